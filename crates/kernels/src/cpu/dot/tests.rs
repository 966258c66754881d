//! Every path of this machine against the scalar reference, and the reference against plain floats.

use half::f16;
use oscar_random::Random;

use super::stripes::{self, STRIPES, Stripe};
use super::{Dot, row_bytes};
use crate::cpu::activation::QuantisedRows;
use crate::cpu::isa::Isa;
use crate::dtype::DType;
use crate::quant::dequantise;
use crate::quant::fp8::{BlockScales, e4m3};

fn activations(random: &mut Random, count: usize) -> Vec<f32> {
    (0..count).map(|_| random.signed() * 4.0).collect()
}

/// Gives a block scales and offsets of `size()`; MXFP4 has exponents for scales, down to those that floats hardly have.
fn set_scales(dtype: DType, block: &mut [u8], mut size: impl FnMut() -> f32) {
    if dtype == DType::Mxfp4 {
        block[0] = (size().abs().log2() as i32 + 127).clamp(0, 254) as u8;
    }
    for &at in halves(dtype) {
        block[at..at + 2].copy_from_slice(&f16::from_f32(size()).to_le_bytes());
    }
}

/// Byte offsets of the half-precision numbers in a block.
fn halves(dtype: DType) -> &'static [usize] {
    match dtype {
        DType::Q4_0 | DType::Q5_0 | DType::Q8_0 => &[0],
        DType::Q4_1 | DType::Q5_1 | DType::Q4K | DType::Q5K => &[0, 2],
        DType::Q6K => &[208],
        DType::F32 | DType::F16 | DType::BF16 | DType::F8E4M3 | DType::Mxfp4 => &[],
    }
}

/// Rows of random codes with scales of ordinary size.
fn random_weights(random: &mut Random, dtype: DType, rows: usize, cols: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = Vec::new();
    if dtype.is_float() {
        for _ in 0..rows * cols {
            let value = random.signed();
            match dtype {
                DType::F32 => bytes.extend(value.to_le_bytes()),
                DType::F16 => bytes.extend(f16::from_f32(value).to_le_bytes()),
                _ => bytes.extend(half::bf16::from_f32(value).to_le_bytes()),
            }
        }
        return bytes;
    }
    bytes.extend((0..dtype.bytes_for(rows * cols).unwrap()).map(|_| random.next_u64() as u8));
    for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
        set_scales(dtype, block, || random.signed() * 0.1);
    }
    bytes
}

fn quantised_types() -> impl Iterator<Item = DType> {
    DType::ALL.into_iter().filter(|dtype| !dtype.is_float())
}

fn fast_paths() -> Vec<Isa> {
    Isa::available().filter(|&isa| isa != Isa::Scalar).collect()
}

/// `Σ w·x` and `Σ |w||x|` for every pair of rows, in double precision.
fn exact(dtype: DType, weights: &[u8], x: &QuantisedRows) -> Vec<(f64, f64)> {
    let cols = x.cols();
    let row_bytes = dtype.bytes_for(cols).unwrap();
    let outputs = weights.len() / row_bytes;
    let mut floats = vec![0.0; cols];
    let mut results = vec![(0.0, 0.0); outputs * x.rows()];
    for (r, row) in weights.chunks_exact(row_bytes).enumerate() {
        dequantise(dtype, row, &mut floats);
        for m in 0..x.rows() {
            let x = x.row(m);
            let products = (0..cols).map(|i| f64::from(floats[i]) * f64::from(x.value(i)));
            results[m * outputs + r] = products.fold((0.0, 0.0), |(s, a), p| (s + p, a + p.abs()));
        }
    }
    results
}

#[track_caller]
fn assert_near(got: &[f32], expected: &[f32], magnitudes: &[(f64, f64)], what: &str) {
    for (i, ((got, expected), (_, magnitude))) in got.iter().zip(expected).zip(magnitudes).enumerate() {
        let difference = f64::from((got - expected).abs());
        assert!(difference <= 1e-5 * magnitude, "{what} [{i}]: {got} instead of {expected} of {magnitude}");
    }
}

/// The products of all rows of a matrix, `[activation row][weight row]`.
fn quantised_rows(isa: Isa, dtype: DType, weights: &[u8], x: &QuantisedRows, out: &mut [f32]) {
    in_stripes(weights, row_bytes(dtype, x.cols()), x.rows(), out, |stripes| {
        Dot::new(isa).quantised_rows(dtype, stripes, x);
    });
}

