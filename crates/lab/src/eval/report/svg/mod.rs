//! Small charts as SVG text: heat map, bars, lines, roofline.
//!
//! No script and no dependency, readable in light and dark. Charts are drawn for a narrow column, so that their
//! letters can still be read when a phone shows them at full width.

mod bars;
mod canvas;
mod heat_map;
mod lines;
mod roofline;
mod scale;

pub use bars::{Bar, BarChart};
pub use canvas::{STYLE, escape};
pub use heat_map::{HeatMap, heat_map_svg};
pub use lines::{LineChart, Series};
pub use roofline::{Roofline, RooflineDot};
pub use scale::short;
