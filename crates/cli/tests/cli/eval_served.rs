//! `oscar eval` with caches that serve: the engine answers, and is graded as the lab is.

use serde_json::Value;

use crate::support::{Machine, Outcome, patient_model};

/// Everything outside of the page being filled is read from the cache's codes.
const NO_WINDOWS: [&str; 4] = ["--sink-tokens", "0", "--recent-tokens", "0"];

fn rows(outcome: &Outcome) -> Vec<Value> {
    outcome.json()["rows"].as_array().expect("rows").clone()
}

#[test]
fn needles_are_sought_by_the_engine_and_by_the_lab() {
    let machine = Machine::new();
    let model = patient_model(&machine);
    let arguments = ["eval", "niah", model.to_str().expect("path"), "--lengths", "1k", "--depths", "20,80"];
    let caches = ["--kv", "bf16", "--kv-cache-dtype", "bf16,int4", "--json", "--log-level", "info"];
    let outcome = machine.run(arguments.iter().chain(&caches).chain(&NO_WINDOWS)).success();
    let rows = rows(&outcome);
    let names: Vec<&str> = rows.iter().filter_map(|row| row["kv"].as_str()).collect();
    assert_eq!(names, ["bf16", "served bf16", "served int4", "bf16", "served bf16", "served int4"]);
    let number = |row: &Value, name: &str| row[name].as_f64().expect("a number");
    for cell in rows.chunks(3) {
        assert_eq!(cell[0]["score"], cell[1]["score"], "{cell:?}");
        let bits: Vec<f64> = cell.iter().map(|row| number(row, "bits_per_element")).collect();
        assert_eq!(bits[..2], [16.0, 16.0]);
        // 16 channels of 4 bits are padded to 32, with two scales of 16 bits; the page being filled is bf16.
        assert_eq!(bits[2], 10.0);
        let whole = number(&cell[2], "bits_with_windows");
        assert!(whole > bits[2] && whole < 16.0, "{whole}");
    }
    // A score of 0 proves little: what was said must be the same too.
    let said = |served: bool| -> Vec<&str> {
        let lines = outcome.stderr.lines().filter(|line| line.contains("served bf16: ") == served);
        lines.filter_map(|line| Some(line.split_once(" bf16: ")?.1)).collect()
    };
    assert_eq!(said(true).len(), 2, "{}", outcome.stderr);
    assert!(said(true).iter().all(|line| line.contains("wanted")));
    assert_eq!(said(false), said(true));
    assert!(outcome.stderr.contains("KV cache: int4, mean keys estimated"), "{}", outcome.stderr);

    // Without codecs of the lab there is nothing but the engine.
    let alone = ["--kv-cache-dtype", "fp8", "--depths", "50"];
    let outcome = machine.run(arguments[..5].iter().chain(&alone)).success();
    assert!(outcome.stdout.contains("served fp8") && !outcome.stdout.contains("int2"), "{}", outcome.stdout);
    assert!(outcome.stdout.contains("bits_per_element"), "{}", outcome.stdout);
}

#[test]
fn divergence_and_copies_are_those_of_the_lab() {
    let machine = Machine::new();
    let model = patient_model(&machine);
    let model = model.to_str().expect("path");
    let caches = ["--kv", "int4", "--kv-cache-dtype", "bf16,int4,int2:scalar,int2", "--json"];
    let run = |arguments: &[&str]| {
        let outcome = machine.run(arguments.iter().chain(&caches).chain(&NO_WINDOWS)).success();
        let rows = rows(&outcome);
        let names: Vec<&str> = rows.iter().filter_map(|row| row["kv"].as_str()).collect();
        assert_eq!(names, ["int4", "served bf16", "served int4", "served int2:scalar", "served int2"]);
        rows
    };
    let number = |row: &Value, name: &str| row[name].as_f64().expect("a number");
    for prefix in ["0", "600"] {
        let rows = run(&["eval", "kl", model, "--tokens", "1024", "--sequences", "1", "--prefix", prefix]);
        let kl: Vec<f64> = rows.iter().map(|row| number(row, "kl")).collect();
        // The page being filled is bf16 where it is served, and sealed in the lab.
        assert!(kl[1] < 1e-6 && (0.7..1.1).contains(&(kl[2] / kl[0])), "{kl:?}");
        assert!(kl[2] < kl[3] && kl[2] < kl[4] && kl[3] != kl[4], "{kl:?}");
        assert_eq!(number(&rows[2], "bits_per_element"), 10.0);
        assert!(number(&rows[2], "bits_per_element_with_windows") > 10.0);
    }
    let rows = run(&["eval", "probe", model]);
    assert!(number(&rows[1], "loss").abs() < 1e-4, "{rows:?}");
    assert!(rows[2..].iter().all(|row| number(row, "sealed") != number(row, "exact")), "{rows:?}");
    let odd = ["eval", "kl", model, "--tokens", "1024", "--kv-cache-dtype", "int4", "--recent-tokens", "100"];
    let odd = machine.run(odd);
    odd.failure(1, &["--recent-tokens 100", "64 or 128"]);
}

#[test]
fn a_served_cache_says_what_it_cannot_do() {
    let machine = Machine::new();
    let model = patient_model(&machine);
    let model = model.to_str().expect("path");
    let run = |options: &[&str]| machine.run([&["eval", "niah", model, "--lengths", "1k"], options].concat());
    let odd = run(&["--kv-cache-dtype", "int4", "--sink-tokens", "100"]);
    odd.failure(1, &["--sink-tokens 100", "64 or 128"]);
    run(&["--kv-cache-dtype", "int5"]).failure(2, &["auto, bf16, fp8, int4, int2 or int1.5"]);
    let memory = run(&["--kv-cache-dtype", "bf16", "--kv-memory", "4KiB"]);
    memory.failure(1, &["KV memory", "fix: give a larger --kv-memory"]);
    let idle = run(&["--kv", "bf16", "--depths", "50", "--k-clip", "0.9", "--kv-memory", "1GiB"]).success();
    assert!(idle.stderr.contains("--k-clip, --kv-memory: no effect without --kv-cache-dtype"), "{idle:?}");
}
