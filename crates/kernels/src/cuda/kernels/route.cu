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

// A number as one whose order is that of integers; 0 for a NaN, which cannot be chosen.
DEVICE u32 key_of(float x) {
  const u32 bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0;
  if (bits == 0x80000000u) return bits;  // both zeros are equal
  return bits >> 31 ? ~bits : bits | 0x80000000u;
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
  // Every lane knows the best of its own experts; whoever had the best of all looks for its next one.
  u32 key;
  int place;
  auto look = [&] {
    key = 0, place = -1;
    for (int e = lane; e < a.experts; e += 32) {
      const u32 its = key_of(choosing[e]);
      if (its > key) key = its, place = e;
    }
  };
  look();
  // Lane i has choice i.
  float mine = 0.0f, first = 0.0f, total = 0.0f;
  int expert = 0;
  for (int i = 0; i < a.top_k; i++) {
    const u32 best = __reduce_max_sync(ALL_LANES, key);
    const int best_place = best ? (int)__reduce_min_sync(ALL_LANES, key == best ? (u32)place : 0xffffffffu) : -1;
    float weight = best ? scores[best_place] : NOT_A_NUMBER;
    if (i == 0) first = weight;
    if (a.scores == SOFTMAX_OF_CHOSEN) weight = __expf(weight - first);
    total += weight;
    if (lane == i) mine = weight, expert = max(best_place, 0);
    if (best && place == best_place) {
      choosing[place] = NOT_A_NUMBER;
      look();
    }
  }
  const float factor = (a.normalise || a.scores == SOFTMAX_OF_CHOSEN ? 1.0f / (total + 1e-20f) : 1.0f) * a.scale;
  if (lane < a.top_k) choices[lane] = {expert, mine * factor};
}

// The sums of two numbers over all threads of lower number, and over all threads. Every thread of the block calls it.
DEVICE int2 sums_before(int2 x, int2* shared, int2& all) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int2 sum = x;
  for (int step = 1; step < 32; step *= 2) {
    const int2 other = make_int2(__shfl_up_sync(ALL_LANES, sum.x, step), __shfl_up_sync(ALL_LANES, sum.y, step));
    if (lane >= step) sum.x += other.x, sum.y += other.y;
  }
  if (lane == 31) shared[warp] = sum;
  __syncthreads();
  int2 before = make_int2(sum.x - x.x, sum.y - x.y);
  all = make_int2(0, 0);
  for (int i = 0; i < WARPS; i++) {
    if (i < warp) before.x += shared[i].x, before.y += shared[i].y;
    all.x += shared[i].x, all.y += shared[i].y;
  }
  return before;
}

// Sorts the choices of all rows by expert, and makes jobs of them. One block.
DEVICE void sort(const Arguments& a, int* counts, int* firsts, int2* shared) {
  constexpr int EACH = MOST_EXPERTS / THREADS;
  const int pairs = a.rows * a.top_k;
  for (int e = threadIdx.x; e < MOST_EXPERTS; e += THREADS) counts[e] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < pairs; i += THREADS) atomicAdd(&counts[a.choices[i].expert], 1);
  __syncthreads();
  // Neighbouring experts of this thread: their choices and jobs.
  int2 mine = make_int2(0, 0), all;
  for (int e = threadIdx.x * EACH; e < (threadIdx.x + 1) * EACH; e++)
    mine.x += counts[e], mine.y += (counts[e] + a.job_rows - 1) / a.job_rows;
  int2 next = sums_before(mine, shared, all);
  for (int e = threadIdx.x * EACH; e < (threadIdx.x + 1) * EACH; e++) {
    firsts[e] = next.x;
    for (int at = 0; at < counts[e]; at += a.job_rows) a.jobs[next.y++] = {e, next.x + at, min(a.job_rows, counts[e] - at), 0};
    next.x += counts[e];
  }
  if (threadIdx.x == 0) *a.job_count = all.y;
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
  __shared__ int2 shared[WARPS];
  let_next_launch_begin();
  wait_for_launches();
  sort(a, counts, firsts, shared);
}

// Both at once, for few rows; without jobs for experts_few.cu.
extern "C" __global__ void __launch_bounds__(THREADS) route(const __grid_constant__ Arguments a) {
  __shared__ float scores[WARPS][MOST_EXPERTS], choosing[WARPS][MOST_EXPERTS];
  __shared__ int counts[MOST_EXPERTS], firsts[MOST_EXPERTS];
  __shared__ int2 shared[WARPS];
  let_next_launch_begin();
  wait_for_launches();
  const int warp = threadIdx.x / 32;
  for (int row = warp; row < a.rows; row += WARPS) choose(a, row, scores[warp], choosing[warp], threadIdx.x % 32);
  if (a.job_rows == 0) return;
  __syncthreads();
  sort(a, counts, firsts, shared);
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
