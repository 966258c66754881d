//! Measurements as commands: every number comes with the machine it was measured on.

pub mod bench;
pub mod calibrate;
pub mod eval;
pub mod machine;
pub mod page_codec;
pub mod report;
pub mod zoo;

pub use machine::Machine;
pub use report::Report;
