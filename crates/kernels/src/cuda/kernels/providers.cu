// Tiles of weights on their way to the matrix instruction, of each kind that tiles.cu defines.

template <bool WIDE>
DEVICE void multiply_add(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if (WIDE)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Activations in the order of activations.cu: rows of one column tile in shared memory (FUSED), or column tiles of eight rows in
// global memory, or single rows there, of which a list says which column has which (LISTED).
struct Activations {
#if FUSED
  u32 bf16, f16, sums;  // addresses in shared memory
#else
  const u8* bf16;
  const u8* f16;
  const float* sums;
#endif
  int rows;  // LISTED: bytes of a row
#if LISTED
  const int* list;  // the row of every column, or -1
#endif

  // The activations of 64 inputs and 8 rows that one lane holds: four steps of two registers.
  template <bool WIDE>
  DEVICE void operands(int step, int tile, int lane, u32 (&b)[8]) const {
#if FUSED
    const u32 at = (WIDE ? bf16 : f16) + step * rows * 128 + lane * 16;
    const bool there = lane / 4 < rows;
    const int half_bytes = rows * 64;
#elif LISTED
    const int half_bytes = 64, row = list[tile * 8 + lane / 4];
    const u8* at = (WIDE ? bf16 : f16) + (long long)row * rows + step * 128 + lane % 4 * 16;
    const bool there = row >= 0;
#else
    const int half_bytes = 512;
    const u8* at = (WIDE ? bf16 : f16) + (long long)(step * COLUMN_TILES + tile) * 1024 + lane * 16;
    const bool there = tile * 8 + lane / 4 < rows;
#endif
    #pragma unroll
    for (int half = 0; half < 2; half++) {
      uint4 x = make_uint4(0, 0, 0, 0);
#if FUSED
      if (there) x = shared16(at + half * half_bytes);
#else
      if (there) x = *(const uint4*)(at + half * half_bytes);
#endif
      b[half * 4] = x.x, b[half * 4 + 1] = x.y, b[half * 4 + 2] = x.z, b[half * 4 + 3] = x.w;
    }
  }
  // Sums of 16 inputs for the two rows whose results one lane holds.
  DEVICE float2 sums_of(int step, int tile, int j, int lane) const {
    const int column = tile * 8 + lane % 4 * 2;
#if FUSED
    const u32 at = sums + ((step * 4 + j) * rows + column) * 4;
    return make_float2(column < rows ? __uint_as_float(shared4(at)) : 0.0f, column + 1 < rows ? __uint_as_float(shared4(at + 4)) : 0.0f);
#elif LISTED
    const int first = list[column], second = list[column + 1], at = step * 4 + j, stride = rows / 32;
    return make_float2(
        first >= 0 ? sums[(long long)first * stride + at] : 0.0f, second >= 0 ? sums[(long long)second * stride + at] : 0.0f);
#else
    return *(const float2*)(sums + (((long long)step * COLUMN_TILES + tile) * 4 + j) * 8 + column % 8);
#endif
  }
};

// Each kind of tile says how many bytes it has, how many of them are fetched at a time, and adds its products with activations
// to sums. A tile is named by its address in shared memory.
struct FloatTile {
  static constexpr int TYPE = FLOATS, BYTES = 2048, RUN = 2;
  DEVICE static void add(u32 tile, const Activations& a, int step, float (&sums)[COLUMN_TILES][4], int lane) {
    uint4 words[4];
    #pragma unroll
    for (int j = 0; j < 4; j++) words[j] = shared16(tile + j * 512 + lane * 16);
    #pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++) {
      u32 x[8];
      a.operands<true>(step, n, lane, x);
      #pragma unroll
      for (int j = 0; j < 4; j++) {
        const u32 registers[4] = {words[j].x, words[j].y, words[j].z, words[j].w};
        multiply_add<true>(sums[n], registers, x[2 * j], x[2 * j + 1]);
      }
    }
  }
};

// An integer in the low bits of an f16 between 1024 and 2048 is that integer plus 1024.
constexpr u32 UNITS = 0x64006400u;
constexpr float UNIT = 1024.0f;

