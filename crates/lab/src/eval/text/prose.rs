//! Paragraphs out of patterns and words.

use std::collections::HashSet;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};

use super::words::words;
use oscar_random::Random;

/// An endless stream of different paragraphs.
#[derive(Clone, Debug)]
pub struct Prose {
    random: Random,
    seen: HashSet<u64>,
}

impl Prose {
    /// The stream of sentences that belongs to `seed`.
    pub fn new(seed: u64) -> Prose {
        Prose { random: Random::new(seed), seen: HashSet::new() }
    }

    fn paragraph(&mut self) -> String {
        let random = &mut self.random;
        let hero = *random.choose(words("name"));
        let friend = different(random, "name", hero);
        let (place, thing) = (*random.choose(words("place")), *random.choose(words("thing")));
        let cast = Cast { hero, friend, place, thing };
        let opening = *random.choose(words("opening"));
        let mut text = sentence(opening, &cast, random);
        let patterns = words("sentence");
        let mut used = Vec::new();
        for _ in 0..3 + random.below(5) {
            let pattern = loop {
                let pattern = random.below(patterns.len());
                if !used.contains(&pattern) {
                    break pattern;
                }
            };
            used.push(pattern);
            text.push(' ');
            text.push_str(&sentence(patterns[pattern], &cast, random));
        }
        text
    }
}

impl Iterator for Prose {
    type Item = String;

    fn next(&mut self) -> Option<String> {
        loop {
            let paragraph = self.paragraph();
            let mut hasher = DefaultHasher::new();
            paragraph.hash(&mut hasher);
            if self.seen.insert(hasher.finish()) {
                return Some(paragraph);
            }
        }
    }
}

/// Paragraphs of `seed`, a blank line between them, until there are at least `bytes` bytes.
pub fn prose(seed: u64, bytes: usize) -> String {
    let mut text = String::with_capacity(bytes.saturating_add(1024).min(1 << 30));
    for paragraph in Prose::new(seed) {
        if text.len() >= bytes {
            break;
        }
        if !text.is_empty() {
            text.push_str("\n\n");
        }
        text.push_str(&paragraph);
    }
    text
}

/// The people and things that the sentences of a paragraph share.
struct Cast<'a> {
    hero: &'a str,
    friend: &'a str,
    place: &'a str,
    thing: &'a str,
}

fn sentence(pattern: &str, cast: &Cast<'_>, random: &mut Random) -> String {
    let mut out = String::with_capacity(pattern.len() * 2);
    let mut rest = pattern;
    let mut article = false;
    while let Some((before, slot_onwards)) = rest.split_once('{') {
        out.push_str(before);
        let (slot, after) = slot_onwards.split_once('}').expect("every slot of a pattern is closed");
        rest = after;
        if slot == "a" {
            article = true;
            // The article and its space are written once the next word is known.
            rest = rest.strip_prefix(' ').unwrap_or(rest);
            continue;
        }
        let word = fill(slot, cast, random);
        if std::mem::take(&mut article) {
            out.push_str(if word.starts_with(['a', 'e', 'i', 'o', 'u']) && !word.starts_with("use") {
                "an "
            } else {
                "a "
            });
        }
        out.push_str(word);
    }
    out.push_str(rest);
    match out.char_indices().nth(1) {
        Some((second, _)) => out[..second].to_uppercase() + &out[second..],
        None => out,
    }
}

fn fill<'a>(slot: &str, cast: &Cast<'a>, random: &mut Random) -> &'a str {
    match slot {
        "hero" => cast.hero,
        "friend" => cast.friend,
        "place" => cast.place,
        "thing" => cast.thing,
        "other" => different(random, "thing", cast.thing),
        "elsewhere" => different(random, "place", cast.place),
        list => {
            let words = words(list);
            words[random.below(words.len())]
        }
    }
}

/// A word of a list other than `not`.
fn different(random: &mut Random, list: &str, not: &str) -> &'static str {
    loop {
        let word = *random.choose(words(list));
        if word != not {
            return word;
        }
    }
}

#[cfg(test)]
mod tests {
    use sha2::{Digest, Sha256};

    use super::*;

    #[test]
    fn mean_keys_are_estimated_on_this_text() {
        assert_eq!(prose(1, 8 * oscar_rotations::means::MEAN_TOKENS), oscar_rotations::means::PROSE);
    }

    #[test]
    fn the_text_of_a_seed_never_changes() {
        // Measurements of years ago can be repeated only on the same text.
        for (seed, bytes, expected) in [
            (0, 300_000, "2b27dc9430fd977ab12238574c7fe58c31b552903974e80630333864220bb760"),
            (5, 1_000_000, "2466f949efec9539838f0d5c248d46a7263301aeceff65f047be6fa647a4fb7a"),
        ] {
            let hash = Sha256::digest(prose(seed, bytes));
            let text: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(text, expected, "seed {seed}");
        }
    }

    #[test]
    fn text_depends_on_the_seed_alone() {
        assert_eq!(prose(1, 20_000), prose(1, 20_000));
        assert_ne!(prose(1, 20_000), prose(2, 20_000));
        assert!(prose(1, 40_000).starts_with(&prose(1, 20_000)));
        assert_eq!(prose(1, 0), "");
    }

    #[test]
    fn lengths_are_reached_by_the_last_paragraph() {
        for bytes in [1, 1000, 100_000] {
            let text = prose(9, bytes);
            assert!(text.len() >= bytes && text.len() < bytes + 2000, "{bytes}: {}", text.len());
        }
    }

    #[test]
    fn a_million_bytes_repeat_no_paragraph_and_few_sentences() {
        let text = prose(5, 1_000_000);
        let paragraphs: Vec<&str> = text.split("\n\n").collect();
        assert_eq!(paragraphs.iter().collect::<HashSet<_>>().len(), paragraphs.len());
        let sentences: Vec<&str> = text.split(['.', '\n']).filter(|sentence| sentence.len() > 3).collect();
        let distinct = sentences.iter().collect::<HashSet<_>>().len();
        assert!(distinct * 100 > sentences.len() * 97, "{distinct} of {}", sentences.len());
    }

    #[test]
    fn text_is_plain_and_well_formed() {
        let text = prose(11, 200_000);
        assert!(text.is_ascii() && !text.contains(['{', '}']) && !text.contains("  "));
        assert!(!text.bytes().any(|byte| byte.is_ascii_digit()), "a number could be taken for a needle");
        for paragraph in text.split("\n\n") {
            assert!(paragraph.starts_with(|first: char| first.is_uppercase() || first == '"'), "{paragraph}");
            assert!(paragraph.ends_with(['.', '"']), "{paragraph}");
        }
        for wrong in [" a a", " a e", " a i", " a o", " an b", " an u", " an d"] {
            let found = text.to_lowercase().find(wrong);
            let around = found.map(|at| &text[at..(at + 30).min(text.len())]);
            // "an unusual", "an uneven" are right; "an useful" is not.
            let right = around.is_some_and(|text| text.starts_with(" an un"));
            assert!(around.is_none() || right, "{around:?}");
        }
        assert!(!text.contains("an useful"));
    }

    #[test]
    fn the_vocabulary_is_used() {
        let text = prose(3, 500_000);
        for list in ["name", "role", "place", "thing", "adjective", "deed", "motion", "matter"] {
            let words = words(list);
            assert_eq!(words.iter().collect::<HashSet<_>>().len(), words.len(), "a word is listed twice");
            assert!(words.iter().all(|word| text.contains(word)));
        }
    }
}
