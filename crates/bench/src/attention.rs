//! Attention alone, over pages of every format: a decode step of one sequence against a long context, no model.
//!
//! Pages lie as in a pool, `[page][layer][head]`, and there are as many models of 32 layers as it takes to fill more
//! memory than caches hold; a pass attends once in each layer, as a decode step does. Each format is compared with a plain read
//! of the same pages in the same order, and with bf16. The step is cut over threads as the engine cuts it.

use std::ops::Range;
use std::sync::Mutex;
use std::time::Instant;

use half::bf16;
use oscar_codec::{BandRows, CodecError, PAGE_TOKENS, PageLayout, Rule, Side};
use oscar_kernels::KernelError;
use oscar_kernels::cpu::attention::sealed::{SealedPages, attend_sealed, attend_sealed_heads};
use oscar_kernels::cpu::attention::{AttentionScratch, SoftmaxState, Span};
use oscar_kernels::cpu::isa::Isa;
use oscar_kernels::cpu::memory::AlignedBuffer;
use oscar_kernels::cpu::pool::Pool;
use oscar_random::Random;
use serde::Serialize;

use crate::formats::PageFormat;

/// A measurement of attention on the CPU.
#[derive(Clone, Debug)]
pub struct AttentionBench {
    /// Query heads, a multiple of `kv_heads`.
    pub q_heads: usize,
    /// The number of KV heads.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Groups of channels with a scale of their own, in formats that have groups.
    pub groups: usize,
    /// Numbers of tokens in the cache to measure.
    pub contexts: Vec<usize>,
    /// Page formats to measure.
    pub formats: Vec<PageFormat>,
    /// The number of worker threads.
    pub threads: usize,
    /// Memory to read per pass, at least.
    pub pool_bytes: usize,
    /// Passes, of which the fastest counts.
    pub repeat: usize,
    /// The kernel path to measure.
    pub isa: Isa,
}

/// Page ranges per thread, as in the engine.
const ITEMS_PER_THREAD: usize = 6;

/// Pages that a thread reads at the same time in the plain read.
const PLACES: usize = 4;

/// Layers of a model: how far apart the pages of a layer lie.
const MODEL_LAYERS: usize = 32;

/// Different pages that fill the memory in turn.
const SAMPLES: usize = 8;

/// The result of one measurement.
#[derive(Clone, Debug, Serialize)]
pub struct AttentionRow {
    kind: &'static str,
    /// The page format.
    pub kv: &'static str,
    /// Tokens in the cache.
    pub context: usize,
    q_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    threads: usize,
    path: String,
    /// Layers that a pass attends in, each with its own pages.
    layers: usize,
    /// Bytes of pages that a pass reads.
    pub pool_bytes: usize,
    /// Microseconds per token and layer.
    pub us_per_layer: f64,
    /// Bytes of pages per second.
    pub gb_per_s: f64,
    /// Bytes per second of a plain read of the same pages in the same order.
    pub read_gb_per_s: f64,
    /// Time of the plain read over time of attention.
    pub read_share: f64,
    /// Times faster than bf16 at this context, if that is measured.
    pub times_bf16: Option<f64>,
    /// Largest difference to the definition of the format, relative to the largest output.
    pub error: f64,
}

/// How the time of a format grows with the context.
#[derive(Clone, Debug, Serialize)]
pub struct AttentionSlope {
    kind: &'static str,
    /// The page format.
    pub kv: &'static str,
    /// Microseconds per layer and 1024 tokens of context: the least-squares line through all contexts, or through
    /// the origin where there is only one.
    pub us_per_1k_tokens: f64,
    /// The slope relative to that of bf16, if that is measured.
    pub of_bf16: Option<f64>,
}

