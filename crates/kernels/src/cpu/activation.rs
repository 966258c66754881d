//! Activations prepared for integer dot products with quantised weights.
//!
//! Eight bits for an activation cost about half a percent per projection, which is more than 4-bit weights need
//! to lose. So a value is kept as a 16-bit fixed-point number with one scale per 32 values, split in two signed
//! bytes: `x ≈ scale · (256·high + low)`. Byte products then run on the same instructions twice, and the result
//! is good to about 2⁻¹⁵ of the largest value of the group.

use super::elementwise::ROUND;

/// Values that share a scale.
pub const GROUP: usize = 32;

/// Values per entry of [`QuantisedRow::sums`]; the smallest group of any weight format.
pub const SUM_GROUP: usize = 16;

/// Largest magnitude of the fixed-point number; keeps the high byte within ±127.
pub(crate) const LIMIT: f32 = 32512.0;

/// Rows of activations in fixed point. `cols` is a multiple of [`GROUP`].
#[derive(Default)]
pub struct QuantisedRows {
    rows: usize,
    cols: usize,
    high: Vec<i8>,
    low: Vec<i8>,
    scales: Vec<f32>,
    sums: Vec<f32>,
}

impl QuantisedRows {
    /// Resizes for `rows` rows of `cols` values; contents are unspecified.
    pub fn reset(&mut self, rows: usize, cols: usize) {
        assert!(cols.is_multiple_of(GROUP), "{cols} columns are not whole groups of {GROUP}");
        (self.rows, self.cols) = (rows, cols);
        self.high.resize(rows * cols, 0);
        self.low.resize(rows * cols, 0);
        self.scales.resize(rows * cols / GROUP, 0.0);
        self.sums.resize(rows * cols / SUM_GROUP, 0.0);
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Values per row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// One row.
    pub fn row(&self, row: usize) -> QuantisedRow<'_> {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        let cols = self.cols;
        QuantisedRow {
            high: &self.high[row * cols..][..cols],
            low: &self.low[row * cols..][..cols],
            scales: &self.scales[row * cols / GROUP..][..cols / GROUP],
            sums: &self.sums[row * cols / SUM_GROUP..][..cols / SUM_GROUP],
        }
    }

    /// Everything a fast path fills after [`Self::reset`]: high bytes, low bytes, scales, sums.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    pub(crate) fn parts_mut(&mut self) -> (&mut [i8], &mut [i8], &mut [f32], &mut [f32]) {
        (&mut self.high, &mut self.low, &mut self.scales, &mut self.sums)
    }

    /// Quantises all rows of `x` (`rows * cols` values).
    #[inline(always)]
    pub fn quantise(&mut self, x: &[f32], rows: usize, cols: usize) {
        assert_eq!(x.len(), rows * cols);
        self.reset(rows, cols);
        for group in 0..rows * cols / GROUP {
            let values = &x[group * GROUP..][..GROUP];
            let high = &mut self.high[group * GROUP..][..GROUP];
            let low = &mut self.low[group * GROUP..][..GROUP];
            let sums = &mut self.sums[group * 2..][..2];
            self.scales[group] = quantise_group(values, high, low, sums);
        }
    }
}

/// One row of [`QuantisedRows`].
#[derive(Clone, Copy)]
pub struct QuantisedRow<'a> {
    /// High bytes, one per value.
    pub high: &'a [i8],
    /// Low bytes, one per value.
    pub low: &'a [i8],
    /// One scale per [`GROUP`] values.
    pub scales: &'a [f32],
    /// Sums of the fixed-point values times their scale, one per [`SUM_GROUP`] values: the factor of a format's offset.
    pub sums: &'a [f32],
}

impl QuantisedRow<'_> {
    /// The value the fixed-point number stands for.
    pub fn value(&self, index: usize) -> f32 {
        let fixed = i32::from(self.high[index]) * 256 + i32::from(self.low[index]);
        self.scales[index / GROUP] * fixed as f32
    }
}

