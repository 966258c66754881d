//! The experts of one or a few rows: `experts_few.cu` reads what each row has chosen and needs no list of jobs.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, DevicePtr, DevicePtrMut, DeviceRepr, LaunchConfig};

use super::compile::{Source, texts};
use super::device::{Device, KernelVersions, OWN_MEMORY, launch_overlapping};
use super::multiply::{Multiply, Rings, SourceArguments, WARPS};
use super::operands::{GatedBlock, Input, RoutedBlock, gate_settings};
use super::tile_kind::{TILE_COLUMNS, TILE_ROWS, TileKind};
use super::weights::{CudaExperts, CudaWeight};
use crate::backend::KernelError;
use crate::error::CudaError;

/// Rows for which it is made.
const MOST_ROWS: usize = 4;
/// Experts of a row for which the kernels have memory, without the shared one.
pub(super) const MOST_CHOICES: usize = 32;

/// Both kernels, for experts that are stored in one kind of tiles.
pub(super) fn source(kind: TileKind, rings: Rings) -> Source {
    let texts =
        texts!["ring.cu", "tiles.cu", "activations.cu", "providers.cu", "spread.cu", "experts_few.cu"];
    let mut defines = vec![("COLUMN_TILES", 1), ("FUSED", 1), ("LISTED", 0), ("KIND", kind as usize)];
    defines.extend(rings.defines());
    Source { name: format!("experts of few rows, {}", kind.name()), texts, defines, exact: false }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Arguments {
    tiles: [u64; 2],
    shared_tiles: [u64; 2],
    biases: [u64; 2],
    choices: u64,
    source: SourceArguments,
    inner: u64,
    hidden: u64,
    rows: i32,
    top_k: i32,
    slots: i32,
    inputs: i32,
    outputs: i32,
    steps: i32,
    tile_rows: i32,
    activation: i32,
    alpha: f32,
    limit: f32,
}
// SAFETY: plain numbers in the order of the kernels' `Arguments`.
unsafe impl DeviceRepr for Arguments {}

/// The experts of few rows on one card.
pub(super) struct FewExperts {
    device: Arc<Device>,
    open: KernelVersions<TileKind>,
    close: KernelVersions<TileKind>,
    rings: Rings,
}

/// How many rows there are, and who works on them.
#[derive(Clone, Copy)]
pub(super) struct Call<'a> {
    pub(super) rows: usize,
    pub(super) block: &'a RoutedBlock<'a>,
    pub(super) shared: Option<&'a GatedBlock<'a>>,
}

impl Call<'_> {
    /// The experts of a row, with the shared one.
    pub(super) fn slots(&self) -> usize {
        self.block.routing.rule().top_k + usize::from(self.shared.is_some())
    }
}

/// Whether a shared expert is like the others, so that it can be one more of them.
fn is_like_others(block: &RoutedBlock<'_>, shared: &GatedBlock<'_>) -> bool {
    let like = |weight: &CudaWeight, experts: &CudaExperts| {
        weight.kind == experts.kind && weight.rows == experts.rows && weight.cols == experts.cols
    };
    let projections = [(&shared.gate, block.gate), (&shared.up, block.up), (&shared.down, block.down)];
    shared.activation == block.activation
        && projections
            .iter()
            .all(|(projection, experts)| projection.bias.is_none() && like(projection.weight, experts))
}

impl FewExperts {
    pub(super) fn new(device: &Arc<Device>) -> FewExperts {
        FewExperts {
            open: KernelVersions::new(device, "open_experts"),
            close: KernelVersions::new(device, "close_experts"),
            rings: Rings::new(device.block_memory()),
            device: device.clone(),
        }
    }

    /// Whether a call is one for these kernels, and has the memory that they need.
    pub(super) fn takes(&self, call: Call<'_>) -> bool {
        let block = call.block;
        let most = self.memory(block.gate, call.rows).max(self.memory(block.down, call.slots()));
        call.rows <= MOST_ROWS
            && most + OWN_MEMORY <= self.device.block_memory()
            && call.shared.is_none_or(|shared| is_like_others(block, shared))
    }

    /// Shared memory of a block that prepares so many rows.
    fn memory(&self, experts: &CudaExperts, rows: usize) -> usize {
        let steps = experts.cols.div_ceil(TILE_COLUMNS).next_multiple_of(4);
        WARPS * self.rings.of(experts.kind) + rows * steps * (128 + 16)
    }

