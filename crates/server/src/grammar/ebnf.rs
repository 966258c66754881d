//! Grammars as llama.cpp and XGrammar write them (`root ::= "a" | [0-9]+`), rewritten for the library.

use super::GrammarError;

/// Rewrites a grammar: `::=` becomes `:`, `root` becomes `start`, character classes become regular expressions, and
/// names become ones that Lark takes for rules.
pub(super) fn to_lark(grammar: &str) -> Result<String, GrammarError> {
    let mut out = String::with_capacity(grammar.len() * 2);
    let mut has_root = false;
    let mut rest = grammar;
    while let Some(character) = rest.chars().next() {
        let length = match character {
            '"' => {
                let length = quoted(rest, '"').ok_or_else(|| invalid("a string is not closed", rest))?;
                out.push_str(&rest[..length]);
                length
            }
            '[' => {
                let length =
                    quoted(rest, ']').ok_or_else(|| invalid("a character class is not closed", rest))?;
                out.push_str(&format!("/{}/", rest[..length].replace('/', "\\/")));
                length
            }
            '#' => rest.find('\n').unwrap_or(rest.len()),
            ':' if rest.starts_with("::=") => {
                out.push(':');
                3
            }
            '.' => {
                out.push_str("/(?s:.)/");
                1
            }
            _ if character.is_ascii_alphabetic() || character == '_' => {
                let part = |other: char| other.is_ascii_alphanumeric() || "-_".contains(other);
                let length = rest.find(|other| !part(other)).unwrap_or(rest.len());
                let name = &rest[..length];
                let defines = rest[length..].trim_start().starts_with("::=");
                has_root |= name == "root" && defines;
                out.push_str(&rule_name(name));
                length
            }
            '{' => {
                let length = rest.find('}').ok_or_else(|| invalid("a repetition is not closed", rest))? + 1;
                out.push_str(&rest[..length]);
                length
            }
            '|' | '(' | ')' | '*' | '+' | '?' => {
                out.push(character);
                1
            }
            _ if character.is_whitespace() => {
                out.push(character);
                character.len_utf8()
            }
            _ => return Err(invalid("a character that is not part of the notation", rest)),
        };
        rest = &rest[length..];
    }
    if has_root { Ok(out) } else { Err(invalid("it has no rule `root`", "")) }
}

/// Rules of Lark are in lower case; names that differ must stay different.
fn rule_name(name: &str) -> String {
    if name == "root" {
        return "start".to_owned();
    }
    let mut out = "r_".to_owned();
    for character in name.chars() {
        match character {
            '-' => out.push_str("_d"),
            '_' => out.push_str("__"),
            _ if character.is_ascii_uppercase() => {
                out.push_str("_u");
                out.push(character.to_ascii_lowercase());
            }
            _ => out.push(character),
        }
    }
    out
}

/// Bytes to the closing character, past escaped ones.
fn quoted(text: &str, close: char) -> Option<usize> {
    let mut escaped = false;
    for (index, character) in text.char_indices().skip(1) {
        match character {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if character == close => return Some(index + character.len_utf8()),
            '\n' => return None,
            _ => {}
        }
    }
    None
}

fn invalid(reason: &str, rest: &str) -> GrammarError {
    let near: String = rest.chars().take(24).collect();
    let place = if near.is_empty() { String::new() } else { format!(", near `{}`", near.trim_end()) };
    GrammarError::Invalid { what: "the grammar", reason: format!("{reason}{place}") }
}
