//! The messages of a chat, and their rendering and encoding for a model.

use oscar_kernels::Backend;
use oscar_model::LoadedModel;
use oscar_model::text::{ChatTemplate, RenderedText, TextError};
use serde_json::{Value, json};

use crate::failure::Failure;

/// The messages of a chat.
#[derive(Clone, Debug)]
pub(crate) struct Conversation {
    system: Option<String>,
    messages: Vec<Value>,
}

impl Conversation {
    /// A chat without messages but the system message, if there is one.
    pub(crate) fn new(system: Option<&str>) -> Conversation {
        let mut conversation = Conversation { system: system.map(str::to_owned), messages: Vec::new() };
        conversation.reset();
        conversation
    }

    /// Removes all messages but the system message.
    pub(crate) fn reset(&mut self) {
        self.messages.clear();
        let system = self.system.as_ref().map(|text| json!({"role": "system", "content": text}));
        self.messages.extend(system);
    }

    /// Adds a message of the user.
    pub(crate) fn ask(&mut self, text: &str) {
        self.messages.push(json!({"role": "user", "content": text}));
    }

    /// Adds an answer of the model.
    pub(crate) fn answer(&mut self, text: &str) {
        self.messages.push(json!({"role": "assistant", "content": text}));
    }

    /// Removes the last message.
    pub(crate) fn take_back(&mut self) {
        self.messages.pop();
    }

    /// Renders the prompt of the next answer with the model's chat template.
    pub(crate) fn render<B: Backend>(&self, model: &LoadedModel<B>) -> Result<RenderedText, Failure> {
        required_template(model)?;
        model.render_chat(&self.messages).map_err(Failure::new)
    }

    /// The token ids of the prompt of the next answer.
    pub(crate) fn encode<B: Backend>(&self, model: &LoadedModel<B>) -> Result<Vec<u32>, Failure> {
        required_template(model)?;
        model.encode_chat(&self.messages).map_err(Failure::new)
    }
}

/// The chat template of a model, or a failure for commands that need one.
pub(crate) fn required_template<B: Backend>(model: &LoadedModel<B>) -> Result<&ChatTemplate, Failure> {
    model.chat_template().map_err(|error| {
        let fix = match error {
            TextError::NoChatTemplate => "use `oscar generate` without --chat, or a model made for chat",
            _ => "use `oscar generate` without --chat, or mend the template of the model",
        };
        Failure::new(error).with_fix(fix)
    })
}
