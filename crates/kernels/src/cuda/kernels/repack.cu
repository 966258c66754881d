// Stored weights to tiles, once at load. A thread fills what one lane holds of a tile, and sixteen of the threads of a tile a
// row of scales each.

// Stored types, in the order of `DType`.
constexpr int F32 = 0, F16 = 1, BF16 = 2, Q4_0 = 3, Q4_1 = 4, Q5_0 = 5, Q5_1 = 6, Q8_0 = 7, Q4_K = 8, Q5_K = 9, Q6_K = 10;
constexpr int MX_FP4 = 11, F8_E4M3 = 12;

struct Arguments {
  const u8* stored;  // rows `first_row..` of the matrix
  u8* tiles;
  long long row_bytes;
  int type, kind, rows, columns, steps;
  int first_row, row_tiles;  // what is repacked here
  int scale_columns;         // columns that share a scale of FP8, a multiple of those of a tile
  const float* scales;       // of FP8: [row from first_row on][columns / scale_columns, rounded up]
};

DEVICE u32 word16(const u8* at) { return at[0] | at[1] << 8; }
DEVICE u32 word32(const u8* at) { return word16(at) | word16(at + 2) << 16; }
DEVICE float half_at(const u8* at) { return half_to_float(word16(at)); }

DEVICE float stored_float(const u8* row, int type, int column) {
  if (type == F32) return __uint_as_float(word32(row + 4 * column));
  const u32 bits = word16(row + 2 * column);
  return type == F16 ? half_to_float(bits) : bf16_to_float(bits);
}

// The code of a column.
DEVICE u32 stored_code(const u8* row, int type, int column) {
  if (type == F8_E4M3) return row[column];
  const int i = column % 32;
  if (type == MX_FP4) return row[(long long)(column / 32) * 17 + 1 + i % 16] >> (i < 16 ? 0 : 4) & 15;
  if (type <= Q8_0) {
    const int bytes = type == Q4_0 ? 18 : type == Q4_1 ? 20 : type == Q5_0 ? 22 : type == Q5_1 ? 24 : 34;
    const u8* block = row + (long long)(column / 32) * bytes;
    if (type == Q8_0) return (u32)block[2 + i] ^ 128u;  // plus 128
    const int high_at = type == Q5_0 ? 2 : 4;  // the fifth bits of the types that have them
    const int low_at = type == Q4_0 ? 2 : type == Q4_1 ? 4 : high_at + 4;
    const u32 low = block[low_at + i % 16] >> (i < 16 ? 0 : 4) & 15;
    return type == Q4_0 || type == Q4_1 ? low : low | (word32(block + high_at) >> i & 1) << 4;
  }
  const int inner = column % 256, part = inner / 32;
  if (type == Q6_K) {
    const u8* block = row + (long long)(column / 256) * 210;
    const int half = inner / 128, which = inner % 128 / 32;
    const u32 low = block[half * 64 + which % 2 * 32 + i] >> (which < 2 ? 0 : 4) & 15;
    return low | (block[128 + half * 32 + i] >> 2 * which & 3) << 4;
  }
  const u8* block = row + (long long)(column / 256) * (type == Q4_K ? 144 : 176);
  const u32 low = block[(type == Q4_K ? 16 : 48) + part / 2 * 32 + i] >> (part % 2 ? 4 : 0) & 15;
  return type == Q4_K ? low : low | (block[16 + i] >> part & 1) << 4;
}

// Scale and offset of the group that a column belongs to: a weight is scale * code - offset.
DEVICE float2 stored_scale(const u8* row, int type, int column) {
  if (type <= Q8_0) {
    const int bytes = type == Q4_0 ? 18 : type == Q4_1 ? 20 : type == Q5_0 ? 22 : type == Q5_1 ? 24 : 34;
    const u8* block = row + (long long)(column / 32) * bytes;
    const float scale = half_at(block);
    if (type == Q4_1 || type == Q5_1) return make_float2(scale, -half_at(block + 2));
    return make_float2(scale, scale * (type == Q4_0 ? 8.0f : type == Q5_0 ? 16.0f : 128.0f));
  }
  const int inner = column % 256, part = inner / 32;
  if (type == Q6_K) {
    const u8* block = row + (long long)(column / 256) * 210;
    const float scale = half_at(block + 208) * (float)(signed char)block[192 + inner / 16];
    return make_float2(scale, 32.0f * scale);
  }
  const u8* block = row + (long long)(column / 256) * (type == Q4_K ? 144 : 176);
  const u8* packed = block + 4;  // six bits each of eight scales and eight offsets
  const u32 scale = part < 4 ? packed[part] & 63 : (packed[part + 4] & 15) | packed[part - 4] >> 6 << 4;
  const u32 offset = part < 4 ? packed[part + 4] & 63 : packed[part + 4] >> 4 | packed[part] >> 6 << 4;
  return make_float2(half_at(block) * (float)scale, half_at(block + 2) * (float)offset);
}

