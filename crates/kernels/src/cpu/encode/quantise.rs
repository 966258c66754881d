//! `oscar_codec::quantise` with rows in lanes: grids and codes of a block of sixteen rows.
//!
//! Read the scalar module first; what is written here is only what differs from it for speed and cannot be seen in
//! the bytes:
//! * the clip threshold is found by keeping the few largest magnitudes of a row in order instead of sorting it;
//! * minimum and maximum are clipped instead of all values before they are compared (clipping is monotone);
//! * search keeps the grid of the best step and computes its codes once, at the end.

use oscar_codec::quantise::{LARGEST_GAIN, RowFormat, SMALLEST_GAIN, clip_threshold, step_ratio};
use oscar_codec::rule::{GAUSSIAN_STEP, Rule, SEARCH_STEPS, ScaleType, clip_index};

use super::unpack::BLOCK;
use crate::cpu::simd::Vector;

/// The range of a flat group and the least deviation.
const SMALLEST_RANGE: f32 = 1e-8;

/// Nearest number of the scale type, saturating; NaN becomes the most negative one, as in [`ScaleType::to_bits`].
///
/// # Safety
/// The CPU has the instructions of `V`.
#[inline(always)]
unsafe fn round_to_scale<V: Vector>(value: V, scale_type: ScaleType) -> V {
    // SAFETY: the caller promises the instructions.
    unsafe {
        let limit = scale_type.largest();
        let value = value.maximum(V::splat(-limit)).minimum(V::splat(limit));
        match scale_type {
            ScaleType::F16 => value.round_to_f16(),
            ScaleType::Bf16 => value.round_to_bf16(),
        }
    }
}

/// Codes and scales of a block of rows, on their way into a page.
#[derive(Default)]
pub(super) struct BlockCodes {
    /// `[channel][16]`, one code per byte.
    pub(super) codes: Vec<[u8; BLOCK]>,
    /// `[group][scale, offset][16]`.
    pub(super) scales: Vec<[[u16; BLOCK]; 2]>,
}

impl BlockCodes {
    /// Makes room for rows of `channels` channels (padding included, with codes of zero) in `groups` groups.
    pub(super) fn reset(&mut self, channels: usize, groups: usize) {
        self.codes.clear();
        self.codes.resize(channels, [0; BLOCK]);
        self.scales.clear();
        self.scales.resize(groups, [[0; BLOCK]; 2]);
    }
}

/// Quantises the 16 rows of `block`, `[channel][16]` finite numbers. `codes` has room for them.
///
/// # Safety
/// The CPU has the instructions of `V`.
#[inline(always)]
pub(super) unsafe fn quantise_block<V: Vector>(block: &[f32], format: &RowFormat, out: &mut BlockCodes) {
    let channels = block.len() / BLOCK;
    assert!(block.len().is_multiple_of(BLOCK) && out.codes.len() >= channels);
    assert!(out.scales.len() == format.groups && channels.is_multiple_of(format.groups));
    assert!(matches!(format.levels, 4 | 16), "two or four bits");
    for lane in (0..BLOCK).step_by(V::WIDTH) {
        // SAFETY: the caller promises the instructions; the lengths are asserted and `lane + WIDTH <= 16`.
        unsafe {
            match format.published {
                false => quantise_lanes::<V, false>(block, lane, format, out),
                true => quantise_lanes::<V, true>(block, lane, format, out),
            }
        }
    }
}

