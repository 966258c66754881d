// A ring of tiles in shared memory that a warp fills ahead of itself. A tile is contiguous, so one bulk copy fetches it. Each
// warp has a ring of its own: no warp ever waits for another one between its first and its last tile. Stages should begin at
// multiples of 128 bytes: others made products of bf16 weights a fifth slower on an H200.

template <int DEPTH, int STAGE>
struct Ring {
  u8* memory;            // of the block
  int offset;            // of the stages of this warp
  u32 stages, barriers;  // addresses in shared memory
  int read_stage;
  u32 read_phase;

  DEVICE void open(u8* block_memory, u64* block_barriers, int warp, int lane) {
    memory = block_memory;
    offset = kept(warp * (DEPTH * STAGE));
    stages = kept(shared_address(memory) + offset);
    barriers = kept(shared_address(block_barriers + warp * DEPTH));
    read_stage = 0;
    read_phase = 0;
#if __CUDA_ARCH__ >= 900
    if (lane == 0) {
      for (int i = 0; i < DEPTH; i++)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(barriers + i * 8));
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
#endif
  }

  // Nothing is on its way any more, and the memory may become another ring.
  DEVICE void close(int lane) {
    __syncwarp();
#if __CUDA_ARCH__ >= 900
    if (lane == 0)
      for (int i = 0; i < DEPTH; i++)
        asm volatile("mbarrier.inval.shared::cta.b64 [%0];" :: "r"(barriers + i * 8) : "memory");
    __syncwarp();
#endif
  }

  // The stage `ahead` of the one that is read next.
  DEVICE int stage(int ahead) const {
    if (DEPTH == 2) return read_stage ^ ahead;
    const int index = read_stage + ahead;
    return index >= DEPTH ? index - DEPTH : index;
  }

  // Begins to fetch a tile into a stage. Before sm_90 a call without a tile keeps the count of groups right.
  template <int BYTES>
  DEVICE void fetch(int ahead, const u8* source, bool there, int lane) const {
    const int index = stage(ahead);
    const u32 to = stages + index * STAGE;
#if __CUDA_ARCH__ >= 900
    // By one lane, and without a branch: around one, nothing else is computed.
    asm volatile(
        "{.reg .pred there, one;"
        "setp.ne.u32 there, %4, 0;"
        "elect.sync _|one, 0xffffffff;"
        "and.pred one, one, there;"
        "@one mbarrier.arrive.expect_tx.shared::cta.b64 _, [%3], %2;"
        "@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];}"
        :: "r"(to), "l"(source), "n"(BYTES), "r"(barriers + index * 8), "r"((u32)there) : "memory");
#else
    if (there) {
      for (int at = lane * 16; at < BYTES; at += 512)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to + at), "l"(source + at) : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
  }

  // Begins to fetch several tiles into a stage, all at the same offset from where `sources` are.
  template <int BYTES, int PARTS>
  DEVICE void fetch_parts(int ahead, const u8* const (&sources)[PARTS], long long offset, bool there, int lane) const {
    const int index = stage(ahead);
    const u32 to = stages + index * STAGE;
#if __CUDA_ARCH__ >= 900
    const u32 barrier = barriers + index * 8;
    if (there && lane == 0) {
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "n"(BYTES * PARTS) : "memory");
      #pragma unroll
      for (int i = 0; i < PARTS; i++)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     :: "r"(to + i * BYTES), "l"(sources[i] + offset), "n"(BYTES), "r"(barrier) : "memory");
    }
    __syncwarp();
#else
    if (there) {
      #pragma unroll
      for (int i = 0; i < PARTS; i++)
        for (int at = lane * 16; at < BYTES; at += 512)
          asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to + i * BYTES + at), "l"(sources[i] + offset + at) : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
  }

  // Waits for the oldest tile. `LATER` fetches have begun after it.
  template <int LATER>
  DEVICE void wait() const {
#if __CUDA_ARCH__ >= 900
    const u32 barrier = barriers + read_stage * 8;
    // All lanes see the same, which the compiler would not know of a loop of its own.
    asm volatile(
        "{.reg .pred there;"
        "WAIT: mbarrier.try_wait.parity.shared::cta.b64 there, [%0], %1;"
        "@!there bra.uni WAIT;}"
        :: "r"(barrier), "r"(read_phase) : "memory");
#else
    asm volatile("cp.async.wait_group %0;" :: "n"(LATER) : "memory");
    __syncwarp();
#endif
  }

  // The same; it remains the oldest.
  template <int LATER>
  DEVICE const u8* look() const {
    const u8* tile = memory + (offset + read_stage * STAGE);
    wait<LATER>();
    return tile;
  }

  // The oldest tile is done with; the next one is the oldest then.
  DEVICE void pass() {
    const int next = stage(1);
    read_phase ^= next == 0;
    read_stage = next;
  }

  // The address of the oldest tile in shared memory.
  DEVICE u32 address() const { return stages + read_stage * STAGE; }

  // Waits for the oldest tile; the next one is the oldest then. DEPTH - 1 fetches have begun after it.
  DEVICE const u8* take() {
    const u8* tile = look<DEPTH - 1>();
    pass();
    return tile;
  }
};
