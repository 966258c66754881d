//! [`Backend`] on a card: checks shapes and launches kernels on one stream.

use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use cudarc::driver::CudaSlice;
use oscar_codec::{CodecError, ExactSlot, HostCopy, PageLayout};

use super::cache::CudaCache;
use super::device::Device;
use super::graphs::{self, Next};
use super::operands::{Ends, GatedBlock, Input, InputSource, Output, OutputNorm, Projection, RoutedBlock};
use super::plan::Split;
use super::prefill::{PlannedRows, PrefillPools};
use super::products::Products;
use super::readings::HIGH;
use super::routed::Experts;
use super::sample::{CudaDraws, Sampler};
use super::seal::SealPools;
use super::step::CudaStep;
use super::step_tables::{StepTables, WindowTables, lock};
use super::weights::{CudaExperts, CudaWeight, WeightLoader, bytes_of_numbers};
use super::write::{HeadNorm, HeadNorms, StepRows, WritePools};
use crate::backend::{
    Activation, AttentionSpec, Backend, Batch, CacheSpec, Draw, ExpertBiases, Feature, GatedMlp, KernelError,
    Linear, RmsNorm, Rope, RoutedMlp, Sampling, SealPage, StoredMatrix, expect,
};
use crate::dtype::DType;
use crate::error::CudaError;

/// Pages of a segment where results must not depend on the batch.
const FIXED_PAGES: usize = 16;

/// A card as a device.
pub struct CudaBackend {
    device: Arc<Device>,
    loader: WeightLoader,
    pub(super) products: Products,
    sampler: Sampler,
    /// Kernels for mixtures of experts, compiled for the first model that has some.
    experts: OnceLock<Experts>,
    /// Sums of weights of rows, which the share of learned sinks depends on.
    pub(super) totals: Mutex<Option<CudaSlice<f32>>>,
    deterministic: bool,
    /// Whether decode steps are recorded; `OSCAR_CUDA_RECORD=0` turns it off, to find out whether it matters.
    records: bool,
}

/// A matrix of f32 activations on the card.
pub struct CudaBuffer {
    rows: usize,
    cols: usize,
    pub(super) values: CudaSlice<f32>,
}

impl CudaBuffer {
    /// The number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    pub(super) fn check(&self, what: &'static str, rows: usize) -> Result<(), KernelError> {
        if rows <= self.rows {
            return Ok(());
        }
        Err(KernelError::Shape { what, expected: rows, got: self.rows })
    }
}

impl CudaBackend {
    /// Compiles (or finds) the kernels that do not depend on a model. With `deterministic` the bits of a row do not depend
    /// on what else is computed with it.
    pub fn new(device: Arc<Device>, deterministic: bool) -> Result<CudaBackend, CudaError> {
        Ok(CudaBackend {
            loader: WeightLoader::new(&device)?,
            products: Products::new(&device, deterministic)?,
            sampler: Sampler::new(&device)?,
            experts: OnceLock::new(),
            totals: Mutex::default(),
            deterministic,
            records: std::env::var_os("OSCAR_CUDA_RECORD").is_none_or(|value| value != "0"),
            device,
        })
    }

    /// The card that it works on.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Whether products of many rows go through cuBLASLt; without it prefill is slower.
    pub fn has_blas(&self) -> bool {
        self.products.has_blas()
    }

    pub(super) fn loader(&self) -> &WeightLoader {
        &self.loader
    }

    fn experts(&self) -> Result<&Experts, CudaError> {
        if let Some(experts) = self.experts.get() {
            return Ok(experts);
        }
        let experts = Experts::new(&self.device, self.deterministic)?;
        Ok(self.experts.get_or_init(|| experts))
    }

    /// Applies norms that are over all heads of a layer, before each head goes its own way.
    fn norm_heads_together(
        &self,
        step: &CudaStep,
        spec: &AttentionSpec<Self>,
        qkv: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        let (queries, keys) = (spec.q_heads * spec.head_dim, spec.kv_heads * spec.head_dim);
        for (norm, columns) in [(&spec.q_norm, 0..queries), (&spec.k_norm, queries..queries + keys)] {
            let Some(norm) = norm.as_ref().filter(|norm| norm.weight.cols != spec.head_dim) else { continue };
            let gain = norm.weight.vector("a norm over all heads", columns.len())?;
            let (stride, epsilon) = (qkv.cols, norm.eps);
            let norms = self.products.norms();
            norms.norm_columns(&mut qkv.values, step.rows, stride, columns, gain, epsilon)?;
        }
        Ok(())
    }

