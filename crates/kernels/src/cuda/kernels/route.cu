// Which experts a row goes to, as `routing.rs` defines it, and the rows of each expert. A warp chooses for a row; then one block
// sorts all choices by expert and cuts them into jobs, an expert and some of its rows each.

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int MOST_EXPERTS = 512;
constexpr int SOFTMAX = 0, SIGMOID = 1, SOFTMAX_OF_CHOSEN = 2;
#define NEGATIVE_INFINITY __int_as_float(0xff800000)
#define NOT_A_NUMBER __int_as_float(0x7fc00000)

struct Choice {
  int expert;
  float weight;
};
struct Job {
  int expert, first, count, padding;  // rows of `order`
};

struct Arguments {
  const float* logits;      // [row][experts]
  const float* correction;  // or null
  Choice* choices;          // [row][top_k]
  int* order;               // choices sorted by expert
  Job* jobs;
  int* job_count;
  int rows, experts, top_k, scores, groups, chosen_groups, normalise;
  int job_rows;             // of a job, at most
  float scale;
};

// The largest number of a warp and where it is; the lowest place on a tie. No number has place -1.
DEVICE void best_of_warp(float& value, int& place) {
  for (int step = 16; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(ALL_LANES, value, step);
    const int other_place = __shfl_xor_sync(ALL_LANES, place, step);
    const bool better = other_place >= 0 && (place < 0 || other > value || (other == value && other_place < place));
    if (better) value = other, place = other_place;
  }
}

DEVICE float over_warp(float x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
  return x;
}

// Leaves only the experts of the best groups among those to choose from. A group is as good as its two best experts together.
DEVICE void keep_best_groups(const Arguments& a, float* choosing, int lane) {
  const int size = a.experts / a.groups;
  float good = NEGATIVE_INFINITY;
  if (lane < a.groups) {
    float first = NEGATIVE_INFINITY, second = NEGATIVE_INFINITY;
    for (int i = 0; i < size; i++) {
      const float x = choosing[lane * size + i];
      if (x > first) second = first, first = x;
      else if (x > second) second = x;
    }
    good = size > 1 ? first + second : first;
  }
  bool kept = false, candidate = lane < a.groups;
  for (int i = 0; i < a.chosen_groups; i++) {
    float value = good;
    int place = candidate ? lane : -1;
    best_of_warp(value, place);
    if (place == lane) kept = true, candidate = false;
  }
  if (lane < a.groups && !kept)
    for (int i = 0; i < size; i++) choosing[lane * size + i] = NOT_A_NUMBER;
  __syncwarp();
}

// The choices of one row. `choosing` is memory for a number of each expert; NaN there cannot be chosen.
DEVICE void choose(const Arguments& a, int row, float* scores, float* choosing, int lane) {
  const float* logits = a.logits + (long long)row * a.experts;
  Choice* choices = a.choices + row * a.top_k;
  bool bad = false;
  float largest = NEGATIVE_INFINITY;
  for (int e = lane; e < a.experts; e += 32) {
    const float x = logits[e];
    // Compared as bits, because numbers are assumed to be finite otherwise.
    bad |= (__float_as_uint(x) & 0x7fffffffu) > 0x7f800000u;
    largest = fmaxf(largest, x);
    scores[e] = x;
  }
  for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, step));
  bad = __any_sync(ALL_LANES, bad) || (a.scores == SOFTMAX && (__float_as_uint(largest) & 0x7fffffffu) == 0x7f800000u);
  if (bad) {
    for (int i = lane; i < a.top_k; i += 32) choices[i] = {i, NOT_A_NUMBER};
    return;
  }
  float sum = 0.0f;
  for (int e = lane; e < a.experts; e += 32) {
    if (a.scores == SOFTMAX) sum += scores[e] = __expf(scores[e] - largest);
    if (a.scores == SIGMOID) scores[e] = 1.0f / (1.0f + __expf(-scores[e]));
  }
  if (a.scores == SOFTMAX) {
    sum = over_warp(sum);
    for (int e = lane; e < a.experts; e += 32) scores[e] /= sum;
  }
  for (int e = lane; e < a.experts; e += 32) choosing[e] = a.correction ? scores[e] + a.correction[e] : scores[e];
  __syncwarp();
  if (a.groups > 1) keep_best_groups(a, choosing, lane);
  float first = 0.0f, total = 0.0f;
  for (int i = 0; i < a.top_k; i++) {
    float value = 0.0f;
    int place = -1;
    for (int e = lane; e < a.experts; e += 32) {
      const float x = choosing[e];
      if ((__float_as_uint(x) & 0x7fffffffu) <= 0x7f800000u && (place < 0 || x > value)) value = x, place = e;
    }
    best_of_warp(value, place);
    float weight = place >= 0 ? scores[place] : NOT_A_NUMBER;
    if (i == 0) first = weight;
    if (a.scores == SOFTMAX_OF_CHOSEN) weight = __expf(weight - first);
    total += weight;
    if (lane == 0) {
      choices[i] = {max(place, 0), weight};
      if (place >= 0) choosing[place] = NOT_A_NUMBER;
    }
    __syncwarp();
  }
  const float factor = (a.normalise || a.scores == SOFTMAX_OF_CHOSEN ? 1.0f / (total + 1e-20f) : 1.0f) * a.scale;
  for (int i = lane; i < a.top_k; i += 32) choices[i].weight *= factor;
}

