//! What a page shows of each kind of result.

use serde_json::json;

use super::charts::{Bar, BarChart, HeatMap, LineChart, Series, short};
use super::results::ResultRow;
use super::table::{number, table, text};

/// Kinds in the order of the page, with their headings. Others follow under their own name.
pub(super) const KINDS: [(&str, &str, &str); 5] = [
    ("kl", "Distance from the exact cache", "Lower is better: 0 is the exact cache."),
    ("niah", "Needles in a haystack", "Share of hidden numbers that were found, in percent."),
    ("ablation", "Ablations", "One setting changed at a time."),
    ("codec", "Codec speed and size", ""),
    ("calibration", "Calibration", ""),
];

/// Charts and tables of the rows of one kind and one model.
pub(super) fn section(kind: &str, rows: &[&ResultRow]) -> String {
    let mut out = String::new();
    match kind {
        "kl" => out += &grid(&distance_charts(rows)),
        "niah" => {
            out += &needle_summary(rows);
            out += &grid(&needle_charts(rows));
        }
        "ablation" => out += &grid(&ablation_charts(rows)),
        "codec" => out += &grid(&speed_charts(rows)),
        _ => {}
    }
    out + &table(rows, &["kind", "model"])
}

fn grid(charts: &[String]) -> String {
    if charts.is_empty() {
        return String::new();
    }
    let figures: Vec<String> = charts.iter().map(|chart| format!("<figure>{chart}</figure>")).collect();
    format!("<div class=\"charts\">{}</div>", figures.concat())
}

/// The codec, with those of `fields` that tell the rows apart.
fn labels(rows: &[&ResultRow], first: &str, fields: &[&str]) -> Vec<String> {
    let varies = |field: &&&str| rows.iter().any(|row| text(row, field) != text(rows[0], field));
    let telling: Vec<&&str> = fields.iter().filter(varies).collect();
    let label = |row: &&ResultRow| {
        let name = text(row, first).unwrap_or_else(|| "–".to_owned());
        let details: Vec<String> = telling
            .iter()
            .filter_map(|field| {
                let value = text(row, field)?;
                // Numbers need their name beside them; words speak for themselves.
                Some(if row.get(**field).is_some_and(|value| value.is_string()) {
                    value
                } else {
                    format!("{field} {value}")
                })
            })
            .collect();
        if details.is_empty() { name } else { format!("{name}, {}", details.join(", ")) }
    };
    rows.iter().map(label).collect()
}

/// Fields that tell rows of one codec apart.
const WINDOWS: [&str; 8] = ["setting", "sink", "recent", "tokens", "prefix", "chunk", "length", "rotations"];

/// Values of several decades need an axis that shows them all.
fn spans_decades(values: &[f64]) -> bool {
    let positive = || values.iter().copied().filter(|value| *value > 0.0);
    let (low, high) = (positive().fold(f64::INFINITY, f64::min), positive().fold(0.0, f64::max));
    high / low > 20.0
}

fn distance_charts(rows: &[&ResultRow]) -> Vec<String> {
    let names = labels(rows, "kv", &WINDOWS);
    let mut points: Vec<(String, f64, Option<f64>)> = Vec::new();
    for (row, label) in rows.iter().zip(names) {
        if let Some(kl) = number(row, "kl") {
            points.push((label, kl, number(row, "bits_per_element")));
        }
    }
    if points.is_empty() {
        return Vec::new();
    }
    points.sort_by(|one, other| one.1.total_cmp(&other.1));
    let values: Vec<f64> = points.iter().map(|point| point.1).collect();
    let logarithmic = spans_decades(&values);
    let mut charts = vec![bars("KL by codec", "KL, nats per token", &points, logarithmic)];
    // The exact cache has no distance, and no place on an axis of decades.
    let sized: Vec<Series> = points
        .iter()
        .filter(|point| point.1 > 0.0)
        .filter_map(|(label, kl, bits)| {
            Some(Series { name: label.clone(), points: vec![((*bits)?, *kl)], notes: vec![] })
        })
        .collect();
    if sized.len() > 1 {
        let chart = LineChart {
            title: "KL against size".into(),
            x_axis: "bits per element, scales included".into(),
            y_axis: if logarithmic { "KL (log scale)".into() } else { "KL".into() },
            series: sized,
            logarithmic_y: logarithmic,
            ..LineChart::default()
        };
        charts.push(chart.svg());
    }
    charts
}

