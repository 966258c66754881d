//! Several series over one axis, as lines or as dots.

use super::canvas::{Canvas, TITLE_HEIGHT, WIDTH, colour, fitted, text_width};
use super::scale::{Scale, short};

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
    /// Join the points of a series; otherwise each point is a dot with the name of its series beside it.
    pub joined: bool,
}

const HEIGHT: f64 = 230.0;
pub(super) const LEFT: f64 = 62.0;
pub(super) const RIGHT: f64 = WIDTH - 16.0;

impl LineChart {
    /// The chart as SVG, to be put into a page that holds the style.
    pub fn svg(&self) -> String {
        let mut canvas = Canvas::new();
        canvas.text(4.0, 18.0, "title", &fitted(&self.title, WIDTH - 8.0));
        let names: Vec<String> = self.series.iter().map(|series| series.name.clone()).collect();
        let legend = if self.joined { legend(&mut canvas, TITLE_HEIGHT, &names) } else { 0.0 };
        let top = TITLE_HEIGHT + legend + 6.0;
        let bottom = top + HEIGHT;
        let points = || self.series.iter().flat_map(|series| &series.points);
        let x_scale = Scale::new(points().map(|point| point.0), self.logarithmic_x, false);
        let y_scale = Scale::new(points().map(|point| point.1), self.logarithmic_y, false);
        let x = |place: f64| LEFT + place * (RIGHT - LEFT);
        let y = |place: f64| bottom - place * HEIGHT;
        draw_marks(&mut canvas, &x_scale, &y_scale, &x, &y, bottom);
        let mut dots: Vec<(usize, f64, f64)> = Vec::new();
        for (index, series) in self.series.iter().enumerate() {
            let mut shown: Vec<(f64, f64, &(f64, f64))> = Vec::new();
            for point in &series.points {
                if let (Some(right), Some(up)) = (x_scale.place(point.0), y_scale.place(point.1)) {
                    shown.push((x(right), y(up), point));
                }
            }
            shown.sort_by(|one, other| one.0.total_cmp(&other.0));
            if self.joined && shown.len() > 1 {
                let path: Vec<(f64, f64)> = shown.iter().map(|(x, y, _)| (*x, *y)).collect();
                canvas.polyline(&path, &colour(index));
            }
            for (x, y, point) in shown {
                let says = format!("{}: {} at {}", series.name, short(point.1), short(point.0));
                canvas.dot(x, y, &colour(index), &says);
                dots.push((index, x, y));
            }
        }
        if !self.joined {
            let mut labels = Labels::around(&dots, top, bottom);
            for (index, x, y) in dots {
                labels.write(&mut canvas, x, y, &self.series[index].name);
            }
        }
        canvas.text((LEFT + RIGHT) / 2.0, bottom + 34.0, "faint middle", &self.x_axis);
        canvas.upright_text(14.0, (top + bottom) / 2.0, "faint middle", &self.y_axis);
        canvas.finish(&self.title, bottom + 42.0, false)
    }
}

/// The marks of both axes; `x` and `y` take places to the canvas.
pub(super) fn draw_marks(
    canvas: &mut Canvas,
    x_scale: &Scale,
    y_scale: &Scale,
    x: &impl Fn(f64) -> f64,
    y: &impl Fn(f64) -> f64,
    bottom: f64,
) {
    for mark in &y_scale.marks {
        let at = y(y_scale.place(*mark).unwrap_or(0.0));
        canvas.line(LEFT, at, RIGHT, at);
        canvas.text(LEFT - 6.0, at + 4.0, "faint end", &short(*mark));
    }
    for mark in &x_scale.marks {
        let at = x(x_scale.place(*mark).unwrap_or(0.0));
        canvas.line(at, bottom, at, bottom + 4.0);
        canvas.text(at, bottom + 16.0, "faint middle", &short(*mark));
    }
}

