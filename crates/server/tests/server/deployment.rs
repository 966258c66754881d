//! Files under `deploy/` against the server they are for.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::support::mock;

/// Series in an expression: names with one of our prefixes.
fn series(expression: &str) -> impl Iterator<Item = &str> {
    let part_of_name = |letter: char| letter.is_ascii_alphanumeric() || letter == '_' || letter == ':';
    let words = expression.split(move |letter| !part_of_name(letter));
    words.filter(|word| word.starts_with("sglang:") || word.starts_with("oscar_"))
}

/// Every expression of the dashboard.
fn expressions(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(entries) => {
            for (name, value) in entries {
                match value {
                    Value::String(text) if ["expr", "query", "definition"].contains(&name.as_str()) => {
                        found.push(text.clone());
                    }
                    value => expressions(value, found),
                }
            }
        }
        Value::Array(values) => values.iter().for_each(|value| expressions(value, found)),
        _ => {}
    }
}

#[tokio::test]
async fn the_dashboard_asks_for_series_that_are_there() {
    let house = mock();
    house.post("/v1/completions", json!({"prompt": "a", "max_tokens": 3, "ignore_eos": true})).await.ok();
    let metrics = house.get("/metrics").await.text;
    let there: BTreeSet<&str> = metrics
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.split(['{', ' ']).next())
        .collect();
    let dashboard: Value =
        serde_json::from_str(include_str!("../../../../deploy/grafana-dashboard.json")).unwrap();
    let mut asked = Vec::new();
    expressions(&dashboard, &mut asked);
    let asked: BTreeSet<&str> = asked.iter().flat_map(|expression| series(expression)).collect();
    assert!(asked.len() > 15, "{asked:?}");
    let missing: Vec<_> = asked.difference(&there).collect();
    assert!(missing.is_empty(), "{missing:?} are not in {there:?}");
}

#[test]
fn the_time_to_stop_is_longer_than_the_servers_own() {
    let own = oscar_server::ServerOptions::default().shutdown.as_secs();
    for (file, text, name) in [
        ("oscar.service", include_str!("../../../../deploy/oscar.service"), "TimeoutStopSec="),
        (
            "kubernetes.yaml",
            include_str!("../../../../deploy/kubernetes.yaml"),
            "terminationGracePeriodSeconds: ",
        ),
    ] {
        let value = text.lines().find_map(|line| line.trim().strip_prefix(name));
        let seconds: u64 = value.and_then(|value| value.parse().ok()).expect(file);
        assert!(seconds > own + 5, "{file}: {seconds}");
    }
}
