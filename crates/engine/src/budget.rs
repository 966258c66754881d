//! Where every byte of the cache goes.
//!
//! One amount of memory is split into bf16 pages, sealed pages, and what a long prompt needs while it is computed:
//! bf16 pages of one layer and the hidden states of all its tokens. A sequence that fills the context always fits, so
//! that whatever is admitted can finish once it is alone.

use std::fmt;

use oscar_codec::{KvGeometry, PAGE_TOKENS, PageWindows};
use oscar_kv::{HostPools, LedgerOptions, PageNeed, SealedPools};
use oscar_model::ModelConfig;

use crate::error::EngineError;
use crate::request::Contexts;
use crate::settings::EngineOptions;

/// Context when the user does not choose one; longer ones cost memory that most runs never use.
const DEFAULT_CONTEXT: usize = 32 * 1024;

/// Share of the memory for bf16 pages when there are sealed ones: a quarter keeps windows for many requests.
const EXACT_SHARE: usize = 4;

/// The same where histories may be in bf16 too: half of the memory for either kind.
const EXACT_SHARE_WITH_TIER: usize = 2;

/// Share of what is left for sealed pages that goes to those of the high tier, where there is one.
const HIGH_SHARE: usize = 2;

/// The pools of a cache and what they cost.
#[derive(Clone, Debug, PartialEq)]
pub struct Budget {
    /// Tokens that a sequence may have, prompt and answer together.
    pub context: usize,
    /// Tokens that a sequence might have if the memory were not limited.
    pub wanted_context: usize,
    /// The name of the format in which pages are sealed.
    pub kv: String,
    /// Pages at both ends of a sequence that stay in bf16.
    pub windows: PageWindows,
    /// The pool of bf16 pages.
    pub exact: PoolBudget,
    /// The pool of sealed pages.
    pub sealed: PoolBudget,
    /// The pool of sealed pages of the high tier, if requests may choose that tier.
    pub high: PoolBudget,
    /// The scratch pool: bf16 pages of one layer, for prompts on their way to sealed pages.
    pub scratch: PoolBudget,
    /// Bytes of the hidden states and tables of the longest prompt.
    pub hidden_bytes: usize,
    /// Bytes of the mean keys of pages, which all sequences share.
    pub mean_bytes: usize,
    /// bf16 pages in the host's memory, and sealed ones: those that the device had no room for.
    pub host: [PoolBudget; 2],
    /// Tokens that a sequence with its history in bf16 may have, if requests may choose that tier. Its pages are in the pool of
    /// bf16 pages, beside the windows of all sequences.
    pub bf16_context: Option<usize>,
    /// Tokens that a sequence of the high tier may have, if requests may choose that tier.
    pub high_context: Option<usize>,
    /// Bits per stored key or value element of a sequence that fills the context, windows and scales included.
    pub bits_per_element: f64,
    /// Elements (keys and values) of one token, and those of layers that keep a history.
    elements_per_token: usize,
    history_elements: usize,
}

/// The pages of one pool and what they cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolBudget {
    /// Pages that sequences can use.
    pub pages: usize,
    /// Bytes of one page of this pool.
    pub page_bytes: usize,
}

impl PoolBudget {
    /// Bytes of the pool, with the dummy that padded rows name.
    pub fn bytes(&self) -> usize {
        if self.page_bytes == 0 { 0 } else { self.pages.saturating_add(1).saturating_mul(self.page_bytes) }
    }
}

/// The shape of a model from which the costs of its cache follow.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) geometry: KvGeometry,
    pub(crate) hidden_size: usize,
    pub(crate) max_context: usize,
}

impl From<&ModelConfig> for Shape {
    fn from(config: &ModelConfig) -> Shape {
        Shape {
            geometry: config.kv_geometry(),
            hidden_size: config.hidden_size,
            max_context: config.max_context,
        }
    }
}

impl Budget {
    /// What the cache of an engine with these settings would cost a model, without making it.
    pub fn of(config: &ModelConfig, options: &EngineOptions) -> Result<Budget, EngineError> {
        Budget::plan(config.into(), &options.for_layers(config)?)
    }

