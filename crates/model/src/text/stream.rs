//! Text of a running generation, one token at a time, never half a character.

use std::sync::Arc;

use super::{TextError, Tokenizer};

/// Turns token ids into text as they arrive. Work per token is proportional to that token's bytes.
#[derive(Debug, Clone)]
pub struct StreamDecoder {
    tokenizer: Arc<Tokenizer>,
    /// Start of a character whose other bytes have not arrived; at most 3 bytes.
    pending: Vec<u8>,
    keeps_special: bool,
    strip_next_space: bool,
}

impl StreamDecoder {
    /// Decodes tokens that continue a prompt: special tokens are skipped, a leading space is kept.
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        Self { tokenizer, pending: Vec::new(), keeps_special: false, strip_next_space: false }
    }

    /// Also emits the text of special tokens.
    #[must_use]
    pub fn keep_special(mut self) -> Self {
        self.keeps_special = true;
        self
    }

    /// Decodes a text of its own, as [`Tokenizer::decode`] does: the space that SentencePiece puts before the
    /// first word is dropped.
    #[must_use]
    pub fn from_start(mut self) -> Self {
        self.strip_next_space = self.tokenizer.strips_leading_space();
        self
    }

    /// Takes the next token and returns the text it completes, if any.
    pub fn push(&mut self, id: u32) -> Result<Option<String>, TextError> {
        let mut piece = self.tokenizer.token_bytes(id)?;
        if self.tokenizer.is_special(id) && !self.keeps_special {
            return Ok(None);
        }
        if self.strip_next_space {
            piece = piece.strip_prefix(b" ").unwrap_or(piece);
            self.strip_next_space = false;
        }
        self.pending.extend_from_slice(piece);
        let text = self.take_complete();
        Ok((!text.is_empty()).then_some(text))
    }

    /// Ends the text: an unfinished character becomes U+FFFD.
    pub fn finish(&mut self) -> Option<String> {
        let rest = std::mem::take(&mut self.pending);
        (!rest.is_empty()).then(|| String::from_utf8_lossy(&rest).into_owned())
    }

    /// Removes all complete characters from `pending`; bytes that can never become one turn into U+FFFD.
    fn take_complete(&mut self) -> String {
        let mut text = String::with_capacity(self.pending.len());
        let mut rest = self.pending.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    self.pending.clear();
                    return text;
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    match error.error_len() {
                        Some(bad) => {
                            text.push(char::REPLACEMENT_CHARACTER);
                            rest = &after[bad..];
                        }
                        None => {
                            self.pending = after.to_vec();
                            return text;
                        }
                    }
                }
            }
        }
    }
}
