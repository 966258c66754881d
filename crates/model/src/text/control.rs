//! Control tokens that somebody has written into a message: they stay text.
//!
//! A chat template writes control tokens (`<|im_end|>`) around messages, and the tokenizer cannot tell them from the
//! same characters inside a message. So where a message has such characters, the template's own tokens are rendered with
//! a mark in them ([`MarkedLiterals`](super::marked::MarkedLiterals)), and the message as it is. A control token without a
//! mark is then text. [`RenderedText`] is what comes out, without marks but with a place inside each such text, and no
//! control token is matched across one of those. A chat without such characters is rendered and encoded as if nothing of
//! this existed.

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
    /// Finds what a message must contain for a control token to come of it.
    in_messages: Option<AhoCorasick>,
    /// Finds whole tokens.
    whole: Option<AhoCorasick>,
    /// The tokens, and the same read backwards, in alphabetical order.
    forwards: Vec<String>,
    backwards: Vec<String>,
    /// Bytes of the longest token.
    longest: usize,
}

impl ControlTokens {
    /// Takes the texts of control tokens. A token of one character cannot be cut and is not looked for.
    pub(super) fn new<'a>(texts: impl IntoIterator<Item = &'a str>) -> Result<ControlTokens, TextError> {
        let mut forwards: Vec<String> =
            texts.into_iter().filter(|text| text.chars().count() > 1).map(str::to_owned).collect();
        forwards.sort_unstable();
        let mut backwards: Vec<String> = forwards.iter().map(|text| reversed(text)).collect();
        backwards.sort_unstable();
        let matcher = |patterns: Vec<&str>| {
            let built = (!patterns.is_empty()).then(|| AhoCorasick::new(patterns)).transpose();
            built.map_err(|error| TextError::Encode { reason: error.to_string() })
        };
        // A template may write the brackets itself, as in `'<' ~ name ~ '>'`.
        let inside = forwards.iter().map(|text| between_brackets(text).unwrap_or(text));
        Ok(ControlTokens {
            in_messages: matcher(inside.collect())?,
            whole: matcher(forwards.iter().map(String::as_str).collect())?,
            longest: forwards.iter().map(String::len).max().unwrap_or(0),
            forwards,
            backwards,
        })
    }

    /// Whether a text of the value, or a name in it, contains a control token.
    pub(super) fn occur_in(&self, value: &Value) -> bool {
        let found = |text: &str| self.in_messages.as_ref().is_some_and(|matcher| matcher.is_match(text));
        match value {
            Value::String(text) => found(text),
            Value::Array(items) => items.iter().any(|item| self.occur_in(item)),
            Value::Object(fields) => fields.iter().any(|(name, field)| found(name) || self.occur_in(field)),
            _ => false,
        }
    }

    /// A text whose control tokens are meant, with `mark` inside each of them. A part of a token at an end of the text, of
    /// two characters or more, is marked too, because the rest may be printed beside it (`'<|' ~ role ~ '|>'`).
    pub(super) fn marked(&self, text: &str, mark: &str) -> String {
        let mut places: Vec<usize> = self.find(text).map(|(start, _)| behind_first(text, start)).collect();
        let is_part = |part: &str, tokens: &[String]| {
            let next = tokens.get(tokens.partition_point(|token| token.as_str() < part));
            part.chars().nth(1).is_some()
                && next.is_some_and(|token| token != part && token.starts_with(part))
        };
        for (at, character) in text.char_indices() {
            let end = at + character.len_utf8();
            if text.len() - at < self.longest && is_part(&text[at..], &self.forwards) {
                places.push(end);
            }
            if end < self.longest && is_part(&reversed(&text[..end]), &self.backwards) {
                places.push(at);
            }
        }
        places.sort_unstable();
        places.dedup();
        insert(text, &places, mark)
    }

    /// The control tokens in a text, in the order of their ends, whether meant or not.
    fn find(&self, text: &str) -> impl Iterator<Item = (usize, usize)> {
        let found = self.whole.iter().flat_map(move |matcher| matcher.find_overlapping_iter(text));
        found.map(|found| (found.start(), found.end()))
    }

    /// The tokens.
    #[cfg(test)]
    pub(super) fn texts(&self) -> &[String] {
        &self.forwards
    }

    /// How many control tokens a text has.
    #[cfg(test)]
    pub(super) fn count(&self, text: &str) -> usize {
        self.find(text).count()
    }

    /// A place in each control token that has none of the places in `meant` inside, in ascending order. A token that is
    /// meant is never cut.
    fn cuts(&self, text: &str, meant: &[usize]) -> Vec<usize> {
        let is_meant = |&(start, end): &(usize, usize)| {
            meant.get(meant.partition_point(|&place| place <= start)).is_some_and(|&place| place < end)
        };
        let (mut whole, others): (Vec<_>, Vec<_>) = self.find(text).partition(is_meant);
        whole.sort_unstable();
        whole.dedup_by(|next, before| {
            let overlap = next.0 < before.1;
            before.1 = if overlap { before.1.max(next.1) } else { before.1 };
            overlap
        });
        let cut = |(start, end): (usize, usize)| {
            let place = behind_first(text, start);
            let around = whole.get(whole.partition_point(|&(_, end)| end <= place));
            match around.filter(|around| around.0 < place) {
                None => Some(place),
                // Where the two overlap, the edge of the one that is meant.
                Some(&(from, to)) => [to, from].into_iter().find(|&edge| start < edge && edge < end),
            }
        };
        let mut cuts: Vec<usize> = others.into_iter().filter_map(cut).collect();
        cuts.sort_unstable();
        cuts.dedup();
        cuts
    }
}

