//! Multiple choice: options in a random order, and the letter of an answer.

use super::maths::{boxed, without_thoughts};
use super::{Prompt, Style};
use crate::eval::text::Random;

/// As many options as letters that are told apart at a glance.
pub(super) const MOST_OPTIONS: usize = 10;

/// Options and which is right.
#[derive(Debug)]
pub(super) struct Options {
    pub(super) texts: Vec<String>,
    right: usize,
}

impl Options {
    pub(super) fn ordered(texts: Vec<String>, right: usize) -> Options {
        Options { texts, right }
    }

    pub(super) fn shuffled(right: String, wrong: Vec<String>, random: &mut Random) -> Options {
        let mut order: Vec<usize> = (0..=wrong.len()).collect();
        random.shuffle(&mut order);
        let all: Vec<String> = std::iter::once(right).chain(wrong).collect();
        let place = order.iter().position(|&index| index == 0).expect("the right one is among them");
        Options { texts: order.into_iter().map(|index| all[index].clone()).collect(), right: place }
    }

    pub(super) fn letter(&self) -> char {
        letter_at(self.right)
    }

    pub(super) fn prompt(&self, question: &str, style: Style) -> Prompt {
        let mut text = format!("{}\n\n", question.trim());
        for (index, option) in self.texts.iter().enumerate() {
            text += &format!("{}) {}\n", letter_at(index), option.trim());
        }
        let last = letter_at(self.texts.len().saturating_sub(1));
        match style {
            Style::Chat => {
                text += &format!(
                    "\nWhich is right? Think it through, then end with a line `Answer: X`, where X is a letter from A to {last}."
                )
            }
            Style::Plain => text += "\nAnswer:",
        }
        let stop = if style == Style::Plain { vec!["\n\n".to_owned()] } else { Vec::new() };
        Prompt { text, style, stop }
    }
}

/// The letter of an option.
fn letter_at(index: usize) -> char {
    char::from(b'A' + (index % 26) as u8)
}

/// The option of a letter.
pub(super) fn index_of(letter: &str) -> Option<usize> {
    match letter.as_bytes() {
        [letter @ b'A'..=b'Z'] => Some(usize::from(letter - b'A')),
        _ => None,
    }
}

/// The letter an answer ends on, of `options` letters from A.
///
/// In order: the last "answer: X" or "answer is X", a box, a letter alone or at the very beginning, the last letter
/// in brackets. A letter must stand alone: the A of "A metal" in running text is a word.
pub fn letter(answer: &str, options: usize) -> Option<char> {
    let answer = without_thoughts(answer);
    let valid =
        |letter: char| (letter as usize).checked_sub('A' as usize).is_some_and(|index| index < options);
    if let Some(found) = after_answer(answer).filter(|letter| valid(*letter)) {
        return Some(found);
    }
    if let Some(found) = boxed(answer).and_then(|inside| bare(&inside)).filter(|letter| valid(*letter)) {
        return Some(found);
    }
    let trimmed = answer.trim();
    if let Some(found) = bare(trimmed).filter(|letter| valid(*letter)) {
        return Some(found);
    }
    let mut letters = trimmed.trim_start_matches(['(', '*', '[', ' ']).chars();
    if let (Some(first), Some(next)) = (letters.next(), letters.next())
        && valid(first)
        && (").:]*\n".contains(next))
    {
        return Some(first);
    }
    let bytes = answer.as_bytes();
    let bracketed = (2..bytes.len()).rev().find(|&end| bytes[end] == b')' && bytes[end - 2] == b'(');
    bracketed.map(|end| char::from(bytes[end - 1])).filter(|letter| valid(*letter))
}

/// The letter after the last "answer".
fn after_answer(text: &str) -> Option<char> {
    let lower = text.to_ascii_lowercase();
    let mut found = None;
    for (at, word) in lower.match_indices("answer") {
        let rest = &text[at + word.len()..];
        let rest = rest.trim_start_matches([' ', '*', '_', '`', '"']);
        let rest = rest
            .strip_prefix("is:")
            .or_else(|| rest.strip_prefix("is"))
            .or_else(|| rest.strip_prefix(':'))
            .or_else(|| rest.strip_prefix('='));
        let Some(rest) = rest else { continue };
        let rest = rest.trim_start_matches([' ', '*', '_', '`', '"', '(', '[', '$', ':', '\n']);
        let rest = rest.strip_prefix("option ").or_else(|| rest.strip_prefix("Option ")).unwrap_or(rest);
        let rest = ["\\boxed{", "\\text{", "\\textbf{", "\\mathrm{", "("]
            .iter()
            .fold(rest, |rest, wrap| rest.strip_prefix(wrap).unwrap_or(rest));
        let mut letters = rest.chars();
        if let Some(letter) = letters.next().filter(char::is_ascii_uppercase)
            && letters.next().is_none_or(|next| !next.is_alphanumeric() && next != '\'')
        {
            // "The answer is A metal" is prose; "The answer is A. Metal" is not.
            let prose = rest[1..].strip_prefix(' ').is_some_and(|next| next.starts_with(char::is_lowercase));
            if !prose {
                found = Some(letter);
            }
        }
    }
    found
}

/// A letter and nothing else but marks around it.
fn bare(text: &str) -> Option<char> {
    let text = ["\\text{", "\\textbf{", "\\mathrm{"]
        .iter()
        .find_map(|wrap| text.trim().strip_prefix(wrap)?.strip_suffix('}'))
        .unwrap_or(text);
    let text = text.trim_matches(|mark: char| mark.is_whitespace() || mark.is_ascii_punctuation());
    let mut letters = text.chars();
    let first = letters.next().filter(char::is_ascii_uppercase)?;
    letters.next().is_none().then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_are_found_where_models_put_them() {
        for (text, expected) in [
            ("Answer: B", Some('B')),
            ("We exclude A. We exclude B.\n\n**Answer: C**", Some('C')),
            ("Answer: A\nWait, no.\nAnswer: (D)", Some('D')),
            ("The correct answer is option B.", Some('B')),
            ("The answer is $\\boxed{\\text{C}}$.", Some('C')),
            ("Therefore \\boxed{D}", Some('D')),
            ("C", Some('C')),
            (" (B) because of entropy", Some('B')),
            ("B) 12 kJ", Some('B')),
            ("I think it must be (A), clearly.", Some('A')),
            ("<think>Answer: A</think>Answer: B", Some('B')),
            ("**Answer:** B", Some('B')),
            ("The answer is A metal oxide, which leads to (C)", Some('C')),
            ("answer: b", None),
            ("Answer: E", None),
            ("A metal reacts with water.", None),
            ("Answer: Boron", None),
            ("", None),
            ("é", None),
        ] {
            assert_eq!(letter(text, 4), expected, "{text}");
        }
    }

    #[test]
    fn prompts_show_every_option() {
        let options = Options::shuffled("r".into(), vec!["x".into(), "y".into()], &mut Random::new(5));
        assert_eq!(options.texts[options.right], "r");
        let prompt = options.prompt(" Why? ", Style::Chat);
        assert!(
            prompt.text.starts_with("Why?\n\nA) ")
                && prompt.text.contains("\nC) ")
                && prompt.text.contains("A to C")
        );
        assert!(options.prompt("Why?", Style::Plain).text.ends_with("Answer:"));
    }
}
