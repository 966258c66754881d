//! Cache types on the command line.

use std::fs;

use crate::support::{Machine, Outcome, fixture, patient_model};

fn generate(machine: &Machine, options: &[&str]) -> Outcome {
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
        ("--kv-cache-dtype", "int5", "auto, bf16, fp8, int4, int2 or int1.5"),
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
fn options_without_effect_are_named() {
    let machine = Machine::new();
    let notice = |options: &[&str]| {
        let outcome = generate(&machine, options).success();
        let lines = outcome.stderr.lines().filter(|line| line.contains("no effect"));
        lines.map(|line| line.split_once("WARN").expect("a warning").1.to_owned()).collect::<Vec<_>>()
    };
    let clips = ["--k-clip", "0.9", "--v-clip", "0.9"];
    let lines = notice(&[&clips[..], &["--kv-cache-dtype", "int4"]].concat());
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].contains("--k-clip, --v-clip have no effect on a KV cache of type int4"), "{lines:?}");
    // What auto came to is what counts.
    let lines = notice(&["--kv-encoder", "paper", "--recent-tokens", "128"]);
    assert!(lines[0].contains("--kv-encoder, --recent-tokens have no effect on a KV cache of type bf16"));
    assert_eq!(notice(&["--kv-cache-dtype", "int4", "--kv-bf16-layers", "0", "--sink-tokens", "0"]), [""; 0]);
    let both = generate(&machine, &["--deterministic", "--prefill", "exact"]);
    both.failure(1, &["--prefill exact contradicts --deterministic", "fix: "]);
}

#[test]
fn a_cache_says_at_the_start_what_it_is() {
    let machine = Machine::new();
    let line = |options: &[&str]| {
        let outcome = generate(&machine, options).success();
        let line = outcome.stderr.lines().find(|line| line.starts_with("KV cache: ")).map(str::to_owned);
        (line.expect("a line"), outcome.stderr)
    };
    let (fp8, log) = line(&["--kv-cache-dtype", "fp8", "--sink-tokens", "0", "--recent-tokens", "0"]);
    // Three of four pages sealed: 32 channels of 8 bits with a scale of 16, after 16 of bf16.
    assert_eq!(
        fp8,
        "KV cache: fp8, mean keys estimated, 10.38 bits per element, room for 426 tokens, 256 in one sequence"
    );
    assert!(!log.contains("prefill scratch"), "the table is for those who ask");
    let (_, log) = line(&["--kv-cache-dtype", "fp8", "--log-level", "info"]);
    assert!(log.contains("prefill scratch") && log.contains("bits per element"), "{log}");
    assert!(!log.contains("shortened"), "{log}");
    let (_, log) = line(&["--kv-memory", "100KiB"]);
    assert!(log.contains("context shortened from 256 to ") && log.contains("--kv-memory"), "{log}");
    // Whoever chooses a context that fits has no need to be told.
    let (_, log) = line(&["--kv-memory", "100KiB", "--context", "64"]);
    assert!(!log.contains("shortened"), "{log}");
}

/// Rotations of the tiny model in the cache, with a certificate of our choice.
#[test]
fn a_certificate_that_failed_is_heard() {
    let machine = Machine::new();
    let model = fixture("qwen2-tied");
    let model = model.to_str().expect("path");
    let data = machine.path("text.txt");
    fs::write(&data, "the river and the stone and a lamp in winter ".repeat(120)).expect("text");
    let calibrate =
        ["calibrate", model, "--tokens", "256", "--sink-tokens", "8", "--recent-tokens", "32", "--data"];
    machine.run(calibrate.iter().copied().chain([data.to_str().expect("path")])).success();
    let folder = machine.path("cache/rotations");
    let files = fs::read_dir(&folder).expect("rotations").map(|file| file.expect("file").path());
    let certificate = files
        .into_iter()
        .find(|path| path.to_str().is_some_and(|path| path.ends_with(".certificate.json")))
        .expect("a certificate");
    let verdict = |verdict: &str| {
        let text = fs::read_to_string(&certificate).expect("certificate");
        let mut value: serde_json::Value = serde_json::from_str(&text).expect("certificate");
        value["verdict"] = verdict.into();
        value["reason"] = "because of this test; use int4 or fp8".into();
        fs::write(&certificate, value.to_string()).expect("certificate");
    };
    let run = |kv: &str| {
        let arguments = ["generate", model, "--prompt", "hello", "-n", "4", "--json", "--kv-cache-dtype", kv];
        let outcome = machine.run(arguments).success();
        (outcome.json()["rows"][0]["kv"].as_str().expect("kv").to_owned(), outcome.stderr)
    };
    verdict("good");
    let (kv, log) = run("auto");
    assert!(kv == "int2" && !log.contains("advises"), "{kv}: {log}");
    assert!(log.contains("KV cache: int2, encoder band, rotations qwen2-tied"), "{log}");
    verdict("bad");
    let (kv, log) = run("auto");
    assert!(
        kv == "int4" && log.contains("advises against int2, so the cache is int4: because"),
        "{kv}: {log}"
    );
    let (kv, log) = run("int2");
    assert!(kv == "int2" && log.contains("advises against int2: because"), "{kv}: {log}");
    assert!(!run("fp8").1.contains("advises"));
    // One that cannot be read says nothing about the rotations.
    fs::write(&certificate, "{").expect("certificate");
    let (kv, log) = run("auto");
    assert!(kv == "int2" && log.contains("passed over"), "{kv}: {log}");
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
        Outcome::of(output)
    };
    let taken = run("SGLANG_MIXED_KV_RECENT_TOKENS", "100").success();
    assert!(taken.stderr.contains("--recent-tokens") && taken.stderr.contains("rounded up"), "{taken:?}");
    for name in ["SGLANG_LLOYD_MAX", "HADAMARD_ORDER", "DUMP_KVCACHE_DIR"] {
        assert!(run(name, "1").success().stderr.contains(&format!("{name} has no effect")), "{name}");
    }
    assert_eq!(run("SGLANG_OSCAR_K_CLIP_RATIO", "much").code, Some(1));
}

