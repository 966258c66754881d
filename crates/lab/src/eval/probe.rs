//! The retrieval probe: whether a model can still copy, word for word, what it read long ago.
//!
//! A text is computed exactly. Then strings of it are begun again, one at a time, and the probe is the log-probability
//! of the rest of each: with the exact cache, and with the same cache read through a codec. It asks what needles ask, to
//! find one place among thousands, but every token of every string counts, so a few dozen strings tell codecs apart that
//! need hundreds of needle prompts. No text is needed: strings come from built-in prose, which nothing is calibrated on.

use std::sync::Arc;

use oscar_codec::Windows;
use oscar_kernels::Inspect;
use oscar_model::LoadedModel;
use oscar_rotations::{ProbeDistance, RetrievalProbe, RotationFile};

use super::EvalError;
use super::codecs::CodecSource;
use super::evaluator::Evaluator;
use super::history::Reading;
use super::paged::PagedCache;
use super::text::prose;

/// Seed of the prose; other measurements have smaller ones.
pub const SEED: u64 = 8192;

/// Most tokens of text, those of a string that is begun again included.
pub const MOST_TOKENS: usize = 8192;

/// The largest number of strings of a probe.
const STRINGS: usize = 32;

/// Tokens of a string that are given: enough to tell the place from all others.
const CUE: usize = 12;

/// Tokens of a string that the model must know.
const REST: usize = 12;

/// Fewer strings than this say nothing.
const LEAST_STRINGS: usize = 4;

/// A text and the strings of it that are begun again after its end.
#[derive(Clone, Debug)]
pub struct CopyTask {
    text: Vec<u32>,
    /// How far before the end of the text each string starts, nearest first.
    distances: Vec<usize>,
}

impl CopyTask {
    /// Strings of `text` that lie outside both windows whenever they are to be copied; `None` if there is no room for them.
    pub fn new(text: Vec<u32>, windows: Windows) -> Option<CopyTask> {
        let distances = distances(text.len(), windows);
        (distances.len() >= LEAST_STRINGS).then_some(CopyTask { text, distances })
    }

    /// The task in built-in prose for a model, as long as its context allows; `None` if that is too short.
    pub fn built_in<B: Inspect>(
        model: &LoadedModel<B>,
        windows: Windows,
        seed: u64,
    ) -> Result<Option<CopyTask>, EvalError> {
        let tokens = MOST_TOKENS.min(model.config().max_context).saturating_sub(CUE + REST);
        // Enough letters for the shortest tokens that prose is made of.
        let mut text = model.tokenizer().encode(&prose(seed, tokens * 8), true)?;
        text.truncate(tokens);
        Ok(CopyTask::new(text, windows))
    }

    /// Tokens of the text and of one string that is begun again.
    pub fn tokens(&self) -> usize {
        self.text.len() + CUE + REST
    }

    /// Given and asked tokens of each string.
    fn strings(&self) -> impl Iterator<Item = (&[u32], &[u32])> {
        self.distances.iter().map(|distance| {
            let start = self.text.len() - distance;
            self.text[start..start + CUE + REST].split_at(CUE)
        })
    }
}

/// Where strings start, counted back from the end of a text of so many tokens: evenly on a logarithmic scale from an
/// eighth of the text to all of it, without overlap.
fn distances(tokens: usize, windows: Windows) -> Vec<usize> {
    let length = CUE + REST;
    // The first query of a string that is begun again reads the recent window, its own token included.
    let nearest = (tokens / 8).max(windows.recent.saturating_add(length));
    let Some(farthest) = tokens.checked_sub(windows.sink).filter(|farthest| *farthest >= nearest) else {
        return Vec::new();
    };
    let ratio = farthest as f64 / nearest as f64;
    let mut chosen: Vec<usize> = Vec::new();
    for index in 0..STRINGS {
        let share = index as f64 / (STRINGS - 1) as f64;
        let distance = ((nearest as f64 * ratio.powf(share)) as usize).min(farthest);
        if chosen.last().is_none_or(|last| distance >= last + length) {
            chosen.push(distance);
        }
    }
    chosen
}

/// The log-probabilities of all strings of a task with an exact cache.
pub struct CopyProbe<'a, B: Inspect> {
    evaluator: Evaluator<B>,
    task: &'a CopyTask,
    exact: Vec<f64>,
}