fn bars(title: &str, axis: &str, points: &[(String, f64, Option<f64>)], logarithmic: bool) -> String {
    let bar = |(label, value, _): &(String, f64, Option<f64>)| Bar { label: label.clone(), value: *value };
    BarChart {
        title: title.to_owned(),
        axis: axis.to_owned(),
        bars: points.iter().map(bar).collect(),
        logarithmic,
    }
    .svg()
}

/// What kind of needle a row is about.
fn needle_group(row: &ResultRow) -> String {
    let parts = [
        text(row, "needle").or_else(|| text(row, "task")),
        text(row, "keys").map(|keys| if keys == "1" { "1 key".to_owned() } else { format!("{keys} keys") }),
        text(row, "setting"),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// Different values in the order they come.
fn distinct<T: PartialEq>(values: impl Iterator<Item = T>) -> Vec<T> {
    let mut out = Vec::new();
    for value in values {
        if !out.contains(&value) {
            out.push(value);
        }
    }
    out
}

fn sorted_numbers(rows: &[&ResultRow], name: &str) -> Vec<f64> {
    let mut values = distinct(rows.iter().filter_map(|row| number(row, name)));
    values.sort_by(f64::total_cmp);
    values
}

/// The mean score of the rows that pass, each counted by its prompts.
fn mean_score(rows: &[&ResultRow], pass: impl Fn(&ResultRow) -> bool) -> Option<f64> {
    let (mut sum, mut weight) = (0.0, 0.0);
    for row in rows.iter().filter(|row| pass(row)) {
        let Some(score) = number(row, "score") else { continue };
        let prompts = number(row, "prompts").filter(|prompts| *prompts > 0.0).unwrap_or(1.0);
        sum += score * prompts;
        weight += prompts;
    }
    (weight > 0.0).then(|| sum / weight)
}

/// Lengths as people name them: 4k, 32k; other numbers as they are.
fn length_name(tokens: f64) -> String {
    if tokens >= 1024.0 && tokens % 1024.0 == 0.0 { format!("{}k", tokens / 1024.0) } else { short(tokens) }
}

/// Heat maps of needle rows, one for each codec and kind of needle.
pub fn needle_maps(rows: &[&ResultRow]) -> Vec<HeatMap> {
    let mut maps = Vec::new();
    for group in distinct(rows.iter().map(|row| needle_group(row))) {
        let group_rows: Vec<&ResultRow> =
            rows.iter().copied().filter(|row| needle_group(row) == group).collect();
        for kv in distinct(group_rows.iter().map(|row| text(row, "kv"))) {
            let cells: Vec<&ResultRow> =
                group_rows.iter().copied().filter(|row| text(row, "kv") == kv).collect();
            let (lengths, depths) = (sorted_numbers(&cells, "length"), sorted_numbers(&cells, "depth"));
            if lengths.is_empty() || depths.is_empty() {
                continue;
            }
            let cell = |depth: f64, length: f64| {
                mean_score(&cells, |row| {
                    number(row, "length") == Some(length) && number(row, "depth") == Some(depth)
                })
            };
            let name = kv.unwrap_or_else(|| "–".to_owned());
            maps.push(HeatMap {
                title: if group.is_empty() { name } else { format!("{name}: {group}") },
                x_axis: "context, tokens".into(),
                y_axis: "depth, %".into(),
                columns: lengths.iter().map(|length| length_name(*length)).collect(),
                rows: depths.iter().map(|depth| short(*depth)).collect(),
                scores: depths
                    .iter()
                    .map(|depth| lengths.iter().map(|length| cell(*depth, *length)).collect())
                    .collect(),
            });
        }
    }
    maps
}

fn needle_charts(rows: &[&ResultRow]) -> Vec<String> {
    let mut charts = Vec::new();
    for group in distinct(rows.iter().map(|row| needle_group(row))) {
        let group_rows: Vec<&ResultRow> =
            rows.iter().copied().filter(|row| needle_group(row) == group).collect();
        let lengths = sorted_numbers(&group_rows, "length");
        if lengths.len() < 2 {
            continue;
        }
        let series = distinct(group_rows.iter().map(|row| text(row, "kv"))).into_iter().map(|kv| {
            let score = |length: f64| {
                mean_score(&group_rows, |row| text(row, "kv") == kv && number(row, "length") == Some(length))
            };
            let points =
                lengths.iter().filter_map(|length| Some((*length, 100.0 * score(*length)?))).collect();
            Series { name: kv.clone().unwrap_or_else(|| "–".to_owned()), points, notes: vec![] }
        });
        let chart = LineChart {
            title: if group.is_empty() {
                "Found by length".into()
            } else {
                format!("Found by length: {group}")
            },
            x_axis: "context, tokens".into(),
            y_axis: "found, %".into(),
            series: series.collect(),
            joined: true,
            ..LineChart::default()
        };
        charts.push(chart.svg());
    }
    charts.extend(needle_maps(rows).iter().map(HeatMap::svg));
    charts
}

/// One row for each codec and kind of needle, one column for each length.
fn needle_summary(rows: &[&ResultRow]) -> String {
    let lengths = sorted_numbers(rows, "length");
    let mut summary: Vec<ResultRow> = Vec::new();
    for key in distinct(rows.iter().map(|row| (needle_group(row), text(row, "kv")))) {
        let matches = |row: &ResultRow| (needle_group(row), text(row, "kv")) == key;
        let mut line = ResultRow::new();
        line.insert("kv".into(), json!(key.1));
        line.insert("needles".into(), if key.0.is_empty() { json!(null) } else { json!(key.0) });
        for length in &lengths {
            let score = mean_score(rows, |row| matches(row) && number(row, "length") == Some(*length));
            line.insert(
                format!("{}, %", length_name(*length)),
                json!(score.map(|score| format!("{:.1}", 100.0 * score))),
            );
        }
        summary.push(line);
    }
    if lengths.is_empty() { String::new() } else { table(&summary.iter().collect::<Vec<_>>(), &[]) }
}

fn ablation_charts(rows: &[&ResultRow]) -> Vec<String> {
    let mut charts = Vec::new();
    for group in distinct(rows.iter().map(|row| text(row, "task"))) {
        let group_rows: Vec<&ResultRow> =
            rows.iter().copied().filter(|row| text(row, "task") == group).collect();
        let names = labels(&group_rows, "setting", &["kv"]);
        for (metric, axis) in [("kl", "KL, nats per token"), ("score", "score")] {
            let values = group_rows.iter().zip(&names);
            let points: Vec<(String, f64, Option<f64>)> =
                values.filter_map(|(row, name)| Some((name.clone(), number(row, metric)?, None))).collect();
            if points.is_empty() {
                continue;
            }
            let all: Vec<f64> = points.iter().map(|point| point.1).collect();
            let title = group.clone().unwrap_or_else(|| "KL by setting".to_owned());
            charts.push(bars(&title, axis, &points, spans_decades(&all)));
        }
    }
    charts
}

/// Speed of the stages of a codec on each path.
fn speed_charts(rows: &[&ResultRow]) -> Vec<String> {
    let timed: Vec<&ResultRow> =
        rows.iter().copied().filter(|row| number(row, "mb_per_s_per_core").is_some()).collect();
    if timed.is_empty() {
        return Vec::new();
    }
    let names = labels(&timed, "stage", &["side", "rule", "head_dim", "groups", "path"]);
    let values = timed.iter().zip(names);
    let points: Vec<(String, f64, Option<f64>)> =
        values.filter_map(|(row, name)| Some((name, number(row, "mb_per_s_per_core")?, None))).collect();
    vec![bars("Speed of the codec", "MB/s of bf16 input per core", &points, false)]
}
