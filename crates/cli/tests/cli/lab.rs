//! `oscar calibrate` and `oscar eval` on a tiny model: from text to rotations, a certificate and a table.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::support::Machine;

fn fixture(name: &str) -> String {
    crate::support::fixture(name).to_str().expect("path").to_owned()
}

/// Enough words for two sequences of the tiny model.
fn text(machine: &Machine, name: &str, seed: usize) -> String {
    let words =
        ["river", "stone", "lamp", "winter", "copper", "garden", "letter", "harbour", "window", "orchard"];
    let text: Vec<&str> = (0..4000).map(|i| words[(i * i + seed * 7 + i / 3) % words.len()]).collect();
    let path = machine.path(name);
    fs::write(&path, text.join(" ")).expect("text");
    path.to_str().expect("path").to_owned()
}

/// Calibrates the tiny model; the windows leave it a history.
fn calibrate(machine: &Machine, model: &str, output: &str) -> Value {
    let data = text(machine, "calibration.txt", 1);
    let arguments = ["calibrate", model, "--data", &data, "--tokens", "512", "-o", output, "--json"];
    let windows = ["--sink-tokens", "8", "--recent-tokens", "32"];
    let outcome = machine.run(arguments.iter().chain(&windows)).success();
    serde_json::from_str(&outcome.stdout).expect("a certificate")
}

#[test]
fn rotations_are_made_verified_and_measured() {
    let machine = Machine::new();
    let (model, output) = (fixture("llama-tied"), machine.path("tiny.safetensors"));
    let output = output.to_str().expect("path");
    let certificate = calibrate(&machine, &model, output);
    assert!(certificate["heads"].as_array().expect("heads").len() > 1);
    assert!(["good", "caution", "bad"].contains(&certificate["verdict"].as_str().expect("verdict")));
    assert!(certificate["mean_output_error"].as_f64().expect("error") > 0.0, "there was a history");
    assert!(machine.path("tiny.certificate.json").exists());
    // Random weights copy nothing, and are judged by their heads alone.
    let probe = &certificate["probe"];
    assert!(
        probe["strings"].as_u64().expect("strings") >= 4 && probe["exact"].as_f64().expect("exact") < -2.0
    );
    assert!(!machine.path("tiny.safetensors.partial").exists(), "nothing is left of the way");
    machine.run(["zoo", "verify", output, "--model", &model]).success();

    let data = text(&machine, "held-out.txt", 5);
    let arguments =
        ["eval", "kl", &model, "--rotations", output, "--data", &data, "--tokens", "192", "--json"];
    let settings = ["--sequences", "1", "--sink-tokens", "8", "--recent-tokens", "16", "--skip", "32"];
    let codecs = ["--kv", "bf16,int4,int2,int2:paper,kivi2"];
    let outcome = machine.run(arguments.iter().chain(&settings).chain(&codecs)).success();
    let report = outcome.json();
    let rows = report["rows"].as_array().expect("rows");
    let kl: Vec<f64> = rows.iter().map(|row| row["kl"].as_f64().expect("kl")).collect();
    assert_eq!(rows.len(), 5);
    assert!(kl[0] < 1e-6 && kl[1] < kl[2], "bf16 is exact and int4 nearer than int2: {kl:?}");
    assert!(rows.iter().all(|row| row["positions"] == 159), "{rows:?}");

    // The same numbers as a page.
    let results = machine.path("kl.json");
    fs::write(&results, report.to_string()).expect("results");
    let page = machine.path("report.html");
    let (results, page) = (results.to_str().expect("path"), page.to_str().expect("path"));
    machine.run(["eval", "report", results, "-o", page]).success();
    assert!(fs::read_to_string(page).expect("page").contains("int2:paper"));
}

#[test]
fn rotations_are_certified_again() {
    let machine = Machine::new();
    let (model, output) = (fixture("llama-tied"), machine.path("tiny.safetensors"));
    let output = output.to_str().expect("path");
    let whole = calibrate(&machine, &model, output);
    let beside = machine.path("tiny.certificate.json");
    let mut old = whole.clone();
    old.as_object_mut().expect("an object").remove("probe").expect("a probe");
    fs::write(&beside, old.to_string()).expect("certificate");
    let rotations = fs::read(output).expect("rotations");
    let again = machine.run(["calibrate", &model, "--certify", output, "--json"]).success();
    let again: Value = serde_json::from_str(&again.stdout).expect("a certificate");
    assert_eq!((&whole["probe"], &whole["verdict"]), (&again["probe"], &again["verdict"]));
    assert_eq!(rotations, fs::read(output).expect("rotations"));
    let written: Value =
        serde_json::from_str(&fs::read_to_string(&beside).expect("certificate")).expect("JSON");
    assert_eq!(written, again);
    let both = machine.run(["calibrate", &model, "--certify", output, "--tokens", "512"]);
    both.failure(2, &["--certify"]);
    fs::remove_file(beside).expect("certificate");
    machine
        .run(["calibrate", &model, "--certify", output])
        .failure(1, &["no certificate", "oscar calibrate"]);
}