/// Quantises 32 values and returns their scale. Non-finite values make the scale NaN, so that they stay visible.
#[inline(always)]
pub(crate) fn quantise_group(values: &[f32], high: &mut [i8], low: &mut [i8], sums: &mut [f32]) -> f32 {
    let mut largest = 0.0f32;
    let mut finite = true;
    for &value in &values[..GROUP] {
        largest = largest.max(value.abs());
        finite &= value.is_finite();
    }
    let inverse = if largest > 0.0 && finite { LIMIT / largest } else { 0.0 };
    let scale = if !finite {
        f32::NAN
    } else if inverse.is_finite() {
        largest / LIMIT
    } else {
        0.0
    };
    // Without a scale there is nothing to round, and no infinity times zero.
    if !(inverse.is_finite() && finite) {
        high[..GROUP].fill(0);
        low[..GROUP].fill(0);
        sums[..2].fill(scale * 0.0);
        return scale;
    }
    for half in 0..2 {
        let mut sum = 0i32;
        for i in half * SUM_GROUP..(half + 1) * SUM_GROUP {
            let fixed = (values[i] * inverse + ROUND).to_bits().wrapping_sub(ROUND.to_bits()) as i32;
            // Rounding to the nearest multiple of 256 leaves a low byte in [-128, 127].
            let upper = (fixed + 128) >> 8;
            high[i] = upper as i8;
            low[i] = (fixed - upper * 256) as i8;
            sum += fixed;
        }
        sums[half] = scale * sum as f32;
    }
    scale
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(values: &[f32]) -> f32 {
        let mut rows = QuantisedRows::default();
        rows.quantise(values, 1, values.len());
        let row = rows.row(0);
        let mut worst = 0.0f32;
        for (group, chunk) in values.chunks(GROUP).enumerate() {
            let largest = chunk.iter().fold(0.0f32, |a, v| a.max(v.abs())).max(f32::MIN_POSITIVE);
            for (i, value) in chunk.iter().enumerate() {
                worst = worst.max((row.value(group * GROUP + i) - value).abs() / largest);
            }
        }
        worst
    }

    #[test]
    fn values_keep_fifteen_bits() {
        let values: Vec<f32> = (0..256).map(|i| ((i * 37 % 101) as f32 - 50.0) * 1.37).collect();
        assert!(error(&values) < 0.5 / 32512.0 * 1.01);
    }

    #[test]
    fn nasty_groups_are_safe() {
        assert_eq!(error(&[0.0; 32]), 0.0);
        assert_eq!(error(&[-3.5; 32]), 0.0);
        let mut outlier = [1e-3f32; 32];
        outlier[7] = -1e20;
        assert!(error(&outlier) < 2e-5);
        let tiny = [f32::MIN_POSITIVE / 4.0; 32];
        assert!(error(&tiny) <= 1.0);
    }

    #[test]
    fn sums_are_those_of_the_fixed_point_values() {
        let values: Vec<f32> = (0..64).map(|i| (i as f32 * 0.71).sin() * 4.0).collect();
        let mut rows = QuantisedRows::default();
        rows.quantise(&values, 1, 64);
        let row = rows.row(0);
        for (index, sum) in row.sums.iter().enumerate() {
            let exact: f32 = (0..SUM_GROUP).map(|i| row.value(index * SUM_GROUP + i)).sum();
            assert!((sum - exact).abs() < 1e-4, "{sum} {exact}");
        }
    }

    #[test]
    fn not_a_number_stays_visible() {
        for bad in [f32::NAN, f32::INFINITY] {
            let mut values = [1.0f32; 32];
            values[3] = bad;
            let mut rows = QuantisedRows::default();
            rows.quantise(&values, 1, 32);
            assert!(rows.row(0).scales[0].is_nan());
        }
    }
}
