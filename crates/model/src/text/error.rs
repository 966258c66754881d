//! Everything that can go wrong between text and token ids, each with the field at fault.

use std::path::PathBuf;

use crate::files::on_one_line;

/// An error from a tokenizer or a chat template.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// A file could not be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file that was read.
        path: PathBuf,
        /// The error of the system.
        #[source]
        source: std::io::Error,
    },
    /// A tokenizer or template file is larger than any real one.
    #[error("{path}: {bytes} bytes, more than the limit of {limit} bytes for this kind of file")]
    TooLarge {
        /// The file that was read.
        path: PathBuf,
        /// Size of the file in bytes.
        bytes: u64,
        /// Most bytes that are read.
        limit: u64,
    },
    /// A tokenizer or configuration file does not parse or contradicts itself.
    #[error("{path}: {}", on_one_line(reason))]
    File {
        /// The file that was read.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The model file itself is at fault.
    #[error(transparent)]
    ModelFile(#[from] crate::files::FileError),
    /// A metadata field the tokenizer needs is absent.
    #[error("vocabulary field `{field}` is missing")]
    MissingField {
        /// The key of the metadata.
        field: &'static str,
    },
    /// A metadata field is present but holds the wrong type or an impossible value.
    #[error("vocabulary field `{field}`: {}", on_one_line(reason))]
    BadField {
        /// The key of the metadata.
        field: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// `tokenizer.ggml.model` names a tokenizer this crate does not know.
    #[error("vocabulary field `tokenizer.ggml.model`: unknown tokenizer {model:?} (known: gpt2, llama)")]
    UnknownModel {
        /// The value that the file has.
        model: String,
    },
    /// `tokenizer.ggml.pre` names a pre-tokenizer this crate does not know; guessing would silently change ids.
    #[error("vocabulary field `tokenizer.ggml.pre`: unknown pre-tokenizer {pre:?} (known: {known})")]
    UnknownPreTokenizer {
        /// The value that the file has.
        pre: String,
        /// The values that would work.
        known: String,
    },
    /// The vocabulary holds no token at all.
    #[error("vocabulary field `tokenizer.ggml.tokens` is empty")]
    EmptyVocabulary,
    /// Two parallel arrays of the vocabulary differ in length.
    #[error("vocabulary field `{field}` has {found} entries but `tokenizer.ggml.tokens` has {tokens}")]
    LengthMismatch {
        /// The key of the metadata.
        field: &'static str,
        /// Length of the array.
        found: usize,
        /// The number of tokens of the vocabulary.
        tokens: usize,
    },
    /// The same token text has two ids.
    #[error("vocabulary field `tokenizer.ggml.tokens`: ids {first} and {second} are both {token:?}")]
    DuplicateToken {
        /// The text of both tokens.
        token: String,
        /// The lower of the two ids.
        first: u32,
        /// The higher of the two ids.
        second: u32,
    },
    /// A merge rule is not two tokens, or names a token outside the vocabulary.
    #[error("merge rule {index} ({merge:?}): {reason}")]
    BadMerge {
        /// Position in the list.
        index: usize,
        /// The merge rule as the file has it.
        merge: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A special token id is outside the vocabulary.
    #[error("vocabulary field `{field}` is {id} but the vocabulary has {tokens} tokens")]
    SpecialOutOfRange {
        /// The key of the metadata.
        field: &'static str,
        /// The id that is out of range.
        id: u32,
        /// The number of tokens of the vocabulary.
        tokens: usize,
    },
    /// The tokenizer can produce ids for which the model has no embedding row.
    #[error(
        "the tokenizer has {tokenizer} tokens but the model has {rows} embedding rows: tokenizer and weights are from different models"
    )]
    LargerThanEmbedding {
        /// The number of ids that the tokenizer has.
        tokenizer: usize,
        /// The number of rows that the embedding has.
        rows: usize,
    },
    /// A token id the tokenizer does not know.
    #[error("token id {id} is outside the vocabulary of {tokens} tokens")]
    UnknownId {
        /// The id that is out of range.
        id: u32,
        /// The number of tokens of the vocabulary.
        tokens: usize,
    },
    /// The tokenizer library refused the text.
    #[error("cannot encode the text: {}", on_one_line(reason))]
    Encode {
        /// What the library said.
        reason: String,
    },
    /// The model has no chat template.
    #[error("the model has no chat template; `oscar generate` continues plain text without one")]
    NoChatTemplate,
    /// The chat template does not compile or fails while rendering.
    #[error("chat template line {line}: {reason}")]
    Template {
        /// Line of the template, 0 when unknown.
        line: usize,
        /// What went wrong.
        reason: String,
    },
    /// The chat template refused the conversation with a message of its own.
    #[error("the chat template refuses this conversation: {message}")]
    TemplateRefused {
        /// What the template said.
        message: String,
    },
    /// The chat template wanted more than a template may take.
    #[error("chat template line {line}: {reason}; templates of real models stay far below this limit")]
    TemplateLimit {
        /// Line of the template, 0 when unknown.
        line: usize,
        /// The limit that was reached, in words.
        reason: String,
    },
}
