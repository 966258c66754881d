//! Weights in 2 MiB memory pages.
//!
//! A decode step reads all weights, far more memory than the addresses of 4 KiB pages that a core remembers. The pages of a
//! mapped file stay small on most systems, so the bytes are read into memory of this process instead, in the place of the
//! mapping: the process never holds them twice.

use std::fs::File;
use std::io;

use memmap2::MmapRaw;

/// Bytes of a large page, and what it must be aligned to.
#[cfg(target_os = "linux")]
const LARGE_PAGE: usize = 2 << 20;

/// Reads the whole large pages of a mapping of `file` into memory of this process. What the mapping holds afterwards is the
/// same; if that fails, it is gone.
#[cfg(target_os = "linux")]
#[allow(unsafe_code)]
pub(super) fn read(map: MmapRaw, file: &File) -> io::Result<MmapRaw> {
    use std::os::fd::AsRawFd;

    let first = map.as_ptr().align_offset(LARGE_PAGE);
    let len = map.len().saturating_sub(first) / LARGE_PAGE * LARGE_PAGE;
    if len == 0 {
        return Ok(map);
    }
    let check = |done: bool| if done { Ok(()) } else { Err(io::Error::last_os_error()) };
    // SAFETY: `first..first + len` is inside the mapping, which is ours: nobody has a reference to its bytes. It is replaced
    // by fresh memory, which the end of the mapping gives back as it would the old, and filled before anyone looks.
    unsafe {
        let start = map.as_mut_ptr().add(first).cast::<libc::c_void>();
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        check(libc::mmap(start, len, access, kind, -1, 0) != libc::MAP_FAILED)?;
        // Best effort: without it everything is only slower.
        libc::madvise(start, len, libc::MADV_HUGEPAGE);
        let mut done = 0;
        while done < len {
            let offset = libc::off_t::try_from(first + done).map_err(io::Error::other)?;
            match libc::pread(file.as_raw_fd(), start.add(done), len - done, offset) {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                read if read > 0 => done += read.cast_unsigned(),
                _ if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
                _ => return Err(io::Error::last_os_error()),
            }
        }
        check(libc::mprotect(start, len, libc::PROT_READ) == 0)?;
    }
    Ok(map)
}

/// Elsewhere the mapping stays as it is.
#[cfg(not(target_os = "linux"))]
pub(super) fn read(map: MmapRaw, _file: &File) -> io::Result<MmapRaw> {
    Ok(map)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use memmap2::MmapOptions;

    use super::super::{MappedFile, WeightMemory};
    use super::*;

    #[test]
    fn the_bytes_are_those_of_the_file() {
        // Sizes around whole pages, and one with several of them wherever the mapping begins.
        for len in [1, 4095, (2 << 20) - 1, 2 << 20, (4 << 20) + 1, (9 << 20) + 12_345] {
            let bytes: Vec<u8> =
                (0..len).map(|i: usize| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
            let mut file = tempfile::NamedTempFile::new().unwrap();
            file.write_all(&bytes).unwrap();
            for memory in [WeightMemory::Mapped, WeightMemory::LargePages] {
                let opened = MappedFile::open(file.path(), memory).unwrap();
                assert!(opened.as_ref() == bytes, "{len} {memory:?}");
            }
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    #[allow(unsafe_code)]
    fn whole_large_pages_no_longer_depend_on_the_file() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&vec![7; 9 << 20]).unwrap();
        let map = MmapOptions::new().map_raw_read_only(file.as_file()).unwrap();
        let map = read(map, file.as_file()).unwrap();
        file.as_file().set_len(0).unwrap();
        // Of the mapping itself nothing could be read now.
        let first = map.as_ptr().align_offset(LARGE_PAGE);
        let len = ((9 << 20) - first) / LARGE_PAGE * LARGE_PAGE;
        assert!(len >= 6 << 20);
        // SAFETY: these bytes are in memory of this process.
        let bytes = unsafe { std::slice::from_raw_parts(map.as_ptr().add(first), len) };
        assert!(bytes.iter().all(|&byte| byte == 7));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_file_that_shrinks_is_an_error() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&vec![7; 9 << 20]).unwrap();
        let map = MmapOptions::new().map_raw_read_only(file.as_file()).unwrap();
        file.as_file().set_len(3 << 20).unwrap();
        assert_eq!(read(map, file.as_file()).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
