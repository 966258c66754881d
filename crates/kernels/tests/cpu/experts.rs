//! Mixtures of experts on the CPU against their definition in f64.

#![allow(unsafe_code)] // memory in which some experts cannot be read
use std::sync::Arc;

use half::{bf16, f16};
use oscar_codec::{ExactSlot, KvGeometry};
use oscar_kernels::backend::{
    Activation, Batch, CacheSpec, ExpertBiases, Linear, RmsNorm, Rope, RopeLayout, RoutedMlp, SequenceRows,
    SharedBytes, SharedExpert, StoredMatrix,
};
use oscar_kernels::cpu::isa::Isa;
use oscar_kernels::cpu::{CpuBackend, Step};
use oscar_kernels::quant::dequantise;
use oscar_kernels::routing::{Routing, RoutingRule, Scores};
use oscar_kernels::{Backend, DType, KernelError};
use oscar_random::Random;

const HIDDEN: usize = 64;
const INNER: usize = 96;
const EXPERTS: usize = 12;
const TOP_K: usize = 3;
const EPS: f32 = 1e-6;

/// The stored weights of a layer.
struct Stored {
    norm: StoredMatrix,
    router: StoredMatrix,
    correction: StoredMatrix,
    experts: [Vec<StoredMatrix>; 3],
    biases: Option<[Vec<StoredMatrix>; 3]>,
    activation: Activation,
    shared: [StoredMatrix; 3],
}

fn matrix(dtype: DType, rows: usize, cols: usize, random: &mut Random) -> StoredMatrix {
    let mut bytes = Vec::new();
    match dtype {
        DType::F32 => {
            bytes.extend(random.signed_vec(rows * cols).iter().flat_map(|x| (0.3 * x).to_le_bytes()))
        }
        DType::BF16 => {
            let values = random.signed_vec(rows * cols);
            bytes.extend(values.iter().flat_map(|x| bf16::from_f32(0.3 * x).to_le_bytes()));
        }
        DType::Q8_0 => {
            for _ in 0..rows * cols / 32 {
                bytes.extend(f16::from_f32(0.003).to_le_bytes());
                bytes.extend(random.signed_vec(32).iter().map(|x| (127.0 * x) as i8 as u8));
            }
        }
        DType::Mxfp4 => {
            for _ in 0..rows * cols / 32 {
                bytes.push(123 + random.below(3) as u8);
                bytes.extend((0..16).map(|_| random.next_u64() as u8));
            }
        }
        _ => unreachable!("{dtype}"),
    }
    StoredMatrix { bytes: Arc::new(bytes), offset: 0, dtype, rows, cols, scales: None }
}

fn stored(dtype: DType, random: &mut Random) -> Stored {
    let mut all = |rows, cols| (0..EXPERTS).map(|_| matrix(dtype, rows, cols, random)).collect();
    let experts = [all(INNER, HIDDEN), all(INNER, HIDDEN), all(HIDDEN, INNER)];
    let mut one = |dtype, rows, cols| matrix(dtype, rows, cols, random);
    Stored {
        norm: one(DType::F32, 1, HIDDEN),
        router: one(DType::F32, EXPERTS, HIDDEN),
        correction: one(DType::F32, 1, EXPERTS),
        experts,
        biases: None,
        activation: Activation::Silu,
        shared: [one(dtype, INNER, HIDDEN), one(dtype, INNER, HIDDEN), one(dtype, HIDDEN, INNER)],
    }
}

/// A layer whose experts have biases and an activation that is clamped, at numbers that occur.
fn with_biases(dtype: DType, random: &mut Random) -> Stored {
    let mut all = |cols| (0..EXPERTS).map(|_| matrix(DType::BF16, 1, cols, random)).collect();
    let biases = [all(INNER), all(INNER), all(HIDDEN)];
    let activation = Activation::ClampedSwiglu { alpha: 1.702, limit: 0.9 };
    Stored { biases: Some(biases), activation, ..stored(dtype, random) }
}

fn routing() -> Routing {
    let rule = RoutingRule {
        experts: EXPERTS,
        top_k: TOP_K,
        scores: Scores::Sigmoid,
        groups: None,
        normalise: true,
        scale: 1.5,
    };
    Routing::new(rule).unwrap()
}

