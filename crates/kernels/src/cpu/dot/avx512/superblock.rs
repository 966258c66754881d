//! Formats with 256 weights per block (Q4_K, Q5_K, Q6_K).
//!
//! A block is four vectors of 64 codes in the order they are stored. The scales of all its groups, times those of
//! the activations, are one vector of 16 floats; a permutation spreads them over the lanes of each code vector. For
//! Q4_K and Q5_K the upper half of that vector holds the minima times the activation sums, which go straight to the
//! accumulator.

use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use super::{Activations, Pass, dot_one, prefetch, sum};
use crate::cpu::dot::stripes::{STRIPES, Stripes};

pub(super) trait Superblock {
    const BYTES: usize;
    /// What is taken off the unsigned codes.
    const BIAS: i8;
    /// Whether the upper half of the scales are minima.
    const HAS_MINIMA: bool;
    /// Which scale belongs to which lane of code vector `2 * half + i`.
    const SPREAD: [[i32; 16]; 4];

    /// Code vectors `2 * half` and `2 * half + 1`.
    ///
    /// # Safety
    /// The CPU has AVX-512 F and BW; a block is readable at `block`.
    unsafe fn codes(block: *const u8, half: usize) -> [__m512i; 2];

    /// The 16 scales, or 8 scales and 8 minima.
    ///
    /// # Safety
    /// The caller keeps the promises of [`Self::codes`].
    unsafe fn scales(block: *const u8) -> __m512;

    /// What the scales are multiplied with: activation scales, and negated activation sums for minima.
    ///
    /// # Safety
    /// The CPU has AVX-512F; 8 scales and 16 sums are readable.
    unsafe fn factors(scales: *const f32, sums: *const f32) -> __m512;

    /// 128 activation bytes in the order of the codes.
    ///
    /// # Safety
    /// The CPU has AVX-512F; 128 bytes are readable at `at`.
    unsafe fn activation_bytes(at: *const i8) -> [__m512i; 2];
}

/// Groups of 32 codes stored by 64: low nibbles of two chunks are groups 0 and 2, high nibbles 1 and 3.
const BY_64: [[i32; 16]; 4] = [
    [0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2],
    [1, 1, 1, 1, 1, 1, 1, 1, 3, 3, 3, 3, 3, 3, 3, 3],
    [4, 4, 4, 4, 4, 4, 4, 4, 6, 6, 6, 6, 6, 6, 6, 6],
    [5, 5, 5, 5, 5, 5, 5, 5, 7, 7, 7, 7, 7, 7, 7, 7],
];

/// Low and high nibbles of 64 bytes.
///
/// # Safety
/// The CPU has AVX-512 F and BW; 64 bytes are readable at `at`.
#[inline(always)]
unsafe fn nibbles(at: *const u8) -> [__m512i; 2] {
    // SAFETY: the caller promises the bytes.
    unsafe {
        let nibble = _mm512_set1_epi8(15);
        let bytes = _mm512_loadu_si512(at.cast());
        [_mm512_and_si512(bytes, nibble), _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), nibble)]
    }
}

/// `d · scale` eight times, then `dmin · minimum` eight times.
///
/// # Safety
/// The CPU has AVX-512F and F16C; 16 bytes are readable at `block`.
#[inline(always)]
unsafe fn scales_and_minima(block: *const u8) -> __m512 {
    // SAFETY: the caller promises the bytes.
    unsafe {
        let head = _mm512_broadcast_i32x4(_mm_loadu_si128(block.cast()));
        // The 6-bit numbers are spread over the lanes with the bytes that hold their parts (see `six_bit_scales`):
        // the low or only part in byte 0 of a lane, the two upper bits of numbers 4-7 at the top of byte 1.
        let parts = _mm512_shuffle_epi8(head, _mm512_loadu_si512(PARTS.as_ptr().cast()));
        let low = _mm512_srlv_epi32(parts, quarters(0, 0, 0, 4));
        let high = _mm512_and_si512(_mm512_srli_epi32::<10>(parts), _mm512_set1_epi32(0x30));
        const MASKED_OR: i32 = 0b1110_1010;
        let codes = _mm512_ternarylogic_epi32::<MASKED_OR>(low, quarters(0x3f, 0x0f, 0x3f, 0x0f), high);
        let halves = _mm256_shuffle_epi8(
            _mm512_castsi512_si256(head),
            _mm256_setr_epi64x(D_WORDS, D_WORDS, DMIN_WORDS, DMIN_WORDS),
        );
        _mm512_mul_ps(_mm512_cvtepi32_ps(codes), _mm512_cvtph_ps(halves))
    }
}

/// Bytes 0 and 1, and bytes 2 and 3, four times.
const D_WORDS: i64 = 0x0100_0100_0100_0100;
const DMIN_WORDS: i64 = 0x0302_0302_0302_0302;

