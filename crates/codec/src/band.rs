//! Bands: codes of different widths for channels of different strength. The arithmetic of one row.
//!
//! Keys have steep spectra: after a rotation to principal directions a few channels carry most of what a query can read.
//! A row is therefore cut into bands of channels of like strength, strong ones first, and each band gets codes of its own
//! width and, for every token, a scale of its own:
//!
//! ```text
//!   strength
//!   |##
//!   |####                        bits a channel      4    2    1    1
//!   |#######__
//!   |#########_____________      one scale a token   s0   s1   s2   s3
//!   +-------------------------> channel
//!   | band 0 | band 1 | 2 | 3 |
//! ```
//!
//! The transform before ([`HeadTransform`](crate::HeadTransform)) mixes the channels inside a band with a Hadamard matrix
//! and divides every band by its typical strength, so that all scales are about one and a scale of 8 bits, the same
//! logarithm for all heads, has room for tokens 256 times weaker and stronger.
//!
//! A code `c` of `b` bits stands for `(c - (L-1)/2)·s` with `L = 2ᵇ` levels; there is no offset. As in
//! [`quantise`](crate::quantise) all arithmetic is f32, rounded to nearest even and **order-defined**. For a band of `n`
//! channels `x`:
//!
//! 1. `v = fma(x, x, v)` in channel order from 0. Where `v` is 0, all codes and the scale are 0.
//! 2. For every step `a` of [`steps`]: `d = a·sqrt(v / n)`, `c = trunc(min(max(fma(x, 1/d, L/2), 0), L-1))`,
//!    `u = c - (L-1)/2`, and in channel order from 0 `p = fma(x, u, p)`, `r = fma(u, u, r)`. The first step with the largest
//!    `(p·p) / r` wins: its levels point in the direction of the row best, whatever their length.
//! 3. The scale is `v / p`, which gives the decoded row its full length along the row, so that no logit shrinks; rounded to
//!    [`scale_code`].

/// Steps that are fit for codes of `bits` bits, in standard deviations of a band: the best for a Gaussian, and some
/// around it for bands that are flatter or have longer tails. Codes of one bit are signs, whatever the step.
pub fn steps(bits: u32) -> &'static [f32] {
    const ONE: [f32; 1] = [1.596];
    const TWO: [f32; 5] = [0.7, 0.85, 0.9957, 1.15, 1.35];
    const FOUR: [f32; 5] = [0.235, 0.285, 0.3352, 0.385, 0.45];
    match bits {
        1 => &ONE,
        2 => &TWO,
        _ => &FOUR,
    }
}

/// Scales of one octave, 2 to the power of n / 16.
pub const OCTAVE: [f32; 16] = [
    1.0,
    1.044_273_7,
    1.090_507_7,
    1.138_788_6,
    1.189_207_1,
    1.241_857_8,
    1.296_839_6,
    1.354_255_6,
    std::f32::consts::SQRT_2,
    1.476_826_2,
    1.542_210_8,
    1.610_490_3,
    1.681_792_9,
    1.756_252_2,
    1.834_008_1,
    1.915_206_6,
];

/// Where one scale of an octave ends and the next begins, 2 to the power of (n + 1/2) / 16.
pub const BOUNDS: [f32; 16] = [
    1.021_897_2,
    1.067_140_5,
    1.114_386_8,
    1.163_724_9,
    1.215_247_4,
    1.269_051,
    1.325_236_7,
    1.383_91,
    1.445_180_8,
    1.509_164_5,
    1.575_980_9,
    1.645_755_5,
    1.718_619_3,
    1.794_709_1,
    1.874_167_7,
    1.957_144_1,
];

/// Octaves below one at which codes begin.
pub const OCTAVES_BELOW: u32 = 8;

/// The scale that a code stands for: 0, or 2 to the power of `code / 16 - 8`.
pub const fn scale(code: u8) -> f32 {
    match code {
        0 => 0.0,
        _ => {
            let octave = (code >> 4) as u32;
            f32::from_bits(OCTAVE[(code & 15) as usize].to_bits() + (octave << 23) - (OCTAVES_BELOW << 23))
        }
    }
}

