//! One kernel on one batch, timed as it runs in a model: pages of several layers, so that none is in a cache when its turn
//! comes, launches replayed from a graph. The result of one head is compared with attention in f64 on the decoded pages.

use std::sync::Arc;

use cudarc::driver::CudaSlice;
use cudarc::driver::sys::{CUevent_flags, CUgraphInstantiate_flags, CUstreamCaptureMode};
use oscar_codec::{ExactSlot, PAGE_TOKENS, SealedSlot};
use oscar_kernels::cuda::reference::{random_page, reference, shuffled};
use oscar_kernels::cuda::{
    CudaError, DecodeAttention, DecodeSequence, DecodeShape, Device, PageOrder, PoolView, Split, Tuning,
};
use oscar_random::Random;

use super::page_means::CentredPages;
use super::read::ReadAll;

/// A batch of sequences of one length.
#[derive(Clone, Copy, Debug)]
pub struct DecodeCase {
    /// Heads and page format.
    pub shape: DecodeShape,
    /// Number of sequences.
    pub batch: usize,
    /// Tokens of each sequence.
    pub tokens: usize,
    /// Pages read in bf16 at the start.
    pub sink_pages: usize,
    /// Full pages read in bf16 before that of the query.
    pub recent_pages: usize,
    /// How sequences are split into segments.
    pub split: Split,
    /// A tuning of the kernel other than the one that is chosen by default.
    pub tuning: Option<Tuning>,
    /// Bytes of pages that are read before one is read again.
    pub pool_bytes: usize,
    /// Timed passes over all layers.
    pub passes: usize,
}

/// The measurement of a case.
#[derive(Clone, Copy, Debug)]
pub struct MeasuredDecode {
    /// Seconds per layer: the median over passes.
    pub seconds: f64,
    /// Seconds per layer of the fastest pass.
    pub fastest: f64,
    /// Bytes of pages that a layer reads.
    pub bytes: usize,
    /// How many layers are timed together.
    pub layers: usize,
    /// Norm of the difference to f64 over the norm of the result.
    pub error: f64,
    /// Registers that a thread of the kernel has.
    pub registers: usize,
    /// Bytes of local memory of a thread.
    pub spilled: usize,
    /// Number of partial results of a layer.
    pub partials: usize,
}

/// Different pages that fill the pools in turn; odd, so that heads and pages differ.
pub(super) const SAMPLES: usize = 7;

/// Replays what `record` launches as a graph; seconds of each pass, sorted.
pub(super) fn replay(
    device: &Device,
    passes: usize,
    record: impl FnOnce() -> Result<(), CudaError>,
) -> Result<Vec<f64>, CudaError> {
    let stream = device.stream();
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
    let recorded = record();
    let graph = stream.end_capture(CUgraphInstantiate_flags(0));
    recorded?;
    let Some(graph) = graph? else {
        return Err(CudaError::Unsupported("nothing was launched, so nothing can be timed".into()));
    };
    for _ in 0..2 {
        graph.launch()?;
    }
    let mut seconds = Vec::new();
    for _ in 0..passes.max(1) {
        let start = stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT))?;
        graph.launch()?;
        let end = stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT))?;
        seconds.push(f64::from(start.elapsed_ms(&end)?) / 1e3);
    }
    seconds.sort_by(f64::total_cmp);
    Ok(seconds)
}

/// Bytes per second of a kernel that only reads, the best of several launches, on random bytes.
pub fn read_ceiling(device: &Arc<Device>) -> Result<f64, CudaError> {
    let bytes = (4_usize << 30).min(device.free_memory()? / 2) & !15;
    let mut random = Random::new(1);
    let chunk: Vec<u8> = (0..16 << 20).map(|_| (random.signed() * 127.0) as i8 as u8).collect();
    let staged = device.stream().clone_htod(&chunk)?;
    let mut memory = device.zeroed(bytes)?;
    for begin in (0..bytes).step_by(chunk.len()) {
        let len = chunk.len().min(bytes - begin);
        device.stream().memcpy_dtod(&staged.slice(..len), &mut memory.slice_mut(begin..begin + len))?;
    }
    let mut read = ReadAll::new(device)?;
    let mut best = f64::INFINITY;
    for blocks in [2, 4, 8] {
        let seconds = replay(device, 15, || read.launch(&memory, blocks))?;
        best = best.min(seconds[seconds.len() / 2]);
    }
    Ok(bytes as f64 / best)
}

