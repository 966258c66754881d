//! 2-bit and 4-bit pages on AMX for many rows, as in a prefill over a sealed prefix: codes are widened to bf16, which
//! holds them exactly, and multiplied in tiles as the pages of [`crate::cpu::attention::amx`] are.
//!
//! A page is widened once for all rows of a call. Scales and offsets stay apart: they act on logits and on weights, so
//! nothing is rounded that the integer products of few rows keep. A decode step has too few rows: widening would take
//! longer than the products, and tiles lower the clock of everything that runs beside them.

use std::arch::x86_64::*;

use oscar_codec::PAGE_TOKENS;

use super::engine::{Shape, Words};
use super::scales::Widen;
use super::schedule::PREFILL_ROWS;
use crate::cpu::attention::amx::{Page, RowOffsets, Tiled, TokenScales};
use crate::cpu::attention::scratch::{AttentionScratch, WidePageScratch};
use crate::cpu::attention::state::SoftmaxState;
use crate::cpu::attention::work::Work;
use crate::cpu::simd::amx::TILE_ROWS;
use crate::cpu::simd::{Simd, prefetch};

/// Whether the rows and pages of a call are for [`attend`]: many rows, and heads that fill their tiles.
pub(super) fn takes(shape: &Shape, work: &Work<'_, u8>) -> bool {
    let d = work.d;
    work.spans.len() >= PREFILL_ROWS
        && shape.groups == 1
        && !shape.has_bands()
        && shape.padded == d
        && (32..=256).contains(&d)
}

/// Attends all rows of one head to all pages. AMX must be available, and [`takes`] true.
pub(super) fn attend(
    simd: Simd,
    shape: &Shape,
    work: &Work<'_, u8>,
    scratch: &mut AttentionScratch,
    state: &mut SoftmaxState,
) {
    let (d, rows) = (work.d, work.spans.len());
    let AttentionScratch { tiles, scores, wide, .. } = scratch;
    let WidePageScratch { queries: totals, page: wide, scales, sums } = wide;
    let padded = rows.next_multiple_of(TILE_ROWS);
    let (totals, sums) = (totals.at_least::<f32>(padded), sums.at_least::<f32>(padded));
    totals.fill(0.0);
    sums.fill(0.0);
    for (total, q) in totals.iter_mut().zip(work.q.chunks_exact(d)) {
        *total = q.iter().copied().map(f64::from).sum::<f64>() as f32;
    }
    let mut tiled =
        Tiled::new(work.q, work.spans, d, tiles, scores).with_offsets(RowOffsets { totals, sums });
    let (keys, values) = wide.at_least::<u16>(2 * PAGE_TOKENS * d).split_at_mut(PAGE_TOKENS * d);
    let scales = scales.at_least::<f32>(shape.scale_counts().iter().sum());
    let mut pages = work.visible_pages().peekable();
    while let Some((page, start)) = pages.next() {
        if let Some((next, _)) = pages.peek() {
            (0..next.len()).step_by(64).for_each(|line| prefetch(next.as_ptr().wrapping_add(line)));
        }
        // SAFETY: AMX implies AVX-512.
        unsafe {
            widen(shape.bits, shape.key_words(page), keys);
            widen(shape.bits, shape.value_words(page), values);
        }
        let (of_keys, of_values) = scales.split_at_mut(shape.scale_counts()[0]);
        for (stored, out) in [(shape.key_scales(page), of_keys), (shape.value_scales(page), of_values)] {
            simd.run(Widen { stored, scale_type: shape.scale_type, out });
        }
        let [key_scales, key_offsets, value_scales, value_offsets] = quarters(scales);
        let scales = TokenScales { keys: key_scales, values: value_scales };
        let offsets = TokenScales { keys: key_offsets, values: value_offsets };
        let (next_keys, next_values) = (&*keys, &*values);
        let page = Page {
            keys,
            values,
            next_keys,
            next_values,
            start,
            scales: Some(scales),
            offsets: Some(offsets),
        };
        tiled.attend(&page, state);
    }
    tiled.subtract_offsets(state);
}

/// Scales of keys, offsets of keys, scales of values, offsets of values.
fn quarters(scales: &[f32]) -> [&[f32; PAGE_TOKENS]; 4] {
    std::array::from_fn(|n| scales[n * PAGE_TOKENS..].first_chunk().expect("four numbers per token"))
}

