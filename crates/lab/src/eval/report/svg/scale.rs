//! From numbers to places: linear and logarithmic axes with round marks, and short names for numbers.

/// An axis.
#[derive(Clone, Debug)]
pub(super) struct Scale {
    low: f64,
    high: f64,
    logarithmic: bool,
    /// Where marks go.
    pub(super) marks: Vec<f64>,
}

impl Scale {
    /// An axis that holds `values`. A linear one begins at zero when `from_zero` or when that costs little; a
    /// logarithmic one leaves out what is not positive.
    pub(super) fn new(values: impl Iterator<Item = f64>, logarithmic: bool, from_zero: bool) -> Scale {
        let usable: Vec<f64> =
            values.filter(|value| value.is_finite() && (!logarithmic || *value > 0.0)).collect();
        let low = usable.iter().copied().fold(f64::INFINITY, f64::min);
        let high = usable.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if usable.is_empty() {
            return Scale { low: 0.0, high: 1.0, logarithmic: false, marks: vec![0.0, 0.5, 1.0] };
        }
        if logarithmic { Scale::decades(low, high) } else { Scale::round(low, high, from_zero) }
    }

    fn decades(low: f64, high: f64) -> Scale {
        let (first, mut last) = (low.log10().floor() as i32, high.log10().ceil() as i32);
        if last <= first {
            last = first + 1;
        }
        let step = ((last - first) / 6 + 1).max(1) as usize;
        let marks = (first..=last).step_by(step).map(|power| 10f64.powi(power)).collect();
        Scale { low: 10f64.powi(first), high: 10f64.powi(last), logarithmic: true, marks }
    }

    fn round(mut low: f64, mut high: f64, from_zero: bool) -> Scale {
        if from_zero || (low > 0.0 && low < 0.5 * high) {
            low = low.min(0.0);
            high = high.max(0.0);
        }
        if high - low <= 0.0 {
            high = low + if low == 0.0 { 1.0 } else { low.abs() * 0.1 };
        }
        let rough = (high - low) / 4.0;
        let power = 10f64.powf(rough.log10().floor());
        let step =
            [1.0, 2.0, 2.5, 5.0, 10.0].map(|factor| factor * power).into_iter().find(|step| *step >= rough);
        let step = step.unwrap_or(10.0 * power);
        let (first, last) = ((low / step).floor(), (high / step).ceil());
        let count = (last - first).clamp(1.0, 20.0) as usize;
        let marks: Vec<f64> = (0..=count).map(|index| (first + index as f64) * step).collect();
        Scale { low: first * step, high: last * step, logarithmic: false, marks }
    }

    /// Where a value is between the ends: 0 to 1. Nothing for what this axis cannot show.
    pub(super) fn place(&self, value: f64) -> Option<f64> {
        if !value.is_finite() || (self.logarithmic && value <= 0.0) {
            return None;
        }
        let place = if self.logarithmic {
            (value.log10() - self.low.log10()) / (self.high.log10() - self.low.log10())
        } else {
            (value - self.low) / (self.high - self.low)
        };
        Some(place.clamp(0.0, 1.0))
    }
}

/// A number in few letters: `0.062`, `1.44`, `32k`, `1.2e-5`.
pub fn short(value: f64) -> String {
    if value == 0.0 {
        return "0".to_owned();
    }
    if !value.is_finite() {
        return value.to_string();
    }
    let magnitude = value.abs().log10().floor() as i32;
    // Rounding to three digits must not change the unit.
    if magnitude < -3 {
        return format!("{value:.1e}");
    }
    let trimmed = |text: String| {
        if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
    };
    if magnitude >= 4 {
        for (unit, name) in [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")] {
            if value.abs() >= unit {
                let scaled = value / unit;
                let decimals = (2 - scaled.abs().log10().floor() as i32).clamp(0, 2) as usize;
                return trimmed(format!("{scaled:.decimals$}")) + name;
            }
        }
    }
    trimmed(format!("{value:.*}", (2 - magnitude).clamp(0, 6) as usize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        for (value, text) in [
            (0.0, "0"),
            (0.0616, "0.0616"),
            (1.4444, "1.44"),
            (100.0, "100"),
            (4096.0, "4096"),
            (32_768.0, "32.8k"),
            (2.0e6, "2M"),
            (0.000_012, "1.2e-5"),
            (-0.5, "-0.5"),
            (f64::NAN, "NaN"),
        ] {
            assert_eq!(short(value), text);
        }
    }

    #[test]
    fn linear_axes_have_round_marks_around_their_values() {
        let scale = Scale::new([3.0, 87.0].into_iter(), false, true);
        assert_eq!(scale.marks, [0.0, 25.0, 50.0, 75.0, 100.0]);
        assert_eq!(scale.place(50.0), Some(0.5));
        assert_eq!(scale.place(f64::NAN), None);
        let scale = Scale::new([1.0, 1.01, 1.02].into_iter(), false, false);
        assert!(scale.place(1.0).expect("place") >= 0.0 && scale.marks[0] > 0.9, "{scale:?}");
    }

    #[test]
    fn logarithmic_axes_count_decades() {
        let scale = Scale::new([0.002, 1.4, 0.0].into_iter(), true, true);
        assert_eq!(scale.place(0.001), Some(0.0));
        assert_eq!(scale.place(10.0), Some(1.0));
        assert!((scale.place(0.1).expect("place") - 0.5).abs() < 1e-9);
        assert_eq!(scale.place(0.0), None);
    }

    #[test]
    fn every_input_gives_a_usable_axis() {
        let inputs: [&[f64]; 7] =
            [&[], &[0.0], &[5.0, 5.0], &[f64::NAN], &[-1.0, -1.0], &[1e-300, 1e300], &[f64::INFINITY, 2.0]];
        for values in inputs {
            for logarithmic in [false, true] {
                let scale = Scale::new(values.iter().copied(), logarithmic, false);
                assert!(!scale.marks.is_empty() && scale.marks.len() < 120, "{values:?} {scale:?}");
                assert!(scale.high > scale.low, "{values:?} {scale:?}");
                for value in values.iter().filter(|value| value.is_finite()) {
                    assert!(
                        scale.place(*value).is_none_or(|place| (0.0..=1.0).contains(&place)),
                        "{scale:?}"
                    );
                }
            }
        }
    }
}
