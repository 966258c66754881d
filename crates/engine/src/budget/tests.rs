use std::sync::Arc;

use oscar_codec::{CodeLayout, HeadEncoder, HeadTransform, PageCodec, Rule};

use super::*;
use crate::settings::KvOptions;

const SHAPE: Shape = Shape {
    geometry: KvGeometry { layers: 28, kv_heads: 2, head_dim: 128 },
    hidden_size: 1536,
    max_context: 32 << 10,
};

fn plan(codec: bool, context: Option<usize>, memory: Option<usize>) -> Budget {
    let codec = codec.then(|| Arc::new(PageCodec::int4(SHAPE.geometry, None).expect("a codec")));
    let kv = KvOptions { codec, memory, ..KvOptions::default() };
    Budget::plan(SHAPE, &EngineOptions { context, kv, ..EngineOptions::default() }).expect("a budget")
}

#[test]
fn capacity_counts_windows_and_history_together() {
    let exact = plan(false, Some(1024), None);
    assert_eq!((exact.exact.pages, exact.sealed.pages), (17, 0));
    assert_eq!(exact.capacity_tokens(), 17 * 64);
    // One sequence of 16 pages has 6 in bf16 and 10 sealed; the pools have 17 and 20 of them.
    let mixed = plan(true, Some(1024), None);
    assert_eq!((mixed.exact.pages, mixed.sealed.pages), (17, 20));
    assert_eq!(mixed.capacity_tokens(), 1024 * 20 / 10);
    // Nothing is ever sealed: what counts is bf16, and no more of it than two such sequences have.
    let short = plan(true, Some(256), None);
    assert_eq!((short.exact.pages, short.capacity_tokens()), (8, 8 * 64));
    for context in [1, 64, 384, 385, 4096, 32 << 10] {
        for codec in [false, true] {
            let capacity = plan(codec, Some(context), None).capacity_tokens();
            assert!(capacity >= context, "{capacity} of {context}");
        }
    }
}

#[test]
fn a_context_that_is_shortened_says_what_it_was() {
    let whole = plan(true, None, None);
    assert_eq!((whole.context, whole.wanted_context), (32 << 10, 32 << 10));
    let small = plan(true, None, Some(64 << 20));
    assert!(small.context < small.wanted_context && small.wanted_context == 32 << 10, "{small}");
    assert!(small.total_bytes() <= 64 << 20 && small.context.is_multiple_of(64));
    // More would not have fit.
    let longer = EngineOptions {
        context: Some(small.context + 64),
        kv: KvOptions {
            codec: Some(Arc::new(PageCodec::int4(SHAPE.geometry, None).expect("a codec"))),
            memory: Some(64 << 20),
            ..KvOptions::default()
        },
        ..EngineOptions::default()
    };
    assert!(matches!(Budget::plan(SHAPE, &longer), Err(EngineError::MemoryTooSmall { .. })));
}

#[test]
fn a_limit_makes_room_for_as_many_requests_as_may_run() {
    let plan = |codec: bool, limit: Option<usize>, max_running: usize| {
        let codec = codec.then(|| Arc::new(PageCodec::int4(SHAPE.geometry, None).expect("a codec")));
        let kv = KvOptions { codec, memory_limit: limit, ..KvOptions::default() };
        let options = EngineOptions { context: Some(4096), kv, max_running, ..EngineOptions::default() };
        Budget::plan(SHAPE, &options).expect("a budget")
    };
    for codec in [false, true] {
        let one = plan(codec, None, 8);
        let all = plan(codec, Some(usize::MAX), 8);
        // Windows that are sealed early make some more room.
        assert!((8 * 4096..10 * 4096).contains(&all.capacity_tokens()), "{all}");
        assert_eq!(plan(codec, Some(all.total_bytes()), 8), all);
        assert_eq!(plan(codec, Some(usize::MAX), 1), one);
        // Less than all: whatever fits, and never less than one request.
        let some = plan(codec, Some(all.total_bytes() / 2), 8);
        assert!((2 * 4096..8 * 4096).contains(&some.capacity_tokens()), "{some}");
        assert!(some.total_bytes() <= all.total_bytes() / 2);
        assert_eq!(plan(codec, Some(1), 8), one);
    }
}