/// Bytes of the block's head for each lane: scales 0-3, scales 4-7, minima 0-3, minima 4-7; -1 gives zero.
const PARTS: [[i8; 4]; 16] = {
    let mut parts = [[-1; 4]; 16];
    let mut i = 0;
    while i < 4 {
        parts[i][0] = 4 + i as i8;
        parts[4 + i][0] = 12 + i as i8;
        parts[4 + i][1] = 4 + i as i8;
        parts[8 + i][0] = 8 + i as i8;
        parts[12 + i][0] = 12 + i as i8;
        parts[12 + i][1] = 8 + i as i8;
        i += 1;
    }
    parts
};

/// One value for each four lanes.
///
/// # Safety
/// The CPU has AVX-512F.
#[inline(always)]
unsafe fn quarters(a: i32, b: i32, c: i32, d: i32) -> __m512i {
    // SAFETY: the caller promises the instructions.
    unsafe { _mm512_setr_epi32(a, a, a, a, b, b, b, b, c, c, c, c, d, d, d, d) }
}

/// Activation scales, then negated sums over groups of 32.
///
/// # Safety
/// The caller keeps the promises of [`Superblock::factors`].
#[inline(always)]
unsafe fn scales_and_sums(scales: *const f32, sums: *const f32) -> __m512 {
    // SAFETY: the caller promises 8 scales and 16 sums.
    unsafe {
        let (first, second) = (_mm256_loadu_ps(sums), _mm256_loadu_ps(sums.add(8)));
        let pairs = _mm256_castps_pd(_mm256_hadd_ps(first, second));
        let sums = _mm256_castpd_ps(_mm256_permute4x64_pd::<0b11_01_10_00>(pairs));
        let negated = _mm256_sub_ps(_mm256_setzero_ps(), sums);
        _mm512_insertf32x8::<1>(_mm512_castps256_ps512(_mm256_loadu_ps(scales)), negated)
    }
}

/// Bytes of groups 0 and 2, then 1 and 3.
///
/// # Safety
/// The caller keeps the promises of [`Superblock::activation_bytes`].
#[inline(always)]
unsafe fn by_64(at: *const i8) -> [__m512i; 2] {
    // SAFETY: the caller promises 128 bytes.
    unsafe {
        let (first, second) = (_mm512_loadu_si512(at.cast()), _mm512_loadu_si512(at.add(64).cast()));
        [
            _mm512_shuffle_i64x2::<0b01_00_01_00>(first, second),
            _mm512_shuffle_i64x2::<0b11_10_11_10>(first, second),
        ]
    }
}

pub(super) struct Q4K;
impl Superblock for Q4K {
    const BYTES: usize = 144;
    const BIAS: i8 = 0;
    const HAS_MINIMA: bool = true;
    const SPREAD: [[i32; 16]; 4] = BY_64;

    #[inline(always)]
    unsafe fn codes(block: *const u8, half: usize) -> [__m512i; 2] {
        // SAFETY: bytes 16 to 144 of the block.
        unsafe { nibbles(block.add(16 + 64 * half)) }
    }

    #[inline(always)]
    unsafe fn scales(block: *const u8) -> __m512 {
        // SAFETY: passed on.
        unsafe { scales_and_minima(block) }
    }

    #[inline(always)]
    unsafe fn factors(scales: *const f32, sums: *const f32) -> __m512 {
        // SAFETY: passed on.
        unsafe { scales_and_sums(scales, sums) }
    }

    #[inline(always)]
    unsafe fn activation_bytes(at: *const i8) -> [__m512i; 2] {
        // SAFETY: passed on.
        unsafe { by_64(at) }
    }
}

pub(super) struct Q5K;
impl Superblock for Q5K {
    const BYTES: usize = 176;
    const BIAS: i8 = 0;
    const HAS_MINIMA: bool = true;
    const SPREAD: [[i32; 16]; 4] = BY_64;

    #[inline(always)]
    unsafe fn codes(block: *const u8, half: usize) -> [__m512i; 2] {
        // SAFETY: bytes 16 to 176 of the block.
        unsafe {
            let [low, high] = nibbles(block.add(48 + 64 * half));
            let fifth = _mm512_broadcast_i64x4(_mm256_loadu_si256(block.add(16).cast()));
            // Bit `g` of byte `i` belongs to weight `i` of group `g`.
            let group = 1i8 << (4 * half);
            let two = |first: i8, second: i8| {
                _mm512_inserti64x4::<1>(_mm512_set1_epi8(first), _mm256_set1_epi8(second))
            };
            let low_bits = _mm512_test_epi8_mask(fifth, two(group, group << 2));
            let high_bits = _mm512_test_epi8_mask(fifth, two(group << 1, group << 3));
            let sixteen = _mm512_set1_epi8(16);
            [
                _mm512_mask_add_epi8(low, low_bits, low, sixteen),
                _mm512_mask_add_epi8(high, high_bits, high, sixteen),
            ]
        }
    }

