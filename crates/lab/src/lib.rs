//! Measurements as commands: every number comes with the machine it was measured on.

pub mod calibrate;
pub mod eval;
pub mod machine;
pub mod report;

pub use machine::Machine;
pub use report::Report;
