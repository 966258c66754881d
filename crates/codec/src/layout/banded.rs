//! The order inside a sealed page whose keys have bands of channels with codes of different widths. This file is the one
//! place that knows it.
//!
//! A page holds 64 tokens of one layer and one KV head, little-endian. Channels come in three regions, 4-bit channels
//! first, then 2-bit, then 1-bit ones; a region is cut into bands. Values are codes of `v` = 2 bits (`high`: 4) as in
//! [`codes`](super::codes), in one group:
//!
//! | part | layout |
//! |---|---|
//! | K codes | u32 words `[words of a token][64 tokens]`, region by region; in a region of `b` bits byte `i`, bits `b·p..` of word `w`: channel `(32/b)·w + 4·p + i` of the region |
//! | V codes | u32 words `[2v][d padded to 32]`; byte `i`, bits `v·p..`: token `(32/v)·block + 4·p + i` |
//! | K scales | u8 `[band][64 tokens]`, see [`band::scale`](crate::band::scale) |
//! | V scales | u16 `[scale, offset][64 tokens]`, f16 |
//!
//! At 128 channels a key has 32 bytes of codes and 4 of scales: as many as 2-bit codes with a 16-bit scale and offset.
//!
//! Channels after the last band are not stored and read as zero. The smaller format, `int1.5`, has the bands that `int2` gives
//! to a head of half as many channels: 16 bytes of codes and 4 of scales at 128 channels. The larger format, `high`, has the
//! bands of `int2` with four bits each and 4-bit values.
//!
//! Layers of `int2` may have bands of [other widths](super::widths). Those keep room for four scales a token, also where fewer
//! bands are stored, so that a token's scales fill a word on every device; scales that stand for no band are zero.

use super::codes::{CodeLayout, key_code, value_code};
use super::widths::{BAND_STEP, KeyWidths};
use super::{PAGE_TOKENS, check_token};
use crate::band::{half_range, quantise_band, scale};
use crate::cache_codec::Side;
use crate::error::{CodecError, check_finite, check_length};
use crate::quantise::{RowFormat, ScalePair, dequantise_row, quantise_row};
use crate::rule::{Rule, ScaleType};

/// Most bands of a row.
pub const MOST_BANDS: usize = 4;

/// Neighbouring channels of a row with codes of one width, and a scale of their own for each token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Band {
    /// The first channel of the band.
    pub first: usize,
    /// Channels of the band, a multiple of 16.
    pub channels: usize,
    /// Bits of a code: 4, 2 or 1.
    pub bits: u32,
    /// First channel of the region of this width; words are filled from there.
    pub region: usize,
    /// First word of a token in that region.
    pub region_word: usize,
}

impl Band {
    /// The channels of the band.
    pub fn range(&self) -> std::ops::Range<usize> {
        self.first..self.first + self.channels
    }
}

/// Shape of pages with banded keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BandLayout {
    /// Those after `count` are empty.
    bands: [Band; MOST_BANDS],
    count: usize,
    /// Scales of a key: as many as bands or more.
    scales: usize,
    /// How values would lie in a page of their own.
    values: CodeLayout,
}

impl BandLayout {
    /// Two bits a channel on average: twice as many channels of one bit as of four, in the ratio 1 : 1 : 2 where that comes
    /// out even, and what is left has two bits.
    pub fn int2(head_dim: usize) -> Result<BandLayout, CodecError> {
        BandLayout::new(head_dim, int2_widths(head_dim / BAND_STEP), 2)
    }

    /// The bands of [`int2`](Self::int2) with these bits in each; bands of no bits are not stored. Widths other than the default
    /// need heads that have them on [their menu](KeyWidths::menu).
    pub fn of_widths(head_dim: usize, widths: KeyWidths) -> Result<BandLayout, CodecError> {
        if widths == KeyWidths::default() {
            return BandLayout::int2(head_dim);
        }
        if KeyWidths::menu(head_dim).all(|fit| fit != widths) {
            return Err(CodecError::HeadDim {
                head_dim,
                reason: "keys of this size cannot have these widths",
            });
        }
        let units = head_dim / BAND_STEP / MOST_BANDS;
        let layout = BandLayout::new(head_dim, widths.quarters().map(|bits| (bits, units)), 2)?;
        Ok(BandLayout { scales: MOST_BANDS, ..layout })
    }

    /// Whether every band is one of those of [`int2`](Self::int2), whatever its bits: rows of one transform can be stored in
    /// both.
    pub fn has_bands_of_int2(&self) -> bool {
        BandLayout::int2(self.head_dim()).is_ok_and(|int2| {
            self.bands().iter().zip(int2.bands()).all(|(own, other)| own.range() == other.range())
        })
    }

    /// Four bits a channel in the bands of [`int2`](Self::int2), and values of four bits: more exact pages for rows of the same
    /// transform.
    pub fn high(head_dim: usize) -> Result<BandLayout, CodecError> {
        let widths = int2_widths(head_dim / BAND_STEP).map(|(_, units)| (4, units));
        BandLayout::new(head_dim, widths, 4)
    }

