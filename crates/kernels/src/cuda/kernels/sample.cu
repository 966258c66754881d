// Draws a token from every row of logits, so that the row can stay on the card and the next step can begin with the token:
// the largest logit, or the place where sums of weights reach a draw, over all tokens in the order of their numbers or over
// those that top-k, top-p and min-p leave. Penalties, biases and masks change a copy of the row, from which the token is drawn;
// what is reported is of the row as it was. What the host needs besides is left for it: sums of weights, the largest logits.
// One block for each row.

constexpr int THREADS = 1024;
constexpr u32 NONE = 0xffffffffu;
constexpr int BINS = 2048;  // of 11 bits at a time

struct Row {
  float temperature, draw;
  int vocabulary;
  int walks;   // whether a token is drawn from all of them, in the order of their numbers
  int wanted;  // how many of the largest logits are listed to draw from, 0 for none
  int reported;  // how many of the largest logits are listed to be reported
  int plain;   // whether weights are summed at temperature 1 too
  u32 given;   // a token whose logit is asked for, or NONE
  int draws;   // whether a token is drawn from those that are listed, by the filters below
  int hosts;   // whether the host draws from those that are listed
  int top_k;   // 0 for none, as top_p 1 and min_p 0
  float top_p, min_p;
  int changed;  // where the changed copy of the row is, or -1 if logits are taken as they are
  int first_change, changes;
  int mask, mask_words;  // where the bits of tokens that may be drawn begin, or -1 if all may
};

// Of the logit of one token; no token has two.
struct Change {
  u32 token;
  float penalty, add;
};

struct Result {
  u32 token;    // the largest logit, the drawn token or the given one
  u32 bad;      // the first logit that is NaN or positive infinity, or NONE
  float largest, logit;  // logit: of the token
  u32 listed;   // how many were listed; more than there is room for if they could not be
  u32 decided;  // whether the token is the one to be taken; if not, the host looks at more than was listed
  double total, plain_total;
};

struct Arguments {
  const float* logits;
  const Row* rows;
  Result* results;
  uint2* lists;  // [row][list_room]: token, bits of its logit
  u32* tokens;   // what the next step computes for each row
  float* changed;  // [changed row][stride]
  const Change* changes;
  const u32* masks;
  long long stride;
  int list_room;
};

