//! The kernel that turns blocks of rows into the codes of a page.

use oscar_codec::quantise::RowFormat;

use super::pack::{Placement, write_block};
use super::quantise::{BlockCodes, quantise_block};
use super::unpack::BLOCK;
use crate::cpu::simd::{Kernel, Vector};

/// Quantises rotated blocks of finite numbers into a page.
pub(super) struct Quantise<'a> {
    pub(super) format: &'a RowFormat,
    pub(super) place: Placement,
    /// Channels of a row.
    pub(super) dim: usize,
    pub(super) rows: usize,
    /// `[block][channel][16]`.
    pub(super) rotated: &'a [f32],
    pub(super) codes: &'a mut BlockCodes,
    pub(super) page: &'a mut [u8],
}

impl Kernel for Quantise<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let Quantise { format, place, dim, rows, rotated, codes, page } = self;
        codes.reset(place.channels, format.groups);
        for (index, block) in rotated.chunks_exact(dim * BLOCK).enumerate() {
            // SAFETY: the caller promises the instructions.
            unsafe { quantise_block::<V>(block, format, codes) };
            let first = index * BLOCK;
            write_block(&place, page, first, (rows - first).min(BLOCK), codes);
        }
    }
}
