//! Commands that run a model, on tiny random checkpoints: the text is nonsense, its rules are not.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use crate::support::{Machine, fixture};

const TEMPLATE: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n\
                        {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

fn text(path: &Path) -> &str {
    path.to_str().expect("path")
}

/// A model folder of the fixtures with a chat template added.
fn chat_model(machine: &Machine) -> PathBuf {
    let folder = machine.path("chat-model");
    fs::create_dir(&folder).expect("folder");
    for file in ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"] {
        fs::copy(fixture("llama-tied").join(file), folder.join(file)).expect(file);
    }
    fs::write(folder.join("chat_template.jinja"), TEMPLATE).expect("template");
    folder
}

#[test]
fn greedy_text_is_the_same_from_a_prompt_and_from_standard_input() {
    let machine = Machine::new();
    for model in [fixture("llama-tied"), fixture("qwen3"), fixture("gguf-qwen2-q8_0/model.gguf")] {
        let arguments = ["generate", text(&model), "--max-tokens", "24"];
        let first = machine.run([&arguments[..], &["--prompt", "hello world"]].concat()).success();
        assert!(first.stdout.len() > 1 && first.stdout.ends_with('\n'), "{first:?}");
        let said = "KV cache: bf16, 16.00 bits per element, room for ";
        assert!(first.stderr.starts_with(said) && first.stderr.lines().count() == 1, "{first:?}");
        let again = machine.run_with_input(&arguments, b"hello world\n").success();
        assert_eq!(first.stdout, again.stdout, "{}", model.display());
        let place = ["--prompt", "hello world", "--weights", "large-pages"];
        let elsewhere = machine.run([&arguments[..], &place].concat()).success();
        assert_eq!(first.stdout, elsewhere.stdout, "{}", model.display());
    }
}

#[test]
fn seeded_text_is_reproducible() {
    let machine = Machine::new();
    let model = fixture("llama-tied");
    let run = |seed: &str| {
        let arguments = ["generate", text(&model), "--prompt", "hello", "-n", "32", "--temperature", "2"];
        machine
            .run([&arguments[..], &["--top-k", "50", "--min-p", "0.001", "--seed", seed]].concat())
            .success()
            .stdout
    };
    assert_eq!(run("7"), run("7"));
    assert_ne!(run("7"), run("8"));
}

#[test]
fn json_holds_the_text_and_how_it_came_about() {
    let machine = Machine::new();
    let model = fixture("qwen3");
    let arguments = ["generate", text(&model), "--prompt", "hello", "-n", "8"];
    let plain = machine.run(arguments).success().stdout;
    let json = machine.run([&arguments[..], &["--json", "--temperature", "0"]].concat()).success().json();
    let row = &json["rows"][0];
    assert_eq!(row["text"].as_str().expect("text"), plain.trim_end_matches('\n'));
    assert_eq!((row["finish_reason"].as_str(), row["gen_tokens"].as_u64()), (Some("length"), Some(8)));
    assert!(row["prompt_tokens"].as_u64().is_some_and(|tokens| tokens > 0), "{row}");
    for name in ["ttft_ms", "prefill_tokens_per_s", "decode_tokens_per_s"] {
        assert!(row[name].as_f64().is_some_and(|value| value > 0.0), "{name} of {row}");
    }
    assert!(row["seed"].is_null(), "a greedy answer has no seed: {row}");
}

#[test]
fn a_stop_text_ends_the_answer_and_is_not_shown() {
    let machine = Machine::new();
    let model = fixture("llama-tied");
    let arguments = ["generate", text(&model), "--prompt", "hello world", "-n", "24", "--json"];
    let whole = machine.run(arguments).success().json()["rows"][0]["text"].as_str().expect("text").to_owned();
    let stop: String = whole.chars().skip(2).take(2).collect();
    let stopped =
        machine.run([&arguments[..], &["--stop", "never", "--stop", &stop]].concat()).success().json();
    let row = &stopped["rows"][0];
    assert_eq!(row["text"].as_str(), whole.find(&stop).map(|end| &whole[..end]), "{row}");
    assert_eq!(row["finish_reason"], "stop");
}

#[test]
fn prompts_beyond_the_context_are_refused() {
    let machine = Machine::new();
    let model = fixture("llama-tied");
    let long = "word ".repeat(400);
    let outcome = machine.run(["generate", text(&model), "--prompt", &long]);
    outcome.failure(1, &["the prompt has", "the context holds 256", "fix: "]);
    let outcome = machine.run(["generate", text(&model), "--prompt", "hello hello hello", "--context", "4"]);
    outcome.failure(1, &["the context holds 4"]);
    let outcome = machine.run(["generate", text(&model), "--prompt", "x", "--context", "257"]);
    outcome.failure(1, &["257 tokens", "256"]);
}