fn layer(backend: &CpuBackend, stored: &Stored) -> RoutedMlp<CpuBackend> {
    let weight = |matrix: &StoredMatrix| backend.weight(matrix).unwrap();
    let linear = |matrix: &StoredMatrix| Linear { weight: weight(matrix), bias: None };
    let [gate, up, down] = stored.experts.each_ref().map(|experts| backend.experts(experts).unwrap());
    let [shared_gate, shared_up, shared_down] = stored.shared.each_ref().map(linear);
    RoutedMlp {
        norm: RmsNorm { weight: weight(&stored.norm), eps: EPS },
        router: linear(&stored.router),
        correction: Some(weight(&stored.correction)),
        routing: routing(),
        activation: stored.activation,
        gate,
        up,
        down,
        biases: stored.biases.as_ref().map(|biases| {
            let [gate, up, down] = biases.each_ref().map(|biases| backend.experts(biases).unwrap());
            ExpertBiases { gate, up, down }
        }),
        shared: Some(SharedExpert { gate: shared_gate, up: shared_up, down: shared_down }),
    }
}

fn step(backend: &CpuBackend, rows: usize) -> Step {
    let geometry = KvGeometry { layers: 1, kv_heads: 1, head_dim: 32 };
    let cache = backend.cache(&CacheSpec::exact(geometry, 1, 3)).unwrap();
    let rope = Rope { inverse_frequencies: Vec::new(), magnitude: 1.0, layout: RopeLayout::Halves };
    let pages = ExactSlot::table([1, 2]);
    let sequence = SequenceRows::exact(0, rows, &pages);
    backend.begin_step(&Batch { tokens: &vec![0; rows], sequences: &[sequence] }, &rope, &cache).unwrap()
}

fn run(backend: &CpuBackend, mlp: &RoutedMlp<CpuBackend>, x: &[f32]) -> Result<Vec<f32>, KernelError> {
    let rows = x.len() / HIDDEN;
    let mut hidden = backend.buffer(rows, HIDDEN)?;
    hidden.first_rows_mut("rows", rows)?.copy_from_slice(x);
    backend.routed_mlp(&step(backend, rows), mlp, &mut hidden)?;
    backend.read(&hidden, 0..rows)
}

fn values(matrix: &StoredMatrix) -> Vec<f32> {
    let mut out = vec![0.0; matrix.rows * matrix.cols];
    dequantise(matrix.dtype, matrix.data().unwrap(), &mut out);
    out
}

fn product(matrix: &StoredMatrix, x: &[f64]) -> Vec<f64> {
    let rows = values(matrix);
    rows.chunks(matrix.cols).map(|row| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum()).collect()
}

fn expert(
    weights: [&StoredMatrix; 3],
    biases: Option<[&StoredMatrix; 3]>,
    activation: Activation,
    x: &[f64],
) -> Vec<f64> {
    let project = |part: usize, x: &[f64]| -> Vec<f64> {
        let bias = biases.map_or(vec![0.0; weights[part].rows], |biases| values(biases[part]));
        product(weights[part], x).into_iter().zip(bias).map(|(value, bias)| value + f64::from(bias)).collect()
    };
    let (gate, up) = (project(0, x), project(1, x));
    let activate = |(gate, up): (f64, f64)| match activation {
        Activation::ClampedSwiglu { alpha, limit } => {
            let limit = f64::from(limit);
            let gate = gate.min(limit);
            gate / (1.0 + (-f64::from(alpha) * gate).exp()) * (up.clamp(-limit, limit) + 1.0)
        }
        _ => gate / (1.0 + (-gate).exp()) * up,
    };
    project(2, &gate.into_iter().zip(up).map(activate).collect::<Vec<_>>())
}

/// The definition, and which experts it goes to.
fn defined(stored: &Stored, x: &[f32]) -> (Vec<f64>, Vec<usize>) {
    let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / HIDDEN as f64;
    let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
    let normed: Vec<f64> =
        x.iter().zip(values(&stored.norm)).map(|(&x, g)| f64::from(x) * scale * f64::from(g)).collect();
    let scores: Vec<f64> =
        product(&stored.router, &normed).into_iter().map(|logit| 1.0 / (1.0 + (-logit).exp())).collect();
    let correction = values(&stored.correction);
    let mut order: Vec<usize> = (0..EXPERTS).collect();
    let key = |expert: usize| scores[expert] + f64::from(correction[expert]);
    order.sort_by(|&a, &b| key(b).total_cmp(&key(a)));
    order.truncate(TOP_K);
    let sum: f64 = order.iter().map(|&expert| scores[expert]).sum();
    let mut out: Vec<f64> = x.iter().copied().map(f64::from).collect();
    let mut add =
        |weight: f64, values: Vec<f64>| out.iter_mut().zip(values).for_each(|(o, v)| *o += weight * v);
    for &chosen in &order {
        let of = |all: &'_ [Vec<StoredMatrix>; 3]| all.each_ref().map(|all| all[chosen].clone());
        let (weights, biases) = (of(&stored.experts), stored.biases.as_ref().map(of));
        let biases = biases.as_ref().map(|biases| biases.each_ref());
        let made = expert(weights.each_ref(), biases, stored.activation, &normed);
        add(1.5 * scores[chosen] / sum, made);
    }
    add(1.0, expert(stored.shared.each_ref(), None, stored.activation, &normed));
    (out, order)
}

