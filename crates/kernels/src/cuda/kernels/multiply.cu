// Products of weights with up to 8 * COLUMN_TILES rows of activations: every weight is read once, from memory through a ring in
// shared memory to the matrix instruction.
//
// The work is a list of units, 16 output channels each (of a gate and of what it multiplies, where they belong together). Blocks
// take units in turn, so that all of them read neighbouring memory at a time, and keep reading ahead of themselves while results
// are put together. A unit is never cut: a row has the same bits in every batch. (Cutting inputs where there are few channels
// mostly costs more than it brings: a partial sum must be in memory before another block may read it.)

constexpr int WARPS = THREADS / 32;
constexpr int MOST_MATRICES = 3;
// With FUSED there are one or two rows.
constexpr int COLUMNS = FUSED ? 2 : 8 * COLUMN_TILES, STRIDE = COLUMNS + 1;
constexpr int WARP_RESULTS = TILE_ROWS * STRIDE, HALF_RESULTS = WARPS * WARP_RESULTS;
// With two sets, results of one unit are read while those of the next are written.
constexpr int SETS = COLUMN_TILES <= 2 ? 2 : 1;
constexpr int SET = 0, ADD = 1, GATE = 2;
// FLOAT_RING and CODE_RING are the shared memory of a warp for tiles on their way.
constexpr int MOST_STAGES = FLOAT_RING / 2048 > CODE_RING / 544 ? FLOAT_RING / 2048 : CODE_RING / 544;

struct Matrix {
  const u8* tiles;
  const float* bias;  // or null
  int kind, rows, first_column;  // first_column: where its outputs begin in a row of `out`
  int first_unit;
};

struct Arguments {
  Matrix matrices[MOST_MATRICES];
  Source source;         // FUSED: what the activations are made from
  const u8* bf16;        // otherwise: what pack.cu made of them
  const u8* f16;
  const float* sums;
  float* factors;        // of f16 activations
  float* out;
  long long out_stride;
  int matrix_count, rows, steps;
  int units;
  int ends;              // what happens to results; with GATE, matrices 0 and 1 are one group
  int ring_bytes;        // of all warps
  int activation;        // of a gate
  int parts;             // rows of tiles that `run_grouped` takes at a time
  int late;              // the next launch begins when the inputs of this one are there
};

// The matrix of a unit; with GATE, the first of two.
DEVICE int matrix_of(const Arguments& a, int unit) {
  int matrix = 0;
  #pragma unroll
  for (int i = 1; i < MOST_MATRICES; i++)
    if (a.ends != GATE && i < a.matrix_count && unit >= a.matrices[i].first_unit) matrix = i;
  return matrix;
}

// Adds the warps' results of a unit and writes them.
DEVICE void finish(const Arguments& a, const float* results, const float* factors, int unit) {
  const int matrix = matrix_of(a, unit), first_output = (unit - a.matrices[matrix].first_unit) * TILE_ROWS;
  for (int i = threadIdx.x; i < TILE_ROWS * a.rows; i += THREADS) {
    const int row = i / TILE_ROWS, channel = i % TILE_ROWS, output = first_output + channel;
    if (output >= a.matrices[matrix].rows) continue;
    auto result = [&](int half) {
      const Matrix& m = a.matrices[matrix + half];
      const float* at = results + half * HALF_RESULTS + channel * STRIDE + row;
      float sum = 0.0f;
      #pragma unroll
      for (int w = 0; w < WARPS; w++) sum += at[w * WARP_RESULTS];
      if (m.kind != FLOATS) sum *= factors[row];
      return m.bias ? sum + m.bias[output] : sum;
    };
    float* out = a.out + row * a.out_stride + a.matrices[matrix].first_column + output;
    if (a.ends == GATE) *out = gated(a.activation, result(0), result(1));
    else *out = a.ends == ADD ? *out + result(0) : result(0);
  }
}

