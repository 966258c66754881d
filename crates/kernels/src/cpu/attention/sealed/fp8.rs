//! 8-bit floats: a page is widened to bf16, which holds every E4M3 number, and multiplied as bf16 pages are.
//!
//! Elements lie in the order of bf16 pages already. The scales of tokens act on logits and on weights. Numbers are
//! widened to 1/256 of what they stand for, and the scales make up for it: exponents then differ by 112, whose low
//! bits are zero, and no addition is needed to move them.

use oscar_codec::Fp8Layout;
use oscar_codec::{PAGE_TOKENS, ScaleType};

use super::scalar;
use super::scales::Widen;
use super::schedule::{WorkItem, schedule};
use crate::cpu::aligned::AlignedScratch;
#[cfg(target_arch = "x86_64")]
use crate::cpu::attention::amx::{Page, Tiled, TokenScales};
use crate::cpu::attention::floats::{NOTHING, Product, ROWS, SoftmaxRows};
use crate::cpu::attention::scratch::{AttentionScratch, WidePageScratch};
use crate::cpu::attention::state::SoftmaxState;
#[cfg(target_arch = "x86_64")]
use crate::cpu::attention::state::TILES_FROM;
use crate::cpu::attention::work::{Span, Work};
use crate::cpu::isa::Isa;
use crate::cpu::simd::{Kernel, Simd, Vector};

/// Attends all rows to all pages.
pub(super) fn attend(
    simd: Simd,
    layout: &Fp8Layout,
    work: &Work<'_, u8>,
    scratch: &mut AttentionScratch,
    state: &mut SoftmaxState,
) {
    if simd.isa() == Isa::Scalar {
        let decode = |page: &[u8], side, token, row: &mut [f32]| layout.decode_token(page, side, token, row);
        return scalar::attend(work, decode, state);
    }
    #[cfg(target_arch = "x86_64")]
    if simd.isa() == Isa::Amx
        && work.spans.len() >= TILES_FROM
        && work.d == layout.padded_dim()
        && work.d <= 256
    {
        return attend_tiled(simd, work, scratch, state);
    }
    let mut attention = Fp8Attention::new(simd, layout, work, &mut scratch.wide);
    let scores = scratch.scores.at_least(ROWS * PAGE_TOKENS);
    let items = schedule(work, 1, ROWS);
    for (n, item) in items.iter().enumerate() {
        if n == 0 || items[n - 1].index != item.index {
            // The next page, if the rows are one group; else this one, which costs little.
            let next = items.get(n + 1).map_or(&[][..], |next| next.page);
            attention.page.widen(simd, item.page, next);
        }
        let scores = &mut scores[..item.rows.len() * PAGE_TOKENS];
        attention.attend(item, work.spans, scores, state);
    }
}

/// [`attend`] with tiles, for heads that are not padded.
#[cfg(target_arch = "x86_64")]
fn attend_tiled(simd: Simd, work: &Work<'_, u8>, scratch: &mut AttentionScratch, state: &mut SoftmaxState) {
    let AttentionScratch { tiles, scores, wide, .. } = scratch;
    let mut wide = WidePage::new(work.d, &mut wide.page, &mut wide.scales);
    let mut tiled = Tiled::new(work.q, work.spans, work.d, tiles, scores);
    let mut pages = work.visible_pages().peekable();
    while let Some((page, start)) = pages.next() {
        wide.widen(simd, page, pages.peek().map_or(&[], |(page, _)| page));
        let page = Page {
            keys: wide.keys,
            values: wide.values,
            next_keys: wide.keys,
            next_values: wide.values,
            start,
            scales: Some(TokenScales::of(wide.scales)),
            offsets: None,
        };
        tiled.attend(&page, state);
    }
}

/// A page widened to bf16, its scales apart.
struct WidePage<'a> {
    keys: &'a mut [u16],
    values: &'a mut [u16],
    /// Scales of the keys, then of the values.
    scales: &'a mut [f32; 2 * PAGE_TOKENS],
}