#[test]
fn every_path_agrees_with_the_definition() {
    let mut random = Random::new(31);
    let plain = [DType::F32, DType::BF16, DType::Q8_0].map(|dtype| (dtype, stored(dtype, &mut random)));
    let biased = [DType::BF16, DType::Mxfp4].map(|dtype| (dtype, with_biases(dtype, &mut random)));
    for (dtype, stored) in plain.into_iter().chain(biased) {
        // 40 rows at 3 of 12 experts: groups of few rows and of many.
        for rows in [1, 2, 7, 40] {
            let x = random.signed_vec(rows * HIDDEN);
            for isa in Isa::available() {
                for backend in [CpuBackend::with_isa(2, isa), CpuBackend::with_isa(3, isa).deterministic()] {
                    let got = run(&backend, &layer(&backend, &stored), &x).unwrap();
                    for (row, (got, x)) in got.chunks(HIDDEN).zip(x.chunks(HIDDEN)).enumerate() {
                        let (exact, _) = defined(&stored, x);
                        let size = exact.iter().map(|v| v * v).sum::<f64>().sqrt();
                        let error =
                            got.iter().zip(&exact).map(|(g, e)| (f64::from(*g) - e).powi(2)).sum::<f64>();
                        assert!(
                            error.sqrt() < 2e-4 * size,
                            "{dtype} {isa} row {row} of {rows}: {:.1e}",
                            error.sqrt() / size
                        );
                    }
                }
            }
        }
    }
}

/// With one numeric path a row has the same bits alone and among others, in whatever group its experts are.
#[test]
fn a_row_does_not_depend_on_its_batch() {
    let mut random = Random::new(32);
    let plain = [DType::BF16, DType::Q8_0].map(|dtype| (dtype, stored(dtype, &mut random)));
    let biased = [DType::Mxfp4].map(|dtype| (dtype, with_biases(dtype, &mut random)));
    for (dtype, stored) in plain.into_iter().chain(biased) {
        for isa in Isa::available() {
            let backend = CpuBackend::with_isa(2, isa).deterministic();
            let mlp = layer(&backend, &stored);
            let x = random.signed_vec(40 * HIDDEN);
            let together = run(&backend, &mlp, &x).unwrap();
            for (row, (x, together)) in x.chunks(HIDDEN).zip(together.chunks(HIDDEN)).enumerate() {
                assert_eq!(run(&backend, &mlp, x).unwrap(), together, "{dtype} {isa} row {row}");
            }
            for chunk in [3, 17] {
                let apart: Vec<f32> =
                    x.chunks(chunk * HIDDEN).flat_map(|x| run(&backend, &mlp, x).unwrap()).collect();
                assert_eq!(apart, together, "{dtype} {isa} chunks of {chunk}");
            }
        }
    }
}

/// A router that has no scores for a row concerns that row alone.
#[test]
fn a_row_without_scores_becomes_nan_and_the_others_do_not() {
    let mut random = Random::new(33);
    let stored = stored(DType::BF16, &mut random);
    let backend = CpuBackend::new(2).unwrap().deterministic();
    let mlp = layer(&backend, &stored);
    let mut x = random.signed_vec(9 * HIDDEN);
    let before = run(&backend, &mlp, &x).unwrap();
    x[4 * HIDDEN + 5] = f32::NAN;
    let after = run(&backend, &mlp, &x).unwrap();
    for (row, (before, after)) in before.chunks(HIDDEN).zip(after.chunks(HIDDEN)).enumerate() {
        match row {
            4 => assert!(after.iter().all(|value| value.is_nan())),
            _ => assert_eq!(before, after, "row {row}"),
        }
    }
}

