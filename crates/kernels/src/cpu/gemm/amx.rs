//! AMX: products of bf16 tiles with the precision of 16-bit mantissas.
//!
//! A value is kept as the sum of two bf16 numbers, `x = high + low`, good to 2⁻¹⁸ of its size. Of the four partial
//! products the smallest, `low · low`, is dropped; the other three are summed in the same f32 tiles. The weights are
//! the left operand, whose rows are plain runs of channels, so a freshly dequantised row needs no transposition;
//! the activations are the right operand in pairs of channels, transposed once when they are packed.

use std::arch::asm;
use std::arch::x86_64::*;

use super::{BLOCK_ROWS, DEPTH_STEP};
use crate::cpu::simd::amx::{TILE_BYTES, TILE_ROWS, Tiles};
use crate::cpu::simd::avx512::transpose;

/// Words (pairs of bf16) of one tile.
const TILE_WORDS: usize = TILE_BYTES / 4;

/// Words of the packed activations of a block per step of 32 channels: two high tiles, then two low ones.
const STEP_WORDS: usize = 4 * TILE_WORDS;

/// Words of the weight tiles per pair of tile rows and step: two high tiles, and two low ones if there are any.
fn weight_step_words(low: bool) -> usize {
    if low { 4 * TILE_WORDS } else { 2 * TILE_WORDS }
}

/// Words of the tiles of `n` weight rows over `depth` channels.
pub(super) fn weight_words(n: usize, depth: usize, low: bool) -> usize {
    n.div_ceil(BLOCK_ROWS) * depth.div_ceil(DEPTH_STEP) * weight_step_words(low)
}

/// Splits 32 values into high and low bf16 parts, in order.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn split(first: __m512, second: __m512) -> (__m512i, __m512i) {
    // SAFETY: same size, all bit patterns valid.
    let high: __m512i = unsafe { std::mem::transmute(_mm512_cvtne2ps_pbh(second, first)) };
    let rest = |value: __m512, half: __m256i| {
        let high = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half)));
        let rest = _mm512_sub_ps(value, high);
        // An infinite value would leave NaN; the high part alone says all there is to say.
        _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_ORD_Q>(rest, rest), rest)
    };
    let rest_first = rest(first, _mm512_castsi512_si256(high));
    let rest_second = rest(second, _mm512_extracti64x4_epi64::<1>(high));
    // SAFETY: same size, all bit patterns valid.
    let low: __m512i = unsafe { std::mem::transmute(_mm512_cvtne2ps_pbh(rest_second, rest_first)) };
    (high, low)
}

/// The 32 values at `values[at..]`, zeros past the end.
#[inline]
#[target_feature(enable = "avx512f")]
fn load_step(values: &[f32], at: usize) -> (__m512, __m512) {
    let left = &values[at..];
    let mask = |count: usize| ((1u32 << count.min(16)) - 1) as u16;
    // SAFETY: the masks select elements inside `left` only.
    unsafe {
        let first = _mm512_maskz_loadu_ps(mask(left.len()), left.as_ptr());
        let second =
            _mm512_maskz_loadu_ps(mask(left.len().saturating_sub(16)), left.as_ptr().wrapping_add(16));
        (first, second)
    }
}

/// Packs 16 rows of `depth` activations into half `half` of a block (`[step][high 0, high 1, low 0, low 1]`).
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) fn pack_activations(rows: &[f32], depth: usize, block: &mut [u32], half: usize) {
    assert!(rows.len() == TILE_ROWS * depth && half < 2);
    assert!(block.len() >= depth.div_ceil(DEPTH_STEP) * STEP_WORDS);
    for step in 0..depth.div_ceil(DEPTH_STEP) {
        let mut high = [_mm512_setzero_si512(); 16];
        let mut low = high;
        for row in 0..TILE_ROWS {
            let (first, second) = load_step(&rows[row * depth..][..depth], step * DEPTH_STEP);
            (high[row], low[row]) = split(first, second);
        }
        for (part, words) in [(0, transpose(high)), (2, transpose(low))] {
            let tile = &mut block[step * STEP_WORDS + (part + half) * TILE_WORDS..][..TILE_WORDS];
            for (pair, word) in words.into_iter().enumerate() {
                // SAFETY: 16 rows of 16 words fill the tile.
                unsafe { _mm512_storeu_si512(tile.as_mut_ptr().add(pair * 16).cast(), word) };
            }
        }
    }
}

