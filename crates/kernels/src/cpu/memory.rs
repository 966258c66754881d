//! Memory the kernels share: cache-line aligned buffers, and slices that several threads write disjointly.
//!
//! A decode step walks through far more memory than the tables of 4 KiB pages that a core remembers: with pools in
//! such pages, a third of the time of 2-bit attention went into looking up addresses. [`AlignedBuffer::merge_pages`]
//! turns what is in use into 2 MiB pages. Asking for those from the start would make memory resident that holds
//! nothing yet.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytemuck::Zeroable;

use crate::backend::KernelError;

/// One cache line, and one AMX or AVX-512 register row.
const ALIGNMENT: usize = 64;

/// Buffers from this size on are mapped by themselves: untouched parts are not resident, and all of it goes back when
/// the buffer is dropped, which an allocator's heap does not promise.
const MAPPED_BYTES: usize = 256 * 1024;

/// Bytes of a large page, and what it must be aligned to.
const LARGE_PAGE: usize = 2 << 20;

/// The smallest pages there are.
const SMALL_PAGE: usize = 4096;

/// Large pages made by one call: each is a copy of 2 MiB, which must not hold up a step for long.
const MERGES_PER_CALL: usize = 32;

/// A zeroed, cache-line aligned array of fixed length. Large ones become resident only where they are touched.
pub struct AlignedBuffer<T> {
    /// First element, on a cache line.
    pointer: NonNull<T>,
    len: usize,
    allocation: NonNull<u8>,
    /// Bytes from `pointer` on that need not be looked at again by [`Self::merge_pages`].
    merged: AtomicUsize,
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
        let Some(layout) = layout::<T>(len) else { return Err(failed) };
        let allocation = if layout.size() >= MAPPED_BYTES {
            map(layout)
        } else {
            // SAFETY: the layout has a non-zero size.
            NonNull::new(unsafe { alloc_zeroed(layout) })
        }
        .ok_or(failed)?;
        // SAFETY: the layout has a cache line to spare, so the next line starts inside it.
        let pointer = unsafe { allocation.add(allocation.align_offset(ALIGNMENT)) }.cast();
        Ok(AlignedBuffer { pointer, len, allocation, merged: AtomicUsize::new(0) })
    }

    /// Turns elements `used` into large pages where whole ones are in use, from the start on, a bounded number at a
    /// time; `true` if there may be more to do. Best effort: without it everything is only slower. What the elements
    /// hold does not change.
    pub fn merge_pages(&self, used: Range<usize>) -> bool {
        let base = self.pointer.as_ptr().addr();
        let end = base + used.end.min(self.len) * size_of::<T>();
        let first = base + self.merged.load(Ordering::Relaxed).max(used.start * size_of::<T>());
        let mut next = first.next_multiple_of(LARGE_PAGE);
        for _ in 0..MERGES_PER_CALL {
            if next + LARGE_PAGE > end || !merge_page(std::ptr::without_provenance_mut(next)) {
                return false;
            }
            next += LARGE_PAGE;
            self.merged.store(next - base, Ordering::Relaxed);
        }
        true
    }

    /// Makes everything zero again and gives the memory back until it is touched.
    pub(crate) fn release(&mut self) {
        *self.merged.get_mut() = 0;
        #[cfg(target_os = "linux")]
        if let Some(layout) = layout::<T>(self.len).filter(|layout| layout.size() >= MAPPED_BYTES) {
            // SAFETY: a private mapping of this size that belongs to this buffer; its pages read as zero afterwards.
            let given =
                unsafe { libc::madvise(self.allocation.as_ptr().cast(), layout.size(), libc::MADV_DONTNEED) };
            if given == 0 {
                return;
            }
        }
        self.fill(T::zeroed());
    }
}

