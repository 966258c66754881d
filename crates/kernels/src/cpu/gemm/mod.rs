//! Matrix products for many rows of activations: `out = x · Wᵀ` with `W` in its stored type.
//!
//! Weights are dequantised on the fly, a panel of rows and a run of channels at a time, into scratch that stays in
//! the second-level cache, and multiplied with all activations from there. So weights never have a second resident
//! copy, and the cost of dequantising is shared by all rows. For one or a few rows dot products are faster.
//!
//! | module | job |
//! |---|---|
//! | `pack` | activations in the order the kernels read them |
//! | `weights` | weight rows as `f32` |
//! | `amx` | tiles of split bf16, the fastest path |
//! | `floats` | `f32` products on vectors |
//! | `scalar` | the reference |

#[cfg(target_arch = "x86_64")]
mod amx;
mod floats;
mod pack;
mod scalar;
#[cfg(test)]
mod tests;
mod weights;

pub(crate) use pack::PackedActivations;

use super::aligned::AlignedScratch;
use super::isa::Isa;
use super::simd::Simd;
use crate::dtype::DType;
use crate::quant::fp8::BlockScales;
use floats::{Multiply, Transpose};

/// Most weight rows of a panel. Wide panels read the activations, which do not fit the cache, less often.
pub(crate) const PANEL_ROWS: usize = 128;

/// Activation rows of a block, and the step in which panels are best sized.
const BLOCK_ROWS: usize = 32;

/// Channels of one tile.
const DEPTH_STEP: usize = 32;

/// Channels multiplied before the next ones are dequantised; a multiple of every quantised block.
/// A panel of this depth and its share of a block of activations fit the second-level cache with room to spare.
const DEPTH: usize = 1024;

/// Memory of one thread for [`panel`]; keeps its allocation between calls.
#[derive(Default)]
pub(crate) struct PanelScratch {
    /// A panel of weight rows as floats.
    rows: AlignedScratch,
    /// The panel in the order of tile products.
    #[cfg(target_arch = "x86_64")]
    tiles: AlignedScratch,
    /// Running sums, `[block][weight row][32 activation rows]`.
    sums: AlignedScratch,
}

/// A panel height for a matrix of `outputs` rows that gives all `threads` the same number of panels, as nearly as
/// steps of 32 rows allow.
pub(crate) fn panel_rows(outputs: usize, threads: usize) -> usize {
    let threads = threads.max(1);
    let panels = outputs.div_ceil(PANEL_ROWS).next_multiple_of(threads).max(1);
    outputs.div_ceil(panels).next_multiple_of(BLOCK_ROWS).clamp(BLOCK_ROWS, PANEL_ROWS)
}

/// Some rows of a weight, as they are stored.
#[derive(Clone, Copy)]
pub(crate) struct PanelWeights<'a> {
    pub(crate) dtype: DType,
    /// The bytes of whole rows of the matrix.
    pub(crate) bytes: &'a [u8],
    /// Which row of the matrix is the first.
    pub(crate) first_row: usize,
    /// The scales of the matrix, if its elements have them.
    pub(crate) scales: Option<&'a BlockScales>,
}

/// Multiplies a panel of `n <= PANEL_ROWS` weight rows of `cols` values with all packed activations.
///
/// `out[i * n + r]` becomes the product of activation row `i` and weight
/// row `r`. `x` must have been packed for the same `isa`.
pub(crate) fn panel(
    isa: Isa,
    panel: PanelWeights<'_>,
    cols: usize,
    x: &PackedActivations,
    scratch: &mut PanelScratch,
    out: &mut [f32],
) {
    let PanelWeights { dtype, bytes: weights, .. } = panel;
    assert_eq!(x.cols(), cols, "weights and activations have different widths");
    assert!(x.is_for(isa), "activations were packed for another path than {isa}");
    if out.is_empty() {
        return;
    }
    if cols == 0 {
        return out.fill(0.0);
    }
    let row_bytes = dtype.bytes_for(cols).expect("a weight row is whole blocks");
    let n = weights.len() / row_bytes;
    assert!(n <= PANEL_ROWS && weights.len() == n * row_bytes, "{} bytes of {dtype} rows", weights.len());
    assert_eq!(out.len(), x.rows() * n, "{} rows of {n} outputs", x.rows());
    let simd = Simd::new(isa);

    let padded = n.next_multiple_of(BLOCK_ROWS);
    scratch.sums.at_least::<f32>(x.blocks() * padded * BLOCK_ROWS).fill(0.0);
    for depth in (0..cols).step_by(DEPTH) {
        let count = (cols - depth).min(DEPTH);
        let slice = DepthSlice { simd, panel, row_bytes, depth, count };
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => slice.multiply_tiles(n, x, scratch),
            _ => slice.multiply_floats(n, x, scratch),
        }
    }
    let sums = scratch.sums.all::<f32>().chunks_exact(padded * BLOCK_ROWS);
    for (from, to) in sums.zip(out.chunks_mut(BLOCK_ROWS * n)) {
        let columns = to.len() / n;
        simd.run(Transpose { from, from_stride: BLOCK_ROWS, rows: n, columns, to, to_stride: n });
    }
}

