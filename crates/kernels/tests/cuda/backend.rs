//! The backend of the card against the CPU's: weights of every stored type, products, experts, sampling, and attention
//! (`attend`).

use std::sync::Arc;

use oscar_codec::{ExactSlot, KvGeometry, PAGE_TOKENS};
use oscar_kernels::backend::{
    Activation, Batch, CacheSpec, ExpertBiases, GatedMlp, Linear, LogitChange, RmsNorm, Rope, RopeLayout,
    RoutedMlp, Sampled, Sampling, SequenceRows, SharedExpert, StoredMatrix,
};
use oscar_kernels::cpu::CpuBackend;
use oscar_kernels::cpu::isa::Isa;
use oscar_kernels::cuda::{CudaBackend, Device};
use oscar_kernels::quant::fp8::BlockScales;
use oscar_kernels::routing::{ExpertGroups, Routing, RoutingRule, Scores};
use oscar_kernels::{Backend, DType, Inspect, KernelError, quant};
use oscar_random::Random;

use super::attend;

/// Runs everything; the number of failures.
pub(crate) fn run(device: &Arc<Device>, quick: bool) -> usize {
    let cpu = CpuBackend::with_isa(4, Isa::detect());
    // Vector instructions round queries where they meet codes.
    let scalar = CpuBackend::with_isa(8, Isa::Scalar);
    let mut failures = 0;
    for deterministic in [false, true] {
        let cuda = match CudaBackend::new(device.clone(), deterministic) {
            Ok(cuda) => cuda,
            Err(error) => {
                println!("FAILED backend: {error}");
                return failures + 1;
            }
        };
        if !deterministic {
            println!("cuda: cuBLASLt is {}", if cuda.has_blas() { "there" } else { "not there" });
            failures += weights(&cuda);
            failures += sampling(&cpu, &cuda);
        }
        failures += products(&cpu, &cuda, quick);
        failures += odd_rows(&cpu, &cuda);
        failures += experts(&cpu, &cuda, quick);
        failures += attend::attention(&scalar, &cuda, quick);
        if deterministic {
            failures += attend::chunks(&cuda);
        }
    }
    failures
}

/// Random blocks of a type, with scales of a size that weights have.
fn stored(dtype: DType, rows: usize, cols: usize, random: &mut Random) -> StoredMatrix {
    let mut bytes: Vec<u8> = Vec::new();
    if dtype.is_float() {
        for _ in 0..rows * cols {
            let x = 0.1 * random.signed();
            match dtype {
                DType::F32 => bytes.extend(x.to_le_bytes()),
                DType::F16 => bytes.extend(half::f16::from_f32(x).to_le_bytes()),
                _ => bytes.extend(half::bf16::from_f32(x).to_le_bytes()),
            }
        }
    } else if dtype == DType::F8E4M3 {
        bytes.extend((0..rows * cols).map(|_| random.next_u64() as u8));
    } else {
        bytes.extend((0..dtype.bytes_for(cols).unwrap() * rows).map(|_| random.next_u64() as u8));
        for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
            let places: &[usize] = match dtype {
                DType::Q4_1 | DType::Q5_1 | DType::Q4K | DType::Q5K => &[0, 2],
                DType::Q6K => &[208],
                _ => &[0],
            };
            let size = match dtype {
                DType::Q6K => 3e-5,
                DType::Q4K | DType::Q5K => 2e-4,
                DType::Q8_0 => 1e-3,
                _ => 1e-2,
            };
            if dtype == DType::Mxfp4 {
                block[0] = 120;
                continue;
            }
            for &place in places {
                let scale = half::f16::from_f32(size * (1.0 + random.signed() * 0.5));
                block[place..place + 2].copy_from_slice(&scale.to_le_bytes());
            }
        }
    }
    // FP8 has scales of blocks, which end inside the last tiles.
    let scales = (dtype == DType::F8E4M3).then(|| {
        bytes.iter_mut().filter(|byte| **byte & 0x7f == 0x7f).for_each(|byte| *byte ^= 1);
        let count = rows.div_ceil(128) * cols.div_ceil(128);
        let values = (0..count).map(|_| 1e-3 * (1.5 + random.signed())).collect();
        Arc::new(BlockScales::new(values, [rows, cols], [128, 128]).unwrap())
    });
    StoredMatrix { bytes: Arc::new(bytes), offset: 0, dtype, rows, cols, scales }
}

