//! One turn of a conversation, whatever interface it came by: from a request to the engine, and how the answer is read.

use std::sync::Arc;

use oscar_engine::{FinishReason, GenerateOptions, MatchedStop, Summary};
use serde_json::Value;

use crate::parse::{
    HarmonyParser, OutputParser, ReasoningParser, Tool, ToolCallParser, needs_special_tokens,
};
use crate::protocol::{ApiError, OpenAiRequest};
use crate::requests::{AnswerStream, PromptRequest};
use crate::routes::constrain::token_filter;
use crate::routes::logprobs::EndTokens;
use crate::state::AppState;
use crate::text::{Chat, RenderedPrompt};

/// What all answers (choices) to one chat request share.
pub(crate) struct Turn {
    pub(crate) app: Arc<AppState>,
    rendered: RenderedPrompt,
    salt: Option<String>,
    pub(super) end_tokens: EndTokens,
    pub(super) wants_logprobs: bool,
    pub(super) wants_prompt_logprobs: bool,
    /// The number of answers, `n` of the request.
    pub(super) choices: usize,
    /// The tools that the model may call.
    tools: Arc<[Tool]>,
    /// The text with which the ids of tool calls begin, behind `call_`.
    id_stem: String,
    separate_reasoning: bool,
}

impl Turn {
    /// Renders a conversation, hands it to the engine, and says what its answers are to be read with. `id` names it in
    /// the answer, and its calls are named after it.
    pub(crate) async fn begin(
        app: &Arc<AppState>,
        request: &mut OpenAiRequest,
        id: &str,
    ) -> Result<(Turn, AnswerStream), ApiError> {
        app.model.check_name(request.model.as_deref())?;
        let logprobs = request.chat_logprobs()?;
        let new_text = !request.continue_final_message.unwrap_or(false);
        let sampling_fields = request.sampling_fields(None)?.options(&app.model.sampling)?;
        let prompt_logprobs = request.prompt_logprobs()?;
        let options = GenerateOptions { logprobs, prompt_logprobs, new_text, ..sampling_fields };
        let mut options = request.precision().apply(app.engine.info(), options)?;
        let format = request.answer_format()?;
        let tools = if format.wants_calls() { format.tools.clone() } else { Vec::new() };
        let separate_reasoning = request.separate_reasoning.unwrap_or(true);
        // Messages in channels cannot be read without their markers, whether or not reasoning is told apart.
        let reasoning_markers =
            app.options.reasoning_parser.filter(|format| separate_reasoning || format.harmony);
        let tool_markers = app.options.tool_call_parser.filter(|_| !tools.is_empty());
        if needs_special_tokens(app.model.tokenizer(), reasoning_markers, tool_markers) {
            options.keep_special = true;
        }
        let salt = options.cache_salt.clone();
        let rendered = prepare(app, request, salt.clone()).await?;
        // What a thinking model must keep to begins after its thoughts. Where control tokens end them, which grammars do not
        // have, the answer is all there is.
        let thinks = app
            .options
            .reasoning_parser
            .filter(|format| !format.harmony && format.starts_in_reasoning(rendered.text.as_str()));
        let filter = token_filter(app, format, thinks.map(|format| format.markers.1)).await?;
        let turn = Turn {
            end_tokens: EndTokens::new(app.model.tokenizer(), &options),
            salt,
            wants_logprobs: logprobs.is_some(),
            wants_prompt_logprobs: prompt_logprobs.is_some(),
            choices: options.n,
            tools: tools.into(),
            id_stem: id.chars().skip_while(char::is_ascii_lowercase).skip(1).take(16).collect(),
            separate_reasoning,
            rendered,
            app: Arc::clone(app),
        };
        let asked = PromptRequest {
            id: request.rid.clone().unwrap_or_else(|| id.to_owned()),
            prompt: turn.rendered.ids.clone(),
            options,
            filter,
        };
        Ok((turn, AnswerStream::submit(app, vec![asked])?))
    }

    /// A parser for one of the answers.
    pub(crate) fn parser(&self, choice: usize) -> OutputParser {
        let options = &self.app.options;
        let calls = options.tool_call_parser.filter(|_| !self.tools.is_empty());
        let stem = || format!("{}_{choice}_", self.id_stem);
        let separates = options.reasoning_parser.filter(|format| format.harmony);
        if separates.is_some() || calls.is_some_and(|format| format.is_harmony()) {
            let separates = separates.is_some() && self.separate_reasoning;
            return OutputParser::harmony(HarmonyParser::new(separates, calls.map(|_| stem())));
        }
        let reasoning = options.reasoning_parser.filter(|_| self.separate_reasoning).map(|format| {
            let inside = format.starts_in_reasoning(self.rendered.text.as_str());
            ReasoningParser::new(format, inside, calls.map_or(&[], |calls| calls.openers))
        });
        let calls = calls.map(|format| ToolCallParser::new(format, Arc::clone(&self.tools), stem()));
        OutputParser::new(reasoning, calls)
    }

    /// Remembers the token ids of the conversation, for its next turn.
    pub(crate) fn remember(&self, summary: &Summary) {
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
        self.app.memory.remember(tokenizer, self.salt.as_deref(), &self.rendered, said);
    }
}

/// Renders the chat of a request and tokenizes it.
pub(crate) async fn prepare(
    app: &Arc<AppState>,
    request: &mut OpenAiRequest,
    salt: Option<String>,
) -> Result<RenderedPrompt, ApiError> {
    let bytes = request.messages.iter().flatten().chain(request.tools.iter().flatten()).map(text_bytes).sum();
    let mut chat = Chat::new(request)?;
    app.encode(bytes, move |app| {
        let text = chat.render(&app.model, &app.options)?;
        app.model.check_length(text.as_str(), app.engine.info().context, "messages")?;
        app.model.encode_chat(&app.memory, salt.as_deref(), text)
    })
    .await
}

/// Roughly the bytes of text in a value.
fn text_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(text_bytes).sum(),
        Value::Object(fields) => fields.values().map(text_bytes).sum(),
        _ => 8,
    }
}
