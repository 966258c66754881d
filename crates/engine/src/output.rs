//! One answer as it grows: how the next token is sampled, the text so far, and when to end.

use std::sync::Arc;
use std::time::Instant;

use oscar_kernels::backend::{LogitChange, Sampled, Sampling};
use oscar_model::text::{StreamDecoder, TextError};

use crate::draw::draw;
use crate::error::EngineError;
use crate::event::{FinishReason, MatchedStop, PromptLogprob, Summary, Token};
use crate::filter::{self, TokenFilter, TokenMask};
use crate::penalties::LogitChanges;
use crate::pooling::PooledHidden;
use crate::request::GenerateOptions;
use crate::stop::StopFilter;

/// Turns token ids into text as they arrive.
pub(crate) trait Decode: Send {
    /// The text that the next token completes.
    fn push(&mut self, id: u32) -> Result<Option<String>, TextError>;
    /// The text of tokens that never completed a character, at the end of the answer.
    fn finish(&mut self) -> Option<String>;
}

impl Decode for StreamDecoder {
    fn push(&mut self, id: u32) -> Result<Option<String>, TextError> {
        StreamDecoder::push(self, id)
    }

    fn finish(&mut self) -> Option<String> {
        StreamDecoder::finish(self)
    }
}

/// The state of one answer: its tokens, its text and how the next token is sampled.
pub(crate) struct Output {
    pub(crate) choice: usize,
    pub(crate) prompt_tokens: usize,
    pub(crate) cached_tokens: usize,
    pub(crate) prompt_logprobs: Vec<PromptLogprob>,
    pub(crate) pooled: PooledHidden,
    pub(crate) preemptions: usize,
    pub(crate) demoted_tokens: usize,
    pub(crate) submitted: Instant,
    options: Arc<GenerateOptions>,
    first_prompt_token: Option<u32>,
    seed: u64,
    tokens: Vec<u32>,
    text: String,
    logprobs: Vec<f32>,
    matched: Option<MatchedStop>,
    decoder: Box<dyn Decode>,
    stops: StopFilter,
    changes: LogitChanges,
    filter: Option<(Box<dyn TokenFilter>, TokenMask)>,
    started: Option<Instant>,
    first: Option<Instant>,
}

impl Output {
    /// An answer without a token. `endings` are the tokens with which the model ends its turn.
    pub(crate) fn new(
        options: &Arc<GenerateOptions>,
        seed: u64,
        prompt: &[u32],
        endings: &[u32],
        vocabulary: usize,
        filter: Option<Box<dyn TokenFilter>>,
        decoder: Box<dyn Decode>,
    ) -> Output {
        let model_endings = endings.iter().filter(|_| !options.ignore_end);
        let endings = model_endings.chain(&options.stop_tokens).copied().collect();
        Output {
            choice: 0,
            prompt_tokens: prompt.len(),
            cached_tokens: 0,
            prompt_logprobs: Vec::new(),
            pooled: PooledHidden::default(),
            preemptions: 0,
            demoted_tokens: 0,
            options: Arc::clone(options),
            first_prompt_token: prompt.first().copied(),
            seed,
            tokens: Vec::new(),
            text: String::new(),
            logprobs: Vec::new(),
            matched: None,
            decoder,
            stops: StopFilter::new(&options.stop),
            changes: LogitChanges::new(&options.sampling, prompt, endings),
            filter: filter.map(|filter| (filter, TokenMask::all(vocabulary))),
            submitted: Instant::now(),
            started: None,
            first: None,
        }
    }

    /// The same answer before its first token, as another choice.
    pub(crate) fn fork(&self, choice: usize, decoder: Box<dyn Decode>) -> Output {
        Output {
            choice,
            prompt_logprobs: self.prompt_logprobs.clone(),
            pooled: self.pooled.clone(),
            options: Arc::clone(&self.options),
            seed: self.seed.wrapping_add(choice as u64),
            tokens: Vec::new(),
            text: String::new(),
            logprobs: Vec::new(),
            matched: None,
            decoder,
            stops: StopFilter::new(&self.options.stop),
            changes: self.changes.clone(),
            filter: self.filter.as_ref().map(|(filter, mask)| (filter::fork(&**filter), mask.clone())),
            ..*self
        }
    }

