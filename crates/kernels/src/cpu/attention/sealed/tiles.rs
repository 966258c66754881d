//! AMX: `tdpbsud` multiplies 16 rows of 64 signed bytes with a tile of 64 x 16 codes.
//!
//! The high and low bytes of a query (or of weights) are two rows of the left tile, so a tile serves 8 of them. The right
//! tiles are codes, one byte each, unpacked into a buffer that stays in the first-level cache; the order of the codes in a
//! page makes every row of a tile one register. Sums are exact.
//!
//! Sums of values stay in `tmm0` to `tmm3` from one call to the next. Nothing else touches them: the compiler has no use for
//! tile registers.

use std::arch::asm;
use std::arch::x86_64::*;
use std::ops::Range;
use std::sync::OnceLock;

use oscar_codec::PAGE_TOKENS;

use super::engine::{Left, Words};
use crate::cpu::gemm::tiles::{TILE_BYTES, TILE_ROWS, Tiles};

/// Bytes of a row of a tile, and summed elements of one product.
const STEP: usize = 64;

/// Columns of a tile of sums.
pub(super) const COLUMNS: usize = 16;

/// Tiles of tokens in a page.
const TOKEN_TILES: usize = PAGE_TOKENS / COLUMNS;

/// Most rows of one product.
pub(super) const ROWS: usize = TILE_ROWS / 2;

/// Tiles of sums there are.
pub(super) const MOST_TILES: usize = 4;

/// Whether the CPU multiplies bytes in tiles and has what unpacks codes for them; [`crate::cpu::isa::Isa::Amx`] promises
/// bf16 only.
pub(super) fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| {
        const AMX_INT8: u32 = 1 << 25;
        __cpuid_count(7, 0).edx & AMX_INT8 != 0 && is_x86_feature_detected!("gfni")
    })
}

/// Bytes of the unpacked keys of a page of `padded` channels.
pub(super) fn key_bytes(padded: usize) -> usize {
    padded.div_ceil(STEP) * TOKEN_TILES * TILE_BYTES
}

/// Bytes of the unpacked values of a page for `columns` channels.
pub(super) fn value_bytes(columns: usize) -> usize {
    columns / COLUMNS * TILE_BYTES
}

/// The tile registers of this thread, ready for products of so many rows.
pub(super) struct Products {
    _tiles: Tiles,
}

impl Products {
    /// # Safety
    /// As [`Tiles::configure`]; [`is_available`].
    pub(super) unsafe fn new(rows: usize) -> Products {
        assert!((1..=ROWS).contains(&rows), "products of {rows} rows");
        // SAFETY: the caller's promise.
        let tiles = unsafe { Tiles::configure(2 * rows, [2 * rows, TILE_ROWS, TILE_ROWS, TILE_ROWS]) };
        Products { _tiles: tiles }
    }

    /// Sums over the channels in `inner` for 64 tokens: `[rows][high, low][64]`, with room for [`ROWS`] rows. `keys` are
    /// the unpacked keys of a page.
    #[inline(always)]
    pub(super) fn keys(&self, left: &Left<'_>, inner: Range<usize>, keys: &[u8], sums: &mut [i32]) {
        let reach = (TILE_ROWS - 1) * left.stride;
        let steps = inner.start / STEP..inner.end.div_ceil(STEP);
        assert!(!steps.is_empty() && left.bytes.len() >= reach + steps.end * STEP);
        assert!(sums.len() >= TILE_ROWS * PAGE_TOKENS);
        let right = &keys[steps.start * TOKEN_TILES * TILE_BYTES..];
        assert!(right.len() >= steps.len() * TOKEN_TILES * TILE_BYTES);
        // SAFETY: tiles are configured while `self` lives, and the lengths above cover all steps.
        unsafe {
            let left_bytes = left.bytes.as_ptr().add(steps.start * STEP);
            key_sums(left_bytes, left.stride, right.as_ptr(), steps.len(), sums.as_mut_ptr());
        }
    }

