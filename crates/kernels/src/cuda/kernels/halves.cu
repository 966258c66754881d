// Values of codes with weights in f16, of which the small ones are as precise as the large: next to one large weight,
// thousands of small ones may count for as much. Codes are taken as f16 as well: a small integer in the low bits of one is
// that many times 2^-24. A lane holds weights of every eighth token; as operands they are needed the other way round,
// which is what `movmatrix` does.

// Codes of every other sixteen values lie four bits higher, so they count sixteen times.
template <int BITS>
struct HalfCodes : SealedKeys<BITS, 4> {
  typedef SealedKeys<BITS, 4> Base;
  using Base::KEY_BYTES; using Base::SCALES_AT; using Base::GROUP_BYTES; using Base::TOKENS; using Base::LANE_TOKENS; using Base::SLICES;
  using Base::CHANNEL_TILES; using Base::reference; using Base::total; using Base::offsets; using Base::start;
  using Base::fresh; using Base::score; using Base::four_scales; using Base::later;
  static constexpr int LATER = 4;
  // The largest weight when a reference is chosen: far from 65504 and from 2^-14, below which bits are lost.
  static constexpr float LARGEST_WEIGHT = 256.0f;
  // Pairs of slices: a weight of each is half of an operand.
  static constexpr int COLUMNS = (SLICES + 1) / 2;

  // Channels in rows; the first of a pair of slices in even, the second in odd columns.
  float sums[CHANNEL_TILES][COLUMNS][4];

  DEVICE void begin(const u8* queries, int lane) {
    this->begin_keys(queries, lane);
    #pragma unroll
    for (int i = 0; i < CHANNEL_TILES * COLUMNS; i++)
      #pragma unroll
      for (int e = 0; e < 4; e++) sums[i / COLUMNS][i % COLUMNS][e] = 0.0f;
  }

  // The first references, before the first tile is added.
  DEVICE void prime(const u8* page, int lane) { choose_references(page, lane); }

  DEVICE void add(const u8* page, int, int lane) {
    u32 weights[GROUPS][COLUMNS][LANE_TOKENS];
    // Once more if references had to be chosen. A third time would help nobody: that is a logit that is not a number.
    // Zeros that the compiler does not know keep it from holding a tile in registers for what hardly ever happens.
    if (!take_weights(page, lane, weights)) {
      choose_references(page + start[0], lane);
      take_weights(page + start[2], lane, weights);
    }
    #pragma unroll
    for (int group = 0; group < GROUPS; group++) add_values(group, page + KEY_BYTES, lane, weights[group]);
  }

  // The weights of a tile as operands, for each group of channels; their sum and those of offsets are added to what the
  // segment has. False, and nothing added, if a weight of any query head does not fit.
  DEVICE bool take_weights(const u8* page, int lane, u32 (&weights)[GROUPS][COLUMNS][LANE_TOKENS]) {
    const u8* scales = page + SCALES_AT + GROUPS * GROUP_BYTES;
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
        if (half == 0 && inner % 2 == 0) chunk = *(const uint4*)(values + lane_load(i / 2, lane));
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
    const u8* scales = page + SCALES_AT + GROUPS * GROUP_BYTES;
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
