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
  // Those of a tile of a run.
  DEVICE const Activations& of(int) const { return *this; }
};

#if LISTED
// The activations of one tile and eight rows that a lane has already.
struct Held {
  const Activations& a;
  const u32 (&x)[8];
  template <bool WIDE>
  DEVICE void operands(int, int, int, u32 (&b)[8]) const {
    #pragma unroll
    for (int i = 0; i < 8; i++) b[i] = x[i];
  }
  DEVICE float2 sums_of(int step, int tile, int j, int lane) const { return a.sums_of(step, tile, j, lane); }
};

// Those of a run of tiles, all on their way at once and before the tiles are waited for.
template <int RUN, bool WIDE>
struct Fetched {
  const Activations& a;
  u32 x[RUN][8];
  DEVICE Fetched(const Activations& activations, int step, int steps, int lane) : a(activations) {
    #pragma unroll
    for (int i = 0; i < RUN; i++) a.operands<WIDE>(min(step + i, steps - 1), 0, lane, x[i]);
  }
  DEVICE Held of(int i) const { return {a, x[i]}; }
};
#endif

// Each kind of tile says how many bytes it has, how many of them are fetched at a time, and adds its products with activations
// to sums. A tile is named by its address in shared memory.
struct FloatTile {
  static constexpr int TYPE = FLOATS, BYTES = 2048, RUN = 2;
  static constexpr bool SPREAD = false, TAKEN_BACK = false;
  template <class A>
  DEVICE static void add(u32 tile, const A& a, int step, float (&sums)[COLUMN_TILES][4], int lane) {
    uint4 words[4];
    #pragma unroll
    for (int j = 0; j < 4; j++) words[j] = shared16(tile + j * 512 + lane * 16);
    #pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++) {
      u32 x[8];
      a.template operands<true>(step, n, lane, x);
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

// Some bits of a word, plus UNITS, in one instruction: that has room for one constant only.
template <u32 MASK>
DEVICE u32 with_units(u32 word) {
  u32 result;
  asm("{.reg .b32 units; mov.b32 units, %2; lop3.b32 %0, %1, %3, units, 0xea;}" : "=r"(result) : "r"(word), "r"(kept(UNITS)), "n"(MASK));
  return result;
}

// Codes of 4 bits in rows 8 to 15 of a tile are read where they are, as 16 times the code.
template <int BITS, int GROUP>
struct CodeTile {
  static constexpr int TYPE = BITS == 4 ? NIBBLES : GROUP == 32 ? EIGHTS : SIXTEENS;
  static constexpr int GROUPS = 64 / GROUP, STEPS = GROUP / 16, RUN = BITS == 4 ? 2 : 1;
  static constexpr int BYTES = BITS * 128 + TILE_ROWS * GROUPS * 4;
  static constexpr bool SPREAD = false, TAKEN_BACK = false, OFFSETS = true;
  uint4 codes[BITS / 4];
  DEVICE u32 word(int index) const {
    const uint4& x = codes[index / 4];
    return index % 4 == 0 ? x.x : index % 4 == 1 ? x.y : index % 4 == 2 ? x.z : x.w;
  }
  DEVICE void unpack(int j, u32 (&registers)[4]) const {
    if (BITS == 4) {
      const u32 x = word(j), y = x >> 8;
      registers[0] = with_units<0x000f000fu>(x), registers[1] = with_units<0x00f000f0u>(x);
      registers[2] = with_units<0x000f000fu>(y), registers[3] = with_units<0x00f000f0u>(y);
    } else {
      #pragma unroll
      for (int part = 0; part < 4; part++)
        registers[part] = __byte_perm(word(2 * j + part / 2), UNITS, part % 2 ? 0x7372 : 0x7170);
    }
  }
  DEVICE void load(u32 tile, int lane) {
    #pragma unroll
    for (int i = 0; i < BITS / 4; i++) codes[i] = shared16(tile + i * 512 + lane * 16);
  }
  // Scales of two groups of a row, and what the sums of their inputs are multiplied with.
  DEVICE static void scales_of(u32 tile, int row, int group, float (&scales)[2], float (&offsets)[2]) {
    const uint2 pairs = shared8(tile + BITS * 128 + (row * GROUPS + group) * 4);
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      const u32 pair = i ? pairs.y : pairs.x;
      scales[i] = half_to_float(pair & 0xffffu) * (BITS == 4 && row >= 8 ? 1.0f / 16.0f : 1.0f);
      offsets[i] = -__fmaf_rn(UNIT, scales[i], half_to_float(pair >> 16));
    }
  }
#if FUSED
  // The sums of the inputs of two groups, of the only row.
  DEVICE static float2 inputs_of(const Activations& a, int step, int group) {
    const u32 at = a.sums + step * 16;
    if (GROUPS == 4) {
      const uint2 two = shared8(at + group * 4);
      return make_float2(__uint_as_float(two.x), __uint_as_float(two.y));
    }
    const uint4 four = shared16(at);
    return make_float2(__uint_as_float(four.x) + __uint_as_float(four.y), __uint_as_float(four.z) + __uint_as_float(four.w));
  }
#endif
  template <class A>
  DEVICE static void add(u32 tile, const A& a, int step, float (&sums)[COLUMN_TILES][4], int lane) {
    CodeTile held;
    held.load(tile, lane);
    u32 x[COLUMN_TILES][8];
    #pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++) a.template operands<false>(step, n, lane, x[n]);
    #pragma unroll
    for (int group = 0; group < GROUPS; group++) {
      u32 registers[STEPS][4];
      #pragma unroll
      for (int j = 0; j < STEPS; j++) held.unpack(group * STEPS + j, registers[j]);
      float scale[2], offset[2];
      #pragma unroll
      for (int i = 0; i < 2; i++) {
        const u32 pair = shared4(tile + BITS * 128 + ((lane / 4 + 8 * i) * GROUPS + group) * 4);
        scale[i] = half_to_float(pair & 0xffffu) * (BITS == 4 && i == 1 ? 1.0f / 16.0f : 1.0f);
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

// FP8 weights (E4M3). Before sm_89 their bits are read as those of an f16 with a smaller exponent: 2^-8 of the weight.
struct Fp8Tile {
  static constexpr int TYPE = FP8, BYTES = 1024 + TILE_ROWS * 4, RUN = 2;
  static constexpr bool SPREAD = false, TAKEN_BACK = FUSED;
#if __CUDA_ARCH__ >= 890
  static constexpr float UNIT = 1.0f / 256.0f;  // scales are stored for 2^-8 of the weights
  DEVICE static void four_weights(u32 word, u32& low, u32& high) {
    asm("{.reg .b16 first, second; mov.b32 {first, second}, %2;"
        "cvt.rn.f16x2.e4m3x2 %0, first; cvt.rn.f16x2.e4m3x2 %1, second;}" : "=r"(low), "=r"(high) : "r"(word));
  }
#else
  static constexpr float UNIT = 1.0f;
  DEVICE static u32 two_halves(u32 high_bytes) {
    return (high_bytes & 0x80008000u) | (high_bytes >> 1 & 0x3f803f80u);
  }
  DEVICE static void four_weights(u32 word, u32& low, u32& high) {
    low = two_halves(__byte_perm(word, 0, 0x1404)), high = two_halves(__byte_perm(word, 0, 0x3424));
  }
#endif
  template <class A>
  DEVICE static void add(u32 tile, const A& a, int step, float (&sums)[COLUMN_TILES][4], int lane) {
    u32 registers[4][4];
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint4 codes = shared16(tile + i * 512 + lane * 16);
      const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
      #pragma unroll
      for (int j = 0; j < 4; j++) four_weights(words[j], registers[2 * i + j / 2][j % 2 * 2], registers[2 * i + j / 2][j % 2 * 2 + 1]);
    }
    const float scale[2] = {__uint_as_float(shared4(tile + 1024 + lane / 4 * 4)) * UNIT,
                            __uint_as_float(shared4(tile + 1024 + (lane / 4 + 8) * 4)) * UNIT};
    #pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++) {
      u32 x[8];
      a.template operands<false>(step, n, lane, x);
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
  static constexpr int TYPE = MXFP4, BYTES = 512 + TILE_ROWS * 2, RUN = 4, GROUPS = 2;
  static constexpr bool SPREAD = false, TAKEN_BACK = false, OFFSETS = false;
  uint4 codes;
  DEVICE void load(u32 tile, int lane) { codes = shared16(tile + lane * 16); }
  DEVICE void unpack(int j, u32 (&registers)[4]) const {
    const u32 word = j == 0 ? codes.x : j == 1 ? codes.y : j == 2 ? codes.z : codes.w;
    #pragma unroll
    for (int part = 0; part < 4; part++) {
      const u32 pair = word >> 4 * part;
      registers[part] = (pair << 12 & 0x80008000u) | (pair << 9 & 0x0e000e00u);
    }
  }
  // The scales of both groups of a row.
  DEVICE static void scales_of(u32 tile, int row, int, float (&scales)[2], float (&)[2]) {
    const u32 pair = shared4(tile + 512 + row / 2 * 4) >> row % 2 * 16;
    #pragma unroll
    for (int i = 0; i < 2; i++) scales[i] = power_of(pair >> 8 * i & 0xffu) * (16384.0f * SCALE_UNIT);
  }
  DEVICE static float2 inputs_of(const Activations&, int, int) { return make_float2(0.0f, 0.0f); }
  template <class A>
  DEVICE static void add(u32 tile, const A& a, int step, float (&sums)[COLUMN_TILES][4], int lane) {
    Mxfp4Tile held;
    held.load(tile, lane);
    u32 x[COLUMN_TILES][8];
    #pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++) a.template operands<false>(step, n, lane, x[n]);
    float scales[2][2], none[2];
    #pragma unroll
    for (int i = 0; i < 2; i++) scales_of(tile, lane / 4 + 8 * i, 0, scales[i], none);
    #pragma unroll
    for (int group = 0; group < 2; group++) {
      u32 registers[2][4];
      #pragma unroll
      for (int j = 0; j < 2; j++) held.unpack(2 * group + j, registers[j]);
      #pragma unroll
      for (int n = 0; n < COLUMN_TILES; n++) {
        float product[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        #pragma unroll
        for (int j = 0; j < 2; j++)
          multiply_add<false>(product, registers[j], x[n][2 * (2 * group + j)], x[n][2 * (2 * group + j) + 1]);
        #pragma unroll
        for (int i = 0; i < 4; i++) sums[n][i] = __fmaf_rn(scales[i / 2][group], product[i], sums[n][i]);
      }
    }
  }
};

// Tiles that are taken one at a time, RUN of them in a row.
template <class T>
struct EachTile : T {
  template <class A>
  DEVICE static void add_run(u32 tiles, const A& a, int step, int steps, float (&sums)[COLUMN_TILES][4], int lane) {
    #pragma unroll
    for (int i = 0; i < T::RUN; i++) {
      const bool there = i == 0 || step + i < steps;
      if (!T::TAKEN_BACK) {
        if (there) T::add(tiles + i * T::BYTES, a.of(i), step + i, sums, lane);
        continue;
      }
      // Activations in shared memory go on with zeros. Taking a sum back is faster than a branch around which nothing else is
      // computed.
      const float before[4] = {sums[0][0], sums[0][1], sums[0][2], sums[0][3]};
      T::add(tiles + i * T::BYTES, a.of(i), step + i, sums, lane);
      #pragma unroll
      for (int j = 0; j < 4; j++) sums[0][j] = there ? sums[0][j] : before[j];
    }
  }
};

template <int TYPE> struct TileOf { typedef EachTile<FloatTile> Tile; };
template <> struct TileOf<FP8> { typedef EachTile<Fp8Tile> Tile; };
#if !FUSED
template <> struct TileOf<NIBBLES> { typedef EachTile<CodeTile<4, 32>> Tile; };
template <> struct TileOf<EIGHTS> { typedef EachTile<CodeTile<8, 32>> Tile; };
template <> struct TileOf<SIXTEENS> { typedef EachTile<CodeTile<8, 16>> Tile; };
template <> struct TileOf<MXFP4> { typedef EachTile<Mxfp4Tile> Tile; };
#endif
