//! One answer as a list of parts, for interfaces whose answers are blocks or items, streamed or not.

use oscar_engine::{EngineError, Event, Summary, Token};

use super::{Turn, is_cut_off};
use crate::parse::{Change, OutputParser, Part, Parts};
use crate::protocol::ApiError;
use crate::requests::AnswerStream;

/// An answer that is being generated, as the list of its parts so far.
pub(crate) struct PartsAnswer {
    turn: Turn,
    parser: OutputParser,
    parts: Parts,
    tokens: usize,
    reasoning_tokens: usize,
}

impl PartsAnswer {
    /// The answer to a request that has only one.
    pub(crate) fn new(turn: Turn) -> PartsAnswer {
        let parser = turn.parser(0);
        PartsAnswer { turn, parser, parts: Parts::default(), tokens: 0, reasoning_tokens: 0 }
    }

    /// Waits until the answer has finished.
    pub(crate) async fn collect(&mut self, answers: &mut AnswerStream) -> Result<Summary, ApiError> {
        while let Some(delivered) = answers.next().await {
            match delivered.event {
                Event::Token { token, .. } => drop(self.token(&token)),
                Event::Finished { summary, .. } => {
                    self.finish(&summary);
                    return Ok(*summary);
                }
                Event::Failed { error, .. } => return Err(self.error(&error)),
                Event::Prefill { .. } | Event::Scored { .. } => {}
            }
        }
        Err(EngineError::Stopped.into())
    }

    /// Takes a token and gives what it changed.
    pub(crate) fn token(&mut self, token: &Token) -> Vec<Change> {
        let mut changes = Vec::new();
        for piece in self.parser.push(&token.text) {
            self.parts.push(piece, &mut changes);
        }
        self.tokens += 1;
        // Markers count with the thoughts they enclose.
        if matches!(self.parts.list(), [] | [Part::Reasoning(_)]) {
            self.reasoning_tokens = self.tokens;
        }
        changes
    }

    /// Takes the end of the answer and gives what had been held back until then.
    pub(crate) fn finish(&mut self, summary: &Summary) -> Vec<Change> {
        let mut changes = Vec::new();
        for piece in self.parser.finish(is_cut_off(summary)) {
            self.parts.push(piece, &mut changes);
        }
        self.parts.finish(&mut changes);
        self.turn.remember(summary);
        changes
    }

    /// An error of the engine, under the names that the client sent.
    pub(crate) fn error(&self, error: &EngineError) -> ApiError {
        self.turn.names.restore(error.into())
    }

    /// The parts of the answer so far.
    pub(crate) fn parts(&self) -> &Parts {
        &self.parts
    }

    /// The number of tokens that were reasoning.
    pub(crate) fn reasoning_tokens(&self) -> usize {
        match self.parts.list() {
            [Part::Reasoning(_), ..] => self.reasoning_tokens,
            _ => 0,
        }
    }

    /// The request that it answers.
    pub(crate) fn turn(&self) -> &Turn {
        &self.turn
    }
}
