// Products of weights with up to 8 * COLUMN_TILES rows of activations: every weight is read once, from memory to registers in
// the order of the matrix instruction.
//
// The work is a line of chunks, 16 output channels by 512 inputs each (a tile for every warp), all chunks of 16 channels
// side by side:
//
//   channels 0..16              channels 16..32              ...
//   | 0 | 1 | 2 | ... | last |  | 0 | 1 | 2 | ... | last |
//   |------ block 0 ------|---- block 1 ----|---- block 2 ...
//
// Every block takes an equal part of the line and keeps reading ahead of itself while results are put together. Channels that
// are cut leave partial sums, which the last block to arrive adds in the order of blocks. All of that depends on the matrices
// and on the card, not on the rows: a row has the same bits in every batch.

constexpr int WARPS = THREADS / 32;
constexpr int MOST_MATRICES = 3;
constexpr int COLUMNS = 8 * COLUMN_TILES, STRIDE = COLUMNS + 1;
constexpr int WARP_RESULTS = TILE_ROWS * STRIDE, HALF_RESULTS = WARPS * WARP_RESULTS;
// With two sets, results of one group of channels are read while those of the next are written.
constexpr int SETS = COLUMN_TILES <= 2 ? 2 : 1;
constexpr int SET = 0, ADD = 1, GATE = 2;
// FLOAT_RING and CODE_RING are the shared memory of a warp for tiles on their way.
constexpr int MOST_STAGES = FLOAT_RING / 2048 > CODE_RING / 640 ? FLOAT_RING / 2048 : CODE_RING / 640;

struct Matrix {
  const u8* tiles;
  const float* bias;  // or null
  int kind, rows, first_column;  // first_column: where its outputs begin in a row of `out`
  int first_tile;
};

struct Arguments {
  Matrix matrices[MOST_MATRICES];
  Source source;         // FUSED: what the activations are made from
  const u8* bf16;        // otherwise: what pack.cu made of them
  const u8* f16;
  const float* sums;
  float* factors;        // of f16 activations
  float* out;
  float* partials;       // [block][first or last][half][16 channels][row]
  int* arrivals;         // [group], zero before and after
  long long out_stride;
  int matrix_count, rows, steps, tiles, ends;  // ends: what happens to results; with GATE, matrices 0 and 1 are one group
  int ring_bytes;        // of all warps
};

// The line of chunks and the part of this block. Groups are what is put together at the end: the chunks of 16 channels, twice
// as many where a gate and what it multiplies belong together.
struct Line {
  int per_tile, halves, per_group, begin, end;
  u32 chunks, blocks;  // their product fits: `multiply.rs` sees to it
  DEVICE explicit Line(const Arguments& a)
      : per_tile((a.steps + WARPS - 1) / WARPS), halves(a.ends == GATE ? 2 : 1), per_group(per_tile * halves),
        chunks(a.tiles * per_tile), blocks(gridDim.x) {
    begin = first(blockIdx.x), end = first(blockIdx.x + 1);
  }
  DEVICE int first(u32 block) const { return (int)(block * chunks / blocks); }
  DEVICE int owner(u32 chunk) const { return (int)(((chunk + 1) * blocks - 1) / chunks); }
};

// The matrix and the tile row of the n-th tile of the line.
struct TileRow {
  int matrix, row;
  DEVICE TileRow(const Arguments& a, int n) : matrix(0) {
    if (a.ends == GATE) {
      matrix = n % 2, row = n / 2;
      return;
    }
    #pragma unroll
    for (int i = 1; i < MOST_MATRICES; i++)
      if (i < a.matrix_count && n >= a.matrices[i].first_tile) matrix = i;
    row = n - a.matrices[matrix].first_tile;
  }
};

