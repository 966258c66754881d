// Attention of many rows on sm_90: one warpgroup brings pages to shared memory, two others have 64 rows each and multiply whole
// pages from there (`wgmma`). The squares of a bf16 page are what such an instruction reads, so a bf16 page is one bulk copy; a
// sealed page is copied as it is and unsealed by the warpgroup that brings it.
//
//   bring       page 3     page 4     page 5 ...
//   multiply    Q·K 2 | P·V 1     Q·K 3 | P·V 2 ...      (the tensor cores; both warpgroups take turns by themselves)
//   softmax            page 2            page 3 ...      (while P·V of the page before is on its way)
//
// Queries and weights are bf16. For other architectures this source is empty.

#if __CUDA_ARCH__ == 900
constexpr int GROUP = 128, WORKERS = 2, THREADS = GROUP * (WORKERS + 1);
static_assert(ROWS == 64 * WORKERS, "a warpgroup has 64 rows");
constexpr int STEPS = HEAD_DIM / 16;
#if SEALED_BITS
// A sealed page, and the mean key that its keys are less of.
constexpr int MEAN_BYTES = BAND_UNITS ? HEAD_DIM * 2 : 0;
constexpr int SEALED_STAGE_BYTES = SEALED_PAGE_BYTES + MEAN_BYTES;
#else
constexpr int SEALED_STAGE_BYTES = 0;
#endif

DEVICE void wait_for(u32 barrier, u32 phase) {
  asm volatile(
      "{.reg .pred there;"
      "WAIT: mbarrier.try_wait.parity.shared::cta.b64 there, [%0], %1;"
      "@!there bra.uni WAIT;}"
      :: "r"(barrier), "r"(phase) : "memory");
}
DEVICE void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}
// Arrives, and has the barrier wait for so many bytes as well.
DEVICE void arrive_and_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}
// Has bytes copied that a barrier waits for.
DEVICE void copy(u32 barrier, u32 to, const u8* from, u32 bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
DEVICE void arrive_and_copy(u32 barrier, u32 to, const u8* from, u32 bytes) {
  arrive_and_expect(barrier, bytes);
  copy(barrier, to, from, bytes);
}

// A place in a ring of stages, and how often it went round.
template <int COUNT>
struct Place {
  int stage = 0;
  u32 phase = 0;
  DEVICE Place next() const {
    const bool round = stage + 1 == COUNT;
    Place place;
    place.stage = round ? 0 : stage + 1, place.phase = phase ^ round;
    return place;
  }
};

struct Memory {
  u32 pages, sealed;          // stages
  u32 full, empty, sealed_full;  // barriers
  DEVICE Memory(const u8* memory) {
    pages = shared_address(memory);
    sealed = pages + STAGES * PAGE_BYTES;
    full = sealed + SEALED_STAGES * SEALED_STAGE_BYTES;
    empty = full + STAGES * 8;
    sealed_full = empty + STAGES * 8;
  }
  DEVICE void begin() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < STAGES; i++) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(full + i * 8), "r"(GROUP));
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(empty + i * 8), "r"(WORKERS * 4));
      }
      for (int i = 0; i < SEALED_STAGES; i++)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(sealed_full + i * 8));
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
  }
};

