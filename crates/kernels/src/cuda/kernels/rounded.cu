// What the sources share whose results are defined to the bit: `seal.cu` and `write.cu` repeat `oscar_codec`. They are
// compiled without fast math and without contraction, so that `a * b + c` is two roundings and `fma` is one, numbers
// below the smallest normal one are kept, and division and square root are rounded correctly.

// A bf16 page in units of 16 bytes: tiles of 8 tokens, keys then values. Keys are [eight channels][token], values are
// [channel], and a unit holds eight channels of a key or eight tokens of a value. `page_order.rs` defines it; sizes come from
// there.
constexpr int CHUNKS = HEAD_DIM / 32;
constexpr int SIDE_UNITS = EXACT_SIDE_BYTES / 16;
constexpr int TILE_UNITS = EXACT_TILE_BYTES / 16;
constexpr int PAGE_UNITS = PAGE_TOKENS / EXACT_TILE_TOKENS * TILE_UNITS;

// The two bf16 numbers of a word.
DEVICE float low_half(u32 word) { return __uint_as_float(word << 16); }
DEVICE float high_half(u32 word) { return __uint_as_float(word & 0xffff0000u); }

// Nearest bf16, ties to even.
DEVICE u32 bf16_bits(float x) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
DEVICE float round_to_bf16(float x) { return __uint_as_float(bf16_bits(x) << 16); }

// Byte of a channel of a value in its page.
DEVICE int value_byte(int token, int channel) {
  return ((token >> 3) * TILE_UNITS + SIDE_UNITS + channel) * 16 + (token & 7) * 2;
}
// The same for keys, where eight channels from a multiple of eight on are neighbours.
DEVICE int key_byte(int token, int channel) {
  return ((token >> 3) * TILE_UNITS + (channel & ~7) + (token & 7)) * 16 + (channel & 7) * 2;
}
