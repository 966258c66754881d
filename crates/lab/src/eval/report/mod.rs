//! Results as one self-contained HTML page, with charts drawn here.

mod html;
mod results;
mod sections;
pub mod svg;
mod table;

pub use html::page;
pub use results::{ReportError, Results, Row};
pub use sections::needle_maps;
pub use svg::{HeatMap, heat_map_svg};
