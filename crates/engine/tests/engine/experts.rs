//! Mixtures of experts, partial rotation and norms over all heads, with every format of a cache.

use oscar_engine::{EngineOptions, Request, Serve};

use crate::support::*;

/// Which experts a row goes to, and with what bits, does not depend on who else is there or how prompts are cut.
#[test]
fn a_batch_equals_one_by_one() {
    for name in EXPERTS {
        let model = model_with(name, 1024, true, |_| ());
        for format in ["int2", "band"] {
            let options = EngineOptions { context: Some(512), ..fixed_options(&model, format, Some(60)) };
            let requests = || (0..5).map(|seed| prompt(seed, [1, 65, 130, 200, 290][seed]));
            let alone: Vec<Vec<u32>> = requests()
                .map(|prompt| {
                    let engine = TestEngine::new(model.clone(), &options).unwrap();
                    ask(&engine, &prompt, &greedy(24)).tokens
                })
                .collect();
            let chunked = EngineOptions { prefill_chunk: 77, ..options.clone() };
            for options in [options, chunked] {
                let engine = TestEngine::new(model.clone(), &options).unwrap();
                let answers: Vec<_> = requests()
                    .map(|prompt| engine.answer(Request::new(prompt, greedy(24))).unwrap())
                    .collect();
                for (answer, alone) in answers.into_iter().zip(&alone) {
                    assert_eq!(&answer.wait().unwrap()[0].tokens, alone, "{name} {format}");
                }
                assert_idle(&engine);
            }
        }
    }
}

/// A token whose row gives a router nothing to go by fails its own request.
#[test]
fn a_row_without_scores_fails_alone() {
    const BROKEN: u32 = 7;
    let sound: Vec<u32> =
        prompt(1, 100).into_iter().map(|token| if token == BROKEN { 8 } else { token }).collect();
    let whole = model_with(EXPERTS[0], 512, true, |_| ());
    let options = fixed_options(&whole, "int2", None);
    let expected = ask(&TestEngine::new(whole, &options).unwrap(), &sound, &greedy(1)).tokens;
    let broken = model_with(EXPERTS[0], 512, true, |bytes| break_token(bytes, BROKEN as usize));
    let engine = TestEngine::new(broken, &options).unwrap();
    let bad: Vec<u32> = sound.iter().copied().chain([BROKEN]).collect();
    let answers =
        [&sound, &bad, &sound].map(|prompt| engine.answer(Request::new(prompt.clone(), greedy(1))).unwrap());
    let [first, failed, last] = answers.map(|answer| answer.wait());
    assert_eq!((&first.unwrap()[0].tokens, &last.unwrap()[0].tokens), (&expected, &expected));
    let failed = failed.unwrap_err();
    assert!(failed.to_string().contains("finite"), "{failed}");
    assert_idle(&engine);
}
