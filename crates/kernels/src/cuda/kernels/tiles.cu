// Weights on the card. A matrix is cut into tiles of 16 rows (output channels) and 64 columns (inputs), whose numbers lie in
// the order in which the lanes of a warp hold the first operand of four matrix instructions, 16 columns each:
//
//   lane = 4 g + t of step j holds   a0: row g,     columns 16 j + 2 t, + 1        a2: row g,     columns 16 j + 2 t + 8, + 9
//                                    a1: row g + 8, the same                       a3: row g + 8, the same
//
//   floats    bf16       [step][lane][a0 a1 a2 a3]                              2048 bytes
//   nibbles   4 bits     [lane][step], then [row][32 columns] scale, offset      640 bytes
//   eights    8 bits     [two steps][lane][step], then as nibbles               1152 bytes
//   sixteens  8 bits     the same, with a scale for every 16 columns            1280 bytes
//   FP8       E4M3       as eights, then [row] scale as f32                     1088 bytes
//   MXFP4     E2M1       as nibbles, then [row][32 columns] exponent, a byte     544 bytes
//
// A quantised weight is scale * code - offset; both are f16 and 256 times as large, so that small ones keep their bits. A scale of
// FP8 is 2^16 times as large: 256 times, and 2^8 because its bits are read as those of an f16. An exponent of MXFP4 is stored as
// it is. All tiles of 16 rows lie side by side. Rows and columns beyond the matrix are zero.

constexpr int TILE_ROWS = 16, TILE_COLUMNS = 64;
// As macros, because kernels for one kind are told so by a macro; MIXED is for launches with several.
#define FLOATS 0
#define NIBBLES 1
#define EIGHTS 2
#define SIXTEENS 3
#define FP8 4
#define MXFP4 5
#define MIXED 6
constexpr float SCALE_UNIT = 256.0f;

DEVICE int tile_bytes(int kind) {
  return kind == FLOATS ? 2048 : kind == NIBBLES ? 640 : kind == EIGHTS ? 1152 : kind == FP8 ? 1088 : kind == MXFP4 ? 544 : 1280;
}
// Bytes of the codes of a tile; scales follow.
DEVICE int code_bytes(int kind) { return kind == NIBBLES || kind == MXFP4 ? 512 : 1024; }

DEVICE float half_to_float(u32 bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((u16)bits));
  return x;
}
DEVICE u32 float_to_half(float x) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
DEVICE float bf16_to_float(u32 bits) { return __uint_as_float(bits << 16); }
DEVICE u32 float_to_bf16(float x) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

// 2^-8 of an E4M3 number: its bits are those of an f16 with a smaller exponent.
DEVICE float e4m3(u32 byte) { return half_to_float((byte & 0x80u) << 8 | (byte & 0x7fu) << 7); }

// 2^-14 of an E2M1 number, for the same reason, and the power of two that an exponent of MXFP4 stands for.
DEVICE float e2m1(u32 nibble) { return half_to_float((nibble & 8u) << 12 | (nibble & 7u) << 9); }
// 0 stands for 2^-127, which is subnormal, and 255 for a NaN.
DEVICE float power_of(u32 exponent) { return __uint_as_float(exponent << 23 | (exponent % 255 == 0 ? 0x00400000u : 0u)); }

// Where two neighbouring columns, an even one and the next, lie in a tile: lane, step and register.
struct Place {
  int lane, step, part;
};
DEVICE Place place_of(int row, int column) {
  const int inner = column % 16;
  return {row % 8 * 4 + inner % 8 / 2, column / 16, inner / 8 * 2 + row / 8};
}

// The weights that two codes of a row of a tile stand for, which belong to one group of columns.
DEVICE float2 code_pair(const u8* tile, int kind, int row, int column, u32 first, u32 second) {
  const u8* scales = tile + code_bytes(kind);
  if (kind == MXFP4) {
    const float scale = power_of(scales[row * 2 + column / 32]) * 16384.0f;
    return make_float2(scale * e2m1(first), scale * e2m1(second));
  }
  if (kind == FP8) {
    const float scale = *(const float*)(scales + row * 4) * (1.0f / (SCALE_UNIT * 256.0f));
    return make_float2(scale * e4m3(first) * 256.0f, scale * e4m3(second) * 256.0f);
  }
  const int groups = kind == SIXTEENS ? 4 : 2;
  const u32 scale = *(const u32*)(scales + (row * groups + column / (TILE_COLUMNS / groups)) * 4);
  const float s = half_to_float(scale & 0xffffu) * (1.0f / SCALE_UNIT), o = half_to_float(scale >> 16) * (1.0f / SCALE_UNIT);
  return make_float2(s * (float)first - o, s * (float)second - o);
}

// The weights of a row at two neighbouring columns, an even one and the next.
DEVICE float2 weight_pair(const u8* tiles, int kind, int steps, int row, int column) {
  const u8* tile = tiles + ((long long)(row / TILE_ROWS) * steps + column / TILE_COLUMNS) * tile_bytes(kind);
  const int tile_row = row % TILE_ROWS, tile_column = column % TILE_COLUMNS;
  const Place place = place_of(tile_row, tile_column);
  if (kind == FLOATS) {
    const u32 word = *(const u32*)(tile + place.step * 512 + place.lane * 16 + place.part * 4);
    return make_float2(bf16_to_float(word & 0xffffu), bf16_to_float(word >> 16));
  }
  if (kind == NIBBLES || kind == MXFP4) {
    const u32 word = *(const u32*)(tile + place.lane * 16 + place.step * 4) >> 4 * place.part;
    return code_pair(tile, kind, tile_row, tile_column, word & 15, word >> 16 & 15);
  }
  const u8* pair = tile + place.step / 2 * 512 + place.lane * 16 + place.step % 2 * 8 + place.part * 2;
  return code_pair(tile, kind, tile_row, tile_column, pair[0], pair[1]);
}
