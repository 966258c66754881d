// Attention of many rows with the matrix instructions of all cards: eight warps have sixteen rows each, and all of them fetch
// the next page while they multiply with this one.

constexpr int WARPS = 8, THREADS = 32 * WARPS;
static_assert(ROWS == 16 * WARPS, "a warp has sixteen rows");
constexpr int STEPS = HEAD_DIM / 16;
// Queries in two bf16 parts, x = high + low, so that logits lose nothing against f32; where registers have room.
constexpr int PARTS = HEAD_DIM <= 128 ? 2 : 1;

DEVICE void multiply_add(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Four squares that lie side by side: of each a lane has two numbers of row lane / 4.
DEVICE void squares(u32 (&words)[4], u32 address, int lane) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
      : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(address + lane * 16) : "memory");
}

DEVICE void fetch(const Arguments& a, const Item& item, Turn turn, u8* to) {
  const u8* page = page_of(a, turn, slot_of(a, item, turn));
#if SEALED_BITS
  if (turn.sealed) return unseal<THREADS>(page, mean_of(a, turn), to, threadIdx.x);
#endif
  const u32 target = shared_address(to);
  for (int at = threadIdx.x * 16; at < PAGE_BYTES; at += THREADS * 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(target + at), "l"(page + at) : "memory");
}

struct Queries {
  u32 parts[PARTS][STEPS][4];
  DEVICE Queries(const TwoRows& rows, int lane) {
    #pragma unroll
    for (int i = 0; i < STEPS * 4; i++) {
      const int step = i / 4, word = i % 4;
      const float* row = rows.sources[word % 2];
      const int channel = step * 16 + word / 2 * 8 + lane % 4 * 2;
      const float2 x = row ? *(const float2*)(row + channel) : make_float2(0.0f, 0.0f);
      const u32 rounded = two_halves(x.x, x.y);
      parts[0][step][word] = rounded;
      if (PARTS == 2)
        parts[PARTS - 1][step][word] =
            two_halves(x.x - __uint_as_float(rounded << 16), x.y - __uint_as_float(rounded & 0xffff0000u));
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_rows(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) u8 memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Item item = a.items[blockIdx.x];
  const TwoRows rows(a, item, warp * 16 + lane / 4);
  const Walk walk(a, item);
  const Queries queries(rows, lane);
  Softmax softmax;
  float out[HEAD_DIM / 8][4] = {};

  Turn turn = walk.begin();
  int stage = 0;
  fetch(a, item, turn, memory);
  #pragma unroll 1
  while (!walk.ends(turn)) {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    const u32 page = shared_address(memory + stage * PAGE_BYTES);
    const Turn next = walk.next(turn);
    stage ^= 1;
    if (!walk.ends(next)) fetch(a, item, next, memory + stage * PAGE_BYTES);

    float logits[8][4] = {};
    #pragma unroll
    for (int tile = 0; tile < 8; tile++)
      #pragma unroll
      for (int chunk = 0; chunk < STEPS / 2; chunk++) {
        u32 keys[4];
        squares(keys, page + tile * EXACT_TILE_BYTES + chunk * 512, lane);
        #pragma unroll
        for (int part = 0; part < PARTS; part++) {
          multiply_add(logits[tile], queries.parts[part][2 * chunk], keys[0], keys[1]);
          multiply_add(logits[tile], queries.parts[part][2 * chunk + 1], keys[2], keys[3]);
        }
      }
    float rescale[2];
    softmax.add(logits, rescale, walk, turn, rows, a.scale, lane);
    #pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i++) out[i / 4][i % 4] *= rescale[i % 4 / 2];
    u32 weights[4][4];
    as_operands(logits, weights);
    #pragma unroll
    for (int pair = 0; pair < 4; pair++)
      #pragma unroll
      for (int chunk = 0; chunk < STEPS / 2; chunk++) {
        u32 low[4], high[4];
        const u32 values = page + 2 * pair * EXACT_TILE_BYTES + EXACT_SIDE_BYTES + chunk * 512;
        squares(low, values, lane);
        squares(high, values + EXACT_TILE_BYTES, lane);
        #pragma unroll
        for (int i = 0; i < 4; i++) multiply_add(out[4 * chunk + i], weights[pair], low[i], high[i]);
      }
    __syncthreads();
    turn = next;
  }
  store_rows(a, out, softmax, rows, lane);
}