#[test]
fn damaged_models_are_named() {
    let machine = Machine::new();
    let folder = chat_model(&machine);
    let weights = folder.join("model.safetensors");
    let bytes = fs::read(&weights).expect("weights");
    fs::write(&weights, &bytes[..bytes.len() - 100]).expect("truncate");
    machine.run(["generate", text(&folder), "--prompt", "x"]).failure(1, &["model.safetensors"]);
    fs::write(&weights, &bytes).expect("restore");
    fs::write(folder.join("config.json"), "{\"model_type\": \"mystery\"}").expect("config");
    machine.run(["generate", text(&folder), "--prompt", "x"]).failure(1, &["config.json", "mystery"]);
    fs::remove_file(folder.join("config.json")).expect("remove");
    machine.run(["generate", text(&folder), "--prompt", "x"]).failure(1, &["config.json"]);
}

#[test]
fn models_are_inspected_without_loading() {
    let machine = Machine::new();
    let model = fixture("gguf-qwen2-q8_0/model.gguf");
    let json = machine.run(["inspect", text(&model), "--memory", "1MiB", "--json"]).success().json();
    let rows = json["rows"].as_array().expect("rows");
    let costs: Vec<(&str, u64, u64)> = rows
        .iter()
        .map(|row| {
            let number = |name: &str| row[name].as_u64().expect(name);
            (row["kv"].as_str().expect("kv"), number("bytes_per_token"), number("tokens"))
        })
        .collect();
    // 2 layers of 2 KV heads, 16 channels; all but bf16 are padded to 32, with 8 bytes of scales, fp8 with 4.
    let (bf16, fp8) = (2 * 2 * 2 * 16 * 2, 2 * 2 * (2 * 32 + 4));
    let int4 = 2 * 2 * (2 * 32 / 2 + 8);
    // Keys in bands are not padded: one band here, with a byte for its scale. Half of the channels, but 16 at least, makes
    // int1.5 the same.
    let (high, int2) = (2 * 2 * ((16 / 2 + 1) + (32 / 2 + 4)), 2 * 2 * ((16 / 4 + 1) + (32 / 4 + 4)));
    let expected =
        [("bf16", bf16), ("fp8", fp8), ("int4", int4), ("high", high), ("int2", int2), ("int1.5", int2)];
    assert_eq!(costs, expected.map(|(name, bytes)| (name, bytes, (1 << 20) / (64 * bytes) * 64)));
    assert_eq!(rows[0]["family"], "qwen2");
    assert_eq!(rows[0]["dtypes"]["Q8_0"]["tensors"], 14);
    let table = machine.run(["inspect", text(&fixture("qwen3"))]).success().stdout;
    for word in ["qwen3", "RoPE", "BYTES PER TOKEN", "int2", "safetensors", "BF16"] {
        assert!(table.contains(word), "{word}: {table}");
    }
}

