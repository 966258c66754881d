// The experts of one or a few rows, in two launches: `open_experts` multiplies with gates and what they multiply, and
// `close_experts` with what leads back, adding up all experts of a row. There is no list of jobs: a unit is 16 output channels
// of a row, rows that choose the same expert read it twice, and both kernels prepare activations themselves. A shared expert
// is one that every row goes to, with weight 1.
//
// A unit consists of parts, a matrix each (the gate and what it multiplies, or an expert each), whose tiles are one list:
//
//   part 0: tile tile tile tile | part 1: tile tile tile tile | ..
//   warp 0 ---------><---------- warp 1 --------><---------- ..

constexpr int WARPS = THREADS / 32;
constexpr int MOST_ROWS = 4;
constexpr bool WIDE = KIND == FLOATS;
constexpr int RING = WIDE ? FLOAT_RING : CODE_RING;
typedef TileOf<KIND>::Tile Tile;
constexpr int RUN = Tile::RUN, RUN_BYTES = RUN * Tile::BYTES, DEPTH = RING / RUN_BYTES;

struct Choice {
  int expert;
  float weight;
};

struct Arguments {
  const u8* tiles[2];         // of all experts: the gate and what it multiplies, or what leads back
  const u8* shared_tiles[2];  // the same of the shared expert, or null
  const float* biases[2];     // [expert][outputs], or null
  const Choice* choices;      // [row][top_k]
  Source source;              // of open_experts; close_experts reads `inner`
  float* inner;               // [row][slot][inputs of close_experts]
  float* hidden;              // [row][outputs of close_experts]
  int rows, top_k, slots;     // slots: the experts of a row with the shared one
  int inputs, outputs, steps, tile_rows;
  int activation;             // of gates
  float alpha, limit;         // of clamped ones
};

// Memory of a row of activations: numbers, then sums of 16.
DEVICE int padded_steps(const Arguments& a) { return (a.steps + 3) / 4 * 4; }
DEVICE int row_bytes(const Arguments& a) { return padded_steps(a) * (128 + 16); }
DEVICE Activations row_at(const Arguments& a, u8* memory, int index) {
  const u32 at = shared_address(memory) + index * row_bytes(a);
  return {at, at, at + padded_steps(a) * 128, 1};
}

// The tiles of a slot of a row.
DEVICE const u8* tiles_of(const Arguments& a, int row, int slot, int half, long long tile_row_bytes) {
  if (slot >= a.top_k) return a.shared_tiles[half];
  return a.tiles[half] + a.choices[row * a.top_k + slot].expert * (tile_row_bytes * a.tile_rows);
}

