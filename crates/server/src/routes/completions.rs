//! `/v1/completions`: continues plain text.

use std::collections::{HashMap, HashSet};
use std::fmt::Write;
use std::sync::Arc;
use std::time::SystemTime;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bytes::{BufMut, Bytes, BytesMut};
use oscar_engine::{EngineError, Event, GenerateOptions, MatchedStop, PromptLogprob, Summary, Token};
use serde::Serialize;
use serde_json::{Value, json};

use super::collect::{FinishedChoice, collect};
use super::{chunk_head, finish_name, fresh_id};
use crate::http::JsonBody;
use crate::http::sse::{EventWriter, stream, write_done, write_event, write_json};
use crate::protocol::{AnswerFormat, ApiError, OpenAiRequest, Prompt, RequestKind, SentNames, Usage};
use crate::requests::{AnswerStream, PromptEvent, PromptRequest, request_id};
use crate::routes::constrain::{asked_form, token_filter};
use crate::routes::logprobs::{
    CompletionLogprobs, CompletionTokens, EndTokens, prompt_logprobs as list_prompt,
};
use crate::state::{AppState, unix_seconds};

/// The most tokens of an answer when the client gives no limit, as OpenAI has it.
const DEFAULT_MAX_TOKENS: u64 = 16;

/// The token ids of a prompt, and the text it is echoed as if it is.
pub(super) struct Prepared {
    pub(super) ids: Vec<u32>,
    pub(super) echo: Option<String>,
}

/// What is left of a request when it has been read.
struct Asked {
    prompts: Vec<Prepared>,
    options: GenerateOptions,
    format: Option<AnswerFormat>,
    rid: Arc<str>,
    streams: bool,
    includes_usage: bool,
    echo: bool,
    /// Whether the probabilities of the prompt are listed apart from the answer.
    lists_prompt: bool,
}

impl Asked {
    /// Reads a request, whose own id is `id`. For bodies of any size, this is work for [`AppState::encode_body`].
    fn read(app: &AppState, mut request: OpenAiRequest, id: &str) -> Result<Asked, ApiError> {
        app.model.check_name(request.model.as_deref())?;
        let echo = request.echo.unwrap_or(false);
        let logprobs = request.completion_logprobs()?;
        let sampling_fields = request.sampling_fields(Some(DEFAULT_MAX_TOKENS))?;
        let listed = request.prompt_logprobs()?;
        let echoed = logprobs.filter(|_| echo);
        if listed.is_some() && echoed.is_some() && listed != echoed {
            let message = "prompt_logprobs must be logprobs where the prompt is echoed";
            return Err(ApiError::bad_field("prompt_logprobs", message));
        }
        let prompt_logprobs = listed.or(echoed);
        let options =
            GenerateOptions { logprobs, prompt_logprobs, ..sampling_fields.options(&app.model.sampling)? };
        let options = request.precision().apply(app.engine.info(), options)?;
        let prompts = request.prompt.as_ref().map_or(1, Prompt::count);
        app.check_batch(prompts, "prompt")?;
        let rid = request_id(request.rid.as_deref(), id)?;
        let format = asked_form(app, request.answer_format()?)?;
        Ok(Asked {
            prompts: prepare(app, request.prompt.take(), echo)?,
            options,
            format,
            rid,
            streams: request.streams(),
            includes_usage: request.includes_usage(),
            echo,
            lists_prompt: listed.is_some(),
        })
    }
}

