//! Memory the kernels share: cache-line aligned buffers, and slices that several threads write disjointly.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;

use bytemuck::Zeroable;

use crate::backend::KernelError;

/// One cache line, and one AMX or AVX-512 register row.
const ALIGNMENT: usize = 64;

/// A zeroed, cache-line aligned array of fixed length. Large ones become resident only where they are touched.
pub struct AlignedBuffer<T> {
    pointer: NonNull<T>,
    len: usize,
}

// SAFETY: the buffer owns its memory like a `Vec<T>` does.
unsafe impl<T: Send> Send for AlignedBuffer<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for AlignedBuffer<T> {}

impl<T: Zeroable + Copy> AlignedBuffer<T> {
    /// Allocates `len` zeros; `what` names the buffer in the error.
    pub fn zeroed(len: usize, what: &'static str) -> Result<AlignedBuffer<T>, KernelError> {
        let bytes = len.saturating_mul(size_of::<T>());
        let failed = KernelError::OutOfMemory { what, bytes };
        if bytes == 0 {
            return Ok(AlignedBuffer { pointer: NonNull::dangling(), len });
        }
        let Ok(layout) = Layout::from_size_align(bytes, ALIGNMENT) else { return Err(failed) };
        // SAFETY: the layout has a non-zero size.
        let raw = unsafe { alloc_zeroed(layout) }.cast::<T>();
        let pointer = NonNull::new(raw).ok_or(failed)?;
        Ok(AlignedBuffer { pointer, len })
    }
}

impl<T> Drop for AlignedBuffer<T> {
    fn drop(&mut self) {
        let bytes = self.len * size_of::<T>();
        if bytes > 0 {
            let layout =
                Layout::from_size_align(bytes, ALIGNMENT).expect("the layout was valid when allocated");
            // SAFETY: allocated in `zeroed` with this layout.
            unsafe { dealloc(self.pointer.as_ptr().cast(), layout) };
        }
    }
}

impl<T> Deref for AlignedBuffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the pointer is valid for `len` initialised elements, or dangling with length 0.
        unsafe { std::slice::from_raw_parts(self.pointer.as_ptr(), self.len) }
    }
}

impl<T> DerefMut for AlignedBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.as_ptr(), self.len) }
    }
}

/// A mutable slice whose parts are written by several threads, each part by one.
pub(crate) struct DisjointSlice<'a, T> {
    pointer: *mut T,
    len: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: the only access is through `part`, whose caller promises that parts do not overlap.
unsafe impl<T: Send> Sync for DisjointSlice<'_, T> {}

impl<'a, T> DisjointSlice<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        DisjointSlice { pointer: slice.as_mut_ptr(), len: slice.len(), borrow: PhantomData }
    }

    /// Part of the slice; the range is checked.
    ///
    /// # Safety
    /// No two parts that are alive at the same time may overlap.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        // SAFETY: inside the slice, and exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.add(range.start), range.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_zero() {
        for len in [0, 1, 63, 64, 1000] {
            let buffer = AlignedBuffer::<f32>::zeroed(len, "test").unwrap();
            assert_eq!(buffer.len(), len);
            assert!(len == 0 || buffer.as_ptr().addr().is_multiple_of(ALIGNMENT));
            assert!(buffer.iter().all(|&value| value == 0.0));
        }
    }

    #[test]
    fn an_impossible_size_is_an_error() {
        for len in [usize::MAX, usize::MAX / 8] {
            let error = AlignedBuffer::<f32>::zeroed(len, "a test").err().unwrap();
            assert!(error.to_string().contains("a test"), "{error}");
        }
    }
}
