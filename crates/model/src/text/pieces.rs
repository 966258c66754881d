//! The raw bytes of every token, in one block: decoding is a table walk.

use super::TextError;

/// What a token is, after `tokenizer.ggml.token_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PieceKind {
    /// A piece of ordinary text.
    Normal,
    /// Stands for text that no other token covers.
    Unknown,
    /// Steers the model (`<|im_end|>`); never made from plain text, skipped when decoding.
    Control,
    /// Always one token wherever its text appears, but part of the visible text (`<tool_call>`).
    UserDefined,
    /// A row without meaning, such as padding of the embedding.
    Unused,
    /// One raw byte, written `<0x0A>`.
    Byte,
}

impl PieceKind {
    /// Hidden from decoded text, and only recognised in text where special tokens are parsed.
    pub(super) fn is_special(self) -> bool {
        matches!(self, PieceKind::Control | PieceKind::Unknown)
    }
}

/// How token text stands for bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Spelling {
    /// Each character of the token stands for one byte (GPT-2 alphabet).
    ByteLevel,
    /// UTF-8 with `▁` for a space and `<0x..>` for single bytes.
    SentencePiece,
}

/// The byte a character of the GPT-2 alphabet stands for.
///
/// Printable bytes stand for themselves; the other 68 are numbered upwards from U+0100 in byte order, so that
/// no token contains a space or a control character.
fn byte_of_char(character: char) -> Option<u8> {
    let code = u32::from(character);
    match code {
        0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => u8::try_from(code).ok(),
        0x100..=0x120 => u8::try_from(code - 0x100).ok(),
        0x121..=0x142 => u8::try_from(code - 0x121 + 0x7F).ok(),
        0x143 => Some(0xAD),
        _ => None,
    }
}

/// Bytes and kind of every token id.
#[derive(Debug, Clone, Default)]
pub(super) struct PieceTable {
    bytes: Vec<u8>,
    /// `ends[i]` closes token `i`; token `i` starts where token `i - 1` ends.
    ends: Vec<u32>,
    kinds: Vec<PieceKind>,
}

impl PieceTable {
    /// Appends the next id.
    pub(super) fn push(&mut self, text: &str, kind: PieceKind, spelling: Spelling) -> Result<(), TextError> {
        match (kind, spelling) {
            (PieceKind::Normal, Spelling::ByteLevel) => {
                let start = self.bytes.len();
                for character in text.chars() {
                    let Some(byte) = byte_of_char(character) else {
                        // A token outside the alphabet is plain text someone added by hand.
                        self.bytes.truncate(start);
                        self.bytes.extend_from_slice(text.as_bytes());
                        break;
                    };
                    self.bytes.push(byte);
                }
            }
            (PieceKind::Normal | PieceKind::Byte | PieceKind::UserDefined, Spelling::SentencePiece) => {
                match byte_token(text).filter(|_| kind != PieceKind::UserDefined) {
                    Some(byte) => self.bytes.push(byte),
                    None => self.bytes.extend_from_slice(text.replace('▁', " ").as_bytes()),
                }
            }
            _ => self.bytes.extend_from_slice(text.as_bytes()),
        }
        let end = u32::try_from(self.bytes.len()).map_err(|_| TextError::BadField {
            field: "tokenizer.ggml.tokens",
            reason: "more than 4 GiB of token text".to_owned(),
        })?;
        self.ends.push(end);
        self.kinds.push(kind);
        Ok(())
    }

    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    pub(super) fn kind(&self, id: u32) -> Option<PieceKind> {
        self.kinds.get(id as usize).copied()
    }

    pub(super) fn bytes(&self, id: u32) -> Option<&[u8]> {
        let index = id as usize;
        let end = *self.ends.get(index)? as usize;
        let start = if index == 0 { 0 } else { self.ends[index - 1] as usize };
        Some(&self.bytes[start..end])
    }
}

/// The byte that `<0x0A>` stands for.
pub(super) fn byte_token(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() != 2 || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    u8::from_str_radix(digits, 16).ok()
}

#[cfg(test)]
mod tests {
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;

    use super::*;

    #[test]
    fn alphabet_is_the_one_of_the_tokenizer_library() {
        let alphabet = ByteLevel::alphabet();
        assert_eq!(alphabet.len(), 256);
        let mut seen = [false; 256];
        for character in alphabet {
            let byte = byte_of_char(character).expect("every letter of the alphabet is a byte");
            assert!(!seen[usize::from(byte)], "{byte} twice");
            seen[usize::from(byte)] = true;
        }
        assert_eq!(byte_of_char('Ġ'), Some(b' '));
        assert_eq!(byte_of_char('Ċ'), Some(b'\n'));
        assert_eq!(byte_of_char('▁'), None);
    }
}
