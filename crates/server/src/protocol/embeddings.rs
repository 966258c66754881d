//! The body of `/v1/embeddings`.

use oscar_engine::Pooling;
use serde::Deserialize;

use super::{ApiError, Prompt, UnreadFields};

/// The body of `/v1/embeddings`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct EmbeddingsRequest {
    pub(crate) model: Option<String>,
    pub(crate) input: Option<Prompt>,
    pub(crate) encoding_format: Option<String>,
    pub(crate) dimensions: Option<u64>,
    pub(crate) pooling: Option<String>,
    pub(crate) rid: Option<String>,
    pub(crate) cache_salt: Option<String>,
    #[serde(flatten)]
    pub(crate) unread: UnreadFields,
}

/// How the numbers of an embedding are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EmbeddingEncoding {
    /// A list of numbers.
    Float,
    /// The bytes of the numbers as 32-bit floats, lowest byte first, in base64.
    Base64,
}

impl EmbeddingsRequest {
    /// Which hidden states count: those of the last token unless the client says otherwise.
    pub(crate) fn pooling(&self) -> Result<Pooling, ApiError> {
        match self.pooling.as_deref() {
            None | Some("" | "last") => Ok(Pooling::Last),
            Some("mean") => Ok(Pooling::Mean),
            Some(_) => Err(ApiError::bad_field("pooling", "pooling must be \"last\" or \"mean\"")),
        }
    }

    pub(crate) fn encoding(&self) -> Result<EmbeddingEncoding, ApiError> {
        match self.encoding_format.as_deref() {
            None | Some("" | "float") => Ok(EmbeddingEncoding::Float),
            Some("base64") => Ok(EmbeddingEncoding::Base64),
            Some(_) => {
                let message = "encoding_format must be \"float\" or \"base64\"";
                Err(ApiError::bad_field("encoding_format", message))
            }
        }
    }

    /// Refuses another size than the model's: a part of a vector that was not trained for it means nothing.
    pub(crate) fn check_dimensions(&self, size: usize) -> Result<(), ApiError> {
        match self.dimensions {
            Some(asked) if asked != size as u64 => {
                let message =
                    format!("embeddings of this model have {size} dimensions and cannot be shortened");
                Err(ApiError::bad_field("dimensions", message))
            }
            _ => Ok(()),
        }
    }
}
