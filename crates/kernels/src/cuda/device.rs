//! A card: opening it, its limits, and kernels loaded on it.

use std::collections::HashMap;
use std::hash::Hash;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{self, CUdevice_attribute as Attribute, CUfunction_attribute as FunctionAttribute};
use cudarc::driver::{
    CudaContext, CudaFunction, CudaModule, CudaSlice, CudaStream, DeviceRepr, LaunchConfig, PushKernelArg,
    ValidAsZeroBits,
};
use cudarc::nvrtc::Ptx;

use super::compile::Source;
use crate::error::CudaError;

/// An open card with one stream that all work goes to.
#[derive(Debug)]
pub struct Device {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    name: String,
    capability: (i32, i32),
    multiprocessors: usize,
    block_memory: usize,
    multiprocessor_memory: usize,
    l2_bytes: usize,
    cache: Option<PathBuf>,
}

impl Device {
    /// Opens a card. Compiled kernels are kept in a folder, if there is one. Without a driver, or without that card, the
    /// error says what is missing.
    pub fn open(ordinal: usize, kernels: Option<PathBuf>) -> Result<Arc<Device>, CudaError> {
        // SAFETY: probing opens and closes the driver library. Everything else panics if it is not there.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::LibraryMissing {
                library: "libcuda.so (NVIDIA's driver)",
                fix: "install the driver of the card, or run on the CPU",
            });
        }
        let count = CudaContext::device_count().map_err(CudaError::Driver).or_else(|error| match error {
            // A driver without a card.
            CudaError::Driver(driver) if driver.0 == sys::CUresult::CUDA_ERROR_NO_DEVICE => Ok(0),
            error => Err(error),
        })?;
        let count = usize::try_from(count).unwrap_or(0);
        if ordinal >= count {
            return Err(CudaError::NoDevice { ordinal, count });
        }
        let context = CudaContext::new(ordinal)?;
        // SAFETY: there is one stream, so nothing is used before it is there or after it is gone. Tracked events would
        // be recorded into graphs, which then wait for events of the past.
        unsafe { context.disable_event_tracking() };
        let name = context.name()?;
        let capability = context.compute_capability()?;
        if capability.0 < 8 {
            return Err(CudaError::TooOld { name, major: capability.0, minor: capability.1 });
        }
        let attribute = |attribute| context.attribute(attribute).map(|value| value.max(0) as usize);
        Ok(Arc::new(Device {
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            block_memory: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            multiprocessor_memory: attribute(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
            )?,
            l2_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
            stream: context.new_stream()?,
            cache: kernels,
            context,
            name,
            capability,
        }))
    }

    /// The name of the card.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What code is compiled for. Code for Hopper's own instructions runs on no other card, hence the `a`.
    pub fn architecture(&self) -> String {
        match self.capability {
            (9, 0) => "sm_90a".to_owned(),
            (major, minor) => format!("sm_{major}{minor}"),
        }
    }

    /// Version of the CUDA interface of the driver, such as 13000.
    pub fn driver_version(&self) -> Result<i32, CudaError> {
        let mut version = 0;
        // SAFETY: the driver is there, and `version` outlives the call.
        unsafe { sys::cuDriverGetVersion(&mut version).result() }?;
        Ok(version)
    }

    /// The number of multiprocessors.
    pub fn multiprocessors(&self) -> usize {
        self.multiprocessors
    }

    /// Shared memory that a block may have.
    pub fn block_memory(&self) -> usize {
        self.block_memory
    }

    /// Shared memory of a multiprocessor, which its blocks divide.
    pub fn multiprocessor_memory(&self) -> usize {
        self.multiprocessor_memory
    }

    /// Bytes of the second-level cache.
    pub fn l2_bytes(&self) -> usize {
        self.l2_bytes
    }

    /// The stream of all work.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Bytes on the card that are free.
    pub fn free_memory(&self) -> Result<usize, CudaError> {
        Ok(self.context.mem_get_info()?.0)
    }

    /// Loads a kernel, compiled for this card.
    pub fn load(&self, source: &Source, function: &str) -> Result<CudaFunction, CudaError> {
        Ok(self.load_module(source)?.load_function(function)?)
    }

    /// Loads a source with several kernels, compiled for this card.
    pub(super) fn load_module(&self, source: &Source) -> Result<Arc<CudaModule>, CudaError> {
        let code = source.machine_code(&self.architecture(), self.cache.as_deref())?;
        Ok(self.context.load_module(Ptx::from_binary(code))?)
    }

    /// Memory that holds anything. Too little of it is an error that says what it is for and what is free.
    pub(super) fn allocate<T: DeviceRepr + ValidAsZeroBits>(
        &self,
        count: usize,
        what: &'static str,
    ) -> Result<CudaSlice<T>, CudaError> {
        self.stream.alloc_zeros(count.max(1)).map_err(|error| match error.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => CudaError::OutOfMemory {
                what,
                bytes: count.saturating_mul(size_of::<T>()),
                free: self.free_memory().unwrap_or(0),
            },
            _ => error.into(),
        })
    }

    /// Copies numbers to memory on the card, which is replaced by more of it if it is too small.
    pub(super) fn upload<T: DeviceRepr + ValidAsZeroBits>(
        &self,
        numbers: &[T],
        memory: &mut CudaSlice<T>,
    ) -> Result<(), CudaError> {
        self.grow(memory, numbers.len(), "the tables of a step")?;
        if numbers.is_empty() {
            return Ok(());
        }
        Ok(self.stream.memcpy_htod(numbers, &mut memory.slice_mut(..numbers.len()))?)
    }

    /// Replaces memory by more of it if it is too small; what was there is lost.
    pub(super) fn grow<T: DeviceRepr + ValidAsZeroBits>(
        &self,
        memory: &mut CudaSlice<T>,
        count: usize,
        what: &'static str,
    ) -> Result<(), CudaError> {
        if memory.len() < count {
            *memory = self.allocate(count.next_power_of_two(), what)?;
        }
        Ok(())
    }

    /// Allocates memory full of zeros.
    pub fn zeroed(&self, bytes: usize) -> Result<CudaSlice<u8>, CudaError> {
        Ok(self.stream.alloc_zeros(bytes.max(1))?)
    }

    /// Waits for all work.
    pub fn synchronise(&self) -> Result<(), CudaError> {
        Ok(self.stream.synchronize()?)
    }
}

