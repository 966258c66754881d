//! The reference: plain loops in `f64`, any even head dimension.

use std::ops::Range;

use half::bf16;

use super::state::SoftmaxState;

/// An element of a bf16 page.
pub(super) fn element(page: &[u16], index: usize) -> f64 {
    f64::from(bf16::from_bits(page[index]).to_f32())
}

/// Attends one row to some tokens of a page. `q` is scaled already; `key` and `value` read (token, channel).
pub(super) fn attend_row(
    q: &[f32],
    tokens: Range<usize>,
    key: impl Fn(usize, usize) -> f64,
    value: impl Fn(usize, usize) -> f64,
    row: usize,
    state: &mut SoftmaxState,
) {
    let d = q.len();
    // Rounded like the stored maximum, so that none is above it.
    let logits: Vec<f64> = tokens
        .clone()
        .map(|token| (0..d).map(|c| f64::from(q[c]) * key(token, c)).sum::<f64>())
        .map(|logit| f64::from(logit as f32))
        .collect();
    let old = f64::from(state.max[row]);
    let max = logits.iter().fold(old, |max, &logit| max.max(logit));
    if max == f64::NEG_INFINITY && !logits.iter().any(|logit| logit.is_nan()) {
        return;
    }
    let rescale = if state.sum[row] == 0.0 { 0.0 } else { (old - max).exp2() };
    let weights: Vec<f64> = logits.iter().map(|logit| (logit - max).exp2()).collect();
    state.max[row] = max as f32;
    state.sum[row] = (f64::from(state.sum[row]) * rescale + weights.iter().sum::<f64>()) as f32;
    for (c, total) in state.values[row * d..(row + 1) * d].iter_mut().enumerate() {
        let sum: f64 = weights.iter().zip(tokens.clone()).map(|(weight, t)| weight * value(t, c)).sum();
        *total = (f64::from(*total) * rescale + sum) as f32;
    }
}
