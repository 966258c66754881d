// The read ceiling: every byte of a buffer once, nothing done with it.

extern "C" __global__ void __launch_bounds__(512) read_all(const uint4* source, unsigned long long count, unsigned int* out) {
  const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
  unsigned int sum = 0;
  unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
  for (; i + 7 * step < count; i += 8 * step) {
    uint4 x[8];
    #pragma unroll
    for (int k = 0; k < 8; k++)
      asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
          : "=r"(x[k].x), "=r"(x[k].y), "=r"(x[k].z), "=r"(x[k].w) : "l"(source + i + k * step));
    #pragma unroll
    for (int k = 0; k < 8; k++) sum ^= x[k].x ^ x[k].y ^ x[k].z ^ x[k].w;
  }
  for (; i < count; i += step) sum ^= source[i].x ^ source[i].y ^ source[i].z ^ source[i].w;
  // Never true for the buffers that are read, but the compiler does not know.
  if (sum == 0x9e3779b9u) out[0] = sum;
}
