//! The order of bytes inside a page on the device, and converters from and to the CPU's.
//!
//! A page of 64 tokens is cut into tiles of about 32 bytes per channel, the unit a warp works on: 64 tokens of 2 bits,
//! 32 of 4, 16 of 8-bit floats, 8 of bf16. A tile is keys, values and scales, contiguous, so one copy fetches it. Inside,
//! elements lie in the order in which the 32 lanes of a warp hold the operands of a matrix instruction: 16 bytes per
//! lane, 512 per load, no shuffles. A page has as many bytes as on the CPU.
//!
//! A bf16 tile is squares of eight rows and 16 bytes, which all matrix instructions read from shared memory, one square for
//! each eight channels:
//!
//! ```text
//!   keys                              values
//!   token 0:  channels 0 1 .. 7       channel 0:  tokens 0 1 .. 7
//!   token 1:  channels 0 1 .. 7       channel 1:  tokens 0 1 .. 7
//!   ...                               ...
//! ```
//!
//! Banded keys have other codes in the place of 2-bit ones. Of each sixteen channels of a token a lane has four, in the
//! four bytes of a word, and the sixteens of a token follow one another inside these bytes, strongest first:
//!
//! ```text
//!   d=128, one token, one lane       word 0             word 1
//!   bits of every byte               7..4   3..0        7  6  5  4  3..2  1..0
//!   channels of the token / 16       1      0           7  6  5  4  3     2
//! ```
//!
//! Where all bands have four bits (`high`), words hold two sixteens each and values are 4-bit codes. Where channels after the last
//! band are not stored (`int1.5`, layers of fewer bits), a token has fewer words, and the keys of a tile fewer bytes than its values.
//! Heads of 64 channels may have 6 or 10 bits in their four sixteens. Then a sixteen of all eight tokens of a lane comes before the
//! next sixteen, and the last two words of a lane are a load of their own:
//!
//! ```text
//!   d=64, widths 4/2/0/0, one lane     words 0 .. 3                          words 4, 5
//!   bits of every byte                 7..4      3..0                        7..6  5..4  3..2  1..0
//!                                      token 1   token 0 of sixteen 0, ...   tokens 3, 2, 1, 0 of sixteen 1, ...
//! ```

use crate::error::CudaError;
use oscar_codec::{BandLayout, Bf16Layout, CodeLayout, Fp8Layout, PAGE_TOKENS, PageLayout, ScaleType, Side};

/// Which pages of a kernel sizes are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pages {
    /// bf16 pages: windows and scratch.
    Exact,
    /// Sealed pages.
    Sealed,
}

/// Channels of a token that the lanes of a row hold together, four each.
const UNIT: usize = 16;

/// Bands of a key: their scales fill a word.
const BANDS: usize = 4;

/// Shape of the pages of one format on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageOrder {
    layout: PageLayout,
}

impl PageOrder {
    /// The order of a layout whose heads have a multiple of 32 channels up to 256, in groups that are multiples of 32, or
    /// in bands that fill loads of 8 bytes of each lane and have room for four scales.
    pub fn new(layout: PageLayout) -> Result<PageOrder, CudaError> {
        let head_dim = layout.head_dim();
        if head_dim == 0 || !head_dim.is_multiple_of(32) || head_dim > 256 {
            return Err(CudaError::Unsupported(format!(
                "heads of {head_dim} channels: CUDA kernels need a multiple of 32 up to 256"
            )));
        }
        let order = PageOrder { layout };
        if let PageLayout::Banded(layout) = layout {
            let (scales, load) = (layout.key_scale_count(), 32 * 8);
            if scales != BANDS || !order.key_bytes().is_multiple_of(load) {
                return Err(CudaError::Unsupported(format!(
                    "keys of {head_dim} channels with {scales} scales, {} bytes of {} tokens: CUDA kernels need {BANDS} \
                     scales and a multiple of {load} bytes (choose another type of cache, or --device cpu)",
                    order.key_bytes(),
                    order.tile_tokens(),
                )));
            }
        }
        let group = head_dim / order.groups();
        if !group.is_multiple_of(32) {
            return Err(CudaError::Unsupported(format!(
                "groups of {group} channels: CUDA kernels need a multiple of 32"
            )));
        }
        Ok(order)
    }

