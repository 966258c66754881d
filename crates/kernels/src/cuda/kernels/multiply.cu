// Products of weights with up to 8 * COLUMN_TILES rows of activations: every weight is read once, from memory to registers in
// the order of the matrix instruction. A block has 16 output channels, or a share of their inputs; its warps take 64 inputs in
// turn. Sums are added in an order that depends on the matrix alone, so a row has the same bits in every batch.

constexpr int WARPS = 8;
constexpr int MOST_MATRICES = 3;

struct Matrix {
  const u8* tiles;
  const float* bias;  // or null
  int kind, rows, first_column;  // first_column: where its outputs begin in a row of `out`
  int first_block;
};

struct Arguments {
  Matrix matrices[MOST_MATRICES];
  const u8* bf16;        // activations; see pack.cu
  const u8* f16;
  const float* sums;
  const float* factors;  // of f16 activations
  float* out;
  float* partials;       // [block][split][16 channels][row], where inputs are split
  int* arrivals;         // [block], zero before and after
  long long out_stride;
  int matrix_count, rows, steps, splits, adds;
};

template <bool WIDE>
DEVICE void multiply_add(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if (WIDE)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE uint4 load_once(const u8* pointer) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
      : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(pointer));
  return x;
}

// Activations of 64 inputs and 8 rows that one lane holds: four steps of two registers.
struct Operands {
  u32 b[8];
  DEVICE void load(const u8* operands, int step, int tile, bool there, int lane) {
    const u8* at = operands + ((long long)step * COLUMN_TILES + tile) * 1024 + lane * 16;
    #pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint4 x = there ? *(const uint4*)(at + half * 512) : make_uint4(0, 0, 0, 0);
      b[half * 4] = x.x, b[half * 4 + 1] = x.y, b[half * 4 + 2] = x.z, b[half * 4 + 3] = x.w;
    }
  }
};

struct FloatTile {
  static constexpr int KIND = FLOATS, DEPTH = COLUMN_TILES <= 2 ? 3 : 2;
  uint4 words[4];
  DEVICE void load(const u8* tile, int lane) {
    #pragma unroll
    for (int j = 0; j < 4; j++) words[j] = load_once(tile + j * 512 + lane * 16);
  }
  DEVICE void add(const Arguments& a, int step, float (&sums)[COLUMN_TILES][4], int lane) const {
    #pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++) {
      Operands x;
      x.load(a.bf16, step, n, n * 8 + lane / 4 < a.rows, lane);
      #pragma unroll
      for (int j = 0; j < 4; j++) {
        const u32 registers[4] = {words[j].x, words[j].y, words[j].z, words[j].w};
        multiply_add<true>(sums[n], registers, x.b[2 * j], x.b[2 * j + 1]);
      }
    }
  }
};

// An integer in the low bits of an f16 between 1024 and 2048 is that integer plus 1024.
constexpr u32 UNITS = 0x64006400u;
constexpr float UNIT = 1024.0f;

template <int BITS, int GROUP>
struct CodeTile {
  static constexpr int KIND = BITS == 4 ? NIBBLES : GROUP == 32 ? BYTES : SIXTEENS;
  static constexpr int DEPTH = BITS == 4 ? 4 : 3;
  static constexpr int GROUPS = 64 / GROUP, STEPS = GROUP / 16;
  uint4 codes[BITS / 4];
  u32 scales[2][GROUPS];  // of rows g and g + 8
  DEVICE void load(const u8* tile, int lane) {
    #pragma unroll
    for (int i = 0; i < BITS / 4; i++) codes[i] = load_once(tile + i * 512 + lane * 16);
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      const u8* at = tile + BITS * 128 + (lane / 4 + 8 * i) * (GROUPS * 4);
      #pragma unroll
      for (int group = 0; group < GROUPS; group += 2) {
        const uint2 pair = __ldg((const uint2*)(at + group * 4));
        scales[i][group] = pair.x, scales[i][group + 1] = pair.y;
      }
    }
  }
  DEVICE u32 word(int index) const {
    const uint4& x = codes[index / 4];
    return index % 4 == 0 ? x.x : index % 4 == 1 ? x.y : index % 4 == 2 ? x.z : x.w;
  }
  DEVICE void unpack(int j, u32 (&registers)[4]) const {
    if (BITS == 4) {
      const u32 x = word(j);
      #pragma unroll
      for (int part = 0; part < 4; part++) registers[part] = (x >> 4 * part & 0x000f000fu) | UNITS;
    } else {
      #pragma unroll
      for (int part = 0; part < 4; part++)
        registers[part] = __byte_perm(word(2 * j + part / 2), UNITS, part % 2 ? 0x7372 : 0x7170);
    }
  }
  DEVICE void add(const Arguments& a, int step, float (&sums)[COLUMN_TILES][4], int lane) const {
    Operands x[COLUMN_TILES];
    #pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++) x[n].load(a.f16, step, n, n * 8 + lane / 4 < a.rows, lane);
    #pragma unroll
    for (int group = 0; group < GROUPS; group++) {
      u32 registers[STEPS][4];
      #pragma unroll
      for (int j = 0; j < STEPS; j++) unpack(group * STEPS + j, registers[j]);
      float scale[2], offset[2];
      #pragma unroll
      for (int i = 0; i < 2; i++) {
        scale[i] = half_to_float(scales[i][group] & 0xffffu);
        offset[i] = -__fmaf_rn(UNIT, scale[i], half_to_float(scales[i][group] >> 16));
      }
      #pragma unroll
      for (int n = 0; n < COLUMN_TILES; n++) {
        float product[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        const float* of_inputs = a.sums + (((long long)step * COLUMN_TILES + n) * 4 + group * STEPS) * 8 + lane % 4 * 2;
        float2 inputs = *(const float2*)of_inputs;
        if (STEPS == 2) {
          const float2 more = *(const float2*)(of_inputs + 8);
          inputs.x += more.x, inputs.y += more.y;
        }
        #pragma unroll
        for (int j = 0; j < STEPS; j++)
          multiply_add<false>(product, registers[j], x[n].b[2 * (group * STEPS + j)], x[n].b[2 * (group * STEPS + j) + 1]);
        #pragma unroll
        for (int i = 0; i < 4; i++)
          sums[n][i] = __fmaf_rn(scale[i / 2], product[i], __fmaf_rn(offset[i / 2], i % 2 ? inputs.y : inputs.x, sums[n][i]));
      }
    }
  }
};

