//! One row of numbers to codes and back: the arithmetic every encoder, on whatever hardware, must repeat.
//!
//! A row of `d` channels is cut into equal groups of consecutive channels. Each group gets a step `s` and an
//! offset `o`, both stored in 16 bits; a code `c` then stands for `c·s - o` (the reference calls `o` "scale times
//! zero point"). All arithmetic is f32 with round to nearest even and is **order-defined**, so that a SIMD lane
//! or a GPU thread that handles one row can produce the same bytes:
//!
//! 1. Clip (only [`Rule::Clip`] with a positive ratio): `τ` is the magnitude at [`clip_index`] of the whole row,
//!    sorted; every value becomes `min(max(x, -τ), τ)`.
//! 2. Grid of a group with `L` levels:
//!    * clip: `low = min`, `s = max(max - min, 1e-8) / (L-1)`;
//!    * Gaussian and search: `m = (x0 + x1 + …) / n`, added in channel order;
//!      `v = fma(x-m, x-m, v)` in channel order from 0; `σ = sqrt(v / n) + 1e-8`; `s = a·σ` with the step `a` of the
//!      rule; `low = m - (L-1)/2·s` (a product, then a difference).
//! 3. Offset `o = 0 - low` (never -0 for a zero minimum). Stored: `s' = round16(max(s, smallest))`, `o' = round16(o)`,
//!    both saturating (see [`ScaleType::to_bits`]): an offset beyond ±65504 in f16 stays finite and the row decodes
//!    as well as it can.
//! 4. Codes:
//!    * normally against what is stored: `r = 1 / s'`, `c = trunc(min(max(fma(x + o', r, 0.5), 0), L-1))`;
//!    * `published`, the reference's rule: against the unrounded numbers, `z = o / s`,
//!      `c = trunc(min(max(x / s + z + 0.5, 0), L-1))`, and `s' = round16(s)` without the smallest-scale floor.
//!
//!    `max(NaN, 0)` is 0 (overflow in a published constant row), and codes are always inside `0..L`.
//! 5. [`Rule::Search`] does 3 and 4 for each step and keeps the first with the least
//!    `e = fma(y-x, y-x, e)`, `y = fma(c, s', -o')`, over channels in order from 0.
//! 6. Gaussian and search, unless published: **unbiased scales**. The grid with the least squared error shrinks a row
//!    towards its mean, and with it the large logits that attention looks for. So the decoded row is stretched about the
//!    mean until it projects onto the row with its full length: `b = fma(x-m, y-m, b)` over channels in order from 0,
//!    `g = v / b`, and 1 where that is not between 0.5 and 2 (flat rows, one outlier); then
//!    `s'' = round16(max(g·s', smallest))` and `o'' = round16(fma(g, o', (g-1)·m))` are stored in place of `s'` and `o'`.
//!    Codes are not chosen again.
//!
//! Nothing but `+ - * / sqrt fma min max` and 16-bit rounding is used.

use crate::error::{CodecError, check_finite, check_length};
use crate::rule::{GAUSSIAN_STEP, Rule, SEARCH_STEPS, ScaleType, clip_index};

/// The range of a flat group is taken to be this much, as in the reference.
const SMALLEST_RANGE: f32 = 1e-8;

/// A row is stretched only by a factor between these: beyond them its mean or one outlier is all there is to it.
pub const SMALLEST_GAIN: f32 = 0.5;
/// See [`SMALLEST_GAIN`].
pub const LARGEST_GAIN: f32 = 2.0;

/// What is fixed about the rows of one head: everything but the numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowFormat {
    /// Equal groups of consecutive channels, each with its own scale and offset.
    pub groups: usize,
    /// How a grid is chosen.
    pub rule: Rule,
    /// How its two numbers are stored.
    pub scale_type: ScaleType,
    /// Codes from the unrounded scale, as the reference does.
    pub published: bool,
    /// Levels: 4, 8 or 16 for 2, 3 or 4 bits.
    pub levels: u8,
}

impl RowFormat {
    /// The 2-bit format that is not published: codes against the stored scale.
    pub fn int2(groups: usize, rule: Rule, scale_type: ScaleType) -> Self {
        RowFormat { groups, rule, scale_type, published: false, levels: 4 }
    }

