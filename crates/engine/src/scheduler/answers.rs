//! The answers in progress: who listens, the text so far, and how the next token is sampled.

use std::collections::HashMap;
use std::sync::Arc;

use oscar_kernels::backend::{Sampled, Sampling};
use oscar_model::text::{StreamDecoder, Tokenizer};

use super::plan::{AnswerId, Next};
use crate::error::EngineError;
use crate::event::{Event, FinishReason};
use crate::output::{Decode, Output};
use crate::request::{Contexts, GenerateOptions};
use crate::serve::SharedSink;

/// Every answer that has not ended. A request has one until its prompt is in the cache, then one for each choice.
pub(super) struct Answers {
    answers: HashMap<AnswerId, Answer>,
    tokenizer: Arc<Tokenizer>,
    contexts: Contexts,
}

/// An answer in progress.
pub(super) struct Answer {
    pub(super) sink: SharedSink,
    pub(super) output: Output,
    /// Why it ends, as soon as that is known.
    pub(super) finish: Option<FinishReason>,
    pub(super) span: tracing::Span,
}

impl Answers {
    pub(super) fn new(tokenizer: Arc<Tokenizer>, contexts: Contexts) -> Answers {
        Answers { answers: HashMap::new(), tokenizer, contexts }
    }

    pub(super) fn insert(&mut self, id: AnswerId, sink: SharedSink, output: Output) {
        let span = tracing::debug_span!("request", id = id.request, choice = id.choice);
        self.answers.insert(id, Answer { sink, output, finish: None, span });
    }

    pub(super) fn get_mut(&mut self, id: AnswerId) -> Option<&mut Answer> {
        self.answers.get_mut(&id)
    }

    /// Makes the choices of a request beside its first one.
    pub(super) fn fork(&mut self, first: AnswerId, choices: usize) {
        let Some(answer) = self.answers.get(&first) else { return };
        let sink = answer.sink.clone();
        let forks: Vec<Output> = (first.choice + 1..first.choice + choices)
            .map(|choice| answer.output.fork(choice, self.decoder(answer.output.options())))
            .collect();
        for output in forks {
            let id = AnswerId { request: first.request, choice: output.choice };
            self.insert(id, sink.clone(), output);
        }
    }

    /// Takes out the answers of a request from `first` on, `choices` of them; those that were not forked yet are.
    pub(super) fn remove(&mut self, first: AnswerId, choices: usize) -> Vec<Answer> {
        let last = AnswerId { choice: first.choice + choices - 1, ..first };
        if !self.answers.contains_key(&last) {
            self.fork(first, choices);
        }
        (first.choice..first.choice + choices)
            .filter_map(|choice| self.answers.remove(&AnswerId { choice, ..first }))
            .collect()
    }

    /// Turns the tokens of an answer into text.
    pub(super) fn decoder(&self, options: &GenerateOptions) -> Box<dyn Decode> {
        let mut decoder = StreamDecoder::new(Arc::clone(&self.tokenizer));
        if options.new_text {
            decoder = decoder.from_start();
        }
        if options.keep_special {
            decoder = decoder.keep_special();
        }
        Box::new(decoder)
    }

    /// Gets ready to sample the next token of an answer.
    pub(super) fn prepare(&mut self, id: AnswerId) -> Result<(), EngineError> {
        self.answers.get_mut(&id).map_or(Err(EngineError::Stopped), |answer| answer.output.prepare())
    }

    /// How the next token of an answer is sampled.
    pub(super) fn sampling(&self, id: AnswerId) -> Sampling<'_> {
        let vocabulary = self.tokenizer.vocab_size();
        self.answers.get(&id).map(|answer| answer.output.setting(vocabulary)).unwrap_or_default()
    }

    /// How the token after the next one of an answer is sampled, if the next one makes no difference.
    pub(super) fn sampling_after_next(&self, id: AnswerId) -> Option<Sampling<'static>> {
        self.answers.get(&id)?.output.setting_after_next(self.tokenizer.vocab_size())
    }

    /// Hands out a sampled token and says what becomes of the answer.
    pub(super) fn take_token(&mut self, id: AnswerId, sampled: Result<Sampled, EngineError>) -> Next {
        let Some(answer) = self.answers.get_mut(&id) else { return Next::Failed(EngineError::Stopped) };
        let output = &mut answer.output;
        // Behind the token that is taken now.
        let context = self.contexts.of(output.options());
        let room = output.prompt_tokens + output.tokens().len() + 1 < context;
        let taken = sampled.and_then(|sampled| {
            let token = sampled.token;
            let (shown, finish) = output.push(sampled, self.tokenizer.is_end(token), room)?;
            Ok((token, shown, finish))
        });
        match taken {
            Ok((token, shown, finish)) => {
                answer.sink.send(Event::Token { choice: id.choice, token: shown });
                answer.finish = finish;
                if finish.is_some() { Next::Finished } else { Next::Continue(token) }
            }
            Err(error) => Next::Failed(error),
        }
    }
}
