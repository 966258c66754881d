// Products of the experts that were chosen with the rows that go to them. The work is a list of units: rows of tiles (16 output
// channels each) of one job, which is an expert and up to 8 * COLUMN_TILES of its rows. Blocks take units in turn and keep
// reading ahead of themselves from unit to unit. The rows of tiles of a unit are its strips; the warps of a strip divide its
// inputs:
//
//   gate and up   two strips, the same row of tiles of both     four warps each
//   down          four strips, neighbouring rows of tiles       two warps each
//
// So warps have equally much to read although the inputs of a matrix that leads back are few, and a block meets once for 64
// channels of it. A unit is never cut, so a row has the same bits whoever else is there.

constexpr int WARPS = THREADS / 32;
constexpr int COLUMNS = 8 * COLUMN_TILES, STRIDE = COLUMNS + 1;
constexpr int WARP_RESULTS = TILE_ROWS * STRIDE;
// With two sets, results of one unit are read while those of the next are written. Lists are written a unit ahead.
constexpr int SETS = COLUMN_TILES <= 2 ? 2 : 1, LIST_SETS = SETS + 1;
constexpr int MOST_STAGES = FLOAT_RING / 2048 > CODE_RING / 544 ? FLOAT_RING / 2048 : CODE_RING / 544;

struct Job {
  int expert, first, count, padding;
};

struct Arguments {
  const u8* tiles[2];    // of all experts: the one matrix, or the gate and what it multiplies
  const float* biases[2];  // [expert][outputs], or null
  const Job* jobs;
  const int* job_count;
  const int* order;      // choices sorted by expert
  Activations rows;      // [row] or [choice]
  const float* factors;  // of f16 activations
  float* out;            // [choice][outputs]
  int outputs, steps, tile_rows, halves;
  int choices_per_row;   // of activations: 1 if they are those of choices
  int activation;        // of gates
  float alpha, limit;    // of clamped ones
};

// The choices of a unit, -1 beyond, and the rows of their activations.
struct List {
  int choices[COLUMNS], rows[COLUMNS];
};

// A block on its way through its units.
template <class Tile, int STRIPS>
struct Block {
  static constexpr int HALVES = STRIPS == 2 ? 2 : 1, SPAN = STRIPS / HALVES;  // rows of tiles of a unit
  static constexpr int SHARES = WARPS / STRIPS;                               // warps of a strip
  static constexpr int RUN = Tile::RUN, BYTES = RUN * Tile::BYTES, ROUND = SHARES * RUN;
  static constexpr int DEPTH = (KIND == FLOATS ? FLOAT_RING : CODE_RING) / BYTES;

  const Arguments& a;
  int warp, lane, spans, units;

  DEVICE Block(const Arguments& a)
      : a(a), warp(kept((int)threadIdx.x / 32)), lane(kept((int)threadIdx.x % 32)), spans((a.tile_rows + SPAN - 1) / SPAN),
        units(*a.job_count * spans) {}

  DEVICE int strip() const { return warp % STRIPS; }
  DEVICE int first_step() const { return warp / STRIPS * RUN; }
  // The row of tiles of this warp in a unit; the last unit of a job may have fewer.
  DEVICE int tile_row(int unit) const { return unit % spans * SPAN + (HALVES == 2 ? 0 : strip()); }
  DEVICE bool has_tiles(int unit) const { return tile_row(unit) < a.tile_rows && first_step() < a.steps; }
  DEVICE Job job_of(int unit) const {
    if (unit >= units) return {0, 0, 0, 0};
    const int4 job = ((const int4*)a.jobs)[unit / spans];
    return {job.x, job.y, job.z, job.w};
  }

  // Adds the sums of the warps of each strip and writes them, a column by each warp.
  DEVICE void finish(int unit, const float* results, const List& list, float first_factor) const {
    for (int column = warp; column < COLUMNS; column += WARPS) {
      const int choice = list.choices[column];
      if (choice < 0) break;
      const float factor = column == warp ? first_factor : factor_of(list, column);
      for (int channel = lane; channel < SPAN * TILE_ROWS; channel += 32) {
        const int output = unit % spans * (SPAN * TILE_ROWS) + channel;
        if (output >= a.outputs) break;
        auto result = [&](int half) {
          const int strip = HALVES == 2 ? half : channel / TILE_ROWS;
          const float* at = results + strip * WARP_RESULTS + channel % TILE_ROWS * STRIDE + column;
          float sum = 0.0f;
          #pragma unroll
          for (int share = 0; share < SHARES; share++) sum += at[share * STRIPS * WARP_RESULTS];
          sum *= factor;
          const float* biases = a.biases[half];
          return biases ? sum + biases[(long long)a.jobs[unit / spans].expert * a.outputs + output] : sum;
        };
        a.out[(long long)choice * a.outputs + output] =
            HALVES == 2 ? activated(a.activation, a.alpha, a.limit, result(0), result(1)) : result(0);
      }
    }
  }
  DEVICE float factor_of(const List& list, int column) const {
    return KIND == FLOATS || list.choices[column] < 0 ? 1.0f : a.factors[list.rows[column]];
  }

