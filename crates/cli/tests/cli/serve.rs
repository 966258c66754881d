//! `oscar serve` as a process: ready, asked, told to stop; and what it refuses.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::{Machine, fixture};

/// A server that is ready.
struct Serving {
    child: Child,
    address: String,
    /// Kept open: a server whose standard error is closed cannot say why it ends.
    stderr: BufReader<std::process::ChildStderr>,
    banner: String,
}

impl Serving {
    fn start(machine: &Machine, arguments: &[&str]) -> Serving {
        Serving::of(machine, fixture("qwen3").to_str().expect("path"), arguments)
    }

    fn of(machine: &Machine, model: &str, arguments: &[&str]) -> Serving {
        Serving::by(machine, &["serve", model], arguments)
    }

    /// A server that another command starts.
    fn by(machine: &Machine, command: &[&str], arguments: &[&str]) -> Serving {
        let mut command = machine.oscar(command.iter().chain(&["--port", "0"]));
        let mut child = command.args(arguments).stderr(Stdio::piped()).spawn().expect("oscar");
        let mut stderr = BufReader::new(child.stderr.take().expect("stderr"));
        let mut banner = String::new();
        while !banner.contains("requests at a time") {
            assert!(stderr.read_line(&mut banner).expect("stderr") > 0, "{banner}");
        }
        let url = banner.split("http://").nth(1).expect("URL").lines().next().expect("URL");
        Serving { child, address: url.trim().to_owned(), stderr, banner }
    }

    fn ask(&self, method: &str, path: &str, body: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).expect("connection");
        let length = body.len();
        let head = "host: localhost\r\nconnection: close\r\ncontent-type: application/json";
        write!(stream, "{method} {path} HTTP/1.1\r\n{head}\r\ncontent-length: {length}\r\n\r\n{body}")
            .expect("write");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("read");
        answer
    }

    #[cfg(unix)]
    fn terminate(mut self) -> (Option<i32>, String) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &id]).status().expect("kill").success());
        let begun = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("wait") {
                break status;
            }
            assert!(begun.elapsed() < Duration::from_secs(30), "the server does not end");
            std::thread::sleep(Duration::from_millis(20));
        };
        let mut rest = String::new();
        self.stderr.read_to_string(&mut rest).expect("stderr");
        (status.code(), rest)
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
#[cfg(unix)]
fn a_server_starts_answers_and_stops() {
    let machine = Machine::new();
    let arguments = ["--served-model-name", "tiny", "--max-running-requests", "4", "--context-length", "128"];
    let serving = Serving::start(&machine, &arguments);
    assert!(serving.banner.contains("tiny is ready at http://127.0.0.1:"), "{}", serving.banner);
    assert!(
        serving.banner.contains("bits per element") && serving.banner.contains("4 requests"),
        "{}",
        serving.banner
    );
    assert!(serving.banner.contains("KV cache              pages         each"), "{}", serving.banner);
    assert!(serving.ask("GET", "/health", "").starts_with("HTTP/1.1 200"));
    let body = r#"{"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": true}"#;
    let answer = serving.ask("POST", "/v1/completions", body);
    assert!(answer.contains("\"completion_tokens\":3"), "{answer}");
    assert!(serving.ask("GET", "/v1/models", "").contains("\"max_model_len\":128"));
    let (code, rest) = serving.terminate();
    assert_eq!(code, Some(0), "{rest}");
    assert!(rest.contains("has stopped") && !rest.contains("panicked"), "{rest}");
}

#[test]
fn a_server_that_answers_to_any_name_says_so() {
    let machine = Machine::new();
    let warns = |arguments: &[&str]| {
        let serving = Serving::start(&machine, arguments);
        serving.banner.contains("WARN") && serving.banner.contains("--allowed-hosts * without a key")
    };
    assert!(warns(&["--allowed-hosts", "*"]));
    assert!(!warns(&["--allowed-hosts", "*", "--api-key", "secret"]));
    assert!(!warns(&["--allowed-hosts", "oscar"]));
}

/// The cache of a server has room for all requests that may run, and costs nothing before it is used.
#[test]
#[cfg(target_os = "linux")]
fn a_large_cache_is_reserved_and_not_resident() {
    let machine = Machine::new();
    let serving = Serving::start(&machine, &["--max-running-requests", "7", "--kv-cache-dtype", "bf16"]);
    assert!(serving.banner.contains(" or 7 requests of 256, 7 requests"), "{}", serving.banner);
    let serving = Serving::start(&machine, &["--kv-memory", "2GiB", "--kv-cache-dtype", "bf16"]);
    assert!(serving.banner.contains("2.00 GiB that become resident"), "{}", serving.banner);
    assert!(resident(&serving) < 512 << 20, "{}", resident(&serving));
    let small = Serving::start(&machine, &["--mem-fraction-static", "0.05", "--kv-cache-dtype", "bf16"]);
    assert!(small.banner.contains("requests at a time"), "{}", small.banner);
    let model = fixture("qwen3");
    let share = ["--gpu-memory-fraction", "0.0000001", "--port", "0"];
    let refused = machine.run(["serve", model.to_str().expect("path")].into_iter().chain(share));
    refused.failure(1, &["of the memory that is free", "--mem-fraction-static"]);
}

