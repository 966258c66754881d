//! A device that fails for good: every request ends with one error that names the cause, and no more are taken.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::Duration;

use oscar_engine::{
    Engine, EngineError, EngineOptions, GenerateOptions, MockEngine, MockOptions, Request, Serve,
};
use oscar_kernels::KernelError;
use oscar_testing::{FaultRates, HashBackend, tiny_model};

const TEXT: &str = "the device failed: the device is lost: injected fault: Device; the engine has stopped and has to be \
                    started again";

fn engine(max_running: usize) -> (Arc<HashBackend>, Engine<HashBackend>) {
    let backend = Arc::new(HashBackend::default());
    let model = tiny_model(8192, Arc::clone(&backend));
    let options = EngineOptions { max_running, ..EngineOptions::default() };
    (backend, Engine::new(model, &options).unwrap())
}

fn request(first: u32, max_tokens: usize) -> Request {
    let options = GenerateOptions {
        max_tokens: Some(max_tokens),
        ignore_end: true,
        n: 1,
        ..GenerateOptions::default()
    };
    Request::new(vec![first, 5, 6, 7], options)
}

/// Asserts that nobody is answered any more and that nothing is held.
fn assert_stopped(engine: &Engine<HashBackend>) {
    assert_eq!(engine.failure().unwrap().to_string(), TEXT);
    let refused = engine.answer(request(9, 1)).unwrap_err();
    assert!(matches!(refused, EngineError::DeviceFailed(_)) && refused.is_fatal(), "{refused}");
    assert_eq!(refused.to_string(), TEXT);
    let stats = engine.fresh_stats();
    assert_eq!((stats.queued, stats.prefilling, stats.running), (0, 0, 0), "{stats:?}");
    assert_eq!(stats.cache.tree_pages, 0, "nobody can read what the prefix tree keeps");
    assert_eq!(engine.kv_bytes(), 0);
    engine.reset();
}

#[test]
fn everything_in_progress_and_everything_that_waits_fails_with_the_same_cause() {
    for ahead in [false, true] {
        let (backend, engine) = engine(2);
        backend.compute_ahead(ahead);
        assert!(engine.failure().is_none());
        // Two run, one of several answers and three others wait.
        let mut answers: Vec<_> = (3..8).map(|first| engine.answer(request(first, 8000)).unwrap()).collect();
        let mut several = request(8, 8000);
        several.options.n = 2;
        answers.push(engine.answer(several).unwrap());
        // Both are on their way.
        for answer in &mut answers[..2] {
            assert_eq!(answer.by_ref().take(20).count(), 20);
        }
        backend.lose_after(Some(100));
        for answer in answers {
            let error = answer.wait().unwrap_err();
            assert!(matches!(*error, EngineError::DeviceFailed(_)), "{error:?}");
            assert_eq!(error.to_string(), TEXT);
        }
        assert_stopped(&engine);
        assert_eq!(engine.fresh_stats().failed, 7);
        assert_eq!(backend.fault_counts().after_loss, 1, "nothing was tried again");
    }
}

#[test]
fn an_engine_may_lose_its_device_at_any_operation() {
    for operations in 0..120 {
        let (backend, engine) = engine(4);
        backend.compute_ahead(operations % 2 == 0);
        let complete =
            engine.generate(&[3, 4, 5], &request(3, 2).options, |_| std::ops::ControlFlow::Continue(()));
        assert_eq!(complete.unwrap().tokens.len(), 2);
        backend.lose_after(Some(operations));
        let answers: Vec<_> = (0..3).map(|first| engine.answer(request(first, 6))).collect();
        for answer in answers {
            let outcome = answer.map_err(Arc::new).and_then(|answer| answer.wait());
            assert!(outcome.is_ok_and(|done| done[0].tokens.len() == 6) || engine.failure().is_some());
        }
        // Once it is lost there is nothing left to be done, and before that an idle device is whole.
        if engine.failure().is_some() {
            assert_stopped(&engine);
            let stats = engine.fresh_stats();
            assert_eq!(stats.requests, stats.finished + stats.cancelled + stats.failed, "{stats:?}");
            assert_eq!(backend.fault_counts().after_loss, 1, "after {operations} operations");
        }
    }
}

#[test]
fn other_errors_end_one_request_and_no_more() {
    let (backend, engine) = engine(2);
    backend.inject_faults(1, FaultRates { sample: 1, ..FaultRates::default() });
    let error = engine.answer(request(3, 4)).unwrap().wait().unwrap_err();
    assert!(!error.is_fatal(), "{error}");
    assert!(engine.failure().is_none());
    backend.inject_faults(1, FaultRates::default());
    assert_eq!(engine.answer(request(3, 4)).unwrap().wait().unwrap()[0].tokens.len(), 4);
    let full = KernelError::OutOfMemory { what: "hidden states", bytes: 5 };
    assert!(!EngineError::from(full).is_fatal());
}

#[test]
fn a_mock_loses_its_device_as_an_engine_does() {
    let mock = MockEngine::new(MockOptions {
        tokens_per_s: Some(1.0),
        latency: Duration::from_secs(3600),
        max_running: 1,
        ..MockOptions::default()
    });
    let answers = [3, 4].map(|first| mock.answer(request(first, 8)).unwrap());
    mock.fail_device(KernelError::DeviceLost("injected fault: Device".to_owned()));
    for answer in answers {
        assert_eq!(answer.wait().unwrap_err().to_string(), TEXT);
    }
    assert_eq!(mock.answer(request(5, 8)).unwrap_err().to_string(), TEXT);
    assert_eq!(mock.failure().unwrap().to_string(), TEXT);
    assert_eq!(mock.stats().queued, 0);
}
