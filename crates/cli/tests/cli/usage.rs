//! Help, bad arguments, and commands that need no model.

use crate::support::Machine;

const COMMANDS: [&str; 12] = [
    "chat",
    "generate",
    "serve",
    "models",
    "pull",
    "inspect",
    "calibrate",
    "zoo",
    "eval",
    "lab",
    "bench",
    "doctor",
];

/// Commands of commands, each with examples of its own.
const NESTED: [[&str; 2]; 14] = [
    ["bench", "model"],
    ["bench", "codec"],
    ["eval", "kl"],
    ["eval", "niah"],
    ["eval", "probe"],
    ["eval", "ablation"],
    ["lab", "serve"],
    ["eval", "report"],
    ["zoo", "list"],
    ["zoo", "pull"],
    ["zoo", "verify"],
    ["zoo", "import"],
    ["zoo", "export"],
    ["zoo", "diff"],
];

#[test]
fn help_teaches() {
    let machine = Machine::new();
    let help = machine.run(["--help"]).success();
    for command in COMMANDS {
        assert!(help.stdout.contains(&format!("\n  {command} ")), "{}", help.stdout);
    }
    assert!(help.stdout.contains("oscar chat smollm2"));
    for command in COMMANDS.iter().filter(|command| !["bench", "eval", "lab", "zoo"].contains(*command)) {
        let help = machine.run([command, "--help"]).success();
        assert!(help.stdout.contains("Examples:\n  "), "{}", help.stdout);
    }
    for [command, nested] in NESTED {
        let help = machine.run([command, nested, "--help"]).success().stdout;
        assert!(help.contains("Examples:"), "{command} {nested}: {help}");
    }
}