#[test]
fn experts_that_do_not_fit_the_router_are_errors() {
    let mut random = Random::new(34);
    let stored = with_biases(DType::F32, &mut random);
    let backend = CpuBackend::new(1).unwrap();
    let x = random.signed_vec(HIDDEN);
    let fails = |change: &dyn Fn(&mut RoutedMlp<CpuBackend>)| {
        let mut mlp = layer(&backend, &stored);
        change(&mut mlp);
        run(&backend, &mlp, &x).unwrap_err()
    };
    fails(&|mlp| mlp.down = backend.experts(&stored.experts[2][1..]).unwrap());
    fails(&|mlp| mlp.down = backend.experts(&stored.experts[0]).unwrap());
    fails(&|mlp| mlp.up = backend.experts(&stored.experts[2]).unwrap());
    fails(&|mlp| mlp.router.weight = backend.weight(&stored.experts[0][0]).unwrap());
    fails(&|mlp| mlp.correction = Some(backend.weight(&stored.norm).unwrap()));
    let biases = stored.biases.as_ref().unwrap();
    let change = |mlp: &mut RoutedMlp<CpuBackend>, wrong: &[StoredMatrix]| {
        mlp.biases.as_mut().unwrap().up = backend.experts(wrong).unwrap();
    };
    fails(&|mlp| change(mlp, &biases[1][1..]));
    fails(&|mlp| change(mlp, &biases[2]));
    fails(&|mlp| change(mlp, &stored.experts[0]));
    let mixed = [stored.experts[0][0].clone(), stored.experts[2][0].clone()];
    assert!(backend.experts(&mixed).is_err(), "experts of one projection have one shape");
}

/// Memory in which each expert has pages of its own, some of which cannot be read.
#[cfg(target_os = "linux")]
struct Guarded {
    start: *mut u8,
    bytes: usize,
}

// SAFETY: memory that is only read once it is shared.
#[cfg(target_os = "linux")]
unsafe impl Send for Guarded {}
// SAFETY: as above.
#[cfg(target_os = "linux")]
unsafe impl Sync for Guarded {}

#[cfg(target_os = "linux")]
impl AsRef<[u8]> for Guarded {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: a mapping of this size that lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.start, self.bytes) }
    }
}

#[cfg(target_os = "linux")]
impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: the mapping is nobody else's.
        unsafe { libc::munmap(self.start.cast(), self.bytes) };
    }
}

/// The experts of a layer in memory where reading an expert outside `chosen` ends the process.
#[cfg(target_os = "linux")]
fn guarded(experts: &[StoredMatrix], chosen: &[usize]) -> Vec<StoredMatrix> {
    const PAGE: usize = 1 << 16;
    let bytes = experts.len() * PAGE;
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping, checked below.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0) };
    assert_ne!(start, libc::MAP_FAILED);
    let start: *mut u8 = start.cast();
    for (index, expert) in experts.iter().enumerate() {
        let data = expert.data().unwrap();
        assert!(data.len() <= PAGE);
        // SAFETY: each expert has a page of the mapping that it fits into.
        unsafe {
            let page = start.add(index * PAGE);
            page.copy_from_nonoverlapping(data.as_ptr(), data.len());
            if !chosen.contains(&index) {
                assert_eq!(libc::mprotect(page.cast(), PAGE, libc::PROT_NONE), 0);
            }
        }
    }
    let bytes: SharedBytes = Arc::new(Guarded { start, bytes });
    let at = |(index, expert): (usize, &StoredMatrix)| StoredMatrix {
        bytes: bytes.clone(),
        offset: index * PAGE,
        ..expert.clone()
    };
    experts.iter().enumerate().map(at).collect()
}

#[test]
#[cfg(target_os = "linux")]
fn weights_of_experts_that_nobody_chose_are_not_read() {
    let mut random = Random::new(35);
    let mut stored = stored(DType::BF16, &mut random);
    for rows in [1, 2, 20] {
        // Rows alike choose alike, so some experts are left over even for many of them.
        let one = random.signed_vec(HIDDEN);
        let x: Vec<f32> = (0..rows)
            .flat_map(|_| one.iter().map(|x| x + 0.01 * random.signed()).collect::<Vec<_>>())
            .collect();
        let mut chosen: Vec<usize> = x.chunks(HIDDEN).flat_map(|x| defined(&stored, x).1).collect();
        chosen.sort_unstable();
        chosen.dedup();
        assert!(chosen.len() < EXPERTS, "everybody was chosen");
        let all = stored.experts.clone();
        stored.experts = all.each_ref().map(|experts| guarded(experts, &chosen));
        for isa in Isa::available() {
            let backend = CpuBackend::with_isa(2, isa);
            // Loading does not read them either.
            run(&backend, &layer(&backend, &stored), &x).unwrap();
        }
        stored.experts = all;
    }
}
