//! A few rows times a square matrix, with output channels in lanes.
//!
//! This is the product of a decode step, where a head has one new row: `rotate` keeps sixteen rows in lanes and would
//! waste fifteen. Each output channel is one chain of fused multiply-adds over input channels 0, 1, 2, …, starting from
//! zero, as [`HeadTransform::apply`] defines, so the results are equal to the bit. Rows share each load of the matrix.

use std::ops::Range;

use oscar_codec::HeadTransform;
use oscar_codec::transform::round_to_bf16;

use crate::cpu::simd::{Kernel, Vector};

/// Rows that go through the product together: the matrix comes from the second-level cache once for all of them.
pub(super) const ROW_BLOCK: usize = 48;

/// What is done to rows before the product.
#[derive(Clone, Copy)]
pub(super) enum Prepare<'a> {
    /// Rows are multiplied as they are.
    Copy,
    /// Rows become what [`HeadTransform::apply`] multiplies: rounded where the published implementation rounds, and
    /// centred.
    Centre(&'a HeadTransform),
}

/// What is done to the sums of the product before they are stored.
#[derive(Clone, Copy)]
pub(super) enum Finish<'a> {
    /// Sums are stored as they are.
    Keep,
    /// Sums are rounded to bf16.
    Bf16,
    /// The mean of its channel is added to each sum.
    Add(&'a [f32]),
}

/// The matrix that rows are multiplied with, `[d][d]`.
pub(super) enum Matrix<'a> {
    /// The identity: there is no product.
    One,
    /// The matrix with a row for each input channel.
    Rows(&'a [f32]),
    /// The matrix with a row for each output channel, and a buffer for [`TURNED`] rows of its transpose. Transposing takes
    /// about as long as the product of one row, and far less than reading a transposed copy from memory, or than writing a
    /// whole one: the rotation of a value has just been used, and is still in the cache.
    Columns(&'a [f32], &'a mut [f32]),
}

/// Input channels of a matrix that are turned over together.
pub(super) const TURNED: usize = 16;

/// `rows = finish(prepare(rows) · matrix)` in place.
pub(super) struct Product<'a> {
    pub(super) matrix: Matrix<'a>,
    pub(super) dim: usize,
    pub(super) prepare: Prepare<'a>,
    pub(super) finish: Finish<'a>,
    /// The rows, which are replaced by the result.
    pub(super) rows: &'a mut [f32],
    /// A buffer with room for [`ROW_BLOCK`] rows.
    pub(super) input: &'a mut [f32],
}

impl Kernel for Product<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let Product { mut matrix, dim, prepare, finish, rows, input } = self;
        assert!(dim > 0 && rows.len().is_multiple_of(dim) && input.len() >= ROW_BLOCK * dim);
        match &matrix {
            Matrix::One => {}
            Matrix::Rows(matrix) => assert_eq!(matrix.len(), dim * dim),
            Matrix::Columns(matrix, turned) => {
                assert!(matrix.len() == dim * dim && turned.len() == TURNED * dim);
            }
        }
        if let Finish::Add(mean) = finish {
            assert_eq!(mean.len(), dim);
        }
        for rows in rows.chunks_mut(ROW_BLOCK * dim) {
            let input = &mut input[..rows.len()];
            prepare_rows(prepare, dim, rows, input);
            match &mut matrix {
                // SAFETY: the caller promises the instructions; the lengths are asserted and equal.
                Matrix::Rows(matrix) => unsafe { multiply::<V>(input, matrix, 0..dim, dim, finish, rows) },
                Matrix::Columns(matrix, turned) => {
                    for first in (0..dim).step_by(TURNED) {
                        let inputs = first..(first + TURNED).min(dim);
                        // SAFETY: as above; there is room for the rows that are turned.
                        unsafe {
                            turn::<V>(matrix, inputs.clone(), dim, turned);
                            multiply::<V>(input, turned, inputs, dim, finish, rows);
                        }
                    }
                }
                Matrix::One => {
                    for (input, row) in input.chunks_exact(dim).zip(rows.chunks_exact_mut(dim)) {
                        // SAFETY: as above.
                        unsafe { finish_row::<V>(input, finish, row) };
                    }
                }
            }
        }
    }
}

