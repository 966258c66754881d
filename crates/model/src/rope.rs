//! Rotary frequencies and the ways models stretch them.
//!
//! Formulas as in the published methods: linear interpolation, YaRN (Peng et al. 2023) and the Llama 3.1 rule.
//! Everything is computed in f64 and rounded once.

use std::f64::consts::PI;

use oscar_kernels::backend::{Rope, RopeLayout};

/// Rotary position embedding as a model describes it.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f64,
    /// Channels of a head that rotate.
    pub rotary_dim: usize,
    /// Which channels form a pair.
    pub layout: RopeLayout,
    /// How the frequencies are changed for longer contexts.
    pub scaling: RopeScaling,
}

/// How frequencies are changed for contexts longer than those of pre-training.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Frequencies are used as they are.
    None,
    /// Linear interpolation: positions are divided by `factor`.
    Linear {
        /// Ratio of the new context to the old.
        factor: f64,
    },
    /// YaRN: low frequencies are interpolated, high ones kept, with a ramp between them; attention is sharpened.
    Yarn {
        /// Ratio of the new context to the old.
        factor: f64,
        /// The number of positions that the model was trained on before its context was extended.
        original_context: usize,
        /// Rotations within the old context above which a frequency is kept.
        beta_fast: f64,
        /// Rotations below which a frequency is fully interpolated.
        beta_slow: f64,
        /// Factor on cosine and sine; `0.1 ln(factor) + 1` when the model does not give one.
        attention_factor: Option<f64>,
        /// Whether the ends of the ramp are rounded to whole channels.
        truncate: bool,
    },
    /// The rule of Llama 3.1: wavelengths beyond the old context are divided by `factor`, with a smooth middle.
    Llama3 {
        /// Ratio for the longest wavelengths.
        factor: f64,
        /// Old context over this is the longest wavelength that counts as low frequency.
        low_frequency_factor: f64,
        /// Old context over this is the shortest wavelength that is not kept.
        high_frequency_factor: f64,
        /// The number of positions that the model was trained on before its context was extended.
        original_context: usize,
    },
    /// A divisor for each frequency, given by the file.
    Divisors {
        /// What each frequency is divided by.
        divisors: Vec<f32>,
        /// Factor on cosine and sine.
        magnitude: f64,
    },
}

impl RopeScaling {
    /// The context a model reaches with this scaling, given the one its description states. Descriptions differ in
    /// whether they state the context before or after YaRN.
    pub fn context(&self, stated: usize) -> usize {
        match self {
            RopeScaling::Yarn { factor, original_context, .. } => {
                stated.max((*original_context as f64 * factor) as usize)
            }
            _ => stated,
        }
    }
}

impl RopeConfig {
    /// Computes the table of frequencies that a backend needs.
    pub fn build(&self) -> Rope {
        let dim = self.rotary_dim as f64;
        let mut frequencies: Vec<f64> =
            (0..self.rotary_dim / 2).map(|pair| self.theta.powf(-2.0 * pair as f64 / dim)).collect();
        let mut magnitude = 1.0;
        match &self.scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => {
                frequencies.iter_mut().for_each(|frequency| *frequency /= factor)
            }
            RopeScaling::Divisors { divisors, magnitude: factor } => {
                magnitude = *factor;
                frequencies
                    .iter_mut()
                    .zip(divisors)
                    .for_each(|(frequency, divisor)| *frequency /= f64::from(*divisor));
            }
            RopeScaling::Llama3 { factor, low_frequency_factor, high_frequency_factor, original_context } => {
                let context = *original_context as f64;
                for frequency in &mut frequencies {
                    let wavelength = 2.0 * PI / *frequency;
                    if wavelength > context / low_frequency_factor {
                        *frequency /= factor;
                    } else if wavelength >= context / high_frequency_factor {
                        let smooth = (context / wavelength - low_frequency_factor)
                            / (high_frequency_factor - low_frequency_factor);
                        *frequency *= (1.0 - smooth) / factor + smooth;
                    }
                }
            }
            RopeScaling::Yarn {
                factor,
                original_context,
                beta_fast,
                beta_slow,
                attention_factor,
                truncate,
            } => {
                // The channel whose frequency makes `rotations` turns within the old context.
                let channel = |rotations: f64| {
                    dim * (*original_context as f64 / (rotations * 2.0 * PI)).ln() / (2.0 * self.theta.ln())
                };
                let (mut low, mut high) = (channel(*beta_fast), channel(*beta_slow));
                if *truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                let low = low.max(0.0);
                let mut high = high.min(dim - 1.0);
                if low == high {
                    high += 0.001;
                }
                for (pair, frequency) in frequencies.iter_mut().enumerate() {
                    let ramp = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    *frequency = *frequency / factor * ramp + *frequency * (1.0 - ramp);
                }
                magnitude = attention_factor.unwrap_or_else(|| yarn_magnitude(*factor));
            }
        }
        Rope {
            inverse_frequencies: frequencies.into_iter().map(|frequency| frequency as f32).collect(),
            magnitude: magnitude as f32,
            layout: self.layout,
        }
    }
}

