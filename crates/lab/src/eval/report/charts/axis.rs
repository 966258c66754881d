//! Axes that hold whatever values there are, and short names for numbers.

use std::ops::Range;

/// The largest number on a linear axis, so that differences stay finite.
const LARGEST: f64 = 1e300;

/// One axis of a plot. Decades are drawn by their exponents, so that the plot itself is always linear.
pub(super) struct Axis {
    /// From one end to the other, in exponents if the axis is logarithmic.
    pub(super) range: Range<f64>,
    /// Most marks that it has.
    pub(super) marks: usize,
    logarithmic: bool,
}

impl Axis {
    /// An axis that holds `values`. A linear one begins at zero when `from_zero` or when that costs little; a
    /// logarithmic one leaves out what is not positive.
    pub(super) fn new(values: impl Iterator<Item = f64>, logarithmic: bool, from_zero: bool) -> Axis {
        let mut axis = Axis { range: f64::INFINITY..f64::NEG_INFINITY, marks: 6, logarithmic };
        for value in values.filter_map(|value| axis.exponent(value)).collect::<Vec<f64>>() {
            axis.range = axis.range.start.min(value)..axis.range.end.max(value);
        }
        let Range { start: mut low, end: mut high } = axis.range;
        if low > high {
            (low, high) = (0.0, 1.0);
        } else if logarithmic {
            low = low.floor();
            high = high.ceil().max(low + 1.0);
            axis.marks = axis.marks.min((high - low) as usize + 1);
        } else {
            if from_zero || (low > 0.0 && low < 0.5 * high) {
                (low, high) = (low.min(0.0), high.max(0.0));
            }
            // So little between the ends could not be told from rounding.
            if high - low <= 1e-9 * high.abs().max(low.abs()) {
                high = low + if low == 0.0 { 1.0 } else { low.abs() * 0.1 };
            }
            let margin = |end: f64| if end == 0.0 { 0.0 } else { 0.04 * (high - low) };
            (low, high) = (low - margin(low), high + margin(high));
        }
        axis.range = low..high;
        axis
    }

    /// An axis from the top, with a row of unit height for each of so many things and no marks.
    pub(super) fn rows(count: usize) -> Axis {
        Axis { range: count as f64..0.0, marks: 0, logarithmic: false }
    }

    /// The value itself or its exponent. Nothing for what this axis cannot show.
    fn exponent(&self, value: f64) -> Option<f64> {
        match self.logarithmic {
            true => (value.is_finite() && value > 0.0).then(|| value.log10()),
            false => value.is_finite().then(|| value.clamp(-LARGEST, LARGEST)),
        }
    }

    /// Where a value is shown: at the end of the axis if it lies beyond. Nothing for what this axis cannot show.
    pub(super) fn place(&self, value: f64) -> Option<f64> {
        Some(self.exponent(value)?.clamp(self.range.start, self.range.end))
    }

    /// What stands at a mark.
    pub(super) fn name(&self, place: f64) -> String {
        short(if self.logarithmic { 10f64.powf(place) } else { place })
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
    if !(-3..18).contains(&magnitude) {
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
    use plotters::coord::ranged1d::Ranged;
    use plotters::coord::types::RangedCoordf64;

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
            (1e300, "1.0e300"),
            (-0.5, "-0.5"),
            (f64::NAN, "NaN"),
        ] {
            assert_eq!(short(value), text);
        }
    }

    /// The marks that an axis has.
    fn marks(axis: &Axis) -> Vec<String> {
        let places = RangedCoordf64::from(axis.range.clone()).key_points(axis.marks);
        places.iter().map(|place| axis.name(*place)).collect()
    }

    #[test]
    fn linear_axes_have_round_marks_around_their_values() {
        let axis = Axis::new([3.0, 87.0].into_iter(), false, true);
        assert_eq!(marks(&axis), ["0", "20", "40", "60", "80"]);
        assert_eq!((axis.place(50.0), axis.place(f64::NAN)), (Some(50.0), None));
        let axis = Axis::new([1.0, 1.01, 1.02].into_iter(), false, false);
        assert!(axis.range.start > 0.9 && axis.range.contains(&1.0), "{:?}", axis.range);
    }

    #[test]
    fn logarithmic_axes_count_decades() {
        let axis = Axis::new([0.002, 1.4, 0.0].into_iter(), true, true);
        assert_eq!(marks(&axis), ["0.001", "0.01", "0.1", "1", "10"]);
        assert_eq!((axis.place(0.1), axis.place(0.0)), (Some(-1.0), None));
        assert_eq!(marks(&Axis::new([2.0, 9.0].into_iter(), true, false)), ["1", "10"]);
        let wide = Axis::new([1e-12, 1e12].into_iter(), true, false);
        assert!((3..=6).contains(&marks(&wide).len()), "{:?}", marks(&wide));
    }

    #[test]
    fn every_input_gives_a_usable_axis() {
        let inputs: [&[f64]; 12] = [
            &[],
            &[0.0],
            &[5.0, 5.0],
            &[f64::NAN],
            &[-1.0, -1.0],
            &[-1.0, 1.0],
            &[1e-300, 1e300],
            &[-f64::MAX, f64::MAX],
            &[f64::MIN_POSITIVE / 8.0],
            &[f64::MAX],
            &[1.0, 1.0 + f64::EPSILON],
            &[f64::INFINITY, 2.0],
        ];
        for values in inputs {
            for (logarithmic, from_zero) in [(false, false), (false, true), (true, false)] {
                let axis = Axis::new(values.iter().copied(), logarithmic, from_zero);
                let Range { start, end } = axis.range;
                assert!(start < end && (end - start).is_finite(), "{values:?}: {start} to {end}");
                assert!(marks(&axis).len() < 12, "{values:?}");
                for place in values.iter().filter_map(|value| axis.place(*value)) {
                    assert!((start..=end).contains(&place), "{values:?}: {place}");
                }
            }
        }
    }
}
