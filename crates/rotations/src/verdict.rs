//! What calibration advises: whether the cache of a model can be served in two bits.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Whether the cache can be used, the better verdict first.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// The cache can be served.
    Good,
    /// The cache should be measured on the user's own task first.
    Caution,
    /// The cache should not be used; `int4` or `fp8` are better.
    Bad,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Verdict::Good => "good",
            Verdict::Caution => "caution",
            Verdict::Bad => "bad",
        })
    }
}