    pub(crate) fn options(&self) -> &Arc<GenerateOptions> {
        &self.options
    }

    pub(crate) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Work on the answer begins; only the first call counts.
    pub(crate) fn start(&mut self) {
        self.started.get_or_insert_with(Instant::now);
    }

    /// The prompt begins to be computed, for the first time or again. One that is scored is computed from its first token
    /// on, until an answer has begun.
    pub(crate) fn begin_prompt(&mut self) {
        self.start();
        if !self.tokens.is_empty() {
            return;
        }
        self.pooled = PooledHidden::default();
        if self.options.prompt_logprobs.is_some() {
            let unknown = |token| PromptLogprob { token, logprob: None, top: Vec::new() };
            let first = self.first_prompt_token.filter(|_| self.options.score_from == 0);
            self.prompt_logprobs = first.map(unknown).into_iter().collect();
        }
    }

    /// Brings penalties and filters up to date before the next token is sampled.
    pub(crate) fn prepare(&mut self) -> Result<(), EngineError> {
        self.changes.prepare(self.may_end());
        if let Some((filter, mask)) = &mut self.filter {
            mask.reset();
            filter::guarded(|| filter.allowed(mask))?;
        }
        Ok(())
    }

    /// How the next token is sampled, after [`Self::prepare`].
    pub(crate) fn setting(&self, vocabulary: usize) -> Sampling<'_> {
        Sampling {
            changes: self.changes.current(),
            allowed: self.filter.as_ref().map(|(_, mask)| mask.words()),
            ..self.plain_setting(self.tokens.len(), vocabulary)
        }
    }

    /// How the token after the next one is sampled, if there may be one and the next one makes no difference to that.
    pub(crate) fn setting_after_next(&self, vocabulary: usize) -> Option<Sampling<'static>> {
        let index = self.tokens.len() + 1;
        let plain = self.filter.is_none() && self.changes.are_none(index >= self.options.min_tokens);
        let goes_on = self.options.max_tokens.is_none_or(|most| index < most);
        (plain && goes_on).then(|| self.plain_setting(index, vocabulary))
    }

    /// How the token of this index is sampled where no logit is changed.
    fn plain_setting<'a>(&self, index: usize, vocabulary: usize) -> Sampling<'a> {
        let sampling = &self.options.sampling;
        Sampling {
            temperature: sampling.temperature,
            top_k: sampling.top_k,
            top_p: sampling.top_p,
            typical_p: sampling.typical_p,
            min_p: sampling.min_p,
            vocabulary,
            draw: draw(self.seed, index as u64),
            changes: &[],
            allowed: None,
            given: None,
            logprobs: self.options.logprobs,
        }
    }

    /// Whether the next token may be this one, after [`Self::prepare`].
    pub(crate) fn allows(&self, token: u32) -> bool {
        let ruled_out = |change: &LogitChange| change.token == token && change.add == f32::NEG_INFINITY;
        let masked = self.filter.as_ref().is_some_and(|(_, mask)| !mask.allows(token));
        !masked && !self.changes.current().iter().any(ruled_out)
    }

    /// Takes the next token. `ends` says whether the model ends its turn with it, `room` whether the context holds
    /// another one.
    pub(crate) fn push(
        &mut self,
        drawn: Sampled,
        ends: bool,
        room: bool,
    ) -> Result<(Token, Option<FinishReason>), EngineError> {
        let id = drawn.token;
        let may_end = self.may_end();
        self.first.get_or_insert_with(Instant::now);
        self.tokens.push(id);
        self.logprobs.extend(drawn.logprob);
        self.changes.drawn(id);
        if let Some((filter, _)) = &mut self.filter {
            filter::guarded(|| filter.accept(id))?;
        }
        let mut text = String::new();
        let mut finish = None;
        if ends && !self.options.ignore_end {
            finish = Some(FinishReason::End);
            self.matched = Some(MatchedStop::Token(id));
        } else if may_end && self.options.stop_tokens.contains(&id) {
            finish = Some(FinishReason::Stop);
            self.matched = Some(MatchedStop::Token(id));
            if self.options.keep_stop {
                text.push_str(&self.stops.finish());
                text.push_str(&self.decoder.push(id)?.unwrap_or_default());
            }
        } else if let Some(piece) = self.decoder.push(id)? {
            finish = self.show(&piece, may_end, &mut text);
        }
        if finish.is_none() {
            finish = match self.options.max_tokens {
                Some(most) if self.tokens.len() >= most => Some(FinishReason::Length),
                _ if !room => Some(FinishReason::Context),
                _ => None,
            };
        }
        // Nothing more will come, so nothing need be held back; text before a stop text has been shown already.
        if finish.is_some() && !matches!(self.matched, Some(MatchedStop::Text(_))) {
            let rest = self.decoder.finish().unwrap_or_default();
            if let Some(stopped) = self.show(&rest, may_end, &mut text) {
                finish = Some(stopped);
            } else {
                text.push_str(&self.stops.finish());
            }
        }
        self.text.push_str(&text);
        Ok((Token { id, text, logprob: drawn.logprob, top: drawn.top }, finish))
    }

    /// Adds what may be shown of a piece to `text`.
    fn show(&mut self, piece: &str, may_end: bool, text: &mut String) -> Option<FinishReason> {
        if !may_end {
            text.push_str(piece);
            return None;
        }
        let filtered = self.stops.push(piece);
        text.push_str(&filtered.text);
        let stopped = filtered.stopped?;
        if self.options.keep_stop {
            text.push_str(&stopped);
        }
        self.matched = Some(MatchedStop::Text(stopped));
        Some(FinishReason::Stop)
    }

    fn may_end(&self) -> bool {
        self.tokens.len() >= self.options.min_tokens
    }

    /// What the caller is told when the answer has ended.
    pub(crate) fn summary(&self, finish: FinishReason) -> Summary {
        let now = Instant::now();
        let first = self.first.unwrap_or(now);
        Summary {
            finish,
            matched: self.matched.clone().filter(|_| finish != FinishReason::Cancelled),
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens,
            tokens: self.tokens.clone(),
            text: self.text.clone(),
            logprobs: self.logprobs.clone(),
            prompt_logprobs: self.prompt_logprobs.clone(),
            embedding: self.pooled.mean(),
            seed: self.seed,
            queued: self.started.unwrap_or(now) - self.submitted,
            first_token: first - self.submitted,
            decode: now - first,
            preemptions: self.preemptions,
            demoted_tokens: self.demoted_tokens,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Token `i` is the `i`-th letter.
    struct Letters;

    impl Decode for Letters {
        fn push(&mut self, id: u32) -> Result<Option<String>, TextError> {
            Ok(char::from_u32(u32::from('a') + id).map(String::from))
        }

        fn finish(&mut self) -> Option<String> {
            None
        }
    }

    /// What comes of drawing these tokens, 25 being the model's end.
    fn run(options: GenerateOptions, ids: &[u32]) -> (String, Option<FinishReason>, Summary) {
        let mut output = Output::new(&Arc::new(options), 0, &[1], &[25], 26, None, Box::new(Letters));
        let mut shown = String::new();
        let mut finish = None;
        for &token in ids {
            assert_eq!(finish, None, "nothing comes after the end");
            output.prepare().unwrap();
            let drawn = Sampled { token, logprob: None, top: Vec::new() };
            let (token, finished) = output.push(drawn, token == 25, true).unwrap();
            shown.push_str(&token.text);
            finish = finished;
        }
        let summary = output.summary(finish.unwrap_or(FinishReason::Cancelled));
        assert_eq!(summary.text, shown);
        (shown, finish, summary)
    }

    fn stop(text: &str) -> GenerateOptions {
        GenerateOptions { stop: vec![text.into()], ..GenerateOptions::default() }
    }

    #[test]
    fn answers_end_for_the_right_reason() {
        let plain = GenerateOptions::default;
        let (text, finish, summary) = run(plain(), &[0, 1, 25]);
        assert_eq!((text.as_str(), finish), ("ab", Some(FinishReason::End)));
        assert_eq!((summary.tokens.len(), summary.matched), (3, Some(MatchedStop::Token(25))));
        let (text, finish, _) = run(GenerateOptions { ignore_end: true, ..plain() }, &[0, 25]);
        assert_eq!((text.as_str(), finish), ("az", None));
        let (text, finish, summary) = run(GenerateOptions { stop_tokens: vec![2], ..plain() }, &[0, 2]);
        assert_eq!((text.as_str(), finish), ("a", Some(FinishReason::Stop)));
        assert_eq!(summary.matched, Some(MatchedStop::Token(2)));
        let (text, finish, _) = run(GenerateOptions { max_tokens: Some(2), ..plain() }, &[0, 1]);
        assert_eq!((text.as_str(), finish), ("ab", Some(FinishReason::Length)));
    }

    #[test]
    fn held_text_comes_with_the_last_token() {
        let (text, finish, summary) = run(stop("bc"), &[0, 1, 2]);
        assert_eq!((text.as_str(), finish), ("a", Some(FinishReason::Stop)));
        assert_eq!(summary.matched, Some(MatchedStop::Text("bc".into())));
        let (text, finish, _) = run(GenerateOptions { max_tokens: Some(2), ..stop("bc") }, &[0, 1]);
        assert_eq!((text.as_str(), finish), ("ab", Some(FinishReason::Length)));
        let (text, finish, _) = run(stop("bc"), &[0, 1, 25]);
        assert_eq!((text.as_str(), finish), ("ab", Some(FinishReason::End)));
        assert_eq!(
            run(stop("bc"), &[0, 1]).0,
            "a",
            "an answer that is broken off shows nothing that may be a stop"
        );
    }

    #[test]
    fn what_ended_an_answer_may_stay_in_it() {
        let (text, finish, _) = run(GenerateOptions { keep_stop: true, ..stop("bc") }, &[0, 1, 2]);
        assert_eq!((text.as_str(), finish), ("abc", Some(FinishReason::Stop)));
        let token = GenerateOptions { keep_stop: true, stop_tokens: vec![2], ..stop("bx") };
        let (text, finish, _) = run(token, &[0, 1, 2]);
        assert_eq!((text.as_str(), finish), ("abc", Some(FinishReason::Stop)));
        let (text, finish, _) = run(GenerateOptions { keep_stop: true, ..stop("bc") }, &[0, 25]);
        assert_eq!((text.as_str(), finish), ("a", Some(FinishReason::End)), "the model's end has no text");
    }

    #[test]
    fn short_answers_are_not_ended() {
        let options = GenerateOptions { min_tokens: 2, stop_tokens: vec![2], ..stop("b") };
        let mut output = Output::new(&Arc::new(options.clone()), 0, &[1], &[25], 26, None, Box::new(Letters));
        output.prepare().unwrap();
        let ruled_out: Vec<u32> = output.setting(26).changes.iter().map(|change| change.token).collect();
        assert_eq!(ruled_out, [25, 2]);
        let (text, finish, _) = run(options, &[0, 1, 3, 1]);
        assert_eq!((text.as_str(), finish), ("abd", Some(FinishReason::Stop)));
    }

    #[test]
    fn choices_draw_with_seeds_of_their_own() {
        let options = Arc::new(GenerateOptions::default());
        let output = Output::new(&options, u64::MAX, &[1], &[25], 26, None, Box::new(Letters));
        let other = output.fork(2, Box::new(Letters));
        assert_eq!((other.choice, other.summary(FinishReason::End).seed), (2, 1));
        assert_ne!(output.setting(26).draw, other.setting(26).draw);
    }
}