// Sorts the choices of all rows by expert, and makes jobs of them. One block.
DEVICE void sort(const Arguments& a, int* counts, int* firsts) {
  const int pairs = a.rows * a.top_k;
  for (int e = threadIdx.x; e < a.experts; e += THREADS) counts[e] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < pairs; i += THREADS) atomicAdd(&counts[a.choices[i].expert], 1);
  __syncthreads();
  if (threadIdx.x == 0) {
    int next = 0, jobs = 0;
    for (int e = 0; e < a.experts; e++) {
      firsts[e] = next;
      for (int at = 0; at < counts[e]; at += a.job_rows) a.jobs[jobs++] = {e, next + at, min(a.job_rows, counts[e] - at), 0};
      next += counts[e];
    }
    *a.job_count = jobs;
  }
  __syncthreads();
  // Columns of a product do not depend on one another, so it does not matter in which order rows come.
  for (int i = threadIdx.x; i < pairs; i += THREADS) a.order[atomicAdd(&firsts[a.choices[i].expert], 1)] = i;
}

extern "C" __global__ void __launch_bounds__(THREADS) choose_experts(const __grid_constant__ Arguments a) {
  __shared__ float scores[WARPS][MOST_EXPERTS], choosing[WARPS][MOST_EXPERTS];
  let_next_launch_begin();
  wait_for_launches();
  const int warp = threadIdx.x / 32, row = blockIdx.x * WARPS + warp;
  if (row < a.rows) choose(a, row, scores[warp], choosing[warp], threadIdx.x % 32);
}

extern "C" __global__ void __launch_bounds__(THREADS) sort_choices(const __grid_constant__ Arguments a) {
  __shared__ int counts[MOST_EXPERTS], firsts[MOST_EXPERTS];
  let_next_launch_begin();
  wait_for_launches();
  sort(a, counts, firsts);
}

// Both at once, for few rows.
extern "C" __global__ void __launch_bounds__(THREADS) route(const __grid_constant__ Arguments a) {
  __shared__ float scores[WARPS][MOST_EXPERTS], choosing[WARPS][MOST_EXPERTS];
  __shared__ int counts[MOST_EXPERTS], firsts[MOST_EXPERTS];
  let_next_launch_begin();
  wait_for_launches();
  const int warp = threadIdx.x / 32;
  for (int row = warp; row < a.rows; row += WARPS) choose(a, row, scores[warp], choosing[warp], threadIdx.x % 32);
  __syncthreads();
  sort(a, counts, firsts);
}

struct CombineArguments {
  const Choice* choices;   // [row][top_k]
  const float* products;   // [row][top_k][columns]
  float* hidden;           // [row][columns]
  int top_k, columns;
};

// hidden += the weighted outputs of the chosen experts, best first.
extern "C" __global__ void __launch_bounds__(THREADS) combine(const __grid_constant__ CombineArguments a) {
  let_next_launch_begin();
  wait_for_launches();
  const int row = blockIdx.y, column = blockIdx.x * THREADS + threadIdx.x;
  if (column >= a.columns) return;
  const Choice* choices = a.choices + row * a.top_k;
  const float* products = a.products + (long long)row * a.top_k * a.columns + column;
  float sum = 0.0f;
  for (int i = 0; i < a.top_k; i++) sum = fmaf(choices[i].weight, __ldcg(products + (long long)i * a.columns), sum);
  a.hidden[(long long)row * a.columns + column] += sum;
}
