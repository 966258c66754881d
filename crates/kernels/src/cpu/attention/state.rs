//! The running state of a softmax over many pages.
//!
//! Logits are kept in units of log₂, so that every exponential is a power of two. Two states over different pages of
//! the same rows merge exactly, so a long context can be split between threads.

/// Rows are allocated in whole tiles of this many, so that a tile may be loaded and stored for the last rows too.
const ROW_STEP: usize = 16;

/// Running maximum, sum and weighted values of some query rows.
#[derive(Clone, Debug, Default)]
pub struct SoftmaxState {
    rows: usize,
    d: usize,
    /// What weights are relative to, in units of log₂: the largest logit so far or one not far below; -∞ if none.
    pub(super) max: Vec<f32>,
    /// Sum of the weights.
    pub(super) sum: Vec<f32>,
    /// Values summed with these weights, `[rows rounded up][d]`.
    pub(super) values: Vec<f32>,
}

impl SoftmaxState {
    /// Forgets everything and takes the shape of `rows` rows of `d` channels.
    pub fn reset(&mut self, rows: usize, d: usize) {
        (self.rows, self.d) = (rows, d);
        let padded = rows.next_multiple_of(ROW_STEP);
        self.max.clear();
        self.max.resize(padded, f32::NEG_INFINITY);
        self.sum.clear();
        self.sum.resize(padded, 0.0);
        self.values.clear();
        self.values.resize(padded * d, 0.0);
    }

    /// Number of query rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Channels per row.
    pub fn head_dim(&self) -> usize {
        self.d
    }

    /// Adds what `other` saw of the same rows. Either may be empty.
    pub fn merge(&mut self, other: &SoftmaxState) {
        assert!(self.rows == other.rows && self.d == other.d, "states of different shapes");
        for row in 0..self.rows {
            if other.sum[row] == 0.0 {
                continue;
            }
            let range = row * self.d..(row + 1) * self.d;
            let (mine, theirs) = (&mut self.values[range.clone()], &other.values[range]);
            if self.sum[row] == 0.0 {
                (self.max[row], self.sum[row]) = (other.max[row], other.sum[row]);
                mine.copy_from_slice(theirs);
                continue;
            }
            let max = self.max[row].max(other.max[row]);
            let (a, b) = ((self.max[row] - max).exp2(), (other.max[row] - max).exp2());
            self.max[row] = max;
            self.sum[row] = self.sum[row] * a + other.sum[row] * b;
            for (mine, theirs) in mine.iter_mut().zip(theirs) {
                *mine = *mine * a + theirs * b;
            }
        }
    }

    /// The attention output of one row; zeros if the row saw no token.
    pub fn finish(&self, row: usize, out: &mut [f32]) {
        assert!(
            row < self.rows && out.len() == self.d,
            "row {row} of {} into {} channels",
            self.rows,
            out.len()
        );
        if self.sum[row] == 0.0 {
            return out.fill(0.0);
        }
        let inverse = 1.0 / self.sum[row];
        for (out, value) in out.iter_mut().zip(&self.values[row * self.d..]) {
            *out = value * inverse;
        }
    }
}