/// Bytes of a server that are no mapped files.
#[cfg(target_os = "linux")]
fn resident(serving: &Serving) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", serving.child.id())).expect("status");
    let resident = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect(&status);
    let kibibytes: u64 = resident.trim().trim_end_matches(" kB").parse().expect(resident);
    kibibytes << 10
}

/// What large bodies took goes back to the system, whatever was wrong with them.
#[test]
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn memory_comes_back_after_large_bodies() {
    const NOISE: u64 = 8 << 20;
    let machine = Machine::new();
    let serving = Serving::start(&machine, &["--kv-cache-dtype", "bf16"]);
    let list = |item: &str, count: usize| format!("[{}]", vec![item; count].join(","));
    let chat = |count: usize| {
        let messages = list(r#"{"role": "user", "content": "a"}"#, count);
        ("/v1/chat/completions", format!(r#"{{"messages": {messages}}}"#))
    };
    let words = "w ".repeat(7 << 20);
    let bodies = [
        chat(500_000),
        chat(16_000),
        ("/v1/chat/completions", format!(r#"{{"messages": [{{"role": "user", "content": "{words}"}}]}}"#)),
        ("/v1/completions", format!(r#"{{"prompt": "{words}"}}"#)),
        ("/v1/completions", format!(r#"{{"prompt": {}}}"#, list("1", 2_000_000))),
        ("/generate", format!(r#"{{"text": {}}}"#, list("\"a\"", 4_000_000))),
    ];
    assert!(said(&serving).len() > 20);
    let before = resident(&serving);
    let most = before + NOISE.max(before / 10);
    for round in 0..3 {
        std::thread::scope(|scope| {
            for (path, body) in bodies.iter().flat_map(|asked| [asked; 4]) {
                let serving = &serving;
                scope.spawn(move || assert!(serving.ask("POST", path, body).starts_with("HTTP/1.1 400")));
            }
        });
        let begun = Instant::now();
        while resident(&serving) > most {
            let (after, seconds) = (resident(&serving) >> 20, begun.elapsed().as_secs());
            assert!(seconds < 30, "{} MiB before, {after} after round {round}", before >> 20);
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// What is said of a prompt after 40 tokens, all of which but 16 are history.
fn said(serving: &Serving) -> String {
    let prompt: Vec<u32> = (5..45).collect();
    let body = serde_json::json!({"prompt": prompt, "max_tokens": 24, "ignore_eos": true, "temperature": 0});
    let answer = serving.ask("POST", "/v1/completions", &body.to_string());
    let text = answer.split("\"text\":").nth(1).expect(&answer);
    text.split("\"logprobs\"").next().expect("text").to_owned()
}

#[test]
fn codecs_of_the_lab_are_served() {
    let machine = Machine::new();
    let model = fixture("qwen3");
    let model = model.to_str().expect("path");
    let windows = ["--sink-tokens", "0", "--recent-tokens", "16"];
    let serve = |codec: &str| {
        let command = ["lab", "serve", model, "--kv", codec];
        Serving::by(&machine, &command, &windows)
    };
    let exact = serve("bf16");
    assert!(exact.banner.contains("1 requests at a time"), "{}", exact.banner);
    assert!(exact.banner.contains("bf16 of the lab over bf16 pages"), "{}", exact.banner);
    let plain = Serving::start(&machine, &["--deterministic", "--kv-cache-dtype", "bf16"]);
    assert_eq!(said(&exact), said(&plain));
    let coarse = serve("naive-int2");
    assert!(coarse.banner.contains("would take"), "{}", coarse.banner);
    assert_ne!(said(&coarse), said(&exact), "the codec is really read");
    machine.run(["lab", "serve", model, "--kv", "int5"]).failure(1, &["`int5` is not a codec"]);
}

#[test]
fn settings_come_from_a_file_and_flags_win() {
    let machine = Machine::new();
    let file = machine.path("server.toml");
    std::fs::write(&file, "served-model-name = \"from-file\"\nmax_running_requests = 3\napi-key = \"k\"\n")
        .expect("file");
    let serving =
        Serving::start(&machine, &["--config", file.to_str().expect("path"), "--max-running-requests", "5"]);
    assert!(
        serving.banner.contains("from-file") && serving.banner.contains("5 requests"),
        "{}",
        serving.banner
    );
    assert!(serving.ask("GET", "/v1/models", "").starts_with("HTTP/1.1 401"));
}

/// A folder of the fixtures whose `generation_config.json` says this.
fn model_that_says(machine: &Machine, generation: &str) -> String {
    let folder = machine.path("model");
    std::fs::create_dir_all(&folder).expect("folder");
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::copy(fixture("qwen3").join(file), folder.join(file)).expect(file);
    }
    std::fs::write(folder.join("generation_config.json"), generation).expect("file");
    folder.to_str().expect("path").to_owned()
}

#[test]
fn answers_are_drawn_as_the_model_says() {
    let machine = Machine::new();
    let model = model_that_says(&machine, r#"{"temperature": 0.0, "top_k": 20, "eos_token_id": 2}"#);
    let body = r#"{"prompt": [5, 6, 7], "max_tokens": 24, "ignore_eos": true}"#;
    let text = |answer: String| {
        let body = answer.split("\r\n\r\n").nth(1).expect("body").to_owned();
        serde_json::from_str::<serde_json::Value>(&body).expect("JSON")["choices"][0]["text"].clone()
    };
    let serving = Serving::of(&machine, &model, &[]);
    let told = serving.ask("GET", "/get_model_info", "");
    assert!(told.contains(r#""preferred_sampling_params":{"temperature":0.0,"top_k":20}"#), "{told}");
    let ask = || text(serving.ask("POST", "/v1/completions", body));
    assert_eq!(ask(), ask());
    let serving = Serving::of(&machine, &model, &["--sampling-defaults", "openai"]);
    assert!(serving.ask("GET", "/get_model_info", "").contains(r#""preferred_sampling_params":null"#));
    let ask = || text(serving.ask("POST", "/v1/completions", body));
    assert_ne!(ask(), ask());
    model_that_says(&machine, r#"{"top_p": 7}"#);
    let fix = ["generation_config.json", "top_p", "--sampling-defaults openai"];
    machine.run(["serve", &model, "--port", "0"]).failure(1, &fix);
}

#[test]
fn logs_are_json_when_asked_for() {
    let machine = Machine::new();
    let mut serving = Serving::start(&machine, &["--log-format", "json", "--log-level", "oscar_server=info"]);
    assert!(serving.ask("GET", "/version", "").starts_with("HTTP/1.1 200"));
    let mut line = String::new();
    serving.stderr.read_line(&mut line).expect("stderr");
    let value: serde_json::Value =
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"));
    assert_eq!((&value["path"], &value["status"]), (&"/version".into(), &200.into()));
}

#[test]
fn what_is_not_there_is_refused_in_one_line() {
    let machine = Machine::new();
    for (arguments, words) in [
        (vec!["--tp-size", "2"], "--tensor-parallel-size is not supported"),
        (vec!["--tensor-parallel-size", "4"], "--tensor-parallel-size is not supported"),
        (vec!["--dp", "2"], "--data-parallel-size is not supported"),
        (vec!["--lora-paths", "a", "b"], "--lora-paths is not supported"),
        (vec!["--speculative-algorithm", "EAGLE"], "--speculative-algorithm is not supported"),
        (vec!["--enable-multimodal"], "--enable-multimodal is not supported"),
    ] {
        let all = ["serve", "--model-path", "nowhere"].into_iter().chain(arguments);
        machine.run(all).failure(1, &[words]);
    }
    machine.run(["serve"]).failure(1, &["no model"]);
    machine.run(["serve", "nowhere", "--device", "tpu"]).failure(2, &["cpu, cuda, or cuda:N"]);
    machine.run(["serve", "nowhere", "--host", "no.such.host.invalid"]).failure(1, &["no.such.host.invalid"]);
    machine.run(["serve", "--config", "nowhere.toml"]).failure(1, &["nowhere.toml"]);
    let file = machine.path("bad.toml");
    std::fs::write(&file, "port = 1\nname = = 2\n").expect("file");
    machine.run(["serve", "--config", file.to_str().expect("path")]).failure(1, &["bad.toml line 2"]);
    let model = fixture("qwen3");
    let model = model.to_str().expect("path");
    machine
        .run(["serve", model, "--port", "0", "--tool-call-parser", "x"])
        .failure(1, &["--tool-call-parser", "qwen25"]);
}

#[test]
fn a_port_that_is_taken_is_said_before_anything_is_loaded() {
    let machine = Machine::new();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("port");
    let port = taken.local_addr().expect("address").port().to_string();
    machine.run(["serve", "no-such-model", "--port", &port]).failure(1, &["cannot listen", &port]);
}