// Calls `f` with every register that a lane holds of a tile: step, part, row and column, counted from the first of the tile.
template <class F>
DEVICE void for_registers(int lane, F f) {
  for (int j = 0; j < 4; j++)
    for (int part = 0; part < 4; part++)
      f(j, part, lane / 4 + part % 2 * 8, 16 * j + lane % 4 * 2 + part / 2 * 8);
}

extern "C" __global__ void repack(Arguments a) {
  const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  const int lane = thread % 32;
  const long long tile = thread / 32;
  if (tile >= (long long)a.row_tiles * a.steps) return;
  const int step = tile % a.steps, first_row = (int)(tile / a.steps) * TILE_ROWS, first_column = step * TILE_COLUMNS;
  u8* target = a.tiles + ((long long)(a.first_row / TILE_ROWS) * a.steps + tile) * tile_bytes(a.kind);
  // Whether there is such a row and column, counted as above.
  auto there = [&](int row, int column) { return a.first_row + first_row + row < a.rows && first_column + column < a.columns; };
  auto stored_row = [&](int row) { return a.stored + (first_row + row) * a.row_bytes; };
  if (a.kind == FLOATS) {
    for_registers(lane, [&](int j, int part, int row, int column) {
      u32 pair[2];
      for (int i = 0; i < 2; i++)
        pair[i] = there(row, column + i) ? float_to_bf16(stored_float(stored_row(row), a.type, first_column + column + i)) : 0;
      *(u32*)(target + j * 512 + lane * 16 + part * 4) = pair[0] | pair[1] << 16;
    });
    return;
  }
  u32 words[8] = {};
  bool bad = false;
  for_registers(lane, [&](int j, int part, int row, int column) {
    for (int i = 0; i < 2; i++) {
      const u32 code = there(row, column + i) ? stored_code(stored_row(row), a.type, first_column + column + i) : 0;
      bad |= (code & 0x7fu) == 0x7fu;
      if (a.kind == NIBBLES || a.kind == MXFP4) words[j] |= code << (4 * part + 16 * i);
      else words[j * 2 + part / 2] |= code << (part % 2 * 16 + 8 * i);
    }
  });
  if (a.kind == NIBBLES || a.kind == MXFP4) {
    *(uint4*)(target + lane * 16) = make_uint4(words[0], words[1], words[2], words[3]);
  } else {
    *(uint4*)(target + lane * 16) = make_uint4(words[0], words[1], words[2], words[3]);
    *(uint4*)(target + 512 + lane * 16) = make_uint4(words[4], words[5], words[6], words[7]);
  }
  // A NaN of FP8 has the bits of a number where it is read; the scale makes it one again.
  bad = __any_sync(ALL_LANES, bad);
  if (lane >= TILE_ROWS) return;
  if (a.kind == FP8) {
    const int across = (a.columns + a.scale_columns - 1) / a.scale_columns;
    const float scale = there(lane, 0) ? a.scales[(long long)(first_row + lane) * across + first_column / a.scale_columns] : 0.0f;
    *(float*)(target + 1024 + lane * 4) = bad ? __int_as_float(0x7fc00000) : scale * (SCALE_UNIT * 256.0f);
    return;
  }
  if (a.kind == MXFP4) {
    for (int group = 0; group < 2; group++) {
      const int column = first_column + 32 * group;
      target[512 + lane * 2 + group] = there(lane, 32 * group) ? stored_row(lane)[(long long)(column / 32) * 17] : 0;
    }
    return;
  }
  const int groups = a.kind == SIXTEENS ? 4 : 2;
  for (int group = 0; group < groups; group++) {
    const int column = group * (TILE_COLUMNS / groups);
    const float2 scale =
        there(lane, column) ? stored_scale(stored_row(lane), a.type, first_column + column) : make_float2(0.0f, 0.0f);
    const u32 bits = float_to_half(scale.x * SCALE_UNIT) | float_to_half(scale.y * SCALE_UNIT) << 16;
    *(u32*)(target + code_bytes(a.kind) + (lane * groups + group) * 4) = bits;
  }
}

struct UnpackArguments {
  const u8* tiles;
  void* out;  // [row][column], bf16 or f32
  int kind, rows, columns, steps;
};

