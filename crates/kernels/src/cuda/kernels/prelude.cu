// What all sources begin with: integer types, and launches that overlap. No source includes a header: the run-time compiler
// finds none on a user's machine, so the sources of a kernel are put together in Rust, this one first.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__

constexpr u32 ALL_LANES = 0xffffffffu;

DEVICE u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// Reads from shared memory by address: the compiler does not know of every pointer that it points there.
DEVICE uint4 shared16(u32 address) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address) : "memory");
  return x;
}
DEVICE uint2 shared8(u32 address) {
  uint2 x;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(address) : "memory");
  return x;
}
DEVICE u32 shared4(u32 address) {
  u32 x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}

// The same number, of which the compiler forgets how it came about: it would otherwise compute it again at every use.
DEVICE int kept(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
DEVICE u32 kept(u32 x) { return (u32)kept((int)x); }
template <class T>
DEVICE const T* kept(const T* x) {
  asm volatile("" : "+l"(x));
  return x;
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
