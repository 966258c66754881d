// Decode attention of a ragged batch in one launch: bf16 tiles of sinks and windows, sealed tiles of histories, and the
// merge. The host cuts the work into segments, runs of tiles of one kind, and gives every block a list of about equal
// cost. The warps of a block take the tiles of a segment in turn, put their softmax states together in shared memory
// and write one partial result. Whoever writes the last one of a (sequence, KV head) merges them, in their order.

struct Segment {
  int kind;  // 0: bf16 tiles, 1: sealed tiles
  int sequence, head, first_row, rows;  // the row of the batch; KV head; query heads of its group
  int begin, end;  // tiles of this kind, counted from the first of the sequence
  int partial;
  int unit;  // what is merged: a sequence, KV head and range of query heads
  int first_partial, partials;  // of the unit
  int sink_pages, history_end;  // pages sink_pages..history_end are sealed
  int tokens;
  int result;
  int next;  // of the same block, or -1
};

// What becomes of the result of a segment: it is a partial result, or it is left in shared memory for the next segment of
// the block, or it is a partial result together with what was left.
enum { PARTIAL, LEFT, TAKEN };

#if SEALED_BITS == 8
typedef Floats<true> Sealed;
#elif BYTE_WEIGHTS
typedef ByteCodes Sealed;
#elif SEALED_BITS == 2 || SEALED_BITS == 4
typedef HalfCodes<SEALED_BITS> Sealed;
#endif
typedef Floats<false> Exact;

constexpr int ROWS = 8 * ROW_TILES;
constexpr int THREADS = 32 * WARPS;
constexpr int MOST_PARTIALS = 256;  // of a unit; `plan.rs` keeps to it
// Rows of partial results in shared memory, apart by more than a multiple of 128 bytes.
constexpr int ROW_STRIDE = HEAD_DIM + 8;
// In floats: where a result is left, after all that tiles and the sums of warps need.
// Pages come in tiles of about 32 bytes per channel, whatever their format: 64 tokens of 2 bits, 8 of bf16. A warp works on one
// tile at a time.
typedef Ring<STAGES, STAGE_BYTES> TileRing;
constexpr int TILE_FLOATS = WARPS * STAGES * STAGE_BYTES / 4, SUM_FLOATS = WARPS * ROWS * ROW_STRIDE;
constexpr int LEFT_AT = TILE_FLOATS > SUM_FLOATS ? TILE_FLOATS : SUM_FLOATS;

struct Arguments {
  const float* queries;  // [row][kv head][group][channel], rows so far apart
  long long query_stride;
  const u8* exact_pool;  // of one layer: page `slot`, head `h` at slot * exact_stride + h * page bytes
  const u8* sealed_pool;
  u32 exact_stride, sealed_stride;
  const u8* scratch_pool;  // bf16 pages from slot `exact_slots` on
  u32 scratch_stride, exact_slots;
  const int* table;  // [row][page]: the slot in the pool the page is read from
  long long table_width;
  const Segment* segments;  // the first of each block, then all others
  float* partial_values;    // [partial][row][channel]
  float2* partial_states;   // [partial][row]: largest logit, sum of weights
  int* arrivals;            // of each unit, zero before and after
  float* out;               // like queries
  const float* undo;        // [kv head][channel of pages][channel of outputs], or null
  const float* mean;        // [kv head][channel of outputs], or null
  float* totals;            // [row][query head]: logarithm (base 2) of the sum of all weights, or null
  const u8* means;          // [page][kv head][channel]: what the stored keys of sealed pages are less of, in bf16, or null
  int kv_heads, group;
  float scale;  // of logits, times log2(e)
};

template <bool FP8>
DEVICE void begin(
    Floats<FP8>& state, const float* queries, int rows, float scale, u8*, int, int lane) {
  state.begin(queries, rows, scale, lane);
}
template <class Codes>
DEVICE void begin(
    Codes& state, const float* queries, int rows, float scale, u8* query_memory, int warp, int lane) {
  Codes::prepare(queries, rows, scale, query_memory, warp, lane);
  __syncthreads();
  state.begin(query_memory, lane);
}

