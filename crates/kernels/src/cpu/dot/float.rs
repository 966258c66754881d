//! Float weights times float activations: widen to `f32` in registers, fused multiply-add, `f32` accumulators.
//!
//! One generic loop serves all instruction sets; a [`Lanes`] type says how to load and multiply. Four weight rows
//! go together, so an activation vector is loaded once for four products.

use half::{bf16, f16};

use super::MAX_ROWS;
use super::runs::{RUNS, Runs};
use crate::dtype::DType;

/// A vector of `f32` lanes and the ways to fill it. Methods are inlined into functions that enable the features.
trait Lanes: Copy {
    const COUNT: usize;
    fn zero() -> Self;
    /// # Safety
    /// `COUNT` elements are readable at `at`, and the CPU has the instructions.
    unsafe fn load<W: Width>(at: *const u8) -> Self;
    /// # Safety
    /// The CPU has the instructions.
    unsafe fn multiply_add(self, a: Self, b: Self) -> Self;
    /// # Safety
    /// The CPU has the instructions.
    unsafe fn sum(self) -> f32;
}

/// A stored float type.
trait Width {
    const DTYPE: DType;
    const BYTES: usize = Self::DTYPE.block_bytes();
    /// # Safety
    /// One element is readable at `at`.
    unsafe fn one(at: *const u8) -> f32;
}

struct F32;
struct F16;
struct Bf16;

impl Width for F32 {
    const DTYPE: DType = DType::F32;

    #[inline(always)]
    unsafe fn one(at: *const u8) -> f32 {
        // SAFETY: the caller promises four readable bytes; the read is unaligned.
        unsafe { f32::from_bits(u32::from_le(at.cast::<u32>().read_unaligned())) }
    }
}

impl Width for F16 {
    const DTYPE: DType = DType::F16;

    #[inline(always)]
    unsafe fn one(at: *const u8) -> f32 {
        // SAFETY: the caller promises two readable bytes; the read is unaligned.
        f16::from_bits(unsafe { u16::from_le(at.cast::<u16>().read_unaligned()) }).to_f32()
    }
}

impl Width for Bf16 {
    const DTYPE: DType = DType::BF16;

    #[inline(always)]
    unsafe fn one(at: *const u8) -> f32 {
        // SAFETY: the caller promises two readable bytes; the read is unaligned.
        bf16::from_bits(unsafe { u16::from_le(at.cast::<u16>().read_unaligned()) }).to_f32()
    }
}

/// All products of the rows of `runs` and `x`. Lengths are checked by the caller.
///
/// # Safety
/// The CPU has the instructions of `L`.
#[inline(always)]
unsafe fn rows<L: Lanes>(dtype: DType, runs: &mut Runs<'_>, x: &[f32], cols: usize) {
    // SAFETY: passed on.
    unsafe {
        match dtype {
            DType::F32 => rows_of::<L, F32>(runs, x, cols),
            DType::F16 => rows_of::<L, F16>(runs, x, cols),
            _ => rows_of::<L, Bf16>(runs, x, cols),
        }
    }
}

/// # Safety
/// As [`rows`].
#[inline(always)]
unsafe fn rows_of<L: Lanes, W: Width>(runs: &mut Runs<'_>, x: &[f32], cols: usize) {
    for (index, x) in x.chunks(MAX_ROWS * cols).enumerate() {
        let first = index * MAX_ROWS;
        // SAFETY: passed on.
        unsafe {
            match x.len() / cols {
                1 => pass::<L, W, 1>(runs, x, cols, first),
                2 => pass::<L, W, 2>(runs, x, cols, first),
                3 => pass::<L, W, 3>(runs, x, cols, first),
                _ => pass::<L, W, 4>(runs, x, cols, first),
            }
        }
    }
}

/// All weights with `M` activation rows, numbers `first..` of all.
///
/// # Safety
/// As [`rows`].
#[inline(always)]
unsafe fn pass<L: Lanes, W: Width, const M: usize>(
    runs: &mut Runs<'_>,
    x: &[f32],
    cols: usize,
    first: usize,
) {
    assert!(x.len() == M * cols && runs.row_bytes() == cols * W::BYTES);
    let whole = cols / L::COUNT * L::COUNT;
    for pass in 0..runs.passes() {
        let starts = runs.rows(pass).map(<[u8]>::as_ptr);
        let mut sums = [[L::zero(); RUNS]; M];
        for col in (0..whole).step_by(L::COUNT) {
            // SAFETY: `col + COUNT <= cols`, so every load stays inside its row.
            unsafe {
                let mut w = [L::zero(); RUNS];
                for r in 0..RUNS {
                    w[r] = L::load::<W>(starts[r].add(col * W::BYTES));
                }
                for m in 0..M {
                    let values = L::load::<F32>(x.as_ptr().add(m * cols + col).cast());
                    for r in 0..RUNS {
                        sums[m][r] = sums[m][r].multiply_add(w[r], values);
                    }
                }
            }
        }
        for m in 0..M {
            let mut totals = [0.0; RUNS];
            for r in 0..RUNS {
                // SAFETY: the CPU has the instructions.
                totals[r] = unsafe { sums[m][r].sum() };
                for col in whole..cols {
                    // SAFETY: `col < cols`.
                    totals[r] += unsafe { W::one(starts[r].add(col * W::BYTES)) } * x[m * cols + col];
                }
            }
            runs.write(first + m, pass, totals);
        }
    }
}

impl Lanes for f32 {
    const COUNT: usize = 1;

    #[inline(always)]
    fn zero() -> f32 {
        0.0
    }

    #[inline(always)]
    unsafe fn load<W: Width>(at: *const u8) -> f32 {
        // SAFETY: passed on.
        unsafe { W::one(at) }
    }

