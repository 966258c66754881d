//! AMX: `tdpbsud` multiplies 16 rows of 64 signed bytes with a tile of 64 x 16 codes.
//!
//! The high and low bytes of a query (or of weights) are two rows of the left tile, so a tile serves 8 of them and
//! costs as much for one as for eight. The right tiles are the codes, one byte each, unpacked once per page into a
//! buffer that stays in the first-level cache; the order of the codes in a page makes every row of a tile one
//! register. Sums are exact and what surrounds them is that of AVX-512, so the results are those of [`super::vnni`].

use std::arch::asm;
use std::arch::x86_64::*;
use std::ops::Range;
use std::sync::OnceLock;

use oscar_codec::{PAGE_TOKENS, ScaleType, Side};

use super::engine::{Engine, Left, Running, Shape, Sums, Weights, Words};
use super::{equal_groups, weigh};
use crate::cpu::attention::amx::stay_awake;
use crate::cpu::gemm::aligned::AlignedScratch;
use crate::cpu::gemm::tiles::{TILE_BYTES, TILE_ROWS, Tiles};

/// Bytes of a row of a tile, and summed elements of one product.
const STEP: usize = 64;

/// Columns of a tile of sums.
const COLUMNS: usize = 16;

/// Tiles of tokens in a page.
const TOKEN_TILES: usize = PAGE_TOKENS / COLUMNS;

/// Most rows of one product.
const ROWS: usize = TILE_ROWS / 2;

/// Whether the CPU multiplies bytes in tiles; [`crate::cpu::isa::Isa::Amx`] promises bf16 only.
pub(super) fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| {
        const AMX_INT8: u32 = 1 << 25;
        __cpuid_count(7, 0).edx & AMX_INT8 != 0
    })
}

/// The engine, with the tile registers of this thread.
pub(super) struct Tdpbsud<'a> {
    _tiles: Tiles,
    /// `[64 channels][16 tokens]` tiles.
    keys: &'a mut [u8],
    /// `[16 channels]` tiles.
    values: &'a mut [u8],
}

impl<'a> Tdpbsud<'a> {
    /// For calls of `rows` query rows.
    ///
    /// # Safety
    /// As [`Tiles::configure`]; [`is_available`].
    pub(super) unsafe fn new(shape: &Shape, rows: usize, scratch: &'a mut AlignedScratch) -> Tdpbsud<'a> {
        let group = equal_groups(rows, ROWS);
        let key_bytes = shape.padded.div_ceil(STEP) * TOKEN_TILES * TILE_BYTES;
        let value_bytes = shape.padded / COLUMNS * TILE_BYTES;
        let (keys, values) = scratch.at_least(key_bytes + value_bytes).split_at_mut(key_bytes);
        if !shape.padded.is_multiple_of(STEP) {
            // The last tile is not filled.
            keys.fill(0);
        }
        // SAFETY: the caller's promise.
        let tiles = unsafe { Tiles::configure(2 * group, [2 * group, TILE_ROWS, TILE_ROWS, TILE_ROWS]) };
        Tdpbsud { _tiles: tiles, keys, values }
    }
}

impl Engine for Tdpbsud<'_> {
    const ROWS: usize = ROWS;

    #[inline(always)]
    fn open(&mut self, shape: &Shape, side: Side, page: &[u8]) {
        let words = Words::of(shape, side, page);
        let tiles = match side {
            Side::Key => &mut *self.keys,
            Side::Value => &mut *self.values,
        };
        // SAFETY: an engine exists only where its instruction set does.
        unsafe {
            match shape.bits {
                2 => unpack::<2>(words, tiles),
                _ => unpack::<4>(words, tiles),
            }
        }
    }

    #[inline(always)]
    fn product(
        &mut self,
        shape: &Shape,
        side: Side,
        _page: &[u8],
        left: &Left<'_>,
        inner: Range<usize>,
        columns: Range<usize>,
        sums: &mut [i32],
    ) {
        let reach = (TILE_ROWS - 1) * left.stride;
        match side {
            Side::Key => {
                let steps = inner.start / STEP..inner.end.div_ceil(STEP);
                assert!(!steps.is_empty() && left.bytes.len() >= reach + steps.end * STEP);
                assert!(sums.len() >= TILE_ROWS * PAGE_TOKENS);
                let right = &self.keys[steps.start * TOKEN_TILES * TILE_BYTES..];
                assert!(right.len() >= steps.len() * TOKEN_TILES * TILE_BYTES);
                // SAFETY: tiles are configured while `self` lives, and the lengths above cover all steps.
                unsafe {
                    let left_bytes = left.bytes.as_ptr().add(steps.start * STEP);
                    key_sums(left_bytes, left.stride, right.as_ptr(), steps.len(), sums.as_mut_ptr());
                }
            }
            Side::Value => {
                assert!(left.stride == STEP && left.bytes.len() >= reach + STEP);
                assert!(columns.end <= shape.padded && sums.len() >= TILE_ROWS * shape.padded);
                assert!(columns.start.is_multiple_of(COLUMNS) && columns.end.is_multiple_of(COLUMNS));
                assert!(self.values.len() >= columns.end / COLUMNS * TILE_BYTES);
                let mut first = columns.start;
                while first < columns.end {
                    let tiles = ((columns.end - first) / COLUMNS).min(4);
                    // SAFETY: tiles are configured while `self` lives; the lengths above cover columns
                    // `first..first + 16 * tiles`.
                    unsafe {
                        let right = self.values.as_ptr().add(first / COLUMNS * TILE_BYTES);
                        let sums = sums.as_mut_ptr().add(first);
                        let left = left.bytes.as_ptr();
                        match tiles {
                            4 => value_sums_4(left, right, shape.padded, sums),
                            3 => value_sums_3(left, right, shape.padded, sums),
                            2 => value_sums_2(left, right, shape.padded, sums),
                            _ => value_sums_1(left, right, shape.padded, sums),
                        }
                    }
                    first += COLUMNS * tiles;
                }
            }
        }
    }

