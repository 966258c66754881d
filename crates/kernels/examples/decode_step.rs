//! Where the time of a decode step goes: milliseconds of each part, with a bf16 cache and with a 2-bit one, which take
//! turns because a machine's memory is faster in one minute than in the next.
//!
//! `cargo run --release -p oscar-kernels --example decode_step [smollm2|qwen [CONTEXT [THREADS]]]`
//!
//! Shapes are those of SmolLM2-135M in Q4_1 and Qwen2.5-1.5B in Q4_K; weights, keys and values are fillers.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::Instant;

use oscar_codec::{
    CodeLayout, ExactSlot, HeadEncoder, HeadTransform, KvGeometry, PAGE_TOKENS, PageCodec, PageWindows, Rule,
    SealedSlot, hadamard,
};
use oscar_kernels::backend::{
    Activation, AttentionSpec, Batch, CacheSpec, GatedMlp, HostSlots, Linear, RmsNorm, Rope, RopeLayout,
    SealPage, SealedRows, SealedSpec, SequenceRows, StoredMatrix,
};
use oscar_kernels::cpu::{Cache, CpuBackend};
use oscar_kernels::{Backend, DType};
use oscar_random::Random;

const PARTS: [&str; 7] = ["qkv", "rope", "attention", "output", "mlp", "head", "all"];
const STEPS: usize = 100;

#[derive(Clone, Copy)]
struct Shape {
    layers: usize,
    hidden: usize,
    inner: usize,
    q_heads: usize,
    kv_heads: usize,
    d: usize,
    vocab: usize,
    weights: DType,
    head: DType,
}

const SMOLLM2: Shape = Shape {
    layers: 30,
    hidden: 576,
    inner: 1536,
    q_heads: 9,
    kv_heads: 3,
    d: 64,
    vocab: 49152,
    weights: DType::Q4_1,
    head: DType::Q8_0,
};

const QWEN: Shape = Shape {
    layers: 28,
    hidden: 1536,
    inner: 8960,
    q_heads: 12,
    kv_heads: 2,
    d: 128,
    vocab: 151_936,
    weights: DType::Q4K,
    head: DType::Q6K,
};

struct Layer {
    norm: RmsNorm<CpuBackend>,
    qkv: [Linear<CpuBackend>; 3],
    output: Linear<CpuBackend>,
    mlp: GatedMlp<CpuBackend>,
}

/// A cache that holds `context` tokens of one sequence.
struct Filled {
    cache: Cache,
    exact: Vec<Option<ExactSlot>>,
    sealed: Option<Vec<Option<SealedSlot>>>,
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let shape = if arguments.first().is_some_and(|name| name == "qwen") { QWEN } else { SMOLLM2 };
    let context = arguments.get(1).map_or(8000, |context| context.parse().unwrap());
    let threads = arguments.get(2).map_or(2, |threads| threads.parse().unwrap());
    let backend = CpuBackend::new(threads).unwrap();
    let rope =
        Rope { inverse_frequencies: vec![0.01; shape.d / 2], magnitude: 1.0, layout: RopeLayout::Halves };
    let mut caches = [false, true].map(|sealed| fill(&backend, &rope, shape, context, sealed));
    let linear = |rows, cols| Linear { weight: weight(&backend, shape.weights, rows, cols), bias: None };
    let norm = || RmsNorm { weight: weight(&backend, DType::F32, 1, shape.hidden), eps: 1e-5 };
    let (q, kv) = (shape.q_heads * shape.d, shape.kv_heads * shape.d);
    let layers: Vec<Layer> = (0..shape.layers)
        .map(|_| Layer {
            norm: norm(),
            qkv: [q, kv, kv].map(|rows| linear(rows, shape.hidden)),
            output: linear(shape.hidden, q),
            mlp: GatedMlp {
                norm: norm(),
                activation: Activation::Silu,
                gate: linear(shape.inner, shape.hidden),
                up: linear(shape.inner, shape.hidden),
                down: linear(shape.hidden, shape.inner),
                output_norm: None,
            },
        })
        .collect();
    let (head, last) = (weight(&backend, shape.head, shape.vocab, shape.hidden), norm());
    let mut times = [const { Vec::new() }; 2];
    for _ in 0..STEPS {
        for (cache, times) in caches.iter_mut().zip(&mut times) {
            times.push(step(&backend, &rope, shape, context, &layers, &head, &last, cache));
        }
    }
    println!(
        "{} kernels, {threads} threads, {context} tokens; milliseconds, median of {STEPS}",
        backend.isa()
    );
    println!("{:5} {}", "cache", PARTS.map(|part| format!("{part:>10}")).concat());
    for (name, times) in ["bf16", "int2"].into_iter().zip(times) {
        let median = |part: usize| {
            let mut values: Vec<f64> = times.iter().map(|step: &[f64; PARTS.len()]| step[part]).collect();
            values.sort_by(f64::total_cmp);
            format!("{:10.3}", values[values.len() / 2])
        };
        println!("{name:5} {}", std::array::from_fn::<_, { PARTS.len() }, _>(median).concat());
    }
}

