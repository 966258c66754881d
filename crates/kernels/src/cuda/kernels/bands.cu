// Keys in bands of channels with codes of four, two or one bits: k = s*(c - h) per token and band, where h is half of the
// largest code. Channels after the last band are not stored: their queries are not multiplied. A band is a sum of its own,
// q.k = s*(sum(q*c) - h*sum(q)), and the logit is the sum of four. Queries become integers with a step for each band: the
// largest of their channels meet the weakest keys.
//
// These integers have two bytes. With more than four query heads, where instructions decide and not memory, they have one in
// bands of one or two bits, which are narrow bands here. Codes of so few bits are so far from the keys that a byte is enough:
// what rounding a query to it does to a logit has at most 3 % of the variance that the codes themselves cause if rounding
// errors are spread evenly, and at worst three times that (docs/cuda.md). Columns of matrix instructions, for the query heads
// of a lane, one of each four (slices):
//
//     two bytes   slice 0: high, low     slice 1: high, low     slice 2: high, low
//     one byte    slices 0 and 1         slice 2 and nothing
//
// Where keys are less the mean key of their page, the logits of a page are more by the product of that and the query. A warp
// computes these products for sixteen tiles at once.
//
// Scales are logarithms of eight bits. A table in shared memory decodes them: one byte taken out and one load, where
// arithmetic would take six instructions, and zero needs no care.