/// Makes one large page of 2 MiB at an aligned address inside a mapping; `false` if some of it is not in use yet.
#[cfg(target_os = "linux")]
fn merge_page(address: *mut libc::c_void) -> bool {
    /// As in Linux 6.1 and later.
    const MADV_COLLAPSE: libc::c_int = 25;
    let mut resident = [0_u8; LARGE_PAGE / SMALL_PAGE];
    // SAFETY: both calls look at the tables of a mapping and may move its pages, without any change to what they
    // hold; `resident` has a byte for each of the smallest pages there are.
    unsafe {
        let asked = libc::mincore(address, LARGE_PAGE, resident.as_mut_ptr());
        let pages = LARGE_PAGE / page_size();
        if asked != 0 || resident[..pages.min(resident.len())].iter().any(|page| page & 1 == 0) {
            return false;
        }
        // Where the system cannot, asking again would not help.
        libc::madvise(address, LARGE_PAGE, MADV_COLLAPSE);
    }
    true
}

/// Bytes of an ordinary page.
#[cfg(target_os = "linux")]
fn page_size() -> usize {
    // SAFETY: reads a constant of the system.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).unwrap_or(4096).max(4096)
}

#[cfg(not(target_os = "linux"))]
fn merge_page(_: *mut std::ffi::c_void) -> bool {
    false
}

/// Gives memory that the allocator holds but nobody uses back to the system. Allocators keep what threads have freed,
/// about a megabyte after a long prompt.
pub fn trim() {
    // SAFETY: works on free memory of the allocator only, and takes its locks.
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    unsafe {
        libc::malloc_trim(0);
    }
}

/// A mapping of zeros that nobody else has.
#[cfg(unix)]
fn map(layout: Layout) -> Option<NonNull<u8>> {
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new anonymous mapping touches nothing that exists.
    let address = unsafe { libc::mmap(std::ptr::null_mut(), layout.size(), protection, flags, -1, 0) };
    if address == libc::MAP_FAILED { None } else { NonNull::new(address.cast()) }
}

/// # Safety
/// `allocation` must come from [`map`] with this layout.
#[cfg(unix)]
unsafe fn unmap(allocation: NonNull<u8>, layout: Layout) {
    // SAFETY: by the caller's promise a mapping of this size.
    unsafe { libc::munmap(allocation.as_ptr().cast(), layout.size()) };
}

#[cfg(not(unix))]
fn map(layout: Layout) -> Option<NonNull<u8>> {
    // SAFETY: the layout has a non-zero size.
    NonNull::new(unsafe { alloc_zeroed(layout) })
}

/// # Safety
/// `allocation` must come from [`map`] with this layout.
#[cfg(not(unix))]
unsafe fn unmap(allocation: NonNull<u8>, layout: Layout) {
    // SAFETY: by the caller's promise allocated with this layout.
    unsafe { dealloc(allocation.as_ptr(), layout) };
}

/// Room for `len` elements and a cache line to align them in. Asking for no more than the alignment every allocator
/// gives anyway lets it hand out untouched pages; with a larger one it clears them, which makes them all resident.
fn layout<T>(len: usize) -> Option<Layout> {
    let bytes = len.checked_mul(size_of::<T>())?.checked_add(ALIGNMENT)?;
    Layout::from_size_align(bytes, align_of::<T>().max(8)).ok()
}

impl<T> Drop for AlignedBuffer<T> {
    fn drop(&mut self) {
        let layout = layout::<T>(self.len).expect("the layout was valid when allocated");
        // SAFETY: allocated in `zeroed` with this layout, in the same of two ways.
        unsafe {
            if layout.size() >= MAPPED_BYTES {
                unmap(self.allocation, layout);
            } else {
                dealloc(self.allocation.as_ptr(), layout);
            }
        }
    }
}

impl<T> Deref for AlignedBuffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the pointer is valid for `len` initialised elements.
        unsafe { std::slice::from_raw_parts(self.pointer.as_ptr(), self.len) }
    }
}

impl<T> DerefMut for AlignedBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.as_ptr(), self.len) }
    }
}

