//! The read ceiling: how fast a card reads memory when it does nothing else.

use std::sync::Arc;

use cudarc::driver::{CudaFunction, CudaSlice, LaunchConfig, PushKernelArg};

use super::compile::Source;
use super::device::Device;
use super::error::CudaError;

/// A kernel that reads every byte of a buffer once.
pub struct ReadAll {
    device: Arc<Device>,
    function: CudaFunction,
    sink: CudaSlice<u32>,
}

impl ReadAll {
    /// The source.
    pub fn source() -> Source {
        let text = include_str!("kernels/read.cu").into();
        Source { name: "read".into(), text, defines: Vec::new(), exact: false }
    }

    /// Loads the kernel.
    pub fn new(device: &Arc<Device>) -> Result<ReadAll, CudaError> {
        let function = device.load(&Self::source(), "read_all")?;
        let sink = device.stream().alloc_zeros(1)?;
        Ok(ReadAll { device: device.clone(), function, sink })
    }

    /// Reads `memory`, with so many blocks of 512 threads per multiprocessor; what remains after 16 bytes is not read.
    pub fn launch(&mut self, memory: &CudaSlice<u8>, blocks: usize) -> Result<(), CudaError> {
        let count = (memory.len() / 16) as u64;
        let blocks = (self.device.multiprocessors() * blocks.max(1)) as u32;
        let config = LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (512, 1, 1), shared_mem_bytes: 0 };
        let mut launch = self.device.stream().launch_builder(&self.function);
        launch.arg(memory).arg(&count).arg(&mut self.sink);
        // SAFETY: the arguments are those of `read_all`, and it reads `count` elements of 16 bytes, all inside.
        unsafe { launch.launch(config) }?;
        Ok(())
    }
}
