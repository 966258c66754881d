//! Weight rows that are multiplied side by side lie far apart.
//!
//! A core that reads on and on in one place gets two thirds of what memory gives it in four: the hardware fetches ahead
//! within one page of memory and starts anew with the next, and the other three places go on meanwhile. So a matrix is cut
//! into [`RUNS`] runs of consecutive rows, and a pass takes one row of each.

use std::ops::Range;

/// Rows of a pass.
pub const RUNS: usize = 4;

/// Bytes of each run that are asked for ahead. The first ones of a run are for the caller to ask for.
pub(in crate::cpu) const FETCH_AHEAD: usize = 1280;

/// Consecutive rows of a matrix, and where their products go: `[activation row][weight row]`.
pub struct Run<'a> {
    /// Whole rows, as they are stored.
    pub weights: &'a [u8],
    /// As many numbers for each row of activations as there are weight rows.
    pub out: &'a mut [f32],
}

/// The rows of each run for some of the passes over a matrix of so many rows. All rows are in exactly one pass, always in the
/// same run.
pub fn cut(rows: usize, passes: Range<usize>) -> [Range<usize>; RUNS] {
    let most = self::passes(rows);
    std::array::from_fn(|run| {
        let end = ((run + 1) * most).min(rows);
        (run * most + passes.start).min(end)..(run * most + passes.end.min(most)).min(end)
    })
}

/// Passes over a matrix of so many rows.
pub fn passes(rows: usize) -> usize {
    rows.div_ceil(RUNS)
}

/// Four runs whose lengths were checked.
pub(super) struct Runs<'a> {
    runs: [Run<'a>; RUNS],
    /// Rows of each run.
    counts: [usize; RUNS],
    row_bytes: usize,
    passes: usize,
}

impl<'a> Runs<'a> {
    /// Runs of rows of `row_bytes`, multiplied with `x_rows` rows of activations.
    pub(super) fn new(mut runs: [Run<'a>; RUNS], row_bytes: usize, x_rows: usize) -> Runs<'a> {
        let mut counts = [0; RUNS];
        for (Run { weights, out }, count) in runs.iter().zip(&mut counts) {
            assert!(
                weights.len().is_multiple_of(row_bytes),
                "{} bytes are not whole rows of {row_bytes}",
                weights.len()
            );
            *count = weights.len() / row_bytes;
            assert_eq!(out.len(), x_rows * *count, "{x_rows} x {count} outputs");
        }
        let longest = (0..RUNS).max_by_key(|&run| counts[run]).unwrap_or(0);
        let weights = runs[longest].weights;
        // An empty run reads what another one does.
        runs.iter_mut().filter(|run| run.weights.is_empty()).for_each(|run| run.weights = weights);
        Runs { runs, counts, row_bytes, passes: counts[longest] }
    }

    /// Rows of the longest run.
    #[inline(always)]
    pub(super) fn passes(&self) -> usize {
        self.passes
    }

    #[inline(always)]
    pub(super) fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// The rows of a pass. A run with fewer repeats its last one; [`Self::write`] forgets the result.
    #[inline(always)]
    pub(super) fn rows(&self, pass: usize) -> [&'a [u8]; RUNS] {
        std::array::from_fn(|run| {
            let weights = self.runs[run].weights;
            &weights[(pass * self.row_bytes).min(weights.len() - self.row_bytes)..][..self.row_bytes]
        })
    }

    /// Keeps the results of a pass with one row of activations.
    #[inline(always)]
    pub(super) fn write(&mut self, x_row: usize, pass: usize, results: [f32; RUNS]) {
        for run in 0..RUNS {
            if pass < self.counts[run] {
                self.runs[run].out[x_row * self.counts[run] + pass] = results[run];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_in_one_task() {
        for rows in 0..40 {
            for chunk in 1..12 {
                let mut seen = vec![0; rows];
                let mut run_of = vec![usize::MAX; rows];
                for start in (0..passes(rows)).step_by(chunk) {
                    for (run, range) in cut(rows, start..start + chunk).into_iter().enumerate() {
                        assert!(range.len() <= chunk, "{rows} {chunk}");
                        for row in range {
                            seen[row] += 1;
                            run_of[row] = run;
                        }
                    }
                }
                assert!(seen.iter().all(|&times| times == 1), "{rows} {chunk} {seen:?}");
                // Whatever the tasks, a row has the same place in a pass.
                let whole = cut(rows, 0..passes(rows));
                assert!(run_of.iter().enumerate().all(|(row, &run)| whole[run].contains(&row)), "{run_of:?}");
            }
        }
    }
}
