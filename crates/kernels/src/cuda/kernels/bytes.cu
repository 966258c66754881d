// Values of 2-bit codes with weights in two bytes: an 8-bit MMA takes twice as many tokens as one of f16, and bytes of
// codes need half as many operations as halves. High and low bytes are neighbouring columns, so that twelve query heads
// fill three instructions where f16 would need four.
//
// Fixed point loses what is small next to the largest. So every weight is rounded up or down at a point of its own, which
// goes through all 256ths of a unit from token to token: the sum of many weights far below one unit is right, though
// each of them becomes 0 or 1. With n tokens and a total of T units the error is about 0.8 sqrt(n) / T of a value. It is
// largest where one token has most of the weight, T = 2^16, and plans limit n, see `tuning.rs`; elsewhere T is larger.

#if BYTE_WEIGHTS
DEVICE void mma_values(int (&sums)[4], const u32 (&codes)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
      : "r"(codes[0]), "r"(codes[1]), "r"(codes[2]), "r"(codes[3]), "r"(b0), "r"(b1));
}

struct ByteCodes : SealedKeys<2, 0> {
  static constexpr int OPERANDS = LANE_TOKENS / 2;
  // Weights are added to this: the two low bytes of such a float are an integer up to 65535.
  static constexpr float ZERO = 12582912.0f;
  static constexpr u32 BEYOND = 0x4b410000u;  // as bits: one more than the largest
  // When a reference is chosen, the largest weight is this, or as much as an eighth of it if there are others as large:
  // the more tokens share the weight, the larger will be the largest of those to come, and the less precise need it be.
  static constexpr float LARGEST_WEIGHT = 65400.0f, MOST_ROOM = 8.0f;

  // Channels in rows; high bytes of weights in even, low ones in odd columns.
  int sums[CHANNEL_TILES][SLICES][4];
  // Where weights are rounded: multiples of 2^-8 below 2^-3, another in every tile.
  float dither;

  DEVICE void begin(const u8* queries, int lane) {
    begin_keys(queries, lane);
    #pragma unroll
    for (int i = 0; i < CHANNEL_TILES * SLICES; i++)
      #pragma unroll
      for (int e = 0; e < 4; e++) sums[i / SLICES][i % SLICES][e] = 0;
    dither = (lane >> 2) * (1.0f / 64.0f);
  }

  DEVICE void prime(const u8* page, int lane) { choose_references(page, lane); }

  DEVICE void add(const u8* page, int, int lane) {
    float probability[SLICES][LANE_TOKENS], sum[SLICES], offset[SLICES];
    u32 weights[SLICES][OPERANDS];
    take_weights(page, lane, probability, sum);
    if (!pack(page, lane, probability, sum, offset, weights)) {
      // Zeros that the compiler does not know keep it from holding a tile in registers for what hardly ever happens.
      if (!raise(page + start[0], lane, probability, sum)) {
        choose_references(page + start[0], lane);
        take_weights(page + start[2], lane, probability, sum);
      }
      // If this fails too, a logit is not a number, and neither will the total be.
      pack(page + start[2], lane, probability, sum, offset, weights);
    }
    #pragma unroll
    for (int slice = 0; slice < SLICES; slice++) {
      total[slice] += sum[slice];
      offsets[slice][0] += offset[slice];
    }
    add_values(page + KEY_BYTES, lane, weights);
    dither += 19.0f / 256.0f;
    dither = dither >= 0.125f ? dither - 0.125f : dither;
  }

  DEVICE void take_weights(const u8* page, int lane, float (&probability)[SLICES][LANE_TOKENS], float (&sum)[SLICES]) const {
    score(page, lane, probability);
    #pragma unroll
    for (int i = 0; i < LANE_TOKENS; i++)
      #pragma unroll
      for (int slice = 0; slice < SLICES; slice++) {
        float& p = probability[slice][i];
        p = exp2_fast(p);
        sum[slice] = i == 0 ? p : sum[slice] + p;
      }
  }

  DEVICE static float2 affine_of(const u8* page, int i, int lane) {
    return scale_pair(word_of(four_scales(page + SCALES_AT + GROUP_BYTES, 0, i / 4, lane), i % 4));
  }

  // Weights as operands, and the sums of offsets. False if a weight of any query head does not fit.
  DEVICE bool pack(
      const u8* page, int lane, const float (&probability)[SLICES][LANE_TOKENS], const float (&sum)[SLICES],
      float (&offset)[SLICES], u32 (&weights)[SLICES][OPERANDS]) const {
    float w[SLICES][LANE_TOKENS];
    u32 all = 0;
    #pragma unroll
    for (int i = 0; i < LANE_TOKENS; i++)
      #pragma unroll
      for (int slice = 0; slice < SLICES; slice++) {
        const float point = dither + (0.125f * i - 0.5f);
        w[slice][i] = fmaf(probability[slice][i], affine_of(page, i, lane).x, point) + ZERO;
        all |= __float_as_uint(w[slice][i]);
        // Two tokens: their high bytes, then their low bytes, as neighbouring columns.
        if (i % 2)
          weights[slice][i / 2] = transposed(
              __byte_perm(__float_as_uint(w[slice][i - 1]), __float_as_uint(w[slice][i]), 0x4051));
      }
    #pragma unroll
    for (int slice = 0; slice < SLICES; slice++)
      #pragma unroll
      for (int i = 0; i < LANE_TOKENS; i++) {
        const float p = probability[slice][i], y = affine_of(page, i, lane).y;
        offset[slice] = i == 0 ? p * y : fmaf(p, y, offset[slice]);
      }
    bool fits = all < BEYOND;
    // Looked at too, because a scale may be zero.
    #pragma unroll
    for (int slice = 0; slice < SLICES; slice++) fits &= sum[slice] < 1e30f;
    return __all_sync(ALL_LANES, fits);
  }

