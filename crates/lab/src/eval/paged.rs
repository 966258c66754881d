//! A text over the cache that serves: its pages, its kernels and its windows.
//!
//! Codecs of the lab are decoded before they are read ([`history`](super::history)), and their windows are counted in tokens.
//! Here pages are sealed as they leave the window and read from their codes, and the window is whole pages and the one being
//! filled. Every query reads its history as a decode step would, which is how a server with `--prefill uniform` reads prompts.

use std::sync::Arc;

use oscar_codec::{PageCodec, PageWindows};
use oscar_kernels::backend::{Batch, CacheSpec, HostSlots, SealPage, SealedRows, SealedSpec, SequenceRows};
use oscar_kernels::{Backend, Inspect};
use oscar_kv::{ExactSlot, PAGE_TOKENS, SealedSlot};
use oscar_model::{Activations, LoadedModel, PagedSealing};

use super::EvalError;
use super::evaluator::{AnswerScore, LOGIT_ROWS, STEP_TOKENS};

/// A cache of one sequence as an engine has it.
pub struct PagedCache<B: Backend> {
    model: Arc<LoadedModel<B>>,
    cache: B::Cache,
    activations: Activations<B>,
    exact: Vec<Option<ExactSlot>>,
    /// `None` if nothing is sealed.
    sealed: Option<Vec<Option<SealedSlot>>>,
    windows: PageWindows,
    /// Tokens of the sequence.
    tokens: usize,
    /// Pages below this and after the sink are sealed.
    sealed_until: usize,
}

impl<B: Inspect> PagedCache<B> {
    /// A cache for sequences of up to `capacity` tokens; without a codec all its pages are bf16.
    pub fn new(
        model: Arc<LoadedModel<B>>,
        codec: Option<Arc<PageCodec>>,
        windows: PageWindows,
        capacity: usize,
    ) -> Result<PagedCache<B>, EvalError> {
        let most = model.config().max_context;
        if capacity == 0 || capacity > most {
            return Err(EvalError::Context { tokens: capacity, most });
        }
        let pages = capacity.div_ceil(PAGE_TOKENS);
        let spec = CacheSpec {
            geometry: model.config().kv_geometry(),
            query_heads: model.config().q_heads,
            slots: pages + 1,
            scratch_slots: 0,
            sealed: codec.map(|codec| SealedSpec {
                codec,
                slots: pages + 1,
                windows,
                sequence_pages: pages,
                high: None,
            }),
            host: HostSlots::default(),
        };
        Ok(PagedCache {
            cache: model.model().backend().cache(&spec)?,
            activations: model.model().activations(STEP_TOKENS.min(capacity), LOGIT_ROWS)?,
            exact: ExactSlot::first(pages),
            sealed: spec.sealed.map(|_| SealedSlot::first(pages)),
            windows,
            tokens: 0,
            sealed_until: 0,
            model,
        })
    }

    /// Forgets all tokens but the first so many.
    pub(super) fn rewind(&mut self, tokens: usize) {
        self.tokens = tokens.min(self.tokens);
        // A page that is written again is sealed again.
        self.sealed_until = self.sealed_until.min(self.tokens / PAGE_TOKENS);
    }

    /// Appends tokens. With `exact` they read everything before them in bf16, as a prompt of its own does. After each pass
    /// `visit` gets the model, its activations and how many of `ids` are done.
    pub(super) fn run(
        &mut self,
        ids: &[u32],
        exact: bool,
        mut visit: impl FnMut(&LoadedModel<B>, &mut Activations<B>, usize) -> Result<(), EvalError>,
    ) -> Result<(), EvalError> {
        let (needed, most) = (self.tokens + ids.len(), self.exact.len() * PAGE_TOKENS);
        if needed > most {
            return Err(EvalError::Context { tokens: needed, most });
        }
        let mut done = 0;
        for chunk in ids.chunks(self.activations.max_rows()) {
            self.step(chunk, exact)?;
            done += chunk.len();
            visit(&self.model, &mut self.activations, done)?;
        }
        Ok(())
    }

    fn step(&mut self, ids: &[u32], exact: bool) -> Result<(), EvalError> {
        let model = self.model.model();
        let (start, exact_from) = (self.tokens, if exact { 0 } else { usize::MAX });
        let history = self.windows.history((start + ids.len() - 1) / PAGE_TOKENS, exact_from, 0);
        let mut seal: Vec<SealPage> = Vec::new();
        let mut rows = SequenceRows::exact(start, ids.len(), &self.exact);
        if let Some(sealed) = &self.sealed {
            let pages = self.sealed_until.max(history.start)..history.end;
            let page = |page: usize| Some(SealPage { page, exact: self.exact[page]?, sealed: sealed[page]? });
            seal.extend(pages.filter_map(page));
            self.sealed_until = self.sealed_until.max(history.end);
            rows.sealed = Some(SealedRows { pages: sealed, exact_from, sealed_until: 0 });
        }
        let batch = Batch { tokens: ids, sequences: &[rows] };
        let step = model.begin_step(&batch, &self.cache)?;
        model.embed(&batch, &step, &mut self.activations)?;
        let mut attention = PagedSealing { cache: &mut self.cache, before: &seal, after: &[] };
        model.run_layers(0..self.model.config().layers, &step, &mut attention, &mut self.activations)?;
        self.tokens += ids.len();
        Ok(())
    }

    /// Reads a text as a prompt of its own and gives the mean log-probability of each pair's answer after the text and its
    /// question, which read the text from the cache. `progress` gets the tokens of the text that are done.
    pub(super) fn log_probabilities<'a>(
        &mut self,
        text: &[u32],
        pairs: impl IntoIterator<Item = (&'a [u32], &'a [u32])>,
        mut progress: impl FnMut(usize),
    ) -> Result<Vec<f64>, EvalError> {
        self.rewind(0);
        self.run(text, true, |_, _, done| {
            progress(done);
            Ok(())
        })?;
        let score = |(question, answer): (&'a [u32], &'a [u32])| {
            self.rewind(text.len());
            let mut score = AnswerScore::new(question, answer);
            self.run(&score.tokens(), false, |model, activations, done| {
                score.visit(model, activations, done)
            })?;
            Ok(score.mean())
        };
        pairs.into_iter().map(score).collect()
    }
}
