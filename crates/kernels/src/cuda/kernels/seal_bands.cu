// Sealing keys in bands: `oscar_codec::band` on one key by one thread, in the order that is defined there.
//
// A code is found as a fraction of all levels, not as a number of them: an instruction that keeps its result between 0
// and 1 then takes the place of one that looks for the larger. A power of two changes no rounding, as nothing here
// comes near the smallest numbers: rows whose squares have a sum above zero have channels of 2^-75 and more.

#if BAND_UNITS
__constant__ u32 scale_bounds[16] = {BOUND_0, BOUND_1, BOUND_2,  BOUND_3,  BOUND_4,  BOUND_5,  BOUND_6,  BOUND_7,
                                     BOUND_8, BOUND_9, BOUND_10, BOUND_11, BOUND_12, BOUND_13, BOUND_14, BOUND_15};
// Steps that are tried, in deviations, for codes of four bits and of two.
constexpr int BAND_STEPS = 5;
__constant__ u32 four_bit_steps[BAND_STEPS] = {FOUR_BIT_STEP_0, FOUR_BIT_STEP_1, FOUR_BIT_STEP_2, FOUR_BIT_STEP_3, FOUR_BIT_STEP_4};
__constant__ u32 two_bit_steps[BAND_STEPS] = {TWO_BIT_STEP_0, TWO_BIT_STEP_1, TWO_BIT_STEP_2, TWO_BIT_STEP_3, TWO_BIT_STEP_4};

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

template <int BAND>
struct BandOfKey {
  static constexpr int BITS_HERE = band_bits(BAND), UNITS = band_units(BAND), FIRST = band_unit(BAND);
  static constexpr float LEVELS = (float)(1 << BITS_HERE), HALF_RANGE = 0.5f * (LEVELS - 1.0f);
  // A float of this size has the levels as its lowest bits: adding to it toward zero drops what is behind a code.
  static constexpr float ABOVE = 8388608.0f / LEVELS;

  // Calls `f` with every channel in order.
  template <class F>
  DEVICE static void for_channels(const Row& row, F f) {
    #pragma unroll 1
    for (int part = 2 * FIRST; part < 2 * (FIRST + UNITS); part++) {
      const uint4 unit = row.unit(part >> 2, part & 3);
      f(low_half(unit.x)); f(high_half(unit.x));
      f(low_half(unit.y)); f(high_half(unit.y));
      f(low_half(unit.z)); f(high_half(unit.z));
      f(low_half(unit.w)); f(high_half(unit.w));
    }
  }

  // The code over all levels, plus ABOVE. `reciprocal`: of the step times all levels.
  DEVICE static float code_above(float x, float reciprocal) {
    // Not a number becomes zero.
    float part;
    asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(part) : "f"(x), "f"(reciprocal), "f"(0.5f));
    return __fadd_rz(fminf(part, (LEVELS - 1.0f) / LEVELS), ABOVE);
  }
  // The level over all levels.
  DEVICE static float level(float above) { return (above - ABOVE) - HALF_RANGE / LEVELS; }

  DEVICE static float reciprocal_of(u32 step_bits, float deviation) {
    return (1.0f / (__uint_as_float(step_bits) * deviation)) * (1.0f / LEVELS);
  }

  // The best step: what channels are multiplied with, and the product of the band and its levels.
  DEVICE static float choose(const Row& row, float deviation, float& along) {
    if (BITS_HERE == 1) {
      const float reciprocal = reciprocal_of(ONE_BIT_STEP, deviation);
      float product = 0.0f;
      for_channels(row, [&](float x) { product = __fmaf_rn(x, level(code_above(x, reciprocal)), product); });
      along = product * LEVELS;
      return reciprocal;
    }
    const u32* steps = BITS_HERE == 4 ? four_bit_steps : two_bit_steps;
    float reciprocals[BAND_STEPS], products[BAND_STEPS], squares[BAND_STEPS];
    #pragma unroll
    for (int i = 0; i < BAND_STEPS; i++) {
      reciprocals[i] = reciprocal_of(steps[i], deviation);
      products[i] = squares[i] = 0.0f;
    }
    for_channels(row, [&](float x) {
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
      const float product = products[i] * LEVELS;
      const float match = product * product / (squares[i] * (LEVELS * LEVELS));
      if (match > best) {
        best = match;
        along = product;
        chosen = reciprocals[i];
      }
    }
    return chosen;
  }

  // Puts the codes of the band into the page and returns the code of its scale. `held` are words that are not full yet.
  DEVICE static u32 seal(const Row& row, const LaneToken& at, u8* page, u32 (&held)[4]) {
    float squares = 0.0f, along = 0.0f, reciprocal = 0.0f;
    for_channels(row, [&](float x) { squares = __fmaf_rn(x, x, squares); });
    const bool zero = !(squares > 0.0f);
    if (squares == __int_as_float(0x7f800000)) {
      // The step is infinite, so every code is that of zero. A sum of halves may overflow and a sum of less may not.
      for_channels(row, [&](float x) { along = __fmaf_rn(x, 0.5f, along); });
    } else if (!zero) {
      reciprocal = choose(row, __fsqrt_rn(squares / (float)(16 * UNITS)), along);
    }
    #pragma unroll 1
    for (int i = 0; i < UNITS; i++) {
      u32 quads[4];
      #pragma unroll
      for (int half = 0; half < 2; half++) {
        const int part = 2 * (FIRST + i) + half;
        const uint4 unit = row.unit(part >> 2, part & 3);
        const float x[8] = {low_half(unit.x), high_half(unit.x), low_half(unit.y), high_half(unit.y),
                            low_half(unit.z), high_half(unit.z), low_half(unit.w), high_half(unit.w)};
        float c[8];
        #pragma unroll
        for (int e = 0; e < 8; e++) c[e] = zero ? 0.0f : code_above(x[e], reciprocal);
        quads[2 * half] = four_bytes(c[0], c[1], c[2], c[3]);
        quads[2 * half + 1] = four_bytes(c[4], c[5], c[6], c[7]);
      }
      put_unit(page, at, at.eight * TOKEN_BITS + band_bit(BAND) + i * BITS_HERE, quads, held);
    }
    return zero ? 0 : scale_code(squares / along);
  }

  // Four channels of each of four lanes, at a bit of the bytes of their words.
  DEVICE static void put_unit(u8* page, const LaneToken& at, int bit, const u32 (&quads)[4], u32 (&held)[4]) {
    const int word = bit / 8, shift = bit % 8;
    u8* target = page + word / 4 * 512 + at.row * 64 + word % 4 * 4;
    #pragma unroll
    for (int lane = 0; lane < 4; lane++) {
      u32* out = (u32*)(target + lane * 16);
      const u32 codes = quads[lane] << shift;
      if (SHARED_WORDS) {
        atomicOr(out, codes);
      } else {
        held[lane] = shift == 0 ? codes : held[lane] | codes;
        if (shift + BITS_HERE == 8) *out = held[lane];
      }
    }
  }
};

DEVICE void seal_key(const Row& row, int token, u8* page) {
  const LaneToken at(token);
  u32 held[4] = {0, 0, 0, 0};
  u32 scales = BandOfKey<0>::seal(row, at, page, held);
  scales |= BandOfKey<1>::seal(row, at, page, held) << 8;
  scales |= BandOfKey<2>::seal(row, at, page, held) << 16;
  scales |= BandOfKey<3>::seal(row, at, page, held) << 24;
  *(u32*)(page + 2 * SIDE_BYTES + at.eight / 4 * 128 + at.row * 16 + at.eight % 4 * 4) = scales;
}
#endif