    /// Multiplies with gates and what they multiply. `choices` are those of the rows; results go to `inner`.
    pub(super) fn open(
        &self,
        multiply: &Multiply,
        input: &Input<'_>,
        call: Call<'_>,
        choices: u64,
        inner: &mut CudaSlice<f32>,
    ) -> Result<(), KernelError> {
        let (block, stream) = (call.block, self.device.stream());
        let tiles = [block.gate.tiles()?, block.up.tiles()?].map(|tiles| tiles.device_ptr(stream).0);
        let shared_tiles = match call.shared {
            Some(shared) => [shared.gate.weight.tiles()?, shared.up.weight.tiles()?]
                .map(|tiles| tiles.device_ptr(stream).0),
            None => [0; 2],
        };
        let biases =
            block.biases.map_or([0; 2], |[gate, up, _]| [gate, up].map(|it| it.device_ptr(stream).0));
        let source = multiply.source_arguments(input, 0)?;
        let arguments = Arguments {
            tiles,
            shared_tiles,
            biases,
            inner: inner.device_ptr_mut(stream).0,
            ..self.arguments(call, block.gate, choices, source)?
        };
        let units = call.rows * call.slots() * block.gate.rows.div_ceil(TILE_ROWS);
        self.launch(&self.open, block.gate, call.rows, units, &arguments)
    }

    /// Multiplies the results of [`open`](Self::open) with what leads back, and adds up the experts of a row in `hidden`.
    pub(super) fn close(
        &self,
        multiply: &Multiply,
        input: &Input<'_>,
        call: Call<'_>,
        choices: u64,
        hidden: &mut CudaSlice<f32>,
    ) -> Result<(), KernelError> {
        let (block, stream) = (call.block, self.device.stream());
        let shared = call.shared.map(|shared| shared.down.weight.tiles()).transpose()?;
        let source = multiply.source_arguments(input, 0)?;
        let arguments = Arguments {
            tiles: [block.down.tiles()?.device_ptr(stream).0, 0],
            shared_tiles: [shared.map_or(0, |tiles| tiles.device_ptr(stream).0), 0],
            biases: [block.biases.map_or(0, |[_, _, down]| down.device_ptr(stream).0), 0],
            inner: source.x,
            hidden: hidden.device_ptr_mut(stream).0,
            ..self.arguments(call, block.down, choices, source)?
        };
        let units = block.down.rows.div_ceil(TILE_ROWS);
        self.launch(&self.close, block.down, call.slots(), units, &arguments)
    }

    /// The arguments that both kernels have; the rest is 0.
    fn arguments(
        &self,
        call: Call<'_>,
        experts: &CudaExperts,
        choices: u64,
        source: SourceArguments,
    ) -> Result<Arguments, CudaError> {
        let (activation, alpha, limit) = gate_settings(call.block.activation)?;
        Ok(Arguments {
            tiles: [0; 2],
            shared_tiles: [0; 2],
            biases: [0; 2],
            choices,
            source,
            inner: 0,
            hidden: 0,
            rows: call.rows as i32,
            top_k: call.block.routing.rule().top_k as i32,
            slots: call.slots() as i32,
            inputs: experts.cols as i32,
            outputs: experts.rows as i32,
            steps: experts.cols.div_ceil(TILE_COLUMNS) as i32,
            tile_rows: experts.rows.div_ceil(TILE_ROWS) as i32,
            activation,
            alpha,
            limit,
        })
    }

    fn launch(
        &self,
        kernels: &KernelVersions<TileKind>,
        experts: &CudaExperts,
        rows: usize,
        units: usize,
        arguments: &Arguments,
    ) -> Result<(), KernelError> {
        let function = kernels.get(experts.kind, || source(experts.kind, self.rings))?;
        let memory = self.memory(experts, rows);
        let two = experts.kind != TileKind::Floats
            && 2 * (memory + OWN_MEMORY) <= self.device.multiprocessor_memory();
        let blocks = if two { 2 } else { 1 } * self.device.multiprocessors();
        let config = LaunchConfig {
            grid_dim: (blocks.min(units) as u32, 1, 1),
            block_dim: (32 * WARPS as u32, 1, 1),
            shared_mem_bytes: memory as u32,
        };
        // SAFETY: shapes were checked, there are choices for as many rows, and `inner` has room for all slots of them.
        Ok(unsafe { launch_overlapping(&self.device, &function, config, arguments) }?)
    }
}
