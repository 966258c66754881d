// Activations before a product with weights: normed, gated or as they are, rounded, and put in the order in which lanes hold
// the second operand of a matrix instruction. A whole block prepares a row, in the same order wherever it does so.
//
//   lane = 4 g + t of column tile n (rows 8 n + g of the batch) and step j (16 inputs) holds inputs 16 j + 2 t, + 1, + 8, + 9
//   [64 inputs][column tile][two steps][g][t][step][4 numbers of 16 bits]
//
// bf16 weights take bf16. Codes take f16, with a power of two for every row that brings its largest number below 2^15, and
// with sums of every 16 inputs, which offsets are multiplied with.

constexpr int THREADS = 256;
constexpr int NORMED = 0, GATED = 1, PLAIN = 2;
constexpr int SILU = 0, GELU_TANH = 1, CLAMPED = 2;

struct Source {
  const float* x;     // [row][stride]
  const float* gain;  // of the norm
  const u32* rows;    // which rows of x, or null for the first ones
  long long stride;
  float epsilon;
  int kind, columns;
  int activation;     // of a gate
};

// The activated gate times `up`. GELU by its tanh approximation is x / 2 (1 + tanh u), which is x times the sigmoid of 2 u.
DEVICE float gated(int activation, float gate, float up) {
  const float u = 0.7978845608f * (gate + 0.044715f * gate * gate * gate);
  return gate / (1.0f + __expf(activation == GELU_TANH ? -2.0f * u : -gate)) * up;
}

template <class F>
DEVICE float over_block(float x, float* shared, F join) {
  for (int step = 16; step > 0; step /= 2) x = join(x, __shfl_xor_sync(ALL_LANES, x, step));
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  x = shared[0];
  for (int i = 1; i < THREADS / 32; i++) x = join(x, shared[i]);
  return x;
}

// Four neighbouring numbers of a row whose length or place is no multiple of four; zeros beyond its end. Apart from the usual
// way, so that it takes no space there.
__device__ __noinline__ float4 four_singly(const float* from, int column, int columns) {
  float x[4];
  for (int i = 0; i < 4; i++) x[i] = column + i < columns ? from[column + i] : 0.0f;
  return make_float4(x[0], x[1], x[2], x[3]);
}

// One row, read by the threads of a block in groups of four neighbouring inputs. The first groups of a thread stay in registers.
struct Row {
  static constexpr int KEPT = 5;
  const float* x;
  const float* gain;
  int kind, columns, groups, activation;  // groups: a multiple of 16, inputs beyond the row are zero
  bool aligned;
  float inverse;
  float4 kept[KEPT];

  DEVICE float4 four(const float* from, int column) const {
    if (aligned && column < columns) return __ldcg((const float4*)(from + column));
    return four_singly(from, column, columns);
  }
  DEVICE float4 load(int group) const {
    const float4 v = four(x, 4 * group);
    // Products that prepare rows themselves end with the gate where there is one.
    if (kind != GATED || FUSED) return v;
    const float4 up = four(x + columns, 4 * group);
    return make_float4(gated(activation, v.x, up.x), gated(activation, v.y, up.y), gated(activation, v.z, up.z),
                       gated(activation, v.w, up.w));
  }
  DEVICE float4 scaled(int group, float4 v) const {
    if (kind != NORMED) return v;
    const float4 g = four(gain, 4 * group);
    return make_float4(v.x * g.x * inverse, v.y * g.y * inverse, v.z * g.z * inverse, v.w * g.w * inverse);
  }
  // Calls `visit` with each group of this thread and its inputs, unscaled. Threads of a warp go through it together.
  template <class F>
  DEVICE void each(F visit) const {
    #pragma unroll
    for (int i = 0; i < KEPT; i++)
      if (threadIdx.x + i * THREADS < groups) visit(threadIdx.x + i * THREADS, kept[i]);
    for (int group = threadIdx.x + KEPT * THREADS; group < groups; group += THREADS) visit(group, load(group));
  }

  // Reads the row and finds its norm. Every thread of the block calls it.
  DEVICE Row(const Source& s, int row, int steps, float* shared)
      : x(s.x + (s.rows ? s.rows[row] : row) * s.stride), gain(s.gain), kind(s.kind), columns(s.columns), groups(steps * 16),
        activation(s.activation), aligned(s.stride % 4 == 0 && s.columns % 4 == 0), inverse(1.0f) {
    #pragma unroll
    for (int i = 0; i < KEPT; i++) {
      const int group = threadIdx.x + i * THREADS;
      kept[i] = group < groups ? load(group) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    if (kind != NORMED) return;
    float squares = 0.0f;
    each([&](int, float4 v) { squares = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, squares)))); });
    squares = over_block(squares, shared, [](float p, float q) { return p + q; });
    inverse = rsqrtf(squares / (float)columns + s.epsilon);
  }

  // The power of two that brings the largest number of the row below 2^15. Every thread of the block calls it.
  DEVICE float f16_power(float* shared) const {
    float largest = 0.0f;
    each([&](int group, float4 v) {
      v = scaled(group, v);
      largest = fmaxf(fmaxf(fmaxf(largest, fabsf(v.x)), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
    });
    largest = over_block(largest, shared, [](float p, float q) { return fmaxf(p, q); });
    const u32 exponent = __float_as_uint(largest) >> 23;
    return exponent > 15 && exponent < 254 ? __uint_as_float((127 + 127 + 14 - exponent) << 23) : 1.0f;
  }

  // Writes the operands of a row. `out` is where column tiles of `tile_rows` rows lie `tiles` to 64 inputs, and `g` which
  // row of the first of them this is; `sums` are those of f16.
  template <bool WIDE>
  DEVICE void write(u8* out, float* sums, float power, int tiles, int tile_rows, int g) const {
    each([&](int group, float4 v) {
      v = scaled(group, v);
      const int column = 4 * group, step = column / 64, j = column % 64 / 16, inner = column % 16;
      u8* at = out + ((long long)step * tiles * 2 + j / 2) * (tile_rows * 64) + g * 64 + inner % 8 / 2 * 16 + j % 2 * 8 + inner / 8 * 4;
      if (WIDE) {
        *(u32*)at = float_to_bf16(v.x) | float_to_bf16(v.y) << 16;
        *(u32*)(at + 16) = float_to_bf16(v.z) | float_to_bf16(v.w) << 16;
        return;
      }
      const u32 bits[4] = {float_to_half(v.x * power), float_to_half(v.y * power), float_to_half(v.z * power), float_to_half(v.w * power)};
      *(u32*)at = bits[0] | bits[1] << 16;
      *(u32*)(at + 16) = bits[2] | bits[3] << 16;
      float sum = (half_to_float(bits[0]) + half_to_float(bits[1])) + (half_to_float(bits[2]) + half_to_float(bits[3]));
      for (int lanes = 1; lanes < 4; lanes *= 2) sum += __shfl_xor_sync(0xfu << (threadIdx.x % 32 & ~3), sum, lanes);
      if (inner == 0) sums[((long long)step * tiles * 4 + j) * tile_rows + g] = sum;
    });
  }
};
