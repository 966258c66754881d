//! [`Backend`] on the CPU: checks shapes, splits work over the pool, calls the kernels.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use oscar_codec::{ExactSlot, HeadIndex, SealedSlot, Side};

use super::attend::{self, AttendScratch, Numerics, PartialStates, Tiers};
use super::cache::Cache;
use super::dot::Dot;
use super::elementwise::{activate, rms_norm, rms_norm_in_place};
use super::encode::{SealScratch, Sealer};
use super::experts::{self, ExpertScratch, Experts};
use super::heads::Heads;
use super::isa::Isa;
use super::memory::DisjointSlice;
use super::outputs::{linear_into, norm_add, projection};
use super::per_thread::PerThread;
use super::pool::Pool;
use super::project::{Input, Mode, ProjectScratch, Projection, Projector, WorkerScratch};
use super::rows::{PARALLEL_VALUES, for_each_row};
use super::step::Step;
use super::store::Store;
use super::tensors::{Matrix, Weight};
use crate::backend::{
    AttentionSpec, Backend, Batch, CacheSpec, Draw, Feature, GatedMlp, KernelError, Linear, RmsNorm, Rope,
    RoutedMlp, Sampled, Sampling, SealPage, SealedSpec, StoredMatrix, expect,
};
use crate::sampling;

/// The CPU as a device.
pub struct CpuBackend {
    pub(super) isa: Isa,
    pool: Pool,
    dot: Dot,
    workspace: Mutex<Workspace>,
    projectors: PerThread<WorkerScratch>,
    attenders: PerThread<AttendScratch>,
    sealers: PerThread<SealScratch>,
    partial_states: Mutex<PartialStates>,
    fixed: bool,
}

/// Intermediate activations, kept between calls.
#[derive(Default)]
struct Workspace {
    gate_up: Vec<f32>,
    experts: ExpertScratch,
    /// Results that are normed before they are added.
    output: Vec<f32>,
    project: ProjectScratch,
}

impl CpuBackend {
    /// A backend on `threads` threads with the path of this machine, or the one `OSCAR_SIMD` names.
    pub fn new(threads: usize) -> Result<CpuBackend, KernelError> {
        Ok(CpuBackend::with_isa(threads, Isa::from_env()?))
    }

    /// A backend with a given path, which must be available.
    pub fn with_isa(threads: usize, isa: Isa) -> CpuBackend {
        assert!(isa.is_available(), "{isa} is not available on this machine");
        let pool = Pool::new(threads);
        let threads = pool.threads();
        CpuBackend {
            isa,
            pool,
            dot: Dot::new(isa),
            workspace: Mutex::default(),
            projectors: PerThread::new(threads),
            attenders: PerThread::new(threads),
            sealers: PerThread::new(threads),
            partial_states: Mutex::default(),
            fixed: false,
        }
    }

    /// The same backend with one numeric path for every batch size and attention split by position only: the result of
    /// a row is the same to the bit, whatever else is computed with it. Prefill is slower for it.
    pub fn deterministic(mut self) -> CpuBackend {
        self.fixed = true;
        self
    }

