//! Loops over the rows of a matrix, on all threads where that pays.

use super::memory::DisjointSlice;
use super::pool::Pool;

/// Below this many values a loop over rows stays on the calling thread.
pub(super) const PARALLEL_VALUES: usize = 16 * 1024;

/// Calls `body` with the index and values of every row of `out`, in parallel where it pays.
pub(super) fn for_each_row(
    pool: &Pool,
    out: &mut [f32],
    cols: usize,
    body: impl Fn(usize, &mut [f32]) + Sync,
) {
    if out.len() < PARALLEL_VALUES {
        return out.chunks_exact_mut(cols.max(1)).enumerate().for_each(|(row, values)| body(row, values));
    }
    let rows = out.len() / cols;
    let target = DisjointSlice::new(out);
    pool.for_each(rows, |row| {
        // SAFETY: rows do not overlap and each index runs once.
        body(row, unsafe { target.part(row * cols..(row + 1) * cols) });
    });
}
