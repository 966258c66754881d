//! What commands print: rows of numbers with the machine they were made on, as JSON or as a table.

pub mod machine;
mod report;

pub use machine::Machine;
pub use report::Report;