    /// Checks that rows of `head_dim` channels can be cut this way.
    pub fn check(&self, head_dim: usize) -> Result<(), CodecError> {
        if self.groups == 0 || head_dim == 0 || !head_dim.is_multiple_of(self.groups) {
            return Err(CodecError::Groups { head_dim, groups: self.groups });
        }
        if !matches!(self.levels, 4 | 8 | 16) {
            return Err(CodecError::Shape {
                what: "levels of a code (4, 8 or 16)",
                expected: 4,
                got: self.levels.into(),
            });
        }
        Ok(())
    }
}

/// The stored bits of one group's scale and offset.
pub type ScalePair = (u16, u16);

/// Quantises one row. `codes` gets one code per channel and `scales` one pair per group.
///
/// On an error nothing has been written. The row of [`CodecError::NotFinite`] is 0; callers with more rows say
/// [`CodecError::in_row`].
pub fn quantise_row(
    row: &[f32],
    format: &RowFormat,
    codes: &mut [u8],
    scales: &mut [ScalePair],
) -> Result<(), CodecError> {
    format.check(row.len())?;
    check_length("codes of a row", row.len(), codes.len())?;
    check_length("scales of a row", format.groups, scales.len())?;
    check_finite(row, 0)?;
    let clipped;
    let row = match format.rule {
        Rule::Clip(ratio) if ratio > 0.0 => {
            let threshold = clip_threshold(row, ratio);
            clipped = row.iter().map(|x| x.max(-threshold).min(threshold)).collect::<Vec<_>>();
            &clipped
        }
        _ => row,
    };
    let channels = row.len() / format.groups;
    let groups = row.chunks_exact(channels).zip(codes.chunks_exact_mut(channels)).zip(scales);
    for ((group, codes), scales) in groups {
        *scales = quantise_group(group, format, codes);
    }
    Ok(())
}

/// The inverse of [`quantise_row`]: `fma(code, s', -o')` per channel.
pub fn dequantise_row(
    codes: &[u8],
    scales: &[ScalePair],
    scale_type: ScaleType,
    row: &mut [f32],
) -> Result<(), CodecError> {
    check_length("codes of a row", row.len(), codes.len())?;
    if scales.is_empty() || !row.len().is_multiple_of(scales.len()) || row.is_empty() {
        return Err(CodecError::Groups { head_dim: row.len(), groups: scales.len() });
    }
    let channels = row.len() / scales.len();
    for ((row, codes), &(scale, offset)) in
        row.chunks_exact_mut(channels).zip(codes.chunks_exact(channels)).zip(scales)
    {
        let (scale, offset) = (scale_type.to_f32(scale), scale_type.to_f32(offset));
        for (x, &code) in row.iter_mut().zip(codes) {
            *x = f32::from(code).mul_add(scale, -offset);
        }
    }
    Ok(())
}

/// The magnitude at which a row is clipped: exact, no interpolation.
pub fn clip_threshold(row: &[f32], ratio: f32) -> f32 {
    // Magnitudes are not negative, so their bits sort as they do.
    let mut magnitudes: Vec<u32> = row.iter().map(|x| x.abs().to_bits()).collect();
    let index = clip_index(ratio, row.len());
    f32::from_bits(*magnitudes.select_nth_unstable(index).1)
}

fn quantise_group(group: &[f32], format: &RowFormat, codes: &mut [u8]) -> ScalePair {
    let top = f32::from(format.levels - 1);
    match format.rule {
        Rule::Clip(_) => {
            let low = group.iter().fold(f32::INFINITY, |low, &x| low.min(x));
            let high = group.iter().fold(f32::NEG_INFINITY, |high, &x| high.max(x));
            let grid = Grid { step: (high - low).max(SMALLEST_RANGE) / top, low };
            grid.round(group, format, codes).pair
        }
        Rule::Gaussian => {
            let moments = Moments::of(group);
            let grid = moments.grid(GAUSSIAN_STEP * step_ratio(format.levels), top);
            grid.round(group, format, codes).unbiased(&moments, group, format, codes)
        }
        Rule::Search => {
            let moments = Moments::of(group);
            let ratio = step_ratio(format.levels);
            let mut best: Option<(f32, StoredGrid)> = None;
            let mut trial = vec![0; codes.len()];
            for step in SEARCH_STEPS {
                let stored = moments.grid(step * ratio, top).round(group, format, &mut trial);
                let error = stored.squared_error(group, &trial);
                if best.as_ref().is_none_or(|(least, _)| error < *least) {
                    best = Some((error, stored));
                    codes.copy_from_slice(&trial);
                }
            }
            let (_, stored) = best.expect("there is at least one step to try");
            stored.unbiased(&moments, group, format, codes)
        }
    }
}

