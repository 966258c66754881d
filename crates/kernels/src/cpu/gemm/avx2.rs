//! AVX2 and FMA: a register-blocked product in `f32`.

use std::arch::x86_64::*;

use super::BLOCK_ROWS;

/// Lanes of the micro-kernel: two registers.
const LANES: usize = 16;

/// As [`super::scalar::multiply`].
#[target_feature(enable = "avx2,fma")]
pub(super) fn multiply(w: &[f32], x: &[f32], depth: usize, sums: &mut [f32]) {
    let n = w.len() / depth;
    for lane in (0..BLOCK_ROWS).step_by(LANES) {
        let mut row = 0;
        while row < n {
            let (w, sums) = (&w[row * depth..], &mut sums[row * BLOCK_ROWS..]);
            row += match n - row {
                6.. => rows::<6>(w, x, depth, lane, sums),
                3.. => rows::<3>(w, x, depth, lane, sums),
                _ => rows::<1>(w, x, depth, lane, sums),
            };
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn rows<const R: usize>(w: &[f32], x: &[f32], depth: usize, lane: usize, sums: &mut [f32]) -> usize {
    assert!(w.len() >= R * depth && x.len() >= depth * BLOCK_ROWS && sums.len() >= R * BLOCK_ROWS);
    assert!(lane + LANES <= BLOCK_ROWS);
    // SAFETY: all offsets are below the lengths asserted above.
    unsafe {
        let (w, x, sums) = (w.as_ptr(), x.as_ptr().add(lane), sums.as_mut_ptr().add(lane));
        let mut totals = [[_mm256_setzero_ps(); 2]; R];
        for r in 0..R {
            totals[r][0] = _mm256_loadu_ps(sums.add(r * BLOCK_ROWS));
            totals[r][1] = _mm256_loadu_ps(sums.add(r * BLOCK_ROWS + 8));
        }
        for k in 0..depth {
            let x0 = _mm256_loadu_ps(x.add(k * BLOCK_ROWS));
            let x1 = _mm256_loadu_ps(x.add(k * BLOCK_ROWS + 8));
            for r in 0..R {
                let weight = _mm256_set1_ps(*w.add(r * depth + k));
                totals[r][0] = _mm256_fmadd_ps(weight, x0, totals[r][0]);
                totals[r][1] = _mm256_fmadd_ps(weight, x1, totals[r][1]);
            }
        }
        for r in 0..R {
            _mm256_storeu_ps(sums.add(r * BLOCK_ROWS), totals[r][0]);
            _mm256_storeu_ps(sums.add(r * BLOCK_ROWS + 8), totals[r][1]);
        }
    }
    R
}
