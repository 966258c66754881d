//! What a request may ask for.

use crate::support::*;
use oscar_engine::{
    EngineError, EngineOptions, Event, FinishReason, GenerateOptions, MatchedStop, Request, SamplingOptions,
    Serve, Summary, TokenFilter, TokenMask,
};

fn engine(format: &str) -> TestEngine {
    let model = model(true);
    let options = EngineOptions { context: Some(1024), ..fixed_options(&model, format, Some(100)) };
    TestEngine::new(model, &options).unwrap()
}

fn with(options: GenerateOptions, sampling: SamplingOptions) -> GenerateOptions {
    GenerateOptions { sampling, ..options }
}

#[test]
fn choices_share_a_prompt_and_draw_for_themselves() {
    for format in FORMATS {
        let engine = engine(format);
        for length in [1, 64, 300] {
            let options = GenerateOptions { n: 4, ..seeded(150, 40) };
            let together = engine.answer(Request::new(prompt(2, length), options)).unwrap().wait().unwrap();
            assert_eq!(together.iter().map(|summary| summary.seed).collect::<Vec<_>>(), [40, 41, 42, 43]);
            for (choice, summary) in together.iter().enumerate() {
                engine.reset();
                let alone = ask(&engine, &prompt(2, length), &seeded(150, 40 + choice as u64));
                assert_eq!(summary.tokens, alone.tokens, "{format} {length} {choice}");
                assert!(choice == 0 || summary.tokens != together[0].tokens);
            }
        }
        assert_idle(&engine);
    }
}

#[test]
fn choices_that_do_not_fit_take_turns() {
    let model = model(true);
    let options = EngineOptions { context: Some(512), ..fixed_options(&model, "bf16", Some(12)) };
    let engine = TestEngine::new(model, &options).unwrap();
    let options = GenerateOptions { n: 6, ..seeded(200, 3) };
    let together = engine.answer(Request::new(prompt(2, 200), options)).unwrap().wait().unwrap();
    assert!(engine.fresh_stats().preemptions > 0);
    assert!(together.iter().any(|summary| summary.preemptions > 0));
    for summary in together {
        assert_eq!(summary.tokens, ask(&engine, &prompt(2, 200), &seeded(200, summary.seed)).tokens);
    }
    assert_idle(&engine);
}

#[test]
fn stop_tokens_and_least_lengths() {
    let engine = engine("int4");
    let whole = ask(&engine, &prompt(6, 70), &greedy(60)).tokens;
    let stop = whole[20];
    let first = whole.iter().position(|&token| token == stop).unwrap();
    let stopped = ask(&engine, &prompt(6, 70), &GenerateOptions { stop_tokens: vec![stop], ..greedy(60) });
    assert_eq!((stopped.finish, stopped.matched), (FinishReason::Stop, Some(MatchedStop::Token(stop))));
    assert_eq!(stopped.tokens, whole[..=first]);
    // A token that may not end the answer yet is not drawn at all.
    let longer = GenerateOptions { stop_tokens: vec![stop], min_tokens: 40, ..greedy(60) };
    let longer = ask(&engine, &prompt(6, 70), &longer).tokens;
    assert!(longer.len() >= 40 && !longer[..40].contains(&stop));
}

#[test]
fn penalties_and_biases_change_what_is_said() {
    let engine = engine("bf16");
    let plain = SamplingOptions::default;
    let say = |sampling: SamplingOptions| ask(&engine, &prompt(6, 70), &with(greedy(50), sampling)).tokens;
    let distinct = |tokens: &[u32]| {
        let mut tokens = tokens.to_vec();
        tokens.sort_unstable();
        tokens.dedup();
        tokens.len()
    };
    let free = say(plain());
    assert!(distinct(&free) < 50, "the tiny model repeats itself");
    // So strong that nothing is said twice.
    assert_eq!(distinct(&say(SamplingOptions { presence_penalty: 1e6, ..plain() })), 50);
    assert_eq!(distinct(&say(SamplingOptions { frequency_penalty: 1e6, ..plain() })), 50);
    let repetition = say(SamplingOptions { repetition_penalty: 1e6, ..plain() });
    assert!(distinct(&repetition) > distinct(&free));
    assert_eq!(say(SamplingOptions { logit_bias: vec![(9, 1e6)], ..plain() }), [9; 50]);
    assert!(!say(SamplingOptions { logit_bias: vec![(free[0], -1e6)], ..plain() }).contains(&free[0]));
}