/// `/v1/completions`: continues one prompt or several.
pub(crate) async fn completions(
    State(app): State<Arc<AppState>>,
    JsonBody(mut request, memory): JsonBody<OpenAiRequest>,
) -> Result<Response, ApiError> {
    let id = fresh_id("cmpl-");
    let own = id.clone();
    let read = move |app: &AppState| {
        request.leave_fields_of_chats();
        request.check_fields(RequestKind::Completions, &app.field_policy())?;
        let names = SentNames::of_completions(request.aliases());
        match Asked::read(app, request, &own) {
            Ok(asked) => Ok((asked, names)),
            Err(error) => Err(names.restore(error)),
        }
    };
    let ((asked, names), memory) = app.encode_body(memory, read).await?;
    let Asked { prompts: prepared, options, format, rid, streams, includes_usage, echo, lists_prompt } =
        asked;
    let logprobs = options.logprobs;
    let filter = token_filter(&app, format, prepared.len(), None).await?;
    let mut echoes = Vec::with_capacity(prepared.len());
    let mut asked = Vec::with_capacity(prepared.len());
    for Prepared { ids, echo } in prepared {
        let filter = filter.as_ref().map(|filter| filter.fork());
        echoes.push(echo);
        asked.push(PromptRequest { id: Arc::clone(&rid), prompt: ids, options: options.clone(), filter });
    }
    let mut answers = AnswerStream::submit(&app, asked).map_err(|error| names.restore(error))?;
    drop(memory);
    let end_tokens = EndTokens::new(app.model.tokenizer(), &options);
    if streams {
        let writer = CompletionWriter {
            head: chunk_head(&app, &id, "text_completion"),
            include_usage: includes_usage,
            usage: Usage::default(),
            echoes,
            n: options.n,
            tokens: HashMap::new(),
            begun: HashSet::new(),
            wants_logprobs: logprobs.is_some(),
            end_tokens,
            names,
            app,
        };
        return Ok(stream(answers, writer));
    }
    let whole = collect(&mut answers, echoes.len(), options.n, logprobs.is_some()).await;
    let whole = whole.map_err(|error| names.restore(error))?;
    let mut usage = Usage::default();
    let mut choices = Vec::with_capacity(whole.len());
    for FinishedChoice { prompt, choice, tokens, summary } in whole {
        usage.add(choice, &summary);
        let list = logprobs.map(|_| {
            let mut list = CompletionTokens::new(app.model.tokenizer());
            if echo {
                list.prompt(&summary.prompt_logprobs);
            }
            // Whoever has the prompt echoed counts: harnesses ask for one token and cut it off, also when it is the end.
            let with_end = echoes[prompt].is_some();
            let listed = tokens.iter().filter(|token| with_end || !end_tokens.contains(token.id));
            listed.for_each(|token| list.token(token));
            list.take()
        });
        let text = match &echoes[prompt] {
            Some(echo) => [echo, summary.text.as_str()].concat(),
            None => summary.text.clone(),
        };
        let mut choice = json!({
            "index": prompt * options.n + choice,
            "text": text,
            "logprobs": list,
            "finish_reason": finish_name(summary.finish),
            "matched_stop": matched(&summary),
        });
        if lists_prompt {
            choice["prompt_logprobs"] = list_prompt(app.model.tokenizer(), &summary.prompt_logprobs);
        }
        choices.push(choice);
    }
    Ok(Json(json!({
        "id": id,
        "object": "text_completion",
        "created": unix_seconds(SystemTime::now()),
        "model": app.model.name,
        "system_fingerprint": app.fingerprint,
        "choices": choices,
        "usage": usage,
    }))
    .into_response())
}

/// `matched_stop`: the token or text that ended an answer.
pub(crate) fn matched(summary: &Summary) -> Value {
    match &summary.matched {
        None => Value::Null,
        Some(MatchedStop::Token(id)) => (*id).into(),
        Some(MatchedStop::Text(text)) => text.as_str().into(),
    }
}

/// Tokenizes the prompts of a request, and keeps their text if it is to be `echo`ed.
pub(super) fn prepare(app: &AppState, prompt: Option<Prompt>, echo: bool) -> Result<Vec<Prepared>, ApiError> {
    let prompt = prompt.ok_or_else(|| ApiError::bad_field("prompt", "there is no prompt"))?;
    let mut left = app.options.body_bytes;
    let mut from_ids = |ids| Prepared::from_ids(app, ids, echo.then_some(&mut left));
    let prepared = match prompt {
        Prompt::Text(text) => vec![Prepared::from_text(app, text, echo)?],
        Prompt::Texts(texts) => {
            let prepared = texts.into_iter().map(|text| Prepared::from_text(app, text, echo));
            prepared.collect::<Result<_, _>>()?
        }
        Prompt::Ids(ids) => vec![from_ids(ids)?],
        Prompt::IdLists(lists) => lists.into_iter().map(from_ids).collect::<Result<_, _>>()?,
    };
    if prepared.is_empty() {
        return Err(ApiError::bad_field("prompt", "the list of prompts is empty"));
    }
    Ok(prepared)
}

impl Prepared {
    fn from_text(app: &AppState, text: String, echo: bool) -> Result<Prepared, ApiError> {
        app.model.check_length(&text, app.engine.info().context, "prompt")?;
        Ok(Prepared { ids: app.model.encode(&text, "prompt")?, echo: echo.then_some(text) })
    }

    /// With `left`, the text of the tokens is wanted, and all prompts of the request may have so many bytes more.
    fn from_ids(app: &AppState, ids: Vec<u32>, left: Option<&mut usize>) -> Result<Prepared, ApiError> {
        let context = app.engine.info().context;
        if ids.len() > context {
            return Err(EngineError::PromptTooLong { tokens: ids.len(), context }.into());
        }
        let Some(left) = left else { return Ok(Prepared { ids, echo: None }) };
        let text = app.model.decode(&ids, false, "prompt")?;
        *left = left.checked_sub(text.len()).ok_or_else(|| {
            let most = app.options.body_bytes;
            ApiError::bad_field("prompt", format!("the tokens of prompt have more than {most} bytes of text"))
        })?;
        Ok(Prepared { ids, echo: Some(text) })
    }
}

