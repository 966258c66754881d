//! How the grid of a row is chosen, and in what type its two numbers are stored.

use std::fmt;
use std::str::FromStr;

use half::{bf16, f16};

use crate::error::CodecError;

/// How the step and the lowest level of a row's (or group's) grid are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// Clip the whole row at a percentile of its magnitudes, then span minimum to maximum of each group.
    /// A ratio of zero or less does not clip (plain min-max).
    Clip(f32),
    /// The best affine grid for a Gaussian (Lloyd–Max with equal steps): 0.9957 standard deviations per step
    /// around the mean.
    Gaussian,
    /// The Gaussian grid with the step, out of [`SEARCH_STEPS`], that leaves the smallest squared error.
    Search,
}

/// Steps in standard deviations that [`Rule::Search`] tries, in this order; the first of equals wins.
pub const SEARCH_STEPS: [f32; 7] = [0.7, 0.8, 0.9, 0.9957, 1.1, 1.2, 1.35];

/// Step of the best affine 4-level grid for a unit Gaussian.
pub const GAUSSIAN_STEP: f32 = 0.9957;

impl Rule {
    /// Plain min-max, no clipping.
    pub const MIN_MAX: Rule = Rule::Clip(0.0);
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Rule::Clip(ratio) if *ratio > 0.0 => f.pad(&format!("clip={ratio}")),
            Rule::Clip(_) => f.pad("minmax"),
            Rule::Gaussian => f.pad("gaussian"),
            Rule::Search => f.pad("search"),
        }
    }
}

impl FromStr for Rule {
    type Err = CodecError;

    fn from_str(name: &str) -> Result<Self, CodecError> {
        let unknown = || CodecError::UnknownName {
            what: "rounding rule",
            name: name.to_owned(),
            known: "clip=RATIO with a ratio of 0 to 1, minmax, gaussian, search",
        };
        match name {
            "minmax" => Ok(Rule::MIN_MAX),
            "gaussian" => Ok(Rule::Gaussian),
            "search" => Ok(Rule::Search),
            _ => {
                let ratio = name.strip_prefix("clip=").ok_or_else(unknown)?;
                let ratio: f32 = ratio.parse().map_err(|_| unknown())?;
                if (0.0..=1.0).contains(&ratio) { Ok(Rule::Clip(ratio)) } else { Err(unknown()) }
            }
        }
    }
}

/// Index into the sorted magnitudes of a row of `dim` channels at which `ratio` clips: `min(⌊ratio·d⌋, d - 1)`.
///
/// The ratio is taken as the decimal it was written as (to a millionth): in f32 0.95 is a little less, and
/// `⌊0.95·20⌋` would become 18 instead of the 19 that everybody else computes.
pub fn clip_index(ratio: f32, dim: usize) -> usize {
    let ratio = (f64::from(ratio) * 1e6).round() / 1e6;
    ((ratio * dim as f64).floor() as usize).min(dim.saturating_sub(1))
}

/// The 16-bit type of a stored scale and offset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ScaleType {
    /// 11 significant bits, up to 65504.
    #[default]
    F16,
    /// 8 significant bits, the range of f32.
    Bf16,
}

impl ScaleType {
    /// Bits of `value` rounded to nearest even. What does not fit saturates to [`ScaleType::largest`] with its sign
    /// and NaN becomes the most negative, so a stored number, and what it decodes to, is always finite.
    pub fn to_bits(self, value: f32) -> u16 {
        let limit = self.largest();
        // Not `clamp`: it would let NaN through. `max` and `min` of a number and NaN are the number.
        #[allow(clippy::manual_clamp)]
        let value = value.max(-limit).min(limit);
        match self {
            ScaleType::F16 => f16::from_f32(value).to_bits(),
            ScaleType::Bf16 => bf16::from_f32(value).to_bits(),
        }
    }

    /// The number that `bits` stand for.
    pub fn to_f32(self, bits: u16) -> f32 {
        match self {
            ScaleType::F16 => f16::from_bits(bits).to_f32(),
            ScaleType::Bf16 => bf16::from_bits(bits).to_f32(),
        }
    }