#[test]
fn logprobs_are_those_of_the_model() {
    let engine = engine("int2");
    let options = GenerateOptions { logprobs: Some(3), ..greedy(20) };
    let mut tokens = Vec::new();
    for event in engine.answer(Request::new(prompt(6, 70), options)).unwrap() {
        if let Event::Token { token, .. } = event {
            tokens.push(token);
        }
    }
    assert_eq!(tokens.len(), 20);
    for token in &tokens {
        // Greedy: what was drawn is the most likely.
        assert_eq!((token.top.len(), token.top[0]), (3, (token.id, token.logprob.unwrap())));
        assert!(token.top[0].1 >= token.top[1].1 && token.top[1].1 >= token.top[2].1);
    }
    let all = GenerateOptions { logprobs: Some(100), max_tokens: Some(1), ..greedy(1) };
    let Some(Event::Token { token, .. }) = engine
        .answer(Request::new(prompt(6, 70), all))
        .unwrap()
        .find(|event| matches!(event, Event::Token { .. }))
    else {
        panic!("a token")
    };
    let sum: f32 = token.top.iter().map(|(_, logprob)| logprob.exp()).sum();
    assert!(sum > 0.9 && sum < 1.0001, "{sum}");
}

/// What an evaluation harness asks for: the probabilities of a given text.
#[test]
fn prompts_are_scored() {
    for format in ["bf16", "int2"] {
        let engine = engine(format);
        let answer = ask(&engine, &prompt(6, 300), &GenerateOptions { logprobs: Some(0), ..greedy(30) });
        let text = [prompt(6, 300), answer.tokens.clone()].concat();
        let options = GenerateOptions { prompt_logprobs: Some(2), ..greedy(0) };
        let scored = ask(&engine, &text, &options);
        assert_eq!((scored.tokens.len(), scored.cached_tokens), (0, 0));
        assert_eq!(scored.prompt_logprobs.len(), text.len());
        assert_eq!(scored.prompt_logprobs[0].logprob, None);
        for (scored, &token) in scored.prompt_logprobs.iter().zip(&text) {
            assert_eq!(scored.token, token);
        }
        // Deterministic, so a text scores exactly as it was generated.
        let own: Vec<f32> =
            scored.prompt_logprobs[300..].iter().map(|scored| scored.logprob.unwrap()).collect();
        assert_eq!(own, answer.logprobs, "{format}");
        assert_eq!(scored.prompt_logprobs[300].top.len(), 2);
        assert_idle(&engine);
    }
}

/// Allows tokens in turn.
#[derive(Clone)]
struct InTurn(Vec<u32>, usize);