template <class Provider>
DEVICE void attend_tiles(
    const Arguments& a, const Segment& s, TileRing& ring, u8* query_memory, int warp, int lane, Provider& state) {
  constexpr bool EXACT = Provider::TOKENS == 8;
  // Without a format of sealed pages, history is bf16 too, in a pool of its own.
  const bool history = !EXACT || (SEALED_BITS == 0 && s.kind);
  const u8* pool = history ? a.sealed_pool : a.exact_pool;
  const u32 stride = history ? a.sealed_stride : a.exact_stride;
  pool = kept(pool + (long long)s.head * (Provider::TILE_BYTES * Provider::TILES_PER_PAGE));
  const int* table = kept(a.table + s.sequence * a.table_width);
  const int count = s.end - s.begin > warp ? (s.end - s.begin - warp + WARPS - 1) / WARPS : 0;
  const int sink_tiles = s.sink_pages * Provider::TILES_PER_PAGE;
  // The page of the i-th tile of this warp.
  auto page_of = [&](int i) {
    const int tile = s.begin + warp + i * WARPS, page = tile / Provider::TILES_PER_PAGE;
    if (history) return s.sink_pages + page;
    return tile < sink_tiles ? page : page - s.sink_pages + s.history_end;
  };
  // Slots are looked up a tile ahead: a lookup costs as much time as a tile.
  auto slot_of = [&](int i) { return i < count ? __ldg(table + page_of(i)) : 0; };
  u32 slot = slot_of(0);
  auto fetch = [&](int i, int ahead) {
    const int part = (s.begin + warp + i * WARPS) % Provider::TILES_PER_PAGE;
    const u8* source = pool + (u64)slot * stride + part * Provider::TILE_BYTES;
    if (!history && slot >= a.exact_slots) {
      const int tile = s.head * Provider::TILES_PER_PAGE + part;
      source = a.scratch_pool + (u64)(slot - a.exact_slots) * a.scratch_stride + tile * Provider::TILE_BYTES;
    }
    slot = slot_of(i + 1);
    ring.fetch<Provider::TILE_BYTES>(ahead, source, i < count, lane);
  };
  // All slots of the first tiles at once, where these are several.
  u32 slots[STAGES];
  #pragma unroll
  for (int i = 1; i < STAGES - 1; i++) slots[i] = slot_of(i);
  wait_for_launches();
  #pragma unroll
  for (int i = 0; i < STAGES - 1; i++) {
    if (i > 0) slot = slots[i];
    fetch(i, i);
  }
  const long long row = s.sequence * a.query_stride + (s.head * a.group + s.first_row) * HEAD_DIM;
  begin(state, a.queries + row, s.rows, a.scale, query_memory, warp, lane);
  // What the logits of the next tiles are more because keys are less the means of their pages.
  auto centre = [&](int i) {
    if constexpr (Provider::CENTRED) {
      auto mean_of = [&](int later) {
        const long long page = page_of(min(i + later, count - 1));
        return a.means + (page * a.kv_heads + s.head) * (HEAD_DIM * 2);
      };
      if (i % Provider::CENTRED_TILES == 0 && a.means) state.multiply_means(a.queries + row, s.rows, a.scale, mean_of, lane);
      if (i == 0 && !a.means) state.no_means(lane);
      state.centre_on(i);
    }
  };
  if (count > 0) centre(0);
  if (count > 0) state.prime(ring.look<STAGES - 2>(), lane);
  #pragma unroll 1
  for (int i = 0; i < count; i++) {
    __syncwarp();
    fetch(i + STAGES - 1, STAGES - 1);
    const u8* tile = ring.take();
    if (i > 0) centre(i);
    int visible = Provider::TOKENS;
    if (EXACT) {
      const int first = page_of(i) * PAGE_TOKENS + (s.begin + warp + i * WARPS) % Provider::TILES_PER_PAGE * 8;
      visible = min(8, s.tokens - first);
    }
    state.add(tile, visible, lane);
  }
}