impl<'a> WidePage<'a> {
    fn new(padded: usize, page: &'a mut AlignedScratch, scales: &'a mut AlignedScratch) -> WidePage<'a> {
        let side = PAGE_TOKENS * padded;
        let (keys, values) = page.at_least(2 * side).split_at_mut(side);
        let scales = scales.at_least(2 * PAGE_TOKENS).first_chunk_mut().expect("two scales per token");
        WidePage { keys, values, scales }
    }

    /// Widens another page; `next` will be read after it.
    fn widen(&mut self, simd: Simd, page: &[u8], next: &[u8]) {
        let side = self.keys.len();
        let (next_keys, next_values) = next.split_at(side.min(next.len()));
        simd.run(ToBf16 { bytes: &page[..side], wide: self.keys, ahead: next_keys });
        simd.run(ToBf16 { bytes: &page[side..2 * side], wide: self.values, ahead: next_values });
        simd.run(Widen { stored: &page[2 * side..], scale_type: ScaleType::F16, out: &mut *self.scales });
        self.scales.iter_mut().for_each(|scale| *scale *= UNIT);
    }
}

/// The queries of a call, and the page that is widened.
struct Fp8Attention<'a> {
    simd: Simd,
    d: usize,
    padded: usize,
    /// Rows of padded channels.
    queries: &'a [f32],
    page: WidePage<'a>,
    /// Values summed over the page.
    sums: &'a mut [f32],
}

impl<'a> Fp8Attention<'a> {
    fn new(simd: Simd, layout: &Fp8Layout, work: &Work<'a, u8>, scratch: &'a mut WidePageScratch) -> Self {
        let (d, padded) = (work.d, layout.padded_dim());
        let queries = scratch.queries.at_least::<f32>(work.spans.len() * padded);
        for (padded, q) in queries.chunks_exact_mut(padded).zip(work.q.chunks_exact(d)) {
            padded[..d].copy_from_slice(q);
            padded[d..].fill(0.0);
        }
        Fp8Attention {
            simd,
            d,
            padded,
            queries,
            page: WidePage::new(padded, &mut scratch.page, &mut scratch.scales),
            sums: scratch.sums.at_least(ROWS * padded),
        }
    }
}

impl Fp8Attention<'_> {
    fn attend(&mut self, item: &WorkItem<'_>, spans: &[Span], scores: &mut [f32], state: &mut SoftmaxState) {
        let (rows, start) = (item.rows.clone(), item.start);
        let (count, padded, d) = (rows.len(), self.padded, self.d);
        let simd = self.simd;
        let values = &mut state.values[rows.start * d..rows.end * d];
        let queries = &self.queries[rows.start * padded..rows.end * padded];
        let sums = &mut self.sums[..count * padded];
        scores.fill(0.0);
        sums.fill(0.0);
        simd.run(Product {
            left: queries,
            left_stride: padded,
            rows: count,
            right: self.page.keys,
            pairs: padded / 2,
            width: PAGE_TOKENS,
            out: scores,
            ahead: NOTHING,
        });
        scale(scores, &self.page.scales[..PAGE_TOKENS]);
        simd.run(SoftmaxRows {
            scores,
            spans: &spans[rows.clone()],
            start,
            max: &mut state.max[rows.clone()],
            sum: &mut state.sum[rows],
            values,
            d,
        });
        scale(scores, &self.page.scales[PAGE_TOKENS..]);
        simd.run(Product {
            left: scores,
            left_stride: PAGE_TOKENS,
            rows: count,
            right: self.page.values,
            pairs: PAGE_TOKENS / 2,
            width: padded,
            out: sums,
            ahead: NOTHING,
        });
        for (values, sums) in values.chunks_exact_mut(d).zip(sums.chunks_exact(padded)) {
            values.iter_mut().zip(sums).for_each(|(value, sum)| *value += sum);
        }
    }
}

/// Multiplies each row with one number per token.
fn scale(rows: &mut [f32], scales: &[f32]) {
    for row in rows.chunks_exact_mut(PAGE_TOKENS) {
        row.iter_mut().zip(scales).for_each(|(value, scale)| *value *= scale);
    }
}

/// What a widened number is to be multiplied with.
const UNIT: f32 = 256.0;

/// E4M3 bytes to bf16 in units of [`UNIT`], exactly. The seven numbers below the smallest exponent are multiples of
/// 2⁻⁹. Bytes that stand for NaN, which no page has, become 480.
struct ToBf16<'a> {
    bytes: &'a [u8],
    wide: &'a mut [u16],
    /// The memory that will be read later, to be prefetched.
    ahead: &'a [u8],
}