/// Heads of 16 channels have one choice of widths; a file of them stays as it is, and the user is told why.
#[test]
fn bits_of_layers_are_not_chosen_where_there_is_no_choice() {
    let machine = Machine::new();
    let (model, output) = (fixture("llama-tied"), machine.path("tiny.safetensors"));
    let output = output.to_str().expect("path");
    calibrate(&machine, &model, output);
    let rotations = fs::read(output).expect("rotations");
    let data = text(&machine, "other.txt", 2);
    let allocate = ["calibrate", &model, "--allocate", output, "--data", &data, "--tokens", "512", "--json"];
    let outcome = machine.run(allocate).success();
    assert!(outcome.stderr.contains("multiple of 64 channels"), "{}", outcome.stderr);
    assert_eq!(rotations, fs::read(output).expect("rotations"));
    for other in
        [["--certify", output].as_slice(), &["--layer-bits"], &["--no-probe"], &["-o", "x.safetensors"]]
    {
        let arguments = ["calibrate", &model, "--allocate", output].into_iter().chain(other.iter().copied());
        machine.run(arguments).failure(2, &["--allocate"]);
    }
}

#[test]
fn rotations_without_a_place_go_to_the_cache_and_are_found() {
    let machine = Machine::new();
    let model = fixture("qwen2-tied");
    let data = text(&machine, "calibration.txt", 2);
    let arguments = ["calibrate", &model, "--data", &data, "--tokens", "256", "--no-probe"];
    let windows = ["--sink-tokens", "8", "--recent-tokens", "32"];
    let made = machine.run(arguments.iter().chain(&windows)).success();
    assert!(made.stdout.contains("was not measured"), "{}", made.stdout);
    let listed = machine.run(["zoo", "list"]).success();
    assert!(listed.stdout.contains("qwen2-tied"), "{}", listed.stdout);
    let settings =
        ["--tokens", "128", "--sequences", "1", "--kv", "int2", "--skip", "64", "--recent-tokens", "16"];
    machine.run(["eval", "kl", &model, "--data", &data].iter().chain(&settings)).success();
}

#[test]
fn wrong_requests_name_what_is_wrong() {
    let machine = Machine::new();
    let model = fixture("llama-tied");
    let data = text(&machine, "text.txt", 3);
    let fails = |arguments: &[&str], wanted: &str| {
        let outcome = machine.run(arguments);
        assert_eq!(outcome.code, Some(1), "{arguments:?}: {outcome:?}");
        assert!(outcome.stderr.contains(wanted), "{arguments:?}: {}", outcome.stderr);
    };
    fails(&["eval", "kl", &model, "--prefix", "64", "--tokens", "64"], "--prefix 64");
    fails(&["eval", "kl", &model, "--kv", "int5", "--tokens", "64"], "known are");
    fails(&["eval", "kl", &model, "--kv", "int2", "--tokens", "64"], "oscar calibrate");
    fails(&["eval", "kl", &model, "--tokens", "100000000000"], "more than");
    fails(&["eval", "ablation", &model, "--studies", "colour"], "rotation, target");
    fails(&["eval", "niah", &model, "--kv", "bf16", "--lengths", "64k"], "more than");
    fails(&["calibrate", &model, "--data", &data, "-o", "/nonexistent/x.safetensors"], "no such folder");
    fails(&["calibrate", &model, "--data", &data, "--tokens", "256"], "--recent-tokens");
    fails(&["calibrate", &model, "--data", "/nonexistent.txt"], "/nonexistent.txt");
    let broken = machine.path("broken.jsonl");
    fs::write(&broken, "{\"text\": \"fine\"}\n{\"question\": 1}\n").expect("file");
    fails(&["calibrate", &model, "--data", broken.to_str().expect("path")], "line 2");
    // A rotation file of a model of another shape.
    let foreign = machine.path("foreign.safetensors");
    let foreign = foreign.to_str().expect("path");
    calibrate(&machine, &fixture("llama-head48"), foreign);
    fails(&["eval", "kl", &model, "--rotations", foreign, "--tokens", "64"], "another model");
    assert!(Path::new(foreign).exists());
}
