// Tiles of 2-bit or 4-bit codes. Codes are never turned into numbers: with k = s*c - o per token and group of channels,
// q.k = s*sum(q*c) - o*sum(q), and likewise for values. Queries and weights become integers of two bytes; the high bytes
// are rows 0-7 of an 8-bit MMA and the low bytes rows 8-15, so one instruction multiplies both, and sums are exact.
//
// The weighted sum of values stays in integers over all tiles of a segment: weights are rounded in units of 2^reference,
// and so are their total and the sum of offsets. The reference is chosen optimistically, not tile by tile: a tile is
// weighed with that of the tiles before it, and only if a weight does not fit 16 bits is a new one chosen, with room for
// weights eight times as large, and everything so far rescaled. That happens a few times in a segment; looking for the
// largest logit of every tile would cost more than all of its exponentials.

DEVICE void mma_signed(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const int (&c)[4]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
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
  // A tile is worked on in rounds, so that no more than the logits of one are in registers. Two warps share a tile
  // where one could not hold all sums: each weighs the tokens of one round, then each sums half of the channels.
  static constexpr int TEAM = TEAM_WARPS;
  static constexpr int ROUNDS = TEAM == 2 ? 1 : TOKENS / 32;
  static constexpr int LANE_TOKENS = TOKENS / 4;
  static constexpr int ROUND_TOKENS = LANE_TOKENS / ROUNDS / TEAM;
  static constexpr int PAIRS = ROUND_TOKENS / 2;
  static constexpr int TOKEN_STEPS = TOKENS / 32;
  static constexpr int CHANNEL_STEPS = HEAD_DIM / 32;
  static constexpr int CHANNEL_TILES = HEAD_DIM / 8 / TEAM;
  static constexpr int GROUP_TILES = CHANNEL_TILES / GROUPS;
  static constexpr int WORD_STEPS = 4 / BITS;
  // Registers of weights that a lane makes in a round.
  static constexpr int WEIGHTS = ROUND_TOKENS / 2;
  // An odd number of steps would put a step now in the first, now in the second half of a word.
  static constexpr bool QUARTER = BITS == 2 && CHANNEL_STEPS % 2 == 0;
  // A float of this value has integers in its low bits: adding to an accumulator that starts here converts it, one
  // slow instruction less per logit. It holds 22 bits, which sums of 4-bit codes would have to be cut down to.
  static constexpr bool MAGIC = BITS == 2;
  static constexpr int MAGIC_BITS = MAGIC ? 0x4b400000 : 0;
  static constexpr float MAGIC_VALUE = MAGIC ? 12582912.0f : 0.0f;
  // Of a team, in shared memory: weights, twice, since one warp may be a tile ahead; then what rescaling compares.
  static constexpr int WEIGHT_BYTES = ROW_TILES * TEAM * 128 * WEIGHTS;
  static constexpr int TEAM_BYTES = TEAM == 1 ? 0 : 2 * WEIGHT_BYTES + ROW_TILES * TEAM * 8 * 8;

  u32 q[ROW_TILES][CHANNEL_STEPS][4];
  // Sums of products with codes are in units of q_step; q_sum is that of each group of channels, scaled
  // like logits and negative.
  float q_step[ROW_TILES], q_sum[ROW_TILES][GROUPS];
  float reference[ROW_TILES], total[ROW_TILES], offsets[ROW_TILES][GROUPS];
  int sums[ROW_TILES][CHANNEL_TILES][4];
  // What accumulators of logits start from, in registers that stay as they are: none need be cleared.
  int zero[4];
  // Nothing has been weighed, so there is no reference yet.
  bool fresh;
  int member, barrier, buffer;
  u8* team;

  // `memory`: of the team; `index`: that of the team in its block.
  DEVICE void begin(
      const float* queries, int rows, float scale, int lane, int warp, u8* memory) {
    const int g = lane >> 2, t = lane & 3;
    member = TEAM == 1 ? 0 : warp % TEAM;
    barrier = 1 + warp / TEAM;
    buffer = 0;
    team = memory + warp / TEAM * TEAM_BYTES;
    fresh = true;
    // The compiler must not know that these are constants, or it would set them again every time.
    const int unknown = rows >> 31;
    zero[0] = zero[1] = unknown;
    zero[2] = zero[3] = unknown | MAGIC_BITS;
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
        q_sum[tile][group] = -scale * quad_sum(q_sum[tile][group]);
        offsets[tile][group] = 0.0f;
      }
      reference[tile] = 0.0f;
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
    #pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
      // Tokens of this warp: a round of its own, or its part of the team's.
      const u8* keys = page + member * (SIDE_BYTES / 2);
      const u8* key_scales = page + 2 * SIDE_BYTES + member * (GROUP_BYTES / 2);
      const u8* value_scales = key_scales + GROUPS * GROUP_BYTES;
      float exponent[ROW_TILES][ROUND_TOKENS];
      score(round * PAIRS, keys, key_scales, lane, exponent);
      weigh_and_sum(round, exponent, page + SIDE_BYTES, value_scales, lane);
    }
  }

  // Logits less their reference, which is what weights are powers of.
  DEVICE void score(
      int first_pair, const u8* keys, const u8* scales, int lane, float (&exponent)[ROW_TILES][ROUND_TOKENS]) const {
    const int t = lane & 3;
    uint4 chunk;
    #pragma unroll
    for (int pair = 0; pair < PAIRS; pair++) {
      const int j = first_pair + pair;
      #pragma unroll
      for (int group = 0; group < GROUPS; group++) {
        int c[ROW_TILES][4];
        #pragma unroll
        for (int inner = 0; inner < CHANNEL_STEPS / GROUPS; inner++) {
          const int step = group * (CHANNEL_STEPS / GROUPS) + inner;
          const int flat = j * CHANNEL_STEPS + step, word = flat / WORD_STEPS;
          if (flat % (4 * WORD_STEPS) == 0 || (pair == 0 && step == 0))
            chunk = *(const uint4*)(keys + word / 4 * 512 + lane * 16);
          u32 b0, b1;
          unpack<BITS, QUARTER>(word_of(chunk, word % 4), flat % WORD_STEPS, b0, b1);
          #pragma unroll
          for (int tile = 0; tile < ROW_TILES; tile++)
            if (inner == 0) mma_signed(c[tile], q[tile][step], b0, b1, zero);
            else mma_signed(c[tile], q[tile][step], b0, b1, c[tile]);
        }
        const uint2 words = two_scales(scales, group, j, t);
        const float2 affine[2] = {scale_pair(words.x), scale_pair(words.y)};
        #pragma unroll
        for (int tile = 0; tile < ROW_TILES; tile++)
          #pragma unroll
          for (int e = 0; e < 2; e++) {
            const int integer = c[tile][e] * 256 + c[tile][e + 2];
            // Rounding of the constant moves all sums by less than one unit of the queries.
            const float sum = MAGIC ? fmaf(__int_as_float(integer), q_step[tile], -MAGIC_VALUE * q_step[tile])
                                    : (float)integer * q_step[tile];
            const float before = group == 0 ? -reference[tile] : exponent[tile][2 * pair + e];
            exponent[tile][2 * pair + e] = fmaf(affine[e].x, sum, fmaf(affine[e].y, q_sum[tile][group], before));
          }
      }
    }
  }

  DEVICE void weigh_and_sum(
      int round, float (&exponent)[ROW_TILES][ROUND_TOKENS], const u8* values, const u8* scales, int lane) {
    const int first_pair = round * PAIRS;
    float probability[ROW_TILES][ROUND_TOKENS];
    exponentiate(exponent, probability);
    uint4 chunk;
    #pragma unroll
    for (int group = 0; group < GROUPS; group++) {
      u32 weights[ROW_TILES][WEIGHTS];
      if (!weigh_all(group, first_pair, probability, scales, lane, weights)) {
        float most[ROW_TILES];
        #pragma unroll
        for (int tile = 0; tile < ROW_TILES; tile++) {
          if (group == 0) most[tile] = reference[tile] + largest_of(exponent[tile]);
          // Exponents are gone, but the first group has made sure that these are finite.
          else most[tile] = reference[tile] + __log2f(largest_of(probability[tile]));
        }
        const float2 moved = choose_references(most, first_pair, scales, lane);
        #pragma unroll
        for (int tile = 0; tile < ROW_TILES; tile++) {
          const float by = tile == 0 ? moved.x : moved.y, ratio = exp2_fast(by);
          #pragma unroll
          for (int i = 0; i < ROUND_TOKENS; i++)
            probability[tile][i] = group == 0 ? exp2_fast(exponent[tile][i] + by) : probability[tile][i] * ratio;
        }
        weigh_all(group, first_pair, probability, scales, lane, weights);
      }
      u32 operands[ROW_TILES][TOKEN_STEPS][4];
      gather(weights, lane, operands);
      // A team sums in all tokens at once, one warp only its own round.
      constexpr int STEPS = TEAM == 1 ? 1 : TOKEN_STEPS;
      const u8* source = values + group * (SIDE_BYTES / GROUPS) + member * (SIDE_BYTES / GROUPS / 2);
      #pragma unroll
      for (int inner = 0; inner < GROUP_TILES; inner += WORD_STEPS) {
        #pragma unroll
        for (int s = 0; s < STEPS; s++) {
          const int step = TEAM == 1 ? round : s;
          const int word = inner / WORD_STEPS * TOKEN_STEPS + step;
          if (word % 4 == 0 || (s == 0 && word % 4 < TOKEN_STEPS))
            chunk = *(const uint4*)(source + word / 4 * 512 + lane * 16);
          #pragma unroll
          for (int half = 0; half < WORD_STEPS; half++) {
            u32 b0, b1;
            unpack<BITS, true>(word_of(chunk, word % 4), half, b0, b1);
            #pragma unroll
            for (int tile = 0; tile < ROW_TILES; tile++)
              mma_unsigned(sums[tile][group * GROUP_TILES + inner + half], operands[tile][s], b0, b1);
          }
        }
      }
    }
  }

  DEVICE static void exponentiate(
      const float (&exponent)[ROW_TILES][ROUND_TOKENS], float (&probability)[ROW_TILES][ROUND_TOKENS]) {
    #pragma unroll
    for (int tile = 0; tile < ROW_TILES; tile++)
      #pragma unroll
      for (int i = 0; i < ROUND_TOKENS; i++) probability[tile][i] = exp2_fast(exponent[tile][i]);
  }

  // Weights as operands of an MMA: those of this warp, or those of both.
  DEVICE void gather(
      const u32 (&weights)[ROW_TILES][WEIGHTS], int lane, u32 (&operands)[ROW_TILES][TOKEN_STEPS][4]) {
    if (TEAM == 1) {
      #pragma unroll
      for (int tile = 0; tile < ROW_TILES; tile++)
        #pragma unroll
        for (int i = 0; i < WEIGHTS; i++) operands[tile][0][i % 4] = weights[tile][i];
    } else {
      #pragma unroll
      for (int tile = 0; tile < ROW_TILES; tile++)
        #pragma unroll
        for (int other = 0; other < TEAM; other++) {
          const u8* place = weight_place(tile, other, lane);
          u32 (&to)[4] = operands[tile][other * WEIGHTS / 4];
          if (WEIGHTS == 4) {
            const uint4 four = *(const uint4*)place;
            to[0] = four.x; to[1] = four.y; to[2] = four.z; to[3] = four.w;
          } else {
            const uint2 two = *(const uint2*)place;
            to[other * WEIGHTS % 4] = two.x; to[other * WEIGHTS % 4 + 1] = two.y;
          }
        }
      buffer ^= WEIGHT_BYTES;
    }
  }

  DEVICE u8* weight_place(int tile, int of, int lane) const {
    return team + buffer + ((tile * TEAM + of) * 32 + lane) * (4 * WEIGHTS);
  }

  // The weights of a round for a group of channels, as bytes, their sum and that of offsets; whether all weights fit.
  DEVICE static bool weigh(
      int group, int first_pair, const float (&probability)[ROUND_TOKENS], const u8* scales, int t,
      u32 (&weights)[WEIGHTS], float& sum, float& offset_sum) {
    sum = group == 0 ? sum_of(probability) : 0.0f;
    // Two chains, so that additions do not wait for one another.
    float offset[2] = {0.0f, 0.0f};
    u32 r[ROUND_TOKENS], bits = 0;
    #pragma unroll
    for (int pair = 0; pair < PAIRS; pair++) {
      const uint2 words = two_scales(scales, group, first_pair + pair, t);
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
    for (int part = 0; part < ROUND_TOKENS / 4; part++) {
      const u32* four = &r[part * 4];
      const u32 a = __byte_perm(four[0], four[1], 0x4051), b = __byte_perm(four[2], four[3], 0x4051);
      weights[part * 2] = __byte_perm(a, b, 0x5410);
      weights[part * 2 + 1] = __byte_perm(a, b, 0x7632);
    }
    // 2^23 has these bits: anything else is more than 16 bits, infinite or not a number. The sum is looked at too, because
    // a scale may be zero.
    offset_sum = offset[0] + offset[1];
    return (bits & 0xffff0000u) == 0x4b000000u && sum < 1e30f;
  }

  // All rows; false, and nothing added to the sums, if a weight of any does not fit. A team leaves its weights in shared
  // memory, where both find them once both are here.
  DEVICE bool weigh_all(
      int group, int first_pair, const float (&probability)[ROW_TILES][ROUND_TOKENS], const u8* scales, int lane,
      u32 (&weights)[ROW_TILES][WEIGHTS]) {
    float sum[ROW_TILES], offset[ROW_TILES];
    bool fits = !fresh;
    #pragma unroll
    for (int tile = 0; tile < ROW_TILES; tile++) {
      fits &= weigh(group, first_pair, probability[tile], scales, lane & 3, weights[tile], sum[tile], offset[tile]);
      if (TEAM == 2) {
        u8* place = weight_place(tile, member, lane);
        if (WEIGHTS == 4)
          *(uint4*)place = make_uint4(weights[tile][0], weights[tile][1], weights[tile][2 % WEIGHTS], weights[tile][3 % WEIGHTS]);
        else
          *(uint2*)place = make_uint2(weights[tile][0], weights[tile][1]);
      }
    }
    if (TEAM == 2 ? !team_all(barrier, fits) : !__all_sync(ALL_LANES, fits)) return false;
    #pragma unroll
    for (int tile = 0; tile < ROW_TILES; tile++) {
      total[tile] += sum[tile];
      offsets[tile][group] += offset[tile];
    }
    return true;
  }

  // References at which the weights of this round and of all before it fit. What groups before this one have added of the
  // round is rescaled with the rest. There is room for eight times as much: the largest of several rows grows often, if
  // only by a little. It costs three of sixteen bits.
  // Returns by how much exponents change. `most`: the largest logits of this lane.
  DEVICE float2 choose_references(const float (&most)[ROW_TILES], int first_pair, const u8* scales, int lane) {
    float scale = 1e-20f;
    #pragma unroll
    for (int group = 0; group < GROUPS; group++)
      #pragma unroll
      for (int pair = 0; pair < PAIRS; pair++) {
        const uint2 words = two_scales(scales, group, first_pair + pair, lane & 3);
        scale = fmaxf(scale, fmaxf(scale_pair(words.x).x, scale_pair(words.y).x));
      }
    scale = quad_max(scale);
    float lowest[ROW_TILES];
    #pragma unroll
    for (int tile = 0; tile < ROW_TILES; tile++)
      lowest[tile] = quad_max(most[tile]) + __log2f(scale * (8.0f / 65000.0f));
    if (TEAM == 2) {
      // The other warp's tokens count as well. Nobody writes here again before both have passed another barrier.
      float* compared = (float*)(team + 2 * WEIGHT_BYTES) + (lane >> 2);
      #pragma unroll
      for (int tile = 0; tile < ROW_TILES; tile++)
        if ((lane & 3) == 0) compared[(tile * TEAM + member) * 8] = lowest[tile];
      team_all(barrier, true);
      #pragma unroll
      for (int tile = 0; tile < ROW_TILES; tile++)
        lowest[tile] = fmaxf(compared[tile * TEAM * 8], compared[(tile * TEAM + 1) * 8]);
    }
    float moved[2] = {0.0f, 0.0f};
    #pragma unroll
    for (int tile = 0; tile < ROW_TILES; tile++) {
      const float old = reference[tile], now = fresh ? lowest[tile] : fmaxf(old, lowest[tile]);
      reference[tile] = now;
      moved[tile] = old - now;
      if (fresh) continue;
      const float ratio = exp2_fast(old - now);
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
    }
    fresh = false;
    return make_float2(moved[0], moved[1]);
  }

  DEVICE float row_largest(int tile) const { return fresh ? NEGATIVE_INFINITY : reference[tile]; }
  DEVICE float row_total(int tile) const { return quad_sum(total[tile]); }

  // The offsets of the other warp's tokens belong to all channels.
  DEVICE void settle(int lane) {
    #pragma unroll
    for (int tile = 0; tile < ROW_TILES; tile++)
      #pragma unroll
      for (int group = 0; group < GROUPS; group++) {
        offsets[tile][group] = quad_sum(offsets[tile][group]);
        if (TEAM == 1) continue;
        float* shared = (float*)(team + 2 * WEIGHT_BYTES) + (lane >> 2);
        team_all(barrier, true);
        if ((lane & 3) == 0) shared[member * 8] = offsets[tile][group];
        team_all(barrier, true);
        offsets[tile][group] = shared[0] + shared[8];
      }
  }

  // First channel of a tile of eight.
  DEVICE int channel(int i) const {
    return ((i / GROUP_TILES * TEAM + member) * GROUP_TILES + i % GROUP_TILES) * 8;
  }

  // The weighted sums of values, columns 2t and 2t + 1 of every eight channels.
  DEVICE void end(int tile, float2 (&out)[CHANNEL_TILES]) const {
    #pragma unroll
    for (int i = 0; i < CHANNEL_TILES; i++) {
      const float unit = BITS == 2 && (i & 1) ? 0.25f : 1.0f, offset = offsets[tile][i / GROUP_TILES];
      const int (&c)[4] = sums[tile][i];
      out[i].x = fmaf((float)c[0], 256.0f, (float)c[2]) * unit - offset;
      out[i].y = fmaf((float)c[1], 256.0f, (float)c[3]) * unit - offset;
    }
  }
};
