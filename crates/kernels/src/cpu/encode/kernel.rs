//! The steps of encoding up to a page of rows, compiled once per instruction set.

use oscar_codec::quantise::RowFormat;
use oscar_codec::{CodeLayout, Side};

use super::lanes::{BLOCK, Lanes, Portable};
use super::pack::write_block;
use super::quantise::{BlockCodes, quantise_block};
use crate::cpu::isa::Isa;

/// A step over up to 64 rows, ready to run on any width.
pub(super) trait Step {
    /// What it reports.
    type Output;

    /// Runs the step.
    ///
    /// # Safety
    /// The CPU has the instructions of `V`.
    unsafe fn run<V: Lanes, const VECTORS: usize, const OUTPUTS: usize>(self) -> Self::Output;
}

/// Runs a step with the instructions of `isa`, which the caller has found to be available.
///
/// # Safety
/// `isa` is available on this machine.
pub(super) unsafe fn run<S: Step>(isa: Isa, step: S) -> S::Output {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn avx2<S: Step>(step: S) -> S::Output {
            // SAFETY: this function has the instructions. Two registers of rows and four outputs make eight sums,
            // as many as the multipliers have in flight, in 16 registers.
            unsafe { step.run::<std::arch::x86_64::__m256, 2, 4>() }
        }
        #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
        fn avx512<S: Step>(step: S) -> S::Output {
            // SAFETY: this function has the instructions. Sixteen sums and each matrix entry is used twice.
            unsafe { step.run::<std::arch::x86_64::__m512, 2, 8>() }
        }
        match isa {
            // SAFETY: the caller promises that the path is available.
            Isa::Avx2 => return unsafe { avx2(step) },
            // SAFETY: as above.
            Isa::Avx512 | Isa::Amx => return unsafe { avx512(step) },
            Isa::Scalar | Isa::Neon => {}
        }
    }
    let _ = isa;
    // SAFETY: plain Rust needs no special instructions.
    unsafe { step.run::<Portable, 4, 4>() }
}

/// Quantises rotated blocks of finite numbers into a page.
pub(super) struct Quantise<'a> {
    pub(super) format: &'a RowFormat,
    pub(super) layout: &'a CodeLayout,
    pub(super) side: Side,
    pub(super) rows: usize,
    /// `[block][channel][16]`.
    pub(super) rotated: &'a [f32],
    pub(super) codes: &'a mut BlockCodes,
    pub(super) page: &'a mut [u8],
}

impl Step for Quantise<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes, const VECTORS: usize, const OUTPUTS: usize>(self) {
        let Quantise { format, layout, side, rows, rotated, codes, page } = self;
        codes.reset(layout.padded_dim(), layout.groups());
        for (index, block) in rotated.chunks_exact(layout.head_dim() * BLOCK).enumerate() {
            // SAFETY: the caller promises the instructions.
            unsafe { quantise_block::<V>(block, format, codes) };
            let first = index * BLOCK;
            write_block(layout, side, page, first, (rows - first).min(BLOCK), codes);
        }
    }
}