    /// The path in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Threads in use.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    pub(super) fn attend_tiers(
        &self,
        step: &Step,
        spec: &AttentionSpec<CpuBackend>,
        qkv: &Matrix,
        tiers: &Tiers<'_>,
        out: &mut Matrix,
    ) -> Result<(), KernelError> {
        expect("columns of queries, keys and values", spec.qkv_cols(), qkv.cols())?;
        expect("columns of the attention output", spec.q_heads * spec.head_dim, out.cols())?;
        let qkv = qkv.first_rows("query, key and value rows", step.rows())?;
        let out = out.first_rows_mut("attention rows", step.rows())?;
        let numerics = Numerics { isa: self.isa, fixed: self.fixed };
        let partial = &mut lock(&self.partial_states);
        attend::attend(
            numerics,
            &self.pool,
            &self.attenders,
            partial,
            if spec.window.is_some() { &step.window_plan } else { &step.plan },
            &step.sequences,
            Heads::of(spec),
            tiers,
            qkv,
            out,
        );
        Ok(())
    }

    fn check_cache(
        &self,
        spec: &AttentionSpec<CpuBackend>,
        layer: usize,
        cache: &Cache,
    ) -> Result<(), KernelError> {
        let geometry = cache.spec().geometry;
        expect("KV heads of the cache", spec.kv_heads, geometry.kv_heads)?;
        expect("head dimension of the cache", spec.head_dim, geometry.head_dim)?;
        if layer >= geometry.layers {
            let (expected, got) = (layer + 1, geometry.layers);
            return Err(KernelError::Shape { what: "layers of the cache", expected, got });
        }
        Ok(())
    }

    fn workspace(&self) -> MutexGuard<'_, Workspace> {
        lock(&self.workspace)
    }

    pub(super) fn projector<'a>(&'a self, scratch: &'a mut ProjectScratch) -> Projector<'a> {
        let (isa, fixed) = (self.isa, self.fixed);
        Projector { isa, fixed, dot: &self.dot, pool: &self.pool, workers: &self.projectors, scratch }
    }

    /// Applies norms that are over all heads of a layer, before each head goes its own way.
    fn norm_heads_together(
        &self,
        spec: &AttentionSpec<CpuBackend>,
        qkv: &mut [f32],
    ) -> Result<(), KernelError> {
        let d = spec.head_dim;
        let (queries, keys) = (spec.q_heads * d, spec.kv_heads * d);
        for (norm, heads) in [(&spec.q_norm, 0..queries), (&spec.k_norm, queries..queries + keys)] {
            let Some(norm) = norm.as_ref().filter(|norm| norm.weight.cols() > d) else { continue };
            let gain = norm.weight.vector("a norm over all heads", heads.len())?;
            for_each_row(&self.pool, qkv, spec.qkv_cols(), |_, row| {
                rms_norm_in_place(self.isa, &mut row[heads.clone()], gain, norm.eps);
            });
        }
        Ok(())
    }

    /// Calls `body` with a worker and every task.
    fn for_each_task(&self, parallel: bool, tasks: usize, body: impl Fn(usize, usize) + Sync) {
        match parallel {
            true => self.pool.for_each_worker(tasks, body),
            false => (0..tasks).for_each(|task| body(0, task)),
        }
    }
}

/// Scratch holds no state between calls, so a panic in an earlier one does not matter.
fn lock<T>(scratch: &Mutex<T>) -> MutexGuard<'_, T> {
    scratch.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Gain and epsilon of a norm over one head. A norm over several heads at once is [`CpuBackend::norm_heads_together`]'s.
fn head_norm(norm: &Option<RmsNorm<CpuBackend>>, d: usize) -> Result<Option<(&[f32], f32)>, KernelError> {
    let norm = norm.as_ref().filter(|norm| norm.weight.cols() <= d);
    norm.map(|norm| Ok((norm.weight.vector("a head norm", d)?, norm.eps))).transpose()
}

/// The learned sinks of a layer.
pub(super) fn sinks(spec: &AttentionSpec<CpuBackend>) -> Result<Option<&[f32]>, KernelError> {
    spec.sinks.as_ref().map(|sinks| sinks.vector("learned sinks", spec.q_heads)).transpose()
}

impl Backend for CpuBackend {
    type Weight = Weight;
    type Experts = Experts;
    type Buffer = Matrix;
    type Cache = Cache;
    type Step = Step;
    /// They are drawn at once.
    type Draws = Vec<Result<Sampled, KernelError>>;

    fn is_deterministic(&self) -> bool {
        self.fixed
    }

    fn supports(&self, _: Feature) -> bool {
        true
    }

    fn weight(&self, stored: &StoredMatrix) -> Result<Weight, KernelError> {
        Weight::new(stored)
    }

    fn experts(&self, stored: &[StoredMatrix]) -> Result<Experts, KernelError> {
        Experts::new(stored)
    }

    fn buffer(&self, rows: usize, cols: usize) -> Result<Matrix, KernelError> {
        Matrix::zeroed(rows, cols)
    }

    fn cache(&self, spec: &CacheSpec) -> Result<Cache, KernelError> {
        Cache::new(self.isa, spec)
    }

    fn read(&self, buffer: &Matrix, rows: Range<usize>) -> Result<Vec<f32>, KernelError> {
        Ok(buffer.first_rows("rows read", rows.end)?[rows.start * buffer.cols()..].to_vec())
    }

    fn begin_step(&self, batch: &Batch<'_>, rope: &Rope, cache: &Cache) -> Result<Step, KernelError> {
        Step::new(batch, rope, cache)
    }

    fn add_windows(&self, step: &mut Step, rope: &Rope, _: usize, _: &Cache) -> Result<(), KernelError> {
        step.add_window_rope(rope);
        Ok(())
    }