// Goes through the units of this block. `tiles_at` gives the tiles of a part of a unit,
// `activations_of` what they are multiplied with; `prepare` is called when the first tiles are on their way, `add` with the results
// of every part that this warp has tiles of (in lanes of which four share one, those of two channels), `finish` after every unit.
template <class TilesAt, class ActivationsOf, class Prepare, class Add, class Finish>
DEVICE void go_through(const Arguments& a, u8* ring_memory, u64* barriers, int warp, int lane, int units, int parts, TilesAt tiles_at,
                       ActivationsOf activations_of, Prepare prepare, Add add, Finish finish) {
  Ring<DEPTH, RUN_BYTES> ring;
  Tile tile;
  ring.open(ring_memory, barriers, warp, lane);
  const int runs = (a.steps + RUN - 1) / RUN, all = parts * runs, first = warp * all / WARPS, last = (warp + 1) * all / WARPS;
  // The next tiles to be fetched.
  int unit = first < last ? (int)blockIdx.x : units, run = first, left = 0;
  const u8* at = nullptr;
  auto seek = [&] {
    if (unit >= units) return;
    const int part = run / runs, in = run % runs;
    at = tiles_at(unit, part) + (long long)in * RUN_BYTES;
    left = min(runs - in, last - run);
  };
  auto fetch = [&](int ahead) {
    const bool there = unit < units;
    ring.template fetch<RUN_BYTES>(ahead, at, there, lane);
    if (!there) return;
    at += RUN_BYTES, run++;
    if (--left > 0) return;
    if (run == last) run = first, unit += gridDim.x;
    seek();
  };
  seek();
  #pragma unroll 1
  for (int i = 0; i < DEPTH - 1; i++) fetch(i);
  prepare();
  #pragma unroll 1
  for (int mine = blockIdx.x; mine < units; mine += gridDim.x) {
    #pragma unroll 1
    for (int from = first; from < last;) {
      const int part = from / runs, in = from % runs, end = min(runs, in + last - from);
      const Activations activations = activations_of(mine, part);
      float sums[COLUMN_TILES][4] = {};
      #pragma unroll 1
      for (int i = in; i < end; i++) {
        __syncwarp();
        fetch(DEPTH - 1);
        ring.template wait<DEPTH - 1>();
        tile.add_run(ring.address(), activations, i * RUN, a.steps, sums, lane);
        ring.pass();
      }
      float results[2] = {sums[0][0], sums[0][2]};
      if (Tile::SPREAD) {
        #pragma unroll
        for (int i = 0; i < 2; i++) {
          results[i] += sums[0][2 * i + 1];
          for (int lanes = 1; lanes < 4; lanes *= 2) results[i] += __shfl_xor_sync(ALL_LANES, results[i], lanes);
        }
      }
      add(mine, part, results);
      from += end - in;
    }
    finish(mine);
  }
  ring.close(lane);
}

extern "C" __global__ void __launch_bounds__(THREADS, WIDE ? 1 : 2) open_experts(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ u64 barriers[WARPS * DEPTH];
  __shared__ float2 shared[WARPS];
  __shared__ float factors[MOST_ROWS], results[2][WARPS][TILE_ROWS];
  let_next_launch_begin();
  u8* rows = memory + WARPS * RING;
  // The rows are there already: the launches before this one choose experts for them, and began when they were (`late` of
  // multiply.cu). Only what was chosen is waited for.
  #pragma unroll 1
  for (int row = 0; row < a.rows; row++) {
    u8* to = rows + row * row_bytes(a);
    const Row input(a.source, row, padded_steps(a), !WIDE, shared);
    input.write<WIDE>(to, (float*)(to + padded_steps(a) * 128), 1, 1, 0);
    if (threadIdx.x == 0) factors[row] = WIDE ? 1.0f : input.factor();
  }
  wait_for_launches();
  const int warp = kept((int)threadIdx.x / 32), lane = kept((int)threadIdx.x % 32);
  const int slot_units = a.slots * a.tile_rows;
  const long long tile_row_bytes = (long long)a.steps * Tile::BYTES;
  float mine[2][2] = {};  // of this warp: the gate and what it multiplies
  go_through(
      a, memory, barriers, warp, lane, a.rows * slot_units, 2,
      [&](int unit, int half) {
        const int row = unit / slot_units, slot = unit % slot_units / a.tile_rows;
        return tiles_of(a, row, slot, half, tile_row_bytes) + unit % a.tile_rows * tile_row_bytes;
      },
      [&](int unit, int) { return row_at(a, rows, unit / slot_units); },
      [&] { __syncthreads(); },
      [&](int, int half, const float (&part)[2]) {
        #pragma unroll
        for (int i = 0; i < 2; i++) (half ? mine[1][i] : mine[0][i]) = part[i];
      },
      [&](int unit) {
        #pragma unroll
        for (int half = 0; half < 2; half++)
          #pragma unroll
          for (int i = 0; i < 2; i++)
            if (lane % 4 == 0) results[half][warp][lane / 4 + 8 * i] = mine[half][i];
        __syncthreads();
        const int channel = threadIdx.x, output = unit % a.tile_rows * TILE_ROWS + channel;
        if (channel < TILE_ROWS && output < a.outputs) {
          const int row = unit / slot_units, slot = unit % slot_units / a.tile_rows;
          float sums[2];
          #pragma unroll
          for (int half = 0; half < 2; half++) {
            sums[half] = 0.0f;
            #pragma unroll
            for (int w = 0; w < WARPS; w++) sums[half] += results[half][w][channel];
            sums[half] *= factors[row];
            if (a.biases[half] && slot < a.top_k)
              sums[half] += a.biases[half][(long long)a.choices[row * a.top_k + slot].expert * a.outputs + output];
          }
          a.inner[((long long)row * a.slots + slot) * a.outputs + output] = activated(a.activation, a.alpha, a.limit, sums[0], sums[1]);
        }
        __syncthreads();
      });
}

