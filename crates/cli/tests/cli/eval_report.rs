//! `oscar eval report`.

use std::fs;

use crate::support::Machine;

const RESULTS: &str = r#"{"machine": {"cpu": "a CPU"}, "rows": [
    {"kind": "kl", "model": "m", "kv": "int2", "kl": 0.06, "bits_per_element": 2.25},
    {"kind": "kl", "model": "m", "kv": "int4", "kl": 0.003, "bits_per_element": 4.25}]}"#;

#[test]
fn results_become_a_page_that_needs_nothing_else() {
    let machine = Machine::new();
    let (results, page) = (machine.path("r.json"), machine.path("r.html"));
    fs::write(&results, RESULTS).expect("write");
    let arguments = ["eval", "report", results.to_str().expect("path"), "-o", page.to_str().expect("path")];
    machine.run(arguments).success();
    let html = fs::read_to_string(&page).expect("page");
    assert!(html.contains("int4") && html.contains("<svg") && !html.contains("<script"));
}

#[test]
fn reports_name_the_file_they_cannot_read() {
    let machine = Machine::new();
    let bad = machine.path("bad.json");
    for (text, words) in
        [("{\"rows\": [", "not a file of results"), ("{\"rows\": [3]}", "row 1 is not an object")]
    {
        fs::write(&bad, text).expect("write");
        let outcome = machine.run(["eval", "report", bad.to_str().expect("path")]);
        outcome.failure(1, &["bad.json", words, "fix: "]);
    }
    machine.run(["eval", "report", "missing.json"]).failure(1, &["missing.json: cannot read"]);
    machine.run(["eval", "report"]).failure(2, &["RESULTS.json"]);
}