    pub(crate) fn plan(shape: Shape, options: &EngineOptions) -> Result<Budget, EngineError> {
        let most = shape.max_context;
        let asked = options.context.unwrap_or(most.min(DEFAULT_CONTEXT));
        if asked == 0 || asked > most {
            return Err(EngineError::bad_option("context", asked, format!("1 to {most}, the model's own")));
        }
        if options.prefill_chunk == 0 {
            return Err(EngineError::bad_option("prefill_chunk", 0, "at least 1"));
        }
        if options.max_running == 0 {
            return Err(EngineError::bad_option("max_running", 0, "at least 1"));
        }
        if let (Some(tier), None) = (options.kv.other_tiers().next(), &options.kv.codec) {
            let expected = "nothing more where all pages are bf16";
            return Err(EngineError::bad_option("kv_tiers", tier, expected));
        }
        let high_page_bytes = options.kv.high_codec()?.map_or(0, |codec| codec.page_bytes());
        if let Some(codec) = &options.kv.codec
            && codec.geometry() != shape.geometry
        {
            let (got, expected) = (format!("{:?}", codec.geometry()), format!("{:?}", shape.geometry));
            return Err(EngineError::bad_option("the codec of the cache", got, expected));
        }
        let plan = |context| Budget::for_context(shape, options, high_page_bytes, context);
        let error = match plan(asked) {
            Ok(budget) => return Ok(budget),
            Err(error) if options.context.is_some() => return Err(error),
            Err(error) => error,
        };
        // Nobody chose this context: take the longest that fits.
        let (mut fits, mut too_long) = (0, asked.div_ceil(PAGE_TOKENS));
        while fits + 1 < too_long {
            let middle = fits.midpoint(too_long);
            if plan(middle * PAGE_TOKENS).is_ok() { fits = middle } else { too_long = middle }
        }
        if fits == 0 {
            return Err(error);
        }
        Ok(Budget { wanted_context: asked, ..plan(fits * PAGE_TOKENS)? })
    }

    fn for_context(
        shape: Shape,
        options: &EngineOptions,
        high_page_bytes: usize,
        context: usize,
    ) -> Result<Budget, EngineError> {
        let KvGeometry { layers, kv_heads, head_dim } = shape.geometry;
        let kv = &options.kv;
        let exact_bytes = shape.geometry.page_bytes(shape.geometry.bf16());
        let mut budget = Budget {
            context,
            wanted_context: context,
            kv: kv.codec.as_ref().map_or("bf16".to_owned(), |codec| codec.name().to_owned()),
            windows: kv.windows,
            exact: PoolBudget { pages: 0, page_bytes: exact_bytes },
            sealed: PoolBudget::default(),
            high: PoolBudget { pages: usize::from(high_page_bytes > 0), page_bytes: high_page_bytes },
            scratch: PoolBudget::default(),
            hidden_bytes: 0,
            mean_bytes: 0,
            host: [PoolBudget::default(); 2],
            bf16_context: None,
            high_context: None,
            bits_per_element: 0.0,
            elements_per_token: 2 * layers * kv_heads * head_dim,
            history_elements: 2 * layers * kv_heads * head_dim,
        };
        let least = PageNeed::of(context, kv.windows, kv.codec.is_some(), kv.prefix_tree);
        if let Some(codec) = &kv.codec {
            // Where no layer keeps a history there is still a pool, of pages without bytes.
            budget.sealed.page_bytes = codec.page_bytes().max(1);
            budget.mean_bytes = codec.page_mean_bytes().saturating_mul(context.div_ceil(PAGE_TOKENS));
            let with_history = (0..layers).filter(|&layer| codec.has_history(layer)).count();
            budget.history_elements = 2 * with_history * kv_heads * head_dim;
            budget.scratch = PoolBudget { pages: least.scratch, page_bytes: exact_bytes / layers.max(1) };
            if context > options.prefill_chunk {
                // A row of hidden states and its rotary angles, in f32.
                budget.hidden_bytes =
                    context.saturating_mul((shape.hidden_size + head_dim) * size_of::<f32>());
            }
        }
        budget.exact.pages = least.exact;
        // A pool cannot be empty, even if no sequence is long enough to seal anything.
        budget.sealed.pages = if kv.codec.is_some() { least.sealed.max(1) } else { 0 };
        let pages = context.div_ceil(PAGE_TOKENS);
        match kv.memory {
            Some(memory) if memory < budget.total_bytes() => {
                let (needed, parts) = (budget.total_bytes(), budget.parts());
                return Err(EngineError::MemoryTooSmall { context, needed, memory, parts });
            }
            Some(memory) => budget.fill(memory, options),
            // A finished answer gives the tree its window sealed early, and the next turn needs a window of its own.
            None if kv.codec.is_some() => {
                budget.exact.pages += kv.windows.recent.saturating_add(2).min(pages);
                if kv.bf16_tier {
                    budget.exact.pages += pages;
                }
                budget.sealed.pages = budget.sealed.pages.max(pages);
                if kv.high_tier {
                    budget.high.pages = budget.sealed.pages;
                }
            }
            None => budget.exact.pages += 1,
        }
        if let (None, Some(limit)) = (kv.memory, kv.memory_limit) {
            budget.grow(limit, least, options);
        }
        budget.host = budget.host_pools(kv.host_memory);
        budget.bits_per_element = budget.bits_at(context);
        let bf16_context = budget.exact.pages.saturating_mul(PAGE_TOKENS).min(context);
        budget.bf16_context = kv.bf16_tier.then_some(bf16_context);
        budget.high_context = kv.high_tier.then(|| budget.longest_high(kv.prefix_tree));
        Ok(budget)
    }

