//! The token ids that a text had when the model saw or generated it, so that the next turn of a chat hits the prefix cache.
//!
//! A chat is rendered anew for every turn, and encoding what the model itself has said need not give the ids it said:
//! any spelling of a text decodes to it, and a model does not always choose the encoder's. Then the next turn shares no
//! more cached pages than up to its first such word. [`RememberedText`] keeps what was seen: the rendered prompt and
//! the answer with their ids. A text that begins with one of them gets those ids, and only the rest is encoded.
//!
//! Text is cut only where an answer ended, so the ids before the cut are exactly those in the cache. What follows is
//! encoded as it would be in the whole text: behind a special token, which nothing merges across, or else only if its
//! ids spell it out byte for byte. Where a template renders an earlier turn differently (dropped thinking, trimmed
//! space), what was remembered counts up to the last answer before that.

use super::{RenderedText, TextError, Tokenizer};

/// Bound on the chats that are remembered, because every prompt is compared with all of them.
const MOST_CONVERSATIONS: usize = 1024;

/// Bytes counted for a conversation besides its text and ids.
const ENTRY_BYTES: usize = 128;

/// Texts and the ids that the model saw or generated for them; the least recently used ones are forgotten first.
#[derive(Debug)]
pub struct RememberedText {
    conversations: Vec<RememberedChat>,
    most_bytes: usize,
    bytes: usize,
    clock: u64,
}

/// The token ids of a whole text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RememberedIds {
    /// The ids, remembered and encoded.
    pub ids: Vec<u32>,
    /// How many at the start are remembered, not encoded.
    pub remembered: usize,
}

/// The beginning of a text whose ids are remembered; empty if nothing is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RememberedPrefix {
    bytes: usize,
    ids: Vec<u32>,
}

impl RememberedPrefix {
    /// The ids of the whole text.
    pub fn encode(self, tokenizer: &Tokenizer, text: &RenderedText) -> Result<RememberedIds, TextError> {
        let RememberedPrefix { bytes, mut ids } = self;
        if bytes > 0
            && let Some(rest) = encode_rest(tokenizer, &ids, text, bytes)?
        {
            let remembered = ids.len();
            ids.extend(rest);
            return Ok(RememberedIds { ids, remembered });
        }
        Ok(RememberedIds { ids: tokenizer.encode_rendered(text)?, remembered: 0 })
    }
}

/// A rendered prompt and its answer, with their ids.
#[derive(Debug)]
struct RememberedChat {
    scope: String,
    text: RenderedText,
    ids: Vec<u32>,
    /// The places where answers ended, ascending.
    ends: Vec<CutPoint>,
    used: u64,
}

/// A place where text and ids may be cut, as an index into each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CutPoint {
    text: usize,
    ids: usize,
}

impl RememberedChat {
    fn bytes(&self) -> usize {
        let (ids, ends) = (size_of_val(&self.ids[..]), size_of_val(&self.ends[..]));
        self.scope.len() + self.text.bytes() + ids + ends + ENTRY_BYTES
    }

    /// The last place to cut that lies in what is common with `text`.
    fn last_end(&self, text: &RenderedText) -> Option<CutPoint> {
        let common = self.text.common_bytes(text);
        self.ends.iter().rfind(|end| end.text <= common).copied()
    }
}

impl RememberedText {
    /// Remembers up to `most_bytes` of text and ids.
    pub fn new(most_bytes: usize) -> RememberedText {
        RememberedText { conversations: Vec::new(), most_bytes, bytes: 0, clock: 0 }
    }

    /// Encodes a rendered prompt with the ids that were seen for the longest beginning of it
    /// that is remembered in `scope`. Scopes share nothing: what one user's model said must not change how another's
    /// text is read.
    pub fn encode(
        &mut self,
        tokenizer: &Tokenizer,
        scope: &str,
        text: &RenderedText,
    ) -> Result<RememberedIds, TextError> {
        self.remembered_prefix(scope, text).encode(tokenizer, text)
    }

    /// The remembered part of a text. Encoding the rest by [`RememberedPrefix::encode`] needs no access to what is
    /// remembered, so a lock on it can be released first.
    pub fn remembered_prefix(&mut self, scope: &str, text: &RenderedText) -> RememberedPrefix {
        let ends = self.conversations.iter().enumerate().filter(|(_, known)| known.scope == scope);
        let ends = ends.filter_map(|(index, known)| Some((known.last_end(text)?, index)));
        let Some((end, index)) = ends.max_by_key(|(end, index)| (end.text, *index)) else {
            return RememberedPrefix::default();
        };
        self.clock += 1;
        let known = &mut self.conversations[index];
        known.used = self.clock;
        RememberedPrefix { bytes: end.text, ids: known.ids[..end.ids].to_vec() }
    }

