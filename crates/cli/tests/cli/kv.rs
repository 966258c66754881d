//! Cache types on the command line.

use crate::support::{Machine, fixture};

fn generate(machine: &Machine, options: &[&str]) -> crate::support::Outcome {
    let model = fixture("qwen3");
    let arguments = ["generate", model.to_str().expect("path"), "--prompt", "hello world", "-n", "16"];
    machine.run([&arguments[..], options].concat())
}

#[test]
fn every_type_answers_and_says_what_it_is() {
    let machine = Machine::new();
    let exact = generate(&machine, &[]).success().stdout;
    for (kv, name) in [("auto", "bf16"), ("bf16", "bf16"), ("fp8", "fp8"), ("int4", "int4")] {
        let row = generate(&machine, &["--kv-cache-dtype", kv, "--json"]).success().json()["rows"][0].clone();
        assert_eq!(row["kv"], name, "{row}");
        assert!(row["bits_per_element"].as_f64().is_some_and(|bits| bits > 0.0), "{row}");
        // Everything is inside the windows, so no code is ever read. Centred and rotated rows round differently, and
        // the random model's answer hangs on a hair.
        if name == "bf16" {
            assert_eq!(format!("{}\n", row["text"].as_str().expect("text")), exact, "{kv}");
        }
    }
    let told = generate(&machine, &["--kv-cache-dtype", "auto"]).success();
    assert!(told.stderr.contains("oscar calibrate"), "{told:?}");
    let deterministic = ["--deterministic", "--kv-cache-dtype", "int4"];
    let [one, two] = [1, 2].map(|_| generate(&machine, &deterministic).success().stdout);
    assert_eq!(one, two);
}

#[test]
fn windows_of_no_tokens_read_everything_sealed() {
    let machine = Machine::new();
    let long = "hello world ".repeat(24);
    let model = fixture("qwen3");
    let model = model.to_str().expect("path");
    let windows = ["--sink-tokens", "0", "--recent-tokens", "0", "--kv-cache-dtype"];
    for kv in ["fp8", "int4"] {
        let arguments = ["generate", model, "--prompt", &long, "-n", "8", "--json"];
        let row = machine.run([&arguments[..], &windows, &[kv]].concat()).success().json()["rows"][0].clone();
        assert!(row["bits_per_element"].as_f64().is_some_and(|bits| bits < 16.0), "{row}");
    }
}

#[test]
fn what_makes_no_sense_is_refused() {
    let machine = Machine::new();
    for (option, value, word) in [
        ("--kv-cache-dtype", "int5", "auto, bf16, fp8, int4 or int2"),
        ("--sink-tokens", "100", "64 or 128"),
        ("--recent-tokens", "-1", "-1"),
        ("--k-clip", "1.5", "0 (no clip) to 1"),
        ("--kv-memory", "much", "does not begin with a number"),
        ("--prefix-tail", "none", "recompute"),
    ] {
        let outcome = generate(&machine, &[option, value]);
        assert_eq!(outcome.code, Some(2), "{outcome:?}");
        assert!(outcome.stderr.contains(word), "{}", outcome.stderr);
    }
    generate(&machine, &["--kv-memory", "1KiB"]).failure(1, &["--kv-memory"]);
    let layers = ["--kv-cache-dtype", "int4", "--kv-bf16-layers", "0,99"];
    generate(&machine, &layers).failure_after_notice(&["99"]);
    // This model's context is too short to calibrate on; another file must be given.
    generate(&machine, &["--kv-cache-dtype", "int2"]).failure_after_notice(&["--kv-cache-dtype"]);
}

#[test]
fn published_variables_are_taken_with_a_notice() {
    let machine = Machine::new();
    let model = fixture("qwen3");
    let run = |name: &str, value: &str| {
        let arguments = [
            "generate",
            model.to_str().expect("path"),
            "--prompt",
            "hello",
            "-n",
            "4",
            "--kv-cache-dtype",
            "int4",
        ];
        let output = machine.oscar(arguments).env(name, value).output().expect("oscar");
        crate::support::Outcome::of(output)
    };
    let taken = run("SGLANG_MIXED_KV_RECENT_TOKENS", "100").success();
    assert!(taken.stderr.contains("--recent-tokens") && taken.stderr.contains("rounded up"), "{taken:?}");
    assert!(run("SGLANG_LLOYD_MAX", "1").success().stderr.contains("no effect"));
    assert_eq!(run("SGLANG_OSCAR_K_CLIP_RATIO", "much").code, Some(1));
}