/// Prefetches memory that is about to be read, in all its pages at once: the hardware fetches ahead in each by itself.
#[inline]
#[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
pub(super) fn prefetch<T>(values: &[T]) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let (first, len) = (values.as_ptr().cast::<i8>(), size_of_val(values));
        for line in (0..len.min(SMALL_PAGE)).step_by(ALIGNMENT) {
            for at in (line..len).step_by(SMALL_PAGE) {
                // SAFETY: a prefetch does not access memory in the sense of the language, whatever the address.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(first.wrapping_add(at)) };
            }
        }
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

    #[cfg(target_os = "linux")]
    #[test]
    #[cfg_attr(miri, ignore = "asks the system about its pages")]
    fn untouched_memory_is_not_resident() {
        let resident = || {
            let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
            statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
        };
        let before = resident();
        let mut buffer = AlignedBuffer::<u16>::zeroed(512 << 20, "test").unwrap();
        buffer[1 << 20] = 1;
        assert!(resident() < before + (256 << 20), "{} bytes became resident", resident() - before);
    }

    #[test]
    fn released_buffers_are_zero_again() {
        // The last one is a mapping, of which Miri cannot give back a part.
        for len in [0, 100, if cfg!(miri) { 1000 } else { 1 << 20 }] {
            let mut buffer = AlignedBuffer::<u16>::zeroed(len, "test").unwrap();
            buffer.fill(7);
            buffer.release();
            assert!(buffer.iter().all(|&value| value == 0), "{len}");
            buffer.fill(9);
            assert!(buffer.iter().all(|&value| value == 9), "{len}");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    #[cfg_attr(miri, ignore = "asks the system about its pages")]
    fn released_memory_is_not_resident() {
        let mut buffer = AlignedBuffer::<u8>::zeroed(1 << 20, "test").unwrap();
        let resident = |buffer: &AlignedBuffer<u8>| {
            let mut pages = vec![0u8; buffer.len().div_ceil(4096) + 1];
            // SAFETY: the range is mapped and `pages` has a byte for each of its pages.
            let asked =
                unsafe { libc::mincore(buffer.allocation.as_ptr().cast(), buffer.len(), pages.as_mut_ptr()) };
            assert_eq!(asked, 0);
            pages.iter().filter(|&&page| page & 1 == 1).count()
        };
        assert_eq!(resident(&buffer), 0);
        buffer.fill(1);
        assert_eq!(resident(&buffer), 256);
        buffer.release();
        assert_eq!(resident(&buffer), 0);
    }

    #[cfg(target_os = "linux")]
    #[test]
    #[cfg_attr(miri, ignore = "asks the system about its pages")]
    fn only_what_is_in_use_becomes_large_pages() {
        let huge = |buffer: &AlignedBuffer<u8>| {
            let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
            let start = buffer.allocation.as_ptr().addr();
            let mut inside = false;
            let mut sizes = (0, 0);
            for line in maps.lines() {
                let mut words = line.split_whitespace();
                let (Some(name), rest) = (words.next(), words.next()) else { continue };
                if let Some((from, to)) = name.split_once('-') {
                    let bounds = [from, to].map(|text| usize::from_str_radix(text, 16).unwrap_or(0));
                    inside = (bounds[0]..bounds[1]).contains(&start);
                } else if let Some(kilobytes) =
                    rest.and_then(|text| text.parse::<usize>().ok()).filter(|_| inside)
                {
                    match name {
                        "Rss:" => sizes.0 += kilobytes << 10,
                        "AnonHugePages:" => sizes.1 += kilobytes << 10,
                        _ => {}
                    }
                }
            }
            sizes
        };
        let mut buffer = AlignedBuffer::<u8>::zeroed(64 << 20, "test").unwrap();
        buffer.merge_pages(0..64 << 20);
        assert_eq!(huge(&buffer), (0, 0), "nothing is in use");
        let used = 20 << 20;
        for (index, byte) in buffer[..used].iter_mut().enumerate() {
            *byte = (index / 7) as u8;
        }
        let (before, _) = huge(&buffer);
        buffer.merge_pages(0..64 << 20);
        let (after, large) = huge(&buffer);
        assert_eq!(before, after, "merging makes nothing else resident");
        // How many large pages there are to be had is the system's business.
        assert!(large <= used, "{large} bytes in large pages");
        for (index, &byte) in buffer.iter().enumerate() {
            assert_eq!(byte, if index < used { (index / 7) as u8 } else { 0 }, "byte {index}");
        }
        buffer.release();
        assert!(buffer.iter().all(|&byte| byte == 0));
    }

    #[test]
    fn an_impossible_size_is_an_error() {
        for len in [usize::MAX, usize::MAX / 8] {
            let error = AlignedBuffer::<f32>::zeroed(len, "a test").err().unwrap();
            assert!(error.to_string().contains("a test"), "{error}");
        }
    }
}
