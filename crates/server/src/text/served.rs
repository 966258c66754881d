//! What the server knows about its model: names, tokenizer, template.

use std::sync::{Arc, OnceLock};

use oscar_model::SamplingDefaults;
use oscar_model::text::{ChatTemplate, RenderedText, Tokenizer};

use super::call_forms::CallForm;
use super::{ConversationMemory, RenderedPrompt};
use crate::protocol::{ApiError, text_error};

/// The name by which clients that name no model in particular ask for it.
const DEFAULT_NAME: &str = "default";

/// The model that is served: its name, tokenizer, chat template and sampling defaults.
#[derive(Debug)]
pub struct ServedModel {
    /// The name that clients use, and that answers carry.
    pub name: String,
    /// Where the model came from, as the user named it. Clients may use this as its name, too.
    pub path: String,
    /// The `model_type` of its `config.json`, such as `qwen3`.
    pub family: String,
    /// The sampling parameters of requests that do not give their own.
    pub sampling: SamplingDefaults,
    tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
    /// The forms in which the template writes calls, without tools and with them.
    call_forms: [OnceLock<Option<CallForm>>; 2],
    /// The number of bytes of the longest token.
    longest_token: usize,
    bos: String,
    eos: String,
}

impl ServedModel {
    /// A model with its tokenizer and, where it has one, its chat template.
    pub fn new(
        name: impl Into<String>,
        path: impl Into<String>,
        family: impl Into<String>,
        tokenizer: Arc<Tokenizer>,
        template: Option<ChatTemplate>,
    ) -> ServedModel {
        let ids = 0..u32::try_from(tokenizer.vocab_size()).unwrap_or(u32::MAX);
        let longest = ids.filter_map(|id| tokenizer.token_bytes(id).ok()).map(<[u8]>::len).max();
        let text = |id: Option<u32>| id.and_then(|id| tokenizer.token_text(id).ok()).unwrap_or_default();
        let (bos, eos) = (text(tokenizer.bos_id()), text(tokenizer.eos_id()));
        ServedModel {
            name: name.into(),
            path: path.into(),
            family: family.into(),
            sampling: SamplingDefaults::default(),
            tokenizer,
            template,
            call_forms: Default::default(),
            longest_token: longest.unwrap_or(1).max(1),
            bos,
            eos,
        }
    }

    /// Sets the sampling parameters of requests that do not give their own.
    #[must_use]
    pub fn with_sampling(self, sampling: SamplingDefaults) -> ServedModel {
        ServedModel { sampling, ..self }
    }

    /// The tokenizer of the model.
    pub(crate) fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// The chat template of the model, or the error for clients that want to chat with one that has none.
    pub(crate) fn template(&self) -> Result<&ChatTemplate, ApiError> {
        let missing = || text_error("messages", &oscar_model::text::TextError::NoChatTemplate);
        self.template.as_ref().ok_or_else(missing)
    }

    /// The form in which the template writes calls of earlier messages, unless it leaves them out in all.
    pub(super) fn call_form(&self, with_tools: bool) -> Result<Option<CallForm>, ApiError> {
        let template = self.template()?;
        let find = || {
            let knows = template.mentions("tool_calls", with_tools);
            knows.then(|| CallForm::of(template, with_tools, &self.bos, &self.eos)).flatten()
        };
        Ok(*self.call_forms[usize::from(with_tools)].get_or_init(find))
    }

    /// The source of the chat template, for [`ToolCallFormat::choose`](crate::ToolCallFormat::choose) and its like.
    pub fn template_source(&self) -> Option<&str> {
        self.template.as_ref().map(ChatTemplate::source)
    }

    pub(crate) fn bos(&self) -> &str {
        &self.bos
    }

    pub(crate) fn eos(&self) -> &str {
        &self.eos
    }

    /// Refuses requests that name another model.
    pub(crate) fn check_name(&self, asked: Option<&str>) -> Result<(), ApiError> {
        match asked {
            None | Some("" | DEFAULT_NAME) => Ok(()),
            Some(asked) if asked == self.name || asked == self.path => Ok(()),
            Some(asked) => {
                let asked: String = asked.chars().take(120).collect();
                let message = format!("the model {asked:?} is not served here; {:?} is", self.name);
                let error = ApiError::new(axum::http::StatusCode::NOT_FOUND, message);
                Err(error.with_param("model").with_code("model_not_found"))
            }
        }
    }

    /// Refuses a text that is too long whatever its tokens are, without spending time on them.
    pub(crate) fn check_length(&self, text: &str, context: usize, param: &str) -> Result<(), ApiError> {
        if text.len() / self.longest_token > context {
            let message =
                format!("the prompt has {} bytes, more than {context} tokens can stand for", text.len());
            return Err(ApiError::bad_field(param, message).with_code("context_length_exceeded"));
        }
        Ok(())
    }

    /// The tokens of a raw prompt. Special tokens are meant where they are written, and a begin token is not doubled.
    pub(crate) fn encode(&self, text: &str, param: &str) -> Result<Vec<u32>, ApiError> {
        let begun = !self.bos.is_empty() && text.starts_with(&self.bos);
        let encoded = self.tokenizer.encode_with_special_tokens_parsed(text, !begun);
        encoded.map_err(|error| text_error(param, &error))
    }

    /// The tokens of a rendered chat. What `memory` knows of it gets the ids it had.
    pub(crate) fn encode_chat(
        &self,
        memory: &ConversationMemory,
        salt: Option<&str>,
        text: RenderedText,
    ) -> Result<RenderedPrompt, ApiError> {
        memory.encode(&self.tokenizer, salt, text).map_err(|error| text_error("messages", &error))
    }

    /// The text of tokens, special ones included.
    pub(crate) fn decode(&self, ids: &[u32], skip_special: bool, param: &str) -> Result<String, ApiError> {
        self.tokenizer.decode(ids, skip_special).map_err(|error| text_error(param, &error))
    }
}
