//! FP8 weights times float activations: widen to `f32` in registers, and scale the sums of each block of columns.

use super::MAX_ROWS;
use super::stripes::{STRIPES, Stripes};
use crate::cpu::simd::{Kernel, Vector};
use crate::quant::fp8::{BlockScales, E4M3};

/// All products of the rows of `stripes` and `x`. Lengths are checked by the caller.
pub(super) struct Fp8Rows<'a, 'b> {
    pub(super) stripes: &'a mut Stripes<'b>,
    /// The row of the matrix that each stripe begins with.
    pub(super) first_rows: [usize; STRIPES],
    pub(super) scales: &'a BlockScales,
    pub(super) x: &'a [f32],
    pub(super) cols: usize,
}

impl Kernel for Fp8Rows<'_, '_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(mut self) {
        for (index, x) in self.x.chunks(MAX_ROWS * self.cols).enumerate() {
            let first = index * MAX_ROWS;
            // SAFETY: passed on.
            unsafe {
                match x.len() / self.cols {
                    1 => self.pass::<V, 1>(x, first),
                    2 => self.pass::<V, 2>(x, first),
                    3 => self.pass::<V, 3>(x, first),
                    _ => self.pass::<V, 4>(x, first),
                }
            }
        }
    }
}

impl Fp8Rows<'_, '_> {
    /// All weights with `M` activation rows, numbers `first..` of all.
    ///
    /// # Safety
    /// The CPU has the instructions of `V`; lengths are checked.
    #[inline(always)]
    unsafe fn pass<V: Vector, const M: usize>(&mut self, x: &[f32], first: usize) {
        let (cols, block_cols) = (self.cols, self.scales.block_cols());
        assert!(x.len() == M * cols && self.stripes.row_bytes() == cols);
        for pass in 0..self.stripes.passes() {
            let rows = self.stripes.rows(pass);
            let starts = rows.map(<[u8]>::as_ptr);
            let scales = self.stripes.matrix_rows(self.first_rows, pass).map(|row| self.scales.of_row(row));
            // SAFETY: the CPU has the instructions.
            let mut sums = unsafe { [[V::splat(0.0); STRIPES]; M] };
            let mut totals = [[0.0; STRIPES]; M];
            for block in 0..cols.div_ceil(block_cols) {
                let (start, end) = (block * block_cols, ((block + 1) * block_cols).min(cols));
                let whole = start + (end - start) / V::WIDTH * V::WIDTH;
                // SAFETY: `col + WIDTH <= end <= cols`, so every load stays inside its row.
                unsafe {
                    let mut parts = [[V::splat(0.0); STRIPES]; M];
                    for col in (start..whole).step_by(V::WIDTH) {
                        let mut w = [V::splat(0.0); STRIPES];
                        for r in 0..STRIPES {
                            w[r] = V::load_e4m3(starts[r].add(col));
                        }
                        for m in 0..M {
                            let values = V::load(x.as_ptr().add(m * cols + col));
                            for r in 0..STRIPES {
                                parts[m][r] = w[r].multiply_add(values, parts[m][r]);
                            }
                        }
                    }
                    for m in 0..M {
                        for r in 0..STRIPES {
                            sums[m][r] = parts[m][r].multiply_add(V::splat(scales[r][block]), sums[m][r]);
                        }
                    }
                }
                for m in 0..M {
                    for r in 0..STRIPES {
                        let products =
                            (whole..end).map(|col| E4M3[usize::from(rows[r][col])] * x[m * cols + col]);
                        totals[m][r] += scales[r][block] * products.sum::<f32>();
                    }
                }
            }
            for m in 0..M {
                for r in 0..STRIPES {
                    // SAFETY: the CPU has the instructions.
                    totals[m][r] += unsafe { sums[m][r].sum() };
                }
                self.stripes.write(first + m, pass, totals[m]);
            }
        }
    }

    /// The products in plain Rust, which the fast paths are compared with.
    pub(super) fn scalar(self) {
        let Fp8Rows { stripes, first_rows, scales, x, cols } = self;
        let block = scales.block_cols();
        for pass in 0..stripes.passes() {
            let (rows, matrix_rows) = (stripes.rows(pass), stripes.matrix_rows(first_rows, pass));
            for (m, x) in x.chunks_exact(cols).enumerate() {
                let products = std::array::from_fn(|stripe| {
                    let blocks = rows[stripe].chunks(block).zip(x.chunks(block));
                    let sums = blocks.map(|(weights, x)| {
                        weights.iter().zip(x).fold(0.0, |sum, (byte, x)| sum + E4M3[usize::from(*byte)] * x)
                    });
                    sums.zip(scales.of_row(matrix_rows[stripe])).map(|(sum, scale)| sum * scale).sum()
                });
                stripes.write(m, pass, products);
            }
        }
    }
}