    fn gain<'a>(&self, norm: &'a RmsNorm<Self>, len: usize) -> Result<&'a CudaSlice<f32>, KernelError> {
        norm.weight.vector("a norm", len)
    }

    /// The norm of what a block adds, which has `len` columns.
    fn output_norm<'a>(&self, norm: &'a RmsNorm<Self>, len: usize) -> Result<OutputNorm<'a>, KernelError> {
        Ok(OutputNorm { gain: self.gain(norm, len)?, epsilon: norm.eps })
    }

    fn projections<'a>(
        &self,
        step: &CudaStep,
        linears: &[&'a Linear<Self>],
    ) -> Result<Vec<Projection<'a>>, KernelError> {
        let mut first_column = 0;
        linears
            .iter()
            .map(|linear| {
                let projection = self.projection(step, linear, first_column);
                first_column += linear.weight.rows;
                projection
            })
            .collect()
    }

    fn projection<'a>(
        &self,
        step: &CudaStep,
        linear: &'a Linear<Self>,
        first_column: usize,
    ) -> Result<Projection<'a>, KernelError> {
        let bias = linear.bias.as_ref().map(|bias| bias.vector("a bias", linear.weight.rows));
        let kept = matches!(step.tables(), StepTables::Prefill(_));
        Ok(Projection { weight: &linear.weight, bias: bias.transpose()?, first_column, kept })
    }
}

impl CudaBackend {
    /// Adds the product of rows with one matrix, or the norm of that, to the hidden rows.
    fn add_product(
        &self,
        step: &CudaStep,
        x: &CudaBuffer,
        linear: &Linear<Self>,
        norm: Option<OutputNorm<'_>>,
        hidden: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        expect("columns of the projection", linear.weight.rows, hidden.cols)?;
        let source = InputSource::Plain;
        let input = Input { x: &x.values, stride: x.cols, rows: step.rows, columns: x.cols, source };
        let projection = self.projection(step, linear, 0)?;
        self.products.run_added(&self.loader, input, projection, norm, &mut hidden.values)
    }
}

/// A norm over each head of a layer; one over all heads together is [`CudaBackend::norm_heads_together`]'s.
fn head_norm(
    norm: Option<&RmsNorm<CudaBackend>>,
    head_dim: usize,
) -> Result<Option<HeadNorm<'_>>, KernelError> {
    norm.filter(|norm| norm.weight.cols == head_dim)
        .map(|norm| {
            let gain = norm.weight.vector("a head norm", head_dim)?;
            Ok(HeadNorm { gain, epsilon: norm.eps })
        })
        .transpose()
}

/// What the experts of a layer add, in the order of [`RoutedBlock::biases`].
fn expert_biases<'a>(
    mlp: &RoutedMlp<CudaBackend>,
    biases: &'a ExpertBiases<CudaBackend>,
) -> Result<[&'a CudaSlice<f32>; 3], KernelError> {
    let count = mlp.gate.count;
    Ok([
        biases.gate.vectors("biases of the gates", count, mlp.gate.rows)?,
        biases.up.vectors("biases of the up projections", count, mlp.up.rows)?,
        biases.down.vectors("biases of the down projections", count, mlp.down.rows)?,
    ])
}

/// What a step has for layers with a window.
fn windows_of(windows: &Option<WindowTables>) -> Result<&WindowTables, CudaError> {
    windows.as_ref().ok_or_else(|| CudaError::Unsupported("a step without tables for windows".into()))
}

fn check_cache(
    spec: &AttentionSpec<CudaBackend>,
    layer: usize,
    cache: &CudaCache,
) -> Result<(), KernelError> {
    let geometry = cache.spec.geometry;
    expect("KV heads of the cache", spec.kv_heads, geometry.kv_heads)?;
    expect("head dimension of the cache", spec.head_dim, geometry.head_dim)?;
    expect("query heads of the cache", spec.q_heads, cache.spec.query_heads)?;
    if layer >= geometry.layers {
        let (expected, got) = (layer + 1, geometry.layers);
        return Err(KernelError::Shape { what: "layers of the cache", expected, got });
    }
    Ok(())
}

impl Backend for CudaBackend {
    type Weight = CudaWeight;
    type Experts = CudaExperts;
    type Buffer = CudaBuffer;
    type Cache = CudaCache;
    type Step = CudaStep;
    type Draws = CudaDraws;

    fn is_deterministic(&self) -> bool {
        self.deterministic
    }

