//! Products of activations with weights.
//!
//! Up to 64 rows go through `multiply.cu`, which reads every weight once, straight from its tiles. More rows go through
//! cuBLASLt on a copy of one matrix in bf16; without that library, or where the bits of a row must not depend on the batch,
//! they go through `multiply.cu` 64 at a time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::{
    CudaFunction, CudaSlice, DevicePtr, DevicePtrMut, DeviceRepr, LaunchConfig, ValidAsZeroBits,
};

use super::blas::{Blas, DenseProduct};
use super::compile::Source;
use super::device::{Device, launch_overlapping};
use super::error::CudaError;
use super::weights::{CudaWeight, TILE_COLUMNS, TILE_ROWS, TileKind, WeightLoader};
use crate::backend::KernelError;

/// Rows of activations in one launch, in eights: one kernel for each.
pub(super) const COLUMN_TILES: [usize; 4] = [1, 2, 4, 8];
/// Rows of a launch, at most.
const MOST_ROWS: usize = 64;
/// Matrices of a launch, at most.
const MOST_MATRICES: usize = 3;

/// What is multiplied.
#[derive(Clone, Copy)]
pub(super) struct Input<'a> {
    /// `[row][stride]`.
    pub(super) x: &'a CudaSlice<f32>,
    /// From one row to the next.
    pub(super) stride: usize,
    /// Rows.
    pub(super) rows: usize,
    /// Numbers of a row that are multiplied.
    pub(super) columns: usize,
    /// What happens to a row first.
    pub(super) source: InputSource<'a>,
}

/// What happens to a row before it is multiplied.
#[derive(Clone, Copy)]
pub(super) enum InputSource<'a> {
    /// A root-mean-square norm; `indices` names the rows where they are not the first ones.
    Normed { gain: &'a CudaSlice<f32>, epsilon: f32, indices: Option<&'a CudaSlice<u32>> },
    /// `silu(first half) * second half`.
    Gated,
    /// Nothing.
    Plain,
}

/// A matrix, its bias, and where its outputs begin in a row of results.
#[derive(Clone, Copy)]
pub(super) struct Projection<'a> {
    pub(super) weight: &'a CudaWeight,
    pub(super) bias: Option<&'a CudaSlice<f32>>,
    pub(super) first_column: usize,
}

/// Where results go.
pub(super) struct Output<'a> {
    /// `[row][stride]`.
    pub(super) out: &'a mut CudaSlice<f32>,
    /// From one row to the next.
    pub(super) stride: usize,
    /// Results are added to what is there.
    pub(super) adds: bool,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct PackArguments {
    x: u64,
    gain: u64,
    rows: u64,
    out: u64,
    sums: u64,
    factors: u64,
    stride: i64,
    epsilon: f32,
    source: i32,
    format: i32,
    columns: i32,
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
    first_block: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct MultiplyArguments {
    matrices: [MatrixArguments; MOST_MATRICES],
    bf16: u64,
    f16: u64,
    sums: u64,
    factors: u64,
    out: u64,
    partials: u64,
    arrivals: u64,
    out_stride: i64,
    matrix_count: i32,
    rows: i32,
    steps: i32,
    splits: i32,
    adds: i32,
}
// SAFETY: plain numbers in the order of the kernel's `Arguments`.
unsafe impl DeviceRepr for MultiplyArguments {}

/// What `pack.cu` writes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Format {
    Bf16Operands = 0,
    F16Operands = 1,
    Bf16Rows = 2,
}

/// Memory that products need, which grows with the largest of them.
#[derive(Default)]
struct Scratch {
    bf16: Option<CudaSlice<u8>>,
    f16: Option<CudaSlice<u8>>,
    sums: Option<CudaSlice<f32>>,
    factors: Option<CudaSlice<f32>>,
    partials: Option<CudaSlice<f32>>,
    arrivals: Option<CudaSlice<i32>>,
    slab: Option<CudaSlice<u8>>,
}

/// The kernel that prepares activations.
pub(super) fn pack_source() -> Source {
    let text = [include_str!("kernels/tiles.cu"), include_str!("kernels/pack.cu")].concat();
    Source { name: "activations".into(), text, defines: Vec::new(), exact: false }
}

