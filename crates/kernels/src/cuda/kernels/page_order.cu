// Where codes lie in a tile of a page, as `page_order.rs` defines it; sizes come from there. A load gives each of 32 lanes four
// words of four bytes, in the order in which matrix instructions want them.

constexpr int LOAD_BYTES = 32 * 16;
// The bytes of a lane in a load, and those of one of its words.
DEVICE constexpr int lane_load(int load, int lane) { return load * LOAD_BYTES + lane * 16; }
DEVICE constexpr int lane_word(int word, int lane) { return lane_load(word / 4, lane) + word % 4 * 4; }
// The four bytes of a token among the scales of a side of codes: those of four tokens of a row of lanes lie side by side, where
// `eight` says which of the row's tokens it is.
DEVICE constexpr int token_scale(int eight, int row) { return eight / 4 * 128 + row * 16 + eight % 4 * 4; }

// Keys in bands: where the codes of a token lie in the words of a lane, with a hexadecimal digit for each band. Channels come in
// units of sixteen, of which a lane has four, in the four bytes of a word. The units of a token follow one another inside these
// bytes, strongest band first; where the bits of a token are no multiple of four, codes would cross bytes, and a unit of all
// tokens of a lane comes before the next unit instead.

DEVICE constexpr int band_units(int band) { return BAND_UNITS >> 4 * band & 15; }
DEVICE constexpr int band_bits(int band) { return BAND_BITS >> 4 * band & 15; }
DEVICE constexpr int bits_in_all(int band) { return band_units(band) * band_bits(band); }
// The first unit of each band in four bits, and the first bit of its codes in eight.
constexpr unsigned int FIRST_UNITS =
    band_units(0) << 4 | (band_units(0) + band_units(1)) << 8 | (band_units(0) + band_units(1) + band_units(2)) << 12;
constexpr unsigned int FIRST_BITS =
    bits_in_all(0) << 8 | (bits_in_all(0) + bits_in_all(1)) << 16 | (bits_in_all(0) + bits_in_all(1) + bits_in_all(2)) << 24;
DEVICE constexpr int band_unit(int band) { return FIRST_UNITS >> 4 * band & 15; }
DEVICE constexpr int band_bit(int band) { return FIRST_BITS >> 8 * band & 255; }

constexpr int BANDS = BAND_UNITS ? 4 : 0;
// Bits of a token in each of the four bytes of a lane.
constexpr int TOKEN_BITS = bits_in_all(0) + bits_in_all(1) + bits_in_all(2) + bits_in_all(3);
constexpr bool UNITS_TOGETHER = TOKEN_BITS % 4 != 0;

#if BAND_UNITS
// Tokens of a tile that a lane has, and its words; whole loads of four words come before a load of two.
constexpr int LANE_EIGHTS = SEALED_TILE_TOKENS / 8;
constexpr int KEY_WORDS = LANE_EIGHTS * TOKEN_BITS / 8, WHOLE_WORDS = KEY_WORDS / 4 * 4;
static_assert(KEY_WORDS % 2 == 0, "a lane has loads of 16 or 8 bytes");

// The bit, among those of a byte of all words of a lane, of a code of `bits` of a token; `unit_bit` is that of its unit.
DEVICE constexpr int key_bit(int eight, int unit_bit, int bits) {
  return UNITS_TOGETHER ? LANE_EIGHTS * unit_bit + eight * bits : eight * TOKEN_BITS + unit_bit;
}
// The byte of a word of a lane in the keys of a tile.
DEVICE constexpr int key_word(int word, int lane) {
  return word < WHOLE_WORDS ? lane_word(word, lane)
                            : WHOLE_WORDS * 128 + lane * 8 + (word - WHOLE_WORDS) * 4;
}
#endif
