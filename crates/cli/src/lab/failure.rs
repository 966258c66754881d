//! How errors of calibration and evaluation fail a command.

use oscar_lab::calibrate::CalibrateError;
use oscar_lab::eval::EvalError;

use crate::failure::{Failure, engine_failure};

impl From<CalibrateError> for Failure {
    fn from(error: CalibrateError) -> Failure {
        match error {
            CalibrateError::Rotations(error) => error.into(),
            error => Failure::new(error),
        }
    }
}

impl From<EvalError> for Failure {
    fn from(error: EvalError) -> Failure {
        match error {
            EvalError::Rotations(error) => (*error).into(),
            EvalError::Calibrate(error) => (*error).into(),
            EvalError::Engine(error) => engine_failure(&error),
            error => Failure::new(error),
        }
    }
}
