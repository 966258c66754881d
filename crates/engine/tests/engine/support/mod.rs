//! Tiny random models on the device under test, codecs for them, and requests.

#![allow(dead_code)]

use std::sync::Arc;

use oscar_codec::{
    BandLayout, BandRows, CodeLayout, HeadEncoder, HeadTransform, KeyTurning, KeyWidths, KvGeometry,
    PageCodec, PageMeans, RopeLayout, RowEncoder, Rule, SquareMatrix, hadamard,
};
use oscar_engine::{
    Engine, EngineOptions, GenerateOptions, KvOptions, Request, SamplingOptions, Serve, Summary,
};
use oscar_model::LoadedModel;

pub(crate) type TestModel = Arc<LoadedModel<TestBackend>>;
pub(crate) type TestEngine = Engine<TestBackend>;

use device::{CENTRES_PAGES, TestBackend, backend};
pub(crate) use device::{EXPERTS, FIXTURE, OTHER_FIXTURE, SLIDING};

/// The device that these tests run on.
#[cfg(not(feature = "cuda-tests"))]
mod device {
    use std::sync::Arc;

    pub(super) type TestBackend = oscar_kernels::cpu::CpuBackend;

    pub(super) fn backend(deterministic: bool) -> Arc<TestBackend> {
        // Tests run side by side, and workers that spin would take turns on few cores.
        let backend = TestBackend::new(1).unwrap();
        Arc::new(if deterministic { backend.deterministic() } else { backend })
    }

    /// The model of most tests.
    pub(crate) const FIXTURE: &str = "qwen3";
    /// A model for what does not depend on the cache.
    pub(crate) const OTHER_FIXTURE: &str = "llama-tied";
    /// Whether keys of sealed pages can be centred page by page.
    pub(super) const CENTRES_PAGES: bool = true;
    /// Mixtures of experts.
    pub(crate) const EXPERTS: [&str; 4] = ["qwen3-moe", "glm4-moe", "minimax-m2", "qwen3-moe-fp8-blocks"];
    /// Models with sliding windows; the second has learned sinks too.
    pub(crate) const SLIDING: [&str; 2] = ["gemma3", "gpt-oss"];
}

/// The same on a card, where banded keys need heads of 64 channels at least.
#[cfg(feature = "cuda-tests")]
mod device {
    use std::sync::Arc;

    use oscar_kernels::cuda::Device;

    pub(super) type TestBackend = oscar_kernels::cuda::CudaBackend;

    pub(super) fn backend(deterministic: bool) -> Arc<TestBackend> {
        let kernels = std::env::temp_dir().join("oscar-cuda-kernels");
        let device = Device::open(0, Some(kernels)).expect("a card for the suite that was built for one");
        Arc::new(TestBackend::new(device, deterministic).unwrap())
    }

    pub(crate) const FIXTURE: &str = "qwen3-wide";
    pub(crate) const OTHER_FIXTURE: &str = "qwen3";
    pub(super) const CENTRES_PAGES: bool = false;
    pub(crate) const EXPERTS: [&str; 4] =
        ["qwen3-moe-wide", "glm4-moe-wide", "minimax-m2-wide", "qwen3-moe-wide-fp8"];
    pub(crate) const SLIDING: [&str; 2] = ["gemma3-wide", "gpt-oss"];
}

/// All formats of a cache.
pub(crate) const FORMATS: [&str; 5] = ["bf16", "fp8", "int4", "int2", "band"];

/// A fixture with room for `context` tokens; `damage` may change its weights file.
pub(crate) fn model_with(
    name: &str,
    context: usize,
    deterministic: bool,
    damage: impl FnOnce(&mut Vec<u8>),
) -> TestModel {
    oscar_testing::tiny_model_with(name, context, backend(deterministic), damage)
}

/// Makes the embedding of a token NaN, in a file whose embedding is bf16.
pub(crate) fn break_token(bytes: &mut [u8], token: usize) {
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let text = String::from_utf8(bytes[8..8 + header].to_vec()).unwrap();
    let entry = &text[text.find("\"model.embed_tokens.weight\"").unwrap()..];
    let numbers = |name: &str| -> Vec<usize> {
        let list = &entry[entry.find(name).unwrap() + name.len()..];
        list[..list.find(']').unwrap()].split(',').map(|number| number.trim().parse().unwrap()).collect()
    };
    let (row, start) = (2 * numbers("\"shape\":[")[1], numbers("\"data_offsets\":[")[0]);
    let start = 8 + header + start + token * row;
    bytes[start..start + row].chunks_exact_mut(2).for_each(|x| x.copy_from_slice(&[0xc0, 0x7f]));
}