    #[inline(always)]
    fn weigh(&mut self, sums: Sums<'_>, running: Running<'_>, weights: &mut Weights<'_>) {
        // SAFETY: tiles are configured while `self` lives, and sums start from zero wherever they are used; an engine
        // exists only where its instruction set does.
        unsafe {
            stay_awake();
            weigh::weigh::<ROWS>(&sums, running, weights);
        }
    }

    weigh::steps!();
}

/// Codes to bytes, as tiles `[64 inner elements][16 columns]`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn unpack<const BITS: u32>(words: Words<'_>, tiles: &mut [u8]) {
    let mask = _mm512_set1_epi8((1 << BITS) - 1);
    let quads = 8 / BITS as usize;
    let (width, registers) = (words.width, words.width / COLUMNS);
    let blocks = words.bytes.len() / 4 / width;
    assert!(width.is_multiple_of(COLUMNS) && words.bytes.len() == 4 * blocks * width);
    assert!(tiles.len() >= (blocks * quads).div_ceil(TILE_ROWS) * registers * TILE_BYTES);
    for block in 0..blocks {
        let (tile, row) = (block * quads / TILE_ROWS, block * quads % TILE_ROWS);
        for register in 0..registers {
            // SAFETY: inside the lengths above: a block fills `quads` rows of one tile per register.
            unsafe {
                let from = words.bytes.as_ptr().add(4 * (block * width + COLUMNS * register));
                let to = tiles.as_mut_ptr().add((tile * registers + register) * TILE_BYTES + STEP * row);
                let mut codes = _mm512_loadu_si512(from.cast());
                for quad in 0..quads {
                    _mm512_storeu_si512(to.add(STEP * quad).cast(), _mm512_and_si512(codes, mask));
                    codes = _mm512_srli_epi32::<BITS>(codes);
                }
            }
        }
    }
}

/// Sums of up to 16 rows over `steps` times 64 channels, for 64 tokens.
///
/// # Safety
/// Tiles are configured; `left` has 16 rows of `steps * 64` bytes, `stride` apart, `right` four tiles per step and
/// `sums` 16 rows of 64.
unsafe fn key_sums(left: *const i8, stride: usize, right: *const u8, steps: usize, sums: *mut i32) {
    // SAFETY: reads and writes exactly what the caller promised.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "2:",
            "tileloadd tmm4, [{a} + {stride}]",
            "tileloadd tmm5, [{b} + {line}]",
            "tileloadd tmm6, [{b} + {line} + 1024]",
            "tileloadd tmm7, [{b} + {line} + 2048]",
            "tdpbsud tmm0, tmm4, tmm5",
            "tileloadd tmm5, [{b} + {line} + 3072]",
            "tdpbsud tmm1, tmm4, tmm6",
            "tdpbsud tmm2, tmm4, tmm7",
            "tdpbsud tmm3, tmm4, tmm5",
            "add {a}, 64",
            "add {b}, 4096",
            "dec {steps}",
            "jnz 2b",
            "tilestored [{c} + {width}], tmm0",
            "tilestored [{c} + {width} + 64], tmm1",
            "tilestored [{c} + {width} + 128], tmm2",
            "tilestored [{c} + {width} + 192], tmm3",
            a = inout(reg) left => _,
            b = inout(reg) right => _,
            steps = inout(reg) steps => _,
            c = in(reg) sums,
            stride = in(reg) stride,
            line = in(reg) STEP,
            width = in(reg) 4 * PAGE_TOKENS,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// Defines the sums of up to 16 rows over 64 tokens, for 16 channels per tile.
macro_rules! value_sums {
    ($name:ident, [$(($sum:literal, $right:literal, $from:literal, $to:literal)),*]) => {
        /// # Safety
        /// Tiles are configured; `left` and each tile of `right` has 16 rows of 64 bytes, `sums` 16 rows of `width`.
        unsafe fn $name(left: *const i8, right: *const u8, width: usize, sums: *mut i32) {
            // SAFETY: reads and writes exactly what the caller promised.
            unsafe {
                asm!(
                    "tileloadd tmm4, [{a} + {line}]",
                    $(
                        concat!("tilezero tmm", $sum),
                        concat!("tileloadd tmm", $right, ", [{b} + {line} + ", $from, "]"),
                        concat!("tdpbsud tmm", $sum, ", tmm4, tmm", $right),
                    )*
                    $(concat!("tilestored [{c} + {width} + ", $to, "], tmm", $sum),)*
                    a = in(reg) left,
                    b = in(reg) right,
                    c = in(reg) sums,
                    line = in(reg) STEP,
                    width = in(reg) 4 * width,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}

value_sums!(value_sums_4, [(0, 5, 0, 0), (1, 6, 1024, 64), (2, 7, 2048, 128), (3, 5, 3072, 192)]);
value_sums!(value_sums_3, [(0, 5, 0, 0), (1, 6, 1024, 64), (2, 7, 2048, 128)]);
value_sums!(value_sums_2, [(0, 5, 0, 0), (1, 6, 1024, 64)]);
value_sums!(value_sums_1, [(0, 5, 0, 0)]);