  DEVICE void add_values(const u8* values, int lane, const u32 (&weights)[SLICES][OPERANDS]) {
    uint4 chunks[CHUNKS];
    // Sixteen channels at a time: a word for every 32 tokens. Codes of rows 8-15 come out four times too large.
    #pragma unroll
    for (int half = 0; half < 2; half++)
      #pragma unroll
      for (int i = 0; i < CHANNEL_TILES; i++) {
        if (half == 0 && i % 2 == 0) chunks[i / 2] = *(const uint4*)(values + lane_load(i / 2, lane));
        u32 codes[4];
        #pragma unroll
        for (int e = 0; e < 2; e++)
          unpack<2, true>(word_of(chunks[i / 2], i % 2 * 2 + half), e, codes[e], codes[e + 2]);
        #pragma unroll
        for (int slice = 0; slice < SLICES; slice++)
          mma_values(sums[i][slice], codes, weights[slice][2 * half], weights[slice][2 * half + 1]);
      }
  }

  // The scale of a value where weights are looked for that are too large: where it is zero, a weight still counts.
  DEVICE static float room_scale(const u8* page, int i, int lane) { return fmaxf(affine_of(page, i, lane).x, 1e-20f); }

  // Lets references rise until the weights of this tile fit, and everything with them. False if a weight is too large for
  // a float.
  DEVICE bool raise(const u8* page, int lane, float (&probability)[SLICES][LANE_TOKENS], float (&sum)[SLICES]) {
    float least[SLICES];
    bool finite = true;
    #pragma unroll
    for (int slice = 0; slice < SLICES; slice++) {
      float weight[LANE_TOKENS];
      #pragma unroll
      for (int i = 0; i < LANE_TOKENS; i++) weight[i] = probability[slice][i] * room_scale(page, i, lane);
      const float most = head_max(largest_of(weight)), all = head_sum(sum_of(weight));
      least[slice] = fminf(all, most * MOST_ROOM);
      finite &= all < 1e38f && sum[slice] < 1e38f;
    }
    if (!__all_sync(ALL_LANES, finite)) return false;
    #pragma unroll
    for (int slice = 0; slice < SLICES; slice++) {
      const float ratio = rise(slice, __log2f(least[slice] * (1.0f / LARGEST_WEIGHT)));
      sum[slice] *= ratio;
      #pragma unroll
      for (int i = 0; i < LANE_TOKENS; i++) probability[slice][i] *= ratio;
    }
    return true;
  }

  // References at which the weights of this tile have the room they should have.
  DEVICE void choose_references(const u8* page, int lane) {
    float exponent[SLICES][LANE_TOKENS];
    score(page, lane, exponent);
    #pragma unroll
    for (int i = 0; i < LANE_TOKENS; i++) {
      const float scale = __log2f(room_scale(page, i, lane));
      #pragma unroll
      for (int slice = 0; slice < SLICES; slice++) exponent[slice][i] += scale;
    }
    #pragma unroll
    for (int slice = 0; slice < SLICES; slice++) {
      const float most = head_max(largest_of(exponent[slice]));
      float all = 0.0f;
      #pragma unroll
      for (int i = 0; i < LANE_TOKENS; i++) all += exp2_fast(exponent[slice][i] - most);
      const float higher = most + __log2f(fminf(head_sum(all), MOST_ROOM) * (1.0f / LARGEST_WEIGHT));
      if (fresh) reference[slice] = higher;
      else rise(slice, higher);
    }
    fresh = false;
  }

  // Lets a reference rise by whole powers of two, if at all, and returns what weights shrink by.
  DEVICE float rise(int slice, float least) {
    const int shift = max(0, (int)ceilf(fminf(least, 1000.0f)));
    const float ratio = exp2_fast((float)-shift);
    reference[slice] += shift;
    total[slice] *= ratio;
    offsets[slice][0] *= ratio;
    for (int left = shift; left > 0; left -= 16) {
      const int step = min(left, 16);
      #pragma unroll
      for (int i = 0; i < CHANNEL_TILES; i++)
        #pragma unroll
        for (int e = 0; e < 4; e += 2) {
          int &high = sums[i][slice][e], &low = sums[i][slice][e + 1];
          // What high bytes lose goes to the low ones.
          low = (low + (high & ((1 << step) - 1)) * 256) >> step;
          high >>= step;
        }
    }
    return ratio;
  }

  // Writes the weighted sums of values that this lane holds of a row, times a factor; nothing if there is no row.
  DEVICE void store(int slice, float factor, float* row, int lane) const {
    const float offset = head_sum(offsets[slice][0]);
    #pragma unroll
    for (int i = 0; i < CHANNEL_TILES; i++) {
      const int (&c)[4] = sums[i][slice];
      const float low = fmaf((float)c[0], 256.0f, (float)c[1]);
      const float high = fmaf((float)c[2], 256.0f, (float)c[3]) * 0.25f;
      if (!row) continue;
      row[i * 16 + (lane >> 2)] = (low - offset) * factor;
      row[i * 16 + 8 + (lane >> 2)] = (high - offset) * factor;
    }
  }
};
#endif