    /// The largest number we store: 65504 in f16. In bf16 it is 2¹²², so that no code of up to four bits decodes to
    /// infinity.
    pub fn largest(self) -> f32 {
        match self {
            ScaleType::F16 => f16::MAX.to_f32(),
            ScaleType::Bf16 => f32::from_bits((122 + 127) << 23),
        }
    }

    /// The smallest scale we store, so that a scale has a finite reciprocal.
    pub fn smallest_scale(self) -> f32 {
        match self {
            ScaleType::F16 => f16::MIN_POSITIVE_SUBNORMAL.to_f32(),
            ScaleType::Bf16 => bf16::MIN_POSITIVE.to_f32(),
        }
    }
}

impl fmt::Display for ScaleType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            ScaleType::F16 => "f16",
            ScaleType::Bf16 => "bf16",
        })
    }
}

impl FromStr for ScaleType {
    type Err = CodecError;

    fn from_str(name: &str) -> Result<Self, CodecError> {
        match name {
            "f16" => Ok(ScaleType::F16),
            "bf16" => Ok(ScaleType::Bf16),
            _ => {
                Err(CodecError::UnknownName { what: "scale type", name: name.to_owned(), known: "f16, bf16" })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clip_indices_of_the_published_table() {
        for (ratio, indices) in [(0.96, [61, 122, 245]), (0.92, [58, 117, 235])] {
            for (dim, index) in [64, 128, 256].into_iter().zip(indices) {
                assert_eq!(clip_index(ratio, dim), index, "ratio {ratio}, d={dim}");
            }
        }
        assert_eq!(clip_index(1.0, 128), 127);
        assert_eq!(clip_index(0.0, 128), 0);
    }

    #[test]
    fn clip_index_is_that_of_the_decimal_ratio() {
        for thousandths in 0..=1000_usize {
            let ratio: f32 = format!("0.{thousandths:03}").parse().unwrap();
            let ratio = if thousandths == 1000 { 1.0 } else { ratio };
            for dim in [16, 20, 48, 64, 96, 100, 128, 256] {
                // Exact integer arithmetic.
                let expected = (thousandths * dim / 1000).min(dim - 1);
                let decimal = thousandths as f64 / 1000.0;
                // f64 itself may fall on the other side of an exact integer; then it decides.
                let expected_f64 = ((decimal * dim as f64).floor() as usize).min(dim - 1);
                assert_eq!(clip_index(ratio, dim), expected_f64);
                assert!(expected.abs_diff(expected_f64) <= 1);
            }
        }
        assert_eq!(clip_index(0.95, 20), 19);
    }

    #[test]
    fn names_round_trip() {
        for rule in [Rule::Clip(0.96), Rule::Clip(1.0), Rule::MIN_MAX, Rule::Gaussian, Rule::Search] {
            assert_eq!(rule.to_string().parse(), Ok(rule));
        }
        assert_eq!(Rule::Clip(0.92).to_string(), "clip=0.92");
        for bad in ["", "clip", "clip=", "clip=nan", "clip=1.5", "clip=-1", "lloyd"] {
            assert!(bad.parse::<Rule>().is_err(), "{bad:?}");
        }
        for scale_type in [ScaleType::F16, ScaleType::Bf16] {
            assert_eq!(scale_type.to_string().parse(), Ok(scale_type));
        }
        assert!("f32".parse::<ScaleType>().is_err());
    }

    #[test]
    fn stored_numbers_are_always_finite() {
        for scale_type in [ScaleType::F16, ScaleType::Bf16] {
            let nasty =
                [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX, f32::MIN, 65519.9, 70000.0, -1e30];
            for value in nasty {
                assert!(scale_type.to_f32(scale_type.to_bits(value)).is_finite(), "{scale_type} of {value}");
            }
            assert_eq!(scale_type.to_f32(scale_type.to_bits(f32::INFINITY)), scale_type.largest());
            assert_eq!(scale_type.to_f32(scale_type.to_bits(1.5)), 1.5);
            assert!((1.0 / scale_type.smallest_scale()).is_finite());
        }
        assert_eq!(ScaleType::F16.to_bits(-1e9), 0xfbff);
    }
}