pub(super) fn vector(len: usize, random: &mut Random) -> StoredMatrix {
    let bytes: Vec<u8> = (0..len).flat_map(|_| (1.0 + random.signed()).to_le_bytes()).collect();
    StoredMatrix { bytes: Arc::new(bytes), offset: 0, dtype: DType::F32, rows: 1, cols: len, scales: None }
}

/// The root mean square of the difference over that of what is expected.
pub(super) fn error(expected: &[f32], got: &[f32]) -> f64 {
    assert_eq!(expected.len(), got.len());
    let size: f64 = expected.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    let difference: f64 = expected.iter().zip(got).map(|(&a, &b)| f64::from(a - b) * f64::from(a - b)).sum();
    (difference / size.max(1e-30)).sqrt()
}

pub(super) fn report(what: &str, worst: f64, limit: f64) -> usize {
    let failed = worst.is_nan() || worst > limit;
    println!("{}{what}: worst error {worst:.1e} (limit {limit:.0e})", if failed { "FAILED " } else { "" });
    usize::from(failed)
}

fn weights(cuda: &CudaBackend) -> usize {
    let mut failures = 0;
    let mut random = Random::new(5);
    for dtype in DType::ALL {
        let mut worst = 0.0_f64;
        for (rows, cols) in [(16, 256), (37, 768), (5, 512), (130, 2304)] {
            let stored = stored(dtype, rows, cols, &mut random);
            let mut expected = vec![0.0; rows * cols];
            quant::dequantise(dtype, stored.data().unwrap(), &mut expected);
            let got = cuda.dequantise(&cuda.weight(&stored).unwrap()).unwrap();
            worst = worst.max(error(&expected, &got));
        }
        failures += report(&format!("weights of {dtype}"), worst, if dtype.is_float() { 2e-3 } else { 5e-4 });
    }
    failures
}

struct Layer<B: Backend> {
    norm: RmsNorm<B>,
    qkv: [Linear<B>; 3],
    output: Linear<B>,
    /// Norms after blocks, GELU and scaled embeddings.
    output_norm: Option<RmsNorm<B>>,
    mlp: GatedMlp<B>,
    table: B::Weight,
}

/// The same weights on a device.
fn layer<B: Backend>(backend: &B, types: [DType; 3], hidden: usize, inner: usize, plain: bool) -> Layer<B> {
    let mut random = Random::new(11);
    let mut linear = |dtype, rows, cols, bias: bool| Linear {
        weight: backend.weight(&stored(dtype, rows, cols, &mut random)).unwrap(),
        bias: bias.then(|| backend.weight(&vector(rows, &mut random)).unwrap()),
    };
    let [first, second, third] = types;
    let qkv = [
        linear(first, 768, hidden, true),
        linear(second, 256, hidden, true),
        linear(third, 256, hidden, false),
    ];
    let output = linear(second, hidden, 768, true);
    let [gate, up] = [first, second].map(|dtype| linear(dtype, inner, hidden, false));
    let down = linear(third, hidden, inner, false);
    let table = linear(second, 1000, hidden, false).weight;
    let mut norm = || RmsNorm { weight: backend.weight(&vector(hidden, &mut random)).unwrap(), eps: 1e-5 };
    let activation = if plain { Activation::Silu } else { Activation::GeluTanh };
    let [first, second] = [(); 2].map(|()| (!plain).then(&mut norm));
    let mlp = GatedMlp { norm: norm(), activation, gate, up, down, output_norm: first };
    Layer { norm: norm(), qkv, output, output_norm: second, mlp, table }
}

