//! The response object of `/v1/responses` and its output items, for streams and whole answers.

use std::time::SystemTime;

use oscar_engine::{FinishReason, Summary};
use serde_json::{Value, json};

use crate::http::KeptMemory;
use crate::parse::{MessageCall, Part};
use crate::protocol::{ApiError, ResponsesRequest, says_nothing, short, short_json};
use crate::routes::chat::PartsAnswer;
use crate::state::{AppState, unix_seconds};

/// The most bytes of JSON of what a response repeats besides the instructions, which are part of the prompt.
const MAX_REPEATED_BYTES: usize = 1 << 20;

/// The response object before the answer: it repeats the fields of the request.
pub(super) struct ResponseObject {
    /// The object as JSON, without the closing bracket and what becomes of the answer. A request may wait for long, and as
    /// values its tools would take many times the memory.
    repeated: String,
    /// The text with which the ids of its output items end.
    stem: String,
    _memory: KeptMemory,
}

impl ResponseObject {
    /// Makes the response object of a request.
    pub(super) fn new(
        app: &AppState,
        id: &str,
        request: &ResponsesRequest,
    ) -> Result<ResponseObject, ApiError> {
        short_json("tools", &request.tools, MAX_REPEATED_BYTES)?;
        short_json("tool_choice", &request.tool_choice, MAX_REPEATED_BYTES)?;
        let text = request.text.as_ref().map(|text| &text.0.format);
        short_json("text.format", &text, MAX_REPEATED_BYTES)?;
        let thinks = request.reasoning.as_ref().map(|reasoning| &reasoning.0.effort);
        short_json("reasoning.effort", &thinks, MAX_REPEATED_BYTES)?;
        let drawn = &app.model.sampling;
        let said = |value: &Option<Value>| value.clone().filter(|value| !says_nothing(value));
        let format = request.text.as_ref().and_then(|text| said(&text.0.format));
        let filled = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        let effort = request.reasoning.as_ref().and_then(|reasoning| filled(&reasoning.0.effort));
        let fields = json!({
            "id": id,
            "object": "response",
            "created_at": unix_seconds(SystemTime::now()),
            "background": false,
            "instructions": filled(&request.instructions),
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata.clone().unwrap_or_default(),
            "model": app.model.name,
            "parallel_tool_calls": request.parallel_tool_calls.unwrap_or(true),
            "previous_response_id": null,
            "reasoning": {"effort": effort, "summary": null},
            "store": false,
            "temperature": short(request.temperature.or(drawn.temperature).unwrap_or(1.0)),
            "text": {"format": format.unwrap_or_else(|| json!({"type": "text"}))},
            "tool_choice": said(&request.tool_choice).unwrap_or_else(|| "auto".into()),
            "tools": request.tools.clone().unwrap_or_default(),
            "top_p": short(request.top_p.or(drawn.top_p).unwrap_or(1.0)),
            "truncation": "disabled",
        });
        let mut repeated = fields.to_string();
        repeated.pop();
        repeated.shrink_to_fit();
        let memory = app.bodies.keep(repeated.len())?;
        Ok(ResponseObject { repeated, stem: id.trim_start_matches("resp_").to_owned(), _memory: memory })
    }

    /// The JSON of the response object, with what becomes of the answer.
    fn json(&self, answer: &Value) -> String {
        let answer = answer.to_string();
        [&self.repeated, ",", &answer[1..]].concat()
    }

    /// The response object with which a stream begins.
    pub(super) fn begun(&self) -> String {
        self.json(&json!({
            "status": "in_progress", "error": null, "incomplete_details": null, "output": [], "usage": null,
        }))
    }

    /// The response object when the answer has finished.
    pub(super) fn finished(&self, answer: &PartsAnswer, summary: &Summary) -> String {
        let parts = answer.parts().list();
        let last = parts.len().saturating_sub(1);
        let item = |(index, part)| {
            let status = if index == last { item_status(summary) } else { "completed" };
            self.item(index, part, status)
        };
        let (status, why) = status(summary);
        let mut usage = json!({
            "input_tokens": summary.prompt_tokens,
            "input_tokens_details": {"cached_tokens": summary.cached_tokens},
            "output_tokens": summary.tokens.len(),
            "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens()},
            "total_tokens": summary.prompt_tokens + summary.tokens.len(),
        });
        if summary.demoted_tokens > 0 {
            usage["kv_demoted_tokens"] = summary.demoted_tokens.into();
        }
        self.json(&json!({
            "status": status,
            "error": null,
            "incomplete_details": why.map(|reason| json!({"reason": reason})),
            "output": parts.iter().enumerate().map(item).collect::<Value>(),
            "usage": usage,
        }))
    }

    /// The response object of an answer that failed.
    pub(super) fn failed(&self, error: &ApiError) -> String {
        let code = error.code().unwrap_or("server_error");
        let error = json!({"code": code, "message": error.to_string()});
        self.json(&json!({
            "status": "failed", "error": error, "incomplete_details": null, "output": [], "usage": null,
        }))
    }

    /// The id of an output item.
    pub(super) fn item_id(&self, index: usize, part: &Part) -> String {
        let prefix = match part {
            Part::Reasoning(_) => "rs",
            Part::Text(_) => "msg",
            Part::Call(_) => "fc",
        };
        format!("{prefix}_{}_{index}", self.stem)
    }

    /// An output item with its content.
    pub(super) fn item(&self, index: usize, part: &Part, status: &str) -> Value {
        let mut item = self.empty_item(index, part);
        item["status"] = status.into();
        match part {
            Part::Reasoning(text) | Part::Text(text) => item["content"] = json!([content(part, text)]),
            Part::Call(MessageCall { arguments, .. }) => item["arguments"] = arguments.as_str().into(),
        }
        item
    }

    /// An output item with which a stream begins one, without content.
    pub(super) fn empty_item(&self, index: usize, part: &Part) -> Value {
        let (id, status) = (self.item_id(index, part), "in_progress");
        match part {
            Part::Reasoning(_) => {
                json!({"id": id, "type": "reasoning", "status": status, "summary": [], "content": []})
            }
            Part::Text(_) => {
                json!({"id": id, "type": "message", "status": status, "role": "assistant", "content": []})
            }
            Part::Call(MessageCall { id: call, name, .. }) => json!({"id": id, "type": "function_call",
                "status": status, "call_id": call, "name": name, "arguments": ""}),
        }
    }
}

/// The only content part of an output item, with this text.
pub(super) fn content(part: &Part, text: &str) -> Value {
    match part {
        Part::Reasoning(_) => json!({"type": "reasoning_text", "text": text}),
        _ => json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []}),
    }
}

/// The `status` of a response, and the reason if it is incomplete.
pub(super) fn status(summary: &Summary) -> (&'static str, Option<&'static str>) {
    match summary.finish {
        FinishReason::End | FinishReason::Stop => ("completed", None),
        FinishReason::Length | FinishReason::Context => ("incomplete", Some("max_output_tokens")),
        FinishReason::Cancelled => ("cancelled", None),
    }
}

/// The `status` of the last output item; those before it are complete.
pub(super) fn item_status(summary: &Summary) -> &'static str {
    if status(summary).0 == "completed" { "completed" } else { "incomplete" }
}