/// Calls `product` with some passes over a matrix at a time, and collects what it writes.
fn in_stripes(
    weights: &[u8],
    row_bytes: usize,
    x_rows: usize,
    out: &mut [f32],
    product: impl Fn([Stripe<'_>; STRIPES]),
) {
    const CHUNK: usize = 3;
    let rows = weights.len() / row_bytes;
    for start in (0..stripes::passes(rows)).step_by(CHUNK) {
        let parts = stripes::cut(rows, start..start + CHUNK);
        let mut outs = parts.clone().map(|part| vec![f32::NAN; x_rows * part.len()]);
        let mut targets = outs.iter_mut();
        product(parts.clone().map(|part| Stripe {
            weights: &weights[part.start * row_bytes..part.end * row_bytes],
            out: targets.next().unwrap(),
        }));
        for (part, values) in parts.into_iter().zip(outs) {
            for (i, row) in part.clone().enumerate() {
                for m in 0..x_rows {
                    out[m * rows + row] = values[m * part.len() + i];
                }
            }
        }
    }
}

fn one_stripe<'a>(weights: &'a [u8], out: &'a mut [f32]) -> [Stripe<'a>; STRIPES] {
    let empty = || Stripe { weights: &[], out: &mut [] };
    [empty(), Stripe { weights, out }, empty(), empty()]
}

/// Checks the scalar path against `exact` and all others against the scalar path.
fn check(dtype: DType, weights: &[u8], x: &QuantisedRows, what: &str) {
    let exact = exact(dtype, weights, x);
    let expected: Vec<f32> = exact.iter().map(|&(sum, _)| sum as f32).collect();
    let mut reference = vec![f32::NAN; exact.len()];
    quantised_rows(Isa::Scalar, dtype, weights, x, &mut reference);
    assert_near(&reference, &expected, &exact, &format!("{dtype} scalar {what}"));
    for isa in fast_paths() {
        let mut out = vec![f32::NAN; exact.len()];
        quantised_rows(isa, dtype, weights, x, &mut out);
        assert_near(&out, &reference, &exact, &format!("{dtype} {isa} {what}"));
    }
}

fn quantised(x: &[f32], rows: usize) -> QuantisedRows {
    let mut quantised = QuantisedRows::default();
    quantised.quantise(x, rows, x.len() / rows);
    quantised
}

/// A machine (or an emulator) without any fast path passes the other tests unseen; run this where one is expected.
#[test]
#[ignore = "fails by design on machines with only the scalar path"]
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
fn there_is_a_fast_path_to_test() {
    assert!(!fast_paths().is_empty(), "this machine has neither AVX2 nor the NEON dot product");
}

#[test]
fn all_shapes_agree() {
    let mut random = Random::new(1);
    for dtype in quantised_types() {
        for cols in [32, 64, 96, 128, 160, 256, 512, 576, 768, 1536, 1568, 2048, 8960, 8992] {
            if !cols_fit(dtype, cols) {
                continue;
            }
            for outputs in [1, 2, 3, 5, 33] {
                // Long rows once; the shapes that matter are the short ones.
                if cols > 2048 && outputs > 5 {
                    continue;
                }
                let weights = random_weights(&mut random, dtype, outputs, cols);
                for rows in [1, 2, 3, 4, 5, 9] {
                    let x = quantised(&activations(&mut random, rows * cols), rows);
                    check(dtype, &weights, &x, &format!("{cols} cols, {outputs} outputs, {rows} rows"));
                }
            }
        }
    }
}

fn cols_fit(dtype: DType, cols: usize) -> bool {
    cols.is_multiple_of(dtype.block_len())
}

#[test]
fn weights_need_no_alignment() {
    let mut random = Random::new(2);
    for dtype in quantised_types() {
        let weights = random_weights(&mut random, dtype, 3, 512);
        let x = quantised(&activations(&mut random, 512), 1);
        for shift in 1..4 {
            let mut shifted = vec![0; shift];
            shifted.extend_from_slice(&weights);
            check(dtype, &shifted[shift..], &x, "shifted");
        }
    }
}

#[test]
fn nasty_activations_agree() {
    let mut random = Random::new(3);
    for dtype in quantised_types() {
        let cols = 512;
        let weights = random_weights(&mut random, dtype, 5, cols);
        let mut outlier = vec![1e-3f32; cols];
        outlier[77] = -1e6;
        let alternating = (0..cols).map(|i| if i % 2 == 0 { 1.0 } else { -1.0 }).collect();
        // The low byte is -128 exactly where the fixed-point number is 128 modulo 256.
        let low_extreme = (0..cols).map(|i| if i % 32 == 0 { 32512.0 } else { -128.0 }).collect();
        let cases: [(&str, Vec<f32>); 7] = [
            ("zeros", vec![0.0; cols]),
            ("constant", vec![1.0; cols]),
            ("negative constant", vec![-7.25; cols]),
            ("outlier", outlier),
            ("alternating", alternating),
            ("low byte -128", low_extreme),
            ("tiny", vec![f32::MIN_POSITIVE / 4.0; cols]),
        ];
        for (what, x) in cases {
            check(dtype, &weights, &quantised(&x, 1), what);
        }
    }
}

#[test]
fn largest_codes_do_not_saturate() {
    for dtype in quantised_types() {
        for byte in [0x00u8, 0xff, 0x80, 0x7f, 0xf0, 0x0f] {
            let cols = 512;
            let mut weights = vec![byte; dtype.bytes_for(3 * cols).unwrap()];
            for block in weights.chunks_exact_mut(dtype.block_bytes()) {
                set_scales(dtype, block, || 0.5);
            }
            for sign in [1.0f32, -1.0] {
                let x: Vec<f32> = (0..2 * cols).map(|i| if i % 3 == 0 { 3.0 } else { 3.0 * sign }).collect();
                check(dtype, &weights, &quantised(&x, 2), &format!("bytes {byte:#x}"));
            }
        }
    }
}

/// Exponents of both ends: numbers that floats only have without a leading one, and the largest.
#[test]
fn extreme_exponents_agree() {
    let mut random = Random::new(8);
    let cols = 224;
    for (exponents, scale) in [([0, 1, 2, 3], 1e30), ([1, 0, 127, 90], 1.0), ([100, 130, 140, 120], 1.0)] {
        let mut weights = random_weights(&mut random, DType::Mxfp4, 5, cols);
        for (index, block) in weights.chunks_exact_mut(DType::Mxfp4.block_bytes()).enumerate() {
            block[0] = exponents[index % 4];
        }
        let x: Vec<f32> = activations(&mut random, 3 * cols).iter().map(|x| x * scale).collect();
        check(DType::Mxfp4, &weights, &quantised(&x, 3), &format!("{exponents:?}"));
    }
}

#[test]
fn not_a_number_spoils_its_row_and_no_other() {
    let mut random = Random::new(4);
    for dtype in quantised_types() {
        for cols in [256, 512, 768] {
            let weights = random_weights(&mut random, dtype, 5, cols);
            for rows in [1, 3, 5] {
                for position in [0, cols / 2 + 1, cols - 1] {
                    let mut x = activations(&mut random, rows * cols);
                    let bad = rows / 2;
                    x[bad * cols + position] = f32::NAN;
                    let x = quantised(&x, rows);
                    for isa in Isa::available() {
                        let mut out = vec![0.0; rows * 5];
                        quantised_rows(isa, dtype, &weights, &x, &mut out);
                        for (m, out) in out.chunks_exact(5).enumerate() {
                            assert!(
                                out.iter().all(|v| v.is_nan() == (m == bad)),
                                "{dtype} {isa} {rows} {out:?}"
                            );
                        }
                    }
                }
            }
        }
    }
}

/// A block of MXFP4 whose scale is NaN spoils the outputs of its weight row, for every activation row, and no others.
#[test]
fn a_scale_that_is_no_number_spoils_its_output_and_no_other() {
    let mut random = Random::new(14);
    for cols in [32, 256, 352] {
        for bad in 0..6 {
            let mut weights = random_weights(&mut random, DType::Mxfp4, 6, cols);
            let blocks = cols / 32;
            weights[(bad * blocks + bad % blocks) * 17] = 255;
            let x = quantised(&activations(&mut random, 3 * cols), 3);
            for isa in Isa::available() {
                let mut out = vec![0.0; 3 * 6];
                quantised_rows(isa, DType::Mxfp4, &weights, &x, &mut out);
                for (index, value) in out.iter().enumerate() {
                    assert_eq!(
                        value.is_nan(),
                        index % 6 == bad,
                        "{isa} {cols} columns, output {index}: {value}"
                    );
                }
            }
        }
    }
}

#[test]
fn fast_activations_equal_the_scalar_ones() {
    let mut random = Random::new(5);
    let mut x = activations(&mut random, 32 * 20);
    x[32..64].fill(0.0);
    x[64..96].fill(-3.5);
    x[100] = f32::NAN;
    x[140] = f32::INFINITY;
    x[161] = f32::NEG_INFINITY;
    x[192..224].fill(f32::MIN_POSITIVE / 8.0);
    x[224] = f32::MAX;
    x[260] = 1e30;
    // Exact halves between two fixed-point numbers.
    for i in 0..32 {
        x[288 + i] = if i == 0 { 32512.0 } else { i as f32 + 0.5 };
    }
    let bits = |floats: &[f32]| -> Vec<u32> {
        // Any not-a-number is as good as another.
        floats.iter().map(|f| if f.is_nan() { u32::MAX } else { f.to_bits() }).collect()
    };
    // Also numbers of groups that a path does not take at once.
    for (rows, groups) in [(4, 20), (1, 19), (2, 18), (1, 17), (1, 3), (1, 1)] {
        let x = &x[..groups * 32];
        let expected = quantised(x, rows);
        for isa in Isa::available() {
            let mut got = QuantisedRows::default();
            Dot::new(isa).quantise(x, rows, x.len() / rows, &mut got);
            for m in 0..rows {
                let (got, expected) = (got.row(m), expected.row(m));
                assert_eq!(got.high, expected.high, "{isa}");
                assert_eq!(got.low, expected.low, "{isa}");
                assert_eq!(bits(got.scales), bits(expected.scales), "{isa}");
                assert_eq!(bits(got.sums), bits(expected.sums), "{isa}");
            }
        }
    }
}

#[test]
fn fast_dequantisers_equal_the_scalar_one() {
    let mut random = Random::new(6);
    for dtype in DType::ALL {
        for count in [256, 512, 2304, 277] {
            if !cols_fit(dtype, count) {
                continue;
            }
            let weights = random_weights(&mut random, dtype, 1, count);
            let mut expected = vec![0.0; count];
            dequantise(dtype, &weights, &mut expected);
            for isa in Isa::available() {
                let mut out = vec![f32::NAN; count];
                Dot::new(isa).dequantise(dtype, &weights, &mut out);
                for i in 0..count {
                    assert_eq!(out[i].to_bits(), expected[i].to_bits(), "{dtype} {isa} {i}");
                }
            }
        }
    }
}

#[test]
fn float_weights_agree_with_double_precision() {
    let mut random = Random::new(7);
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for cols in [1, 7, 16, 33, 576, 1000] {
            for outputs in [1, 2, 3, 5, 33] {
                let weights = random_weights(&mut random, dtype, outputs, cols);
                let mut floats = vec![0.0; outputs * cols];
                dequantise(dtype, &weights, &mut floats);
                for rows in [1, 2, 3, 4, 5, 9] {
                    let x = activations(&mut random, rows * cols);
                    let mut expected = Vec::new();
                    let mut magnitudes = Vec::new();
                    for m in 0..rows {
                        for r in 0..outputs {
                            let product =
                                |i: usize| f64::from(floats[r * cols + i]) * f64::from(x[m * cols + i]);
                            expected.push((0..cols).map(product).sum::<f64>() as f32);
                            magnitudes.push((0.0, (0..cols).map(|i| product(i).abs()).sum::<f64>()));
                        }
                    }
                    for isa in Isa::available() {
                        let mut out = vec![f32::NAN; rows * outputs];
                        in_stripes(&weights, row_bytes(dtype, cols), rows, &mut out, |stripes| {
                            Dot::new(isa).float_rows(dtype, stripes, &x, rows);
                        });
                        assert_near(
                            &out,
                            &expected,
                            &magnitudes,
                            &format!("{dtype} {isa} {cols} {outputs} {rows}"),
                        );
                    }
                }
            }
        }
    }
}

