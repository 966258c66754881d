//! How keys turn with their position, and the mean key of a page.
//!
//! Rotary embedding turns every pair of channels by an angle that grows with the position of the token. Before it, keys of a head
//! have a mean that hardly depends on the position, and in many models that mean is far larger than what tells keys apart. After
//! it the mean turns:
//!
//! ```text
//!            page 0     page 1     page 2          mean of a pair of channels, by page
//!              /          |          \
//!             /           |           \            one mean for all pages leaves the differences
//!            *            *            *           between these to the codes
//! ```
//!
//! A mean that is subtracted from every key of a row changes no softmax, so bf16 rows are centred by one mean for all
//! positions. A sealed page is centred by its own on top: the mean of its 64 positions, which follows from the mean key before
//! rotary embedding and from the angles. Pairs that turn fast add up to nothing within a page, the slow ones are known. Readers
//! add the product of query and page mean to the logits of the page.

use std::sync::Arc;

use crate::error::{CodecError, check_finite, check_length};
use crate::layout::PAGE_TOKENS;

/// Which channels of a head rotate together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeLayout {
    /// Channel `i` with `i + rotary_dim/2` (Hugging Face checkpoints, Qwen GGUF files).
    Halves,
    /// Channel `2i` with `2i + 1` (Llama GGUF files).
    Interleaved,
}

/// The angles by which rotary embedding turns the pairs of a head's channels.
#[derive(Clone, Debug, PartialEq)]
pub struct KeyTurning {
    /// Angle per position of each pair; channels beyond them do not turn.
    frequencies: Vec<f32>,
    layout: RopeLayout,
}

impl KeyTurning {
    /// Pairs that turn by these angles for every position, none if keys do not turn.
    pub fn new(frequencies: Vec<f32>, layout: RopeLayout) -> KeyTurning {
        KeyTurning { frequencies, layout }
    }

    /// The turn by so many positions, which may be negative to undo one.
    pub fn by(&self, positions: f64) -> KeyTurn {
        self.turn(|frequency| {
            let (sin, cos) = (frequency * positions).sin_cos();
            (cos, sin)
        })
    }

    /// What makes of a key at position 0 the mean of what it is at the 64 positions of a page.
    fn to_page(&self, page: usize) -> KeyTurn {
        let centre = (page * PAGE_TOKENS) as f64 + 0.5 * (PAGE_TOKENS - 1) as f64;
        self.turn(|frequency| {
            // The sum of the unit vectors of all positions, over their number.
            let half = 0.5 * frequency;
            let length = match half.sin() {
                0.0 => 1.0,
                sine => (PAGE_TOKENS as f64 * half).sin() / (PAGE_TOKENS as f64 * sine),
            };
            let (sin, cos) = (frequency * centre).sin_cos();
            (length * cos, length * sin)
        })
    }

    fn turn(&self, factor: impl Fn(f64) -> (f64, f64)) -> KeyTurn {
        let factors = self.frequencies.iter().map(|&frequency| factor(frequency.into())).collect();
        KeyTurn { factors, layout: self.layout }
    }

    /// Number of channels that turn.
    fn channels(&self) -> usize {
        2 * self.frequencies.len()
    }
}

/// A complex number for each pair of channels.
pub struct KeyTurn {
    factors: Vec<(f64, f64)>,
    layout: RopeLayout,
}

impl KeyTurn {
    /// Multiplies the pairs of a row.
    ///
    /// # Panics
    /// When the row has fewer channels than turn.
    pub fn apply(&self, row: &mut [f32]) {
        let pairs = self.factors.len();
        for (pair, &(real, imaginary)) in self.factors.iter().enumerate() {
            let (i, j) = match self.layout {
                RopeLayout::Halves => (pair, pair + pairs),
                RopeLayout::Interleaved => (2 * pair, 2 * pair + 1),
            };
            let (a, b) = (f64::from(row[i]), f64::from(row[j]));
            row[i] = (a * real - b * imaginary) as f32;
            row[j] = (b * real + a * imaginary) as f32;
        }
    }
}

/// The mean key of a head in every page.
#[derive(Clone, Debug, PartialEq)]
pub struct PageMeans {
    unturned: Arc<[f32]>,
    turning: Arc<KeyTurning>,
}

impl PageMeans {
    /// From the mean key before rotary embedding.
    pub fn new(unturned: &[f32], turning: Arc<KeyTurning>) -> Result<PageMeans, CodecError> {
        check_finite(unturned, 0)?;
        if turning.channels() > unturned.len() {
            let (expected, got) = (turning.channels(), unturned.len());
            return Err(CodecError::Shape { what: "channels of a mean key, at least", expected, got });
        }
        Ok(PageMeans { unturned: unturned.into(), turning })
    }

    /// Checks that means are of rows of so many channels.
    pub(crate) fn check_dim(&self, dim: usize) -> Result<(), CodecError> {
        check_length("channels of a mean key", dim, self.unturned.len())
    }

    /// The mean key of a page, after rotary embedding.
    pub fn of_page(&self, page: usize) -> Vec<f32> {
        let mut mean = self.unturned.to_vec();
        self.turning.to_page(page).apply(&mut mean);
        mean
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turning(layout: RopeLayout) -> Arc<KeyTurning> {
        Arc::new(KeyTurning::new(vec![1.0, 0.1, 0.003, 0.0], layout))
    }

    #[test]
    fn the_mean_of_a_page_is_that_of_its_positions() {
        let row: Vec<f32> = (0..10).map(|channel| 3.0 - channel as f32).collect();
        for layout in [RopeLayout::Halves, RopeLayout::Interleaved] {
            let turning = turning(layout);
            let means = PageMeans::new(&row, turning.clone()).unwrap();
            for page in [0, 1, 500] {
                let mut sum = [0.0_f64; 10];
                for position in page * PAGE_TOKENS..(page + 1) * PAGE_TOKENS {
                    let mut key = row.clone();
                    turning.by(position as f64).apply(&mut key);
                    sum.iter_mut().zip(&key).for_each(|(sum, &x)| *sum += f64::from(x) / PAGE_TOKENS as f64);
                }
                for (mean, sum) in means.of_page(page).into_iter().zip(sum) {
                    assert!(
                        (f64::from(mean) - sum).abs() < 1e-5,
                        "{layout:?}, page {page}: {mean} for {sum}"
                    );
                }
                // What does not turn stays.
                assert_eq!(means.of_page(page)[8..], row[8..]);
            }
        }
    }

    #[test]
    fn turns_are_undone_and_too_many_channels_refused() {
        let turning = turning(RopeLayout::Halves);
        let row: Vec<f32> = (0..8).map(|channel| channel as f32 + 1.0).collect();
        let mut turned = row.clone();
        turning.by(30_000.0).apply(&mut turned);
        assert!(turned.iter().zip(&row).any(|(one, other)| (one - other).abs() > 0.5));
        turning.by(-30_000.0).apply(&mut turned);
        assert!(turned.iter().zip(&row).all(|(one, other)| (one - other).abs() < 1e-5));
        assert!(PageMeans::new(&row[..6], turning.clone()).is_err());
        assert!(PageMeans::new(&[f32::NAN; 8], turning).is_err());
    }
}
