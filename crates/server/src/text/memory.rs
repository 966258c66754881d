//! The token ids of recent conversations, shared by all requests; [`RememberedText`] says why they are kept.

use std::sync::{Mutex, MutexGuard, PoisonError};

use oscar_model::text::{RememberedText, RenderedText, TextError, Tokenizer};

/// The most bytes of text and ids that are remembered.
const MAX_BYTES: usize = 64 << 20;

/// Remembers which token ids the text of a conversation had, apart for each cache salt.
#[derive(Debug)]
pub(crate) struct ConversationMemory(Option<Mutex<RememberedText>>);

impl ConversationMemory {
    /// A memory, or one that remembers nothing: then a prompt has the ids of its text, whatever was said before.
    pub(crate) fn new(remembers: bool) -> ConversationMemory {
        ConversationMemory(remembers.then(|| Mutex::new(RememberedText::new(MAX_BYTES))))
    }

    /// Tokenizes a rendered prompt. What is remembered of it gets the ids it had.
    pub(crate) fn encode(
        &self,
        tokenizer: &Tokenizer,
        salt: Option<&str>,
        text: RenderedText,
    ) -> Result<RenderedPrompt, TextError> {
        // Encoding takes long for long texts: nobody waits for it.
        let beginning = self.lock().map(|mut memory| memory.remembered_prefix(&scope(salt), &text));
        let ids = beginning.unwrap_or_default().encode(tokenizer, &text)?.ids;
        Ok(RenderedPrompt { text, ids })
    }

    /// Remembers a prompt and the tokens that were generated for it.
    pub(crate) fn remember(
        &self,
        tokenizer: &Tokenizer,
        salt: Option<&str>,
        prompt: &RenderedPrompt,
        said: &[u32],
    ) {
        let Some(mut memory) = self.lock() else { return };
        let kept = memory.remember(tokenizer, &scope(salt), &prompt.text, &prompt.ids, said);
        if let Err(error) = kept {
            tracing::debug!("a conversation is not remembered: {error}");
        }
    }

    /// Forgets all conversations.
    pub(crate) fn clear(&self) {
        if let Some(mut memory) = self.lock() {
            memory.clear();
        }
    }

    fn lock(&self) -> Option<MutexGuard<'_, RememberedText>> {
        Some(self.0.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Requests without a salt share with each other, and not with those of an empty one.
fn scope(salt: Option<&str>) -> String {
    salt.map_or(String::new(), |salt| format!("salt {salt}"))
}

/// A prompt as the chat template rendered it, and its token ids.
#[derive(Clone, Debug, Default)]
pub(crate) struct RenderedPrompt {
    pub(crate) text: RenderedText,
    pub(crate) ids: Vec<u32>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenants_have_scopes_of_their_own() {
        let scopes = [scope(None), scope(Some("")), scope(Some("a")), scope(Some("b"))];
        for (index, one) in scopes.iter().enumerate() {
            assert!(scopes[index + 1..].iter().all(|other| other != one), "{one}");
        }
    }
}
