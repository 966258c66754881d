// Tiles of bf16 or of 8-bit floats (E4M3, widened to f16 with a shift: a factor of 2^8 that the scales take). Queries and
// weights are split into a number and its rounding error. With up to eight rows the errors are rows 8-15 of the same
// MMA; with more, a second MMA adds them.

DEVICE void mma_bf16_short(float (&c)[4], u32 a0, u32 a1, u32 b0) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(b0));
}
// Four E4M3 bytes as two pairs of f16, 2^8 times too small: bytes 0 and 2, bytes 1 and 3.
DEVICE void widen(u32 word, u32& even, u32& odd) {
  even = ((word & 0x007f007fu) << 7) | ((word & 0x00800080u) << 8);
  odd = ((word & 0x7f007f00u) >> 1) | (word & 0x80008000u);
}

// Four squares of a bf16 page that lie side by side: of each a lane has two numbers of row lane / 4.
DEVICE uint4 squares(const u8* first, int lane) {
  uint4 words;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
      : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w) : "r"(shared_address(first) + lane * 16) : "memory");
  return words;
}

template <bool FP8>
struct Floats {
  static constexpr bool CENTRED = false;
  static constexpr int TOKENS = FP8 ? SEALED_TILE_TOKENS : EXACT_TILE_TOKENS;
  static constexpr int TILES_PER_PAGE = PAGE_TOKENS / TOKENS;
  static constexpr int SIDE_BYTES = FP8 ? SEALED_KEY_BYTES : EXACT_SIDE_BYTES;
  static constexpr int TILE_BYTES = FP8 ? SEALED_TILE_BYTES : EXACT_TILE_BYTES;
  static constexpr int TOKEN_TILES = TOKENS / 8;
  static constexpr int CHANNEL_STEPS = HEAD_DIM / 16;
  static constexpr int CHANNEL_TILES = HEAD_DIM / 8;
  static constexpr int LANE_TOKENS = 2 * TOKEN_TILES;
  // Query heads of a lane: one of eight of each.
  static constexpr int SLICES = ROW_TILES;

  // [0] alone with up to eight rows: numbers in rows 0-7, errors in rows 8-15. Otherwise numbers in [0], errors in [1].
  u32 q[ROW_TILES][CHANNEL_STEPS][4];
  float q_step[ROW_TILES], largest[ROW_TILES], total[ROW_TILES];
  // The largest weight so far: weights are divided by it, so that they fit f16.
  float bound[ROW_TILES];
  float sums[CHANNEL_TILES][4];

  DEVICE void begin(const float* queries, int rows, float scale, int lane) {
    const int g = lane >> 2, t = lane & 3;
    #pragma unroll
    for (int tile = 0; tile < ROW_TILES; tile++) {
      const int row = tile * 8 + g;
      // Four channels of each step.
      float4 values[CHANNEL_STEPS];
      float most = FP8 ? 0.0f : 1.0f;
      #pragma unroll
      for (int step = 0; step < CHANNEL_STEPS; step++) {
        const float* sixteen = queries + row * HEAD_DIM + step * 16;
        values[step] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (row < rows && FP8) values[step] = *(const float4*)(sixteen + t * 4);
        if (row < rows && !FP8) {
          const float2 first = *(const float2*)(sixteen + t * 2), second = *(const float2*)(sixteen + 8 + t * 2);
          values[step] = make_float4(first.x, first.y, second.x, second.y);
        }
        const float4& four = values[step];
        if (FP8)
          most = fmaxf(most, fmaxf(fmaxf(fabsf(four.x), fabsf(four.y)), fmaxf(fabsf(four.z), fabsf(four.w))));
      }
      if (FP8) most = quad_max(most);
      const float inverse = most < 1e-30f ? 0.0f : 1.0f / most;
      q_step[tile] = scale * most * (FP8 ? 256.0f : 1.0f);
      largest[tile] = NEGATIVE_INFINITY;
      total[tile] = 0.0f;
      bound[tile] = 0.0f;
      #pragma unroll
      for (int step = 0; step < CHANNEL_STEPS; step++)
        #pragma unroll
        for (int part = 0; part < 2; part++) {
          const float4& four = values[step];
          const float x = FP8 ? (part ? four.y : four.x) : part ? four.z : four.x;
          const float y = FP8 ? (part ? four.w : four.z) : part ? four.w : four.y;
          u32 rounded, rest;
          split<FP8>(x * inverse, y * inverse, rounded, rest);
          if (ROW_TILES == 1) {
            q[0][step][part * 2] = rounded;
            q[0][step][part * 2 + 1] = rest;
          } else {
            q[0][step][part * 2 + tile] = rounded;
            q[ROW_TILES - 1][step][part * 2 + tile] = rest;
          }
        }
    }
    #pragma unroll
    for (int i = 0; i < CHANNEL_TILES; i++)
      #pragma unroll
      for (int e = 0; e < 4; e++) sums[i][e] = 0.0f;
  }

