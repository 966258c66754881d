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

// The same for experts, some of whom clamp both. Comparisons keep a NaN.
DEVICE float activated(int activation, float alpha, float limit, float gate, float up) {
  if (activation != CLAMPED) return gated(activation, gate, up);
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  return gate / (1.0f + __expf(-alpha * gate)) * (up + 1.0f);
}

// The sum of one number and the largest of another over all threads of a block.
DEVICE float2 sum_and_largest(float sum, float largest, float2* shared) {
  for (int step = 16; step > 0; step /= 2) {
    sum += __shfl_xor_sync(ALL_LANES, sum, step);
    largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, step));
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = make_float2(sum, largest);
  __syncthreads();
  float2 all = shared[0];
  for (int i = 1; i < THREADS / 32; i++) all = make_float2(all.x + shared[i].x, fmaxf(all.y, shared[i].y));
  return all;
}

// The power of two that brings numbers up to `largest` below 2^15.
DEVICE float power_below(float largest) {
  const u32 exponent = __float_as_uint(largest) >> 23;
  return exponent > 15 && exponent < 254 ? __uint_as_float((127 + 127 + 14 - exponent) << 23) : 1.0f;
}

// Eight neighbouring numbers.
struct Eight {
  float x[8];
  // From a row of a multiple of four numbers; zeros beyond its end.
  DEVICE static Eight load(const float* from, int first, int columns) {
    Eight v;
    #pragma unroll
    for (int i = 0; i < 8; i += 4) {
      float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (first + i < columns) four = __ldcg((const float4*)(from + first + i));
      v.x[i] = four.x, v.x[i + 1] = four.y, v.x[i + 2] = four.z, v.x[i + 3] = four.w;
    }
    return v;
  }
  DEVICE float largest(float most) const {
    #pragma unroll
    for (int i = 0; i < 8; i++) most = fmaxf(most, fabsf(x[i]));
    return most;
  }
  DEVICE float squares(float sum) const {
    #pragma unroll
    for (int i = 0; i < 8; i++) sum = fmaf(x[i], x[i], sum);
    return sum;
  }
  DEVICE void gate(int activation, const Eight& up) {
    #pragma unroll
    for (int i = 0; i < 8; i++) x[i] = gated(activation, x[i], up.x[i]);
  }
  DEVICE void multiply(const Eight& other) {
    #pragma unroll
    for (int i = 0; i < 8; i++) x[i] *= other.x[i];
  }
};

// Writes eight neighbouring inputs of a row as operands, times `factor`. `out` is where column tiles of `tile_rows` rows lie
// `tiles` to 64 inputs, and `g` which row of the first of them this is; `sums` are those of f16. Two neighbouring lanes, which
// have 16 inputs, call it together.
template <bool WIDE>
DEVICE void write_operands(u8* out, float* sums, float factor, int tiles, int tile_rows, int g, int first, const Eight& v) {
  const int step = first / 64, j = first % 64 / 16, half = first % 16 / 8;
  u8* at = out + ((long long)step * tiles * 2 + j / 2) * (tile_rows * 64) + g * 64 + j % 2 * 8 + half * 4;
  float sum = 0.0f;
  #pragma unroll
  for (int i = 0; i < 4; i++) {
    const float low = v.x[2 * i] * factor, high = v.x[2 * i + 1] * factor;
    const u32 pair = WIDE ? float_to_bf16(low) | float_to_bf16(high) << 16 : float_to_half(low) | float_to_half(high) << 16;
    *(u32*)(at + i * 16) = pair;
    if (!WIDE) sum += half_to_float(pair & 0xffffu) + half_to_float(pair >> 16);
  }
  if (WIDE) return;
  sum += __shfl_xor_sync(3u << (threadIdx.x % 32 & ~1), sum, 1);
  if (half == 0) sums[((long long)step * tiles * 4 + j) * tile_rows + g] = sum;
}

// One row, read by the threads of a block in groups of eight neighbouring inputs. The first groups of a thread stay in registers.
struct Row {
  static constexpr int KEPT = 6, ROUND = THREADS * 8;
  const float* x;
  const float* gain;
  int kind, columns, end, activation;  // end: a multiple of 64, inputs beyond the row are zero
  float inverse;
  float power;  // for f16: what brings the largest number of the row below 2^15
  Eight kept[KEPT];

  // A group later than those that are kept, with the gains of the norm; `squares` are of numbers without them.
  DEVICE Eight later(int first, float& squares) const {
    Eight v = Eight::load(x, first, columns);
    if (kind == GATED && !FUSED) v.gate(activation, Eight::load(x + columns, first, columns));
    if (kind == NORMED) {
      squares = v.squares(squares);
      v.multiply(Eight::load(gain, first, columns));
    }
    return v;
  }
  // Calls `visit` with each group of this thread and its first input. Threads of a warp go through it together.
  template <class F>
  DEVICE void each(F visit) const {
    #pragma unroll
    for (int i = 0; i < KEPT; i++)
      if (i * ROUND + (int)threadIdx.x * 8 < end) visit(i * ROUND + threadIdx.x * 8, kept[i]);
    float squares;
    #pragma unroll 1
    for (int first = KEPT * ROUND + threadIdx.x * 8; first < end; first += ROUND) visit(first, later(first, squares));
  }

  // Reads the row and finds its norm, and its power where it becomes f16. Every thread of the block calls it.
  DEVICE Row(const Source& s, int row, int steps, bool f16, float2* shared)
      : x(s.x + (s.rows ? s.rows[row] : row) * s.stride), gain(s.gain), kind(s.kind), columns(s.columns), end(steps * 64),
        activation(s.activation), inverse(1.0f), power(1.0f) {
    const int mine = threadIdx.x * 8;
    // All loads first, so that they wait for memory together.
    #pragma unroll
    for (int i = 0; i < KEPT; i++) kept[i] = Eight::load(x, i * ROUND + mine, columns);
    float squares = 0.0f, largest = 0.0f;
    // Products that prepare rows themselves end with the gate where there is one.
    if (kind == GATED && !FUSED) {
      #pragma unroll
      for (int i = 0; i < KEPT; i++) kept[i].gate(activation, Eight::load(x + columns, i * ROUND + mine, columns));
    } else if (kind == NORMED) {
      Eight gains[KEPT];
      #pragma unroll
      for (int i = 0; i < KEPT; i++) gains[i] = Eight::load(gain, i * ROUND + mine, columns);
      #pragma unroll
      for (int i = 0; i < KEPT; i++) {
        squares = kept[i].squares(squares);
        kept[i].multiply(gains[i]);
      }
    } else if (!f16) {
      return;
    }
    #pragma unroll
    for (int i = 0; i < KEPT; i++) largest = kept[i].largest(largest);
    #pragma unroll 1
    for (int first = KEPT * ROUND + mine; first < end; first += ROUND) largest = later(first, squares).largest(largest);
    const float2 all = sum_and_largest(squares, largest, shared);
    if (kind == NORMED) inverse = rsqrtf(all.x / (float)columns + s.epsilon);
    if (f16) power = power_below(all.y * inverse);
  }

  // Writes the operands of a row, see `write_operands`.
  template <bool WIDE>
  DEVICE void write(u8* out, float* sums, int tiles, int tile_rows, int g) const {
    const float factor = WIDE ? inverse : inverse * power;
    each([&](int first, const Eight& v) { write_operands<WIDE>(out, sums, factor, tiles, tile_rows, g, first, v); });
  }
  // What results are multiplied with where activations are f16.
  DEVICE float factor() const { return 1.0f / (power * SCALE_UNIT); }
};
