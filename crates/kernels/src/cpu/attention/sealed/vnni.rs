//! AVX-512 VNNI: `vpdpbusd` multiplies four codes of 16 tokens (or channels) with four bytes of a query (or weights).

use std::arch::x86_64::*;
use std::ops::Range;

use oscar_codec::Side;

use super::engine::{Engine, Left, Running, Shape, Sums, Weights, Words};
use super::weigh;

/// Lanes of a register.
const LANES: usize = 16;

/// The engine.
pub(super) struct Vpdpbusd;

/// Most rows of one product.
const ROWS: usize = 8;

impl Engine for Vpdpbusd {
    const ROWS: usize = ROWS;

    #[inline(always)]
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
            match shape.bits {
                2 => product::<2>(left, words, inner, columns, sums),
                _ => product::<4>(left, words, inner, columns, sums),
            }
        }
    }

    #[inline(always)]
    fn weigh(&mut self, sums: &Sums<'_>, running: &mut Running<'_>, weights: &mut Weights<'_>) {
        // SAFETY: an engine exists only where its instruction set does.
        unsafe { weigh::weigh::<ROWS>(sums, running, weights) }
    }

    weigh::steps!();
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn product<const BITS: u32>(
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
    assert!(left.bytes.len() >= left.rows * 2 * left.stride && left.stride.is_multiple_of(4));
    assert!(sums.len() >= left.rows * 2 * width);
    assert!(columns.end <= width && columns.start.is_multiple_of(LANES) && columns.end.is_multiple_of(LANES));
    let mut first = columns.start;
    while first < columns.end {
        let registers = (columns.end - first) / LANES;
        let block = Block {
            left: left.bytes.as_ptr(),
            stride: left.stride,
            // SAFETY: `first < width`, so the offset is inside the first row of words.
            right: unsafe { words.bytes.as_ptr().add(4 * first) },
            blocks: blocks.clone(),
            width,
            // SAFETY: as above.
            sums: unsafe { sums.as_mut_ptr().add(first) },
        };
        // SAFETY: the block covers columns from `first` on, inside the lengths above. The number of rows and columns
        // side by side is what fits the registers and keeps enough sums in flight.
        first += LANES
            * unsafe {
                match (left.rows, registers) {
                    (1, 4..) => block.run::<BITS, 1, 4>(),
                    (1, 2..) => block.run::<BITS, 1, 2>(),
                    (1, _) => block.run::<BITS, 1, 1>(),
                    (2, 4..) => block.run::<BITS, 2, 4>(),
                    (2, 2..) => block.run::<BITS, 2, 2>(),
                    (2, _) => block.run::<BITS, 2, 1>(),
                    (3, 2..) => block.run::<BITS, 3, 2>(),
                    (3, _) => block.run::<BITS, 3, 1>(),
                    (4, 2..) => block.run::<BITS, 4, 2>(),
                    (4, _) => block.run::<BITS, 4, 1>(),
                    (5, 2..) => block.run::<BITS, 5, 2>(),
                    (5, _) => block.run::<BITS, 5, 1>(),
                    (6, 2..) => block.run::<BITS, 6, 2>(),
                    (6, _) => block.run::<BITS, 6, 1>(),
                    (7, _) => block.run::<BITS, 7, 1>(),
                    (8, _) => block.run::<BITS, 8, 1>(),
                    _ => unreachable!("products have 1 to 8 rows"),
                }
            };
    }
}

/// Some columns of a product.
struct Block {
    left: *const i8,
    stride: usize,
    right: *const u8,
    blocks: Range<usize>,
    width: usize,
    sums: *mut i32,
}

impl Block {
    /// Multiplies `R` rows with `16 * T` columns and returns `T`.
    ///
    /// # Safety
    /// The pointers reach `R` rows (left, sums) or `blocks` (right) of `16 * T` columns.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn run<const BITS: u32, const R: usize, const T: usize>(&self) -> usize {
        let mask = _mm512_set1_epi8((1 << BITS) - 1);
        let quads = 8 / BITS as usize;
        let mut sums = [[[_mm512_setzero_si512(); T]; 2]; R];
        // SAFETY: the caller's promise.
        unsafe {
            for block in self.blocks.clone() {
                let mut words = [_mm512_setzero_si512(); T];
                for t in 0..T {
                    words[t] =
                        _mm512_loadu_si512(self.right.add(4 * (block * self.width + t * LANES)).cast());
                }
                for quad in 0..quads {
                    let mut codes = [_mm512_setzero_si512(); T];
                    for t in 0..T {
                        codes[t] = _mm512_and_si512(words[t], mask);
                        words[t] = _mm512_srli_epi32::<BITS>(words[t]);
                    }
                    for r in 0..R {
                        for part in 0..2 {
                            let left =
                                self.left.add((2 * r + part) * self.stride + 4 * (block * quads + quad));
                            let left = _mm512_set1_epi32(left.cast::<i32>().read_unaligned());
                            for t in 0..T {
                                sums[r][part][t] = _mm512_dpbusd_epi32(sums[r][part][t], codes[t], left);
                            }
                        }
                    }
                }
            }
            for r in 0..R {
                for part in 0..2 {
                    for t in 0..T {
                        let target = self.sums.add((2 * r + part) * self.width + t * LANES);
                        _mm512_storeu_si512(target.cast(), sums[r][part][t]);
                    }
                }
            }
        }
        T
    }
}
