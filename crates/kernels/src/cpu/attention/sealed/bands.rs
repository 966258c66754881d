//! Logits of keys in bands.
//!
//! Bands have scales of their own, so their integer sums cannot be added. They are joined to numbers, scaled and added while
//! they are still in registers: what is stored is one logit for each token, as with keys in one group, and not the sums of
//! every band.

use oscar_codec::PAGE_TOKENS;
use oscar_codec::layout::widths::BAND_STEP;

use super::band_places::{BandPlace, BandPlaces, QUAD};
use super::product::most_rows;
use crate::cpu::simd::{CodeWords, Kernel, Vector};

/// Channels of a band are a multiple of this many quads: half a word of 1-bit codes, one of 2-bit or two of 4-bit codes.
const QUADS: usize = BAND_STEP / QUAD;

/// Writes the logits of some rows of queries for all tokens of a page.
pub(super) struct BandLogits<'a> {
    pub(super) bands: &'a BandPlaces,
    pub(super) page: &'a [u8],
    /// Number of query rows to multiply.
    pub(super) rows: usize,
    /// `[quad of channels][row][high, low][4 channels]`, rows from the first of these on; each band has its own unit.
    pub(super) left: &'a [i8],
    /// `[band]`, `stride` apart: what a unit of each row's query stands for.
    pub(super) units: &'a [f32],
    /// What is added to the product of each row before it is scaled, in the same order: minus half the largest code times the
    /// sum of the channels.
    pub(super) offsets: &'a [f32],
    pub(super) stride: usize,
    /// What is added to all logits of each row.
    pub(super) starts: &'a [f32],
    /// `[rows][64 tokens]`.
    pub(super) logits: &'a mut [f32],
}

impl Kernel for BandLogits<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(mut self) {
        let BandLogits { bands, rows, stride, .. } = self;
        let numbers = bands.count().saturating_sub(1) * stride + rows;
        assert!(bands.count() > 0 && self.page.len() >= bands.page_bytes() && rows <= stride);
        assert!(self.left.len() >= ((bands.quads() - 1) * stride + rows) * 2 * QUAD);
        assert!(self.units.len().min(self.offsets.len()) >= numbers);
        assert!(self.logits.len() >= rows * PAGE_TOKENS && self.starts.len() >= rows);
        let mut first = 0;
        while first < rows {
            // SAFETY: the caller promises the instructions, and lengths are as promised, see above and `BandPlaces::new`.
            unsafe {
                // As many rows as leave room for their sums in registers.
                match ((rows - first).min(most_rows(V::WIDTH)), V::WIDTH) {
                    (1, _) => self.all_tokens::<V, 1, 4>(&mut first),
                    (2, 8) => self.all_tokens::<V, 2, 2>(&mut first),
                    (2, _) => self.all_tokens::<V, 2, 4>(&mut first),
                    (3, 16) => self.all_tokens::<V, 3, 2>(&mut first),
                    (4, 16) => self.all_tokens::<V, 4, 2>(&mut first),
                    (5, 16) => self.all_tokens::<V, 5, 2>(&mut first),
                    (6, 16) => self.all_tokens::<V, 6, 2>(&mut first),
                    (7, 16) => self.all_tokens::<V, 7, 1>(&mut first),
                    (8, 16) => self.all_tokens::<V, 8, 1>(&mut first),
                    (rows, _) => unreachable!("a product of {rows} rows"),
                }
            }
        }
    }
}

impl BandLogits<'_> {
    /// `R` rows from `first` on, which becomes the row after them, with `T` registers of tokens at once.
    ///
    /// # Safety
    /// The CPU has the instructions of `V`, there are so many rows, and lengths are as [`BandLogits::run`] checks them.
    #[inline(always)]
    unsafe fn all_tokens<V: Vector, const R: usize, const T: usize>(&mut self, first: &mut usize) {
        let row = *first;
        for token in (0..PAGE_TOKENS).step_by(T * V::WIDTH) {
            // SAFETY: addresses inside the page, the queries and the logits, by the caller's promise.
            unsafe {
                let mut logits = [[V::splat(0.0); T]; R];
                for r in 0..R {
                    logits[r] = [V::splat(*self.starts.as_ptr().add(row + r)); T];
                }
                for (index, place) in self.bands.iter().enumerate() {
                    let band = Band::new(self, index, place, row, token);
                    match place.bits {
                        1 => band.add::<V, 1, R, T>(&mut logits),
                        2 => band.add::<V, 2, R, T>(&mut logits),
                        _ => band.add::<V, 4, R, T>(&mut logits),
                    }
                }
                for r in 0..R {
                    for t in 0..T {
                        let at = (row + r) * PAGE_TOKENS + token + t * V::WIDTH;
                        logits[r][t].store(self.logits.as_mut_ptr().add(at));
                    }
                }
            }
        }
        *first += R;
    }
}