/// What a layer makes of tokens without attention: every product once.
fn run_layer<B: Backend>(backend: &B, layer: &Layer<B>, hidden: usize, rows: usize) -> [Vec<f32>; 3] {
    let geometry = KvGeometry { layers: 1, kv_heads: 1, head_dim: 64 };
    let cache = backend.cache(&CacheSpec::exact(geometry, 1, 40)).unwrap();
    let rope = Rope { inverse_frequencies: vec![], magnitude: 1.0, layout: RopeLayout::Halves };
    let tokens: Vec<u32> = (0..rows as u32).map(|row| row * 37 % 1000).collect();
    let pages = ExactSlot::first(rows.div_ceil(PAGE_TOKENS));
    let sequences = [SequenceRows::exact(0, rows, &pages)];
    let step = backend.begin_step(&Batch { tokens: &tokens, sequences: &sequences }, &rope, &cache).unwrap();
    let mut x = backend.buffer(rows, hidden).unwrap();
    let mut qkv = backend.buffer(rows, 1280).unwrap();
    backend.embed(&layer.table, &step, &mut x).unwrap();
    let [q, k, v] = &layer.qkv;
    backend.norm_linear(&step, &x, &layer.norm, &[q, k, v], &mut qkv).unwrap();
    let mut attended = backend.buffer(rows, 768).unwrap();
    backend.norm_linear(&step, &x, &layer.norm, &[q], &mut attended).unwrap();
    match &layer.output_norm {
        None => backend.linear_add(&step, &attended, &layer.output, &mut x).unwrap(),
        Some(norm) => {
            backend.scale(&step, 3.5, &mut x).unwrap();
            backend.linear_norm_add(&step, &attended, &layer.output, norm, &mut x).unwrap();
        }
    }
    backend.gated_mlp(&step, &layer.mlp, &mut x).unwrap();
    let mut logits = backend.buffer(rows, 1000).unwrap();
    let wanted: Vec<usize> = (0..rows).rev().collect();
    backend.logits(&x, &wanted, &layer.norm, &layer.table, &mut logits).unwrap();
    let read = |buffer: &B::Buffer| backend.read(buffer, 0..rows).unwrap();
    let mut sampled = backend.sample(&logits, &vec![Sampling::default(); rows]).unwrap();
    assert!(sampled.drain(..).all(|sample| sample.is_ok()));
    [read(&qkv), read(&x), read(&logits)]
}

fn products(cpu: &CpuBackend, cuda: &CudaBackend, quick: bool) -> usize {
    let mut failures = 0;
    let types = [
        [DType::BF16; 3],
        [DType::F32, DType::F16, DType::BF16],
        [DType::Q4_1, DType::Q4_0, DType::Q8_0],
        [DType::Q4K, DType::Q6K, DType::Q5K],
        [DType::Q5_0, DType::Q5_1, DType::F16],
        [DType::F8E4M3; 3],
    ];
    let styled = [[DType::BF16; 3], [DType::Q4K, DType::Q4K, DType::Q6K]];
    let cases = types.map(|types| (types, true)).into_iter().chain(styled.map(|types| (types, false)));
    for (types, plain) in cases {
        // Columns that fill no whole number of steps for floats, and super-blocks for the others.
        let (hidden, inner) = if types[0].is_float() { (1056, 2080) } else { (1024, 2304) };
        let (on_cpu, on_card) =
            (layer(cpu, types, hidden, inner, plain), layer(cuda, types, hidden, inner, plain));
        let mut alone: Option<Vec<f32>> = None;
        let mut worst = 0.0_f64;
        for rows in [1, 2, 3, 8, 9, 17, 40, 64, 65, 200] {
            if quick && rows > 9 {
                continue;
            }
            let expected = run_layer(cpu, &on_cpu, hidden, rows);
            let got = run_layer(cuda, &on_card, hidden, rows);
            for (expected, got) in expected.iter().zip(&got) {
                worst = worst.max(error(expected, got));
            }
            if cuda.is_deterministic() {
                let first = got[1][..hidden].to_vec();
                let before = alone.get_or_insert_with(|| first.clone());
                if before.iter().zip(&first).any(|(a, b)| a.to_bits() != b.to_bits()) {
                    println!("FAILED {types:?}: a row has other bits among {rows} rows");
                    failures += 1;
                }
            }
        }
        let style = if plain { "" } else { ", norms after blocks and GELU" };
        failures += report(&format!("products of {types:?}{style}"), worst, 1e-2);
    }
    failures
}

/// Rows that activations should not be but may be: `hidden += linear(x)` and `linear(norm x)` of each.
fn plain_and_normed<B: Inspect>(backend: &B, dtype: DType, rows: &[Vec<f32>]) -> [Vec<f32>; 2] {
    const OUTPUTS: usize = 80;
    let mut random = Random::new(23);
    let cols = rows[0].len();
    let weight = backend.weight(&stored(dtype, OUTPUTS, cols, &mut random)).unwrap();
    let linear = Linear { weight, bias: None };
    let norm = RmsNorm { weight: backend.weight(&vector(cols, &mut random)).unwrap(), eps: 1e-5 };
    let geometry = KvGeometry { layers: 1, kv_heads: 1, head_dim: 64 };
    let cache = backend.cache(&CacheSpec::exact(geometry, 1, 4)).unwrap();
    let rope = Rope { inverse_frequencies: vec![], magnitude: 1.0, layout: RopeLayout::Halves };
    let (tokens, pages) = (vec![0; rows.len()], ExactSlot::first(1));
    let sequences = [SequenceRows::exact(0, rows.len(), &pages)];
    let step = backend.begin_step(&Batch { tokens: &tokens, sequences: &sequences }, &rope, &cache).unwrap();
    let mut x = backend.buffer(rows.len(), cols).unwrap();
    backend.write(&rows.concat(), &mut x).unwrap();
    [false, true].map(|normed| {
        let mut out = backend.buffer(rows.len(), OUTPUTS).unwrap();
        match normed {
            true => backend.norm_linear(&step, &x, &norm, &[&linear], &mut out).unwrap(),
            false => backend.linear_add(&step, &x, &linear, &mut out).unwrap(),
        }
        backend.read(&out, 0..rows.len()).unwrap()
    })
}

