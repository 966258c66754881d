//! Which ids a text had. The ids a model draws are often not those its text encodes to, so an answer that is sent back
//! in the next turn would miss the pages it left in the cache. What was read and said is therefore remembered with the
//! ids that were really used, and a text that begins with it gets them again.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

/// Conversations that are remembered, and bytes of all of them.
const MAX_ENTRIES: usize = 512;
const MAX_BYTES: usize = 64 << 20;

/// Texts and their ids, the latest used last.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    entries: Mutex<Entries>,
}

#[derive(Debug, Default)]
struct Entries {
    list: VecDeque<Arc<Entry>>,
    bytes: usize,
}

/// A prompt and its answer.
#[derive(Debug)]
struct Entry {
    salt: Option<String>,
    text: String,
    ids: Vec<u32>,
    /// Bytes and ids of the prompt alone, for templates that drop parts of earlier answers.
    prompt_bytes: usize,
    prompt_ids: usize,
}

impl Entry {
    fn bytes(&self) -> usize {
        self.text.len() + self.ids.len() * size_of::<u32>() + self.salt.as_ref().map_or(0, String::len)
    }

    /// How much of `text` this entry knows: bytes, ids.
    fn known(&self, text: &str) -> Option<(usize, usize)> {
        if text.starts_with(&self.text) {
            return Some((self.text.len(), self.ids.len()));
        }
        let prompt = &self.text[..self.prompt_bytes];
        text.starts_with(prompt).then_some((self.prompt_bytes, self.prompt_ids))
    }
}

impl Memory {
    /// The longest beginning of `text` that is remembered: its bytes and its ids. `may_cut` says whether the text may
    /// be cut between two parts.
    pub(crate) fn beginning(
        &self,
        salt: Option<&str>,
        text: &str,
        may_cut: impl Fn(&str, &str) -> bool,
    ) -> Option<(usize, Vec<u32>)> {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let known = entries.list.iter().enumerate().filter(|(_, entry)| entry.salt.as_deref() == salt);
        let known = known.filter_map(|(index, entry)| Some((entry.known(text)?, index)));
        let cuttable = known.filter(|((bytes, _), _)| may_cut(&text[..*bytes], &text[*bytes..]));
        let ((bytes, ids), index) = cuttable.max_by_key(|((bytes, _), _)| *bytes)?;
        let entry = entries.list.remove(index)?;
        let ids = entry.ids[..ids].to_vec();
        entries.list.push_back(entry);
        Some((bytes, ids))
    }

    /// Remembers a prompt and what was said. Texts of the tokens must be `prompt` and `answer`.
    pub(crate) fn remember(&self, salt: Option<&str>, prompt: &Prompted, answer: &str, said: &[u32]) {
        let entry = Entry {
            salt: salt.map(str::to_owned),
            text: [&prompt.text, answer].concat(),
            ids: [&prompt.ids, said].concat(),
            prompt_bytes: prompt.text.len(),
            prompt_ids: prompt.ids.len(),
        };
        if entry.bytes() > MAX_BYTES / 4 {
            return;
        }
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        // The turn before is the beginning of this one and will not be asked for again, unless its end is elsewhere.
        let before = |old: &Arc<Entry>| old.salt == entry.salt && entry.text.starts_with(&old.text);
        if let Some(index) = entries.list.iter().position(before)
            && let Some(old) = entries.list.remove(index)
        {
            entries.bytes -= old.bytes();
        }
        entries.bytes += entry.bytes();
        entries.list.push_back(Arc::new(entry));
        while entries.list.len() > MAX_ENTRIES || entries.bytes > MAX_BYTES {
            let Some(old) = entries.list.pop_front() else { break };
            entries.bytes -= old.bytes();
        }
    }

    /// Forgets everything.
    pub(crate) fn clear(&self) {
        *self.entries.lock().unwrap_or_else(PoisonError::into_inner) = Entries::default();
    }
}

/// A rendered prompt and its ids.
#[derive(Clone, Debug, Default)]
pub(crate) struct Prompted {
    pub(crate) text: String,
    pub(crate) ids: Vec<u32>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompted(text: &str, ids: &[u32]) -> Prompted {
        Prompted { text: text.to_owned(), ids: ids.to_vec() }
    }

    fn anywhere(_: &str, _: &str) -> bool {
        true
    }

    #[test]
    fn the_longest_beginning_wins() {
        let memory = Memory::default();
        memory.remember(None, &prompted("Q1A:", &[1, 2]), "yes", &[7]);
        memory.remember(None, &prompted("Q1A:yesQ2A:", &[1, 2, 7, 3]), "no", &[8, 9]);
        let (bytes, ids) = memory.beginning(None, "Q1A:yesQ2A:noQ3", anywhere).unwrap();
        assert_eq!((bytes, ids), (13, vec![1, 2, 7, 3, 8, 9]));
        let (bytes, ids) = memory.beginning(None, "Q1A:yesQ2A:maybe", anywhere).unwrap();
        assert_eq!((bytes, ids), (11, vec![1, 2, 7, 3]), "the prompt alone is known too");
        assert_eq!(memory.beginning(None, "something else", anywhere), None);
    }

    #[test]
    fn texts_are_cut_only_where_they_may_be() {
        let memory = Memory::default();
        memory.remember(None, &prompted("Q", &[1]), "yes", &[7]);
        let special = |_: &str, rest: &str| rest.is_empty() || rest.starts_with('<');
        assert_eq!(memory.beginning(None, "Qyes<end>", special), Some((4, vec![1, 7])));
        assert_eq!(memory.beginning(None, "Qyesterday", special), None);
    }

    #[test]
    fn tenants_do_not_share() {
        let memory = Memory::default();
        memory.remember(Some("a"), &prompted("Q", &[1]), "yes", &[7]);
        assert_eq!(memory.beginning(None, "Qyes", anywhere), None);
        assert_eq!(memory.beginning(Some("b"), "Qyes", anywhere), None);
        assert!(memory.beginning(Some("a"), "Qyes", anywhere).is_some());
    }

    #[test]
    fn memory_is_bounded_and_forgets_the_oldest() {
        let memory = Memory::default();
        for number in 0..MAX_ENTRIES + 10 {
            memory.remember(None, &prompted(&format!("{number:06}"), &[1]), "!", &[2]);
        }
        assert_eq!(memory.entries.lock().unwrap().list.len(), MAX_ENTRIES);
        assert_eq!(memory.beginning(None, "000009!", anywhere), None);
        assert!(memory.beginning(None, "000010!", anywhere).is_some());
        memory.remember(None, &prompted(&"x".repeat(MAX_BYTES), &[1]), "!", &[2]);
        assert!(memory.entries.lock().unwrap().bytes <= MAX_BYTES);
        memory.clear();
        assert_eq!(memory.beginning(None, "000010!", anywhere), None);
    }
}
