//! Products of up to 64 rows: `multiply.cu` reads every weight once, straight from its tiles, and prepares one or a few rows of
//! activations itself; more rows are prepared by `pack.cu`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::{
    CudaFunction, CudaSlice, DevicePtr, DevicePtrMut, DeviceRepr, LaunchConfig, ValidAsZeroBits,
};

use super::compile::{Source, texts};
use super::device::{Device, KernelVersions, OWN_MEMORY, launch_overlapping};
use super::operands::{Ends, Input, InputSource, Output, Projection, activation_number};
use super::tile_kind::{TILE_COLUMNS, TILE_ROWS, TileKind};
use super::unpacked::Unpacked;
use crate::backend::{Activation, KernelError};
use crate::error::CudaError;

/// Rows of a launch, at most.
pub(super) const MOST_ROWS: usize = 64;
/// Matrices of a launch, at most.
pub(super) const MOST_MATRICES: usize = 3;
/// Warps of a block.
pub(super) const WARPS: usize = 8;
/// Shared memory of a block that is large.
const LARGE_MEMORY: usize = 160_000;
/// Rows that `multiply.cu` prepares itself, at most: every block does so. One where `spread.cu` multiplies.
const MOST_FUSED_ROWS: usize = 2;

/// Where kinds of tiles have a number, that of several.
const MIXED: usize = 6;

/// One way to multiply; there is a kernel of each for every kind of tiles, and one for several kinds.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Variant {
    /// Rows of activations, in eights.
    column_tiles: usize,
    /// Whether it prepares activations itself.
    fused: bool,
}

impl Variant {
    /// All of them, fewest rows first.
    pub(super) const ALL: [Variant; 5] = [
        Variant { column_tiles: 1, fused: true },
        Variant { column_tiles: 1, fused: false },
        Variant { column_tiles: 2, fused: false },
        Variant { column_tiles: 4, fused: false },
        Variant { column_tiles: 8, fused: false },
    ];

    /// Rows that it has room for.
    fn rows(self) -> usize {
        if self.fused { MOST_FUSED_ROWS } else { 8 * self.column_tiles }
    }
}

/// Bytes of results in shared memory for so many rows; `halves` are results that belong together.
pub(super) fn result_bytes(rows: usize, halves: usize) -> usize {
    let sets = if rows <= 16 { 2 } else { 1 };
    sets * halves * WARPS * TILE_ROWS * (rows + 1) * size_of::<f32>()
}

/// Shared memory of a warp for tiles of weights on their way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Rings {
    floats: usize,
    codes: usize,
}

impl Rings {
    /// What a card with so much shared memory for a block affords.
    pub(super) fn new(block_memory: usize) -> Rings {
        match block_memory {
            200_000.. => Rings { floats: 16384, codes: 9216 },
            LARGE_MEMORY.. => Rings { floats: 12288, codes: 6144 },
            _ => Rings { floats: 8192, codes: 5120 },
        }
    }

    /// The ring for tiles of one kind.
    pub(super) fn of(self, kind: TileKind) -> usize {
        if kind == TileKind::Floats { self.floats } else { self.codes }
    }

