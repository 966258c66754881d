//! Chat templates: a conversation in, the prompt text a model was trained on out.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use serde_json::{Map, Value};

use super::TextError;
use super::control::{ControlTokens, RenderedText};
use super::literals::join_continued;
use super::marked::MarkedLiterals;
use super::render::{self, RenderJob};
use super::tokenizer_json::{read_bounded, read_json};
use crate::files::gguf::Gguf;

/// The longest published template has about 30 KB.
const MAX_TEMPLATE_BYTES: usize = 256 << 10;

/// The template library counts columns in 16 bits, and overflows when it reports an error in the last one.
const MAX_LINE_BYTES: usize = u16::MAX as usize - 1;

/// A Jinja chat template, and the variant for conversations with tools where a model has one.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    default: Arc<str>,
    tool_use: Option<Arc<str>>,
}

/// What a template sees besides the messages.
#[derive(Debug, Clone, Copy, Default)]
pub struct RenderOptions<'a> {
    /// Tool definitions in JSON schema form.
    pub tools: Option<&'a [Value]>,
    /// End the text where the assistant's answer begins.
    pub add_generation_prompt: bool,
    /// Text of the begin token, `""` where there is none.
    pub bos_token: &'a str,
    /// Text of the end token.
    pub eos_token: &'a str,
    /// More variables, such as `enable_thinking`; they win over the ones above.
    pub extra: Option<&'a Map<String, Value>>,
    /// The clock of `strftime_now`; the system's when absent.
    pub now: Option<SystemTime>,
}

impl ChatTemplate {
    /// Takes a template and checks that it compiles.
    pub fn from_source(source: &str) -> Result<Self, TextError> {
        Ok(Self { default: prepare(source)?, tool_use: None })
    }

    /// Adds the variant used when tools are given.
    pub fn with_tool_use(mut self, source: &str) -> Result<Self, TextError> {
        self.tool_use = Some(prepare(source)?);
        Ok(self)
    }

    /// Takes the template of a GGUF file.
    pub fn from_gguf(file: &Gguf) -> Result<Self, TextError> {
        let metadata = file.metadata();
        let source: &str = metadata.get("tokenizer.chat_template")?.ok_or(TextError::NoChatTemplate)?;
        let template = Self::from_source(source)?;
        match metadata.get::<&str>("tokenizer.chat_template.tool_use")? {
            Some(source) => template.with_tool_use(source),
            None => Ok(template),
        }
    }

    /// Finds the template of a model folder: `chat_template.jinja`, `chat_template.json`, or the
    /// `chat_template` of `tokenizer_config.json`, which is a string or a list of named templates.
    pub fn from_folder(folder: impl AsRef<Path>) -> Result<Self, TextError> {
        let folder = folder.as_ref();
        let jinja = folder.join("chat_template.jinja");
        if jinja.exists() {
            let bytes = read_bounded(&jinja, MAX_TEMPLATE_BYTES as u64)?;
            let source = String::from_utf8(bytes)
                .map_err(|error| TextError::File { path: jinja, reason: error.to_string() })?;
            return Self::from_source(&source);
        }
        for name in ["chat_template.json", "tokenizer_config.json"] {
            let path = folder.join(name);
            if let Some(value) = read_json(&path)?.and_then(|config| config.get("chat_template").cloned()) {
                return Self::from_json(&value)
                    .map_err(|reason| TextError::File { path, reason })
                    .and_then(|template| template);
            }
        }
        Err(TextError::NoChatTemplate)
    }

    /// The outer error is about the shape of the field, the inner one about the template.
    fn from_json(value: &Value) -> Result<Result<Self, TextError>, String> {
        if let Some(source) = value.as_str() {
            return Ok(Self::from_source(source));
        }
        let list = value.as_array().ok_or("field `chat_template` must be a string or a list")?;
        let named = |name: &str| {
            list.iter()
                .find(|entry| entry.get("name").and_then(Value::as_str) == Some(name))
                .and_then(|entry| entry.get("template")?.as_str())
        };
        let default = named("default").ok_or("field `chat_template` has no template named `default`")?;
        Ok(Self::from_source(default).and_then(|template| match named("tool_use") {
            Some(source) => template.with_tool_use(source),
            None => Ok(template),
        }))
    }

    /// Whether the template for conversations, with tools or without, contains a word, such as a variable that it would
    /// have to read.
    pub fn mentions(&self, word: &str, with_tools: bool) -> bool {
        self.chosen(with_tools).contains(word)
    }

    fn chosen(&self, with_tools: bool) -> &Arc<str> {
        self.tool_use.as_ref().filter(|_| with_tools).unwrap_or(&self.default)
    }

