//! The engine says what it does: nothing that goes wrong goes unmentioned.

#![allow(clippy::unwrap_used)]

use std::io::Write;
use std::sync::{Arc, Mutex};

use oscar_codec::{PageCodec, PageWindows};
use oscar_engine::{Engine, EngineOptions, GenerateOptions, KvOptions, Request, Serve};
use oscar_random::Random;
use oscar_testing::{FaultRates, HashBackend, tiny_model};

/// Writes to memory.
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn what_goes_wrong_is_logged_with_its_cause() {
    let log = Arc::new(Mutex::new(Vec::new()));
    let writer = Arc::clone(&log);
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_ansi(false)
        .with_writer(move || Log(Arc::clone(&writer)))
        .finish();
    tracing::subscriber::set_global_default(subscriber).unwrap();

    let backend = Arc::new(HashBackend::default());
    let model = tiny_model(1024, Arc::clone(&backend));
    let codec = PageCodec::int4(model.config().kv_geometry(), None).unwrap();
    let windows = PageWindows { sink: 1, recent: 1 };
    let kv = KvOptions { codec: Some(Arc::new(codec)), windows, ..KvOptions::default() };
    let options = EngineOptions { context: Some(512), max_running: 8, kv, ..EngineOptions::default() };
    let engine = Engine::new(model, &options).unwrap();

    // Each sentence with what belongs on its line.
    let mut missing = vec![
        ("a request is refused", vec!["error=the prompt has 513 tokens"]),
        ("a request is queued", vec!["tokens=", "choices="]),
        ("admitted", vec!["request{id=", "cached="]),
        ("preempted: an older request needs the pages", vec!["request{id=", "tokens="]),
        ("a decode batch failed", vec!["step{kind=\"decode\"}", "error=injected fault"]),
        ("a batch of prompts failed", vec!["step{kind=\"prefill_batch\"}", "error=injected fault"]),
        ("not given to the prefix tree", vec!["step{kind=\"seal\"}", "error="]),
        ("failed", vec!["request{id=", "error=injected fault"]),
        ("ended", vec!["request{id=", "reason=\"length\""]),
    ];
    let mut random = Random::new(1);
    for round in 0..200 {
        // One kind of fault at a time, and none in some rounds, so that requests live long enough to meet the others.
        let rates = match round % 3 {
            0 => FaultRates { forward: 12, ..FaultRates::default() },
            1 => FaultRates { seal: 3, ..FaultRates::default() },
            _ => FaultRates::default(),
        };
        backend.inject_faults(round, rates);
        assert!(engine.answer(Request::new([5; 513], GenerateOptions::default())).is_err());
        let answers: Vec<_> = (0..16)
            .map(|_| {
                let prompt: Vec<u32> =
                    (0..random.between(1, 80)).map(|_| random.between(3, 110) as u32).collect();
                let max_tokens = Some(random.between(1, 400));
                let options = GenerateOptions { max_tokens, ignore_end: true, ..GenerateOptions::default() };
                engine.answer(Request::new(prompt, options)).unwrap()
            })
            .collect();
        for answer in answers {
            let _ = answer.wait();
        }
        let text = String::from_utf8(std::mem::take(&mut *log.lock().unwrap())).unwrap();
        missing.retain(|(sentence, parts)| {
            let said = |line: &str| line.contains(sentence) && parts.iter().all(|part| line.contains(part));
            !text.lines().any(said)
        });
        if missing.is_empty() {
            break;
        }
    }
    assert!(missing.is_empty(), "never said: {missing:?}");

    backend.inject_faults(0, FaultRates::default());
    backend.lose_after(Some(100));
    let ask = |_| engine.answer(Request::new([5; 20], GenerateOptions::default()));
    let answers: Vec<_> = (0..8).map(ask).collect();
    assert!(answers.into_iter().all(|answer| answer.is_err() || answer.unwrap().wait().is_err()));
    let text = String::from_utf8(std::mem::take(&mut *log.lock().unwrap())).unwrap();
    let errors: Vec<&str> = text.lines().filter(|line| line.contains("ERROR")).collect();
    let [once] = errors[..] else { panic!("{errors:#?}") };
    assert!(once.contains("the device failed") && once.contains("injected fault: Device"), "{once}");
}