    /// Macros of the kernels.
    pub(super) fn defines(self) -> [(&'static str, usize); 2] {
        [("FLOAT_RING", self.floats), ("CODE_RING", self.codes)]
    }
}

/// The kernel that prepares activations.
pub(super) fn pack_source() -> Source {
    let texts = texts!["tiles.cu", "activations.cu", "pack.cu"];
    Source { name: "activations".into(), texts, defines: vec![("FUSED", 0)], exact: false }
}

/// The kernel that multiplies.
pub(super) fn source(variant: Variant, kind: Option<TileKind>, rings: Rings) -> Source {
    let Variant { column_tiles, fused } = variant;
    let texts = match fused {
        true => {
            texts!["ring.cu", "tiles.cu", "activations.cu", "providers.cu", "spread.cu", "multiply.cu"]
        }
        false => texts!["ring.cu", "tiles.cu", "activations.cu", "providers.cu", "multiply.cu"],
    };
    let rows = variant.rows();
    let name = format!("products of up to {rows} rows, {}", kind.map_or("mixed", TileKind::name));
    let mut defines = vec![
        ("COLUMN_TILES", column_tiles),
        ("FUSED", usize::from(fused)),
        ("LISTED", 0),
        ("KIND", kind.map_or(MIXED, |kind| kind as usize)),
    ];
    defines.extend(rings.defines());
    Source { name, texts, defines, exact: false }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct SourceArguments {
    pub(super) x: u64,
    gain: u64,
    rows: u64,
    stride: i64,
    epsilon: f32,
    kind: i32,
    columns: i32,
    activation: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct PackArguments {
    source: SourceArguments,
    out: u64,
    sums: u64,
    factors: u64,
    format: i32,
    steps: i32,
    column_tiles: i32,
}
// SAFETY: plain numbers in the order of the kernel's `Arguments`.
unsafe impl DeviceRepr for PackArguments {}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct MatrixArguments {
    tiles: u64,
    bias: u64,
    kind: i32,
    rows: i32,
    first_column: i32,
    first_unit: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct MultiplyArguments {
    matrices: [MatrixArguments; MOST_MATRICES],
    source: SourceArguments,
    bf16: u64,
    f16: u64,
    sums: u64,
    factors: u64,
    out: u64,
    out_stride: i64,
    matrix_count: i32,
    rows: i32,
    steps: i32,
    units: i32,
    ends: i32,
    ring_bytes: i32,
    activation: i32,
    parts: i32,
    late: i32,
}
// SAFETY: plain numbers in the order of the kernel's `Arguments`.
unsafe impl DeviceRepr for MultiplyArguments {}

/// What `pack.cu` writes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    Bf16Operands = 0,
    F16Operands = 1,
    Bf16Rows = 2,
}

/// Memory that products need, which grows with the largest of them.
#[derive(Default)]
pub(super) struct Scratch {
    pub(super) bf16: Option<CudaSlice<u8>>,
    f16: Option<CudaSlice<u8>>,
    sums: Option<CudaSlice<f32>>,
    factors: Option<CudaSlice<f32>>,
    pub(super) unpacked: Unpacked,
    /// A matrix that is not kept.
    pub(super) slab: Option<CudaSlice<u8>>,
}

/// The addresses of activations that were packed, or 0 for a format that was not.
pub(super) struct PackedRows {
    pub(super) bf16: u64,
    pub(super) f16: u64,
    pub(super) sums: u64,
    pub(super) factors: u64,
}

impl Scratch {
    /// Where the activations are that were packed last.
    pub(super) fn addresses(&self, device: &Device) -> PackedRows {
        fn address<T>(slice: &Option<CudaSlice<T>>, device: &Device) -> u64 {
            slice.as_ref().map_or(0, |slice| slice.device_ptr(device.stream()).0)
        }
        PackedRows {
            bf16: address(&self.bf16, device),
            f16: address(&self.f16, device),
            sums: address(&self.sums, device),
            factors: address(&self.factors, device),
        }
    }
}

/// Products of few rows on one card.
pub(super) struct Multiply {
    device: Arc<Device>,
    pack: CudaFunction,
    kernels: KernelVersions<(Variant, Option<TileKind>)>,
    rings: Rings,
    /// Whether one row may have other bits than it has in a batch.
    spreads: bool,
    /// How often scratch memory was replaced by more of it, which makes recorded launches invalid.
    replaced: AtomicU64,
}

impl Multiply {
    /// Compiles (or finds) and loads the kernels. With `deterministic`, a row has the bits that it has in any batch.
    pub(super) fn new(device: &Arc<Device>, deterministic: bool) -> Result<Multiply, CudaError> {
        Ok(Multiply {
            pack: device.load(&pack_source(), "pack")?,
            kernels: KernelVersions::new(device, "multiply"),
            rings: Rings::new(device.block_memory()),
            spreads: !deterministic,
            replaced: AtomicU64::new(0),
            device: device.clone(),
        })
    }

    /// The card that it works on.
    pub(super) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Whether so many rows may end with a gate: the results of two matrices need twice the memory.
    pub(super) fn gates(&self, rows: usize) -> bool {
        gates(rows, self.device.block_memory())
    }

    /// How often memory was replaced that recorded launches may name.
    pub(super) fn replaced(&self) -> u64 {
        self.replaced.load(Ordering::Relaxed)
    }

    /// Memory of at least so many elements, made anew if what is there is smaller. New memory is zero.
    pub(super) fn grown<'a, T: DeviceRepr + ValidAsZeroBits>(
        &self,
        slice: &'a mut Option<CudaSlice<T>>,
        len: usize,
    ) -> Result<&'a mut CudaSlice<T>, CudaError> {
        if slice.as_ref().is_none_or(|slice| slice.len() < len) {
            self.replaced.fetch_add(1, Ordering::Relaxed);
            *slice = None;
            *slice = Some(self.device.allocate(len.next_power_of_two(), "scratch of products")?);
        }
        let Some(slice) = slice else { unreachable!("it was made above") };
        Ok(slice)
    }

    /// What kernels are told about rows from `first` on, and what happens to them.
    pub(super) fn source_arguments(
        &self,
        input: &Input<'_>,
        first: usize,
    ) -> Result<SourceArguments, CudaError> {
        let stream = self.device.stream();
        let (gain, epsilon, indices) = match input.source {
            InputSource::Normed { gain, epsilon, indices } => {
                (gain.device_ptr(stream).0, epsilon, indices.map(|indices| indices.device_ptr(stream).0))
            }
            InputSource::Gated(_) | InputSource::Plain => (0, 0.0, None),
        };
        let (kind, activation) = match input.source {
            InputSource::Normed { .. } => (0, Activation::default()),
            InputSource::Gated(activation) => (1, activation),
            InputSource::Plain => (2, Activation::default()),
        };
        let x = input.x.device_ptr(stream).0;
        Ok(SourceArguments {
            x: if indices.is_some() { x } else { x + (first * input.stride * 4) as u64 },
            gain,
            rows: indices.map_or(0, |indices| indices + 4 * first as u64),
            stride: input.stride as i64,
            epsilon,
            kind,
            columns: input.columns as i32,
            activation: activation_number(activation)?,
        })
    }

    /// Prepares some rows in one format: in column tiles, or one after the other where these are 0.
    pub(super) fn pack(
        &self,
        input: &Input<'_>,
        first: usize,
        rows: usize,
        column_tiles: usize,
        format: Format,
        scratch: &mut Scratch,
    ) -> Result<(), CudaError> {
        let steps = input.columns.div_ceil(TILE_COLUMNS);
        let padded = match format {
            Format::Bf16Rows => rows * input.columns * 2,
            _ if column_tiles == 0 => rows * steps * 128,
            _ => steps * column_tiles * 1024,
        };
        let sums = steps * if column_tiles == 0 { 4 * rows } else { 32 * column_tiles };
        let stream = self.device.stream();
        let out = match format {
            Format::F16Operands => self.grown(&mut scratch.f16, padded)?,
            _ => self.grown(&mut scratch.bf16, padded)?,
        };
        let out = out.device_ptr_mut(stream).0;
        let sums = self.grown(&mut scratch.sums, sums)?.device_ptr_mut(stream).0;
        let arguments = PackArguments {
            source: self.source_arguments(input, first)?,
            out,
            sums,
            factors: self.grown(&mut scratch.factors, rows)?.device_ptr_mut(stream).0,
            format: format as i32,
            steps: steps as i32,
            column_tiles: column_tiles as i32,
        };
        let config =
            LaunchConfig { grid_dim: (rows as u32, 1, 1), block_dim: (256, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: rows, gains and the memory for what is written were checked or made.
        unsafe { launch_overlapping(&self.device, &self.pack, config, &arguments) }
    }

    /// Multiplies up to 64 rows from `first` on. Shapes were checked.
    pub(super) fn run(
        &self,
        input: &Input<'_>,
        first: usize,
        rows: usize,
        projections: &[Projection<'_>],
        output: &Output<'_>,
        scratch: &mut Scratch,
    ) -> Result<(), KernelError> {
        let stream = self.device.stream();
        let steps = input.columns.div_ceil(TILE_COLUMNS);
        let floats = projections.iter().filter(|other| other.weight.kind == TileKind::Floats).count();
        let (wide, codes) = (floats > 0, floats < projections.len());
        let (ends, activation) = match output.ends {
            Ends::Set | Ends::SetLate => (0, Activation::default()),
            Ends::Add => (1, Activation::default()),
            Ends::Gate(activation) => (2, activation),
        };
        let halves = if matches!(output.ends, Ends::Gate(_)) { 2 } else { 1 };
        let ring_bytes = WARPS * if wide { self.rings.floats } else { self.rings.codes };
        let operand_bytes = rows
            * steps.next_multiple_of(4)
            * (usize::from(wide) * 128 + usize::from(codes) * (128 + 4 * size_of::<f32>()));
        let memory = |variant: Variant| {
            let operands = if variant.fused { operand_bytes } else { 0 };
            ring_bytes + result_bytes(variant.rows(), halves) + operands
        };
        let fused_rows = match projections.iter().any(|other| other.weight.kind.spreads()) {
            true => usize::from(self.spreads),
            false => MOST_FUSED_ROWS,
        };
        let fits = |variant: Variant| match variant.fused {
            true => {
                let gated = matches!(input.source, InputSource::Gated(_));
                rows <= fused_rows && !gated && memory(variant) + OWN_MEMORY <= self.device.block_memory()
            }
            false => rows <= variant.rows(),
        };
        let Some(variant) = Variant::ALL.into_iter().find(|variant| fits(*variant)) else {
            let (expected, got) = (MOST_ROWS, rows);
            return Err(KernelError::Shape { what: "rows of a product, at most", expected, got });
        };
        let first_kind = projections.first().map(|projection| projection.weight.kind);
        let kind = first_kind.filter(|&kind| projections.iter().all(|other| other.weight.kind == kind));
        let function = self.kernels.get((variant, kind), || source(variant, kind, self.rings))?;
        if !variant.fused && wide {
            self.pack(input, first, rows, variant.column_tiles, Format::Bf16Operands, scratch)?;
        }
        if !variant.fused && codes {
            self.pack(input, first, rows, variant.column_tiles, Format::F16Operands, scratch)?;
        }
        let mut matrices = [MatrixArguments::default(); MOST_MATRICES];
        let mut units = 0;
        for (arguments, projection) in matrices.iter_mut().zip(projections) {
            *arguments = MatrixArguments {
                tiles: projection.weight.tiles()?.device_ptr(stream).0,
                bias: projection.bias.map_or(0, |bias| bias.device_ptr(stream).0),
                kind: projection.weight.kind as i32,
                rows: projection.weight.rows as i32,
                first_column: projection.first_column as i32,
                first_unit: units as i32,
            };
            units += projection.weight.row_tiles();
        }
        // A gate and what it multiplies are one unit.
        let units = units / halves;
        let address = |slice: &mut Option<CudaSlice<u8>>| {
            slice.as_mut().map_or(0, |slice| slice.device_ptr_mut(stream).0)
        };
        let arguments = MultiplyArguments {
            matrices,
            source: self.source_arguments(input, first)?,
            bf16: address(&mut scratch.bf16),
            f16: address(&mut scratch.f16),
            sums: self.grown(&mut scratch.sums, 1)?.device_ptr_mut(stream).0,
            factors: self.grown(&mut scratch.factors, rows)?.device_ptr_mut(stream).0,
            out: output.out.device_ptr(stream).0 + (first * output.stride * 4) as u64,
            out_stride: output.stride as i64,
            matrix_count: projections.len() as i32,
            rows: rows as i32,
            steps: steps as i32,
            units: units as i32,
            ends,
            ring_bytes: ring_bytes as i32,
            activation: activation_number(activation)?,
            parts: parts(units, halves, self.device.multiprocessors()) as i32,
            late: i32::from(output.ends == Ends::SetLate),
        };
        // Codes take more instructions than bytes, so two blocks of them share a multiprocessor where they fit.
        let two = !wide && 2 * (memory(variant) + OWN_MEMORY) <= self.device.multiprocessor_memory();
        let blocks = if two { 2 } else { 1 } * self.device.multiprocessors();
        let config = LaunchConfig {
            grid_dim: (blocks.min(units) as u32, 1, 1),
            block_dim: (32 * WARPS as u32, 1, 1),
            shared_mem_bytes: memory(variant) as u32,
        };
        // SAFETY: shapes were checked, activations were packed for as many rows, and scratch is as large as the kernel uses.
        Ok(unsafe { launch_overlapping(&self.device, &function, config, &arguments) }?)
    }
}

/// How many rows of tiles a block should take at a time, where each brings weights and all of them together the activations of
/// many rows: as few rounds of blocks as possible, with the activations counted as one row of tiles.
fn parts(units: usize, halves: usize, blocks: usize) -> usize {
    let cost = |parts: usize| units.div_ceil(parts / halves).div_ceil(blocks) * (parts + 1);
    // More than three at a time have no room in registers.
    if halves == 1 && cost(3) < cost(2) { 3 } else { 2 }
}

/// See [`Multiply::gates`].
fn gates(rows: usize, block_memory: usize) -> bool {
    block_memory >= LARGE_MEMORY || rows <= 8
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shapes of an 8B model on a card with 132 multiprocessors: as few rounds as there can be.
    #[test]
    fn blocks_take_rows_of_tiles_in_few_rounds() {
        assert_eq!(
            [(384, 1), (256, 1), (768, 2)].map(|(units, halves)| parts(units, halves, 132)),
            [3, 2, 2]
        );
        assert_eq!(parts(1, 1, 132), 2);
    }

    /// Shared memory of a block on sm_80, sm_89 and sm_90, less what a kernel has of its own.
    #[test]
    fn a_block_fits_every_card() {
        for block in [166_912, 101_376, 232_448] {
            for variant in Variant::ALL.into_iter().filter(|variant| !variant.fused) {
                let Rings { floats, codes } = Rings::new(block);
                let halves = if gates(8 * variant.column_tiles, block) { 2 } else { 1 };
                let most = WARPS * floats + result_bytes(variant.rows(), halves);
                assert!(most <= block - OWN_MEMORY, "{variant:?} {most} of {block}");
                // At least two stages of the largest tiles.
                assert!(floats >= 2 * 4096 && codes >= 2 * 1280 && floats >= codes);
            }
        }
    }
}
