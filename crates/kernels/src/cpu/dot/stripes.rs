//! Weight rows that are multiplied side by side lie far apart.
//!
//! A core that reads on and on in one place gets two thirds of what memory gives it in four: the hardware fetches ahead
//! within one page of memory and starts anew with the next, and the other three places go on meanwhile. So a matrix is cut
//! into [`STRIPES`] stripes of consecutive rows, and a pass takes one row of each.

use std::ops::Range;

/// How many activation rows a pass multiplies at once.
pub const STRIPES: usize = 4;

/// Bytes of each stripe that are prefetched ahead. The first ones of a stripe are for the caller to prefetch.
pub(in crate::cpu) const PREFETCH_AHEAD: usize = 1280;

/// Consecutive rows of a matrix, and where their products go: `[activation row][weight row]`.
pub struct Stripe<'a> {
    /// Whole rows, as they are stored.
    pub weights: &'a [u8],
    /// The products: for each row of activations one number per weight row.
    pub out: &'a mut [f32],
}

/// The rows of each stripe for some of the passes over a matrix of so many rows. All rows are in exactly one pass, always in the
/// same stripe.
pub fn cut(rows: usize, passes: Range<usize>) -> [Range<usize>; STRIPES] {
    let most = self::passes(rows);
    std::array::from_fn(|stripe| {
        let end = ((stripe + 1) * most).min(rows);
        (stripe * most + passes.start).min(end)..(stripe * most + passes.end.min(most)).min(end)
    })
}

/// Passes over a matrix of so many rows.
pub fn passes(rows: usize) -> usize {
    rows.div_ceil(STRIPES)
}

/// Four stripes whose lengths were checked.
pub(super) struct Stripes<'a> {
    stripes: [Stripe<'a>; STRIPES],
    /// Rows of each stripe.
    counts: [usize; STRIPES],
    row_bytes: usize,
    passes: usize,
}

impl<'a> Stripes<'a> {
    /// Stripes of rows of `row_bytes`, multiplied with `x_rows` rows of activations.
    pub(super) fn new(mut stripes: [Stripe<'a>; STRIPES], row_bytes: usize, x_rows: usize) -> Stripes<'a> {
        let mut counts = [0; STRIPES];
        for (Stripe { weights, out }, count) in stripes.iter().zip(&mut counts) {
            assert!(
                weights.len().is_multiple_of(row_bytes),
                "{} bytes are not whole rows of {row_bytes}",
                weights.len()
            );
            *count = weights.len() / row_bytes;
            assert_eq!(out.len(), x_rows * *count, "{x_rows} x {count} outputs");
        }
        let longest = (0..STRIPES).max_by_key(|&stripe| counts[stripe]).unwrap_or(0);
        let weights = stripes[longest].weights;
        // An empty stripe reads what another one does.
        stripes
            .iter_mut()
            .filter(|stripe| stripe.weights.is_empty())
            .for_each(|stripe| stripe.weights = weights);
        Stripes { stripes, counts, row_bytes, passes: counts[longest] }
    }

    /// Rows of the longest stripe.
    #[inline(always)]
    pub(super) fn passes(&self) -> usize {
        self.passes
    }

    #[inline(always)]
    pub(super) fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// The rows of a pass. A stripe with fewer repeats its last one; [`Self::write`] forgets the result.
    #[inline(always)]
    pub(super) fn rows(&self, pass: usize) -> [&'a [u8]; STRIPES] {
        std::array::from_fn(|stripe| {
            let weights = self.stripes[stripe].weights;
            &weights[(pass * self.row_bytes).min(weights.len() - self.row_bytes)..][..self.row_bytes]
        })
    }

    /// The rows of a matrix that a pass takes, where the stripes begin with some of them.
    #[inline(always)]
    pub(super) fn matrix_rows(&self, first_rows: [usize; STRIPES], pass: usize) -> [usize; STRIPES] {
        // An empty stripe takes whatever row there is; its results are forgotten.
        std::array::from_fn(|stripe| first_rows[stripe] + pass.min(self.counts[stripe].saturating_sub(1)))
    }

    /// Keeps the results of a pass with one row of activations.
    #[inline(always)]
    pub(super) fn write(&mut self, x_row: usize, pass: usize, results: [f32; STRIPES]) {
        for stripe in 0..STRIPES {
            if pass < self.counts[stripe] {
                self.stripes[stripe].out[x_row * self.counts[stripe] + pass] = results[stripe];
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
                let mut stripe_of = vec![usize::MAX; rows];
                for start in (0..passes(rows)).step_by(chunk) {
                    for (stripe, range) in cut(rows, start..start + chunk).into_iter().enumerate() {
                        assert!(range.len() <= chunk, "{rows} {chunk}");
                        for row in range {
                            seen[row] += 1;
                            stripe_of[row] = stripe;
                        }
                    }
                }
                assert!(seen.iter().all(|&times| times == 1), "{rows} {chunk} {seen:?}");
                // Whatever the tasks, a row has the same place in a pass.
                let whole = cut(rows, 0..passes(rows));
                assert!(
                    stripe_of.iter().enumerate().all(|(row, &stripe)| whole[stripe].contains(&row)),
                    "{stripe_of:?}"
                );
            }
        }
    }
}