    /// One bit a channel on average: the stronger half of the channels has two, and the weaker half none.
    pub fn int15(head_dim: usize) -> Result<BandLayout, CodecError> {
        BandLayout::new(head_dim, int2_widths((head_dim / BAND_STEP).div_ceil(2)), 2)
    }

    /// Bands of these bits and multiples of 16 channels, strongest first, and the bits of values.
    fn new(
        head_dim: usize,
        widths: [(u32, usize); MOST_BANDS],
        value_bits: u32,
    ) -> Result<BandLayout, CodecError> {
        if head_dim == 0 || head_dim > 4096 || !head_dim.is_multiple_of(BAND_STEP) {
            let reason = "bands need a multiple of 16 channels, up to 4096";
            return Err(CodecError::HeadDim { head_dim, reason });
        }
        let mut bands = [Band::default(); MOST_BANDS];
        let (mut count, mut first, mut word) = (0, 0, 0);
        let (mut region, mut region_word) = (0, 0);
        for (bits, units) in widths.into_iter().filter(|&(bits, units)| bits > 0 && units > 0) {
            if count == 0 || bands[count - 1].bits != bits {
                (region, region_word) = (first, word);
            }
            let channels = units * BAND_STEP;
            bands[count] = Band { first, channels, bits, region, region_word };
            count += 1;
            first += channels;
            word = region_word + ((first - region) * bits as usize).div_ceil(32);
        }
        Ok(BandLayout { bands, count, scales: count, values: CodeLayout::new(value_bits, head_dim, 1)? })
    }

    /// The bands of a key, strongest first. They are side by side from channel 0 on; channels after them are not stored.
    pub fn bands(&self) -> &[Band] {
        &self.bands[..self.count]
    }

    /// Channels of a row, without padding.
    pub fn head_dim(&self) -> usize {
        self.values.head_dim()
    }

    /// Channels of a value as stored.
    pub fn padded_dim(&self) -> usize {
        self.values.padded_dim()
    }

    /// Bits of a value's code: 2 or 4.
    pub fn value_bits(&self) -> u32 {
        self.values.bits()
    }

    /// How scales and offsets of values are stored.
    pub fn value_scale_type(&self) -> ScaleType {
        self.values.scale_type()
    }

    /// Words of a token's key codes.
    pub fn key_words(&self) -> usize {
        self.bands().last().map_or(0, |band| {
            let channels = band.first + band.channels - band.region;
            band.region_word + (channels * band.bits as usize).div_ceil(32)
        })
    }

    /// First byte of the value codes.
    pub fn value_codes(&self) -> usize {
        4 * self.key_words() * PAGE_TOKENS
    }

    /// First byte of the key scales, `[band][64]`.
    pub fn key_scales(&self) -> usize {
        self.value_codes() + PAGE_TOKENS * self.padded_dim() * self.value_bits() as usize / 8
    }

    /// Scales of a key: one for each band, and zeros where more have room.
    pub fn key_scale_count(&self) -> usize {
        self.scales
    }

    /// First byte of the value scales; offsets lie 128 bytes after them.
    pub fn value_scales(&self) -> usize {
        self.key_scales() + self.scales * PAGE_TOKENS
    }

    /// Bytes of a page.
    pub fn page_bytes(&self) -> usize {
        self.value_scales() + 4 * PAGE_TOKENS
    }

    /// The band of a channel, and which one it is.
    ///
    /// # Panics
    /// When there is no such channel.
    pub fn band_of(&self, channel: usize) -> (usize, &Band) {
        let found = self.bands().iter().enumerate().find(|(_, band)| band.range().contains(&channel));
        found.unwrap_or_else(|| panic!("channel {channel} of {}", self.head_dim()))
    }

    /// Byte and bit shift of the code of (`token`, `channel`).
    ///
    /// # Panics
    /// When there is no such token or channel.
    pub fn code_position(&self, side: Side, token: usize, channel: usize) -> (usize, u32) {
        assert!(token < PAGE_TOKENS, "token {token} is outside a page");
        match side {
            Side::Key => self.key_position(self.band_of(channel).1, token, channel),
            Side::Value => self.value_position(token, channel),
        }
    }

    /// Byte and bit shift of a key's code in a band.
    fn key_position(&self, band: &Band, token: usize, channel: usize) -> (usize, u32) {
        let (byte, shift) = key_code(band.bits, token, channel - band.region);
        (4 * band.region_word * PAGE_TOKENS + byte, shift)
    }

    fn value_position(&self, token: usize, channel: usize) -> (usize, u32) {
        let (byte, shift) = value_code(self.value_bits(), self.padded_dim(), token, channel);
        (self.value_codes() + byte, shift)
    }