#[test]
#[should_panic(expected = "whole rows")]
fn part_of_a_row_is_refused() {
    let x = quantised(&[1.0; 256], 1);
    Dot::new(Isa::Scalar).quantised_rows(DType::Q4_0, one_stripe(&[0; 18 * 9], &mut [0.0; 1]), &x);
}

#[test]
#[should_panic(expected = "outputs")]
fn a_wrong_output_length_is_refused() {
    let x = quantised(&[1.0; 256], 1);
    Dot::new(Isa::Scalar).quantised_rows(DType::Q4_0, one_stripe(&[0; 18 * 16], &mut [0.0; 1]), &x);
}

/// All bytes but those of NaN.
fn fp8_bytes(random: &mut Random, count: usize) -> Vec<u8> {
    let byte = |_| (random.next_u64() as u8).min(0xfe);
    (0..count).map(byte).map(|byte| if byte == 0x7f { 0x7e } else { byte }).collect()
}

/// `[x row][weight row]` in one stripe for each task that a matrix is cut into.
fn fp8_products(
    isa: Isa,
    weights: &[u8],
    rows: usize,
    scales: &BlockScales,
    x: &[f32],
    x_rows: usize,
) -> Vec<f32> {
    let cols = x.len() / x_rows;
    let mut products = vec![f32::NAN; x_rows * rows];
    for first in (0..stripes::passes(rows)).step_by(3) {
        let parts = stripes::cut(rows, first..first + 3);
        let mut outs = parts.clone().map(|part| vec![0.0; x_rows * part.len()]);
        let mut targets = outs.iter_mut();
        let stripes = parts.clone().map(|part| Stripe {
            weights: &weights[part.start * cols..part.end * cols],
            out: targets.next().unwrap(),
        });
        let first_rows = parts.each_ref().map(|part| part.start.min(rows - 1));
        Dot::new(isa).fp8_rows(stripes, first_rows, scales, x, x_rows);
        for (part, out) in parts.iter().zip(&outs) {
            for (at, value) in out.iter().enumerate() {
                products[at / part.len() * rows + part.start + at % part.len()] = *value;
            }
        }
    }
    products
}

