//! One answer as a list of parts: for interfaces that send blocks or items, in a stream and whole.

use oscar_engine::{Event, Summary, Token};

use super::Turn;
use crate::parse::{Change, OutputParser, Part, Parts};
use crate::protocol::ApiError;
use crate::requests::AnswerStream;

/// An answer that is being said.
pub(crate) struct PartsAnswer {
    turn: Turn,
    parser: OutputParser,
    parts: Parts,
    tokens: usize,
    reasoning_tokens: usize,
}

impl PartsAnswer {
    /// The one answer of a turn.
    pub(crate) fn new(turn: Turn) -> PartsAnswer {
        let parser = turn.parser(0);
        PartsAnswer { turn, parser, parts: Parts::default(), tokens: 0, reasoning_tokens: 0 }
    }

    /// Waits for the whole answer.
    pub(crate) async fn collect(&mut self, answers: &mut AnswerStream) -> Result<Summary, ApiError> {
        while let Some(delivered) = answers.next().await {
            match delivered.event {
                Event::Token { token, .. } => drop(self.token(&token)),
                Event::Finished { summary, .. } => {
                    self.finish(&summary);
                    return Ok(*summary);
                }
                Event::Failed { error, .. } => return Err(ApiError::from(&*error)),
                Event::Prefill { .. } | Event::Scored { .. } => {}
            }
        }
        Err(oscar_engine::EngineError::Stopped.into())
    }

    /// Takes a token; tells what it changed.
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

    /// Takes the end; tells what was still held back.
    pub(crate) fn finish(&mut self, summary: &Summary) -> Vec<Change> {
        let mut changes = Vec::new();
        for piece in self.parser.finish() {
            self.parts.push(piece, &mut changes);
        }
        self.parts.finish(&mut changes);
        self.turn.remember(summary);
        changes
    }

    /// What has been said.
    pub(crate) fn parts(&self) -> &Parts {
        &self.parts
    }

    /// Tokens that were thoughts.
    pub(crate) fn reasoning_tokens(&self) -> usize {
        match self.parts.list() {
            [Part::Reasoning(_), ..] => self.reasoning_tokens,
            _ => 0,
        }
    }

    /// The turn it belongs to.
    pub(crate) fn turn(&self) -> &Turn {
        &self.turn
    }
}
