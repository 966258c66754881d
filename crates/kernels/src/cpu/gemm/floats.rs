//! Products in `f32` on vectors, and the transpositions around them.

use super::BLOCK_ROWS;
use crate::cpu::simd::{Kernel, Vector};

/// Adds `w · xᵀ` to `sums`, as [`super::scalar::multiply`] does.
pub(super) struct Multiply<'a> {
    /// `[n][depth]` weights.
    pub(super) w: &'a [f32],
    /// `[depth][32]` activations.
    pub(super) x: &'a [f32],
    pub(super) depth: usize,
    /// `[n][32]`.
    pub(super) sums: &'a mut [f32],
}

impl Kernel for Multiply<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(mut self) {
        let n = self.w.len() / self.depth;
        assert!(self.x.len() >= self.depth * BLOCK_ROWS && self.sums.len() >= n * BLOCK_ROWS);
        // Activations of the micro-kernel, in registers: what is left of 16 or 32 holds the sums of its weight rows.
        let columns = if V::WIDTH == 4 { 4 * V::WIDTH } else { 2 * V::WIDTH };
        for lane in (0..BLOCK_ROWS).step_by(columns) {
            let mut row = 0;
            while row < n {
                let left = n - row;
                // SAFETY: the caller promises the instructions; these rows and lanes exist.
                row += unsafe {
                    match V::WIDTH {
                        16 if left >= 12 => self.rows::<V, 12, 2>(row, lane),
                        16 if left >= 8 => self.rows::<V, 8, 2>(row, lane),
                        16 if left >= 4 => self.rows::<V, 4, 2>(row, lane),
                        16 => self.rows::<V, 1, 2>(row, lane),
                        8 if left >= 6 => self.rows::<V, 6, 2>(row, lane),
                        8 if left >= 3 => self.rows::<V, 3, 2>(row, lane),
                        8 => self.rows::<V, 1, 2>(row, lane),
                        _ if left >= 6 => self.rows::<V, 6, 4>(row, lane),
                        _ if left >= 3 => self.rows::<V, 3, 4>(row, lane),
                        _ => self.rows::<V, 1, 4>(row, lane),
                    }
                };
            }
        }
    }
}

impl Multiply<'_> {
    /// `R` weight rows from `row` on with `C` registers of activations from `lane` on. Returns `R`.
    ///
    /// # Safety
    /// The CPU has the instructions of `V`, these rows and lanes exist, and lengths were checked.
    #[inline(always)]
    unsafe fn rows<V: Vector, const R: usize, const C: usize>(&mut self, row: usize, lane: usize) -> usize {
        let depth = self.depth;
        // SAFETY: the caller's promise.
        unsafe {
            let w = self.w.as_ptr().add(row * depth);
            let x = self.x.as_ptr().add(lane);
            let sums = self.sums.as_mut_ptr().add(row * BLOCK_ROWS + lane);
            let mut totals = [[V::splat(0.0); C]; R];
            for r in 0..R {
                for c in 0..C {
                    totals[r][c] = V::load(sums.add(r * BLOCK_ROWS + c * V::WIDTH));
                }
            }
            for k in 0..depth {
                let mut lanes = [V::splat(0.0); C];
                for c in 0..C {
                    lanes[c] = V::load(x.add(k * BLOCK_ROWS + c * V::WIDTH));
                }
                for r in 0..R {
                    let weight = V::splat(*w.add(r * depth + k));
                    for c in 0..C {
                        totals[r][c] = weight.multiply_add(lanes[c], totals[r][c]);
                    }
                }
            }
            for r in 0..R {
                for c in 0..C {
                    totals[r][c].store(sums.add(r * BLOCK_ROWS + c * V::WIDTH));
                }
            }
        }
        R
    }
}

/// `to[j·to_stride + i] = from[i·from_stride + j]` for `rows` rows `i` of `columns` numbers `j`.
pub(super) struct Transpose<'a> {
    pub(super) from: &'a [f32],
    pub(super) from_stride: usize,
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) to: &'a mut [f32],
    pub(super) to_stride: usize,
}

impl Kernel for Transpose<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let Transpose { from, from_stride, rows, columns, to, to_stride } = self;
        if rows == 0 || columns == 0 {
            return;
        }
        assert!(
            from.len() >= (rows - 1) * from_stride + columns && to.len() >= (columns - 1) * to_stride + rows
        );
        let (square_rows, square_columns) = (rows / V::WIDTH * V::WIDTH, columns / V::WIDTH * V::WIDTH);
        for i in (0..square_rows).step_by(V::WIDTH) {
            for j in (0..square_columns).step_by(V::WIDTH) {
                // SAFETY: the caller promises the instructions; the square lies inside both lengths.
                unsafe {
                    let (from, to) =
                        (from.as_ptr().add(i * from_stride + j), to.as_mut_ptr().add(j * to_stride + i));
                    V::transpose(from, from_stride, to, to_stride);
                }
            }
        }
        for i in 0..rows {
            for j in if i < square_rows { square_columns } else { 0 }..columns {
                to[j * to_stride + i] = from[i * from_stride + j];
            }
        }
    }
}
