//! Answers in progress while a long prompt is read: how much longer their readers wait for the next token.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use oscar_engine::{Engine, EngineError, Event, GenerateOptions, Request, Serve};
use oscar_kernels::Backend;
use serde::Serialize;

use super::model::synthetic_tokens;

/// Tokens of the prompt of an answer that is in progress.
const PROMPT: usize = 64;
/// Tokens of every answer before the long prompt comes: those after the first few are the idle times.
const IDLE_TOKENS: usize = 200;
const WARM_UP: usize = 20;

/// The measurement of one context.
#[derive(Clone, Debug, Serialize)]
pub struct StreamsRow {
    /// The type of the cache, by its name on the command line.
    pub kv: String,
    /// The number of answers in progress.
    pub streams: usize,
    /// Tokens of the long prompt.
    pub context: usize,
    /// Median time between two tokens of an answer with nothing else to do, in milliseconds.
    pub idle_p50_ms: f64,
    /// 99 of 100 such times are shorter.
    pub idle_p99_ms: f64,
    /// Median time between two tokens while the prompt is read, in milliseconds.
    pub busy_p50_ms: f64,
    /// While the prompt is read, 99 of 100 times are shorter than this.
    pub busy_p99_ms: f64,
    /// How many times longer tokens take beside a prompt: `busy_p99_ms` over `idle_p99_ms`.
    pub ratio: f64,
    /// How fast the prompt was read meanwhile.
    pub prefill_tokens_per_s: f64,
    /// Answers that had to make room for others.
    pub preempted: u64,
}

/// Room that an answer in progress needs while a prompt of `context` tokens is read.
pub fn stream_tokens(context: usize) -> usize {
    // A step reads some tokens of the prompt and makes one of each answer.
    PROMPT + IDLE_TOKENS + context / 4 + 1024
}

/// Starts `streams` answers, then reads a prompt of `context` tokens beside them.
pub fn streams<B: Backend>(
    engine: &Engine<B>,
    streams: usize,
    context: usize,
) -> Result<StreamsRow, EngineError> {
    let vocabulary = engine.model().config().vocab_size;
    let options =
        |tokens| GenerateOptions { max_tokens: Some(tokens), ignore_end: true, ..GenerateOptions::default() };
    let (started, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let before = engine.stats().preemptions;
    let outcome = thread::scope(|scope| {
        let readers: Vec<_> = (0..streams)
            .map(|index| {
                let (started, stop) = (&started, &stop);
                let prompt = synthetic_tokens((index + 1) * PROMPT, vocabulary).split_off(index * PROMPT);
                scope.spawn(move || -> Result<Vec<Instant>, EngineError> {
                    let mut times = Vec::new();
                    for event in
                        engine.answer(Request::new(&prompt, options(stream_tokens(context) - PROMPT)))?
                    {
                        match event {
                            Event::Token { .. } => times.push(Instant::now()),
                            Event::Failed { error, .. } => return Err(EngineError::Shared(error)),
                            _ => {}
                        }
                        if times.len() == IDLE_TOKENS {
                            started.fetch_add(1, Ordering::Relaxed);
                        }
                        if stop.load(Ordering::Relaxed) {
                            break;
                        }
                    }
                    Ok(times)
                })
            })
            .collect();
        // A reader that failed never gets there.
        while started.load(Ordering::Relaxed) < streams && !readers.iter().any(|reader| reader.is_finished())
        {
            thread::sleep(Duration::from_millis(5));
        }
        let begin = Instant::now();
        let mut prompt = synthetic_tokens(context + streams * PROMPT, vocabulary);
        let prompt = prompt.split_off(streams * PROMPT);
        let read = engine
            .answer(Request::new(&prompt, options(1)))
            .and_then(|answer| answer.wait().map_err(EngineError::Shared));
        let end = Instant::now();
        stop.store(true, Ordering::Relaxed);
        let times = readers
            .into_iter()
            .map(|reader| reader.join().unwrap_or(Err(EngineError::Stopped)))
            .collect::<Result<Vec<_>, _>>();
        read?;
        Ok::<_, EngineError>((times?, begin, end))
    });
    let (times, begin, end) = outcome?;
    let mut idle = Vec::new();
    let mut busy = Vec::new();
    for times in &times {
        for (index, pair) in times.windows(2).enumerate().skip(WARM_UP) {
            let gap = (pair[1] - pair[0]).as_secs_f64() * 1e3;
            if pair[1] <= begin && index < IDLE_TOKENS {
                idle.push(gap);
            } else if pair[1] > begin && pair[0] < end {
                busy.push(gap);
            }
        }
    }
    let (idle, busy) = (Times::new(idle), Times::new(busy));
    Ok(StreamsRow {
        kv: engine.info().kv.clone(),
        streams,
        context,
        idle_p50_ms: idle.share(0.5),
        idle_p99_ms: idle.share(0.99),
        busy_p50_ms: busy.share(0.5),
        busy_p99_ms: busy.share(0.99),
        ratio: busy.share(0.99) / idle.share(0.99),
        prefill_tokens_per_s: context as f64 / (end - begin).as_secs_f64(),
        preempted: engine.stats().preemptions - before,
    })
}

/// Times in ascending order.
struct Times(Vec<f64>);

impl Times {
    fn new(mut times: Vec<f64>) -> Times {
        times.sort_by(f64::total_cmp);
        Times(times)
    }

    /// So large a share of the times is at most this; NaN if there are none.
    fn share(&self, share: f64) -> f64 {
        let index = (share * self.0.len() as f64).ceil() as usize;
        self.0.get(index.saturating_sub(1)).copied().unwrap_or(f64::NAN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_of_times() {
        let times = Times::new((1..=200).rev().map(f64::from).collect());
        assert_eq!(times.share(0.5), 100.0);
        assert_eq!(times.share(0.99), 198.0);
        assert_eq!(times.share(1.0), 200.0);
        assert!(Times::new(Vec::new()).share(0.5).is_nan());
    }
}