struct Shared {
  // Of each warp, then of the result that was left.
  float largest[WARPS + 1][ROWS], total[WARPS + 1][ROWS];
  float merged_total[ROWS];
  int last;
};

// The largest logit of a row over all warps, and over what was left where that counts.
DEVICE float largest_of_all(const Shared& shared, int row, bool taken) {
  float most = taken ? shared.largest[WARPS][row] : NEGATIVE_INFINITY;
  #pragma unroll
  for (int i = 0; i < WARPS; i++) most = fmaxf(most, shared.largest[i][row]);
  return most;
}

// What weights relative to `mine` count for, relative to `most`.
DEVICE float factor_of(float mine, float most) { return mine == NEGATIVE_INFINITY ? 0.0f : exp2_fast(mine - most); }

// Puts the states of all warps together and writes the partial result, or leaves it.
template <class Provider>
DEVICE void write_partial(
    const Arguments& a, const Segment& s, const Provider& state, float* scratch, Shared& shared, int warp, int lane) {
  const bool taken = s.result == TAKEN;
  float* left = scratch + LEFT_AT;
  #pragma unroll
  for (int slice = 0; slice < Provider::SLICES; slice++) {
    const int row = Provider::row_of(slice, lane);
    const float total = state.row_total(slice);
    if (Provider::leads(lane)) {
      shared.largest[warp][row] = state.row_largest(slice);
      shared.total[warp][row] = total;
    }
  }
  // Also: no warp is still reading tiles from the memory that the values go to.
  __syncthreads();
  #pragma unroll
  for (int slice = 0; slice < Provider::SLICES; slice++) {
    const int row = Provider::row_of(slice, lane);
    const float factor = factor_of(state.row_largest(slice), largest_of_all(shared, row, taken));
    state.store(slice, factor, row < s.rows ? scratch + (warp * ROWS + row) * ROW_STRIDE : nullptr, lane);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < s.rows * (HEAD_DIM / 4); i += THREADS) {
    const int row = i / (HEAD_DIM / 4), channel = i % (HEAD_DIM / 4) * 4;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    #pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float4 x = *(const float4*)&scratch[(w * ROWS + row) * ROW_STRIDE + channel];
      sum.x += x.x; sum.y += x.y; sum.z += x.z; sum.w += x.w;
    }
    float* place = s.result == LEFT ? left + row * HEAD_DIM : &a.partial_values[((long long)s.partial * ROWS + row) * HEAD_DIM];
    if (taken) {
      const float factor = factor_of(shared.largest[WARPS][row], largest_of_all(shared, row, true));
      const float4 x = *(const float4*)&left[row * HEAD_DIM + channel];
      sum.x += factor * x.x; sum.y += factor * x.y; sum.z += factor * x.z; sum.w += factor * x.w;
    }
    *(float4*)&place[channel] = sum;
  }
  if (threadIdx.x < s.rows) {
    const int row = threadIdx.x;
    const float most = largest_of_all(shared, row, taken);
    float total = 0.0f;
    for (int w = 0; w < WARPS + taken; w++) total += shared.total[w][row] * factor_of(shared.largest[w][row], most);
    if (s.result == LEFT) {
      shared.largest[WARPS][row] = most;
      shared.total[WARPS][row] = total;
    } else {
      a.partial_states[s.partial * ROWS + row] = make_float2(most, total);
    }
  }
}