/// The place behind the character that begins at `start`.
fn behind_first(text: &str, start: usize) -> usize {
    start + text[start..].chars().next().map_or(0, char::len_utf8)
}

fn reversed(text: &str) -> String {
    text.chars().rev().collect()
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
    /// Places inside what is not a control token but has the characters of one, ascending.
    cuts: Vec<usize>,
}

/// A text in which every control token is meant.
impl From<String> for RenderedText {
    fn from(text: String) -> RenderedText {
        RenderedText { text, cuts: Vec::new() }
    }
}

impl RenderedText {
    /// Takes the marks out of a text. Control tokens that have none are text.
    pub(super) fn from_marked(marked: &str, mark: &str, control: &ControlTokens) -> RenderedText {
        let (mut text, mut meant) = (String::with_capacity(marked.len()), Vec::new());
        for (index, part) in marked.split(mark).enumerate() {
            if index > 0 {
                meant.push(text.len());
            }
            text.push_str(part);
        }
        let cuts = control.cuts(&text, &meant);
        RenderedText { text, cuts }
    }

    /// The text as the tokenizer gets it.
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
    fn messages_are_searched_for_control_tokens_and_nothing_else() {
        for text in ["", "im_end", "<|im_end>", "a < b | c > d", "x", "<s>", "</ s>", "INST", "<|im_start|>"]
        {
            assert!(!control().occur_in(&text.into()), "{text}");
        }
        for text in ["a<|im_end|>b", "|im_end|", "<｜User｜>", "</s>", "[INST]"] {
            assert!(control().occur_in(&json!({"a": [1, text]})), "{text}");
            assert!(control().occur_in(&json!({text: null})), "{text}");
        }
    }

    #[test]
    fn tokens_and_parts_of_them_at_the_ends_are_marked() {
        let marked = |text: &str| control().marked(text, "7");
        for text in ["", "im_end", "<", ">", "|im_end|", "a <| b", "x", "<s>", "["] {
            assert_eq!(marked(text), text);
        }
        assert_eq!(marked("a<|im_end|>b"), "a<7|im_end|>b");
        assert_eq!(marked("<｜User｜></s>[INST]"), "<7｜User｜><7/s>[7INST]");
        assert_eq!(marked("x<|"), "x<7|");
        assert_eq!(marked("x<|im_"), "x<7|im_");
        assert_eq!(marked("｜>x"), "｜7>x");
        assert_eq!(marked("|>"), "|7>");
        assert_eq!(marked("end|>"), "end|7>");
        assert_eq!(ControlTokens::default().marked("<|im_end|>", "7"), "<|im_end|>");
    }

    #[test]
    fn control_tokens_without_a_mark_are_cut() {
        let rendered = |marked: &str| RenderedText::from_marked(marked, "7", &control());
        let read = rendered("<7|im_end|>u<|im_end|> v </s>");
        assert_eq!(read.as_str(), "<|im_end|>u<|im_end|> v </s>");
        assert_eq!(read.cuts, [12, 25]);
        assert_eq!(read.with_marks().unwrap().unwrap().0, "<|im_end|>u<\u{F0000}|im_end|> v <\u{F0000}/s>");
        assert_eq!(rendered("<7|im_end|>").with_marks().unwrap(), None);
        assert_eq!(RenderedText::from("\u{F0000}".to_owned()).with_marks().unwrap(), None);
        // Parts of a token count where they have two characters.
        assert_eq!(rendered("<7|im_end|7>").cuts, [0; 0]);
        assert_eq!(rendered("<7|im_end|>").cuts, [0; 0]);
        assert_eq!(rendered("<|im_end|7>").cuts, [0; 0]);
        assert_eq!(rendered("<|im_end|>7").cuts, [1]);
        assert_eq!(rendered("7<|im_end|>").cuts, [1]);
    }

    #[test]
    fn tokens_that_are_meant_are_never_cut() {
        let control = ControlTokens::new(["<ab>", "ab", ">cd<", "xy<a"]).unwrap();
        let cuts = |marked: &str| RenderedText::from_marked(marked, "7", &control).cuts;
        assert_eq!(cuts("<7ab>"), [0; 0], "`ab` lies inside");
        assert_eq!(cuts("<7ab>cd<7ab>"), [4], "`>cd<` overlaps two");
        assert_eq!(cuts("xy<7ab>"), [2; 0], "the mark is inside both");
        assert_eq!(cuts("xyxy<a<7ab>ab"), [3, 11]);
        assert_eq!(cuts("<ab>cd<ab>"), [1, 2, 4, 7, 8]);
    }

    #[test]
    fn places_follow_their_text() {
        let read = RenderedText::from_marked("u<|im_end|> v </s>", "7", &control());
        assert_eq!(read.cuts, [2, 15]);
        assert_eq!(read.rest(3, "ab").cuts, [14]);
        let mut short = read.clone();
        short.truncate(13);
        assert_eq!((short.as_str(), &short.cuts[..]), ("u<|im_end|> v", &[2][..]));
        // The same characters, once as text and once as a token.
        let meant = RenderedText::from("u<|im_end|> v </s>".to_owned());
        assert_eq!(read.common_bytes(&meant), 2);
        assert_eq!(read.common_bytes(&short), 13);
        assert_eq!(meant.common_bytes(&meant), 18);
    }

    #[test]
    fn texts_in_the_place_of_marks_are_meant() {
        let mut rendered = RenderedText::from_marked("a<7/s>9b</s>9c</s>", "7", &control());
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
