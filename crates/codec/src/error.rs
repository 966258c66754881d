//! What can be wrong with numbers handed to a codec.

/// A codec refused its input. Nothing has been written when one of these is returned.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CodecError {
    /// NaN or infinity in a key or value row, before or after its rotation.
    #[error("row {row}, channel {channel} is not a finite number; a sealed row cannot hold NaN or infinity")]
    NotFinite {
        /// Row (token) of the call.
        row: usize,
        /// Channel inside the row.
        channel: usize,
    },
    /// A slice or a table has the wrong length.
    #[error("{what}: expected {expected}, got {got}")]
    Shape {
        /// What has the wrong size, in words.
        what: &'static str,
        /// The length it must have.
        expected: usize,
        /// The length it has.
        got: usize,
    },
    /// A head dimension this codec cannot work with.
    #[error("head dimension {head_dim}: {reason}")]
    HeadDim {
        /// The dimension that was requested.
        head_dim: usize,
        /// Why it does not work.
        reason: &'static str,
    },
    /// A row cannot be cut into that many equal groups.
    #[error(
        "{groups} groups do not divide a head of {head_dim} channels; use groups of head_dim, 64, 32 or 16 channels"
    )]
    Groups {
        /// Channels of a row.
        head_dim: usize,
        /// The number of groups that was requested.
        groups: usize,
    },
    /// A matrix of a transform that cannot be undone.
    #[error("the matrix of a transform has no inverse")]
    Singular,
    /// A codec was called for a head it was not built for.
    #[error("layer {layer}, KV head {head} is outside this codec ({layers} layers of {heads} heads)")]
    UnknownHead {
        /// The layer it was called for.
        layer: usize,
        /// The KV head it was called for.
        head: usize,
        /// Layers the codec has.
        layers: usize,
        /// KV heads per layer the codec has.
        heads: usize,
    },
    /// Heads of one layer have pages of different layouts.
    #[error("the heads of layer {layer} have pages of different layouts")]
    MixedLayouts {
        /// The layer whose heads differ.
        layer: usize,
    },
    /// A name that stands for nothing we know.
    #[error("unknown {what} {name:?}; known: {known}")]
    UnknownName {
        /// What kind of thing was named.
        what: &'static str,
        /// The name as given.
        name: String,
        /// The names that work.
        known: &'static str,
    },
}

impl CodecError {
    /// The same error, with the row counted from the start of the caller's slice instead of its own.
    pub fn in_row(self, row: usize) -> Self {
        match self {
            CodecError::NotFinite { channel, .. } => CodecError::NotFinite { row, channel },
            other => other,
        }
    }

    /// The same error, with so many rows of the caller's slice before its own.
    pub fn after_rows(self, before: usize) -> Self {
        match self {
            CodecError::NotFinite { row, channel } => CodecError::NotFinite { row: before + row, channel },
            other => other,
        }
    }
}

/// Refuses the first NaN or infinity of `row`, calling the row `row_index`.
pub(crate) fn check_finite(row: &[f32], row_index: usize) -> Result<(), CodecError> {
    match row.iter().position(|value| !value.is_finite()) {
        Some(channel) => Err(CodecError::NotFinite { row: row_index, channel }),
        None => Ok(()),
    }
}

/// Refuses a length that is not the expected one.
pub(crate) fn check_length(what: &'static str, expected: usize, got: usize) -> Result<(), CodecError> {
    if expected == got { Ok(()) } else { Err(CodecError::Shape { what, expected, got }) }
}
