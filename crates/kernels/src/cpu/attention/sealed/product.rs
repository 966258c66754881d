//! Integer products of bytes with packed codes.
//!
//! Both products have the same shape: bytes of queries (or weights) times codes in words `[blocks][width]`, where a word
//! holds the codes of one token (or channel) for 8, 16 or 32 channels (or tokens) in a row, and neighbouring words are
//! neighbouring tokens (or channels). Sums are exact.

use std::ops::Range;

use super::engine::{Left, Words};
use crate::cpu::simd::{CodeWords, Kernel, Vector};

/// Columns that are multiplied together: those of a product begin and end at multiples of this.
pub(super) const COLUMN_STEP: usize = 16;

/// `sums[row][part]` = bytes of a part of the row times codes, `[rows][high, low][width]`, for some columns.
pub(super) struct Product<'a> {
    /// Bits of a code: 1, 2 or 4.
    pub(super) bits: u32,
    pub(super) left: Left<'a>,
    pub(super) words: Words<'a>,
    /// Which bytes of the left side (channels of keys, tokens of values) may not be zero.
    pub(super) inner: Range<usize>,
    /// Tokens of keys, channels of values.
    pub(super) columns: Range<usize>,
    pub(super) sums: &'a mut [i32],
}

impl Kernel for Product<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        // SAFETY: passed on.
        unsafe {
            match self.bits {
                1 => multiply::<V::Codes, 1>(self),
                2 => multiply::<V::Codes, 2>(self),
                _ => multiply::<V::Codes, 4>(self),
            }
        }
    }
}

/// Most rows of a product on vectors of so many words.
pub(super) const fn most_rows(lanes: usize) -> usize {
    if lanes == 16 { 8 } else { 2 }
}

/// # Safety
/// The CPU has the instructions of `C`.
#[inline(always)]
unsafe fn multiply<C: CodeWords, const BITS: u32>(product: Product<'_>) {
    let Product { left, words, inner, columns, sums, .. } = product;
    let codes = 32 / BITS as usize;
    let blocks = inner.start / codes..inner.end.div_ceil(codes);
    let width = words.width;
    assert!(words.bytes.len() >= blocks.end * width * 4 && left.stride >= blocks.end * codes);
    assert!(left.bytes.len() >= left.rows * 2 * left.stride && left.stride.is_multiple_of(4));
    assert!(sums.len() >= left.rows * 2 * width && columns.end <= width);
    assert!(columns.start.is_multiple_of(COLUMN_STEP) && columns.end.is_multiple_of(COLUMN_STEP));
    // Without rows the loop below would not end, and with 16 lanes a second group of rows could take fewer registers than the
    // first, or more.
    assert!(left.rows > 0 && (C::LANES < 16 || left.rows <= most_rows(C::LANES)));
    let mut first = columns.start;
    while first < columns.end {
        let registers = (columns.end - first) / C::LANES;
        let (mut row, mut done) = (0, 0);
        while row < left.rows {
            let rows = (left.rows - row).min(most_rows(C::LANES));
            // Every group of rows takes as many registers: with 16 lanes there is one group, and with fewer lanes the rows do
            // not matter.
            // SAFETY: `first < width` and `row < left.rows`, so the offsets are inside of words and of sums; the block covers so
            // many rows and registers of columns from there on.
            done = unsafe {
                let block = Block {
                    left: left.bytes.as_ptr().add(row * 2 * left.stride),
                    stride: left.stride,
                    right: words.bytes.as_ptr().add(4 * first),
                    blocks: blocks.clone(),
                    width,
                    sums: sums.as_mut_ptr().add(row * 2 * width + first),
                };
                match rows {
                    1 => block.rows::<C, BITS, 1>(registers),
                    2 => block.rows::<C, BITS, 2>(registers),
                    3 if most_rows(C::LANES) >= 3 => block.rows::<C, BITS, 3>(registers),
                    4 if most_rows(C::LANES) >= 4 => block.rows::<C, BITS, 4>(registers),
                    5 if most_rows(C::LANES) >= 5 => block.rows::<C, BITS, 5>(registers),
                    6 if most_rows(C::LANES) >= 6 => block.rows::<C, BITS, 6>(registers),
                    7 if most_rows(C::LANES) >= 7 => block.rows::<C, BITS, 7>(registers),
                    8 if most_rows(C::LANES) >= 8 => block.rows::<C, BITS, 8>(registers),
                    rows => unreachable!("a product of {rows} rows"),
                }
            };
            row += rows;
        }
        first += C::LANES * done;
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
    /// Multiplies `R` rows with as many registers of columns as fit the sums and keep enough of them in flight, at most
    /// `registers`. Returns how many.
    ///
    /// # Safety
    /// The CPU has the instructions of `C`; pointers reach `R` rows (left, sums) or `blocks` (right) of so many columns.
    #[inline(always)]
    unsafe fn rows<C: CodeWords, const BITS: u32, const R: usize>(&self, registers: usize) -> usize {
        // SAFETY: passed on. With fewer than 16 lanes the columns are those of a step.
        unsafe {
            match C::LANES {
                16 if R <= 2 && registers >= 4 => self.multiply::<C, BITS, R, 4>(),
                16 if R <= 6 && registers >= 2 => self.multiply::<C, BITS, R, 2>(),
                16 => self.multiply::<C, BITS, R, 1>(),
                8 => self.multiply::<C, BITS, R, 2>(),
                _ => self.multiply::<C, BITS, R, 4>(),
            }
        }
    }

    /// [`Self::rows`] with `T` registers. Returns `T`.
    ///
    /// # Safety
    /// The caller keeps the promises of [`Self::rows`].
    #[inline(always)]
    unsafe fn multiply<C: CodeWords, const BITS: u32, const R: usize, const T: usize>(&self) -> usize {
        let quads = 8 / BITS as usize;
        // SAFETY: the caller's promise.
        unsafe {
            let mut sums = [[[C::zero(); T]; 2]; R];
            let mut next = self.blocks.start;
            while next < self.blocks.end {
                let end = next.saturating_add(C::words_before_widening(BITS)).min(self.blocks.end);
                let mut partial = [[[C::begin(C::zero()); T]; 2]; R];
                for r in 0..R {
                    for part in 0..2 {
                        for t in 0..T {
                            partial[r][part][t] = C::begin(sums[r][part][t]);
                        }
                    }
                }
                for block in next..end {
                    let mut words = [C::splat(0); T];
                    for t in 0..T {
                        words[t] = C::load(self.right.add(4 * (block * self.width + t * C::LANES)));
                    }
                    for quad in 0..quads {
                        let mut codes = [C::splat(0); T];
                        for t in 0..T {
                            codes[t] = words[t].low_codes::<BITS>();
                            words[t] = words[t].next_codes::<BITS>();
                        }
                        for r in 0..R {
                            for part in 0..2 {
                                let at = (2 * r + part) * self.stride + 4 * (block * quads + quad);
                                let bytes = C::splat(self.left.add(at).cast::<i32>().read_unaligned());
                                for t in 0..T {
                                    partial[r][part][t] =
                                        C::add_products(partial[r][part][t], codes[t], bytes);
                                }
                            }
                        }
                    }
                }
                for r in 0..R {
                    for part in 0..2 {
                        for t in 0..T {
                            sums[r][part][t] = C::widen(sums[r][part][t], partial[r][part][t]);
                        }
                    }
                }
                next = end;
            }
            for r in 0..R {
                for part in 0..2 {
                    for t in 0..T {
                        C::store(sums[r][part][t], self.sums.add((2 * r + part) * self.width + t * C::LANES));
                    }
                }
            }
        }
        T
    }
}
