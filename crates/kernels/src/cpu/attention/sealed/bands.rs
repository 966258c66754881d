//! AVX-512: logits of keys in bands.
//!
//! Bands have scales of their own, so their integer sums cannot be added. They are joined to numbers, scaled and added while
//! they are still in registers: what is stored is one logit for each token, as with keys in one group, and not the sums of
//! every band.

use std::arch::x86_64::*;
use std::ops::Range;

use oscar_codec::PAGE_TOKENS;
use oscar_codec::layout::widths::BAND_STEP;

use super::band_places::QUAD;
use super::engine::{BandKeys, LANES};
use super::registers::load_band;

/// Channels of a band are a multiple of this many quads: half a word of 1-bit codes, one of 2-bit or two of 4-bit codes.
const QUADS: usize = BAND_STEP / QUAD;

/// What is added to the logits for a band, with addresses instead of slices.
struct Band {
    /// The words of the band's region.
    words: *const u8,
    /// Steps of 16 channels of the region.
    steps: Range<usize>,
    /// One byte a token.
    scales: *const u8,
    /// The first quad of the band for the first row, and the bytes to the next quad.
    left: *const u8,
    quad_bytes: usize,
    /// A number for each row.
    units: *const f32,
    offsets: *const f32,
}

/// Writes the logits of some rows for all tokens of a page, `[rows][64]`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")]
pub(super) fn band_logits(keys: &BandKeys<'_>, logits: &mut [f32]) {
    let BandKeys { bands, rows, .. } = *keys;
    let numbers = bands.count().saturating_sub(1) * keys.stride + rows;
    assert!(bands.count() > 0 && keys.page.len() >= bands.page_bytes() && rows <= keys.stride);
    assert!(keys.left.len() >= ((bands.quads() - 1) * keys.stride + rows) * 2 * QUAD);
    assert!(keys.units.len().min(keys.offsets.len()) >= numbers && logits.len() >= rows * PAGE_TOKENS);
    // SAFETY: all lengths are as promised, see above and `BandPlaces::new`.
    unsafe {
        match rows {
            1 => all_tokens::<1, 4>(keys, logits),
            2 => all_tokens::<2, 4>(keys, logits),
            3 => all_tokens::<3, 2>(keys, logits),
            4 => all_tokens::<4, 2>(keys, logits),
            5 => all_tokens::<5, 2>(keys, logits),
            6 => all_tokens::<6, 2>(keys, logits),
            7 => all_tokens::<7, 1>(keys, logits),
            8 => all_tokens::<8, 1>(keys, logits),
            rows => unreachable!("a product of {rows} rows"),
        }
    }
}

/// [`band_logits`] for `R` rows, with `T` registers of tokens at once.
///
/// # Safety
/// There are `R` rows, and lengths are as [`band_logits`] checks them.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")]
unsafe fn all_tokens<const R: usize, const T: usize>(keys: &BandKeys<'_>, logits: &mut [f32]) {
    let quad_bytes = keys.stride * 2 * QUAD;
    for first in (0..PAGE_TOKENS).step_by(T * LANES) {
        let mut page = [[_mm512_setzero_ps(); T]; R];
        for (index, place) in keys.bands.iter().enumerate() {
            // SAFETY: tokens from `first` on of words and scales of the page, a quad of a row and numbers of all rows, by the
            // caller's promise.
            unsafe {
                let band = Band {
                    words: keys.page.as_ptr().add(place.words + 4 * first),
                    steps: place.step..place.step + place.steps,
                    scales: keys.page.as_ptr().add(place.scales + first),
                    left: keys.left.as_ptr().add(place.quad * quad_bytes).cast(),
                    quad_bytes,
                    units: keys.units.as_ptr().add(index * keys.stride),
                    offsets: keys.offsets.as_ptr().add(index * keys.stride),
                };
                match place.bits {
                    1 => add_band::<1, R, T>(&band, &mut page),
                    2 => add_band::<2, R, T>(&band, &mut page),
                    _ => add_band::<4, R, T>(&band, &mut page),
                }
            }
        }
        for r in 0..R {
            for t in 0..T {
                // SAFETY: the caller promises room for the rows.
                unsafe {
                    _mm512_storeu_ps(
                        logits.as_mut_ptr().add(r * PAGE_TOKENS + first + t * LANES),
                        page[r][t],
                    );
                }
            }
        }
    }
}

/// Adds what a band has of the logits of `R` rows and `T` registers of tokens.
///
/// # Safety
/// The CPU has the instructions of [`band_logits`]; the addresses reach all steps, rows and tokens.
#[inline(always)]
unsafe fn add_band<const BITS: u32, const R: usize, const T: usize>(
    band: &Band,
    logits: &mut [[__m512; T]; R],
) {
    // Words of a step, and quads of each.
    let words_of_step = (BITS as usize / 2).max(1);
    let quads = QUADS / words_of_step;
    // SAFETY: the caller's promise.
    unsafe {
        let mask = _mm512_set1_epi8((1 << BITS) - 1);
        let mut sums = [[[_mm512_setzero_si512(); T]; 2]; R];
        let mut left = band.left;
        for step in band.steps.clone() {
            for word in 0..words_of_step {
                let at = if BITS == 1 { step / 2 } else { step * words_of_step + word };
                let mut words = [_mm512_setzero_si512(); T];
                for t in 0..T {
                    words[t] = _mm512_loadu_si512(band.words.add(4 * (at * PAGE_TOKENS + t * LANES)).cast());
                    if BITS == 1 && step % 2 == 1 {
                        words[t] = _mm512_srli_epi32::<{ QUADS as u32 }>(words[t]);
                    }
                }
                for _ in 0..quads {
                    let mut codes = [_mm512_setzero_si512(); T];
                    for t in 0..T {
                        codes[t] = _mm512_and_si512(words[t], mask);
                        words[t] = _mm512_srli_epi32::<BITS>(words[t]);
                    }
                    for r in 0..R {
                        for part in 0..2 {
                            let bytes = left.add((2 * r + part) * QUAD).cast::<i32>().read_unaligned();
                            let bytes = _mm512_set1_epi32(bytes);
                            for t in 0..T {
                                sums[r][part][t] = _mm512_dpbusd_epi32(sums[r][part][t], codes[t], bytes);
                            }
                        }
                    }
                    left = left.wrapping_add(band.quad_bytes);
                }
            }
        }
        for t in 0..T {
            let scale = load_band(band.scales.add(t * LANES));
            for r in 0..R {
                let sum = _mm512_add_epi32(_mm512_slli_epi32::<8>(sums[r][0][t]), sums[r][1][t]);
                let (unit, offset) =
                    (_mm512_set1_ps(*band.units.add(r)), _mm512_set1_ps(*band.offsets.add(r)));
                let product = _mm512_fmsub_ps(_mm512_cvtepi32_ps(sum), unit, offset);
                logits[r][t] = _mm512_fmadd_ps(product, scale, logits[r][t]);
            }
        }
    }
}
