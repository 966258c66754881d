//! What the prefix tree keeps of a text, for those who look and do not compute.

use oscar_codec::PAGE_TOKENS;

use crate::key::PrefixKey;
use crate::ledger::Ledger;

/// How the prefix tree keeps a full page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeptPage {
    /// The page is kept in bf16 only.
    Exact,
    /// The page is kept sealed only.
    Sealed,
    /// The page is kept sealed, and its bf16 copy for the next turn.
    Warm,
}

/// What the prefix tree keeps of a text, by [`Ledger::kept`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeptPrefix {
    /// The full pages at the start of the text, without a gap.
    pub pages: Vec<KeptPage>,
    /// Tokens of the partly filled page after them.
    pub tail_tokens: usize,
}

impl Ledger {
    /// What the prefix tree keeps of `tokens`. A look is no use: it keeps nothing from being evicted and counts as no hit.
    pub fn kept(&self, key: impl Into<PrefixKey>, tokens: &[u32]) -> KeptPrefix {
        let key = key.into();
        let found = self.tree.find(key, tokens, usize::MAX);
        let pages: Vec<KeptPage> = found
            .nodes
            .iter()
            .map(|&node| match self.tree.slots(node) {
                (Some(_), Some(_)) => KeptPage::Warm,
                (None, Some(_)) => KeptPage::Sealed,
                (_, None) => KeptPage::Exact,
            })
            .collect();
        let rest = &tokens[pages.len() * PAGE_TOKENS..];
        let rest = &rest[..rest.len().min(PAGE_TOKENS)];
        let tail_tokens = self.tree.find_tail(key, &found.nodes, rest).map_or(0, |(_, common)| common);
        KeptPrefix { pages, tail_tokens }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HostPools, LedgerOptions, PageWindows, PrefillMode, SealedPools, TailPolicy};

    #[test]
    fn a_text_is_kept_until_it_is_forgotten() {
        let options = LedgerOptions {
            windows: PageWindows { sink: 1, recent: 2 },
            exact_pages: 32,
            sealed: Some(SealedPools { pages: 32, high_pages: 0, scratch_pages: 16 }),
            prefix_tree: true,
            tail: TailPolicy::Recompute,
            host: HostPools::default(),
        };
        let mut ledger = Ledger::new(options).unwrap();
        let text: Vec<u32> = (0..64 * 5 + 10).collect();
        assert_eq!(ledger.kept(0, &text), KeptPrefix::default());
        let mut sequence = ledger.open(0, &text);
        let extension = ledger.extend(&mut sequence, &text, PrefillMode::Exact).unwrap();
        ledger.finish_extension(&mut sequence, extension);
        let _sealed = ledger.plan_insert(&mut sequence);
        ledger.insert(&sequence, true);
        ledger.close(sequence);
        let before = ledger.stats();
        let kept = ledger.kept(0, &text);
        let pages = [KeptPage::Exact, KeptPage::Sealed, KeptPage::Sealed, KeptPage::Warm, KeptPage::Warm];
        assert_eq!(kept, KeptPrefix { pages: pages.to_vec(), tail_tokens: 10 });
        // Another text from page 2 on, and a shorter one.
        let mut other = text.clone();
        other[150] += 1000;
        assert_eq!(ledger.kept(0, &other).pages, pages[..2]);
        assert_eq!(ledger.kept(0, &text[..130]).pages, pages[..2]);
        assert_eq!(ledger.kept(1, &text), KeptPrefix::default());
        assert_eq!(ledger.stats(), before);
        ledger.flush();
        assert_eq!(ledger.kept(0, &text), KeptPrefix::default());
    }
}
