//! AVX2: `vpmaddubsw` multiplies codes with bytes of a query (or weights) and adds in pairs, to 16 bits.
//!
//! A pair is at most 2·3·128 with 2-bit and 2·15·128 with 4-bit codes, so 16 bits hold the sums of 32 or 8 of them;
//! then they are widened.

use std::arch::x86_64::*;
use std::ops::Range;

use oscar_codec::{PAGE_TOKENS, ScaleType, Side};

use super::engine::{Engine, Left, Running, Shape, Sums, Weights, Words};
use super::fixed_point::{self, plain_steps};
use crate::cpu::attention::floats;
use crate::cpu::gemm::aligned::AlignedScratch;

/// Words of a register.
const LANES: usize = 8;

/// Columns of a block: two registers.
const COLUMNS: usize = 2 * LANES;

/// The engine.
pub(super) struct Maddubs<'a> {
    /// `[ROWS][64]`.
    logits: &'a mut [f32],
    /// Scales and offsets of a page.
    numbers: &'a mut [f32],
}

/// Most rows of one product.
const ROWS: usize = 2;

impl<'a> Maddubs<'a> {
    pub(super) fn new(shape: &Shape, scratch: &'a mut AlignedScratch) -> Self {
        let logits = ROWS * PAGE_TOKENS;
        let (logits, numbers) = scratch.at_least(logits + shape.numbers()).split_at_mut(logits);
        Maddubs { logits, numbers }
    }
}

impl Engine for Maddubs<'_> {
    const ROWS: usize = ROWS;

    fn product(
        &mut self,
        shape: &Shape,
        side: Side,
        page: &[u8],
        left: &Left<'_>,
        inner: Range<usize>,
        columns: Range<usize>,
        sums: &mut [i32],
    ) {
        let words = Words::of(shape, side, page);
        // SAFETY: an engine exists only where its instruction set does.
        unsafe {
            match (shape.bits, left.rows) {
                (2, 1) => product::<2, 1>(left, words, inner, columns, sums),
                (2, 2) => product::<2, 2>(left, words, inner, columns, sums),
                (4, 1) => product::<4, 1>(left, words, inner, columns, sums),
                (4, 2) => product::<4, 2>(left, words, inner, columns, sums),
                _ => unreachable!("codes have 2 or 4 bits, products 1 or 2 rows"),
            }
        }
    }

    plain_steps!("avx2,fma", &floats::AVX2);
}

/// 16-bit numbers to `f32`.
#[target_feature(enable = "avx2,f16c")]
pub(super) fn numbers(stored: &[u8], scale_type: ScaleType, numbers: &mut [f32]) {
    assert!(stored.len() == 2 * numbers.len() && numbers.len().is_multiple_of(LANES));
    for (stored, numbers) in stored.chunks_exact(2 * LANES).zip(numbers.chunks_exact_mut(LANES)) {
        // SAFETY: the chunks have 16 bytes and 8 numbers.
        unsafe {
            let bits = _mm_loadu_si128(stored.as_ptr().cast());
            let wide = match scale_type {
                ScaleType::F16 => _mm256_cvtph_ps(bits),
                ScaleType::Bf16 => _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(bits))),
            };
            _mm256_storeu_ps(numbers.as_mut_ptr(), wide);
        }
    }
}

#[target_feature(enable = "avx2")]
fn product<const BITS: u32, const R: usize>(
    left: &Left<'_>,
    words: Words<'_>,
    inner: Range<usize>,
    columns: Range<usize>,
    sums: &mut [i32],
) {
    let codes = 32 / BITS as usize;
    let blocks = inner.start / codes..inner.end.div_ceil(codes);
    let width = words.width;
    assert!(words.bytes.len() >= blocks.end * width * 4 && left.stride >= blocks.end * codes);
    assert!(left.bytes.len() >= R * 2 * left.stride && sums.len() >= R * 2 * width);
    assert!(columns.end <= width && columns.len().is_multiple_of(COLUMNS));
    for first in columns.step_by(COLUMNS) {
        // SAFETY: the block covers columns `first..first + 16` of `R` rows, inside the lengths above.
        unsafe {
            let right = words.bytes.as_ptr().add(4 * first);
            let sums = sums.as_mut_ptr().add(first);
            block::<BITS, R>(left.bytes.as_ptr(), left.stride, right, blocks.clone(), width, sums);
        }
    }
}

/// # Safety
/// The pointers reach `R` rows (left, sums) or `blocks` (right) of 16 columns.
#[target_feature(enable = "avx2")]
unsafe fn block<const BITS: u32, const R: usize>(
    left: *const i8,
    stride: usize,
    right: *const u8,
    blocks: Range<usize>,
    width: usize,
    sums: *mut i32,
) {
    let mask = _mm256_set1_epi8((1 << BITS) - 1);
    let ones = _mm256_set1_epi16(1);
    let quads = 8 / BITS as usize;
    // Blocks whose pairs fit 16 bits together.
    let together = if BITS == 2 { 8 } else { 4 };
    let zero = _mm256_setzero_si256();
    let mut totals = [[[zero; 2]; 2]; R];
    let mut next = blocks.start;
    // SAFETY: the caller's promise.
    unsafe {
        while next < blocks.end {
            let end = (next + together).min(blocks.end);
            let mut pairs = [[[zero; 2]; 2]; R];
            for block in next..end {
                let mut words = [zero; 2];
                for t in 0..2 {
                    words[t] = _mm256_loadu_si256(right.add(4 * (block * width + t * LANES)).cast());
                }
                for quad in 0..quads {
                    let mut codes = [zero; 2];
                    for t in 0..2 {
                        codes[t] = _mm256_and_si256(words[t], mask);
                        words[t] = match BITS {
                            2 => _mm256_srli_epi32::<2>(words[t]),
                            _ => _mm256_srli_epi32::<4>(words[t]),
                        };
                    }
                    for r in 0..R {
                        for part in 0..2 {
                            let left = left.add((2 * r + part) * stride + 4 * (block * quads + quad));
                            let left = _mm256_set1_epi32(left.cast::<i32>().read_unaligned());
                            for t in 0..2 {
                                let products = _mm256_maddubs_epi16(codes[t], left);
                                pairs[r][part][t] = _mm256_add_epi16(pairs[r][part][t], products);
                            }
                        }
                    }
                }
            }
            for r in 0..R {
                for part in 0..2 {
                    for t in 0..2 {
                        let wide = _mm256_madd_epi16(pairs[r][part][t], ones);
                        totals[r][part][t] = _mm256_add_epi32(totals[r][part][t], wide);
                    }
                }
            }
            next = end;
        }
        for r in 0..R {
            for part in 0..2 {
                for t in 0..2 {
                    let target = sums.add((2 * r + part) * width + t * LANES);
                    _mm256_storeu_si256(target.cast(), totals[r][part][t]);
                }
            }
        }
    }
}
