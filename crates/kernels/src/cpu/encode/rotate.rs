//! Rows in, rotated rows out, sixteen rows side by side.
//!
//! A block is `[channel][16 rows]`. With rows in lanes an output channel is a chain of fused multiply-adds of a
//! broadcast matrix entry with a register of rows, over input channels 0, 1, 2, …: the order that
//! [`HeadTransform::apply`] defines, hence the same bits, and no horizontal sums.

use std::sync::Arc;

use half::bf16;
use oscar_codec::HeadTransform;

use super::lanes::{BLOCK, Lanes};

/// Output channels whose matrix entries lie together.
pub(super) const PANEL: usize = 8;

/// Rounding to bf16 makes infinity of this and everything above it.
const FIRST_WITHOUT_BF16: f32 = f32::from_bits(0x7f7f_8000);

/// A square matrix cut into panels `[d / 8][d][8]` of output channels, so that the inner loop reads on.
#[derive(Clone, Debug)]
pub(super) struct Panels {
    dim: usize,
    values: Arc<[f32]>,
}

impl Panels {
    /// `entry(i, j)` weighs input channel `i` in output channel `j`.
    pub(super) fn new(dim: usize, entry: impl Fn(usize, usize) -> f32) -> Self {
        let mut values = Vec::with_capacity(dim * dim.next_multiple_of(PANEL));
        for first in (0..dim).step_by(PANEL) {
            for i in 0..dim {
                values.extend((first..first + PANEL).map(|j| if j < dim { entry(i, j) } else { 0.0 }));
            }
        }
        Panels { dim, values: values.into() }
    }

    /// The rotation of `transform`, and its inverse.
    pub(super) fn pair(transform: &HeadTransform) -> [Self; 2] {
        let (dim, matrix) = (transform.dim(), transform.rotation());
        [Panels::new(dim, |i, j| matrix[i * dim + j]), Panels::new(dim, |i, j| matrix[j * dim + i])]
    }

    pub(super) fn dim(&self) -> usize {
        self.dim
    }
}

/// A number of an input row.
pub trait Element: sealed::Sealed + Copy + Send + Sync {
    /// The number, exactly.
    fn to_f32(self) -> f32;
}

impl Element for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }
}

// Nobody outside can name a trait of a private module, nor call it.
#[allow(private_bounds)]
mod sealed {
    use half::bf16;

    use crate::cpu::encode::lanes::Lanes;

    #[allow(clippy::missing_safety_doc)]
    pub trait Sealed: Sized {
        /// [`Lanes::transpose`] from this type, and as safe.
        unsafe fn transpose<V: Lanes>(from: *const Self, from_stride: usize, to: *mut f32, to_stride: usize);
    }

    impl Sealed for f32 {
        #[inline(always)]
        unsafe fn transpose<V: Lanes>(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
            // SAFETY: the caller keeps the promises of `Lanes::transpose`.
            unsafe { V::transpose(from, from_stride, to, to_stride) }
        }
    }

    impl Sealed for bf16 {
        #[inline(always)]
        unsafe fn transpose<V: Lanes>(from: *const bf16, from_stride: usize, to: *mut f32, to_stride: usize) {
            // SAFETY: the caller keeps the promises of `Lanes::transpose_bf16`.
            unsafe { V::transpose_bf16(from, from_stride, to, to_stride) }
        }
    }
}

