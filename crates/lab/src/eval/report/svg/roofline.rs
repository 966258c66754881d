//! Speeds against what memory allows: a line that climbs with the operations per byte, and a dot for every measurement.

use super::canvas::{Canvas, TITLE_HEIGHT, WIDTH, colour, fitted};
use super::lines::{LEFT, Labels, RIGHT, draw_marks, legend};
use super::scale::Scale;

/// One measurement.
#[derive(Clone, Debug, PartialEq)]
pub struct RooflineDot {
    /// The series it belongs to, which has one colour.
    pub series: String,
    /// What stands beside it.
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

const HEIGHT: f64 = 300.0;

/// More dots than these are not all named: the fastest and the slowest of a series are. What a pointer finds names all.
const NAMED: usize = 12;

impl Roofline {
    /// The chart as SVG, for a file of its own.
    pub fn svg(&self) -> String {
        let mut canvas = Canvas::new();
        canvas.text(4.0, 18.0, "title", &fitted(&self.title, WIDTH - 8.0));
        let mut names: Vec<String> = Vec::new();
        for dot in &self.dots {
            if !names.contains(&dot.series) {
                names.push(dot.series.clone());
            }
        }
        let top = TITLE_HEIGHT + legend(&mut canvas, TITLE_HEIGHT, &names) + 6.0;
        let bottom = top + HEIGHT;
        let x_scale = Scale::new(self.dots.iter().map(|dot| dot.intensity), true, false);
        // The ceiling is above every dot, so the axis holds that as well.
        let roofs = self.dots.iter().map(|dot| dot.intensity * self.ceiling);
        let y_scale = Scale::new(self.dots.iter().map(|dot| dot.speed).chain(roofs), true, false);
        let x = |place: f64| LEFT + place * (RIGHT - LEFT);
        let y = |place: f64| bottom - place * HEIGHT;
        draw_marks(&mut canvas, &x_scale, &y_scale, &x, &y, bottom);
        let most = |values: &mut dyn Iterator<Item = f64>| values.fold(0.0, f64::max);
        let right = most(&mut self.dots.iter().map(|dot| dot.intensity));
        let left = self.dots.iter().map(|dot| dot.intensity).fold(right, f64::min);
        let roof: Vec<(f64, f64)> = [left / 1.5, right]
            .iter()
            .filter_map(|&at| Some((x(x_scale.place(at)?), y(y_scale.place(at * self.ceiling)?))))
            .collect();
        if roof.len() == 2 {
            canvas.polyline(&roof, "var(--faint)");
        }
        let mut shown = Vec::new();
        for dot in &self.dots {
            if let (Some(across), Some(up)) = (x_scale.place(dot.intensity), y_scale.place(dot.speed)) {
                let series = names.iter().position(|name| *name == dot.series).unwrap_or(0);
                let share = dot.speed / (dot.intensity * self.ceiling);
                let says = format!("{} {}: {share:.2} of the ceiling", dot.series, dot.name);
                canvas.dot(x(across), y(up), &colour(series), &says);
                shown.push((series, x(across), y(up), &dot.name));
            }
        }
        let places: Vec<(usize, f64, f64)> = shown.iter().map(|&(series, x, y, _)| (series, x, y)).collect();
        let mut labels = Labels::around(&places, top, bottom);
        for &(series, x, y, name) in &shown {
            let mut heights = places.iter().filter(|place| place.0 == series).map(|place| place.2);
            let ends = heights.clone().all(|other| other >= y) || heights.all(|other| other <= y);
            if ends || shown.len() <= NAMED {
                labels.write(&mut canvas, x, y, name);
            }
        }
        canvas.text((LEFT + RIGHT) / 2.0, bottom + 34.0, "faint middle", "operations per byte of pages");
        canvas.upright_text(14.0, (top + bottom) / 2.0, "faint middle", "operations per second");
        canvas.finish(&self.title, bottom + 42.0, true)
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
        assert!(svg.contains("bf16 1 x 1000: 0.90 of the ceiling") && svg.contains("0.71 of the ceiling"));
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
            .map(|part| part.parse().unwrap())
            .collect();
        let heights: Vec<f64> = svg.split("cy=\"").skip(1).map(number).collect();
        assert!(ends[3] < heights[1] && heights[1] < heights[2], "{ends:?} {heights:?}");
        assert!(ends[0] < ends[2] && ends[3] < ends[1], "the line climbs: {ends:?}");
    }

    #[test]
    fn of_many_dots_the_ends_of_a_series_are_named() {
        let mut chart = chart();
        chart.dots = (1..=NAMED + 1)
            .map(|i| RooflineDot {
                series: "int2".into(),
                name: format!("dot {i}"),
                intensity: 28.0,
                speed: i as f64 * 1e12,
            })
            .collect();
        let named = |chart: &Roofline| chart.svg().matches(">dot ").count();
        assert_eq!(named(&chart), 2);
        chart.dots.pop();
        assert_eq!(named(&chart), NAMED);
    }

    #[test]
    fn nothing_to_show_is_no_trouble() {
        let svg = Roofline::default().svg();
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>") && !svg.contains("NaN"), "{svg}");
    }
}
