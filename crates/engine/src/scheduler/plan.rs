//! What the policy tells the executor, and what it tells the rest of the engine.

use std::ops::Range;

use oscar_codec::ExactSlot;
use oscar_kernels::backend::{SealPage, SequenceRows};

use crate::error::EngineError;

/// One answer of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct AnswerId {
    pub(crate) request: u64,
    pub(crate) choice: usize,
}

/// The next piece of work for a device. Page tables are borrowed from the policy's sequences.
pub(crate) enum StepPlan<'a> {
    /// Seal pages, all layers, so that the prefix tree can own them.
    Seal(&'a [SealPage]),
    /// Seal pages of a history in bf16, all layers, so that their bf16 can be given back.
    Demote(&'a [SealPage]),
    /// Compute and sample one more token of every running answer.
    Decode(DecodePlan<'a>),
    /// Prepare the pages of a prompt, and its hidden states if it is going to be computed layer by layer.
    StartExtension(ExtensionPlan<'a>),
    /// Compute one chunk of a prompt through some layers.
    PrefillChunk(ChunkPlan<'a>),
    /// Compute several short prompts in one pass.
    PrefillBatch(BatchPlan<'a>),
    /// Sample the first token of answers whose prompts are in the cache.
    SampleFirst(FirstTokens),
    /// Give back the hidden states and scratch pages of prompts that are done or were given up.
    ReleasePrefill,
}

impl StepPlan<'_> {
    /// The name of the kind of work, for logs.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            StepPlan::Seal(_) => "seal",
            StepPlan::Demote(_) => "demote",
            StepPlan::Decode(_) => "decode",
            StepPlan::StartExtension(_) => "start_extension",
            StepPlan::PrefillChunk(_) => "prefill_chunk",
            StepPlan::PrefillBatch(_) => "prefill_batch",
            StepPlan::SampleFirst(_) => "sample_first",
            StepPlan::ReleasePrefill => "release_prefill",
        }
    }
}

/// One more token of every running answer.
pub(crate) struct DecodePlan<'a> {
    pub(crate) rows: Vec<DecodeRow<'a>>,
    /// As far as anybody knows the next step is of the same answers: none is about to join them.
    pub(crate) goes_on: bool,
}

/// One running answer in a decode step.
pub(crate) struct DecodeRow<'a> {
    pub(crate) answer: AnswerId,
    /// The token whose keys and values are computed.
    pub(crate) token: u32,
    pub(crate) rows: SequenceRows<'a>,
    /// A shared bf16 page that is copied before it is written: (from, to).
    pub(crate) copy: Option<(ExactSlot, ExactSlot)>,
    /// A page that leaves the recent window, sealed after the copy.
    pub(crate) seal: Option<SealPage>,
}

/// The start of an extension of a sequence by prompt tokens.
pub(crate) struct ExtensionPlan<'a> {
    /// Shared bf16 pages that are copied before they are written: (from, to).
    pub(crate) copies: Vec<(ExactSlot, ExactSlot)>,
    /// All chunks of a prompt that is computed layer by layer, else nothing.
    pub(crate) chunks: Vec<PromptRows<'a>>,
}

/// Consecutive tokens of a prompt and the pages they read and write.
pub(crate) struct PromptRows<'a> {
    pub(crate) tokens: &'a [u32],
    pub(crate) rows: SequenceRows<'a>,
}

/// One chunk of a prompt through some layers.
pub(crate) struct ChunkPlan<'a> {
    pub(crate) prompt: PromptRows<'a>,
    pub(crate) layers: Range<usize>,
    /// Where the hidden states are kept between pieces; `None` for a chunk that runs through all layers at once.
    pub(crate) kept: Option<usize>,
    /// They are made of the tokens first.
    pub(crate) embeds: bool,
    /// Pages that are sealed after the chunk's rows are written and before they attend.
    pub(crate) seal_before: &'a [SealPage],
    /// Pages that are sealed when the chunk's rows have attended.
    pub(crate) seal_after: &'a [SealPage],
    /// What is read from the last hidden states; nothing before the last layer.
    pub(crate) wanted: WantedRows<'a>,
}

/// What is read from the last hidden states of a chunk.
#[derive(Clone, Default)]
pub(crate) struct WantedRows<'a> {
    /// Consecutive tokens whose probabilities are wanted.
    pub(crate) scored: &'a [u32],
    /// The row of the chunk that the first of them follows.
    pub(crate) scored_after: usize,
    /// Alternatives to report with each of them.
    pub(crate) alternatives: usize,
    /// How many copies of the logits of the last row are needed: one for each answer that begins.
    pub(crate) last_row: usize,
    /// Rows of the chunk whose hidden states are part of an embedding.
    pub(crate) hidden: Range<usize>,
}

/// Several prompts that run through all layers in one pass.
pub(crate) struct BatchPlan<'a> {
    pub(crate) prompts: Vec<PromptRows<'a>>,
    pub(crate) copies: Vec<(ExactSlot, ExactSlot)>,
    pub(crate) seal_before: Vec<SealPage>,
    pub(crate) seal_after: Vec<SealPage>,
    /// Rows of the batch whose hidden states are part of the embedding of a prompt.
    pub(crate) hidden: Vec<(AnswerId, Range<usize>)>,
}

/// Answers that are about to begin.
pub(crate) struct FirstTokens {
    pub(crate) answers: Vec<AnswerId>,
    /// Rows of the last batch whose logits are wanted; `None` if the logits are there already.
    pub(crate) rows: Option<Vec<usize>>,
}

/// What becomes of an answer after a token was sampled for it, or could not be.
#[derive(Debug)]
pub(crate) enum Next {
    /// The answer goes on with this token.
    Continue(u32),
    /// The answer is complete.
    Finished,
    /// The answer cannot be completed.
    Failed(EngineError),
}

/// What the policy decided about a request, in order. Who submitted it is told accordingly.
#[derive(Debug)]
pub(crate) enum Decision {
    /// The prompt of a request begins to be computed.
    Admitted {
        answer: AnswerId,
        /// Tokens found in the prefix tree, when this is the first time that the request is admitted.
        cached: Option<usize>,
        /// The request was counted as waiting by those who submit.
        was_queued: bool,
    },
    /// A request that was admitted waits again and nothing was computed for it.
    PutBack { request: u64 },
    /// A request that waited is cancelled or fails.
    Dequeued { was_queued: bool },
    /// A prompt is computed in part.
    Progress { request: u64, done: usize, total: usize },
    /// A request lost its pages to an older one and will be computed again.
    Preempted { answer: AnswerId, tokens: usize },
    /// A request gave up bf16 history: pages below `end` are read sealed after `at` tokens.
    Demoted { answer: AnswerId, at: usize, pages: usize, end: usize },
    /// The prompt of a new request is in the cache.
    PromptDone { request: u64, tokens: usize, cached: usize, choices: usize },
    /// The pages of some answers were given back: they have ended.
    Ended { first: AnswerId, choices: usize },
    /// Some answers cannot be completed.
    Failed { first: AnswerId, choices: usize, error: EngineError },
}
