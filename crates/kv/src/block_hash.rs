//! The hash that names a full page: over its tokens and everything before them.
//!
//! SHA-256 of the parent's whole digest followed by the tokens as little-endian `u32`. Routers that follow the cache
//! of their workers chain the same way, so the top eight bytes can be published as they are.

use sha2::{Digest, Sha256};

use crate::key::{PrefixKey, Tier};

/// A hash of 64 tokens, their position and all tokens before them.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockHash([u8; 32]);

impl BlockHash {
    /// What the first page of a sequence is chained to. Sequences of different keys share nothing; salt 0 and the
    /// cache's own tier add nothing to the hash.
    pub fn root(key: impl Into<PrefixKey>) -> Option<BlockHash> {
        let PrefixKey { salt, tier } = key.into();
        let mut name = Vec::new();
        if salt != 0 {
            name.extend(salt.to_le_bytes());
        }
        match tier {
            Tier::Sealed => {}
            Tier::High => name.extend(b"high"),
            Tier::Exact => name.extend(b"bf16"),
        }
        (!name.is_empty()).then(|| BlockHash(Sha256::digest(&name).into()))
    }

    /// The hash of the page with `tokens` after `parent`.
    pub fn chain(parent: Option<BlockHash>, tokens: &[u32]) -> BlockHash {
        let mut hasher = Sha256::new();
        if let Some(parent) = parent {
            hasher.update(parent.0);
        }
        let mut bytes = [0; 4 * crate::PAGE_TOKENS];
        for tokens in tokens.chunks(crate::PAGE_TOKENS) {
            for (bytes, token) in bytes.chunks_exact_mut(4).zip(tokens) {
                bytes.copy_from_slice(&token.to_le_bytes());
            }
            hasher.update(&bytes[..4 * tokens.len()]);
        }
        BlockHash(hasher.finalize().into())
    }

    /// The number under which cache events name this page.
    pub fn event_id(&self) -> i64 {
        let mut top = [0; 8];
        top.copy_from_slice(&self.0[..8]);
        i64::from_be_bytes(top)
    }
}

impl std::fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:016x}", self.event_id())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_names_tokens_position_salt_and_tier() {
        let page: Vec<u32> = (0..64).collect();
        let first = BlockHash::chain(BlockHash::root(0), &page);
        let again = BlockHash::chain(BlockHash::root(0), &page);
        let second = BlockHash::chain(Some(first), &page);
        let salted = BlockHash::chain(BlockHash::root(7), &page);
        assert_eq!(first, again);
        assert!(first != second && first != salted && second != salted);
        assert_ne!(BlockHash::chain(BlockHash::root(8), &page), salted);
        let of = |salt, tier| BlockHash::chain(BlockHash::root(PrefixKey { salt, tier }), &page);
        let (exact, high) = (|salt| of(salt, Tier::Exact), |salt| of(salt, Tier::High));
        assert!(exact(0) != first && exact(7) != salted && exact(0) != exact(7));
        assert!(high(0) != first && high(7) != salted && high(0) != high(7) && high(0) != exact(0));
    }

    /// SHA-256 of the bytes of `00000000 01000000` and of that digest followed by `02000000`.
    #[test]
    fn the_chain_is_plain_sha_256() {
        let first = BlockHash::chain(None, &[0, 1]);
        let digest: [u8; 32] = Sha256::digest([0, 0, 0, 0, 1, 0, 0, 0]).into();
        assert_eq!(first.0, digest);
        assert_eq!(first.event_id(), i64::from_be_bytes(digest[..8].try_into().unwrap()));
        let mut bytes = digest.to_vec();
        bytes.extend([2, 0, 0, 0]);
        let digest: [u8; 32] = Sha256::digest(&bytes).into();
        assert_eq!(BlockHash::chain(Some(first), &[2]).0, digest);
    }
}
