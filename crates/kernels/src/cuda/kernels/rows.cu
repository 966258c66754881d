// What sealing a page consists of, whatever the format: rows in shared memory, and where the codes of a token go.

constexpr int THREADS = 128;
constexpr int TILE_TOKENS = SEALED_TILE_TOKENS;
constexpr int GROUP_CHUNKS = CHUNKS / GROUPS;
// Where values and scales begin in a tile; those of keys come first.
constexpr int KEY_BYTES = SEALED_KEY_BYTES, SCALES_AT = SEALED_KEY_BYTES + SEALED_VALUE_BYTES;
constexpr int SIDE_SCALE_BYTES = SEALED_SCALE_BYTES;
constexpr int TILE_BYTES = SEALED_TILE_BYTES;
constexpr int SEALED_BYTES = PAGE_TOKENS / TILE_TOKENS * TILE_BYTES;
// Whether tokens share words of keys. Words of 2-bit keys hold two chunks of a token; where the number of chunks is odd, of two
// tokens.
constexpr bool SHARED_WORDS = BAND_UNITS ? TOKEN_BITS % 8 != 0 : BITS == 2 && CHUNKS % 2 == 1;

// A row in shared memory: eight channels of eight tokens lie side by side.
struct Row {
  const uint4* units;
  DEVICE uint4 unit(int chunk, int part) const { return units[chunk * 32 + part * 8]; }
};

DEVICE u32 max_halves(u32 a, u32 b) {
  u32 c;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}
DEVICE u32 min_halves(u32 a, u32 b) {
  u32 c;
  asm("min.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}
// Zero times both halves, added to `sum`: NaN if one is not finite.
DEVICE u32 zero_times(u32 word, u32 sum) {
  u32 c;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(c) : "r"(word), "r"(0), "r"(sum));
  return c;
}

// Calls `f` with each word (two channels) of chunks `begin..end` in order, so many units of eight channels unrolled: more
// are fewer instructions, and too many for the instruction cache where `f` is long.
template <int UNROLLED, class F>
DEVICE void for_words(const Row& row, int begin, int end, F f) {
  #pragma unroll 1
  for (int first = begin * 4; first < end * 4; first += UNROLLED) {
    #pragma unroll
    for (int i = 0; i < UNROLLED; i++) {
      const uint4 unit = row.unit(first >> 2, UNROLLED == 4 ? i : (first & 3) + i);
      f(unit.x);
      f(unit.y);
      f(unit.z);
      f(unit.w);
    }
  }
}
template <int UNROLLED, class F>
DEVICE void for_values(const Row& row, int begin, int end, F f) {
  for_words<UNROLLED>(row, begin, end, [&](u32 word) {
    f(low_half(word));
    f(high_half(word));
  });
}

// The lowest bytes of four numbers as one word.
DEVICE u32 four_bytes(float a, float b, float c, float d) {
  const u32 ab = __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x0040);
  const u32 cd = __byte_perm(__float_as_uint(c), __float_as_uint(d), 0x0040);
  return __byte_perm(ab, cd, 0x5410);
}

// Where the reader has a token: of values, which run of tokens of a tile and the place in it; of keys and of scales, which
// eight tokens and the row of them.
struct LaneToken {
  int tile, column, token, eight, row;
  DEVICE LaneToken(int page_token) {
    constexpr int run = TILE_TOKENS / 4;
    tile = page_token / TILE_TOKENS;
    column = page_token % TILE_TOKENS / run;
    token = page_token % run;
    eight = token / 4 * 2 + token % 2;
    row = 2 * column + token % 4 / 2;
  }
};