/// [`quantise_block`] of lanes `lane..lane + WIDTH`.
///
/// # Safety
/// The caller has checked the assertions of [`quantise_block`] and keeps its promises.
#[inline(always)]
unsafe fn quantise_lanes<V: Vector, const PUBLISHED: bool>(
    block: &[f32],
    lane: usize,
    format: &RowFormat,
    out: &mut BlockCodes,
) {
    let channels = block.len() / BLOCK / format.groups;
    let levels = Levels { top: f32::from(format.levels - 1), step_ratio: step_ratio(format.levels) };
    // SAFETY: the caller promises the instructions, and that codes and scales have room for 16 lanes of all channels
    // and groups.
    unsafe {
        let threshold = match format.rule {
            Rule::Clip(ratio) if ratio > 0.0 => threshold::<V>(block, lane, ratio),
            _ => V::splat(f32::INFINITY),
        };
        for (index, group) in block.chunks_exact(channels * BLOCK).enumerate() {
            let mut moments = None;
            let grid = match format.rule {
                Rule::Clip(_) => {
                    min_max::<V>(group, lane, threshold, levels).stored::<PUBLISHED>(format.scale_type)
                }
                Rule::Gaussian => {
                    let moments = moments.insert(Moments::of(group, lane));
                    moments.grid(GAUSSIAN_STEP, levels).stored::<PUBLISHED>(format.scale_type)
                }
                Rule::Search => {
                    let moments = moments.insert(Moments::of(group, lane));
                    search::<V, PUBLISHED>(moments, group, lane, format.scale_type, levels)
                }
            };
            let codes = &mut out.codes[index * channels..][..channels];
            let (scale, offset) = match moments {
                Some(moments) if !PUBLISHED => {
                    let mut along = V::splat(0.0);
                    for (lanes, codes) in group.chunks_exact(BLOCK).zip(codes) {
                        let x = V::load(lanes.as_ptr().add(lane));
                        let code = grid.code::<PUBLISHED>(x, levels).truncate();
                        code.store_bytes(codes.as_mut_ptr().add(lane));
                        let decoded = grid.decode(code).subtract(moments.mean);
                        along = x.subtract(moments.mean).multiply_add(decoded, along);
                    }
                    grid.unbiased(&moments, along, format.scale_type)
                }
                _ => {
                    for (lanes, codes) in group.chunks_exact(BLOCK).zip(codes) {
                        let x = clip(V::load(lanes.as_ptr().add(lane)), threshold);
                        grid.code::<PUBLISHED>(x, levels).store_bytes(codes.as_mut_ptr().add(lane));
                    }
                    (grid.scale, grid.offset)
                }
            };
            let [scales, offsets] = &mut out.scales[index];
            store_scale(scale, format.scale_type, scales.as_mut_ptr().add(lane));
            store_scale(offset, format.scale_type, offsets.as_mut_ptr().add(lane));
        }
    }
}

/// # Safety
/// The CPU has the instructions of `V`, and there is room for `WIDTH` numbers.
#[inline(always)]
unsafe fn store_scale<V: Vector>(value: V, scale_type: ScaleType, at: *mut u16) {
    // SAFETY: the caller promises the instructions and the room.
    unsafe {
        match scale_type {
            ScaleType::F16 => value.store_f16(at),
            ScaleType::Bf16 => {
                let mut lanes = [0.0_f32; BLOCK];
                value.store(lanes.as_mut_ptr());
                for (index, value) in lanes[..V::WIDTH].iter().enumerate() {
                    *at.add(index) = (value.to_bits() >> 16) as u16;
                }
            }
        }
    }
}

/// # Safety
/// The CPU has the instructions of `V`.
#[inline(always)]
unsafe fn clip<V: Vector>(x: V, threshold: V) -> V {
    // SAFETY: the caller promises the instructions.
    unsafe { x.maximum(V::splat(0.0).subtract(threshold)).minimum(threshold) }
}

/// The magnitude at which each row is clipped.
///
/// # Safety
/// The CPU has the instructions of `V`; `block` is `[channel][16]`.
#[inline(always)]
unsafe fn threshold<V: Vector>(block: &[f32], lane: usize, ratio: f32) -> V {
    let channels = block.len() / BLOCK;
    // The threshold is the `rank`-th largest magnitude.
    let rank = channels - clip_index(ratio, channels);
    // SAFETY: the caller promises the instructions and the shape.
    unsafe {
        // Ranks of the published ratios 0.96 and 0.92 for 64, 128 and 256 channels are 3, 6, 11 and 21.
        match rank {
            1..=3 => largest::<V, 3>(block, lane)[rank - 1],
            4..=6 => largest::<V, 6>(block, lane)[rank - 1],
            7..=11 => largest::<V, 11>(block, lane)[rank - 1],
            12..=21 => largest::<V, 21>(block, lane)[rank - 1],
            _ => {
                let mut thresholds = [0.0; BLOCK];
                let mut row = vec![0.0; channels];
                for (index, threshold) in thresholds[..V::WIDTH].iter_mut().enumerate() {
                    for (x, lanes) in row.iter_mut().zip(block.chunks_exact(BLOCK)) {
                        *x = lanes[lane + index];
                    }
                    *threshold = clip_threshold(&row, ratio);
                }
                V::load(thresholds.as_ptr())
            }
        }
    }
}

