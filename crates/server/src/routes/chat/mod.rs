//! `/v1/chat/completions`: a conversation goes on.

mod message;
mod writer;

use std::sync::Arc;
use std::time::SystemTime;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use oscar_engine::{FinishReason, GenerateOptions, MatchedStop, Summary};
use serde_json::{Value, json};

use self::message::message_json;
use self::writer::ChatWriter;
use super::collect::{Whole, collect};
use super::completions::matched;
use super::{finish_name, fresh_id};
use crate::answers::{Answers, Asked};
use crate::app::{App, unix_seconds};
use crate::body::JsonBody;
use crate::error::ApiError;
use crate::form;
use crate::frames::stream;
use crate::logprobs::{ChatLogprob, Endings};
use crate::parse::{
    Message, OutputParser, ReasoningParser, Tool, ToolKind, ToolParser, needs_special_tokens,
};
use crate::protocol::{OpenAiRequest, Usage, check_kv_precision};
use crate::text::{Chat, Prompted};

/// Answers the last message of a conversation.
pub(crate) async fn chat_completions(
    State(app): State<Arc<App>>,
    JsonBody(mut request): JsonBody<OpenAiRequest>,
) -> Result<Response, ApiError> {
    app.model.check_name(request.model.as_deref())?;
    check_kv_precision(request.kv_precision.as_ref(), &app.engine.info().kv)?;
    let logprobs = request.chat_logprobs()?;
    let new_text = !request.continue_final_message.unwrap_or(false);
    let mut options = GenerateOptions { logprobs, new_text, ..request.wishes(None)?.options(&app.model.sampling)? };
    let form = form::of_openai(&request)?;
    let tools = if form.wants_calls() { form.tools.clone() } else { Vec::new() };
    let separate_reasoning = request.separate_reasoning.unwrap_or(true);
    let reasoning_markers = app.options.reasoning_parser.filter(|_| separate_reasoning);
    let tool_markers = app.options.tool_parser.filter(|_| !tools.is_empty());
    if needs_special_tokens(app.model.tokenizer(), reasoning_markers, tool_markers) {
        options.keep_special = true;
    }
    let salt = options.cache_salt.clone();
    let prompted = prepare(&app, &mut request, salt).await?;
    // What a thinking model must keep to begins after its thoughts.
    let thinks = app.options.reasoning_parser.filter(|kind| kind.starts_in_reasoning(&prompted.text));
    let filter = form::filter(&app, form, thinks.map(|kind| kind.markers().1)).await?;
    let id = fresh_id("chatcmpl");
    let asked = Asked {
        id: request.rid.clone().unwrap_or_else(|| id.clone()),
        prompt: prompted.ids.clone(),
        options: options.clone(),
        filter,
    };
    let mut answers = Answers::submit(&app, vec![asked])?;
    let turn = Turn {
        endings: Endings::new(app.model.tokenizer(), &options),
        salt: options.cache_salt.clone(),
        wants_logprobs: logprobs.is_some(),
        tools: tools.into(),
        id_stem: id.trim_start_matches("chatcmpl-").chars().take(16).collect(),
        separate_reasoning,
        prompted,
        app: Arc::clone(&app),
    };
    if request.streams() {
        return Ok(stream(answers, ChatWriter::new(turn, &id, request.includes_usage())));
    }
    let whole = collect(&mut answers, 1, options.n, logprobs.is_some()).await?;
    let mut usage = Usage::default();
    let mut choices = Vec::with_capacity(whole.len());
    for Whole { choice, tokens, summary, .. } in whole {
        usage.add(choice, &summary);
        turn.remember(&summary);
        let mut parser = turn.parser(choice);
        let mut message = Message::default();
        message.extend(parser.push(&summary.text));
        message.extend(parser.finish());
        let tokens = tokens.iter().filter(|token| !turn.endings.contains(token.id));
        let list: Vec<ChatLogprob> =
            tokens.map(|token| ChatLogprob::new(app.model.tokenizer(), token)).collect();
        choices.push(json!({
            "index": choice,
            "finish_reason": chat_finish(summary.finish, !message.tool_calls.is_empty()),
            "message": message_json(&message),
            "logprobs": logprobs.map(|_| json!({"content": list, "refusal": null})),
            "matched_stop": matched(&summary),
        }));
    }
    Ok(Json(json!({
        "id": id,
        "object": "chat.completion",
        "created": unix_seconds(SystemTime::now()),
        "model": app.model.name,
        "system_fingerprint": app.fingerprint,
        "choices": choices,
        "usage": usage,
    }))
    .into_response())
}

/// What the answers to one conversation share.
struct Turn {
    app: Arc<App>,
    prompted: Prompted,
    salt: Option<String>,
    endings: Endings,
    wants_logprobs: bool,
    /// Functions that may be called.
    tools: Arc<[Tool]>,
    /// What the ids of calls begin with.
    id_stem: String,
    separate_reasoning: bool,
}

impl Turn {
    /// Tells the parts of an answer apart.
    fn parser(&self, choice: usize) -> OutputParser {
        let options = &self.app.options;
        let calls = options.tool_parser.filter(|_| !self.tools.is_empty());
        let reasoning = options.reasoning_parser.filter(|_| self.separate_reasoning).map(|kind| {
            let inside = kind.starts_in_reasoning(&self.prompted.text);
            ReasoningParser::new(kind, inside, calls.map_or(&[][..], ToolKind::openers))
        });
        let stem = || format!("{}_{choice}_", self.id_stem);
        let calls = calls.map(|kind| ToolParser::new(kind, Arc::clone(&self.tools), stem()));
        OutputParser::new(reasoning, calls)
    }

    /// Remembers which ids the conversation had, for its next turn.
    fn remember(&self, summary: &Summary) {
        let tokenizer = self.app.model.tokenizer();
        let said = match (&summary.finish, &summary.matched) {
            (FinishReason::End, Some(MatchedStop::Token(_))) | (FinishReason::Length, None) => {
                &summary.tokens[..]
            }
            (FinishReason::Stop, Some(MatchedStop::Token(_))) => {
                &summary.tokens[..summary.tokens.len().saturating_sub(1)]
            }
            // A stop text is cut out of the tokens, and a broken answer may miss the end of its text.
            _ => return,
        };
        self.app.memory.remember(tokenizer, self.salt.as_deref(), &self.prompted, said);
    }
}

/// Why a chat's answer ended.
fn chat_finish(finish: FinishReason, called: bool) -> &'static str {
    match finish {
        FinishReason::End | FinishReason::Stop if called => "tool_calls",
        finish => finish_name(finish),
    }
}

async fn prepare(
    app: &Arc<App>,
    request: &mut OpenAiRequest,
    salt: Option<String>,
) -> Result<Prompted, ApiError> {
    let bytes = request.messages.iter().flatten().chain(request.tools.iter().flatten()).map(text_bytes).sum();
    let mut chat = Chat::new(request)?;
    app.encode(bytes, move |app| {
        let text = chat.render(&app.model)?;
        app.model.check_length(&text, app.engine.info().context, "messages")?;
        app.model.encode_chat(&app.memory, salt.as_deref(), text)
    })
    .await
}

/// Text in a value, roughly.
fn text_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(text_bytes).sum(),
        Value::Object(fields) => fields.values().map(text_bytes).sum(),
        _ => 8,
    }
}
