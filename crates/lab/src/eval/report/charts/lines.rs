//! Several series over one axis, as lines or as dots.

use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use super::axis::Axis;
use super::{FAINT, Heading, INK, colour, dot_style, fitted, letters, plot, sheet};

/// A line of the chart.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Series {
    /// Name of the series in the legend.
    pub name: String,
    /// The points of the series.
    pub points: Vec<(f64, f64)>,
    /// Texts beside some of the points.
    pub notes: Vec<Note>,
}

/// A text beside a point.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Note {
    /// The point that the text stands beside.
    pub at: (f64, f64),
    /// The text.
    pub text: String,
    /// Whether the text stands to the right and below, instead of to the left and above.
    pub below: bool,
}

/// A chart of several series.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LineChart {
    /// Title of the chart.
    pub title: String,
    /// Name of the x axis.
    pub x_axis: String,
    /// Name of the y axis.
    pub y_axis: String,
    /// The lines of the chart.
    pub series: Vec<Series>,
    /// Whether the x axis is logarithmic.
    pub logarithmic_x: bool,
    /// Whether the y axis is logarithmic.
    pub logarithmic_y: bool,
    /// Whether the points of every series are joined by a line.
    pub joined: bool,
    /// A line that belongs to no series, such as a limit.
    pub limit: Vec<(f64, f64)>,
}

const HEIGHT: u32 = 290;

impl LineChart {
    /// Draws the chart as SVG.
    pub fn svg(&self) -> String {
        let names: Vec<String> = self.series.iter().map(|series| series.name.clone()).collect();
        let heading = Heading::new(&self.title, &names);
        let points = || self.series.iter().flat_map(|series| &series.points).chain(&self.limit);
        let x = Axis::new(points().map(|point| point.0), self.logarithmic_x, false);
        let y = Axis::new(points().map(|point| point.1), self.logarithmic_y, false);
        let place = |&(across, up): &(f64, f64)| Some((x.place(across)?, y.place(up)?));
        sheet(heading.height + HEIGHT, |sheet| {
            let axes = ((&x, self.x_axis.as_str()), (&y, self.y_axis.as_str()));
            let mut plot = plot(&heading.draw(sheet)?, [64, 16], axes.0, axes.1)?;
            let limit: Vec<(f64, f64)> = self.limit.iter().filter_map(place).collect();
            plot.draw_series([PathElement::new(limit, FAINT.stroke_width(2))])?;
            for (index, series) in self.series.iter().enumerate() {
                let mut points: Vec<(f64, f64)> = series.points.iter().filter_map(place).collect();
                points.sort_by(|one, other| one.0.total_cmp(&other.0));
                if self.joined {
                    plot.draw_series([PathElement::new(points.clone(), colour(index).stroke_width(2))])?;
                }
                plot.draw_series(points.into_iter().map(|point| Circle::new(point, 4, dot_style(index))))?;
                for note in &series.notes {
                    let Some(point) = place(&note.at) else { continue };
                    let (anchor, offset) =
                        if note.below { (HPos::Left, (8, 7)) } else { (HPos::Right, (-8, -7)) };
                    let text = Text::new(fitted(&note.text, 200.0), offset, letters(INK, anchor));
                    plot.draw_series([EmptyElement::at(point) + text])?;
                }
            }
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart() -> LineChart {
        LineChart {
            title: "KL against size".into(),
            x_axis: "bits".into(),
            y_axis: "KL".into(),
            series: vec![
                Series {
                    name: "int2".into(),
                    points: vec![(2.5, 0.06), (2.25, 0.2)],
                    notes: vec![Note { at: (2.5, 0.06), text: "a <note>".into(), below: true }],
                },
                Series {
                    name: "int4 & more".into(),
                    points: vec![(4.0, 0.003), (5.0, f64::NAN), (6.0, 0.0)],
                    notes: vec![Note { at: (6.0, 0.0), text: "not to be shown".into(), below: false }],
                },
            ],
            logarithmic_x: false,
            logarithmic_y: true,
            joined: true,
            limit: vec![(2.0, 1.0), (4.0, 0.01)],
        }
    }

    #[test]
    fn points_that_can_be_shown_are_shown() {
        let svg = chart().svg();
        assert_eq!(svg.matches("<circle").count(), 3, "NaN and zero have no place on a logarithmic axis");
        // The limit, and two series of which one has a single point.
        assert_eq!(svg.matches("<polyline").count(), 3);
        assert!(svg.contains("int4 &amp; more") && svg.contains("a &lt;note&gt;"), "{svg}");
        assert!(!svg.contains("NaN") && !svg.contains("not to be shown"), "{svg}");
    }

    #[test]
    fn lines_run_from_left_to_right() {
        let svg = chart().svg();
        let points = svg.split("points=\"").nth(2).expect("line").split('"').next().expect("points");
        let places: Vec<f64> = points
            .split_whitespace()
            .map(|point| point.split(',').next().expect("x").parse().expect("number"))
            .collect();
        assert!(places.is_sorted(), "{places:?}");
    }

    #[test]
    fn every_series_is_named_in_its_colour() {
        let series =
            |index: usize| Series { name: format!("codec {index}"), points: vec![(2.0, 0.1)], notes: vec![] };
        let svg = LineChart { joined: false, series: (0..6).map(series).collect(), ..chart() }.svg();
        for index in 0..6 {
            assert!(svg.contains(&format!("codec {index}\n")), "{svg}");
        }
        assert_eq!(svg.matches("<circle").count(), 6);
    }

    #[test]
    fn no_points_are_no_trouble() {
        let svg = LineChart { series: vec![Series::default()], ..chart() }.svg();
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n") && !svg.contains("NaN"));
    }
}
