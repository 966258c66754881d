//! Files that are whole or not there: written beside their place and renamed into it.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::error::ZooError;

/// Writes `path` with `fill`. Whatever goes wrong, no part of a file is left behind and an old one is kept.
pub(super) fn write_atomically(
    path: &Path,
    fill: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> Result<(), ZooError> {
    let temporary = temporary_beside(path)?;
    let result = File::create_new(&temporary).and_then(|file| {
        let mut writer = BufWriter::with_capacity(1 << 20, file);
        fill(&mut writer)?;
        writer.flush()?;
        writer.get_ref().sync_all()?;
        fs::rename(&temporary, path)
    });
    result.map_err(|error| {
        // A file of that name that existed before was not made here.
        if error.kind() != io::ErrorKind::AlreadyExists {
            let _ = fs::remove_file(&temporary);
        }
        ZooError::io(path, "write", error)
    })
}

fn temporary_beside(path: &Path) -> Result<PathBuf, ZooError> {
    static WRITES: AtomicU64 = AtomicU64::new(0);
    let Some(name) = path.file_name() else {
        let error = io::Error::new(io::ErrorKind::InvalidInput, "not the name of a file");
        return Err(ZooError::io(path, "write", error));
    };
    let number = WRITES.fetch_add(1, Ordering::Relaxed);
    let temporary = format!(".{}.{}-{number}.partial", name.to_string_lossy(), std::process::id());
    Ok(path.with_file_name(temporary))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_write_keeps_the_old_file_and_leaves_nothing() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("file");
        write_atomically(&path, |file| file.write_all(b"old")).expect("write");
        let failed = write_atomically(&path, |file| {
            file.write_all(b"new")?;
            Err(io::Error::other("full"))
        });
        assert!(matches!(failed, Err(ZooError::Io { .. })));
        assert_eq!(fs::read(&path).expect("file"), b"old");
        assert_eq!(fs::read_dir(folder.path()).expect("folder").count(), 1);
        write_atomically(&path, |file| file.write_all(b"new")).expect("write");
        assert_eq!(fs::read(&path).expect("file"), b"new");
        assert!(write_atomically(&folder.path().join("none/file"), |_| Ok(())).is_err());
    }
}
