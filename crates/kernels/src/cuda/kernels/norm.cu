// A root-mean-square norm of neighbouring columns of every row, in place: queries or keys of all heads together. One block for
// each row.

constexpr int THREADS = 256;

struct Arguments {
  float* x;           // [row][stride]
  const float* gain;  // [column]
  long long stride;
  float epsilon;
  int first_column, columns;
};

extern "C" __global__ void __launch_bounds__(THREADS) norm_columns(const __grid_constant__ Arguments a) {
  __shared__ float sums[THREADS / 32];
  let_next_launch_begin();
  wait_for_launches();
  float* x = a.x + blockIdx.x * a.stride + a.first_column;
  float squares = 0.0f;
  for (int i = threadIdx.x; i < a.columns; i += THREADS) squares = fmaf(x[i], x[i], squares);
  for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(ALL_LANES, squares, step);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = squares;
  __syncthreads();
  squares = 0.0f;
  for (int i = 0; i < THREADS / 32; i++) squares += sums[i];
  const float inverse = rsqrtf(squares / (float)a.columns + a.epsilon);
  for (int i = threadIdx.x; i < a.columns; i += THREADS) x[i] = x[i] * inverse * a.gain[i];
}
