//! Scores by depth and length: one square each, darker (lighter on dark paper) for better.

use super::canvas::{Canvas, TITLE_HEIGHT, WIDTH, fitted};

/// A grid of scores.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HeatMap {
    /// What it shows, such as the codec.
    pub title: String,
    /// What the columns are, such as context length in tokens.
    pub x_axis: String,
    /// What the rows are, such as depth in percent.
    pub y_axis: String,
    /// Names of the columns.
    pub columns: Vec<String>,
    /// Names of the rows, from the top.
    pub rows: Vec<String>,
    /// Scores of 0 to 1 by row, then column; nothing where none was measured.
    pub scores: Vec<Vec<Option<f64>>>,
}

const LEFT: f64 = 58.0;
const ROW: f64 = 30.0;
const MAP_GAP: f64 = 10.0;

impl HeatMap {
    /// The map as SVG, to be put into a page that holds the style.
    pub fn svg(&self) -> String {
        let mut canvas = Canvas::new();
        let height = self.draw(&mut canvas, 0.0);
        canvas.finish(&self.title, height, false)
    }

    fn draw(&self, canvas: &mut Canvas, offset: f64) -> f64 {
        let top = offset + TITLE_HEIGHT;
        canvas.text(4.0, offset + 18.0, "title", &fitted(&self.title, WIDTH - 8.0));
        let columns = self.columns.len().max(1) as f64;
        let cell = ((WIDTH - LEFT - 8.0) / columns).min(96.0);
        let bottom = top + ROW * self.rows.len() as f64;
        for (row, name) in self.rows.iter().enumerate() {
            let y = top + ROW * row as f64;
            canvas.text(LEFT - 6.0, y + 19.0, "faint end", name);
            for (column, column_name) in self.columns.iter().enumerate() {
                let x = LEFT + cell * column as f64;
                let score = self.scores.get(row).and_then(|scores| *scores.get(column)?);
                let says =
                    |score: &str| format!("{} {column_name}, {} {name}: {score}", self.x_axis, self.y_axis);
                let (corner, size) = ((x + 1.0, y + 1.0), ((cell - 2.0).max(0.5), ROW - 2.0));
                let Some(score) = score.filter(|score| score.is_finite()) else {
                    canvas.rectangle(corner, size, r#"rx="3" class="gap""#, &says("not measured"));
                    continue;
                };
                let score = score.clamp(0.0, 1.0);
                // One colour, more or less of it, works on light and on dark paper; full strength needs white letters.
                let strength = 0.06 + 0.94 * score;
                let attributes = format!(r#"rx="3" class="heat" fill-opacity="{strength:.2}""#);
                let percent = format!("{:.0}", score * 100.0);
                canvas.rectangle(corner, size, &attributes, &says(&format!("{percent} %")));
                if cell >= 24.0 {
                    let class = if score > 0.55 { "middle on" } else { "middle" };
                    canvas.text(x + cell / 2.0, y + 19.0, class, &percent);
                }
            }
        }
        // Names of many narrow columns would run into each other.
        let every = (34.0 / cell).ceil().max(1.0) as usize;
        for (column, name) in self.columns.iter().enumerate().step_by(every) {
            canvas.text(LEFT + cell * (column as f64 + 0.5), bottom + 15.0, "faint middle", name);
        }
        canvas.text(LEFT + cell * columns / 2.0, bottom + 31.0, "faint middle", &self.x_axis);
        canvas.upright_text(14.0, (top + bottom) / 2.0, "faint middle", &self.y_axis);
        bottom + 40.0
    }
}

/// Maps under each other in one file of its own.
pub fn heat_map_svg(title: &str, maps: &[HeatMap]) -> String {
    let mut canvas = Canvas::new();
    let mut height = 0.0;
    if !title.is_empty() {
        canvas.text(4.0, 20.0, "title", &fitted(title, WIDTH - 8.0));
        height = TITLE_HEIGHT;
    }
    for map in maps {
        height = map.draw(&mut canvas, height) + MAP_GAP;
    }
    canvas.finish(title, height.max(TITLE_HEIGHT), true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map() -> HeatMap {
        HeatMap {
            title: "int2 <b>".into(),
            x_axis: "tokens".into(),
            y_axis: "depth %".into(),
            columns: vec!["4k".into(), "8k".into()],
            rows: vec!["0".into(), "50".into(), "100".into()],
            scores: vec![vec![Some(1.0), Some(0.5)], vec![Some(0.0), None], vec![Some(f64::NAN), Some(7.0)]],
        }
    }

    #[test]
    fn every_measured_square_is_filled_by_its_score() {
        let svg = map().svg();
        assert_eq!(svg.matches("class=\"heat\"").count(), 4);
        assert_eq!(svg.matches("class=\"gap\"").count(), 2);
        assert!(svg.contains("fill-opacity=\"1.00\"") && svg.contains("fill-opacity=\"0.53\""));
        assert!(svg.contains("tokens 8k, depth % 0: 50 %"), "{svg}");
        assert!(svg.contains("int2 &lt;b&gt;"));
    }

    #[test]
    fn several_maps_share_a_file() {
        let svg = heat_map_svg("SmolLM2", &[map(), map()]);
        assert_eq!(svg.matches("<svg").count(), 1);
        assert_eq!(svg.matches("class=\"heat\"").count(), 8);
        assert!(svg.contains("prefers-color-scheme"));
    }

    #[test]
    fn ragged_and_empty_grids_are_drawn() {
        let ragged = HeatMap { scores: vec![vec![Some(1.0)]], ..map() };
        assert_eq!(ragged.svg().matches("class=\"gap\"").count(), 5);
        assert!(!heat_map_svg("", &[HeatMap::default()]).contains("NaN"));
        let many = HeatMap { columns: (0..200).map(|n| n.to_string()).collect(), ..map() };
        assert!(!many.svg().contains("width=\"-"));
    }
}