    fn free_memory(&self) -> Option<usize> {
        self.device.free_memory().ok()
    }

    fn weight_bytes(&self, dtype: DType, numbers: usize) -> usize {
        bytes_of_numbers(dtype, numbers)
    }

    fn supports(&self, feature: Feature) -> bool {
        match feature {
            Feature::SlidingWindows
            | Feature::OutputNorms
            | Feature::GeluTanh
            | Feature::ScaledEmbeddings
            | Feature::HostPages
            | Feature::LearnedSinks
            | Feature::ClampedSwiglu
            | Feature::ExpertBiases
            | Feature::LayersWithoutRope
            | Feature::HighTier => true,
        }
    }

    fn weight(&self, stored: &StoredMatrix) -> Result<CudaWeight, KernelError> {
        self.loader.load(stored)
    }

    fn finish_weights(&self) {
        self.loader.release_staging();
    }

    fn buffer(&self, rows: usize, cols: usize) -> Result<CudaBuffer, KernelError> {
        let values = self.device.allocate(rows.saturating_mul(cols), "activations")?;
        Ok(CudaBuffer { rows, cols, values })
    }

    fn cache(&self, spec: &CacheSpec) -> Result<CudaCache, KernelError> {
        Ok(CudaCache::new(&self.device, spec)?)
    }

    fn read(&self, buffer: &CudaBuffer, rows: Range<usize>) -> Result<Vec<f32>, KernelError> {
        buffer.check("rows read", rows.end)?;
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        let values = buffer.values.slice(rows.start * buffer.cols..rows.end * buffer.cols);
        let stream = self.device.stream();
        let read = stream.clone_dtoh(&values).map_err(CudaError::Driver)?;
        stream.synchronize().map_err(CudaError::Driver)?;
        Ok(read)
    }

    fn begin_step(&self, batch: &Batch<'_>, rope: &Rope, cache: &CudaCache) -> Result<CudaStep, KernelError> {
        let split = if self.deterministic { Split::Fixed { pages: FIXED_PAGES } } else { Split::Balanced };
        CudaStep::new(&self.device, batch, rope, cache, split)
    }

    fn computes_ahead(&self) -> bool {
        true
    }

    fn begin_step_of_draws(
        &self,
        draws: &CudaDraws,
        batch: &Batch<'_>,
        rope: &Rope,
        cache: &CudaCache,
    ) -> Result<Option<CudaStep>, KernelError> {
        let step = self.begin_step(batch, rope, cache)?;
        let StepTables::Decode(tables) = step.tables() else { return Ok(None) };
        let passed_on = self.sampler.pass_on(draws, &mut lock(tables).tokens)?;
        Ok(passed_on.then_some(step))
    }

    fn add_windows(
        &self,
        step: &mut CudaStep,
        rope: &Rope,
        window: usize,
        cache: &CudaCache,
    ) -> Result<(), KernelError> {
        step.add_windows(rope, window, cache)
    }

    fn record(
        &self,
        step: &CudaStep,
        variant: usize,
        body: &mut dyn FnMut() -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        let StepTables::Decode(tables) = step.tables() else { return body() };
        if !self.records {
            return body();
        }
        let mut signature = lock(tables).signature(&self.device);
        signature.extend([self.products.replaced(), variant as u64]);
        let next = lock(tables).recordings.replay(&signature)?;
        match next {
            Next::Done => Ok(()),
            Next::Run => body(),
            Next::Record => {
                let graph = graphs::record(self.device.stream(), body)?;
                let refused = graph.is_none();
                lock(tables).recordings.keep(&signature, graph)?;
                if refused { body() } else { Ok(()) }
            }
        }
    }

    fn embed(&self, table: &CudaWeight, step: &CudaStep, hidden: &mut CudaBuffer) -> Result<(), KernelError> {
        expect("columns of the embedding", table.cols, hidden.cols)?;
        hidden.check("embedding rows", step.rows)?;
        if step.rows > 0 && step.largest_token as usize >= table.rows {
            return Err(KernelError::TokenOutOfRange { token: step.largest_token, vocab: table.rows });
        }
        match step.tables() {
            StepTables::Decode(tables) => {
                self.loader.embed(table, &lock(tables).tokens, step.rows, &mut hidden.values)
            }
            StepTables::Prefill(tables) => {
                self.loader.embed(table, &tables.tokens, step.rows, &mut hidden.values)
            }
        }
    }

