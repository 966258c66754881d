//! `oscar eval tasks` and `oscar eval report`.

use std::fs;

use crate::support::{Machine, fixture};

const QUESTIONS: &str = "{\"problem\": \"1 + 1?\", \"answer\": \"2\", \"id\": \"first\"}\n\
                         {\"problem\": \"2 + 2?\", \"answer\": \"4\", \"id\": \"second\"}\n";

#[test]
fn answers_are_graded_and_reported() {
    let machine = Machine::new();
    let (data, log, results, page) =
        (machine.path("q.jsonl"), machine.path("log.jsonl"), machine.path("r.json"), machine.path("r.html"));
    fs::write(&data, QUESTIONS).expect("write");
    let model = fixture("gguf-qwen2-q8_0/model.gguf");
    let mut command = machine.oscar(["eval", "tasks"]);
    command
        .arg(&model)
        .args(["--task", "math500", "--plain", "--max-tokens", "3", "--kv", "bf16,int4", "--json", "--data"])
        .arg(&data)
        .arg("--log")
        .arg(&log);
    let outcome = crate::support::Outcome::of(command.output().expect("oscar")).success();
    let json = outcome.json();
    let rows = json["rows"].as_array().expect("rows");
    assert_eq!(rows.iter().map(|row| &row["kv"]).collect::<Vec<_>>(), ["bf16", "int4"]);
    for row in rows {
        assert_eq!((&row["kind"], &row["task"]), (&"tasks".into(), &"math500".into()));
        assert_eq!(row["total"], 2);
    }
    let lines: Vec<serde_json::Value> = fs::read_to_string(&log)
        .expect("log")
        .lines()
        .map(|line| serde_json::from_str(line).expect("a JSON object a line"))
        .collect();
    let asked: Vec<_> = lines.iter().map(|line| (line["id"].as_str(), line["kv"].as_str())).collect();
    let expected = [("first", "bf16"), ("first", "int4"), ("second", "bf16"), ("second", "int4")];
    assert_eq!(asked, expected.map(|(id, kv)| (Some(id), Some(kv))));

    fs::write(&results, &outcome.stdout).expect("write");
    let arguments = ["eval", "report", results.to_str().expect("path"), "-o", page.to_str().expect("path")];
    machine.run(arguments).success();
    let html = fs::read_to_string(&page).expect("page");
    assert!(html.contains("math500") && html.contains("<svg") && !html.contains("<script"));
}

#[test]
fn programs_run_only_when_asked() {
    let outcome = Machine::new().run(["eval", "tasks", "no-such-model", "--task", "humaneval"]);
    outcome.failure(1, &["only with --allow-code-execution", "fix: add --allow-code-execution"]);
}

#[test]
fn questions_come_from_a_file_or_a_package() {
    let machine = Machine::new();
    let outcome = machine.run(["eval", "tasks", "no-such-model", "--task", "gpqa"]);
    outcome.failure(1, &["gpqa needs --data", "fix: give its JSONL file"]);
    let outcome = machine.run(["eval", "tasks", "no-such-model", "--task", "math500", "--offline"]);
    outcome.failure(1, &["math500 is not in the cache", "--data"]);
    let data = machine.path("bad.jsonl");
    fs::write(&data, "{\"problem\": \"p\"}\n").expect("write");
    let data = data.to_str().expect("path");
    let outcome = machine.run(["eval", "tasks", "no-such-model", "--task", "aime", "--data", data]);
    outcome.failure(1, &["bad.jsonl: line 1: no field `answer`"]);
    let outcome = machine.run(["eval", "tasks", "no-such-model", "--task", "trivia"]);
    outcome.failure(2, &["gpqa, aime, math500 and humaneval"]);
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
