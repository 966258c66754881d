//! Steps whose sequences have sealed pages of two codecs, over layers of which one stays bf16: the card against the CPU, and
//! rows alone against rows in a batch.

use std::sync::Arc;

use oscar_codec::{BandLayout, ExactSlot, PAGE_TOKENS, PageCodec, PageWindows, SealedSlot};
use oscar_kernels::backend::{
    AttentionSpec, Batch, CacheSpec, HighSpec, HostSlots, Rope, RopeLayout, SealPage, SealedRows, SealedSpec,
    SequenceRows,
};
use oscar_kernels::cpu::CpuBackend;
use oscar_kernels::cpu::isa::Isa;
use oscar_kernels::cuda::reference::rounds_queries;
use oscar_kernels::cuda::{CudaBackend, Device};
use oscar_kernels::{Backend, Inspect};
use oscar_random::Random;

use super::attend::{KV_HEADS, banded, codec, sinks};
use super::backend::{error, report};

/// Layers of the cache; the second may stay bf16.
const LAYERS: usize = 2;
/// Pages that a sequence may have.
const PAGES: usize = 9;
const WINDOWS: PageWindows = PageWindows { sink: 1, recent: 2 };

/// Where the history of a sequence goes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Tier {
    /// Sealed with the codec of the cache.
    Own,
    /// Sealed with the second codec.
    High,
    /// It stays in bf16.
    Exact,
}

const TIERS: [Tier; 4] = [Tier::High, Tier::Own, Tier::Exact, Tier::High];

/// Rows of each sequence in every step. Chunks, tokens, both; steps without some of the tiers.
const STEPS: [[usize; 4]; 9] = [
    [150, 200, 70, 1],
    [1, 1, 1, 1],
    [90, 1, 0, 300],
    [1, 1, 0, 1],
    [0, 64, 1, 0],
    [1, 0, 0, 1],
    [1, 1, 1, 1],
    [30, 40, 50, 60],
    [1, 1, 1, 1],
];

/// Runs everything; the number of failures.
pub(crate) fn run(device: &Arc<Device>, quick: bool) -> usize {
    // Vector instructions round queries where they meet codes.
    let cpu = CpuBackend::with_isa(8, Isa::Scalar);
    let mut failures = 0;
    for deterministic in [false, true] {
        let cuda = CudaBackend::new(device.clone(), deterministic).unwrap();
        for (d, bands, keep, group, with_sinks) in [
            (128, true, true, 4, false),
            (64, true, false, 3, false),
            (64, false, true, 8, false),
            (128, false, false, 12, false),
            (128, true, true, 12, true),
            (256, true, true, 4, false),
        ] {
            if quick && d != 128 {
                continue;
            }
            let codec = if bands { banded(BandLayout::int2(d).unwrap(), keep) } else { codec(d, 2) };
            let codec = match keep {
                true => PageCodec::clone(&codec).keep_bf16(&[1]).unwrap(),
                false => PageCodec::clone(&codec),
            };
            let shape = Shape { codec: Arc::new(codec), group, with_sinks };
            failures += against_cpu(&cpu, &cuda, &shape);
            if deterministic {
                failures += alone(&cuda, &shape);
            }
        }
        failures += usize::from(!seals_both(&cpu, &cuda));
    }
    failures
}

/// What a cache and its reader are like.
struct Shape {
    codec: Arc<PageCodec>,
    group: usize,
    with_sinks: bool,
}

impl Shape {
    fn name(&self) -> String {
        let d = self.codec.geometry().head_dim;
        let kept = if self.codec.layout(1) == self.codec.layout(0) { "" } else { ", a layer in bf16" };
        let sinks = if self.with_sinks { ", sinks" } else { "" };
        format!("tiers of {}, {d} channels, {} query heads{kept}{sinks}", self.codec.name(), self.group)
    }

    fn query_heads(&self) -> usize {
        KV_HEADS * self.group
    }

    /// Numbers of queries, keys and values of a row.
    fn columns(&self) -> usize {
        (self.query_heads() + 2 * KV_HEADS) * self.codec.geometry().head_dim
    }
}

/// A sequence of a cache.
struct Sequence {
    tier: Tier,
    tokens: usize,
    exact: Vec<Option<ExactSlot>>,
    sealed: Vec<Option<SealedSlot>>,
    /// The first of the numbers that its sealed pages have.
    first_sealed: u32,
}

/// Sequences of all tiers in a cache on a device.
struct Tiers<'a, B: Backend> {
    backend: &'a B,
    spec: AttentionSpec<B>,
    cache: B::Cache,
    rope: Rope,
    sequences: Vec<Sequence>,
}

