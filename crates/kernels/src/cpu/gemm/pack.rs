//! Activations in the order the product kernels read them.
//!
//! Rows come in blocks of [`BLOCK_ROWS`]. A block is `[channel][row]` in `f32`, or, for AMX, steps of 32 channels of
//! bf16 tiles (see [`super::amx`]). Both take four bytes per value, so one buffer serves either.

use std::cell::RefCell;
use std::sync::Mutex;

use super::floats::Transpose;
use super::{BLOCK_ROWS, DEPTH_STEP};
use crate::cpu::aligned::AlignedScratch;
use crate::cpu::isa::Isa;
use crate::cpu::pool::Pool;
use crate::cpu::simd::Simd;

/// Rows packed at a time: those of a tile.
const HALF_ROWS: usize = 16;

thread_local! {
    /// Rows of the task at hand, kept per worker so that packing does not allocate.
    static STAGING: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Rows of activations packed for [`super::panel`]. Keeps its allocation between uses.
#[derive(Default)]
pub(crate) struct PackedActivations {
    /// The path it was packed for.
    isa: Option<Isa>,
    rows: usize,
    cols: usize,
    words: AlignedScratch,
}

impl PackedActivations {
    /// Packs a row-major matrix; the threads of `pool` share the work.
    #[cfg(test)]
    pub(super) fn pack(&mut self, isa: Isa, pool: &Pool, x: &[f32], rows: usize, cols: usize) {
        assert_eq!(x.len(), rows * cols, "{rows} rows of {cols} activations");
        self.pack_with(isa, pool, rows, cols, |row, out| out.copy_from_slice(&x[row * cols..][..cols]));
    }

    /// Packs rows as they are computed: `fill(row, out)` writes one row of `cols` values.
    ///
    /// This saves a pass over memory when the rows come out of a norm or an activation function.
    pub(crate) fn pack_with(
        &mut self,
        isa: Isa,
        pool: &Pool,
        rows: usize,
        cols: usize,
        fill: impl Fn(usize, &mut [f32]) + Sync,
    ) {
        assert!(isa.is_available(), "{isa} kernels on a machine without them");
        (self.isa, self.rows, self.cols) = (Some(isa), rows, cols);
        let block_words = self.block_words();
        let words = self.words.at_least::<u32>(self.rows.div_ceil(BLOCK_ROWS) * block_words);
        if words.is_empty() {
            return;
        }
        // Each block is taken by one task, so the locks are never contended.
        let blocks: Vec<Mutex<&mut [u32]>> = words.chunks_exact_mut(block_words).map(Mutex::new).collect();
        pool.for_each(blocks.len(), |index| {
            let mut block = blocks[index].lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            STAGING.with_borrow_mut(|staging| {
                staging.resize(HALF_ROWS * cols, 0.0);
                for half in 0..2 {
                    let first_row = index * BLOCK_ROWS + half * HALF_ROWS;
                    let count = rows.saturating_sub(first_row).min(HALF_ROWS);
                    let (used, padding) = staging.split_at_mut(count * cols);
                    for (row, out) in used.chunks_exact_mut(cols).enumerate() {
                        fill(first_row + row, out);
                    }
                    padding.fill(0.0);
                    pack_half(isa, staging, cols, &mut block, half);
                }
            });
        });
    }

    /// Number of rows.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Values per row.
    pub(crate) fn cols(&self) -> usize {
        self.cols
    }

    /// Whether this was packed for the path `isa`.
    pub(super) fn is_for(&self, isa: Isa) -> bool {
        self.isa == Some(isa)
    }

    /// Number of row blocks.
    pub(super) fn blocks(&self) -> usize {
        self.rows.div_ceil(BLOCK_ROWS)
    }

    fn block_words(&self) -> usize {
        self.cols.next_multiple_of(DEPTH_STEP) * BLOCK_ROWS
    }

    /// The words of one block from channel `depth` on; `depth` is a multiple of [`DEPTH_STEP`].
    pub(super) fn block(&self, block: usize, depth: usize) -> &[u32] {
        let words = self.block_words();
        &self.words.all::<u32>()[block * words..][depth * BLOCK_ROWS..words]
    }
}

/// Packs 16 rows into half `half` of a block.
fn pack_half(isa: Isa, rows: &[f32], cols: usize, block: &mut [u32], half: usize) {
    match isa {
        // SAFETY: the path is available, which the caller has checked.
        #[cfg(target_arch = "x86_64")]
        Isa::Amx => unsafe { super::amx::pack_activations(rows, cols, block, half) },
        _ => Simd::new(isa).run(Transpose {
            from: rows,
            from_stride: cols,
            rows: HALF_ROWS,
            columns: cols,
            to: &mut bytemuck::cast_slice_mut(block)[half * HALF_ROWS..],
            to_stride: BLOCK_ROWS,
        }),
    }
}