pub(crate) fn model(deterministic: bool) -> TestModel {
    model_with(FIXTURE, 4096, deterministic, |_| ())
}

/// A model with one layer that sees everything; the others see `window` positions.
pub(crate) fn sliding_model(name: &str, window: usize) -> TestModel {
    oscar_testing::tiny_sliding_model(name, 4096, window, backend(true))
}

/// The codec of a format; `None` for bf16.
pub(crate) fn codec(format: &str, geometry: KvGeometry) -> Option<Arc<PageCodec>> {
    let codec = match format {
        "bf16" => return None,
        "fp8" => PageCodec::fp8(geometry, None).unwrap(),
        "int4" => PageCodec::int4(geometry, None).unwrap(),
        "int2" => {
            let transform = HeadTransform::new(None, &hadamard::matrix(geometry.head_dim)).unwrap();
            let heads = geometry.layers * geometry.kv_heads;
            let layout = CodeLayout::new(2, geometry.head_dim, 1).unwrap();
            let encoders = vec![HeadEncoder::codes(transform, layout, Rule::Search, false); heads];
            PageCodec::new("int2", geometry, encoders.clone(), encoders).unwrap()
        }
        "centred" => {
            // Two bits, and means of keys and values far from zero, which a learned sink must be compared with and take from.
            let dim = geometry.head_dim;
            let encoder = |head: usize, by: f32| {
                let mean = (0..dim).map(|channel| by * ((head + 3 * channel) % 7) as f32 - by).collect();
                let transform = HeadTransform::new(Some(mean), &hadamard::matrix(dim)).unwrap();
                HeadEncoder::codes(transform, CodeLayout::new(2, dim, 1).unwrap(), Rule::Search, false)
            };
            let heads = 0..geometry.layers * geometry.kv_heads;
            let (keys, values) =
                (heads.clone().map(|head| encoder(head, 0.5)), heads.map(|head| encoder(head, 0.25)));
            PageCodec::new("centred", geometry, keys.collect(), values.collect()).unwrap()
        }
        "band" => {
            let dim = geometry.head_dim;
            // Channels of different strength, values off zero: what a rotation would not have.
            let matrix = hadamard::matrix(dim);
            let scaled = SquareMatrix::from_fn(dim, |i, j| matrix.get(i, j) * 0.9_f64.powi(j as i32));
            // Layers of different widths, where heads have a choice.
            let menu: Vec<KeyWidths> = KeyWidths::menu(dim).collect();
            let rows = |head: usize| {
                let widths = menu[head / geometry.kv_heads % menu.len()];
                let layout = BandLayout::of_widths(dim, widths).unwrap();
                RowEncoder::Banded(BandRows { layout, value_rule: Rule::Search })
            };
            let key = HeadTransform::general(None, &scaled).unwrap();
            let value = HeadTransform::new(Some(vec![0.125; dim]), &matrix).unwrap();
            // A mean that turns: a page that is read under another number than it was sealed under gives another answer.
            let turning = Arc::new(KeyTurning::new(vec![0.3, 0.02, 0.001], RopeLayout::Halves));
            let means = PageMeans::new(&vec![2.0; dim], turning).unwrap();
            let encoders = |transform: HeadTransform, page_means: Option<PageMeans>| {
                let encoder = |head| HeadEncoder {
                    transform: transform.clone(),
                    rows: rows(head),
                    page_means: page_means.clone(),
                };
                (0..geometry.layers * geometry.kv_heads).map(encoder).collect()
            };
            let (keys, values) = (encoders(key, CENTRES_PAGES.then_some(means)), encoders(value, None));
            PageCodec::new("band", geometry, keys, values).unwrap()
        }
        other => panic!("{other}"),
    };
    Some(Arc::new(codec))
}