/// Some columns of a `dim x dim` matrix as rows.
///
/// # Safety
/// The CPU has the instructions of `V`; the columns exist, and `turned` has room for them.
#[inline(always)]
unsafe fn turn<V: Vector>(matrix: &[f32], columns: Range<usize>, dim: usize, turned: &mut [f32]) {
    let whole = |len: usize| len / V::WIDTH * V::WIDTH;
    let (squares, edge) = (whole(columns.len()), whole(dim));
    for j in (0..squares).step_by(V::WIDTH) {
        for i in (0..edge).step_by(V::WIDTH) {
            // SAFETY: the caller promises the instructions and the room; `j + WIDTH` and `i + WIDTH` end inside both.
            unsafe {
                let from = matrix.as_ptr().add(i * dim + columns.start + j);
                V::transpose(from, dim, turned.as_mut_ptr().add(j * dim + i), dim);
            }
        }
    }
    for j in 0..columns.len() {
        for i in if j < squares { edge } else { 0 }..dim {
            turned[j * dim + i] = matrix[i * dim + columns.start + j];
        }
    }
}

/// Stores one row that has no product.
///
/// # Safety
/// The CPU has the instructions of `V`; the slices, and a mean to be added, are equally long.
#[inline(always)]
unsafe fn finish_row<V: Vector>(input: &[f32], finish: Finish<'_>, out: &mut [f32]) {
    let vectors = input.len() / V::WIDTH * V::WIDTH;
    for channel in (0..vectors).step_by(V::WIDTH) {
        // SAFETY: the caller promises the instructions, and the lengths end at `vectors` or later.
        unsafe {
            // The definition adds each number to zero, which takes the sign of a negative zero.
            let sum = V::load(input.as_ptr().add(channel)).add(V::splat(0.0));
            finish_lanes(finish, channel, sum).store(out.as_mut_ptr().add(channel));
        }
    }
    for channel in vectors..input.len() {
        out[channel] = finish_one(finish, channel, input[channel] + 0.0);
    }
}

/// # Safety
/// The CPU has the instructions of `V`; a mean to be added has channels `channel..channel + WIDTH`.
#[inline(always)]
unsafe fn finish_lanes<V: Vector>(finish: Finish<'_>, channel: usize, sum: V) -> V {
    // SAFETY: the caller promises both.
    unsafe {
        match finish {
            Finish::Keep => sum,
            Finish::Bf16 => {
                // NaN must stay NaN, which the rounding alone does not promise.
                let limit = V::splat(f32::INFINITY);
                sum.magnitude().where_less(limit, sum.round_to_bf16(), sum)
            }
            Finish::Add(mean) => sum.add(V::load(mean.as_ptr().add(channel))),
        }
    }
}

#[inline(always)]
fn prepare_rows(prepare: Prepare<'_>, dim: usize, rows: &[f32], input: &mut [f32]) {
    input.copy_from_slice(rows);
    let Prepare::Centre(transform) = prepare else { return };
    if transform.rounds_input() {
        input.iter_mut().for_each(|x| *x = round_to_bf16(*x));
    }
    if let Some(mean) = transform.mean() {
        for row in input.chunks_exact_mut(dim) {
            row.iter_mut().zip(mean).for_each(|(x, mean)| *x -= mean);
        }
    }
}

#[inline(always)]
fn finish_one(finish: Finish<'_>, channel: usize, sum: f32) -> f32 {
    match finish {
        Finish::Keep => sum,
        Finish::Bf16 => round_to_bf16(sum),
        Finish::Add(mean) => sum + mean[channel],
    }
}

/// `out = finish(input · matrix)`, or the part of it that comes of `inputs`: sums go on from what `out` holds, and are
/// finished with the last input. `matrix` begins with the row of the first of them.
///
/// # Safety
/// The CPU has the instructions of `V`; `input` and `out` are as many whole rows of `dim`, the matrix has a row of `dim` for
/// each of `inputs`, which exist, and a mean to be added has `dim` channels.
#[inline(always)]
unsafe fn multiply<V: Vector>(
    input: &[f32],
    matrix: &[f32],
    inputs: Range<usize>,
    dim: usize,
    finish: Finish<'_>,
    out: &mut [f32],
) {
    let rows = input.len() / dim;
    let finish = if inputs.end == dim { finish } else { Finish::Keep };
    let mut tile = Tile { input, matrix, inputs, dim, finish, out };
    let mut channel = 0;
    // One row needs many sums in flight, hence wide strips; with more rows four registers of channels are enough and
    // leave room for the sums of other rows.
    // SAFETY: the caller promises the instructions and the shapes; columns end at `dim`.
    unsafe {
        if rows == 1 {
            while channel + 8 * V::WIDTH <= dim {
                tile.columns::<V, 8>(rows, channel);
                channel += 8 * V::WIDTH;
            }
        }
        while channel + 4 * V::WIDTH <= dim {
            tile.columns::<V, 4>(rows, channel);
            channel += 4 * V::WIDTH;
        }
        while channel + V::WIDTH <= dim {
            tile.columns::<V, 1>(rows, channel);
            channel += V::WIDTH;
        }
    }
    for channel in channel..dim {
        for row in 0..rows {
            let mut sum = if tile.inputs.start == 0 { 0.0 } else { tile.out[row * dim + channel] };
            for (i, &x) in tile.input[row * dim..][tile.inputs.clone()].iter().enumerate() {
                sum = x.mul_add(matrix[i * dim + channel], sum);
            }
            tile.out[row * dim + channel] = finish_one(finish, channel, sum);
        }
    }
}

