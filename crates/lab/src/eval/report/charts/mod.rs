//! Charts as SVG text, drawn by `plotters`: heat map, bars, lines.
//!
//! Charts are as wide as a narrow column, so that their letters can still be read when a phone shows them at full
//! width. They need no script and no font file.

mod axis;
mod bars;
mod heat_map;
mod lines;

use plotters::chart::ChartContext;
use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use self::axis::Axis;
pub use self::axis::short;
pub use self::bars::{Bar, BarChart};
pub use self::heat_map::{HeatMap, heat_map_svg};
pub use self::lines::{LineChart, Note, Series};

/// Width of every chart in its own units; pages scale it.
const WIDTH: u32 = 460;
/// Space above the drawing for the title.
const TITLE_HEIGHT: u32 = 30;
/// Space for one row of the legend.
const LEGEND_ROW: u32 = 18;
/// Size of ordinary letters and of the title. `plotters` divides by 1.24, so these are 12 and 14 units.
const LETTERS: f64 = 14.9;
const TITLE_LETTERS: f64 = 17.4;

const INK: RGBColor = RGBColor(0x1c, 0x24, 0x30);
const FAINT: RGBColor = RGBColor(0x5d, 0x68, 0x78);
const RULE: RGBColor = RGBColor(0xd9, 0xde, 0xe6);
const COLOURS: [RGBColor; 8] = [
    RGBColor(0x21, 0x66, 0xac),
    RGBColor(0xd9, 0x5f, 0x02),
    RGBColor(0x1b, 0x8a, 0x5a),
    RGBColor(0xa6, 0x32, 0x8c),
    RGBColor(0x8a, 0x6d, 0x00),
    RGBColor(0x5e, 0x4f, 0xa2),
    RGBColor(0xc2, 0x18, 0x5b),
    RGBColor(0x4d, 0x65, 0x70),
];

type Sheet<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Plot<'a> = ChartContext<'a, SVGBackend<'a>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;
type Drawn<T = ()> = Result<T, DrawingAreaErrorKind<std::io::Error>>;

/// The colour of the series at `index`; colours repeat.
fn colour(index: usize) -> RGBColor {
    COLOURS[index % COLOURS.len()]
}

/// How dots of the series at `index` are drawn: where colours repeat, every other time as rings.
fn dot_style(index: usize) -> ShapeStyle {
    let colour = colour(index);
    if (index / COLOURS.len()).is_multiple_of(2) { colour.filled() } else { colour.stroke_width(2) }
}

/// A chart of a height, on white ground.
fn sheet(height: u32, draw: impl FnOnce(&Sheet<'_>) -> Drawn) -> String {
    let mut svg = String::new();
    let drawn = {
        let sheet = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        sheet.fill(&WHITE).and_then(|()| draw(&sheet)).and_then(|()| sheet.present())
    };
    drawn.expect("a string takes every drawing");
    svg
}

/// Letters of a colour, placed by `anchor` relative to their point.
fn letters(colour: RGBColor, across: HPos) -> TextStyle<'static> {
    ("sans-serif", LETTERS).into_font().color(&colour).pos(Pos::new(across, VPos::Center))
}

/// About how wide a text is; system letters differ, so this is on the generous side.
fn text_width(text: &str) -> f64 {
    text.chars().map(|letter| if letter.is_ascii() { 6.7 } else { 9.0 }).sum()
}

/// A text cut to a width, with a mark where letters are left out. Control characters, which XML forbids, become a mark
/// too; `plotters` escapes the others.
fn fitted(text: &str, width: f64) -> String {
    let text = super::escape::printable(text);
    if text_width(&text) <= width {
        return text;
    }
    let mut out = String::new();
    for letter in text.chars() {
        if text_width(&out) + 16.0 > width {
            break;
        }
        out.push(letter);
    }
    out.push('…');
    out
}