/// Layers that have mean keys of their own, at most.
const MEAN_LAYERS: usize = 48;

/// The bf16 and the sealed slots of a sequence.
type PageTables = (Vec<Option<ExactSlot>>, Vec<Option<SealedSlot>>);

/// Measures a case.
pub fn measure(device: &Arc<Device>, case: &DecodeCase) -> Result<MeasuredDecode, CudaError> {
    let kernel = match case.tuning {
        Some(tuning) => DecodeAttention::with_tuning(device, case.shape, tuning)?,
        None => DecodeAttention::new(device, case.shape)?,
    };
    let pages = case.tokens.div_ceil(PAGE_TOKENS);
    let history_end =
        if case.shape.sealed.is_bf16() { 0 } else { pages.saturating_sub(1 + case.recent_pages) };
    let is_sealed = |page: usize| (case.sink_pages..history_end).contains(&page);
    let sealed_pages = (0..pages).filter(|&page| is_sealed(page)).count();
    let mut random = Random::new(11);
    // Slots of each pool in random order, as after some hours of serving.
    let mut free = [pages - sealed_pages, sealed_pages]
        .map(|count| shuffled(case.batch * count, &mut random).into_iter());
    let tables: Vec<PageTables> = (0..case.batch)
        .map(|_| {
            let slots = |page| {
                let sealed = is_sealed(page);
                let number = 1 + free[usize::from(sealed)].next().expect("a slot per page");
                if sealed { (None, SealedSlot::new(number)) } else { (ExactSlot::new(number), None) }
            };
            (0..pages).map(slots).unzip()
        })
        .collect();
    let sequences: Vec<DecodeSequence<'_>> = tables
        .iter()
        .enumerate()
        .map(|(row, (exact, sealed))| {
            let (tokens, sink_pages) = (case.tokens, case.sink_pages);
            DecodeSequence { row, tokens, sink_pages, history_end, exact, sealed }
        })
        .collect();
    let mut plan = kernel.plan(case.split, &sequences)?;
    let bytes = plan.plan().bytes;
    let layers = case.pool_bytes.div_ceil(bytes.max(1)).clamp(1, 1024);

    let samples = [0, 1].map(|pool| SamplePages::new(&kernel.orders()[pool], &mut random));
    let heads = case.shape.kv_heads;
    // One slot more than pages: the dummy of a layer is the last page of the layer before.
    let pools = [(0, pages - sealed_pages), (1, sealed_pages)].map(|(pool, count): (usize, usize)| {
        samples[pool].fill(device, (layers * case.batch * count + 1) * heads)
    });
    let [exact, sealed] = pools;
    let (exact, sealed) = (exact?, sealed?);
    let view = |pool: usize, memory: &CudaSlice<u8>, count: usize, layer: usize| -> (usize, usize) {
        debug_assert!(!memory.is_empty());
        let stride = kernel.orders()[pool].page_bytes() * heads;
        (layer * case.batch * count * stride, stride)
    };

    let numbers = case.batch * heads * case.shape.group * case.shape.head_dim;
    let queries: Vec<f32> = (0..numbers).map(|_| 2.0 * random.signed()).collect();
    let scale = 1.0 / (case.shape.head_dim as f32).sqrt();
    let device_queries = device.stream().clone_htod(&queries)?;
    let mut out = device.stream().clone_htod(&vec![f32::NAN; numbers])?;
    // Enough that none is in a cache when its turn comes.
    let mean_layers = layers.min(MEAN_LAYERS);
    let centred = CentredPages::new(device, case.shape.sealed, heads, mean_layers, pages)?;
    let mut launch = |layer: usize| {
        let (offset, stride) = view(0, &exact, pages - sealed_pages, layer);
        let exact = PoolView { memory: &exact, first: 0, offset, stride, scratch: None, means: None };
        let (offset, stride) = view(1, &sealed, sealed_pages, layer);
        let sealed = (sealed_pages > 0).then_some(PoolView {
            memory: &sealed,
            first: 0,
            offset,
            stride,
            scratch: None,
            means: centred.as_ref().and_then(|centred| centred.table.of_layer(layer % centred.layers)),
        });
        kernel.launch(&mut plan, exact, sealed, &device_queries, scale, &mut out)
    };
    launch(0)?;
    device.synchronise()?;
    let seconds = replay(device, case.passes, || (0..layers).try_for_each(&mut launch))?;
    launch(0)?;
    let got = device.stream().clone_dtoh(&out)?;
    device.synchronise()?;

    let (exact, sealed) = &tables[0];
    let rows = |page: usize| {
        let (pool, slot) = match is_sealed(page) {
            false => (0, ExactSlot::table_entry(exact[page])),
            true => (1, SealedSlot::table_entry(sealed[page])),
        };
        let rows = &samples[pool].rows[slot as usize * heads % SAMPLES];
        match &centred {
            Some(centred) if pool == 1 => centred.with_mean(page, rows),
            _ => rows.clone(),
        }
    };
    let held: Vec<[Vec<f32>; 2]> = (0..pages).map(rows).collect();
    let width = case.shape.group * case.shape.head_dim;
    let error =
        relative_error(&queries[..width], &got[..width], case.shape.head_dim, scale, case.tokens, |page| {
            &held[page]
        });
    let (registers, spilled) = kernel.resources()?;
    Ok(MeasuredDecode {
        seconds: seconds[seconds.len() / 2] / layers as f64,
        fastest: seconds[0] / layers as f64,
        bytes,
        layers,
        error,
        registers,
        spilled,
        partials: plan.plan().partials,
    })
}