/// Why attention could not be measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttentionBenchError {
    /// There are no pages of this shape.
    #[error(transparent)]
    Codec(#[from] CodecError),
    /// The memory for the pages could not be had.
    #[error(transparent)]
    Memory(#[from] KernelError),
    /// The query heads do not divide among the KV heads.
    #[error("{q_heads} query heads do not divide among {kv_heads} KV heads")]
    Heads {
        /// The number of query heads.
        q_heads: usize,
        /// The number of KV heads.
        kv_heads: usize,
    },
    /// bf16 pages hold pairs of channels.
    #[error("a head of {0} channels: bf16 pages need an even number")]
    OddHead(usize),
    /// The pages of one context do not fit the address space.
    #[error("the pages of {0} tokens are too large")]
    TooLarge(usize),
}

/// Measures; `on_row` is called after each row.
pub fn run(
    bench: &AttentionBench,
    mut on_row: impl FnMut(&AttentionRow),
) -> Result<Vec<AttentionSlope>, AttentionBenchError> {
    let AttentionBench { q_heads, kv_heads, head_dim, .. } = *bench;
    if kv_heads == 0 || q_heads == 0 || !q_heads.is_multiple_of(kv_heads) {
        return Err(AttentionBenchError::Heads { q_heads, kv_heads });
    }
    let pool = Pool::new(bench.threads);
    let mut rows: Vec<AttentionRow> = Vec::new();
    for &kind in &bench.formats {
        if kind == PageFormat::Bf16 && !head_dim.is_multiple_of(2) {
            return Err(AttentionBenchError::OddHead(head_dim));
        }
        let format = kind.layout(head_dim, bench.groups)?;
        let samples = samples(&format, head_dim)?;
        let page_bytes = format.page_bytes();
        let error = error(bench, &format, &samples)?;
        let mut memory = PageMemory::default();
        for &context in &bench.contexts {
            let pages = context.div_ceil(PAGE_TOKENS);
            let layer_bytes = pages
                .checked_mul(kv_heads * page_bytes)
                .filter(|bytes| bytes.checked_add(bench.pool_bytes).is_some_and(|sum| sum < 1 << 46))
                .ok_or(AttentionBenchError::TooLarge(context))?;
            let layers = bench.pool_bytes.div_ceil(layer_bytes).max(1);
            let model_layers = layers.min(MODEL_LAYERS);
            let layers = layers.next_multiple_of(model_layers);
            memory.fill(layers * layer_bytes, &samples)?;
            // Means of pages, which all sequences of a model share; small random numbers are as fast as any.
            let mut random = Random::new(6);
            let values = if matches!(format, PageLayout::Banded(_)) {
                model_layers * pages * kv_heads * head_dim
            } else {
                0
            };
            let means: Vec<u16> = (0..values).map(|_| bf16::from_f32(random.signed()).to_bits()).collect();
            let bytes = memory.bytes();
            let cache = PooledPages {
                bytes,
                means: &means,
                head_dim,
                pages,
                layers,
                model_layers,
                kv_heads,
                page_bytes,
            };
            let step = DecodeStep { bench, format: &format, context, pool: &pool };
            let read = fastest(bench.repeat, || step.read(&cache));
            let time = fastest(bench.repeat, || step.attend(&cache));
            let pool_bytes = layers * layer_bytes;
            let us_per_layer = time / layers as f64 * 1e6;
            let exact = |row: &&AttentionRow| row.kv == "bf16" && row.context == context;
            let exact = if kind == PageFormat::Bf16 {
                Some(us_per_layer)
            } else {
                rows.iter().find(exact).map(|row| row.us_per_layer)
            };
            let row = AttentionRow {
                kind: "attention",
                kv: kind.name(),
                context,
                q_heads,
                kv_heads,
                head_dim,
                threads: bench.threads,
                path: bench.isa.to_string(),
                layers,
                pool_bytes,
                us_per_layer,
                gb_per_s: pool_bytes as f64 / time / 1e9,
                read_gb_per_s: pool_bytes as f64 / read / 1e9,
                read_share: read / time,
                times_bf16: exact.map(|exact| exact / us_per_layer),
                error,
            };
            on_row(&row);
            rows.push(row);
        }
    }
    Ok(slopes(bench, &rows))
}

/// Pages of random rows, quantised as plainly as their format allows: speed does not depend on how well.
fn samples(format: &PageLayout, head_dim: usize) -> Result<Vec<Vec<u8>>, CodecError> {
    let mut random = Random::new(5);
    (0..SAMPLES).map(|_| sample(format, head_dim, &mut random)).collect()
}

fn sample(format: &PageLayout, head_dim: usize, random: &mut Random) -> Result<Vec<u8>, CodecError> {
    let mut page = vec![0; format.page_bytes()];
    for token in 0..PAGE_TOKENS {
        let rows = [Side::Key, Side::Value]
            .map(|side| (side, (0..head_dim).map(|_| 2.0 * random.signed()).collect::<Vec<f32>>()));
        match format {
            PageLayout::Bf16(layout) => {
                for (side, row) in &rows {
                    layout.write_token(&mut page, *side, token, row)?;
                }
            }
            PageLayout::Fp8(layout) => {
                for (side, row) in &rows {
                    layout.write_token(&mut page, *side, token, row)?;
                }
            }
            PageLayout::Banded(layout) => {
                let rows_of = BandRows { layout: *layout, value_rule: Rule::Gaussian };
                for (side, row) in &rows {
                    rows_of.write_token(&mut page, *side, token, row)?;
                }
            }
            PageLayout::Codes(layout) => {
                let (top, scale_type) = (f32::from(layout.largest_code()), layout.scale_type());
                let scales = vec![(scale_type.to_bits(4.0 / top), scale_type.to_bits(2.0)); layout.groups()];
                for (side, row) in &rows {
                    let codes: Vec<u8> = row.iter().map(|x| ((x + 2.0) / 4.0 * top).round() as u8).collect();
                    layout.write_token(&mut page, *side, token, &codes, &scales)?;
                }
            }
        }
    }
    Ok(page)
}

/// The largest difference between the path and the scalar reference on the sample pages.
fn error(bench: &AttentionBench, format: &PageLayout, samples: &[Vec<u8>]) -> Result<f64, KernelError> {
    let (rows, d) = (bench.q_heads / bench.kv_heads, bench.head_dim);
    // In whole words, so that bf16 pages lie on even addresses.
    let mut memory = PageMemory::default();
    memory.fill(samples.iter().map(Vec::len).sum(), samples)?;
    let pages: Vec<&[u8]> = memory.bytes().chunks_exact(samples[0].len()).take(samples.len()).collect();
    let (queries, scale) = (queries(rows * d), 1.0 / (d as f32).sqrt());
    let spans = vec![Span::up_to(pages.len() * PAGE_TOKENS); rows];
    let outputs = |isa: Isa| -> Vec<f32> {
        let (mut scratch, mut state) = (AttentionScratch::default(), SoftmaxState::default());
        state.reset(rows, d);
        let pages = SealedPages { layout: format, first: 0, bytes: &pages, means: &[] };
        attend_sealed(isa, pages, &queries, scale, &spans, &mut scratch, &mut state);
        let mut out = vec![0.0; rows * d];
        out.chunks_exact_mut(d).enumerate().for_each(|(row, out)| state.finish(row, out));
        out
    };
    let (expected, got) = (outputs(Isa::Scalar), outputs(bench.isa));
    let largest = expected.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
    let error = expected.iter().zip(&got).fold(0.0_f32, |error, (a, b)| error.max((a - b).abs()));
    Ok(f64::from(error / largest))
}

fn queries(len: usize) -> Vec<f32> {
    let mut random = Random::new(6);
    (0..len).map(|_| random.signed()).collect()
}

/// The memory of all pages, of the kind that pools have. It only grows, and is filled when it does.
#[derive(Default)]
struct PageMemory(Option<AlignedBuffer<u64>>);

impl PageMemory {
    fn fill(&mut self, len: usize, samples: &[Vec<u8>]) -> Result<(), KernelError> {
        if self.bytes().len() >= len {
            return Ok(());
        }
        self.0 = None;
        let mut words = AlignedBuffer::zeroed(len.div_ceil(8), "the pages to attend to")?;
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
        for (page, sample) in bytes.chunks_exact_mut(samples[0].len()).zip(samples.iter().cycle()) {
            page.copy_from_slice(sample);
        }
        while words.merge_pages(0..words.len()) {}
        self.0 = Some(words);
        Ok(())
    }

    fn bytes(&self) -> &[u8] {
        self.0.as_ref().map_or(&[], |words| bytemuck::cast_slice(words))
    }
}

/// Pages as they lie in a pool, `[page][layer][head]`.
struct PooledPages<'a> {
    bytes: &'a [u8],
    /// What keys are centred by, `[layer][page][head][channel]`; empty if that is nothing.
    means: &'a [u16],
    head_dim: usize,
    /// Number of pages of a context.
    pages: usize,
    /// Number of layers of all models together.
    layers: usize,
    model_layers: usize,
    kv_heads: usize,
    page_bytes: usize,
}