impl Kernel for ToBf16<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let ToBf16 { bytes, wide, ahead } = self;
        #[cfg(target_arch = "x86_64")]
        if V::WIDTH == 16 {
            // SAFETY: the caller promises the instructions of a register of 16 numbers.
            return unsafe { avx512::widen(bytes, wide, ahead) };
        }
        let _ = ahead;
        for (byte, wide) in bytes.iter().zip(wide) {
            let byte = u32::from(*byte);
            let magnitude = byte & 0x7f;
            let normal = magnitude << 4 | 112 << 7;
            let below = (magnitude as i32 as f32 * (0.001_953_125 / UNIT)).to_bits() >> 16;
            let bits = if magnitude < 8 { below } else { normal };
            *wide = (bits | (byte & 0x80) << 8) as u16;
        }
    }
}

/// [`ToBf16`] with AVX-512.
#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::*;

    /// The bf16 numbers n·2⁻¹⁷ for n = 0..8, four times.
    static BELOW: [u16; 32] = {
        let below = [0, 0x3700, 0x3780, 0x37c0, 0x3800, 0x3820, 0x3840, 0x3860];
        let mut table = [0; 32];
        let mut i = 0;
        while i < 32 {
            table[i] = below[i % 8];
            i += 1;
        }
        table
    };

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) fn widen(bytes: &[u8], wide: &mut [u16], ahead: &[u8]) {
        assert!(bytes.len() == wide.len() && bytes.len().is_multiple_of(32));
        // SAFETY: the table has 64 bytes.
        let table = unsafe { _mm512_loadu_si512(BELOW.as_ptr().cast()) };
        let (kept, exponent) = (_mm512_set1_epi16(0x87f0_u16 as i16), _mm512_set1_epi16(0x78));
        let (moved, sign) = (_mm512_set1_epi16(112 << 7), _mm512_set1_epi16(i16::MIN));
        let mut at = 0;
        while at < bytes.len() {
            // SAFETY: 32 elements of each, see the lengths above. Prefetching an address is harmless whatever it is.
            unsafe {
                if at % 64 == 0 && at < ahead.len() {
                    _mm_prefetch::<_MM_HINT_T0>(ahead.as_ptr().add(at).cast());
                }
                let words = _mm512_cvtepi8_epi16(_mm256_loadu_si256(bytes.as_ptr().add(at).cast()));
                let shifted = _mm512_slli_epi16::<4>(words);
                // shifted & kept | moved
                let normal = _mm512_ternarylogic_epi32::<0b1110_1010>(shifted, kept, moved);
                let below = _mm512_testn_epi16_mask(words, exponent);
                let number = _mm512_mask_permutexvar_epi16(normal, below, words, table);
                // number | shifted & sign
                let number = _mm512_ternarylogic_epi32::<0b1111_1000>(number, shifted, sign);
                _mm512_storeu_si512(wide.as_mut_ptr().add(at).cast(), number);
            }
            at += 32;
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use oscar_codec::fp8::e4m3_to_f32;

    use super::*;

    #[test]
    fn every_byte_widens_exactly() {
        let bytes: Vec<u8> = (0..=255).collect();
        let check = |name: &str, widen: &dyn Fn(&[u8], &mut [u16])| {
            let mut wide = vec![0; bytes.len()];
            widen(&bytes, &mut wide);
            for (byte, wide) in bytes.iter().zip(wide) {
                let (expected, got) = (e4m3_to_f32(*byte), bf16::from_bits(wide).to_f32() * UNIT);
                let expected = if expected.is_nan() {
                    480_f32.copysign(if byte & 0x80 == 0 { 1.0 } else { -1.0 })
                } else {
                    expected
                };
                assert_eq!(got.to_bits(), expected.to_bits(), "{name} {byte:#x}: {got} for {expected}");
            }
        };
        for isa in Isa::available() {
            let simd = Simd::new(isa);
            check(&isa.to_string(), &|bytes, wide| simd.run(ToBf16 { bytes, wide, ahead: &[] }));
        }
    }
}