// An order of floats as an order of numbers, in which both zeros are the same.
DEVICE u32 ordered(float x) {
  const u32 bits = x == 0.0f ? 0 : __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
DEVICE float of_order(u32 order) { return __uint_as_float(order & 0x80000000u ? order ^ 0x80000000u : ~order); }

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

// Sorts keys, the largest first; a power of two of them, up to one for each thread.
DEVICE void sort_keys(u64* keys, int count) {
  const int i = threadIdx.x;
  for (int run = 2; run <= count; run *= 2)
    for (int step = run / 2; step > 0; step /= 2) {
      __syncthreads();
      const int other = i ^ step;
      if (i < count && other > i) {
        const u64 a = keys[i], b = keys[other];
        if ((a < b) == ((i & run) == 0)) keys[i] = b, keys[other] = a;
      }
    }
  __syncthreads();
}

// How many of the most likely tokens the filters leave, of `count` that are listed in that order; 0 if more would have to be
// listed to know. Sums have the order of the CPU's.
DEVICE int kept_by_filters(const double* weights, int count, const Row& row, double total_of_all) {
  bool whole = count == row.vocabulary;
  if (row.top_k > 0 && row.top_k < row.vocabulary) {
    if (count < row.top_k) return 0;
    count = row.top_k;
    whole = true;
  }
  if (row.top_p < 1.0f) {
    double total = total_of_all, sum = 0.0;
    if (whole) {
      total = 0.0;
      for (int i = 0; i < count; i++) total += weights[i];
    }
    const double wanted = (double)row.top_p * total;
    int last = 0;
    while (last < count && (sum += weights[last]) < wanted) last++;
    if (last == count && !whole) return 0;
    count = min(last + 1, count);
    whole = true;
  }
  if (row.min_p > 0.0f) {
    const double least = (double)row.min_p;
    if (!whole && (count == 0 || weights[count - 1] >= least)) return 0;
    while (count > 0 && weights[count - 1] < least) count--;
  }
  return count;
}

// Draws from listed tokens as `sampling::sample` does, if enough of them are listed.
DEVICE void draw_listed(const uint2* list, const Row& row, double* weights, Result& result) {
  __shared__ u64 keys[THREADS];
  __shared__ int kept;
  const int listed = result.listed, i = threadIdx.x;
  int count = 32;
  while (count < listed) count *= 2;
  if (i < count) keys[i] = i < listed ? (u64)ordered(__uint_as_float(list[i].y)) << 32 | (u32)~list[i].x : 0;
  sort_keys(keys, count);
  const double temperature = row.temperature;
  if (i < listed) weights[i] = exp((double)(of_order(keys[i] >> 32) - result.largest) / temperature);
  __syncthreads();
  if (i == 0) kept = kept_by_filters(weights, listed, row, result.total);
  __syncthreads();
  if (kept == 0) return;
  const bool by_weight = (row.top_k > 0 && row.top_k < row.vocabulary) || row.top_p < 1.0f;
  if (!by_weight) {
    // Nothing has asked for an order, so it is that of numbers.
    const u64 key = i < kept ? keys[i] << 32 | keys[i] >> 32 : 0;
    __syncthreads();
    if (i < count) keys[i] = key;
    sort_keys(keys, count);
    if (i < kept) weights[i] = exp((double)(of_order((u32)keys[i]) - result.largest) / temperature);
    __syncthreads();
  }
  if (i == 0) {
    double total = 0.0, sum = 0.0;
    for (int k = 0; k < kept; k++) total += weights[k];
    const double target = (double)row.draw * total;
    // Rounding can leave the last sum a hair below the target.
    int chosen = -1;
    for (int k = 0; k < kept && sum <= target; k++) {
      sum += weights[k];
      if (weights[k] > 0.0) chosen = k;
    }
    if (chosen >= 0) {
      result.token = ~(u32)(by_weight ? keys[chosen] : keys[chosen] >> 32);
      result.decided = 1;
    }
  }
}

// What all threads of a block know of a row.
struct Shared {
  double sums[THREADS];
  u64 best[THREADS / 32];
  u32 bad, token;
  int some;
};

// Surveys logits and draws from them.
__device__ __noinline__ Result survey_logits(const float* logits, const Row& row, uint2* list, int room, Shared& shared) {
  if (threadIdx.x == 0) shared.bad = NONE;
  __syncthreads();
  // The largest logit, of several the first: the order of the logit above, the order of numbers downwards below.
  u64 largest = 0;
  for (int i = threadIdx.x; i < row.vocabulary; i += THREADS) {
    const float x = logits[i];
    if (!(x < __int_as_float(0x7f800000))) atomicMin(&shared.bad, i);
    const u64 key = (u64)ordered(x) << 32 | (u32)~i;
    largest = key > largest ? key : largest;
  }
  for (int step = 16; step > 0; step /= 2) {
    const u64 other = __shfl_xor_sync(ALL_LANES, largest, step);
    largest = other > largest ? other : largest;
  }
  if (threadIdx.x % 32 == 0) shared.best[threadIdx.x / 32] = largest;
  __syncthreads();
  largest = shared.best[0];
  for (int i = 1; i < THREADS / 32; i++) largest = shared.best[i] > largest ? shared.best[i] : largest;
  Result result = {};
  result.token = ~(u32)largest;
  result.bad = shared.bad;
  result.largest = logits[min(result.token, (u32)row.vocabulary - 1)];
  if (result.bad == NONE && result.largest > __int_as_float(0xff800000)) {
    if (row.walks) walk(logits, row, result.largest, shared.sums, result);
    const bool sums = row.wanted > 0 && row.temperature > 0.0f && !row.walks;
    double total = 0.0, plain = 0.0;
    if (sums || row.plain)
      for (int i = threadIdx.x; i < row.vocabulary; i += THREADS) {
        const double x = logits[i] - result.largest;
        if (sums) total += exp(x / (double)row.temperature);
        if (row.plain) plain += exp(x);
      }
    if (sums) result.total = sum_over_block(total, shared.sums);
    if (row.plain) result.plain_total = sum_over_block(plain, shared.sums);
    if (row.wanted > 0) result.listed = list_largest(logits, row, list, room);
    result.decided = !row.draws && !row.hosts;
    if (row.draws && result.listed <= room) draw_listed(list, row, shared.sums, result);
    if (row.given != NONE) result.token = row.given;
    result.logit = logits[min(result.token, (u32)row.vocabulary - 1)];
  }
  return result;
}

// Makes the changed copy of a row. Returns the first logit of the row that is NaN or positive infinity, NONE if there is none; 0 if
// no logit is finite.
DEVICE u32 change(const float* logits, const Arguments& a, const Row& row, float* changed, Shared& shared) {
  if (threadIdx.x == 0) shared.bad = NONE, shared.some = 0;
  __syncthreads();
  const float least = __int_as_float(0xff800000);
  for (int i = threadIdx.x; i < row.vocabulary; i += THREADS) {
    const float x = logits[i];
    if (!(x < __int_as_float(0x7f800000))) atomicMin(&shared.bad, i);
    if (x > least) shared.some = 1;
    const bool allowed = row.mask < 0 || (i / 32 < row.mask_words && a.masks[row.mask + i / 32] >> i % 32 & 1);
    changed[i] = allowed ? x : least;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < row.changes; i += THREADS) {
    const Change c = a.changes[row.first_change + i];
    if (c.token >= row.vocabulary) continue;
    const float x = changed[c.token];
    if (x > least) changed[c.token] = __fadd_rn(x > 0.0f ? __fdiv_rn(x, c.penalty) : __fmul_rn(x, c.penalty), c.add);
  }
  const u32 bad = shared.bad;
  const bool some = shared.some;
  __syncthreads();
  return bad == NONE && !some ? 0 : bad;
}

extern "C" __global__ void __launch_bounds__(THREADS) survey(Arguments a) {
  __shared__ Shared shared;
  Row row = a.rows[blockIdx.x];
  const float* logits = a.logits + blockIdx.x * a.stride;
  uint2* list = a.lists + blockIdx.x * (long long)a.list_room;
  Result result;
  if (row.changed < 0) {
    row.wanted = max(row.wanted, row.reported);
    result = survey_logits(logits, row, list, a.list_room, shared);
  } else {
    float* changed = a.changed + row.changed * a.stride;
    const u32 bad = change(logits, a, row, changed, shared);
    Row drawn = row;
    drawn.plain = 0;
    result = survey_logits(changed, drawn, list, a.list_room, shared);
    result.bad = bad;
    if (row.plain) {
      __syncthreads();
      if (threadIdx.x == 0) shared.token = result.token;
      __syncthreads();
      const u32 decided = result.decided;
      Row reported = {};
      reported.vocabulary = row.vocabulary;
      reported.wanted = row.reported;
      reported.plain = 1;
      reported.given = min(shared.token, (u32)row.vocabulary - 1);
      const Result of_row = survey_logits(logits, reported, list, a.list_room, shared);
      // Where no token may be drawn that stays to be seen.
      if (result.largest > __int_as_float(0xff800000)) result = of_row;
      result.bad = bad;
      result.decided = decided;
    }
  }
  if (threadIdx.x == 0) {
    a.results[blockIdx.x] = result;
    a.tokens[blockIdx.x] = result.token < row.vocabulary ? result.token : 0;
  }
}
