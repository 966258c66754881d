//! The message object of `/v1/messages`, and the parts of it that streams use too.

use oscar_engine::{FinishReason, MatchedStop, Summary};
use serde_json::{Map, Value, json};

use crate::parse::{MessageCall, Part};
use crate::routes::chat::{PartsAnswer, is_cut_off};

/// The message when the answer has finished.
pub(super) fn whole_message(id: &str, answer: &PartsAnswer, summary: &Summary) -> Value {
    // A call that was cut off has no arguments that could be trusted.
    let whole = |part: &&Part| match part {
        Part::Call(call) => !is_cut_off(summary) || arguments(call).is_some(),
        Part::Reasoning(_) | Part::Text(_) => true,
    };
    let blocks: Vec<Value> = answer.parts().list().iter().filter(whole).map(whole_block).collect();
    let (reason, sequence) = stopped(summary, answer.parts().has_calls());
    let mut message = empty_message(id, &answer.turn().app.model.name);
    message["content"] = blocks.into();
    message["stop_reason"] = reason.into();
    message["stop_sequence"] = sequence.into();
    message["usage"] = usage(answer, summary);
    message
}

/// The message with which a stream begins.
pub(super) fn empty_message(id: &str, model: &str) -> Value {
    json!({
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": null,
        "stop_sequence": null,
        "usage": null,
    })
}

/// A content block with which a stream begins one: all of its fields, without text.
pub(super) fn empty_block(part: &Part) -> Value {
    match part {
        // Thoughts are signed where their text is kept from changing; here it is just text.
        Part::Reasoning(_) => json!({"type": "thinking", "thinking": "", "signature": ""}),
        Part::Text(_) => json!({"type": "text", "text": ""}),
        Part::Call(MessageCall { id, name, .. }) => {
            json!({"type": "tool_use", "id": id, "name": name, "input": {}})
        }
    }
}

fn whole_block(part: &Part) -> Value {
    let mut block = empty_block(part);
    match part {
        Part::Reasoning(text) => block["thinking"] = text.as_str().into(),
        Part::Text(text) => block["text"] = text.as_str().into(),
        Part::Call(call) => block["input"] = input(call),
    }
    block
}

/// The arguments of a tool call as a JSON object, which is empty for arguments that are none.
fn input(call: &MessageCall) -> Value {
    arguments(call).unwrap_or_default().into()
}

fn arguments(call: &MessageCall) -> Option<Map<String, Value>> {
    serde_json::from_str(&call.arguments).ok()
}

/// The `stop_reason` and `stop_sequence` of an answer; `called` says whether it has tool calls.
pub(super) fn stopped(summary: &Summary, called: bool) -> (&'static str, Option<&str>) {
    match (summary.finish, &summary.matched) {
        (FinishReason::Stop, Some(MatchedStop::Text(text))) => ("stop_sequence", Some(text)),
        (FinishReason::End | FinishReason::Stop, _) if called => ("tool_use", None),
        (FinishReason::End | FinishReason::Stop, _) => ("end_turn", None),
        (FinishReason::Length, _) => ("max_tokens", None),
        (FinishReason::Context, _) => ("model_context_window_exceeded", None),
        (FinishReason::Cancelled, _) => ("abort", None),
    }
}

/// The `usage` of an answer. Prompt tokens from the prefix cache are counted apart.
pub(super) fn usage(answer: &PartsAnswer, summary: &Summary) -> Value {
    let mut usage = prompt_usage(summary.prompt_tokens, summary.cached_tokens);
    usage["output_tokens"] = summary.tokens.len().into();
    usage["output_tokens_details"] = json!({"thinking_tokens": answer.reasoning_tokens()});
    if summary.demoted_tokens > 0 {
        usage["kv_demoted_tokens"] = summary.demoted_tokens.into();
    }
    usage
}

/// The `usage` before the first token of an answer.
pub(super) fn prompt_usage(tokens: usize, cached: usize) -> Value {
    json!({
        "input_tokens": tokens.saturating_sub(cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_an_object_whatever_was_written() {
        let call =
            |arguments: &str| MessageCall { arguments: arguments.to_owned(), ..MessageCall::default() };
        assert_eq!(input(&call("{\"a\": [1]}")), json!({"a": [1]}));
        for bad in ["", "{\"a\": [1", "[1]", "3"] {
            assert_eq!(input(&call(bad)), json!({}), "{bad}");
        }
    }
}
