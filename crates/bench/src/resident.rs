//! Decode steps of many sequences at once, all of them resident. Their histories are copies of the pages of one short prompt,
//! each in a slot of its own: a step takes as long as over any other pages, and nobody waits for a prompt to be computed.

use std::sync::Arc;
use std::time::Instant;

use oscar_codec::{ExactSlot, PAGE_TOKENS, PageCodec, PageWindows, SealedSlot};
use oscar_engine::EngineError;
use oscar_kernels::backend::{
    Batch, CacheSpec, HostSlots, Sampling, SealPage, SealedRows, SealedSpec, SequenceRows,
};
use oscar_kernels::{Backend, KernelError};
use oscar_model::{Activations, Model, ModelConfig};
use serde::Serialize;

use crate::model::synthetic_tokens;

/// Pages of the prompt that all histories are made of.
const SOURCE_PAGES: usize = 8;
/// Pages that are sealed at a time.
const SEALED_AT_ONCE: usize = 512;
/// Steps before those that are timed: a device may record them.
const WARM_UP: usize = 4;

/// A measurement of decode steps.
#[derive(Clone, Copy, Debug)]
pub struct ResidentBench {
    /// How many sequences each step takes one token further.
    pub batch: usize,
    /// Tokens of each when decoding starts.
    pub context: usize,
    /// Steps that are timed.
    pub steps: usize,
    /// How often; the fastest counts.
    pub repeat: usize,
}

/// The times and rates of steps over resident sequences.
#[derive(Clone, Debug, Serialize)]
pub struct ResidentRow {
    /// The type of the cache, by its name on the command line.
    pub kv: String,
    /// How many sequences each step takes one token further.
    pub batch: usize,
    /// The number of tokens of each sequence.
    pub context: usize,
    /// The number of tokens of all sequences.
    pub resident_tokens: usize,
    /// Bytes of their pages, which a step reads.
    pub kv_bytes: usize,
    /// Time of a step, sampling included.
    pub step_ms: f64,
    /// Tokens of all sequences.
    pub decode_tokens_per_s: f64,
}

/// Bytes of the pages of a sequence.
pub fn sequence_bytes(
    config: &ModelConfig,
    codec: Option<&Arc<PageCodec>>,
    windows: PageWindows,
    context: usize,
) -> usize {
    let geometry = config.kv_geometry();
    let exact = geometry.page_bytes(geometry.bf16());
    match codec {
        None => context.div_ceil(PAGE_TOKENS) * exact,
        Some(codec) => {
            let (exact_pages, sealed_pages) = windows.pages(context);
            exact_pages * exact + sealed_pages * codec.page_bytes()
        }
    }
}

/// The page table of a sequence.
struct Pages {
    exact: Vec<Option<ExactSlot>>,
    sealed: Vec<Option<SealedSlot>>,
}

/// The page tables of all sequences, and how many slots they name.
struct Tables {
    sequences: Vec<Pages>,
    exact_slots: usize,
    sealed_slots: usize,
}

impl Tables {
    /// Slots for sequences that grow to `length` tokens, the first ones left to the source.
    fn new(batch: usize, context: usize, length: usize, windows: Option<PageWindows>) -> Tables {
        let count = length.div_ceil(PAGE_TOKENS);
        // What is read sealed first, and what is so last.
        let history = |length: usize| {
            let page = (length - 1) / PAGE_TOKENS;
            windows.map_or(0..0, |windows| windows.history(page, usize::MAX, 0))
        };
        let (first, last) = (history(context), history(length));
        let (mut exact_slots, mut sealed_slots) = (1 + SOURCE_PAGES, 1);
        let take = |next: &mut usize, there: bool| {
            there.then(|| {
                *next += 1;
                (*next - 1) as u32
            })
        };
        let sequences = (0..batch)
            .map(|_| Pages {
                exact: (0..count)
                    .map(|page| take(&mut exact_slots, !first.contains(&page)).and_then(ExactSlot::new))
                    .collect(),
                sealed: (0..count)
                    .map(|page| take(&mut sealed_slots, last.contains(&page)).and_then(SealedSlot::new))
                    .collect(),
            })
            .collect();
        Tables { sequences, exact_slots, sealed_slots }
    }

    /// Rows of one token of each sequence.
    fn rows(&self, position: usize, sealed: bool) -> Vec<SequenceRows<'_>> {
        self.sequences
            .iter()
            .map(|pages| SequenceRows {
                start: position,
                len: 1,
                pages: &pages.exact,
                sealed: sealed.then_some(SealedRows {
                    pages: &pages.sealed,
                    exact_from: usize::MAX,
                    sealed_until: 0,
                }),
            })
            .collect()
    }
}

