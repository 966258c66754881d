//! Horizontal bars: a label, a bar, a number.

use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use super::axis::{Axis, short};
use super::{Heading, INK, WIDTH, colour, fitted, letters, plot, sheet, text_width};

/// A bar with its label.
#[derive(Clone, Debug, PartialEq)]
pub struct Bar {
    /// Text beside the bar.
    pub label: String,
    /// The number that the bar shows.
    pub value: f64,
}

/// A chart of horizontal bars.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BarChart {
    /// Title of the chart.
    pub title: String,
    /// Name of the axis of numbers.
    pub axis: String,
    /// The bars, from the top.
    pub bars: Vec<Bar>,
    /// Whether the axis is logarithmic, for values that span several decades.
    pub logarithmic: bool,
}

const ROW: u32 = 24;
/// Space for the marks and the name of the axis.
const AXIS_HEIGHT: u32 = 46;
/// Space at the right for the number of the longest bar.
const NUMBER_WIDTH: u32 = 58;

impl BarChart {
    /// Draws the chart as SVG.
    pub fn svg(&self) -> String {
        let heading = Heading::new(&self.title, &[]);
        let rows = self.bars.len().max(1);
        let widest = self.bars.iter().map(|bar| text_width(&bar.label)).fold(40.0, f64::max);
        let left = (widest + 12.0).min(f64::from(WIDTH) * 0.45);
        let name = if self.logarithmic { format!("{} (log scale)", self.axis) } else { self.axis.clone() };
        let axis = Axis::new(self.bars.iter().map(|bar| bar.value), self.logarithmic, true);
        // Bars begin at zero, or where an axis of decades does.
        let zero = axis.place(0.0).unwrap_or(axis.range.start);
        // What the axis cannot show, zero on one of decades above all, has no length but is still named.
        let ends: Vec<f64> = self.bars.iter().map(|bar| axis.place(bar.value).unwrap_or(zero)).collect();
        sheet(heading.height + ROW * rows as u32 + AXIS_HEIGHT, |sheet| {
            let sides = [left as u32, NUMBER_WIDTH];
            let chart = plot(&heading.draw(sheet)?, sides, (&axis, &name), (&Axis::rows(rows), ""))?;
            for (row, (bar, end)) in self.bars.iter().zip(ends).enumerate() {
                let (top, middle, bottom) = (row as f64 + 0.15, row as f64 + 0.5, row as f64 + 0.85);
                let area = chart.plotting_area();
                let (from, to) = (zero.min(end), zero.max(end));
                area.draw(&Rectangle::new([(from, top), (to, bottom)], colour(0).filled()))?;
                let label = fitted(&bar.label, left - 10.0);
                let begin = axis.range.start;
                area.draw(
                    &(EmptyElement::at((begin, middle))
                        + Text::new(label, (-6, 0), letters(INK, HPos::Right))),
                )?;
                let number = short(bar.value);
                area.draw(
                    &(EmptyElement::at((to, middle)) + Text::new(number, (5, 0), letters(INK, HPos::Left))),
                )?;
            }
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(values: &[f64], logarithmic: bool) -> BarChart {
        let bar = |(index, value): (usize, &f64)| Bar { label: format!("codec<{index}>"), value: *value };
        BarChart {
            title: "KL".into(),
            axis: "nats".into(),
            bars: values.iter().enumerate().map(bar).collect(),
            logarithmic,
        }
    }

    /// Lengths of bars; the first rectangle is the ground.
    fn widths(svg: &str) -> Vec<f64> {
        let numbers = svg.split("<rect ").skip(2).map(|rect| {
            let width = rect.split("width=\"").nth(1).expect("width").split('"').next().expect("number");
            width.parse().expect("number")
        });
        numbers.collect()
    }

    #[test]
    fn lengths_are_in_proportion() {
        let svg = chart(&[1.0, 2.0, 4.0], false).svg();
        let widths = widths(&svg);
        // Ends are whole units, so each length is off by less than one.
        assert!((widths[1] - 2.0 * widths[0]).abs() < 3.0 && (widths[2] - 4.0 * widths[0]).abs() < 5.0);
        assert!(svg.contains("codec&lt;0&gt;") && !svg.contains("codec<"));
    }

    #[test]
    fn decades_are_equally_long() {
        let widths = widths(&chart(&[0.01, 0.1, 1.0, 0.005], true).svg());
        assert!((widths[2] - widths[1] - (widths[1] - widths[0])).abs() <= 1.0, "{widths:?}");
    }

    #[test]
    fn odd_values_are_drawn_without_trouble() {
        for values in [&[][..], &[0.0], &[f64::NAN, 1.0], &[-1.0, 2.0], &[f64::INFINITY]] {
            for logarithmic in [false, true] {
                let svg = chart(values, logarithmic).svg();
                assert!(
                    !svg.contains("=\"NaN") && !svg.contains("=\"inf") && !svg.contains("width=\"-"),
                    "{svg}"
                );
            }
        }
    }
}
