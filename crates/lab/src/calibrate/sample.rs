//! Calibration text from the model itself, for users who have none: seeded conversations, several at once.

use std::collections::VecDeque;

use oscar_codec::{ExactSlot, PAGE_TOKENS};
use oscar_engine::draw;
use oscar_kernels::Backend;
use oscar_kernels::backend::{Batch, Sampling, SequenceRows};
use oscar_model::LoadedModel;
use oscar_random::Random;
use serde_json::json;

use super::CalibrateError;

/// What the conversations are about. Wide rather than deep: moments need variety, not facts.
const TOPICS: [&str; 32] = [
    "the history of bridges",
    "how bread is made",
    "a walk through an old harbour town",
    "the life of a honey bee",
    "sorting algorithms, with code",
    "planning a vegetable garden",
    "the water cycle",
    "a letter to a friend abroad",
    "how a bicycle stays upright",
    "a mystery set in a library",
    "basic probability, with worked examples",
    "the phases of the moon",
    "repairing a wooden chair",
    "a dialogue between two engineers",
    "writing a small web server, with code",
    "the geography of mountain ranges",
    "a recipe for a winter soup",
    "how vaccines work",
    "the rules of chess",
    "a fable about a fox and a river",
    "linear equations, step by step",
    "the invention of printing",
    "a day in a weather station",
    "parsing a text file, with code",
    "how music is recorded",
    "a short biography of an imaginary explorer",
    "electric motors",
    "a debate about city parks",
    "glaciers and how they move",
    "a checklist for moving house",
    "databases and their indexes",
    "a poem about the sea, with a commentary",
];

const REQUESTS: [&str; 4] = [
    "Write a long, detailed text about",
    "Explain step by step:",
    "Tell me everything a beginner should know about",
    "Write several pages about",
];

/// Draws `count` sequences of `length` tokens. `progress` gets the number of tokens that are drawn.
pub fn sample<B: Backend>(
    model: &LoadedModel<B>,
    count: usize,
    length: usize,
    seed: u64,
    mut progress: impl FnMut(usize),
) -> Result<Vec<Vec<u32>>, CalibrateError> {
    let pages = length.div_ceil(PAGE_TOKENS);
    let mut cache = model.model().cache(count * pages + 1)?;
    let mut activations = model.model().activations(count, count)?;
    let rows: Vec<usize> = (0..count).collect();
    let slots = ExactSlot::first(count * pages);
    let tables: Vec<&[Option<ExactSlot>]> = slots.chunks_exact(pages.max(1)).collect();
    let mut speakers: Vec<SampledConversation> =
        (0..count).map(|index| SampledConversation::new(seed, index)).collect();
    let mut drawn: Vec<Option<u32>> = vec![None; count];
    let mut sequences: Vec<Vec<u32>> = vec![Vec::with_capacity(length); count];
    for position in 0..length {
        let tokens: Vec<u32> = speakers
            .iter_mut()
            .zip(&drawn)
            .map(|(speaker, drawn)| speaker.next(model, *drawn))
            .collect::<Result<_, _>>()?;
        let batch: Vec<SequenceRows<'_>> =
            tables.iter().map(|pages| SequenceRows::exact(position, 1, pages)).collect();
        let batch = Batch { tokens: &tokens, sequences: &batch };
        model.model().forward(&batch, &rows, &mut cache, &mut activations)?;
        let settings: Vec<Sampling<'_>> = (0..count)
            .map(|index| Sampling {
                temperature: 1.0,
                top_p: 0.95,
                vocabulary: model.tokenizer().vocab_size(),
                draw: draw(seed, (index * length + position) as u64),
                ..Sampling::default()
            })
            .collect();
        let next = model.model().backend().sample(activations.logits(), &settings)?;
        drawn = next
            .into_iter()
            .map(|sampled| sampled.map(|sampled| Some(sampled.token)))
            .collect::<Result<_, _>>()?;
        sequences.iter_mut().zip(&tokens).for_each(|(sequence, token)| sequence.push(*token));
        progress((position + 1) * count);
    }
    Ok(sequences)
}

/// One conversation: the user's turns are given, the model's are sampled.
struct SampledConversation {
    seed: u64,
    turn: u64,
    given: VecDeque<u32>,
}

impl SampledConversation {
    fn new(seed: u64, index: usize) -> SampledConversation {
        SampledConversation { seed: mix(seed ^ mix(index as u64)), turn: 0, given: VecDeque::new() }
    }

    /// The next token: what is left of the user's turn, else what the model drew. An end of turn starts a new one.
    fn next<B: Backend>(
        &mut self,
        model: &LoadedModel<B>,
        drawn: Option<u32>,
    ) -> Result<u32, CalibrateError> {
        if let Some(token) = self.given.pop_front() {
            return Ok(token);
        }
        if let Some(token) = drawn.filter(|&token| !model.is_end(token)) {
            return Ok(token);
        }
        self.given.extend(drawn);
        let asked = self.ask(model)?;
        self.given.extend(asked);
        self.given.pop_front().ok_or(CalibrateError::NoText)
    }

    fn ask<B: Backend>(&mut self, model: &LoadedModel<B>) -> Result<Vec<u32>, CalibrateError> {
        let draw = mix(self.seed.wrapping_add(self.turn)) as usize;
        self.turn += 1;
        let request = REQUESTS[draw % REQUESTS.len()];
        let topic = TOPICS[draw / REQUESTS.len() % TOPICS.len()];
        let text = format!("{request} {topic}.");
        if model.chat_template().is_ok() {
            let messages = [json!({"role": "user", "content": text})];
            return model.encode_chat(&messages).map_err(|error| CalibrateError::Chat(error.to_string()));
        }
        Ok(model.tokenizer().encode(&text, true)?)
    }
}

/// A hash of 64 bits.
fn mix(value: u64) -> u64 {
    Random::new(value).next_u64()
}
