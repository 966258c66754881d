// Root-mean-square norms that are launches of their own, one block for each row: of neighbouring columns in place, as of queries
// or keys of all heads together, or of what a block adds to the hidden rows. And a factor on all numbers.

constexpr int THREADS = 256;

struct Arguments {
  float* x;           // [row][stride]
  const float* gain;  // [column]
  float* sum;         // `add_normed`: what the result is added to, [row][stride]
  long long stride;   // `scale`: how many numbers there are
  float epsilon;      // `scale`: the factor
  int first_column, columns;
};

// What the columns of a row are multiplied with, but for the gain. Every thread of the block calls it.
DEVICE float inverse_norm(const float* x, const Arguments& a) {
  __shared__ float sums[THREADS / 32];
  float squares = 0.0f;
  for (int i = threadIdx.x; i < a.columns; i += THREADS) squares = fmaf(x[i], x[i], squares);
  for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(ALL_LANES, squares, step);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = squares;
  __syncthreads();
  squares = 0.0f;
  for (int i = 0; i < THREADS / 32; i++) squares += sums[i];
  return rsqrtf(squares / (float)a.columns + a.epsilon);
}

extern "C" __global__ void __launch_bounds__(THREADS) norm_columns(const __grid_constant__ Arguments a) {
  let_next_launch_begin();
  wait_for_launches();
  float* x = a.x + blockIdx.x * a.stride + a.first_column;
  const float inverse = inverse_norm(x, a);
  for (int i = threadIdx.x; i < a.columns; i += THREADS) x[i] = x[i] * inverse * a.gain[i];
}

extern "C" __global__ void __launch_bounds__(THREADS) add_normed(const __grid_constant__ Arguments a) {
  let_next_launch_begin();
  wait_for_launches();
  const float* x = a.x + blockIdx.x * a.stride;
  float* sum = a.sum + blockIdx.x * a.stride;
  const float inverse = inverse_norm(x, a);
  for (int i = threadIdx.x; i < a.columns; i += THREADS) sum[i] += x[i] * inverse * a.gain[i];
}

extern "C" __global__ void __launch_bounds__(THREADS) scale(const __grid_constant__ Arguments a) {
  let_next_launch_begin();
  wait_for_launches();
  const long long i = blockIdx.x * (long long)THREADS + threadIdx.x;
  if (i < a.stride) a.x[i] *= a.epsilon;
}