impl<'a> PooledPages<'a> {
    /// The pages of a range in one layer, head by head within each.
    fn pages(&self, range: &Range<usize>, layer: usize) -> impl Iterator<Item = &'a [u8]> {
        let PooledPages { bytes, pages, model_layers, kv_heads, page_bytes, .. } = *self;
        let (model, layer) = (layer / model_layers, layer % model_layers);
        range.clone().flat_map(move |page| {
            let first = ((model * pages + page) * model_layers + layer) * kv_heads;
            bytes[first * page_bytes..][..kv_heads * page_bytes].chunks_exact(page_bytes)
        })
    }

    /// The means of the same pages, in the same order.
    fn means(&self, range: &Range<usize>, layer: usize) -> impl Iterator<Item = &'a [u16]> {
        let first = layer % self.model_layers * self.pages;
        let of_page = self.kv_heads * self.head_dim;
        let means = self.means.get((first + range.start) * of_page..(first + range.end) * of_page);
        means.unwrap_or_default().chunks_exact(self.head_dim)
    }
}

/// A decode step of one token.
struct DecodeStep<'a> {
    bench: &'a AttentionBench,
    format: &'a PageLayout,
    context: usize,
    pool: &'a Pool,
}

impl DecodeStep<'_> {
    /// The work of one layer: ranges of pages, each for all heads.
    fn items(&self) -> Vec<Range<usize>> {
        let pages = self.context.div_ceil(PAGE_TOKENS);
        let range = pages.div_ceil(self.pool.threads() * ITEMS_PER_THREAD).max(1);
        (0..pages).step_by(range).map(|first| first..(first + range).min(pages)).collect()
    }

    /// Reads every page of every layer. Four pages at a time, because that is how a core gets the most of its memory.
    fn read(&self, cache: &PooledPages<'_>) {
        let items = self.items();
        for layer in 0..cache.layers {
            self.pool.for_each(items.len(), |index| {
                let mut sum = [0_u64; 32];
                let pages: Vec<&[[u64; 32]]> = cache
                    .pages(&items[index], layer)
                    .map(|page| bytemuck::cast_slice::<u8, u64>(page).as_chunks().0)
                    .collect();
                let quarter = pages.len().div_ceil(PLACES);
                for first in 0..quarter {
                    for part in 0..pages[first].len() {
                        for page in pages[first..].iter().step_by(quarter) {
                            sum.iter_mut().zip(&page[part]).for_each(|(sum, word)| *sum ^= word);
                        }
                    }
                }
                std::hint::black_box(sum);
            });
        }
    }

    /// Attends in every layer.
    fn attend(&self, cache: &PooledPages<'_>) {
        let AttentionBench { q_heads, kv_heads, head_dim: d, .. } = *self.bench;
        let rows = q_heads / kv_heads;
        let (queries, scale) = (queries(q_heads * d), 1.0 / (d as f32).sqrt());
        let spans = vec![Span::up_to(self.context); rows];
        let items = self.items();
        let scratches: Vec<Mutex<AttentionScratch>> =
            (0..self.pool.threads()).map(|_| Mutex::default()).collect();
        let states: Vec<Mutex<Vec<SoftmaxState>>> =
            items.iter().map(|_| Mutex::new(vec![SoftmaxState::default(); kv_heads])).collect();
        let mut out = vec![0.0; d];
        for layer in 0..cache.layers {
            self.pool.for_each_worker(items.len(), |worker, index| {
                let mut scratch = scratches[worker].lock().expect("no task panics");
                let mut states = states[index].lock().expect("no task panics");
                states.iter_mut().for_each(|state| state.reset(rows, d));
                let bytes: Vec<&[u8]> = cache.pages(&items[index], layer).collect();
                let means: Vec<&[u16]> = cache.means(&items[index], layer).collect();
                let first = items[index].start;
                let pages = SealedPages { layout: self.format, first, bytes: &bytes, means: &means };
                attend_sealed_heads(
                    self.bench.isa,
                    pages,
                    &queries,
                    scale,
                    &spans,
                    &mut scratch,
                    &mut states,
                );
            });
            let parts: Vec<_> = states.iter().map(|part| part.lock().expect("no task panics")).collect();
            for head in 0..kv_heads {
                let parts: Vec<&SoftmaxState> = parts.iter().map(|states| &states[head]).collect();
                (0..rows).for_each(|row| SoftmaxState::finish_parts(&parts, row, &mut out));
            }
            std::hint::black_box(&out);
        }
    }
}