#[test]
fn the_benchmark_reports_speed_and_memory() {
    let machine = Machine::new();
    let model = fixture("llama-tied");
    let sizes =
        ["--prompt-tokens", "40", "--gen-tokens", "8", "--context", "80", "--repeat", "2", "--threads", "1"];
    let arguments = [&["bench", "model", text(&model)][..], &sizes].concat();
    let json = machine.run([&arguments[..], &["--json"]].concat()).success().json();
    let rows = json["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 2);
    for row in rows {
        for name in ["prefill_tokens_per_s", "decode_tokens_per_s", "ttft_ms"] {
            assert!(row[name].as_f64().is_some_and(|value| value > 0.0), "{name} of {row}");
        }
        assert_eq!((row["threads"].as_u64(), row["context"].as_u64()), (Some(1), Some(80)), "{row}");
    }
    assert!(machine.run(&arguments).success().stdout.contains("decode_tokens_per_s"));
    let outcome = machine.run(["bench", "model", text(&model), "--prompt-tokens", "300"]);
    outcome.failure(1, &["tokens", "256"]);
}

#[test]
fn a_reader_that_leaves_early_ends_the_text() {
    let machine = Machine::new();
    let model = fixture("llama-tied");
    let mut child = machine
        .oscar(["generate", text(&model), "--prompt", "hello world", "-n", "200"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("oscar");
    let mut byte = [0];
    child.stdout.take().expect("stdout").read_exact(&mut byte).expect("first byte");
    crate::support::Outcome::of(child.wait_with_output().expect("oscar")).success();
}

#[test]
fn a_chat_answers_each_line_of_a_pipe() {
    let machine = Machine::new();
    let model = chat_model(&machine);
    let arguments = ["chat", text(&model), "-n", "12", "--temperature", "0"];
    let outcome = machine.run_with_input(&arguments, b"hello\n\nhello again\n").success();
    assert_eq!(outcome.stderr.lines().filter(|line| line.contains("tokens/s")).count(), 2, "{outcome:?}");
    assert!(outcome.stdout.lines().count() >= 2, "{outcome:?}");

    // What was said before counts, and is forgotten by /reset: then the same question has the same answer.
    let reset = machine.run_with_input(&arguments, b"hello\n/reset\nhello\n").success();
    let once = machine.run_with_input(&arguments, b"hello").success();
    assert_eq!(reset.stdout, once.stdout.repeat(2));

    let ended = machine.run_with_input(&arguments, b"/help\n/exit\nhello\n").success();
    assert_eq!(ended.stdout, "");
    assert!(ended.stderr.contains("/reset"), "{ended:?}");
    let unknown = machine.run_with_input(&arguments, b"/restart\n").success();
    assert!(unknown.stderr.contains("Unknown command /restart"), "{unknown:?}");
    machine.run_with_input(&arguments, b"caf\xe9\n").failure(1, &["not UTF-8", "position 3"]);
}

/// What a random model says is hardly ever what its encoder would write, and is found again all the same, unless it
/// cannot be said again: half a character, or a control token that is not shown.
#[test]
fn a_chat_finds_what_was_said_in_the_cache() {
    let machine = Machine::new();
    let model = chat_model(&machine);
    let number = |line: &str, before: &str| -> usize {
        let (_, after) = line.split_once(before).unwrap_or_else(|| panic!("{before:?} in {line:?}"));
        let digits = after.find(|c: char| !c.is_ascii_digit()).unwrap_or(after.len());
        after[..digits].parse().expect("a number")
    };
    let (mut found, mut turns) = (0, 0);
    for seed in ["1", "2", "3", "4"] {
        let arguments = ["chat", text(&model), "-n", "24", "--temperature", "3", "--seed", seed];
        let outcome = machine.run_with_input(&arguments, b"a\nb\nc\nd\n").success();
        let status: Vec<&str> = outcome.stderr.lines().filter(|line| line.starts_with('[')).collect();
        assert_eq!(status.len(), 4, "{}", outcome.stderr);
        for (before, after) in status.iter().zip(&status[1..]) {
            // The last token of an answer was drawn and not computed.
            let seen = number(before, "context ") - 1;
            let cached = number(after, "/256, ");
            assert!(cached <= number(after, " of "), "{after}");
            found += usize::from(cached >= seen);
            turns += 1;
        }
    }
    assert!(found * 3 >= turns * 2, "{found} of {turns} turns found all that was said before them");
}

#[test]
fn chat_and_generate_ask_the_same_question() {
    let machine = Machine::new();
    let model = chat_model(&machine);
    let asked = machine
        .run(["generate", text(&model), "--chat", "--system", "be", "--prompt", "hello", "-n", "12"])
        .success();
    let chatted = machine.run_with_input(
        &["chat", text(&model), "--system", "be", "-n", "12", "--temperature", "0"],
        b"hello\n",
    );
    assert_eq!(asked.stdout, chatted.success().stdout);
    let plain = machine.run(["generate", text(&model), "--prompt", "hello", "-n", "12"]).success();
    assert_ne!(asked.stdout, plain.stdout);
}

#[test]
fn a_chat_draws_as_the_model_says() {
    let machine = Machine::new();
    let model = chat_model(&machine);
    let chat = |generation: &str, more: &[&str]| {
        fs::write(model.join("generation_config.json"), generation).expect("file");
        let arguments = [&["chat", text(&model), "-n", "24"], more].concat();
        machine.run_with_input(&arguments, b"hello\n")
    };
    let greedy = chat(r#"{"temperature": 0.0, "eos_token_id": 2}"#, &[]).success().stdout;
    assert_eq!(chat(r#"{"temperature": 0.0, "eos_token_id": 2}"#, &[]).success().stdout, greedy);
    assert_eq!(chat(r#"{"temperature": 5.0}"#, &["--temperature", "0"]).success().stdout, greedy);
    assert_ne!(chat(r#"{"temperature": 5.0}"#, &["--seed", "7"]).success().stdout, greedy);
    chat(r#"{"min_p": "some"}"#, &[]).failure(1, &["generation_config.json", "min_p", "correct the file"]);
}

#[test]
fn a_model_without_a_template_cannot_chat() {
    let machine = Machine::new();
    let model = fixture("llama-tied");
    machine.run(["chat", text(&model)]).failure(1, &["no chat template", "oscar generate"]);
    machine.run(["generate", text(&model), "--chat", "--prompt", "x"]).failure(1, &["no chat template"]);
}
