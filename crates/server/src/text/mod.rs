//! Between what clients write and what the engine reads: prompts, chats, and how single tokens are shown.

mod chat;
mod memory;
mod served;
mod tokens;

pub(crate) use chat::Chat;
pub(crate) use memory::{ConversationMemory, RenderedPrompt};
pub use served::ServedModel;
pub(crate) use tokens::{bytes_of, shown};