/// Seconds of the fastest pass.
fn fastest(repeat: usize, mut pass: impl FnMut()) -> f64 {
    let mut fastest = f64::INFINITY;
    for _ in 0..repeat.max(1) {
        let start = Instant::now();
        pass();
        fastest = fastest.min(start.elapsed().as_secs_f64());
    }
    fastest
}

/// Fits a line through the contexts of each format.
fn slopes(bench: &AttentionBench, rows: &[AttentionRow]) -> Vec<AttentionSlope> {
    let slope = |kv: &str| {
        let points =
            rows.iter().filter(|row| row.kv == kv).map(|row| (row.context as f64 / 1024.0, row.us_per_layer));
        slope(&points.collect::<Vec<_>>())
    };
    let exact = slope(PageFormat::Bf16.name());
    let names = bench.formats.iter().map(|format| format.name());
    names
        .filter_map(|kv| {
            let us_per_1k_tokens = slope(kv)?;
            let of_bf16 = exact.map(|exact| us_per_1k_tokens / exact);
            Some(AttentionSlope { kind: "slope", kv, us_per_1k_tokens, of_bf16 })
        })
        .collect()
}

/// The least-squares slope; through the origin if all points have one x.
fn slope(points: &[(f64, f64)]) -> Option<f64> {
    let count = points.len() as f64;
    let mean = |of: &dyn Fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
    let (mean_x, mean_y) = (mean(&|point| point.0), mean(&|point| point.1));
    let variance = mean(&|point| (point.0 - mean_x).powi(2));
    if points.is_empty() {
        return None;
    }
    if variance == 0.0 {
        return Some(mean_y / mean_x);
    }
    Some(mean(&|point| (point.0 - mean_x) * (point.1 - mean_y)) / variance)
}

#[cfg(test)]
mod tests;
