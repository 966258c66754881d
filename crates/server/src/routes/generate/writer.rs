//! The events of a streamed `/generate`: each holds all of the text so far.
//!
//! Because of that an event makes those before it superfluous: where several tokens are ready, only the last state of
//! each answer is written.

use std::sync::Arc;
use std::time::Instant;

use bytes::BytesMut;
use oscar_engine::{Event, Token};
use serde_json::{Value, json};

use super::answer::Shape;
use crate::http::sse::{EventWriter, write_done, write_event};
use crate::protocol::SentNames;
use crate::requests::PromptEvent;
use crate::state::AppState;

/// Writes the events of a streamed `/generate`.
pub(super) struct GenerateWriter {
    app: Arc<AppState>,
    shapes: Vec<Shape>,
    names: SentNames,
    /// Whether there are several answers, which then carry an index.
    many: bool,
    begun: Instant,
    choices: Vec<Growing>,
    n: usize,
    /// The tokens of each prompt, and how many of them came from the prefix cache.
    prompts: Vec<(usize, usize)>,
}

/// The state of one answer.
#[derive(Clone, Default)]
struct Growing {
    text: String,
    ids: Vec<u32>,
    /// The tokens with their logprobs, if those are listed.
    tokens: Vec<Token>,
    /// Whether the state has changed since it was last written.
    changed: bool,
}

impl GenerateWriter {
    pub(super) fn new(
        app: Arc<AppState>,
        shapes: Vec<Shape>,
        names: SentNames,
        many: bool,
        begun: Instant,
    ) -> GenerateWriter {
        let n = shapes.first().map_or(1, |shape| shape.n);
        let choices = vec![Growing::default(); shapes.len() * n];
        let prompts = vec![(0, 0); shapes.len()];
        GenerateWriter { app, shapes, names, many, begun, choices, n, prompts }
    }

    fn write(&self, index: usize, mut answer: Value, out: &mut BytesMut) {
        if self.many {
            answer["index"] = index.into();
        }
        write_event(out, &answer);
    }
}

impl EventWriter for GenerateWriter {
    fn event(&mut self, delivered: PromptEvent, out: &mut BytesMut) {
        let prompt = delivered.prompt;
        let shape = &self.shapes[prompt];
        match delivered.event {
            Event::Prefill { total, cached, .. } => self.prompts[prompt] = (total, cached),
            // Comes with the summary.
            Event::Scored { .. } => {}
            Event::Token { choice, token } => {
                let growing = &mut self.choices[prompt * self.n + choice];
                growing.text.push_str(&token.text);
                growing.ids.push(token.id);
                growing.changed = true;
                if shape.listing.is_some() {
                    growing.tokens.push(token);
                }
            }
            Event::Finished { choice, summary } => {
                let index = prompt * self.n + choice;
                let growing = std::mem::take(&mut self.choices[index]);
                let elapsed = delivered.at - self.begun;
                let answer = shape.finished(&self.app, choice, &summary, &growing.tokens, elapsed);
                self.write(index, answer, out);
            }
            Event::Failed { error, .. } => write_event(out, &self.names.restore((&*error).into()).body()),
        }
    }

    fn flush(&mut self, out: &mut BytesMut) {
        for index in 0..self.choices.len() {
            if !std::mem::take(&mut self.choices[index].changed) {
                continue;
            }
            let growing = &self.choices[index];
            let (prompt, choice) = (index / self.n, index % self.n);
            let (shape, (total, cached)) = (&self.shapes[prompt], self.prompts[prompt]);
            let mut meta = shape.meta(choice, total, cached, growing.ids.len());
            if let Some(listing) = shape.listing {
                listing.add_tokens(&self.app, &growing.tokens, &mut meta);
            }
            let answer = json!({"text": growing.text, "output_ids": growing.ids, "meta_info": meta});
            self.write(index, answer, out);
        }
    }

    fn end(&mut self, out: &mut BytesMut) {
        write_done(out);
    }
}