fn odd_rows(cpu: &CpuBackend, cuda: &CudaBackend) -> usize {
    const COLS: usize = 768;
    let mut random = Random::new(29);
    let mut row = |size: f32| -> Vec<f32> { (0..COLS).map(|_| size * random.signed()).collect() };
    let with = |mut row: Vec<f32>, x: f32| {
        row[COLS / 2 + 1] = x;
        row
    };
    let rows = vec![
        vec![0.0; COLS],
        row(1e-30),
        row(1e12),
        with(row(1.0), 3e7),
        with(row(1e-3), -65504.0),
        vec![1.0; COLS],
        with(row(1.0), f32::INFINITY),
        with(row(1.0), f32::NAN),
    ];
    let mut failures = 0;
    for dtype in [DType::BF16, DType::Q4_0, DType::Q8_0, DType::Q6K] {
        let mut worst = 0.0_f64;
        // All rows at once, and each alone.
        let batches = std::iter::once(rows.clone()).chain(rows.iter().map(|row| vec![row.clone()]));
        for batch in batches {
            let expected = plain_and_normed(cpu, dtype, &batch);
            let got = plain_and_normed(cuda, dtype, &batch);
            for (expected, got) in expected.iter().zip(&got) {
                let width = expected.len() / batch.len();
                for ((expected, got), row) in
                    expected.chunks_exact(width).zip(got.chunks_exact(width)).zip(&batch)
                {
                    if row.iter().all(|x| x.is_finite()) {
                        worst = worst.max(error(expected, got));
                    } else if got.iter().any(|x| x.is_finite()) {
                        println!("FAILED {dtype}: a row that is not finite has finite products");
                        failures += 1;
                    }
                }
            }
        }
        failures += report(&format!("products of odd rows with {dtype}"), worst, 2e-2);
    }
    failures
}

/// What a mixture of experts adds to rows, most of which choose alike so that some experts have many rows.
fn routed<B: Inspect>(backend: &B, dtype: DType, rule: RoutingRule, shared: bool, rows: usize) -> Vec<f32> {
    const HIDDEN: usize = 512;
    const INNER: usize = 768;
    let mut random = Random::new(31);
    let mut linear = |rows, cols| Linear {
        weight: backend.weight(&stored(dtype, rows, cols, &mut random)).unwrap(),
        bias: None,
    };
    let router = Linear {
        weight: backend.weight(&stored(DType::BF16, rule.experts, HIDDEN, &mut Random::new(37))).unwrap(),
        bias: None,
    };
    let shared = shared.then(|| SharedExpert {
        gate: linear(INNER, HIDDEN),
        up: linear(INNER, HIDDEN),
        down: linear(HIDDEN, INNER),
    });
    let mut random = Random::new(41);
    let mut all = |rows, cols| -> B::Experts {
        let matrices: Vec<_> = (0..rule.experts).map(|_| stored(dtype, rows, cols, &mut random)).collect();
        backend.experts(&matrices).unwrap()
    };
    let (gate, up, down) = (all(INNER, HIDDEN), all(INNER, HIDDEN), all(HIDDEN, INNER));
    // As GPT-OSS has them.
    let clamped = rule.scores == Scores::SoftmaxOfChosen;
    let mut vectors = |len| -> B::Experts {
        let vectors: Vec<_> = (0..rule.experts).map(|_| vector(len, &mut random)).collect();
        backend.experts(&vectors).unwrap()
    };
    let biases =
        clamped.then(|| ExpertBiases { gate: vectors(INNER), up: vectors(INNER), down: vectors(HIDDEN) });
    let sigmoid = rule.scores == Scores::Sigmoid;
    let mlp = RoutedMlp {
        norm: RmsNorm { weight: backend.weight(&vector(HIDDEN, &mut random)).unwrap(), eps: 1e-5 },
        router,
        correction: sigmoid.then(|| backend.weight(&vector(rule.experts, &mut random)).unwrap()),
        routing: Routing::new(rule).unwrap(),
        activation: match clamped {
            true => Activation::ClampedSwiglu { alpha: 1.702, limit: 1.5 },
            false => Activation::Silu,
        },
        gate,
        up,
        down,
        biases,
        shared,
    };
    let geometry = KvGeometry { layers: 1, kv_heads: 1, head_dim: 64 };
    let cache = backend.cache(&CacheSpec::exact(geometry, 1, 8)).unwrap();
    let rope = Rope { inverse_frequencies: vec![], magnitude: 1.0, layout: RopeLayout::Halves };
    let (tokens, pages) = (vec![0; rows], ExactSlot::first(rows.div_ceil(PAGE_TOKENS)));
    let sequences = [SequenceRows::exact(0, rows, &pages)];
    let step = backend.begin_step(&Batch { tokens: &tokens, sequences: &sequences }, &rope, &cache).unwrap();
    let mut random = Random::new(43);
    let common: Vec<f32> = (0..HIDDEN).map(|_| random.signed()).collect();
    let x: Vec<f32> =
        (0..rows).flat_map(|_| common.iter().map(|&x| x + random.signed()).collect::<Vec<_>>()).collect();
    let mut hidden = backend.buffer(rows, HIDDEN).unwrap();
    backend.write(&x, &mut hidden).unwrap();
    backend.routed_mlp(&step, &mlp, &mut hidden).unwrap();
    let after = backend.read(&hidden, 0..rows).unwrap();
    // What was added, not what was there.
    after.iter().zip(&x).map(|(after, before)| after - before).collect()
}

