use oscar_random::Random;

use super::*;
use crate::cpu::pool::Pool;

fn store(dtype: DType, values: &[f32]) -> Vec<u8> {
    match dtype {
        DType::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        DType::BF16 => values.iter().flat_map(|&value| half::bf16::from_f32(value).to_le_bytes()).collect(),
        DType::F16 => values.iter().flat_map(|&value| half::f16::from_f32(value).to_le_bytes()).collect(),
        _ => unreachable!("{dtype} is not a float"),
    }
}

fn loaded(dtype: DType, bytes: &[u8], len: usize) -> Vec<f32> {
    let mut values = vec![0.0; len];
    weights::dequantise(Isa::Scalar, dtype, bytes, &mut values);
    values
}

fn plain(dtype: DType, bytes: &[u8]) -> PanelWeights<'_> {
    PanelWeights { dtype, bytes, first_row: 0, scales: None }
}

fn tolerance(isa: Isa) -> f64 {
    if isa == Isa::Amx { 2e-5 } else { 2e-6 }
}

fn check(isa: Isa, dtype: DType, bytes: &[u8], x: &[f32], m: usize, n: usize, k: usize) {
    let pool = Pool::new(1);
    let w = loaded(dtype, bytes, n * k);
    let mut packed = PackedActivations::default();
    packed.pack(isa, &pool, x, m, k);
    let mut out = vec![f32::NAN; m * n];
    panel(isa, plain(dtype, bytes), k, &packed, &mut PanelScratch::default(), &mut out);
    for i in 0..m {
        for r in 0..n {
            let pairs = || x[i * k..][..k].iter().zip(&w[r * k..][..k]);
            let exact: f64 = pairs().map(|(&x, &w)| f64::from(x) * f64::from(w)).sum();
            let size: f64 = pairs().map(|(&x, &w)| (f64::from(x) * f64::from(w)).abs()).sum();
            let got = f64::from(out[i * n + r]);
            assert!(
                (got - exact).abs() <= tolerance(isa) * size + 1e-30,
                "{isa} {dtype} {m}x{n}x{k} at {i},{r}: {got} for {exact}, size {size}"
            );
        }
    }
}

#[test]
fn every_path_agrees_with_exact_sums() {
    let mut random = Random::new(1);
    for isa in Isa::available() {
        for m in [1, 2, 15, 16, 17, 31, 33, 64, 100] {
            for n in [1, 3, 16, 17, 32, 33, 128] {
                if n > 32 && m != 17 {
                    continue;
                }
                for k in [32, 64, 96, 288, 576, 1536] {
                    if k > 288 && m > 33 && isa == Isa::Scalar {
                        continue;
                    }
                    let x = random.signed_vec(m * k);
                    let w = random.signed_vec(n * k);
                    for dtype in [DType::F32, DType::BF16, DType::F16] {
                        check(isa, dtype, &store(dtype, &w), &x, m, n, k);
                    }
                }
            }
        }
    }
}

#[test]
fn odd_widths_are_padded() {
    let mut random = Random::new(2);
    for isa in Isa::available() {
        for k in [1, 7, 31, 33, 50, 1023, 1025, 2050] {
            let (x, w) = (random.signed_vec(5 * k), random.signed_vec(9 * k));
            for dtype in [DType::F32, DType::BF16] {
                check(isa, dtype, &store(dtype, &w), &x, 5, 9, k);
            }
        }
    }
}

#[test]
fn wide_ranges_of_magnitudes() {
    let mut random = Random::new(3);
    for isa in Isa::available() {
        let scale = |random: &mut Random| (random.signed() * 12.0).exp2();
        let x: Vec<f32> = (0..20 * 256).map(|_| random.signed() * scale(&mut random)).collect();
        let w: Vec<f32> = (0..32 * 256).map(|_| random.signed() * scale(&mut random)).collect();
        check(isa, DType::F32, &store(DType::F32, &w), &x, 20, 32, 256);
    }
}

