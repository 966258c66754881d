// Activations before a product with weights: normed, gated or as they are, rounded, and put in the order in which lanes hold
// the second operand of a matrix instruction. One block for each row.
//
//   lane = 4 g + t of column tile n (rows 8 n + g of the batch) and step j (16 inputs) holds inputs 16 j + 2 t, + 1, + 8, + 9
//   [64 inputs][column tile][two steps][lane][step][4 numbers of 16 bits]
//
// bf16 weights take bf16. Codes take f16, with a power of two for every row that brings its largest number below 2^15, and
// with sums of every 16 inputs, which offsets are multiplied with.

constexpr int THREADS = 256;
constexpr int NORMED = 0, GATED = 1, PLAIN = 2;
constexpr int BF16_OPERANDS = 0, F16_OPERANDS = 1, BF16_ROWS = 2;

struct Arguments {
  const float* x;      // [row][stride]
  const float* gain;   // of the norm
  const u32* rows;     // which rows of x, or null for the first ones
  u8* out;
  float* sums;         // [64 inputs][column tile][16 inputs][8 rows]
  float* factors;      // [row]: what results are multiplied with
  long long stride;
  float epsilon;
  int source, format, columns, steps, column_tiles;
};

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

extern "C" __global__ void __launch_bounds__(THREADS) pack(Arguments a) {
  __shared__ float shared[THREADS / 32];
  let_next_launch_begin();
  wait_for_launches();
  const int row = blockIdx.x;
  const float* x = a.x + (a.rows ? a.rows[row] : row) * a.stride;
  // One input before the norm's common factor.
  auto input = [&](int column) {
    if (a.source == NORMED) return x[column] * a.gain[column];
    if (a.source == PLAIN) return x[column];
    const float gate = x[column];
    return gate / (1.0f + __expf(-gate)) * x[a.columns + column];
  };
  float inverse = 1.0f;
  if (a.source == NORMED) {
    float squares = 0.0f;
    for (int column = threadIdx.x; column < a.columns; column += THREADS) squares = fmaf(x[column], x[column], squares);
    squares = over_block(squares, shared, [](float p, float q) { return p + q; });
    inverse = rsqrtf(squares / (float)a.columns + a.epsilon);
  }
  if (a.format == BF16_ROWS) {
    u32* out = (u32*)a.out + (long long)row * (a.columns / 2);
    for (int pair = threadIdx.x; pair < a.columns / 2; pair += THREADS)
      out[pair] = float_to_bf16(input(2 * pair) * inverse) | float_to_bf16(input(2 * pair + 1) * inverse) << 16;
    return;
  }
  float power = 1.0f;
  if (a.format == F16_OPERANDS) {
    float largest = 0.0f;
    for (int column = threadIdx.x; column < a.columns; column += THREADS) largest = fmaxf(largest, fabsf(input(column) * inverse));
    largest = over_block(largest, shared, [](float p, float q) { return fmaxf(p, q); });
    // 2^15 over the power of two above the largest.
    const u32 exponent = __float_as_uint(largest) >> 23;
    if (exponent > 15 && exponent < 254) power = __uint_as_float((127 + 127 + 14 - exponent) << 23);
    if (threadIdx.x == 0) a.factors[row] = 1.0f / (power * SCALE_UNIT);
  } else if (threadIdx.x == 0) {
    a.factors[row] = 1.0f;
  }
  const int tile = row / 8, g = row % 8;
  for (int first = 0; first < a.steps * 32; first += THREADS) {
    const int pair = first + threadIdx.x, column = 2 * pair;
    if (pair >= a.steps * 32) break;  // whole warps: a step is 32 pairs
    const float2 value = make_float2(
        column < a.columns ? input(column) * inverse * power : 0.0f,
        column + 1 < a.columns ? input(column + 1) * inverse * power : 0.0f);
    const bool wide = a.format == BF16_OPERANDS;
    const u32 bits[2] = {wide ? float_to_bf16(value.x) : float_to_half(value.x), wide ? float_to_bf16(value.y) : float_to_half(value.y)};
    const int step = column / 64, j = column % 64 / 16, inner = column % 16;
    const long long at = (((long long)step * a.column_tiles + tile) * 2 + j / 2) * 512
        + (g * 4 + inner % 8 / 2) * 16 + j % 2 * 8 + inner / 8 * 4;
    *(u32*)(a.out + at) = bits[0] | bits[1] << 16;
    if (!wide) {
      float sum = half_to_float(bits[0]) + half_to_float(bits[1]);
      for (int lanes = 1; lanes < 8; lanes *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, lanes);
      if (inner == 0) a.sums[(((long long)step * a.column_tiles + tile) * 4 + j) * 8 + g] = sum;
    }
  }
}
