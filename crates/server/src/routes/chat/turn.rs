//! One turn of a conversation, whatever interface it came by: from a request to the engine, and how the answer is read.

use std::sync::Arc;

use oscar_engine::{FinishReason, GenerateOptions, MatchedStop, Summary};
use serde_json::Value;

use crate::http::{BodyMemory, KeptMemory};
use crate::parse::{
    HarmonyParser, OutputParser, ReasoningParser, Tool, ToolCallParser, needs_special_tokens,
};
use crate::protocol::{AnswerFormat, ApiError, OpenAiRequest, SentNames, json_bytes, short_json};
use crate::requests::{AnswerStream, PromptRequest, request_id};
use crate::routes::constrain::{asked_form, token_filter};
use crate::routes::logprobs::EndTokens;
use crate::state::AppState;
use crate::text::{Chat, RenderedPrompt};

/// The most bytes of all tools of a request as JSON: they are kept while it is answered, also what no template writes.
const MAX_TOOLS_BYTES: usize = 1 << 20;

/// About as much as values of JSON take for each byte of it.
const VALUE_BYTES_PER_BYTE: usize = 16;

/// What all answers (choices) to one chat request share.
pub(crate) struct Turn {
    pub(crate) app: Arc<AppState>,
    /// What the client called the fields of its request.
    pub(crate) names: Arc<SentNames>,
    /// Whether the answer is streamed, and whether a stream ends with its usage.
    pub(crate) streams: bool,
    pub(super) includes_usage: bool,
    rendered: RenderedPrompt,
    salt: Option<String>,
    pub(super) end_tokens: EndTokens,
    pub(super) wants_logprobs: bool,
    pub(super) wants_prompt_logprobs: bool,
    /// The number of answers, `n` of the request.
    pub(super) choices: usize,
    /// The tools that the model may call, as far as they are needed to read its answer, and the memory that they take.
    tools: Arc<[Tool]>,
    _memory: KeptMemory,
    /// Whether it must call one.
    forced: bool,
    /// The text with which the ids of tool calls begin, behind `call_`.
    id_stem: String,
    separate_reasoning: bool,
}

/// What is left of a request when it has been read.
struct Prepared {
    rid: Option<String>,
    streams: bool,
    includes_usage: bool,
    rendered: RenderedPrompt,
    options: GenerateOptions,
    /// What the answer must look like, if there is something to keep to, and the text behind which that begins.
    format: Option<AnswerFormat>,
    after: Option<&'static str>,
    tools: Vec<Tool>,
    memory: KeptMemory,
    forced: bool,
    separate_reasoning: bool,
}