/// The `COUNT` largest magnitudes of each row, largest first (zeros where a row has fewer).
///
/// # Safety
/// The CPU has the instructions of `V`; `block` is `[channel][16]`.
#[inline(always)]
unsafe fn largest<V: Vector, const COUNT: usize>(block: &[f32], lane: usize) -> [V; COUNT] {
    // SAFETY: the caller promises the instructions and the shape.
    unsafe {
        let mut kept = [V::splat(0.0); COUNT];
        for lanes in block.chunks_exact(BLOCK) {
            let mut x = V::load(lanes.as_ptr().add(lane)).magnitude();
            for kept in &mut kept {
                let larger = kept.maximum(x);
                x = kept.minimum(x);
                *kept = larger;
            }
        }
        kept
    }
}

/// What differs between grids of two and of four bits.
#[derive(Clone, Copy)]
struct Levels {
    /// The largest code, as a number.
    top: f32,
    /// The best Gaussian step relative to that of two bits.
    step_ratio: f32,
}

/// A grid before its numbers are rounded.
#[derive(Clone, Copy)]
struct Grid<V> {
    step: V,
    low: V,
}

/// A grid as a reader sees it, and what codes are computed from: `1 / scale` and `offset`, or in a published row
/// the unrounded step and zero point.
#[derive(Clone, Copy)]
struct StoredGrid<V> {
    scale: V,
    offset: V,
    divisor: V,
    zero: V,
}

/// Clipped minimum to clipped maximum.
///
/// # Safety
/// The CPU has the instructions of `V`; `group` is `[channel][16]`.
#[inline(always)]
unsafe fn min_max<V: Vector>(group: &[f32], lane: usize, threshold: V, levels: Levels) -> Grid<V> {
    // SAFETY: the caller promises the instructions and the shape.
    unsafe {
        let mut low = V::splat(f32::INFINITY);
        let mut high = V::splat(f32::NEG_INFINITY);
        for lanes in group.chunks_exact(BLOCK) {
            let x = V::load(lanes.as_ptr().add(lane));
            low = low.minimum(x);
            high = high.maximum(x);
        }
        let (low, high) = (clip(low, threshold), clip(high, threshold));
        let range = high.subtract(low).maximum(V::splat(SMALLEST_RANGE));
        Grid { step: range.divide(V::splat(levels.top)), low }
    }
}

#[derive(Clone, Copy)]
struct Moments<V> {
    mean: V,
    /// Sums of squared differences from the mean.
    squares: V,
    deviation: V,
}

impl<V: Vector> Moments<V> {
    /// # Safety
    /// The CPU has the instructions of `V`; `group` is `[channel][16]`.
    #[inline(always)]
    unsafe fn of(group: &[f32], lane: usize) -> Self {
        // SAFETY: the caller promises the instructions and the shape.
        unsafe {
            let count = V::splat((group.len() / BLOCK) as f32);
            let mut sum = V::splat(0.0);
            for lanes in group.chunks_exact(BLOCK) {
                sum = sum.add(V::load(lanes.as_ptr().add(lane)));
            }
            let mean = sum.divide(count);
            let mut squares = V::splat(0.0);
            for lanes in group.chunks_exact(BLOCK) {
                let difference = V::load(lanes.as_ptr().add(lane)).subtract(mean);
                squares = difference.multiply_add(difference, squares);
            }
            let deviation = squares.divide(count).square_root().add(V::splat(SMALLEST_RANGE));
            Moments { mean, squares, deviation }
        }
    }

    /// # Safety
    /// The CPU has the instructions of `V`.
    #[inline(always)]
    unsafe fn grid(&self, steps: f32, levels: Levels) -> Grid<V> {
        // SAFETY: the caller promises the instructions.
        unsafe {
            let step = V::splat(steps * levels.step_ratio).multiply(self.deviation);
            Grid { step, low: self.mean.subtract(V::splat(0.5 * levels.top).multiply(step)) }
        }
    }
}

