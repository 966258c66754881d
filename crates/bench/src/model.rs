//! Speed of a whole model: prefill, time to first token, decode.

use std::ops::ControlFlow;

use oscar_engine::{Engine, EngineError, GenerateOptions, Serve, Summary};
use oscar_kernels::Backend;
use oscar_report::machine::peak_rss_bytes;
use serde::Serialize;

/// What is read and generated before anything is timed.
const WARM_UP_TOKENS: usize = 512;
const WARM_UP_STEPS: usize = 4;

/// A measurement of the speed of a model.
#[derive(Clone, Debug)]
pub struct ModelBench {
    /// Prompt tokens of the prefill measurement.
    pub prompt_tokens: usize,
    /// Tokens generated in the decode measurement.
    pub gen_tokens: usize,
    /// Tokens in the cache when decoding starts; the prompt when `None`.
    pub context: Option<usize>,
    /// How often everything is measured.
    pub repeat: usize,
}

/// The times and rates of one repetition.
#[derive(Debug, Serialize)]
struct ModelRow {
    repetition: usize,
    kv: String,
    threads: usize,
    batch: usize,
    prompt_tokens: usize,
    prefill_tokens_per_s: f64,
    ttft_ms: f64,
    context: usize,
    gen_tokens: usize,
    decode_tokens_per_s: Option<f64>,
    /// Time of a decode step, which makes one token.
    step_ms: Option<f64>,
    bits_per_element: f64,
    kv_bytes: usize,
    peak_rss_bytes: Option<u64>,
}

/// Measures; `on_row` is called after each repetition, for progress.
pub fn run<B: Backend>(
    engine: &Engine<B>,
    bench: &ModelBench,
    threads: usize,
    mut on_row: impl FnMut(serde_json::Value),
) -> Result<(), EngineError> {
    let context = bench.context.unwrap_or(bench.prompt_tokens).max(bench.prompt_tokens);
    let tokens = synthetic_tokens(context, engine.model().config().vocab_size);
    // A device may compile kernels when they are first needed, and a mapped file is read from the disk.
    generate(engine, &tokens[..bench.prompt_tokens.min(WARM_UP_TOKENS)], WARM_UP_STEPS + 1)?;
    for repetition in 1..=bench.repeat {
        engine.reset();
        let prefill = generate(engine, &tokens[..bench.prompt_tokens], 1)?;
        // The first generated token comes from the prompt's own logits; each further one is a decode step.
        let decode = generate(engine, &tokens, bench.gen_tokens + 1)?;
        let seconds = prefill.first_token.as_secs_f64();
        let row = ModelRow {
            repetition,
            kv: engine.info().kv.clone(),
            threads,
            batch: 1,
            prompt_tokens: bench.prompt_tokens,
            prefill_tokens_per_s: bench.prompt_tokens as f64 / seconds,
            ttft_ms: seconds * 1e3,
            context,
            gen_tokens: bench.gen_tokens,
            decode_tokens_per_s: decode.decode_tokens_per_s(),
            step_ms: decode.decode_tokens_per_s().map(|rate| 1e3 / rate),
            bits_per_element: engine.budget().bits_at(context),
            kv_bytes: engine.kv_bytes(),
            peak_rss_bytes: peak_rss_bytes(),
        };
        on_row(serde_json::to_value(row).expect("a row holds plain values only"));
    }
    Ok(())
}

fn generate<B: Backend>(
    engine: &Engine<B>,
    prompt: &[u32],
    max_tokens: usize,
) -> Result<Summary, EngineError> {
    let options =
        GenerateOptions { max_tokens: Some(max_tokens), ignore_end: true, ..GenerateOptions::default() };
    engine.generate(prompt, &options, |_| ControlFlow::Continue(()))
}

/// Token ids without a meaning; the speed of a dense model does not depend on them.
pub(super) fn synthetic_tokens(count: usize, vocab_size: usize) -> Vec<u32> {
    (0..count as u64)
        .map(|index| (index.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33) as u32 % vocab_size as u32)
        .collect()
}
