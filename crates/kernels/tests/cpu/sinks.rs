//! Attention with a learned sink for each query head, against the definition.

use std::sync::Arc;

use half::bf16;
use oscar_codec::{
    CodeLayout, ExactSlot, HeadEncoder, HeadTransform, KvGeometry, PAGE_TOKENS, PageCodec, PageWindows, Rule,
    SealedSlot, hadamard,
};
use oscar_kernels::backend::{
    AttentionSpec, Batch, CacheSpec, Rope, RopeLayout, SealPage, SealedRows, SealedSpec, SequenceRows,
    StoredMatrix,
};
use oscar_kernels::cpu::CpuBackend;
use oscar_kernels::cpu::isa::Isa;
use oscar_kernels::{Backend, DType};
use oscar_random::Random;

use crate::mixed::{NEVER, Sequence, Shape, banded, fast_paths, int2, key_mean};

const DIM: usize = 64;
const KV_HEADS: usize = 2;
const GROUP: usize = 3;
const TOKENS: usize = 200;
const SCALE: f32 = 0.11;
/// One that dominates, one that is hardly there, and some between.
const SINKS: [f32; KV_HEADS * GROUP] = [8.0, -30.0, 0.0, 2.5, -1.0, 4.0];

fn numbers(len: usize, seed: u64) -> Vec<f32> {
    let mut random = Random::new(seed);
    (0..len).map(|_| bf16::from_f32(2.0 * random.signed()).to_f32()).collect()
}

fn spec(backend: &CpuBackend, window: Option<usize>, sinks: &[f32]) -> AttentionSpec<CpuBackend> {
    let bytes: Vec<u8> = sinks.iter().flat_map(|sink| sink.to_le_bytes()).collect();
    let stored = StoredMatrix {
        bytes: Arc::new(bytes),
        offset: 0,
        dtype: DType::F32,
        rows: 1,
        cols: SINKS.len(),
        scales: None,
    };
    AttentionSpec {
        q_heads: KV_HEADS * GROUP,
        kv_heads: KV_HEADS,
        head_dim: DIM,
        scale: SCALE,
        window,
        rotates: true,
        sinks: Some(backend.weight(&stored).unwrap()),
        q_norm: None,
        k_norm: None,
    }
}

fn reference(rows: &[f32], window: usize, position: usize, query_head: usize) -> Vec<f64> {
    let cols = (KV_HEADS * GROUP + 2 * KV_HEADS) * DIM;
    let row = |p: usize, head: usize| &rows[p * cols + head * DIM..][..DIM];
    let (query, head) = (row(position, query_head), query_head / GROUP);
    let mut sum = f64::from(SINKS[query_head]).exp();
    let mut out = vec![0.0; DIM];
    for p in (0..=position).filter(|&p| p + window > position) {
        let key = row(p, KV_HEADS * GROUP + head);
        let dot: f64 = query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
        let weight = (dot * f64::from(SCALE)).exp();
        sum += weight;
        let value = row(p, KV_HEADS * (GROUP + 1) + head);
        out.iter_mut().zip(value).for_each(|(out, value)| *out += weight * f64::from(*value));
    }
    out.iter_mut().for_each(|out| *out /= sum);
    out
}

/// A codec that centres keys and values far from zero and rotates them.
fn centred(bits: u32) -> Arc<PageCodec> {
    let geometry = KvGeometry { layers: 1, kv_heads: KV_HEADS, head_dim: DIM };
    let encoder = |seed: u64| {
        let mean = numbers(DIM, seed).into_iter().map(|value| value + 1.0).collect();
        let transform = HeadTransform::new(Some(mean), &hadamard::matrix(DIM)).unwrap();
        HeadEncoder::codes(transform, CodeLayout::new(bits, DIM, 1).unwrap(), Rule::MIN_MAX, false)
    };
    let keys = (0..KV_HEADS as u64).map(|head| encoder(100 + head)).collect();
    let values = (0..KV_HEADS as u64).map(|head| encoder(200 + head)).collect();
    Arc::new(PageCodec::new("centred", geometry, keys, values).unwrap())
}

