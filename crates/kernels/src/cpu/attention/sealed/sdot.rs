//! NEON with the dot-product extension: `sdot` multiplies four codes of 4 tokens (or channels) with four bytes of a
//! query (or weights). Codes are small, so they are signed bytes as well.

use std::arch::aarch64::*;
use std::arch::asm;
use std::ops::Range;

use oscar_codec::{PAGE_TOKENS, ScaleType, Side};

use super::engine::{Engine, Left, Running, Shape, Sums, Weights, Words};
use super::fixed_point::{self, plain_steps};
use crate::cpu::attention::floats;
use crate::cpu::gemm::aligned::AlignedScratch;

/// Words of a register.
const LANES: usize = 4;

/// Registers side by side.
const REGISTERS: usize = 4;

/// Columns of a block.
const COLUMNS: usize = REGISTERS * LANES;

/// The engine.
pub(super) struct Sdot<'a> {
    /// `[ROWS][64]`.
    logits: &'a mut [f32],
    /// Scales and offsets of a page.
    numbers: &'a mut [f32],
}

/// Most rows of one product.
const ROWS: usize = 2;

impl<'a> Sdot<'a> {
    pub(super) fn new(shape: &Shape, scratch: &'a mut AlignedScratch) -> Self {
        let logits = ROWS * PAGE_TOKENS;
        let (logits, numbers) = scratch.at_least(logits + shape.numbers()).split_at_mut(logits);
        Sdot { logits, numbers }
    }
}

/// `sum + a · b` by fours.
///
/// # Safety
/// The CPU has the dot-product extension.
#[inline(always)]
unsafe fn sdot(mut sum: int32x4_t, a: uint8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: the caller promises the instruction; only registers are touched.
    unsafe {
        asm!(
            ".arch_extension dotprod",
            "sdot {sum:v}.4s, {a:v}.16b, {b:v}.16b",
            sum = inout(vreg) sum, a = in(vreg) a, b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sum
}

impl Engine for Sdot<'_> {
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
        match (shape.bits, left.rows) {
            (2, 1) => product::<2, 1>(left, words, inner, columns, sums),
            (2, 2) => product::<2, 2>(left, words, inner, columns, sums),
            (4, 1) => product::<4, 1>(left, words, inner, columns, sums),
            (4, 2) => product::<4, 2>(left, words, inner, columns, sums),
            _ => unreachable!("codes have 2 or 4 bits, products 1 or 2 rows"),
        }
    }

    plain_steps!("neon", &floats::NEON);
}

/// 16-bit numbers to `f32`. Unsafe like the other instruction sets' functions of this kind.
///
/// # Safety
/// None needed.
pub(super) unsafe fn numbers(stored: &[u8], scale_type: ScaleType, numbers: &mut [f32]) {
    assert!(stored.len() == 2 * numbers.len());
    let (pairs, _) = stored.as_chunks::<2>();
    for (stored, number) in pairs.iter().zip(numbers) {
        let bits = u32::from(u16::from_le_bytes(*stored));
        *number = match scale_type {
            // Exponents move by 112; multiplying gets the numbers below the smallest exponent right too.
            ScaleType::F16 => {
                let magnitude = f32::from_bits((bits & 0x7fff) << 13) * f32::from_bits((127 + 112) << 23);
                f32::from_bits(magnitude.to_bits() | (bits & 0x8000) << 16)
            }
            ScaleType::Bf16 => f32::from_bits(bits << 16),
        };
    }
}

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
        // SAFETY: the block covers columns `first..first + 16` of `R` rows, inside the lengths above; an engine
        // exists only where its instruction set does.
        unsafe {
            let right = words.bytes.as_ptr().add(4 * first);
            let sums = sums.as_mut_ptr().add(first);
            block::<BITS, R>(left.bytes.as_ptr(), left.stride, right, blocks.clone(), width, sums);
        }
    }
}

/// # Safety
/// The pointers reach `R` rows (left, sums) or `blocks` (right) of 16 columns; the CPU has the dot-product extension.
#[target_feature(enable = "neon")]
unsafe fn block<const BITS: u32, const R: usize>(
    left: *const i8,
    stride: usize,
    right: *const u8,
    blocks: Range<usize>,
    width: usize,
    sums: *mut i32,
) {
    let mask = vdupq_n_u8((1 << BITS) - 1);
    let quads = 8 / BITS as usize;
    let mut totals = [[[vdupq_n_s32(0); REGISTERS]; 2]; R];
    // SAFETY: the caller's promise.
    unsafe {
        for block in blocks {
            let mut words = [vdupq_n_u8(0); REGISTERS];
            for t in 0..REGISTERS {
                words[t] = vld1q_u8(right.add(4 * (block * width + t * LANES)));
            }
            for quad in 0..quads {
                let mut codes = [vdupq_n_u8(0); REGISTERS];
                for t in 0..REGISTERS {
                    codes[t] = vandq_u8(words[t], mask);
                    words[t] = match BITS {
                        2 => vshrq_n_u8::<2>(words[t]),
                        _ => vshrq_n_u8::<4>(words[t]),
                    };
                }
                for r in 0..R {
                    for part in 0..2 {
                        let left = left.add((2 * r + part) * stride + 4 * (block * quads + quad));
                        let left = vreinterpretq_s8_s32(vdupq_n_s32(left.cast::<i32>().read_unaligned()));
                        for t in 0..REGISTERS {
                            totals[r][part][t] = sdot(totals[r][part][t], codes[t], left);
                        }
                    }
                }
            }
        }
        for r in 0..R {
            for part in 0..2 {
                for t in 0..REGISTERS {
                    vst1q_s32(sums.add((2 * r + part) * width + t * LANES), totals[r][part][t]);
                }
            }
        }
    }
}
