// Outputs of attention from the basis of the pages back to the basis of values: out = row * matrix + mean, in place. A block
// has VECTORS rows of one KV head and a thread for every channel.

constexpr int VECTORS = 16;

struct Arguments {
  float* rows;            // [row][query head][channel]
  const float* matrices;  // [KV head][channel of the pages][channel of the outputs]
  const float* means;     // [KV head][channel], or null
  long long stride;
  int row_count, group;
};

extern "C" __global__ void __launch_bounds__(HEAD_DIM) undo(Arguments a) {
  __shared__ float input[VECTORS][HEAD_DIM];
  const int head = blockIdx.y, channel = threadIdx.x, first = blockIdx.x * VECTORS;
  const int count = min(VECTORS, a.row_count * a.group - first);
  auto vector = [&](int v) {
    return a.rows + (long long)((first + v) / a.group) * a.stride + (head * a.group + (first + v) % a.group) * HEAD_DIM;
  };
  for (int v = 0; v < count; v++) input[v][channel] = vector(v)[channel];
  for (int v = count; v < VECTORS; v++) input[v][channel] = 0.0f;
  __syncthreads();
  float sums[VECTORS];
  const float mean = a.means ? a.means[head * HEAD_DIM + channel] : 0.0f;
  #pragma unroll
  for (int v = 0; v < VECTORS; v++) sums[v] = mean;
  const float* matrix = a.matrices + (long long)head * HEAD_DIM * HEAD_DIM + channel;
  #pragma unroll 4
  for (int i = 0; i < HEAD_DIM; i++) {
    const float weight = __ldg(matrix + i * HEAD_DIM);
    #pragma unroll
    for (int v = 0; v < VECTORS; v++) sums[v] = fmaf(input[v][i], weight, sums[v]);
  }
  #pragma unroll
  for (int v = 0; v < VECTORS; v++)
    if (v < count) vector(v)[channel] = sums[v];
}