// The tiles `begin, begin + WARPS, ..` below `end`, several of them on their way.
template <class Tile>
DEVICE void add_tiles(const Arguments& a, const u8* tiles, int begin, int end, float (&sums)[COLUMN_TILES][4], int lane) {
  constexpr int DEPTH = Tile::DEPTH;
  const int bytes = tile_bytes(Tile::KIND);
  Tile ring[DEPTH];
  #pragma unroll
  for (int i = 0; i < DEPTH; i++)
    if (begin + i * WARPS < end) ring[i].load(tiles + (long long)(begin + i * WARPS) * bytes, lane);
  // Weights are on their way while the launch that packs the activations still runs.
  wait_for_launches();
  #pragma unroll 1
  for (int first = begin; first < end; first += DEPTH * WARPS) {
    #pragma unroll
    for (int i = 0; i < DEPTH; i++) {
      const int step = first + i * WARPS, next = step + DEPTH * WARPS;
      if (step >= end) break;
      ring[i].add(a, step, sums, lane);
      if (next < end) ring[i].load(tiles + (long long)next * bytes, lane);
    }
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) multiply(const __grid_constant__ Arguments a) {
  constexpr int COLUMNS = 8 * COLUMN_TILES, STRIDE = COLUMNS + 1;
  __shared__ float results[WARPS][TILE_ROWS * STRIDE];
  __shared__ int last;
  let_next_launch_begin();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, split = blockIdx.y;
  int which = 0;
  #pragma unroll
  for (int i = 1; i < MOST_MATRICES; i++)
    if (i < a.matrix_count && blockIdx.x >= a.matrices[i].first_block) which = i;
  const Matrix& m = a.matrices[which];
  const int row_tile = blockIdx.x - m.first_block;
  const u8* tiles = m.tiles + (long long)row_tile * a.steps * tile_bytes(m.kind);
  const int share = (a.steps + a.splits - 1) / a.splits;
  const int begin = split * share + warp, end = min(a.steps, (split + 1) * share);
  float sums[COLUMN_TILES][4] = {};
  if (m.kind == FLOATS) add_tiles<FloatTile>(a, tiles, begin, end, sums, lane);
  else if (m.kind == NIBBLES) add_tiles<CodeTile<4, 32>>(a, tiles, begin, end, sums, lane);
  else if (m.kind == BYTES) add_tiles<CodeTile<8, 32>>(a, tiles, begin, end, sums, lane);
  else add_tiles<CodeTile<8, 16>>(a, tiles, begin, end, sums, lane);
  #pragma unroll
  for (int n = 0; n < COLUMN_TILES; n++)
    #pragma unroll
    for (int i = 0; i < 4; i++)
      results[warp][(lane / 4 + i / 2 * 8) * STRIDE + n * 8 + lane % 4 * 2 + i % 2] = sums[n][i];
  __syncthreads();
  float* partials = a.partials + (long long)blockIdx.x * a.splits * (TILE_ROWS * COLUMNS);
  if (a.splits > 1) {
    for (int i = threadIdx.x; i < TILE_ROWS * COLUMNS; i += 32 * WARPS) {
      float sum = 0.0f;
      #pragma unroll
      for (int w = 0; w < WARPS; w++) sum += results[w][i / COLUMNS * STRIDE + i % COLUMNS];
      partials[split * (TILE_ROWS * COLUMNS) + i] = sum;
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      last = atomicAdd(&a.arrivals[blockIdx.x], 1) == a.splits - 1;
      if (last) a.arrivals[blockIdx.x] = 0;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
  }
  for (int i = threadIdx.x; i < TILE_ROWS * a.rows; i += 32 * WARPS) {
    const int row = i / TILE_ROWS, channel = i % TILE_ROWS, output = row_tile * TILE_ROWS + channel;
    if (output >= m.rows) continue;
    float sum = 0.0f;
    if (a.splits > 1) {
      for (int s = 0; s < a.splits; s++) sum += __ldcg(&partials[s * (TILE_ROWS * COLUMNS) + channel * COLUMNS + row]);
    } else {
      #pragma unroll
      for (int w = 0; w < WARPS; w++) sum += results[w][channel * STRIDE + row];
    }
    if (m.kind != FLOATS) sum *= a.factors[row];
    if (m.bias) sum += m.bias[output];
    float* out = a.out + row * a.out_stride + m.first_column + output;
    *out = a.adds ? *out + sum : sum;
  }
}
