//! Which ids conversations had, shared by all requests; why and how is told in [`RememberedText`].

use std::sync::{Mutex, MutexGuard, PoisonError};

use oscar_model::text::{RememberedText, TextError, Tokenizer};

/// Bytes of text and ids that are remembered.
const MAX_BYTES: usize = 64 << 20;

/// What was read and said, by tenant.
#[derive(Debug)]
pub(crate) struct ConversationMemory(Mutex<RememberedText>);

impl Default for ConversationMemory {
    fn default() -> Self {
        ConversationMemory(Mutex::new(RememberedText::new(MAX_BYTES)))
    }
}

impl ConversationMemory {
    /// The ids of a rendered prompt.
    pub(crate) fn encode(
        &self,
        tokenizer: &Tokenizer,
        salt: Option<&str>,
        text: String,
    ) -> Result<RenderedPrompt, TextError> {
        // Encoding takes long for long texts: nobody waits for it.
        let beginning = self.lock().beginning(&scope(salt), &text);
        let ids = beginning.encode(tokenizer, &text)?.ids;
        Ok(RenderedPrompt { text, ids })
    }

    /// Remembers a prompt and the tokens that were said.
    pub(crate) fn remember(
        &self,
        tokenizer: &Tokenizer,
        salt: Option<&str>,
        prompt: &RenderedPrompt,
        said: &[u32],
    ) {
        let kept = self.lock().remember(tokenizer, &scope(salt), &prompt.text, &prompt.ids, said);
        if let Err(error) = kept {
            tracing::debug!("a conversation is not remembered: {error}");
        }
    }

    /// Forgets everything.
    pub(crate) fn clear(&self) {
        self.lock().clear();
    }

    fn lock(&self) -> MutexGuard<'_, RememberedText> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Requests without a salt share with each other, and not with those of an empty one.
fn scope(salt: Option<&str>) -> String {
    salt.map_or(String::new(), |salt| format!("salt {salt}"))
}

/// A rendered prompt and its ids.
#[derive(Clone, Debug, Default)]
pub(crate) struct RenderedPrompt {
    pub(crate) text: String,
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
