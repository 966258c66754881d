//! Control tokens that somebody has written into a message: they stay text.
//!
//! A chat template writes control tokens (`<|im_end|>`) around messages, and the tokenizer cannot tell them from the
//! same characters inside a message. So a message with such characters is rendered with a mark in the middle of them.
//! [`RenderedText`] is what comes out, without the marks but with their places, and no control token is matched across
//! one of those. A message without such characters is rendered and encoded as if nothing of this existed.

use std::collections::HashSet;
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};

use aho_corasick::AhoCorasick;
use serde_json::Value;

use super::TextError;

/// Characters that no text has a reason to contain.
const PRIVATE: std::ops::RangeInclusive<char> = '\u{F0000}'..='\u{FFFFD}';

/// Finds the control tokens of a vocabulary in text.
#[derive(Debug, Default)]
pub struct ControlTokens {
    matcher: Option<AhoCorasick>,
    /// For each pattern of the matcher, how many of its bytes are before the cut.
    cuts: Vec<usize>,
}

impl ControlTokens {
    /// Takes the texts of control tokens. A token of one character cannot be cut and is not looked for.
    pub(super) fn new<'a>(texts: impl IntoIterator<Item = &'a str>) -> Result<ControlTokens, TextError> {
        let (mut patterns, mut cuts) = (Vec::new(), Vec::new());
        for text in texts.into_iter().filter(|text| text.chars().count() > 1) {
            // A template may write the brackets itself, as in `'<' ~ name ~ '>'`.
            let pattern = between_brackets(text).unwrap_or(text);
            cuts.push(pattern.chars().next().map_or(0, char::len_utf8));
            patterns.push(pattern);
        }
        let built = (!patterns.is_empty()).then(|| AhoCorasick::new(patterns)).transpose();
        let matcher = built.map_err(|error| TextError::Encode { reason: error.to_string() })?;
        Ok(ControlTokens { matcher, cuts })
    }

    /// Whether a text of the value, or a name in it, contains a control token.
    pub(super) fn occur_in(&self, value: &Value) -> bool {
        let found = |text: &str| self.matcher.as_ref().is_some_and(|matcher| matcher.is_match(text));
        match value {
            Value::String(text) => found(text),
            Value::Array(items) => items.iter().any(|item| self.occur_in(item)),
            Value::Object(fields) => fields.iter().any(|(name, field)| found(name) || self.occur_in(field)),
            _ => false,
        }
    }

    /// The value with `mark` inside each control token of its texts and names.
    pub(super) fn marked(&self, value: &Value, mark: &str) -> Value {
        match value {
            Value::String(text) => self.marked_text(text, mark).into(),
            Value::Array(items) => items.iter().map(|item| self.marked(item, mark)).collect(),
            Value::Object(fields) => fields
                .iter()
                .map(|(name, field)| (self.marked_text(name, mark), self.marked(field, mark)))
                .collect(),
            other => other.clone(),
        }
    }

    fn marked_text(&self, text: &str, mark: &str) -> String {
        let found = self.matcher.iter().flat_map(|matcher| matcher.find_overlapping_iter(text));
        let mut places: Vec<usize> =
            found.map(|found| found.start() + self.cuts[found.pattern().as_usize()]).collect();
        places.sort_unstable();
        places.dedup();
        insert(text, &places, mark)
    }
}

/// The text between angle brackets: `|im_end|` of `<|im_end|>`.
fn between_brackets(text: &str) -> Option<&str> {
    let mut characters = text.chars();
    let (_, _, inside) = (characters.next()?, characters.next_back()?, characters.as_str());
    let bar = |character: char| matches!(character, '|' | '｜');
    let long = inside.chars().count() > 2;
    (long && inside.starts_with(bar) && inside.ends_with(bar)).then_some(inside)
}

/// Whether a token looks as those do that begin and end turns, whatever kind its vocabulary says it is.
pub(super) fn looks_like_control(text: &str) -> bool {
    text.starts_with('<') && text.ends_with('>') && between_brackets(text).is_some()
}

/// A mark that survives what templates do to text: digits are not trimmed, escaped or put into other case. It is drawn
/// anew each time, so nobody can write it into a message.
pub fn random_mark() -> String {
    format!("{:020}", RandomState::new().build_hasher().finish())
}

