// Weighted sums of values that are codes. Weights, which begin as floats, become operands of an MMA and codes its other
// operand, without a conversion. Up to eight rows: weights are integers of two bytes, high bytes in rows 0-7 and low bytes
// in rows 8-15, and sums are exact. More rows: 128 sums per lane would be too many, so weights are f16, one row each, and
// codes are taken as f16 as well: a small integer in the low bits of one is that many times 2^-24.
//
// A round is 32 tokens, eight per lane: the first four and the second four lie in different bits of a word.

DEVICE void mma_unsigned(int (&c)[4], const u32* a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void mma_f16(float (&c)[4], const u32* a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two steps of an 8-bit operand out of one word of codes. Of 2-bit codes the second half comes out four times too large
// (one instruction less than shifting it); QUARTER says that somebody makes up for that.
template <int BITS, bool QUARTER>
DEVICE void unpack(u32 word, int half, u32& b0, u32& b1) {
  if (BITS == 4) {
    b0 = word & 0x0f0f0f0fu;
    b1 = (word >> 4) & 0x0f0f0f0fu;
  } else if (half == 0) {
    b0 = word & 0x03030303u;
    b1 = (word >> 4) & 0x03030303u;
  } else if (QUARTER) {
    b0 = word & 0x0c0c0c0cu;
    b1 = (word >> 4) & 0x0c0c0c0cu;
  } else {
    b0 = (word >> 2) & 0x03030303u;
    b1 = (word >> 6) & 0x03030303u;
  }
}

template <int BITS>
struct IntegerSums {
  static constexpr int TILES = HEAD_DIM / 8;
  static constexpr int OPERANDS = 4;
  // Exponents of the second four tokens are smaller by this.
  static constexpr int LATER = 0;
  // The largest weight when a reference is chosen. There is room for eight times as much: the largest of several rows
  // grows often, if only by a little. It costs three of sixteen bits.
  static constexpr float LARGEST = 65000.0f / 8.0f;
  int sums[TILES][4];

  DEVICE void clear() {
    #pragma unroll
    for (int i = 0; i < TILES; i++)
      #pragma unroll
      for (int e = 0; e < 4; e++) sums[i][e] = 0;
  }

  DEVICE static float weight(float probability, float scale) { return fmaf(probability, scale, 8388608.0f); }

  // Whether all weights fit 16 bits; if so, their bytes.
  DEVICE static bool pack(const float (&weights)[1][8], u32 (&operands)[OPERANDS]) {
    u32 r[8], bits = 0;
    #pragma unroll
    for (int i = 0; i < 8; i++) {
      r[i] = __float_as_uint(weights[0][i]);
      bits |= r[i];
    }
    #pragma unroll
    for (int half = 0; half < 2; half++) {
      const u32* four = &r[half * 4];
      const u32 a = __byte_perm(four[0], four[1], 0x4051), b = __byte_perm(four[2], four[3], 0x4051);
      operands[half * 2] = __byte_perm(a, b, 0x5410);
      operands[half * 2 + 1] = __byte_perm(a, b, 0x7632);
    }
    // 2^23 has these bits: anything else is more than 16 bits, infinite or not a number.
    return (bits & 0xffff0000u) == 0x4b000000u;
  }

  // Adds a word: eight channels of 4-bit codes, sixteen of 2-bit codes.
  DEVICE void add(int i, const u32 (&operands)[OPERANDS], u32 word) {
    #pragma unroll
    for (int half = 0; half < 4 / BITS; half++) {
      u32 b0, b1;
      unpack<BITS, true>(word, half, b0, b1);
      mma_unsigned(sums[i + half], operands, b0, b1);
    }
  }

  DEVICE void rescale(const float (&ratio)[1]) {
    #pragma unroll
    for (int i = 0; i < TILES; i++) {
      int (&c)[4] = sums[i];
      #pragma unroll
      for (int e = 0; e < 2; e++) {
        const float value = fmaf((float)c[e], 256.0f, (float)c[e + 2]) * ratio[0];
        const float top = rintf(value * (1.0f / 256.0f));
        c[e] = (int)top;
        c[e + 2] = __float2int_rn(fmaf(top, -256.0f, value));
      }
    }
  }

  DEVICE float2 read(int, int i) const {
    const float unit = BITS == 2 && (i & 1) ? 0.25f : 1.0f;
    const int (&c)[4] = sums[i];
    return make_float2(
        fmaf((float)c[0], 256.0f, (float)c[2]) * unit, fmaf((float)c[1], 256.0f, (float)c[3]) * unit);
  }
};

template <int BITS>
struct HalfSums {
  static constexpr int TILES = HEAD_DIM / 8;
  static constexpr int OPERANDS = 8;
  // Codes of the second four tokens lie four bits higher, so they count sixteen times.
  static constexpr int LATER = 4;
  // Far from 65504 and from 2^-14, below which bits are lost.
  static constexpr float LARGEST = 16.0f;
  float sums[TILES][4];

  DEVICE void clear() {
    #pragma unroll
    for (int i = 0; i < TILES; i++)
      #pragma unroll
      for (int e = 0; e < 4; e++) sums[i][e] = 0.0f;
  }

  DEVICE static float weight(float probability, float scale) { return probability * scale; }

  DEVICE static bool pack(const float (&weights)[2][8], u32 (&operands)[OPERANDS]) {
    u32 most = 0;
    #pragma unroll
    for (int half = 0; half < 2; half++)
      #pragma unroll
      for (int e = 0; e < 2; e++)
        #pragma unroll
        for (int row = 0; row < 2; row++) {
          const float* four = &weights[row][half * 4];
          u32& operand = operands[half * 4 + e * 2 + row];
          asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(operand) : "f"(four[e + 2]), "f"(four[e]));
          asm("max.f16x2 %0, %0, %1;" : "+r"(most) : "r"(operand));
        }
    return (most & 0xffffu) < 0x7c00u && most < 0x7c000000u;
  }

  DEVICE void add(int i, const u32 (&operands)[OPERANDS], u32 word) {
    const u32 odd = word >> 8;
    #pragma unroll
    for (int half = 0; half < 4 / BITS; half++)
      #pragma unroll
      for (int part = 0; part < 2; part++) {
        const u32 mask = (BITS == 2 ? 0x00030003u << (2 * half) : 0x000f000fu) << (4 * part);
        mma_f16(sums[i + half], operands + part * 4, word & mask, odd & mask);
      }
  }

  DEVICE void rescale(const float (&ratio)[2]) {
    #pragma unroll
    for (int i = 0; i < TILES; i++)
      #pragma unroll
      for (int e = 0; e < 4; e++) sums[i][e] *= ratio[e / 2];
  }

  DEVICE float2 read(int tile, int i) const {
    const float unit = BITS == 2 && (i & 1) ? 4194304.0f : 16777216.0f;
    return make_float2(sums[i][2 * tile] * unit, sums[i][2 * tile + 1] * unit);
  }
};

#if ROW_TILES == 1
template <int BITS> using Sums = IntegerSums<BITS>;
#else
template <int BITS> using Sums = HalfSums<BITS>;
#endif