/// Names beside dots, moved aside where they would cover a dot or each other.
pub(super) struct Labels {
    /// Left, right and height of what is written or drawn.
    taken: Vec<(f64, f64, f64)>,
    top: f64,
    bottom: f64,
}

impl Labels {
    pub(super) fn around(dots: &[(usize, f64, f64)], top: f64, bottom: f64) -> Labels {
        Labels { taken: dots.iter().map(|&(_, x, y)| (x - 5.0, x + 5.0, y)).collect(), top, bottom }
    }

    pub(super) fn write(&mut self, canvas: &mut Canvas, x: f64, y: f64, name: &str) {
        let name = fitted(name, (RIGHT - LEFT) * 0.6);
        let width = text_width(&name);
        // Right of the dot, left of it, then the same further and further above and below.
        let places = (0..16).flat_map(|step| {
            let shift = 6.0 * f64::from(step);
            [
                (x + 8.0, y + shift),
                (x - 8.0 - width, y + shift),
                (x + 8.0, y - shift),
                (x - 8.0 - width, y - shift),
            ]
        });
        let free = |&(left, height): &(f64, f64)| {
            let inside = left >= LEFT && left + width <= WIDTH && (self.top..=self.bottom).contains(&height);
            inside
                && self.taken.iter().all(|&(from, to, other)| {
                    left > to || left + width < from || (other - height).abs() >= 12.0
                })
        };
        let (left, height) = places.into_iter().find(free).unwrap_or((x + 8.0, y));
        if (height - y).abs() > 8.0 {
            canvas.line(x, y, if left > x { left - 1.0 } else { left + width + 1.0 }, height);
        }
        self.taken.push((left, left + width, height));
        canvas.text(left, height + 4.0, "", &name);
    }
}

/// Coloured names in as many rows as they need; returns the height used. One name alone needs no legend.
pub(super) fn legend(canvas: &mut Canvas, top: f64, names: &[String]) -> f64 {
    if names.len() < 2 {
        return 0.0;
    }
    let (mut x, mut row) = (6.0, 0.0);
    for (index, name) in names.iter().enumerate() {
        let name = fitted(name, WIDTH - 40.0);
        let width = 16.0 + text_width(&name) + 12.0;
        if x + width > WIDTH && x > 6.0 {
            x = 6.0;
            row += 1.0;
        }
        let y = top + row * 18.0;
        let fill = format!(r#"rx="2" style="fill:{}""#, colour(index));
        canvas.rectangle((x, y), (10.0, 10.0), &fill, &name);
        canvas.text(x + 15.0, y + 10.0, "", &name);
        x += width;
    }
    (row + 1.0) * 18.0 + 2.0
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
            .split(' ')
            .map(|point| point.split(',').next().expect("x").parse().expect("number"))
            .collect();
        assert!(places.is_sorted(), "{places:?}");
    }

    #[test]
    fn names_beside_dots_do_not_cover_each_other() {
        let series = |index: usize| Series { name: format!("codec {index}"), points: vec![(2.0, 0.1)] };
        let svg = LineChart { joined: false, series: (0..6).map(series).collect(), ..chart() }.svg();
        let texts = svg.split("<text ").skip(1).filter_map(|text| text.split_once("</text>"));
        let places: std::collections::HashSet<&str> = texts
            .filter_map(|(text, _)| text.split_once('>'))
            .filter(|(_, name)| name.starts_with("codec "))
            .map(|(place, _)| place)
            .collect();
        assert_eq!(places.len(), 6);
    }

    #[test]
    fn a_legend_wraps() {
        let names: Vec<String> = (0..12).map(|index| format!("a codec with a long name {index}")).collect();
        let mut canvas = Canvas::new();
        assert!(legend(&mut canvas, 0.0, &names) > 100.0);
        assert_eq!(legend(&mut canvas, 0.0, &names[..1]), 0.0);
    }

    #[test]
    fn no_points_are_no_trouble() {
        let svg = LineChart { series: vec![Series::default()], ..chart() }.svg();
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>") && !svg.contains("NaN"));
    }
}