// Tiles back to rows of f32, for those who ask for weights.
extern "C" __global__ void unpack_floats(UnpackArguments a) {
  const long long index = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  const int pairs = a.columns / 2;
  if (index >= (long long)a.rows * pairs) return;
  ((float2*)a.out)[index] = weight_pair(a.tiles, a.kind, a.steps, index / pairs, index % pairs * 2);
}

// What the lanes of a warp hold of a tile, as bf16: [step][register].
struct HeldTile {
  u32 words[4][4];

  DEVICE HeldTile(const u8* tile, int kind, int lane) {
    if (kind == FLOATS) {
      #pragma unroll
      for (int j = 0; j < 4; j++) set(j, __ldcs((const uint4*)(tile + j * 512) + lane));
      return;
    }
    const bool nibbles = kind == NIBBLES || kind == MXFP4;
    uint4 codes[2] = {__ldcs((const uint4*)tile + lane), nibbles ? make_uint4(0, 0, 0, 0) : __ldcs((const uint4*)(tile + 512) + lane)};
    const u32* word = (const u32*)codes;
    #pragma unroll
    for (int j = 0; j < 4; j++)
      #pragma unroll
      for (int part = 0; part < 4; part++) {
        const int row = lane / 4 + part % 2 * 8;
        const u32 pair = nibbles ? word[j] >> 4 * part : word[2 * j + part / 2] >> part % 2 * 16;
        const u32 first = nibbles ? pair & 15u : pair & 255u, second = nibbles ? pair >> 16 & 15u : pair >> 8 & 255u;
        words[j][part] = bf16_pair(tile, kind, row, 16 * j, first, second);
      }
  }
  DEVICE void set(int j, uint4 x) { words[j][0] = x.x, words[j][1] = x.y, words[j][2] = x.z, words[j][3] = x.w; }

  // Two codes of a row as weights, rounded to bf16.
  DEVICE static u32 bf16_pair(const u8* tile, int kind, int row, int column, u32 first, u32 second) {
    const float2 pair = code_pair(tile, kind, row, column, first, second);
    return float_to_bf16(pair.x) | float_to_bf16(pair.y) << 16;
  }
};

// Tiles back to rows of bf16, for products of many rows. A warp takes a tile: its rows come together in shared memory, so that
// memory is written 16 bytes at a time.
extern "C" __global__ void __launch_bounds__(256) unpack_rows(UnpackArguments a) {
  constexpr int STRIDE = 128 + 16;
  __shared__ __align__(16) u8 shared[8][TILE_ROWS * STRIDE];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const long long index = (long long)blockIdx.x * 8 + warp;
  const int tile_row = index / a.steps, step = index % a.steps;
  if (tile_row * TILE_ROWS >= a.rows) return;
  const HeldTile held(a.tiles + index * tile_bytes(a.kind), a.kind, lane);
  #pragma unroll
  for (int j = 0; j < 4; j++)
    #pragma unroll
    for (int part = 0; part < 4; part++)
      *(u32*)(shared[warp] + (lane / 4 + part % 2 * 8) * STRIDE + j * 32 + part / 2 * 16 + lane % 4 * 4) = held.words[j][part];
  __syncwarp();
  u16* out = (u16*)a.out;
  #pragma unroll
  for (int i = 0; i < 4; i++) {
    const int row = tile_row * TILE_ROWS + i * 4 + lane / 8, column = step * TILE_COLUMNS + lane % 8 * 8;
    const u8* from = shared[warp] + (i * 4 + lane / 8) * STRIDE + lane % 8 * 16;
    if (row >= a.rows || column >= a.columns) continue;
    u16* to = out + (long long)row * a.columns + column;
    if (a.columns % 8 == 0) *(uint4*)to = *(const uint4*)from;
    else
      for (int k = 0; k < 8 && column + k < a.columns; k++) to[k] = ((const u16*)from)[k];
  }
}

struct EmbedArguments {
  const u8* tiles;
  const u32* tokens;
  float* out;  // [row][column]
  int kind, rows, columns, steps;
};

// The rows of a table that tokens name.
extern "C" __global__ void embed(EmbedArguments a) {
  let_next_launch_begin();
  wait_for_launches();
  // Whoever sends tokens has checked them; a replayed launch reads them again.
  const int token = min(a.tokens[blockIdx.x], (u32)a.rows - 1);
  float2* out = (float2*)(a.out + (long long)blockIdx.x * a.columns);
  for (int pair = threadIdx.x; pair < a.columns / 2; pair += blockDim.x)
    out[pair] = weight_pair(a.tiles, a.kind, a.steps, token, 2 * pair);
}
