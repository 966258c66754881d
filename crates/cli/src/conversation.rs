//! The messages of a chat and the tokens they become.

use oscar_model::ModelError;
use oscar_model::files::Gguf;
use oscar_model::source::ModelPath;
use oscar_model::text::{ChatTemplate, RenderOptions, TextError, Tokenizer};
use serde_json::{Value, json};

use crate::failure::Failure;

/// A chat so far.
#[derive(Clone, Debug)]
pub(crate) struct Conversation {
    system: Option<String>,
    messages: Vec<Value>,
}

impl Conversation {
    /// Nothing said yet.
    pub(crate) fn new(system: Option<&str>) -> Conversation {
        let mut conversation = Conversation { system: system.map(str::to_owned), messages: Vec::new() };
        conversation.reset();
        conversation
    }

    /// Forgets everything but the system message.
    pub(crate) fn reset(&mut self) {
        self.messages.clear();
        let system = self.system.as_ref().map(|text| json!({"role": "system", "content": text}));
        self.messages.extend(system);
    }

    /// The user says something.
    pub(crate) fn ask(&mut self, text: &str) {
        self.messages.push(json!({"role": "user", "content": text}));
    }

    /// The model has answered.
    pub(crate) fn answer(&mut self, text: &str) {
        self.messages.push(json!({"role": "assistant", "content": text}));
    }

    /// Takes back the last message.
    pub(crate) fn take_back(&mut self) {
        self.messages.pop();
    }

    /// The tokens the model reads before it answers.
    pub(crate) fn encode(&self, template: &ChatTemplate, tokenizer: &Tokenizer) -> Result<Vec<u32>, Failure> {
        let token_text = |id: Option<u32>| id.map(|id| tokenizer.token_text(id)).transpose();
        let bos_token = token_text(tokenizer.bos_id())?.unwrap_or_default();
        let eos_token = token_text(tokenizer.eos_id())?.unwrap_or_default();
        let options = RenderOptions {
            add_generation_prompt: true,
            bos_token: &bos_token,
            eos_token: &eos_token,
            ..RenderOptions::default()
        };
        let text = template.render(&self.messages, &options)?;
        Ok(tokenizer.encode_with_special_tokens_parsed(&text, false)?)
    }
}

/// The chat template among the files of a model, if there is one.
pub(crate) fn chat_template(path: &ModelPath) -> Result<Option<ChatTemplate>, Failure> {
    let found = match path {
        ModelPath::Gguf(file) => ChatTemplate::from_gguf(&Gguf::open(file).map_err(ModelError::from)?),
        ModelPath::Folder(folder) => ChatTemplate::from_folder(folder),
    };
    match found {
        Ok(template) => Ok(Some(template)),
        Err(TextError::NoChatTemplate) => Ok(None),
        Err(source) => Err(ModelError::Text { path: path.path().to_owned(), source }.into()),
    }
}

/// As [`chat_template`], for commands that cannot do without.
pub(crate) fn required_chat_template(path: &ModelPath) -> Result<ChatTemplate, Failure> {
    chat_template(path)?.ok_or_else(|| {
        Failure::new(format!("{}: the model has no chat template", path.path().display()))
            .with_fix("use `oscar generate` without --chat, or a model made for chat")
    })
}