/// The kernel that multiplies.
pub(super) fn multiply_source(column_tiles: usize) -> Source {
    let text = [include_str!("kernels/tiles.cu"), include_str!("kernels/multiply.cu")].concat();
    let defines = vec![("COLUMN_TILES", column_tiles)];
    Source { name: format!("products of {} rows", 8 * column_tiles), text, defines, exact: false }
}

/// The products of one card.
pub(super) struct Products {
    device: Arc<Device>,
    pack: CudaFunction,
    multiply: Vec<CudaFunction>,
    blas: Option<Blas>,
    scratch: Mutex<Scratch>,
    gated: Mutex<CudaSlice<f32>>,
    /// How often scratch memory was replaced by more of it, which makes recorded launches invalid.
    replaced: AtomicU64,
}

impl Products {
    /// Compiles (or finds) and loads the kernels. Without `dense`, cuBLASLt is not used even if it is there.
    pub(super) fn new(device: &Arc<Device>, dense: bool) -> Result<Products, CudaError> {
        let multiply = COLUMN_TILES.map(|tiles| device.load(&multiply_source(tiles), "multiply"));
        Ok(Products {
            pack: device.load(&pack_source(), "pack")?,
            multiply: multiply.into_iter().collect::<Result<_, _>>()?,
            blas: if dense { Blas::open(device)? } else { None },
            scratch: Mutex::default(),
            gated: Mutex::new(device.allocate(1, "activations of a gated block")?),
            replaced: AtomicU64::new(0),
            device: device.clone(),
        })
    }

    /// How often memory was replaced that recorded launches may name.
    pub(super) fn replaced(&self) -> u64 {
        self.replaced.load(Ordering::Relaxed)
    }

    /// Whether products of many rows go through cuBLASLt.
    pub(super) fn has_blas(&self) -> bool {
        self.blas.is_some()
    }

