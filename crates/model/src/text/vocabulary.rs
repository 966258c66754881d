//! The vocabulary as GGUF metadata carries it: plain fields, checked once.

use std::borrow::Cow;
use std::collections::HashMap;

use super::TextError;
use super::pieces::PieceKind;
use crate::files::gguf::{Gguf, Strings};

/// More tokens than any model has; a file that claims more is lying.
pub(super) const MAX_TOKENS: usize = 1 << 22;

/// Vocabulary fields of a GGUF file, before they are made into a tokenizer.
#[derive(Debug, Clone, Default)]
pub struct GgufVocabulary {
    /// `tokenizer.ggml.model`: `gpt2` (byte-level BPE) or `llama` (SentencePiece).
    pub model: String,
    /// `tokenizer.ggml.pre`: which pre-tokenizer a byte-level vocabulary was trained with.
    pub pre: Option<String>,
    /// `tokenizer.ggml.tokens`: token texts by id.
    pub tokens: Vec<String>,
    /// `tokenizer.ggml.scores`: merge priorities; SentencePiece only.
    pub scores: Vec<f32>,
    /// `tokenizer.ggml.token_type`; may be empty, then every token is ordinary text.
    pub token_types: Vec<i32>,
    /// `tokenizer.ggml.merges`: rules of two tokens separated by a space; byte-level only.
    pub merges: Vec<String>,
    /// `tokenizer.ggml.bos_token_id`: begins a text.
    pub bos: Option<u32>,
    /// `tokenizer.ggml.eos_token_id`: ends a text.
    pub eos: Option<u32>,
    /// `tokenizer.ggml.eot_token_id`: ends a turn.
    pub eot: Option<u32>,
    /// `tokenizer.ggml.eom_token_id`: ends a message of several in one turn.
    pub eom: Option<u32>,
    /// The id of the token for what the vocabulary lacks (`tokenizer.ggml.unknown_token_id`).
    pub unk: Option<u32>,
    /// The id of the token that fills up a batch (`tokenizer.ggml.padding_token_id`).
    pub pad: Option<u32>,
    /// Whether texts begin with the begin token (`tokenizer.ggml.add_bos_token`).
    pub add_bos: Option<bool>,
    /// Whether texts end with the end token (`tokenizer.ggml.add_eos_token`).
    pub add_eos: Option<bool>,
    /// `tokenizer.ggml.add_space_prefix`: SentencePiece text starts with a space that is not in the input.
    pub add_space_prefix: Option<bool>,
}

impl GgufVocabulary {
    /// Reads the vocabulary fields of a GGUF file. Absent optional fields stay empty; a field of the wrong type
    /// is an error.
    pub fn from_gguf(file: &Gguf) -> Result<Self, TextError> {
        let metadata = file.metadata();
        let strings = |key: &str| -> Result<Vec<String>, TextError> {
            Ok(metadata
                .get::<&Strings>(key)?
                .map_or_else(Vec::new, |strings| strings.iter().map(str::to_owned).collect()))
        };
        Ok(Self {
            model: metadata.str("tokenizer.ggml.model")?.to_owned(),
            pre: metadata.get::<&str>("tokenizer.ggml.pre")?.map(str::to_owned),
            tokens: metadata.strings("tokenizer.ggml.tokens")?.iter().map(str::to_owned).collect(),
            scores: metadata.get::<&[f32]>("tokenizer.ggml.scores")?.map_or_else(Vec::new, <[f32]>::to_vec),
            token_types: metadata
                .get::<Cow<'_, [i32]>>("tokenizer.ggml.token_type")?
                .map_or_else(Vec::new, Cow::into_owned),
            merges: strings("tokenizer.ggml.merges")?,
            bos: metadata.get("tokenizer.ggml.bos_token_id")?,
            eos: metadata.get("tokenizer.ggml.eos_token_id")?,
            eot: metadata.get("tokenizer.ggml.eot_token_id")?,
            eom: metadata.get("tokenizer.ggml.eom_token_id")?,
            unk: metadata.get("tokenizer.ggml.unknown_token_id")?,
            pad: metadata.get("tokenizer.ggml.padding_token_id")?,
            add_bos: metadata.get("tokenizer.ggml.add_bos_token")?,
            add_eos: metadata.get("tokenizer.ggml.add_eos_token")?,
            add_space_prefix: metadata.get("tokenizer.ggml.add_space_prefix")?,
        })
    }

    /// Checks what every tokenizer relies on: sizes, parallel arrays, unique texts, ids in range.
    pub(super) fn check(&self) -> Result<(), TextError> {
        let tokens = self.tokens.len();
        if tokens == 0 {
            return Err(TextError::EmptyVocabulary);
        }
        if tokens > MAX_TOKENS {
            return Err(TextError::BadField {
                field: "tokenizer.ggml.tokens",
                reason: format!("{tokens} tokens, more than the limit of {MAX_TOKENS}"),
            });
        }
        if !self.token_types.is_empty() && self.token_types.len() != tokens {
            return Err(TextError::LengthMismatch {
                field: "tokenizer.ggml.token_type",
                found: self.token_types.len(),
                tokens,
            });
        }
        if !self.scores.is_empty() && self.scores.len() != tokens {
            return Err(TextError::LengthMismatch {
                field: "tokenizer.ggml.scores",
                found: self.scores.len(),
                tokens,
            });
        }
        let mut seen: HashMap<&str, u32> = HashMap::with_capacity(tokens);
        for (id, token) in self.tokens.iter().enumerate() {
            let id = id as u32;
            if let Some(first) = seen.insert(token, id) {
                return Err(TextError::DuplicateToken { token: token.clone(), first, second: id });
            }
        }
        let specials = [
            ("tokenizer.ggml.bos_token_id", self.bos),
            ("tokenizer.ggml.eos_token_id", self.eos),
            ("tokenizer.ggml.eot_token_id", self.eot),
            ("tokenizer.ggml.eom_token_id", self.eom),
            ("tokenizer.ggml.unknown_token_id", self.unk),
            ("tokenizer.ggml.padding_token_id", self.pad),
        ];
        for (field, id) in specials {
            if let Some(id) = id.filter(|id| *id as usize >= tokens) {
                return Err(TextError::SpecialOutOfRange { field, id, tokens });
            }
        }
        if self.add_bos == Some(true) && self.bos.is_none() {
            return Err(TextError::MissingField { field: "tokenizer.ggml.bos_token_id" });
        }
        if self.add_eos == Some(true) && self.eos.is_none() {
            return Err(TextError::MissingField { field: "tokenizer.ggml.eos_token_id" });
        }
        Ok(())
    }

    /// Kind of each token, after `token_type`.
    pub(super) fn kinds(&self) -> Result<Vec<PieceKind>, TextError> {
        if self.token_types.is_empty() {
            return Ok(vec![PieceKind::Normal; self.tokens.len()]);
        }
        self.token_types
            .iter()
            .enumerate()
            .map(|(id, token_type)| {
                Ok(match token_type {
                    // 0 is "undefined" in the format; converters write it for ordinary tokens.
                    0 | 1 => PieceKind::Normal,
                    2 => PieceKind::Unknown,
                    3 => PieceKind::Control,
                    4 => PieceKind::UserDefined,
                    5 => PieceKind::Unused,
                    6 => PieceKind::Byte,
                    other => {
                        return Err(TextError::BadField {
                            field: "tokenizer.ggml.token_type",
                            reason: format!("token {id} has type {other}, expected 0 to 6"),
                        });
                    }
                })
            })
            .collect()
    }
}
