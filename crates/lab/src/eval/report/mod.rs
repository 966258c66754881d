//! Results as one self-contained HTML page with charts.

pub mod charts;
mod escape;
mod html;
mod results;
mod sections;
mod table;

pub use charts::{HeatMap, heat_map_svg};
pub use html::page;
pub use results::{ReportError, ResultRow, Results};
pub use sections::needle_maps;