/// One token through all layers; milliseconds of each part.
fn step(
    backend: &CpuBackend,
    rope: &Rope,
    shape: Shape,
    context: usize,
    layers: &[Layer],
    head: &<CpuBackend as Backend>::Weight,
    last: &RmsNorm<CpuBackend>,
    filled: &mut Filled,
) -> [f64; PARTS.len()] {
    let spec = attention(shape);
    let mut hidden = backend.buffer(1, shape.hidden).unwrap();
    hidden.first_rows_mut("a row", 1).unwrap().copy_from_slice(&Random::new(1).signed_vec(shape.hidden));
    let mut qkv = backend.buffer(1, spec.qkv_cols()).unwrap();
    let mut attended = backend.buffer(1, shape.q_heads * shape.d).unwrap();
    let mut logits = backend.buffer(1, shape.vocab).unwrap();
    let begin = Instant::now();
    let (mut times, mut at) = ([0.0; PARTS.len()], begin);
    let mut lap = |part: usize| {
        let now = Instant::now();
        times[part] += (now - at).as_secs_f64() * 1e3;
        at = now;
    };
    let sealed = filled.sealed.as_ref();
    let sealed = sealed.map(|pages| SealedRows { pages, exact_from: usize::MAX, sealed_until: 0 });
    let rows = SequenceRows { start: context, len: 1, pages: &filled.exact, sealed };
    let cache = &mut filled.cache;
    let tables = backend.begin_step(&Batch { tokens: &[0], sequences: &[rows] }, rope, cache).unwrap();
    for (index, layer) in layers.iter().enumerate() {
        let [q, k, v] = &layer.qkv;
        backend.norm_linear(&tables, &hidden, &layer.norm, &[q, k, v], &mut qkv).unwrap();
        lap(0);
        backend.rope_store(&tables, &spec, index, &mut qkv, cache).unwrap();
        lap(1);
        backend.attend(&tables, &spec, index, &qkv, cache, &mut attended).unwrap();
        lap(2);
        backend.linear_add(&tables, &attended, &layer.output, &mut hidden).unwrap();
        lap(3);
        backend.gated_mlp(&tables, &layer.mlp, &mut hidden).unwrap();
        lap(4);
    }
    backend.logits(&hidden, &[0], last, head, &mut logits).unwrap();
    lap(5);
    times[6] = begin.elapsed().as_secs_f64() * 1e3;
    times
}

fn attention(shape: Shape) -> AttentionSpec<CpuBackend> {
    let Shape { q_heads, kv_heads, d: head_dim, .. } = shape;
    AttentionSpec {
        q_heads,
        kv_heads,
        head_dim,
        scale: 0.05,
        window: None,
        rotates: true,
        sinks: None,
        q_norm: None,
        k_norm: None,
    }
}