impl RopeConfig {
    /// Checks that the settings give usable angles; `field` as in [`crate::ModelConfig`]'s own check.
    pub(crate) fn validate(&self, field: &dyn Fn(&str, &str) -> String) -> Result<(), String> {
        if let RopeScaling::Yarn { beta_fast, beta_slow, attention_factor, .. } = &self.scaling {
            let numbers = [
                ("beta_fast", "rope.scaling.yarn_beta_fast", *beta_fast),
                ("beta_slow", "rope.scaling.yarn_beta_slow", *beta_slow),
                ("attention_factor", "rope.scaling.attn_factor", attention_factor.unwrap_or(1.0)),
            ];
            for (json, gguf, value) in numbers {
                if !(value > 0.0 && (value as f32).is_finite()) {
                    return Err(format!("`{}` is {value}, expected a number above 0", field(json, gguf)));
                }
            }
        }
        if self.build().inverse_frequencies.iter().all(|frequency| frequency.is_finite()) {
            return Ok(());
        }
        let name = field("rope_theta", "rope.freq_base");
        Err(format!("`{name}` is {}, which gives rotary frequencies that are not finite", self.theta))
    }
}

/// YaRN's factor on cosine and sine for a context `factor` times longer.
pub(crate) fn yarn_magnitude(factor: f64) -> f64 {
    yarn_magnitude_of(factor, 1.0)
}

/// The same where a model says how strong it is.
pub(crate) fn yarn_magnitude_of(factor: f64, strength: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * strength * factor.ln() + 1.0 }
}

/// LongRoPE (Ding et al. 2024): a divisor for each frequency, one set for contexts up to that of pre-training and one for longer
/// ones. The set is that of the context which the model is made for, whatever the length of a text: keys in the cache would
/// otherwise change when a text grows.
pub(crate) struct LongRope {
    pub(crate) short: Vec<f32>,
    pub(crate) long: Vec<f32>,
    pub(crate) original_context: usize,
    pub(crate) context: usize,
    /// Factor on cosine and sine, if the model gives one.
    pub(crate) magnitude: Option<f64>,
}