fn experts(cpu: &CpuBackend, cuda: &CudaBackend, quick: bool) -> usize {
    let softmax = RoutingRule {
        experts: 32,
        top_k: 4,
        scores: Scores::Softmax,
        groups: None,
        normalise: true,
        scale: 1.0,
    };
    let grouped = RoutingRule {
        experts: 64,
        top_k: 6,
        scores: Scores::Sigmoid,
        groups: Some(ExpertGroups { count: 4, chosen: 2 }),
        scale: 2.5,
        ..softmax
    };
    let chosen = RoutingRule { scores: Scores::SoftmaxOfChosen, normalise: false, ..softmax };
    let mut failures = 0;
    for (dtype, rule, shared) in [
        (DType::BF16, softmax, false),
        (DType::F8E4M3, grouped, true),
        (DType::Q4K, chosen, false),
        (DType::Mxfp4, chosen, false),
        (DType::Mxfp4, softmax, true),
        (DType::Q6K, softmax, true),
        (DType::Q8_0, softmax, false),
    ] {
        let mut worst = 0.0_f64;
        let mut alone: Option<Vec<f32>> = None;
        for rows in [1, 2, 9, 64, 65, 200] {
            if quick && rows > 9 {
                continue;
            }
            let (expected, got) =
                (routed(cpu, dtype, rule, shared, rows), routed(cuda, dtype, rule, shared, rows));
            // Where two experts are nearly as good as each other, devices may choose differently.
            let width = got.len() / rows;
            let mut errors: Vec<f64> =
                expected.chunks_exact(width).zip(got.chunks_exact(width)).map(|(a, b)| error(a, b)).collect();
            errors.sort_by(f64::total_cmp);
            worst = worst.max(errors[rows - 1 - rows / 20]);
            let first = got[..width].to_vec();
            let before = alone.get_or_insert_with(|| first.clone());
            if cuda.is_deterministic() && before.iter().zip(&first).any(|(a, b)| a.to_bits() != b.to_bits()) {
                println!("FAILED experts of {dtype}: a row has other bits among {rows} rows");
                failures += 1;
            }
        }
        failures += report(&format!("experts of {dtype}"), worst, 2e-2);
    }
    failures
}

