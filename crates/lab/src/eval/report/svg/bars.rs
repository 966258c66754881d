//! Horizontal bars: a label, a bar, a number.

use super::canvas::{Canvas, TITLE_HEIGHT, WIDTH, colour, fitted, text_width};
use super::scale::{Scale, short};

/// One bar.
#[derive(Clone, Debug, PartialEq)]
pub struct Bar {
    /// What it stands for.
    pub label: String,
    /// How long it is.
    pub value: f64,
    /// Which colour: bars of one group share it.
    pub group: usize,
}

/// A chart of horizontal bars.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BarChart {
    /// What it shows.
    pub title: String,
    /// What the numbers are.
    pub axis: String,
    /// The bars, from the top.
    pub bars: Vec<Bar>,
    /// Lengths count decades; for values that span several.
    pub logarithmic: bool,
    /// Names of the groups, shown as a legend when there are several.
    pub groups: Vec<String>,
}

const ROW: f64 = 24.0;

impl BarChart {
    /// The chart as SVG, to be put into a page that holds the style.
    pub fn svg(&self) -> String {
        let mut canvas = Canvas::new();
        canvas.text(4.0, 18.0, "title", &fitted(&self.title, WIDTH - 8.0));
        let widest = self.bars.iter().map(|bar| text_width(&bar.label)).fold(40.0, f64::max);
        let left = (widest + 12.0).min(WIDTH * 0.45);
        let right = WIDTH - 58.0;
        let legend = super::lines::legend(&mut canvas, TITLE_HEIGHT, &self.groups);
        let top = TITLE_HEIGHT + legend;
        let bottom = top + ROW * self.bars.len() as f64;
        let scale = Scale::new(self.bars.iter().map(|bar| bar.value), self.logarithmic, true);
        let x = |place: f64| left + place * (right - left);
        for mark in &scale.marks {
            let at = x(scale.place(*mark).unwrap_or(0.0));
            canvas.line(at, top, at, bottom);
            canvas.text(at, bottom + 14.0, "faint middle", &short(*mark));
        }
        let zero = scale.place(0.0).unwrap_or(0.0);
        for (row, bar) in self.bars.iter().enumerate() {
            let y = top + ROW * row as f64;
            canvas.text(left - 6.0, y + 16.0, "end", &fitted(&bar.label, left - 10.0));
            let says = format!("{}: {}", bar.label, bar.value);
            // What a logarithmic axis cannot show, zero above all, is still named.
            let place = scale.place(bar.value);
            let (from, to) = place.map_or((zero, zero), |place| (place.min(zero), place.max(zero)));
            let fill = format!(r#"rx="2" style="fill:{}""#, colour(bar.group));
            canvas.rectangle(
                (x(from), y + 4.0),
                (((to - from) * (right - left)).max(1.0), ROW - 8.0),
                &fill,
                &says,
            );
            canvas.text(x(to) + 5.0, y + 16.0, "", &short(bar.value));
        }
        let axis = if self.logarithmic { format!("{} (log scale)", self.axis) } else { self.axis.clone() };
        canvas.text((left + right) / 2.0, bottom + 30.0, "faint middle", &axis);
        canvas.finish(&self.title, bottom + 38.0, false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(values: &[f64], logarithmic: bool) -> BarChart {
        let bar =
            |(index, value): (usize, &f64)| Bar { label: format!("codec<{index}>"), value: *value, group: 0 };
        BarChart {
            title: "KL".into(),
            axis: "nats".into(),
            bars: values.iter().enumerate().map(bar).collect(),
            logarithmic,
            groups: Vec::new(),
        }
    }

    fn widths(svg: &str) -> Vec<f64> {
        let numbers = svg.split("<rect ").skip(1).map(|rect| {
            let width = rect.split("width=\"").nth(1).expect("width").split('"').next().expect("number");
            width.parse().expect("number")
        });
        numbers.collect()
    }

    #[test]
    fn lengths_are_in_proportion() {
        let svg = chart(&[1.0, 2.0, 4.0], false).svg();
        let widths = widths(&svg);
        assert!((widths[1] / widths[0] - 2.0).abs() < 0.02 && (widths[2] / widths[0] - 4.0).abs() < 0.02);
        assert!(svg.contains("codec&lt;0&gt;") && !svg.contains("codec<"));
    }

    #[test]
    fn decades_are_equally_long() {
        let widths = widths(&chart(&[0.01, 0.1, 1.0, 0.005], true).svg());
        assert!((widths[2] - widths[1] - (widths[1] - widths[0])).abs() < 0.3, "{widths:?}");
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