/// Writes the chunks of a streamed completion.
struct CompletionWriter {
    app: Arc<AppState>,
    head: Bytes,
    include_usage: bool,
    usage: Usage,
    echoes: Vec<Option<String>>,
    n: usize,
    tokens: HashMap<usize, CompletionTokens>,
    /// The choices whose prompt has been echoed.
    begun: HashSet<usize>,
    wants_logprobs: bool,
    end_tokens: EndTokens,
    names: SentNames,
}

impl CompletionWriter {
    /// The text to echo, if the prompt of a choice has not been echoed.
    fn echo(&mut self, prompt: usize, index: usize) -> Option<String> {
        let echo = self.echoes[prompt].as_ref()?;
        self.begun.insert(index).then(|| echo.clone())
    }

    /// Writes the prompt with its logprobs as the first chunk of every choice.
    fn scored(&mut self, prompt: usize, scored: &[PromptLogprob], out: &mut BytesMut) {
        for index in prompt * self.n..(prompt + 1) * self.n {
            let Some(echo) = self.echo(prompt, index) else { continue };
            let mut tokens = CompletionTokens::new(self.app.model.tokenizer());
            tokens.prompt(scored);
            let list = tokens.take();
            self.tokens.insert(index, tokens);
            self.chunk(index, &echo, Some(&list), None, out);
        }
    }

    fn token(&mut self, prompt: usize, choice: usize, token: &Token, out: &mut BytesMut) {
        let index = prompt * self.n + choice;
        let list = (self.wants_logprobs && !self.end_tokens.contains(token.id)).then(|| {
            let tokenizer = self.app.model.tokenizer();
            let tokens = self.tokens.entry(index).or_insert_with(|| CompletionTokens::new(tokenizer));
            tokens.token(token);
            tokens.take()
        });
        match self.echo(prompt, index) {
            Some(echo) => self.chunk(index, &[&echo, token.text.as_str()].concat(), list.as_ref(), None, out),
            None if token.text.is_empty() && list.is_none() => {}
            None => self.chunk(index, &token.text, list.as_ref(), None, out),
        }
    }

    fn chunk(
        &self,
        index: usize,
        text: &str,
        logprobs: Option<&CompletionLogprobs>,
        finished: Option<&Summary>,
        out: &mut BytesMut,
    ) {
        out.put_slice(&self.head);
        let _ = write!(out, "{{\"index\":{index},\"text\":");
        write_json(out, text);
        match logprobs {
            Some(list) => {
                out.put_slice(b",\"logprobs\":");
                write_json(out, list);
            }
            None => out.put_slice(b",\"logprobs\":null"),
        }
        match finished {
            Some(summary) => {
                let _ =
                    write!(out, ",\"finish_reason\":\"{}\",\"matched_stop\":", finish_name(summary.finish));
                write_json(out, &matched(summary));
            }
            None => out.put_slice(b",\"finish_reason\":null"),
        }
        self.close(out, None::<&Usage>);
    }

    /// Ends the list of choices and the chunk.
    fn close(&self, out: &mut BytesMut, usage: Option<&impl Serialize>) {
        out.put_slice(if usage.is_some() { b"]" } else { b"}]" });
        if self.include_usage {
            out.put_slice(b",\"usage\":");
            write_json(out, &usage);
        }
        out.put_slice(b"}\n\n");
    }
}

impl EventWriter for CompletionWriter {
    fn event(&mut self, delivered: PromptEvent, out: &mut BytesMut) {
        let prompt = delivered.prompt;
        match delivered.event {
            Event::Token { choice, token } => self.token(prompt, choice, &token, out),
            Event::Finished { choice, summary } => {
                self.usage.add(choice, &summary);
                let index = prompt * self.n + choice;
                let echo = self.echo(prompt, index).unwrap_or_default();
                self.chunk(index, &echo, None, Some(&summary), out);
            }
            Event::Failed { error, .. } => write_event(out, &self.names.restore((&*error).into()).body()),
            Event::Scored { prompt: list } => self.scored(prompt, &list, out),
            Event::Prefill { .. } => {}
        }
    }

    fn end(&mut self, out: &mut BytesMut) {
        if self.include_usage {
            out.put_slice(&self.head);
            self.close(out, Some(&self.usage));
        }
        write_done(out);
    }
}