    fn scale(&self, step: &Step, factor: f32, hidden: &mut Matrix) -> Result<(), KernelError> {
        let hidden = hidden.first_rows_mut("hidden rows", step.rows())?;
        hidden.iter_mut().for_each(|value| *value *= factor);
        Ok(())
    }

    fn embed(&self, table: &Weight, step: &Step, hidden: &mut Matrix) -> Result<(), KernelError> {
        let cols = hidden.cols();
        expect("columns of the embedding", table.cols(), cols)?;
        if let Some(&token) = step.tokens.iter().find(|&&token| token as usize >= table.rows()) {
            return Err(KernelError::TokenOutOfRange { token, vocab: table.rows() });
        }
        let rows = hidden.first_rows_mut("embedding rows", step.rows())?;
        for_each_row(&self.pool, rows, cols, |row, out| {
            let token = step.tokens[row] as usize;
            self.dot.dequantise(table.dtype(), table.row_data(token..token + 1), out);
            table.scale_row(token, out);
        });
        Ok(())
    }

    fn norm_linear(
        &self,
        step: &Step,
        x: &Matrix,
        norm: &RmsNorm<Self>,
        linears: &[&Linear<Self>],
        out: &mut Matrix,
    ) -> Result<(), KernelError> {
        let (rows, cols) = (step.rows(), x.cols());
        let x = x.first_rows("hidden rows", rows)?;
        let weight = norm.weight.vector("a norm", cols)?;
        let fill = |row: usize, out: &mut [f32]| {
            rms_norm(self.isa, &x[row * cols..(row + 1) * cols], weight, norm.eps, out);
        };
        let projections = linears.iter().map(|linear| projection(linear)).collect::<Result<Vec<_>, _>>()?;
        let out = out.first_rows_mut("projected rows", step.rows())?;
        let input = Input { rows, cols, fill: &fill };
        self.projector(&mut self.workspace().project).run(input, &projections, out, Mode::Store)
    }

    fn rope_store(
        &self,
        step: &Step,
        spec: &AttentionSpec<Self>,
        layer: usize,
        qkv: &mut Matrix,
        cache: &mut Cache,
    ) -> Result<(), KernelError> {
        self.check_cache(spec, layer, cache)?;
        expect("columns of queries, keys and values", spec.qkv_cols(), qkv.cols())?;
        let store = Store {
            isa: self.isa,
            heads: Heads::of(spec),
            q_norm: head_norm(&spec.q_norm, spec.head_dim)?,
            k_norm: head_norm(&spec.k_norm, spec.head_dim)?,
            rotates: spec.rotates,
            layer,
        };
        let rows = qkv.first_rows_mut("query, key and value rows", step.rows())?;
        self.norm_heads_together(spec, rows)?;
        let writer = cache.writer(layer);
        // A codec multiplies every head with a matrix, which is worth a second thread even for one row.
        let first_head = HeadIndex { layer, head: 0 };
        let rotates = |sealer: &Sealer| {
            [Side::Key, Side::Value].into_iter().any(|side| !sealer.is_identity(first_head, side))
        };
        let parallel = writer.sealer.is_some_and(rotates) || rows.len() >= PARALLEL_VALUES;
        // Where a page gets one token, it is written with what was just computed.
        let one_token = step.sequences.iter().all(|sequence| sequence.len == 1);
        let (sides, values) = (2 * spec.kv_heads, DisjointSlice::new(rows));
        self.for_each_task(parallel, step.rows() * sides, |worker, task| {
            let (row, part) = (task / sides, task % sides);
            let part = (part / 2, if part % 2 == 0 { Side::Key } else { Side::Value });
            let scratch = &mut self.sealers.of(worker);
            // SAFETY: each task is a row, a head and a side of its own, and `begin_step` made sure that no slot is written by
            // two sequences.
            unsafe {
                match one_token {
                    true => store.store_side(step, &writer, row, part, &values, scratch),
                    false => store.prepare_side(step, &writer, row, part, &values, scratch),
                }
            }
        });
        if !one_token {
            let tasks = store.tasks(step);
            // SAFETY: as above, and each task is one (slot, head).
            let write = |task: usize| unsafe { store.write_page(step, &tasks[task], rows, &writer) };
            self.for_each_task(rows.len() >= PARALLEL_VALUES, tasks.len(), |_, task| write(task));
        }
        Ok(())
    }