    #[inline(always)]
    unsafe fn scales(block: *const u8) -> __m512 {
        // SAFETY: passed on.
        unsafe { scales_and_minima(block) }
    }

    #[inline(always)]
    unsafe fn factors(scales: *const f32, sums: *const f32) -> __m512 {
        // SAFETY: passed on.
        unsafe { scales_and_sums(scales, sums) }
    }

    #[inline(always)]
    unsafe fn activation_bytes(at: *const i8) -> [__m512i; 2] {
        // SAFETY: passed on.
        unsafe { by_64(at) }
    }
}

pub(super) struct Q6K;
impl Superblock for Q6K {
    const BYTES: usize = 210;
    const BIAS: i8 = 32;
    const HAS_MINIMA: bool = false;
    const SPREAD: [[i32; 16]; 4] = [
        [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3],
        [4, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7],
        [8, 8, 8, 8, 9, 9, 9, 9, 10, 10, 10, 10, 11, 11, 11, 11],
        [12, 12, 12, 12, 13, 13, 13, 13, 14, 14, 14, 14, 15, 15, 15, 15],
    ];

    #[inline(always)]
    unsafe fn codes(block: *const u8, half: usize) -> [__m512i; 2] {
        // SAFETY: bytes 0 to 192 of the block.
        unsafe {
            let [low, high] = nibbles(block.add(64 * half));
            let pairs = _mm512_broadcast_i64x4(_mm256_loadu_si256(block.add(128 + 32 * half).cast()));
            // The wanted pair of bits is brought to bits 4 and 5; neighbouring bytes leak in outside of them.
            let two = |first: i64, second: i64| {
                _mm512_setr_epi64(first, first, first, first, second, second, second, second)
            };
            let mask = _mm512_set1_epi8(0x30);
            const OR_WITH_MASKED: i32 = 0b1111_1000;
            [
                _mm512_ternarylogic_epi64::<OR_WITH_MASKED>(low, _mm512_sllv_epi64(pairs, two(4, 2)), mask),
                _mm512_ternarylogic_epi64::<OR_WITH_MASKED>(high, _mm512_srlv_epi64(pairs, two(0, 2)), mask),
            ]
        }
    }

    #[inline(always)]
    unsafe fn scales(block: *const u8) -> __m512 {
        // SAFETY: bytes 192 to 210 of the block.
        unsafe {
            let d = _mm512_cvtph_ps(_mm256_set1_epi16(block.add(208).cast::<i16>().read_unaligned()));
            let codes = _mm512_cvtepi8_epi32(_mm_loadu_si128(block.add(192).cast()));
            _mm512_mul_ps(_mm512_cvtepi32_ps(codes), d)
        }
    }

    #[inline(always)]
    unsafe fn factors(scales: *const f32, _sums: *const f32) -> __m512 {
        // SAFETY: the caller promises 8 scales.
        unsafe {
            let twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
            _mm512_permutexvar_ps(twice, _mm512_castps256_ps512(_mm256_loadu_ps(scales)))
        }
    }

    #[inline(always)]
    unsafe fn activation_bytes(at: *const i8) -> [__m512i; 2] {
        // SAFETY: the caller promises 128 bytes.
        unsafe { [_mm512_loadu_si512(at.cast()), _mm512_loadu_si512(at.add(64).cast())] }
    }
}

/// 256 activations as a block needs them: the same for all weight rows.
#[derive(Clone, Copy)]
struct Ready {
    /// Bytes in the order of the codes.
    high: [[__m512i; 2]; 2],
    low: [[__m512i; 2]; 2],
    /// What the scales of a block are multiplied with.
    factors: __m512,
    /// The integer sums that a constant in all codes makes; nothing where there is none.
    bias: MaybeUninit<[[__m512i; 2]; 2]>,
}

impl Ready {
    /// # Safety
    /// The CPU has AVX-512 F, BW and VNNI; block `index` exists in the activations.
    #[inline(always)]
    unsafe fn new<B: Superblock>(x: Activations, index: usize) -> Ready {
        // SAFETY: all reads are within the block.
        unsafe {
            let half =
                |bytes: *const i8, half: usize| B::activation_bytes(bytes.add(256 * index + 128 * half));
            let mut ready = Ready {
                high: [half(x.high, 0), half(x.high, 1)],
                low: [half(x.low, 0), half(x.low, 1)],
                factors: B::factors(x.scales.add(8 * index), x.sums.add(16 * index)),
                bias: MaybeUninit::uninit(),
            };
            if B::BIAS != 0 {
                let mut bias = [[_mm512_setzero_si512(); 2]; 2];
                for half in 0..2 {
                    for i in 0..2 {
                        bias[half][i] =
                            dot_one(_mm512_set1_epi8(B::BIAS), ready.high[half][i], ready.low[half][i]);
                    }
                }
                ready.bias.write(bias);
            }
            ready
        }
    }
}