/// Norm of the difference to attention in f64 over the norm of that, for rows of one head; `rows(page)` is what pages hold.
pub(super) fn relative_error<'a>(
    queries: &[f32],
    got: &[f32],
    head_dim: usize,
    scale: f32,
    tokens: usize,
    rows: impl Fn(usize) -> &'a [Vec<f32>; 2],
) -> f64 {
    let (mut difference, mut norm) = (0.0, 0.0);
    for (query, got) in queries.chunks_exact(head_dim).zip(got.chunks_exact(head_dim)) {
        for (expected, &got) in reference(query, scale, tokens, &rows).iter().zip(got) {
            difference += (expected - f64::from(got)).powi(2);
            norm += expected.powi(2);
        }
    }
    // NaN if any number is NaN.
    if norm == 0.0 { f64::sqrt(difference) } else { f64::sqrt(difference / norm) }
}

/// Random pages of one format: bytes of the device and what they mean.
pub(super) struct SamplePages {
    /// Bytes of each page, in the order of the device.
    pages: Vec<Vec<u8>>,
    /// Keys and values of each page, 64 rows.
    pub(super) rows: Vec<[Vec<f32>; 2]>,
}

impl SamplePages {
    pub(super) fn new(order: &PageOrder, random: &mut Random) -> SamplePages {
        let drawn = (0..SAMPLES).map(|_| {
            let rows =
                [0, 1].map(|_| (0..PAGE_TOKENS * order.head_dim()).map(|_| 2.0 * random.signed()).collect());
            random_page(order, &rows, random)
        });
        let (pages, rows) = drawn.unzip();
        SamplePages { pages, rows }
    }

    /// Allocates device memory and fills it with the pages in turn.
    pub(super) fn fill(&self, device: &Device, pages: usize) -> Result<CudaSlice<u8>, CudaError> {
        let page = self.pages[0].len();
        let mut memory = device.zeroed(pages * page)?;
        if pages == 0 {
            return Ok(memory);
        }
        let chunk: Vec<u8> = self.pages.concat().repeat((32 << 20) / (page * SAMPLES) + 1);
        let staged = device.stream().clone_htod(&chunk)?;
        for begin in (0..pages * page).step_by(chunk.len()) {
            let len = chunk.len().min(pages * page - begin);
            device.stream().memcpy_dtod(&staged.slice(..len), &mut memory.slice_mut(begin..begin + len))?;
        }
        device.synchronise()?;
        Ok(memory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_relative_to_the_result() {
        // Two tokens with logits 0 and ln 3 and values 4 and 8: the result is 7.
        let page = [[0.0, 3_f32.ln()].repeat(32), [4.0, 8.0].repeat(32)];
        assert!((relative_error(&[1.0], &[7.07], 1, 1.0, 2, |_| &page) - 0.01).abs() < 1e-6);
        assert!(relative_error(&[1.0], &[f32::NAN], 1, 1.0, 2, |_| &page).is_nan());
    }
}