/// Kernels of one source in several versions, each compiled (or found) when it is first needed, with all shared memory of a
/// block but what they have of their own.
#[derive(Debug)]
pub(super) struct KernelVersions<K> {
    device: Arc<Device>,
    function: &'static str,
    kernels: Mutex<HashMap<K, CudaFunction>>,
}

/// Shared memory that such a kernel has of its own, at most.
pub(super) const OWN_MEMORY: usize = 2048;

impl<K: Copy + Eq + Hash> KernelVersions<K> {
    /// Versions of the kernel that is called `function` in its source.
    pub(super) fn new(device: &Arc<Device>, function: &'static str) -> KernelVersions<K> {
        KernelVersions { device: device.clone(), function, kernels: Mutex::default() }
    }

    /// The kernel of a version, whose source is `source`.
    pub(super) fn get(&self, version: K, source: impl FnOnce() -> Source) -> Result<CudaFunction, CudaError> {
        let mut kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = kernels.get(&version) {
            return Ok(function.clone());
        }
        let function = self.device.load(&source(), self.function)?;
        let attribute = FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        function.set_attribute(attribute, (self.device.block_memory() - OWN_MEMORY) as i32)?;
        kernels.insert(version, function.clone());
        Ok(function)
    }
}

/// Launches a kernel with one argument.
///
/// # Safety
/// The argument is the kernel's, and everything that it points at is as large as the kernel expects and is used on this
/// stream only.
pub(super) unsafe fn launch<A: DeviceRepr>(
    stream: &Arc<CudaStream>,
    function: &CudaFunction,
    config: LaunchConfig,
    argument: &A,
) -> Result<(), CudaError> {
    let mut builder = stream.launch_builder(function);
    builder.arg(argument);
    // SAFETY: the caller's promise.
    unsafe { builder.launch(config) }?;
    Ok(())
}

/// Launches a kernel that may begin while the one before it ends, where the card can do that. The kernel must wait for it
/// before it touches anything that another kernel writes or reads.
///
/// # Safety
/// As [`launch`].
pub(super) unsafe fn launch_overlapping<A: DeviceRepr>(
    device: &Device,
    function: &CudaFunction,
    config: LaunchConfig,
    argument: &A,
) -> Result<(), CudaError> {
    let mut overlap = sys::CUlaunchAttribute {
        id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
    };
    let config = sys::CUlaunchConfig {
        gridDimX: config.grid_dim.0,
        gridDimY: config.grid_dim.1,
        gridDimZ: config.grid_dim.2,
        blockDimX: config.block_dim.0,
        blockDimY: config.block_dim.1,
        blockDimZ: config.block_dim.2,
        sharedMemBytes: config.shared_mem_bytes,
        hStream: device.stream.cu_stream(),
        attrs: &mut overlap,
        numAttrs: u32::from(device.capability.0 >= 9),
    };
    device.context.bind_to_thread()?;
    let mut parameters = [std::ptr::from_ref(argument).cast_mut().cast()];
    // SAFETY: the kernel has one parameter, which is copied before the call returns; the rest is the caller's promise.
    unsafe {
        sys::cuLaunchKernelEx(&config, function.cu_function(), parameters.as_mut_ptr(), std::ptr::null_mut())
    }
    .result()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_a_card_gets_an_error_that_says_so() {
        match Device::open(0, None) {
            Ok(device) => assert!(!device.name().is_empty() && device.multiprocessors() > 0),
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains("libcuda") || text.contains("no CUDA device"), "{text}");
            }
        }
    }

    #[test]
    fn a_card_that_is_not_there_is_refused() {
        let error = Device::open(4096, None).unwrap_err();
        assert!(matches!(
            error,
            CudaError::LibraryMissing { .. } | CudaError::NoDevice { ordinal: 4096, .. }
        ));
    }
}
