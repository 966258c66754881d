//! Texts to words and signs.

use crate::memory::Fault;

/// A word, a number or a sign.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Token {
    Word(String),
    Number(i64),
    /// A sign of one or two characters.
    Sign(&'static str),
    /// A number, a text in quotes or another character that no size depends on.
    Other,
}

impl Token {
    pub(super) fn is(&self, sign: &str) -> bool {
        matches!(self, Token::Sign(this) if *this == sign)
    }

    pub(super) fn is_word(&self, word: &str) -> bool {
        matches!(self, Token::Word(this) if this == word)
    }

    pub(super) fn word(&self) -> Option<&str> {
        match self {
            Token::Word(word) => Some(word),
            _ => None,
        }
    }
}

/// Signs, the longer ones first.
const SIGNS: [&str; 42] = [
    "||", "&&", "==", "!=", "<=", ">=", "<<", ">>", "::", "->", "++", "--", "+=", "-=", "*=", "|=", "&=",
    "^=", "/=", "%=", "(", ")", "{", "}", "[", "]", "<", ">", ",", ";", ":", "?", "*", "/", "%", "+", "-",
    "!", "=", "&", "|", ".",
];

/// The text with a space for each comment, and lines that go on in the next one as one line.
pub(super) fn without_comments(text: &str) -> String {
    let text = text.replace("\\\n", " ");
    let mut left = text.as_str();
    let mut kept = String::with_capacity(text.len());
    while let Some(at) = left.find('/') {
        kept.push_str(&left[..at]);
        left = &left[at..];
        let end = if left.starts_with("//") {
            left.find('\n').unwrap_or(left.len())
        } else if left.starts_with("/*") {
            left.find("*/").map_or(left.len(), |end| end + 2)
        } else {
            kept.push('/');
            left = &left[1..];
            continue;
        };
        kept.push(' ');
        kept.extend(left[..end].chars().filter(|&c| c == '\n'));
        left = &left[end..];
    }
    kept + left
}

/// The words and signs of a text without comments.
pub(super) fn split(text: &str) -> Result<Vec<Token>, Fault> {
    let mut tokens = Vec::new();
    let mut left = text.trim_start();
    while let Some(first) = left.chars().next() {
        let length = |part: fn(char) -> bool| left.find(|c| !part(c)).unwrap_or(left.len());
        let taken = if first.is_ascii_alphabetic() || first == '_' {
            let length = length(|c| c.is_ascii_alphanumeric() || c == '_');
            tokens.push(Token::Word(left[..length].to_owned()));
            length
        } else if first.is_ascii_digit() {
            let length = length(|c| c.is_ascii_alphanumeric() || c == '.' || c == '\'');
            tokens.push(number(&left[..length]).map_or(Token::Other, Token::Number));
            length
        } else if first == '"' || first == '\'' {
            let mut escaped = false;
            let end = left[1..].find(|c| {
                let ends = c == first && !escaped;
                escaped = c == '\\' && !escaped;
                ends
            });
            tokens.push(Token::Other);
            end.ok_or("a text in quotes does not end")? + 2
        } else if let Some(sign) = SIGNS.into_iter().find(|sign| left.starts_with(sign)) {
            tokens.push(Token::Sign(sign));
            sign.len()
        } else {
            tokens.push(Token::Other);
            first.len_utf8()
        };
        left = left[taken..].trim_start();
    }
    Ok(tokens)
}

/// A whole number, with or without a suffix.
fn number(text: &str) -> Option<i64> {
    let text = text.trim_end_matches(['u', 'U', 'l', 'L']);
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok().map(|number| number as i64),
        None => text.parse().ok(),
    }
}

/// One past the sign that closes what opens at `open`.
pub(super) fn after_closing(tokens: &[Token], open: usize) -> usize {
    let mut depth = 0;
    for (at, token) in tokens.iter().enumerate().skip(open) {
        let Token::Sign(sign) = token else { continue };
        match *sign {
            "(" | "{" | "[" => depth += 1,
            ")" | "}" | "]" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at + 1;
        }
    }
    tokens.len()
}
