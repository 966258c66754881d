//! NEON: a register-blocked product in `f32`.

use std::arch::aarch64::*;

use super::BLOCK_ROWS;

/// Lanes of the micro-kernel: four registers.
const LANES: usize = 16;

/// As [`super::scalar::multiply`].
#[target_feature(enable = "neon")]
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
#[target_feature(enable = "neon")]
fn rows<const R: usize>(w: &[f32], x: &[f32], depth: usize, lane: usize, sums: &mut [f32]) -> usize {
    assert!(w.len() >= R * depth && x.len() >= depth * BLOCK_ROWS && sums.len() >= R * BLOCK_ROWS);
    assert!(lane + LANES <= BLOCK_ROWS);
    // SAFETY: all offsets are below the lengths asserted above.
    unsafe {
        let (w, x, sums) = (w.as_ptr(), x.as_ptr().add(lane), sums.as_mut_ptr().add(lane));
        let mut totals = [[vdupq_n_f32(0.0); 4]; R];
        for r in 0..R {
            for v in 0..4 {
                totals[r][v] = vld1q_f32(sums.add(r * BLOCK_ROWS + 4 * v));
            }
        }
        for k in 0..depth {
            let mut lanes = [vdupq_n_f32(0.0); 4];
            for v in 0..4 {
                lanes[v] = vld1q_f32(x.add(k * BLOCK_ROWS + 4 * v));
            }
            for r in 0..R {
                let weight = *w.add(r * depth + k);
                for v in 0..4 {
                    totals[r][v] = vfmaq_n_f32(totals[r][v], lanes[v], weight);
                }
            }
        }
        for r in 0..R {
            for v in 0..4 {
                vst1q_f32(sums.add(r * BLOCK_ROWS + 4 * v), totals[r][v]);
            }
        }
    }
    R
}