/// Measures decode steps of `model` with a cache of `codec`, or of bf16. A model with sliding windows has layers that keep
/// other pages than these and is not measured.
pub fn resident<B: Backend>(
    model: &Model<B>,
    codec: Option<&Arc<PageCodec>>,
    windows: PageWindows,
    bench: &ResidentBench,
) -> Result<ResidentRow, EngineError> {
    let (config, backend) = (model.config(), model.backend());
    let geometry = config.kv_geometry();
    let length = bench.context + WARM_UP + bench.steps;
    let tables = Tables::new(bench.batch, bench.context + 1, length, codec.map(|_| windows));
    let mut cache = backend.cache(&CacheSpec {
        geometry,
        query_heads: config.q_heads,
        slots: tables.exact_slots,
        scratch_slots: 0,
        sealed: codec.map(|codec| SealedSpec {
            codec: Arc::clone(codec),
            slots: tables.sealed_slots,
            windows,
            sequence_pages: length.div_ceil(PAGE_TOKENS),
            high: None,
        }),
        host: HostSlots::default(),
    })?;
    let prompt = SOURCE_PAGES * PAGE_TOKENS;
    let mut activations = model.activations(prompt.max(bench.batch), bench.batch)?;
    fill(model, &tables, &mut cache, &mut activations)?;

    let tokens = synthetic_tokens(bench.batch, config.vocab_size);
    let mut best = f64::INFINITY;
    for _ in 0..bench.repeat.max(1) {
        for position in bench.context..bench.context + WARM_UP {
            step(model, &tables.rows(position, codec.is_some()), &tokens, &mut cache, &mut activations)?;
        }
        let began = Instant::now();
        for position in bench.context + WARM_UP..length {
            step(model, &tables.rows(position, codec.is_some()), &tokens, &mut cache, &mut activations)?;
        }
        best = best.min(began.elapsed().as_secs_f64() / bench.steps.max(1) as f64);
    }
    Ok(ResidentRow {
        kv: codec.map_or("bf16", |codec| codec.name()).to_owned(),
        batch: bench.batch,
        context: bench.context,
        resident_tokens: bench.batch * bench.context,
        kv_bytes: bench.batch * sequence_bytes(config, codec, windows, bench.context),
        step_ms: best * 1e3,
        decode_tokens_per_s: bench.batch as f64 / best,
    })
}

/// Computes the prompt and copies its pages to all slots.
fn fill<B: Backend>(
    model: &Model<B>,
    tables: &Tables,
    cache: &mut B::Cache,
    activations: &mut Activations<B>,
) -> Result<(), KernelError> {
    let (backend, layers) = (model.backend(), model.config().layers);
    let source = ExactSlot::first(SOURCE_PAGES);
    let length = SOURCE_PAGES * PAGE_TOKENS;
    let tokens = synthetic_tokens(length, model.config().vocab_size);
    let sequences = [SequenceRows::exact(0, length, &source)];
    model.forward(&Batch { tokens: &tokens, sequences: &sequences }, &[], cache, activations)?;
    let source: Vec<ExactSlot> = source.into_iter().flatten().collect();
    let (mut copies, mut seals) = (Vec::new(), Vec::new());
    for pages in &tables.sequences {
        copies.extend(
            pages.exact.iter().zip(source.iter().cycle()).filter_map(|(to, from)| Some((*from, (*to)?))),
        );
        seals.extend(
            pages
                .sealed
                .iter()
                .zip(source.iter().cycle())
                .enumerate()
                .filter_map(|(page, (to, from))| Some(SealPage { page, exact: *from, sealed: (*to)? })),
        );
    }
    backend.copy_pages(&copies, cache)?;
    seals.chunks(SEALED_AT_ONCE).try_for_each(|pages| backend.seal(0..layers, pages, cache))
}

/// One token of every sequence, sampled.
fn step<B: Backend>(
    model: &Model<B>,
    rows: &[SequenceRows<'_>],
    tokens: &[u32],
    cache: &mut B::Cache,
    activations: &mut Activations<B>,
) -> Result<(), KernelError> {
    model.decode(&Batch { tokens, sequences: rows }, cache, activations)?;
    let sampled = model.backend().sample(activations.logits(), &vec![Sampling::default(); tokens.len()])?;
    sampled.into_iter().try_for_each(|token| token.map(drop))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_sequence_has_pages_of_its_own_wherever_it_reads() {
        let windows = PageWindows { sink: 1, recent: 4 };
        for (context, length) in [(1, 20), (400, 430), (640, 800), (5000, 5200)] {
            for windows in [None, Some(windows)] {
                let tables = Tables::new(3, context, length, windows);
                let (mut exact, mut sealed) = (HashSet::new(), HashSet::new());
                for pages in &tables.sequences {
                    exact.extend(pages.exact.iter().flatten().map(|slot| slot.number()));
                    sealed.extend(pages.sealed.iter().flatten().map(|slot| slot.number()));
                    for position in context - 1..length {
                        let page = position / PAGE_TOKENS;
                        let history = windows.map_or(0..0, |windows| windows.history(page, usize::MAX, 0));
                        for read in 0..=page {
                            let there = match history.contains(&read) {
                                true => pages.sealed[read].is_some(),
                                false => pages.exact[read].is_some(),
                            };
                            assert!(there, "page {read} at {position} of {context}..{length}, {windows:?}");
                        }
                    }
                }
                // All slots but the dummies and those of the source are named once.
                assert_eq!(exact.len(), tables.exact_slots - 1 - SOURCE_PAGES);
                assert_eq!(sealed.len(), tables.sealed_slots - 1);
            }
        }
    }
}
