//! Formats with 32 weights per block, four blocks (128 weights) at a time.
//!
//! The sixteen bytes of nibbles of each block go to one 128-bit lane, so low nibbles are weights 0-15 of four blocks
//! and high nibbles weights 16-31; activations are shuffled to match. Both halves of a block then end in the same
//! lane, and one conversion to float serves 128 weights. Half-precision scales are gathered and converted for four
//! weight rows at once, and so are exponents: float lane `4r + b` belongs to block `b` of row `r`.

use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use super::{Activations, Pass, dot_pair, prefetch, sum_each};
use crate::cpu::dot::stripes::{STRIPES, Stripes};
use crate::quant::mxfp4::{NAN_BITS, NAN_SCALE, TWICE};

/// Blocks per step.
const BLOCKS: usize = 4;

pub(super) trait Small {
    const BYTES: usize;
    /// Where the nibbles or bytes of the block start.
    const CODES_AT: usize;
    /// Where the fifth bits start, if there are any.
    const FIFTH_BITS_AT: Option<usize> = None;
    const BYTE_CODES: bool = false;
    /// What is taken off the unsigned codes.
    const BIAS: i8 = 0;
    /// Whether a half-precision offset follows the scale.
    const HAS_OFFSET: bool = false;
    /// What unsigned codes nibbles stand for, if not for themselves. Such a block has an exponent for a scale.
    const TABLE: Option<[u8; 16]> = None;
}

pub(super) struct Q4_0;
impl Small for Q4_0 {
    const BYTES: usize = 18;
    const CODES_AT: usize = 2;
    const BIAS: i8 = 8;
}

pub(super) struct Q4_1;
impl Small for Q4_1 {
    const BYTES: usize = 20;
    const CODES_AT: usize = 4;
    const HAS_OFFSET: bool = true;
}

pub(super) struct Q5_0;
impl Small for Q5_0 {
    const BYTES: usize = 22;
    const CODES_AT: usize = 6;
    const FIFTH_BITS_AT: Option<usize> = Some(2);
    const BIAS: i8 = 16;
}

pub(super) struct Q5_1;
impl Small for Q5_1 {
    const BYTES: usize = 24;
    const CODES_AT: usize = 8;
    const FIFTH_BITS_AT: Option<usize> = Some(4);
    const HAS_OFFSET: bool = true;
}

pub(super) struct Q8_0;
impl Small for Q8_0 {
    const BYTES: usize = 34;
    const CODES_AT: usize = 2;
    const BYTE_CODES: bool = true;
    /// 128 as an unsigned byte.
    const BIAS: i8 = -128;
}

pub(super) struct Mxfp4;
impl Small for Mxfp4 {
    const BYTES: usize = 17;
    const CODES_AT: usize = 1;
    const BIAS: i8 = 12;
    const TABLE: Option<[u8; 16]> = Some(unsigned(Self::BIAS));
}

/// The codes of MXFP4 with a bias that leaves none of them negative.
const fn unsigned(bias: i8) -> [u8; 16] {
    let mut table = [0; 16];
    let mut nibble = 0;
    while nibble < 16 {
        table[nibble] = (TWICE[nibble] + bias) as u8;
        nibble += 1;
    }
    table
}

/// Sixteen bytes from each of `count` blocks, one block per 128-bit lane; zero for missing blocks.
///
/// # Safety
/// The CPU has AVX-512F; sixteen bytes are readable at `at + b * stride` for every `b < count`.
#[inline(always)]
unsafe fn lanes<const FULL: bool>(at: *const u8, stride: usize, count: usize) -> __m512i {
    // SAFETY: only lanes below `count` are loaded.
    unsafe {
        let lane = |b: usize| _mm_loadu_si128(at.add(b * stride).cast());
        let mut all = _mm512_castsi128_si512(lane(0));
        if !FULL {
            all = _mm512_zextsi128_si512(lane(0));
        }
        if FULL || count > 1 {
            all = _mm512_inserti32x4::<1>(all, lane(1));
        }
        if FULL || count > 2 {
            all = _mm512_inserti32x4::<2>(all, lane(2));
        }
        if FULL || count > 3 {
            all = _mm512_inserti32x4::<3>(all, lane(3));
        }
        all
    }
}