  DEVICE void prime(const u8*, int) {}

  // `visible`: tokens of the tile that are there. What was never written may be NaN.
  DEVICE void add(const u8* page, int visible, int lane) {
    const int t = lane & 3;
    float logit[ROW_TILES][LANE_TOKENS];
    float value_scale[LANE_TOKENS];
    uint4 chunk;
    #pragma unroll
    for (int j = 0; j < TOKEN_TILES; j++) {
      // Two chains, so that an MMA does not wait for the one before it.
      float c[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};
      #pragma unroll
      for (int step = 0; step < CHANNEL_STEPS; step++) {
        u32 b0, b1;
        if (FP8) {
          const int word = j * CHANNEL_STEPS + step;
          if (word % 4 == 0) chunk = *(const uint4*)(page + lane_load(word / 4, lane));
          widen(word_of(chunk, word % 4), b0, b1);
        } else {
          if (step % 2 == 0) chunk = squares(page + step / 2 * LOAD_BYTES, lane);
          b0 = step % 2 ? chunk.z : chunk.x;
          b1 = step % 2 ? chunk.w : chunk.y;
        }
        #pragma unroll
        for (int part = 0; part < ROW_TILES; part++) {
          if (FP8) mma_f16(c[step & 1], q[part][step], b0, b1);
          else mma_bf16(c[step & 1], q[part][step], b0, b1);
        }
      }
      float2 key_scale = make_float2(1.0f, 1.0f);
      if (FP8) {
        const u8* scales = page + 2 * SIDE_BYTES + j * 16 + t * 4;
        key_scale = scale_pair(*(const u32*)scales);
        const float2 pair = scale_pair(*(const u32*)(scales + 2 * TOKENS));
        value_scale[2 * j] = pair.x;
        value_scale[2 * j + 1] = pair.y;
      }
      #pragma unroll
      for (int e = 0; e < 2; e++) {
        const float scale = e ? key_scale.y : key_scale.x;
        const bool there = FP8 || 2 * t + e < visible;
        const float low = c[0][e] + c[1][e], high = c[0][e + 2] + c[1][e + 2];
        if (ROW_TILES == 1) {
          logit[0][2 * j + e] = there ? (low + high) * (q_step[0] * scale) : NEGATIVE_INFINITY;
        } else {
          logit[0][2 * j + e] = there ? low * (q_step[0] * scale) : NEGATIVE_INFINITY;
          logit[ROW_TILES - 1][2 * j + e] =
              there ? high * (q_step[ROW_TILES - 1] * scale) : NEGATIVE_INFINITY;
        }
      }
    }
    float rescale[ROW_TILES];
    bool changed = false;
    #pragma unroll
    for (int tile = 0; tile < ROW_TILES; tile++) {
      float most = logit[tile][0];
      #pragma unroll
      for (int i = 1; i < LANE_TOKENS; i++) most = fmaxf(most, logit[tile][i]);
      const float larger = fmaxf(largest[tile], quad_max(most));
      rescale[tile] = exp2_fast(largest[tile] - larger);
      changed |= larger > largest[tile];
      largest[tile] = larger;
      total[tile] *= rescale[tile];
      #pragma unroll
      for (int i = 0; i < LANE_TOKENS; i++) {
        logit[tile][i] = exp2_fast(logit[tile][i] - larger);
        total[tile] += logit[tile][i];
      }
      if (FP8) {
        // The sums are in multiples of the bound: they shrink with it, not by themselves.
        bound[tile] *= rescale[tile];
        float heaviest = 0.0f;
        #pragma unroll
        for (int i = 0; i < LANE_TOKENS; i++) {
          logit[tile][i] *= value_scale[i];
          heaviest = fmaxf(heaviest, logit[tile][i]);
        }
        heaviest = quad_max(heaviest);
        const float now = heaviest > bound[tile] ? 1.25f * heaviest : bound[tile];
        rescale[tile] = now > 1e-30f ? bound[tile] / now : 0.0f;
        changed |= now > bound[tile];
        bound[tile] = now;
        const float inverse = now > 1e-30f ? 1.0f / now : 0.0f;
        #pragma unroll
        for (int i = 0; i < LANE_TOKENS; i++) logit[tile][i] *= inverse;
      }
    }
    if (__any_sync(ALL_LANES, changed)) {
      #pragma unroll
      for (int i = 0; i < CHANNEL_TILES; i++)
        #pragma unroll
        for (int e = 0; e < 4; e++) sums[i][e] *= rescale[e < 2 ? 0 : ROW_TILES - 1];
    }
    u32 weights[ROW_TILES][4] = {};
    #pragma unroll
    for (int tile = 0; tile < ROW_TILES; tile++)
      #pragma unroll
      for (int j = 0; j < TOKEN_TILES; j++) {
        u32 rounded, rest;
        split<FP8>(logit[tile][2 * j], logit[tile][2 * j + 1], rounded, rest);
        weights[0][2 * j + tile] = rounded;
        weights[ROW_TILES - 1][2 * j + (ROW_TILES == 1 ? 1 : tile)] = rest;
      }
    const u32 written = (2 * t < visible ? 0xffffu : 0u) | (2 * t + 1 < visible ? 0xffff0000u : 0u);
    #pragma unroll
    for (int i = 0; i < CHANNEL_TILES; i++) {
      if (i % 4 == 0) {
        const u8* values = page + SIDE_BYTES;
        chunk = FP8 ? *(const uint4*)(values + lane_load(i / 4, lane)) : squares(values + i / 4 * LOAD_BYTES, lane);
      }
      const u32 word = word_of(chunk, i % 4);
      if (!FP8 && ROW_TILES == 2) {
        // Numbers and errors are the two halves of one product with the same values twice.
        const u32 both[4] = {weights[0][0], weights[0][1], weights[1][0], weights[1][1]};
        mma_bf16(sums[i], both, word & written, word & written);
        continue;
      }
      #pragma unroll
      for (int part = 0; part < ROW_TILES; part++) {
        if (FP8) {
          u32 b0, b1;
          widen(word, b0, b1);
          mma_f16(sums[i], weights[part], b0, b1);
        } else {
          mma_bf16_short(sums[i], weights[part][0], weights[part][1], word & written);
        }
      }
    }
  }

  DEVICE static int row_of(int tile, int lane) { return tile * 8 + (lane >> 2); }
  DEVICE static bool leads(int lane) { return (lane & 3) == 0; }

  DEVICE float row_largest(int tile) const { return largest[tile]; }
  DEVICE float row_total(int tile) const { return quad_sum(total[tile]); }

  DEVICE void store(int tile, float factor, float* row, int lane) const {
    const float unit = FP8 ? 256.0f * bound[tile] * factor : factor;
    if (!row) return;
    #pragma unroll
    for (int i = 0; i < CHANNEL_TILES; i++) {
      const float (&c)[4] = sums[i];
      const float x = ROW_TILES == 1 ? c[0] + c[2] : tile == 0 ? c[0] : c[2];
      const float y = ROW_TILES == 1 ? c[1] + c[3] : tile == 0 ? c[1] : c[3];
      *(float2*)&row[i * 8 + 2 * (lane & 3)] = make_float2(x * unit, y * unit);
    }
  }
};
