// Keys of 2-bit or 4-bit codes. Codes are never turned into numbers: with k = s*c - o per token and group of channels,
// q.k = s*sum(q*c) - o*sum(q), and likewise for values (halves.cu, bytes.cu). They are the rows of matrix instructions,
// tokens of keys and channels of values, so that none is empty.
//
// Queries become integers of two bytes, and their high and low bytes are neighbouring columns of an 8-bit MMA. Sums are
// exact, and a lane finds both parts of a sum in its own registers.
//
// Weights are powers relative to a reference, and so are their total and the sums of offsets and of values, which go on
// over all tiles of a segment. The reference is chosen optimistically, not tile by tile: a tile is weighed with that of
// the tiles before it, and only if a weight does not fit is a new one chosen and everything so far rescaled. That happens
// once or twice in a segment; looking for the largest logit of every tile would cost more than all of its exponentials.

DEVICE void mma_keys(int (&d)[4], const u32 (&codes)[4], uint2 queries, const int (&c)[4]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(codes[0]), "r"(codes[1]), "r"(codes[2]), "r"(codes[3]), "r"(queries.x), "r"(queries.y),
        "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
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
// four times too large (one instruction less than shifting it) where QUARTER says that this is made up for: by queries, or
// when sums of values are read.
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

// LATER: exponents of every other sixteen tokens are smaller by this.
template <int BITS, int LATER>
struct Keys {
  static constexpr int TOKENS = SEALED_TILE_TOKENS;
  static constexpr int TILES_PER_PAGE = PAGE_TOKENS / TOKENS;
  // Where values and scales begin in a tile; those of keys come first.
  static constexpr int KEY_BYTES = SEALED_KEY_BYTES, SCALES_AT = SEALED_KEY_BYTES + SEALED_VALUE_BYTES;
  static constexpr int GROUP_BYTES = SEALED_SCALE_BYTES / GROUPS;
  static constexpr int TILE_BYTES = SEALED_TILE_BYTES;
  // Query heads of a lane: one of four of each.
  static constexpr int SLICES = HEAD_QUADS;
  static constexpr int LANE_TOKENS = TOKENS / 8;
  static constexpr int CHANNEL_STEPS = HEAD_DIM / 32;
  static constexpr int CHUNKS = CHANNEL_STEPS;  // loads of 16 bytes per lane and side
  static constexpr int CHANNEL_TILES = HEAD_DIM / 16;
  static constexpr int WORD_STEPS = 4 / BITS;
  // An odd number of steps would put a step now in the first, now in the second half of a word.
  static constexpr bool QUARTER = BITS == 2 && CHANNEL_STEPS % 2 == 0;
  // A float of this value has integers in its low bits: adding to an accumulator that starts here converts it, one
  // slow instruction less per logit. It holds 22 bits, which sums of 4-bit codes would have to be cut down to.
  static constexpr bool MAGIC = BITS == 2;
  static constexpr int MAGIC_BITS = MAGIC ? 0x4b400000 : 0;
  static constexpr float MAGIC_VALUE = MAGIC ? 12582912.0f : 0.0f;
  // Queries as operands, then their steps and sums, then what accumulators of logits start from, in shared memory: all
  // warps of a block have the same.
  static constexpr int FRAGMENT_BYTES = SLICES * CHANNEL_STEPS * 256;
  static constexpr int START = FRAGMENT_BYTES + (1 + GROUPS) * SLICES * 16;
  static constexpr int QUERY_BYTES = START + 16;
  static constexpr bool CENTRED = false;

  uint2 q[SLICES][CHANNEL_STEPS];
  // Sums of products with codes are in units of q_step; q_sum is that of each group of channels, scaled like logits and
  // negative.
  float q_step[SLICES], q_sum[SLICES][GROUPS];
  float reference[SLICES], total[SLICES], offsets[SLICES][GROUPS];
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
  DEVICE void begin_keys(const u8* queries, int lane) {
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
  }

  // Scales and offsets of four tokens of a lane, of which a tile has four or eight.
  DEVICE static uint4 four_scales(const u8* scales, int group, int four, int lane) {
    return *(const uint4*)(scales + group * GROUP_BYTES + token_scale(4 * four, lane >> 2));
  }

  DEVICE static constexpr int later(int i) { return i % 4 < 2 ? 0 : LATER; }

  // Logits less their reference, which is what weights are powers of.
  DEVICE void score(const u8* page, int lane, float (&exponent)[SLICES][LANE_TOKENS]) const {
    const u8* scales = page + SCALES_AT;
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
              if (!(here >> (word / 4) & 1)) chunks[word / 4] = *(const uint4*)(page + lane_load(word / 4, lane));
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

  // The query head of a slice, and whether this lane speaks for it.
  DEVICE static int row_of(int slice, int lane) { return slice * 4 + (lane & 3); }
  DEVICE static bool leads(int lane) { return lane < 4; }

  DEVICE float row_largest(int slice) const { return fresh ? NEGATIVE_INFINITY : reference[slice]; }
  DEVICE float row_total(int slice) const { return head_sum(total[slice]); }
};