template <int BITS, int GROUP>
struct CodeTile {
  static constexpr int TYPE = BITS == 4 ? NIBBLES : GROUP == 32 ? EIGHTS : SIXTEENS;
  static constexpr int GROUPS = 64 / GROUP, STEPS = GROUP / 16, RUN = BITS == 4 ? 2 : 1;
  static constexpr int BYTES = BITS * 128 + TILE_ROWS * GROUPS * 4;
  uint4 codes[BITS / 4];
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
  DEVICE static void add(u32 tile, const Activations& a, int step, float (&sums)[COLUMN_TILES][4], int lane) {
    CodeTile held;
    #pragma unroll
    for (int i = 0; i < BITS / 4; i++) held.codes[i] = shared16(tile + i * 512 + lane * 16);
    u32 x[COLUMN_TILES][8];
    #pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++) a.operands<false>(step, n, lane, x[n]);
    #pragma unroll
    for (int group = 0; group < GROUPS; group++) {
      u32 registers[STEPS][4];
      #pragma unroll
      for (int j = 0; j < STEPS; j++) held.unpack(group * STEPS + j, registers[j]);
      float scale[2], offset[2];
      #pragma unroll
      for (int i = 0; i < 2; i++) {
        const u32 pair = shared4(tile + BITS * 128 + ((lane / 4 + 8 * i) * GROUPS + group) * 4);
        scale[i] = half_to_float(pair & 0xffffu);
        offset[i] = -__fmaf_rn(UNIT, scale[i], half_to_float(pair >> 16));
      }
      #pragma unroll
      for (int n = 0; n < COLUMN_TILES; n++) {
        float product[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        float2 inputs = a.sums_of(step, n, group * STEPS, lane);
        if (STEPS == 2) {
          const float2 more = a.sums_of(step, n, group * STEPS + 1, lane);
          inputs.x += more.x, inputs.y += more.y;
        }
        #pragma unroll
        for (int j = 0; j < STEPS; j++)
          multiply_add<false>(product, registers[j], x[n][2 * (group * STEPS + j)], x[n][2 * (group * STEPS + j) + 1]);
        #pragma unroll
        for (int i = 0; i < 4; i++)
          sums[n][i] = __fmaf_rn(scale[i / 2], product[i], __fmaf_rn(offset[i / 2], i % 2 ? inputs.y : inputs.x, sums[n][i]));
      }
    }
  }
};

// FP8 weights (E4M3). Their bits are those of an f16 with a smaller exponent: 2^-8 of the weight, which scales make up for.
struct Fp8Tile {
  static constexpr int TYPE = FP8, BYTES = 1024 + TILE_ROWS * 4, RUN = 1;
  DEVICE static u32 two_halves(u32 high_bytes) {
    return (high_bytes & 0x80008000u) | (high_bytes >> 1 & 0x3f803f80u);
  }
  DEVICE static void add(u32 tile, const Activations& a, int step, float (&sums)[COLUMN_TILES][4], int lane) {
    u32 registers[4][4];
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint4 codes = shared16(tile + i * 512 + lane * 16);
      const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
      #pragma unroll
      for (int j = 0; j < 2; j++)
        #pragma unroll
        for (int part = 0; part < 4; part++)
          registers[2 * i + j][part] = two_halves(__byte_perm(words[2 * j + part / 2], 0, part % 2 ? 0x3424 : 0x1404));
    }
    const float scale[2] = {
        __uint_as_float(shared4(tile + 1024 + lane / 4 * 4)), __uint_as_float(shared4(tile + 1024 + (lane / 4 + 8) * 4))};
    #pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++) {
      u32 x[8];
      a.operands<false>(step, n, lane, x);
      float product[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      #pragma unroll
      for (int j = 0; j < 4; j++) multiply_add<false>(product, registers[j], x[2 * j], x[2 * j + 1]);
      #pragma unroll
      for (int i = 0; i < 4; i++) sums[n][i] = __fmaf_rn(scale[i / 2], product[i], sums[n][i]);
    }
  }
};

// MXFP4 weights. Two of them become two f16 of 2^-14 of their size in two steps; groups of 32 columns have a power of two each.
struct Mxfp4Tile {
  static constexpr int TYPE = MXFP4, BYTES = 512 + TILE_ROWS * 2, RUN = 2;
  DEVICE static void add(u32 tile, const Activations& a, int step, float (&sums)[COLUMN_TILES][4], int lane) {
    const uint4 codes = shared16(tile + lane * 16);
    const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
    u32 x[COLUMN_TILES][8];
    #pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++) a.operands<false>(step, n, lane, x[n]);
    // The exponents of rows in pairs of bytes: both groups of a row.
    const u32 low = shared4(tile + 512 + lane / 8 * 4) >> lane / 4 % 2 * 16, high = shared4(tile + 528 + lane / 8 * 4) >> lane / 4 % 2 * 16;
    #pragma unroll
    for (int group = 0; group < 2; group++) {
      const float scale[2] = {
          power_of(low >> 8 * group & 0xffu) * (16384.0f * SCALE_UNIT), power_of(high >> 8 * group & 0xffu) * (16384.0f * SCALE_UNIT)};
      u32 registers[2][4];
      #pragma unroll
      for (int j = 0; j < 2; j++)
        #pragma unroll
        for (int part = 0; part < 4; part++) {
          const u32 pair = words[2 * group + j] >> 4 * part;
          registers[j][part] = (pair << 12 & 0x80008000u) | (pair << 9 & 0x0e000e00u);
        }
      #pragma unroll
      for (int n = 0; n < COLUMN_TILES; n++) {
        float product[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        #pragma unroll
        for (int j = 0; j < 2; j++)
          multiply_add<false>(product, registers[j], x[n][2 * (2 * group + j)], x[n][2 * (2 * group + j) + 1]);
        #pragma unroll
        for (int i = 0; i < 4; i++) sums[n][i] = __fmaf_rn(scale[i / 2], product[i], sums[n][i]);
      }
    }
  }
};

template <int TYPE> struct TileOf { typedef FloatTile Tile; };
template <> struct TileOf<NIBBLES> { typedef CodeTile<4, 32> Tile; };
template <> struct TileOf<EIGHTS> { typedef CodeTile<8, 32> Tile; };
template <> struct TileOf<SIXTEENS> { typedef CodeTile<8, 16> Tile; };
template <> struct TileOf<FP8> { typedef Fp8Tile Tile; };
template <> struct TileOf<MXFP4> { typedef Mxfp4Tile Tile; };