#if BAND_UNITS
// Half of the channels of `mma_keys`.
DEVICE void mma_unit(int (&d)[4], const u32 (&codes)[4], u32 queries, const int (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5},{%6},{%7,%8,%9,%10};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(codes[0]), "r"(codes[1]), "r"(queries), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

// BITS: of values, which say how many tokens a tile has.
template <int BITS, int LATER>
struct BandKeys : Keys<BITS, LATER> {
  typedef Keys<BITS, LATER> Base;
  using Base::SLICES; using Base::CHANNEL_STEPS; using Base::LANE_TOKENS; using Base::SCALES_AT; using Base::FRAGMENT_BYTES; using Base::start;
  using Base::fresh; using Base::reference; using Base::total; using Base::offsets; using Base::four_scales;
  using Base::later;
  // A unit of every token lies at the same bits of its word, so that queries can make up for codes that come out two,
  // four or eight times too large. Where tokens share words, it does not, and codes are shifted.
  static constexpr bool ALIGNED = TOKEN_BITS % 8 == 0;
  // Loads of a lane's keys.
  static constexpr int KEY_CHUNKS = (KEY_WORDS + 3) / 4;
  static_assert(LANE_TOKENS == LANE_EIGHTS, "a lane has a token of each eight");
  // Sums of a band are small enough for a float that has integers in its low bits, see `Keys::MAGIC`.
  static constexpr int MAGIC_BITS = 0x4b400000;
  static constexpr float MAGIC_VALUE = 12582912.0f;
  // In shared memory after the operands: steps and starts [band][row][2], what accumulators start from, the table of
  // scales, and those of the tile that a warp works on, [band][four tokens][row][token].
  static constexpr int ROWS_HERE = SLICES * 4;
  static constexpr int START = FRAGMENT_BYTES + 2 * BANDS * ROWS_HERE * 4;
  static constexpr int TABLE = START + 32;
  // Instructions for the query heads of a lane in a narrow band.
  static constexpr int PAIRS = (SLICES + 1) / 2;
  static constexpr int SCALES = TABLE + 256 * 4;
  // Scales of a band, in fours, and two more: lanes that write those of different bands meet different banks.
  static constexpr int BAND_STRIDE = LANE_TOKENS / 4 * 8 + 2;
  static constexpr int SCALE_BYTES = BANDS * BAND_STRIDE * 16;
  // Last come the products with the mean keys of the tiles that a warp works on next, [tile][row].
  static constexpr bool CENTRED = true;
  static constexpr int CENTRED_TILES = 16;
  static constexpr int MEANS = SCALES + WARPS * SCALE_BYTES;
  static constexpr int QUERY_BYTES = MEANS + WARPS * CENTRED_TILES * ROWS_HERE * 4;

  // What a high byte counts for, 256. A multiplication that the compiler does not know to be a shift goes to units that
  // are less busy.
  int high_byte;
  // The operands, steps and starts of a band are fetched when its turn comes: registers have no room for those of all.
  const u8* queries;
  float4* scales;
  // Where the products of the tile that is worked on lie among those of all warps.
  int centre;

  // Whether queries have one byte.
  DEVICE static constexpr bool narrow(int band) { return SLICES > 1 && band_bits(band) <= 2; }

  // The place in a byte of the codes of a unit, and where a mask finds them.
  DEVICE static constexpr int shift_of(int flat) { return ALIGNED ? flat % 8 / 4 * 4 : flat % 8; }
  DEVICE static constexpr int factor_shift(int flat) { return ALIGNED ? flat % 4 : 0; }

  // Queries to integers, a row by each warp. Eight lanes have a band, each of them every eighth four of its channels.
  DEVICE static void prepare(const float* queries, int rows, float scale, u8* memory, int warp, int lane) {
    constexpr int MOST_UNITS = largest_units(), FOURS = (MOST_UNITS + 1) / 2;
    constexpr int TURNS = (ROWS_HERE + WARPS - 1) / WARPS;
    float2* steps = (float2*)(memory + FRAGMENT_BYTES);
    if (warp == 0 && lane == 0) {
      *(int4*)(memory + START) = make_int4(0, MAGIC_BITS, 0, MAGIC_BITS);
      *(int*)(memory + START + 16) = 256;
    }
    for (int code = warp * 32 + lane; code < 256; code += WARPS * 32)
      ((float*)(memory + TABLE))[code] = code == 0 ? 0.0f : exp2_fast(code * (1.0f / 16.0f) - OCTAVES_BELOW);
    const int band = lane / 8, first_unit = band_unit(band), fours = 4 * band_units(band), bits = band_bits(band);
    const float top = (float)((1 << bits) - 1);
    // All rows are being fetched when the first one is waited for.
    float4 fetched[TURNS][FOURS];
    #pragma unroll
    for (int turn = 0; turn < TURNS; turn++)
      #pragma unroll
      for (int i = 0; i < FOURS; i++) {
        const int row = turn * WARPS + warp, four = lane % 8 + 8 * i;
        fetched[turn][i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (row < rows && four < fours)
          fetched[turn][i] = *(const float4*)(queries + row * HEAD_DIM + first_unit * 16 + four * 4);
      }
    #pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
      const int row = turn * WARPS + warp;
      if (row >= ROWS_HERE) break;
      float x[FOURS][4], factor[FOURS], most = 0.0f, absolute = 0.0f, sum = 0.0f;
      #pragma unroll
      for (int i = 0; i < FOURS; i++) {
        const float4 four = fetched[turn][i];
        x[i][0] = four.x; x[i][1] = four.y; x[i][2] = four.z; x[i][3] = four.w;
        factor[i] = (float)(1 << factor_shift(band_bit(band) + (lane % 8 + 8 * i) / 4 * bits));
        const float largest =
            fmaxf(fmaxf(fabsf(four.x), fabsf(four.y)), fmaxf(fabsf(four.z), fabsf(four.w)));
        most = fmaxf(most, largest / factor[i]);
        absolute += (fabsf(four.x) + fabsf(four.y)) + (fabsf(four.z) + fabsf(four.w));
        sum += (four.x + four.y) + (four.z + four.w);
      }
      #pragma unroll
      for (int step = 4; step > 0; step /= 2) {
        most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, step));
        absolute += __shfl_xor_sync(ALL_LANES, absolute, step);
        sum += __shfl_xor_sync(ALL_LANES, sum, step);
      }
      // High bytes up to 127, and sums below 2^22, which the magic float must hold: all codes of one sign of the query may
      // be the largest, and those of the other zero.
      // Where queries have few levels, the last bit of the unit can move one of them by a level: it is exactly that of
      // `reference.rs`.
      const bool one_byte = narrow(band);
      float inverse = most < 1e-30f ? 0.0f : __fdiv_rn(one_byte ? 127.0f : 32512.0f, most);
      if (inverse > 0.0f) inverse = fminf(inverse, 4180000.0f / (0.5f * top * (absolute + fabsf(sum))));
      int whole = 0;
      #pragma unroll
      for (int i = 0; i < FOURS; i++) {
        const int four = lane % 8 + 8 * i;
        if (four >= fours) continue;
        // The low bits of such a float are an integer; its bytes are what is wanted.
        const float unit = inverse / factor[i];
        u32 r[4];
        #pragma unroll
        for (int e = 0; e < 4; e++) r[e] = __float_as_uint(fmaf(x[i][e], unit, 12582912.0f));
        whole += (int)(r[0] + r[1] + r[2] + r[3] - 4 * 0x4b400000u) * (int)factor[i];
        const u32 low = __byte_perm(__byte_perm(r[0], r[1], 0x0040), __byte_perm(r[2], r[3], 0x0040), 0x5410);
        // Low bytes are signed, so the high ones are rounded.
        const u32 high = __byte_perm(
            __byte_perm(r[0] + 128, r[1] + 128, 0x0051), __byte_perm(r[2] + 128, r[3] + 128, 0x0051), 0x5410);
        const int place = first_unit + four / 4, slice = row / 4;
        const int operand = one_byte ? slice / 2 : slice, column = row % 4 * 2 + (one_byte ? slice % 2 : 0);
        u32* words = (u32*)memory + ((operand * CHANNEL_STEPS + place / 2) * 32 + column * 4 + four % 4) * 2 + place % 2;
        words[0] = one_byte ? low : high;
        if (!one_byte) words[8] = low;
      }
      #pragma unroll
      for (int step = 4; step > 0; step /= 2) whole += __shfl_xor_sync(ALL_LANES, whole, step);
      if (lane % 8 == 0) {
        // A query that is not finite has logits that are not numbers.
        const float step = (inverse > 0.0f ? scale / inverse : 0.0f) + 0.0f * absolute;
        // Sums of products with codes are in units of the step; the start takes the magic float and h*sum(q) off.
        steps[band * ROWS_HERE + row] = make_float2(step, -(MAGIC_VALUE + 0.5f * top * (float)whole) * step);
      }
    }
  }

  DEVICE static constexpr int largest_units() {
    int most = 0;
    for (int band = 0; band < BANDS; band++) most = band_units(band) > most ? band_units(band) : most;
    return most;
  }

  // `memory`: what `prepare` has left.
  DEVICE void begin_keys(const u8* memory, int lane) {
    fresh = true;
    const int4 four = *(const int4*)(memory + START);
    start[0] = four.x; start[1] = four.y; start[2] = four.z; start[3] = four.w;
    high_byte = *(const int*)(memory + START + 16);
    queries = memory;
    scales = (float4*)(memory + SCALES + threadIdx.x / 32 * SCALE_BYTES);
    #pragma unroll
    for (int slice = 0; slice < SLICES; slice++) reference[slice] = total[slice] = offsets[slice][0] = 0.0f;
  }

  // Multiplies all queries with the mean keys of sixteen tiles, with bf16 instructions: the queries in two parts, which loses
  // nothing against f32. `mean_of` says where the mean of a tile lies. Channels have any order that is the same for both, so a
  // lane takes eight that are side by side.
  template <class F>
  DEVICE void multiply_means(const float* queries, int rows, float scale, F mean_of, int lane) {
    constexpr int EIGHTS = (ROWS_HERE + 7) / 8;
    const u8* means[2] = {mean_of(lane / 4), mean_of(lane / 4 + 8)};
    float products[EIGHTS][4] = {};
    #pragma unroll
    for (int step = 0; step < CHANNEL_STEPS; step++) {
      const int channel = step * 32 + lane % 4 * 8;
      const uint4 first = __ldg((const uint4*)(means[0] + channel * 2));
      const uint4 second = __ldg((const uint4*)(means[1] + channel * 2));
      #pragma unroll
      for (int eight = 0; eight < EIGHTS; eight++) {
        const int row = eight * 8 + lane / 4;
        float4 x[2] = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
        if (row < rows) {
          x[0] = *(const float4*)(queries + row * HEAD_DIM + channel);
          x[1] = *(const float4*)(queries + row * HEAD_DIM + channel + 4);
        }
        #pragma unroll
        for (int half = 0; half < 2; half++) {
          const u32 keys[4] = {word_of(first, 2 * half), word_of(second, 2 * half), word_of(first, 2 * half + 1),
                               word_of(second, 2 * half + 1)};
          u32 rounded[2], rest[2];
          split<false>(x[half].x, x[half].y, rounded[0], rest[0]);
          split<false>(x[half].z, x[half].w, rounded[1], rest[1]);
          mma_bf16(products[eight], keys, rounded[0], rounded[1]);
          mma_bf16(products[eight], keys, rest[0], rest[1]);
        }
      }
    }
    float* out = products_of_means() + threadIdx.x / 32 * (CENTRED_TILES * ROWS_HERE);
    // Nobody still reads those before.
    __syncwarp();
    #pragma unroll
    for (int i = 0; i < EIGHTS * 4; i++) {
      const int tile = lane / 4 + i % 4 / 2 * 8, row = i / 4 * 8 + lane % 4 * 2 + i % 2;
      if (row < ROWS_HERE) out[tile * ROWS_HERE + row] = scale * products[i / 4][i % 4];
    }
    __syncwarp();
  }
  // The same where pages have no means.
  DEVICE void no_means(int lane) {
    float* out = products_of_means() + threadIdx.x / 32 * (CENTRED_TILES * ROWS_HERE);
    for (int i = lane; i < CENTRED_TILES * ROWS_HERE; i += 32) out[i] = 0.0f;
    __syncwarp();
  }
  DEVICE float* products_of_means() const { return (float*)(queries + MEANS); }
  // Says which of these tiles comes next.
  DEVICE void centre_on(int tile) { centre = (threadIdx.x / 32 * CENTRED_TILES + tile % CENTRED_TILES) * ROWS_HERE; }

  // Decodes the scales of a tile, each lane those of one band for all lanes of its row.
  DEVICE void decode_scales(const u8* page, int lane) const {
    float decoded[LANE_TOKENS];
    #pragma unroll
    for (int i = 0; i < LANE_TOKENS; i++) {
      const u32 codes = word_of(four_scales(page + SCALES_AT, 0, i / 4, lane), i % 4);
      decoded[i] = ((const float*)(queries + TABLE))[__byte_perm(codes, 0, 0x4440 + (lane & 3))];
    }
    // Nobody still reads those of the tile before.
    __syncwarp();
    #pragma unroll
    for (int i = 0; i < LANE_TOKENS; i += 4)
      scales[(lane & 3) * BAND_STRIDE + i / 4 * 8 + (lane >> 2)] =
          make_float4(decoded[i], decoded[i + 1], decoded[i + 2], decoded[i + 3]);
    __syncwarp();
  }

  // Logits less their reference, which is what weights are powers of.
  DEVICE void score(const u8* page, int lane, float (&exponent)[SLICES][LANE_TOKENS]) const {
    uint4 chunks[KEY_CHUNKS];
    #pragma unroll
    for (int i = 0; i < KEY_CHUNKS; i++) {
      const u8* at = page + key_word(4 * i, lane);
      if (4 * i < WHOLE_WORDS) {
        chunks[i] = *(const uint4*)at;
      } else {
        const uint2 half = *(const uint2*)at;
        chunks[i] = make_uint4(half.x, half.y, 0, 0);
      }
    }
    decode_scales(page, lane);
    float before[SLICES];
    #pragma unroll
    for (int slice = 0; slice < SLICES; slice++)
      before[slice] = products_of_means()[centre + slice * 4 + (lane & 3)] - reference[slice];
    #pragma unroll
    for (int band = 0; band < BANDS; band++) {
      // Not stored.
      if (band_units(band) == 0) continue;
      float2 steps[SLICES];
      #pragma unroll
      for (int slice = 0; slice < SLICES; slice++)
        steps[slice] = ((const float2*)(queries + FRAGMENT_BYTES))[band * ROWS_HERE + slice * 4 + (lane & 3)];
      // Two tokens of a lane are rows of one instruction.
      #pragma unroll
      for (int first = 0; first < LANE_TOKENS; first += 2) {
        // Of each slice high and low sums of two tokens, or in a narrow band of two slices the sums of two tokens.
        int c[SLICES][4];
        const int same[4] = {start[1], start[1], start[1], start[1]};
        #pragma unroll
        for (int inner = 0; inner < band_units(band); inner += 2) {
          const bool two = inner + 1 < band_units(band);
          u32 codes[4];
          #pragma unroll
          for (int e = 0; e < (two ? 4 : 2); e++) {
            const int bits = band_bits(band);
            const int flat = key_bit(first + e % 2, band_bit(band) + (inner + e / 2) * bits, bits), word = flat / 8;
            const u32 mask = ((1u << bits) - 1) * 0x01010101u << factor_shift(flat);
            codes[e] = (word_of(chunks[word / 4], word % 4) >> shift_of(flat)) & mask;
          }
          #pragma unroll
          for (int i = 0; i < (narrow(band) ? PAIRS : SLICES); i++)
            if (inner > 0) multiply(c[i], codes, i, band_unit(band) + inner, two, lane, c[i]);
            else multiply(c[i], codes, i, band_unit(band), two, lane, narrow(band) ? same : start);
        }
        const float4 four = scales[band * BAND_STRIDE + first / 4 * 8 + (lane >> 2)];
        #pragma unroll
        for (int e = 0; e < 2; e++) {
          const float scale = first % 4 == 0 ? (e ? four.y : four.x) : e ? four.w : four.z;
          #pragma unroll
          for (int slice = 0; slice < SLICES; slice++) {
            const int sum = narrow(band) ? c[slice / 2][2 * e + slice % 2]
                                         : c[slice][2 * e] * high_byte + c[slice][2 * e + 1];
            float& x = exponent[slice][first + e];
            x = fmaf(scale, fmaf(__int_as_float(sum), steps[slice].x, steps[slice].y),
                     band > 0 ? x : before[slice] - later(first + e));
          }
        }
      }
    }
  }

  // Adds the products of one or two units.
  DEVICE void multiply(
      int (&d)[4], const u32 (&codes)[4], int operand, int unit, bool two, int lane, const int (&before)[4]) const {
    const u8* place = queries + ((operand * CHANNEL_STEPS + unit / 2) * 32 + lane) * 8 + unit % 2 * 4;
    if (!two) mma_unit(d, codes, *(const u32*)place, before);
    else if (unit % 2 == 0) mma_keys(d, codes, *(const uint2*)place, before);
    else mma_keys(d, codes, make_uint2(*(const u32*)place, *(const u32*)(place + 252)), before);
  }
};

template <int BITS, int LATER>
using SealedKeys = BandKeys<BITS, LATER>;
#else
template <int BITS, int LATER>
using SealedKeys = Keys<BITS, LATER>;
#endif
