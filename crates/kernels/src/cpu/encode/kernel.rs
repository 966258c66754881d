//! The steps of encoding and decoding up to a page of rows, compiled once per instruction set.

use half::bf16;
use oscar_codec::code_page::CodeLayout;
use oscar_codec::quantise::RowFormat;
use oscar_codec::{HeadTransform, Side};

use super::lanes::{BLOCK, Lanes, Portable};
use super::pack::{read_block, write_block};
use super::quantise::{BlockCodes, quantise_block};
use super::rotate::{Element, Finish, Panels, blocks_to_rows, centre, multiply, rows_to_blocks};
use crate::cpu::isa::Isa;

/// Everything about one head and side that the kernels read.
pub(super) struct Head {
    pub(super) transform: HeadTransform,
    pub(super) rotation: Panels,
    pub(super) inverse: Panels,
    pub(super) format: RowFormat,
    pub(super) layout: CodeLayout,
}

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

/// Rotates rows into blocks; tells whether all numbers came out finite.
pub(super) struct Rotate<'a, E> {
    pub(super) head: &'a Head,
    pub(super) rows: &'a [E],
    /// Scratch of the size of `rotated`.
    pub(super) blocks: &'a mut [f32],
    /// `[block][channel][16]`.
    pub(super) rotated: &'a mut [f32],
}

impl<E: Element> Step for Rotate<'_, E> {
    type Output = bool;

    #[inline(always)]
    unsafe fn run<V: Lanes, const VECTORS: usize, const OUTPUTS: usize>(self) -> bool {
        // SAFETY: the caller promises the instructions.
        unsafe {
            rows_to_blocks::<V, E>(self.rows, self.head.rotation.dim(), self.blocks);
            centre::<V>(&self.head.transform, self.blocks);
            multiply::<V, VECTORS, OUTPUTS>(&self.head.rotation, self.blocks, self.rotated, Finish::Bf16)
        }
    }
}

/// Lays rows that are rotated already out in blocks; tells whether all are finite.
pub(super) struct Arrange<'a> {
    pub(super) dim: usize,
    pub(super) rows: &'a [bf16],
    pub(super) blocks: &'a mut [f32],
}

impl Step for Arrange<'_> {
    type Output = bool;

    #[inline(always)]
    unsafe fn run<V: Lanes, const VECTORS: usize, const OUTPUTS: usize>(self) -> bool {
        // SAFETY: the caller promises the instructions.
        unsafe { rows_to_blocks::<V, bf16>(self.rows, self.dim, self.blocks) };
        // Compared as bits, because `max` over floats would lose NaN.
        let largest = self.blocks.iter().fold(0, |largest: u32, x| largest.max(x.to_bits() & 0x7fff_ffff));
        largest < f32::INFINITY.to_bits()
    }
}

/// Blocks back to rows.
pub(super) struct Restore<'a> {
    pub(super) dim: usize,
    pub(super) blocks: &'a [f32],
    pub(super) rows: &'a mut [f32],
}

impl Step for Restore<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes, const VECTORS: usize, const OUTPUTS: usize>(self) {
        // SAFETY: the caller promises the instructions.
        unsafe { blocks_to_rows::<V>(self.blocks, self.dim, self.rows) }
    }
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

/// Reads rows of a page, still rotated, into blocks.
pub(super) struct Decode<'a> {
    pub(super) head: &'a Head,
    pub(super) side: Side,
    pub(super) page: &'a [u8],
    /// `[block][channel][16]`.
    pub(super) rotated: &'a mut [f32],
}

impl Step for Decode<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes, const VECTORS: usize, const OUTPUTS: usize>(self) {
        let Decode { head: Head { format, layout, .. }, side, page, rotated } = self;
        for (index, block) in rotated.chunks_exact_mut(layout.head_dim() * BLOCK).enumerate() {
            read_block(layout, side, page, index * BLOCK, format.scale_type, block);
        }
    }
}

/// Un-rotates blocks, adds the mean and lays them out as rows.
pub(super) struct Undo<'a> {
    pub(super) head: &'a Head,
    /// `[block][channel][16]`.
    pub(super) rotated: &'a [f32],
    /// Scratch of the size of `rotated`.
    pub(super) blocks: &'a mut [f32],
    pub(super) rows: &'a mut [f32],
}

impl Step for Undo<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Lanes, const VECTORS: usize, const OUTPUTS: usize>(self) {
        let finish = Finish::Mean(self.head.transform.mean());
        // SAFETY: the caller promises the instructions.
        unsafe {
            multiply::<V, VECTORS, OUTPUTS>(&self.head.inverse, self.rotated, self.blocks, finish);
            blocks_to_rows::<V>(self.blocks, self.head.inverse.dim(), self.rows);
        }
    }
}