fn fill(backend: &CpuBackend, rope: &Rope, shape: Shape, context: usize, seal: bool) -> Filled {
    let windows = PageWindows { sink: 1, recent: 4 };
    let last = context / PAGE_TOKENS;
    let history = if seal { windows.history(last, usize::MAX, 0) } else { 0..0 };
    // One more slot, in which pages are written before they are sealed.
    let slots = last + 3 - history.len();
    let workbench = ExactSlot::new(slots as u32 - 1).unwrap();
    let spec = CacheSpec {
        geometry: KvGeometry { layers: shape.layers, kv_heads: shape.kv_heads, head_dim: shape.d },
        query_heads: shape.q_heads,
        slots,
        scratch_slots: 0,
        sealed: seal.then(|| SealedSpec {
            codec: Arc::new(int2(shape)),
            slots: history.len() + 1,
            windows,
            sequence_pages: last + 1,
            high: None,
        }),
        host: HostSlots::default(),
    };
    let mut cache = backend.cache(&spec).unwrap();
    let spec = attention(shape);
    let values = Random::new(1).signed_vec(PAGE_TOKENS * spec.qkv_cols());
    let mut qkv = backend.buffer(PAGE_TOKENS, spec.qkv_cols()).unwrap();
    let (mut exact, mut sealed) = (vec![None; last + 1], vec![None; last + 1]);
    let mut unused = ExactSlot::first(last + 1).into_iter().flatten();
    for page in 0..=last {
        let kept = !history.contains(&page);
        let slot = if kept { unused.next() } else { Some(workbench) };
        // Every page is written as if it were the first: only its place in memory counts.
        let rows = SequenceRows::exact(0, PAGE_TOKENS, std::slice::from_ref(&slot));
        let tokens = [0; PAGE_TOKENS];
        let step = backend.begin_step(&Batch { tokens: &tokens, sequences: &[rows] }, rope, &cache).unwrap();
        for layer in 0..shape.layers {
            qkv.first_rows_mut("a page", PAGE_TOKENS).unwrap().copy_from_slice(&values);
            backend.rope_store(&step, &spec, layer, &mut qkv, &mut cache).unwrap();
        }
        if kept {
            exact[page] = slot;
        } else {
            let to = SealedSlot::new((page - history.start) as u32 + 1).unwrap();
            sealed[page] = Some(to);
            let entry = SealPage { page, exact: workbench, sealed: to };
            backend.seal(0..shape.layers, &[entry], &mut cache).unwrap();
        }
    }
    Filled { cache, exact, sealed: seal.then_some(sealed) }
}

fn int2(shape: Shape) -> PageCodec {
    let encoders = |clip: f32| -> Vec<HeadEncoder> {
        let transform = || HeadTransform::new(None, &hadamard::matrix(shape.d)).unwrap();
        let layout = CodeLayout::new(2, shape.d, 1).unwrap();
        let encoder = |_| HeadEncoder::codes(transform(), layout, Rule::Clip(clip), false);
        (0..shape.layers * shape.kv_heads).map(encoder).collect()
    };
    let (keys, values) = (encoders(0.96), encoders(0.92));
    let geometry = KvGeometry { layers: shape.layers, kv_heads: shape.kv_heads, head_dim: shape.d };
    PageCodec::new("int2", geometry, keys, values).unwrap()
}

fn weight(backend: &CpuBackend, dtype: DType, rows: usize, cols: usize) -> <CpuBackend as Backend>::Weight {
    let len = rows * cols / dtype.block_len() * dtype.block_bytes();
    // Small numbers in every type, at any place.
    let data: Vec<u8> = (0..len).map(|i| [0x1c, 0x24, 0x1d, 0x23, 0x1b][i % 5]).collect();
    backend
        .weight(&StoredMatrix { bytes: Arc::new(data), offset: 0, dtype, rows, cols, scales: None })
        .unwrap()
}