    /// Writes one token's key codes (one per channel) and scales (one per band), leaving all other tokens as they are.
    pub fn write_key(
        &self,
        page: &mut [u8],
        token: usize,
        codes: &[u8],
        scales: &[u8],
    ) -> Result<(), CodecError> {
        self.check(page.len(), token)?;
        check_length("codes of a key", self.head_dim(), codes.len())?;
        check_length("scales of a key", self.count, scales.len())?;
        for (index, band) in self.bands().iter().enumerate() {
            let mask = (1_u8 << band.bits) - 1;
            for channel in band.range() {
                let (byte, shift) = self.key_position(band, token, channel);
                page[byte] = page[byte] & !(mask << shift) | (codes[channel] & mask) << shift;
            }
            page[self.key_scales() + index * PAGE_TOKENS + token] = scales[index];
        }
        for unused in self.count..self.scales {
            page[self.key_scales() + unused * PAGE_TOKENS + token] = 0;
        }
        Ok(())
    }

    /// Writes one token's value codes and scale pair, leaving all other tokens as they are.
    pub fn write_value(
        &self,
        page: &mut [u8],
        token: usize,
        codes: &[u8],
        (scale, offset): ScalePair,
    ) -> Result<(), CodecError> {
        self.check(page.len(), token)?;
        check_length("codes of a value", self.head_dim(), codes.len())?;
        let mask = self.values.largest_code();
        for channel in 0..self.padded_dim() {
            let code = codes.get(channel).map_or(0, |code| code & mask);
            let (byte, shift) = self.value_position(token, channel);
            page[byte] = page[byte] & !(mask << shift) | code << shift;
        }
        for (part, bits) in [scale, offset].into_iter().enumerate() {
            let at = self.value_scales() + 2 * (part * PAGE_TOKENS + token);
            page[at..at + 2].copy_from_slice(&bits.to_le_bytes());
        }
        Ok(())
    }

    /// The row a reader makes of one token, still transformed.
    pub fn decode_token(
        &self,
        page: &[u8],
        side: Side,
        token: usize,
        row: &mut [f32],
    ) -> Result<(), CodecError> {
        self.check(page.len(), token)?;
        check_length("channels of a row", self.head_dim(), row.len())?;
        match side {
            Side::Key => {
                row.fill(0.0);
                for (index, band) in self.bands().iter().enumerate() {
                    let scale = scale(page[self.key_scales() + index * PAGE_TOKENS + token]);
                    let mask = (1_u8 << band.bits) - 1;
                    for channel in band.range() {
                        let (byte, shift) = self.key_position(band, token, channel);
                        row[channel] =
                            (f32::from(page[byte] >> shift & mask) - half_range(band.bits)) * scale;
                    }
                }
                Ok(())
            }
            Side::Value => {
                let code = |channel| {
                    let (byte, shift) = self.value_position(token, channel);
                    page[byte] >> shift & self.values.largest_code()
                };
                let codes: Vec<u8> = (0..row.len()).map(code).collect();
                let at = self.value_scales() + 2 * token;
                let word = |at: usize| u16::from_le_bytes([page[at], page[at + 1]]);
                let pair = (word(at), word(at + 2 * PAGE_TOKENS));
                dequantise_row(&codes, &[pair], self.value_scale_type(), row)
            }
        }
    }

    fn check(&self, bytes: usize, token: usize) -> Result<(), CodecError> {
        check_token("bytes of a page of bands", self.page_bytes(), bytes, token)
    }
}

/// Bits and multiples of 16 channels of bands with two bits a channel on average.
fn int2_widths(units: usize) -> [(u32, usize); MOST_BANDS] {
    // Three units at least: one of four bits and two of one bit.
    let strong = if units < 3 { 0 } else { (units / 4).max(1) };
    [(4, strong), (2, units - 3 * strong), (1, strong), (1, strong)]
}

/// How rows become codes of a layout.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BandRows {
    /// The layout of the pages that the codes are written to.
    pub layout: BandLayout,
    /// How the grid of a value is chosen.
    pub value_rule: Rule,
}

impl BandRows {
    /// The arithmetic of a value.
    pub fn value_format(&self) -> RowFormat {
        RowFormat {
            groups: 1,
            rule: self.value_rule,
            scale_type: self.layout.value_scale_type(),
            published: false,
            levels: self.layout.values.largest_code() + 1,
        }
    }

    /// Quantises one row and writes its codes and scales. On an error the page is as it was.
    pub fn write_token(
        &self,
        page: &mut [u8],
        side: Side,
        token: usize,
        row: &[f32],
    ) -> Result<(), CodecError> {
        check_length("channels of a row", self.layout.head_dim(), row.len())?;
        check_finite(row, 0)?;
        let mut codes = vec![0; row.len()];
        match side {
            Side::Key => {
                let scales: Vec<u8> = self
                    .layout
                    .bands()
                    .iter()
                    .map(|band| quantise_band(&row[band.range()], band.bits, &mut codes[band.range()]))
                    .collect();
                self.layout.write_key(page, token, &codes, &scales)
            }
            Side::Value => {
                let mut pair = [(0, 0)];
                quantise_row(row, &self.value_format(), &mut codes, &mut pair)?;
                self.layout.write_value(page, token, &codes, pair[0])
            }
        }
    }
}

#[cfg(test)]
mod tests;
