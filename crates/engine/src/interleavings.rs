//! The engine's thread and those who ask it, in random interleavings.
//!
//! Each test is run many times, with another choice of who goes on whenever threads meet. A failure prints the schedule,
//! and `shuttle::replay` runs it again. The device computes hashes, so a run takes less than a millisecond.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use oscar_model::LoadedModel;
use oscar_testing::{HashBackend, tiny_model};
use shuttle::scheduler::PctScheduler;
use shuttle::{Config, Runner, thread};

use crate::{
    CacheEvent, Engine, EngineError, EngineOptions, FinishReason, GenerateOptions, Request, Serve, Sink,
};

type TestEngine = Engine<HashBackend>;

/// The number of random schedules that each test runs.
const RUNS: usize = 4000;

/// Points at which a schedule changes who goes first. Bugs that need more changes than this are rare.
const CHANGES: usize = 3;

fn check(max_running: usize, max_queued: usize, test: impl Fn(Arc<TestEngine>) + Send + Sync + 'static) {
    let model: Arc<LoadedModel<HashBackend>> = tiny_model(256, Arc::new(HashBackend::default()));
    let options = EngineOptions { max_running, max_queued, context: Some(256), ..EngineOptions::default() };
    let mut config = Config::new();
    // An engine's turn needs more than the small stack that is the default.
    config.stack_size = 1 << 20;
    Runner::new(PctScheduler::new(CHANGES, RUNS), config).run(move || {
        let engine = Engine::new(Arc::clone(&model), &options).expect("an engine");
        test(Arc::new(engine));
    });
}

fn request(prompt: usize, max_tokens: usize) -> Request {
    let options =
        GenerateOptions { max_tokens: Some(max_tokens), ignore_end: true, ..GenerateOptions::default() };
    Request::new((0..prompt).map(|index| 3 + index as u32 % 100).collect::<Vec<_>>(), options)
}

/// A sink that counts the last events of answers.
fn counting(ended: &Arc<AtomicUsize>) -> Sink {
    let ended = Arc::clone(ended);
    Box::new(move |event| {
        ended.fetch_add(usize::from(event.is_last()), Ordering::SeqCst);
    })
}

fn assert_idle(engine: &TestEngine) {
    let stats = engine.fresh_stats();
    assert_eq!((stats.queued, stats.prefilling, stats.running), (0, 0, 0), "{stats:?}");
    assert_eq!(stats.requests, stats.finished + stats.cancelled + stats.failed, "{stats:?}");
}

#[test]
fn every_answer_ends_whoever_asks_or_cancels_meanwhile() {
    check(2, 8, |engine| {
        let ask = |cancels: Option<usize>| {
            let engine = Arc::clone(&engine);
            thread::spawn(move || {
                let mut answer = engine.answer(request(20, 3)).expect("there is room");
                if let Some(after) = cancels {
                    let _ = answer.by_ref().take(after).count();
                    answer.cancel();
                }
                let summaries = answer.wait().expect("an answer");
                let complete = summaries[0].finish == FinishReason::Length && summaries[0].tokens.len() == 3;
                assert!(complete || cancels.is_some() && summaries[0].finish == FinishReason::Cancelled);
            })
        };
        for client in [ask(None), ask(Some(0)), ask(Some(1))] {
            client.join().expect("a client");
        }
        assert_idle(&engine);
    });
}

#[test]
fn nobody_is_refused_for_somebody_who_was_refused() {
    check(2, 1, |engine| {
        let other = {
            let engine = Arc::clone(&engine);
            thread::spawn(move || {
                engine.answer(request(4, 1)).map(|answer| answer.wait().expect("an answer"))
            })
        };
        let first = engine.answer(request(4, 1)).map(|answer| answer.wait().expect("an answer"));
        let second = engine.answer(request(4, 1)).map(|answer| answer.wait().expect("an answer"));
        let other = other.join().expect("the other client");
        let refused = |outcome: Result<_, EngineError>| match outcome {
            Ok(_) => false,
            Err(EngineError::QueueFull { .. }) => true,
            Err(error) => panic!("{error}"),
        };
        let (first, second, other) = (refused(first), refused(second), refused(other));
        // One place, and nobody but the other one could have had it.
        assert!(!(other && (first || second)), "both were refused: {first} {second}");
        assert_idle(&engine);
    });
}

#[test]
fn an_engine_that_stops_ends_every_answer_once() {
    check(1, 8, |engine| {
        let ended = Arc::new(AtomicUsize::new(0));
        let handles: Vec<_> = (0..3)
            .map(|_| engine.submit(request(40, 50), counting(&ended)).expect("there is room"))
            .collect();
        // Whoever drops a handle cancels, before, while and after the engine stops.
        let dropping = thread::spawn(move || drop(handles));
        drop(Arc::into_inner(engine).expect("nobody else has it"));
        assert_eq!(ended.load(Ordering::SeqCst), 3);
        dropping.join().expect("handles outlive their engine");
    });
}

#[test]
fn a_sink_that_panics_harms_only_itself() {
    check(2, 8, |engine| {
        let bad = {
            let engine = Arc::clone(&engine);
            // Without a message, which would be printed in every run.
            let sink: Sink = Box::new(|_| std::panic::resume_unwind(Box::new("on purpose")));
            thread::spawn(move || engine.submit(request(8, 2), sink).map(drop))
        };
        let summaries = engine.answer(request(8, 2)).expect("there is room").wait().expect("an answer");
        assert_eq!(summaries[0].tokens.len(), 2);
        bad.join().expect("a client").expect("there is room");
    });
}

#[test]
fn statistics_flushes_and_subscribers_never_wait_for_ever() {
    check(2, 8, |engine| {
        let watching = {
            let engine = Arc::clone(&engine);
            thread::spawn(move || {
                let events = engine.cache_events();
                engine.reset();
                let _ = engine.fresh_stats();
                engine.flush();
                let told: Vec<CacheEvent> = events.try_iter().flatten().collect();
                assert!(matches!(told.first(), None | Some(CacheEvent::Cleared)), "{told:?}");
            })
        };
        let answer = engine.answer(request(70, 2)).expect("there is room");
        assert_eq!(answer.wait().expect("an answer")[0].tokens.len(), 2);
        watching.join().expect("a subscriber");
        engine.reset();
        assert_idle(&engine);
        assert_eq!(engine.kv_bytes(), 0);
    });
}