#[test]
fn a_sink_has_its_share_once_per_row() {
    let geometry = KvGeometry { layers: 1, kv_heads: KV_HEADS, head_dim: DIM };
    let pages = TOKENS.div_ceil(PAGE_TOKENS);
    let slots = ExactSlot::first(pages);
    let sealed_table = vec![None; pages];
    let rope = Rope { inverse_frequencies: Vec::new(), magnitude: 1.0, layout: RopeLayout::Halves };
    for isa in Isa::available() {
        // With several threads the pages of a row are in several items.
        for backend in [CpuBackend::with_isa(3, isa), CpuBackend::with_isa(2, isa).deterministic()] {
            for (codec, tolerance) in [(None, 1e-4), (Some(centred(4)), 0.02)] {
                for window in [None, Some(70)] {
                    let attention = spec(&backend, window, &SINKS);
                    let cols = attention.qkv_cols();
                    let rows = numbers(TOKENS * cols, 17);
                    let mut cache_spec = CacheSpec::exact(geometry, KV_HEADS * GROUP, pages + 1);
                    // Nothing is sealed, so that only the basis of the codec is at work.
                    cache_spec.sealed = codec.clone().map(|codec| SealedSpec {
                        codec,
                        slots: 2,
                        windows: PageWindows { sink: 0, recent: 100 },
                        sequence_pages: pages,
                        high: None,
                    });
                    let mut cache = backend.cache(&cache_spec).unwrap();
                    for cut in [&[TOKENS][..], &[63, 1, 5, 1, 58, 1, 70, 1]] {
                        let (mut out, mut first) = (Vec::new(), 0);
                        for &len in cut {
                            let mut sequence = SequenceRows::exact(first, len, &slots);
                            sequence.sealed = codec.is_some().then_some(SealedRows {
                                pages: &sealed_table,
                                exact_from: usize::MAX,
                                sealed_until: 0,
                            });
                            let batch = Batch { tokens: &vec![0; len], sequences: &[sequence] };
                            let step = backend.begin_step(&batch, &rope, &cache).unwrap();
                            let mut qkv = backend.buffer(len, cols).unwrap();
                            let part = &rows[first * cols..(first + len) * cols];
                            qkv.first_rows_mut("rows", len).unwrap().copy_from_slice(part);
                            backend.rope_store(&step, &attention, 0, &mut qkv, &mut cache).unwrap();
                            let mut attended = backend.buffer(len, KV_HEADS * GROUP * DIM).unwrap();
                            backend.attend(&step, &attention, 0, &qkv, &cache, &mut attended).unwrap();
                            out.extend_from_slice(attended.first_rows("rows", len).unwrap());
                            first += len;
                        }
                        for position in [0, 1, 63, 64, 69, 70, 128, 199] {
                            for query_head in 0..KV_HEADS * GROUP {
                                let want = reference(&rows, window.unwrap_or(TOKENS), position, query_head);
                                let got = &out[(position * KV_HEADS * GROUP + query_head) * DIM..][..DIM];
                                for (got, want) in got.iter().zip(&want) {
                                    assert!(
                                        (f64::from(*got) - want).abs() < tolerance,
                                        "{isa}, codec {}, window {window:?}, steps {cut:?}, position {position}, \
                                         head {query_head}: {got} for {want}",
                                        codec.is_some()
                                    );
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

const LONG: usize = 300;
const QUERIES: std::ops::Range<usize> = 290..LONG;

/// Attention of the last rows of a sequence whose first pages, but for one, are sealed.
fn over_sealed_pages(
    backend: &CpuBackend,
    codec: &Arc<PageCodec>,
    attention: &AttentionSpec<CpuBackend>,
    rows: &[f32],
) -> Vec<f32> {
    let geometry = KvGeometry { layers: 1, kv_heads: KV_HEADS, head_dim: DIM };
    let pages = LONG.div_ceil(PAGE_TOKENS);
    let slots = ExactSlot::first(pages);
    let rope = Rope { inverse_frequencies: Vec::new(), magnitude: 1.0, layout: RopeLayout::Halves };
    let mut spec = CacheSpec::exact(geometry, KV_HEADS * GROUP, pages + 1);
    let windows = PageWindows { sink: 1, recent: 1 };
    let codec_here = codec.clone();
    spec.sealed =
        Some(SealedSpec { codec: codec_here, slots: 3, windows, sequence_pages: pages, high: None });
    let mut cache = backend.cache(&spec).unwrap();
    let sealed: Vec<Option<SealedSlot>> = (0..pages as u32)
        .map(|page| (1..3).contains(&page).then(|| SealedSlot::new(page).unwrap()))
        .collect();
    let cols = attention.qkv_cols();
    let run = |first: usize, last: usize, exact_from: usize, cache: &mut _| {
        let mut sequence = SequenceRows::exact(first, last - first, &slots);
        sequence.sealed = Some(SealedRows { pages: &sealed, exact_from, sealed_until: 0 });
        let tokens = vec![0; last - first];
        let step =
            backend.begin_step(&Batch { tokens: &tokens, sequences: &[sequence] }, &rope, cache).unwrap();
        let mut qkv = backend.buffer(tokens.len(), cols).unwrap();
        let part = &rows[first * cols..last * cols];
        qkv.first_rows_mut("rows", tokens.len()).unwrap().copy_from_slice(part);
        backend.rope_store(&step, attention, 0, &mut qkv, cache).unwrap();
        let mut attended = backend.buffer(tokens.len(), KV_HEADS * GROUP * DIM).unwrap();
        backend.attend(&step, attention, 0, &qkv, cache, &mut attended).unwrap();
        attended.first_rows("rows", tokens.len()).unwrap().to_vec()
    };
    run(0, QUERIES.start, 0, &mut cache);
    let page = |page: usize| SealPage { page, exact: slots[page].unwrap(), sealed: sealed[page].unwrap() };
    backend.seal(0..1, &[page(1), page(2)], &mut cache).unwrap();
    run(QUERIES.start, LONG, usize::MAX, &mut cache)
}

/// What a sink leaves of a row is the row without a sink times one number, whatever keys and values were centred by, and
/// this number says how the sink compares with all logits.
#[test]
fn a_sink_is_compared_with_whole_logits_of_sealed_pages() {
    let cols = (KV_HEADS * GROUP + 2 * KV_HEADS) * DIM;
    let rows = numbers(LONG * cols, 23);
    // Codes of two bits are far off in single keys, and much less in their sum; `q · mean` is 1.5 on average.
    for (bits, tolerance) in [(2, 0.9), (4, 0.2)] {
        let codec = centred(bits);
        for isa in Isa::available() {
            let backend = CpuBackend::with_isa(2, isa);
            let sinks = [2.0, 3.0, 4.0, 2.5, 1.5, 3.5];
            let with =
                |sinks: &[f32]| over_sealed_pages(&backend, &codec, &spec(&backend, None, sinks), &rows);
            let without = AttentionSpec { sinks: None, ..spec(&backend, None, &sinks) };
            let without = over_sealed_pages(&backend, &codec, &without, &rows);
            let (first, second) = (with(&sinks), with(&sinks.map(|sink| sink + 1.0)));
            for (index, without) in without.chunks(DIM).enumerate() {
                let (position, query_head) =
                    (QUERIES.start + index / (KV_HEADS * GROUP), index % (KV_HEADS * GROUP));
                let left = [&first, &second].map(|rows| {
                    let row = &rows[index * DIM..][..DIM];
                    let dot = |a: &[f32], b: &[f32]| {
                        a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>()
                    };
                    let left = dot(row, without) / dot(without, without);
                    for (got, without) in row.iter().zip(without) {
                        let want = left * f64::from(*without);
                        assert!((f64::from(*got) - want).abs() < 1e-3, "{isa} {bits} bits: {got} for {want}");
                    }
                    left
                });
                // `left / (1 - left)` is the sum over keys by that of the sink.
                let [over, over_larger] = left.map(|left| (left / (1.0 - left)).ln());
                assert!((over - over_larger - 1.0).abs() < 1e-2, "{isa} {bits} bits: {over} {over_larger}");
                let row = |p: usize, head: usize| &rows[p * cols + head * DIM..][..DIM];
                let query = row(position, query_head);
                let logit = |p: usize| -> f64 {
                    let key = row(p, KV_HEADS * GROUP + query_head / GROUP);
                    let dot: f64 = query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                    dot * f64::from(SCALE)
                };
                let sum: f64 = (0..=position).map(|p| logit(p).exp()).sum();
                let exact = sum.ln() - f64::from(sinks[query_head]);
                assert!(
                    (over - exact).abs() < tolerance,
                    "{isa} {bits} bits, position {position}, head {query_head}: {over:.2} for {exact:.2}"
                );
            }
        }
    }
}

/// A sink that dominates, one that is hardly there, one that is not there, one beyond what weights can be, and some between.
fn nasty_sinks(count: usize, first: usize) -> Vec<f32> {
    const SINKS: [f32; 8] = [6.0, f32::NEG_INFINITY, 1e4, -2.0, -1e4, 25.0, f32::MAX, 2.5];
    (0..count).map(|head| SINKS[(first + head) % SINKS.len()]).collect()
}

/// What a codec does to keys and values: the oracle reads pages through it, so that two bits are as exact as sixteen.
fn codecs(shape: Shape) -> [PageCodec; 4] {
    let means =
        || Some((0..shape.layers * shape.kv_heads).map(|head| key_mean(shape.d, head as u64)).collect());
    [
        int2(shape, 1),
        banded(shape),
        PageCodec::int4(shape.geometry(), means()).unwrap(),
        PageCodec::fp8(shape.geometry(), means()).unwrap(),
    ]
}

/// One token, a window alone, history beside windows, and history alone but for the query's own page, with keys and values that
/// are centred: a sink is compared with `q · k` including `q · mean`, and what it takes it takes from the mean of values too.
#[test]
fn every_format_leaves_a_sink_its_share() {
    let shape = Shape { kv_heads: 2, group: 4, d: 64, layers: 1 };
    for (case, (sink, recent)) in [(1, 1), (0, 0), (0, 2)].into_iter().enumerate() {
        let windows = PageWindows { sink, recent };
        for codec in codecs(shape) {
            // Plain Rust has its turn where there is most to read sealed.
            for isa in Isa::available().filter(|&isa| isa != Isa::Scalar || recent == 0) {
                let what = format!("{isa} {} {windows:?}", codec.name());
                let mut sequence = Sequence::new(isa, shape, codec.clone(), windows, 193);
                sequence.sinks = nasty_sinks(8, case);
                for position in 0..193 {
                    let out = sequence.decode(position);
                    if [0, 1, 63, 64, 128, 192].contains(&position) {
                        let history = windows.history(position / PAGE_TOKENS, NEVER, 0);
                        sequence.check(position, history, &out, &what);
                    }
                }
            }
        }
    }
}

/// Logits of which few count, at either end of what weights can be.
#[test]
fn a_sink_beside_logits_far_apart() {
    let shape = Shape { kv_heads: 2, group: 3, d: 64, layers: 1 };
    let windows = PageWindows { sink: 0, recent: 0 };
    for (larger, sinks) in
        [(40.0, [150.0, -150.0, 900.0, -900.0, 0.0, 300.0]), (0.0, [0.0, 3.0, -3.0, 40.0, 5.0, -40.0])]
    {
        for isa in Isa::available() {
            let mut sequence = Sequence::new(isa, shape, banded(shape), windows, 200);
            for row in sequence.rows.chunks_exact_mut(shape.cols()) {
                row[..6 * shape.d].iter_mut().for_each(|query| *query *= larger);
            }
            sequence.sinks = sinks.to_vec();
            for position in 0..200 {
                let out = sequence.decode(position);
                if [0, 64, 128, 199].contains(&position) {
                    let history = windows.history(position / PAGE_TOKENS, NEVER, 0);
                    sequence.check(position, history, &out, &format!("{isa}, queries times {larger}"));
                }
            }
        }
    }
}

/// Pages of a row that several threads share, and prompts in pieces, both ways of reading them: a sink counts once.
#[test]
fn a_sink_counts_once_however_a_row_is_cut() {
    let shape = Shape { kv_heads: 3, group: 3, d: 64, layers: 1 };
    let windows = PageWindows { sink: 1, recent: 2 };
    let tokens = 64 * 17 + 17;
    let width = shape.kv_heads * shape.group * shape.d;
    for isa in fast_paths() {
        for threads in [1, 3] {
            let mut sequence = Sequence::new(isa, shape, banded(shape), windows, tokens);
            sequence.backend = CpuBackend::with_isa(threads, isa);
            sequence.sinks = nasty_sinks(9, 0);
            for position in 0..tokens {
                let out = sequence.decode(position);
                if position == tokens - 1 {
                    let history = windows.history(position / PAGE_TOKENS, NEVER, 0);
                    sequence.check(position, history, &out, &format!("{isa}, {threads} threads"));
                }
            }
        }
        for (chunk, uniform) in [(tokens, false), (100, true), (448, true)] {
            let mut sequence = Sequence::new(isa, shape, banded(shape), windows, tokens);
            sequence.sinks = nasty_sinks(9, 0);
            let out = sequence.prefill(tokens, chunk, uniform);
            for position in [0, 448, tokens - 1] {
                let history = windows.history(position / PAGE_TOKENS, if uniform { NEVER } else { 0 }, 0);
                let what = format!("{isa}, chunks of {chunk}, uniform {uniform}");
                sequence.check(position, history, &out[position * width..][..width], &what);
            }
        }
    }
}

/// A sink of minus infinity is none, to the bit.
#[test]
fn a_sink_that_weighs_nothing_changes_nothing() {
    let shape = Shape { kv_heads: 2, group: 3, d: 64, layers: 1 };
    let windows = PageWindows { sink: 1, recent: 1 };
    for isa in Isa::available() {
        let run = |sinks: Vec<f32>| {
            let mut sequence = Sequence::new(isa, shape, banded(shape), windows, 300);
            sequence.sinks = sinks;
            (0..300).flat_map(|position| sequence.decode(position)).collect::<Vec<f32>>()
        };
        assert_eq!(run(vec![f32::NEG_INFINITY; 6]), run(Vec::new()), "{isa}");
    }
}