/// The title of a chart and under it the names of its series with their colours, in as many rows as they need.
struct Heading {
    title: String,
    /// Place and text of the name of each series.
    names: Vec<(i32, i32, String)>,
    height: u32,
}

impl Heading {
    /// One name alone needs no legend.
    fn new(title: &str, names: &[String]) -> Heading {
        let mut heading =
            Heading { title: fitted(title, f64::from(WIDTH) - 8.0), names: Vec::new(), height: TITLE_HEIGHT };
        if names.len() < 2 {
            return heading;
        }
        let mut x = 6.0;
        for name in names {
            let name = fitted(name, f64::from(WIDTH) - 40.0);
            let width = 16.0 + text_width(&name) + 12.0;
            if x + width > f64::from(WIDTH) && x > 6.0 {
                x = 6.0;
                heading.height += LEGEND_ROW;
            }
            heading.names.push((x as i32, heading.height as i32 + 6, name));
            x += width;
        }
        heading.height += LEGEND_ROW;
        heading
    }

    /// Draws itself and returns what is left below.
    fn draw<'a>(&self, sheet: &Sheet<'a>) -> Drawn<Sheet<'a>> {
        let style = ("sans-serif", TITLE_LETTERS, FontStyle::Bold).into_font().color(&INK);
        sheet.draw_text(&self.title, &style, (4, 6))?;
        for (index, (x, y, name)) in self.names.iter().enumerate() {
            sheet.draw(&Rectangle::new([(*x, y - 5), (x + 10, y + 5)], dot_style(index)))?;
            sheet.draw_text(name, &letters(INK, HPos::Left), (x + 15, *y))?;
        }
        Ok(sheet.split_vertically(self.height).1)
    }
}

/// A plot of two axes with their names and marks, that much space left and right of it. Lines run across at the marks of
/// the y axis, or upwards at those of the x axis if it has none.
fn plot<'a>(area: &Sheet<'a>, sides: [u32; 2], x: (&Axis, &str), y: (&Axis, &str)) -> Drawn<Plot<'a>> {
    let mut builder = ChartBuilder::on(area);
    builder.margin_top(6).x_label_area_size(40);
    // The name of an axis stands on the edge, half of it beyond.
    builder.margin_left(12).y_label_area_size(sides[0] - 12).margin_right(sides[1]);
    let mut plot = builder.build_cartesian_2d(x.0.range.clone(), y.0.range.clone())?;
    let (x_name, y_name) = (|place: &f64| x.0.name(*place), |place: &f64| y.0.name(*place));
    let mut mesh = plot.configure_mesh();
    if y.0.marks == 0 {
        mesh.disable_y_mesh().disable_y_axis()
    } else {
        mesh.disable_x_mesh()
    };
    mesh.light_line_style(TRANSPARENT).bold_line_style(RULE).axis_style(TRANSPARENT);
    mesh.label_style(letters(FAINT, HPos::Center)).axis_desc_style(letters(FAINT, HPos::Center));
    mesh.x_labels(x.0.marks).x_label_formatter(&x_name).x_desc(x.1);
    mesh.y_labels(y.0.marks).y_label_formatter(&y_name).y_desc(y.1).draw()?;
    Ok(plot)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_are_cut_and_control_characters_replaced() {
        assert_eq!(fitted("short", 100.0), "short");
        let cut = fitted("a very long label that does not fit", 80.0);
        assert!(cut.ends_with('…') && text_width(&cut) <= 80.0, "{cut}");
        assert_eq!(fitted("anything", 1.0), "…");
        assert_eq!(fitted("a\u{0}b", 100.0), "a\u{fffd}b");
    }

    #[test]
    fn a_legend_wraps() {
        let names: Vec<String> = (0..12).map(|index| format!("a codec with a long name {index}")).collect();
        assert!(Heading::new("t", &names).height > 100);
        assert_eq!(Heading::new("t", &names[..1]).height, TITLE_HEIGHT);
    }
}