impl Turn {
    /// Reads a request, hands it to the engine, and says what its answers are to be read with. `read` translates it, and
    /// may put something aside. `id` names the request in the answer, and its calls are named after it.
    ///
    /// When this returns, nothing is left of the body but what became a prompt.
    pub(crate) async fn begin<E: Send + 'static>(
        app: &Arc<AppState>,
        memory: BodyMemory,
        id: &str,
        read: impl FnOnce(&AppState) -> Result<(OpenAiRequest, SentNames, E), ApiError> + Send + 'static,
    ) -> Result<(Turn, AnswerStream, E), ApiError> {
        let work = move |app: &AppState| {
            let (request, names, aside) = read(app)?;
            match Prepared::new(app, request) {
                Ok(prepared) => Ok((prepared, names, aside)),
                Err(error) => Err(names.restore(error)),
            }
        };
        let ((prepared, names, aside), memory) = app.encode_body(memory, work).await?;
        let names = Arc::new(names);
        let begun = Turn::submit(app, id, prepared, &names).await;
        let (turn, answers) = begun.map_err(|error| names.restore(error))?;
        drop(memory);
        Ok((turn, answers, aside))
    }

    async fn submit(
        app: &Arc<AppState>,
        id: &str,
        prepared: Prepared,
        names: &Arc<SentNames>,
    ) -> Result<(Turn, AnswerStream), ApiError> {
        let Prepared { rid, rendered, options, format, after, tools, .. } = prepared;
        let filter = token_filter(app, format, 1, after).await?;
        let turn = Turn {
            names: Arc::clone(names),
            streams: prepared.streams,
            includes_usage: prepared.includes_usage,
            end_tokens: EndTokens::new(app.model.tokenizer(), &options),
            salt: options.cache_salt.clone(),
            wants_logprobs: options.logprobs.is_some(),
            wants_prompt_logprobs: options.prompt_logprobs.is_some(),
            choices: options.n,
            tools: tools.into(),
            _memory: prepared.memory,
            forced: prepared.forced,
            id_stem: id.chars().skip_while(char::is_ascii_lowercase).skip(1).take(16).collect(),
            separate_reasoning: prepared.separate_reasoning,
            rendered,
            app: Arc::clone(app),
        };
        let id = request_id(rid.as_deref(), id)?;
        let asked = PromptRequest { id, prompt: turn.rendered.ids.clone(), options, filter };
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
        let calls = calls
            .map(|format| ToolCallParser::new(format, Arc::clone(&self.tools), stem()).forced(self.forced));
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

impl Prepared {
    fn new(app: &AppState, mut request: OpenAiRequest) -> Result<Prepared, ApiError> {
        app.model.check_name(request.model.as_deref())?;
        let logprobs = request.chat_logprobs()?;
        let new_text = !request.continue_final_message.unwrap_or(false);
        let sampling_fields = request.sampling_fields(None)?.options(&app.model.sampling)?;
        let prompt_logprobs = request.prompt_logprobs()?;
        let options = GenerateOptions { logprobs, prompt_logprobs, new_text, ..sampling_fields };
        let mut options = request.precision().apply(app.engine.info(), options)?;
        check_tools(&request)?;
        let format = request.answer_format()?;
        let tools = if format.wants_calls() { tools_to_read(app, &format.tools) } else { Vec::new() };
        let bytes = tools.iter().map(|tool| json_bytes(&tool.parameters, usize::MAX).unwrap_or(0));
        let memory = app.bodies.keep(bytes.sum::<usize>().saturating_mul(VALUE_BYTES_PER_BYTE))?;
        let separate_reasoning = request.separates_reasoning();
        // Messages in channels cannot be read without their markers, whether or not reasoning is told apart.
        let reasoning_markers =
            app.options.reasoning_parser.filter(|format| separate_reasoning || format.harmony);
        let tool_markers = app.options.tool_call_parser.filter(|_| !tools.is_empty());
        if needs_special_tokens(app.model.tokenizer(), reasoning_markers, tool_markers) {
            options.keep_special = true;
        }
        let rendered = render(app, &mut request, options.cache_salt.as_deref())?;
        // What a thinking model must keep to begins after its thoughts. Where control tokens end them, which grammars do not
        // have, the answer is all there is.
        let thinks = app
            .options
            .reasoning_parser
            .filter(|format| !format.harmony && format.starts_in_reasoning(rendered.text.as_str()));
        Ok(Prepared {
            streams: request.streams(),
            includes_usage: request.includes_usage(),
            rid: request.rid,
            rendered,
            options,
            forced: format.forces_calls(),
            format: asked_form(app, format)?,
            after: thinks.map(|format| format.markers.1),
            tools,
            memory,
            separate_reasoning,
        })
    }
}

/// What must be known of tools to read calls of them. Only arguments in tags are not JSON by themselves, and have the
/// types that their schema says.
fn tools_to_read(app: &AppState, tools: &[Tool]) -> Vec<Tool> {
    let typed = app.options.tool_call_parser.is_some_and(|format| !format.is_json() && !format.is_harmony());
    let read = |tool: &Tool| {
        let parameters = if typed { tool.parameters.clone() } else { Value::Null };
        Tool { name: tool.name.clone(), parameters, strict: tool.strict }
    };
    tools.iter().map(read).collect()
}

/// Refuses tools that are too long together, before they are copied.
pub(crate) fn check_tools(request: &OpenAiRequest) -> Result<(), ApiError> {
    request.tools.as_ref().map_or(Ok(()), |tools| short_json("tools", tools, MAX_TOOLS_BYTES))
}

/// Renders the chat of a request and tokenizes it. For chats of any length, this is work for [`AppState::encode_body`].
pub(crate) fn render(
    app: &AppState,
    request: &mut OpenAiRequest,
    salt: Option<&str>,
) -> Result<RenderedPrompt, ApiError> {
    let text = Chat::new(request)?.render(&app.model, &app.options)?;
    app.model.check_length(text.as_str(), app.engine.info().context, "messages")?;
    app.model.encode_chat(&app.memory, salt, text)
}
