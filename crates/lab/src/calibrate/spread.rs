//! The same text at other positions.
//!
//! Rotary embedding makes attention depend on distances alone, so a text that came later in a long context would have the same
//! keys and queries, turned. Calibration reads a few thousand tokens from position 0 on, but its bands and means must hold in the
//! whole context: a key that turns slowly has moved far from where it was there. So of every sequence every other page stays
//! where it is, and the others count as if they were further back, evenly over the context.

use oscar_codec::{KeyTurning, PAGE_TOKENS};
use rayon::prelude::*;

use super::moments::{HeadCounts, ObservedRows};

/// Fractions of this number modulo one are spread evenly, however many are taken: the golden ratio.
const GOLDEN: f64 = 0.618_033_988_749_895;

/// Where the rows of a sequence are taken to be.
#[derive(Clone, Debug, PartialEq)]
pub struct Positions {
    /// How many positions each page of the sequence is shifted by, a multiple of a page.
    shifts: Vec<usize>,
}

impl Positions {
    /// Positions of `tokens` rows that are spread over a context.
    pub fn spread(tokens: usize, context: usize) -> Positions {
        let room = room(tokens, context);
        let shift = |page: usize| match page % 2 {
            0 => 0,
            _ => ((page as f64 * GOLDEN).fract() * (room + 1) as f64) as usize * PAGE_TOKENS,
        };
        Positions { shifts: (0..tokens.div_ceil(PAGE_TOKENS)).map(shift).collect() }
    }

    /// Positions of `tokens` rows that follow each other in the middle of a context.
    pub fn middle(tokens: usize, context: usize) -> Positions {
        let shift = room(tokens, context) / 2 * PAGE_TOKENS;
        Positions { shifts: vec![shift; tokens.div_ceil(PAGE_TOKENS)] }
    }

    /// The position that a row is taken to be at.
    pub fn of(&self, row: usize) -> usize {
        row + self.shifts[row / PAGE_TOKENS]
    }

    /// The queries, keys and values of a layer as they would be at these positions.
    pub(super) fn turned(&self, rows: &ObservedRows<'_>, turning: &KeyTurning) -> Vec<f32> {
        let HeadCounts { query, kv, dim } = rows.heads;
        let mut turned = rows.qkv.to_vec();
        let pages = turned.par_chunks_mut(PAGE_TOKENS * rows.heads.qkv_cols());
        pages.zip(&self.shifts).filter(|(_, shift)| **shift > 0).for_each(|(page, &shift)| {
            let turn = turning.by(shift as f64);
            for row in page.chunks_exact_mut(rows.heads.qkv_cols()) {
                row[..(query + kv) * dim].chunks_exact_mut(dim).for_each(|head| turn.apply(head));
            }
        });
        turned
    }
}

/// How many pages a sequence can be shifted by.
fn room(tokens: usize, context: usize) -> usize {
    context.saturating_sub(tokens) / PAGE_TOKENS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_the_pages_stay_and_the_others_fill_the_context() {
        let positions = Positions::spread(8192, 32_768);
        let shifts: Vec<usize> = (0..8192).map(|row| positions.of(row) - row).collect();
        assert_eq!(shifts.iter().filter(|shift| **shift == 0).count(), 4096);
        assert!(shifts.iter().all(|shift| shift % PAGE_TOKENS == 0 && *shift <= 32_768 - 8192));
        for quarter in 0..4 {
            let within = quarter * 6144 + 1..(quarter + 1) * 6144 + 1;
            let pages = shifts.iter().filter(|&shift| within.contains(shift)).count() / PAGE_TOKENS;
            assert!((14..=18).contains(&pages), "{pages} of 64 pages in quarter {quarter}");
        }
        // A sequence that fills the context stays where it is.
        assert_eq!(Positions::spread(8192, 8192), Positions { shifts: vec![0; 128] });
        assert_eq!(Positions::middle(2048, 8192).of(0), 3072);
        assert_eq!(Positions::middle(2048, 100).of(70), 70);
    }
}