#[test]
fn a_model_without_rotations_is_calibrated_once() {
    let machine = Machine::new();
    let model = patient_model(&machine);
    let run = || {
        let model = model.to_str().expect("path");
        machine.run(["generate", model, "--prompt", "hello", "-n", "8", "--kv-cache-dtype", "int2"]).success()
    };
    let first = run();
    assert!(first.stderr.contains("no rotations yet; calibrating once (`oscar calibrate "), "{first:?}");
    assert!(first.stderr.contains("KV cache: int2, encoder band, rotations patient"), "{first:?}");
    let made = fs::read_dir(machine.path("cache/rotations")).expect("rotations").count();
    assert_eq!(made, 2, "rotations and their certificate");
    let second = run();
    assert!(!second.stderr.contains("calibrating"), "{second:?}");
    assert_eq!(first.stdout, second.stdout);
    // Where that is impossible there are two ways to go on.
    let short = generate(&machine, &["--kv-cache-dtype", "int2"]);
    short.failure_after_notice(&["--rotations FILE", "oscar calibrate", "--kv-cache-dtype"]);
}

/// Rotation files of the published kind, by options and by variables, and those of another model.
#[test]
fn published_pairs_are_read_and_checked() {
    let machine = Machine::new();
    let patient = patient_model(&machine);
    let file = machine.path("patient.safetensors");
    let (model, file) = (patient.to_str().expect("path"), file.to_str().expect("path"));
    let folder = machine.path("pair");
    machine.run(["calibrate", model, "--tokens", "1024", "-o", file]).success();
    let export = ["zoo", "export", file, "--format", "2", "--output-dir", folder.to_str().expect("path")];
    machine.run(export).success();
    let [keys, values] = ["k_rotation_qqt_r_h_pbr.pt", "v_rotation_cs_r_h_pbr.pt"]
        .map(|name| folder.join(name).to_str().expect("path").to_owned());
    let command = |model: &str, options: &[&str]| {
        let arguments = ["generate", model, "--prompt", "hello", "-n", "8", "--kv-cache-dtype", "int2"];
        machine.oscar([&arguments[..], options].concat())
    };
    let run = |model: &str, options: &[&str]| Outcome::of(command(model, options).output().expect("oscar"));
    let pair = ["--k-rotation-path", &keys, "--v-rotation-path", &values];
    let by_options = run(model, &pair).success();
    let named = format!("KV cache: int2, encoder scalar, rotations {keys}");
    assert!(
        by_options.stderr.contains(&named) && !by_options.stderr.contains("calibrating"),
        "{by_options:?}"
    );
    let mut by_variables = command(model, &[]);
    by_variables.env("SGLANG_OSCAR_K_ROTATION_PATH", &keys).env("SGLANG_OSCAR_V_ROTATION_PATH", &values);
    let by_variables = Outcome::of(by_variables.output().expect("oscar")).success();
    assert!(
        by_variables.stderr.contains("is taken as --v-rotation-path") && by_variables.stderr.contains(&named)
    );
    assert_eq!(by_options.stdout, by_variables.stdout);
    let swapped = ["--k-rotation-path", &values, "--v-rotation-path", &keys];
    run(model, &swapped).failure(1, &["swapped", "fix: give the key file first"]);
    assert_eq!(run(model, &pair[..2]).code, Some(2));
    // Of another model.
    let other = fixture("qwen3");
    let other = other.to_str().expect("path");
    for options in [&pair[..], &["--rotations", file]] {
        run(other, options).failure(1, &["was made for another model", "16 channels", "oscar calibrate"]);
    }
}
