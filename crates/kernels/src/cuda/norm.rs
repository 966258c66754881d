//! Norms that are launches of their own: over all query or key heads of a layer together, which come before anything that
//! happens to a head by itself, and of what a block adds to the hidden rows.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaFunction, CudaSlice, DevicePtr, DevicePtrMut, DeviceRepr, LaunchConfig};

use super::compile::{Source, texts};
use super::device::{Device, launch_overlapping};
use crate::error::CudaError;

/// Threads of a block, as the source says.
const THREADS: usize = 256;

/// The source of the kernels.
pub(super) fn source() -> Source {
    Source { name: "norms".into(), texts: texts!["norm.cu"], defines: Vec::new(), exact: false }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Arguments {
    x: u64,
    gain: u64,
    sum: u64,
    stride: i64,
    epsilon: f32,
    first_column: i32,
    columns: i32,
}
// SAFETY: plain numbers in the order of the kernels' `Arguments`.
unsafe impl DeviceRepr for Arguments {}

/// The kernels on one card.
pub(super) struct Norms {
    device: Arc<Device>,
    columns: CudaFunction,
    add: CudaFunction,
    scale: CudaFunction,
}

impl Norms {
    /// Compiles (or finds) and loads the kernels.
    pub(super) fn new(device: &Arc<Device>) -> Result<Norms, CudaError> {
        let source = source();
        Ok(Norms {
            columns: device.load(&source, "norm_columns")?,
            add: device.load(&source, "add_normed")?,
            scale: device.load(&source, "scale")?,
            device: device.clone(),
        })
    }

    /// Norms some columns of the first rows of `x`, which are `stride` apart, in place.
    pub(super) fn norm_columns(
        &self,
        x: &mut CudaSlice<f32>,
        rows: usize,
        stride: usize,
        columns: Range<usize>,
        gain: &CudaSlice<f32>,
        epsilon: f32,
    ) -> Result<(), CudaError> {
        at_least("rows to be normed", rows * stride, x.len())?;
        at_least("columns to be normed", columns.end, stride)?;
        at_least("gains of a norm", columns.len(), gain.len())?;
        let stream = self.device.stream();
        let arguments = Arguments {
            x: x.device_ptr_mut(stream).0,
            gain: gain.device_ptr(stream).0,
            sum: 0,
            stride: stride as i64,
            epsilon,
            first_column: columns.start as i32,
            columns: columns.len() as i32,
        };
        // SAFETY: as many rows, columns and gains were checked to be there.
        unsafe { self.launch(&self.columns, rows, &arguments) }
    }

    /// Adds the norms of the first rows of `x` to those of `sum`; both have `columns` numbers.
    pub(super) fn add_normed(
        &self,
        x: &CudaSlice<f32>,
        rows: usize,
        columns: usize,
        gain: &CudaSlice<f32>,
        epsilon: f32,
        sum: &mut CudaSlice<f32>,
    ) -> Result<(), CudaError> {
        at_least("rows to be normed", rows * columns, x.len())?;
        at_least("rows to be added to", rows * columns, sum.len())?;
        at_least("gains of a norm", columns, gain.len())?;
        let stream = self.device.stream();
        let arguments = Arguments {
            x: x.device_ptr(stream).0,
            gain: gain.device_ptr(stream).0,
            sum: sum.device_ptr_mut(stream).0,
            stride: columns as i64,
            epsilon,
            first_column: 0,
            columns: columns as i32,
        };
        // SAFETY: as above.
        unsafe { self.launch(&self.add, rows, &arguments) }
    }

    /// Multiplies the first `count` numbers of `x` with a factor.
    pub(super) fn scale(&self, x: &mut CudaSlice<f32>, count: usize, factor: f32) -> Result<(), CudaError> {
        at_least("numbers to be scaled", count, x.len())?;
        let arguments = Arguments {
            x: x.device_ptr_mut(self.device.stream()).0,
            gain: 0,
            sum: 0,
            stride: count as i64,
            epsilon: factor,
            first_column: 0,
            columns: 0,
        };
        // SAFETY: as many numbers were checked to be there; the kernel stops at the last of them.
        unsafe { self.launch(&self.scale, count.div_ceil(THREADS), &arguments) }
    }

    /// # Safety
    /// The memory that the arguments name must hold what the kernel reads and writes with so many blocks.
    unsafe fn launch(
        &self,
        function: &CudaFunction,
        blocks: usize,
        arguments: &Arguments,
    ) -> Result<(), CudaError> {
        if blocks == 0 {
            return Ok(());
        }
        let config = LaunchConfig {
            grid_dim: (blocks as u32, 1, 1),
            block_dim: (THREADS as u32, 1, 1),
            shared_mem_bytes: 0,
        };
        // SAFETY: what the caller vouches for.
        unsafe { launch_overlapping(&self.device, function, config, arguments) }
    }
}

fn at_least(what: &'static str, expected: usize, got: usize) -> Result<(), CudaError> {
    if got >= expected { Ok(()) } else { Err(CudaError::Shape { what, expected, got }) }
}