/// Unsigned codes 0-15 and 16-31 of `count` blocks.
///
/// # Safety
/// The CPU has AVX-512 F and BW; `count` blocks are readable at `blocks`.
#[inline(always)]
unsafe fn codes<B: Small, const FULL: bool>(blocks: *const u8, count: usize) -> [__m512i; 2] {
    // SAFETY: all loads are inside the blocks.
    unsafe {
        let first = if B::BYTES == 20 {
            // The block is five 32-bit words, the last four of them codes, so one permutation gathers all.
            let words = _mm512_setr_epi32(1, 2, 3, 4, 6, 7, 8, 9, 11, 12, 13, 14, 28, 29, 30, 31);
            let back = if FULL { _mm512_loadu_si512(blocks.add(16).cast()) } else { _mm512_setzero_si512() };
            _mm512_permutex2var_epi32(head::<B, FULL>(blocks, count), words, back)
        } else {
            lanes::<FULL>(blocks.add(B::CODES_AT), B::BYTES, count)
        };
        if B::BYTE_CODES {
            let second = lanes::<FULL>(blocks.add(B::CODES_AT + 16), B::BYTES, count);
            let bias = _mm512_set1_epi8(B::BIAS);
            return [_mm512_xor_si512(first, bias), _mm512_xor_si512(second, bias)];
        }
        let nibble = _mm512_set1_epi8(15);
        let low = _mm512_and_si512(first, nibble);
        let high = _mm512_and_si512(_mm512_srli_epi16::<4>(first), nibble);
        if let Some(table) = const { B::TABLE } {
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
            return [_mm512_shuffle_epi8(table, low), _mm512_shuffle_epi8(table, high)];
        }
        let Some(at) = B::FIFTH_BITS_AT else { return [low, high] };
        let (mut low_bits, mut high_bits) = (0u64, 0u64);
        for b in 0..if FULL { BLOCKS } else { count } {
            let bits = u64::from(blocks.add(b * B::BYTES + at).cast::<u32>().read_unaligned());
            low_bits |= (bits & 0xffff) << (16 * b);
            high_bits |= (bits >> 16) << (16 * b);
        }
        let sixteen = _mm512_set1_epi8(16);
        [
            _mm512_mask_add_epi8(low, low_bits, low, sixteen),
            _mm512_mask_add_epi8(high, high_bits, high, sixteen),
        ]
    }
}

/// Up to this block size the halves of four blocks are within the first 64 bytes.
const HALVES_IN_A_VECTOR: usize = 20;

/// The first 64 bytes of `count` blocks, zero where there are fewer.
///
/// # Safety
/// The CPU has AVX-512 F and BW; `count` blocks are readable at `blocks`, four of at least 16 bytes if `FULL`.
#[inline(always)]
unsafe fn head<B: Small, const FULL: bool>(blocks: *const u8, count: usize) -> __m512i {
    // SAFETY: four blocks have 64 bytes; of fewer, masked bytes are not read.
    unsafe {
        if FULL {
            return _mm512_loadu_si512(blocks.cast());
        }
        let bytes = u64::MAX >> (64 - (count * B::BYTES).min(64));
        _mm512_maskz_loadu_epi8(bytes, blocks.cast())
    }
}

/// Half-precision scales and offsets of `count` blocks of four rows, for blocks small enough.
///
/// # Safety
/// The caller keeps the promises of [`head`] for each of `at`.
#[inline(always)]
unsafe fn halves_by_permutation<B: Small, const FULL: bool>(
    at: [*const u8; STRIPES],
    count: usize,
) -> [__m256i; 2] {
    // SAFETY: passed on.
    unsafe {
        let words = _mm512_loadu_si512(const { &half_words(B::BYTES) }.as_ptr().cast());
        let mut halves = _mm512_permutexvar_epi16(words, head::<B, FULL>(at[0], count));
        for r in 1..STRIPES {
            let lanes = 0x000f_000f << (4 * r);
            halves = _mm512_mask_permutexvar_epi16(halves, lanes, words, head::<B, FULL>(at[r], count));
        }
        [_mm512_castsi512_si256(halves), _mm512_extracti64x4_epi64::<1>(halves)]
    }
}

/// Where the scale of block `lane % 4` is in lanes 0-15, and its offset in lanes 16-31.
const fn half_words(block_bytes: usize) -> [u16; 32] {
    let mut words = [0; 32];
    let mut lane = 0;
    while lane < 32 {
        words[lane] = (lane % 4 * (block_bytes / 2) + lane / 16) as u16;
        lane += 1;
    }
    words
}