/// Writes one dequantised weight row into the tiles of its panel.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) fn pack_weights(values: &[f32], row: usize, tiles: &mut [u32]) {
    let steps = values.len().div_ceil(DEPTH_STEP);
    let base = row / BLOCK_ROWS * steps * weight_step_words(true) + row % BLOCK_ROWS * 16;
    let tiles = &mut tiles[base..];
    for step in 0..steps {
        let (first, second) = load_step(values, step * DEPTH_STEP);
        let (high, low) = split(first, second);
        // A second tile of 16 rows follows the first, so row 16 starts where row 15 ends.
        let target = &mut tiles[step * weight_step_words(true)..][..2 * TILE_WORDS + 16];
        // SAFETY: the slice holds 16 words at both offsets.
        unsafe {
            _mm512_storeu_si512(target.as_mut_ptr().cast(), high);
            _mm512_storeu_si512(target.as_mut_ptr().add(2 * TILE_WORDS).cast(), low);
        }
    }
}

/// As [`pack_weights`] for a row that is bf16 already, which has no low part.
pub(super) fn pack_bf16_weights(bytes: &[u8], row: usize, tiles: &mut [u32]) {
    let steps = bytes.len().div_ceil(2 * DEPTH_STEP);
    let base = row / BLOCK_ROWS * steps * weight_step_words(false) + row % BLOCK_ROWS * 16;
    for (step, values) in bytes.chunks(2 * DEPTH_STEP).enumerate() {
        let target = &mut tiles[base + step * weight_step_words(false)..][..16];
        let target: &mut [u8] = bytemuck::cast_slice_mut(target);
        target[..values.len()].copy_from_slice(values);
        target[values.len()..].fill(0);
    }
}

/// The AMX unit, ready for products of full tiles.
pub(super) struct Unit {
    _tiles: Tiles,
}

impl Unit {
    /// # Safety
    /// The caller keeps the promises of [`Tiles::configure`].
    pub(super) unsafe fn new() -> Unit {
        // SAFETY: the caller's promise.
        Unit { _tiles: unsafe { Tiles::configure(16, [16; 4]) } }
    }

    /// Adds the product of the weight tiles and one block of activations to `sums` (`[n padded to 32][32]`).
    ///
    /// `block` starts at the first of `steps` steps; unless `wide`, only the first 16 lanes count. `next` will be
    /// the block of the next call.
    pub(super) fn multiply(
        &self,
        tiles: &[u32],
        low: bool,
        block: &[u32],
        steps: usize,
        wide: bool,
        next: &[u32],
        sums: &mut [f32],
    ) {
        let step_words = weight_step_words(low);
        assert!(steps > 0 && block.len() >= steps * STEP_WORDS);
        assert_eq!(tiles.len() / (steps * step_words), sums.len() / (BLOCK_ROWS * BLOCK_ROWS));
        let panels = tiles.chunks_exact(steps * step_words);
        for (index, (tiles, sums)) in panels.zip(sums.chunks_exact_mut(BLOCK_ROWS * BLOCK_ROWS)).enumerate() {
            let (tiles, block, sums) = (tiles.as_ptr(), block.as_ptr(), sums.as_mut_ptr());
            // Four weight blocks prefetch a quarter of the next activations each.
            let next = next.as_ptr().wrapping_add(index % 4 * steps * TILE_WORDS);
            // SAFETY: tiles are configured while `self` lives; each kernel reads `steps` steps of both operands and
            // updates 32 x 32 sums, whose lengths are checked above.
            unsafe {
                match (low, wide) {
                    (true, true) => split_wide(tiles, block, steps, next, sums),
                    (true, false) => split_narrow(tiles, block, steps, next, sums),
                    (false, true) => exact_wide(tiles, block, steps, next, sums),
                    (false, false) => exact_narrow(tiles, block, steps, next, sums),
                }
            }
        }
    }
}