#[test]
fn fp8_products_are_those_of_f64() {
    let mut random = Random::new(91);
    for (rows, cols, block) in [
        (1, 1, [128, 128]),
        (3, 127, [128, 128]),
        (130, 128, [128, 128]),
        (257, 300, [128, 128]),
        (40, 1024, [40, 1024]),
        (21, 200, [1, 200]),
        (9, 77, [2, 5]),
    ] {
        let weights = fp8_bytes(&mut random, rows * cols);
        let scales = (0..rows.div_ceil(block[0]) * cols.div_ceil(block[1])).map(|_| random.signed().abs());
        let scales = BlockScales::new(scales.collect(), [rows, cols], block).unwrap();
        for x_rows in [1, 2, 3, 4, 5, 9] {
            let x = activations(&mut random, x_rows * cols);
            for isa in Isa::available() {
                let got = fp8_products(isa, &weights, rows, &scales, &x, x_rows);
                for (at, got) in got.into_iter().enumerate() {
                    let (m, row) = (at / rows, at % rows);
                    let product = |col: usize| {
                        let scale = scales.of_row(row)[col / block[1]];
                        f64::from(e4m3(weights[row * cols + col]))
                            * f64::from(scale)
                            * f64::from(x[m * cols + col])
                    };
                    let exact: f64 = (0..cols).map(product).sum();
                    let size: f64 = (0..cols).map(product).map(f64::abs).sum();
                    assert!(
                        (f64::from(got) - exact).abs() <= 3e-6 * size + 1e-30,
                        "{isa} {rows}x{cols} {block:?}: {got} for {exact}"
                    );
                }
            }
        }
    }
}

/// One row's products do not depend on how many rows go with it, and NaN stays in its row.
#[test]
fn fp8_rows_do_not_depend_on_each_other() {
    let mut random = Random::new(92);
    let (rows, cols) = (37, 160);
    let mut weights = fp8_bytes(&mut random, rows * cols);
    weights[5 * cols + 3] = 0x7f;
    weights[6 * cols + 159] = 0xff;
    let scales = BlockScales::new(vec![0.3, 0.7], [rows, cols], [128, 128]).unwrap();
    let x = activations(&mut random, 6 * cols);
    for isa in Isa::available() {
        let together = fp8_products(isa, &weights, rows, &scales, &x, 6);
        for (x, together) in x.chunks(cols).zip(together.chunks(rows)) {
            let alone = fp8_products(isa, &weights, rows, &scales, x, 1);
            for (row, (alone, together)) in alone.iter().zip(together).enumerate() {
                assert_eq!(alone.is_nan(), row == 5 || row == 6, "{isa} row {row}");
                assert!(alone == together || alone.is_nan() && together.is_nan(), "{isa} row {row}");
            }
        }
    }
}