/// Half-precision scales and offsets of `count` blocks of four rows. Uses plain integer instructions, whose ports
/// are idle otherwise.
///
/// # Safety
/// The CPU has AVX-512F; `count` blocks are readable at each of `at`.
#[inline(always)]
unsafe fn halves_by_word<B: Small, const FULL: bool>(at: [*const u8; STRIPES], count: usize) -> [__m256i; 2] {
    let (mut scales, mut offsets) = ([0u64; STRIPES], [0u64; STRIPES]);
    for r in 0..STRIPES {
        for b in 0..if FULL { BLOCKS } else { count } {
            // SAFETY: the first bytes of block `b`.
            unsafe {
                let block = at[r].add(b * B::BYTES);
                if B::HAS_OFFSET {
                    let both = u64::from(block.cast::<u32>().read_unaligned());
                    scales[r] |= (both & 0xffff) << (16 * b);
                    offsets[r] |= (both >> 16) << (16 * b);
                } else {
                    scales[r] |= u64::from(block.cast::<u16>().read_unaligned()) << (16 * b);
                }
            }
        }
    }
    // SAFETY: four 64-bit numbers make a vector.
    unsafe {
        [std::mem::transmute::<[u64; 4], __m256i>(scales), std::mem::transmute::<[u64; 4], __m256i>(offsets)]
    }
}

/// The scales of `count` blocks of four rows that begin with an exponent; see [`crate::quant::mxfp4`].
///
/// # Safety
/// The CPU has AVX-512F; `count` blocks are readable at each of `at`.
#[inline(always)]
unsafe fn powers<B: Small, const FULL: bool>(at: [*const u8; STRIPES], count: usize) -> __m512 {
    // Activations of blocks that are missing are zero, so that their scales do not matter.
    let mut exponents = [0u8; STRIPES * BLOCKS];
    for r in 0..STRIPES {
        for b in 0..if FULL { BLOCKS } else { count } {
            // SAFETY: the first byte of block `b`.
            exponents[r * BLOCKS + b] = unsafe { at[r].add(b * B::BYTES).read() };
        }
    }
    // SAFETY: sixteen bytes are readable; the caller promises the instructions.
    unsafe {
        let exponents = _mm512_cvtepu8_epi32(_mm_loadu_si128(exponents.as_ptr().cast()));
        let normal = _mm512_slli_epi32::<23>(_mm512_sub_epi32(exponents, _mm512_set1_epi32(1)));
        let small = _mm512_cmplt_epi32_mask(exponents, _mm512_set1_epi32(2));
        let subnormal = _mm512_sllv_epi32(_mm512_set1_epi32(0x0020_0000), exponents);
        let none = _mm512_cmpeq_epi32_mask(exponents, _mm512_set1_epi32(i32::from(NAN_SCALE)));
        let numbers = _mm512_mask_mov_epi32(normal, small, subnormal);
        _mm512_castsi512_ps(_mm512_mask_mov_epi32(numbers, none, _mm512_set1_epi32(NAN_BITS as i32)))
    }
}

/// 128 activations as a step needs them: the same for all weight rows.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Ready {
    /// Bytes in the order of the codes: 0-15 of each block, then 16-31 of each block.
    high: [__m512i; 2],
    low: [__m512i; 2],
    /// The integer sum that a constant in all codes makes.
    bias: __m512i,
    /// The scale of each block, and the sum of its values.
    scales: [f32; BLOCKS],
    sums: [f32; BLOCKS],
}

