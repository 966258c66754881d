//! Puts a prompt together and makes it as long as it should be.

use oscar_random::Random;

use super::keys::{Needle, needles};
use super::{Haystack, NeedleError, NeedleKind, NeedleOptions, NeedlePrompt};
use crate::eval::text::mix;

/// Whole prompts that are counted at most. Estimates from counted sentences miss by a few tokens in a thousand, so
/// two or three suffice; each costs one pass of the tokenizer.
const MOST_ATTEMPTS: usize = 12;

/// Builds the prompt of `options`. `count` gives the number of tokens of a text; the context and the question
/// together have at most `options.tokens` and at least 99 % of them.
///
/// Each sentence is counted once and the whole prompt a few times, so the tokenizer reads a small multiple of the
/// prompt in all.
pub fn build(
    options: &NeedleOptions,
    haystack: &Haystack,
    count: &dyn Fn(&str) -> usize,
) -> Result<NeedlePrompt, NeedleError> {
    if !(0.0..=100.0).contains(&options.depth) {
        return Err(NeedleError::Depth { depth: options.depth });
    }
    let mut random = Random::new(mix(&[options.seed, 0]));
    let needles = needles(options, &mut random, &|number| haystack.contains(number))?;
    let hidden = PlacedNeedles::new(options, &needles, &mut random);
    let (question, lead_in) = question(&needles[0], options.kind);
    let question_tokens = count(&question);

    let needed = count(&hidden.place(&[], &[])) + question_tokens;
    if needed > options.tokens {
        return Err(NeedleError::TooShort { target: options.tokens, needed });
    }
    let least = options.tokens - options.tokens / 100;
    let mut hay = CountedSentences {
        source: haystack.sentences(options.seed),
        sentences: Vec::new(),
        counts: Vec::new(),
    };
    // What one more estimated token of hay really adds; corrected by each count of the whole.
    let mut wanted = (options.tokens - needed) as f64;
    let mut best: Option<(usize, String)> = None;
    for _ in 0..MOST_ATTEMPTS {
        let (sentences, counts) = hay.cut(wanted.max(0.0) as usize, count);
        let context = hidden.place(&sentences, &counts);
        let tokens = count(&context) + question_tokens;
        if tokens <= options.tokens && best.as_ref().is_none_or(|(most, _)| tokens > *most) {
            best = Some((tokens, context));
        }
        if (least..=options.tokens).contains(&tokens) {
            break;
        }
        // Aims a little below the target, because a prompt above it is of no use.
        let aim = options.tokens as f64 - (options.tokens - least) as f64 * 0.4;
        wanted += aim - tokens as f64;
    }
    match best {
        Some((tokens, context)) if tokens >= least => Ok(NeedlePrompt {
            context,
            question,
            lead_in,
            answers: needles[0].values.clone(),
            depth: options.depth,
            target_tokens: options.tokens,
            tokens,
            kind: options.kind,
            seed: options.seed,
        }),
        best => Err(NeedleError::Length {
            target: options.tokens,
            nearest: best.map_or(needed, |(tokens, _)| tokens),
        }),
    }
}

/// Sentences of the haystack, counted as they are needed.
struct CountedSentences<'a> {
    source: Box<dyn Iterator<Item = String> + 'a>,
    sentences: Vec<String>,
    counts: Vec<usize>,
}

impl CountedSentences<'_> {
    /// Sentences of about `tokens` tokens in all; the last one is shortened to fit.
    fn cut(&mut self, tokens: usize, count: &dyn Fn(&str) -> usize) -> (Vec<String>, Vec<usize>) {
        let mut sum = 0;
        let mut index = 0;
        loop {
            if index == self.sentences.len() {
                let sentence = self.source.next().expect("a haystack never ends");
                // A sentence of no tokens would be taken for ever.
                self.counts.push(count(&sentence).max(1));
                self.sentences.push(sentence);
            }
            if sum + self.counts[index] > tokens {
                break;
            }
            sum += self.counts[index];
            index += 1;
        }
        let mut sentences = self.sentences[..index].to_vec();
        let mut counts = self.counts[..index].to_vec();
        if let Some((part, size)) = shortened(&self.sentences[index], tokens - sum, count) {
            sentences.push(part);
            counts.push(size);
        }
        (sentences, counts)
    }
}

/// The first words of a sentence, closed with a full stop, of at most `tokens` tokens.
fn shortened(sentence: &str, tokens: usize, count: &dyn Fn(&str) -> usize) -> Option<(String, usize)> {
    let words: Vec<&str> = sentence.split_whitespace().collect();
    let part = |taken: usize| {
        let text = words[..taken].join(" ");
        format!("{}. ", text.trim_end_matches(|last: char| last.is_ascii_punctuation()))
    };
    let (mut low, mut high) = (0, words.len().saturating_sub(1));
    while low < high {
        let middle = (low + high).div_ceil(2);
        if count(&part(middle)) <= tokens {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    if low == 0 {
        return None;
    }
    let part = part(low);
    let size = count(&part);
    Some((part, size))
}

/// The needles with their depths, in the order of the text.
struct PlacedNeedles {
    instruction: &'static str,
    needles: Vec<(f64, String)>,
}

impl PlacedNeedles {
    fn new(options: &NeedleOptions, needles: &[Needle], random: &mut Random) -> PlacedNeedles {
        let mut hidden: Vec<(f64, String)> = Vec::new();
        for sentence in needles.iter().flat_map(Needle::sentences) {
            // The first sentence is the asked one; the others are scattered.
            let depth = if hidden.is_empty() { options.depth } else { random.fraction() * 100.0 };
            hidden.push((depth, sentence));
        }
        hidden.sort_by(|one, other| one.0.total_cmp(&other.0));
        let instruction = if hidden.len() == 1 {
            "A secret code is hidden in the following text. Remember it: you will be asked for it later.\n\n"
        } else {
            "Secret codes are hidden in the following text. Remember them: you will be asked for them later.\n\n"
        };
        PlacedNeedles { instruction, needles: hidden }
    }

    /// The context: each needle goes between the two sentences where its share of the tokens is behind it.
    fn place(&self, sentences: &[String], counts: &[usize]) -> String {
        let total: usize = counts.iter().sum();
        let bytes: usize = sentences.iter().map(String::len).sum();
        let mut text = String::with_capacity(bytes + 100 * (self.needles.len() + 1));
        text.push_str(self.instruction);
        let mut waiting = self.needles.iter().peekable();
        let mut before = 0;
        for (sentence, &size) in sentences.iter().zip(counts) {
            // The gap in front of this sentence is nearer than the one behind it.
            let here = (before as f64 + size as f64 / 2.0) / total as f64 * 100.0;
            while let Some((_, needle)) = waiting.next_if(|(depth, _)| *depth < here) {
                text.push_str(needle);
                text.push(' ');
            }
            text.push_str(sentence);
            before += size;
        }
        for (_, needle) in waiting {
            text.push_str(needle);
            text.push(' ');
        }
        text.truncate(text.trim_end().len());
        text
    }
}

fn question(asked: &Needle, kind: NeedleKind) -> (String, String) {
    let key = &asked.key;
    if kind == NeedleKind::MultiValue && asked.values.len() > 1 {
        let count = asked.values.len();
        return (
            format!(
                "\n\nThe text above gives {count} secret codes of the {key}. What are they? \
                 Answer with the {count} numbers only."
            ),
            format!("The secret codes of the {key} are"),
        );
    }
    (
        format!("\n\nWhat is the secret code of the {key} in the text above? Answer with the number only."),
        format!("The secret code of the {key} is"),
    )
}

#[cfg(test)]
mod tests;