    /// Renders a conversation. Messages are JSON objects with `role` and `content`, passed to the template as
    /// they are, so content parts, tool calls and reasoning reach it unchanged.
    pub fn render(&self, messages: &[Value], options: &RenderOptions<'_>) -> Result<String, TextError> {
        self.render_marked(messages, options, None)
    }

    /// Renders a conversation in which control tokens are text where a message or a tool contains them, and tokens
    /// where the template or `extra` of the options writes them. The template sees its messages as they are.
    pub fn render_literally(
        &self,
        messages: &[Value],
        options: &RenderOptions<'_>,
        control: &Arc<ControlTokens>,
    ) -> Result<RenderedText, TextError> {
        let tools = options.tools.unwrap_or_default();
        if !messages.iter().chain(tools).any(|value| control.occur_in(value)) {
            return self.render(messages, options).map(RenderedText::from);
        }
        let literals = MarkedLiterals::new(Arc::clone(control));
        let text = self.render_marked(messages, options, Some(literals.clone()))?;
        Ok(literals.read(&text))
    }

    fn render_marked(
        &self,
        messages: &[Value],
        options: &RenderOptions<'_>,
        literals: Option<MarkedLiterals>,
    ) -> Result<String, TextError> {
        let meant =
            |value: minijinja::Value| literals.iter().fold(value, |value, literals| literals.mark(&value));
        let source = self.chosen(options.tools.is_some());
        let to_template = minijinja::Value::from_serialize::<&Value>;
        let mut variables = BTreeMap::new();
        variables.insert("messages".to_owned(), minijinja::Value::from_serialize(messages));
        variables.insert("tools".to_owned(), minijinja::Value::from_serialize(options.tools));
        variables.insert("documents".to_owned(), minijinja::Value::from(()));
        variables.insert("add_generation_prompt".to_owned(), options.add_generation_prompt.into());
        for (name, text) in [("bos_token", options.bos_token), ("eos_token", options.eos_token)] {
            variables.insert(name.to_owned(), meant(text.into()));
        }
        for (name, value) in options.extra.into_iter().flatten() {
            variables.insert(name.clone(), meant(to_template(value)));
        }
        let tools = options.tools.unwrap_or_default();
        let input_bytes = messages.iter().chain(tools).map(json_bytes).sum();
        render::render(RenderJob {
            source: Arc::clone(source),
            variables,
            input_bytes,
            items: messages.len() + tools.len(),
            now: options.now.unwrap_or_else(SystemTime::now),
            literals,
        })
    }

    /// The template as it is rendered.
    pub fn source(&self) -> &str {
        &self.default
    }
}

/// Text in a JSON value, roughly.
fn json_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len() + 2,
        Value::Array(items) => items.iter().map(json_bytes).sum::<usize>() + 2,
        Value::Object(entries) => {
            entries.iter().map(|(key, value)| key.len() + 4 + json_bytes(value)).sum::<usize>() + 2
        }
        _ => 8,
    }
}

fn prepare(source: &str) -> Result<Arc<str>, TextError> {
    if source.len() > MAX_TEMPLATE_BYTES {
        return Err(TextError::TemplateLimit {
            line: 0,
            reason: format!("{} bytes, the limit is {MAX_TEMPLATE_BYTES}", source.len()),
        });
    }
    let source = neutralise_generation_tags(&join_continued(source));
    if let Some(index) = source.split('\n').position(|line| line.len() > MAX_LINE_BYTES) {
        return Err(TextError::TemplateLimit {
            line: index + 1,
            reason: format!("more than {MAX_LINE_BYTES} bytes in one line"),
        });
    }
    render::check(&source)?;
    Ok(Arc::from(source))
}

/// `{% generation %}` marks the assistant's words for training and prints its body unchanged; an `if` that is
/// always true does the same here and leaves line numbers and white-space control alone.
fn neutralise_generation_tags(source: &str) -> String {
    if !source.contains("generation") {
        return source.to_owned();
    }
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start + 2);
        // Behind the opening, or `{%}` would close itself.
        let Some(length) = tag.find("%}") else { break };
        let inside = &tag[..length];
        let word =
            inside.trim_matches(|character: char| character.is_whitespace() || "-+".contains(character));
        let replacement = match word {
            "generation" => Some("if true"),
            "endgeneration" => Some("endif"),
            _ => None,
        };
        out.push_str(before);
        match replacement {
            Some(replacement) => out.push_str(&inside.replacen(word, replacement, 1)),
            None => out.push_str(inside),
        }
        out.push_str("%}");
        rest = &tag[length + 2..];
    }
    out.push_str(rest);
    out
}
