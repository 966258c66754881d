//! `oscar_codec::band` with rows in lanes: codes and scales of the bands of sixteen keys.
//!
//! Read the scalar module first. Here every step is tried on all channels before the next, and the codes of the best are
//! computed once more at the end.

use oscar_codec::band::{half_range, scale_code, steps};
use oscar_codec::{BandLayout, PAGE_TOKENS};

use super::pack::write_keys;
use super::unpack::BLOCK;
use crate::cpu::simd::{Kernel, Vector};

/// Quantises transformed blocks of finite numbers into the keys of a page.
pub(super) struct QuantiseBands<'a> {
    pub(super) layout: &'a BandLayout,
    pub(super) rows: usize,
    /// `[block][channel][16]`.
    pub(super) blocks: &'a [f32],
    /// Working memory, `[channel][16]`.
    pub(super) codes: &'a mut Vec<[u8; BLOCK]>,
    pub(super) page: &'a mut [u8],
}

impl Kernel for QuantiseBands<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let QuantiseBands { layout, rows, blocks, codes, page } = self;
        let dim = layout.head_dim();
        assert!(page.len() == layout.page_bytes() && blocks.len().is_multiple_of(dim * BLOCK));
        codes.clear();
        codes.resize(dim, [0; BLOCK]);
        for (index, block) in blocks.chunks_exact(dim * BLOCK).enumerate() {
            let first = index * BLOCK;
            let tokens = (rows - first).min(BLOCK);
            for (number, band) in layout.bands().iter().enumerate() {
                let channels = &block[band.first * BLOCK..][..band.channels * BLOCK];
                let mut scales = [0; BLOCK];
                // SAFETY: the caller promises the instructions; as many codes as channels.
                unsafe { quantise_band::<V>(channels, band.bits, &mut codes[band.range()], &mut scales) };
                let at = layout.key_scales() + number * PAGE_TOKENS + first;
                page[at..at + tokens].copy_from_slice(&scales[..tokens]);
            }
            for unused in layout.bands().len()..layout.key_scale_count() {
                page[layout.key_scales() + unused * PAGE_TOKENS + first..][..tokens].fill(0);
            }
            // Bands of one width share words.
            for bands in layout.bands().chunk_by(|one, other| one.bits == other.bits) {
                let channels = bands[0].first..bands[bands.len() - 1].range().end;
                let words = &mut page[4 * bands[0].region_word * PAGE_TOKENS..layout.value_codes()];
                match bands[0].bits {
                    1 => write_keys::<1>(words, first, tokens, &codes[channels]),
                    2 => write_keys::<2>(words, first, tokens, &codes[channels]),
                    _ => write_keys::<4>(words, first, tokens, &codes[channels]),
                }
            }
        }
    }
}

/// Codes and scales of a band, `[channel][16]` numbers.
///
/// # Safety
/// The CPU has the instructions of `V`.
#[inline(always)]
unsafe fn quantise_band<V: Vector>(
    band: &[f32],
    bits: u32,
    codes: &mut [[u8; BLOCK]],
    scales: &mut [u8; BLOCK],
) {
    assert_eq!(band.len(), codes.len() * BLOCK, "a code per channel");
    let mut lengths = [[0.0_f32; BLOCK]; 2];
    for lane in (0..BLOCK).step_by(V::WIDTH) {
        // SAFETY: the caller promises the instructions; `lane + WIDTH <= 16`, and there are 16 lanes of everything.
        unsafe {
            let squares = fold::<V>(band, lane, |x, sum| x.multiply_add(x, sum));
            let deviation = squares.divide(V::splat(codes.len() as f32)).square_root();
            // Where no step is better than none, codes are those of what is not a number: zero.
            let mut reciprocal = V::splat(f32::NAN);
            let (mut best, mut along) = (V::splat(f32::NEG_INFINITY), V::splat(0.0));
            for &step in steps(bits) {
                let grid = Grid::<V>::new(V::splat(1.0).divide(V::splat(step).multiply(deviation)), bits);
                let (product, levels) = grid.fit(band, lane);
                let matched = product.multiply(product).divide(levels);
                reciprocal = best.where_less(matched, grid.reciprocal, reciprocal);
                along = best.where_less(matched, product, along);
                best = best.where_less(matched, matched, best);
            }
            // Neither has a row without strength any codes.
            let reciprocal = V::splat(0.0).where_less(squares, reciprocal, V::splat(f32::NAN));
            let grid = Grid::<V>::new(reciprocal, bits);
            for (lanes, codes) in band.chunks_exact(BLOCK).zip(&mut *codes) {
                grid.code(V::load(lanes.as_ptr().add(lane))).store_bytes(codes.as_mut_ptr().add(lane));
            }
            squares.store(lengths[0].as_mut_ptr().add(lane));
            squares.divide(along).store(lengths[1].as_mut_ptr().add(lane));
        }
    }
    let [squares, lengths] = lengths;
    for (scale, (squares, length)) in scales.iter_mut().zip(squares.into_iter().zip(lengths)) {
        *scale = if squares > 0.0 { scale_code(length) } else { 0 };
    }
}

/// Sums over the channels of a band, in their order.
///
/// # Safety
/// The CPU has the instructions of `V`; `band` is `[channel][16]`.
#[inline(always)]
unsafe fn fold<V: Vector>(band: &[f32], lane: usize, add: impl Fn(V, V) -> V) -> V {
    // SAFETY: the caller promises the instructions and the shape.
    unsafe {
        let mut sum = V::splat(0.0);
        for lanes in band.chunks_exact(BLOCK) {
            sum = add(V::load(lanes.as_ptr().add(lane)), sum);
        }
        sum
    }
}

/// Levels at equal steps around zero.
#[derive(Clone, Copy)]
struct Grid<V> {
    reciprocal: V,
    centre: f32,
    top: f32,
    half: f32,
}

impl<V: Vector> Grid<V> {
    #[inline(always)]
    fn new(reciprocal: V, bits: u32) -> Grid<V> {
        let levels = (1_u32 << bits) as f32;
        Grid { reciprocal, centre: 0.5 * levels, top: levels - 1.0, half: half_range(bits) }
    }

    /// Rounds a register of numbers to codes.
    ///
    /// # Safety
    /// The CPU has the instructions of `V`.
    #[inline(always)]
    unsafe fn code(&self, x: V) -> V {
        // SAFETY: the caller promises the instructions.
        unsafe {
            let position = x.multiply_add(self.reciprocal, V::splat(self.centre));
            position.maximum(V::splat(0.0)).minimum(V::splat(self.top)).truncate()
        }
    }

    /// The products of rows with their levels, and the sums of squared levels.
    ///
    /// # Safety
    /// The CPU has the instructions of `V`; `band` is `[channel][16]`.
    #[inline(always)]
    unsafe fn fit(&self, band: &[f32], lane: usize) -> (V, V) {
        // SAFETY: the caller promises the instructions and the shape.
        unsafe {
            let (mut product, mut squares) = (V::splat(0.0), V::splat(0.0));
            for lanes in band.chunks_exact(BLOCK) {
                let x = V::load(lanes.as_ptr().add(lane));
                let level = self.code(x).subtract(V::splat(self.half));
                product = x.multiply_add(level, product);
                squares = level.multiply_add(level, squares);
            }
            (product, squares)
        }
    }
}