/// The best Gaussian step for `levels` relative to that for four: 0.9957, 0.5860, 0.3352 standard deviations
/// are the known optima of the uniform quantiser (Max 1960).
pub fn step_ratio(levels: u8) -> f32 {
    match levels {
        8 => 0.5860 / 0.9957,
        16 => 0.3352 / 0.9957,
        _ => 1.0,
    }
}

struct Moments {
    mean: f32,
    /// The sum of squared differences from the mean.
    squares: f32,
    deviation: f32,
}

impl Moments {
    fn of(group: &[f32]) -> Self {
        let count = group.len() as f32;
        let mean = group.iter().fold(0.0_f32, |sum, x| sum + x) / count;
        let squares = group.iter().fold(0.0_f32, |sum, x| (x - mean).mul_add(x - mean, sum));
        Moments { mean, squares, deviation: (squares / count).sqrt() + SMALLEST_RANGE }
    }

    fn grid(&self, steps: f32, top: f32) -> Grid {
        let step = steps * self.deviation;
        Grid { step, low: self.mean - 0.5 * top * step }
    }
}

/// A grid before its numbers are rounded.
struct Grid {
    step: f32,
    low: f32,
}

/// A grid as a reader sees it.
struct StoredGrid {
    pair: ScalePair,
    scale: f32,
    offset: f32,
}

impl Grid {
    // `max` then `min`, not `clamp`: NaN must become a code too.
    #[allow(clippy::manual_clamp)]
    fn round(&self, group: &[f32], format: &RowFormat, codes: &mut [u8]) -> StoredGrid {
        let top = f32::from(format.levels - 1);
        let offset = 0.0 - self.low;
        let floor = if format.published { 0.0 } else { format.scale_type.smallest_scale() };
        let pair = (format.scale_type.to_bits(self.step.max(floor)), format.scale_type.to_bits(offset));
        let stored = StoredGrid {
            pair,
            scale: format.scale_type.to_f32(pair.0),
            offset: format.scale_type.to_f32(pair.1),
        };
        if format.published {
            let zero = offset / self.step;
            for (code, x) in codes.iter_mut().zip(group) {
                *code = (x / self.step + zero + 0.5).max(0.0).min(top) as u8;
            }
        } else {
            let reciprocal = 1.0 / stored.scale;
            for (code, x) in codes.iter_mut().zip(group) {
                *code = (x + stored.offset).mul_add(reciprocal, 0.5).max(0.0).min(top) as u8;
            }
        }
        stored
    }
}

impl StoredGrid {
    fn decode(&self, code: u8) -> f32 {
        f32::from(code).mul_add(self.scale, -self.offset)
    }

    fn squared_error(&self, group: &[f32], codes: &[u8]) -> f32 {
        group.iter().zip(codes).fold(0.0, |sum, (x, &code)| {
            let error = self.decode(code) - x;
            error.mul_add(error, sum)
        })
    }

    /// What is stored for codes that were chosen on this grid: step 6 of the module's definition.
    fn unbiased(&self, moments: &Moments, group: &[f32], format: &RowFormat, codes: &[u8]) -> ScalePair {
        if format.published {
            return self.pair;
        }
        let Moments { mean, squares, .. } = *moments;
        let along = group
            .iter()
            .zip(codes)
            .fold(0.0_f32, |sum, (x, &code)| (x - mean).mul_add(self.decode(code) - mean, sum));
        let gain = squares / along;
        let gain = if gain > SMALLEST_GAIN && gain < LARGEST_GAIN { gain } else { 1.0 };
        let scale = (gain * self.scale).max(format.scale_type.smallest_scale());
        let offset = gain.mul_add(self.offset, (gain - 1.0) * mean);
        (format.scale_type.to_bits(scale), format.scale_type.to_bits(offset))
    }
}
