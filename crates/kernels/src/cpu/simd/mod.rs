//! Vectors: what the kernels use of an instruction set, so that each kernel is written once.
//!
//! A kernel is a value that implements [`Kernel`]: a body that is generic over the vector type. [`Simd::run`] compiles
//! the body for every instruction set and runs the one of this machine. Everything on the way from there to an
//! instruction is `#[inline(always)]`, because a function that is called and not inlined is compiled without the
//! instruction set of its caller.
//!
//! | module | job |
//! |---|---|
//! | `vector` | registers of `f32` |
//! | `bytes` | groups of 32 codes of a weight matrix |
//! | `codes` | registers of packed codes of a sealed page |
//! | `avx2`, `avx512`, `neon`, `portable` | these traits on an instruction set, or in plain Rust |
//! | [`amx`] | tile registers |

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod bytes;
mod codes;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
#[cfg(test)]
mod tests;
mod vector;

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) use bytes::Bytes;
pub(crate) use codes::CodeWords;
#[cfg(target_arch = "aarch64")]
pub(crate) use neon::BytePair;
pub(crate) use vector::{Vector, exp2};

use super::isa::Isa;

/// A body that is compiled for every instruction set.
pub(crate) trait Kernel {
    /// The type of what the kernel returns.
    type Output;

    /// Runs the body. Implementations are `#[inline(always)]`.
    ///
    /// # Safety
    /// The CPU has the instructions of `V`.
    unsafe fn run<V: Vector>(self) -> Self::Output;
}

/// An instruction set that this machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Simd(Isa);

impl Simd {
    /// Panics if this machine does not have `isa`.
    pub(crate) fn new(isa: Isa) -> Simd {
        assert!(isa.is_available(), "{isa} kernels on a machine without them");
        Simd(isa)
    }

    /// Plain Rust, which kernels with a scalar reference never take by themselves.
    #[cfg(test)]
    pub(crate) fn portable() -> Simd {
        Simd(if cfg!(target_arch = "aarch64") { Isa::Avx2 } else { Isa::Neon })
    }

    /// The instruction set that kernels are compiled for.
    pub(crate) fn isa(self) -> Isa {
        self.0
    }

    /// Runs a kernel with the instructions of this set; AMX adds none to the vectors of AVX-512.
    #[inline]
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        #[cfg(target_arch = "x86_64")]
        {
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2<K: Kernel>(kernel: K) -> K::Output {
                // SAFETY: this function has the instructions.
                unsafe { kernel.run::<std::arch::x86_64::__m256>() }
            }
            #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
            fn avx512<K: Kernel>(kernel: K) -> K::Output {
                // SAFETY: this function has the instructions.
                unsafe { kernel.run::<std::arch::x86_64::__m512>() }
            }
            match self.0 {
                // SAFETY: a value exists only where its instruction set does.
                Isa::Avx2 => return unsafe { avx2(kernel) },
                // SAFETY: as above.
                Isa::Avx512 | Isa::Amx => return unsafe { avx512(kernel) },
                Isa::Scalar | Isa::Neon => {}
            }
        }
        #[cfg(target_arch = "aarch64")]
        if self.0 == Isa::Neon {
            // SAFETY: NEON is part of the AArch64 baseline.
            return unsafe { kernel.run::<std::arch::aarch64::float32x4_t>() };
        }
        // SAFETY: plain Rust needs no special instructions.
        unsafe { kernel.run::<portable::Portable>() }
    }
}

/// Prefetches the cache line at an address, which need not be readable, into the first-level cache.
#[inline(always)]
pub(crate) fn prefetch(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch does not access memory in the sense of the language, whatever the address.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{at}]", at = in(reg) at, options(readonly, nostack, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = at;
}

/// Defines methods of a trait that are one intrinsic each, applied to registers.
macro_rules! intrinsics {
    ($($name:ident($($argument:ident),*) = $intrinsic:path;)*) => {$(
        #[inline(always)]
        unsafe fn $name(self, $($argument: Self),*) -> Self {
            // SAFETY: the caller promises the instructions.
            unsafe { $intrinsic(self, $($argument),*) }
        }
    )*};
}
pub(crate) use intrinsics;
