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
  __shared__ float shared[THREADS / 32];
  let_next_launch_begin();
  wait_for_launches();
  const int row = blockIdx.x;
  const Row input(a.source, row, a.steps, shared);
  if (a.format == BF16_ROWS) {
    u16* out = (u16*)a.out + (long long)row * a.source.columns;
    input.each([&](int group, float4 v) {
      if (4 * group >= a.source.columns) return;
      v = input.scaled(group, v);
      if (input.aligned) {
        *(uint2*)(out + 4 * group) = make_uint2(
            float_to_bf16(v.x) | float_to_bf16(v.y) << 16, float_to_bf16(v.z) | float_to_bf16(v.w) << 16);
        return;
      }
      const float values[4] = {v.x, v.y, v.z, v.w};
      #pragma unroll
      for (int i = 0; i < 4; i++)
        if (4 * group + i < a.source.columns) out[4 * group + i] = float_to_bf16(values[i]);
    });
    return;
  }
  const int tile_rows = a.column_tiles > 0 ? 8 : 1, tiles = max(a.column_tiles, 1), tile = row / tile_rows;
  u8* out = a.out + (a.column_tiles > 0 ? tile * 1024 : (long long)row * a.steps * 128);
  float* sums = a.sums + (a.column_tiles > 0 ? tile * 32 : (long long)row * a.steps * 4);
  if (a.format == BF16_OPERANDS) {
    input.write<true>(out, sums, 1.0f, tiles, tile_rows, row % tile_rows);
  } else {
    const float power = input.f16_power(shared);
    input.write<false>(out, sums, power, tiles, tile_rows, row % tile_rows);
    if (threadIdx.x == 0) a.factors[row] = 1.0f / (power * SCALE_UNIT);
  }
}
