//! A long prompt that comes back after its pages have left the device: copied from the host's memory, or computed again.

use oscar_engine::{Engine, EngineError, GenerateOptions, Request, Serve, Summary};
use oscar_kernels::Backend;
use serde::Serialize;

use super::model::synthetic_tokens;

/// The measurement of one context.
#[derive(Clone, Debug, Serialize)]
pub struct HostPrefixRow {
    /// The type of the cache, by its name on the command line.
    pub kv: String,
    /// Tokens of the prompt.
    pub context: usize,
    /// Bytes of the pages that came back.
    pub restored_bytes: usize,
    /// Share of the prompt's tokens that did not have to be computed.
    pub cached: f64,
    /// Time to the first token with an empty cache, in milliseconds.
    pub computed_ms: f64,
    /// Time to the first token when the pages are in the host's memory, in milliseconds: the best of the repetitions.
    pub restored_ms: f64,
    /// How much faster that is.
    pub ratio: f64,
}

/// Reads a prompt of `context` tokens, has another one of that length take its place, and requests the first again,
/// `repeat` times. The engine has room for one of them on the device and for both on the host.
pub fn host_prefix<B: Backend>(
    engine: &Engine<B>,
    context: usize,
    repeat: usize,
) -> Result<HostPrefixRow, EngineError> {
    let tokens = synthetic_tokens(2 * context, engine.model().config().vocab_size);
    let (first, second) = tokens.split_at(context);
    engine.reset();
    let computed = answer(engine, first)?;
    let mut restored = None::<(Summary, u64)>;
    for _ in 0..repeat.max(1) {
        answer(engine, second)?;
        let before = engine.stats().cache.host.restored;
        let again = answer(engine, first)?;
        let pages = engine.stats().cache.host.restored - before;
        if restored.as_ref().is_none_or(|(best, _)| again.first_token < best.first_token) {
            restored = Some((again, pages));
        }
    }
    let (restored, pages) = restored.expect("there is at least one repetition");
    let [exact, sealed] = &engine.budget().host;
    let page_bytes = if sealed.page_bytes > 0 { sealed.page_bytes } else { exact.page_bytes };
    Ok(HostPrefixRow {
        kv: engine.info().kv.clone(),
        context,
        restored_bytes: pages as usize * page_bytes,
        cached: restored.cached_tokens as f64 / context as f64,
        computed_ms: computed.first_token.as_secs_f64() * 1e3,
        restored_ms: restored.first_token.as_secs_f64() * 1e3,
        ratio: computed.first_token.as_secs_f64() / restored.first_token.as_secs_f64(),
    })
}

fn answer<B: Backend>(engine: &Engine<B>, prompt: &[u32]) -> Result<Summary, EngineError> {
    let options = GenerateOptions { max_tokens: Some(1), ignore_end: true, ..GenerateOptions::default() };
    let mut answers = engine.answer(Request::new(prompt, options))?.wait().map_err(EngineError::Shared)?;
    answers.pop().ok_or(EngineError::Stopped)
}