fn insert(text: &str, places: &[usize], mark: &str) -> String {
    let mut out = String::with_capacity(text.len() + places.len() * mark.len());
    let mut from = 0;
    for &place in places {
        out.push_str(&text[from..place]);
        out.push_str(mark);
        from = place;
    }
    out.push_str(&text[from..]);
    out
}

/// How many bytes at the start are the same. Every prompt is compared with all that are remembered, so whole blocks come
/// first.
fn common_prefix(a: &[u8], b: &[u8]) -> usize {
    const BLOCK: usize = 64;
    let blocks = a.chunks_exact(BLOCK).zip(b.chunks_exact(BLOCK)).take_while(|(a, b)| a == b).count();
    let same = blocks * BLOCK;
    same + a[same..].iter().zip(&b[same..]).take_while(|(a, b)| a == b).count()
}

/// A rendered chat: its text, and the places in it at which a message has the characters of a control token.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RenderedText {
    text: String,
    /// Places inside what is not a control token, ascending, none at the start or the end of the text.
    cuts: Vec<usize>,
}

/// A text in which every control token is meant.
impl From<String> for RenderedText {
    fn from(text: String) -> RenderedText {
        RenderedText { text, cuts: Vec::new() }
    }
}

impl RenderedText {
    /// Takes the marks out of a text.
    pub(super) fn from_marked(marked: &str, mark: &str) -> RenderedText {
        let mut rendered = RenderedText::default();
        for (index, part) in marked.split(mark).enumerate() {
            if index > 0 {
                rendered.cuts.push(rendered.text.len());
            }
            rendered.text.push_str(part);
        }
        rendered
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Drops all but the first bytes.
    ///
    /// # Panics
    /// If that is not the end of a character.
    pub fn truncate(&mut self, bytes: usize) {
        self.text.truncate(bytes);
        self.cuts.retain(|&cut| cut < bytes);
    }

    /// Puts `text`, in which every control token is meant, in the place of `mark` wherever that stands.
    pub fn replace(&mut self, mark: &str, text: &str) {
        let mut replaced = RenderedText::default();
        let mut from = 0;
        let mut cuts = std::mem::take(&mut self.cuts).into_iter().peekable();
        for (index, part) in self.text.split(mark).enumerate() {
            if index > 0 {
                replaced.text.push_str(text);
            }
            let moved = |cut: usize| cut - from + replaced.text.len();
            let here = std::iter::from_fn(|| cuts.next_if(|&cut| cut < from + part.len()));
            replaced.cuts.extend(here.map(moved));
            replaced.text.push_str(part);
            from += part.len() + mark.len();
        }
        *self = replaced;
    }

    /// Puts `before`, in which every control token is meant, in front of what follows the first `bytes`.
    pub(super) fn rest(&self, bytes: usize, before: &str) -> RenderedText {
        let cuts = self.cuts.iter().filter(|&&cut| cut > bytes).map(|cut| cut - bytes + before.len());
        RenderedText { text: [before, &self.text[bytes..]].concat(), cuts: cuts.collect() }
    }

    /// Appends a text in which every control token is meant.
    pub(super) fn push_str(&mut self, text: &str) {
        self.text.push_str(text);
    }

    /// The number of bytes at the start that are read alike in both.
    pub(super) fn common_bytes(&self, other: &RenderedText) -> usize {
        let bytes = common_prefix(self.text.as_bytes(), other.text.as_bytes());
        let same = self.cuts.iter().zip(&other.cuts).take_while(|(a, b)| a == b).count();
        let first_of_one = self.cuts.get(same).into_iter().chain(other.cuts.get(same)).min();
        first_of_one.map_or(bytes, |&cut| cut.min(bytes))
    }

    /// Bytes of the text and of the places.
    pub(super) fn bytes(&self) -> usize {
        self.text.len() + size_of_val(&self.cuts[..])
    }

    /// The text with a character at each cut that it does not contain, if there is a cut.
    pub(super) fn with_marks(&self) -> Result<Option<(String, char)>, TextError> {
        if self.cuts.is_empty() {
            return Ok(None);
        }
        let used: HashSet<char> = self.text.chars().filter(|character| PRIVATE.contains(character)).collect();
        let mark = PRIVATE.into_iter().find(|character| !used.contains(character));
        let mark = mark.ok_or_else(|| TextError::Encode {
            reason: "the text has every private character of Unicode and a control token".to_owned(),
        })?;
        Ok(Some((insert(&self.text, &self.cuts, mark.encode_utf8(&mut [0; 4])), mark)))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn control() -> ControlTokens {
        ControlTokens::new(["<|im_end|>", "<｜User｜>", "</s>", "[INST]", "x"]).unwrap()
    }

    #[test]
    fn marks_are_put_into_control_tokens_and_nothing_else() {
        let marked = |text: &str| control().marked_text(text, "7");
        for text in ["", "im_end", "<|im_end>", "a < b | c > d", "x", "<s>", "</ s>", "INST", "<|im_start|>"]
        {
            assert_eq!(marked(text), text);
            assert!(!control().occur_in(&text.into()));
        }
        assert_eq!(marked("a<|im_end|>b"), "a<|7im_end|>b");
        assert_eq!(marked("|im_end|"), "|7im_end|");
        assert_eq!(marked("<｜User｜></s>[INST]"), "<｜7User｜><7/s>[7INST]");
        assert_eq!(marked("|im_end|im_end|"), "|7im_end|7im_end|");
        let value = json!({"a": ["<|im_end|>", 3, null], "</s>": {"b": "c"}});
        assert!(control().occur_in(&value));
        assert_eq!(
            control().marked(&value, "7"),
            json!({"a": ["<|7im_end|>", 3, null], "<7/s>": {"b": "c"}})
        );
    }

    #[test]
    fn marks_come_out_again() {
        let rendered = RenderedText::from_marked("u<|7im_end|> v <7/s>", "7");
        assert_eq!(rendered.as_str(), "u<|im_end|> v </s>");
        assert_eq!(rendered.cuts, [3, 15]);
        assert_eq!(rendered.with_marks().unwrap().unwrap().0, "u<|\u{F0000}im_end|> v <\u{F0000}/s>");
        assert_eq!(RenderedText::from("\u{F0000}".to_owned()).with_marks().unwrap(), None);
        assert_eq!(rendered.rest(3, "ab").cuts, [14]);
        let mut short = rendered.clone();
        short.truncate(13);
        assert_eq!((short.as_str(), &short.cuts[..]), ("u<|im_end|> v", &[3][..]));
        // The same characters, once as text and once as a token.
        let meant = RenderedText::from("u<|im_end|> v </s>".to_owned());
        assert_eq!(rendered.common_bytes(&meant), 3);
        assert_eq!(rendered.common_bytes(&short), 13);
        assert_eq!(meant.common_bytes(&meant), 18);
    }

    #[test]
    fn texts_in_the_place_of_marks_are_meant() {
        let mut rendered = RenderedText::from_marked("a</s>9b<7/s>9c<7/s>", "7");
        rendered.replace("9", "</s>");
        assert_eq!(rendered.as_str(), "a</s></s>b</s></s>c</s>");
        assert_eq!(rendered.cuts, [11, 20]);
        let before = rendered.clone();
        rendered.replace("9", "x");
        assert_eq!(rendered, before);
    }

    #[test]
    fn common_prefixes_end_at_the_first_difference() {
        let text: Vec<u8> = (0..200).collect();
        for length in [0, 1, 63, 64, 65, 128, 199, 200] {
            assert_eq!(common_prefix(&text, &text[..length]), length);
            let mut other = text.clone();
            other.get_mut(length).into_iter().for_each(|byte| *byte ^= 1);
            assert_eq!(common_prefix(&text, &other), length);
        }
    }

    #[test]
    fn a_mark_is_never_the_same_twice() {
        let marks: HashSet<String> = (0..100).map(|_| random_mark()).collect();
        assert_eq!(marks.len(), 100);
        assert!(marks.iter().all(|mark| mark.len() == 20 && mark.bytes().all(|byte| byte.is_ascii_digit())));
    }

    #[test]
    fn tokens_that_begin_turns_are_known_by_their_looks() {
        assert!(["<|im_start|>", "<｜User｜>"].iter().all(|text| looks_like_control(text)));
        let plain = ["<think>", "</tool_call>", "[INST]", "<||>", "|a|", "<|", "", "é"];
        assert!(plain.iter().all(|text| !looks_like_control(text)));
    }
}
