//! Files that are whole or not there: written beside their place and renamed into it.

use std::fs::File;
use std::io::{self, BufWriter};
use std::path::Path;

use crate::error::RotationError;

/// Writes `path` with `fill`. Whatever goes wrong, no part of a file is left behind and an old one is kept.
pub(crate) fn write_atomically(
    path: &Path,
    fill: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> Result<(), RotationError> {
    let write = || {
        let Some(name) = path.file_name() else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not the name of a file"));
        };
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let prefix = format!(".{}.", name.to_string_lossy());
        let mut builder = tempfile::Builder::new();
        builder.prefix(&prefix).suffix(".partial");
        // A temporary file is for its owner alone; what becomes of it has the rights of any new file.
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
        let (file, temporary) = builder.tempfile_in(folder)?.into_parts();
        let mut writer = BufWriter::with_capacity(1 << 20, file);
        fill(&mut writer)?;
        writer.into_inner()?.sync_all()?;
        temporary.persist(path)?;
        Ok(())
    };
    write().map_err(|error| RotationError::io(path, "write", error))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;

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
        assert!(matches!(failed, Err(RotationError::Io { .. })));
        assert_eq!(fs::read(&path).expect("file"), b"old");
        assert_eq!(fs::read_dir(folder.path()).expect("folder").count(), 1);
        write_atomically(&path, |file| file.write_all(b"new")).expect("write");
        assert_eq!(fs::read(&path).expect("file"), b"new");
        assert!(write_atomically(&folder.path().join("none/file"), |_| Ok(())).is_err());
        assert!(write_atomically(Path::new("/"), |_| Ok(())).is_err());
    }

    #[cfg(unix)]
    #[test]
    fn others_may_read_what_was_written() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().expect("folder");
        let (written, plain) = (folder.path().join("written"), folder.path().join("plain"));
        write_atomically(&written, |file| file.write_all(b"x")).expect("write");
        fs::write(&plain, b"x").expect("write");
        let mode = |path: &Path| fs::metadata(path).expect("file").permissions().mode();
        assert_eq!(mode(&written), mode(&plain));
    }
}
