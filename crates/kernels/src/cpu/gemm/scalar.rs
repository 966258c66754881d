//! The reference product: plain loops, sums in `f64`.

use super::BLOCK_ROWS;

/// Adds `w · xᵀ` to `sums`: `w` is `[n][depth]`, `x` is `[depth][32]` and `sums` is `[n][32]`.
pub(super) fn multiply(w: &[f32], x: &[f32], depth: usize, sums: &mut [f32]) {
    for (row, sums) in w.chunks_exact(depth).zip(sums.chunks_exact_mut(BLOCK_ROWS)) {
        for (lane, sum) in sums.iter_mut().enumerate() {
            let products =
                row.iter().zip(x.chunks_exact(BLOCK_ROWS)).map(|(&w, x)| f64::from(w) * f64::from(x[lane]));
            *sum = (f64::from(*sum) + products.sum::<f64>()) as f32;
        }
    }
}