// A block on its way through its units.
struct Block {
  u8* ring_memory;
  u64* barriers;
  float* results;
  float* factors;
  Activations activations;
  int warp, lane, set;

  // Stores the sums of this warp; those that are spread over columns are added first.
  template <bool SPREAD>
  DEVICE void store(float (&sums)[COLUMN_TILES][4], float* to) const {
    if (SPREAD) {
      #pragma unroll
      for (int i = 0; i < 2; i++) {
        float sum = sums[0][2 * i] + sums[0][2 * i + 1];
        for (int lanes = 1; lanes < 4; lanes *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, lanes);
        if (lane % 4 == 0) to[(lane / 4 + i * 8) * STRIDE] = sum;
      }
      return;
    }
    #pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++)
      #pragma unroll
      for (int i = 0; i < 4; i++)
        if (!FUSED || lane % 4 == 0) to[(lane / 4 + i / 2 * 8) * STRIDE + n * 8 + lane % 4 * 2 + i % 2] = sums[n][i];
  }

  // All units of this block whose tiles are of one kind, several tiles on their way. `then` is called when the first ones are.
  template <class Tile, class F>
  DEVICE void run(const Arguments& a, F then) {
    // A warp takes RUN tiles that lie side by side at a time; the last time perhaps too many, which are not used.
    constexpr int RUN = Tile::RUN, BYTES = RUN * Tile::BYTES, DEPTH = (Tile::TYPE == FLOATS ? FLOAT_RING : CODE_RING) / BYTES;
    Ring<DEPTH, BYTES> ring;
    Tile tile;
    ring.open(ring_memory, barriers, warp, lane);
    const int units = a.units, steps = a.steps, halves = a.ends == GATE ? 2 : 1;
    const int runs = (steps - warp * RUN + WARPS * RUN - 1) / (WARPS * RUN);  // of this warp in a row of tiles
    // The first unit from this one on that this run is for.
    auto next_of_kind = [&](int unit) {
      if (KIND == MIXED)
        while (unit < units && a.matrices[matrix_of(a, unit)].kind != Tile::TYPE) unit += gridDim.x;
      return unit;
    };
    // The next tiles of this warp to be fetched.
    int unit = next_of_kind(blockIdx.x), half = 0, left = 0;
    const u8* at = nullptr;
    auto seek = [&] {
      left = unit < units ? runs : 0;
      if (left <= 0) return;
      const int matrix = matrix_of(a, unit) + half;
      const long long row = halves == 2 ? unit : unit - a.matrices[matrix].first_unit;
      at = a.matrices[matrix].tiles + (row * steps + warp * RUN) * Tile::BYTES;
    };
    auto fetch = [&](int ahead) {
      ring.template fetch<BYTES>(ahead, at, left > 0, lane);
      at += WARPS * BYTES;
      if (--left == 0) {
        if (++half == halves) half = 0, unit = next_of_kind(unit + gridDim.x);
        seek();
      }
    };
    seek();
    #pragma unroll 1
    for (int i = 0; i < DEPTH - 1; i++) fetch(i);
    then();
    #pragma unroll 1
    for (int mine = next_of_kind(blockIdx.x); mine < units; mine = next_of_kind(mine + gridDim.x)) {
      float* of_set = results + set * halves * HALF_RESULTS;
      #pragma unroll 1
      for (int part = 0; part < halves; part++) {
        float sums[COLUMN_TILES][4] = {};
        #pragma unroll 1
        for (int step = warp * RUN; step < steps; step += WARPS * RUN) {
          __syncwarp();
          fetch(DEPTH - 1);
          ring.template wait<DEPTH - 1>();
          tile.add_run(ring.address(), activations, step, steps, sums, lane);
          ring.pass();
        }
        store<Tile::SPREAD>(sums, of_set + part * HALF_RESULTS + warp * WARP_RESULTS);
      }
      __syncthreads();
      finish(a, of_set, factors, mine);
      if (SETS == 1) __syncthreads();
      else set ^= 1;
    }
    ring.close(lane);
  }

#if COLUMN_TILES >= 4 && KIND == FLOATS
  // The same with PARTS rows of tiles at a time: many rows of activations are larger than the weights that they are multiplied
  // with, so they are read once for several of them. Sums are added in the same order, and have the same bits.
  template <int PARTS, class F>
  DEVICE void run_grouped(const Arguments& a, F then) {
    constexpr int BYTES = FloatTile::BYTES, DEPTH = FLOAT_RING / (PARTS * BYTES), AHEAD = 2;
    Ring<DEPTH, PARTS * BYTES> ring;
    ring.open(ring_memory, barriers, warp, lane);
    const int steps = a.steps, halves = a.ends == GATE ? 2 : 1, group_units = PARTS / halves;
    const int groups = (a.units + group_units - 1) / group_units;
    // A warp takes two neighbouring steps of every sixteen.
    auto after = [&](int step) { return step % 2 == 0 && step + 1 < steps ? step + 1 : step / 2 * 2 + 2 * WARPS; };
    // The next tiles of this warp to be fetched.
    int group = warp * 2 < steps ? (int)blockIdx.x : groups, fetched = warp * 2;
    const u8* tiles[PARTS];
    auto seek = [&] {
      #pragma unroll
      for (int i = 0; i < PARTS; i++) {
        // The last group may repeat a unit.
        const int unit = min(group * group_units + i / halves, a.units - 1), matrix = matrix_of(a, unit) + i % halves;
        const long long row = halves == 2 ? unit : unit - a.matrices[matrix].first_unit;
        tiles[i] = a.matrices[matrix].tiles + row * steps * BYTES;
      }
    };
    auto fetch = [&](int ahead) {
      ring.template fetch_parts<BYTES>(ahead, tiles, fetched * BYTES, group < groups, lane);
      if (group >= groups) return;
      fetched = after(fetched);
      if (fetched < steps) return;
      fetched = warp * 2, group += gridDim.x;
      if (group < groups) seek();
    };
    if (group < groups) seek();
    #pragma unroll 1
    for (int i = 0; i < DEPTH; i++) fetch(i);
    then();
    #pragma unroll 1
    for (int mine = blockIdx.x; mine < groups; mine += gridDim.x) {
      float sums[PARTS][COLUMN_TILES][4] = {};
      u32 x[AHEAD][8];
      #pragma unroll
      for (int n = 0; n < AHEAD; n++) activations.operands<true>(min(warp * 2, steps - 1), n, lane, x[n]);
      #pragma unroll 1
      for (int step = warp * 2; step < steps;) {
        const int next = after(step);
        ring.template wait<DEPTH - 1>();
        uint4 words[PARTS][4];
        #pragma unroll
        for (int i = 0; i < PARTS; i++)
          #pragma unroll
          for (int j = 0; j < 4; j++) words[i][j] = shared16(ring.address() + i * BYTES + j * 512 + lane * 16);
        ring.pass();
        __syncwarp();
        fetch(DEPTH - 1);
        #pragma unroll
        for (int n = 0; n < COLUMN_TILES; n++) {
          #pragma unroll
          for (int j = 0; j < 4; j++)
            #pragma unroll
            for (int i = 0; i < PARTS; i++) {
              const u32 registers[4] = {words[i][j].x, words[i][j].y, words[i][j].z, words[i][j].w};
              multiply_add<true>(sums[i][n], registers, x[n % AHEAD][2 * j], x[n % AHEAD][2 * j + 1]);
            }
          const bool of_next = n + AHEAD >= COLUMN_TILES;
          activations.operands<true>(of_next ? min(next, steps - 1) : step, (n + AHEAD) % COLUMN_TILES, lane, x[n % AHEAD]);
        }
        step = next;
      }
      #pragma unroll
      for (int i = 0; i < PARTS; i++) {
        store<false>(sums[i], results + i % halves * HALF_RESULTS + warp * WARP_RESULTS);
        if (i % halves != halves - 1) continue;
        const int unit = mine * group_units + i / halves;
        __syncthreads();
        if (unit < a.units) finish(a, results, factors, unit);
        __syncthreads();
      }
    }
    ring.close(lane);
  }
#endif
};