    /// Remembers that the model was given `prompt` as `prompt_ids` and said `answer_ids`, an ending token included.
    pub fn remember(
        &mut self,
        tokenizer: &Tokenizer,
        scope: &str,
        prompt: &RenderedText,
        prompt_ids: &[u32],
        answer_ids: &[u32],
    ) -> Result<(), TextError> {
        let ended = answer_ids.last().is_some_and(|&last| tokenizer.is_end(last));
        let said = &answer_ids[..answer_ids.len() - usize::from(ended)];
        // Half a character cannot be part of a prompt again.
        let Ok(answer) = String::from_utf8(spelling(tokenizer, said)?) else { return Ok(()) };
        if said.is_empty() {
            return Ok(());
        }
        let mut text = prompt.clone();
        text.push_str(&answer);
        let mut ids = [prompt_ids, said].concat();
        let mut ends = self.inherited(scope, prompt, prompt_ids);
        ends.push(CutPoint { text: text.as_str().len(), ids: ids.len() });
        // The template may end a turn with another token than the model does, so both sides of it count.
        if let Some(&last) = answer_ids.last().filter(|_| ended) {
            text.push_str(&tokenizer.token_text(last)?);
            ids.push(last);
            ends.push(CutPoint { text: text.as_str().len(), ids: ids.len() });
        }
        self.clock += 1;
        self.keep(RememberedChat { scope: scope.to_owned(), text, ids, ends, used: self.clock });
        Ok(())
    }

    /// Forgets all texts and their tokens.
    pub fn clear(&mut self) {
        self.conversations.clear();
        self.bytes = 0;
    }

    /// Bytes of text and ids that are remembered.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where earlier answers in a prompt ended: those that it got from here.
    fn inherited(&self, scope: &str, prompt: &RenderedText, ids: &[u32]) -> Vec<CutPoint> {
        let known = self.conversations.iter().filter(|known| known.scope == scope);
        let shared = |known: &RememberedChat| -> Vec<CutPoint> {
            let common = known.text.common_bytes(prompt);
            let ends = known.ends.iter().copied();
            ends.filter(|end| end.text <= common && ids.get(..end.ids) == known.ids.get(..end.ids)).collect()
        };
        known.map(shared).max_by_key(Vec::len).unwrap_or_default()
    }

    fn keep(&mut self, new: RememberedChat) {
        if new.bytes() > self.most_bytes {
            return;
        }
        // A conversation that goes on needs its earlier state no more.
        let continued = |known: &RememberedChat| {
            known.scope == new.scope
                && new.ids.starts_with(&known.ids)
                && new.text.common_bytes(&known.text) == known.text.as_str().len()
        };
        self.conversations.retain(|known| !continued(known));
        self.conversations.push(new);
        self.bytes = self.conversations.iter().map(RememberedChat::bytes).sum();
        while self.bytes > self.most_bytes || self.conversations.len() > MOST_CONVERSATIONS {
            let oldest = self.conversations.iter().enumerate().min_by_key(|(_, known)| known.used);
            let Some((oldest, _)) = oldest else { break };
            self.bytes -= self.conversations.swap_remove(oldest).bytes();
        }
    }
}

/// The ids of what follows `bytes` after ids that the model has seen; `None` if they would not be those of the same text.
fn encode_rest(
    tokenizer: &Tokenizer,
    seen: &[u32],
    text: &RenderedText,
    bytes: usize,
) -> Result<Option<Vec<u32>>, TextError> {
    let rest = &text.as_str()[bytes..];
    if rest.is_empty() {
        return Ok(Some(Vec::new()));
    }
    let encode = |before: &str| tokenizer.encode_rendered(&text.rest(bytes, before));
    match seen.last() {
        // Some encoders treat the start of a text in their own way, so the token before is encoded with it.
        Some(&last) if tokenizer.is_special(last) => {
            let mut ids = encode(&tokenizer.token_text(last)?)?;
            Ok((ids.first() == Some(&last)).then(|| ids.split_off(1)))
        }
        _ => {
            let ids = encode("")?;
            let begins_special = ids.first().is_some_and(|&first| tokenizer.is_special(first));
            let same = begins_special || spelling(tokenizer, &ids)? == rest.as_bytes();
            Ok(same.then_some(ids))
        }
    }
}

/// The bytes that ids stand for.
fn spelling(tokenizer: &Tokenizer, ids: &[u32]) -> Result<Vec<u8>, TextError> {
    let mut bytes = Vec::with_capacity(ids.len() * 4);
    for &id in ids {
        bytes.extend_from_slice(tokenizer.token_bytes(id)?);
    }
    Ok(bytes)
}
