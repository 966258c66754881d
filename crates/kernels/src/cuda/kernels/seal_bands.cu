// Sealing keys in bands: `oscar_codec::band` on one key by one thread, in the order that is defined there.
//
// A code is found as a fraction of all levels, not as a number of them: an instruction that keeps its result between 0
// and 1 then takes the place of one that looks for the larger. A power of two changes no rounding, as nothing here
// comes near the smallest numbers: rows whose squares have a sum above zero have channels of 2^-75 and more.
//
// All bands run the same instructions, with numbers of their own in registers: code of its own for each of them made warps
// wait for instructions, since those that seal values run others at the same time.

#if BAND_UNITS
__constant__ u32 scale_bounds[16] = {BOUND_0, BOUND_1, BOUND_2,  BOUND_3,  BOUND_4,  BOUND_5,  BOUND_6,  BOUND_7,
                                     BOUND_8, BOUND_9, BOUND_10, BOUND_11, BOUND_12, BOUND_13, BOUND_14, BOUND_15};
// Steps that are tried, in deviations, for codes of four bits, then of two.
constexpr int BAND_STEPS = 5;
__constant__ u32 band_steps[2 * BAND_STEPS] = {
    FOUR_BIT_STEP_0, FOUR_BIT_STEP_1, FOUR_BIT_STEP_2, FOUR_BIT_STEP_3, FOUR_BIT_STEP_4,
    TWO_BIT_STEP_0,  TWO_BIT_STEP_1,  TWO_BIT_STEP_2,  TWO_BIT_STEP_3,  TWO_BIT_STEP_4};

// As `band::scale_code`.
DEVICE u32 scale_code(float value) {
  const u32 bits = __float_as_uint(value);
  if (!(value > 0.0f && bits < 0x7f800000u)) return value <= 0.0f ? 0 : 255;
  const u32 within = (bits & 0x7fffffu) | 0x3f800000u;
  int code = 16 * ((int)(bits >> 23) - 127 + OCTAVES_BELOW);
  // Positive floats have the order of their bits.
  #pragma unroll
  for (int i = 0; i < 16; i++) code += within >= scale_bounds[i];
  return min(max(code, 0), 255);
}

// A key in shared memory and the mean key of its page, which it is less of, if there is one.
struct Key {
  Row row;
  const uint4* mean;
  // Eight channels.
  DEVICE void channels(int part, float (&x)[8]) const {
    halves(row.unit(part >> 2, part & 3), x);
    if (!mean) return;
    float less[8];
    halves(__ldg(mean + part), less);
    #pragma unroll
    for (int e = 0; e < 8; e++) x[e] -= less[e];
  }
  DEVICE static void halves(const uint4& unit, float (&x)[8]) {
    x[0] = low_half(unit.x); x[1] = high_half(unit.x);
    x[2] = low_half(unit.y); x[3] = high_half(unit.y);
    x[4] = low_half(unit.z); x[5] = high_half(unit.z);
    x[6] = low_half(unit.w); x[7] = high_half(unit.w);
  }
};

// A band of a key.
struct KeyBand {
  int bits, first, units;  // of a code; sixteens of channels
  float levels, share;     // levels, and one of them
  float top, half_range;   // over all levels
  // A float of this size has the levels as its lowest bits: adding to it toward zero drops what is behind a code.
  float above;

  DEVICE explicit KeyBand(int band) : bits(band_bits(band)), first(band_unit(band)), units(band_units(band)) {
    levels = (float)(1 << bits);
    share = 1.0f / levels;
    top = 1.0f - share;
    half_range = 0.5f * top;
    above = 8388608.0f * share;
  }

  // Calls `f` with every channel in order.
  template <class F>
  DEVICE void for_channels(const Key& key, F f) const {
    #pragma unroll 1
    for (int part = 2 * first; part < 2 * (first + units); part++) {
      float x[8];
      key.channels(part, x);
      #pragma unroll
      for (int e = 0; e < 8; e++) f(x[e]);
    }
  }

