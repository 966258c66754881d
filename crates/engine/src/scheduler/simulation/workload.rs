//! What an episode is made of: the engine's options and the requests.

use std::sync::Arc;

use oscar_codec::{
    CodeLayout, HeadEncoder, HeadTransform, KvGeometry, PAGE_TOKENS, PageCodec, PageWindows, Rule,
};
use oscar_kv::{PageNeed, TailPolicy, Tier};
use oscar_model::LoadedModel;
use oscar_random::Random;
use oscar_testing::HashBackend;

use crate::pooling::Pooling;
use crate::request::{GenerateOptions, SamplingOptions};
use crate::settings::{EngineOptions, KvOptions, PrefillMode};

/// Most tokens of a sequence in any episode.
pub(super) const LONGEST: usize = 768;

/// One request of an episode.
#[derive(Clone, Debug)]
pub(super) struct Planned {
    pub(super) prompt: Vec<u32>,
    pub(super) options: GenerateOptions,
    /// Turns after the arrival before this one.
    pub(super) pause: usize,
}

/// The options of an engine whose answers are functions of the request alone, and whether prompts may begin alike.
pub(super) fn engine_options(
    random: &mut Random,
    model: &LoadedModel<HashBackend>,
    context: usize,
) -> (EngineOptions, bool) {
    let geometry = model.config().kv_geometry();
    let sealed = random.below(4) > 0;
    let uniform = random.one_in(2);
    let prefix_tree = !random.one_in(4);
    let tiers = sealed && model.config().sliding.is_none();
    let (bf16_tier, high_tier) = (tiers && random.one_in(2), tiers && random.one_in(2));
    let kv = KvOptions {
        codec: sealed.then(|| Arc::new(int2(geometry))),
        bf16_tier,
        high_tier,
        windows: PageWindows { sink: random.below(3), recent: random.below(4) },
        memory: None,
        memory_limit: None,
        prefix_tree,
        host_memory: 0,
        tail: *random.choose(&[TailPolicy::Recompute, TailPolicy::Sealed, TailPolicy::Exact]),
        prefill: if uniform { PrefillMode::Uniform } else { PrefillMode::Exact },
    };
    let options = EngineOptions {
        context: Some(context),
        prefill_chunk: *random.choose(&[7, 32, 48, 64, 100, 256, 700]),
        max_running: random.between(1, 16),
        max_queued: 1000,
        kv,
        deterministic: false,
        paced: false,
    };
    // A prompt that is computed exactly reads what it finds in the tree sealed, and what it does not find in bf16.
    let may_share = uniform || !sealed || !prefix_tree;
    (options, may_share)
}

/// The requests of an episode. Some begin like another one, or go on where another one ends, if they may share.
pub(super) fn requests(random: &mut Random, context: usize, may_share: bool, tiers: &[Tier]) -> Vec<Planned> {
    let mut requests: Vec<Planned> = Vec::new();
    let common: Vec<u32> = (0..LONGEST).map(|_| token(random)).collect();
    // Short prompts that arrive together are computed together.
    let burst = random.one_in(3);
    for index in 0..random.between(4, 40) {
        let mut prompt = match random.below(4) {
            0 if may_share => common[..random.between(1, 400).min(context / 2)].to_vec(),
            1 if may_share && index > 0 => random.choose(&requests).prompt.clone(),
            // Nobody else begins like this.
            _ => vec![3 + index as u32 / 100, 3 + index as u32 % 100],
        };
        let longest = match burst {
            true => 30,
            false if random.one_in(2) => context,
            false => 90,
        };
        prompt.extend((0..random.between(1, longest)).map(|_| token(random)));
        prompt.truncate(random.between(context / 2, context));
        let pause = if burst { 0 } else { pause(random) };
        requests.push(Planned { prompt, options: options(random, tiers), pause });
    }
    requests
}

/// The next turn of a conversation, if the context holds it.
pub(super) fn next_turn(
    random: &mut Random,
    context: usize,
    said: &Planned,
    answer: &[u32],
    tiers: &[Tier],
) -> Option<Planned> {
    let mut prompt = said.prompt.clone();
    prompt.extend(answer);
    prompt.extend((0..random.between(1, 80)).map(|_| token(random)));
    let options = GenerateOptions { cache_salt: said.options.cache_salt.clone(), ..options(random, tiers) };
    (prompt.len() <= context).then(|| Planned { prompt, options, pause: pause(random) })
}

