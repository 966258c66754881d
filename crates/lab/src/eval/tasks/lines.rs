//! JSON objects out of a file: one per line, or one array; plain or gzip.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use flate2::read::MultiGzDecoder;
use serde_json::{Map, Value};

use super::TaskError;

/// Most bytes of a dataset once unpacked; the largest known one has 20 MB.
const MAX_BYTES: u64 = 256 << 20;

/// An object and the line it stands on.
pub(super) type Line = (usize, Map<String, Value>);

/// All objects of a file.
pub(super) fn objects(path: &Path) -> Result<Vec<Line>, TaskError> {
    let bytes = contents(path, MAX_BYTES)?;
    let problem = |line: usize, problem: String| TaskError::Line { path: path.to_owned(), line, problem };
    let text = match std::str::from_utf8(&bytes) {
        Ok(text) => text.trim_start_matches('\u{feff}'),
        Err(error) => {
            let line = 1 + bytes[..error.valid_up_to()].iter().filter(|byte| **byte == b'\n').count();
            return Err(problem(line, "not UTF-8".to_owned()));
        }
    };
    let object = |line: usize, value: Value| match value {
        Value::Object(object) => Ok((line, object)),
        _ => Err(problem(line, "not a JSON object".to_owned())),
    };
    if text.trim_start().starts_with('[') {
        let values: Vec<Value> = serde_json::from_str(text)
            .map_err(|error| problem(error.line(), format!("not a JSON array: {error}")))?;
        return values.into_iter().enumerate().map(|(index, value)| object(index + 1, value)).collect();
    }
    let mut lines = Vec::new();
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let value =
            serde_json::from_str(line).map_err(|error| problem(index + 1, format!("not JSON: {error}")))?;
        lines.push(object(index + 1, value)?);
    }
    Ok(lines)
}

/// The bytes of a file, unpacked if it begins as gzip does; never more than `limit`.
fn contents(path: &Path, limit: u64) -> Result<Vec<u8>, TaskError> {
    let failed = |source| TaskError::Read { path: path.to_owned(), source };
    let read = |reader: &mut dyn Read| {
        let mut bytes = Vec::new();
        reader.take(limit + 1).read_to_end(&mut bytes).map_err(failed)?;
        if bytes.len() as u64 > limit {
            return Err(TaskError::TooLarge { path: path.to_owned(), limit });
        }
        Ok(bytes)
    };
    let bytes = read(&mut File::open(path).map_err(failed)?)?;
    if bytes.starts_with(&[0x1f, 0x8b]) {
        read(&mut MultiGzDecoder::new(bytes.as_slice()))
    } else {
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    fn file(bytes: &[u8]) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().expect("file");
        file.write_all(bytes).expect("write");
        file
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(bytes).expect("write");
        encoder.finish().expect("gzip")
    }

    #[test]
    fn lines_arrays_and_gzip_are_read() {
        let lines = b"{\"a\": 1}\r\n\n{\"a\": 2}\n";
        for bytes in [
            lines.to_vec(),
            gzip(lines),
            b"\n[{\"a\": 1}, {\"a\": 2}]".to_vec(),
            b"\xef\xbb\xbf{\"a\": 1}\n{\"a\": 2}".to_vec(),
        ] {
            let objects = objects(file(&bytes).path()).expect("objects");
            assert_eq!(
                objects.iter().map(|(_, object)| object["a"].as_u64()).collect::<Vec<_>>(),
                [Some(1), Some(2)]
            );
        }
        assert_eq!(objects(file(lines).path()).expect("objects")[1].0, 3);
    }

    #[test]
    fn errors_name_the_file_and_the_line() {
        for (bytes, line) in [
            (&b"{\"a\": 1}\n{\"a\":"[..], 2),
            (b"{}\n[1]\n", 2),
            (b"{}\n\xff\n", 2),
            (b"[{}, 3]", 2),
            (b"[{},\n{]", 2),
        ] {
            let file = file(bytes);
            let error = objects(file.path()).expect_err("bad").to_string();
            let name = file.path().display().to_string();
            assert!(error.starts_with(&format!("{name}: line {line}: ")), "{error}");
        }
    }

    #[test]
    fn damaged_and_swollen_archives_are_refused() {
        let mut cut = gzip(&b"{\"a\": 1}\n".repeat(100));
        cut.truncate(cut.len() - 9);
        assert!(matches!(objects(file(&cut).path()), Err(TaskError::Read { .. })));
        let bomb = gzip(&vec![b' '; 1 << 20]);
        assert!(bomb.len() < 1 << 13);
        assert!(matches!(contents(file(&bomb).path(), 1 << 19), Err(TaskError::TooLarge { .. })));
        assert!(contents(file(&bomb).path(), 1 << 20).is_ok());
        assert!(matches!(objects(Path::new("no/such.jsonl")), Err(TaskError::Read { .. })));
    }
}
