//! Rows as an HTML table.

use serde_json::Value;

use super::escape::escape;
use super::results::ResultRow;

/// Tables longer than this begin closed.
const LONG: usize = 24;

/// A number of a row.
pub(super) fn number(row: &ResultRow, name: &str) -> Option<f64> {
    row.get(name).and_then(Value::as_f64)
}

/// A value of a row as people read it.
pub(super) fn text(row: &ResultRow, name: &str) -> Option<String> {
    match row.get(name) {
        None | Some(Value::Null) => None,
        Some(value) => Some(shown(value)),
    }
}

/// A value as people read it: four digits of a fraction, all digits of a whole number.
fn shown(value: &Value) -> String {
    match value {
        Value::Null => "–".to_owned(),
        Value::String(text) => text.clone(),
        Value::Bool(true) => "yes".to_owned(),
        Value::Bool(false) => "no".to_owned(),
        Value::Number(number) if number.is_f64() => number.as_f64().map_or(String::new(), four_digits),
        other => other.to_string(),
    }
}

fn four_digits(value: f64) -> String {
    if value == 0.0 {
        return "0".to_owned();
    }
    let magnitude = value.abs().log10().floor() as i32;
    if magnitude < -4 {
        format!("{value:.2e}")
    } else {
        format!("{value:.*}", (3 - magnitude).clamp(0, 8) as usize)
    }
}

/// The table of `rows`. Columns are all names that the rows have, in their order, less those in `without`.
pub(super) fn table(rows: &[&ResultRow], without: &[&str]) -> String {
    let mut names: Vec<&str> = Vec::new();
    for name in rows.iter().flat_map(|row| row.keys()) {
        if !names.contains(&name.as_str()) && !without.contains(&name.as_str()) {
            names.push(name);
        }
    }
    // A column without a value says nothing.
    names.retain(|name| rows.iter().any(|row| text(row, name).is_some()));
    let is_numeric = |value: &Value| match value {
        Value::String(text) => text.parse::<f64>().is_ok(),
        other => other.is_number() || other.is_null(),
    };
    let numeric: Vec<bool> =
        names.iter().map(|name| rows.iter().filter_map(|row| row.get(*name)).all(is_numeric)).collect();
    let mut out = String::from("<div class=\"wide\"><table><thead><tr>");
    let class = |column: usize| if numeric[column] { " class=\"number\"" } else { "" };
    for (column, name) in names.iter().enumerate() {
        out += &format!("<th{}>{}</th>", class(column), escape(&name.replace('_', " ")));
    }
    out += "</tr></thead><tbody>";
    for row in rows {
        out += "<tr>";
        for (column, name) in names.iter().enumerate() {
            let cell = text(row, name).unwrap_or_else(|| "–".to_owned());
            out += &format!("<td{}>{}</td>", class(column), escape(&cell));
        }
        out += "</tr>";
    }
    out += "</tbody></table></div>";
    if rows.len() > LONG {
        out = format!("<details><summary>all {} rows</summary>{out}</details>", rows.len());
    }
    out
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn row(value: Value) -> ResultRow {
        value.as_object().expect("object").clone()
    }

    #[test]
    fn columns_are_the_union_of_the_names() {
        let rows =
            [row(json!({"kv": "<b>", "kl": 0.123456, "note": null})), row(json!({"kl": 2, "top_1": 0.5}))];
        let html = table(&rows.iter().collect::<Vec<_>>(), &["kv_group"]);
        assert!(
            html.contains("<th>kv</th><th class=\"number\">kl</th><th class=\"number\">top 1</th>"),
            "{html}"
        );
        assert!(
            html.contains("<td>&lt;b&gt;</td><td class=\"number\">0.1235</td><td class=\"number\">–</td>")
        );
        assert!(!html.contains("note"), "{html}");
    }

    #[test]
    fn long_tables_begin_closed() {
        let rows: Vec<ResultRow> = (0..30).map(|n| row(json!({"n": n}))).collect();
        assert!(table(&rows.iter().collect::<Vec<_>>(), &[]).starts_with("<details>"));
        assert!(!table(&rows[..5].iter().collect::<Vec<_>>(), &[]).contains("<details>"));
    }

    #[test]
    fn nested_values_are_shown_as_they_are() {
        let html = table(&[&row(json!({"windows": [64, 256], "exact": true}))], &[]);
        assert!(html.contains("[64,256]") && html.contains("yes"));
    }
}
