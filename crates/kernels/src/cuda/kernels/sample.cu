// What a sampler needs to know of a row of logits, so that the row itself can stay on the card: its largest logit, sums of
// weights, the logits that may be drawn, or the token where the sums reach a draw. One block for each row.

constexpr int THREADS = 1024;
constexpr u32 NONE = 0xffffffffu;
constexpr int BINS = 2048;  // of 11 bits at a time

struct Row {
  float temperature, draw;
  int vocabulary;
  int walks;   // whether a token is drawn from all of them, in the order of their numbers
  int wanted;  // how many of the largest logits are listed, 0 for none
  int plain;   // whether weights are summed at temperature 1 too
  u32 given;   // a token whose logit is asked for, or NONE
};

struct Result {
  u32 token;    // the largest logit, the drawn token or the given one
  u32 bad;      // the first logit that is NaN or positive infinity, or NONE
  float largest, logit;  // logit: of the token
  u32 listed;   // how many were listed; more than there is room for if they could not be
  u32 padding;
  double total, plain_total;
};

struct Arguments {
  const float* logits;
  const Row* rows;
  Result* results;
  uint2* lists;  // [row][list_room]: token, bits of its logit
  long long stride;
  int list_room;
};

// An order of floats as an order of numbers, in which both zeros are the same.
DEVICE u32 ordered(float x) {
  const u32 bits = x == 0.0f ? 0 : __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Sums over all threads, added in the order of their numbers within warps and of the warps.
DEVICE double sum_over_block(double x, double* shared) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  double sum = 0.0;
  for (int i = 0; i < THREADS / 32; i++) sum += shared[i];
  return sum;
}

// Draws from all tokens in the order of their numbers: every thread has a run of them.
DEVICE void walk(const float* logits, const Row& row, float largest, double* shared, Result& result) {
  __shared__ u32 found, last;
  const int run = (row.vocabulary + THREADS - 1) / THREADS;
  const int begin = min((int)threadIdx.x * run, row.vocabulary), end = min(begin + run, row.vocabulary);
  const double temperature = row.temperature;
  double sum = 0.0;
  for (int i = begin; i < end; i++) sum += exp((double)(logits[i] - largest) / temperature);
  shared[threadIdx.x] = sum;
  if (threadIdx.x == 0) found = NONE, last = 0;
  __syncthreads();
  for (int step = 1; step < THREADS; step *= 2) {
    const double before = threadIdx.x >= step ? shared[threadIdx.x - step] : 0.0;
    __syncthreads();
    shared[threadIdx.x] += before;
    __syncthreads();
  }
  const double total = shared[THREADS - 1], target = (double)row.draw * total;
  double reached = threadIdx.x > 0 ? shared[threadIdx.x - 1] : 0.0;
  if (sum > 0.0) atomicMax(&last, threadIdx.x);
  __syncthreads();
  // Rounding may leave the target a hair above the last sum.
  if (reached <= target && (shared[threadIdx.x] > target || threadIdx.x == last) && sum > 0.0) {
    u32 token = NONE;
    for (int i = begin; i < end; i++) {
      const double weight = exp((double)(logits[i] - largest) / temperature);
      if (weight > 0.0) token = i;
      reached += weight;
      if (reached > target) break;
    }
    atomicMin(&found, token);
  }
  __syncthreads();
  result.token = found;
  result.total = total;
}

// Lists at least `wanted` of the largest logits: all from some value on.
DEVICE u32 list_largest(const float* logits, const Row& row, uint2* list, int room) {
  __shared__ u32 counts[BINS];
  __shared__ u32 prefix, above, listed;
  if (threadIdx.x == 0) prefix = 0, above = 0, listed = 0;
  u32 floor = 0;
  // From the highest bits on: in which bin the wanted one is.
  for (int shift = 21; shift >= 0; shift = shift == 21 ? 10 : shift == 10 ? 0 : -1) {
    const int bits = shift == 0 ? 10 : 11;
    for (int i = threadIdx.x; i < BINS; i += THREADS) counts[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < row.vocabulary; i += THREADS) {
      const u32 key = ordered(logits[i]);
      if (shift == 21 || key >> (shift + bits) == prefix >> (shift + bits)) atomicAdd(&counts[key >> shift & ((1 << bits) - 1)], 1);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      u32 sum = above;
      int bin = (1 << bits) - 1;
      while (bin > 0 && sum + counts[bin] < row.wanted) sum += counts[bin--];
      above = sum;
      prefix |= (u32)bin << shift;
      listed = sum + counts[bin];
    }
    __syncthreads();
    floor = prefix;
    if (listed <= room) break;
  }
  const u32 count = listed;
  __syncthreads();
  if (count > room) return count;
  if (threadIdx.x == 0) listed = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < row.vocabulary; i += THREADS)
    if (ordered(logits[i]) >= floor) {
      const u32 at = atomicAdd(&listed, 1);
      if (at < room) list[at] = make_uint2(i, __float_as_uint(logits[i]));
    }
  __syncthreads();
  return listed;
}

extern "C" __global__ void __launch_bounds__(THREADS) survey(Arguments a) {
  __shared__ double shared[THREADS];
  __shared__ u64 best[THREADS / 32];
  __shared__ u32 bad;
  const Row row = a.rows[blockIdx.x];
  const float* logits = a.logits + blockIdx.x * a.stride;
  if (threadIdx.x == 0) bad = NONE;
  __syncthreads();
  // The largest logit, of several the first: the order of the logit above, the order of numbers downwards below.
  u64 largest = 0;
  for (int i = threadIdx.x; i < row.vocabulary; i += THREADS) {
    const float x = logits[i];
    if (!(x < __int_as_float(0x7f800000))) atomicMin(&bad, i);
    const u64 key = (u64)ordered(x) << 32 | (u32)~i;
    largest = key > largest ? key : largest;
  }
  for (int step = 16; step > 0; step /= 2) {
    const u64 other = __shfl_xor_sync(ALL_LANES, largest, step);
    largest = other > largest ? other : largest;
  }
  if (threadIdx.x % 32 == 0) best[threadIdx.x / 32] = largest;
  __syncthreads();
  largest = best[0];
  for (int i = 1; i < THREADS / 32; i++) largest = best[i] > largest ? best[i] : largest;
  Result result = {};
  result.token = ~(u32)largest;
  result.bad = bad;
  result.largest = logits[min(result.token, (u32)row.vocabulary - 1)];
  if (bad == NONE && result.largest > __int_as_float(0xff800000)) {
    if (row.walks) walk(logits, row, result.largest, shared, result);
    const bool sums = row.wanted > 0 && row.temperature > 0.0f && !row.walks;
    double total = 0.0, plain = 0.0;
    if (sums || row.plain)
      for (int i = threadIdx.x; i < row.vocabulary; i += THREADS) {
        const double x = logits[i] - result.largest;
        if (sums) total += exp(x / (double)row.temperature);
        if (row.plain) plain += exp(x);
      }
    if (sums) result.total = sum_over_block(total, shared);
    if (row.plain) result.plain_total = sum_over_block(plain, shared);
    if (row.wanted > 0) result.listed = list_largest(logits, row, a.lists + blockIdx.x * (long long)a.list_room, a.list_room);
    if (row.given != NONE) result.token = row.given;
    result.logit = logits[min(result.token, (u32)row.vocabulary - 1)];
  }
  if (threadIdx.x == 0) a.results[blockIdx.x] = result;
}