// Brings page after page.
DEVICE void bring(const Arguments& a, const Item& item, const Walk& walk, const Memory& memory, u8* base, int thread) {
  Place<STAGES> place;
#if SEALED_BITS
  // Sealed pages are neighbours; they are copied two ahead.
  Place<SEALED_STAGES> sealed_place;
  const int sealed_end = min(walk.last_position / PAGE_TOKENS + 1, (walk.most_end + PAGE_TOKENS - 1) / PAGE_TOKENS);
  int ahead = walk.sink / PAGE_TOKENS;
  auto copy_sealed = [&](int stage) {
    if (thread == 0 && ahead < sealed_end) {
      const Turn turn = {ahead, true};
      const u32 barrier = memory.sealed_full + stage * 8, to = memory.sealed + stage * SEALED_STAGE_BYTES;
      const u8* mean = mean_of(a, turn);
      arrive_and_expect(barrier, SEALED_PAGE_BYTES + (mean ? MEAN_BYTES : 0));
      copy(barrier, to, page_of(a, turn, slot_of(a, item, turn)), SEALED_PAGE_BYTES);
      if (mean) copy(barrier, to + SEALED_PAGE_BYTES, mean, MEAN_BYTES);
    }
    ahead++;
  };
  for (int i = 0; i < SEALED_STAGES; i++) copy_sealed(i);
#endif
  Turn turn = walk.begin();
  u32 slot = slot_of(a, item, turn);
  #pragma unroll 1
  while (!walk.ends(turn)) {
    const Turn next = walk.next(turn);
    const u32 next_slot = walk.ends(next) ? 0 : slot_of(a, item, next);
    const u32 full = memory.full + place.stage * 8;
    // The first time round, all stages are empty.
    wait_for(memory.empty + place.stage * 8, place.phase ^ 1);
#if SEALED_BITS
    if (turn.sealed) {
      wait_for(memory.sealed_full + sealed_place.stage * 8, sealed_place.phase);
      const u8* from = base + STAGES * PAGE_BYTES + sealed_place.stage * SEALED_STAGE_BYTES;
      unseal<GROUP>(from, a.means ? from + SEALED_PAGE_BYTES : nullptr, base + place.stage * PAGE_BYTES, thread);
      // What was written here is read by products, what was read here is overwritten by a copy.
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      arrive(full);
      asm volatile("bar.sync 1, %0;" :: "n"(GROUP) : "memory");
      copy_sealed(sealed_place.stage);
      sealed_place = sealed_place.next();
    } else
#endif
    if (thread == 0) arrive_and_copy(full, memory.pages + place.stage * PAGE_BYTES, page_of(a, turn, slot), PAGE_BYTES);
    else arrive(full);
    place = place.next();
    turn = next, slot = next_slot;
  }
}

// Where an instruction finds an operand in shared memory: bytes from eight to eight along the sum, and along the rows.
DEVICE u64 operand(u32 address, int along_sum, int along_rows) {
  return (u64)(address >> 4 & 0x3fff) | (u64)(along_sum / 16) << 16 | (u64)(along_rows / 16) << 32;
}
// Products read registers while other instructions go on. The compiler must neither use nor change these meanwhile: values
// that go through `held` are ordered with everything around it.
template <int N>
DEVICE void held(float (&x)[N][4]) {
  #pragma unroll
  for (int i = 0; i < N * 4; i++) asm volatile("" : "+f"(x[i / 4][i % 4]) :: "memory");
}
template <int N>
DEVICE void held(u32 (&x)[N][4]) {
  #pragma unroll
  for (int i = 0; i < N * 4; i++) asm volatile("" : "+r"(x[i / 4][i % 4]) :: "memory");
}
DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LATER>
DEVICE void wait_for_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(LATER) : "memory"); }

#define FOUR(x, i) "+f"((x)[i][0]), "+f"((x)[i][1]), "+f"((x)[i][2]), "+f"((x)[i][3])
#define EIGHT(x, i) FOUR(x, i), FOUR(x, i + 1)
#define THIRTY_TWO(x, i) EIGHT(x, i), EIGHT(x, i + 2), EIGHT(x, i + 4), EIGHT(x, i + 6)
#define SIXTEEN(x, i) EIGHT(x, i), EIGHT(x, i + 2)
#define FIRST_32 \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define FIRST_48 FIRST_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define FIRST_64 FIRST_48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