impl<'a, B: Inspect> CopyProbe<'a, B> {
    /// Reads the text of a task. `progress` gets the number of its tokens that are done.
    pub fn new(
        model: Arc<LoadedModel<B>>,
        task: &'a CopyTask,
        progress: impl FnMut(usize),
    ) -> Result<CopyProbe<'a, B>, EvalError> {
        let mut evaluator = Evaluator::new(model, task.tokens())?;
        evaluator.prefill(&task.text, progress)?;
        let exact = evaluator.log_probabilities(task.strings(), None)?;
        Ok(CopyProbe { evaluator, task, exact })
    }

    /// What is left when the text is read through a codec.
    pub fn measure(&mut self, reading: Reading<'_>) -> Result<RetrievalProbe, EvalError> {
        let sealed = self.evaluator.log_probabilities(self.task.strings(), Some(reading))?;
        self.compare(sealed)
    }

    /// What is left when the text is read from a cache as it is served. `progress` gets the tokens of the text that are done.
    pub fn measure_served(
        &mut self,
        cache: &mut PagedCache<B>,
        progress: impl FnMut(usize),
    ) -> Result<RetrievalProbe, EvalError> {
        let sealed = cache.log_probabilities(&self.task.text, self.task.strings(), progress)?;
        self.compare(sealed)
    }

    fn compare(&self, sealed: Vec<f64>) -> Result<RetrievalProbe, EvalError> {
        if !self.exact.iter().chain(&sealed).all(|value| value.is_finite()) {
            return Err(EvalError::NotFinite);
        }
        let distances: Vec<ProbeDistance> = (self.task.distances.iter().zip(&self.exact).zip(&sealed))
            .map(|((&tokens, &exact), &sealed)| ProbeDistance { tokens, exact, sealed })
            .collect();
        Ok(RetrievalProbe::new(self.task.tokens(), distances))
    }
}

/// The probe of the 2-bit cache that a rotation file makes of a model; `None` if the model's context is too short for it.
/// Key channels of the file are in the order of the model's own file. `progress` gets the tokens done and those to do.
pub fn probe_rotations<B: Inspect>(
    model: &Arc<LoadedModel<B>>,
    rotations: &RotationFile,
    windows: Windows,
    mut progress: impl FnMut(usize, usize),
) -> Result<Option<RetrievalProbe>, EvalError> {
    let Some(task) = CopyTask::built_in(model, windows, SEED)? else { return Ok(None) };
    let source = CodecSource::new(model, Some(rotations));
    let codec = source.build("int2")?;
    let mut probe = CopyProbe::new(model.clone(), &task, |done| progress(done, task.tokens()))?;
    probe.measure(Reading { codec: &*codec, windows, chunk: None }).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_behind_the_windows_and_do_not_overlap() {
        for (tokens, windows) in [
            (8160, Windows::default()),
            (32_000, Windows { sink: 128, recent: 1024 }),
            (224, Windows { sink: 8, recent: 32 }),
            (2016, Windows { sink: 0, recent: 0 }),
        ] {
            let found = distances(tokens, windows);
            assert!(found.len() >= LEAST_STRINGS, "{tokens}: {found:?}");
            assert!(found.windows(2).all(|pair| pair[0] + CUE + REST <= pair[1]), "{found:?}");
            let last = *found.last().expect("strings");
            assert!(tokens - last >= windows.sink, "{found:?}");
            assert!(found[0] >= windows.recent + CUE + REST, "{found:?}");
        }
        let found = distances(8160, Windows::default());
        assert_eq!((found.len(), found[0], found[STRINGS - 1]), (STRINGS, 1020, 8096));
    }

    #[test]
    fn short_texts_and_wide_windows_have_no_strings() {
        for (tokens, windows) in [
            (0, Windows::default()),
            (100, Windows { sink: 8, recent: 32 }),
            (400, Windows::default()),
            (8160, Windows { sink: 64, recent: usize::MAX }),
            (8160, Windows { sink: usize::MAX, recent: 64 }),
        ] {
            assert!(CopyTask::new(vec![0; tokens], windows).is_none(), "{tokens} {windows:?}");
        }
    }

    #[test]
    fn strings_are_what_the_text_says_there() {
        let text: Vec<u32> = (0..2000).collect();
        let task = CopyTask::new(text, Windows { sink: 4, recent: 64 }).expect("room");
        for ((cue, rest), distance) in task.strings().zip(&task.distances) {
            let start = 2000 - *distance as u32;
            assert_eq!(cue.to_vec(), (start..start + CUE as u32).collect::<Vec<u32>>());
            assert_eq!(rest[0], start + CUE as u32);
            assert_eq!(rest.len(), REST);
        }
    }
}