impl TokenFilter for InTurn {
    fn allowed(&mut self, mask: &mut TokenMask) -> Result<(), EngineError> {
        assert!(mask.allows(0));
        match self.0.get(self.1) {
            Some(&token) => mask.keep_only([token]),
            None => return Err(EngineError::Filter("nothing is left to say".into())),
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<(), EngineError> {
        assert_eq!(token, self.0[self.1]);
        self.1 += 1;
        Ok(())
    }

    fn fork(&self) -> Box<dyn TokenFilter> {
        Box::new(self.clone())
    }
}

#[test]
fn filters_decide_what_is_said() {
    let engine = engine("int4");
    let said = vec![5, 9, 5, 20, 33];
    let request = |options| {
        let filter: Option<Box<dyn TokenFilter>> = Some(Box::new(InTurn(said.clone(), 0)));
        Request { filter, ..Request::new(prompt(1, 80), options) }
    };
    let options = GenerateOptions { n: 3, ..seeded(5, 1) };
    let summaries: Vec<Summary> = engine.answer(request(options)).unwrap().wait().unwrap();
    assert!(summaries.len() == 3 && summaries.iter().all(|summary| summary.tokens == said));
    let failed = engine.answer(request(greedy(6))).unwrap().wait().unwrap_err();
    assert!(failed.to_string().contains("nothing is left to say"), "{failed}");
    assert_eq!(ask(&engine, &prompt(1, 80), &greedy(6)).tokens.len(), 6);
    assert_idle(&engine);
}

/// A filter with a bug: it panics when asked, told or forked.
#[derive(Clone, Copy)]
struct Panics(usize);

impl TokenFilter for Panics {
    fn allowed(&mut self, _: &mut TokenMask) -> Result<(), EngineError> {
        assert_ne!(self.0, 0, "asked");
        Ok(())
    }

    fn accept(&mut self, _: u32) -> Result<(), EngineError> {
        assert_ne!(self.0, 1, "told");
        Ok(())
    }

    fn fork(&self) -> Box<dyn TokenFilter> {
        assert_ne!(self.0, 2, "forked");
        Box::new(*self)
    }
}

#[test]
fn a_filter_that_panics_fails_its_own_request() {
    let engine = engine("int4");
    for bug in 0..3 {
        let options = GenerateOptions { n: 2, ..seeded(5, 1) };
        let filter: Option<Box<dyn TokenFilter>> = Some(Box::new(Panics(bug)));
        let request = Request { filter, ..Request::new(prompt(1, 80), options) };
        let failed = engine.answer(request).unwrap().wait().unwrap_err();
        assert!(failed.to_string().contains("panicked"), "{failed}");
        assert_eq!(ask(&engine, &prompt(1, 80), &greedy(6)).tokens.len(), 6);
    }
    assert_idle(&engine);
}

#[test]
fn determinism_needs_a_backend_that_has_it() {
    let model = model(false);
    let options = EngineOptions { deterministic: true, ..engine_options(&model, "bf16", None) };
    assert!(matches!(TestEngine::new(model, &options), Err(EngineError::BadOption { .. })));
}

#[test]
fn budgets_add_up_and_say_so() {
    let model = model(false);
    let geometry = model.config().kv_geometry();
    let page = geometry.page_bytes(geometry.bf16());
    for format in FORMATS {
        let memory = 128 * page;
        let mut options = engine_options(&model, format, None);
        options.kv.memory = Some(memory);
        let engine = TestEngine::new(model.clone(), &options).unwrap();
        let budget = engine.budget();
        assert!(budget.total_bytes() <= memory && budget.total_bytes() + 2 * page > memory, "{budget}");
        assert_eq!(budget.context, if format == "bf16" { 4096 } else { budget.context });
        let table = budget.to_string();
        assert!(table.contains(format) && table.contains("bits per element"), "{table}");
        assert_eq!(format == "bf16", budget.bits_per_element == 16.0);
        // Too little for one sequence: said with the arithmetic, or less context where nobody asked for this one.
        options.kv.memory = Some(40 * page);
        options.context = Some(4096);
        let error = TestEngine::new(model.clone(), &options).err().unwrap().to_string();
        assert!(error.contains("4096 tokens") && error.contains("bf16 pages"), "{error}");
        options.context = None;
        let shorter = TestEngine::new(model.clone(), &options).unwrap();
        assert!(shorter.context() < 4096 && shorter.context() >= 64, "{}", shorter.budget());
        options.kv.memory = Some(100);
        assert!(TestEngine::new(model.clone(), &options).is_err());
    }
    let mut options = engine_options(&model, "bf16", None);
    options.max_running = 0;
    assert!(TestEngine::new(model.clone(), &options).is_err());
    let other = oscar_codec::KvGeometry { layers: 3, ..geometry };
    options = engine_options(&model, "bf16", None);
    options.kv.codec = codec("int4", other);
    assert!(matches!(TestEngine::new(model, &options), Err(EngineError::BadOption { .. })));
}