    /// Makes the sums of values zero.
    #[inline(always)]
    pub(super) fn clear(&self) {
        // SAFETY: tiles are configured while `self` lives.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                options(nostack, nomem, preserves_flags)
            );
        }
    }

    /// Adds 64 tokens to the sums of up to [`MOST_TILES`] times 16 channels. `weights` are `[rows][high, low][64 tokens]`
    /// with room for [`ROWS`] rows, `values` the unpacked codes of these channels and no others.
    #[inline(always)]
    pub(super) fn add(&self, weights: &[i8], values: &[u8]) {
        assert!(weights.len() >= TILE_ROWS * STEP && values.len().is_multiple_of(TILE_BYTES));
        let (left, right) = (weights.as_ptr(), values.as_ptr());
        // SAFETY: tiles are configured while `self` lives, and the lengths above are what is read.
        unsafe {
            match values.len() / TILE_BYTES {
                1 => add_1(left, right),
                2 => add_2(left, right),
                3 => add_3(left, right),
                MOST_TILES => add_4(left, right),
                tiles => unreachable!("{tiles} tiles of sums"),
            }
        }
    }

    /// Stores the sums of `tiles` times 16 channels, `[rows][high, low][width]`, with room for [`ROWS`] rows.
    #[inline(always)]
    pub(super) fn store(&self, tiles: usize, width: usize, sums: &mut [i32]) {
        assert!(tiles <= MOST_TILES && tiles * COLUMNS <= width);
        assert!(sums.len() >= (TILE_ROWS - 1) * width + tiles * COLUMNS);
        // SAFETY: tiles are configured while `self` lives; 16 rows of so many columns are inside the lengths above.
        unsafe {
            let sums = sums.as_mut_ptr();
            if tiles > 0 {
                asm!("tilestored [{to} + {stride}], tmm0", to = in(reg) sums, stride = in(reg) 4 * width, options(nostack));
            }
            if tiles > 1 {
                asm!("tilestored [{to} + {stride} + 64], tmm1", to = in(reg) sums, stride = in(reg) 4 * width, options(nostack));
            }
            if tiles > 2 {
                asm!("tilestored [{to} + {stride} + 128], tmm2", to = in(reg) sums, stride = in(reg) 4 * width, options(nostack));
            }
            if tiles > 3 {
                asm!("tilestored [{to} + {stride} + 192], tmm3", to = in(reg) sums, stride = in(reg) 4 * width, options(nostack));
            }
        }
    }
}

/// Codes of `bits` bits to bytes, as tiles `[64 inner elements][16 columns]`, for some columns of a page (multiples of 16)
/// that has `inner` codes in a column.
///
/// # Safety
/// [`is_available`].
#[inline(always)]
pub(super) unsafe fn unpack(
    bits: u32,
    words: Words<'_>,
    inner: usize,
    columns: Range<usize>,
    tiles: &mut [u8],
) {
    let registers = columns.len() / COLUMNS;
    let blocks = inner * bits as usize / u32::BITS as usize;
    assert!(words.bytes.len() == 4 * blocks * words.width && columns.end <= words.width);
    assert!(columns.start.is_multiple_of(COLUMNS) && columns.end.is_multiple_of(COLUMNS));
    assert!(tiles.len() >= inner.div_ceil(STEP) * registers * TILE_BYTES);
    // SAFETY: the caller's promise, and the lengths above.
    unsafe {
        match (bits, registers) {
            // A loop whose length is known is taken apart by the compiler.
            (2, MOST_TILES) => unpack_bits::<2, MOST_TILES>(words, blocks, columns.start, registers, tiles),
            (2, _) => unpack_bits::<2, 0>(words, blocks, columns.start, registers, tiles),
            _ => unpack_bits::<4, 0>(words, blocks, columns.start, registers, tiles),
        }
    }
}

/// # Safety
/// As [`unpack`]; `tiles` has room for `blocks` of `registers` times 16 words from column `first` on, which exist. `KNOWN`
/// is `registers` or zero.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,gfni")]
unsafe fn unpack_bits<const BITS: u32, const KNOWN: usize>(
    words: Words<'_>,
    blocks: usize,
    first: usize,
    registers: usize,
    tiles: &mut [u8],
) {
    let quads = 8 / BITS as usize;
    let registers = if KNOWN > 0 { KNOWN } else { registers };
    for block in 0..blocks {
        let (tile, row) = (block * quads / TILE_ROWS, block * quads % TILE_ROWS);
        for register in 0..registers {
            // SAFETY: a block fills `quads` rows of one tile per register, and there is room for all, as promised.
            unsafe {
                let from = words.bytes.as_ptr().add(4 * (block * words.width + first + COLUMNS * register));
                let to = tiles.as_mut_ptr().add((tile * registers + register) * TILE_BYTES + STEP * row);
                unpack_register::<BITS>(from, to);
            }
        }
    }
}

