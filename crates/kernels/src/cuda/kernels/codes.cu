// Tiles of 2-bit or 4-bit codes. Codes are never turned into numbers: with k = s*c - o per token and group of channels,
// q.k = s*sum(q*c) - o*sum(q), and likewise for values. They are the rows of matrix instructions, tokens of keys and
// channels of values, so that none is empty.
//
// Keys: queries become integers of two bytes, and their high and low bytes are neighbouring columns of an 8-bit MMA. Sums
// are exact, and a lane finds both parts of a sum in its own registers.
//
// Values: weights are f16, of which the small ones are as precise as the large: next to one large weight, thousands of
// small ones may count for as much. Codes are taken as f16 as well: a small integer in the low bits of one is that many
// times 2^-24. A lane holds weights of every eighth token; as operands they are needed the other way round, which is
// what `movmatrix` does.
//
// The weighted sum of values stays in the accumulators over all tiles of a segment: weights are powers relative to a
// reference, and so are their total and the sum of offsets. The reference is chosen optimistically, not tile by tile: a
// tile is weighed with that of the tiles before it, and only if a weight does not fit is a new one chosen and everything
// so far rescaled. That happens once or twice in a segment; looking for the largest logit of every tile would cost more
// than all of its exponentials.

DEVICE void mma_keys(int (&d)[4], const u32 (&codes)[4], uint2 queries, const int (&c)[4]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(codes[0]), "r"(codes[1]), "r"(codes[2]), "r"(codes[3]), "r"(queries.x), "r"(queries.y),
        "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}
DEVICE void mma_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// An 8 x 8 matrix of 16-bit elements, two of a row in every lane, transposed.
DEVICE u32 transposed(u32 pair) {
  u32 result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

// Largest and sum over the eight lanes that hold the tokens of one query head.
DEVICE float head_max(float x) {
  #pragma unroll
  for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
  return x;
}
DEVICE float head_sum(float x) {
  #pragma unroll
  for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
  return x;
}

// Half of an 8-bit operand out of one word of codes, which holds two such halves of 2-bit codes. The second comes out
// four times too large (one instruction less than shifting it) where QUARTER says that queries make up for that.
template <int BITS, bool QUARTER>
DEVICE void unpack(u32 word, int half, u32& low, u32& high) {
  if (BITS == 4) {
    low = word & 0x0f0f0f0fu;
    high = (word >> 4) & 0x0f0f0f0fu;
  } else if (half == 0) {
    low = word & 0x03030303u;
    high = (word >> 4) & 0x03030303u;
  } else if (QUARTER) {
    low = word & 0x0c0c0c0cu;
    high = (word >> 4) & 0x0c0c0c0cu;
  } else {
    low = (word >> 2) & 0x03030303u;
    high = (word >> 6) & 0x03030303u;
  }
}

template <int BITS>
struct Codes {
  static constexpr int TOKENS = 128 / BITS;
  static constexpr int TILES_PER_PAGE = 64 / TOKENS;
  static constexpr int SIDE_BYTES = 16 * HEAD_DIM;
  static constexpr int GROUP_BYTES = TOKENS * 4;
  static constexpr int TILE_BYTES = 2 * SIDE_BYTES + 2 * GROUPS * GROUP_BYTES;
  // Query heads of a lane: one of four of each.
  static constexpr int SLICES = HEAD_QUADS;
  static constexpr int LANE_TOKENS = TOKENS / 8;
  static constexpr int CHUNKS = HEAD_DIM / 32;  // loads of 16 bytes per lane and side
  static constexpr int CHANNEL_STEPS = HEAD_DIM / 32;
  static constexpr int CHANNEL_TILES = HEAD_DIM / 16;
  static constexpr int WORD_STEPS = 4 / BITS;
  // An odd number of steps would put a step now in the first, now in the second half of a word.
  static constexpr bool QUARTER = BITS == 2 && CHANNEL_STEPS % 2 == 0;
  // A float of this value has integers in its low bits: adding to an accumulator that starts here converts it, one
  // slow instruction less per logit. It holds 22 bits, which sums of 4-bit codes would have to be cut down to.
  static constexpr bool MAGIC = BITS == 2;
  static constexpr int MAGIC_BITS = MAGIC ? 0x4b400000 : 0;
  static constexpr float MAGIC_VALUE = MAGIC ? 12582912.0f : 0.0f;
  // The largest weight when a reference is chosen: far from 65504 and from 2^-14, below which bits are lost.
  static constexpr float LARGEST_WEIGHT = 256.0f;
  // Codes of every other sixteen values lie four bits higher, so they count sixteen times: exponents are smaller by this.
  static constexpr int LATER = 4;
  // Pairs of slices: a weight of each is half of an operand.
  static constexpr int COLUMNS = (SLICES + 1) / 2;
  // Queries as operands, then their steps and sums, then what accumulators of logits start from, in shared memory: all
  // warps of a block have the same.
  static constexpr int FRAGMENT_BYTES = SLICES * CHANNEL_STEPS * 256;
  static constexpr int START = FRAGMENT_BYTES + (1 + GROUPS) * SLICES * 16;
  static constexpr int QUERY_BYTES = START + 16;

  uint2 q[SLICES][CHANNEL_STEPS];
  // Sums of products with codes are in units of q_step; q_sum is that of each group of channels, scaled like logits and
  // negative.
  float q_step[SLICES], q_sum[SLICES][GROUPS];
  float reference[SLICES], total[SLICES], offsets[SLICES][GROUPS];
  // Channels in rows; the first of a pair of slices in even, the second in odd columns.
  float sums[CHANNEL_TILES][COLUMNS][4];
  // What accumulators of logits start from. It comes from memory so that it stays in registers: if the compiler knew the
  // numbers, it would set all accumulators to them again and again.
  int start[4];
  // Nothing has been weighed, so there is no reference yet.
  bool fresh;

  // Queries to integers, a row by each warp.
  DEVICE static void prepare(const float* queries, int rows, float scale, u8* memory, int warp, int lane) {
    constexpr int PARTS = (HEAD_DIM + 127) / 128, GROUP_CHANNELS = HEAD_DIM / GROUPS;
    // Lanes that hold one group; three quarters of a warp count as a warp, since the rest holds zeros.
    constexpr int LANES = GROUP_CHANNELS >= 96 ? 32 : GROUP_CHANNELS / 4;
    float* steps = (float*)(memory + FRAGMENT_BYTES);  // [row], then sums [group][row]
    if (warp == 0 && lane == 0) *(int4*)(memory + START) = make_int4(0, MAGIC_BITS, 0, MAGIC_BITS);
    constexpr int TURNS = (SLICES * 4 + WARPS - 1) / WARPS;
    // All rows are being fetched when the first one is waited for.
    float4 fetched[TURNS][PARTS];
    #pragma unroll
    for (int turn = 0; turn < TURNS; turn++)
      #pragma unroll
      for (int part = 0; part < PARTS; part++) {
        const int row = turn * WARPS + warp, channel = part * 128 + lane * 4;
        fetched[turn][part] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (row < rows && channel < HEAD_DIM) fetched[turn][part] = *(const float4*)(queries + row * HEAD_DIM + channel);
      }
    #pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
      const int row = turn * WARPS + warp;
      if (row >= SLICES * 4) break;
      float x[PARTS][4], group_sum[PARTS] = {}, most = 0.0f, absolute = 0.0f;
      #pragma unroll
      for (int part = 0; part < PARTS; part++) {
        const int channel = part * 128 + lane * 4;
        const float4 four = fetched[turn][part];
        x[part][0] = four.x; x[part][1] = four.y; x[part][2] = four.z; x[part][3] = four.w;
        const float largest =
            fmaxf(fmaxf(fabsf(four.x), fabsf(four.y)), fmaxf(fabsf(four.z), fabsf(four.w)));
        most = fmaxf(most, QUARTER && (channel & 32) ? 0.25f * largest : largest);
        absolute += (fabsf(four.x) + fabsf(four.y)) + (fabsf(four.z) + fabsf(four.w));
        group_sum[LANES == 32 ? part * 128 / GROUP_CHANNELS : part] += (four.x + four.y) + (four.z + four.w);
      }
      #pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, step));
        absolute += __shfl_xor_sync(ALL_LANES, absolute, step);
        if (step < LANES)
          #pragma unroll
          for (int part = 0; part < PARTS; part++) group_sum[part] += __shfl_xor_sync(ALL_LANES, group_sum[part], step);
      }
      // High bytes up to 127, and sums below 2^22 where the magic float must hold them.
      float inverse = most < 1e-30f ? 0.0f : 32512.0f / most;
      if (MAGIC && inverse > 0.0f) inverse = fminf(inverse, 4180000.0f / (3.0f * absolute));
      if (lane == 0) steps[row] = inverse > 0.0f ? scale / inverse : 0.0f;
      #pragma unroll
      for (int part = 0; part < PARTS; part++) {
        const int channel = part * 128 + lane * 4;
        if (channel >= HEAD_DIM) continue;
        const int group = LANES == 32 ? part : channel / GROUP_CHANNELS;
        if (lane % LANES == 0 && group < GROUPS) steps[(1 + group) * SLICES * 4 + row] = -scale * group_sum[part];
        // The low bits of such a float are an integer; its bytes are what is wanted.
        const float unit = QUARTER && (channel & 32) ? 0.25f * inverse : inverse;
        u32 r[4];
        #pragma unroll
        for (int e = 0; e < 4; e++) r[e] = __float_as_uint(fmaf(x[part][e], unit, 12582912.0f));
        const u32 low = __byte_perm(__byte_perm(r[0], r[1], 0x0040), __byte_perm(r[2], r[3], 0x0040), 0x5410);
        // Low bytes are signed, so the high ones are rounded.
        const u32 high = __byte_perm(
            __byte_perm(r[0] + 128, r[1] + 128, 0x0051), __byte_perm(r[2] + 128, r[3] + 128, 0x0051), 0x5410);
        const int step = channel / 32, half = channel / 16 % 2, t = channel / 4 % 4;
        u32* column = (u32*)memory + ((row / 4 * CHANNEL_STEPS + step) * 32 + row % 4 * 8 + t) * 2 + half;
        column[0] = high;
        column[8] = low;
      }
    }
  }

  // `queries`: what `prepare` has left.
  DEVICE void begin(const u8* queries, int lane) {
    fresh = true;
    const int4 four = *(const int4*)(queries + START);
    start[0] = four.x; start[1] = four.y; start[2] = four.z; start[3] = four.w;
    const float* steps = (const float*)(queries + FRAGMENT_BYTES) + (lane & 3);
    #pragma unroll
    for (int slice = 0; slice < SLICES; slice++) {
      #pragma unroll
      for (int step = 0; step < CHANNEL_STEPS; step++)
        q[slice][step] = *(const uint2*)(queries + ((slice * CHANNEL_STEPS + step) * 32 + lane) * 8);
      q_step[slice] = steps[slice * 4];
      reference[slice] = total[slice] = 0.0f;
      #pragma unroll
      for (int group = 0; group < GROUPS; group++) {
        q_sum[slice][group] = steps[((1 + group) * SLICES + slice) * 4];
        offsets[slice][group] = 0.0f;
      }
    }
    #pragma unroll
    for (int i = 0; i < CHANNEL_TILES * COLUMNS; i++)
      #pragma unroll
      for (int e = 0; e < 4; e++) sums[i / COLUMNS][i % COLUMNS][e] = 0.0f;
  }

  // Scales and offsets of four tokens of a lane, of which a tile has four or eight.
  DEVICE static uint4 four_scales(const u8* scales, int group, int four, int lane) {
    return *(const uint4*)(scales + group * GROUP_BYTES + four * 128 + (lane >> 2) * 16);
  }

  // The first references, before the first tile is added.
  DEVICE void prime(const u8* page, int lane) { choose_references(page, lane); }

  DEVICE void add(const u8* page, int, int lane) {
    u32 weights[GROUPS][COLUMNS][LANE_TOKENS];
    // Once more if references had to be chosen. A third time would help nobody: that is a logit that is not a number.
    // Zeros that the compiler does not know keep it from holding a tile in registers for what hardly ever happens.
    if (!weigh(page, lane, weights)) {
      choose_references(page + start[0], lane);
      weigh(page + start[2], lane, weights);
    }
    #pragma unroll
    for (int group = 0; group < GROUPS; group++) add_values(group, page + SIDE_BYTES, lane, weights[group]);
  }

  DEVICE static constexpr int later(int i) { return i % 4 < 2 ? 0 : LATER; }

  // Logits less their reference, which is what weights are powers of.
  DEVICE void score(const u8* page, int lane, float (&exponent)[SLICES][LANE_TOKENS]) const {
    const u8* scales = page + 2 * SIDE_BYTES;
    constexpr int BLOCK = 4;  // tokens of a lane at once: sums that do not wait for one another
    uint4 chunks[CHUNKS], scale_chunk[GROUPS];
    u32 here = 0;  // of the chunks; known to the compiler
    #pragma unroll
    for (int first = 0; first < LANE_TOKENS; first += BLOCK) {
      #pragma unroll
      for (int group = 0; group < GROUPS; group++) {
        int c[BLOCK / 2][SLICES][4];
        #pragma unroll
        for (int pair = 0; pair < BLOCK / 2; pair++)
          #pragma unroll
          for (int inner = 0; inner < CHANNEL_STEPS / GROUPS; inner++) {
            const int step = group * (CHANNEL_STEPS / GROUPS) + inner;
            u32 codes[4];
            #pragma unroll
            for (int e = 0; e < 2; e++) {
              const int flat = (first + 2 * pair + e) * CHANNEL_STEPS + step, word = flat / WORD_STEPS;
              if (!(here >> (word / 4) & 1)) chunks[word / 4] = *(const uint4*)(page + word / 4 * 512 + lane * 16);
              here |= 1u << (word / 4);
              unpack<BITS, QUARTER>(word_of(chunks[word / 4], word % 4), flat % WORD_STEPS, codes[e], codes[e + 2]);
            }
            #pragma unroll
            for (int slice = 0; slice < SLICES; slice++)
              if (inner == 0) mma_keys(c[pair][slice], codes, q[slice][step], start);
              else mma_keys(c[pair][slice], codes, q[slice][step], c[pair][slice]);
          }
        scale_chunk[group] = four_scales(scales, group, first / 4, lane);
        #pragma unroll
        for (int e = 0; e < BLOCK; e++) {
          const float2 affine = scale_pair(word_of(scale_chunk[group], (first + e) % 4));
          #pragma unroll
          for (int slice = 0; slice < SLICES; slice++) {
            const int* bytes = &c[e / 2][slice][e % 2 * 2];
            const int integer = bytes[0] * 256 + bytes[1];
            // Rounding of the constant moves all sums by less than one unit of the queries.
            const float sum = MAGIC ? fmaf(__int_as_float(integer), q_step[slice], -MAGIC_VALUE * q_step[slice])
                                    : (float)integer * q_step[slice];
            float& x = exponent[slice][first + e];
            const float before = group > 0 ? x : -reference[slice] - later(first + e);
            x = fmaf(affine.x, sum, fmaf(affine.y, q_sum[slice][group], before));
          }
        }
      }
    }
  }

  // The weights of a tile as operands, for each group of channels; their sum and those of offsets are added to what the
  // segment has. False, and nothing added, if a weight of any query head does not fit.
  DEVICE bool weigh(const u8* page, int lane, u32 (&weights)[GROUPS][COLUMNS][LANE_TOKENS]) {
    const u8* scales = page + 2 * SIDE_BYTES + GROUPS * GROUP_BYTES;
    float probability[SLICES][LANE_TOKENS], sum[SLICES], offset[SLICES][GROUPS];
    score(page, lane, probability);
    bool fits = true;
    float halves[SLICES][2];
    #pragma unroll
    for (int i = 0; i < LANE_TOKENS; i++)
      #pragma unroll
      for (int slice = 0; slice < SLICES; slice++) {
        float &p = probability[slice][i], &half = halves[slice][i / 2 % 2];
        p = exp2_fast(p);
        half = i < 4 && i % 2 == 0 ? p : half + p;
      }
    #pragma unroll
    for (int slice = 0; slice < SLICES; slice++) {
      sum[slice] = fmaf(halves[slice][1], 1 << LATER, halves[slice][0]);
      // Looked at too, because a scale may be zero.
      fits &= sum[slice] < 1e30f;
    }
    u32 most = 0;
    #pragma unroll
    for (int group = 0; group < GROUPS; group++) {
      float parts[SLICES][2];
      uint4 chunk;
      #pragma unroll
      for (int i = 0; i < LANE_TOKENS; i++) {
        if (i % 4 == 0) chunk = four_scales(scales, group, i / 4, lane);
        const float2 affine = scale_pair(word_of(chunk, i % 4));
        float w[2 * COLUMNS];
        w[2 * COLUMNS - 1] = 0.0f;
        #pragma unroll
        for (int slice = 0; slice < SLICES; slice++) {
          const float p = probability[slice][i];
          float& part = parts[slice][i / 2 % 2];
          part = i < 4 && i % 2 == 0 ? p * affine.y : fmaf(p, affine.y, part);
          w[slice] = p * affine.x;
        }
        #pragma unroll
        for (int column = 0; column < COLUMNS; column++) {
          u32& pair = weights[group][column][i];
          asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(w[2 * column + 1]), "f"(w[2 * column]));
          pair = transposed(pair);
        }
      }
      #pragma unroll
      for (int slice = 0; slice < SLICES; slice++) offset[slice][group] = fmaf(parts[slice][1], 1 << LATER, parts[slice][0]);
    }
    #pragma unroll
    for (int group = 0; group < GROUPS; group++)
      #pragma unroll
      for (int column = 0; column < COLUMNS; column++)
        #pragma unroll
        for (int i = 0; i < LANE_TOKENS; i++)
          asm("max.f16x2 %0, %0, %1;" : "+r"(most) : "r"(weights[group][column][i]));
    fits &= (most & 0xffffu) < 0x7c00u && most < 0x7c000000u;
    if (!__all_sync(ALL_LANES, fits)) return false;
    #pragma unroll
    for (int slice = 0; slice < SLICES; slice++) {
      total[slice] += sum[slice];
      #pragma unroll
      for (int group = 0; group < GROUPS; group++) offsets[slice][group] += offset[slice][group];
    }
    return true;
  }

  DEVICE void add_values(int group, const u8* values, int lane, const u32 (&weights)[COLUMNS][LANE_TOKENS]) {
    constexpr int HALVES = TOKENS / 32, TILES = CHANNEL_TILES / GROUPS;
    uint4 chunks[TILES / 2];
    // Sixteen channels at a time: a word of 2-bit codes or two of 4-bit codes for every 32 tokens.
    #pragma unroll
    for (int half = 0; half < HALVES; half++)
      #pragma unroll
      for (int inner = 0; inner < TILES; inner++) {
        const int i = group * TILES + inner;
        uint4& chunk = chunks[inner / 2];
        if (half == 0 && inner % 2 == 0) chunk = *(const uint4*)(values + i / 2 * 512 + lane * 16);
        #pragma unroll
        for (int part = 0; part < 2; part++) {
          u32 codes[4];
          #pragma unroll
          for (int e = 0; e < 2; e++) {
            const u32 word = word_of(chunk, i % 2 * 2 + (BITS == 2 ? half : e));
            const u32 mask = (BITS == 2 ? 0x00030003u << (2 * e) : 0x000f000fu) << (4 * part);
            codes[e] = word & mask;
            codes[e + 2] = (word >> 8) & mask;
          }
          const int token = 4 * half + 2 * part;
          #pragma unroll
          for (int column = 0; column < COLUMNS; column++)
            mma_f16(sums[i][column], codes, weights[column][token], weights[column][token + 1]);
        }
      }
  }

  // References at which the weights of this tile and of all before it fit.
  DEVICE void choose_references(const u8* page, int lane) {
    const u8* scales = page + 2 * SIDE_BYTES + GROUPS * GROUP_BYTES;
    float exponent[SLICES][LANE_TOKENS], scale = 1e-20f;
    score(page, lane, exponent);
    #pragma unroll
    for (int group = 0; group < GROUPS; group++)
      #pragma unroll
      for (int i = 0; i < LANE_TOKENS; i++)
        scale = fmaxf(scale, scale_pair(word_of(four_scales(scales, group, i / 4, lane), i % 4)).x);
    const float room = __log2f(head_max(scale) * (1.0f / LARGEST_WEIGHT));
    #pragma unroll
    for (int slice = 0; slice < SLICES; slice++) {
      float most = NEGATIVE_INFINITY;
      #pragma unroll
      for (int i = 0; i < LANE_TOKENS; i++) most = fmaxf(most, exponent[slice][i] + later(i));
      // Whole numbers, so that equal logits have weights that f16 holds exactly: errors of many equal ones would add up.
      const float old = reference[slice], lowest = ceilf(old + head_max(most) + room);
      reference[slice] = fresh ? lowest : fmaxf(old, lowest);
      if (fresh) continue;
      const float ratio = exp2_fast(old - reference[slice]);
      total[slice] *= ratio;
      #pragma unroll
      for (int group = 0; group < GROUPS; group++) offsets[slice][group] *= ratio;
      rescale(slice, ratio);
    }
    fresh = false;
  }

  DEVICE void rescale(int slice, float ratio) {
    #pragma unroll
    for (int i = 0; i < CHANNEL_TILES; i++)
      #pragma unroll
      for (int e = 0; e < 2; e++) sums[i][slice / 2][slice % 2 + 2 * e] *= ratio;
  }

  // The query head of a slice, and whether this lane speaks for it.
  DEVICE static int row_of(int slice, int lane) { return slice * 4 + (lane & 3); }
  DEVICE static bool leads(int lane) { return lane < 4; }

  DEVICE float row_largest(int slice) const { return fresh ? NEGATIVE_INFINITY : reference[slice]; }
  DEVICE float row_total(int slice) const { return head_sum(total[slice]); }

  // Writes the weighted sums of values that this lane holds of a row, times a factor; nothing if there is no row.
  DEVICE void store(int slice, float factor, float* row, int lane) const {
    #pragma unroll
    for (int group = 0; group < GROUPS; group++) {
      const float offset = head_sum(offsets[slice][group]);
      #pragma unroll
      for (int inner = 0; inner < CHANNEL_TILES / GROUPS; inner++) {
        const int i = group * (CHANNEL_TILES / GROUPS) + inner;
        const float (&c)[4] = sums[i][slice / 2];
        const float low = c[slice % 2] * 16777216.0f, high = c[slice % 2 + 2] * (BITS == 2 ? 4194304.0f : 16777216.0f);
        if (!row) continue;
        row[i * 16 + (lane >> 2)] = (low - offset) * factor;
        row[i * 16 + 8 + (lane >> 2)] = (high - offset) * factor;
      }
    }
  }
};