    fn scale(&self, step: &CudaStep, factor: f32, hidden: &mut CudaBuffer) -> Result<(), KernelError> {
        hidden.check("hidden rows", step.rows)?;
        let count = step.rows * hidden.cols;
        Ok(self.products.norms().scale(&mut hidden.values, count, factor)?)
    }

    fn norm_linear(
        &self,
        step: &CudaStep,
        x: &CudaBuffer,
        norm: &RmsNorm<Self>,
        linears: &[&Linear<Self>],
        out: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        let projections = self.projections(step, linears)?;
        let outputs = projections.iter().map(|projection| projection.weight.rows).sum();
        expect("columns of the projections", outputs, out.cols)?;
        let source = InputSource::Normed { gain: self.gain(norm, x.cols)?, epsilon: norm.eps, indices: None };
        let input = Input { x: &x.values, stride: x.cols, rows: step.rows, columns: x.cols, source };
        let output = Output { stride: out.cols, out: &mut out.values, ends: Ends::Set };
        self.products.run(&self.loader, input, &projections, output)
    }

    fn rope_store(
        &self,
        step: &CudaStep,
        spec: &AttentionSpec<Self>,
        layer: usize,
        qkv: &mut CudaBuffer,
        cache: &mut CudaCache,
    ) -> Result<(), KernelError> {
        check_cache(spec, layer, cache)?;
        expect("columns of queries, keys and values", spec.qkv_cols(), qkv.cols)?;
        qkv.check("query, key and value rows", step.rows)?;
        let pools = WritePools {
            exact: &mut cache.exact,
            exact_slots: cache.spec.slots,
            scratch: cache.scratch.as_mut(),
        };
        self.norm_heads_together(step, spec, qkv)?;
        let norms = HeadNorms {
            queries: head_norm(spec.q_norm.as_ref(), spec.head_dim)?,
            keys: head_norm(spec.k_norm.as_ref(), spec.head_dim)?,
        };
        let writer = &cache.writer;
        let write = |targets: &StepRows, windows: &Option<WindowTables>| {
            let targets = if spec.window.is_some() { &windows_of(windows)?.targets } else { targets };
            writer.launch_in_place(targets, layer, spec.rotates, norms, &mut qkv.values, pools)?;
            Ok::<(), KernelError>(())
        };
        match step.tables() {
            StepTables::Decode(tables) => {
                let tables = lock(tables);
                write(&tables.targets, &tables.windows)
            }
            StepTables::Prefill(tables) => write(&tables.targets, &tables.windows),
        }
    }

    fn attend(
        &self,
        step: &CudaStep,
        spec: &AttentionSpec<Self>,
        layer: usize,
        qkv: &CudaBuffer,
        cache: &CudaCache,
        out: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        check_cache(spec, layer, cache)?;
        expect("columns of the attention output", spec.q_heads * spec.head_dim, out.cols)?;
        out.check("attention rows", step.rows)?;
        expect("columns of queries, keys and values", spec.qkv_cols(), qkv.cols)?;
        if spec.window.is_some() {
            // Rows of layers that keep no history are stored as they are.
            let mut attend = |windows: &Option<WindowTables>| {
                let pools = PrefillPools { exact: cache.exact_view(layer), sealed: None, sink: 0 };
                let (kernel, plan) = (&cache.exact_reader().prefill, &windows_of(windows)?.plan);
                let planned = [PlannedRows { kernel, plan, pools }];
                self.attend_rows(&planned, step.rows, None, spec, layer, qkv, cache, out)
            };
            return match step.tables() {
                StepTables::Decode(tables) => attend(&lock(tables).windows),
                StepTables::Prefill(tables) => attend(&tables.windows),
            };
        }
        let undo = cache.undo(layer);
        match step.tables() {
            StepTables::Decode(tables) => {
                self.attend_decode(&mut lock(tables), step.rows, undo, spec, layer, qkv, cache, out)
            }
            StepTables::Prefill(tables) => {
                let planned: Vec<PlannedRows<'_>> = (cache.readings.of_layer(layer))
                    .filter_map(|reading| {
                        let kernel = &cache.reader(reading).prefill;
                        let plan = tables.plans[reading].as_ref()?;
                        Some(PlannedRows { kernel, plan, pools: cache.pools(reading, layer) })
                    })
                    .collect();
                self.attend_rows(&planned, step.rows, undo, spec, layer, qkv, cache, out)
            }
        }
    }

