//! Restricting what may be said next: the hook for grammars.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::error::EngineError;

/// Says which tokens may come next. One filter serves one choice of one request and is told every token in order.
pub trait TokenFilter: Send {
    /// Clears the bits of tokens that may not come next. All bits are set before the call.
    fn allowed(&mut self, mask: &mut TokenMask) -> Result<(), EngineError>;

    /// Takes note of the token that was sampled.
    fn accept(&mut self, token: u32) -> Result<(), EngineError>;

    /// A filter in the same state, for another choice of the same request.
    fn fork(&self) -> Box<dyn TokenFilter>;
}

/// Calls a filter. It is the caller's code: a panic in it must not take the engine along.
pub(crate) fn guarded<T>(call: impl FnOnce() -> Result<T, EngineError>) -> Result<T, EngineError> {
    let panicked = |_| Err(EngineError::Filter("it panicked".to_owned()));
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(panicked)
}

/// [`TokenFilter::fork`]; a filter that panics there is replaced by one that fails its choice.
pub(crate) fn fork(filter: &dyn TokenFilter) -> Box<dyn TokenFilter> {
    guarded(|| Ok(filter.fork())).unwrap_or_else(|_| Box::new(Broken))
}

/// What is left of a filter that could not be forked.
struct Broken;

impl TokenFilter for Broken {
    fn allowed(&mut self, _: &mut TokenMask) -> Result<(), EngineError> {
        Err(EngineError::Filter("it panicked".to_owned()))
    }

    fn accept(&mut self, _: u32) -> Result<(), EngineError> {
        Ok(())
    }

    fn fork(&self) -> Box<dyn TokenFilter> {
        Box::new(Broken)
    }
}

/// One bit per token of the vocabulary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenMask {
    tokens: usize,
    words: Vec<u32>,
}

impl TokenMask {
    /// A mask that allows every token of a vocabulary.
    pub fn all(tokens: usize) -> TokenMask {
        TokenMask { tokens, words: vec![u32::MAX; tokens.div_ceil(32)] }
    }

    /// How many tokens the vocabulary has.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Whether the mask allows a token.
    pub fn allows(&self, token: u32) -> bool {
        let token = token as usize;
        token < self.tokens && self.words[token / 32] >> (token % 32) & 1 == 1
    }

    /// Makes the mask forbid a token.
    pub fn forbid(&mut self, token: u32) {
        if let Some(word) = self.words.get_mut(token as usize / 32) {
            *word &= !(1 << (token % 32));
        }
    }

    /// Forbids everything but these tokens.
    pub fn keep_only(&mut self, tokens: impl IntoIterator<Item = u32>) {
        self.words.fill(0);
        for token in tokens.into_iter().filter(|&token| (token as usize) < self.tokens) {
            self.words[token as usize / 32] |= 1 << (token % 32);
        }
    }

    /// The bits, 32 tokens to a word, the lowest token in the lowest bit.
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// The same, to be written by a library that makes masks of its own.
    pub fn words_mut(&mut self) -> &mut [u32] {
        &mut self.words
    }

    pub(crate) fn reset(&mut self) {
        self.words.fill(u32::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_hold_what_was_put_in() {
        let mut mask = TokenMask::all(40);
        assert!(mask.allows(0) && mask.allows(39) && !mask.allows(40));
        mask.forbid(33);
        mask.forbid(1000);
        assert!(!mask.allows(33) && mask.allows(32));
        mask.keep_only([3, 33, 77]);
        assert_eq!((0..100).filter(|&token| mask.allows(token)).collect::<Vec<_>>(), [3, 33]);
        assert_eq!(mask.words(), [1 << 3, 1 << 1]);
    }
}
