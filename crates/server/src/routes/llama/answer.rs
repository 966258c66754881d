//! An answer of `/completion` in llama.cpp's form.

use std::sync::Arc;
use std::time::Duration;

use oscar_engine::{FinishReason, GenerateOptions, MatchedStop, Summary, Token};
use serde_json::{Value, json};

use crate::protocol::short;
use crate::routes::logprobs::{ChatLogprob, EndTokens};
use crate::state::AppState;

/// What the answers to a request have in common.
pub(super) struct Shape {
    app: Arc<AppState>,
    options: GenerateOptions,
    prompts: Vec<String>,
    return_tokens: bool,
    end_tokens: EndTokens,
}

impl Shape {
    pub(super) fn new(
        app: &Arc<AppState>,
        options: GenerateOptions,
        prompts: Vec<String>,
        return_tokens: bool,
    ) -> Shape {
        let end_tokens = EndTokens::new(app.model.tokenizer(), &options);
        Shape { app: Arc::clone(app), options, prompts, return_tokens, end_tokens }
    }

    /// The number of prompts.
    pub(super) fn prompts(&self) -> usize {
        self.prompts.len()
    }

    /// A token of a stream.
    pub(super) fn token(&self, prompt: usize, token: &Token, said: usize, evaluated: usize) -> Value {
        let mut event = json!({
            "index": prompt,
            "content": token.text,
            "tokens": [token.id],
            "stop": false,
            "id_slot": -1,
            "tokens_predicted": said,
            "tokens_evaluated": evaluated,
        });
        if self.options.logprobs.is_some() {
            event["completion_probabilities"] = self.probabilities(std::slice::from_ref(token));
        }
        event
    }

    /// The answer when it has finished. In a stream its text has been sent already.
    pub(super) fn finished(&self, prompt: usize, summary: &Summary, tokens: &[Token], whole: bool) -> Value {
        let (stop_type, word) = match (summary.finish, &summary.matched) {
            (FinishReason::Stop, Some(MatchedStop::Text(word))) => ("word", word.as_str()),
            (FinishReason::End | FinishReason::Stop, _) => ("eos", ""),
            (FinishReason::Length | FinishReason::Context, _) => ("limit", ""),
            (FinishReason::Cancelled, _) => ("none", ""),
        };
        let ids = if whole && self.return_tokens { summary.tokens.as_slice() } else { &[] };
        let mut answer = json!({
            "index": prompt,
            "content": if whole { summary.text.as_str() } else { "" },
            "tokens": ids,
            "id_slot": -1,
            "stop": true,
            "model": self.app.model.name,
            "tokens_predicted": summary.tokens.len(),
            "tokens_evaluated": summary.prompt_tokens,
            "tokens_cached": summary.prompt_tokens + summary.tokens.len(),
            "generation_settings": settings(&self.options, summary.seed),
            "prompt": self.prompts[prompt],
            "has_new_line": summary.text.contains('\n'),
            "truncated": false,
            "stop_type": stop_type,
            "stopping_word": word,
            "timings": timings(summary),
        });
        if whole && self.options.logprobs.is_some() {
            answer["completion_probabilities"] = self.probabilities(tokens);
        }
        answer
    }

    fn probabilities(&self, tokens: &[Token]) -> Value {
        let tokenizer = self.app.model.tokenizer();
        let listed = tokens.iter().filter(|token| !self.end_tokens.contains(token.id));
        let entry = |token: &Token| {
            let mut entry = json!(ChatLogprob::new(tokenizer, token));
            entry["id"] = token.id.into();
            for (alternative, (id, _)) in
                entry["top_logprobs"].as_array_mut().into_iter().flatten().zip(&token.top)
            {
                alternative["id"] = (*id).into();
            }
            entry
        };
        listed.map(entry).collect()
    }
}

/// The parameters of a request, under llama.cpp's names.
pub(super) fn settings(options: &GenerateOptions, seed: u64) -> Value {
    let sampling = &options.sampling;
    json!({
        "seed": seed,
        "temperature": short(sampling.temperature),
        "top_k": sampling.top_k,
        "top_p": short(sampling.top_p),
        "min_p": short(sampling.min_p),
        "typical_p": short(sampling.typical_p),
        "repeat_penalty": short(sampling.repetition_penalty),
        "repeat_last_n": -1,
        "presence_penalty": short(sampling.presence_penalty),
        "frequency_penalty": short(sampling.frequency_penalty),
        "stop": options.stop,
        "n_predict": options.max_tokens.and_then(|most| i64::try_from(most).ok()).unwrap_or(-1),
        "n_probs": options.logprobs.unwrap_or(0),
        "ignore_eos": options.ignore_end,
    })
}

fn timings(summary: &Summary) -> Value {
    let prompt = summary.prompt_tokens - summary.cached_tokens;
    let (first, rest) = (summary.first_token.saturating_sub(summary.queued), summary.decode);
    let said = summary.tokens.len();
    let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
    // What took no time has no speed.
    let share = |part: f64, of: f64| if of > 0.0 { part / of } else { 0.0 };
    json!({
        "cache_n": summary.cached_tokens,
        "prompt_n": prompt,
        "prompt_ms": milliseconds(first),
        "prompt_per_token_ms": share(milliseconds(first), prompt as f64),
        "prompt_per_second": share(prompt as f64, first.as_secs_f64()),
        "predicted_n": said,
        "predicted_ms": milliseconds(rest),
        "predicted_per_token_ms": share(milliseconds(rest), said as f64),
        "predicted_per_second": share(said as f64, rest.as_secs_f64()),
    })
}
