// What the other sources share: integer types, instructions without a C++ spelling, and the ring of tiles in shared
// memory that a warp fills ahead of itself. No source includes a header: the run-time compiler finds none on a user's
// machine. `tuning.rs` has the order in which sources are put together.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__

constexpr u32 ALL_LANES = 0xffffffffu;
#define NEGATIVE_INFINITY __int_as_float(0xff800000)

DEVICE u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The same number, of which the compiler forgets how it came about: it would otherwise compute it again at every use.
DEVICE int kept(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
template <class T>
DEVICE const T* kept(const T* x) {
  asm volatile("" : "+l"(x));
  return x;
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

// Launches may overlap: everything that this one reads or writes and others write comes after `wait_for_launches`. Before
// sm_90 launches do not overlap.
DEVICE void let_next_launch_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
DEVICE void wait_for_launches() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Pages come in tiles of about 32 bytes per channel, whatever their format: 64 tokens of 2 bits, 8 of bf16. A tile is
// contiguous, so one bulk copy fetches it, and a warp works on one tile at a time. Each warp has a ring of its own:
// no warp ever waits for another one between the first and the last tile of a segment.
struct Ring {
  u8* memory;            // of the block
  int offset;            // of the stages of this warp
  u32 stages, barriers;  // addresses in shared memory
  int read_stage;
  u32 read_phase;
};

DEVICE void ring_open(Ring& ring, u8* memory, u64* barriers, int warp, int lane) {
  ring.memory = memory;
  ring.offset = kept(warp * (STAGES * STAGE_BYTES));
  ring.stages = kept(shared_address(memory) + ring.offset);
  ring.barriers = kept(shared_address(barriers + warp * STAGES));
  ring.read_stage = 0;
  ring.read_phase = 0;
#if __CUDA_ARCH__ >= 900
  if (lane == 0) {
    for (int i = 0; i < STAGES; i++)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(ring.barriers + i * 8));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
#endif
}

// The stage `ahead` of the one that is read next.
DEVICE int ring_stage(const Ring& ring, int ahead) {
  if (STAGES == 2) return ring.read_stage ^ ahead;
  const int stage = ring.read_stage + ahead;
  return stage >= STAGES ? stage - STAGES : stage;
}

// Begins to fetch a tile into a stage. Before sm_90 a call without a tile keeps the count of groups right.
template <int BYTES>
DEVICE void ring_fetch(const Ring& ring, int ahead, const u8* source, bool there, int lane) {
  const int index = ring_stage(ring, ahead);
  const u32 stage = ring.stages + index * STAGE_BYTES;
#if __CUDA_ARCH__ >= 900
  // By one lane, and without a branch: around one, nothing else is computed.
  asm volatile(
      "{.reg .pred there, one;"
      "setp.ne.u32 there, %4, 0;"
      "elect.sync _|one, 0xffffffff;"
      "and.pred one, one, there;"
      "@one mbarrier.arrive.expect_tx.shared::cta.b64 _, [%3], %2;"
      "@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];}"
      :: "r"(stage), "l"(source), "n"(BYTES), "r"(ring.barriers + index * 8), "r"((u32)there) : "memory");
#else
  if (there) {
    for (int at = lane * 16; at < BYTES; at += 512)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
          :: "r"(stage + at), "l"(source + at) : "memory");
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits for the oldest tile, which remains the oldest. `LATER` fetches have begun after it.
template <int LATER>
DEVICE const u8* ring_look(const Ring& ring) {
  const u8* stage = ring.memory + (ring.offset + ring.read_stage * STAGE_BYTES);
#if __CUDA_ARCH__ >= 900
  const u32 barrier = ring.barriers + ring.read_stage * 8;
  // All lanes see the same, which the compiler would not know of a loop of its own.
  asm volatile(
      "{.reg .pred there;"
      "WAIT: mbarrier.try_wait.parity.shared::cta.b64 there, [%0], %1;"
      "@!there bra.uni WAIT;}"
      :: "r"(barrier), "r"(ring.read_phase) : "memory");
#else
  asm volatile("cp.async.wait_group %0;" :: "n"(LATER) : "memory");
  __syncwarp();
#endif
  return stage;
}

// The same, and the next one is the oldest then. STAGES - 1 fetches have begun after it.
DEVICE const u8* ring_take(Ring& ring) {
  const u8* stage = ring_look<STAGES - 1>(ring);
  const int next = ring_stage(ring, 1);
  ring.read_phase ^= next == 0;
  ring.read_stage = next;
  return stage;
}
