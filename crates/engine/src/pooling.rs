//! One vector for a prompt, out of the hidden states of its tokens.

use std::ops::Range;

/// Which hidden states the embedding of a prompt is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// The mean over all tokens of the prompt, which is computed as a whole, whatever the cache holds.
    Mean,
    /// The hidden state of the last token.
    Last,
}

impl Pooling {
    /// The rows that count, of the rows of a prompt of `tokens` tokens at these positions; counted from the first of them.
    pub(crate) fn rows(self, positions: &Range<usize>, tokens: usize) -> Range<usize> {
        let all = positions.len();
        match self {
            Pooling::Mean => 0..all,
            Pooling::Last if positions.end == tokens => all.saturating_sub(1)..all,
            Pooling::Last => 0..0,
        }
    }
}

/// Hidden states of consecutive rows, one after the other.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct HiddenRows {
    pub(crate) count: usize,
    pub(crate) values: Vec<f32>,
}

/// The sum of hidden states. Rows are added one by one, so that it does not matter how a prompt was cut.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct PooledHidden {
    sum: Vec<f64>,
    rows: usize,
}

impl PooledHidden {
    pub(crate) fn add(&mut self, rows: &HiddenRows) {
        if rows.count == 0 {
            return;
        }
        let width = rows.values.len() / rows.count;
        self.sum.resize(width, 0.0);
        for row in rows.values.chunks_exact(width.max(1)) {
            self.sum.iter_mut().zip(row).for_each(|(sum, &value)| *sum += f64::from(value));
        }
        self.rows += rows.count;
    }

    /// The mean of the rows that were added; `None` if there was no row.
    pub(crate) fn mean(&self) -> Option<Vec<f32>> {
        let rows = self.rows as f64;
        (self.rows > 0).then(|| self.sum.iter().map(|sum| (sum / rows) as f32).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rows_that_count_depend_on_the_place_in_the_prompt() {
        assert_eq!(Pooling::Mean.rows(&(64..128), 200), 0..64);
        assert_eq!(Pooling::Last.rows(&(64..128), 200), 0..0);
        assert_eq!(Pooling::Last.rows(&(128..200), 200), 71..72);
    }

    #[test]
    fn a_mean_does_not_depend_on_the_cut() {
        let values: Vec<f32> = (0..20).map(|index| (index as f32).sin()).collect();
        let rows = |range: Range<usize>| HiddenRows {
            count: range.len(),
            values: values[range.start * 2..range.end * 2].to_vec(),
        };
        let mut whole = PooledHidden::default();
        assert_eq!(whole.mean(), None);
        whole.add(&rows(0..10));
        let mut cut = PooledHidden::default();
        [0..3, 3..3, 3..9, 9..10].into_iter().for_each(|range| cut.add(&rows(range)));
        assert_eq!(cut, whole);
        let first: f64 = values.iter().step_by(2).map(|&value| f64::from(value)).sum();
        assert_eq!(whole.mean().unwrap()[0], (first / 10.0) as f32);
    }
}
