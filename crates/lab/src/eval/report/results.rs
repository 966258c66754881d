//! Result files: `{"machine": …, "rows": [ … ]}` as every command of the lab writes them.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Map, Value};

/// Largest file that is read; a day of measurements has a few hundred kilobytes.
const MAX_BYTES: u64 = 64 << 20;

/// One row of results.
pub type ResultRow = Map<String, Value>;

/// One file of results.
#[derive(Clone, Debug, PartialEq)]
pub struct Results {
    /// Name of the file.
    pub name: String,
    /// The machine in one line.
    pub machine: String,
    /// The measurements of the file, a row each.
    pub rows: Vec<ResultRow>,
}

/// Why results cannot be shown.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
#[non_exhaustive]
pub enum ReportError {
    #[error("{}: cannot read: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{}: more than {MAX_BYTES} bytes is not a file of results", path.display())]
    TooLarge { path: PathBuf },
    #[error("{}: not a file of results: {source}", path.display())]
    Json { path: PathBuf, source: serde_json::Error },
    #[error("{}: row {row} is not an object", path.display())]
    ResultRow { path: PathBuf, row: usize },
}

#[derive(Deserialize)]
struct ResultFile {
    #[serde(default)]
    machine: Value,
    rows: Vec<Value>,
}

impl Results {
    /// Reads the results in a file.
    pub fn read(path: &Path) -> Result<Results, ReportError> {
        let failed = |source| ReportError::Read { path: path.to_owned(), source };
        let mut text = Vec::new();
        File::open(path).map_err(failed)?.take(MAX_BYTES + 1).read_to_end(&mut text).map_err(failed)?;
        if text.len() as u64 > MAX_BYTES {
            return Err(ReportError::TooLarge { path: path.to_owned() });
        }
        Results::parse(path, &text)
    }

    /// Reads the text of a file; `path` only names it.
    pub fn parse(path: &Path, text: &[u8]) -> Result<Results, ReportError> {
        let layout: ResultFile = serde_json::from_slice(text)
            .map_err(|source| ReportError::Json { path: path.to_owned(), source })?;
        let mut rows = Vec::with_capacity(layout.rows.len());
        for (index, row) in layout.rows.into_iter().enumerate() {
            let Value::Object(row) = row else {
                return Err(ReportError::ResultRow { path: path.to_owned(), row: index + 1 });
            };
            rows.push(row);
        }
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        Ok(Results { name, machine: machine_line(&layout.machine), rows })
    }
}

/// The line of a report's machine, from what a file says about the machine it was written on.
fn machine_line(machine: &Value) -> String {
    let Value::Object(machine) = machine else { return "unknown machine".to_owned() };
    let text = |name: &str| machine.get(name).and_then(Value::as_str).map(str::to_owned);
    let threads = machine.get("threads").and_then(Value::as_u64).map(|count| format!("{count} threads"));
    let memory = machine.get("memory_bytes").and_then(Value::as_u64);
    let memory = memory.map(|bytes| format!("{:.0} GiB", bytes as f64 / (1u64 << 30) as f64));
    let parts = [
        text("cpu"),
        threads,
        memory,
        text("simd").map(|simd| format!("{simd} kernels")),
        text("system"),
        text("oscar").map(|version| format!("oscar {version}")),
    ];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    if parts.is_empty() { "unknown machine".to_owned() } else { parts.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_report_writes_is_read_back() {
        let mut report = oscar_report::Report::here();
        report.push(serde_json::json!({"kind": "kl", "kl": 0.5}));
        let results = Results::parse(Path::new("a/kl.json"), report.json().as_bytes()).expect("results");
        assert_eq!(results.name, "kl.json");
        assert_eq!(results.machine, report.machine.line());
        assert_eq!(results.rows, report.rows);
    }

    #[test]
    fn errors_name_the_file() {
        for text in ["", "{", "[]", "{\"rows\": 3}", "{\"rows\": [1]}", "{}"] {
            let error = Results::parse(Path::new("bad.json"), text.as_bytes()).expect_err(text);
            assert!(error.to_string().starts_with("bad.json: "), "{error}");
        }
        let error = Results::read(Path::new("no/such/file.json")).expect_err("no file");
        assert!(error.to_string().contains("no/such/file.json"));
    }

    #[test]
    fn a_machine_may_be_missing_or_odd() {
        for machine in ["null", "3", "{}", "{\"cpu\": 4}"] {
            let text = format!("{{\"machine\": {machine}, \"rows\": []}}");
            let results = Results::parse(Path::new("x"), text.as_bytes()).expect("results");
            assert_eq!(results.machine, "unknown machine");
        }
    }
}
