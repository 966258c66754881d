//! Pages that leave a card for the host's memory and come back. On a card only: the memory of other devices is the host's.

use crate::support::*;
use oscar_engine::{EngineError, EngineOptions};

#[test]
fn prompts_that_come_back_from_the_host_are_answered_as_before() {
    let model = model(true);
    for format in FORMATS {
        let alone = TestEngine::new(model.clone(), &fixed_options(&model, format, None)).unwrap();
        let mut small = EngineOptions { context: Some(1024), ..fixed_options(&model, format, Some(1)) };
        // Room for one request, which is not enough for the pages of all prompts.
        small.kv.memory = match TestEngine::new(model.clone(), &small).err() {
            Some(EngineError::MemoryTooSmall { needed, .. }) => Some(needed + needed / 10),
            other => panic!("{format}: one page is enough? {other:?}"),
        };
        small.kv.host_memory = 16 << 20;
        let small = TestEngine::new(model.clone(), &small).unwrap();
        let prompts: Vec<Vec<u32>> = (0..6).map(|seed| prompt(seed, 500 + 37 * seed)).collect();
        let mut found = 0;
        // The second time round each prompt is in the host's memory, because five others came after it.
        for _ in 0..3 {
            for prompt in &prompts {
                alone.reset();
                let expected = ask(&alone, prompt, &scored(greedy(20)));
                let got = ask(&small, prompt, &scored(greedy(20)));
                assert_eq!((&got.tokens, &got.logprobs), (&expected.tokens, &expected.logprobs), "{format}");
                found += got.cached_tokens;
            }
        }
        let host = small.fresh_stats().cache.host;
        assert!(host.restored > 0 && found > 0, "{format}: {host:?}, {found} tokens found");
        assert_idle(&small);
    }
}
