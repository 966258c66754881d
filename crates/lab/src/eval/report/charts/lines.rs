//! Several series over one axis, as lines or as dots.

use plotters::prelude::*;

use super::axis::Axis;
use super::{Heading, SIDES, colour, dot_style, plot, sheet};

/// One series.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Series {
    /// Its name in the legend.
    pub name: String,
    /// Its points.
    pub points: Vec<(f64, f64)>,
}

/// A chart of several series.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LineChart {
    /// What it shows.
    pub title: String,
    /// What runs to the right.
    pub x_axis: String,
    /// What runs up.
    pub y_axis: String,
    /// The series.
    pub series: Vec<Series>,
    /// The x axis counts decades.
    pub logarithmic_x: bool,
    /// The y axis counts decades.
    pub logarithmic_y: bool,
    /// Join the points of a series.
    pub joined: bool,
}

const HEIGHT: u32 = 280;

impl LineChart {
    /// The chart as SVG.
    pub fn svg(&self) -> String {
        let names: Vec<String> = self.series.iter().map(|series| series.name.clone()).collect();
        let heading = Heading::new(&self.title, &names);
        let points = || self.series.iter().flat_map(|series| &series.points);
        let x = Axis::new(points().map(|point| point.0), self.logarithmic_x, false);
        let y = Axis::new(points().map(|point| point.1), self.logarithmic_y, false);
        let shown = |series: &Series| {
            let place = |&(across, up): &(f64, f64)| Some((x.place(across)?, y.place(up)?));
            let mut shown: Vec<(f64, f64)> = series.points.iter().filter_map(place).collect();
            shown.sort_by(|one, other| one.0.total_cmp(&other.0));
            shown
        };
        let shown: Vec<Vec<(f64, f64)>> = self.series.iter().map(shown).collect();
        sheet(heading.height + HEIGHT, |sheet| {
            let mut plot = plot(&heading.draw(sheet)?, SIDES, (&x, &self.x_axis), (&y, &self.y_axis))?;
            for (index, points) in shown.into_iter().enumerate() {
                if self.joined && points.len() > 1 {
                    plot.draw_series([PathElement::new(points.clone(), colour(index).stroke_width(2))])?;
                }
                plot.draw_series(points.into_iter().map(|point| Circle::new(point, 4, dot_style(index))))?;
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
                Series { name: "int2".into(), points: vec![(2.5, 0.06), (2.25, 0.2)] },
                Series {
                    name: "int4 & more".into(),
                    points: vec![(4.0, 0.003), (5.0, f64::NAN), (6.0, 0.0)],
                },
            ],
            logarithmic_x: false,
            logarithmic_y: true,
            joined: true,
        }
    }

    #[test]
    fn points_that_can_be_shown_are_shown() {
        let svg = chart().svg();
        assert_eq!(svg.matches("<circle").count(), 3, "NaN and zero have no place on a logarithmic axis");
        assert_eq!(svg.matches("<polyline").count(), 1);
        assert!(svg.contains("int4 &amp; more") && !svg.contains("NaN"));
    }

    #[test]
    fn lines_run_from_left_to_right() {
        let svg = chart().svg();
        let points = svg.split("points=\"").nth(1).expect("line").split('"').next().expect("points");
        let places: Vec<f64> = points
            .split_whitespace()
            .map(|point| point.split(',').next().expect("x").parse().expect("number"))
            .collect();
        assert!(places.is_sorted(), "{places:?}");
    }

    #[test]
    fn every_series_is_named_in_its_colour() {
        let series = |index: usize| Series { name: format!("codec {index}"), points: vec![(2.0, 0.1)] };
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
