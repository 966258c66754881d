//! Where the rows of a step find keys and values.

use crate::cpu::attention::sealed::pages_per_bf16_page;
use crate::cpu::cache::Cache;

/// What the rows of a step read.
pub(in crate::cpu) struct Tiers<'a> {
    /// The pools of the step.
    pub(in crate::cpu) cache: &'a Cache,
    /// The layer of `cache` that the rows belong to.
    pub(in crate::cpu) layer: usize,
    /// A logit for each query head that has a share of every row's softmax.
    pub(in crate::cpu) sinks: Option<&'a [f32]>,
    /// What is read instead for early positions, if anything: a measurement's stand-in for sealed pages.
    pub(in crate::cpu) history: Option<History<'a>>,
}

impl Tiers<'_> {
    /// About how many sealed pages take as long as one in bf16.
    pub(super) fn exact_cost(&self) -> usize {
        self.cache.sealed().map_or(1, |sealed| pages_per_bf16_page(&sealed.layouts[self.layer]))
    }
}

/// Stand-ins for the early positions of a sequence; see [`crate::inspect::StandIn`].
pub(in crate::cpu) struct History<'a> {
    pub(in crate::cpu) cache: &'a Cache,
    pub(in crate::cpu) layer: usize,
    /// Positions below `ends(position of the query)` are read from the history.
    pub(in crate::cpu) ends: &'a (dyn Fn(usize) -> usize + Sync),
}
