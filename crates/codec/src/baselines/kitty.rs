//! `kitty`: per-channel two-bit keys with the most sensitive eighth of the channels at four bits (Kitty, arXiv
//! 2511.18643).
//!
//! Choices: a page is 128 tokens and a key channel has one scale per page, as in its code; **sensitivity** of a
//! channel is the mean magnitude of its keys over the page (its default; variance is its alternative); 12.5 % of
//! the channels, rounded down, are promoted; values are two bits per token in groups of up to 128 channels; scales
//! and minima in f16. Which channels are promoted is stored as a bit mask per page and counted. Kitty's own sink (32
//! tokens) and buffer (128) are the lab's windows.

use super::kivi::{check_key_groups, round_trip_rows};
use super::line::LineFormat;
use super::{check_head_dim, group_channels};
use crate::cache_codec::{CacheCodec, HeadIndex, Side};
use crate::error::CodecError;

const PAGE: usize = 128;

/// Two bits with an eighth of the key channels at four.
#[derive(Clone, Debug)]
pub struct Kitty {
    head_dim: usize,
    key_line: LineFormat,
    promoted_line: LineFormat,
    value_line: LineFormat,
}

impl Kitty {
    /// Makes the codec for heads of `head_dim` channels.
    pub fn new(head_dim: usize) -> Result<Self, CodecError> {
        check_head_dim(head_dim)?;
        Ok(Kitty {
            head_dim,
            key_line: LineFormat::new(PAGE, 2, 1)?,
            promoted_line: LineFormat::new(PAGE, 4, 1)?,
            value_line: LineFormat::new(head_dim, 2, head_dim / group_channels(head_dim, PAGE))?,
        })
    }

    /// Key channels kept at four bits.
    fn promoted(&self) -> usize {
        self.head_dim / 8
    }

    /// Bytes of the keys of a page: mask, two-bit channels, four-bit channels.
    fn key_page_bytes(&self) -> usize {
        self.head_dim.div_ceil(8)
            + (self.head_dim - self.promoted()) * self.key_line.bytes()
            + self.promoted() * self.promoted_line.bytes()
    }

    /// The mask of the channels with the largest mean magnitude; of equals the lower channel.
    fn mask(&self, page: &[f32]) -> Vec<u8> {
        let mut scores = vec![0.0_f32; self.head_dim];
        for row in page.chunks_exact(self.head_dim) {
            scores.iter_mut().zip(row).for_each(|(score, x)| *score += x.abs() / PAGE as f32);
        }
        let mut order: Vec<usize> = (0..self.head_dim).collect();
        order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
        let mut mask = vec![0; self.head_dim.div_ceil(8)];
        for &channel in &order[..self.promoted()] {
            mask[channel / 8] |= 1 << (channel % 8);
        }
        mask
    }

    fn line(&self, mask: &[u8], channel: usize) -> &LineFormat {
        if mask[channel / 8] >> (channel % 8) & 1 == 1 { &self.promoted_line } else { &self.key_line }
    }

    fn store_keys(&self, page: &[f32]) -> Result<Vec<u8>, CodecError> {
        let mut bytes = self.mask(page);
        let mask = bytes.clone();
        for channel in 0..self.head_dim {
            let column: Vec<f32> = page.iter().skip(channel).step_by(self.head_dim).copied().collect();
            self.line(&mask, channel).store(&column, &mut bytes)?;
        }
        Ok(bytes)
    }

    fn load_keys(&self, bytes: &[u8], page: &mut [f32]) -> Result<(), CodecError> {
        let (mask, mut lines) = bytes.split_at(self.head_dim.div_ceil(8));
        let mut column = [0.0; PAGE];
        for channel in 0..self.head_dim {
            let line = self.line(mask, channel);
            let (this, rest) = lines.split_at(line.bytes());
            line.load(this, &mut column)?;
            for (token, x) in column.iter().enumerate() {
                page[token * self.head_dim + channel] = *x;
            }
            lines = rest;
        }
        Ok(())
    }
}

impl CacheCodec for Kitty {
    fn name(&self) -> &str {
        "kitty"
    }

    fn token_group(&self) -> usize {
        PAGE
    }

    fn round_trip(&self, _: HeadIndex, side: Side, _: usize, rows: &mut [f32]) -> Result<(), CodecError> {
        if side == Side::Value {
            return round_trip_rows(&self.value_line, self.head_dim, rows);
        }
        check_key_groups(rows, self.head_dim, PAGE)?;
        for page in rows.chunks_exact_mut(PAGE * self.head_dim) {
            let bytes = self.store_keys(page)?;
            debug_assert_eq!(bytes.len(), self.key_page_bytes());
            self.load_keys(&bytes, page)?;
        }
        Ok(())
    }

    fn token_bytes(&self, head_dim: usize) -> f64 {
        Kitty::new(head_dim).map_or(f64::NAN, |codec| {
            codec.key_page_bytes() as f64 / PAGE as f64 + codec.value_line.bytes() as f64
        })
    }
}

#[cfg(test)]
mod tests {
    use oscar_random::Random;

    use super::*;

    #[test]
    fn the_loudest_channels_are_promoted_and_read_back_finer() {
        let codec = Kitty::new(16).unwrap();
        let mut random = Random::new(1);
        let page: Vec<f32> = (0..PAGE * 16)
            .map(|i| random.signed() * if matches!(i % 16, 3 | 10) { 50.0 } else { 1.0 })
            .collect();
        assert_eq!(codec.mask(&page), [1 << 3, 1 << 2]);
        let bytes = codec.store_keys(&page).unwrap();
        assert_eq!(bytes.len(), codec.key_page_bytes());
        assert_eq!(bytes.len(), 2 + 14 * (32 + 4) + 2 * (64 + 4));
        let mut back = page.clone();
        codec.round_trip(HeadIndex { layer: 0, head: 0 }, Side::Key, 0, &mut back).unwrap();
        for (i, (x, y)) in page.iter().zip(&back).enumerate() {
            let step = if matches!(i % 16, 3 | 10) { 100.0 / 15.0 } else { 2.0 / 3.0 };
            assert!((x - y).abs() <= 0.51 * step, "channel {}: {x} read as {y}", i % 16);
        }
    }

    #[test]
    fn equal_channels_promote_the_first() {
        let codec = Kitty::new(16).unwrap();
        assert_eq!(codec.mask(&[1.0; PAGE * 16]), [0b11, 0]);
    }
}
