//! Between what clients write and what the engine reads: prompts, chats, and how single tokens are shown.

mod call_forms;
mod chat;
mod memory;
mod roles;
mod served;
mod tokens;
mod tool_text;

pub(crate) use chat::Chat;
pub(crate) use memory::{ConversationMemory, RenderedPrompt};
pub use served::ServedModel;
pub(crate) use tokens::{bytes_of, shown};