    #[inline(always)]
    unsafe fn multiply_add(self, a: f32, b: f32) -> f32 {
        self + a * b
    }

    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        self
    }
}

/// The reference.
pub(super) fn scalar_rows(dtype: DType, runs: &mut Runs<'_>, x: &[f32], cols: usize) {
    // SAFETY: plain floats need no special instructions.
    unsafe { rows::<f32>(dtype, runs, x, cols) }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{avx2_rows, avx512_rows};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{Lanes, Runs, Width, rows};
    use crate::dtype::DType;

    impl Lanes for __m256 {
        const COUNT: usize = 8;

        #[inline(always)]
        fn zero() -> __m256 {
            // SAFETY: all zero bits are a valid vector.
            unsafe { std::mem::zeroed() }
        }

        #[inline(always)]
        unsafe fn load<W: Width>(at: *const u8) -> __m256 {
            // SAFETY: the caller promises eight readable elements and the instructions.
            unsafe {
                match W::DTYPE {
                    DType::F32 => _mm256_loadu_ps(at.cast()),
                    DType::F16 => _mm256_cvtph_ps(_mm_loadu_si128(at.cast())),
                    _ => {
                        let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast()));
                        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
                    }
                }
            }
        }

        #[inline(always)]
        unsafe fn multiply_add(self, a: __m256, b: __m256) -> __m256 {
            // SAFETY: the caller promises the instructions.
            unsafe { _mm256_fmadd_ps(a, b, self) }
        }

        #[inline(always)]
        unsafe fn sum(self) -> f32 {
            // SAFETY: the caller promises the instructions.
            unsafe {
                let four = _mm_add_ps(_mm256_castps256_ps128(self), _mm256_extractf128_ps::<1>(self));
                let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
                _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
            }
        }
    }

    impl Lanes for __m512 {
        const COUNT: usize = 16;

        #[inline(always)]
        fn zero() -> __m512 {
            // SAFETY: all zero bits are a valid vector.
            unsafe { std::mem::zeroed() }
        }

        #[inline(always)]
        unsafe fn load<W: Width>(at: *const u8) -> __m512 {
            // SAFETY: the caller promises sixteen readable elements and the instructions.
            unsafe {
                match W::DTYPE {
                    DType::F32 => _mm512_loadu_ps(at.cast()),
                    DType::F16 => _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())),
                    _ => {
                        let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(at.cast()));
                        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
                    }
                }
            }
        }

        #[inline(always)]
        unsafe fn multiply_add(self, a: __m512, b: __m512) -> __m512 {
            // SAFETY: the caller promises the instructions.
            unsafe { _mm512_fmadd_ps(a, b, self) }
        }

        #[inline(always)]
        unsafe fn sum(self) -> f32 {
            // SAFETY: the caller promises the instructions.
            unsafe { _mm512_reduce_add_ps(self) }
        }
    }

    /// # Safety
    /// The CPU has AVX2, FMA and F16C. Lengths are checked by the caller.
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(in super::super) unsafe fn avx2_rows(dtype: DType, runs: &mut Runs<'_>, x: &[f32], cols: usize) {
        // SAFETY: passed on.
        unsafe { rows::<__m256>(dtype, runs, x, cols) }
    }

    /// # Safety
    /// The CPU has AVX-512 F, BW, DQ and VL. Lengths are checked by the caller.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    pub(in super::super) unsafe fn avx512_rows(dtype: DType, runs: &mut Runs<'_>, x: &[f32], cols: usize) {
        // SAFETY: passed on.
        unsafe { rows::<__m512>(dtype, runs, x, cols) }
    }
}

#[cfg(target_arch = "aarch64")]
pub(super) use arm::neon_rows;

#[cfg(target_arch = "aarch64")]
mod arm {
    use std::arch::aarch64::*;
    use std::arch::asm;

    use super::{Lanes, Runs, Width, rows};
    use crate::dtype::DType;

    impl Lanes for float32x4_t {
        const COUNT: usize = 4;

        #[inline(always)]
        fn zero() -> float32x4_t {
            // SAFETY: all zero bits are a valid vector.
            unsafe { std::mem::zeroed() }
        }

        #[inline(always)]
        unsafe fn load<W: Width>(at: *const u8) -> float32x4_t {
            // SAFETY: the caller promises four readable elements; the loads are unaligned.
            unsafe {
                match W::DTYPE {
                    DType::F32 => vreinterpretq_f32_u8(vld1q_u8(at)),
                    DType::F16 => {
                        let half = vld1_u8(at);
                        let wide: float32x4_t;
                        // The widening is base NEON, but its intrinsic needs the unstable half type.
                        asm!("fcvtl {wide:v}.4s, {half:v}.4h", wide = lateout(vreg) wide, half = in(vreg) half,
                             options(pure, nomem, nostack, preserves_flags));
                        wide
                    }
                    _ => vreinterpretq_f32_u32(vshll_n_u16::<16>(vreinterpret_u16_u8(vld1_u8(at)))),
                }
            }
        }

        #[inline(always)]
        unsafe fn multiply_add(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
            // SAFETY: NEON is part of the AArch64 baseline.
            unsafe { vfmaq_f32(self, a, b) }
        }

        #[inline(always)]
        unsafe fn sum(self) -> f32 {
            // SAFETY: NEON is part of the AArch64 baseline.
            unsafe { vaddvq_f32(self) }
        }
    }

    /// # Safety
    /// Lengths are checked by the caller.
    pub(in super::super) unsafe fn neon_rows(dtype: DType, runs: &mut Runs<'_>, x: &[f32], cols: usize) {
        // SAFETY: NEON is part of the AArch64 baseline.
        unsafe { rows::<float32x4_t>(dtype, runs, x, cols) }
    }
}
