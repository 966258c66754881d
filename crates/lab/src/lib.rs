//! Everything that is fitted or measured on models: calibration and evaluation.

pub mod calibrate;
pub mod eval;
