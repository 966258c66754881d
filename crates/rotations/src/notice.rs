//! What a user should know about the rotations that were taken and the cache that was chosen.

use std::fmt;

use crate::cache_type::CacheType;
use crate::means::MEAN_TOKENS;

/// Something a user should know about a decision.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Notice {
    /// `auto` chose bf16, because there are no rotations for the model.
    NoRotations {
        /// Name of the model.
        model: String,
    },
    /// The certificate advises against 2 bits.
    Certificate {
        /// Name of the rotations.
        rotations: String,
        /// What the certificate says.
        reason: String,
        /// What is used all the same, or instead.
        used: CacheType,
    },
    /// Mean keys are not known and were estimated.
    MeansEstimated {
        /// What came without: a rotation file, or the model.
        of: String,
    },
    /// Rotations are of an earlier version of the format and have no bands.
    OldRotations {
        /// Name of the rotations.
        rotations: String,
        /// The version of their file.
        version: u32,
        /// Name of the model.
        model: String,
        /// Name of the rotations that are used in their place; none if the old ones are used.
        used: Option<String>,
    },
    /// Rotations may not be those of this model.
    Model(String),
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Notice::NoRotations { model } => {
                write!(
                    f,
                    "no rotations for {model}, so the cache is bf16; `oscar calibrate {model}` makes them"
                )
            }
            Notice::Certificate { rotations, reason, used: CacheType::Int2 | CacheType::Int15 } => {
                write!(f, "the certificate of {rotations} advises against int2: {reason}")
            }
            Notice::Certificate { rotations, reason, used } => {
                write!(
                    f,
                    "the certificate of {rotations} advises against int2, so the cache is {used}: {reason}"
                )
            }
            Notice::MeansEstimated { of } => {
                write!(f, "{of}: mean keys are estimated from {MEAN_TOKENS} tokens of generated prose")
            }
            Notice::OldRotations { rotations, version, model, used: Some(used) } => {
                write!(
                    f,
                    "{rotations} (version {version}) has no bands, so the rotations {used} that ship with the program \
                     are used; `oscar calibrate {model}` makes yours anew, --rotations FILE uses them as they are"
                )
            }
            Notice::OldRotations { rotations, version, model, used: None } => {
                write!(
                    f,
                    "{rotations} (version {version}) has no bands, so history is in scalar codes; `oscar calibrate \
                     {model}` makes a file that has them"
                )
            }
            Notice::Model(text) => f.write_str(text),
        }
    }
}