fn pause(random: &mut Random) -> usize {
    if random.one_in(3) { random.below(60) } else { 0 }
}

fn options(random: &mut Random, tiers: &[Tier]) -> GenerateOptions {
    let tier = if random.one_in(2) { *random.choose(tiers) } else { Tier::Sealed };
    let max_tokens = match random.below(12) {
        0 => 0,
        1..6 => random.between(1, 20),
        _ => random.between(20, 160),
    };
    let sampling = SamplingOptions {
        temperature: if random.one_in(2) { 1.0 } else { 0.0 },
        seed: Some(random.below(1000) as u64),
        ..SamplingOptions::default()
    };
    GenerateOptions {
        max_tokens: Some(max_tokens),
        ignore_end: !random.one_in(8),
        sampling,
        n: if random.one_in(5) { random.between(1, 3) } else { 1 },
        prompt_logprobs: random.one_in(10).then_some(1),
        score_from: if random.one_in(2) { random.below(120) } else { 0 },
        embedding: random.one_in(8).then(|| if random.one_in(2) { Pooling::Mean } else { Pooling::Last }),
        logprobs: random.one_in(10).then_some(2),
        cache_salt: random.one_in(6).then(|| "tenant".to_owned()),
        tier,
        demote: tier == Tier::Exact && random.one_in(2),
        ..GenerateOptions::default()
    }
}

/// Two bits for every channel, which have a high tier beside them.
fn int2(geometry: KvGeometry) -> PageCodec {
    let KvGeometry { layers, kv_heads, head_dim } = geometry;
    let layout = CodeLayout::new(2, head_dim, 1).expect("a layout");
    let encoder = HeadEncoder::codes(HeadTransform::identity(head_dim), layout, Rule::MIN_MAX, false);
    let encoders = vec![encoder; layers * kv_heads];
    PageCodec::new("int2", geometry, encoders.clone(), encoders).expect("a codec")
}

fn token(random: &mut Random) -> u32 {
    random.between(3, 110) as u32
}

/// Bytes for a share (in percent) of what all requests that run at a time hold at their ends, and at least what one
/// sequence that fills the context needs.
pub(super) fn memory(
    model: &LoadedModel<HashBackend>,
    options: &EngineOptions,
    requests: &[Planned],
    percent: usize,
) -> usize {
    let options = &options.for_layers(model.config()).expect("settings for the model");
    let geometry = model.config().kv_geometry();
    let exact = geometry.page_bytes(geometry.bf16());
    let sealed = options.kv.codec.as_ref().map_or(0, |codec| codec.page_bytes());
    let pages = |tokens: usize| match sealed {
        0 => (tokens.div_ceil(PAGE_TOKENS), 0),
        _ => options.kv.windows.pages(tokens),
    };
    let bytes = |tokens: usize| pages(tokens).0 * exact + pages(tokens).1 * sealed;
    // One page and the dummy.
    let high = options.kv.high_codec().expect("a codec of 2 bits").map_or(0, |codec| 2 * codec.page_bytes());
    let length = |request: &Planned| request.prompt.len() + request.options.max_tokens.unwrap_or(0);
    let mut needs: Vec<usize> =
        requests.iter().flat_map(|request| (0..request.options.n).map(|_| bytes(length(request)))).collect();
    needs.sort_unstable_by_key(|&need| std::cmp::Reverse(need));
    let need: usize = needs.iter().take(options.max_running).sum();
    let context = options.context.unwrap_or(LONGEST);
    let least = PageNeed::of(context, options.kv.windows, sealed > 0, options.kv.prefix_tree);
    let fixed = match sealed {
        0 => exact,
        _ => {
            let hidden = context * (model.config().hidden_size + geometry.head_dim) * size_of::<f32>();
            exact + sealed + (least.scratch + 1) * exact / geometry.layers + hidden
        }
    };
    fixed + high + (need * percent / 100).max(least.exact * exact + least.sealed.max(1) * sealed)
}