  DEVICE void put(List& list, int choice) const {
    if (threadIdx.x >= COLUMNS) return;
    list.choices[threadIdx.x] = choice;
    list.rows[threadIdx.x] = choice < 0 ? -1 : choice / a.choices_per_row;
  }
  // The choice of this thread's column of a job.
  DEVICE int choice_of(const Job& job) const { return threadIdx.x < job.count ? a.order[job.first + threadIdx.x] : -1; }

  DEVICE void run(u8* ring_memory, u64* barriers, float* results, List* lists) {
    Ring<DEPTH, BYTES> ring;
    ring.open(ring_memory, barriers, warp, lane);
    const long long tile_row_bytes = (long long)a.steps * Tile::BYTES;
    const u8* tiles = a.tiles[HALVES == 2 ? strip() : 0];
    // The next tiles of this warp to be fetched; the expert of a unit is looked up while the unit before it is fetched.
    int next_unit = blockIdx.x, next_step = 0, next_expert = job_of(next_unit).expert;
    const u8* at = nullptr;
    auto seek = [&] {
      const int expert = next_expert;
      next_expert = job_of(next_unit + gridDim.x).expert;
      next_step = first_step();
      at = tiles + ((long long)expert * a.tile_rows + tile_row(next_unit)) * tile_row_bytes + next_step * Tile::BYTES;
    };
    auto skip = [&] {
      for (; next_unit < units && !has_tiles(next_unit); next_unit += gridDim.x) next_expert = job_of(next_unit + gridDim.x).expert;
      if (next_unit < units) seek();
    };
    auto fetch = [&](int ahead) {
      const bool there = next_unit < units;
      ring.template fetch<BYTES>(ahead, at, there, lane);
      if (!there) return;
      next_step += ROUND, at += SHARES * BYTES;
      if (next_step < a.steps) return;
      next_unit += gridDim.x;
      skip();
    };
    skip();
    #pragma unroll 1
    for (int i = 0; i < DEPTH - 1; i++) fetch(i);
    int set = 0, list_set = 0;
    put(lists[0], choice_of(job_of(blockIdx.x)));
    Job coming = job_of(blockIdx.x + gridDim.x);
    __syncthreads();
    #pragma unroll 1
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
      const List& list = lists[list_set];
      // What the end of this unit and the next one need is on its way meanwhile.
      const int coming_choice = choice_of(coming);
      coming = job_of(unit + 2 * gridDim.x);
      const float first_factor = factor_of(list, warp);
      Activations activations = a.rows;
      activations.list = list.rows;
      float sums[COLUMN_TILES][4] = {};
      #pragma unroll 1
      for (int step = has_tiles(unit) ? first_step() : a.steps; step < a.steps; step += ROUND) {
        __syncwarp();
        fetch(DEPTH - 1);
#if COLUMN_TILES == 1
        const Fetched<RUN, KIND == FLOATS> fetched(activations, step, a.steps, lane);
        ring.template wait<DEPTH - 1>();
        Tile::add_run(ring.address(), fetched, step, a.steps, sums, lane);
#else
        ring.template wait<DEPTH - 1>();
        Tile::add_run(ring.address(), activations, step, a.steps, sums, lane);
#endif
        ring.pass();
      }
      float* of_set = results + set * WARPS * WARP_RESULTS;
      float* mine = of_set + warp * WARP_RESULTS;
      #pragma unroll
      for (int n = 0; n < COLUMN_TILES; n++)
        #pragma unroll
        for (int i = 0; i < 4; i++) mine[(lane / 4 + i / 2 * 8) * STRIDE + n * 8 + lane % 4 * 2 + i % 2] = sums[n][i];
      list_set = list_set + 1 == LIST_SETS ? 0 : list_set + 1;
      // Nobody still reads this list: it was that of the unit before the last, or there was a barrier since.
      put(lists[list_set], coming_choice);
      __syncthreads();
      finish(unit, of_set, list, first_factor);
      if (SETS == 1) __syncthreads();
      else set ^= 1;
    }
    ring.close(lane);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, COLUMN_TILES <= 2 ? 2 : 1) multiply_experts(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ u64 barriers[WARPS * MOST_STAGES];
  __shared__ List lists[LIST_SETS];
  let_next_launch_begin();
  wait_for_launches();
  typedef TileOf<KIND>::Tile Tile;
  float* results = (float*)(memory + WARPS * (KIND == FLOATS ? FLOAT_RING : CODE_RING));
  if (a.halves == 2) Block<Tile, 2>(a).run(memory, barriers, results, lists);
  else Block<Tile, 4>(a).run(memory, barriers, results, lists);
}
