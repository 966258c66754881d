//! The `usage` of OpenAI's answers: how many tokens a request had.

use oscar_engine::Summary;
use serde::Serialize;

/// Tokens of a request, all prompts and choices together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: usize,
    pub(crate) completion_tokens: usize,
    pub(crate) total_tokens: usize,
    prompt_tokens_details: PromptTokensDetails,
}

/// How many of the prompt tokens came from the prefix cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
struct PromptTokensDetails {
    cached_tokens: usize,
}

impl Usage {
    /// Adds a finished choice. Several choices share one prompt, which counts with the first.
    pub(crate) fn add(&mut self, choice: usize, summary: &Summary) {
        if choice == 0 {
            self.prompt_tokens += summary.prompt_tokens;
            self.prompt_tokens_details.cached_tokens += summary.cached_tokens;
        }
        self.completion_tokens += summary.tokens.len();
        self.total_tokens = self.prompt_tokens + self.completion_tokens;
    }
}
