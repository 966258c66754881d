//! Settings of an engine.

use std::sync::Arc;

use oscar_codec::{PageCodec, PageWindows};
use oscar_kv::{Extend, TailPolicy};

/// Settings of an engine.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Tokens a sequence may have; the model's own limit, up to 32K and to what the memory holds, when `None`.
    pub context: Option<usize>,
    /// Prompt tokens computed in one pass. Also how long answers in progress wait for a prompt.
    pub prefill_chunk: usize,
    /// Answers in progress at a time.
    pub max_running: usize,
    /// Requests that may wait.
    pub max_queued: usize,
    /// The cache.
    pub kv: KvOptions,
    /// Same request, same tokens, whatever else runs. Implies [`PrefillMode::Uniform`]; the backend must have been
    /// told too.
    pub deterministic: bool,
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
        }
    }
}

/// Settings of a cache.
#[derive(Clone, Debug)]
pub struct KvOptions {
    /// What pages are sealed to; `None` keeps every page in bf16.
    pub codec: Option<Arc<PageCodec>>,
    /// Pages at both ends of a sequence that stay in bf16.
    pub windows: PageWindows,
    /// Bytes for all pools and the scratch of long prompts; room for one full context when `None`.
    pub memory: Option<usize>,
    /// Keep prompts and answers for later requests.
    pub prefix_tree: bool,
    /// What a prefix hit does about a window that is not there in bf16 any more.
    pub tail: TailPolicy,
    /// How a prompt reads itself.
    pub prefill: PrefillMode,
}

impl Default for KvOptions {
    fn default() -> Self {
        KvOptions {
            codec: None,
            windows: PageWindows { sink: 1, recent: 4 },
            memory: None,
            prefix_tree: true,
            tail: TailPolicy::default(),
            prefill: PrefillMode::default(),
        }
    }
}

/// How the tokens of a prompt read each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PrefillMode {
    /// In bf16, layer by layer.
    #[default]
    Exact,
    /// As its answer will read it: pages depend on the tokens alone. A prefix counts only with its whole window.
    Uniform,
}

impl EngineOptions {
    /// How prompts are read, after what `deterministic` implies.
    pub(crate) fn extend(&self) -> Extend {
        match self.kv.prefill {
            PrefillMode::Exact if !self.deterministic => Extend::Exact,
            _ => Extend::Uniform,
        }
    }

    /// What a cold window leads to. Where pages depend on the tokens alone, a prefix hit must not change that.
    pub(crate) fn tail(&self) -> TailPolicy {
        if self.extend() == Extend::Uniform { TailPolicy::Exact } else { self.kv.tail }
    }
}
