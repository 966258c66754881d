// What attention kernels share: reductions over lanes and arrays, and stored scales.

#define NEGATIVE_INFINITY __int_as_float(0xff800000)

DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Largest and sum over the four lanes that hold one row of an MMA accumulator.
DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
  return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}
DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(ALL_LANES, x, 1);
  return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

// Largest and sum of an array as trees: a chain would wait for every step.
template <int N>
DEVICE float largest_of(const float (&x)[N]) {
  float part[4] = {x[0], x[1], x[2], x[3]};
  #pragma unroll
  for (int i = 4; i < N; i++) part[i & 3] = fmaxf(part[i & 3], x[i]);
  return fmaxf(fmaxf(part[0], part[1]), fmaxf(part[2], part[3]));
}
template <int N>
DEVICE float sum_of(const float (&x)[N]) {
  float part[4] = {x[0], x[1], x[2], x[3]};
  #pragma unroll
  for (int i = 4; i < N; i++) part[i & 3] += x[i];
  return (part[0] + part[1]) + (part[2] + part[3]);
}

DEVICE u32 word_of(const uint4& chunk, int index) {
  return index == 0 ? chunk.x : index == 1 ? chunk.y : index == 2 ? chunk.z : chunk.w;
}

// The two 16-bit numbers of a word, as stored scales and offsets.
DEVICE float2 scale_pair(u32 word) {
#if SCALE_BF16
  return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
#else
  float2 pair;
  asm("{.reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
      : "=f"(pair.x), "=f"(pair.y) : "r"(word));
  return pair;
#endif
}