impl Ready {
    /// # Safety
    /// The CPU has AVX-512 F, BW, VL and VNNI; `count` blocks (four if `FULL`) exist from block `first` in the activations.
    #[inline(always)]
    unsafe fn new<B: Small, const FULL: bool>(x: Activations, first: usize, count: usize) -> Ready {
        // SAFETY: masked lanes are not read.
        unsafe {
            let high = activation_bytes::<FULL>(x.high.add(32 * first), count);
            let low = activation_bytes::<FULL>(x.low.add(32 * first), count);
            let mut sums = _mm_setzero_pd();
            if B::HAS_OFFSET {
                let mask = if FULL { 255 } else { ((1u16 << (2 * count)) - 1) as u8 };
                let halves = _mm256_maskz_loadu_ps(mask, x.sums.add(2 * first));
                let pairs = _mm256_castps_pd(_mm256_hadd_ps(halves, halves));
                sums = _mm256_castpd256_pd128(_mm256_permute4x64_pd::<0b00_00_10_00>(pairs));
            }
            let mask = if FULL { 15 } else { (1u8 << count) - 1 };
            Ready {
                high,
                low,
                bias: match B::BIAS {
                    0 => _mm512_setzero_si512(),
                    bias => dot_pair([_mm512_set1_epi8(bias); 2], high, low),
                },
                scales: std::mem::transmute::<__m128, [f32; 4]>(_mm_maskz_loadu_ps(
                    mask,
                    x.scales.add(first),
                )),
                sums: std::mem::transmute::<__m128d, [f32; 4]>(sums),
            }
        }
    }
}

/// Steps times activation rows that are made ready once for all weight rows; of more there is no room to keep them.
const MOST_READY: usize = 64;

/// Four numbers in all quarters of a register.
///
/// # Safety
/// The CPU has AVX-512F.
#[inline(always)]
unsafe fn in_all_quarters(numbers: &[f32; 4]) -> __m512 {
    // SAFETY: four numbers can be read.
    unsafe { _mm512_broadcast_f32x4(_mm_loadu_ps(numbers.as_ptr())) }
}

/// 128 activation bytes in the order of the codes: 0-15 of each block, then 16-31 of each block.
///
/// # Safety
/// The CPU has AVX-512 F and BW; `32 * count` bytes are readable at `at`.
#[inline(always)]
unsafe fn activation_bytes<const FULL: bool>(at: *const i8, count: usize) -> [__m512i; 2] {
    // SAFETY: masked lanes are not read.
    unsafe {
        let (first, second) = if FULL {
            (_mm512_loadu_si512(at.cast()), _mm512_loadu_si512(at.add(64).cast()))
        } else {
            let mask = (1u128 << (32 * count)) - 1;
            let second = _mm512_maskz_loadu_epi8((mask >> 64) as u64, at.wrapping_add(64));
            (_mm512_maskz_loadu_epi8(mask as u64, at), second)
        };
        [
            _mm512_shuffle_i64x2::<0b10_00_10_00>(first, second),
            _mm512_shuffle_i64x2::<0b11_01_11_01>(first, second),
        ]
    }
}

/// Accumulators of four weight rows.
#[derive(Clone, Copy)]
struct Sums<const M: usize> {
    products: [[__m512; STRIPES]; M],
    /// Offsets times activation sums; lane `4r + b` as the scales.
    offsets: [__m512; M],
}

impl<const M: usize> Sums<M> {
    /// # Safety
    /// The CPU has AVX-512F.
    #[inline(always)]
    unsafe fn zero() -> Sums<M> {
        // SAFETY: the caller promises the instructions.
        let zero = unsafe { _mm512_setzero_ps() };
        Sums { products: [[zero; STRIPES]; M], offsets: [zero; M] }
    }

    /// The results of the four rows.
    ///
    /// # Safety
    /// The CPU has AVX-512F.
    #[inline(always)]
    unsafe fn totals<B: Small>(&self, m: usize) -> [f32; STRIPES] {
        let mut products = self.products[m];
        // SAFETY: the caller promises the instructions.
        unsafe {
            if B::HAS_OFFSET {
                for (r, products) in products.iter_mut().enumerate() {
                    *products = _mm512_mask_add_ps(*products, 15 << (4 * r), *products, self.offsets[m]);
                }
            }
            std::mem::transmute::<__m128, [f32; STRIPES]>(sum_each(products))
        }
    }
}