/// Options for a cache of `format` with room for `pages` bf16 pages, or as many bytes of sealed ones. Who runs when does not depend
/// on time.
pub(crate) fn engine_options(model: &TestModel, format: &str, pages: Option<usize>) -> EngineOptions {
    let geometry = model.config().kv_geometry();
    let kv = KvOptions {
        codec: codec(format, geometry),
        windows: oscar_codec::PageWindows { sink: 1, recent: 2 },
        memory: pages.map(|pages| pages * geometry.page_bytes(geometry.bf16())),
        ..KvOptions::default()
    };
    EngineOptions { prefill_chunk: 48, kv, paced: false, ..EngineOptions::default() }
}

/// The same, answering alike whatever else runs.
pub(crate) fn fixed_options(model: &TestModel, format: &str, pages: Option<usize>) -> EngineOptions {
    EngineOptions { deterministic: true, ..engine_options(model, format, pages) }
}

/// Token ids without a meaning; different seeds have little in common.
pub(crate) fn prompt(seed: usize, len: usize) -> Vec<u32> {
    (0..len)
        .map(|index| ((index * 37 + seed * 101 + index * index * (seed % 7) + 11) % 110 + 3) as u32)
        .collect()
}

pub(crate) fn greedy(max_tokens: usize) -> GenerateOptions {
    GenerateOptions { max_tokens: Some(max_tokens), ignore_end: true, ..GenerateOptions::default() }
}

pub(crate) fn seeded(max_tokens: usize, seed: u64) -> GenerateOptions {
    let sampling =
        SamplingOptions { temperature: 1.0, top_p: 0.98, seed: Some(seed), ..SamplingOptions::default() };
    GenerateOptions { sampling, ..greedy(max_tokens) }
}

pub(crate) fn ask(engine: &TestEngine, prompt: &[u32], options: &GenerateOptions) -> Summary {
    engine.answer(Request::new(prompt, options.clone())).unwrap().wait().unwrap().remove(0)
}

/// The same options, with the log-probability of every token.
pub(crate) fn scored(options: GenerateOptions) -> GenerateOptions {
    GenerateOptions { logprobs: Some(0), ..options }
}

/// Two greedy answers are the same. A card reads sealed and bf16 pages in parts of their own, so that sums are rounded in
/// another order: there they may part where two tokens are as good as equally likely.
pub(crate) fn assert_same_but_for_ties(got: &Summary, expected: &Summary, what: &str) {
    if cfg!(not(feature = "cuda-tests")) {
        assert_eq!(got.tokens, expected.tokens, "{what}");
    }
    let same = got.tokens.iter().zip(&expected.tokens).take_while(|(got, expected)| got == expected).count();
    for (index, (got, expected)) in got.logprobs.iter().zip(&expected.logprobs).enumerate().take(same + 1) {
        assert!((got - expected).abs() < 0.05, "{what}, token {index}: {got} and {expected}");
    }
}

/// Asks all requests at once; each answer has the tokens and the log-probabilities that `alone` gives to its request.
pub(crate) fn assert_answers_as_alone(
    alone: &TestEngine,
    together: &TestEngine,
    requests: &[(Vec<u32>, GenerateOptions)],
) -> Vec<Summary> {
    let expected: Vec<Summary> = requests
        .iter()
        .map(|(prompt, options)| {
            alone.reset();
            ask(alone, prompt, options)
        })
        .collect();
    let answers: Vec<_> = requests
        .iter()
        .map(|(prompt, options)| together.answer(Request::new(prompt.clone(), options.clone())).unwrap())
        .collect();
    let answers: Vec<Summary> = answers.into_iter().map(|answer| answer.wait().unwrap().remove(0)).collect();
    for (index, (answer, expected)) in answers.iter().zip(&expected).enumerate() {
        assert_eq!((&answer.tokens, &answer.logprobs), (&expected.tokens, &expected.logprobs), "{index}");
    }
    answers
}

/// Nothing is held by anybody once the tree has forgotten everything.
pub(crate) fn assert_idle(engine: &TestEngine) {
    engine.reset();
    let stats = engine.fresh_stats();
    let cache = stats.cache;
    assert_eq!((stats.queued, stats.prefilling, stats.running), (0, 0, 0));
    let pools = [cache.exact, cache.sealed, cache.high, cache.scratch];
    assert_eq!((pools.map(|pool| pool.used()), cache.sequences), ([0; 4], 0), "{cache:?}");
}