/// The code of the scale nearest to `value` in the logarithm. What is too small to have one gets 0, what is too large (or
/// not a number) the largest.
pub fn scale_code(value: f32) -> u8 {
    if !(value > 0.0 && value < f32::INFINITY) {
        return if value <= 0.0 { 0 } else { u8::MAX };
    }
    let bits = value.to_bits();
    let octave = (bits >> 23) as i32 - 127 + OCTAVES_BELOW as i32;
    let within = f32::from_bits(bits & 0x7f_ffff | 127 << 23);
    let step = BOUNDS.iter().filter(|&&bound| within >= bound).count() as i32;
    (16 * octave + step).clamp(0, 255) as u8
}

/// Quantises the channels of one band of a token. Returns the code of its scale.
///
/// Numbers are finite; callers check that for whole rows.
///
/// # Panics
/// When there are not as many codes as channels.
pub fn quantise_band(band: &[f32], bits: u32, codes: &mut [u8]) -> u8 {
    assert_eq!(band.len(), codes.len(), "a code per channel");
    codes.fill(0);
    let squares = band.iter().fold(0.0_f32, |sum, &x| x.mul_add(x, sum));
    // Not a comparison with zero alone: codes of NaN would not be defined.
    if squares.is_nan() || squares <= 0.0 {
        return 0;
    }
    let deviation = (squares / band.len() as f32).sqrt();
    let (mut best, mut along) = (f32::NEG_INFINITY, 0.0);
    let mut trial = vec![0; codes.len()];
    for step in steps(bits) {
        let fit = GridFit::on_grid(band, bits, step * deviation, &mut trial);
        let match_squared = fit.along * fit.along / fit.squares;
        if match_squared > best {
            (best, along) = (match_squared, fit.along);
            codes.copy_from_slice(&trial);
        }
    }
    scale_code(squares / along)
}

/// How well the levels of a grid fit a band, and what that is computed from.
struct GridFit {
    /// The product of the band and its levels, in steps.
    along: f32,
    /// The sum of the squared levels.
    squares: f32,
}

impl GridFit {
    // `max` then `min`, not `clamp`: NaN must become a code too.
    #[allow(clippy::manual_clamp)]
    fn on_grid(band: &[f32], bits: u32, step: f32, codes: &mut [u8]) -> GridFit {
        let levels = (1_u32 << bits) as f32;
        let (reciprocal, centre) = (1.0 / step, 0.5 * levels);
        let mut fit = GridFit { along: 0.0, squares: 0.0 };
        for (&x, code) in band.iter().zip(codes) {
            *code = x.mul_add(reciprocal, centre).max(0.0).min(levels - 1.0) as u8;
            let level = f32::from(*code) - half_range(bits);
            fit.along = x.mul_add(level, fit.along);
            fit.squares = level.mul_add(level, fit.squares);
        }
        fit
    }
}

/// What is subtracted from a code: half of the largest.
pub fn half_range(bits: u32) -> f32 {
    0.5 * ((1_u32 << bits) - 1) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tables_are_powers_of_two() {
        for n in 0..16 {
            assert_eq!(OCTAVE[n], (n as f64 / 16.0).exp2() as f32, "{n}");
            assert_eq!(BOUNDS[n], ((n as f64 + 0.5) / 16.0).exp2() as f32, "{n}");
        }
    }

    #[test]
    fn scales_are_logarithms_that_survive_a_round_trip() {
        assert_eq!(scale(0), 0.0);
        assert_eq!(scale(128), 1.0);
        assert_eq!(scale(255), (127.0_f64 / 16.0).exp2() as f32);
        for code in 1..=255_u8 {
            let expected = ((f64::from(code) - 128.0) / 16.0).exp2();
            assert!((f64::from(scale(code)) / expected - 1.0).abs() < 1e-7, "{code}");
            assert_eq!(scale_code(scale(code)), code);
            assert_eq!(scale_code(scale(code) * 1.02), code);
            assert_eq!(scale_code(scale(code) * 0.98), code);
        }
        for (value, code) in
            [(0.0, 0), (-1.0, 0), (1e-9, 0), (1e9, 255), (f32::INFINITY, 255), (f32::NAN, 255)]
        {
            assert_eq!(scale_code(value), code, "{value}");
        }
    }
}