/// Four blocks (fewer if not `FULL`) of four weight rows.
///
/// # Safety
/// The caller keeps the promises of [`Pass::run`]; `count` blocks exist from block `first` in all rows.
#[inline(always)]
unsafe fn step<B: Small, const FULL: bool, const M: usize>(
    rows: [*const u8; STRIPES],
    x: &[Ready; M],
    first: usize,
    count: usize,
    sums: &mut Sums<M>,
) {
    // SAFETY: all reads are within the `count` blocks from `first`.
    unsafe {
        let mut packed = [[_mm512_setzero_si512(); 2]; STRIPES];
        let mut at = rows;
        for r in 0..STRIPES {
            at[r] = at[r].add(first * B::BYTES);
            packed[r] = codes::<B, FULL>(at[r], count);
            prefetch(at[r], BLOCKS * B::BYTES);
        }
        let (scales, offsets) = if B::TABLE.is_some() {
            (powers::<B, FULL>(at, count), _mm512_setzero_ps())
        } else {
            let [scales, offsets] = if HALVES_IN_A_VECTOR >= B::BYTES {
                halves_by_permutation::<B, FULL>(at, count)
            } else {
                halves_by_word::<B, FULL>(at, count)
            };
            let offsets = if B::HAS_OFFSET { _mm512_cvtph_ps(offsets) } else { _mm512_setzero_ps() };
            (_mm512_cvtph_ps(scales), offsets)
        };
        let lane = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
        for m in 0..M {
            let x = &x[m];
            let scales = _mm512_mul_ps(scales, in_all_quarters(&x.scales));
            if B::HAS_OFFSET {
                sums.offsets[m] = _mm512_fmadd_ps(offsets, in_all_quarters(&x.sums), sums.offsets[m]);
            }
            for r in 0..STRIPES {
                let mut integer = dot_pair(packed[r], x.high, x.low);
                if B::BIAS != 0 {
                    integer = _mm512_sub_epi32(integer, x.bias);
                }
                let scale =
                    _mm512_permutexvar_ps(_mm512_add_epi32(lane, _mm512_set1_epi32(4 * r as i32)), scales);
                sums.products[m][r] =
                    _mm512_fmadd_ps(_mm512_cvtepi32_ps(integer), scale, sums.products[m][r]);
            }
        }
    }
}

/// The activations of a step.
///
/// # Safety
/// The caller keeps the promises of [`Ready::new`] for all of `x`.
#[inline(always)]
unsafe fn all_ready<B: Small, const M: usize>(x: [Activations; M], block: usize, count: usize) -> [Ready; M] {
    // SAFETY: passed on.
    unsafe {
        let ready = |x: Activations| match count {
            BLOCKS => Ready::new::<B, true>(x, block, count),
            _ => Ready::new::<B, false>(x, block, count),
        };
        let mut all = [ready(x[0]); M];
        for m in 1..M {
            all[m] = ready(x[m]);
        }
        all
    }
}

impl<B: Small> Pass for B {
    #[inline(always)]
    unsafe fn run<const M: usize>(stripes: &mut Stripes<'_>, x: [Activations; M], first: usize) {
        let blocks = stripes.row_bytes() / B::BYTES;
        let steps = blocks.div_ceil(BLOCKS);
        let keep = steps * M <= MOST_READY;
        let mut kept = [const { MaybeUninit::<Ready>::uninit() }; MOST_READY];
        // SAFETY: every step stays inside the `blocks` blocks of the rows and activations; what is kept has been written.
        unsafe {
            for step in 0..if keep { steps } else { 0 } {
                let block = step * BLOCKS;
                let ready = all_ready::<B, M>(x, block, (blocks - block).min(BLOCKS));
                for m in 0..M {
                    kept[step * M + m] = MaybeUninit::new(ready[m]);
                }
            }
            let (whole, rest) = (blocks / BLOCKS * BLOCKS, blocks % BLOCKS);
            for pass in 0..stripes.passes() {
                let rows = stripes.rows(pass).map(<[u8]>::as_ptr);
                let mut sums = Sums::<M>::zero();
                for block in (0..whole).step_by(BLOCKS) {
                    if keep {
                        let x = kept.as_ptr().add(block / BLOCKS * M).cast();
                        step::<B, true, M>(rows, &*x, block, BLOCKS, &mut sums);
                    } else {
                        let x = all_ready::<B, M>(x, block, BLOCKS);
                        step::<B, true, M>(rows, &x, block, BLOCKS, &mut sums);
                    }
                }
                if rest > 0 && keep {
                    let x = kept.as_ptr().add(whole / BLOCKS * M).cast();
                    step::<B, false, M>(rows, &*x, whole, rest, &mut sums);
                } else if rest > 0 {
                    let x = all_ready::<B, M>(x, whole, rest);
                    step::<B, false, M>(rows, &x, whole, rest, &mut sums);
                }
                for m in 0..M {
                    stripes.write(first + m, pass, sums.totals::<B>(m));
                }
            }
        }
    }
}
