//! `/v1/chat/completions`: answers the last message of a chat.

mod answer;
mod message;
mod turn;
mod writer;

use std::sync::Arc;
use std::time::SystemTime;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use oscar_engine::{FinishReason, Summary};
use serde_json::json;

pub(crate) use self::answer::PartsAnswer;
use self::message::message_json;
pub(crate) use self::turn::{Turn, check_tools, render};
use self::writer::ChatWriter;
use super::collect::{FinishedChoice, collect};
use super::completions::matched;
use super::{finish_name, fresh_id};
use crate::http::JsonBody;
use crate::http::sse::stream;
use crate::parse::Message;
use crate::protocol::{ApiError, OpenAiRequest, RequestKind, SentNames, Usage};
use crate::routes::logprobs::{ChatLogprob, prompt_logprobs};
use crate::state::{AppState, unix_seconds};

/// `/v1/chat/completions`: answers the last message of a chat.
pub(crate) async fn chat_completions(
    State(app): State<Arc<AppState>>,
    JsonBody(mut request, memory): JsonBody<OpenAiRequest>,
) -> Result<Response, ApiError> {
    let id = fresh_id("chatcmpl-");
    let read = |app: &AppState| {
        request.leave_fields_of_completions();
        request.check_fields(RequestKind::Chat, &app.field_policy())?;
        let names = SentNames::of_chat(request.aliases());
        Ok((request, names, ()))
    };
    let (turn, mut answers, ()) = Turn::begin(&app, memory, &id, read).await?;
    if turn.streams {
        return Ok(stream(answers, ChatWriter::new(turn, &id)));
    }
    let whole = collect(&mut answers, 1, turn.choices, turn.wants_logprobs).await;
    let whole = whole.map_err(|error| turn.names.restore(error))?;
    let mut usage = Usage::default();
    let mut choices = Vec::with_capacity(whole.len());
    let listed = whole.first().filter(|_| turn.wants_prompt_logprobs);
    let listed = listed.map(|first| prompt_logprobs(app.model.tokenizer(), &first.summary.prompt_logprobs));
    for FinishedChoice { choice, tokens, summary, .. } in whole {
        usage.add(choice, &summary);
        turn.remember(&summary);
        let mut parser = turn.parser(choice);
        let mut message = Message::default();
        message.extend(parser.push(&summary.text));
        message.extend(parser.finish(is_cut_off(&summary)));
        let tokens = tokens.iter().filter(|token| !turn.end_tokens.contains(token.id));
        let list: Vec<ChatLogprob> =
            tokens.map(|token| ChatLogprob::new(app.model.tokenizer(), token)).collect();
        choices.push(json!({
            "index": choice,
            "finish_reason": chat_finish(summary.finish, !message.tool_calls.is_empty()),
            "message": message_json(&message),
            "logprobs": turn.wants_logprobs.then(|| json!({"content": list, "refusal": null})),
            "matched_stop": matched(&summary),
        }));
    }
    let mut body = json!({
        "id": id,
        "object": "chat.completion",
        "created": unix_seconds(SystemTime::now()),
        "model": app.model.name,
        "system_fingerprint": app.fingerprint,
        "choices": choices,
        "usage": usage,
    });
    if let Some(listed) = listed {
        body["prompt_logprobs"] = listed;
    }
    Ok(Json(body).into_response())
}

/// Whether the model had more to say.
pub(crate) fn is_cut_off(summary: &Summary) -> bool {
    !matches!(summary.finish, FinishReason::End | FinishReason::Stop)
}

/// The `finish_reason` of a chat's answer; `called` says whether it has tool calls.
fn chat_finish(finish: FinishReason, called: bool) -> &'static str {
    match finish {
        FinishReason::End | FinishReason::Stop if called => "tool_calls",
        finish => finish_name(finish),
    }
}
