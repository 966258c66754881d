//! Who shares pages with whom.

use std::fmt;

/// How exactly the history of a sequence is kept. All tiers have the sink and the recent window in bf16, in one basis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tier {
    /// Sealed by the codec of the cache; bf16 in a cache without sealed pages.
    #[default]
    Sealed,
    /// Sealed by a codec of more bits with the same transforms, to pages of a pool of its own.
    High,
    /// History stays in bf16: pages are not sealed, unless the sequence is demoted.
    Exact,
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Tier::Sealed => "sealed",
            Tier::High => "high",
            Tier::Exact => "bf16",
        })
    }
}

/// What sequences must have in common to share pages, besides their tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PrefixKey {
    /// Keeps tenants apart; 0 for none.
    pub salt: u64,
    /// Rows depend on how the rows before them were read, so each tier has pages of its own.
    pub tier: Tier,
}

impl From<u64> for PrefixKey {
    /// The salt of sequences in the cache's own tier.
    fn from(salt: u64) -> PrefixKey {
        PrefixKey { salt, tier: Tier::Sealed }
    }
}