struct Tile<'a> {
    input: &'a [f32],
    /// The rows of the matrix for the channels in [`Self::inputs`].
    matrix: &'a [f32],
    inputs: Range<usize>,
    dim: usize,
    finish: Finish<'a>,
    out: &'a mut [f32],
}

impl Tile<'_> {
    /// Channels `channel..channel + COLUMNS · WIDTH` of all rows.
    ///
    /// # Safety
    /// The caller keeps the promises of [`multiply`], and these channels exist.
    #[inline(always)]
    unsafe fn columns<V: Vector, const COLUMNS: usize>(&mut self, rows: usize, channel: usize) {
        let mut row = 0;
        // SAFETY: the caller promises the instructions and the shapes; `row` counts up to `rows`.
        unsafe {
            if COLUMNS <= 4 {
                // As many sums as registers allow: 24 of 32, or 8 of 16.
                if V::WIDTH == 16 {
                    while row + 6 <= rows {
                        self.rows::<V, COLUMNS, 6>(row, channel);
                        row += 6;
                    }
                    if row + 4 <= rows {
                        self.rows::<V, COLUMNS, 4>(row, channel);
                        row += 4;
                    }
                    if row + 3 <= rows {
                        self.rows::<V, COLUMNS, 3>(row, channel);
                        row += 3;
                    }
                }
                while row + 2 <= rows {
                    self.rows::<V, COLUMNS, 2>(row, channel);
                    row += 2;
                }
            }
            while row < rows {
                self.rows::<V, COLUMNS, 1>(row, channel);
                row += 1;
            }
        }
    }

    /// [`Tile::columns`] of `ROWS` rows.
    ///
    /// # Safety
    /// The caller keeps the promises of [`Self::columns`], and these rows exist.
    #[inline(always)]
    unsafe fn rows<V: Vector, const COLUMNS: usize, const ROWS: usize>(
        &mut self,
        row: usize,
        channel: usize,
    ) {
        let dim = self.dim;
        // SAFETY: the caller promises the instructions, that rows `row..row + ROWS` are inside `input` and `out`, and
        // that channels `channel..channel + COLUMNS · WIDTH` are below `dim`, which is also the size of a mean.
        unsafe {
            let mut sums = [[V::splat(0.0); COLUMNS]; ROWS];
            if self.inputs.start > 0 {
                for r in 0..ROWS {
                    for c in 0..COLUMNS {
                        sums[r][c] = V::load(self.out.as_ptr().add((row + r) * dim + channel + c * V::WIDTH));
                    }
                }
            }
            let mut weights = self.matrix.as_ptr().add(channel);
            let inputs = self.input.as_ptr().add(row * dim + self.inputs.start);
            for i in 0..self.inputs.len() {
                let mut column = [V::splat(0.0); COLUMNS];
                for c in 0..COLUMNS {
                    column[c] = V::load(weights.add(c * V::WIDTH));
                }
                for r in 0..ROWS {
                    let x = V::splat(*inputs.add(r * dim + i));
                    for c in 0..COLUMNS {
                        sums[r][c] = x.multiply_add(column[c], sums[r][c]);
                    }
                }
                weights = weights.wrapping_add(dim);
            }
            for r in 0..ROWS {
                for c in 0..COLUMNS {
                    let sum = sums[r][c];
                    let first = channel + c * V::WIDTH;
                    let value = finish_lanes(self.finish, first, sum);
                    value.store(self.out.as_mut_ptr().add((row + r) * dim + first));
                }
            }
        }
    }
}