/// Some channels of all rows of a panel.
struct DepthSlice<'a> {
    simd: Simd,
    panel: PanelWeights<'a>,
    row_bytes: usize,
    depth: usize,
    count: usize,
}

impl<'a> DepthSlice<'a> {
    /// The stored bytes of these channels in each row.
    fn rows(&self) -> impl Iterator<Item = &'a [u8]> {
        let bytes = |channels| self.panel.dtype.bytes_for(channels).expect("slices are whole blocks");
        let range = bytes(self.depth)..bytes(self.depth + self.count);
        self.panel.bytes.chunks_exact(self.row_bytes).map(move |row| &row[range.clone()])
    }

    /// The values of these channels in a row of the panel.
    fn unpack(&self, row: usize, bytes: &[u8], out: &mut [f32]) {
        let PanelWeights { dtype, first_row, scales, .. } = self.panel;
        weights::dequantise(self.simd.isa(), dtype, bytes, out);
        if let Some(scales) = scales {
            scales.apply(first_row + row, self.depth..self.depth + self.count, out);
        }
    }

    fn multiply_floats(&self, n: usize, x: &PackedActivations, scratch: &mut PanelScratch) {
        let rows = scratch.rows.at_least::<f32>(n * self.count);
        for (index, (bytes, row)) in self.rows().zip(rows.chunks_exact_mut(self.count)).enumerate() {
            self.unpack(index, bytes, row);
        }
        let sums_len = n.next_multiple_of(BLOCK_ROWS) * BLOCK_ROWS;
        let sums = scratch.sums.at_least::<f32>(x.blocks() * sums_len).chunks_exact_mut(sums_len);
        for (block, sums) in sums.enumerate() {
            let block: &[f32] = bytemuck::cast_slice(x.block(block, self.depth));
            let block = &block[..self.count * BLOCK_ROWS];
            match self.simd.isa() {
                Isa::Scalar => scalar::multiply(rows, block, self.count, sums),
                _ => self.simd.run(Multiply { w: rows, x: block, depth: self.count, sums }),
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn multiply_tiles(&self, n: usize, x: &PackedActivations, scratch: &mut PanelScratch) {
        let low = self.panel.dtype != DType::BF16;
        let steps = self.count.div_ceil(DEPTH_STEP);
        let tiles = scratch.tiles.at_least::<u32>(amx::weight_words(n, self.count, low));
        if !n.is_multiple_of(BLOCK_ROWS) {
            // Rows past the panel are multiplied too and dropped; stale NaN would be slow and confusing.
            tiles.fill(0);
        }
        let values = scratch.rows.at_least::<f32>(self.count);
        for (row, bytes) in self.rows().enumerate() {
            if low {
                self.unpack(row, bytes, values);
                // SAFETY: activations are packed only for paths that this machine has.
                unsafe { amx::pack_weights(values, row, tiles) };
            } else {
                amx::pack_bf16_weights(bytes, row, tiles);
            }
        }
        let sums_len = n.next_multiple_of(BLOCK_ROWS) * BLOCK_ROWS;
        let sums = scratch.sums.at_least::<f32>(x.blocks() * sums_len).chunks_exact_mut(sums_len);
        // SAFETY: as above; tiles are used only here until `unit` is dropped.
        let unit = unsafe { amx::Unit::new() };
        for (block, sums) in sums.enumerate() {
            let wide = x.rows() - block * BLOCK_ROWS > BLOCK_ROWS / 2;
            let next = x.block((block + 1).min(x.blocks() - 1), self.depth);
            unit.multiply(tiles, low, x.block(block, self.depth), steps, wide, next, sums);
        }
    }
}
