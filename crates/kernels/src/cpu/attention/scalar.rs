//! The reference: plain loops in `f64`, any even head dimension.

use std::ops::Range;

use half::bf16;

use super::page::{key_index, value_index};
use super::state::SoftmaxState;

/// Attends one row to some tokens of a page. `q` is scaled already.
pub(super) fn attend_row(
    q: &[f32],
    page: &[u16],
    tokens: Range<usize>,
    row: usize,
    state: &mut SoftmaxState,
) {
    let d = q.len();
    let element = |index: usize| f64::from(bf16::from_bits(page[index]).to_f32());
    // Rounded like the stored maximum, so that none is above it.
    let logits: Vec<f64> = tokens
        .clone()
        .map(|token| (0..d).map(|c| f64::from(q[c]) * element(key_index(token, c))).sum::<f64>())
        .map(|logit| f64::from(logit as f32))
        .collect();
    let old = f64::from(state.max[row]);
    let max = logits.iter().fold(old, |max, &logit| max.max(logit));
    if max == f64::NEG_INFINITY && !logits.iter().any(|logit| logit.is_nan()) {
        return;
    }
    let shrink = if state.sum[row] == 0.0 { 0.0 } else { (old - max).exp2() };
    let weights: Vec<f64> = logits.iter().map(|logit| (logit - max).exp2()).collect();
    state.max[row] = max as f32;
    state.sum[row] = (f64::from(state.sum[row]) * shrink + weights.iter().sum::<f64>()) as f32;
    for (c, value) in state.values[row * d..(row + 1) * d].iter_mut().enumerate() {
        let sum: f64 = weights
            .iter()
            .zip(tokens.clone())
            .map(|(weight, t)| weight * element(value_index(d, t, c)))
            .sum();
        *value = (f64::from(*value) * shrink + sum) as f32;
    }
}
