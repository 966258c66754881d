//! Why rules about tokens, words and ends of an answer cannot be kept to.

use oscar_model::text::TextError;

/// Why rules cannot be kept to.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RuleError {
    /// A bad word cannot be tokenized.
    #[error(transparent)]
    Text(#[from] TextError),
    /// An expression is not valid.
    #[error("stop_regex: {0}")]
    Regex(String),
    /// Expressions take too much when they are compiled.
    #[error("stop_regex: the expressions take more than {limit} bytes when they are compiled")]
    RegexTooLarge {
        /// The most bytes that they may take.
        limit: usize,
    },
    /// Nothing can end an answer of this model.
    #[error("stop_regex: this model has no token that ends an answer")]
    NoEnd,
}
