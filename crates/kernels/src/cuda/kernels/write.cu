// From projected rows to pages: QK-norm, rotary embedding, the codec's basis, and the write of keys and values to bf16
// pages; queries go to a matrix of their own. One launch for all rows and heads of a layer, equal to the CPU to the bit.
// A block has up to VECTORS vectors that are multiplied with the same matrix: keys of a KV head and the queries that read
// it, or its values. Where the matrix of a layer's keys is not a rotation, queries have another one than keys, and both
// have blocks of their own. First a warp prepares a vector at a time, then a thread has four output channels of PER_THREAD vectors.

constexpr int THREADS = HEAD_DIM;
constexpr int WARPS = HEAD_DIM / 32;
constexpr int VECTORS = 4 * PER_THREAD;
constexpr int STRIDE = VECTORS + 4;  // of channels in shared memory: fewer of them in one bank

// With few vectors a block waits for its matrix more than it computes, so so many of its rows come to shared memory at
// once, beginning before anything else. With many, other blocks compute meanwhile.
constexpr bool STAGED = PER_THREAD <= 2;
constexpr int STAGED_ROWS = STAGED ? (HEAD_DIM <= 128 ? HEAD_DIM : 64) : HEAD_DIM;

DEVICE void stage(float4* to, const float* from, int rows) {
  for (int i = threadIdx.x; i < rows * HEAD_DIM / 4; i += THREADS)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
        :: "r"((u32)__cvta_generic_to_shared(to + i)), "l"(from + 4 * i) : "memory");
}
DEVICE void wait_for_stage() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// What happens to the rows of one head and side.
struct Transform {
  int matrix, mean;  // which one, or -1
  int query_matrix;  // of the queries that read keys
  int stored;        // 0: rounded to bf16 and nothing else
  int rounds_input;
};

struct Arguments {
  const float* rows;            // [row][query heads, key heads, value heads][channel]
  float* queries;               // [row][query head][channel], rows so far apart; perhaps where they are in `rows`
  long long query_stride;
  u8* exact;                    // [slot][layer][head] bf16 pages
  u8* scratch;                  // [slot - exact_slots][head]
  const uint2* targets;         // [row]: slot and token of its page; slot 0 is not written
  const float *cos, *sin;       // [row][pair]
  const float *q_gain, *k_gain; // of the norms, 0 if there are none
  const Transform* transforms;  // [layer][head][key, value]
  const float *matrices, *means;
  float q_epsilon, k_epsilon;
  int row_count, kv_heads, group, pairs, interleaved;
  int exact_slots, all_layers, layer;
  int query_tiles;              // blocks of queries, and of keys where they share a matrix
  int key_tiles;                // blocks of keys alone; the others have values
  int per_row;                  // vectors of a row in blocks of queries: one more than the group if keys are with them
};

struct Vector {
  int row, query;  // query: index of the query head in its group, -1 for keys and values
};

DEVICE Vector vector_of(const Arguments& a, bool queries, int index) {
  if (!queries) return {index, -1};
  const int row = index / a.per_row, which = index % a.per_row;
  return {row, which < a.group ? which : -1};
}

// `x / sqrt(mean(x^2) + epsilon) * gain`. Squares are summed in 32 lanes, and these one after the other, as on the CPU.
DEVICE void norm(float (&x)[CHUNKS], const float* gain, float epsilon, int lane) {
  float squares = 0.0f, sum = 0.0f;
  #pragma unroll
  for (int i = 0; i < CHUNKS; i++) squares += x[i] * x[i];
  #pragma unroll
  for (int i = 0; i < 32; i++) sum += __shfl_sync(ALL_LANES, squares, i);
  const float inverse = 1.0f / __fsqrt_rn(sum / (float)HEAD_DIM + epsilon);
  #pragma unroll
  for (int i = 0; i < CHUNKS; i++) x[i] *= inverse * gain[lane + 32 * i];
}

// Rotates the first 2 * pairs channels. `whole` is room for one vector.
DEVICE void rotate(const Arguments& a, float (&x)[CHUNKS], float* whole, int row, int lane) {
  const float *cos = a.cos + (long long)row * a.pairs, *sin = a.sin + (long long)row * a.pairs;
  #pragma unroll
  for (int i = 0; i < CHUNKS; i++) whole[lane + 32 * i] = x[i];
  __syncwarp();
  #pragma unroll
  for (int i = 0; i < CHUNKS; i++) {
    const int channel = lane + 32 * i;
    if (channel >= 2 * a.pairs) continue;
    const bool second = a.interleaved ? channel & 1 : channel >= a.pairs;
    const int pair = a.interleaved ? channel >> 1 : second ? channel - a.pairs : channel;
    const int other = a.interleaved ? channel ^ 1 : second ? channel - a.pairs : channel + a.pairs;
    const float turned = whole[other] * sin[pair];
    x[i] = second ? x[i] * cos[pair] + turned : x[i] * cos[pair] - turned;
  }
  __syncwarp();
}