  // The code over all levels, added to `above`. `reciprocal`: of the step times all levels.
  DEVICE float code_above(float x, float reciprocal) const {
    // Not a number becomes zero.
    float part;
    asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(part) : "f"(x), "f"(reciprocal), "f"(0.5f));
    return __fadd_rz(fminf(part, top), above);
  }
  // The level over all levels.
  DEVICE float level(float code) const { return (code - above) - half_range; }

  DEVICE float reciprocal_of(u32 step_bits, float deviation) const {
    return (1.0f / (__uint_as_float(step_bits) * deviation)) * share;
  }

  // What channels are multiplied with, and the product of the band and its levels. One-bit codes have one step.
  DEVICE float choose_only(const Key& key, float deviation, float& along) const {
    const float reciprocal = reciprocal_of(ONE_BIT_STEP, deviation);
    float product = 0.0f;
    for_channels(key, [&](float x) { product = __fmaf_rn(x, level(code_above(x, reciprocal)), product); });
    along = product * levels;
    return reciprocal;
  }
  // The same of the best step.
  DEVICE float choose_best(const Key& key, float deviation, float& along) const {
    const u32* steps = band_steps + (bits == 4 ? 0 : BAND_STEPS);
    float reciprocals[BAND_STEPS], products[BAND_STEPS], squares[BAND_STEPS];
    #pragma unroll
    for (int i = 0; i < BAND_STEPS; i++) {
      reciprocals[i] = reciprocal_of(steps[i], deviation);
      products[i] = squares[i] = 0.0f;
    }
    for_channels(key, [&](float x) {
      #pragma unroll
      for (int i = 0; i < BAND_STEPS; i++) {
        const float u = level(code_above(x, reciprocals[i]));
        products[i] = __fmaf_rn(x, u, products[i]);
        squares[i] = __fmaf_rn(u, u, squares[i]);
      }
    });
    // Squares of products may be too large for a float, so they are compared as they are defined.
    float best = __int_as_float(0xff800000), chosen = 0.0f;
    #pragma unroll
    for (int i = 0; i < BAND_STEPS; i++) {
      const float product = products[i] * levels;
      const float match = product * product / (squares[i] * (levels * levels));
      if (match > best) {
        best = match;
        along = product;
        chosen = reciprocals[i];
      }
    }
    return chosen;
  }

  // Puts the codes of the band, whose first unit has this bit, into the page, and returns the code of its scale. `held` are words
  // that are not full yet.
  DEVICE u32 seal(const Key& key, const LaneToken& at, u8* page, int unit_bit, u32 (&held)[4]) const {
    float squares = 0.0f, along = 0.0f, reciprocal = 0.0f;
    for_channels(key, [&](float x) { squares = __fmaf_rn(x, x, squares); });
    const bool zero = !(squares > 0.0f);
    if (squares == __int_as_float(0x7f800000)) {
      // The step is infinite, so every code is that of zero. A sum of halves may overflow and a sum of less may not.
      for_channels(key, [&](float x) { along = __fmaf_rn(x, 0.5f, along); });
    } else if (!zero) {
      const float deviation = __fsqrt_rn(squares / (float)(16 * units));
      reciprocal = bits == 1 ? choose_only(key, deviation, along) : choose_best(key, deviation, along);
    }
    #pragma unroll 1
    for (int i = 0; i < units; i++) {
      u32 quads[4];
      #pragma unroll
      for (int half = 0; half < 2; half++) {
        const int part = 2 * (first + i) + half;
        float x[8], c[8];
        key.channels(part, x);
        #pragma unroll
        for (int e = 0; e < 8; e++) c[e] = code_above(x[e], reciprocal);
        quads[2 * half] = zero ? 0 : four_bytes(c[0], c[1], c[2], c[3]);
        quads[2 * half + 1] = zero ? 0 : four_bytes(c[4], c[5], c[6], c[7]);
      }
      put_unit(page, at, key_bit(at.eight, unit_bit + i * bits, bits), quads, held);
    }
    return zero ? 0 : scale_code(squares / along);
  }

  // Four channels of each of four lanes, at a bit of the bytes of their words.
  DEVICE void put_unit(u8* page, const LaneToken& at, int bit, const u32 (&quads)[4], u32 (&held)[4]) const {
    const int word = bit / 8, shift = bit % 8;
    #pragma unroll
    for (int lane = 0; lane < 4; lane++) {
      u32* out = (u32*)(page + key_word(word, at.row * 4 + lane));
      const u32 codes = quads[lane] << shift;
      if (SHARED_WORDS) {
        atomicOr(out, codes);
      } else {
        held[lane] = shift == 0 ? codes : held[lane] | codes;
        if (shift + bits == 8) *out = held[lane];
      }
    }
  }
};

DEVICE void seal_key(const Key& key, int token, u8* page) {
  const LaneToken at(token);
  page += at.tile * TILE_BYTES;
  u32 held[4] = {0, 0, 0, 0}, scales = 0;
  #pragma unroll 1
  for (int band = 0; band < BANDS; band++)
    scales |= KeyBand(band).seal(key, at, page, band_bit(band), held) << 8 * band;
  *(u32*)(page + SCALES_AT + token_scale(at.eight, at.row)) = scales;
}
#endif
