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
    /// Tokens whose keys and values were to stay in bf16 and were sealed for want of memory.
    #[serde(skip_serializing_if = "is_zero")]
    kv_demoted_tokens: usize,
}

// The signature is serde's.
#[expect(clippy::trivially_copy_pass_by_ref)]
fn is_zero(count: &usize) -> bool {
    *count == 0
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
        self.kv_demoted_tokens += summary.demoted_tokens;
        self.completion_tokens += summary.tokens.len();
        self.total_tokens = self.prompt_tokens + self.completion_tokens;
    }
}
