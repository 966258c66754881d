use std::time::Instant;

use super::*;
use crate::cpu::pool::Pool;

/// A small generator; the tests need spread, not quality.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 40) as f32 / (1u64 << 23) as f32) - 1.0
    }

    fn vector(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.next()).collect()
    }
}

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

fn tolerance(isa: Isa) -> f64 {
    if isa == Isa::Amx { 2e-5 } else { 2e-6 }
}

fn check(isa: Isa, dtype: DType, bytes: &[u8], x: &[f32], m: usize, n: usize, k: usize) {
    let pool = Pool::new(1);
    let w = loaded(dtype, bytes, n * k);
    let mut packed = PackedActivations::default();
    packed.pack(isa, &pool, x, m, k);
    let mut out = vec![f32::NAN; m * n];
    panel(isa, dtype, bytes, k, &packed, &mut PanelScratch::default(), &mut out);
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
    let mut random = Random(1);
    for isa in Isa::available() {
        for m in [1, 2, 15, 16, 17, 31, 33, 64, 100] {
            for n in [1, 3, 16, 17, 32, 33, 128] {
                if n > 33 && m > 33 {
                    continue;
                }
                for k in [32, 64, 96, 288, 576, 1536] {
                    if k > 288 && m > 33 && isa == Isa::Scalar {
                        continue;
                    }
                    let x = random.vector(m * k);
                    let w = random.vector(n * k);
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
    let mut random = Random(2);
    for isa in Isa::available() {
        for k in [1, 7, 31, 33, 50, 1023, 1025, 2050] {
            let (x, w) = (random.vector(5 * k), random.vector(9 * k));
            for dtype in [DType::F32, DType::BF16] {
                check(isa, dtype, &store(dtype, &w), &x, 5, 9, k);
            }
        }
    }
}

#[test]
fn wide_ranges_of_magnitudes() {
    let mut random = Random(3);
    for isa in Isa::available() {
        let scale = |random: &mut Random| (random.next() * 12.0).exp2();
        let x: Vec<f32> = (0..20 * 256).map(|_| random.next() * scale(&mut random)).collect();
        let w: Vec<f32> = (0..32 * 256).map(|_| random.next() * scale(&mut random)).collect();
        check(isa, DType::F32, &store(DType::F32, &w), &x, 20, 32, 256);
    }
}

#[test]
fn a_bad_row_stays_alone() {
    let mut random = Random(4);
    let (m, n, k) = (40, 32, 64);
    let w = store(DType::F32, &random.vector(n * k));
    let x = random.vector(m * k);
    let pool = Pool::new(2);
    for isa in Isa::available() {
        let run = |x: &[f32]| {
            let mut packed = PackedActivations::default();
            packed.pack(isa, &pool, x, m, k);
            let mut out = vec![0.0; m * n];
            panel(isa, DType::F32, &w, k, &packed, &mut PanelScratch::default(), &mut out);
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
    let mut random = Random(5);
    let pool = Pool::new(2);
    for isa in Isa::available() {
        let (mut packed, mut scratch) = (PackedActivations::default(), PanelScratch::default());
        for (m, n, k) in [(64, 64, 1536), (3, 5, 32), (33, 17, 96), (0, 4, 32), (2, 0, 32)] {
            let (x, w) = (random.vector(m * k), random.vector(n * k));
            packed.pack(isa, &pool, &x, m, k);
            let mut out = vec![f32::NAN; m * n];
            panel(isa, DType::F32, &store(DType::F32, &w), k, &packed, &mut scratch, &mut out);
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

/// Prints GFLOP/s per path; run with `--ignored --nocapture` in a release build.
#[test]
#[ignore = "measures speed"]
fn speed() {
    let mut random = Random(6);
    println!(
        "{:>8} {:>6} {:>24} {:>8} {:>9} {:>9}",
        "path", "type", "m x n x k", "threads", "GFLOP/s", "pack ms"
    );
    for isa in Isa::available().filter(|isa| *isa != Isa::Scalar) {
        for threads in [1, 2] {
            let pool = Pool::new(threads);
            for (m, n, k) in [(512, 1536, 8960), (512, 8960, 1536), (512, 576, 1536), (64, 1536, 8960)] {
                let x = random.vector(m * k);
                for dtype in [DType::F32, DType::BF16] {
                    let bytes = store(dtype, &random.vector(n * k));
                    let row_bytes = dtype.bytes_for(k).unwrap();
                    let rows = panel_rows(n, threads);
                    let mut packed = PackedActivations::default();
                    let (mut best, mut best_pack) = (f64::MAX, f64::MAX);
                    let scratch: Vec<_> = (0..threads)
                        .map(|_| std::sync::Mutex::new((PanelScratch::default(), vec![0.0; m * rows])))
                        .collect();
                    for _ in 0..5 {
                        let start = Instant::now();
                        packed.pack(isa, &pool, &x, m, k);
                        best_pack = best_pack.min(start.elapsed().as_secs_f64());
                        let next = std::sync::atomic::AtomicUsize::new(0);
                        pool.run(&|thread| {
                            let (scratch, out) = &mut *scratch[thread].lock().unwrap();
                            loop {
                                let first = next.fetch_add(rows, std::sync::atomic::Ordering::Relaxed);
                                if first >= n {
                                    break;
                                }
                                let count = rows.min(n - first);
                                let weights = &bytes[first * row_bytes..][..count * row_bytes];
                                panel(isa, dtype, weights, k, &packed, scratch, &mut out[..m * count]);
                            }
                        });
                        best = best.min(start.elapsed().as_secs_f64());
                    }
                    println!(
                        "{:>8} {:>6} {:>24} {threads:>8} {:>9.0} {:>9.2}",
                        isa.to_string(),
                        dtype.to_string(),
                        format!("{m} x {n} x {k}"),
                        2.0 * (m * n * k) as f64 / best / 1e9,
                        best_pack * 1e3,
                    );
                }
            }
        }
    }
}