#[test]
fn a_bad_row_stays_alone() {
    let mut random = Random::new(4);
    let (m, n, k) = (40, 32, 64);
    let w = store(DType::F32, &random.signed_vec(n * k));
    let x = random.signed_vec(m * k);
    let pool = Pool::new(2);
    for isa in Isa::available() {
        let run = |x: &[f32]| {
            let mut packed = PackedActivations::default();
            packed.pack(isa, &pool, x, m, k);
            let mut out = vec![0.0; m * n];
            panel(isa, plain(DType::F32, &w), k, &packed, &mut PanelScratch::default(), &mut out);
            out
        };
        let good = run(&x);
        for poison in [f32::NAN, f32::INFINITY] {
            let mut bad = x.clone();
            bad[18 * k + 5] = poison;
            let out = run(&bad);
            assert!(out[18 * n..19 * n].iter().all(|value| !value.is_finite()), "{isa}");
            assert_eq!(out[..18 * n], good[..18 * n], "{isa}");
            assert_eq!(out[19 * n..], good[19 * n..], "{isa}");
        }
    }
}

#[test]
fn scratch_is_reusable_across_shapes() {
    let mut random = Random::new(5);
    let pool = Pool::new(2);
    for isa in Isa::available() {
        let (mut packed, mut scratch) = (PackedActivations::default(), PanelScratch::default());
        for (m, n, k) in [(64, 64, 1536), (3, 5, 32), (33, 17, 96), (0, 4, 32), (2, 0, 32)] {
            let (x, w) = (random.signed_vec(m * k), random.signed_vec(n * k));
            packed.pack(isa, &pool, &x, m, k);
            let mut out = vec![f32::NAN; m * n];
            panel(isa, plain(DType::F32, &store(DType::F32, &w)), k, &packed, &mut scratch, &mut out);
            for (at, got) in out.iter().enumerate() {
                let (i, r) = (at / n, at % n);
                let exact: f32 = (0..k).map(|c| x[i * k + c] * w[r * k + c]).sum();
                assert!((got - exact).abs() < 0.01, "{isa} {m}x{n}x{k} at {i},{r}: {got} for {exact}");
            }
        }
    }
}

#[test]
fn panels_are_even() {
    assert_eq!(panel_rows(576, 2), 96);
    assert_eq!(panel_rows(1536, 2), 128);
    assert_eq!(panel_rows(32, 2), 32);
    assert_eq!(panel_rows(1, 8), 32);
    for outputs in [1, 32, 100, 576, 1536, 8960, 49152] {
        for threads in [1, 2, 3, 64] {
            assert!((BLOCK_ROWS..=PANEL_ROWS).contains(&panel_rows(outputs, threads)));
        }
    }
}

/// Bytes of random blocks with scales of a sane size.
fn random_blocks(dtype: DType, elements: usize, random: &mut Random) -> Vec<u8> {
    if dtype.is_float() {
        return store(dtype, &random.signed_vec(elements));
    }
    let mut bytes: Vec<u8> =
        (0..dtype.bytes_for(elements).unwrap()).map(|_| (random.signed() * 127.0) as i8 as u8).collect();
    // Scales and offsets are f16, at the start of a block or at the end of it.
    let halves = match dtype {
        DType::Q6K => vec![208],
        DType::Q4_0 | DType::Q5_0 | DType::Q8_0 => vec![0],
        DType::Mxfp4 => vec![],
        _ => vec![0, 2],
    };
    for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
        if dtype == DType::Mxfp4 {
            block[0] = 116 + block[0] % 8;
        }
        for &at in &halves {
            block[at..at + 2].copy_from_slice(&half::f16::from_f32(random.signed() * 0.01).to_le_bytes());
        }
    }
    bytes
}

#[test]
fn quantised_weights_are_dequantised_in_runs() {
    let mut random = Random::new(7);
    for isa in Isa::available() {
        for dtype in DType::ALL {
            for k in [256, 512, 2304] {
                let bytes = random_blocks(dtype, 40 * k, &mut random);
                check(isa, dtype, &bytes, &random.signed_vec(33 * k), 33, 40, k);
            }
        }
    }
}

/// CPU seconds of this thread, which a busy machine inflates less than wall time.
#[cfg(target_os = "linux")]
fn thread_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a valid timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Seconds of the fastest of `runs` calls.
#[cfg(target_os = "linux")]
fn fastest(runs: usize, mut call: impl FnMut()) -> f64 {
    (0..runs)
        .map(|_| {
            let start = thread_seconds();
            call();
            thread_seconds() - start
        })
        .fold(f64::MAX, f64::min)
}

