//! The mock engine keeps the promises of a real one.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use oscar_engine::{
    EngineError, Event, FinishReason, GenerateOptions, MOCK_END, MatchedStop, MockEngine, MockOptions,
    Request, SamplingOptions, Serve, Summary, TokenFilter, TokenMask,
};

fn mock() -> MockEngine {
    MockEngine::new(MockOptions::default())
}

fn slow(max_running: usize, max_queued: usize) -> MockEngine {
    let latency = Duration::from_secs(3600);
    MockEngine::new(MockOptions { latency, max_running, max_queued, ..MockOptions::default() })
}

fn one(engine: &dyn Serve, prompt: &[u32], options: GenerateOptions) -> Summary {
    engine.answer(Request::new(prompt, options)).unwrap().wait().unwrap().remove(0)
}

#[test]
fn the_same_request_has_the_same_answer() {
    let first = one(&mock(), &[1, 2, 3], GenerateOptions::default());
    let other = MockEngine::new(MockOptions { tokens_per_s: Some(5000.0), ..MockOptions::default() });
    let second = one(&other, &[1, 2, 3], GenerateOptions::default());
    assert_eq!((&first.tokens, &first.text), (&second.tokens, &second.text));
    assert_eq!((first.finish, *first.tokens.last().unwrap()), (FinishReason::End, MOCK_END));
    assert_ne!(first.tokens, one(&other, &[1, 2, 4], GenerateOptions::default()).tokens);
    let reseeded = MockEngine::new(MockOptions { seed: 1, ..MockOptions::default() });
    assert_ne!(first.tokens, one(&reseeded, &[1, 2, 3], GenerateOptions::default()).tokens);
}

#[test]
fn events_add_up_to_the_summary() {
    let engine = mock();
    let options = GenerateOptions { logprobs: Some(2), max_tokens: Some(20), ..GenerateOptions::default() };
    let (mut text, mut ids, mut summary) = (String::new(), Vec::new(), None);
    for event in engine.answer(Request::new(engine.encode("what is a river"), options)).unwrap() {
        match event {
            Event::Prefill { done, total, cached } => assert_eq!((done, total, cached), (4, 4, 0)),
            Event::Token { choice, token } => {
                assert_eq!((choice, token.top.len()), (0, 2));
                assert!(token.logprob.is_some());
                text.push_str(&token.text);
                ids.push(token.id);
            }
            Event::Finished { summary: end, .. } => summary = Some(end),
            Event::Scored { .. } => panic!("nobody asked for probabilities of the prompt"),
            Event::Failed { error, .. } => panic!("{error}"),
        }
    }
    let summary = summary.expect("an end");
    assert_eq!((summary.text, summary.tokens, summary.logprobs.len()), (text, ids.clone(), ids.len()));
}

#[test]
fn limits_and_stops_hold() {
    let engine = mock();
    let plain =
        one(&engine, &[5], GenerateOptions { ignore_end: true, max_tokens: Some(50), ..Default::default() });
    assert_eq!((plain.tokens.len(), plain.finish), (50, FinishReason::Length));
    let word = plain.text.split(' ').nth(5).unwrap().to_owned();
    let stopped = one(&engine, &[5], GenerateOptions { stop: vec![word.clone()], ..Default::default() });
    assert_eq!(stopped.matched, Some(MatchedStop::Text(word.clone())));
    assert_eq!(stopped.text, plain.text[..plain.text.find(&word).unwrap()]);
    let token = plain.tokens[4];
    let stopped = one(&engine, &[5], GenerateOptions { stop_tokens: vec![token], ..Default::default() });
    assert_eq!(stopped.matched, Some(MatchedStop::Token(token)));
    let longer = GenerateOptions { min_tokens: 80, max_tokens: Some(90), ..Default::default() };
    assert!(one(&engine, &[5], longer).tokens.len() >= 80);
    let none = one(&engine, &[5], GenerateOptions { max_tokens: Some(0), ..Default::default() });
    assert!(none.tokens.is_empty() && none.finish == FinishReason::Length);
    let small = MockEngine::new(MockOptions { context: 10, ..MockOptions::default() });
    let full = one(&small, &[5; 8], GenerateOptions { ignore_end: true, ..Default::default() });
    assert_eq!((full.tokens.len(), full.finish), (2, FinishReason::Context));
}

