//! Pages in the host's memory, which is pinned: copies go on by themselves, in the order of the stream. Only the card ever reads
//! or writes them.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::{CudaSlice, DevicePtr, DevicePtrMut, result};
use oscar_codec::HostSlot;

use super::device::Device;
use crate::error::CudaError;

/// Pages of one size in pinned memory.
pub(super) struct HostPages {
    device: Arc<Device>,
    memory: NonNull<c_void>,
    slots: usize,
    page_bytes: usize,
}

// SAFETY: the memory is owned, and nobody but the card looks into it.
unsafe impl Send for HostPages {}
// SAFETY: as above.
unsafe impl Sync for HostPages {}

impl HostPages {
    /// Pins memory for so many slots.
    pub(super) fn new(device: &Arc<Device>, slots: usize, page_bytes: usize) -> Result<HostPages, CudaError> {
        let bytes = slots.saturating_mul(page_bytes).max(1);
        device.stream().context().bind_to_thread()?;
        // SAFETY: the memory is not read before it is written: a slot is copied from only after it was copied to.
        let memory = unsafe { result::malloc_host(bytes, 0) }.map_err(|_| {
            CudaError::Unsupported(format!("{bytes} bytes of the host's memory cannot be pinned: give less"))
        })?;
        let memory = NonNull::new(memory)
            .ok_or_else(|| CudaError::Unsupported("the driver gave no memory of the host".into()))?;
        Ok(HostPages { device: device.clone(), memory, slots, page_bytes })
    }

    /// Copies a page of a pool to a slot.
    pub(super) fn store(&mut self, pool: &CudaSlice<u8>, page: usize, to: HostSlot) -> Result<(), CudaError> {
        let host = self.slot(to)?;
        self.check(page, pool.len())?;
        let stream = self.device.stream();
        let (from, _record) = pool.device_ptr(stream);
        let from = from + (page * self.page_bytes) as u64;
        // SAFETY: the page and the slot were checked to lie inside; only this stream touches either, in order, and the memory is
        // not given back before the stream has done with it.
        unsafe {
            let host = std::slice::from_raw_parts_mut(host.as_ptr(), self.page_bytes);
            Ok(result::memcpy_dtoh_async(host, from, stream.cu_stream())?)
        }
    }

    /// Copies a slot to a page of a pool.
    pub(super) fn load(
        &self,
        from: HostSlot,
        pool: &mut CudaSlice<u8>,
        page: usize,
    ) -> Result<(), CudaError> {
        let host = self.slot(from)?;
        self.check(page, pool.len())?;
        let stream = self.device.stream();
        let (to, _record) = pool.device_ptr_mut(stream);
        let to = to + (page * self.page_bytes) as u64;
        // SAFETY: as above.
        unsafe {
            let host = std::slice::from_raw_parts(host.as_ptr(), self.page_bytes);
            Ok(result::memcpy_htod_async(to, host, stream.cu_stream())?)
        }
    }

    fn slot(&self, slot: HostSlot) -> Result<NonNull<u8>, CudaError> {
        if slot.index() >= self.slots {
            return Err(CudaError::PageOutOfRange { slot: slot.number(), slots: self.slots });
        }
        // SAFETY: the slot lies inside the memory.
        Ok(unsafe { self.memory.cast::<u8>().add(slot.index() * self.page_bytes) })
    }

    fn check(&self, page: usize, pool_bytes: usize) -> Result<(), CudaError> {
        if (page + 1) * self.page_bytes > pool_bytes {
            let slots = pool_bytes / self.page_bytes.max(1);
            return Err(CudaError::PageOutOfRange { slot: page as u32, slots });
        }
        Ok(())
    }
}

impl Drop for HostPages {
    fn drop(&mut self) {
        // Copies may still be on their way. Where the card has failed, nothing can be done about errors.
        let _ = self.device.synchronise();
        // SAFETY: the memory came from `malloc_host` and nothing uses it any more.
        let _ = unsafe { result::free_host(self.memory.as_ptr()) };
    }
}
