// Products of the experts that were chosen with the rows that go to them. The work is a list of units, 16 output channels of one
// job (an expert and up to 8 * COLUMN_TILES of its rows) each; blocks take units in turn and keep reading ahead of themselves
// from unit to unit. A unit is never cut, so a row has the same bits whoever else is there.

constexpr int WARPS = THREADS / 32;
constexpr int COLUMNS = 8 * COLUMN_TILES, STRIDE = COLUMNS + 1;
constexpr int WARP_RESULTS = TILE_ROWS * STRIDE, HALF_RESULTS = WARPS * WARP_RESULTS;
constexpr int SETS = COLUMN_TILES <= 2 ? 2 : 1;
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

struct Block {
  const Arguments& a;
  u8* ring_memory;
  u64* barriers;
  float* results;
  int* lists;  // [set][COLUMNS]: the choices of a unit, -1 beyond; then the rows of their activations
  int warp, lane, units, set;

  // Adds the warps' results of a unit and writes them.
  DEVICE void finish(int unit) const {
    const Job job = a.jobs[unit / a.tile_rows];
    const float* of_set = results + set * a.halves * HALF_RESULTS;
    for (int i = threadIdx.x; i < TILE_ROWS * job.count; i += THREADS) {
      const int column = i / TILE_ROWS, channel = i % TILE_ROWS, output = unit % a.tile_rows * TILE_ROWS + channel;
      if (output >= a.outputs) continue;
      const int choice = lists[set * COLUMNS + column];
      auto result = [&](int half) {
        const float* at = of_set + half * HALF_RESULTS + channel * STRIDE + column;
        float sum = 0.0f;
        #pragma unroll
        for (int w = 0; w < WARPS; w++) sum += at[w * WARP_RESULTS];
        if (KIND != FLOATS) sum *= a.factors[choice / a.choices_per_row];
        const float* biases = a.biases[half];
        return biases ? sum + biases[(long long)job.expert * a.outputs + output] : sum;
      };
      a.out[(long long)choice * a.outputs + output] = a.halves == 2 ? activated(a.activation, a.alpha, a.limit, result(0), result(1)) : result(0);
    }
  }

  // All units of this block; tiles of both halves are of one kind.
  template <class Tile>
  DEVICE void run() {
    constexpr int RUN = Tile::RUN, BYTES = RUN * Tile::BYTES, DEPTH = (KIND == FLOATS ? FLOAT_RING : CODE_RING) / BYTES;
    Ring<DEPTH, BYTES> ring;
    ring.open(ring_memory, barriers, warp, lane);
    const long long tile_row_bytes = (long long)a.steps * Tile::BYTES, expert_bytes = tile_row_bytes * a.tile_rows;
    // The next tiles of this warp to be fetched.
    int next_unit = warp * RUN < a.steps ? (int)blockIdx.x : units, next_half = 0, next_step = warp * RUN;
    const u8* at = nullptr;
    auto seek = [&] {
      if (next_unit >= units) return;
      const int expert = a.jobs[next_unit / a.tile_rows].expert;
      at = a.tiles[next_half] + expert * expert_bytes + next_unit % a.tile_rows * tile_row_bytes + next_step * Tile::BYTES;
    };
    auto fetch = [&](int ahead) {
      const bool there = next_unit < units;
      ring.template fetch<BYTES>(ahead, at, there, lane);
      if (!there) return;
      next_step += WARPS * RUN, at += WARPS * BYTES;
      if (next_step < a.steps) return;
      next_step = warp * RUN;
      if (++next_half == a.halves) next_half = 0, next_unit += gridDim.x;
      seek();
    };
    seek();
    #pragma unroll 1
    for (int i = 0; i < DEPTH - 1; i++) fetch(i);
    #pragma unroll 1
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
      const Job job = a.jobs[unit / a.tile_rows];
      // The set was last read two units ago, or before the barrier at the end.
      if (threadIdx.x < COLUMNS) {
        const int choice = threadIdx.x < job.count ? a.order[job.first + threadIdx.x] : -1;
        lists[set * COLUMNS + threadIdx.x] = choice;
        lists[(SETS + set) * COLUMNS + threadIdx.x] = choice < 0 ? -1 : choice / a.choices_per_row;
      }
      __syncthreads();
      Activations activations = a.rows;
      activations.list = lists + (SETS + set) * COLUMNS;
      #pragma unroll 1
      for (int half = 0; half < a.halves; half++) {
        float sums[COLUMN_TILES][4] = {};
        #pragma unroll 1
        for (int step = warp * RUN; step < a.steps; step += WARPS * RUN) {
          __syncwarp();
          fetch(DEPTH - 1);
          ring.template wait<DEPTH - 1>();
          Tile::add_run(ring.address(), activations, step, a.steps, sums, lane);
          ring.pass();
        }
        float* mine = results + (set * a.halves + half) * HALF_RESULTS + warp * WARP_RESULTS;
        #pragma unroll
        for (int n = 0; n < COLUMN_TILES; n++)
          #pragma unroll
          for (int i = 0; i < 4; i++) mine[(lane / 4 + i / 2 * 8) * STRIDE + n * 8 + lane % 4 * 2 + i % 2] = sums[n][i];
      }
      __syncthreads();
      finish(unit);
      if (SETS == 1) __syncthreads();
      else set ^= 1;
    }
    ring.close(lane);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, COLUMN_TILES <= 2 ? 2 : 1) multiply_experts(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ u64 barriers[WARPS * MOST_STAGES];
  __shared__ int lists[2 * SETS * COLUMNS];
  let_next_launch_begin();
  wait_for_launches();
  const int ring_bytes = WARPS * (KIND == FLOATS ? FLOAT_RING : CODE_RING);
  Block block = {a, memory, barriers, (float*)(memory + ring_bytes), lists, kept((int)threadIdx.x / 32),
      kept((int)threadIdx.x % 32), *a.job_count * a.tile_rows, 0};
  block.run<TileOf<KIND>::Tile>();
}