#[test]
fn the_version_is_printed() {
    let text = Machine::new().run(["--version"]).success().stdout;
    assert_eq!(text, format!("oscar {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn bad_arguments_end_with_two() {
    let machine = Machine::new();
    let generate = |more: &[&'static str]| [&["generate", "smollm2", "--prompt", "x"], more].concat();
    let cases = [
        (vec![], "Usage"),
        (vec!["fly"], "fly"),
        (vec!["generate"], "MODEL"),
        (vec!["models", "extra"], "extra"),
        (vec!["bench"], "model"),
        (generate(&["--temperature", "-1"]), "at least 0"),
        (generate(&["--temperature", "nan"]), "at least 0"),
        (generate(&["--top-p", "0"]), "above 0"),
        (generate(&["--top-p", "1.5"]), "at most 1"),
        (generate(&["--min-p", "-0.1"]), "at least 0"),
        (generate(&["--top-k", "-3"]), "-3"),
        (generate(&["--max-tokens", "0"]), "at least 1"),
        (generate(&["--stop", ""]), "not be empty"),
        (generate(&["--seed", "x"]), "x"),
        (generate(&["--threads", "0"]), "at least 1"),
        (generate(&["--context", "0"]), "at least 1"),
        (generate(&["--system", "s"]), "--chat"),
        (vec!["inspect", "smollm2", "--memory", "much"], "much"),
        (vec!["bench", "model", "smollm2", "--repeat", "0"], "at least 1"),
        (vec!["models", "--log-level", "a=b=c"], "log-level"),
    ];
    for (arguments, word) in cases {
        let outcome = machine.run(&arguments);
        assert_eq!(outcome.code, Some(2), "{arguments:?}: {outcome:?}");
        assert!(outcome.stderr.contains(word), "{arguments:?}: {}", outcome.stderr);
        assert_eq!(outcome.stdout, "");
    }
}

#[test]
fn the_catalogue_is_listed() {
    let machine = Machine::new();
    let table = machine.run(["models"]).success().stdout;
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines.len(), 5);
    assert!(lines[0].starts_with("NAME") && lines[0].contains("CACHED"), "{table}");
    assert!(lines[1].starts_with("smollm2") && lines[1].ends_with("no"), "{table}");

    let json = machine.run(["models", "--json"]).success().json();
    let rows = json["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 4);
    for row in rows {
        for name in ["name", "family", "licence", "sha256", "hub_id"] {
            assert!(row[name].as_str().is_some_and(|text| !text.is_empty()), "{name} of {row}");
        }
        for name in ["parameters", "context", "bytes"] {
            assert!(row[name].as_u64().is_some_and(|number| number > 1000), "{name} of {row}");
        }
        assert_eq!(row["cached"], false);
    }
    assert!(!machine.path("cache").exists(), "listing must not write");
}

#[test]
fn unknown_models_are_named_with_a_suggestion() {
    let machine = Machine::new();
    for arguments in [
        &["generate", "smolm2", "--prompt", "x"][..],
        &["chat", "smolm2"],
        &["inspect", "smolm2"],
        &["pull", "smolm2"],
        &["bench", "model", "smolm2"],
    ] {
        let outcome =
            machine.run(arguments).failure(1, &["unknown model \"smolm2\"", "did you mean smollm2?"]);
        assert_eq!(outcome.stdout, "");
    }
}

#[test]
fn what_is_not_a_model_is_refused() {
    let machine = Machine::new();
    std::fs::write(machine.path("notes.txt"), "hello").expect("file");
    let path = machine.path("notes.txt");
    machine.run(["inspect", path.to_str().expect("path")]).failure(1, &["notes.txt", "GGUF magic"]);
    std::fs::write(machine.path("cut.gguf"), "GGUF\x03\0\0\0").expect("file");
    let path = machine.path("cut.gguf");
    machine.run(["inspect", path.to_str().expect("path")]).failure(1, &["cut.gguf"]);
    machine.run(["inspect", "missing.gguf"]).failure(1, &["missing.gguf", "no such file"]);
}

#[test]
fn prompts_are_checked_before_a_model_is_fetched() {
    let machine = Machine::new();
    machine.run(["generate", "smollm2", "--prompt", ""]).failure(1, &["the prompt is empty"]);
    machine.run_with_input(&["generate", "smollm2"], b"").failure(1, &["the prompt is empty"]);
    machine.run_with_input(&["generate", "smollm2"], b"\n").failure(1, &["the prompt is empty"]);
    machine
        .run_with_input(&["generate", "smollm2"], b"caf\xe9")
        .failure(1, &["not UTF-8", "position 3", "fix: "]);
    assert!(!machine.path("cache").exists());
}

#[test]
fn a_wrong_kernel_setting_is_an_error_not_a_crash() {
    let machine = Machine::new();
    let output = machine.oscar(["chat", "smollm2"]).env("OSCAR_SIMD", "mmx").output().expect("oscar");
    crate::support::Outcome::of(output).failure(1, &["OSCAR_SIMD=mmx"]);
    let output = machine.oscar(["doctor", "--json"]).env("OSCAR_SIMD", "mmx").output().expect("oscar");
    let outcome = crate::support::Outcome::of(output).failure(1, &["checks failed"]);
    let json = outcome.json();
    let broken = json["rows"].as_array().expect("rows").iter().find(|row| row["status"] == "broken");
    assert_eq!(broken.expect("a broken check")["check"], "simd");
}

#[test]
fn the_doctor_checks_every_part() {
    let machine = Machine::new();
    let json = machine.run(["doctor", "--json"]).success().json();
    let rows = json["rows"].as_array().expect("rows");
    let find =
        |name: &str| rows.iter().find(|row| row["check"] == name).unwrap_or_else(|| panic!("{name}: {json}"));
    for name in ["cpu", "simd", "threads", "memory", "gpu", "cache", "hub cache"] {
        assert_eq!(find(name)["status"], "ok", "{name}");
    }
    // The private search path has neither, and no model was fetched.
    for name in ["pip", "hub client", "models"] {
        assert_eq!(find(name)["status"], "warning", "{name}");
        assert!(find(name)["fix"].as_str().is_some_and(|fix| !fix.is_empty()), "{name}");
    }
    assert!(machine.run(["doctor"]).success().stdout.contains("oscar pull smollm2"));
}

#[test]
fn the_doctor_names_a_cache_that_cannot_be_written() {
    let machine = Machine::new();
    std::fs::write(machine.path("cache"), "a file where the directory should be").expect("file");
    let outcome = machine.run(["doctor"]).failure(1, &["1 of"]);
    assert!(outcome.stdout.contains("cannot be written") && outcome.stdout.contains("OSCAR_CACHE"));
}

#[cfg(unix)]
#[test]
fn a_reader_that_leaves_early_is_no_error() {
    let machine = Machine::new();
    for arguments in [&["models"][..], &["models", "--json"], &["doctor"], &["--help"]] {
        let (reader, writer) = std::io::pipe().expect("pipe");
        drop(reader);
        let output = machine.oscar(arguments).stdout(writer).output().expect("oscar");
        let outcome = crate::support::Outcome::of(output).success();
        assert_eq!(outcome.stderr, "", "{arguments:?}");
    }
}