/// Lays `rows` out in blocks `[block][channel][16]`; rows that fill up the last block are zero.
///
/// # Safety
/// The CPU has the instructions of `V`.
#[inline(always)]
pub(super) unsafe fn rows_to_blocks<V: Lanes, E: Element>(rows: &[E], dim: usize, blocks: &mut [f32]) {
    let count = rows.len() / dim;
    assert_eq!(blocks.len(), count.div_ceil(BLOCK) * dim * BLOCK);
    // Whole squares go through registers, edges one by one.
    let (square_rows, square_channels) = (count / V::WIDTH * V::WIDTH, dim / V::WIDTH * V::WIDTH);
    for row in (0..square_rows).step_by(V::WIDTH) {
        let to = row / BLOCK * dim * BLOCK + row % BLOCK;
        for channel in (0..square_channels).step_by(V::WIDTH) {
            // SAFETY: `row + WIDTH <= count` and `channel + WIDTH <= dim`; a block has 16 lanes for each of `dim`
            // channels and `row % 16 + WIDTH <= 16`.
            unsafe {
                let from = rows.as_ptr().add(row * dim + channel);
                E::transpose::<V>(from, dim, blocks.as_mut_ptr().add(to + channel * BLOCK), BLOCK);
            }
        }
    }
    let at = |row: usize, channel: usize| (row / BLOCK * dim + channel) * BLOCK + row % BLOCK;
    for row in 0..count {
        let edge = if row < square_rows { square_channels } else { 0 };
        for channel in edge..dim {
            blocks[at(row, channel)] = rows[row * dim + channel].to_f32();
        }
    }
    for row in count..count.next_multiple_of(BLOCK) {
        for channel in 0..dim {
            blocks[at(row, channel)] = 0.0;
        }
    }
}

/// The inverse of [`rows_to_blocks`], to as many rows as `rows` has.
///
/// # Safety
/// The CPU has the instructions of `V`.
#[inline(always)]
pub(super) unsafe fn blocks_to_rows<V: Lanes>(blocks: &[f32], dim: usize, rows: &mut [f32]) {
    let count = rows.len() / dim;
    assert_eq!(blocks.len(), count.div_ceil(BLOCK) * dim * BLOCK);
    let (square_rows, square_channels) = (count / V::WIDTH * V::WIDTH, dim / V::WIDTH * V::WIDTH);
    for row in (0..square_rows).step_by(V::WIDTH) {
        let from = row / BLOCK * dim * BLOCK + row % BLOCK;
        for channel in (0..square_channels).step_by(V::WIDTH) {
            // SAFETY: as in `rows_to_blocks`, with the sides exchanged.
            unsafe {
                let to = rows.as_mut_ptr().add(row * dim + channel);
                V::transpose(blocks.as_ptr().add(from + channel * BLOCK), BLOCK, to, dim);
            }
        }
    }
    for row in 0..count {
        let edge = if row < square_rows { square_channels } else { 0 };
        for channel in edge..dim {
            rows[row * dim + channel] = blocks[(row / BLOCK * dim + channel) * BLOCK + row % BLOCK];
        }
    }
}

/// Rounds blocks to bf16 where the transform says so and subtracts its mean.
///
/// # Safety
/// The CPU has the instructions of `V`.
#[inline(always)]
pub(super) unsafe fn centre<V: Lanes>(transform: &HeadTransform, blocks: &mut [f32]) {
    if transform.mean().is_none() && !transform.rounds_input() {
        return;
    }
    for block in blocks.chunks_exact_mut(transform.dim() * BLOCK) {
        for (channel, lanes) in block.chunks_exact_mut(BLOCK).enumerate() {
            let mean = transform.mean().map_or(0.0, |mean| mean[channel]);
            for vector in lanes.chunks_exact_mut(V::WIDTH) {
                // SAFETY: the caller promises the instructions; the chunk has `WIDTH` numbers.
                unsafe {
                    let mut x = V::load(vector.as_ptr());
                    if transform.rounds_input() {
                        // NaN must not be rounded into a number: it has to reach the check after the rotation.
                        let limit = V::splat(f32::INFINITY);
                        x = x.magnitude().where_less(limit, x.round_to_bf16(), x);
                    }
                    if transform.mean().is_some() {
                        x = x.subtract(V::splat(mean));
                    }
                    x.store(vector.as_mut_ptr());
                }
            }
        }
    }
}

/// What becomes of a finished sum.
#[derive(Clone, Copy)]
pub(super) enum Finish<'a> {
    /// It is rounded to bf16 and must then be finite.
    Bf16,
    /// The mean of its channel is added, if there is one.
    Mean(Option<&'a [f32]>),
}

