//! Norms over all query or key heads of a layer together, which come before anything that happens to a head by itself.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaFunction, CudaSlice, DevicePtr, DevicePtrMut, DeviceRepr, LaunchConfig};

use super::compile::{Source, texts};
use super::device::{Device, launch_overlapping};
use super::error::CudaError;

/// The kernel.
pub(super) fn source() -> Source {
    Source {
        name: "norms over all heads".into(),
        texts: texts!["norm.cu"],
        defines: Vec::new(),
        exact: false,
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Arguments {
    x: u64,
    gain: u64,
    stride: i64,
    epsilon: f32,
    first_column: i32,
    columns: i32,
}
// SAFETY: plain numbers in the order of the kernel's `Arguments`.
unsafe impl DeviceRepr for Arguments {}

/// Norms of neighbouring columns.
pub(super) struct ColumnNorm {
    device: Arc<Device>,
    norm: CudaFunction,
}

impl ColumnNorm {
    /// Compiles (or finds) and loads the kernel.
    pub(super) fn new(device: &Arc<Device>) -> Result<ColumnNorm, CudaError> {
        Ok(ColumnNorm { norm: device.load(&source(), "norm_columns")?, device: device.clone() })
    }

    /// Norms some columns of the first rows of `x`, which are `stride` apart, in place.
    pub(super) fn run(
        &self,
        x: &mut CudaSlice<f32>,
        rows: usize,
        stride: usize,
        columns: Range<usize>,
        gain: &CudaSlice<f32>,
        epsilon: f32,
    ) -> Result<(), CudaError> {
        for (what, expected, got) in [
            ("rows to be normed", rows * stride, x.len()),
            ("columns to be normed", columns.end, stride),
            ("gains of a norm", columns.len(), gain.len()),
        ] {
            if got < expected {
                return Err(CudaError::Shape { what, expected, got });
            }
        }
        if rows == 0 {
            return Ok(());
        }
        let stream = self.device.stream();
        let arguments = Arguments {
            x: x.device_ptr_mut(stream).0,
            gain: gain.device_ptr(stream).0,
            stride: stride as i64,
            epsilon,
            first_column: columns.start as i32,
            columns: columns.len() as i32,
        };
        let config =
            LaunchConfig { grid_dim: (rows as u32, 1, 1), block_dim: (256, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: as many rows, columns and gains were checked to be there.
        unsafe { launch_overlapping(&self.device, &self.norm, config, &arguments) }
    }
}