/// Defines a product of 32 weight rows with 16 or 32 activations. `$bytes` is the size of a step of weight tiles.
///
/// `tmm0..tmm3` hold the sums (weight half, activation half), `tmm4` and `tmm5` weights, `tmm6` and `tmm7`
/// activations. The order of the products lets every operand be loaded once per step. Activations come from the
/// third-level cache or from memory, which is the bottleneck, so half the lines of what comes next are prefetched;
/// the hardware adds their neighbours.
macro_rules! kernel {
    ($name:ident, $bytes:literal, load: [$($load:literal),*], step: [$($step:literal),*], store: [$($store:literal),*]) => {
        /// # Safety
        /// Full tiles are configured; `steps` steps of tiles and of activations and 32 x 32 sums are readable, the
        /// sums writable.
        unsafe fn $name(tiles: *const u32, block: *const u32, steps: usize, next: *const u32, sums: *mut f32) {
            // SAFETY: reads and writes exactly what the caller promised.
            unsafe {
                asm!(
                    $($load,)*
                    "2:",
                    $($step,)*
                    concat!("add {w}, ", $bytes),
                    "prefetcht1 [{next}]",
                    "prefetcht1 [{next} + 64]",
                    "prefetcht1 [{next} + 128]",
                    "prefetcht1 [{next} + 192]",
                    "prefetcht1 [{next} + 256]",
                    "prefetcht1 [{next} + 320]",
                    "prefetcht1 [{next} + 384]",
                    "prefetcht1 [{next} + 448]",
                    "add {next}, 1024",
                    "add {x}, 4096",
                    "dec {steps}",
                    "jnz 2b",
                    $($store,)*
                    w = inout(reg) tiles => _,
                    x = inout(reg) block => _,
                    steps = inout(reg) steps => _,
                    next = inout(reg) next => _,
                    c = in(reg) sums,
                    line = in(reg) 64usize,
                    stride = in(reg) 128usize,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}

kernel!(split_wide, "4096",
    load: ["tileloadd tmm0, [{c} + {stride}]", "tileloadd tmm1, [{c} + {stride} + 64]",
           "tileloadd tmm2, [{c} + {stride} + 2048]", "tileloadd tmm3, [{c} + {stride} + 2112]"],
    step: ["tileloadd tmm4, [{w} + {line}]",
           "tileloadd tmm6, [{x} + {line} + 2048]",
           "tdpbf16ps tmm0, tmm4, tmm6",
           "tileloadd tmm5, [{w} + {line} + 1024]",
           "tdpbf16ps tmm2, tmm5, tmm6",
           "tileloadd tmm7, [{x} + {line} + 3072]",
           "tdpbf16ps tmm1, tmm4, tmm7",
           "tdpbf16ps tmm3, tmm5, tmm7",
           "tileloadd tmm6, [{x} + {line}]",
           "tdpbf16ps tmm0, tmm4, tmm6",
           "tdpbf16ps tmm2, tmm5, tmm6",
           "tileloadd tmm7, [{x} + {line} + 1024]",
           "tdpbf16ps tmm1, tmm4, tmm7",
           "tdpbf16ps tmm3, tmm5, tmm7",
           "tileloadd tmm4, [{w} + {line} + 2048]",
           "tdpbf16ps tmm0, tmm4, tmm6",
           "tileloadd tmm5, [{w} + {line} + 3072]",
           "tdpbf16ps tmm2, tmm5, tmm6",
           "tdpbf16ps tmm1, tmm4, tmm7",
           "tdpbf16ps tmm3, tmm5, tmm7"],
    store: ["tilestored [{c} + {stride}], tmm0", "tilestored [{c} + {stride} + 64], tmm1",
            "tilestored [{c} + {stride} + 2048], tmm2", "tilestored [{c} + {stride} + 2112], tmm3"]);

kernel!(split_narrow, "4096",
    load: ["tileloadd tmm0, [{c} + {stride}]", "tileloadd tmm2, [{c} + {stride} + 2048]"],
    step: ["tileloadd tmm4, [{w} + {line}]",
           "tileloadd tmm6, [{x} + {line} + 2048]",
           "tdpbf16ps tmm0, tmm4, tmm6",
           "tileloadd tmm5, [{w} + {line} + 1024]",
           "tdpbf16ps tmm2, tmm5, tmm6",
           "tileloadd tmm7, [{x} + {line}]",
           "tdpbf16ps tmm0, tmm4, tmm7",
           "tdpbf16ps tmm2, tmm5, tmm7",
           "tileloadd tmm4, [{w} + {line} + 2048]",
           "tdpbf16ps tmm0, tmm4, tmm7",
           "tileloadd tmm5, [{w} + {line} + 3072]",
           "tdpbf16ps tmm2, tmm5, tmm7"],
    store: ["tilestored [{c} + {stride}], tmm0", "tilestored [{c} + {stride} + 2048], tmm2"]);

kernel!(exact_wide, "2048",
    load: ["tileloadd tmm0, [{c} + {stride}]", "tileloadd tmm1, [{c} + {stride} + 64]",
           "tileloadd tmm2, [{c} + {stride} + 2048]", "tileloadd tmm3, [{c} + {stride} + 2112]"],
    step: ["tileloadd tmm4, [{w} + {line}]",
           "tileloadd tmm6, [{x} + {line} + 2048]",
           "tdpbf16ps tmm0, tmm4, tmm6",
           "tileloadd tmm5, [{w} + {line} + 1024]",
           "tdpbf16ps tmm2, tmm5, tmm6",
           "tileloadd tmm7, [{x} + {line} + 3072]",
           "tdpbf16ps tmm1, tmm4, tmm7",
           "tdpbf16ps tmm3, tmm5, tmm7",
           "tileloadd tmm6, [{x} + {line}]",
           "tdpbf16ps tmm0, tmm4, tmm6",
           "tdpbf16ps tmm2, tmm5, tmm6",
           "tileloadd tmm7, [{x} + {line} + 1024]",
           "tdpbf16ps tmm1, tmm4, tmm7",
           "tdpbf16ps tmm3, tmm5, tmm7"],
    store: ["tilestored [{c} + {stride}], tmm0", "tilestored [{c} + {stride} + 64], tmm1",
            "tilestored [{c} + {stride} + 2048], tmm2", "tilestored [{c} + {stride} + 2112], tmm3"]);

kernel!(exact_narrow, "2048",
    load: ["tileloadd tmm0, [{c} + {stride}]", "tileloadd tmm2, [{c} + {stride} + 2048]"],
    step: ["tileloadd tmm4, [{w} + {line}]",
           "tileloadd tmm6, [{x} + {line} + 2048]",
           "tdpbf16ps tmm0, tmm4, tmm6",
           "tileloadd tmm5, [{w} + {line} + 1024]",
           "tdpbf16ps tmm2, tmm5, tmm6",
           "tileloadd tmm7, [{x} + {line}]",
           "tdpbf16ps tmm0, tmm4, tmm7",
           "tdpbf16ps tmm2, tmm5, tmm7"],
    store: ["tilestored [{c} + {stride}], tmm0", "tilestored [{c} + {stride} + 2048], tmm2"]);
