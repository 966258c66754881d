use std::cell::Cell;
use std::collections::HashSet;

use super::*;
use crate::eval::text::prose;

/// Words and single marks, long words in pieces of four letters: the texture of a real tokenizer.
fn count(text: &str) -> usize {
    let mut tokens = 0;
    let mut run = 0usize;
    for letter in text.chars().chain([' ']) {
        if letter.is_alphanumeric() {
            run += 1;
        } else {
            tokens += run.div_ceil(4) + usize::from(!letter.is_whitespace());
            run = 0;
        }
    }
    tokens
}

fn options(kind: NeedleKind, tokens: usize, depth: f64, seed: u64) -> NeedleOptions {
    NeedleOptions { kind, tokens, depth, seed, ..NeedleOptions::default() }
}

fn haystacks() -> [Haystack; 2] {
    let user = Haystack::from_text(&prose(77, 300_000).replace('.', ". In 1812")).expect("text");
    [Haystack::Generated, user]
}

#[test]
fn lengths_are_within_one_percent_and_never_above() {
    for haystack in haystacks() {
        for kind in NeedleKind::ALL {
            for tokens in [600, 1000, 4096, 8192, 32_768] {
                let prompt = build(&options(kind, tokens, 40.0, 3), &haystack, &count).expect("prompt");
                let counted = count(&prompt.context) + count(&prompt.question);
                assert_eq!(prompt.tokens, counted);
                assert!(counted <= tokens && counted * 100 >= tokens * 99, "{kind} {tokens}: {counted}");
            }
        }
    }
}

#[test]
fn the_tokenizer_reads_a_small_multiple_of_the_prompt() {
    let read = Cell::new(0);
    let counting = |text: &str| {
        read.set(read.get() + text.len());
        count(text)
    };
    let prompt = build(&options(NeedleKind::MultiKey, 32_768, 50.0, 5), &Haystack::Generated, &counting)
        .expect("prompt");
    assert!(read.get() < prompt.context.len() * 6, "{} of {}", read.get(), prompt.context.len());
}

#[test]
fn asked_values_stand_exactly_once_and_keys_in_their_sentences() {
    for haystack in haystacks() {
        for kind in NeedleKind::ALL {
            for seed in 0..10 {
                let prompt = build(&options(kind, 2000, 70.0, seed), &haystack, &count).expect("prompt");
                let expected = if kind == NeedleKind::MultiValue { 4 } else { 1 };
                assert_eq!(prompt.answers.len(), expected);
                for answer in &prompt.answers {
                    assert_eq!(prompt.context.matches(answer.as_str()).count(), 1);
                    assert!(!prompt.question.contains(answer.as_str()));
                    let sentence = format!(
                        "{} {answer}.",
                        prompt.lead_in.replace("codes", "code").replace(" are", " is")
                    );
                    assert!(prompt.context.contains(&sentence), "{sentence}");
                }
                assert_eq!(crate::eval::needle::score(&prompt.context, &prompt.answers), 1.0);
            }
        }
    }
}

#[test]
fn the_asked_needle_is_at_its_depth() {
    for kind in NeedleKind::ALL {
        for depth in [0.0, 10.0, 25.0, 50.0, 75.0, 100.0] {
            for seed in 0..4 {
                let prompt =
                    build(&options(kind, 8192, depth, seed), &Haystack::Generated, &count).expect("prompt");
                let at = prompt.context.find(prompt.answers[0].as_str()).expect("answer");
                let body = prompt.context.find("\n\n").expect("instruction") + 2;
                let before = count(&prompt.context[body..at]) as f64;
                let reached = before / count(&prompt.context[body..]) as f64 * 100.0;
                assert!((reached - depth).abs() < 2.0, "{kind} {depth}: {reached}");
            }
        }
    }
}

#[test]
fn depth_zero_and_hundred_are_the_very_ends() {
    let first =
        build(&options(NeedleKind::Single, 1000, 0.0, 1), &Haystack::Generated, &count).expect("prompt");
    let (_, body) = first.context.split_once("\n\n").expect("instruction");
    assert!(body.starts_with("The secret code"), "{body}");
    let last =
        build(&options(NeedleKind::Single, 1000, 100.0, 1), &Haystack::Generated, &count).expect("prompt");
    assert!(last.context.ends_with(&format!("{}.", last.answers[0])), "{}", last.context);
}

#[test]
fn needles_stand_between_sentences() {
    for haystack in haystacks() {
        for seed in 0..20 {
            let prompt =
                build(&options(NeedleKind::MultiKey, 3000, 33.0, seed), &haystack, &count).expect("prompt");
            let mut needles = 0;
            for (at, _) in prompt.context.match_indices("The secret code of the ") {
                needles += 1;
                let before = &prompt.context[..at];
                assert!(before.ends_with(char::is_whitespace), "{}", &before[before.len() - 20..]);
                let end = at + prompt.context[at..].find('.').expect("stop") + 1;
                let after = prompt.context[end..].chars().next();
                assert!(after.is_none_or(char::is_whitespace), "{after:?}");
            }
            assert_eq!(needles, 8);
        }
    }
}

#[test]
fn seeds_give_the_same_prompt_again_and_different_ones_apart() {
    let make = |seed| build(&options(NeedleKind::MultiKey, 1000, 50.0, seed), &Haystack::Generated, &count);
    assert_eq!(make(4), make(4));
    let prompts: Vec<NeedlePrompt> = (0..40).map(|seed| make(seed).expect("prompt")).collect();
    let distinct =
        |field: &dyn Fn(&NeedlePrompt) -> String| prompts.iter().map(field).collect::<HashSet<_>>().len();
    assert_eq!(distinct(&|prompt| prompt.context.clone()), 40);
    assert_eq!(distinct(&|prompt| prompt.answers[0].clone()), 40);
    assert!(distinct(&|prompt| prompt.question.clone()) > 35);
}

#[test]
fn short_user_text_is_repeated() {
    let haystack = Haystack::from_text("The sea was calm. Nobody spoke of it any more.").expect("text");
    let prompt = build(&options(NeedleKind::Single, 2000, 50.0, 0), &haystack, &count).expect("prompt");
    assert!(prompt.context.matches("Nobody spoke").count() > 50);
}

#[test]
fn impossible_prompts_are_refused() {
    let build =
        |options: NeedleOptions| build(&options, &Haystack::Generated, &count).expect_err("impossible");
    let base = NeedleOptions::default();
    for depth in [-0.1, 100.1, f64::NAN] {
        assert!(matches!(build(NeedleOptions { depth, ..base }), NeedleError::Depth { .. }));
    }
    let error = build(NeedleOptions { tokens: 20, ..base });
    assert!(matches!(error, NeedleError::TooShort { target: 20, .. }), "{error}");
}

#[test]
fn a_tokenizer_that_merges_across_sentences_still_ends_in_range() {
    // Counts of parts overestimate the whole by a quarter.
    let merging = |text: &str| count(text) - count(text) / 5 + 3;
    for tokens in [1000, 10_000] {
        let prompt = build(&options(NeedleKind::MultiKey, tokens, 50.0, 1), &Haystack::Generated, &merging)
            .expect("prompt");
        assert!(prompt.tokens <= tokens && prompt.tokens * 100 >= tokens * 99, "{}", prompt.tokens);
    }
}
