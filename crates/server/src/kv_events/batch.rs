//! Changes of the tree as SGLang's subscribers read them: a msgpack array `[time, events, rank]`, where an event is an
//! array that begins with its name.

use oscar_kv::{BlockHash, CacheEvent, PAGE_TOKENS};
use serde::Serialize;

const STORED: &str = "BlockStored";
const REMOVED: &str = "BlockRemoved";
const CLEARED: &str = "AllBlocksCleared";

/// The data-parallel rank of all events: there is only one.
const RANK: u32 = 0;

#[derive(Serialize)]
#[serde(untagged)]
enum Entry<'a> {
    /// The event's name, page hashes, hash of the page before, token ids, tokens of a page, and LoRA id.
    Stored(&'static str, Vec<i64>, Option<i64>, &'a [u32], usize, Option<i64>),
    Removed(&'static str, Vec<i64>),
    Cleared([&'static str; 1]),
}

impl<'a> From<&'a CacheEvent> for Entry<'a> {
    fn from(event: &'a CacheEvent) -> Entry<'a> {
        let ids = |blocks: &[BlockHash]| blocks.iter().map(BlockHash::event_id).collect();
        match event {
            CacheEvent::Stored { parent, blocks, tokens } => {
                let parent = parent.as_ref().map(BlockHash::event_id);
                Entry::Stored(STORED, ids(blocks), parent, tokens, PAGE_TOKENS, None)
            }
            CacheEvent::Removed { blocks } => Entry::Removed(REMOVED, ids(blocks)),
            CacheEvent::Cleared => Entry::Cleared([CLEARED]),
        }
    }
}

/// Encodes events that the engine sent together as one batch.
pub(super) fn encode(seconds: f64, events: &[CacheEvent]) -> Result<Vec<u8>, rmp_serde::encode::Error> {
    let events: Vec<Entry<'_>> = events.iter().map(Entry::from).collect();
    rmp_serde::to_vec(&(seconds, events, RANK))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Byte for byte what msgpack has for these arrays.
    #[test]
    fn a_batch_is_an_array_of_arrays() {
        let hash = BlockHash::chain(None, &[1]);
        let events = [
            CacheEvent::Cleared,
            CacheEvent::Stored { parent: None, blocks: vec![hash], tokens: vec![5, 300] },
            CacheEvent::Removed { blocks: vec![hash] },
        ];
        let mut id = vec![if hash.event_id() < 0 { 0xd3 } else { 0xcf }];
        id.extend(hash.event_id().to_be_bytes());
        let mut expected = vec![0x93, 0xcb];
        expected.extend(1.5f64.to_be_bytes());
        expected.push(0x93);
        expected.extend([0x91, 0xb0]);
        expected.extend(b"AllBlocksCleared");
        expected.extend([0x96, 0xab]);
        expected.extend(b"BlockStored");
        expected.push(0x91);
        expected.extend(&id);
        expected.extend([0xc0, 0x92, 5, 0xcd, 1, 44, 64, 0xc0]);
        expected.extend([0x92, 0xac]);
        expected.extend(b"BlockRemoved");
        expected.push(0x91);
        expected.extend(&id);
        expected.push(0);
        assert_eq!(encode(1.5, &events).unwrap(), expected);
    }
}