    /// Tokens of the longest sequence for which there are pages of the high tier.
    fn longest_high(&self, prefix_tree: bool) -> usize {
        let fits = |pages: &usize| {
            let need = PageNeed::of(pages * PAGE_TOKENS, self.windows, true, prefix_tree);
            need.sealed <= self.high.pages && need.exact <= self.exact.pages
        };
        let pages = (1..=self.context.div_ceil(PAGE_TOKENS)).rev().find(fits).unwrap_or(0);
        (pages * PAGE_TOKENS).min(self.context)
    }

    /// Makes room for as many requests that fill the context as may run, or else for what fits into `limit`.
    fn grow(&mut self, limit: usize, one: PageNeed, options: &EngineOptions) {
        let others = options.max_running - 1;
        let mut all = self.clone();
        let history = if options.kv.bf16_tier { self.context.div_ceil(PAGE_TOKENS) } else { 0 };
        all.exact.pages =
            all.exact.pages.saturating_add(one.exact.saturating_add(history).saturating_mul(others));
        all.sealed.pages = all.sealed.pages.saturating_add(one.sealed.saturating_mul(others));
        if options.kv.high_tier {
            all.high.pages = all.high.pages.saturating_add(one.sealed.saturating_mul(others));
        }
        if all.total_bytes() <= limit {
            *self = all;
        } else if self.total_bytes() < limit {
            self.fill(limit, options);
        }
    }

    /// Shares out what is left of the memory after the least that a sequence needs.
    fn fill(&mut self, memory: usize, options: &EngineOptions) {
        let rest = memory.saturating_sub(self.total_bytes());
        if self.sealed.page_bytes == 0 {
            self.exact.pages += rest / self.exact.page_bytes;
            return;
        }
        let PageWindows { sink, recent } = self.windows;
        // Every prefix that is kept for later holds its sink in bf16, and its window as long as there is room.
        let useful = match options.kv.prefix_tree || options.kv.bf16_tier {
            true => usize::MAX,
            false => options.max_running.saturating_mul(sink + 2 * (recent + 1)),
        };
        let part = if options.kv.bf16_tier { EXACT_SHARE_WITH_TIER } else { EXACT_SHARE };
        let share = (memory - self.hidden_bytes - self.mean_bytes) / part / self.exact.page_bytes;
        let more = share.min(useful).saturating_sub(self.exact.pages).min(rest / self.exact.page_bytes);
        self.exact.pages += more;
        let mut rest = rest - more * self.exact.page_bytes;
        let high = (rest / HIGH_SHARE).checked_div(self.high.page_bytes).unwrap_or(0);
        self.high.pages += high;
        rest -= high * self.high.page_bytes;
        self.sealed.pages += rest / self.sealed.page_bytes;
    }

    /// Room for pages in so many bytes of the host's memory. Where pages are sealed, few are in bf16: the sinks of prefixes.
    fn host_pools(&self, memory: usize) -> [PoolBudget; 2] {
        let for_exact = if self.sealed.page_bytes == 0 { memory } else { memory / EXACT_SHARE };
        [(&self.exact, for_exact), (&self.sealed, memory - for_exact)].map(|(pool, bytes)| PoolBudget {
            pages: bytes.checked_div(pool.page_bytes).unwrap_or(0),
            page_bytes: pool.page_bytes,
        })
    }

    /// Bytes of all pools on the device, of the hidden states of a prompt and of the mean keys of pages.
    pub fn total_bytes(&self) -> usize {
        let Budget { exact, sealed, high, scratch, hidden_bytes, mean_bytes, .. } = self;
        [exact.bytes(), sealed.bytes(), high.bytes(), scratch.bytes(), *hidden_bytes, *mean_bytes]
            .into_iter()
            .fold(0, usize::saturating_add)
    }

    /// Tokens of sequences that fill the context for which there are pages of both kinds at the same time.
    pub fn capacity_tokens(&self) -> usize {
        let (exact, sealed) = self.pages_at(self.context);
        let share = |pool: &PoolBudget, pages: usize| match pages {
            0 => usize::MAX,
            _ => (self.context as u128 * pool.pages as u128 / pages as u128) as usize,
        };
        share(&self.exact, exact).min(share(&self.sealed, sealed))
    }

    /// Pages (bf16, sealed) of a sequence of `tokens` tokens.
    fn pages_at(&self, tokens: usize) -> (usize, usize) {
        match self.sealed.page_bytes {
            0 => (tokens.div_ceil(PAGE_TOKENS), 0),
            _ => self.windows.pages(tokens),
        }
    }