extern "C" __global__ void __launch_bounds__(THREADS) write_rows(Arguments a) {
  __shared__ __align__(16) float input[HEAD_DIM * STRIDE];
  __shared__ float whole[WARPS][HEAD_DIM];
  let_next_launch_begin();
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, head = blockIdx.y;
  const bool queries = blockIdx.x < a.query_tiles, values = blockIdx.x >= a.query_tiles + a.key_tiles;
  const int first = (blockIdx.x - (queries ? 0 : values ? a.query_tiles + a.key_tiles : a.query_tiles)) * VECTORS;
  const int count = min(VECTORS, a.row_count * (queries ? a.per_row : 1) - first);
  const int q_heads = a.kv_heads * a.group;
  const long long columns = (long long)(q_heads + 2 * a.kv_heads) * HEAD_DIM;
  const Transform transform = a.transforms[(a.layer * a.kv_heads + head) * 2 + values];

  extern __shared__ float4 staged[];
  const int which = queries ? transform.query_matrix : transform.matrix;
  const float* matrix = a.matrices + (long long)which * (HEAD_DIM * HEAD_DIM);
  if (STAGED && which >= 0) stage(staged, matrix, STAGED_ROWS);
  wait_for_launches();

  for (int v = warp; v < count; v += WARPS) {
    const Vector vector = vector_of(a, queries, first + v);
    const bool is_query = vector.query >= 0;
    const int place = values ? q_heads + a.kv_heads + head : is_query ? head * a.group + vector.query : q_heads + head;
    const float* source = a.rows + vector.row * columns + (long long)place * HEAD_DIM;
    float x[CHUNKS];
    #pragma unroll
    for (int i = 0; i < CHUNKS; i++) x[i] = source[lane + 32 * i];
    if (!values) {
      const float* gain = is_query ? a.q_gain : a.k_gain;
      if (gain) norm(x, gain, is_query ? a.q_epsilon : a.k_epsilon, lane);
      if (a.pairs > 0) rotate(a, x, whole[warp], vector.row, lane);
    }
    if (!is_query) {
      #pragma unroll
      for (int i = 0; i < CHUNKS; i++) {
        if (transform.rounds_input) x[i] = round_to_bf16(x[i]);
        if (transform.mean >= 0) x[i] = x[i] - a.means[(long long)transform.mean * HEAD_DIM + lane + 32 * i];
      }
    }
    #pragma unroll
    for (int i = 0; i < CHUNKS; i++) input[(lane + 32 * i) * STRIDE + v] = x[i];
  }
  if (STAGED) wait_for_stage();
  __syncthreads();

  const int channel = thread % (HEAD_DIM / 4) * 4, first_here = thread / (HEAD_DIM / 4) * PER_THREAD;
  const bool busy = first_here < count;
  float sums[PER_THREAD][4];
  if (which >= 0) {
    // Each sum is one chain over input channels 0, 1, 2, ..., as the codec defines it.
    #pragma unroll
    for (int v = 0; v < PER_THREAD; v++)
      #pragma unroll
      for (int c = 0; c < 4; c++) sums[v][c] = 0.0f;
    #pragma unroll 1
    for (int begin = 0; begin < HEAD_DIM; begin += STAGED_ROWS) {
      const int rows = min(STAGED_ROWS, HEAD_DIM - begin);
      if (begin > 0) {
        __syncthreads();
        stage(staged, matrix + begin * HEAD_DIM, rows);
        wait_for_stage();
        __syncthreads();
      }
      if (!busy) continue;
      #pragma unroll 8
      for (int i = 0; i < rows; i++) {
        const int at = i * HEAD_DIM + channel;
        const float4 weights = STAGED ? staged[at / 4] : __ldg((const float4*)(matrix + at));
        #pragma unroll
        for (int v = 0; v < PER_THREAD; v++) {
          const float x = input[(begin + i) * STRIDE + first_here + v];
          sums[v][0] = __fmaf_rn(x, weights.x, sums[v][0]);
          sums[v][1] = __fmaf_rn(x, weights.y, sums[v][1]);
          sums[v][2] = __fmaf_rn(x, weights.z, sums[v][2]);
          sums[v][3] = __fmaf_rn(x, weights.w, sums[v][3]);
        }
      }
    }
  } else {
    #pragma unroll
    for (int v = 0; v < PER_THREAD; v++)
      #pragma unroll
      for (int c = 0; c < 4; c++) sums[v][c] = input[(channel + c) * STRIDE + first_here + v];
  }

  #pragma unroll
  for (int v = 0; v < PER_THREAD; v++) {
    if (first_here + v >= count) return;
    const Vector vector = vector_of(a, queries, first + first_here + v);
    if (vector.query >= 0) {
      const long long at = vector.row * a.query_stride + (head * a.group + vector.query) * HEAD_DIM + channel;
      *(float4*)(a.queries + at) = make_float4(sums[v][0], sums[v][1], sums[v][2], sums[v][3]);
      continue;
    }
    // Whoever looks at the rows afterwards finds keys as they are stored, too.
    if (a.queries == a.rows && !values) {
      float* key = (float*)a.rows + vector.row * columns + (q_heads + head) * HEAD_DIM + channel;
      *(float4*)key = make_float4(sums[v][0], sums[v][1], sums[v][2], sums[v][3]);
    }
    const uint2 target = a.targets[vector.row];
    if (target.x == 0) continue;
    const long long page_bytes = PAGE_UNITS * 16;
    u8* page = target.x < a.exact_slots
        ? a.exact + (((long long)target.x * a.all_layers + a.layer) * a.kv_heads + head) * page_bytes
        : a.scratch + ((long long)(target.x - a.exact_slots) * a.kv_heads + head) * page_bytes;
    u32 bits[4];
    #pragma unroll
    // A stored row is a sum that began at zero, which takes the sign of a negative zero.
    for (int c = 0; c < 4; c++) bits[c] = bf16_bits(transform.stored ? sums[v][c] + 0.0f : sums[v][c]);
    if (values) {
      #pragma unroll
      for (int c = 0; c < 4; c++) *(u16*)(page + value_byte(target.y, channel + c)) = (u16)bits[c];
    } else {
      *(uint2*)(page + key_byte(target.y, channel)) = make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
    }
  }
}
