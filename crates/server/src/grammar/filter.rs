//! The state of one answer in its grammar, which the engine asks for a mask before each token.

use llguidance::Matcher;
use llguidance::api::StopReason;
use oscar_engine::{EngineError, TokenFilter, TokenMask};

pub(super) struct GrammarFilter {
    matcher: Matcher,
}

impl GrammarFilter {
    pub(super) fn new(matcher: Matcher) -> GrammarFilter {
        GrammarFilter { matcher }
    }

    /// A grammar that ran out of its limits looks to the library like one that has ended.
    fn check(&self) -> Result<(), EngineError> {
        match self.matcher.stop_reason() {
            reason if reason.is_ok() => Ok(()),
            StopReason::LexerTooComplex | StopReason::ParserTooComplex => {
                Err(EngineError::Filter("the grammar is too complex".to_owned()))
            }
            reason => Err(failed(self.matcher.get_error().unwrap_or_else(|| reason.to_string()))),
        }
    }
}

impl TokenFilter for GrammarFilter {
    fn allowed(&mut self, mask: &mut TokenMask) -> Result<(), EngineError> {
        self.check()?;
        let allowed = self.matcher.compute_mask_or_eos().map_err(failed)?;
        self.check()?;
        // The model may have more rows than the vocabulary has tokens.
        let allowed = allowed.as_slice().iter().copied().chain(std::iter::repeat(0));
        for (word, allowed) in mask.words_mut().iter_mut().zip(allowed) {
            *word &= allowed;
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<(), EngineError> {
        if self.matcher.is_stopped() {
            return self.check();
        }
        self.matcher.consume_token(token).map_err(failed)?;
        self.check()
    }

    fn fork(&self) -> Box<dyn TokenFilter> {
        Box::new(GrammarFilter { matcher: self.matcher.deep_clone() })
    }
}

/// The first line says what went wrong; what follows is for the library's authors.
fn failed(error: impl ToString) -> EngineError {
    let text = error.to_string();
    EngineError::Filter(text.lines().next().unwrap_or_default().to_owned())
}
