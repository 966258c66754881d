//! The text needles are hidden in, as a ring of sentences.

use oscar_random::Random;

use super::NeedleError;
use crate::eval::text::{Prose, mix};

/// The text in which needles are hidden.
#[derive(Clone, Debug)]
pub enum Haystack {
    /// Generated prose; every prompt has text of its own.
    Generated,
    /// Sentences of the user's text. Each prompt begins at another one; a short text is repeated.
    Text(Vec<String>),
}

impl Haystack {
    /// The user's text, cut into sentences.
    pub fn from_text(text: &str) -> Result<Haystack, NeedleError> {
        let sentences = split(text);
        if sentences.is_empty() { Err(NeedleError::EmptyHaystack) } else { Ok(Haystack::Text(sentences)) }
    }

    /// Whether the text contains these words.
    pub(super) fn contains(&self, words: &str) -> bool {
        match self {
            // Generated prose has no digits, and words are only ever numbers here.
            Haystack::Generated => false,
            Haystack::Text(sentences) => sentences.iter().any(|sentence| sentence.contains(words)),
        }
    }

    /// An endless run of sentences for the prompt of `seed`. Each ends with what separates it from the next.
    pub(super) fn sentences(&self, seed: u64) -> Box<dyn Iterator<Item = String> + '_> {
        match self {
            Haystack::Generated => Box::new(Prose::new(mix(&[seed, 1])).flat_map(|paragraph| {
                let mut sentences = split(&paragraph);
                if let Some(last) = sentences.last_mut() {
                    last.truncate(last.trim_end().len());
                    last.push_str("\n\n");
                }
                sentences
            })),
            Haystack::Text(sentences) => {
                let start = Random::new(mix(&[seed, 1])).below(sentences.len());
                Box::new(sentences.iter().cycle().skip(start).cloned())
            }
        }
    }
}

/// Cuts text after each sentence end and each blank line; the spaces stay with the sentence before them. Every
/// piece ends with a space or a line end, so that a needle can stand between any two.
fn split(text: &str) -> Vec<String> {
    let mut sentences = Vec::new();
    let mut start = 0;
    let mut letters = text.char_indices().peekable();
    while let Some((_, letter)) = letters.next() {
        let ends = match letter {
            '.' | '!' | '?' | '"' | '”' | ')' => {
                matches!(letters.peek(), Some((_, next)) if next.is_whitespace())
                    && text[start..].trim_start().chars().any(char::is_alphabetic)
                    && sentence_ended(text, &mut letters.clone(), letter, start)
            }
            '\n' => matches!(letters.peek(), Some((_, '\n' | '\r'))),
            _ => false,
        };
        if !ends {
            continue;
        }
        while letters.next_if(|(_, next)| next.is_whitespace()).is_some() {}
        let end = letters.peek().map_or(text.len(), |(at, _)| *at);
        push(&mut sentences, &text[start..end]);
        start = end;
    }
    push(&mut sentences, &text[start..]);
    sentences
}

/// A closing quote or bracket ends a sentence only after a stop; a stop after a single letter is an initial.
fn sentence_ended(
    text: &str,
    after: &mut std::iter::Peekable<std::str::CharIndices<'_>>,
    letter: char,
    start: usize,
) -> bool {
    let end = after.peek().map_or(text.len(), |(at, _)| *at);
    let before = &text[start..end - letter.len_utf8()];
    let last = before.chars().next_back();
    match letter {
        '"' | '”' | ')' => {
            let next = after.find(|(_, next)| !next.is_whitespace());
            last.is_some_and(|last| ".!?".contains(last)) && next.is_none_or(|(_, next)| !next.is_lowercase())
        }
        '.' => {
            let word = before.rsplit(char::is_whitespace).next().unwrap_or("");
            word.chars().filter(|letter| letter.is_alphanumeric()).count() > 1
        }
        _ => true,
    }
}

fn push(sentences: &mut Vec<String>, piece: &str) {
    if piece.trim().is_empty() {
        return;
    }
    let mut piece = piece.to_owned();
    if !piece.ends_with(char::is_whitespace) {
        piece.push(' ');
    }
    sentences.push(piece);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentences_keep_their_spaces() {
        let text = "One day. \"Two?\" he said. Mr. A. Bell left!  Three\nlines.\n\nA title\n\nThe end";
        assert_eq!(
            split(text),
            [
                "One day. ",
                "\"Two?\" he said. ",
                "Mr. ",
                "A. Bell left!  ",
                "Three\nlines.\n\n",
                "A title\n\n",
                "The end "
            ]
        );
    }

    #[test]
    fn nothing_is_lost_or_cut_inside_a_word() {
        let text = crate::eval::text::prose(2, 50_000);
        let sentences = split(&text);
        assert_eq!(sentences.concat().trim_end(), text);
        assert!(sentences.iter().all(|sentence| sentence.ends_with(char::is_whitespace)));
        assert!(sentences.len() > 400, "{}", sentences.len());
    }

    #[test]
    fn odd_text_is_no_trouble() {
        assert_eq!(split(""), Vec::<String>::new());
        assert_eq!(split(" \n\n \r\n"), Vec::<String>::new());
        assert_eq!(split("..."), ["... "]);
        assert_eq!(split("日本語。no spaces"), ["日本語。no spaces "]);
        assert_eq!(split("é.\" Ünd"), ["é.\" ", "Ünd "]);
        assert!(matches!(Haystack::from_text(" \n"), Err(NeedleError::EmptyHaystack)));
    }

    #[test]
    fn seeds_begin_at_different_places() {
        let text: String = (0..100).map(|index| format!("Sentence number w{index}. ")).collect();
        let haystack = Haystack::from_text(&text).expect("text");
        let first = |seed| haystack.sentences(seed).next().expect("endless");
        let firsts: std::collections::HashSet<String> = (0..50).map(first).collect();
        assert!(firsts.len() > 25, "{}", firsts.len());
        assert_eq!(haystack.sentences(0).take(250).collect::<Vec<_>>().len(), 250);
    }
}