/// What is added to the logits for a band, with addresses instead of slices.
struct Band {
    /// The words of the band's region.
    words: *const u8,
    /// Steps of 16 channels of the region: the first of the band, and the one after its last.
    steps: [usize; 2],
    /// One byte a token.
    scales: *const u8,
    /// The first quad of the band for the first row, and the bytes to the next quad.
    left: *const i8,
    quad_bytes: usize,
    /// A number for each row.
    units: *const f32,
    offsets: *const f32,
}

impl Band {
    /// A band for rows from `row` and tokens from `token` on.
    ///
    /// # Safety
    /// There is such a row and such a token, and lengths are as [`BandLogits::run`] checks them.
    #[inline(always)]
    unsafe fn new(keys: &BandLogits<'_>, index: usize, place: &BandPlace, row: usize, token: usize) -> Band {
        // SAFETY: inside the page, the queries and their numbers, by the caller's promise.
        unsafe {
            Band {
                words: keys.page.as_ptr().add(place.words + 4 * token),
                steps: [place.step, place.step + place.steps],
                scales: keys.page.as_ptr().add(place.scales + token),
                left: keys.left.as_ptr().add((place.quad * keys.stride + row) * 2 * QUAD),
                quad_bytes: keys.stride * 2 * QUAD,
                units: keys.units.as_ptr().add(index * keys.stride + row),
                offsets: keys.offsets.as_ptr().add(index * keys.stride + row),
            }
        }
    }

    /// Adds what the band has of the logits of `R` rows and `T` registers of tokens.
    ///
    /// # Safety
    /// The CPU has the instructions of `V`; the addresses reach all steps, rows and tokens.
    #[inline(always)]
    unsafe fn add<V: Vector, const BITS: u32, const R: usize, const T: usize>(
        &self,
        logits: &mut [[V; T]; R],
    ) {
        // Words of a step, and quads of each.
        let words_of_step = (BITS as usize / 2).max(1);
        let quads = QUADS / words_of_step;
        let words_before_widening = V::Codes::words_before_widening(BITS);
        let [mut next, last] = self.steps;
        // SAFETY: the caller's promise.
        unsafe {
            let mut sums = [[[V::Codes::zero(); T]; 2]; R];
            let mut left = self.left;
            while next < last {
                // A constant of the instruction set: where sums need no widening this is no loop.
                let end = match words_before_widening {
                    usize::MAX => last,
                    words => (next + words * 2 / BITS as usize).min(last),
                };
                // Not `map`: a function that is not inlined is compiled without the instructions.
                let mut partial = [[[V::Codes::begin(V::Codes::zero()); T]; 2]; R];
                for r in 0..R {
                    for part in 0..2 {
                        for t in 0..T {
                            partial[r][part][t] = V::Codes::begin(sums[r][part][t]);
                        }
                    }
                }
                for step in next..end {
                    for word in 0..words_of_step {
                        let at = if BITS == 1 { step / 2 } else { step * words_of_step + word };
                        let mut words = [V::Codes::splat(0); T];
                        for t in 0..T {
                            let word = self.words.add(4 * (at * PAGE_TOKENS + t * V::WIDTH));
                            words[t] = V::Codes::load(word);
                            if BITS == 1 && step % 2 == 1 {
                                words[t] = words[t].next_codes::<{ QUADS as u32 }>();
                            }
                        }
                        for _ in 0..quads {
                            let mut codes = [V::Codes::splat(0); T];
                            for t in 0..T {
                                codes[t] = words[t].low_codes::<BITS>();
                                words[t] = words[t].next_codes::<BITS>();
                            }
                            for r in 0..R {
                                for part in 0..2 {
                                    let bytes =
                                        left.add((2 * r + part) * QUAD).cast::<i32>().read_unaligned();
                                    let bytes = V::Codes::splat(bytes);
                                    for t in 0..T {
                                        partial[r][part][t] =
                                            V::Codes::add_products(partial[r][part][t], codes[t], bytes);
                                    }
                                }
                            }
                            left = left.wrapping_add(self.quad_bytes);
                        }
                    }
                }
                for r in 0..R {
                    for part in 0..2 {
                        for t in 0..T {
                            sums[r][part][t] = V::Codes::widen(sums[r][part][t], partial[r][part][t]);
                        }
                    }
                }
                next = end;
            }
            for t in 0..T {
                let scale = V::load_band_scales(self.scales.add(t * V::WIDTH));
                for r in 0..R {
                    let sum = V::Codes::join(sums[r][0][t], sums[r][1][t]);
                    let (unit, offset) = (V::splat(*self.units.add(r)), V::splat(*self.offsets.add(r)));
                    logits[r][t] = sum.multiply_add(unit, offset).multiply_add(scale, logits[r][t]);
                }
            }
        }
    }
}