#[test]
fn choices_are_seeded_one_by_one() {
    let engine = mock();
    let sampling = SamplingOptions { temperature: 1.0, seed: Some(9), ..SamplingOptions::default() };
    let options = GenerateOptions { n: 3, sampling: sampling.clone(), ..GenerateOptions::default() };
    let choices = engine.answer(Request::new([1], options)).unwrap().wait().unwrap();
    assert_eq!(choices.len(), 3);
    assert_ne!(choices[0].tokens, choices[1].tokens);
    let alone = SamplingOptions { seed: Some(choices[2].seed), ..sampling };
    let alone = one(&engine, &[1], GenerateOptions { sampling: alone, ..GenerateOptions::default() });
    assert_eq!(alone.tokens, choices[2].tokens);
}

#[test]
fn requests_are_cancelled_while_they_wait_and_while_they_run() {
    let engine = slow(1, 8);
    let answers: Vec<_> =
        (0..3).map(|i| engine.answer(Request::new([i], GenerateOptions::default())).unwrap()).collect();
    for answer in answers.into_iter().rev() {
        answer.cancel();
        assert_eq!(answer.wait().unwrap()[0].finish, FinishReason::Cancelled);
    }
    assert_eq!(engine.stats().cancelled, 3);
    assert_eq!(engine.stats().queued, 0);
    drop(engine.answer(Request::new([1], GenerateOptions::default())).unwrap());
}

#[test]
fn a_full_queue_refuses() {
    let engine = slow(1, 2);
    let submit = || engine.answer(Request::new([1], GenerateOptions::default()));
    let first = submit().unwrap();
    while engine.stats().running == 0 {
        std::thread::yield_now();
    }
    let _waiting = (submit().unwrap(), submit().unwrap());
    assert!(matches!(submit(), Err(EngineError::QueueFull { queued: 2 })));
    drop(first);
    while engine.stats().queued == 2 {
        std::thread::yield_now();
    }
    assert!(submit().is_ok());
}

#[test]
fn bad_requests_are_refused_at_once() {
    let engine = mock();
    let refuse = |prompt: Vec<u32>, options| engine.answer(Request::new(prompt, options)).unwrap_err();
    assert!(matches!(refuse(vec![], GenerateOptions::default()), EngineError::EmptyPrompt));
    let many = GenerateOptions { n: 5000, ..GenerateOptions::default() };
    assert!(matches!(refuse(vec![1], many), EngineError::BadOption { name: "n", .. }));
}

#[test]
fn an_engine_that_stops_ends_its_answers() {
    let engine = slow(1, 8);
    let answer = engine.answer(Request::new([1], GenerateOptions::default())).unwrap();
    drop(engine);
    assert!(matches!(*answer.wait().unwrap_err(), EngineError::Stopped));
}

/// Allows one word only.
#[derive(Clone)]
struct Only(u32);

impl TokenFilter for Only {
    fn allowed(&mut self, mask: &mut TokenMask) -> Result<(), EngineError> {
        mask.keep_only([self.0]);
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<(), EngineError> {
        if token == self.0 { Ok(()) } else { Err(EngineError::Filter(format!("{token}"))) }
    }

    fn fork(&self) -> Box<dyn TokenFilter> {
        Box::new(self.clone())
    }
}

#[test]
fn filters_are_applied() {
    let engine = mock();
    let options = GenerateOptions { n: 2, max_tokens: Some(5), ..GenerateOptions::default() };
    let request = Request { filter: Some(Box::new(Only(3))), ..Request::new([1], options) };
    for summary in engine.answer(request).unwrap().wait().unwrap() {
        assert_eq!(summary.tokens, [3; 5]);
    }
}

#[test]
fn a_sink_that_panics_harms_nobody_else() {
    let engine = mock();
    let handle = engine
        .submit(Request::new([1], GenerateOptions::default()), Box::new(|_| panic!("a test of panics")))
        .unwrap();
    assert_eq!(one(&engine, &[1], GenerateOptions::default()).finish, FinishReason::End);
    drop(handle);
}

#[test]
fn many_clients_are_served() {
    // Shared by several owners, as a server would.
    let engine: Arc<dyn Serve> = Arc::new(mock());
    let (sender, ends) = mpsc::channel();
    let mut handles = Vec::new();
    for client in 0..300 {
        let sender = sender.clone();
        let sink = Box::new(move |event: Event| {
            if event.is_last() {
                sender.send(client).unwrap();
            }
        });
        handles.push(engine.submit(Request::new([client], GenerateOptions::default()), sink).unwrap());
    }
    let mut ended: Vec<u32> = ends.iter().take(300).collect();
    ended.sort_unstable();
    assert_eq!(ended, (0..300).collect::<Vec<_>>());
}
