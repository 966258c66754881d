// Keys in bands: where the codes of a token lie in the words of a lane. `page_order.rs` defines it; sizes come from there,
// a hexadecimal digit for each band. Channels come in units of sixteen, of which a lane has four, in the four bytes of a
// word. The units of a token follow one another inside these bytes, strongest band first.

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