/// Prints GFLOP/s of one thread per path; run with `--ignored --nocapture` in a release build.
#[cfg(target_os = "linux")]
#[test]
#[ignore = "measures speed"]
fn speed() {
    let mut random = Random::new(6);
    println!(
        "{:>8} {:>5} {:>20} {:>9} {:>12} {:>12}",
        "path", "type", "m x n x k", "GFLOP/s", "dequant ns", "pack ns"
    );
    let pool = Pool::new(1);
    for isa in Isa::available().filter(|isa| *isa != Isa::Scalar) {
        for (m, n, k) in [(512, 128, 8960), (512, 128, 1536), (512, 96, 576), (64, 128, 8960)] {
            let x = random.signed_vec(m * k);
            let mut packed = PackedActivations::default();
            let pack = fastest(10, || packed.pack(isa, &pool, &x, m, k));
            for dtype in
                [DType::BF16, DType::F32, DType::Q4_1, DType::Q4K, DType::Q5K, DType::Q6K, DType::Q8_0]
            {
                if !k.is_multiple_of(dtype.block_len()) {
                    continue;
                }
                let bytes = random_blocks(dtype, n * k, &mut random);
                let mut scratch = PanelScratch::default();
                let mut out = vec![0.0; m * n];
                let runs = if isa == Isa::Amx { 40 } else { 8 };
                let time =
                    fastest(runs, || panel(isa, plain(dtype, &bytes), k, &packed, &mut scratch, &mut out));
                let mut row = vec![0.0; k];
                let row_bytes = dtype.bytes_for(k).unwrap();
                let unpack = fastest(10, || {
                    for bytes in bytes.chunks_exact(row_bytes) {
                        weights::dequantise(isa, dtype, bytes, &mut row);
                    }
                });
                println!(
                    "{:>8} {:>5} {:>20} {:>9.0} {:>12.3} {:>12.3}",
                    isa.to_string(),
                    dtype.to_string(),
                    format!("{m} x {n} x {k}"),
                    2.0 * (m * n * k) as f64 / time / 1e9,
                    unpack / (n * k) as f64 * 1e9,
                    pack / (m * k) as f64 * 1e9,
                );
            }
        }
    }
}

/// A panel from the middle of a matrix, with blocks of scales that end inside of it and inside of a run of channels.
#[test]
fn fp8_rows_are_multiplied_with_their_scales() {
    let mut random = Random::new(17);
    let pool = Pool::new(1);
    for (m, n, k, block) in [
        (7usize, 40usize, 200usize, [128, 128]),
        (33, 128, 1500, [128, 128]),
        (9, 5, 96, [1, 96]),
        (6, 33, 70, [7, 9]),
    ] {
        let (first_row, rows) = (100, 100 + n + 3);
        let scales = (0..rows.div_ceil(block[0]) * k.div_ceil(block[1])).map(|_| random.signed().abs() + 0.1);
        let scales = BlockScales::new(scales.collect(), [rows, k], block).unwrap();
        let bytes: Vec<u8> = (0..n * k).map(|_| random.next_u64() as u8 & !1).collect();
        let x = random.signed_vec(m * k);
        let mut w = loaded(DType::F8E4M3, &bytes, n * k);
        for (row, w) in w.chunks_exact_mut(k).enumerate() {
            for (col, w) in w.iter_mut().enumerate() {
                *w *= scales.of_row(first_row + row)[col / block[1]];
            }
        }
        for isa in Isa::available() {
            let mut packed = PackedActivations::default();
            packed.pack(isa, &pool, &x, m, k);
            let mut out = vec![f32::NAN; m * n];
            let weights =
                PanelWeights { dtype: DType::F8E4M3, bytes: &bytes, first_row, scales: Some(&scales) };
            panel(isa, weights, k, &packed, &mut PanelScratch::default(), &mut out);
            for (at, got) in out.into_iter().enumerate() {
                let pairs = || x[at / n * k..][..k].iter().zip(&w[at % n * k..][..k]);
                let exact: f64 = pairs().map(|(&x, &w)| f64::from(x) * f64::from(w)).sum();
                let size: f64 = pairs().map(|(&x, &w)| (f64::from(x) * f64::from(w)).abs()).sum();
                assert!(
                    (f64::from(got) - exact).abs() <= tolerance(isa) * size,
                    "{isa} {m}x{n}x{k} at {at}: {got} for {exact}"
                );
            }
        }
    }
}
