//! The read ceiling: how fast a card reads memory when it does nothing else.

use std::sync::Arc;

use cudarc::driver::{CudaFunction, CudaSlice, LaunchConfig, PushKernelArg};
use oscar_kernels::cuda::compile::Source;
use oscar_kernels::cuda::{CudaError, Device};

/// A kernel that reads every byte of a buffer once.
pub(super) struct ReadAll {
    device: Arc<Device>,
    function: CudaFunction,
    sink: CudaSlice<u32>,
}

impl ReadAll {
    /// The CUDA source of the kernel.
    pub(super) fn source() -> Source {
        let texts = vec![("read.cu", include_str!("read.cu"))];
        Source { name: "read".into(), texts, defines: Vec::new(), exact: false }
    }

    /// Loads the kernel.
    pub(super) fn new(device: &Arc<Device>) -> Result<ReadAll, CudaError> {
        let function = device.load(&Self::source(), "read_all")?;
        let sink = device.stream().alloc_zeros(1)?;
        Ok(ReadAll { device: device.clone(), function, sink })
    }

    /// Reads `memory`, with so many blocks of 512 threads per multiprocessor; what remains after 16 bytes is not read.
    #[allow(unsafe_code)]
    pub(super) fn launch(&mut self, memory: &CudaSlice<u8>, blocks: usize) -> Result<(), CudaError> {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// What `tools/check-cuda-kernels` compiles is compiled on a card.
    #[test]
    fn the_list_of_configurations_is_that_of_the_product() {
        let read = ReadAll::source();
        let kernel = serde_json::json!({ "name": read.name, "sources": ["read.cu"], "defines": {} });
        let expected =
            serde_json::json!({ "options": oscar_kernels::cuda::compile::OPTIONS, "kernels": [kernel] });
        let listed: serde_json::Value = serde_json::from_str(include_str!("configurations.json")).unwrap();
        assert_eq!(listed, expected);
    }
}