/// Blocks times activation rows that are made ready once for all weight rows; of more there is no room to keep them.
const MOST_READY: usize = 40;

/// One block of the weight rows of a pass.
///
/// # Safety
/// The caller keeps the promises of [`Pass::run`]; block `index` exists in all rows, and `x` is of that block.
#[inline(always)]
unsafe fn step<B: Superblock, const M: usize>(
    rows: [*const u8; STRIPES],
    x: &[Ready; M],
    index: usize,
    sums: &mut [[__m512; STRIPES]; M],
) {
    // SAFETY: all reads are within block `index`; there is a bias where one is used.
    unsafe {
        let blocks = rows.map(|row| row.add(index * B::BYTES));
        let mut scales = [[_mm512_setzero_ps(); STRIPES]; M];
        for r in 0..STRIPES {
            prefetch(blocks[r], B::BYTES);
            let of_block = B::scales(blocks[r]);
            for m in 0..M {
                scales[m][r] = _mm512_mul_ps(of_block, x[m].factors);
                if B::HAS_MINIMA {
                    sums[m][r] = _mm512_mask3_fmadd_ps(of_block, x[m].factors, sums[m][r], 0xff00);
                }
            }
        }
        for half in 0..2 {
            let mut codes = [[_mm512_setzero_si512(); 2]; STRIPES];
            for r in 0..STRIPES {
                codes[r] = B::codes(blocks[r], half);
            }
            for m in 0..M {
                for i in 0..2 {
                    let spread = _mm512_loadu_si512(B::SPREAD[2 * half + i].as_ptr().cast());
                    for r in 0..STRIPES {
                        let mut integer = dot_one(codes[r][i], x[m].high[half][i], x[m].low[half][i]);
                        if B::BIAS != 0 {
                            integer = _mm512_sub_epi32(integer, x[m].bias.assume_init_ref()[half][i]);
                        }
                        let scale = _mm512_permutexvar_ps(spread, scales[m][r]);
                        sums[m][r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(integer), scale, sums[m][r]);
                    }
                }
            }
        }
    }
}

/// The activations of a block.
///
/// # Safety
/// The caller keeps the promises of [`Ready::new`] for all of `x`.
#[inline(always)]
unsafe fn all_ready<B: Superblock, const M: usize>(x: [Activations; M], index: usize) -> [Ready; M] {
    // SAFETY: passed on.
    unsafe {
        let mut all = [Ready::new::<B>(x[0], index); M];
        for m in 1..M {
            all[m] = Ready::new::<B>(x[m], index);
        }
        all
    }
}

/// # Safety
/// The caller keeps the promises of [`Pass::run`].
#[inline(always)]
unsafe fn run<B: Superblock, const M: usize>(stripes: &mut Stripes<'_>, x: [Activations; M], first: usize) {
    let blocks = stripes.row_bytes() / B::BYTES;
    let keep = blocks * M <= MOST_READY;
    let mut kept = [const { MaybeUninit::<Ready>::uninit() }; MOST_READY];
    // SAFETY: all blocks are those of the rows and activations; what is kept has been written.
    unsafe {
        for index in 0..if keep { blocks } else { 0 } {
            let ready = all_ready::<B, M>(x, index);
            for m in 0..M {
                kept[index * M + m] = MaybeUninit::new(ready[m]);
            }
        }
        for pass in 0..stripes.passes() {
            let rows = stripes.rows(pass).map(<[u8]>::as_ptr);
            let mut sums = [[_mm512_setzero_ps(); STRIPES]; M];
            for index in 0..blocks {
                if keep {
                    let x = kept.as_ptr().add(index * M).cast();
                    step::<B, M>(rows, &*x, index, &mut sums);
                } else {
                    step::<B, M>(rows, &all_ready::<B, M>(x, index), index, &mut sums);
                }
            }
            for m in 0..M {
                let mut totals = [0.0; STRIPES];
                for r in 0..STRIPES {
                    totals[r] = sum(sums[m][r]);
                }
                stripes.write(first + m, pass, totals);
            }
        }
    }
}

macro_rules! pass {
    ($($format:ty),*) => {$(
        impl Pass for $format {
            #[inline(always)]
            unsafe fn run<const M: usize>(stripes: &mut Stripes<'_>, x: [Activations; M], first: usize) {
                // SAFETY: passed on.
                unsafe { run::<$format, M>(stripes, x, first) }
            }
        }
    )*};
}

pass!(Q4K, Q5K, Q6K);
