//! Speeds against what memory allows: a line that climbs with the operations per byte, and a dot for every measurement.

use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use super::axis::Axis;
use super::{FAINT, Heading, INK, SIDES, dot_style, fitted, letters, plot, sheet};

/// One measurement.
#[derive(Clone, Debug, PartialEq)]
pub struct RooflineDot {
    /// The series it belongs to, which has one colour.
    pub series: String,
    /// What stands beside it, with its share of the ceiling.
    pub name: String,
    /// Operations per byte that is read.
    pub intensity: f64,
    /// Operations per second.
    pub speed: f64,
}

/// A chart of measurements below the ceiling of memory.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Roofline {
    /// What it shows.
    pub title: String,
    /// Bytes per second that can be read.
    pub ceiling: f64,
    /// The measurements.
    pub dots: Vec<RooflineDot>,
}

const HEIGHT: u32 = 350;

impl Roofline {
    /// The chart as SVG. The fastest and the slowest dot of every series are named.
    pub fn svg(&self) -> String {
        let mut names: Vec<String> = Vec::new();
        for dot in &self.dots {
            if !names.contains(&dot.series) {
                names.push(dot.series.clone());
            }
        }
        let heading = Heading::new(&self.title, &names);
        let intensities = || self.dots.iter().map(|dot| dot.intensity);
        let x = Axis::new(intensities(), true, false);
        // The ceiling is above every dot, so the axis holds that as well.
        let roofs = intensities().map(|intensity| intensity * self.ceiling);
        let y = Axis::new(self.dots.iter().map(|dot| dot.speed).chain(roofs), true, false);
        let right = intensities().fold(0.0, f64::max);
        let left = intensities().fold(right, f64::min) / 1.5;
        let point = |across: f64, up: f64| Some((x.place(across)?, y.place(up)?));
        let roof: Vec<(f64, f64)> =
            [left, right].into_iter().filter_map(|at| point(at, at * self.ceiling)).collect();
        let dots: Vec<((f64, f64), usize, &RooflineDot)> = self
            .dots
            .iter()
            .filter_map(|dot| {
                let series = names.iter().position(|name| *name == dot.series)?;
                Some((point(dot.intensity, dot.speed)?, series, dot))
            })
            .collect();
        sheet(heading.height + HEIGHT, |sheet| {
            let x = (&x, "operations per byte of pages");
            let y = (&y, "operations per second (share of the ceiling)");
            let mut plot = plot(&heading.draw(sheet)?, SIDES, x, y)?;
            plot.draw_series([PathElement::new(roof, FAINT.stroke_width(2))])?;
            for &(point, series, dot) in &dots {
                plot.draw_series([Circle::new(point, 4, dot_style(series))])?;
                let mut speeds = dots.iter().filter(|other| other.1 == series).map(|other| other.2.speed);
                let (fastest, slowest) =
                    (speeds.clone().all(|speed| speed <= dot.speed), speeds.all(|speed| speed >= dot.speed));
                if fastest || slowest {
                    let share = dot.speed / (dot.intensity * self.ceiling);
                    let label = fitted(&format!("{} ({share:.2})", dot.name), 200.0);
                    // The line climbs to the right, so there is room left of the fastest and right of the slowest.
                    let (offset, anchor) =
                        if fastest { ((-8, -7), HPos::Right) } else { ((8, 7), HPos::Left) };
                    let style = letters(INK, anchor);
                    plot.draw_series([EmptyElement::at(point) + Text::new(label, offset, style)])?;
                }
            }
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart() -> Roofline {
        let dot = |series: &str, intensity, speed| RooflineDot {
            series: series.into(),
            name: "1 x 1000".into(),
            intensity,
            speed,
        };
        let dots = vec![dot("bf16", 4.0, 3.6e12), dot("int2", 28.0, 2e13), dot("int2", 28.0, 1e13)];
        Roofline { title: "a card".into(), ceiling: 1e12, dots }
    }

    #[test]
    fn dots_lie_below_the_line_by_their_share() {
        let svg = chart().svg();
        assert_eq!((svg.matches("<circle").count(), svg.matches("<polyline").count()), (3, 1));
        for text in ["1 x 1000 (0.90)", "1 x 1000 (0.71)", "1 x 1000 (0.36)", "bf16", "int2", "a card"] {
            assert!(svg.contains(text), "{text}: {svg}");
        }
        // The end of the line is where the last dot would be at the ceiling: a quarter of a decade above 0.71.
        let number = |text: &str| -> f64 { text.split('"').next().unwrap().parse().unwrap() };
        let ends: Vec<f64> = svg
            .split("points=\"")
            .nth(1)
            .unwrap()
            .split('"')
            .next()
            .unwrap()
            .split([',', ' '])
            .filter_map(|part| part.parse().ok())
            .collect();
        let heights: Vec<f64> = svg.split("cy=\"").skip(1).map(number).collect();
        assert!(ends[3] < heights[1] && heights[1] < heights[2], "{ends:?} {heights:?}");
        assert!(ends[0] < ends[2] && ends[3] < ends[1], "the line climbs: {ends:?}");
    }

    #[test]
    fn of_many_dots_the_ends_of_a_series_are_named() {
        let dot = |i: usize| RooflineDot {
            series: "int2".into(),
            name: format!("dot {i}"),
            intensity: 28.0,
            speed: i as f64 * 1e12,
        };
        let svg = Roofline { dots: (1..=13).map(dot).collect(), ..chart() }.svg();
        assert_eq!(svg.matches("<circle").count(), 13);
        assert!(svg.contains("dot 1 (") && svg.contains("dot 13 (") && !svg.contains("dot 7"), "{svg}");
    }

    #[test]
    fn nothing_to_show_is_no_trouble() {
        let svg = Roofline::default().svg();
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n") && !svg.contains("NaN"), "{svg}");
    }
}