    /// What the pages hold.
    pub fn layout(&self) -> PageLayout {
        self.layout
    }

    /// Channels of a head.
    pub fn head_dim(&self) -> usize {
        self.layout.head_dim()
    }

    /// Bits of an element: 2, 4, 8 or 16; of values where keys have bands.
    pub fn bits(&self) -> usize {
        match self.layout {
            PageLayout::Bf16(_) => 16,
            PageLayout::Codes(layout) => layout.bits() as usize,
            PageLayout::Fp8(_) => 8,
            PageLayout::Banded(layout) => layout.value_bits() as usize,
        }
    }

    /// The bands of keys, where these have any.
    pub fn bands(&self) -> Option<BandLayout> {
        match self.layout {
            PageLayout::Banded(layout) => Some(layout),
            _ => None,
        }
    }

    /// Bits of the element of a channel; 0 where it is not stored.
    pub fn element_bits(&self, side: Side, channel: usize) -> usize {
        match (self.bands(), side) {
            (Some(layout), Side::Key) => {
                let band = layout.bands().iter().find(|band| band.range().contains(&channel));
                band.map_or(0, |band| band.bits as usize)
            }
            _ => self.bits(),
        }
    }

    /// Groups of channels with their own scale; 1 where there are none.
    pub fn groups(&self) -> usize {
        match self.layout {
            PageLayout::Codes(layout) => layout.groups(),
            _ => 1,
        }
    }

    /// Tokens of a tile.
    pub fn tile_tokens(&self) -> usize {
        128 / self.bits()
    }

    /// Tiles of a page.
    pub fn tiles(&self) -> usize {
        PAGE_TOKENS / self.tile_tokens()
    }

    /// Bytes of a tile.
    pub fn tile_bytes(&self) -> usize {
        self.key_bytes() + self.value_bytes() + 2 * self.side_scale_bytes()
    }

    /// Bytes of a page, as many as on the CPU.
    pub fn page_bytes(&self) -> usize {
        self.tiles() * self.tile_bytes()
    }

    /// Elements of values in a tile.
    fn value_bytes(&self) -> usize {
        16 * self.head_dim()
    }

    /// Elements of keys in a tile: as many, unless some channels are not stored or have other bits.
    fn key_bytes(&self) -> usize {
        match self.layout {
            PageLayout::Banded(_) => self.tile_tokens() * 2 * self.band_bit(self.head_dim() / UNIT),
            _ => self.value_bytes(),
        }
    }

    /// Scales of keys or of values in a tile.
    fn side_scale_bytes(&self) -> usize {
        match self.layout {
            PageLayout::Bf16(_) => 0,
            PageLayout::Codes(layout) => layout.groups() * self.tile_tokens() * 4,
            PageLayout::Fp8(_) => self.tile_tokens() * 2,
            // A byte for each band of a key; as much for a scale and an offset of a value.
            PageLayout::Banded(_) => self.tile_tokens() * BANDS,
        }
    }

    /// The sizes of a tile as the kernels know them, for bf16 pages (`EXACT_`) or sealed ones (`SEALED_`). The sources hold
    /// no size of their own.
    pub(super) fn defines(&self, pages: Pages) -> Vec<(&'static str, usize)> {
        match pages {
            Pages::Exact => vec![
                ("PAGE_TOKENS", PAGE_TOKENS),
                ("EXACT_TILE_TOKENS", self.tile_tokens()),
                ("EXACT_SIDE_BYTES", self.value_bytes()),
                ("EXACT_TILE_BYTES", self.tile_bytes()),
            ],
            Pages::Sealed => vec![
                ("SEALED_TILE_TOKENS", self.tile_tokens()),
                ("SEALED_KEY_BYTES", self.key_bytes()),
                ("SEALED_VALUE_BYTES", self.value_bytes()),
                ("SEALED_SCALE_BYTES", self.side_scale_bytes()),
                ("SEALED_TILE_BYTES", self.tile_bytes()),
            ],
        }
    }

