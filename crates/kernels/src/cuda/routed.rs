//! Mixtures of experts: routing on the card, and products of the experts that were chosen.
//!
//! The host never learns which experts those are: `route.cu` makes a list of jobs, an expert and some of its rows each, and
//! `experts.cu` works through it with a fixed number of blocks. So a step can be recorded like any other.

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaFunction, CudaSlice, DevicePtr, DevicePtrMut, DeviceRepr, LaunchConfig};

use super::compile::{Source, texts};
use super::device::{Device, KernelVersions, launch_overlapping};
use super::experts_few::{Call, FewExperts, MOST_CHOICES};
use super::multiply::{Format, Multiply, Rings, Scratch, WARPS, result_bytes};
use super::operands::{Ends, GatedBlock, Input, InputSource, Output, RoutedBlock, gate_settings};
use super::products::Products;
use super::tile_kind::{TILE_COLUMNS, TILE_ROWS, TileKind};
use super::weights::{CudaExperts, WeightLoader};
use crate::backend::{Activation, KernelError, expect};
use crate::error::CudaError;
use crate::routing::Scores;

/// Rows of a job in eights: for decode steps, and for prompts.
pub(super) const COLUMN_TILES: [usize; 2] = [1, 8];
/// Rows from which on jobs are those of prompts.
const MANY_ROWS: usize = 64;
/// Rows that one block routes, a warp each, before it sorts what they have chosen.
const ROUTED_AT_ONCE: usize = 8;
/// Experts that the kernels have memory for.
const MOST_EXPERTS: usize = 512;

/// The kernels that choose experts and add up their results.
pub(super) fn route_source() -> Source {
    Source { name: "routing".into(), texts: texts!["route.cu"], defines: Vec::new(), exact: false }
}

