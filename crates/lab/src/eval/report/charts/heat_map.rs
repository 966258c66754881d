//! Scores by depth and length: one square each, darker for better.

use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use super::{Drawn, FAINT, Heading, INK, RULE, Sheet, TITLE_HEIGHT, WIDTH, colour, fitted, letters, sheet};

/// A grid of scores.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HeatMap {
    /// Title of the map, such as the codec.
    pub title: String,
    /// Name of the axis of columns, such as context length in tokens.
    pub x_axis: String,
    /// Name of the axis of rows, such as depth in percent.
    pub y_axis: String,
    /// Names of the columns.
    pub columns: Vec<String>,
    /// Names of the rows, from the top.
    pub rows: Vec<String>,
    /// Scores of 0 to 1 by row, then column; nothing where none was measured.
    pub scores: Vec<Vec<Option<f64>>>,
}

const LEFT: f64 = 58.0;
const ROW: i32 = 30;
/// Space for the names of the columns and of their axis.
const AXIS_HEIGHT: i32 = 44;

impl HeatMap {
    /// Draws the map as SVG.
    pub fn svg(&self) -> String {
        sheet(self.height(), |sheet| self.draw(sheet))
    }

    fn height(&self) -> u32 {
        TITLE_HEIGHT + (ROW * self.rows.len() as i32 + AXIS_HEIGHT) as u32
    }

    fn draw(&self, sheet: &Sheet<'_>) -> Drawn {
        let area = Heading::new(&self.title, &[]).draw(sheet)?;
        let columns = self.columns.len().max(1) as f64;
        let cell = ((f64::from(WIDTH) - LEFT - 8.0) / columns).min(96.0);
        let edge = |column: usize| (LEFT + cell * column as f64) as i32;
        let middle = |column: usize| (LEFT + cell * (column as f64 + 0.5)) as i32;
        let bottom = ROW * self.rows.len() as i32;
        for (row, name) in self.rows.iter().enumerate() {
            let top = ROW * row as i32;
            area.draw_text(
                &fitted(name, LEFT),
                &letters(FAINT, HPos::Right),
                (LEFT as i32 - 6, top + ROW / 2),
            )?;
            for column in 0..self.columns.len() {
                let corners = [(edge(column) + 1, top + 1), (edge(column + 1) - 1, top + ROW - 1)];
                let score = self.scores.get(row).and_then(|scores| *scores.get(column)?);
                let Some(score) = score.filter(|score| score.is_finite()) else {
                    area.draw(&Rectangle::new(corners, RULE))?;
                    continue;
                };
                let score = score.clamp(0.0, 1.0);
                area.draw(&Rectangle::new(corners, colour(0).mix(0.06 + 0.94 * score).filled()))?;
                if cell >= 24.0 {
                    // Full strength needs white letters.
                    let ink = if score > 0.55 { WHITE } else { INK };
                    let percent = format!("{:.0}", score * 100.0);
                    area.draw_text(&percent, &letters(ink, HPos::Center), (middle(column), top + ROW / 2))?;
                }
            }
        }
        let faint = letters(FAINT, HPos::Center);
        // Names of many narrow columns would run into each other.
        let every = (34.0 / cell).ceil().max(1.0) as usize;
        for (column, name) in self.columns.iter().enumerate().step_by(every) {
            area.draw_text(&fitted(name, LEFT), &faint, (middle(column), bottom + 11))?;
        }
        area.draw_text(&self.x_axis, &faint, ((LEFT + cell * columns / 2.0) as i32, bottom + 29))?;
        area.draw_text(&self.y_axis, &faint.transform(FontTransform::Rotate270), (14, bottom / 2))
    }
}

/// Maps under each other in one file of its own.
pub fn heat_map_svg(title: &str, maps: &[HeatMap]) -> String {
    let heading = Heading::new(title, &[]);
    let heading_height = if title.is_empty() { 0 } else { heading.height };
    let height = heading_height + maps.iter().map(HeatMap::height).sum::<u32>();
    sheet(height.max(TITLE_HEIGHT), |sheet| {
        let mut rest = if title.is_empty() { sheet.clone() } else { heading.draw(sheet)? };
        for map in maps {
            let (area, below) = rest.split_vertically(map.height());
            map.draw(&area)?;
            rest = below;
        }
        Ok(())
    })
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

    /// Squares with a score and squares without; the first rectangle is the ground.
    fn squares(svg: &str) -> (usize, usize) {
        let (filled, empty) =
            svg.split("<rect ").skip(2).partition::<Vec<_>, _>(|rect| rect.contains("stroke=\"none\""));
        (filled.len(), empty.len())
    }

    #[test]
    fn every_measured_square_is_filled_by_its_score() {
        let svg = map().svg();
        assert_eq!(squares(&svg), (4, 2));
        assert!(svg.contains("opacity=\"1\"") && svg.contains("opacity=\"0.53\""), "{svg}");
        for text in [">\n50\n<", ">\n4k\n<", ">\ntokens\n<", ">\ndepth %\n<", "int2 &lt;b&gt;"] {
            assert!(svg.contains(text), "{text}: {svg}");
        }
    }

    #[test]
    fn several_maps_share_a_file() {
        let svg = heat_map_svg("SmolLM2", &[map(), map()]);
        assert_eq!(svg.matches("<svg").count(), 1);
        assert_eq!(squares(&svg), (8, 4));
        assert!(svg.contains("SmolLM2"));
    }

    #[test]
    fn ragged_and_empty_grids_are_drawn() {
        let ragged = HeatMap { scores: vec![vec![Some(1.0)]], ..map() };
        assert_eq!(squares(&ragged.svg()), (1, 5));
        assert!(!heat_map_svg("", &[HeatMap::default()]).contains("NaN"));
        let many = HeatMap { columns: (0..200).map(|n| n.to_string()).collect(), ..map() };
        assert!(!many.svg().contains("width=\"-"));
    }
}