#if FUSED
#if KIND == MIXED
#define CALLED_SEVERAL_TIMES __device__ __noinline__
#else
#define CALLED_SEVERAL_TIMES DEVICE
#endif
// Makes the activations from their source, in shared memory.
CALLED_SEVERAL_TIMES Activations prepare(const Arguments& a, u8* memory, float2* shared, float* factors) {
  bool wide = KIND == FLOATS, codes = KIND != FLOATS && KIND != MIXED;
  if (KIND == MIXED)
    for (int i = 0; i < a.matrix_count; i++) (a.matrices[i].kind == FLOATS ? wide : codes) = true;
  // Products take up to four steps at a time.
  const int steps = (a.steps + 3) / 4 * 4, bytes = a.rows * steps * 128;
  u8* f16 = memory + (wide ? bytes : 0);
  float* sums = (float*)(f16 + (codes ? bytes : 0));
  #pragma unroll 1
  for (int row = 0; row < a.rows; row++) {
    const Row input(a.source, row, steps, codes, shared);
    if (wide) input.write<true>(memory, sums, 1, a.rows, row);
    if (!codes) continue;
    input.write<false>(f16, sums, 1, a.rows, row);
    if (threadIdx.x == 0) factors[row] = input.factor();
  }
  __syncthreads();
  return {shared_address(memory), shared_address(f16), shared_address(sums), a.rows};
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, COLUMN_TILES <= 2 ? 2 : 1) multiply(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ u64 barriers[WARPS * MOST_STAGES];
  __shared__ float2 shared[WARPS];
  __shared__ float row_factors[2];
  if (!a.late) let_next_launch_begin();
  float* results = (float*)(memory + a.ring_bytes);
  Block block = {memory, barriers, results, FUSED ? row_factors : a.factors, {}, kept((int)threadIdx.x / 32), kept((int)threadIdx.x % 32), 0};
#if !FUSED
  block.activations = {a.bf16, a.f16, a.sums, a.rows};
#endif
  bool prepared = false;
  // Weights are on their way while the launch that writes the source still runs.
  auto begin_with = [&] {
    if (prepared) return;
    prepared = true;
    wait_for_launches();
    if (a.late) let_next_launch_begin();
#if FUSED
    block.activations = prepare(a, (u8*)(results + SETS * (a.ends == GATE ? 2 : 1) * HALF_RESULTS), shared, row_factors);
#endif
  };
#if COLUMN_TILES >= 4 && KIND == FLOATS
  if (a.parts == 3) block.run_grouped<3>(a, begin_with);
  else block.run_grouped<2>(a, begin_with);
#elif KIND != MIXED
  block.run<TileOf<KIND>::Tile>(a, begin_with);
#else
  // One kind after the other.
  bool there[MIXED] = {};
  for (int i = 0; i < a.matrix_count; i++) there[a.matrices[i].kind] = true;
  if (there[FLOATS]) block.run<TileOf<FLOATS>::Tile>(a, begin_with);
  if (there[NIBBLES]) block.run<TileOf<NIBBLES>::Tile>(a, begin_with);
  if (there[EIGHTS]) block.run<TileOf<EIGHTS>::Tile>(a, begin_with);
  if (there[SIXTEENS]) block.run<TileOf<SIXTEENS>::Tile>(a, begin_with);
  if (there[FP8]) block.run<TileOf<FP8>::Tile>(a, begin_with);
  if (there[MXFP4]) block.run<TileOf<MXFP4>::Tile>(a, begin_with);
#endif
}