/// Tokens that both devices draw from the same logits.
fn sampling(cpu: &CpuBackend, cuda: &CudaBackend) -> usize {
    let mut random = Random::new(23);
    let (mut failures, mut rows_checked, mut decided_on_the_card) = (0, 0, 0);
    for vocabulary in [5, 1000, 49152, 151_936] {
        for round in 0..24 {
            let rows = 1 + round % 5;
            let spread = [0.0, 1.0, 5.0, 20.0][round % 4];
            let mut logits: Vec<f32> = (0..rows * vocabulary).map(|_| spread * random.signed()).collect();
            if round == 7 {
                logits[vocabulary / 2] = f32::NAN;
            }
            if round % 3 == 0 {
                // Ties, and tokens that are ruled out.
                logits.iter_mut().for_each(|logit| *logit = logit.round());
                logits[0] = f32::NEG_INFINITY;
            }
            let allowed = vec![0x5555_5555; vocabulary.div_ceil(32)];
            // Penalties and biases, one of them for a token that is not there and one that rules its token out.
            let change = |token: usize, penalty, add| LogitChange { token: token as u32, penalty, add };
            let changes: Vec<LogitChange> = (0..vocabulary.min(400))
                .map(|i| {
                    change(i * 3 % vocabulary.max(1200), 1.0 + (i % 5) as f32 * 0.2, (i % 7) as f32 - 3.0)
                })
                .chain([change(vocabulary + 1, 2.0, 9.0)])
                .map(|change| match change.token % 31 {
                    2 => LogitChange { add: f32::NEG_INFINITY, ..change },
                    _ => change,
                })
                .collect();
            let settings: Vec<Sampling<'_>> = (0..rows)
                .map(|row| {
                    let mut pick = |from: &[f32]| from[(random.next_u64() % from.len() as u64) as usize];
                    Sampling {
                        temperature: pick(&[0.0, 0.7, 1.0]),
                        top_k: pick(&[0.0, 0.0, 20.0, 2000.0]) as usize,
                        top_p: pick(&[1.0, 1.0, 0.9]),
                        min_p: pick(&[0.0, 0.0, 0.1]),
                        typical_p: pick(&[1.0, 1.0, 1.0, 0.8]),
                        draw: pick(&[0.0, 0.25, 0.5, 0.9999]),
                        logprobs: [None, Some(0), Some(5)][(round + row) % 3],
                        vocabulary: if round % 2 == 0 { usize::MAX } else { vocabulary - 1 },
                        allowed: match round % 6 {
                            // The last bits of the vocabulary are missing, or all of them.
                            2 => Some(&allowed[..allowed.len() - usize::from(round == 14)]),
                            5 if round == 11 && row == 1 => Some(&[]),
                            5 => Some(&allowed),
                            _ => None,
                        },
                        changes: if matches!(round % 8, 3 | 5) { &changes } else { &[] },
                        given: (round == 9).then_some(3),
                    }
                })
                .collect();
            let drawn = |name: &str, drawn: Vec<Result<Sampled, KernelError>>| -> Vec<String> {
                let show = |sampled: Result<Sampled, KernelError>| match sampled {
                    Ok(sampled) => {
                        let top: Vec<u32> = sampled.top.iter().map(|top| top.0).collect();
                        let logprob = sampled.logprob.map(|logprob| format!("{logprob:.3}"));
                        format!("{} {logprob:?} {top:?}", sampled.token)
                    }
                    Err(error) => error.to_string(),
                };
                assert_eq!(drawn.len(), rows, "{name}");
                drawn.into_iter().map(show).collect()
            };
            let mut buffers = (cpu.buffer(rows, vocabulary).unwrap(), cuda.buffer(rows, vocabulary).unwrap());
            cpu.write(&logits, &mut buffers.0).unwrap();
            cuda.write(&logits, &mut buffers.1).unwrap();
            let expected = drawn("cpu", cpu.sample(&buffers.0, &settings).unwrap());
            let draws = cuda.begin_draws(&buffers.1, &settings).unwrap();
            let draws = cuda.finish_draws(draws, &buffers.1, &settings).unwrap();
            let host = |settings: &Sampling<'_>| settings.typical_p < 1.0;
            let passed_on =
                draws.iter().zip(&settings).filter(|(draw, settings)| draw.passed_on && !host(settings));
            decided_on_the_card += passed_on.count();
            let got = drawn("cuda", draws.into_iter().map(|draw| draw.sampled).collect());
            for (row, (expected, got)) in expected.iter().zip(&got).enumerate() {
                rows_checked += 1;
                if expected != got {
                    println!(
                        "FAILED sampling {vocabulary} tokens, {:?}: {got}, not {expected}",
                        settings[row]
                    );
                    failures += 1;
                }
            }
        }
    }
    println!(
        "cuda: {rows_checked} rows sampled as on the CPU unless said above, {decided_on_the_card} without the host"
    );
    if decided_on_the_card < rows_checked / 2 {
        println!("FAILED sampling: the card decides too few rows");
        failures += 1;
    }
    failures
}