impl LongRope {
    /// The scaling of `pairs` frequencies, or what is wrong with the numbers.
    pub(crate) fn scaling(self, pairs: usize) -> Result<RopeScaling, String> {
        let LongRope { short, long, original_context, context, magnitude } = self;
        for (name, divisors) in [("short", &short), ("long", &long)] {
            if divisors.len() != pairs {
                return Err(format!("there are {} {name} RoPE factors, expected {pairs}", divisors.len()));
            }
            if let Some(divisor) = divisors.iter().find(|divisor| !(divisor.is_finite() && **divisor > 0.0)) {
                return Err(format!("the {name} RoPE factors hold {divisor}, expected numbers above 0"));
            }
        }
        let factor = context as f64 / original_context.max(1) as f64;
        let own =
            if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / (original_context as f64).ln()).sqrt() };
        let magnitude = magnitude.unwrap_or(own);
        if !(magnitude > 0.0 && (magnitude as f32).is_finite()) {
            return Err(format!("the attention factor of RoPE is {magnitude}, expected a number above 0"));
        }
        let divisors = if context > original_context { long } else { short };
        Ok(RopeScaling::Divisors { divisors, magnitude })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(scaling: RopeScaling) -> RopeConfig {
        RopeConfig { theta: 10_000.0, rotary_dim: 64, layout: RopeLayout::Halves, scaling }
    }

    #[test]
    fn plain_frequencies_fall_geometrically() {
        let rope = config(RopeScaling::None).build();
        assert_eq!(rope.inverse_frequencies.len(), 32);
        assert_eq!(rope.inverse_frequencies[0], 1.0);
        assert!((rope.inverse_frequencies[16] - 0.01).abs() < 1e-8);
        assert_eq!(rope.magnitude, 1.0);
    }

    #[test]
    fn linear_and_divisors_divide() {
        let plain = config(RopeScaling::None).build().inverse_frequencies;
        let linear = config(RopeScaling::Linear { factor: 4.0 }).build().inverse_frequencies;
        let scaling = RopeScaling::Divisors { divisors: vec![4.0; 32], magnitude: 1.5 };
        let Rope { inverse_frequencies: divisors, magnitude, .. } = config(scaling).build();
        assert_eq!(magnitude, 1.5);
        assert_eq!(linear, divisors);
        assert!(plain.iter().zip(&linear).all(|(plain, linear)| (plain / 4.0 - linear).abs() < 1e-9));
    }

    #[test]
    fn long_factors_are_for_long_contexts() {
        let make = |context, magnitude| LongRope {
            short: vec![1.0, 2.0],
            long: vec![3.0, 4.0],
            original_context: 4096,
            context,
            magnitude,
        };
        let short = RopeScaling::Divisors { divisors: vec![1.0, 2.0], magnitude: 1.0 };
        assert_eq!(make(4096, None).scaling(2), Ok(short));
        let Ok(RopeScaling::Divisors { divisors, magnitude }) = make(131_072, None).scaling(2) else {
            panic!()
        };
        assert_eq!(divisors, [3.0, 4.0]);
        assert!((magnitude - 1.190_238).abs() < 1e-6, "{magnitude}");
        let own = RopeScaling::Divisors { divisors: vec![3.0, 4.0], magnitude: 1.5 };
        assert_eq!(make(8192, Some(1.5)).scaling(2), Ok(own));
        assert!(make(8192, None).scaling(3).is_err());
        assert!(make(8192, Some(f64::NAN)).scaling(2).is_err());
        for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            assert!(LongRope { short: vec![1.0, bad], ..make(8192, None) }.scaling(2).is_err());
        }
    }

    #[test]
    fn yarn_keeps_fast_and_interpolates_slow_channels() {
        let plain = config(RopeScaling::None).build().inverse_frequencies;
        let scaling = RopeScaling::Yarn {
            factor: 4.0,
            original_context: 4096,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: None,
            truncate: true,
        };
        let yarn = config(scaling.clone()).build();
        assert_eq!((scaling.context(4096), scaling.context(32768)), (16384, 32768));
        assert_eq!(yarn.inverse_frequencies[0], plain[0]);
        assert!((yarn.inverse_frequencies[31] / plain[31] - 0.25).abs() < 1e-6);
        assert!((yarn.magnitude - 1.138_629_4).abs() < 1e-6);
    }

    #[test]
    fn llama3_touches_long_wavelengths_only() {
        let plain = config(RopeScaling::None).build().inverse_frequencies;
        let scaled = config(RopeScaling::Llama3 {
            factor: 8.0,
            low_frequency_factor: 1.0,
            high_frequency_factor: 4.0,
            original_context: 8192,
        })
        .build()
        .inverse_frequencies;
        assert_eq!(scaled[0], plain[0]);
        assert!((scaled[31] / plain[31] - 0.125).abs() < 1e-6);
        assert!(scaled.windows(2).all(|pair| pair[0] > pair[1]), "still falling");
    }
}