    fn seal(
        &self,
        layers: Range<usize>,
        pages: &[SealPage],
        cache: &mut CudaCache,
    ) -> Result<(), KernelError> {
        let CudaCache { spec, exact, scratch, sealed, page_means, .. } = cache;
        let first_high = sealed.get(HIGH).map_or(usize::MAX, |pool| pool.first);
        let mut failures = Vec::new();
        for (tier, pool) in sealed.iter_mut().enumerate() {
            let is_here = |page: &SealPage| (page.sealed.index() >= first_high) == (tier == HIGH);
            let (places, here): (Vec<usize>, Vec<SealPage>) =
                pages.iter().copied().enumerate().filter(|(_, page)| is_here(page)).unzip();
            if here.is_empty() {
                continue;
            }
            let sealer = pool.sealer.get_mut().unwrap_or_else(PoisonError::into_inner);
            let list = sealer.list(&here)?;
            let (scratch, first_sealed) = (scratch.as_ref(), pool.first);
            let (sealed, page_means) = (&mut pool.memory, page_means.as_ref());
            let pools = SealPools { exact, scratch, sealed, first_sealed, page_means };
            sealer.launch(&list, layers.clone(), spec.slots, pools)?;
            failures.extend(sealer.failure(layers.clone())?.map(|failure| (places[failure.page], failure)));
        }
        match failures.into_iter().min_by_key(|(page, _)| *page) {
            None => Ok(()),
            Some((page, failure)) => Err(KernelError::Seal {
                page,
                layer: failure.layer,
                head: failure.head,
                source: CodecError::NotFinite { row: failure.token, channel: failure.channel },
            }),
        }
    }

    fn copy_pages(&self, pages: &[(ExactSlot, ExactSlot)], cache: &mut CudaCache) -> Result<(), KernelError> {
        let (geometry, slots) = (cache.spec.geometry, cache.spec.slots);
        let bytes = PageLayout::bf16(geometry.head_dim).page_bytes() * geometry.kv_heads * geometry.layers;
        let stream = self.device.stream();
        for &(from, to) in pages {
            if let Some(slot) = [from, to].into_iter().find(|slot| slot.index() >= slots) {
                return Err(KernelError::PageOutOfRange { slot: slot.number(), slots });
            }
            if from == to {
                continue;
            }
            let (low, high) = (from.index().min(to.index()), from.index().max(to.index()));
            let (mut before, mut after) = cache.exact.split_at_mut(high * bytes);
            let (mut first, mut second) =
                (before.slice_mut(low * bytes..(low + 1) * bytes), after.slice_mut(..bytes));
            match from.index() == low {
                true => stream.memcpy_dtod(&first, &mut second),
                false => stream.memcpy_dtod(&second, &mut first),
            }
            .map_err(CudaError::Driver)?;
        }
        Ok(())
    }

    fn copy_host_pages(&self, copies: &[HostCopy], cache: &mut CudaCache) -> Result<(), KernelError> {
        let CudaCache { exact, sealed, host, .. } = cache;
        if copies.is_empty() {
            return Ok(());
        }
        let Some([host_exact, host_sealed]) = host else {
            return Err(KernelError::Unsupported(Feature::HostPages));
        };
        let missing = || KernelError::PageMissing { page: 0, tier: "the sealed pool" };
        // Pages of the second codec are of another size than those that there is room for, and stay.
        let mut sealed = sealed.first_mut().map(|pool| &mut pool.memory);
        for copy in copies {
            match *copy {
                HostCopy::ExactOut { from, to } => host_exact.store(exact, from.index(), to)?,
                HostCopy::ExactIn { from, to } => host_exact.load(from, exact, to.index())?,
                HostCopy::SealedOut { from, to } => {
                    host_sealed.store(sealed.as_deref().ok_or_else(missing)?, from.index(), to)?;
                }
                HostCopy::SealedIn { from, to } => {
                    host_sealed.load(from, sealed.as_deref_mut().ok_or_else(missing)?, to.index())?;
                }
            }
        }
        Ok(())
    }

    fn release_scratch(&self, _cache: &mut CudaCache) {}

    fn linear_add(
        &self,
        step: &CudaStep,
        x: &CudaBuffer,
        linear: &Linear<Self>,
        hidden: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        self.add_product(step, x, linear, None, hidden)
    }

    fn linear_norm_add(
        &self,
        step: &CudaStep,
        x: &CudaBuffer,
        linear: &Linear<Self>,
        norm: &RmsNorm<Self>,
        hidden: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        self.add_product(step, x, linear, Some(self.output_norm(norm, hidden.cols)?), hidden)
    }