DEVICE float4 load_from_l2(const float* pointer) {
  float4 x;
  asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];"
      : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(pointer) : "memory");
  return x;
}
DEVICE float2 load_from_l2(const float2* pointer) {
  float2 x;
  asm volatile("ld.global.cg.v2.f32 {%0,%1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(pointer) : "memory");
  return x;
}

// Outputs are sums of values as pages hold them; where the layer after attention expects them as they were, every row is
// multiplied with the inverse of the rotation and the mean is added. Warps share the rows of the matrix.
DEVICE void undo_rotation(
    const Arguments& a, const Segment& s, const float* merged, float* out, int warp, int lane) {
  __syncthreads();
  float* sums = (float*)merged + ROWS * HEAD_DIM;  // [warp][row][channel]
  const float* matrix = a.undo + (long long)s.head * HEAD_DIM * HEAD_DIM;
  #pragma unroll 1
  for (int channel = lane * 4; channel < HEAD_DIM; channel += 128) {
    float4 sum[ROWS];
    #pragma unroll
    for (int row = 0; row < ROWS; row++) sum[row] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    #pragma unroll 8
    for (int k = warp; k < HEAD_DIM; k += WARPS) {
      const float4 m = *(const float4*)&matrix[k * HEAD_DIM + channel];
      #pragma unroll
      for (int row = 0; row < ROWS; row++) {
        const float x = merged[row * HEAD_DIM + k];
        sum[row].x += x * m.x; sum[row].y += x * m.y; sum[row].z += x * m.z; sum[row].w += x * m.w;
      }
    }
    #pragma unroll
    for (int row = 0; row < ROWS; row++)
      if (row < s.rows) *(float4*)&sums[(warp * ROWS + row) * HEAD_DIM + channel] = sum[row];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < s.rows * HEAD_DIM; i += THREADS) {
    const int channel = i % HEAD_DIM;
    float sum = a.mean ? a.mean[s.head * HEAD_DIM + channel] : 0.0f;
    #pragma unroll
    for (int w = 0; w < WARPS; w++) sum += sums[w * ROWS * HEAD_DIM + i];
    out[i] = sum;
  }
}

// What every partial result of a unit counts for, and the sums of all weights.
DEVICE void weigh_partials(const Arguments& a, const Segment& s, float* factors, Shared& shared, int warp, int lane) {
  const int first = s.first_partial, count = s.partials;
  for (int row = warp; row < s.rows; row += WARPS) {
    float most = NEGATIVE_INFINITY, total = 0.0f;
    float2 states[MOST_PARTIALS / 32];
    #pragma unroll
    for (int k = 0; k < MOST_PARTIALS / 32; k++) {
      if (32 * k >= count) break;
      const int i = lane + 32 * k;
      states[k] = make_float2(NEGATIVE_INFINITY, 0.0f);
      if (i < count) states[k] = load_from_l2(&a.partial_states[(first + i) * ROWS + row]);
    }
    #pragma unroll
    for (int k = 0; k < MOST_PARTIALS / 32; k++) {
      if (32 * k >= count) break;
      most = fmaxf(most, states[k].x);
    }
    for (int step = 16; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, step));
    #pragma unroll
    for (int k = 0; k < MOST_PARTIALS / 32; k++) {
      if (32 * k >= count) break;
      const int i = lane + 32 * k;
      const float factor = states[k].x == NEGATIVE_INFINITY ? 0.0f : exp2_fast(states[k].x - most);
      if (i < count) factors[i * ROWS + row] = factor;
      total += factor * states[k].y;
    }
    for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(ALL_LANES, total, step);
    if (lane == 0) {
      shared.merged_total[row] = total;
      const long long out_row = ((long long)s.sequence * a.kv_heads + s.head) * a.group + s.first_row + row;
      if (a.totals) a.totals[out_row] = total > 0.0f ? most + __log2f(total) : -1e30f;
    }
  }
  __syncthreads();
}