#[test]
fn histories_in_bf16_have_room_of_their_own() {
    let plan = |bf16_tier: bool, codec: bool, memory: Option<usize>, limit: Option<usize>| {
        let codec = codec.then(|| Arc::new(PageCodec::int4(SHAPE.geometry, None).expect("a codec")));
        let kv = KvOptions { codec, bf16_tier, memory, memory_limit: limit, ..KvOptions::default() };
        let options = EngineOptions { context: Some(8192), kv, max_running: 4, ..EngineOptions::default() };
        Budget::plan(SHAPE, &options)
    };
    let sealed = plan(false, true, None, None).expect("a budget");
    assert_eq!(sealed.bf16_context, None);
    let both = plan(true, true, None, None).expect("a budget");
    assert_eq!((both.exact.pages, both.bf16_context), (sealed.exact.pages + 128, Some(8192)));
    assert_eq!((both.sealed, both.context), (sealed.sealed, sealed.context));
    assert!(both.to_string().contains("8192 tokens in one sequence with kv_precision \"bf16\""), "{both}");
    assert!(!sealed.to_string().contains("kv_precision"), "{sealed}");
    // Room for all that may run.
    let all = plan(true, true, None, Some(usize::MAX)).expect("a budget");
    assert!(all.exact.pages >= 4 * 128, "{all}");
    // Half of the memory, which is not enough for a whole context in bf16.
    let memory = 192 << 20;
    let tight = plan(true, true, Some(memory), None).expect("a budget");
    let alone = plan(false, true, Some(memory), None).expect("a budget");
    assert!(tight.exact.pages > alone.exact.pages && tight.total_bytes() <= memory, "{tight}");
    assert_eq!((tight.context, tight.bf16_context), (8192, Some(64 * tight.exact.pages)));
    assert!(tight.bf16_context < Some(8192), "{tight}");
    // Where all is bf16 there is no second tier.
    assert!(matches!(plan(true, false, None, None), Err(EngineError::BadOption { .. })));
}

#[test]
fn the_high_tier_has_a_pool_of_its_own() {
    let plan = |kind: &str, memory: Option<usize>, limit: Option<usize>| {
        let codec = match kind {
            "int2" => PageCodec::new("int2", SHAPE.geometry, int2(), int2()),
            _ => PageCodec::int4(SHAPE.geometry, None),
        };
        let kv = KvOptions {
            codec: Some(Arc::new(codec.expect("a codec"))),
            high_tier: true,
            memory,
            memory_limit: limit,
            ..KvOptions::default()
        };
        let options = EngineOptions { context: Some(8192), kv, max_running: 4, ..EngineOptions::default() };
        Budget::plan(SHAPE, &options)
    };
    let one = plan("int2", None, None).expect("a budget");
    assert_eq!((one.high.pages, one.high_context), (one.sealed.pages, Some(8192)));
    // 4.25 bits beside 2.25.
    assert_eq!((one.high.page_bytes, one.sealed.page_bytes), (56 * 8704, 56 * 4608));
    assert!(one.to_string().contains("8192 tokens in one sequence with kv_precision \"high\""), "{one}");
    assert!(plan("int2", None, Some(usize::MAX)).expect("a budget").high.pages >= 4 * 122);
    // Less than a context of the high tier is no reason not to start.
    let tight = plan("int2", Some(128 << 20), None).expect("a budget");
    let most = tight.high_context.expect("a tier");
    assert!(tight.total_bytes() <= 128 << 20 && tight.context == 8192, "{tight}");
    assert!((512..8192).contains(&most) && most.is_multiple_of(64), "{tight}");
    let need = |tokens| PageNeed::of(tokens, tight.windows, true, true).sealed;
    assert!(need(most) <= tight.high.pages && need(most + 64) > tight.high.pages, "{tight}");
    let Err(EngineError::BadOption { name, expected, .. }) = plan("int4", None, None) else {
        panic!("a cache of 4 bits has no such tier")
    };
    assert_eq!(name, "kv_tiers");
    assert!(expected.contains("int2"), "{expected}");
}

fn int2() -> Vec<HeadEncoder> {
    let KvGeometry { layers, kv_heads, head_dim } = SHAPE.geometry;
    let layout = CodeLayout::new(2, head_dim, 1).expect("a layout");
    let transform = HeadTransform::identity(head_dim);
    vec![HeadEncoder::codes(transform, layout, Rule::Gaussian, false); layers * kv_heads]
}

#[test]
fn history_costs_what_its_format_does() {
    assert_eq!(plan(false, Some(1024), None).history_bits(), 16.0);
    assert_eq!(plan(true, Some(1024), None).history_bits(), 4.25);
    let budget = plan(true, Some(32 << 10), None);
    assert_eq!(budget.bits_at(32 << 10), (6.0 * 16.0 + 506.0 * 4.25) / 512.0);
    assert_eq!(budget.bits_at(64), 16.0);
}