    /// The bands as the kernels know them, in hexadecimal digits, the first band in the lowest: sixteens of channels, and
    /// bits of a code. Zero where keys have no bands.
    pub(super) fn band_defines(&self) -> [(&'static str, usize); 2] {
        let (mut units, mut bits) = (0, 0);
        for (index, band) in self.bands().iter().flat_map(|layout| layout.bands()).enumerate() {
            units |= (band.channels / UNIT) << (4 * index);
            bits |= (band.bits as usize) << (4 * index);
        }
        [("BAND_UNITS", units), ("BAND_BITS", bits)]
    }

    /// Byte and bit shift of the element of (`token`, `channel`), a channel that is stored.
    pub fn element_position(&self, side: Side, token: usize, channel: usize) -> (usize, u32) {
        assert!(token < PAGE_TOKENS && channel < self.head_dim(), "({token}, {channel}) is outside a page");
        let (tile, token) = (token / self.tile_tokens(), token % self.tile_tokens());
        let (word, lane, byte, shift) = match (self.bits(), side) {
            (16, Side::Key) => {
                let (chunk, inner) = (channel / 32, channel % 32);
                (chunk * 4 + inner % 8 / 2, inner / 8 * 8 + token, inner % 2 * 2, 0)
            }
            (16, Side::Value) => (channel / 32 * 4 + token / 2, channel % 32, token % 2 * 2, 0),
            (8, Side::Key) => {
                let (step, inner) = (channel / 16, channel % 16);
                let word = token / 8 * (self.head_dim() / 16) + step;
                (word, token % 8 * 4 + inner / 4, inner % 4, 0)
            }
            (_, Side::Key) if self.bands().is_some() => {
                let (eight, row) = self.key_row(token);
                let flat = self.key_bit(eight, channel / UNIT);
                (flat / 8, row * 4 + channel % UNIT / 4, channel % 4, (flat % 8) as u32)
            }
            (8, Side::Value) => (channel / 8, channel % 8 * 4 + token % 8 / 2, token % 2 * 2 + token / 8, 0),
            (bits, Side::Key) => {
                let (eight, row) = self.key_row(token);
                let (step, inner) = (channel / 32, channel % 32);
                let flat = eight * (self.head_dim() / 32) + step;
                let (word, half) = (flat * bits / 4, flat % (4 / bits));
                (word, row * 4 + inner % 16 / 4, inner % 4, code_shift(bits, half, inner / 16))
            }
            (bits, Side::Value) => {
                let (lane_token, column) = self.lane_token(token);
                let (tile, half) = (channel / 8, channel / 8 % (4 / bits));
                let word = tile * bits / 4 * (self.tile_tokens() / 32) + lane_token / 8;
                let shift = code_shift(bits, half, lane_token % 8 / 4);
                (word, channel % 8 * 4 + column, lane_token % 4, shift)
            }
        };
        let start = if side == Side::Key { 0 } else { self.key_bytes() };
        // Loads of four words of each lane, then perhaps one of two: no other side has a number of words that is not a multiple
        // of four.
        let whole = self.key_bytes() / 512 * 4;
        let place = if side == Side::Key && word >= whole {
            whole * 128 + lane * 8 + (word - whole) * 4
        } else {
            word / 4 * 512 + lane * 16 + word % 4 * 4
        };
        (tile * self.tile_bytes() + start + place + byte, shift)
    }

    /// Banded keys: the first bit of sixteen channels among all bits of a byte of a lane's words.
    fn band_bit(&self, unit: usize) -> usize {
        (0..unit).map(|unit| self.element_bits(Side::Key, unit * UNIT)).sum()
    }

    /// Banded keys: where the code of a unit of the lane's token `eight` begins, among all bits of a byte of its words. Where the
    /// bits of a token are no multiple of four, codes would cross bytes, so a unit of all tokens comes before the next one.
    fn key_bit(&self, eight: usize, unit: usize) -> usize {
        let (token_bits, bit) = (self.band_bit(self.head_dim() / UNIT), self.band_bit(unit));
        if token_bits.is_multiple_of(4) {
            eight * token_bits + bit
        } else {
            self.tile_tokens() / 8 * bit + eight * self.element_bits(Side::Key, unit * UNIT)
        }
    }

    /// How many times too large a code of banded keys is where the decode kernel multiplies it: it is taken out of its byte by a
    /// mask, and shifted by whole fours of bits at most.
    pub fn code_factor(&self, channel: usize) -> u32 {
        let token_bits = self.band_bit(self.head_dim() / UNIT);
        if token_bits.is_multiple_of(8) { 1 << (self.band_bit(channel / UNIT) % 4) } else { 1 }
    }

    /// Codes of values: a lane holds a run of the tokens of a tile. Which of them, and which lane of four.
    fn lane_token(&self, token: usize) -> (usize, usize) {
        let run = self.tile_tokens() / 4;
        (token % run, token / run)
    }

    /// Codes of keys: which eight tokens of a tile, and which row of them. Two rows of two eights are four neighbours of a
    /// run, because the kernel turns such four weights from rows into bytes of one operand.
    fn key_row(&self, token: usize) -> (usize, usize) {
        let (lane_token, column) = self.lane_token(token);
        (lane_token / 4 * 2 + lane_token % 2, 2 * column + lane_token % 4 / 2)
    }

    /// Byte of the 16-bit scale of a token and group; an offset, where there is one, follows it.
    pub fn scale_position(&self, side: Side, token: usize, group: usize) -> usize {
        assert!(
            token < PAGE_TOKENS && group < self.groups(),
            "token {token}, group {group} is outside a page"
        );
        let (tile, token) = (token / self.tile_tokens(), token % self.tile_tokens());
        let side = if side == Side::Key { 0 } else { self.side_scale_bytes() };
        let inside = if self.bits() == 8 {
            token * 2
        } else {
            let (eight, row) = self.key_row(token);
            group * self.tile_tokens() * 4 + eight / 4 * 128 + row * 16 + eight % 4 * 4
        };
        tile * self.tile_bytes() + self.key_bytes() + self.value_bytes() + side + inside
    }

    /// Byte of the 8-bit scale of a token's key in a band: the four of a token lie side by side, where the scale and offset
    /// of 2-bit keys would lie.
    pub fn band_scale_position(&self, token: usize, band: usize) -> usize {
        assert!(self.bands().is_some() && band < BANDS, "band {band} of a page");
        self.scale_position(Side::Key, token, 0) + band
    }

    /// A page of the CPU in the order of the device.
    pub fn from_cpu(&self, cpu: &[u8]) -> Result<Vec<u8>, CudaError> {
        self.check(cpu)?;
        let mut page = vec![0; self.page_bytes()];
        match self.layout {
            PageLayout::Bf16(layout) => self.copy_bf16(&layout, cpu, &mut page, true),
            PageLayout::Codes(layout) => self.copy_codes(&layout, cpu, &mut page, true),
            PageLayout::Fp8(layout) => self.copy_fp8(&layout, cpu, &mut page, true),
            PageLayout::Banded(layout) => self.copy_banded(&layout, cpu, &mut page, true),
        }
        Ok(page)
    }

    /// A page of the device in the order of the CPU.
    pub fn to_cpu(&self, page: &[u8]) -> Result<Vec<u8>, CudaError> {
        self.check(page)?;
        let mut cpu = vec![0; self.page_bytes()];
        match self.layout {
            PageLayout::Bf16(layout) => self.copy_bf16(&layout, page, &mut cpu, false),
            PageLayout::Codes(layout) => self.copy_codes(&layout, page, &mut cpu, false),
            PageLayout::Fp8(layout) => self.copy_fp8(&layout, page, &mut cpu, false),
            PageLayout::Banded(layout) => self.copy_banded(&layout, page, &mut cpu, false),
        }
        Ok(cpu)
    }

    /// Writes the key and value of one token to a bf16 page of the device.
    pub fn write_bf16(&self, page: &mut [u8], token: usize, key: &[f32], value: &[f32]) {
        assert!(self.layout.is_bf16(), "a page of codes is written as a whole");
        for (side, row) in [(Side::Key, key), (Side::Value, value)] {
            for (channel, &x) in row.iter().enumerate() {
                let at = self.element_position(side, token, channel).0;
                page[at..at + 2].copy_from_slice(&half::bf16::from_f32(x).to_le_bytes());
            }
        }
    }

    fn copy_bf16(&self, layout: &Bf16Layout, from: &[u8], to: &mut [u8], to_device: bool) {
        for side in [Side::Key, Side::Value] {
            for (token, channel) in (0..PAGE_TOKENS).flat_map(|t| (0..self.head_dim()).map(move |c| (t, c))) {
                let cpu = 2 * layout.index(side, token, channel);
                let device = self.element_position(side, token, channel).0;
                let (read, write) = ordered(cpu, device, to_device);
                to[write..write + 2].copy_from_slice(&from[read..read + 2]);
            }
        }
    }

    fn copy_codes(&self, layout: &CodeLayout, from: &[u8], to: &mut [u8], to_device: bool) {
        let mask = layout.largest_code();
        for side in [Side::Key, Side::Value] {
            for token in 0..PAGE_TOKENS {
                for channel in 0..self.head_dim() {
                    let cpu = layout.code_position(side, token, channel);
                    let device = self.element_position(side, token, channel);
                    let (read, write) = ordered(cpu, device, to_device);
                    to[write.0] |= (from[read.0] >> read.1 & mask) << write.1;
                }
                for group in 0..self.groups() {
                    let cpu = layout.scale_position(side, token, group);
                    let device = self.scale_position(side, token, group);
                    // On the CPU the offsets of all tokens follow the scales of all tokens.
                    for (cpu, device) in [(cpu, device), (cpu + 2 * PAGE_TOKENS, device + 2)] {
                        let (read, write) = ordered(cpu, device, to_device);
                        to[write..write + 2].copy_from_slice(&from[read..read + 2]);
                    }
                }
            }
        }
    }

    fn copy_fp8(&self, layout: &Fp8Layout, from: &[u8], to: &mut [u8], to_device: bool) {
        for side in [Side::Key, Side::Value] {
            for token in 0..PAGE_TOKENS {
                for channel in 0..self.head_dim() {
                    let cpu = layout.position(side, token, channel);
                    let device = self.element_position(side, token, channel).0;
                    let (read, write) = ordered(cpu, device, to_device);
                    to[write] = from[read];
                }
                let (cpu, device) = (layout.scale_position(side, token), self.scale_position(side, token, 0));
                let (read, write) = ordered(cpu, device, to_device);
                to[write..write + 2].copy_from_slice(&from[read..read + 2]);
            }
        }
    }

    fn copy_banded(&self, layout: &BandLayout, from: &[u8], to: &mut [u8], to_device: bool) {
        for token in 0..PAGE_TOKENS {
            for (side, channel) in [Side::Key, Side::Value]
                .into_iter()
                .flat_map(|side| (0..self.head_dim()).map(move |channel| (side, channel)))
                .filter(|&(side, channel)| self.element_bits(side, channel) > 0)
            {
                let mask = (1 << self.element_bits(side, channel)) - 1;
                let cpu = layout.code_position(side, token, channel);
                let (read, write) = ordered(cpu, self.element_position(side, token, channel), to_device);
                to[write.0] |= (from[read.0] >> read.1 & mask) << write.1;
            }
            for band in 0..BANDS {
                let cpu = layout.key_scales() + band * PAGE_TOKENS + token;
                let (read, write) = ordered(cpu, self.band_scale_position(token, band), to_device);
                to[write] = from[read];
            }
            let (cpu, device) =
                (layout.value_scales() + 2 * token, self.scale_position(Side::Value, token, 0));
            for (cpu, device) in [(cpu, device), (cpu + 2 * PAGE_TOKENS, device + 2)] {
                let (read, write) = ordered(cpu, device, to_device);
                to[write..write + 2].copy_from_slice(&from[read..read + 2]);
            }
        }
    }

    /// Whether scales are bf16; f16 otherwise.
    pub fn bf16_scales(&self) -> bool {
        matches!(self.layout, PageLayout::Codes(layout) if layout.scale_type() == ScaleType::Bf16)
    }

    fn check(&self, page: &[u8]) -> Result<(), CudaError> {
        if page.len() != self.page_bytes() {
            return Err(CudaError::Shape {
                what: "bytes of a page",
                expected: self.page_bytes(),
                got: page.len(),
            });
        }
        Ok(())
    }
}

/// Orders the places of one number on the CPU and on the device: first the one to read, then the one to write.
fn ordered<T>(cpu: T, device: T, to_device: bool) -> (T, T) {
    if to_device { (cpu, device) } else { (device, cpu) }
}

/// Where a code lies in its byte: 2-bit codes of two steps lie side by side, the second part of a step above both.
fn code_shift(bits: usize, half: usize, part: usize) -> u32 {
    if bits == 4 { 4 * part as u32 } else { 2 * (half + 2 * part) as u32 }
}

#[cfg(test)]
#[path = "page_order_tests.rs"]
mod tests;
