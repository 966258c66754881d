// What comes after attention, in place. Outputs are sums of values as pages hold them: out = row * matrix + mean takes them back
// to the basis of values. A learned sink is a logit without a value: the weights of a row's values add up to one less its share,
// with which the row and the mean are multiplied. A block has VECTORS rows of one KV head and a thread for every channel.

constexpr int VECTORS = 16, WARPS = HEAD_DIM / 32;

struct Arguments {
  float* rows;             // [row][query head][channel]
  const float* matrices;   // [KV head][channel of the pages][channel of the outputs], or null
  const float* means;      // [KV head][channel], or null
  const float* totals;     // [row][query head]: logarithm (base 2) of the sum of a row's weights; null without sinks
  const float* sinks;      // [query head]
  const float* mean_keys;  // [KV head][channel]: what keys are stored less of, in the basis of the pages; or null
  const float* queries;    // [row][query_stride]
  long long query_stride;
  int row_count, group;
  float scale;             // of logits
};

// What the weights of a row's values add up to. One warp.
DEVICE float share_of_values(const Arguments& a, int row, int head, int query_head, int heads, int lane) {
  float missing = 0.0f;
  if (a.mean_keys) {
    const float *query = a.queries + row * a.query_stride + query_head * HEAD_DIM, *mean = a.mean_keys + head * HEAD_DIM;
    for (int channel = lane; channel < HEAD_DIM; channel += 32) missing = fmaf(query[channel], mean[channel], missing);
    for (int step = 16; step > 0; step /= 2) missing += __shfl_xor_sync(ALL_LANES, missing, step);
  }
  const float sink = (a.sinks[query_head] - missing * a.scale) * 1.44269504f;
  // Beyond 2^126 nothing of the values is left.
  return 1.0f / (1.0f + exp2f(fminf(sink - a.totals[(long long)row * heads + query_head], 126.0f)));
}

extern "C" __global__ void __launch_bounds__(HEAD_DIM) undo(const __grid_constant__ Arguments a) {
  __shared__ float input[VECTORS][HEAD_DIM], shares[VECTORS];
  const int head = blockIdx.y, heads = gridDim.y * a.group, channel = threadIdx.x, first = blockIdx.x * VECTORS;
  const int count = min(VECTORS, a.row_count * a.group - first);
  auto row_of = [&](int v) { return (first + v) / a.group; };
  auto query_head_of = [&](int v) { return head * a.group + (first + v) % a.group; };
  auto vector = [&](int v) { return a.rows + ((long long)row_of(v) * heads + query_head_of(v)) * HEAD_DIM; };
  for (int v = threadIdx.x / 32; v < VECTORS; v += WARPS) {
    float share = 1.0f;
    if (a.totals && v < count) share = share_of_values(a, row_of(v), head, query_head_of(v), heads, threadIdx.x % 32);
    if (threadIdx.x % 32 == 0) shares[v] = share;
  }
  __syncthreads();
  for (int v = 0; v < count; v++) input[v][channel] = vector(v)[channel] * shares[v];
  for (int v = count; v < VECTORS; v++) input[v][channel] = 0.0f;
  __syncthreads();
  float sums[VECTORS];
  const float mean = a.means ? a.means[head * HEAD_DIM + channel] : 0.0f;
  #pragma unroll
  for (int v = 0; v < VECTORS; v++) sums[v] = mean * shares[v] + (a.matrices ? 0.0f : input[v][channel]);
  if (a.matrices) {
    const float* matrix = a.matrices + (long long)head * HEAD_DIM * HEAD_DIM + channel;
    #pragma unroll 4
    for (int i = 0; i < HEAD_DIM; i++) {
      const float weight = __ldg(matrix + i * HEAD_DIM);
      #pragma unroll
      for (int v = 0; v < VECTORS; v++) sums[v] = fmaf(input[v][i], weight, sums[v]);
    }
  }
  #pragma unroll
  for (int v = 0; v < VECTORS; v++)
    if (v < count) vector(v)[channel] = sums[v];
}
