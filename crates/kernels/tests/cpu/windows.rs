//! Attention in which a row sees a window of positions, against the definition.

use half::bf16;
use oscar_codec::{ExactSlot, KvGeometry, PAGE_TOKENS};
use oscar_kernels::Backend;
use oscar_kernels::backend::{AttentionSpec, Batch, CacheSpec, KernelError, Rope, RopeLayout, SequenceRows};
use oscar_kernels::cpu::CpuBackend;
use oscar_kernels::cpu::isa::Isa;
use oscar_random::Random;

const KV_HEADS: usize = 2;
const GROUP: usize = 3;
const TOKENS: usize = 270;
const SCALE: f32 = 0.3;

fn numbers(len: usize, seed: u64) -> Vec<f32> {
    let mut random = Random::new(seed);
    (0..len).map(|_| bf16::from_f32(2.0 * random.signed()).to_f32()).collect()
}

fn spec(d: usize, window: usize) -> AttentionSpec<CpuBackend> {
    AttentionSpec {
        q_heads: KV_HEADS * GROUP,
        kv_heads: KV_HEADS,
        head_dim: d,
        scale: SCALE,
        window: Some(window),
        rotates: true,
        sinks: None,
        q_norm: None,
        k_norm: None,
    }
}

/// The output of one head of one row by the definition.
fn reference(rows: &[f32], d: usize, window: usize, position: usize, query_head: usize) -> Vec<f64> {
    let cols = (KV_HEADS * GROUP + 2 * KV_HEADS) * d;
    let row = |p: usize, head: usize| &rows[p * cols + head * d..][..d];
    let (query, head) = (row(position, query_head), query_head / GROUP);
    let seen = (0..=position).filter(|&p| p + window > position);
    let logits: Vec<(usize, f64)> = seen
        .map(|p| {
            let key = row(p, KV_HEADS * GROUP + head);
            let dot: f64 = query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
            (p, dot * f64::from(SCALE))
        })
        .collect();
    let max = logits.iter().fold(f64::NEG_INFINITY, |max, (_, logit)| max.max(*logit));
    let sum: f64 = logits.iter().map(|(_, logit)| (logit - max).exp()).sum();
    let mut out = vec![0.0; d];
    for (p, logit) in logits {
        let weight = (logit - max).exp() / sum;
        let value = row(p, KV_HEADS * (GROUP + 1) + head);
        out.iter_mut().zip(value).for_each(|(out, value)| *out += weight * f64::from(*value));
    }
    out
}

/// Ways to cut the rows into steps: at once, inside and at page edges, and single rows around them.
const CUTS: [&[usize]; 4] = [
    &[TOKENS],
    &[100, 100, 70],
    &[64, 64, 64, 64, 14],
    &[62, 1, 1, 1, 1, 33, 1, 1, 26, 1, 1, 1, 62, 1, 7, 1, 67, 1, 1],
];

/// Attends all rows, step by step.
fn attend(backend: &CpuBackend, rows: &[f32], d: usize, window: usize, cut: &[usize]) -> Vec<f32> {
    assert_eq!(cut.iter().sum::<usize>(), TOKENS);
    let geometry = KvGeometry { layers: 1, kv_heads: KV_HEADS, head_dim: d };
    let pages = TOKENS.div_ceil(PAGE_TOKENS);
    let mut cache = backend.cache(&CacheSpec::exact(geometry, KV_HEADS * GROUP, pages + 1)).unwrap();
    let rope = Rope { inverse_frequencies: Vec::new(), magnitude: 1.0, layout: RopeLayout::Halves };
    let (attention, slots) = (spec(d, window), ExactSlot::table((1..=pages as u32).rev()));
    let (cols, width) = (attention.qkv_cols(), KV_HEADS * GROUP * d);
    let (mut out, mut first) = (Vec::new(), 0);
    for &len in cut {
        let tokens = vec![0; len];
        let sequence = SequenceRows::exact(first, len, &slots);
        let batch = Batch { tokens: &tokens, sequences: &[sequence] };
        let step = backend.begin_step(&batch, &rope, &cache).unwrap();
        let mut qkv = backend.buffer(len, cols).unwrap();
        qkv.first_rows_mut("rows", len).unwrap().copy_from_slice(&rows[first * cols..(first + len) * cols]);
        backend.rope_store(&step, &attention, 0, &mut qkv, &mut cache).unwrap();
        let mut part = backend.buffer(len, width).unwrap();
        backend.attend(&step, &attention, 0, &qkv, &cache, &mut part).unwrap();
        out.extend_from_slice(part.first_rows("rows", len).unwrap());
        first += len;
    }
    out
}

