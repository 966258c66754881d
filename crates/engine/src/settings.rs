//! Settings of an engine.

use std::sync::Arc;

use oscar_codec::{PAGE_TOKENS, PageCodec, PageWindows};
use oscar_kv::{TailPolicy, Tier};
use oscar_model::ModelConfig;

pub use oscar_kv::PrefillMode;

use crate::error::EngineError;

/// Settings of an engine.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Tokens a sequence may have; the model's own limit, up to 32K and to what the memory holds, when `None`.
    pub context: Option<usize>,
    /// Prompt tokens that are computed in one pass. Running answers wait at most that long for a prompt, and less for a longer
    /// one, which is computed a few layers at a time beside them.
    pub prefill_chunk: usize,
    /// Answers that may run at a time.
    pub max_running: usize,
    /// Requests that may wait; more are refused.
    pub max_queued: usize,
    /// The format, the windows and the memory of the KV cache.
    pub kv: KvOptions,
    /// The same request gets the same tokens, whatever else runs. Implies [`PrefillMode::Uniform`]; the backend must have been
    /// told too.
    pub deterministic: bool,
    /// Beside running answers, a prompt of several chunks gets about as much time between two tokens as a decode step takes, instead
    /// of one chunk. Without it, who runs when does not depend on time.
    pub paced: bool,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            context: None,
            prefill_chunk: 512,
            max_running: 32,
            max_queued: 1024,
            kv: KvOptions::default(),
            deterministic: false,
            paced: true,
        }
    }
}

/// Settings of the KV cache.
#[derive(Clone, Debug)]
pub struct KvOptions {
    /// The codec that seals pages outside the windows; `None` keeps every page in bf16.
    pub codec: Option<Arc<PageCodec>>,
    /// Whether requests may have their history in bf16 instead ([`Tier::Exact`](oscar_kv::Tier)).
    pub bf16_tier: bool,
    /// Whether requests may have their history in about four bits instead ([`Tier::High`](oscar_kv::Tier)): sealed by
    /// [`PageCodec::high`] of the codec, to pages of a pool of its own.
    pub high_tier: bool,
    /// Pages at both ends of a sequence that stay in bf16.
    pub windows: PageWindows,
    /// Bytes for all pools and the scratch of long prompts; room for one full context when `None`.
    pub memory: Option<usize>,
    /// Without `memory`: the bytes up to which there is room for as many full contexts as requests may run.
    pub memory_limit: Option<usize>,
    /// Whether prompts and answers are kept for later requests.
    pub prefix_tree: bool,
    /// Bytes of the host's memory for pages that leave a device with memory of its own.
    pub host_memory: usize,
    /// What a prefix hit does about a window that is not there in bf16 any more.
    pub tail: TailPolicy,
    /// How the tokens of a prompt read each other.
    pub prefill: PrefillMode,
}

impl Default for KvOptions {
    fn default() -> Self {
        KvOptions {
            codec: None,
            bf16_tier: false,
            high_tier: false,
            windows: PageWindows { sink: 1, recent: 4 },
            memory: None,
            memory_limit: None,
            prefix_tree: true,
            host_memory: 0,
            tail: TailPolicy::default(),
            prefill: PrefillMode::default(),
        }
    }
}

impl KvOptions {
    /// The tiers that requests may choose besides the cache's own.
    pub(crate) fn other_tiers(&self) -> impl Iterator<Item = Tier> {
        let tiers = [(self.high_tier, Tier::High), (self.bf16_tier, Tier::Exact)];
        tiers.into_iter().filter_map(|(offered, tier)| offered.then_some(tier))
    }

    /// The codec of [`Tier::High`], if requests may choose that tier.
    pub(crate) fn high_codec(&self) -> Result<Option<Arc<PageCodec>>, EngineError> {
        if !self.high_tier {
            return Ok(None);
        }
        let high = self.codec.as_ref().and_then(|codec| codec.high());
        let expected = "one that a cache of 2-bit codes for all channels (int2) has beside it";
        high.map(Arc::new).map(Some).ok_or_else(|| EngineError::bad_option("kv_tiers", Tier::High, expected))
    }
}

impl EngineOptions {
    /// How the tokens of prompts read each other, after what `deterministic` implies.
    pub(crate) fn prefill_mode(&self) -> PrefillMode {
        match self.kv.prefill {
            PrefillMode::Exact if !self.deterministic => PrefillMode::Exact,
            _ => PrefillMode::Uniform,
        }
    }

    /// The same settings for a model of which some layers see a sliding window.
    ///
    /// Those layers keep no history: every page that leaves the windows of the cache is given back but for what the codec
    /// keeps of the other layers. So the recent window must be as wide as theirs, and a prefix hit counts only up to a place
    /// where the whole window is there in bf16: computing it again would need the windows of the layers below.
    pub(crate) fn for_layers(&self, config: &ModelConfig) -> Result<EngineOptions, EngineError> {
        let mut options = self.clone();
        let Some(sliding) = &config.sliding else { return Ok(options) };
        if let Some(tier) = self.kv.other_tiers().next() {
            let expected = "only the cache's own type for a model with sliding windows";
            return Err(EngineError::bad_option("kv_tiers", tier, expected));
        }
        let geometry = config.kv_geometry();
        let kv = &mut options.kv;
        let codec = match &kv.codec {
            // The budget refuses it.
            Some(codec) if codec.geometry() != geometry => return Ok(options),
            Some(codec) => PageCodec::clone(codec),
            None => {
                // History is as good as the windows.
                kv.windows = PageWindows { sink: 0, recent: 0 };
                PageCodec::bf16(geometry)?
            }
        };
        kv.codec = Some(Arc::new(codec.without_history(&config.sliding_layers())?));
        let window = sliding.window.min(config.max_context);
        kv.windows.recent = kv.windows.recent.max((window - 1).div_ceil(PAGE_TOKENS));
        kv.tail = TailPolicy::Exact;
        Ok(options)
    }

    /// What a cold window leads to. Where pages depend on the tokens alone, a prefix hit must not change that.
    pub(crate) fn tail(&self) -> TailPolicy {
        if self.prefill_mode() == PrefillMode::Uniform { TailPolicy::Exact } else { self.kv.tail }
    }
}