/// The integers 0 to 15 in bf16, twice.
static INTEGERS: [u16; 32] = {
    let mut table = [0; 32];
    let mut i = 0;
    while i < 32 {
        table[i] = (((i % 16) as f32).to_bits() >> 16) as u16;
        i += 1;
    }
    table
};

/// Codes of `bits` bits to bf16 in the order of a bf16 page, `[pairs][width][2]`.
///
/// # Safety
/// The CPU has AVX-512 F and BW.
unsafe fn widen(bits: u32, words: Words<'_>, wide: &mut [u16]) {
    // SAFETY: the caller's promise.
    unsafe {
        match bits {
            2 => widen_bits::<2>(words, wide),
            _ => widen_bits::<4>(words, wide),
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw")]
fn widen_bits<const BITS: u32>(words: Words<'_>, wide: &mut [u16]) {
    /// Words of a register.
    const LANES: usize = 16;
    /// The upper half of each word of a register.
    const UPPER: u32 = 0xaaaa_aaaa;
    let Words { bytes, width } = words;
    let (blocks, quads) = (bytes.len() / (4 * width), 8 / BITS as usize);
    assert!(bytes.len() == 4 * blocks * width && width.is_multiple_of(LANES));
    assert!(wide.len() == 4 * blocks * quads * width);
    // SAFETY: the table has 64 bytes.
    let integers = unsafe { _mm512_loadu_si512(INTEGERS.as_ptr().cast()) };
    let mask = _mm512_set1_epi8((1 << BITS) - 1);
    for block in 0..blocks {
        for column in (0..width).step_by(LANES) {
            // SAFETY: 16 words of a block, and 16 pairs of two rows of pairs for each quad, see the lengths above.
            unsafe {
                let mut word = _mm512_loadu_si512(bytes.as_ptr().add(4 * (block * width + column)).cast());
                for quad in 0..quads {
                    // Four codes, a byte each. A table look-up takes the low bits of each half of a word as its index.
                    let codes = _mm512_and_si512(word, mask);
                    word = _mm512_srli_epi32::<BITS>(word);
                    let low = _mm512_mask_mov_epi16(codes, UPPER, _mm512_slli_epi32::<8>(codes));
                    let high = _mm512_mask_mov_epi16(
                        _mm512_srli_epi32::<16>(codes),
                        UPPER,
                        _mm512_srli_epi32::<8>(codes),
                    );
                    let pair = 2 * (block * quads + quad);
                    for (n, index) in [low, high].into_iter().enumerate() {
                        let to = wide.as_mut_ptr().add(2 * ((pair + n) * width + column));
                        _mm512_storeu_si512(to.cast(), _mm512_permutexvar_epi16(index, integers));
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use oscar_codec::{Bf16Layout, CodeLayout, Side};
    use oscar_random::Random;

    use super::*;
    use crate::cpu::isa::Isa;

    #[test]
    fn codes_become_the_elements_of_a_bf16_page() {
        if !Isa::Avx512.is_available() {
            return;
        }
        let mut random = Random::new(81);
        for (bits, d) in [(2, 32), (2, 64), (2, 128), (4, 64), (4, 96), (4, 256)] {
            let layout = CodeLayout::new(bits, d, 1).unwrap();
            let shape = Shape::new(&layout);
            let mut page = vec![0; layout.page_bytes()];
            let mut expected = vec![0.0; 2 * PAGE_TOKENS * d];
            for token in 0..PAGE_TOKENS {
                for side in [Side::Key, Side::Value] {
                    let most = f32::from(layout.largest_code()) + 1.0;
                    let codes: Vec<u8> =
                        (0..d).map(|_| ((random.signed() + 1.0) * 0.5 * most) as u8).collect();
                    layout.write_token(&mut page, side, token, &codes, &[(0, 0)]).unwrap();
                    for (channel, code) in codes.into_iter().enumerate() {
                        expected[Bf16Layout::new(d).index(side, token, channel)] = f32::from(code);
                    }
                }
            }
            let mut wide = vec![0xffff; 2 * PAGE_TOKENS * d];
            for (side, wide) in
                [Side::Key, Side::Value].into_iter().zip(wide.chunks_exact_mut(PAGE_TOKENS * d))
            {
                let words = match side {
                    Side::Key => shape.key_words(&page),
                    Side::Value => shape.value_words(&page),
                };
                // SAFETY: the instructions are there.
                unsafe { widen(bits, words, wide) };
            }
            let got: Vec<f32> = wide.iter().map(|&bits| bf16::from_bits(bits).to_f32()).collect();
            assert!(got == expected, "{bits} bits, {d} channels");
        }
    }
}
