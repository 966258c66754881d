//! How much freed memory the allocator keeps for itself.

/// Has the allocator give memory back when a megabyte of it is free at the end of one of its heaps, and take pieces of more
/// than a megabyte from the system one by one. By itself glibc raises both limits with the largest piece that was freed, so
/// that after large requests each heap keeps up to 64 MiB, and threads have heaps of their own.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[allow(unsafe_code)]
pub(crate) fn give_back_early() {
    const KEPT_BYTES: libc::c_int = 1 << 20;
    for limit in [libc::M_TRIM_THRESHOLD, libc::M_MMAP_THRESHOLD] {
        // SAFETY: sets a number of the allocator, under its lock.
        unsafe { libc::mallopt(limit, KEPT_BYTES) };
    }
}

/// Other allocators have no such limits.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub(crate) fn give_back_early() {}
