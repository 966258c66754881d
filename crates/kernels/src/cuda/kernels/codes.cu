// Tiles of 2-bit or 4-bit codes. Codes are never turned into numbers: with k = s*c - o per token and group of channels,
// q.k = s*sum(q*c) - o*sum(q), and likewise for values. Queries and weights become integers of two bytes; the high bytes
// are rows 0-7 of an 8-bit MMA and the low bytes rows 8-15, so one instruction multiplies both, and sums are exact.
//
// The weighted sum of values stays in integers over all tiles of a segment: weights are rounded in units of 2^reference,
// and so are their total and the sum of offsets. The reference is chosen optimistically, not tile by tile: a tile is
// weighed with that of the tiles before it, and only if a weight does not fit 16 bits is a new one chosen, with room for
// weights eight times as large, and everything so far rescaled. That happens a few times in a segment; looking for the
// largest logit of every tile would cost more than all of its exponentials.

DEVICE void mma_signed(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void mma_unsigned(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two steps of an MMA operand out of one word of codes. Of 2-bit codes the second half comes out four times too large
// (one instruction less than shifting it); QUARTER says that the other operand makes up for that.
template <int BITS, bool QUARTER>
DEVICE void unpack(u32 word, int half, u32& b0, u32& b1) {
  if (BITS == 4) {
    b0 = word & 0x0f0f0f0fu;
    b1 = (word >> 4) & 0x0f0f0f0fu;
  } else if (half == 0) {
    b0 = word & 0x03030303u;
    b1 = (word >> 4) & 0x03030303u;
  } else if (QUARTER) {
    b0 = word & 0x0c0c0c0cu;
    b1 = (word >> 4) & 0x0c0c0c0cu;
  } else {
    b0 = (word >> 2) & 0x03030303u;
    b1 = (word >> 6) & 0x03030303u;
  }
}

template <int BITS>
struct Codes {
  static constexpr int TOKENS = 128 / BITS;
  static constexpr int TILES_PER_PAGE = 64 / TOKENS;
  static constexpr int SIDE_BYTES = 16 * HEAD_DIM;
  static constexpr int GROUP_BYTES = TOKENS * 4;
  static constexpr int TILE_BYTES = 2 * SIDE_BYTES + 2 * GROUPS * GROUP_BYTES;
  static constexpr int LANE_TOKENS = TOKENS / 4;
  static constexpr int TOKEN_TILES = TOKENS / 8;
  static constexpr int TOKEN_STEPS = TOKENS / 32;
  static constexpr int CHANNEL_STEPS = HEAD_DIM / 32;
  static constexpr int CHANNEL_TILES = HEAD_DIM / 8;
  static constexpr int WORD_STEPS = 4 / BITS;
  // An odd number of steps would put a step now in the first, now in the second half of a word.
  static constexpr bool QUARTER = BITS == 2 && CHANNEL_STEPS % 2 == 0;
  // A float of this value has integers in its low bits: adding to an accumulator that starts here converts it, one
  // slow instruction less per logit. It holds 22 bits, which sums of 4-bit codes would have to be cut down to.
  static constexpr bool MAGIC = BITS == 2;
  static constexpr int MAGIC_BITS = MAGIC ? 0x4b400000 : 0;
  static constexpr float MAGIC_VALUE = 12582912.0f;

  u32 q[ROW_TILES][CHANNEL_STEPS][4];
  // Logits are in units of q_step; q_sum is that of each group of channels, in the same unit and negative.
  float q_step[ROW_TILES], q_sum[ROW_TILES][GROUPS];
  float reference[ROW_TILES], total[ROW_TILES], offsets[ROW_TILES][GROUPS];
  int sums[ROW_TILES][CHANNEL_TILES][4];

  DEVICE void begin(const float* queries, int rows, float scale, int lane) {
    const int g = lane >> 2, t = lane & 3;
    #pragma unroll
    for (int tile = 0; tile < ROW_TILES; tile++) {
      const int row = tile * 8 + g;
      const float* source = queries + row * HEAD_DIM;
      float most = 0.0f, absolute = 0.0f;
      float values[CHANNEL_STEPS][8];
      #pragma unroll
      for (int group = 0; group < GROUPS; group++) q_sum[tile][group] = 0.0f;
      #pragma unroll
      for (int step = 0; step < CHANNEL_STEPS; step++) {
        #pragma unroll
        for (int part = 0; part < 2; part++) {
          float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          if (row < rows) four = *(const float4*)(source + step * 32 + part * 16 + t * 4);
          const float x[4] = {four.x, four.y, four.z, four.w};
          #pragma unroll
          for (int e = 0; e < 4; e++) {
            q_sum[tile][step * GROUPS / CHANNEL_STEPS] += x[e];
            absolute += fabsf(x[e]);
            const float value = QUARTER && (step & 1) ? 0.25f * x[e] : x[e];
            most = fmaxf(most, fabsf(value));
            values[step][part * 4 + e] = value;
          }
        }
      }
      most = quad_max(most);
      absolute = quad_sum(absolute);
      // High bytes up to 127, and sums below 2^22 where the magic float must hold them.
      float inverse = most < 1e-30f ? 0.0f : 32512.0f / most;
      if (MAGIC && inverse > 0.0f) inverse = fminf(inverse, 4180000.0f / (3.0f * absolute));
      q_step[tile] = inverse > 0.0f ? scale / inverse : 0.0f;
      #pragma unroll
      for (int group = 0; group < GROUPS; group++) {
        q_sum[tile][group] = -inverse * quad_sum(q_sum[tile][group]);
        offsets[tile][group] = 0.0f;
      }
      // Nothing fits: the first tile chooses.
      reference[tile] = NEGATIVE_INFINITY;
      total[tile] = 0.0f;
      #pragma unroll
      for (int step = 0; step < CHANNEL_STEPS; step++) {
        #pragma unroll
        for (int part = 0; part < 2; part++) {
          u32 high = 0, low = 0;
          #pragma unroll
          for (int e = 0; e < 4; e++) {
            const int integer = __float2int_rn(values[step][part * 4 + e] * inverse);
            const int top = (integer + 128) >> 8;
            high |= (u32)(top & 255) << (8 * e);
            low |= (u32)((integer - top * 256) & 255) << (8 * e);
          }
          q[tile][step][part * 2] = high;
          q[tile][step][part * 2 + 1] = low;
        }
      }
      #pragma unroll
      for (int i = 0; i < CHANNEL_TILES; i++)
        #pragma unroll
        for (int e = 0; e < 4; e++) sums[tile][i][e] = 0;
    }
  }

  DEVICE static uint2 two_scales(const u8* scales, int group, int pair, int t) {
    return *(const uint2*)(scales + group * GROUP_BYTES + (pair / 2) * 64 + t * 16 + (pair & 1) * 8);
  }

  DEVICE void add(const u8* page, int, int lane) {
    const int t = lane & 3;
    float logit[ROW_TILES][LANE_TOKENS];
    {
      const u8* scales = page + 2 * SIDE_BYTES;
      uint4 chunk;
      #pragma unroll
      for (int j = 0; j < TOKEN_TILES; j++) {
        #pragma unroll
        for (int group = 0; group < GROUPS; group++) {
          int c[ROW_TILES][4];
          #pragma unroll
          for (int tile = 0; tile < ROW_TILES; tile++) {
            c[tile][0] = c[tile][1] = 0;
            c[tile][2] = c[tile][3] = MAGIC_BITS;
          }
          #pragma unroll
          for (int inner = 0; inner < CHANNEL_STEPS / GROUPS; inner++) {
            const int step = group * (CHANNEL_STEPS / GROUPS) + inner;
            const int flat = j * CHANNEL_STEPS + step, word = flat / WORD_STEPS;
            if (flat % (4 * WORD_STEPS) == 0) chunk = *(const uint4*)(page + word / 4 * 512 + lane * 16);
            u32 b0, b1;
            unpack<BITS, QUARTER>(word_of(chunk, word % 4), flat % WORD_STEPS, b0, b1);
            #pragma unroll
            for (int tile = 0; tile < ROW_TILES; tile++) mma_signed(c[tile], q[tile][step], b0, b1);
          }
          const uint2 words = two_scales(scales, group, j, t);
          const float2 affine[2] = {scale_pair(words.x), scale_pair(words.y)};
          #pragma unroll
          for (int tile = 0; tile < ROW_TILES; tile++)
            #pragma unroll
            for (int e = 0; e < 2; e++) {
              const int integer = c[tile][e] * 256 + c[tile][e + 2];
              const float sum = MAGIC ? __int_as_float(integer) - MAGIC_VALUE : (float)integer;
              const float offset = affine[e].y * q_sum[tile][group];
              const float part = fmaf(affine[e].x, sum, offset);
              logit[tile][2 * j + e] = group == 0 ? part : logit[tile][2 * j + e] + part;
            }
        }
      }
    }
    const u8* scales = page + 2 * SIDE_BYTES + GROUPS * GROUP_BYTES;
    const u8* values = page + SIDE_BYTES;
    float probability[ROW_TILES][LANE_TOKENS];
    #pragma unroll
    for (int tile = 0; tile < ROW_TILES; tile++) exponentiate(tile, logit[tile], probability[tile]);
    uint4 chunk;
    #pragma unroll
    for (int group = 0; group < GROUPS; group++) {
      u32 weights[ROW_TILES][TOKEN_STEPS][4];
      if (!weigh_all(group, probability, scales, t, weights)) {
        #pragma unroll
        for (int tile = 0; tile < ROW_TILES; tile++) {
          if (group == 0) {
            choose_reference(tile, largest_of(logit[tile]) * q_step[tile], scales, t);
            exponentiate(tile, logit[tile], probability[tile]);
          } else {
            // Logits are gone, but the first group has made sure that these are finite.
            const float most = reference[tile] + __log2f(largest_of(probability[tile]));
            const float ratio = choose_reference(tile, most, scales, t);
            #pragma unroll
            for (int i = 0; i < LANE_TOKENS; i++) probability[tile][i] *= ratio;
          }
        }
        weigh_all(group, probability, scales, t, weights);
      }
      #pragma unroll
      for (int inner = 0; inner < CHANNEL_TILES / GROUPS; inner += WORD_STEPS) {
        const int i = group * (CHANNEL_TILES / GROUPS) + inner;
        #pragma unroll
        for (int step = 0; step < TOKEN_STEPS; step++) {
          const int word = i / WORD_STEPS * TOKEN_STEPS + step;
          if (word % 4 == 0) chunk = *(const uint4*)(values + word / 4 * 512 + lane * 16);
          #pragma unroll
          for (int half = 0; half < WORD_STEPS; half++) {
            u32 b0, b1;
            unpack<BITS, true>(word_of(chunk, word % 4), half, b0, b1);
            #pragma unroll
            for (int tile = 0; tile < ROW_TILES; tile++)
              mma_unsigned(sums[tile][i + half], weights[tile][step], b0, b1);
          }
        }
      }
    }
  }

  DEVICE void exponentiate(int tile, const float (&logit)[LANE_TOKENS], float (&probability)[LANE_TOKENS]) const {
    #pragma unroll
    for (int i = 0; i < LANE_TOKENS; i++)
      probability[i] = exp2_fast(fmaf(logit[i], q_step[tile], -reference[tile]));
  }

  // The weights of a tile for a group of channels, as bytes, their sum and that of offsets; whether all weights fit.
  DEVICE static bool weigh(
      int group, const float (&probability)[LANE_TOKENS], const u8* scales, int t, u32 (&weights)[TOKEN_STEPS][4],
      float& sum, float& offset_sum) {
    sum = group == 0 ? sum_of(probability) : 0.0f;
    // Two chains, so that additions do not wait for one another.
    float offset[2] = {0.0f, 0.0f};
    u32 r[LANE_TOKENS], bits = 0;
    #pragma unroll
    for (int pair = 0; pair < LANE_TOKENS / 2; pair++) {
      const uint2 words = two_scales(scales, group, pair, t);
      const float2 affine[2] = {scale_pair(words.x), scale_pair(words.y)};
      #pragma unroll
      for (int e = 0; e < 2; e++) {
        const int i = 2 * pair + e;
        offset[e] = fmaf(probability[i], affine[e].y, offset[e]);
        r[i] = __float_as_uint(fmaf(probability[i], affine[e].x, 8388608.0f));
        bits |= r[i];
      }
    }
    #pragma unroll
    for (int step = 0; step < TOKEN_STEPS; step++)
      #pragma unroll
      for (int half = 0; half < 2; half++) {
        const u32* four = &r[step * 8 + half * 4];
        const u32 a = __byte_perm(four[0], four[1], 0x4051), b = __byte_perm(four[2], four[3], 0x4051);
        weights[step][half * 2] = __byte_perm(a, b, 0x5410);
        weights[step][half * 2 + 1] = __byte_perm(a, b, 0x7632);
      }
    // 2^23 has these bits: anything else is more than 16 bits, infinite or not a number. The sum is looked at too, because
    // a scale may be zero.
    offset_sum = offset[0] + offset[1];
    return (bits & 0xffff0000u) == 0x4b000000u && sum < 1e30f;
  }

  // All rows; false, and nothing added to the sums, if a weight of any does not fit.
  DEVICE bool weigh_all(
      int group, const float (&probability)[ROW_TILES][LANE_TOKENS], const u8* scales, int t,
      u32 (&weights)[ROW_TILES][TOKEN_STEPS][4]) {
    float sum[ROW_TILES], offset[ROW_TILES];
    bool fits = true;
    #pragma unroll
    for (int tile = 0; tile < ROW_TILES; tile++)
      fits &= weigh(group, probability[tile], scales, t, weights[tile], sum[tile], offset[tile]);
    if (!__all_sync(ALL_LANES, fits)) return false;
    #pragma unroll
    for (int tile = 0; tile < ROW_TILES; tile++) {
      total[tile] += sum[tile];
      offsets[tile][group] += offset[tile];
    }
    return true;
  }

  // A reference at which the weights of this tile and of all before it fit. What groups before this one have added of the
  // tile is rescaled with the rest. There is room for eight times as much: the largest of several rows grows often, if
  // only by a little. It costs three of sixteen bits.
  // Returns what everything was multiplied with. `lane_most`: the largest logit of this lane.
  DEVICE float choose_reference(int tile, float lane_most, const u8* scales, int t) {
    float scale = 1e-20f;
    #pragma unroll
    for (int group = 0; group < GROUPS; group++)
      #pragma unroll
      for (int pair = 0; pair < LANE_TOKENS / 2; pair++) {
        const uint2 words = two_scales(scales, group, pair, t);
        scale = fmaxf(scale, fmaxf(scale_pair(words.x).x, scale_pair(words.y).x));
      }
    const float lowest = quad_max(lane_most) + __log2f(quad_max(scale) * (8.0f / 65000.0f));
    const float old = reference[tile], now = fmaxf(old, lowest);
    reference[tile] = now;
    const float ratio = exp2_fast(old - now);
    if (!__any_sync(ALL_LANES, old != NEGATIVE_INFINITY)) return ratio;
    total[tile] *= ratio;
    #pragma unroll
    for (int group = 0; group < GROUPS; group++) offsets[tile][group] *= ratio;
    #pragma unroll
    for (int i = 0; i < CHANNEL_TILES; i++) {
      int (&c)[4] = sums[tile][i];
      #pragma unroll
      for (int e = 0; e < 2; e++) {
        const float value = fmaf((float)c[e], 256.0f, (float)c[e + 2]) * ratio;
        const float top = rintf(value * (1.0f / 256.0f));
        c[e] = (int)top;
        c[e + 2] = __float2int_rn(fmaf(top, -256.0f, value));
      }
    }
    return ratio;
  }

  DEVICE float row_largest(int tile) const { return reference[tile]; }
  DEVICE float row_total(int tile) const { return quad_sum(total[tile]); }

  // The weighted sums of values, columns 2t and 2t + 1 of every eight channels.
  DEVICE void end(int tile, float2 (&out)[CHANNEL_TILES]) const {
    #pragma unroll
    for (int i = 0; i < CHANNEL_TILES; i++) {
      const float unit = BITS == 2 && (i & 1) ? 0.25f : 1.0f;
      const int (&c)[4] = sums[tile][i];
      out[i].x = fmaf((float)c[0], 256.0f, (float)c[2]) * unit;
      out[i].y = fmaf((float)c[1], 256.0f, (float)c[3]) * unit;
    }
    #pragma unroll
    for (int group = 0; group < GROUPS; group++) {
      const float offset = quad_sum(offsets[tile][group]);
      #pragma unroll
      for (int inner = 0; inner < CHANNEL_TILES / GROUPS; inner++) {
        out[group * (CHANNEL_TILES / GROUPS) + inner].x -= offset;
        out[group * (CHANNEL_TILES / GROUPS) + inner].y -= offset;
      }
    }
  }
};