// Prepares the activations of all slots of a row, each by a warp.
DEVICE void prepare_slots(const Arguments& a, u8* rows, float* factors, int row, int warp, int lane) {
  for (int slot = warp; slot < a.slots; slot += WARPS) {
    const float* from = a.inner + ((long long)row * a.slots + slot) * a.inputs;
    const int end = padded_steps(a) * 64;
    float largest = 0.0f;
    #pragma unroll 4
    for (int first = lane * 8; !WIDE && first < end; first += 256) largest = Eight::load(from, first, a.inputs).largest(largest);
    for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, step));
    const float power = WIDE ? 1.0f : power_below(largest);
    u8* to = rows + slot * row_bytes(a);
    #pragma unroll 4
    for (int first = lane * 8; first < end; first += 256)
      write_operands<WIDE>(to, (float*)(to + padded_steps(a) * 128), power, 1, 1, 0, first, Eight::load(from, first, a.inputs));
    const float weight = slot < a.top_k ? a.choices[row * a.top_k + slot].weight : 1.0f;
    if (lane == 0) factors[slot] = WIDE ? weight : weight / (power * SCALE_UNIT);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, WIDE ? 1 : 2) close_experts(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ u64 barriers[WARPS * DEPTH];
  __shared__ float factors[33], results[2][WARPS][TILE_ROWS];
  let_next_launch_begin();
  wait_for_launches();
  u8* rows = memory + WARPS * RING;
  const int warp = kept((int)threadIdx.x / 32), lane = kept((int)threadIdx.x % 32);
  const long long tile_row_bytes = (long long)a.steps * Tile::BYTES;
  int set = 0;
  #pragma unroll 1
  for (int row = 0; row < a.rows; row++) {
    float mine[2] = {};
    // Nobody reads the activations of the row before any more.
    __syncthreads();
    go_through(
        a, memory, barriers, warp, lane, a.tile_rows, a.slots,
        [&](int unit, int slot) { return tiles_of(a, row, slot, 0, tile_row_bytes) + unit * tile_row_bytes; },
        [&](int, int slot) { return row_at(a, rows, slot); },
        [&] {
          prepare_slots(a, rows, factors, row, warp, lane);
          __syncthreads();
        },
        [&](int, int slot, const float (&part)[2]) {
          #pragma unroll
          for (int i = 0; i < 2; i++) mine[i] = fmaf(factors[slot], part[i], mine[i]);
        },
        [&](int unit) {
          #pragma unroll
          for (int i = 0; i < 2; i++) {
            if (lane % 4 == 0) results[set][warp][lane / 4 + 8 * i] = mine[i];
            mine[i] = 0.0f;
          }
          __syncthreads();
          const int channel = threadIdx.x, output = unit * TILE_ROWS + channel;
          if (channel < TILE_ROWS && output < a.outputs) {
            float sum = 0.0f;
            #pragma unroll
            for (int w = 0; w < WARPS; w++) sum += results[set][w][channel];
            for (int slot = 0; a.biases[0] && slot < a.top_k; slot++) {
              const Choice choice = a.choices[row * a.top_k + slot];
              sum = fmaf(choice.weight, a.biases[0][(long long)choice.expert * a.outputs + output], sum);
            }
            a.hidden[(long long)row * a.outputs + output] += sum;
          }
          set ^= 1;
        });
  }
}