/// One register of codes to rows of a tile, as many as there are codes in a byte.
///
/// # Safety
/// [`is_available`]; 64 bytes can be read, and 64 written for each row.
#[inline(always)]
pub(super) unsafe fn unpack_register<const BITS: u32>(from: *const u8, to: *mut u8) {
    // SAFETY: the caller's promise.
    unsafe {
        let codes = _mm512_loadu_si512(from.cast());
        for quad in 0..8 / BITS as usize {
            let field = _mm512_set1_epi64(field_matrix(BITS, quad as u32));
            let code = _mm512_gf2p8affine_epi64_epi8::<0>(codes, field);
            _mm512_storeu_si512(to.add(STEP * quad).cast(), code);
        }
    }
}

/// The bit matrix that moves the `quad`-th field of a byte to its low bits and clears the others: one instruction where a
/// shift and a mask would be two. Byte `7 - i` of it selects bit `i` of the result.
const fn field_matrix(bits: u32, quad: u32) -> i64 {
    let mut matrix = 0u64;
    let mut bit = 0;
    while bit < bits {
        matrix |= 1 << (quad * bits + bit) << (8 * (7 - bit));
        bit += 1;
    }
    matrix as i64
}

/// Sums of up to 16 rows over `steps` times 64 channels, for 64 tokens.
///
/// # Safety
/// Tiles are configured; `left` has 16 rows of `steps * 64` bytes, `stride` apart, `right` four tiles per step and
/// `sums` 16 rows of 64.
#[inline(always)]
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
            options(nostack),
        );
    }
}

/// Defines the sums of up to 16 rows over 64 tokens, for 16 channels per tile.
macro_rules! add {
    ($name:ident, [$(($sum:literal, $right:literal, $from:literal)),*]) => {
        /// # Safety
        /// Tiles are configured; `left` and each tile of `right` has 16 rows of 64 bytes.
        #[inline(always)]
        unsafe fn $name(left: *const i8, right: *const u8) {
            // SAFETY: reads exactly what the caller promised.
            unsafe {
                asm!(
                    "tileloadd tmm4, [{a} + {line}]",
                    $(
                        concat!("tileloadd tmm", $right, ", [{b} + {line} + ", $from, "]"),
                        concat!("tdpbsud tmm", $sum, ", tmm4, tmm", $right),
                    )*
                    a = in(reg) left,
                    b = in(reg) right,
                    line = in(reg) STEP,
                    options(nostack, readonly, preserves_flags),
                );
            }
        }
    };
}

add!(add_4, [(0, 5, 0), (1, 6, 1024), (2, 7, 2048), (3, 5, 3072)]);
add!(add_3, [(0, 5, 0), (1, 6, 1024), (2, 7, 2048)]);
add!(add_2, [(0, 5, 0), (1, 6, 1024)]);
add!(add_1, [(0, 5, 0)]);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::attention::tests::Random;

    /// Row `k / 4` of tile `(k / 64, column / 16)` has, at byte `4·(column % 16) + k % 4`, code `k` of a column.
    #[test]
    fn codes_are_unpacked_into_tiles() {
        if !is_available() {
            return;
        }
        let mut random = Random(1);
        for (bits, inner, width) in
            [(2, 64, 64), (2, 128, 64), (2, 64, 96), (4, 64, 64), (4, 64, 128), (2, 32, 64)]
        {
            let bytes: Vec<u8> = (0..inner * width * bits as usize / 8)
                .map(|_| (128.0 * random.next() + 128.0) as u8)
                .collect();
            let words = Words { bytes: &bytes, width };
            for columns in [0..width, 16..width, 0..16] {
                let registers = columns.len() / COLUMNS;
                let mut tiles = vec![0xff; inner.div_ceil(STEP) * registers * TILE_BYTES];
                // SAFETY: the instructions are there.
                unsafe { unpack(bits, words, inner, columns.clone(), &mut tiles) };
                for column in 0..columns.len() {
                    for k in 0..inner {
                        let tile = k / STEP * registers + column / COLUMNS;
                        let at = tile * TILE_BYTES + k % STEP / 4 * STEP + 4 * (column % COLUMNS) + k % 4;
                        assert_eq!(
                            tiles[at],
                            code(bits, words, columns.start + column, k),
                            "{bits} {column} {k}"
                        );
                    }
                }
            }
        }
    }

    /// Code `k` of a column: byte `k % 4` of word `k / (4·codes of a byte)`.
    fn code(bits: u32, words: Words<'_>, column: usize, k: usize) -> u8 {
        let per_byte = 8 / bits as usize;
        let (block, rest) = (k / (4 * per_byte), k % (4 * per_byte));
        let byte = words.bytes[4 * (block * words.width + column) + rest % 4];
        byte >> (bits as usize * (rest / 4)) & ((1 << bits) - 1)
    }
}
