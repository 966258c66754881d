//! The running state of a softmax over many pages.
//!
//! Logits are kept in units of log₂, so that every exponential is a power of two. States over different pages of the
//! same rows make one result exactly, so a long context can be split between threads.

/// Rows from which tiles beat vectors on bf16 pages: below, most of a tile is empty.
pub(super) const TILES_FROM: usize = 5;

/// Rows of a tile. Where sums may go to tiles they are padded to whole ones, which are loaded and stored for the last rows
/// too.
const TILE: usize = 16;

/// Allocating at least so many numbers keeps those of few rows, which different threads write, off the same pair of cache
/// lines.
const APART: usize = 32;

/// Running maximum, sum and weighted values of some query rows.
#[derive(Clone, Debug, Default)]
pub struct SoftmaxState {
    rows: usize,
    d: usize,
    /// What weights are relative to, in units of log₂: the largest logit so far or one not far below; -∞ if none.
    pub(super) max: Vec<f32>,
    /// Sum of the weights.
    pub(super) sum: Vec<f32>,
    /// Values summed with these weights, `[rows, padded to whole tiles if they may go to some][d]`.
    pub(super) values: Vec<f32>,
}

impl SoftmaxState {
    /// Forgets everything and takes the shape of `rows` rows of `d` channels.
    pub fn reset(&mut self, rows: usize, d: usize) {
        (self.rows, self.d) = (rows, d);
        // A decode step has many states of few rows, and every line of them comes from memory.
        let padded = if rows < TILES_FROM { rows } else { rows.next_multiple_of(TILE) };
        for (row_values, first) in [(&mut self.max, f32::NEG_INFINITY), (&mut self.sum, 0.0)] {
            row_values.clear();
            row_values.reserve(APART);
            row_values.resize(padded, first);
        }
        self.values.clear();
        self.values.resize(padded * d, 0.0);
    }

    /// Number of query rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The number of channels of a row.
    pub fn head_dim(&self) -> usize {
        self.d
    }

    /// The attention output of one row; zeros if the row saw no token.
    pub fn finish(&self, row: usize, out: &mut [f32]) {
        SoftmaxState::finish_parts(std::slice::from_ref(&self), row, out);
    }

    /// The attention output of one row whose pages were split between states of one shape; zeros if it saw no token.
    pub fn finish_parts(parts: &[&SoftmaxState], row: usize, out: &mut [f32]) {
        SoftmaxState::finish_with_sink(parts, row, None, out);
    }

    /// [`Self::finish_parts`] with a logit, in units of log₂, that takes part in the softmax and has no value. Returns its
    /// share of the weights.
    pub fn finish_with_sink(parts: &[&SoftmaxState], row: usize, sink: Option<f32>, out: &mut [f32]) -> f32 {
        let seen = || parts.iter().filter(|part| part.sum[row] != 0.0);
        let largest = sink.unwrap_or(f32::NEG_INFINITY);
        let max = seen().fold(largest, |max, part| max.max(part.max[row]));
        let weight = |logit: f32| if logit == max { 1.0 } else { (logit - max).exp2() };
        let mut sum: f32 = seen().map(|part| part.sum[row] * weight(part.max[row])).sum();
        let of_sink = sink.map_or(0.0, weight);
        sum += of_sink;
        out.fill(0.0);
        for part in seen() {
            assert!(
                row < part.rows && out.len() == part.d,
                "row {row} of {}, {} channels",
                part.rows,
                part.d
            );
            let scale = weight(part.max[row]) / sum;
            for (out, value) in out.iter_mut().zip(&part.values[row * part.d..]) {
                *out += value * scale;
            }
        }
        if sink.is_some() { of_sink / sum } else { 0.0 }
    }
}
