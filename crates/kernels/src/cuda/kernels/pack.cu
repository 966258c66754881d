// Activations of a product, prepared by a launch of their own: one block for each row. See activations.cu.

constexpr int BF16_OPERANDS = 0, F16_OPERANDS = 1, BF16_ROWS = 2;

struct Arguments {
  Source source;
  u8* out;
  float* sums;         // [64 inputs][column tile][16 inputs][8 rows]
  float* factors;      // [row]: what results are multiplied with
  int format, steps;
  int column_tiles;    // 0: rows lie one after the other
};

extern "C" __global__ void __launch_bounds__(THREADS) pack(const __grid_constant__ Arguments a) {
  __shared__ float2 shared[THREADS / 32];
  let_next_launch_begin();
  wait_for_launches();
  const int row = blockIdx.x;
  const Row input(a.source, row, a.steps, a.format == F16_OPERANDS, shared);
  if (a.format == BF16_ROWS) {
    u16* out = (u16*)a.out + (long long)row * a.source.columns;
    input.each([&](int first, const Eight& v) {
      #pragma unroll
      for (int i = 0; i < 8; i += 4) {
        if (first + i >= a.source.columns) continue;
        u32 bits[4];
        #pragma unroll
        for (int k = 0; k < 4; k++) bits[k] = float_to_bf16(v.x[i + k] * input.inverse);
        *(uint2*)(out + first + i) = make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
      }
    });
    return;
  }
  const int tile_rows = a.column_tiles > 0 ? 8 : 1, tiles = max(a.column_tiles, 1), tile = row / tile_rows;
  u8* out = a.out + (a.column_tiles > 0 ? tile * 1024 : (long long)row * a.steps * 128);
  float* sums = a.sums + (a.column_tiles > 0 ? tile * 32 : (long long)row * a.steps * 4);
  if (a.format == BF16_OPERANDS) {
    input.write<true>(out, sums, tiles, tile_rows, row % tile_rows);
  } else {
    input.write<false>(out, sums, tiles, tile_rows, row % tile_rows);
    if (threadIdx.x == 0) a.factors[row] = input.factor();
  }
}
