//! Float weights times float activations: widen to `f32` in registers, fused multiply-add, `f32` accumulators.
//!
//! Four weight rows go together, so an activation vector is loaded once for four products.

use half::{bf16, f16};

use super::MAX_ROWS;
use super::stripes::{STRIPES, Stripes};
use crate::cpu::simd::{Kernel, Vector};
use crate::dtype::DType;

/// A stored float type.
trait Width {
    const DTYPE: DType;
    const BYTES: usize = Self::DTYPE.block_bytes();

    /// The element of these bytes.
    fn one(bytes: &[u8]) -> f32;

    /// Reads a register of elements.
    ///
    /// # Safety
    /// The CPU has the instructions of `V`; so many elements are readable at `at`.
    unsafe fn load<V: Vector>(at: *const u8) -> V;
}

struct F32;
struct F16;
struct Bf16;

impl Width for F32 {
    const DTYPE: DType = DType::F32;

    #[inline(always)]
    fn one(bytes: &[u8]) -> f32 {
        f32::from_le_bytes(bytes.try_into().expect("four bytes"))
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(at: *const u8) -> V {
        // SAFETY: passed on.
        unsafe { V::load(at.cast()) }
    }
}

impl Width for F16 {
    const DTYPE: DType = DType::F16;

    #[inline(always)]
    fn one(bytes: &[u8]) -> f32 {
        f16::from_le_bytes(bytes.try_into().expect("two bytes")).to_f32()
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(at: *const u8) -> V {
        // SAFETY: passed on.
        unsafe { V::load_f16(at) }
    }
}

impl Width for Bf16 {
    const DTYPE: DType = DType::BF16;

    #[inline(always)]
    fn one(bytes: &[u8]) -> f32 {
        bf16::from_le_bytes(bytes.try_into().expect("two bytes")).to_f32()
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(at: *const u8) -> V {
        // SAFETY: passed on.
        unsafe { V::load_bf16(at) }
    }
}

/// All products of the rows of `stripes` and `x`. Lengths are checked by the caller.
pub(super) struct FloatRows<'a, 'b> {
    pub(super) dtype: DType,
    pub(super) stripes: &'a mut Stripes<'b>,
    pub(super) x: &'a [f32],
    pub(super) cols: usize,
}

impl Kernel for FloatRows<'_, '_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let FloatRows { dtype, stripes, x, cols } = self;
        // SAFETY: passed on.
        unsafe {
            match dtype {
                DType::F32 => rows_of::<V, F32>(stripes, x, cols),
                DType::F16 => rows_of::<V, F16>(stripes, x, cols),
                _ => rows_of::<V, Bf16>(stripes, x, cols),
            }
        }
    }
}

/// # Safety
/// The CPU has the instructions of `V`; lengths are checked.
#[inline(always)]
unsafe fn rows_of<V: Vector, W: Width>(stripes: &mut Stripes<'_>, x: &[f32], cols: usize) {
    for (index, x) in x.chunks(MAX_ROWS * cols).enumerate() {
        let first = index * MAX_ROWS;
        // SAFETY: passed on.
        unsafe {
            match x.len() / cols {
                1 => pass::<V, W, 1>(stripes, x, cols, first),
                2 => pass::<V, W, 2>(stripes, x, cols, first),
                3 => pass::<V, W, 3>(stripes, x, cols, first),
                _ => pass::<V, W, 4>(stripes, x, cols, first),
            }
        }
    }
}

/// All weights with `M` activation rows, numbers `first..` of all.
///
/// # Safety
/// The CPU has the instructions of `V`; lengths are checked.
#[inline(always)]
unsafe fn pass<V: Vector, W: Width, const M: usize>(
    stripes: &mut Stripes<'_>,
    x: &[f32],
    cols: usize,
    first: usize,
) {
    assert!(x.len() == M * cols && stripes.row_bytes() == cols * W::BYTES);
    let whole = cols / V::WIDTH * V::WIDTH;
    for pass in 0..stripes.passes() {
        let rows = stripes.rows(pass);
        let starts = rows.map(<[u8]>::as_ptr);
        // SAFETY: the CPU has the instructions.
        let mut sums = unsafe { [[V::splat(0.0); STRIPES]; M] };
        for col in (0..whole).step_by(V::WIDTH) {
            // SAFETY: `col + WIDTH <= cols`, so every load stays inside its row.
            unsafe {
                let mut w = [V::splat(0.0); STRIPES];
                for r in 0..STRIPES {
                    w[r] = W::load(starts[r].add(col * W::BYTES));
                }
                for m in 0..M {
                    let values = V::load(x.as_ptr().add(m * cols + col));
                    for r in 0..STRIPES {
                        sums[m][r] = w[r].multiply_add(values, sums[m][r]);
                    }
                }
            }
        }
        for m in 0..M {
            let mut totals = [0.0; STRIPES];
            for r in 0..STRIPES {
                // SAFETY: the CPU has the instructions.
                totals[r] = unsafe { sums[m][r].sum() };
                for col in whole..cols {
                    totals[r] += W::one(&rows[r][col * W::BYTES..][..W::BYTES]) * x[m * cols + col];
                }
            }
            stripes.write(first + m, pass, totals);
        }
    }
}

/// The products in plain Rust, which the fast paths are compared with.
pub(super) fn scalar_rows(dtype: DType, stripes: &mut Stripes<'_>, x: &[f32], cols: usize) {
    match dtype {
        DType::F32 => scalar_rows_of::<F32>(stripes, x, cols),
        DType::F16 => scalar_rows_of::<F16>(stripes, x, cols),
        _ => scalar_rows_of::<Bf16>(stripes, x, cols),
    }
}

fn scalar_rows_of<W: Width>(stripes: &mut Stripes<'_>, x: &[f32], cols: usize) {
    for pass in 0..stripes.passes() {
        let rows = stripes.rows(pass);
        for (m, x) in x.chunks_exact(cols).enumerate() {
            let products = rows.map(|row| {
                let weights = row.chunks_exact(W::BYTES).map(W::one);
                weights.zip(x).fold(0.0, |sum, (weight, x)| sum + weight * x)
            });
            stripes.write(m, pass, products);
        }
    }
}