/// `output = input · matrix` for all rows of blocks. Returns whether all sums are finite after [`Finish::Bf16`].
///
/// # Safety
/// The CPU has the instructions of `V`.
#[inline(always)]
pub(super) unsafe fn multiply<V: Lanes, const VECTORS: usize, const OUTPUTS: usize>(
    panels: &Panels,
    input: &[f32],
    output: &mut [f32],
    finish: Finish<'_>,
) -> bool {
    const { assert!(PANEL.is_multiple_of(OUTPUTS)) };
    assert_eq!(input.len(), output.len());
    assert!(input.len().is_multiple_of(panels.dim * BLOCK));
    let vectors = input.len() / (panels.dim * V::WIDTH);
    let mut first = 0;
    let mut finite = true;
    while first < vectors {
        // SAFETY: the caller promises the instructions; vectors `first..` exist as counted.
        finite &= unsafe {
            if first + VECTORS <= vectors {
                multiply_vectors::<V, VECTORS, OUTPUTS>(panels, input, output, first, finish)
            } else {
                multiply_vectors::<V, 1, OUTPUTS>(panels, input, output, first, finish)
            }
        };
        first += if first + VECTORS <= vectors { VECTORS } else { 1 };
    }
    finite
}

/// [`multiply`] of registers `first..first + VECTORS` of rows, counted through all blocks.
///
/// # Safety
/// The CPU has the instructions of `V`; these registers lie inside `input` and `output`, which are whole blocks.
#[inline(always)]
unsafe fn multiply_vectors<V: Lanes, const VECTORS: usize, const OUTPUTS: usize>(
    panels: &Panels,
    input: &[f32],
    output: &mut [f32],
    first: usize,
    finish: Finish<'_>,
) -> bool {
    let dim = panels.dim;
    let per_block = BLOCK / V::WIDTH;
    let mut starts = [0; VECTORS];
    for (index, start) in starts.iter_mut().enumerate() {
        let vector = first + index;
        *start = vector / per_block * dim * BLOCK + vector % per_block * V::WIDTH;
    }
    // SAFETY: the caller promises the instructions. A panel has `dim · PANEL` entries; `starts[v] + i · BLOCK` for a
    // channel `i < dim` is a register inside its block.
    unsafe {
        let mut beyond = [V::splat(0.0); VECTORS];
        for (panel, entries) in panels.values.chunks_exact(dim * PANEL).enumerate() {
            for part in (0..PANEL).step_by(OUTPUTS) {
                let mut sums = [[V::splat(0.0); VECTORS]; OUTPUTS];
                for i in 0..dim {
                    let mut x = [V::splat(0.0); VECTORS];
                    for v in 0..VECTORS {
                        x[v] = V::load(input.as_ptr().add(starts[v] + i * BLOCK));
                    }
                    for o in 0..OUTPUTS {
                        let entry = V::splat(*entries.as_ptr().add(i * PANEL + part + o));
                        for v in 0..VECTORS {
                            sums[o][v] = x[v].multiply_add(entry, sums[o][v]);
                        }
                    }
                }
                let channels = (dim - (panel * PANEL + part).min(dim)).min(OUTPUTS);
                for o in 0..OUTPUTS {
                    if o >= channels {
                        break;
                    }
                    let channel = panel * PANEL + part + o;
                    for v in 0..VECTORS {
                        let sum = sums[o][v];
                        let value = match finish {
                            Finish::Bf16 => {
                                let limit = V::splat(FIRST_WITHOUT_BF16);
                                beyond[v] = sum.magnitude().where_less(limit, beyond[v], V::splat(1.0));
                                sum.round_to_bf16()
                            }
                            Finish::Mean(Some(mean)) => sum.add(V::splat(mean[channel])),
                            Finish::Mean(None) => sum,
                        };
                        value.store(output.as_mut_ptr().add(starts[v] + channel * BLOCK));
                    }
                }
            }
        }
        let mut finite = true;
        for lanes in beyond {
            let mut flags = [0.0; BLOCK];
            lanes.store(flags.as_mut_ptr());
            finite &= flags.iter().all(|&flag| flag == 0.0);
        }
        finite
    }
}