    /// Room for so many results of a gated block, kept between calls. Whoever asks is done with it before the next.
    pub(super) fn gated(&self, len: usize) -> Result<MutexGuard<'_, CudaSlice<f32>>, CudaError> {
        let mut gated = self.gated.lock().unwrap_or_else(PoisonError::into_inner);
        if gated.len() < len {
            self.replaced.fetch_add(1, Ordering::Relaxed);
            *gated = self.device.allocate(len.next_power_of_two(), "activations of a gated block")?;
        }
        Ok(gated)
    }

    /// Multiplies rows with up to three matrices of the same number of columns.
    pub(super) fn run(
        &self,
        loader: &WeightLoader,
        input: Input<'_>,
        projections: &[Projection<'_>],
        output: Output<'_>,
    ) -> Result<(), KernelError> {
        self.check(&input, projections, &output)?;
        let scratch = &mut *self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        match &self.blas {
            Some(blas) if input.rows > MOST_ROWS => {
                self.run_dense(blas, loader, &input, projections, output, scratch)
            }
            _ => {
                for first in (0..input.rows).step_by(MOST_ROWS) {
                    let rows = MOST_ROWS.min(input.rows - first);
                    self.run_rows(&input, first, rows, projections, &output, scratch)?;
                }
                Ok(())
            }
        }
    }

    fn check(
        &self,
        input: &Input<'_>,
        projections: &[Projection<'_>],
        output: &Output<'_>,
    ) -> Result<(), KernelError> {
        let at_least = |what, expected: usize, got: usize| {
            if got >= expected { Ok(()) } else { Err(KernelError::Shape { what, expected, got }) }
        };
        at_least("matrices of a product, at most", projections.len(), MOST_MATRICES)?;
        let width =
            if matches!(input.source, InputSource::Gated) { 2 * input.columns } else { input.columns };
        at_least("columns of activations", width, input.stride)?;
        match input.source {
            InputSource::Normed { gain, indices, .. } => {
                at_least("gains of a norm", input.columns, gain.len())?;
                match indices {
                    Some(indices) => at_least("rows that are named", input.rows, indices.len())?,
                    None => at_least("activations", input.rows * input.stride, input.x.len())?,
                }
            }
            _ => at_least("activations", input.rows * input.stride, input.x.len())?,
        }
        at_least("results", input.rows * output.stride, output.out.len())?;
        for projection in projections {
            if projection.weight.cols != input.columns {
                let (expected, got) = (projection.weight.cols, input.columns);
                return Err(KernelError::Shape { what: "columns of a projection", expected, got });
            }
            at_least("columns of results", projection.first_column + projection.weight.rows, output.stride)?;
        }
        Ok(())
    }

    /// Prepares some rows in one format.
    fn pack(
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
            _ => steps * column_tiles * 1024,
        };
        let (device, stream, replaced) = (&self.device, self.device.stream(), &self.replaced);
        let out = match format {
            Format::F16Operands => grown(device, replaced, &mut scratch.f16, padded)?,
            _ => grown(device, replaced, &mut scratch.bf16, padded)?,
        };
        let out = out.device_ptr_mut(stream).0;
        let sums =
            grown(device, replaced, &mut scratch.sums, steps * column_tiles * 32)?.device_ptr_mut(stream).0;
        let factors = grown(device, replaced, &mut scratch.factors, rows)?.device_ptr_mut(stream).0;
        let x = input.x.device_ptr(stream).0;
        let (gain, epsilon, indices, source) = match input.source {
            InputSource::Normed { gain, epsilon, indices } => {
                (gain.device_ptr(stream).0, epsilon, indices.map(|indices| indices.device_ptr(stream).0), 0)
            }
            InputSource::Gated => (0, 0.0, None, 1),
            InputSource::Plain => (0, 0.0, None, 2),
        };
        let arguments = PackArguments {
            x: if indices.is_some() { x } else { x + (first * input.stride * 4) as u64 },
            gain,
            rows: indices.map_or(0, |indices| indices + 4 * first as u64),
            out,
            sums,
            factors,
            stride: input.stride as i64,
            epsilon,
            source,
            format: format as i32,
            columns: input.columns as i32,
            steps: steps as i32,
            column_tiles: column_tiles as i32,
        };
        let config =
            LaunchConfig { grid_dim: (rows as u32, 1, 1), block_dim: (256, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: rows, gains and the room for what is written were checked or made.
        unsafe { launch_overlapping(device, &self.pack, config, &arguments) }
    }

    /// Up to 64 rows.
    fn run_rows(
        &self,
        input: &Input<'_>,
        first: usize,
        rows: usize,
        projections: &[Projection<'_>],
        output: &Output<'_>,
        scratch: &mut Scratch,
    ) -> Result<(), KernelError> {
        let kernel =
            COLUMN_TILES.iter().position(|tiles| rows <= 8 * tiles).unwrap_or(COLUMN_TILES.len() - 1);
        let column_tiles = COLUMN_TILES[kernel];
        let floats = |projection: &&Projection<'_>| projection.weight.kind == TileKind::Floats;
        if projections.iter().any(|projection| floats(&projection)) {
            self.pack(input, first, rows, column_tiles, Format::Bf16Operands, scratch)?;
        }
        if !projections.iter().all(|projection| floats(&projection)) {
            self.pack(input, first, rows, column_tiles, Format::F16Operands, scratch)?;
        }
        let (device, stream, replaced) = (&self.device, self.device.stream(), &self.replaced);
        let mut matrices = [MatrixArguments::default(); MOST_MATRICES];
        let mut blocks = 0;
        for (arguments, projection) in matrices.iter_mut().zip(projections) {
            *arguments = MatrixArguments {
                tiles: projection.weight.tiles()?.device_ptr(stream).0,
                bias: projection.bias.map_or(0, |bias| bias.device_ptr(stream).0),
                kind: projection.weight.kind as i32,
                rows: projection.weight.rows as i32,
                first_column: projection.first_column as i32,
                first_block: blocks as i32,
            };
            blocks += projection.weight.row_tiles();
        }
        let steps = input.columns.div_ceil(TILE_COLUMNS);
        let splits = splits(blocks, steps, device.multiprocessors());
        let partials = if splits > 1 { blocks * splits * TILE_ROWS * 8 * column_tiles } else { 0 };
        let address = |slice: &mut Option<CudaSlice<u8>>| {
            slice.as_mut().map_or(0, |slice| slice.device_ptr_mut(stream).0)
        };
        let out = output.out.device_ptr(stream).0 + (first * output.stride * 4) as u64;
        let arguments = MultiplyArguments {
            matrices,
            bf16: address(&mut scratch.bf16),
            f16: address(&mut scratch.f16),
            sums: grown(device, replaced, &mut scratch.sums, 1)?.device_ptr_mut(stream).0,
            factors: grown(device, replaced, &mut scratch.factors, rows)?.device_ptr_mut(stream).0,
            out,
            partials: grown(device, replaced, &mut scratch.partials, partials)?.device_ptr_mut(stream).0,
            arrivals: grown(device, replaced, &mut scratch.arrivals, blocks)?.device_ptr_mut(stream).0,
            out_stride: output.stride as i64,
            matrix_count: projections.len() as i32,
            rows: rows as i32,
            steps: steps as i32,
            splits: splits as i32,
            adds: i32::from(output.adds),
        };
        let config = LaunchConfig {
            grid_dim: (blocks as u32, splits as u32, 1),
            block_dim: (256, 1, 1),
            shared_mem_bytes: 0,
        };
        // SAFETY: shapes were checked, activations were packed for as many rows, and scratch is as large as the kernel uses.
        Ok(unsafe { launch_overlapping(device, &self.multiply[kernel], config, &arguments) }?)
    }

    /// Any number of rows, a matrix at a time in bf16.
    fn run_dense(
        &self,
        blas: &Blas,
        loader: &WeightLoader,
        input: &Input<'_>,
        projections: &[Projection<'_>],
        output: Output<'_>,
        scratch: &mut Scratch,
    ) -> Result<(), KernelError> {
        self.pack(input, 0, input.rows, 0, Format::Bf16Rows, scratch)?;
        let Output { out, stride, adds } = output;
        for projection in projections {
            let weight = projection.weight;
            let slab = grown(&self.device, &self.replaced, &mut scratch.slab, weight.rows * weight.cols * 2)?;
            loader.unpack_bf16(weight, slab)?;
            let Some(x) = &scratch.bf16 else { unreachable!("rows were packed above") };
            blas.run(DenseProduct {
                weight: slab,
                x,
                rows: input.rows,
                inputs: weight.cols,
                outputs: weight.rows,
                bias: projection.bias,
                out: &mut *out,
                first_column: projection.first_column,
                stride,
                adds,
            })?;
        }
        Ok(())
    }
}

/// Into how many parts the inputs of a product are split, so that all multiprocessors have about as much to do. It depends
/// on the matrices alone: the order of sums must not depend on the batch.
fn splits(blocks: usize, steps: usize, multiprocessors: usize) -> usize {
    let slots = 2 * multiprocessors;
    let most = (steps / 8).clamp(1, 8);
    let cost = |splits: &usize| {
        let turns = (blocks * splits).div_ceil(slots) as f64 / *splits as f64;
        (turns * (1.0 + 0.04 * (*splits as f64 - 1.0)) * 1e6) as u64
    };
    (1..=most).min_by_key(cost).unwrap_or(1)
}

/// Memory of at least so many elements, made anew if what is there is smaller. New memory is zero.
fn grown<'a, T: DeviceRepr + ValidAsZeroBits>(
    device: &Device,
    replaced: &AtomicU64,
    slice: &'a mut Option<CudaSlice<T>>,
    len: usize,
) -> Result<&'a mut CudaSlice<T>, CudaError> {
    if slice.as_ref().is_none_or(|slice| slice.len() < len) {
        replaced.fetch_add(1, Ordering::Relaxed);
        *slice = None;
        *slice = Some(device.allocate(len.next_power_of_two(), "scratch of products")?);
    }
    let Some(slice) = slice else { unreachable!("it was made above") };
    Ok(slice)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_are_split_where_there_are_few_outputs() {
        // The projections of an 8B model fill the card without.
        assert_eq!(splits(24_576 / 16, 64, 132), 1);
        // 2560 outputs are 160 blocks for 264 places.
        assert!(splits(160, 152, 132) > 1);
        assert_eq!(splits(4, 4, 132), 1, "a warp has at least one step");
        for (blocks, steps) in [(1, 1), (60, 9), (9496, 24), (256, 192)] {
            let splits = splits(blocks, steps, 132);
            assert!((1..=8).contains(&splits) && splits <= steps, "{blocks} {steps}");
        }
    }
}
