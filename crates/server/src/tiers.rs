//! The precisions that histories may have on this server, and what sequences hold in each.

use oscar_engine::{EngineInfo, EngineStats, Tier};

/// A precision of history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OfferedTier<'a> {
    /// What `kv_precision` calls it.
    pub(crate) name: &'a str,
    pub(crate) tier: Tier,
    /// Tokens that a sequence may have.
    pub(crate) context: usize,
}

/// What the sequences with one precision of history hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TierUse {
    pub(crate) sequences: usize,
    pub(crate) exact_pages: usize,
    pub(crate) sealed_pages: usize,
}

/// The precisions that requests may ask for, the one they have otherwise first.
pub(crate) fn offered(info: &EngineInfo) -> impl Iterator<Item = OfferedTier<'_>> {
    let own = OfferedTier { name: &info.kv, tier: Tier::Sealed, context: info.context };
    let high = info.high_context.map(|context| OfferedTier { name: "high", tier: Tier::High, context });
    let bf16 = info.bf16_context.map(|context| OfferedTier { name: "bf16", tier: Tier::Exact, context });
    std::iter::once(own).chain(high).chain(bf16)
}

/// What the sequences of a tier hold. A page of two sequences counts twice.
pub(crate) fn tier_use(stats: &EngineStats, tier: Tier) -> TierUse {
    let mut total = TierUse::default();
    for sequence in stats.sequences.iter().filter(|sequence| sequence.tier == tier) {
        total.sequences += 1;
        total.exact_pages += sequence.exact_pages;
        total.sealed_pages += sequence.sealed_pages;
    }
    total
}