// 64 rows times 64 columns, sixteen terms of the sum; the first ones of it or more.
template <bool MORE>
DEVICE void multiply(float (&sum)[8][4], const u32 (&a)[4], u64 b) {
  asm volatile(
      "{.reg .pred more; setp.ne.u32 more, %37, 0;"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" FIRST_32 "}, {%32,%33,%34,%35}, %36, more, 1, 1, 0;}"
      : THIRTY_TWO(sum, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(MORE));
}
#if HEAD_DIM == 96
DEVICE void multiply_all(float (&sum)[12][4], const u32 (&a)[4], u64 b) {
  asm volatile(
      "{.reg .pred more; setp.eq.u32 more, 0, 0;"
      "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {" FIRST_48 "}, {%48,%49,%50,%51}, %52, more, 1, 1, 0;}"
      : THIRTY_TWO(sum, 0), SIXTEEN(sum, 8) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#elif HEAD_DIM == 128
DEVICE void multiply_all(float (&sum)[16][4], const u32 (&a)[4], u64 b) {
  asm volatile(
      "{.reg .pred more; setp.eq.u32 more, 0, 0;"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" FIRST_64 "}, {%64,%65,%66,%67}, %68, more, 1, 1, 0;}"
      : THIRTY_TWO(sum, 0), THIRTY_TWO(sum, 8) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#else
DEVICE void multiply_all(float (&sum)[8][4], const u32 (&a)[4], u64 b) { multiply<true>(sum, a, b); }
#endif

DEVICE void multiply_keys(float (&logits)[8][4], const u32 (&queries)[STEPS][4], u32 page) {
  #pragma unroll
  for (int step = 0; step < STEPS; step++) {
    const u64 keys = operand(page + step * 256, 128, EXACT_TILE_BYTES);
    if (step == 0) multiply<false>(logits, queries[step], keys);
    else multiply<true>(logits, queries[step], keys);
  }
}
DEVICE void multiply_values(float (&out)[HEAD_DIM / 8][4], const u32 (&weights)[4][4], u32 page) {
  #pragma unroll
  for (int pair = 0; pair < 4; pair++)
    multiply_all(out, weights[pair], operand(page + EXACT_SIDE_BYTES + 2 * pair * EXACT_TILE_BYTES, EXACT_TILE_BYTES, 128));
}

// Multiplies the rows of a warpgroup with page after page.
DEVICE void work(const Arguments& a, const Item& item, const Walk& walk, const Memory& memory, int warp, int lane) {
  const TwoRows rows(a, item, warp * 16 + lane / 4);
  u32 queries[STEPS][4];
  #pragma unroll
  for (int i = 0; i < STEPS * 4; i++) {
    const float* row = rows.sources[i % 2];
    const int channel = i / 4 * 16 + i % 4 / 2 * 8 + lane % 4 * 2;
    const float2 x = row ? *(const float2*)(row + channel) : make_float2(0.0f, 0.0f);
    queries[i / 4][i % 4] = two_halves(x.x, x.y);
  }
  Softmax softmax;
  float logits[8][4], out[HEAD_DIM / 8][4] = {}, rescale[2];
  u32 weights[4][4];
  Place<STAGES> place;
  Turn turn = walk.begin();
  wait_for(memory.full, 0);
  held(queries);
  begin_products();
  multiply_keys(logits, queries, memory.pages);
  end_products();
  wait_for_products<0>();
  held(logits);
  softmax.add(logits, rescale, walk, turn, rows, a.scale, lane);
  as_operands(logits, weights);
  #pragma unroll 1
  while (true) {
    const Turn next = walk.next(turn);
    if (walk.ends(next)) break;
    const Place<STAGES> next_place = place.next();
    wait_for(memory.full + next_place.stage * 8, next_place.phase);
    held(out);
    held(weights);
    held(logits);
    begin_products();
    multiply_keys(logits, queries, memory.pages + next_place.stage * PAGE_BYTES);
    end_products();
    multiply_values(out, weights, memory.pages + place.stage * PAGE_BYTES);
    end_products();
    wait_for_products<1>();
    held(logits);
    softmax.add(logits, rescale, walk, next, rows, a.scale, lane);
    wait_for_products<0>();
    held(out);
    if (lane == 0) arrive(memory.empty + place.stage * 8);
    __syncwarp();
    if (__any_sync(ALL_LANES, rescale[0] < 1.0f || rescale[1] < 1.0f)) {
      #pragma unroll
      for (int i = 0; i < HEAD_DIM / 2; i++) out[i / 4][i % 4] *= rescale[i % 4 / 2];
    }
    as_operands(logits, weights);
    place = next_place;
    turn = next;
  }
  held(out);
  held(weights);
  begin_products();
  multiply_values(out, weights, memory.pages + place.stage * PAGE_BYTES);
  end_products();
  wait_for_products<0>();
  held(out);
  store_rows(a, out, softmax, rows, lane);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_rows(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) u8 base[];
  const Memory memory(base);
  memory.begin();
  const Item item = a.items[blockIdx.x];
  const Walk walk(a, item);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Registers move from the warpgroup that brings pages to those that multiply. A block begins with 168 for each thread and
  // never gets more: 104 + 2 * 200 = 3 * 168.
  if (warp >= 4 * WORKERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 104;");
    bring(a, item, walk, memory, base, threadIdx.x - GROUP * WORKERS);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 200;");
    work(a, item, walk, memory, warp, lane);
  }
}
#endif
