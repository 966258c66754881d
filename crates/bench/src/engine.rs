//! Speed and memory of an engine: long contexts in several cache types, and many requests with a common prefix.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use oscar_engine::{Engine, EngineError, Event, GenerateOptions, Request, Serve, Summary};
use oscar_kernels::Backend;
use oscar_report::machine::{anonymous_bytes, peak_rss_bytes};
use serde::Serialize;

use super::model::synthetic_tokens;

/// A long context and some tokens after it.
#[derive(Clone, Copy, Debug)]
pub struct LongContext {
    /// Tokens in the cache when decoding starts.
    pub context: usize,
    /// The number of tokens that are decoded.
    pub gen_tokens: usize,
    /// How often decoding is measured.
    pub repeat: usize,
    /// Bytes of weights that a step reads.
    pub weight_bytes: u64,
}

/// Tokens of the prompt that makes everything but pages resident before memory is measured: one chunk.
const WARM_UP_TOKENS: usize = 512;

/// The measurement of one engine.
#[derive(Clone, Debug, Serialize)]
pub struct LongContextRow {
    /// The cache, by its name on the command line.
    pub kv: String,
    /// Tokens in the cache when decoding starts.
    pub context: usize,
    /// Tokens of the prompt per second.
    pub prefill_tokens_per_s: f64,
    /// Decoded tokens per second in the best repetition.
    pub decode_tokens_per_s: f64,
    /// Decoded tokens per second in the median repetition.
    pub decode_tokens_per_s_median: f64,
    /// Bytes of pages the sequence holds.
    pub kv_bytes: usize,
    /// Bits per key or value element, windows and scales included.
    pub bits_per_element: f64,
    /// Growth of the resident size (mapped files aside) by the prompt, from an engine whose buffers are in use already and whose cache is
    /// empty.
    pub rss_delta_bytes: Option<u64>,
    /// Largest resident size so far, of this and every engine before it.
    pub peak_rss_bytes: Option<u64>,
    /// Bytes that a decode step reads: weights and pages.
    pub step_bytes: u64,
    /// Decode speed over the first engine's: the median over repetitions, in each of which all engines take turns.
    pub ratio: f64,
    /// The ratio that the bytes of a step allow, if speed is bound by memory.
    pub limit: f64,
}

/// The progress of a measurement.
#[derive(Clone, Copy, Debug)]
pub enum LongContextStage<'a> {
    /// An engine computes the context.
    Filling {
        /// The cache of the engine, by its name on the command line.
        kv: &'a str,
        /// Tokens that are computed.
        done: usize,
        /// Tokens of the context.
        total: usize,
    },
    /// The engines decode in turn.
    Decoding {
        /// The number of repetitions that are done.
        done: usize,
        /// The number of repetitions in all.
        total: usize,
    },
}

