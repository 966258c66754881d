//! The events of a streamed `/completion`: one for each token, and a last one with what is known at the end.

use bytes::BytesMut;
use oscar_engine::Event;

use super::answer::Shape;
use crate::http::sse::{EventWriter, write_event};
use crate::protocol::SentNames;
use crate::requests::PromptEvent;

/// Writes the events of a streamed `/completion`.
pub(super) struct LlamaWriter {
    shape: Shape,
    /// The tokens of each prompt and of its answer so far.
    tokens: Vec<(usize, usize)>,
}

impl LlamaWriter {
    pub(super) fn new(shape: Shape) -> LlamaWriter {
        let tokens = vec![(0, 0); shape.prompts()];
        LlamaWriter { shape, tokens }
    }
}

impl EventWriter for LlamaWriter {
    fn event(&mut self, delivered: PromptEvent, out: &mut BytesMut) {
        let prompt = delivered.prompt;
        let (evaluated, said) = &mut self.tokens[prompt];
        match delivered.event {
            Event::Prefill { total, .. } => *evaluated = total,
            Event::Token { token, .. } => {
                *said += 1;
                // A token that ends the answer, or whose text is held back, says nothing yet.
                if !token.text.is_empty() || token.logprob.is_some() {
                    write_event(out, &self.shape.token(prompt, &token, *said, *evaluated));
                }
            }
            Event::Finished { summary, .. } => {
                write_event(out, &self.shape.finished(prompt, &summary, &[], false));
            }
            Event::Failed { error, .. } => {
                write_event(out, &SentNames::of_completion().restore((&*error).into()).body());
            }
            Event::Scored { .. } => {}
        }
    }

    // These streams end without a mark.
    fn end(&mut self, _out: &mut BytesMut) {}
}