/// The grid whose step leaves the smallest squared error; the first of equals.
///
/// # Safety
/// The CPU has the instructions of `V`; `group` is `[channel][16]`.
#[inline(always)]
unsafe fn search<V: Vector, const PUBLISHED: bool>(
    moments: &Moments<V>,
    group: &[f32],
    lane: usize,
    scale_type: ScaleType,
    levels: Levels,
) -> StoredGrid<V> {
    // SAFETY: the caller promises the instructions and the shape.
    unsafe {
        let mut grids =
            [moments.grid(SEARCH_STEPS[0], levels).stored::<PUBLISHED>(scale_type); SEARCH_STEPS.len()];
        for (grid, step) in grids.iter_mut().zip(SEARCH_STEPS).skip(1) {
            *grid = moments.grid(step, levels).stored::<PUBLISHED>(scale_type);
        }
        let mut errors = [V::splat(0.0); SEARCH_STEPS.len()];
        for lanes in group.chunks_exact(BLOCK) {
            let x = V::load(lanes.as_ptr().add(lane));
            for (error, grid) in errors.iter_mut().zip(&grids) {
                let code = grid.code::<PUBLISHED>(x, levels).truncate();
                let difference = grid.decode(code).subtract(x);
                *error = difference.multiply_add(difference, *error);
            }
        }
        let (mut least, mut best) = (errors[0], grids[0]);
        for (error, grid) in errors.into_iter().zip(grids).skip(1) {
            best = StoredGrid {
                scale: error.where_less(least, grid.scale, best.scale),
                offset: error.where_less(least, grid.offset, best.offset),
                divisor: error.where_less(least, grid.divisor, best.divisor),
                zero: error.where_less(least, grid.zero, best.zero),
            };
            least = error.where_less(least, error, least);
        }
        best
    }
}

impl<V: Vector> Grid<V> {
    /// # Safety
    /// The CPU has the instructions of `V`.
    #[inline(always)]
    unsafe fn stored<const PUBLISHED: bool>(self, scale_type: ScaleType) -> StoredGrid<V> {
        // SAFETY: the caller promises the instructions.
        unsafe {
            let offset = V::splat(0.0).subtract(self.low);
            let floor = if PUBLISHED { 0.0 } else { scale_type.smallest_scale() };
            let scale = round_to_scale(self.step.maximum(V::splat(floor)), scale_type);
            let stored_offset = round_to_scale(offset, scale_type);
            let (divisor, zero) = if PUBLISHED {
                (self.step, offset.divide(self.step))
            } else {
                (V::splat(1.0).divide(scale), stored_offset)
            };
            StoredGrid { scale, offset: stored_offset, divisor, zero }
        }
    }
}

impl<V: Vector> StoredGrid<V> {
    /// A number whose whole part is the code.
    ///
    /// # Safety
    /// The CPU has the instructions of `V`.
    #[inline(always)]
    unsafe fn code<const PUBLISHED: bool>(&self, x: V, levels: Levels) -> V {
        // SAFETY: the caller promises the instructions.
        unsafe {
            let half = V::splat(0.5);
            let position = if PUBLISHED {
                x.divide(self.divisor).add(self.zero).add(half)
            } else {
                x.add(self.zero).multiply_add(self.divisor, half)
            };
            position.maximum(V::splat(0.0)).minimum(V::splat(levels.top))
        }
    }

    /// What a reader makes of whole codes.
    ///
    /// # Safety
    /// The CPU has the instructions of `V`.
    #[inline(always)]
    unsafe fn decode(&self, code: V) -> V {
        // SAFETY: the caller promises the instructions.
        unsafe { code.multiply_add(self.scale, V::splat(0.0).subtract(self.offset)) }
    }

    /// Scale and offset that stretch decoded rows about their means to their full length; `along` has the products of
    /// rows with decoded rows.
    ///
    /// # Safety
    /// The CPU has the instructions of `V`.
    #[inline(always)]
    unsafe fn unbiased(&self, moments: &Moments<V>, along: V, scale_type: ScaleType) -> (V, V) {
        // SAFETY: the caller promises the instructions.
        unsafe {
            let one = V::splat(1.0);
            let gain = moments.squares.divide(along);
            // A gain that is not a number is not above the smallest.
            let below = gain.where_less(V::splat(LARGEST_GAIN), gain, one);
            let gain = V::splat(SMALLEST_GAIN).where_less(gain, below, one);
            let scale = gain.multiply(self.scale).maximum(V::splat(scale_type.smallest_scale()));
            let offset = gain.multiply_add(self.offset, gain.subtract(one).multiply(moments.mean));
            (round_to_scale(scale, scale_type), round_to_scale(offset, scale_type))
        }
    }
}