    /// Bytes of the pages that a sequence of `tokens` tokens reads in its next decode step.
    pub fn bytes_at(&self, tokens: usize) -> usize {
        let (exact, sealed) = self.pages_at(tokens);
        exact * self.exact.page_bytes + sealed * self.sealed.page_bytes
    }

    /// Bits per stored key or value element of a sequence of `tokens` tokens.
    pub fn bits_at(&self, tokens: usize) -> f64 {
        self.bytes_at(tokens) as f64 * 8.0 / (tokens.max(1) * self.elements_per_token) as f64
    }

    /// Bits per key or value element of a page that is not in a window.
    pub fn history_bits(&self) -> f64 {
        let page = if self.sealed.page_bytes > 0 { self.sealed.page_bytes } else { self.exact.page_bytes };
        page as f64 * 8.0 / (PAGE_TOKENS * self.history_elements).max(1) as f64
    }

    /// Tokens that sequences may have.
    pub(crate) fn contexts(&self) -> Contexts {
        Contexts { own: self.context, high: self.high_context, bf16: self.bf16_context }
    }

    pub(crate) fn ledger_options(&self, options: &EngineOptions) -> LedgerOptions {
        let sealed = (self.sealed.page_bytes > 0).then_some(SealedPools {
            pages: self.sealed.pages,
            high_pages: self.high.pages,
            scratch_pages: self.scratch.pages,
        });
        LedgerOptions {
            windows: self.windows,
            exact_pages: self.exact.pages,
            sealed,
            prefix_tree: options.kv.prefix_tree,
            tail: options.tail(),
            host: HostPools { exact_pages: self.host[0].pages, sealed_pages: self.host[1].pages },
        }
    }

    fn parts(&self) -> String {
        let mut parts =
            vec![format!("{} bf16 pages of {}", self.exact.pages + 1, bytes(self.exact.page_bytes))];
        for (share, name) in [
            (&self.sealed, "sealed pages"),
            (&self.high, "sealed pages of the high tier"),
            (&self.scratch, "pages of prefill scratch"),
        ] {
            if share.page_bytes > 0 {
                parts.push(format!("{} {name} of {}", share.pages + 1, bytes(share.page_bytes)));
            }
        }
        if self.hidden_bytes > 0 {
            parts.push(format!("{} of hidden states", bytes(self.hidden_bytes)));
        }
        if self.mean_bytes > 0 {
            parts.push(format!("{} of mean keys", bytes(self.mean_bytes)));
        }
        parts.join(", ")
    }
}

impl fmt::Display for Budget {
    /// A table, one line for each part.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = |name: &str, pages: String, each: String, total: usize| {
            writeln!(f, "{name:<16} {pages:>10} {each:>12} {:>12}", bytes(total))
        };
        line("KV cache", "pages".into(), "each".into(), self.total_bytes())?;
        let shares = [
            ("bf16", &self.exact),
            (self.kv.as_str(), &self.sealed),
            ("high", &self.high),
            ("prefill scratch", &self.scratch),
        ];
        for (name, share) in shares {
            if share.page_bytes > 0 {
                line(name, share.pages.to_string(), bytes(share.page_bytes), share.bytes())?;
            }
        }
        if self.hidden_bytes > 0 {
            line("prefill states", String::new(), String::new(), self.hidden_bytes)?;
        }
        if self.mean_bytes > 0 {
            line("mean keys", String::new(), String::new(), self.mean_bytes)?;
        }
        for (name, pool) in ["host, bf16", "host, sealed"].into_iter().zip(&self.host) {
            if pool.pages > 0 {
                let bytes_in_all = pool.pages.saturating_mul(pool.page_bytes);
                line(name, pool.pages.to_string(), bytes(pool.page_bytes), bytes_in_all)?;
            }
        }
        write!(
            f,
            "{} tokens in all, {} in one sequence at {:.2} bits per element",
            self.capacity_tokens(),
            self.context,
            self.bits_per_element
        )?;
        for (context, name) in [(self.high_context, "high"), (self.bf16_context, "bf16")] {
            if let Some(tokens) = context {
                write!(f, "\n{tokens} tokens in one sequence with kv_precision \"{name}\"")?;
            }
        }
        Ok(())
    }
}

/// A number of bytes for people.
fn bytes(count: usize) -> String {
    let count = count as f64;
    match count {
        _ if count < 1024.0 => format!("{count} B"),
        _ if count < 1048576.0 => format!("{:.1} KiB", count / 1024.0),
        _ if count < 1073741824.0 => format!("{:.1} MiB", count / 1048576.0),
        _ => format!("{:.2} GiB", count / 1073741824.0),
    }
}

#[cfg(test)]
mod tests;