    fn attend(
        &self,
        step: &Step,
        spec: &AttentionSpec<Self>,
        layer: usize,
        qkv: &Matrix,
        cache: &Cache,
        out: &mut Matrix,
    ) -> Result<(), KernelError> {
        self.check_cache(spec, layer, cache)?;
        if let Some(window) = spec.window {
            step.sequences.iter().try_for_each(|sequence| sequence.check_window(window))?;
        }
        let tiers = Tiers { cache, layer, sinks: sinks(spec)?, history: None };
        self.attend_tiers(step, spec, qkv, &tiers, out)
    }

    fn seal(&self, layers: Range<usize>, pages: &[SealPage], cache: &mut Cache) -> Result<(), KernelError> {
        let spec = cache.spec();
        let (kv_heads, exact_slots) = (spec.geometry.kv_heads, spec.exact_slots());
        let sealed_slots = spec.sealed.as_ref().map_or(0, SealedSpec::all_slots);
        if layers.end > spec.geometry.layers {
            let (expected, got) = (spec.geometry.layers, layers.end);
            return Err(KernelError::Shape { what: "layers of the cache, at most", expected, got });
        }
        let mut targets: Vec<SealedSlot> = pages.iter().map(|page| page.sealed).collect();
        targets.sort_unstable();
        if let Some(pair) = targets.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(KernelError::PageWrittenTwice { slot: pair[0].number() });
        }
        for page in pages {
            let (exact, sealed) = (page.exact.number(), page.sealed.number());
            for (slot, slots) in [(exact, exact_slots), (sealed, sealed_slots)] {
                if slot as usize >= slots {
                    return Err(KernelError::PageOutOfRange { slot, slots });
                }
            }
        }
        let Some(last) = pages.iter().map(|page| page.page).max() else { return Ok(()) };
        let Some(sealing) = cache.sealing(last + 1) else { return Ok(()) };
        let failure = Mutex::new(None);
        self.pool.for_each_worker(pages.len() * layers.len() * kv_heads, |worker, task| {
            let (index, rest) = (task / (layers.len() * kv_heads), task % (layers.len() * kv_heads));
            let head = HeadIndex { layer: layers.start + rest / kv_heads, head: rest % kv_heads };
            let SealPage { page, exact, sealed } = pages[index];
            let pool = sealing.target(sealed);
            if !pool.sealer.codec().has_history(head.layer) {
                return;
            }
            // SAFETY: targets are distinct slots, and each task is one (slot, layer, head).
            let target = unsafe { pool.page(head, sealed) };
            let mut scratch = self.sealers.of(worker);
            let (mean, keys_and_values) = (sealing.page_mean(head, page), sealing.exact_page(head, exact));
            let sealed = pool.sealer.seal(head, mean, keys_and_values, target, &mut scratch);
            if let Err(source) = sealed {
                let page = index;
                let HeadIndex { layer, head } = head;
                // The first of the list is reported, whichever thread comes first.
                let mut first = lock(&failure);
                if first.as_ref().is_none_or(|(other, _)| task < *other) {
                    *first = Some((task, KernelError::Seal { page, layer, head, source }));
                }
            }
        });
        let failure = failure.into_inner().unwrap_or_else(PoisonError::into_inner);
        failure.map_or(Ok(()), |(_, error)| Err(error))
    }

    fn copy_pages(&self, pages: &[(ExactSlot, ExactSlot)], cache: &mut Cache) -> Result<(), KernelError> {
        let slots = cache.spec().slots;
        for &(from, to) in pages {
            if let Some(slot) = [from, to].into_iter().find(|slot| slot.index() >= slots) {
                return Err(KernelError::PageOutOfRange { slot: slot.number(), slots });
            }
            cache.copy_page(from, to);
        }
        Ok(())
    }

    fn release_scratch(&self, cache: &mut Cache) {
        cache.release_scratch();
    }

    fn linear_add(
        &self,
        step: &Step,
        x: &Matrix,
        linear: &Linear<Self>,
        hidden: &mut Matrix,
    ) -> Result<(), KernelError> {
        let rows = step.rows();
        let out = hidden.first_rows_mut("hidden rows", rows)?;
        linear_into(&mut self.projector(&mut self.workspace().project), x, rows, linear, out, Mode::Add)
    }

    fn linear_norm_add(
        &self,
        step: &Step,
        x: &Matrix,
        linear: &Linear<Self>,
        norm: &RmsNorm<Self>,
        hidden: &mut Matrix,
    ) -> Result<(), KernelError> {
        let Workspace { output, project, .. } = &mut *self.workspace();
        let (rows, cols) = (step.rows(), hidden.cols());
        let hidden = hidden.first_rows_mut("hidden rows", rows)?;
        output.resize(rows * cols, 0.0);
        linear_into(&mut self.projector(project), x, rows, linear, output, Mode::Store)?;
        norm_add(self.isa, norm, output, cols, hidden)
    }

    fn gated_mlp(&self, step: &Step, mlp: &GatedMlp<Self>, hidden: &mut Matrix) -> Result<(), KernelError> {
        let mut workspace = self.workspace();
        let Workspace { gate_up, output, project, .. } = &mut *workspace;
        let (rows, cols, inner) = (step.rows(), hidden.cols(), mlp.gate.weight.rows());
        expect("outputs of the up projection", inner, mlp.up.weight.rows())?;
        let weight = mlp.norm.weight.vector("a norm", cols)?;
        let hidden = hidden.first_rows_mut("hidden rows", rows)?;
        gate_up.resize(rows * 2 * inner, 0.0);
        let fill = |row: usize, out: &mut [f32]| {
            rms_norm(self.isa, &hidden[row * cols..(row + 1) * cols], weight, mlp.norm.eps, out);
        };
        let projections = [projection(&mlp.gate)?, projection(&mlp.up)?];
        let input = Input { rows, cols, fill: &fill };
        self.projector(project).run(input, &projections, gate_up, Mode::Store)?;
        let fill = |row: usize, out: &mut [f32]| {
            let (gate, up) = gate_up[row * 2 * inner..(row + 1) * 2 * inner].split_at(inner);
            activate(self.isa, mlp.activation, gate, up, out);
        };
        let (input, down) = (Input { rows, cols: inner, fill: &fill }, [projection(&mlp.down)?]);
        let Some(norm) = &mlp.output_norm else {
            return self.projector(project).run(input, &down, hidden, Mode::Add);
        };
        output.resize(rows * cols, 0.0);
        self.projector(project).run(input, &down, output, Mode::Store)?;
        norm_add(self.isa, norm, output, cols, hidden)
    }

    fn routed_mlp(&self, step: &Step, mlp: &RoutedMlp<Self>, hidden: &mut Matrix) -> Result<(), KernelError> {
        let mut workspace = self.workspace();
        let Workspace { experts, project, .. } = &mut *workspace;
        let cols = hidden.cols();
        let hidden = hidden.first_rows_mut("hidden rows", step.rows())?;
        experts::routed_mlp(&mut self.projector(project), experts, mlp, hidden, cols)
    }

    fn logits(
        &self,
        hidden: &Matrix,
        rows: &[usize],
        norm: &RmsNorm<Self>,
        head: &Weight,
        out: &mut Matrix,
    ) -> Result<(), KernelError> {
        let cols = hidden.cols();
        let weight = norm.weight.vector("the final norm", cols)?;
        let last = rows.iter().max().map_or(0, |row| row + 1);
        let x = hidden.first_rows("hidden rows", last)?;
        let fill = |index: usize, out: &mut [f32]| {
            rms_norm(self.isa, &x[rows[index] * cols..(rows[index] + 1) * cols], weight, norm.eps, out);
        };
        let out = out.first_rows_mut("logits", rows.len())?;
        let input = Input { rows: rows.len(), cols, fill: &fill };
        let head = Projection { weight: head, bias: None };
        self.projector(&mut self.workspace().project).run(input, &[head], out, Mode::Store)
    }

    fn begin_draws(&self, logits: &Matrix, settings: &[Sampling<'_>]) -> Result<Self::Draws, KernelError> {
        let rows = logits.first_rows("logits", settings.len())?;
        let cols = logits.cols();
        let drawn: Vec<OnceLock<Result<Sampled, KernelError>>> =
            settings.iter().map(|_| OnceLock::new()).collect();
        self.pool.for_each(settings.len(), |row| {
            let _ = drawn[row].set(sampling::sample(&rows[row * cols..(row + 1) * cols], &settings[row]));
        });
        Ok(drawn.into_iter().map(|row| row.into_inner().expect("every row was drawn")).collect())
    }

    fn finish_draws(
        &self,
        draws: Self::Draws,
        _: &Matrix,
        _: &[Sampling<'_>],
    ) -> Result<Vec<Draw>, KernelError> {
        Ok(draws.into_iter().map(|sampled| Draw { sampled, passed_on: false }).collect())
    }
}