// Adds the warps' results of a group, and those of other blocks that have chunks of it; then writes them.
DEVICE void finish(const Arguments& a, const Line& line, const float* results, const float* factors, int group, int there) {
  __shared__ int last;
  const int group_begin = group * line.per_group, group_end = group_begin + line.per_group;
  const bool whole = group_begin >= line.begin && group_end <= line.end;
  auto joined = [&](int half, int channel, int row) {
    float sum = 0.0f;
    if (there >> half & 1) {
      const float* at = results + half * HALF_RESULTS + channel * STRIDE + row;
      #pragma unroll
      for (int w = 0; w < WARPS; w++) sum += at[w * WARP_RESULTS];
    }
    return sum;
  };
  constexpr int PART = 2 * TILE_ROWS * COLUMNS;
  if (!whole) {
    float* mine = a.partials + ((long long)blockIdx.x * 2 + (group == line.begin / line.per_group ? 0 : 1)) * PART;
    for (int i = threadIdx.x; i < line.halves * TILE_ROWS * a.rows; i += THREADS) {
      const int half = i / (TILE_ROWS * a.rows), row = i / TILE_ROWS % a.rows, channel = i % TILE_ROWS;
      mine[(half * TILE_ROWS + channel) * COLUMNS + row] = joined(half, channel, row);
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      const int others = line.owner(group_end - 1) - line.owner(group_begin);
      last = atomicAdd(&a.arrivals[group], 1) == others;
      if (last) a.arrivals[group] = 0;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
  }
  const int first_block = whole ? 0 : line.owner(group_begin), last_block = whole ? 0 : line.owner(group_end - 1);
  // Only the first of the blocks can have begun with another group.
  const int first_slot = whole ? 0 : group == line.first(first_block) / line.per_group ? 0 : 1;
  auto summed = [&](int half, int channel, int row) {
    if (whole) return joined(half, channel, row);
    float sum = 0.0f;
    for (int block = first_block; block <= last_block; block++) {
      const int slot = block == first_block ? first_slot : 0;
      sum += __ldcg(a.partials + ((long long)block * 2 + slot) * PART + (half * TILE_ROWS + channel) * COLUMNS + row);
    }
    return sum;
  };
  const TileRow place(a, group * line.halves);
  for (int i = threadIdx.x; i < TILE_ROWS * a.rows; i += THREADS) {
    const int row = i / TILE_ROWS, channel = i % TILE_ROWS, output = place.row * TILE_ROWS + channel;
    auto result = [&](int half) {
      const Matrix& m = a.matrices[place.matrix + half];
      float sum = summed(half, channel, row);
      if (m.kind != FLOATS) sum *= factors[row];
      return m.bias ? sum + m.bias[output] : sum;
    };
    if (output >= a.matrices[place.matrix].rows) continue;
    float* out = a.out + row * a.out_stride + a.matrices[place.matrix].first_column + output;
    if (a.ends == GATE) *out = gated(result(0), result(1));
    else *out = a.ends == ADD ? *out + result(0) : result(0);
  }
}

// Where the tiles of a warp are, one after the other. Warps beyond the last tile of a row have nothing in that chunk.
struct Cursor {
  const Arguments& a;
  int per_tile, warp, tile_bytes;
  int tile, in_tile, chunk;  // of the next one
  const u8* at;

  DEVICE Cursor(const Arguments& a, const Line& line, int begin, int warp, int tile_bytes)
      : a(a), per_tile(line.per_tile), warp(warp), tile_bytes(tile_bytes), tile(begin / per_tile), in_tile(begin % per_tile), chunk(begin) {
    if (in_tile * WARPS + warp >= a.steps) next_tile();
    else seek();
  }
  DEVICE void seek() {
    const TileRow place(a, tile);
    at = a.matrices[place.matrix].tiles + ((long long)place.row * a.steps + in_tile * WARPS + warp) * tile_bytes;
    if (warp >= a.steps) chunk = 1 << 30;  // there is none
  }
  DEVICE void next_tile() {
    chunk += per_tile - in_tile;
    tile++, in_tile = 0;
    if (tile < a.tiles) seek();
  }
  DEVICE void advance() {
    if ((in_tile + 1) * WARPS + warp < a.steps) in_tile++, chunk++, at += WARPS * tile_bytes;
    else next_tile();
  }
};

// The state of a block on its way along the line.
struct Block {
  const Arguments& a;
  const Line& line;
  u8* ring_memory;
  u64* barriers;
  float* results;
  float* factors;
  Activations activations;
  int warp, lane, there, set;

  // Leaves the sums of a warp for the others, and finishes the group if it ends here.
  DEVICE void leave(float (&sums)[COLUMN_TILES][4], int chunk) {
    const int half = chunk / line.per_tile % line.halves, group = chunk / line.per_group;
    float* of_set = results + set * line.halves * HALF_RESULTS;
    float* mine = of_set + half * HALF_RESULTS + warp * WARP_RESULTS;
    #pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++)
      #pragma unroll
      for (int i = 0; i < 4; i++) {
        mine[(lane / 4 + i / 2 * 8) * STRIDE + n * 8 + lane % 4 * 2 + i % 2] = sums[n][i];
        sums[n][i] = 0.0f;
      }
    there |= 1 << half;
    if (chunk + 1 < line.end && (chunk + 1) % line.per_group != 0) return;
    __syncthreads();
    finish(a, line, of_set, factors, group, there);
    there = 0;
    if (SETS == 1) __syncthreads();
    else set ^= 1;
  }

  // Goes from `begin` to `end`, all of it tiles of one kind, several of them on their way. `then` is called when the first
  // ones are.
  template <class Tile, class F>
  DEVICE void run(int begin, int end, F then) {
    constexpr int DEPTH = (Tile::TYPE == FLOATS ? FLOAT_RING : CODE_RING) / Tile::BYTES;
    Ring<DEPTH, Tile::BYTES> ring;
    ring.open(ring_memory, barriers, warp, lane);
    Cursor next(a, line, begin, warp, Tile::BYTES);
    auto fetch = [&](int ahead) {
      const bool there = next.chunk < end;
      ring.template fetch<Tile::BYTES>(ahead, next.at, there, lane);
      if (there) next.advance();
    };
    #pragma unroll 1
    for (int i = 0; i < DEPTH - 1; i++) fetch(i);
    then();
    float sums[COLUMN_TILES][4] = {};
    int in_tile = begin % line.per_tile;
    #pragma unroll 1
    for (int chunk = begin; chunk < end; chunk++) {
      const int step = in_tile * WARPS + warp;
      if (step < a.steps) {
        __syncwarp();
        fetch(DEPTH - 1);
        ring.template wait<DEPTH - 1>();
        Tile::add(ring.address(), activations, step, sums, lane);
        ring.pass();
      }
      const bool ends = ++in_tile == line.per_tile;
      if (ends) in_tile = 0;
      if (ends || chunk == line.end - 1) leave(sums, chunk);
    }
    ring.close(lane);
  }
};

#if FUSED
// Makes the activations from their source, in shared memory.
__device__ __noinline__ Activations prepare(const Arguments& a, u8* memory, float* shared, float* factors) {
  bool wide = KIND == FLOATS, codes = KIND != FLOATS && KIND != MIXED;
  if (KIND == MIXED)
    for (int i = 0; i < a.matrix_count; i++) (a.matrices[i].kind == FLOATS ? wide : codes) = true;
  const int bytes = a.rows * a.steps * 128;
  u8* f16 = memory + (wide ? bytes : 0);
  float* sums = (float*)(f16 + (codes ? bytes : 0));
  #pragma unroll 1
  for (int row = 0; row < a.rows; row++) {
    const Row input(a.source, row, a.steps, shared);
    if (wide) input.write<true>(memory, sums, 1.0f, 1, a.rows, row);
    if (!codes) continue;
    const float power = input.f16_power(shared);
    input.write<false>(f16, sums, power, 1, a.rows, row);
    if (threadIdx.x == 0) factors[row] = 1.0f / (power * SCALE_UNIT);
  }
  __syncthreads();
  return {shared_address(memory), shared_address(f16), shared_address(sums), a.rows};
}

#endif

extern "C" __global__ void __launch_bounds__(THREADS, COLUMN_TILES <= 2 ? 2 : 1) multiply(const __grid_constant__ Arguments a) {
  extern __shared__ float4 memory[];
  __shared__ u64 barriers[WARPS * MOST_STAGES];
  __shared__ float shared[WARPS], row_factors[8];
  let_next_launch_begin();
  const Line line(a);
  float* results = (float*)((u8*)memory + a.ring_bytes);
  Block block = {a, line, (u8*)memory, barriers, results, FUSED ? row_factors : a.factors, {},
      kept((int)threadIdx.x / 32), kept((int)threadIdx.x % 32), 0, 0};
#if !FUSED
  block.activations = {a.bf16, a.f16, a.sums, a.rows};
#endif
  bool prepared = false;
  // Weights are on their way while the launch that writes the source still runs.
  auto begin_with = [&] {
    if (prepared) return;
    prepared = true;
    wait_for_launches();
#if FUSED
    block.activations = prepare(a, (u8*)(results + SETS * line.halves * HALF_RESULTS), shared, row_factors);
#endif
  };
#if KIND != MIXED
  block.run<TileOf<KIND>::Tile>(line.begin, line.end, begin_with);
#else
  for (int begin = line.begin; begin < line.end;) {
    // Tiles of one kind end where the matrix does, or where the other half of a group begins.
    const TileRow place(a, begin / line.per_tile);
    const Matrix& m = a.matrices[place.matrix];
    const int half_end = (begin / line.per_tile + 1) * line.per_tile;
    const int matrix_end = (m.first_tile + (m.rows + TILE_ROWS - 1) / TILE_ROWS) * line.per_tile;
    const int end = min(line.end, a.ends == GATE ? half_end : matrix_end);
    if (m.kind == FLOATS) block.run<TileOf<FLOATS>::Tile>(begin, end, begin_with);
    else if (m.kind == NIBBLES) block.run<TileOf<NIBBLES>::Tile>(begin, end, begin_with);
    else if (m.kind == EIGHTS) block.run<TileOf<EIGHTS>::Tile>(begin, end, begin_with);
    else if (m.kind == SIXTEENS) block.run<TileOf<SIXTEENS>::Tile>(begin, end, begin_with);
    else block.run<TileOf<FP8>::Tile>(begin, end, begin_with);
    begin = end;
  }
#endif
}