/// Fills a context in each engine, then decodes after it in each in turn: a machine that is faster one minute and
/// slower the next is so for all of them. The first engine is what the others are compared with. Each comes with the name of
/// its cache, because two may have the same type and different encoders.
pub fn long_context<B: Backend>(
    engines: &[(String, Engine<B>)],
    bench: &LongContext,
    mut on_stage: impl FnMut(LongContextStage<'_>),
) -> Result<Vec<LongContextRow>, EngineError> {
    let mut rows = Vec::new();
    for (name, engine) in engines {
        rows.push(fill(name, engine, bench, &mut on_stage)?);
    }
    let mut speeds = vec![Vec::new(); engines.len()];
    for done in 0..bench.repeat.max(1) {
        on_stage(LongContextStage::Decoding { done, total: bench.repeat.max(1) });
        for ((_, engine), speeds) in engines.iter().zip(&mut speeds) {
            // The prompt comes from the prefix tree but for its last tokens.
            let prompt = bench.prompt(engine);
            let run = engine
                .generate(&prompt, &bench.options(bench.gen_tokens + 1), |_| ControlFlow::Continue(()))?;
            speeds.push(run.decode_tokens_per_s().unwrap_or(f64::NAN));
        }
    }
    let first_bytes = rows.first().map_or(0, |row| row.step_bytes);
    for (row, own) in rows.iter_mut().zip(&speeds) {
        row.decode_tokens_per_s = own.iter().copied().fold(f64::NAN, f64::max);
        row.decode_tokens_per_s_median = median(own.iter().copied());
        row.ratio = median(own.iter().zip(&speeds[0]).map(|(own, first)| own / first));
        row.limit = first_bytes as f64 / row.step_bytes as f64;
    }
    Ok(rows)
}

impl LongContext {
    fn prompt<B: Backend>(&self, engine: &Engine<B>) -> Vec<u32> {
        synthetic_tokens(self.context, engine.model().config().vocab_size)
    }

    fn options(&self, tokens: usize) -> GenerateOptions {
        GenerateOptions { max_tokens: Some(tokens), ignore_end: true, ..GenerateOptions::default() }
    }
}

/// Computes the context and measures that; decoding is measured later.
fn fill<B: Backend>(
    name: &str,
    engine: &Engine<B>,
    bench: &LongContext,
    on_stage: &mut impl FnMut(LongContextStage<'_>),
) -> Result<LongContextRow, EngineError> {
    let context = bench.context;
    let prompt = bench.prompt(engine);
    let mut fill = |tokens: &[u32]| -> Result<Summary, EngineError> {
        engine.reset();
        for event in engine.answer(Request::new(tokens, bench.options(1)))? {
            match event {
                Event::Prefill { done, total, .. } => {
                    on_stage(LongContextStage::Filling { kv: name, done, total });
                }
                Event::Scored { .. } | Event::Token { .. } => {}
                Event::Finished { summary, .. } => return Ok(*summary),
                Event::Failed { error, .. } => return Err(EngineError::Shared(error)),
            }
        }
        Err(EngineError::Stopped)
    };
    // The pages of the first chunk stay resident and are used again, so they are counted with the prompt.
    let warm_up = context.min(WARM_UP_TOKENS);
    fill(&prompt[..warm_up])?;
    let rss_before = anonymous_bytes();
    let prefill = fill(&prompt)?;
    // What the sequence reads; the prefix tree holds sealed copies of the window besides.
    let (warm_bytes, kv_bytes) = (engine.budget().bytes_at(warm_up), engine.budget().bytes_at(context));
    let rss_delta = anonymous_bytes()
        .zip(rss_before)
        .map(|(after, before)| (after + warm_bytes as u64).saturating_sub(before));
    Ok(LongContextRow {
        kv: name.to_owned(),
        context,
        prefill_tokens_per_s: context as f64 / prefill.first_token.as_secs_f64(),
        decode_tokens_per_s: f64::NAN,
        decode_tokens_per_s_median: f64::NAN,
        kv_bytes,
        bits_per_element: engine.budget().bits_at(context),
        rss_delta_bytes: rss_delta,
        peak_rss_bytes: peak_rss_bytes(),
        step_bytes: bench.weight_bytes + kv_bytes as u64,
        ratio: f64::NAN,
        limit: f64::NAN,
    })
}

/// The middle of some numbers; NaN if there are none.
fn median(numbers: impl Iterator<Item = f64>) -> f64 {
    let mut numbers: Vec<f64> = numbers.collect();
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len() / 2).copied().unwrap_or(f64::NAN)
}

/// A measurement of requests with a common prefix.
#[derive(Clone, Copy, Debug)]
pub struct SharedPrefix {
    /// Number of requests.
    pub requests: usize,
    /// Tokens that the prompts have in common.
    pub prefix_tokens: usize,
    /// Tokens of each prompt after the common ones.
    pub suffix_tokens: usize,
    /// Tokens of each answer.
    pub output_tokens: usize,
    /// Time from one arrival to the next.
    pub interval: Duration,
}

/// The measurement of requests with a common prefix.
#[derive(Clone, Debug, Serialize)]
pub struct SharedPrefixRow {
    /// The type of the cache, by its name on the command line.
    pub kv: String,
    /// Whether prefixes were shared.
    pub prefix_cache: bool,
    /// Number of requests.
    pub requests: usize,
    /// Milliseconds from one arrival to the next.
    pub interval_ms: f64,
    /// Seconds from the first arrival to the last answer.
    pub seconds: f64,
    /// Answer tokens per second, all requests together.
    pub output_tokens_per_s: f64,
    /// Mean time to the first token, in milliseconds.
    pub ttft_ms: f64,
    /// Share of prompt tokens that came from the cache.
    pub cached: f64,
}

/// Sends the requests and waits for all answers.
pub fn shared_prefix<B: Backend>(
    engine: &Engine<B>,
    bench: &SharedPrefix,
) -> Result<SharedPrefixRow, EngineError> {
    let SharedPrefix { requests, prefix_tokens, suffix_tokens, output_tokens, interval } = *bench;
    let vocabulary = engine.model().config().vocab_size;
    let tokens = synthetic_tokens(prefix_tokens + requests * suffix_tokens, vocabulary);
    let (prefix, suffixes) = tokens.split_at(prefix_tokens);
    let options =
        GenerateOptions { max_tokens: Some(output_tokens), ignore_end: true, ..GenerateOptions::default() };
    engine.reset();
    let begin = Instant::now();
    let mut answers = Vec::new();
    for (index, suffix) in suffixes.chunks(suffix_tokens.max(1)).enumerate() {
        let due = interval * index as u32;
        std::thread::sleep(due.saturating_sub(begin.elapsed()));
        let prompt: Vec<u32> = prefix.iter().chain(suffix).copied().collect();
        answers.push(engine.answer(Request::new(prompt, options.clone()))?);
    }
    let (mut first_tokens, mut prompt_tokens, mut cached_tokens) = (0.0, 0, 0);
    for answer in answers {
        for summary in answer.wait().map_err(EngineError::Shared)? {
            first_tokens += summary.first_token.as_secs_f64();
            prompt_tokens += summary.prompt_tokens;
            cached_tokens += summary.cached_tokens;
        }
    }
    let seconds = begin.elapsed().as_secs_f64();
    Ok(SharedPrefixRow {
        kv: engine.info().kv.clone(),
        prefix_cache: engine.info().prefix_cache,
        requests,
        interval_ms: interval.as_secs_f64() * 1e3,
        seconds,
        output_tokens_per_s: (requests * output_tokens) as f64 / seconds,
        ttft_ms: first_tokens * 1e3 / requests as f64,
        cached: cached_tokens as f64 / prompt_tokens.max(1) as f64,
    })
}
