//! Dot products of stored weights with a few rows of activations: the memory-bound half of decoding.
//!
//! Weights are read straight from their stored blocks. Each path unpacks a piece of several weight rows to bytes in
//! registers and multiplies it with up to [`MAX_ROWS`] activation rows before it goes on, so every weight byte is
//! read from memory once per four activation rows. The rows lie far apart, see [`stripes`].
//!
//! | path | integer products | why |
//! |---|---|---|
//! | [`scalar`] | plain | the reference |
//! | `avx2` | 16-bit multiply-add | exact for every code without saturation |
//! | `avx512` | `vpdpbusd` on 64 codes | four products per lane and instruction |
//! | `neon` | `sdot` on 16 codes | the same |
//!
//! The integer sums of a group are exact in every path; paths differ only in the order of the float additions.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod float;
mod fp8;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod lanes;
pub mod scalar;
pub mod stripes;
#[cfg(test)]
mod tests;

use self::stripes::{STRIPES, Stripe, Stripes};
use super::activation::QuantisedRows;
use super::isa::Isa;
use super::simd::Simd;
use crate::dtype::DType;
use crate::quant;
use crate::quant::fp8::BlockScales;

/// Activation rows that share one pass over the weights.
pub const MAX_ROWS: usize = 4;

/// Dot products on one instruction set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dot {
    path: Path,
    simd: Simd,
}

/// What an [`Isa`] means for this module. Only paths of this machine are ever constructed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Path {
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "aarch64")]
    Neon,
}

/// The operands of [`Dot::quantised_rows`] after their lengths were checked: rows of `x.cols()` elements.
struct Product<'a> {
    stripes: Stripes<'a>,
    x: &'a QuantisedRows,
}

impl Dot {
    /// Dot products on `isa`. Panics if this machine does not have it.
    pub fn new(isa: Isa) -> Dot {
        let simd = Simd::new(isa);
        let path = match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx | Isa::Avx512 => Path::Avx512,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Path::Avx2,
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => Path::Neon,
            _ => Path::Scalar,
        };
        Dot { path, simd }
    }

    /// Decodes `out.len()` elements; the values are those of [`quant::dequantise`].
    ///
    /// Panics if `bytes` is not exactly the stored form of `out.len()` elements.
    pub fn dequantise(&self, dtype: DType, bytes: &[u8], out: &mut [f32]) {
        assert_eq!(dtype.bytes_for(out.len()), Some(bytes.len()), "{} {dtype} elements", out.len());
        match self.path {
            Path::Scalar => quant::dequantise_inline(dtype, bytes, out),
            // SAFETY: the path is constructed only on machines that have its instructions; lengths are checked.
            #[cfg(target_arch = "x86_64")]
            Path::Avx2 => unsafe { avx2::dequantise(dtype, bytes, out) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Path::Avx512 => unsafe { avx512::dequantise(dtype, bytes, out) },
            // NEON is part of the AArch64 baseline, so the plain body is already compiled for it.
            #[cfg(target_arch = "aarch64")]
            Path::Neon => quant::dequantise_inline(dtype, bytes, out),
        }
    }

    /// Brings `rows` rows of `cols` activations to fixed point; the same as [`QuantisedRows::quantise`], faster.
    pub fn quantise(&self, x: &[f32], rows: usize, cols: usize, into: &mut QuantisedRows) {
        match self.path {
            // SAFETY: the path is constructed only on machines that have its instructions.
            #[cfg(target_arch = "x86_64")]
            Path::Avx2 => unsafe { avx2::quantise(x, rows, cols, into) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Path::Avx512 => unsafe { avx512::quantise(x, rows, cols, into) },
            _ => into.quantise(x, rows, cols),
        }
    }

    /// Multiplies quantised weights with rows of fixed-point activations.
    ///
    /// A stripe is any number `n` of consecutive rows of `x.cols()` elements; its `out[m * n + r]` becomes the product
    /// of weight row `r` and activation row `m`. Panics if `dtype` is a float type or lengths do not agree.
    pub fn quantised_rows(&self, dtype: DType, stripes: [Stripe<'_>; STRIPES], x: &QuantisedRows) {
        assert!(!dtype.is_float(), "{dtype} weights have no codes; use float_rows");
        let stripes = Stripes::new(stripes, row_bytes(dtype, x.cols()), x.rows());
        if stripes.passes() == 0 || x.rows() == 0 {
            return;
        }
        let product = Product { stripes, x };
        match self.path {
            Path::Scalar => scalar::quantised_rows(dtype, product),
            // SAFETY: the path is constructed only on machines that have its instructions.
            #[cfg(target_arch = "x86_64")]
            Path::Avx2 => unsafe { avx2::quantised_rows(dtype, product) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Path::Avx512 => unsafe { avx512::quantised_rows(dtype, product) },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            Path::Neon => unsafe { lanes::quantised_rows::<super::simd::BytePair>(dtype, product) },
        }
    }

    /// Multiplies FP8 weights with `x_rows` rows of activations, accumulating in `f32`.
    ///
    /// Shapes as in [`Dot::float_rows`]; `first_rows` are the rows of the matrix that the stripes begin with. Panics if
    /// lengths do not agree or there are no scales for a row.
    pub fn fp8_rows(
        &self,
        stripes: [Stripe<'_>; STRIPES],
        first_rows: [usize; STRIPES],
        scales: &BlockScales,
        x: &[f32],
        x_rows: usize,
    ) {
        assert!(x_rows > 0 && x.len().is_multiple_of(x_rows), "{} values in {x_rows} rows", x.len());
        let cols = x.len() / x_rows;
        let mut stripes = Stripes::new(stripes, row_bytes(DType::F8E4M3, cols), x_rows);
        if stripes.passes() == 0 {
            return;
        }
        let rows = fp8::Fp8Rows { stripes: &mut stripes, first_rows, scales, x, cols };
        match self.path {
            Path::Scalar => rows.scalar(),
            _ => self.simd.run(rows),
        }
    }

    /// Multiplies float weights with `x_rows` rows of activations, accumulating in `f32`.
    ///
    /// Shapes as in [`Dot::quantised_rows`]; the number of columns is `x.len() / x_rows`. Panics if `dtype` is not a
    /// float type or lengths do not agree.
    pub fn float_rows(&self, dtype: DType, stripes: [Stripe<'_>; STRIPES], x: &[f32], x_rows: usize) {
        assert!(dtype.is_float(), "{dtype} weights are not plain floats; use quantised_rows or fp8_rows");
        assert!(x_rows > 0 && x.len().is_multiple_of(x_rows), "{} values in {x_rows} rows", x.len());
        let cols = x.len() / x_rows;
        let mut stripes = Stripes::new(stripes, row_bytes(dtype, cols), x_rows);
        if stripes.passes() == 0 {
            return;
        }
        match self.path {
            Path::Scalar => float::scalar_rows(dtype, &mut stripes, x, cols),
            _ => self.simd.run(float::FloatRows { dtype, stripes: &mut stripes, x, cols }),
        }
    }
}

/// Bytes of a weight row of `cols` elements.
fn row_bytes(dtype: DType, cols: usize) -> usize {
    let row = dtype.bytes_for(cols).filter(|&bytes| bytes > 0);
    row.unwrap_or_else(|| panic!("{cols} columns are not whole {dtype} blocks"))
}
