//! Single tokens, for lists of probabilities.

use std::fmt::Write;

use oscar_model::text::Tokenizer;

/// The bytes of a token; none for an id the tokenizer does not know.
pub(crate) fn bytes_of(tokenizer: &Tokenizer, id: u32) -> &[u8] {
    tokenizer.token_bytes(id).unwrap_or_default()
}

/// A token as text. Part of a character is spelt `bytes:\xe2\x82`, so that different tokens stay different.
pub(crate) fn shown(tokenizer: &Tokenizer, id: u32) -> String {
    spelt(bytes_of(tokenizer, id))
}

fn spelt(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => {
            let mut text = String::from("bytes:");
            for byte in bytes {
                let _ = write!(text, "\\x{byte:02x}");
            }
            text
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_characters_are_spelt_out() {
        assert_eq!(spelt(b"abc"), "abc");
        assert_eq!(spelt("é".as_bytes()), "é");
        assert_eq!(spelt(&[0xe2, 0x82]), "bytes:\\xe2\\x82");
    }
}