#[test]
fn a_row_sees_its_window_and_nothing_before() {
    for (d, windows) in [
        (32, &[1, 2, 63, 64, 65, 100, 128, 129, 269, 270, 1000][..]),
        (256, &[5, 64, 130][..]),
        (48, &[70][..]),
    ] {
        let rows = numbers(TOKENS * (KV_HEADS * GROUP + 2 * KV_HEADS) * d, 3 + d as u64);
        for isa in Isa::available() {
            let backend = CpuBackend::with_isa(2, isa);
            for &window in windows {
                for cut in CUTS {
                    let out = attend(&backend, &rows, d, window, cut);
                    for position in [0, 1, 62, 63, 64, 65, 99, 100, 127, 128, 129, 192, 200, 268, 269] {
                        for query_head in [0, 4] {
                            let want = reference(&rows, d, window, position, query_head);
                            let got = &out[(position * KV_HEADS * GROUP + query_head) * d..][..d];
                            for (got, want) in got.iter().zip(&want) {
                                assert!(
                                    (f64::from(*got) - want).abs() < 2e-4,
                                    "{isa} d={d} window {window} steps {cut:?} position {position}: \
                                     {got} for {want}"
                                );
                            }
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn a_deterministic_device_gives_a_row_the_same_bits_in_every_chunk() {
    let d = 32;
    let rows = numbers(TOKENS * (KV_HEADS * GROUP + 2 * KV_HEADS) * d, 9);
    for isa in Isa::available() {
        let backend = CpuBackend::with_isa(2, isa).deterministic();
        for window in [40, 64, 200] {
            let whole = attend(&backend, &rows, d, window, CUTS[0]);
            for cut in &CUTS[1..] {
                assert!(attend(&backend, &rows, d, window, cut) == whole, "{isa} {window} {cut:?}");
            }
        }
    }
}

/// Pages before the window need not be there; one inside it must be.
#[test]
fn a_page_of_the_window_that_is_missing_is_an_error() {
    let backend = CpuBackend::with_isa(1, Isa::detect());
    let geometry = KvGeometry { layers: 1, kv_heads: KV_HEADS, head_dim: 32 };
    let codec = oscar_codec::PageCodec::int4(geometry, None).unwrap();
    let sealed = oscar_kernels::backend::SealedSpec {
        codec: std::sync::Arc::new(codec),
        slots: 8,
        windows: oscar_codec::PageWindows { sink: 0, recent: 1 },
        sequence_pages: 8,
        high: None,
    };
    let mut spec_of_cache = CacheSpec::exact(geometry, KV_HEADS * GROUP, 8);
    spec_of_cache.sealed = Some(sealed);
    let cache = backend.cache(&spec_of_cache).unwrap();
    let rope = Rope { inverse_frequencies: Vec::new(), magnitude: 1.0, layout: RopeLayout::Halves };
    // Position 256 is in page 4; by the windows of the cache it reads pages 3 and 4 in bf16.
    let exact = ExactSlot::table([0, 0, 0, 1, 2]);
    let history = oscar_codec::SealedSlot::table([1, 2, 3, 0, 0]);
    let mut rows = SequenceRows::exact(256, 1, &exact);
    rows.sealed =
        Some(oscar_kernels::backend::SealedRows { pages: &history, exact_from: usize::MAX, sealed_until: 0 });
    let step = backend.begin_step(&Batch { tokens: &[0], sequences: &[rows] }, &rope, &cache).unwrap();
    let attends = |window: usize| {
        let attention = spec(32, window);
        let qkv = backend.buffer(1, attention.qkv_cols()).unwrap();
        let mut out = backend.buffer(1, KV_HEADS * GROUP * 32).unwrap();
        backend.attend(&step, &attention, 0, &qkv, &cache, &mut out)
    };
    attends(65).unwrap();
    let error = attends(66).unwrap_err();
    assert!(matches!(error, KernelError::PageMissing { page: 2, .. }), "{error}");
}
