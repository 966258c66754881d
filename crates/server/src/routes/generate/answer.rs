//! An answer of `/generate` in SGLang's form: `text`, `output_ids` and `meta_info`.

use std::sync::Arc;
use std::time::Duration;

use oscar_engine::{FinishReason, MatchedStop, PromptLogprob, Summary, Token};
use serde_json::{Map, Value, json};

use crate::routes::logprobs::number;
use crate::state::AppState;
use crate::text::shown;

/// What the answers to one prompt must contain.
#[derive(Clone, Debug)]
pub(super) struct Shape {
    pub(super) id: Arc<str>,
    pub(super) n: usize,
    pub(super) listing: Option<Listing>,
}

/// Which logprobs an answer lists.
#[derive(Clone, Copy, Debug)]
pub(super) struct Listing {
    /// The number of alternatives to each token.
    pub(super) top: usize,
    /// Whether tokens are given as text too.
    pub(super) with_text: bool,
}

impl Shape {
    /// The id of one of the answers.
    pub(super) fn choice_id(&self, choice: usize) -> String {
        if self.n == 1 { self.id.to_string() } else { format!("{}_{choice}", self.id) }
    }

    /// The answer when it has finished.
    pub(super) fn finished(
        &self,
        app: &AppState,
        choice: usize,
        summary: &Summary,
        tokens: &[Token],
        elapsed: Duration,
    ) -> Value {
        let mut meta = self.meta(choice, summary.prompt_tokens, summary.cached_tokens, summary.tokens.len());
        meta.insert("finish_reason".to_owned(), finish_reason(summary));
        if summary.demoted_tokens > 0 {
            meta.insert("kv_demoted_tokens".to_owned(), summary.demoted_tokens.into());
        }
        meta.insert("e2e_latency".to_owned(), elapsed.as_secs_f64().into());
        if let Some(listing) = self.listing {
            listing.add_prompt(app, &summary.prompt_logprobs, &mut meta);
            listing.add_tokens(app, tokens, &mut meta);
        }
        json!({"text": summary.text, "output_ids": summary.tokens, "meta_info": meta})
    }

    /// The `meta_info` of an answer, as far as it is known.
    pub(super) fn meta(
        &self,
        choice: usize,
        prompt_tokens: usize,
        cached_tokens: usize,
        completion_tokens: usize,
    ) -> Map<String, Value> {
        let mut meta = Map::new();
        meta.insert("id".to_owned(), self.choice_id(choice).into());
        meta.insert("finish_reason".to_owned(), Value::Null);
        meta.insert("prompt_tokens".to_owned(), prompt_tokens.into());
        meta.insert("weight_version".to_owned(), "default".into());
        meta.insert("completion_tokens".to_owned(), completion_tokens.into());
        meta.insert("cached_tokens".to_owned(), cached_tokens.into());
        meta
    }
}

impl Listing {
    fn add_prompt(self, app: &AppState, prompt: &[PromptLogprob], meta: &mut Map<String, Value>) {
        let list: Vec<Value> =
            prompt.iter().map(|entry| self.entry(app, entry.token, entry.logprob)).collect();
        meta.insert("input_token_logprobs".to_owned(), list.into());
        if self.top > 0 {
            let tops: Vec<Value> = prompt
                .iter()
                .map(|entry| self.alternatives(app, entry.logprob.map(|_| &entry.top[..])))
                .collect();
            meta.insert("input_top_logprobs".to_owned(), tops.into());
        }
    }

    pub(super) fn add_tokens(self, app: &AppState, tokens: &[Token], meta: &mut Map<String, Value>) {
        let list: Vec<Value> = tokens.iter().map(|token| self.entry(app, token.id, token.logprob)).collect();
        meta.insert("output_token_logprobs".to_owned(), list.into());
        if self.top > 0 {
            let tops: Vec<Value> =
                tokens.iter().map(|token| self.alternatives(app, Some(&token.top[..]))).collect();
            meta.insert("output_top_logprobs".to_owned(), tops.into());
        }
    }

    /// An entry of a list of logprobs: `[logprob, id, text]`.
    fn entry(self, app: &AppState, id: u32, logprob: Option<f32>) -> Value {
        let text = self.with_text.then(|| shown(app.model.tokenizer(), id));
        json!([logprob.map(number), id, text])
    }

    fn alternatives(self, app: &AppState, top: Option<&[(u32, f32)]>) -> Value {
        let list = |top: &[(u32, f32)]| {
            top.iter().map(|&(id, logprob)| self.entry(app, id, Some(logprob))).collect::<Vec<Value>>()
        };
        top.map_or(Value::Null, |top| list(top).into())
    }
}

fn finish_reason(summary: &Summary) -> Value {
    match (summary.finish, &summary.matched) {
        (FinishReason::Length | FinishReason::Context, _) => {
            json!({"type": "length", "length": summary.tokens.len()})
        }
        (FinishReason::Cancelled, _) => json!({"type": "abort", "message": "the request was aborted"}),
        (_, Some(MatchedStop::Token(id))) => json!({"type": "stop", "matched": id}),
        (_, Some(MatchedStop::Text(text))) => json!({"type": "stop", "matched": text}),
        (_, None) => json!({"type": "stop", "matched": null}),
    }
}
