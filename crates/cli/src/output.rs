//! What goes to standard output: tables for people, one JSON object for programs.

use std::io::{self, Write};

use oscar_report::Report;
use serde::Serialize;

use crate::failure::Failure;

/// Prints `{"machine": …, "rows": […]}`, the one shape of every `--json`.
pub(crate) fn print_json<Row: Serialize>(rows: impl IntoIterator<Item = Row>) -> Result<(), Failure> {
    let mut report = Report::here();
    rows.into_iter().for_each(|row| report.push(row));
    print_text(&report.json())
}

/// Prints text and a line end.
pub(crate) fn print_text(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    writeln!(out, "{text}")?;
    Ok(out.flush()?)
}

/// Prints rows under a header, columns as wide as they need to be. Columns named in `right` are aligned right.
pub(crate) fn print_table(header: &[&str], rows: &[Vec<String>], right: &[&str]) -> Result<(), Failure> {
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.chain([header[column].chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let header_row: Vec<String> = header.iter().map(|name| (*name).to_owned()).collect();
    let mut out = io::stdout().lock();
    for row in std::iter::once(&header_row).chain(rows) {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            let padding = " ".repeat(widths[column] - cell.chars().count());
            let cell =
                if right.contains(&header[column]) { padding + cell } else { format!("{cell}{padding}") };
            line.push_str(&cell);
            line.push_str("  ");
        }
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(out.flush()?)
}

/// Prints `name  value` lines.
pub(crate) fn print_fields(fields: &[(&str, String)]) -> Result<(), Failure> {
    let width = fields.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
    let mut out = io::stdout().lock();
    for (name, value) in fields {
        writeln!(out, "{name:width$}  {value}")?;
    }
    Ok(out.flush()?)
}

/// `98 MB`: sizes of files, in powers of ten as download pages show them.
pub(crate) fn decimal_bytes(bytes: u64) -> String {
    scaled(bytes as f64, 1000.0, &["B", "kB", "MB", "GB", "TB"])
}

/// `7.5 GiB`: sizes of memory.
pub(crate) fn binary_bytes(bytes: u64) -> String {
    scaled(bytes as f64, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB"])
}

/// `1.54 B`: counts of parameters.
pub(crate) fn count(value: u64) -> String {
    scaled(value as f64, 1000.0, &["", "K", "M", "B", "T"]).trim_end().to_owned()
}

fn scaled(mut value: f64, step: f64, units: &[&str]) -> String {
    let mut unit = 0;
    while value >= step && unit + 1 < units.len() {
        value /= step;
        unit += 1;
    }
    let decimals = if unit == 0 || value >= 100.0 { 0 } else { 3 - (value.max(1.0).log10() as usize + 1) };
    format!("{value:.decimals$} {}", units[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits_and_a_unit() {
        assert_eq!(decimal_bytes(98_362_432), "98.4 MB");
        assert_eq!(decimal_bytes(1_117_320_768), "1.12 GB");
        assert_eq!(decimal_bytes(512), "512 B");
        assert_eq!(binary_bytes(8 << 30), "8.00 GiB");
        assert_eq!(count(134_515_008), "135 M");
        assert_eq!(count(7), "7");
    }
}
