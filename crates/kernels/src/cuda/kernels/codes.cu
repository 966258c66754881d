// Tiles of 2-bit or 4-bit codes. Codes are never turned into numbers: with k = s*c - o per token and group of channels,
// q.k = s*sum(q*c) - o*sum(q), and likewise for values. Queries become integers of two bytes; the high bytes are rows 0-7
// of an 8-bit MMA and the low bytes rows 8-15, so one instruction multiplies both, and sums are exact.
//
// The weighted sum of values stays in the accumulators over all tiles of a segment: weights are powers relative to a
// reference, and so are their total and the sum of offsets. The reference is chosen optimistically, not tile by tile: a
// tile is weighed with that of the tiles before it, and only if a weight does not fit is a new one chosen and everything
// so far rescaled. That happens a few times in a segment; looking for the largest logit of every tile would cost more
// than all of its exponentials.

DEVICE void mma_signed(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const int (&c)[4]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

template <int BITS>
struct Codes {
  static constexpr int TOKENS = 128 / BITS;
  static constexpr int TILES_PER_PAGE = 64 / TOKENS;
  static constexpr int SIDE_BYTES = 16 * HEAD_DIM;
  static constexpr int GROUP_BYTES = TOKENS * 4;
  static constexpr int TILE_BYTES = 2 * SIDE_BYTES + 2 * GROUPS * GROUP_BYTES;
  // A tile is worked on in rounds of 32 tokens, eight per lane, so that the logits of one round are all that is held.
  static constexpr int ROUNDS = TOKENS / 32;
  static constexpr int PAIRS = 4;
  // One after the other where registers are short.
  static constexpr int ROUNDS_AT_ONCE = LEAN && HEAD_DIM % 64 == 0 ? 1 : ROUNDS;
  static constexpr int CHANNEL_STEPS = HEAD_DIM / 32;
  static constexpr int CHANNEL_TILES = HEAD_DIM / 8;
  static constexpr int GROUP_TILES = CHANNEL_TILES / GROUPS;
  static constexpr int WORD_STEPS = 4 / BITS;
  static constexpr int OPERANDS = Sums<BITS>::OPERANDS;
  static constexpr int LATER = Sums<BITS>::LATER;
  // An odd number of steps would put a step now in the first, now in the second half of a word.
  static constexpr bool QUARTER = BITS == 2 && CHANNEL_STEPS % 2 == 0;
  // A float of this value has integers in its low bits: adding to an accumulator that starts here converts it, one
  // slow instruction less per logit. It holds 22 bits, which sums of 4-bit codes would have to be cut down to.
  static constexpr bool MAGIC = BITS == 2;
  static constexpr int MAGIC_BITS = MAGIC ? 0x4b400000 : 0;
  static constexpr float MAGIC_VALUE = MAGIC ? 12582912.0f : 0.0f;
  // Queries as operands, then their steps and sums, in shared memory: all warps of a block have the same.
  static constexpr int FRAGMENT_BYTES = ROW_TILES * CHANNEL_STEPS * 512;
  static constexpr int QUERY_BYTES = FRAGMENT_BYTES + (1 + GROUPS) * ROW_TILES * 8 * 4;

  // Read from there again and again where registers are short.
  static constexpr bool KEPT = !LEAN || HEAD_DIM % 64 != 0;
  u32 kept[ROW_TILES][KEPT ? CHANNEL_STEPS : 1][4];
  const u8* fragments;
  // Sums of products with codes are in units of q_step; q_sum is that of each group of channels, scaled like logits and
  // negative.
  float q_step[ROW_TILES], q_sum[ROW_TILES][GROUPS];
  float reference[ROW_TILES], total[ROW_TILES], offsets[ROW_TILES][GROUPS];
  Sums<BITS> sums;
  // What accumulators of logits start from, in registers that stay as they are: none need be cleared.
  int zero[4];
  // Nothing has been weighed, so there is no reference yet.
  bool fresh;

  // Queries to integers, a row by each warp.
  DEVICE static void prepare(const float* queries, int rows, float scale, u8* memory, int warp, int lane) {
    constexpr int PARTS = (HEAD_DIM + 127) / 128, GROUP_CHANNELS = HEAD_DIM / GROUPS;
    // Lanes that hold one group; three quarters of a warp count as a warp, since the rest holds zeros.
    constexpr int LANES = GROUP_CHANNELS >= 96 ? 32 : GROUP_CHANNELS / 4;
    float* steps = (float*)(memory + FRAGMENT_BYTES);  // [row], then sums [group][row]
    for (int row = warp; row < ROW_TILES * 8; row += WARPS) {
      float x[PARTS][4], group_sum[PARTS] = {}, most = 0.0f, absolute = 0.0f;
      #pragma unroll
      for (int part = 0; part < PARTS; part++) {
        const int channel = part * 128 + lane * 4;
        float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (row < rows && channel < HEAD_DIM) four = *(const float4*)(queries + row * HEAD_DIM + channel);
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
        if (lane % LANES == 0 && group < GROUPS) steps[(1 + group) * ROW_TILES * 8 + row] = -scale * group_sum[part];
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
        *(uint2*)(memory + ((row / 8 * CHANNEL_STEPS + step) * 32 + row % 8 * 4 + t) * 16 + half * 8) =
            make_uint2(high, low);
      }
    }
  }

  // `queries`: what `prepare` has left.
  DEVICE void begin(const u8* queries, int rows, int lane) {
    fresh = true;
    // The compiler must not know that these are constants, or it would set them again every time.
    const int unknown = rows >> 31;
    zero[0] = zero[1] = unknown;
    zero[2] = zero[3] = unknown | MAGIC_BITS;
    fragments = queries + lane * 16;
    if (KEPT)
      #pragma unroll
      for (int step = 0; step < CHANNEL_STEPS; step++)
        #pragma unroll
        for (int tile = 0; tile < ROW_TILES; tile++) fragment(tile, step, kept[tile][KEPT ? step : 0]);
    const float* steps = (const float*)(queries + FRAGMENT_BYTES) + (lane >> 2);
    #pragma unroll
    for (int tile = 0; tile < ROW_TILES; tile++) {
      q_step[tile] = steps[tile * 8];
      reference[tile] = total[tile] = 0.0f;
      #pragma unroll
      for (int group = 0; group < GROUPS; group++) {
        q_sum[tile][group] = steps[(1 + group) * ROW_TILES * 8 + tile * 8];
        offsets[tile][group] = 0.0f;
      }
    }
    sums.clear();
  }

  DEVICE void fragment(int tile, int step, u32 (&q)[4]) const {
    const uint4 four = *(const uint4*)(fragments + (tile * CHANNEL_STEPS + step) * 512);
    q[0] = four.x; q[1] = four.y; q[2] = four.z; q[3] = four.w;
  }

  DEVICE static uint2 two_scales(const u8* scales, int group, int pair, int t) {
    return *(const uint2*)(scales + group * GROUP_BYTES + (pair / 2) * 64 + t * 16 + (pair & 1) * 8);
  }

  DEVICE void add(const u8* page, int, int lane) {
    const u8* scales = page + 2 * SIDE_BYTES;
    #pragma unroll(ROUNDS_AT_ONCE)
    for (int round = 0; round < ROUNDS; round++) {
      // Where the words of a round are whole loads, rounds are the same but for an offset.
      constexpr bool WHOLE = PAIRS * CHANNEL_STEPS % (4 * WORD_STEPS) == 0;
      const int first_pair = WHOLE ? 0 : round * PAIRS;
      const u8* keys = page + (WHOLE ? round * (PAIRS * CHANNEL_STEPS / WORD_STEPS * 128) : 0);
      float exponent[ROW_TILES][8];
      score(first_pair, keys, scales + round * 128, lane, exponent);
      weigh_and_sum(round, exponent, page + SIDE_BYTES, scales + GROUPS * GROUP_BYTES + round * 128, lane);
    }
  }

  // Logits less their reference, which is what weights are powers of.
  DEVICE void score(
      int first_pair, const u8* keys, const u8* scales, int lane, float (&exponent)[ROW_TILES][8]) const {
    const int t = lane & 3;
    // Queries from shared memory are multiplied with all tokens of the round while they are here.
    constexpr int BLOCK = KEPT ? 1 : PAIRS;
    uint4 chunks[(PAIRS * CHANNEL_STEPS / WORD_STEPS + 6) / 4];
    const int first_chunk = first_pair * CHANNEL_STEPS / WORD_STEPS / 4;
    #pragma unroll
    for (int first = 0; first < PAIRS; first += BLOCK) {
      #pragma unroll
      for (int group = 0; group < GROUPS; group++) {
        int c[BLOCK][ROW_TILES][4];
        #pragma unroll
        for (int inner = 0; inner < CHANNEL_STEPS / GROUPS; inner++) {
          const int step = group * (CHANNEL_STEPS / GROUPS) + inner;
          u32 q[ROW_TILES][4];
          #pragma unroll
          for (int tile = 0; tile < ROW_TILES; tile++) {
            if (KEPT)
              #pragma unroll
              for (int i = 0; i < 4; i++) q[tile][i] = kept[tile][KEPT ? step : 0][i];
            else fragment(tile, step, q[tile]);
          }
          #pragma unroll
          for (int block = 0; block < BLOCK; block++) {
            const int flat = (first_pair + first + block) * CHANNEL_STEPS + step, word = flat / WORD_STEPS;
            uint4& chunk = chunks[word / 4 - first_chunk];
            // The first of four words, or of those that this round has of them.
            const int start = max(word / 4 * 4 * WORD_STEPS, first_pair * CHANNEL_STEPS);
            if (KEPT ? flat == start : step == 0 && start / CHANNEL_STEPS == first_pair + block)
              chunk = *(const uint4*)(keys + word / 4 * 512 + lane * 16);
            u32 b0, b1;
            unpack<BITS, QUARTER>(word_of(chunk, word % 4), flat % WORD_STEPS, b0, b1);
            #pragma unroll
            for (int tile = 0; tile < ROW_TILES; tile++)
              if (inner == 0) mma_signed(c[block][tile], q[tile], b0, b1, zero);
              else mma_signed(c[block][tile], q[tile], b0, b1, c[block][tile]);
          }
        }
        #pragma unroll
        for (int block = 0; block < BLOCK; block++) {
          const uint2 words = two_scales(scales, group, first + block, t);
          const float2 affine[2] = {scale_pair(words.x), scale_pair(words.y)};
          #pragma unroll
          for (int tile = 0; tile < ROW_TILES; tile++)
            #pragma unroll
            for (int e = 0; e < 2; e++) {
              const int i = 2 * (first + block) + e, integer = c[block][tile][e] * 256 + c[block][tile][e + 2];
              // Rounding of the constant moves all sums by less than one unit of the queries.
              const float sum = MAGIC ? fmaf(__int_as_float(integer), q_step[tile], -MAGIC_VALUE * q_step[tile])
                                      : (float)integer * q_step[tile];
              const float before = group > 0 ? exponent[tile][i] : -reference[tile] - (i < 4 ? 0 : LATER);
              exponent[tile][i] = fmaf(affine[e].x, sum, fmaf(affine[e].y, q_sum[tile][group], before));
            }
        }
      }
    }
  }

  DEVICE void weigh_and_sum(
      int round, const float (&exponent)[ROW_TILES][8], const u8* values, const u8* scales, int lane) {
    const int t = lane & 3;
    float probability[ROW_TILES][8];
    exponentiate(exponent, probability);
    uint4 chunk;
    #pragma unroll
    for (int group = 0; group < GROUPS; group++) {
      u32 operands[OPERANDS];
      if (!weigh(group, probability, scales, t, operands)) {
        float most[ROW_TILES], moved[ROW_TILES];
        #pragma unroll
        for (int tile = 0; tile < ROW_TILES; tile++) {
          // Exponents are gone after the first group, but that has made sure that probabilities are finite.
          const float* x = group == 0 ? exponent[tile] : probability[tile];
          const float first = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
          const float second = fmaxf(fmaxf(x[4], x[5]), fmaxf(x[6], x[7]));
          most[tile] = reference[tile] + (group == 0 ? fmaxf(first, second + LATER)
                                                     : __log2f(fmaxf(first, second * (1 << LATER))));
        }
        choose_references(most, scales, t, moved);
        #pragma unroll
        for (int tile = 0; tile < ROW_TILES; tile++) {
          const float ratio = exp2_fast(moved[tile]);
          #pragma unroll
          for (int i = 0; i < 8; i++)
            probability[tile][i] =
                group == 0 ? exp2_fast(exponent[tile][i] + moved[tile]) : probability[tile][i] * ratio;
        }
        weigh(group, probability, scales, t, operands);
      }
      #pragma unroll
      for (int inner = 0; inner < GROUP_TILES; inner += WORD_STEPS) {
        const int i = group * GROUP_TILES + inner, word = i / WORD_STEPS * ROUNDS;
        if (word % 4 == 0) chunk = *(const uint4*)(values + word / 4 * 512 + lane * 16);
        sums.add(i, operands, word_of(chunk, word % 4 + (round == 0 ? 0 : 1)));
      }
    }
  }

  DEVICE static void exponentiate(const float (&exponent)[ROW_TILES][8], float (&probability)[ROW_TILES][8]) {
    #pragma unroll
    for (int tile = 0; tile < ROW_TILES; tile++)
      #pragma unroll
      for (int i = 0; i < 8; i++) probability[tile][i] = exp2_fast(exponent[tile][i]);
  }

  // The weights of a round for a group of channels, as operands; their sum and that of offsets are added to those of the
  // segment. False, and nothing added, if a weight of any row does not fit.
  DEVICE bool weigh(
      int group, const float (&probability)[ROW_TILES][8], const u8* scales, int t,
      u32 (&operands)[OPERANDS]) {
    // The first and the second four tokens: two chains, so that additions do not wait for one another.
    float sum[ROW_TILES], offset[ROW_TILES][2], weights[ROW_TILES][8];
    #pragma unroll
    for (int tile = 0; tile < ROW_TILES; tile++) {
      const float (&p)[8] = probability[tile];
      sum[tile] = fmaf((p[4] + p[5]) + (p[6] + p[7]), 1 << LATER, (p[0] + p[1]) + (p[2] + p[3]));
    }
    #pragma unroll
    for (int pair = 0; pair < PAIRS; pair++) {
      const uint2 words = two_scales(scales, group, pair, t);
      const float2 affine[2] = {scale_pair(words.x), scale_pair(words.y)};
      #pragma unroll
      for (int tile = 0; tile < ROW_TILES; tile++)
        #pragma unroll
        for (int e = 0; e < 2; e++) {
          const int i = 2 * pair + e, part = i / 4;
          const float p = probability[tile][i];
          offset[tile][part] = i % 4 == 0 ? p * affine[e].y : fmaf(p, affine[e].y, offset[tile][part]);
          weights[tile][i] = Sums<BITS>::weight(p, affine[e].x);
        }
    }
    bool fits = Sums<BITS>::pack(weights, operands) && !fresh;
    #pragma unroll
    for (int tile = 0; tile < ROW_TILES; tile++)
      // Looked at too, because a scale may be zero.
      if (group == 0) fits &= sum[tile] < 1e30f;
    if (!__all_sync(ALL_LANES, fits)) return false;
    #pragma unroll
    for (int tile = 0; tile < ROW_TILES; tile++) {
      if (group == 0) total[tile] += sum[tile];
      offsets[tile][group] += fmaf(offset[tile][1], 1 << LATER, offset[tile][0]);
    }
    return true;
  }

  // References at which the weights of this round and of all before it fit. What groups before this one have added of the
  // round is rescaled with the rest. `most`: the largest logits of this lane; `moved`: by how much exponents change.
  DEVICE void choose_references(
      const float (&most)[ROW_TILES], const u8* scales, int t, float (&moved)[ROW_TILES]) {
    float scale = 1e-20f;
    #pragma unroll
    for (int group = 0; group < GROUPS; group++)
      #pragma unroll
      for (int pair = 0; pair < PAIRS; pair++) {
        const uint2 words = two_scales(scales, group, pair, t);
        scale = fmaxf(scale, fmaxf(scale_pair(words.x).x, scale_pair(words.y).x));
      }
    const float room = __log2f(quad_max(scale) * (1.0f / Sums<BITS>::LARGEST));
    float ratio[ROW_TILES];
    #pragma unroll
    for (int tile = 0; tile < ROW_TILES; tile++) {
      const float old = reference[tile];
      float lowest = quad_max(most[tile]) + room;
      // Equal logits then have weights that f16 holds exactly: errors of many equal weights would add up.
      if (LATER > 0) lowest = ceilf(lowest);
      reference[tile] = fresh ? lowest : fmaxf(old, lowest);
      moved[tile] = old - reference[tile];
      ratio[tile] = fresh ? 1.0f : exp2_fast(moved[tile]);
      total[tile] *= ratio[tile];
      #pragma unroll
      for (int group = 0; group < GROUPS; group++) offsets[tile][group] *= ratio[tile];
    }
    if (!fresh) sums.rescale(ratio);
    fresh = false;
  }

  DEVICE float row_largest(int tile) const { return fresh ? NEGATIVE_INFINITY : reference[tile]; }
  DEVICE float row_total(int tile) const { return quad_sum(total[tile]); }

  // The weighted sums of values, columns 2t and 2t + 1 of every eight channels.
  DEVICE void end(int tile, float2 (&out)[CHANNEL_TILES]) const {
    #pragma unroll
    for (int group = 0; group < GROUPS; group++) {
      const float offset = quad_sum(offsets[tile][group]);
      #pragma unroll
      for (int inner = 0; inner < GROUP_TILES; inner++) {
        const int i = group * GROUP_TILES + inner;
        const float2 sum = sums.read(tile, i);
        out[i] = make_float2(sum.x - offset, sum.y - offset);
      }
    }
  }
};
