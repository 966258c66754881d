//! One shape for every measurement: `{"machine": …, "rows": [ … ]}`, or a table for people.

use std::fmt::Write;

use serde::Serialize;
use serde_json::{Map, Value};

use crate::machine::Machine;

/// Measurements and the machine they were made on.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The machine that was measured on.
    pub machine: Machine,
    /// The measurements; each row is a flat object with plain names and units.
    pub rows: Vec<Map<String, Value>>,
}

impl Report {
    /// An empty report of this machine.
    pub fn here() -> Report {
        Report { machine: Machine::here(), rows: Vec::new() }
    }

    /// Adds a row; `row` must serialise to an object.
    pub fn push(&mut self, row: impl Serialize) {
        match serde_json::to_value(row) {
            Ok(Value::Object(row)) => self.rows.push(row),
            other => panic!("a row is an object, not {other:?}"),
        }
    }

    /// The report as one JSON object.
    pub fn json(&self) -> String {
        serde_json::to_string(self).expect("a report holds plain values only")
    }

    /// A table of the given columns (all that the rows have when empty), with the machine on top.
    pub fn table(&self, columns: &[&str]) -> String {
        let mut names: Vec<&str> = columns.to_vec();
        if names.is_empty() {
            for row in &self.rows {
                for name in row.keys() {
                    if !names.contains(&name.as_str()) {
                        names.push(name);
                    }
                }
            }
        }
        let cells: Vec<Vec<String>> =
            self.rows.iter().map(|row| names.iter().map(|name| cell(row.get(*name))).collect()).collect();
        let width = |column: usize| {
            cells
                .iter()
                .map(|row| row[column].chars().count())
                .chain([names[column].len()])
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<usize> = (0..names.len()).map(width).collect();
        let mut out = format!("{}\n\n", self.machine.line());
        let mut line = |cells: &mut dyn Iterator<Item = &str>| {
            let padded: Vec<String> =
                cells.zip(&widths).map(|(cell, width)| format!("{cell:>width$}")).collect();
            let _ = writeln!(out, "{}", padded.join("  ").trim_end());
        };
        line(&mut names.iter().copied());
        for row in &cells {
            line(&mut row.iter().map(String::as_str));
        }
        out
    }
}

fn cell(value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => "-".into(),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Number(number)) => match number.as_f64() {
            Some(float) if number.is_f64() => significant(float),
            _ => number.to_string(),
        },
        Some(other) => other.to_string(),
    }
}

/// Four significant digits, or all digits of the whole part.
fn significant(value: f64) -> String {
    if value == 0.0 || !value.is_finite() {
        return value.to_string();
    }
    let magnitude = value.abs().log10().floor() as i32;
    if magnitude < -4 {
        return format!("{value:.2e}");
    }
    format!("{value:.*}", (3 - magnitude).clamp(0, 8) as usize)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn json_is_one_object_with_machine_and_rows() {
        let mut report = Report::here();
        report.push(json!({"ms": 1.5, "kv": "bf16"}));
        let parsed: Value = serde_json::from_str(&report.json()).unwrap();
        assert_eq!(parsed["rows"][0]["kv"], "bf16");
        assert!(parsed["machine"]["cpu"].is_string());
    }

    #[test]
    fn tables_line_up() {
        let mut report = Report::here();
        report.push(json!({"name": "a", "tokens_per_s": 1234.5678}));
        report.push(json!({"name": "longer", "tokens_per_s": 0.012345}));
        let table = report.table(&[]);
        let lines: Vec<&str> = table.lines().skip(2).collect();
        assert_eq!(lines, ["  name  tokens_per_s", "     a          1235", "longer       0.01235"]);
    }
}