impl<'a, B: Inspect> Tiers<'a, B> {
    fn new(backend: &'a B, shape: &Shape) -> Tiers<'a, B> {
        let geometry = shape.codec.geometry();
        let (d, q_heads) = (geometry.head_dim, shape.query_heads());
        let slots = TIERS.len() * PAGES + 1;
        let high = Some(HighSpec { codec: Arc::new(shape.codec.high().unwrap()), slots });
        let sealed =
            SealedSpec { codec: shape.codec.clone(), slots, windows: WINDOWS, sequence_pages: PAGES, high };
        let cache = CacheSpec {
            geometry,
            query_heads: q_heads,
            slots,
            scratch_slots: 0,
            sealed: Some(sealed),
            host: HostSlots::default(),
        };
        let sequences = TIERS.iter().zip(0..).map(|(&tier, index)| {
            let first = 1 + index * PAGES as u32;
            Sequence {
                tier,
                tokens: 0,
                exact: ExactSlot::table(first..first + PAGES as u32),
                sealed: vec![None; PAGES],
                first_sealed: first + if tier == Tier::High { slots as u32 } else { 0 },
            }
        });
        Tiers {
            backend,
            spec: AttentionSpec {
                q_heads,
                kv_heads: KV_HEADS,
                head_dim: d,
                scale: 1.0 / (d as f32).sqrt(),
                window: None,
                rotates: true,
                sinks: shape.with_sinks.then(|| backend.weight(&sinks(q_heads)).unwrap()),
                q_norm: None,
                k_norm: None,
            },
            cache: backend.cache(&cache).unwrap(),
            rope: Rope {
                inverse_frequencies: (0..d / 2).map(|i| 1e4_f32.powf(-2.0 * i as f32 / d as f32)).collect(),
                magnitude: 1.0,
                layout: RopeLayout::Halves,
            },
            sequences: sequences.collect(),
        }
    }

    /// Seals what has left the windows of sequences, all in one call, and attends rows of those that have any: outputs of
    /// every layer, `[layer][row]`.
    fn step(&mut self, lens: &[usize], rows: &[f32]) -> [Vec<f32>; LAYERS] {
        let mut pages = Vec::new();
        let mut ends = Vec::new();
        for sequence in &mut self.sequences {
            let due = match sequence.tier {
                Tier::Exact => 0..0,
                _ => WINDOWS.history(sequence.tokens / PAGE_TOKENS, usize::MAX, 0),
            };
            ends.push(due.end);
            for page in due {
                let (Some(exact), Some(sealed)) =
                    (sequence.exact[page], SealedSlot::new(sequence.first_sealed + page as u32))
                else {
                    continue;
                };
                sequence.sealed[page] = Some(sealed);
                sequence.exact[page] = None;
                pages.push(SealPage { page, exact, sealed });
            }
        }
        self.backend.seal(0..LAYERS, &pages, &mut self.cache).unwrap();
        let count: usize = lens.iter().sum();
        let batch: Vec<SequenceRows<'_>> = self
            .sequences
            .iter()
            .zip(lens)
            .zip(&ends)
            .filter(|((_, len), _)| **len > 0)
            .map(|((sequence, &len), &exact_from)| SequenceRows {
                start: sequence.tokens,
                len,
                pages: &sequence.exact,
                sealed: (sequence.tier != Tier::Exact).then_some(SealedRows {
                    pages: &sequence.sealed,
                    exact_from,
                    sealed_until: 0,
                }),
            })
            .collect();
        let batch = Batch { tokens: &vec![0; count], sequences: &batch };
        let step = self.backend.begin_step(&batch, &self.rope, &self.cache).unwrap();
        let columns = self.spec.qkv_cols();
        let outputs = [0, 1].map(|layer| {
            let mut copy = self.backend.buffer(count, columns).unwrap();
            self.backend.write(rows, &mut copy).unwrap();
            self.backend.rope_store(&step, &self.spec, layer, &mut copy, &mut self.cache).unwrap();
            let width = self.spec.q_heads * self.spec.head_dim;
            let mut out = self.backend.buffer(count, width).unwrap();
            // What no kernel writes shows.
            self.backend.write(&vec![f32::NAN; count * width], &mut out).unwrap();
            self.backend.attend(&step, &self.spec, layer, &copy, &self.cache, &mut out).unwrap();
            self.backend.read(&out, 0..count).unwrap()
        });
        drop(step);
        self.sequences.iter_mut().zip(lens).for_each(|(sequence, len)| sequence.tokens += len);
        outputs
    }
}

/// The rows of all steps.
fn rows(shape: &Shape) -> Vec<Vec<f32>> {
    let mut random = Random::new(41);
    let mut numbers = |count: usize| (0..count).map(|_| 2.0 * random.signed()).collect();
    STEPS.iter().map(|lens| numbers(lens.iter().sum::<usize>() * shape.columns())).collect()
}

fn against_cpu(cpu: &CpuBackend, cuda: &CudaBackend, shape: &Shape) -> usize {
    let (mut here, mut there) = (Tiers::new(cpu, shape), Tiers::new(cuda, shape));
    let mut worst = [[0.0_f64; 2]; LAYERS];
    for (lens, rows) in STEPS.iter().zip(rows(shape)) {
        let (expected, got) = (here.step(lens, &rows), there.step(lens, &rows));
        let tokens = usize::from(lens.iter().all(|&len| len <= 1));
        let count: usize = lens.iter().sum();
        for (layer, (expected, got)) in expected.iter().zip(&got).enumerate() {
            // Every row by itself: one that is missing must not be lost among the others.
            let width = expected.len() / count;
            for (expected, got) in expected.chunks_exact(width).zip(got.chunks_exact(width)) {
                let error = error(expected, got);
                let worst = &mut worst[layer][tokens];
                *worst = if error.is_nan() || worst.is_nan() { f64::NAN } else { worst.max(error) };
            }
        }
    }
    let mut failures = 0;
    for (layer, [chunks, tokens]) in worst.into_iter().enumerate() {
        // The card rounds queries to bytes in some bands where there are many, see `attend.rs`.
        let limit = if rounds_queries(shape.codec.layout(layer), shape.group) { 2e-2 } else { 5e-3 };
        failures += report(&format!("{}, layer {layer}, chunks", shape.name()), chunks, 2e-2);
        failures += report(&format!("{}, layer {layer}, tokens", shape.name()), tokens, limit);
    }
    failures
}

/// With one numeric path, a sequence has the same bits alone and among those of other tiers.
fn alone(cuda: &CudaBackend, shape: &Shape) -> usize {
    let mut failures = 0;
    let steps = rows(shape);
    let mut together = Tiers::new(cuda, shape);
    let batches: Vec<_> = STEPS.iter().zip(&steps).map(|(lens, rows)| together.step(lens, rows)).collect();
    for only in 0..TIERS.len() {
        let mut sequence = Tiers::new(cuda, shape);
        let mut different = 0;
        for ((lens, rows), batch) in STEPS.iter().zip(&steps).zip(&batches) {
            let first: usize = lens[..only].iter().sum();
            let of_only =
                |numbers: &[f32], width: usize| numbers[first * width..(first + lens[only]) * width].to_vec();
            let mut alone = [0; TIERS.len()];
            alone[only] = lens[only];
            if lens[only] == 0 {
                continue;
            }
            let got = sequence.step(&alone, &of_only(rows, shape.columns()));
            for (batch, got) in batch.iter().zip(&got) {
                let expected = of_only(batch, got.len() / lens[only]);
                different += expected.iter().zip(got).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
            }
        }
        if different > 0 {
            println!("FAILED {}: {different} numbers of sequence {only} differ in a batch", shape.name());
            failures += 1;
        }
    }
    failures
}

/// A page that is not finite is named by its place in a list that has pages of both codecs.
fn seals_both(cpu: &CpuBackend, cuda: &CudaBackend) -> bool {
    let shape = Shape { codec: banded(BandLayout::int2(64).unwrap(), true), group: 1, with_sinks: false };
    let mut messages = Vec::new();
    fn message<B: Inspect>(backend: &B, shape: &Shape) -> String {
        let mut tiers = Tiers::new(backend, shape);
        let lens = [64; TIERS.len()];
        let mut rows = vec![1.0; 64 * TIERS.len() * shape.columns()];
        // A value of the second sequence.
        rows[(64 + 7 + 1) * shape.columns() - 1] = f32::NAN;
        tiers.step(&lens, &rows);
        let page = |sequence: &Sequence| SealPage {
            page: 0,
            exact: sequence.exact[0].unwrap(),
            sealed: SealedSlot::new(sequence.first_sealed).unwrap(),
        };
        let pages: Vec<SealPage> = [3, 0, 1].map(|index: usize| page(&tiers.sequences[index])).to_vec();
        let failed = backend.seal(0..LAYERS, &pages, &mut tiers.cache);
        failed.map_or_else(|error| error.to_string(), |()| "sealed".to_owned())
    }
    messages.push(message(cpu, &shape));
    messages.push(message(cuda, &shape));
    let right = messages[0] == messages[1] && messages[0] != "sealed";
    if !right {
        println!("FAILED tiers: {messages:?}");
    }
    right
}