/// The kernel that multiplies.
pub(super) fn experts_source(column_tiles: usize, kind: TileKind, rings: Rings) -> Source {
    let texts = texts!["ring.cu", "tiles.cu", "activations.cu", "providers.cu", "experts.cu"];
    let mut defines =
        vec![("COLUMN_TILES", column_tiles), ("FUSED", 0), ("LISTED", 1), ("KIND", kind as usize)];
    defines.extend(rings.defines());
    let name = format!("experts of up to {} rows, {}", 8 * column_tiles, kind.name());
    Source { name, texts, defines, exact: false }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct RouteArguments {
    logits: u64,
    correction: u64,
    choices: u64,
    order: u64,
    jobs: u64,
    job_count: u64,
    rows: i32,
    experts: i32,
    top_k: i32,
    scores: i32,
    groups: i32,
    chosen_groups: i32,
    normalise: i32,
    job_rows: i32,
    scale: f32,
}
// SAFETY: plain numbers in the order of the kernel's `Arguments`.
unsafe impl DeviceRepr for RouteArguments {}

#[repr(C)]
#[derive(Clone, Copy)]
struct ListedArguments {
    bf16: u64,
    f16: u64,
    sums: u64,
    row_bytes: i32,
    list: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct ExpertArguments {
    tiles: [u64; 2],
    biases: [u64; 2],
    jobs: u64,
    job_count: u64,
    order: u64,
    rows: ListedArguments,
    factors: u64,
    out: u64,
    outputs: i32,
    steps: i32,
    tile_rows: i32,
    halves: i32,
    choices_per_row: i32,
    activation: i32,
    alpha: f32,
    limit: f32,
}
// SAFETY: plain numbers in the order of the kernel's `Arguments`.
unsafe impl DeviceRepr for ExpertArguments {}

#[repr(C)]
#[derive(Clone, Copy)]
struct CombineArguments {
    choices: u64,
    products: u64,
    hidden: u64,
    top_k: i32,
    columns: i32,
}
// SAFETY: plain numbers in the order of the kernel's `CombineArguments`.
unsafe impl DeviceRepr for CombineArguments {}

/// What the chosen experts multiply with: a gate and what it multiplies, or one matrix.
#[derive(Clone, Copy)]
struct ExpertProduct<'a> {
    experts: &'a [&'a CudaExperts],
    /// What is added to the results of each.
    biases: [Option<&'a CudaSlice<f32>>; 2],
    /// The activation that is applied to gates.
    activation: Activation,
    /// Choices that share a row of activations.
    choices_per_row: usize,
}

/// Memory for the rows of a call, which grows with the most of them.
#[derive(Default)]
struct Memory {
    logits: Option<CudaSlice<f32>>,
    choices: Option<CudaSlice<u64>>,
    order: Option<CudaSlice<i32>>,
    jobs: Option<CudaSlice<i32>>,
    inner: Option<CudaSlice<f32>>,
    products: Option<CudaSlice<f32>>,
    packed: Scratch,
}

/// Mixtures of experts on one card.
pub(super) struct Experts {
    device: Arc<Device>,
    route: CudaFunction,
    choose: CudaFunction,
    sort: CudaFunction,
    combine: CudaFunction,
    /// The kernels that multiply, one for each of [`COLUMN_TILES`] and kind of tile.
    kernels: KernelVersions<(usize, TileKind)>,
    rings: Rings,
    /// Few rows have kernels of their own, unless they must have the bits that they have in any batch.
    few: Option<FewExperts>,
    memory: Mutex<Memory>,
}

impl Experts {
    /// Compiles (or finds) and loads the kernels. With `deterministic`, the bits of a row do not depend on the batch.
    pub(super) fn new(device: &Arc<Device>, deterministic: bool) -> Result<Experts, CudaError> {
        let module = device.load_module(&route_source())?;
        let function = |name: &str| module.load_function(name).map_err(CudaError::Driver);
        Ok(Experts {
            route: function("route")?,
            choose: function("choose_experts")?,
            sort: function("sort_choices")?,
            combine: function("combine")?,
            kernels: KernelVersions::new(device, "multiply_experts"),
            rings: Rings::new(device.block_memory()),
            few: (!deterministic).then(|| FewExperts::new(device)),
            memory: Mutex::default(),
            device: device.clone(),
        })
    }

    /// Routes the first rows of `hidden`, after their norm, and adds to them what the chosen experts and the one that all rows
    /// share make of them.
    #[expect(clippy::too_many_arguments)]
    pub(super) fn run(
        &self,
        products: &Products,
        loader: &WeightLoader,
        hidden: &mut CudaSlice<f32>,
        rows: usize,
        norm: InputSource<'_>,
        block: &RoutedBlock<'_>,
        shared: Option<GatedBlock<'_>>,
    ) -> Result<(), KernelError> {
        check(block)?;
        let memory = &mut *self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let multiply = products.multiply();
        let rule = block.routing.rule();
        let columns = block.gate.cols;
        let input = Input { x: &*hidden, stride: columns, rows, columns, source: norm };
        let logits = multiply.grown(&mut memory.logits, rows * rule.experts)?;
        // `experts_few.cu` prepares the rows while they are routed.
        let output = Output { out: logits, stride: rule.experts, ends: Ends::SetLate };
        products.run(loader, input, &[block.router], output)?;

        let call = Call { rows, block, shared: shared.as_ref() };
        if let Some(few) = self.few.as_ref().filter(|few| few.takes(call)) {
            return self.run_few(few, multiply, hidden, norm, call, memory);
        }
        self.compute(multiply, &input, block, memory)?;
        // The shared expert reads the rows before anything is added to them.
        if let Some(shared) = shared {
            products.run_gated(loader, hidden, rows, norm, shared, None)?;
        }
        self.combine(hidden, rows, block, memory)
    }

    /// What few rows have chosen, with the shared expert as one of the choices.
    fn run_few(
        &self,
        few: &FewExperts,
        multiply: &Multiply,
        hidden: &mut CudaSlice<f32>,
        norm: InputSource<'_>,
        call: Call<'_>,
        memory: &mut Memory,
    ) -> Result<(), KernelError> {
        let (rows, columns, inner) = (call.rows, call.block.gate.cols, call.block.gate.rows);
        self.route(multiply, rows, 0, call.block, memory)?;
        let choices = memory.choices.as_ref().map_or(0, |it| it.device_ptr(self.device.stream()).0);
        let opened = multiply.grown(&mut memory.inner, rows * call.slots() * inner)?;
        let input = Input { x: &*hidden, stride: columns, rows, columns, source: norm };
        few.open(multiply, &input, call, choices, opened)?;
        let source = InputSource::Plain;
        let input = Input { x: &*opened, stride: inner, rows: rows * call.slots(), columns: inner, source };
        few.close(multiply, &input, call, choices, hidden)
    }

    /// What the chosen experts make of rows. Nothing is added to them until [`combine`](Self::combine) is called.
    fn compute(
        &self,
        multiply: &Multiply,
        input: &Input<'_>,
        block: &RoutedBlock<'_>,
        memory: &mut Memory,
    ) -> Result<(), KernelError> {
        let (rows, top_k) = (input.rows, block.routing.rule().top_k);
        let (columns, inner, choices) = (block.gate.cols, block.gate.rows, rows * top_k);
        self.route(multiply, rows, 8 * column_tiles(rows), block, memory)?;
        let format = |experts: &CudaExperts| match experts.kind {
            TileKind::Floats => Format::Bf16Operands,
            _ => Format::F16Operands,
        };
        multiply.pack(input, 0, rows, 0, format(block.gate), &mut memory.packed)?;
        multiply.grown(&mut memory.inner, choices * inner)?;
        let [gate_bias, up_bias, down_bias] = block.biases.map_or([None; 3], |biases| biases.map(Some));
        let product = ExpertProduct {
            experts: &[block.gate, block.up],
            biases: [gate_bias, up_bias],
            activation: block.activation,
            choices_per_row: top_k,
        };
        self.multiply(&product, rows, memory)?;
        let Some(inner_rows) = &memory.inner else { unreachable!("it was made above") };
        let source = InputSource::Plain;
        let input = Input { x: inner_rows, stride: inner, rows: choices, columns: inner, source };
        multiply.pack(&input, 0, choices, 0, format(block.down), &mut memory.packed)?;
        multiply.grown(&mut memory.products, choices * columns)?;
        let product = ExpertProduct {
            experts: &[block.down],
            biases: [down_bias, None],
            activation: block.activation,
            choices_per_row: 1,
        };
        self.multiply(&product, rows, memory)
    }

    /// Chooses experts for all rows, and makes jobs of up to `job_rows` rows of the choices, or none where that is 0.
    fn route(
        &self,
        multiply: &Multiply,
        rows: usize,
        job_rows: usize,
        block: &RoutedBlock<'_>,
        memory: &mut Memory,
    ) -> Result<(), KernelError> {
        let rule = block.routing.rule();
        let (stream, choices) = (self.device.stream(), rows * rule.top_k);
        let most_jobs = choices.min(rule.experts + choices / job_rows.max(1));
        let jobs = multiply.grown(&mut memory.jobs, 4 * (most_jobs + 1))?.device_ptr_mut(stream).0;
        let arguments = RouteArguments {
            logits: multiply.grown(&mut memory.logits, 1)?.device_ptr(stream).0,
            correction: block.correction.map_or(0, |correction| correction.device_ptr(stream).0),
            choices: multiply.grown(&mut memory.choices, choices)?.device_ptr_mut(stream).0,
            order: multiply.grown(&mut memory.order, choices)?.device_ptr_mut(stream).0,
            // The number of jobs is the first of four numbers before them.
            jobs: jobs + 16,
            job_count: jobs,
            rows: rows as i32,
            experts: rule.experts as i32,
            top_k: rule.top_k as i32,
            scores: match rule.scores {
                Scores::Softmax => 0,
                Scores::Sigmoid => 1,
                Scores::SoftmaxOfChosen => 2,
            },
            groups: rule.groups.map_or(1, |groups| groups.count) as i32,
            chosen_groups: rule.groups.map_or(1, |groups| groups.chosen) as i32,
            normalise: i32::from(rule.normalise),
            job_rows: job_rows as i32,
            scale: rule.scale,
        };
        let config = |blocks: usize| LaunchConfig {
            grid_dim: (blocks as u32, 1, 1),
            block_dim: (256, 1, 1),
            shared_mem_bytes: 0,
        };
        // SAFETY: there is memory for the numbers, choices and jobs of as many rows.
        unsafe {
            if rows <= ROUTED_AT_ONCE {
                return Ok(launch_overlapping(&self.device, &self.route, config(1), &arguments)?);
            }
            launch_overlapping(&self.device, &self.choose, config(rows.div_ceil(8)), &arguments)?;
            Ok(launch_overlapping(&self.device, &self.sort, config(1), &arguments)?)
        }
    }

    /// Multiplies what was packed: a gate and what it multiplies to the inner rows, or one matrix to the products.
    fn multiply(
        &self,
        product: &ExpertProduct<'_>,
        rows: usize,
        memory: &mut Memory,
    ) -> Result<(), KernelError> {
        let stream = self.device.stream();
        let ExpertProduct { experts, biases, activation, choices_per_row } = *product;
        let (first, last) = (experts[0], experts[experts.len() - 1]);
        let column_tiles = column_tiles(rows);
        let source = || experts_source(column_tiles, first.kind, self.rings);
        let function = self.kernels.get((column_tiles, first.kind), source)?;
        let steps = first.cols.div_ceil(TILE_COLUMNS);
        let address = |slice: &Option<CudaSlice<f32>>| slice.as_ref().map_or(0, |it| it.device_ptr(stream).0);
        let jobs = memory.jobs.as_ref().map_or(0, |jobs| jobs.device_ptr(stream).0);
        let out = if experts.len() == 2 { &memory.inner } else { &memory.products };
        let packed = memory.packed.addresses(&self.device);
        let (number, alpha, limit) = gate_settings(activation)?;
        let arguments = ExpertArguments {
            tiles: [first.tiles()?.device_ptr(stream).0, last.tiles()?.device_ptr(stream).0],
            biases: biases.map(|bias| bias.map_or(0, |bias| bias.device_ptr(stream).0)),
            jobs: jobs + 16,
            job_count: jobs,
            order: memory.order.as_ref().map_or(0, |order| order.device_ptr(stream).0),
            rows: ListedArguments {
                bf16: packed.bf16,
                f16: packed.f16,
                sums: packed.sums,
                row_bytes: (steps * 128) as i32,
                list: 0,
            },
            factors: packed.factors,
            out: address(out),
            outputs: first.rows as i32,
            steps: steps as i32,
            tile_rows: first.rows.div_ceil(TILE_ROWS) as i32,
            halves: experts.len() as i32,
            choices_per_row: choices_per_row as i32,
            activation: number,
            alpha,
            limit,
        };
        // As many blocks as are on the card at once.
        let alone = column_tiles > 1 || first.kind == TileKind::Floats;
        let blocks = if alone { 1 } else { 2 } * self.device.multiprocessors();
        let config = LaunchConfig {
            grid_dim: (blocks as u32, 1, 1),
            block_dim: (32 * WARPS as u32, 1, 1),
            shared_mem_bytes: (WARPS * self.rings.of(first.kind) + result_bytes(8 * column_tiles, 1)) as u32,
        };
        // SAFETY: shapes were checked, and rows, jobs and results have memory for every choice.
        Ok(unsafe { launch_overlapping(&self.device, &function, config, &arguments) }?)
    }

    /// Adds what [`compute`](Self::compute) has left, best expert first, to the first rows of `hidden`.
    fn combine(
        &self,
        hidden: &mut CudaSlice<f32>,
        rows: usize,
        block: &RoutedBlock<'_>,
        memory: &Memory,
    ) -> Result<(), KernelError> {
        let stream = self.device.stream();
        let columns = block.down.rows;
        let arguments = CombineArguments {
            choices: memory.choices.as_ref().map_or(0, |choices| choices.device_ptr(stream).0),
            products: memory.products.as_ref().map_or(0, |products| products.device_ptr(stream).0),
            hidden: hidden.device_ptr_mut(stream).0,
            top_k: block.routing.rule().top_k as i32,
            columns: columns as i32,
        };
        let config = LaunchConfig {
            grid_dim: (columns.div_ceil(256) as u32, rows as u32, 1),
            block_dim: (256, 1, 1),
            shared_mem_bytes: 0,
        };
        // SAFETY: choices and products are those of as many rows.
        Ok(unsafe { launch_overlapping(&self.device, &self.combine, config, &arguments) }?)
    }
}

/// Rows of a job in eights, where so many rows are routed.
fn column_tiles(rows: usize) -> usize {
    let [few, many] = COLUMN_TILES;
    if rows <= MANY_ROWS { few } else { many }
}

/// Checks that matrices and rule fit together and that there are kernels for them.
fn check(block: &RoutedBlock<'_>) -> Result<(), KernelError> {
    let RoutedBlock { router, correction, routing, gate, up, down, activation: _, biases: _ } = block;
    let experts = routing.rule().experts;
    expect("outputs of a router", experts, router.weight.rows)?;
    if let Some(correction) = correction {
        expect("corrections of a router", experts, correction.len())?;
    }
    for (what, got) in [("gates", gate.count), ("up projections", up.count), ("down projections", down.count)]
    {
        expect(what, experts, got)?;
    }
    expect("outputs of the up projections", gate.rows, up.rows)?;
    expect("inputs of the up projections", gate.cols, up.cols)?;
    expect("inputs of the down projections", gate.rows, down.cols)?;
    expect("outputs of the down projections", gate.cols, down.rows)?;
    let groups = routing.rule().groups.map_or(1, |groups| groups.count);
    if experts > MOST_EXPERTS || groups > 32 {
        let problem =
            format!("{experts} experts in {groups} groups; up to {MOST_EXPERTS} in 32 are possible");
        return Err(CudaError::Unsupported(problem).into());
    }
    if routing.rule().top_k > MOST_CHOICES {
        let problem =
            format!("{} experts for a row; up to {MOST_CHOICES} are possible", routing.rule().top_k);
        return Err(CudaError::Unsupported(problem).into());
    }
    if gate.kind != up.kind {
        let problem = "experts whose gate and up projections are stored in different types";
        return Err(CudaError::Unsupported(problem.to_owned()).into());
    }
    Ok(())
}