// All partial results of a unit are there: the output. A unit without tokens gives zeros.
DEVICE void merge(const Arguments& a, const Segment& s, float* scratch, Shared& shared, int warp, int lane) {
  const int first = s.first_partial, count = s.partials;
  float* factors = scratch + THREADS * 4;  // [partial][row]
  float* merged = factors + MOST_PARTIALS * ROWS;
  const long long out_row = ((long long)s.sequence * a.kv_heads + s.head) * a.group + s.first_row;
  float* out = a.undo ? merged : a.out + out_row * HEAD_DIM;
  // Threads beyond the first s.rows * HEAD_DIM / 4 take every so many partials, and their sums are added at the end.
  const int items = s.rows * (HEAD_DIM / 4), slices = max(1, THREADS / items);
  for (int base = 0; base < items; base += THREADS) {
    const int slice = items >= THREADS ? 0 : threadIdx.x / items;
    const int index = items >= THREADS ? base + (int)threadIdx.x : threadIdx.x % items;
    const int end = index < items && slice < slices ? count : 0;
    const int row = index / (HEAD_DIM / 4), channel = index % (HEAD_DIM / 4) * 4;
    const float* values = a.partial_values + ((long long)first * ROWS + row) * HEAD_DIM + channel;
    // Most results have few parts, which need not wait for their factors to be known.
    constexpr int EARLY = 8;
    float4 early[EARLY];
    #pragma unroll
    for (int k = 0; k < EARLY; k++) {
      const int i = slice + k * slices;
      early[k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (i < end) early[k] = load_from_l2(values + i * (ROWS * HEAD_DIM));
    }
    if (base == 0) weigh_partials(a, s, factors, shared, warp, lane);
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    #pragma unroll
    for (int k = 0; k < EARLY; k++) {
      const int i = slice + k * slices;
      const float factor = i < end ? factors[i * ROWS + row] : 0.0f;
      sum.x += factor * early[k].x; sum.y += factor * early[k].y;
      sum.z += factor * early[k].z; sum.w += factor * early[k].w;
    }
    #pragma unroll 12
    for (int i = slice + EARLY * slices; i < end; i += slices) {
      const float4 x = load_from_l2(values + i * (ROWS * HEAD_DIM));
      const float factor = factors[i * ROWS + row];
      sum.x += factor * x.x; sum.y += factor * x.y; sum.z += factor * x.z; sum.w += factor * x.w;
    }
    if (slices > 1) {
      ((float4*)scratch)[threadIdx.x] = sum;
      __syncthreads();
      if (slice == 0)
        for (int other = 1; other < slices; other++) {
          const float4 x = ((const float4*)scratch)[threadIdx.x + other * items];
          sum.x += x.x; sum.y += x.y; sum.z += x.z; sum.w += x.w;
        }
    }
    if (end > 0 && slice == 0) {
      const float total = shared.merged_total[row], inverse = total > 0.0f ? 1.0f / total : 0.0f;
      *(float4*)&out[row * HEAD_DIM + channel] =
          make_float4(sum.x * inverse, sum.y * inverse, sum.z * inverse, sum.w * inverse);
    }
  }
  if (a.undo) undo_rotation(a, s, merged, a.out + out_row * HEAD_DIM, warp, lane);
}

// The next tiles are copied over what was written and read as numbers.
DEVICE void scratch_to_tiles() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) attend(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ u64 barriers[WARPS * STAGES];
  __shared__ Shared shared;
#if SEALED_BITS == 2 || SEALED_BITS == 4
  __shared__ __align__(16) u8 query_memory[Sealed::QUERY_BYTES];
#else
  u8* query_memory = nullptr;
#endif
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  float* scratch = (float*)memory;
  let_next_launch_begin();
  TileRing ring;
  ring.open(memory, barriers, warp, lane);
  for (int index = blockIdx.x; index >= 0;) {
    const Segment s = a.segments[index];
    // A block without work has a segment that is no part of anything.
    if (s.unit < 0) {
      wait_for_launches();
      return;
    }
    index = s.next;
#if SEALED_BITS
    if (s.kind) {
      Sealed state;
      attend_tiles(a, s, ring, query_memory, warp, lane, state);
      write_partial(a, s, state, scratch, shared, warp, lane);
    } else
#endif
    {
      Exact state;
      attend_tiles(a, s, ring, query_memory, warp, lane, state);
      write_partial(a, s, state, scratch, shared, warp, lane);
    }
    scratch_to_tiles();
    if (s.result == LEFT) continue;
    if (threadIdx.x == 0) {
      // Releases what the whole block has written, and acquires what others have.
      int before;
      asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(&a.arrivals[s.unit]) : "memory");
      shared.last = before == s.partials - 1;
      if (shared.last) a.arrivals[s.unit] = 0;
    }
    __syncthreads();
    if (shared.last) {
      merge(a, s, scratch, shared, warp, lane);
      scratch_to_tiles();
    }
  }
}