    fn gated_mlp(
        &self,
        step: &CudaStep,
        mlp: &GatedMlp<Self>,
        hidden: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        let (rows, cols) = (step.rows, hidden.cols);
        expect("inputs of the gate projection", cols, mlp.gate.weight.cols)?;
        expect("outputs of the down projection", cols, mlp.down.weight.rows)?;
        hidden.check("hidden rows", rows)?;
        let source =
            InputSource::Normed { gain: self.gain(&mlp.norm, cols)?, epsilon: mlp.norm.eps, indices: None };
        let [gate, up, down] = [&mlp.gate, &mlp.up, &mlp.down].map(|linear| self.projection(step, linear, 0));
        let block = GatedBlock { activation: mlp.activation, gate: gate?, up: up?, down: down? };
        let norm = mlp.output_norm.as_ref().map(|norm| self.output_norm(norm, cols)).transpose()?;
        self.products.run_gated(&self.loader, &mut hidden.values, rows, source, block, norm)
    }

    fn experts(&self, stored: &[StoredMatrix]) -> Result<CudaExperts, KernelError> {
        self.loader.load_experts(stored)
    }

    fn routed_mlp(
        &self,
        step: &CudaStep,
        mlp: &RoutedMlp<Self>,
        hidden: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        let (rows, cols) = (step.rows, hidden.cols);
        expect("inputs of the experts", cols, mlp.gate.cols)?;
        hidden.check("hidden rows", rows)?;
        let correction = mlp.correction.as_ref().map(|weight| weight.vector("a correction", weight.cols));
        let block = RoutedBlock {
            router: self.projection(step, &mlp.router, 0)?,
            correction: correction.transpose()?,
            routing: &mlp.routing,
            gate: &mlp.gate,
            up: &mlp.up,
            down: &mlp.down,
            activation: mlp.activation,
            biases: mlp.biases.as_ref().map(|biases| expert_biases(mlp, biases)).transpose()?,
        };
        let norm =
            InputSource::Normed { gain: self.gain(&mlp.norm, cols)?, epsilon: mlp.norm.eps, indices: None };
        let shared = match &mlp.shared {
            Some(shared) => {
                let [gate, up, down] =
                    [&shared.gate, &shared.up, &shared.down].map(|linear| self.projection(step, linear, 0));
                Some(GatedBlock { activation: Activation::Silu, gate: gate?, up: up?, down: down? })
            }
            None => None,
        };
        let hidden = &mut hidden.values;
        self.experts()?.run(&self.products, &self.loader, hidden, rows, norm, &block, shared)
    }

    fn logits(
        &self,
        hidden: &CudaBuffer,
        rows: &[usize],
        norm: &RmsNorm<Self>,
        head: &CudaWeight,
        out: &mut CudaBuffer,
    ) -> Result<(), KernelError> {
        expect("columns of logits", head.rows, out.cols)?;
        out.check("logits", rows.len())?;
        hidden.check("hidden rows", rows.iter().max().map_or(0, |row| row + 1))?;
        if rows.is_empty() {
            return Ok(());
        }
        let consecutive = rows.iter().enumerate().all(|(index, &row)| index == row);
        let numbers: Vec<u32> = rows.iter().map(|&row| row as u32).collect();
        let indices = match consecutive {
            true => None,
            false => Some(self.device.stream().clone_htod(&numbers).map_err(CudaError::Driver)?),
        };
        let gain = self.gain(norm, hidden.cols)?;
        let source = InputSource::Normed { gain, epsilon: norm.eps, indices: indices.as_ref() };
        let input =
            Input { x: &hidden.values, stride: hidden.cols, rows: rows.len(), columns: hidden.cols, source };
        let output = Output { stride: out.cols, out: &mut out.values, ends: Ends::Set };
        let head = Projection { weight: head, bias: None, first_column: 0, kept: false };
        self.products.run(&self.loader, input, &[head], output)
    }

    fn begin_draws(&self, logits: &CudaBuffer, settings: &[Sampling<'_>]) -> Result<CudaDraws, KernelError> {
        logits.check("logits", settings.len())?;
        Ok(self.sampler.begin(&logits.values, logits.cols, settings)?)
    }

    fn finish_draws(
        &self,
        draws: CudaDraws,
        logits: &CudaBuffer,
        settings: &[Sampling<'_>],
    ) -> Result<Vec<Draw>, KernelError> {
        Ok(self.sampler.finish(draws, &logits.values, logits.cols, settings)?)
    }
}
