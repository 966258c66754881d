//! Requests and their options, and the checks that are made before a request runs.

use std::hash::{DefaultHasher, Hash, Hasher};

use oscar_kv::{PrefixKey, Tier};

use crate::error::EngineError;
use crate::filter::TokenFilter;
use crate::pooling::Pooling;

/// The largest number of alternatives to a token that a request may want.
pub const MAX_TOP_LOGPROBS: usize = 100;

/// How the tokens of an answer are drawn.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingOptions {
    /// Divides the logits before sampling; 0 always takes the most likely token.
    pub temperature: f32,
    /// Keep the smallest set of tokens whose probability reaches this.
    pub top_p: f32,
    /// Keep the tokens whose information is nearest to the entropy, until their probability reaches this.
    pub typical_p: f32,
    /// Keep this many tokens; 0 keeps all.
    pub top_k: usize,
    /// Drop tokens less likely than this share of the most likely one.
    pub min_p: f32,
    /// The seed of the random draws; a fresh one is taken and reported when there is none.
    pub seed: Option<u64>,
    /// Divides positive and multiplies negative logits of tokens that the prompt or the answer holds; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens that the answer holds.
    pub presence_penalty: f32,
    /// Subtracted from the logit of a token once for each time the answer holds it.
    pub frequency_penalty: f32,
    /// Numbers that are added to the logits of single tokens.
    pub logit_bias: Vec<(u32, f32)>,
}

impl Default for SamplingOptions {
    fn default() -> Self {
        SamplingOptions {
            temperature: 0.0,
            top_p: 1.0,
            typical_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            seed: None,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
        }
    }
}

impl SamplingOptions {
    fn validate(&self, vocabulary: usize) -> Result<(), EngineError> {
        let check = |good: bool, name, value: f32, expected| {
            if good { Ok(()) } else { Err(EngineError::bad_option(name, value, expected)) }
        };
        let Self { temperature, top_p, typical_p, min_p, repetition_penalty, .. } = *self;
        let positive = "a number above 0";
        check(
            temperature.is_finite() && temperature >= 0.0,
            "temperature",
            temperature,
            "a number of 0 or more",
        )?;
        check(top_p > 0.0 && top_p <= 1.0, "top_p", top_p, "a number above 0, at most 1")?;
        check(typical_p > 0.0 && typical_p <= 1.0, "typical_p", typical_p, "a number above 0, at most 1")?;
        check((0.0..=1.0).contains(&min_p), "min_p", min_p, "a number from 0 to 1")?;
        let repetition = repetition_penalty.is_finite() && repetition_penalty > 0.0;
        check(repetition, "repetition_penalty", repetition_penalty, positive)?;
        for (name, value) in
            [("presence_penalty", self.presence_penalty), ("frequency_penalty", self.frequency_penalty)]
        {
            check(value.is_finite(), name, value, "a number")?;
        }
        for &(token, bias) in &self.logit_bias {
            check(bias.is_finite(), "logit_bias", bias, "numbers")?;
            if token as usize >= vocabulary {
                let expected = format!("token ids below {vocabulary}");
                return Err(EngineError::bad_option("logit_bias", token, expected));
            }
        }
        Ok(())
    }
}

/// When and how a request ends.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateOptions {
    /// Most tokens to generate; `None` goes on until the model or the context ends.
    pub max_tokens: Option<usize>,
    /// Tokens before which neither the model nor a stop may end the answer.
    pub min_tokens: usize,
    /// How the tokens of an answer are drawn.
    pub sampling: SamplingOptions,
    /// Texts that end the answer; they are not part of it unless `keep_stop` says so.
    pub stop: Vec<String>,
    /// Tokens that end the answer, besides the model's own; their text is not part of it.
    pub stop_tokens: Vec<u32>,
    /// Leave the stop text or the text of the stop token that ended the answer in it.
    pub keep_stop: bool,
    /// Go on when the model draws a token that ends the answer.
    pub ignore_end: bool,
    /// The answer is a text of its own rather than the rest of the prompt: the space that some tokenizers put before
    /// the first word is dropped.
    pub new_text: bool,
    /// Show the text of special tokens.
    pub keep_special: bool,
    /// Report the probability of each token, and of this many alternatives.
    pub logprobs: Option<usize>,
    /// Report the probability of each token of the prompt from `score_from` on but the first, and of this many
    /// alternatives. The prompt is then computed from there on, whatever the cache holds.
    pub prompt_logprobs: Option<usize>,
    /// The first token of the prompt whose probability is wanted.
    pub score_from: usize,
    /// Report the hidden states of the prompt after the final norm as one vector.
    pub embedding: Option<Pooling>,
    /// Answers to the same prompt. Choice `i` draws with the seed plus `i`.
    pub n: usize,
    /// Requests share cached prompts only with requests of the same salt.
    pub cache_salt: Option<String>,
    /// How exactly the history of the answer is kept.
    pub tier: Tier,
    /// With [`Tier::Exact`]: give up bf16 history for sealed pages where somebody would lose all pages otherwise.
    pub demote: bool,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        GenerateOptions {
            max_tokens: None,
            min_tokens: 0,
            sampling: SamplingOptions::default(),
            stop: Vec::new(),
            stop_tokens: Vec::new(),
            keep_stop: false,
            ignore_end: false,
            new_text: false,
            keep_special: false,
            logprobs: None,
            prompt_logprobs: None,
            score_from: 0,
            embedding: None,
            n: 1,
            cache_salt: None,
            tier: Tier::default(),
            demote: false,
        }
    }
}

/// A salt as the cache wants it; 0 for none.
pub(crate) fn salt_of(salt: Option<&str>) -> u64 {
    salt.map_or(0, |salt| {
        let mut hasher = DefaultHasher::new();
        salt.hash(&mut hasher);
        hasher.finish().max(1)
    })
}

impl GenerateOptions {
    /// Requests with the same key share pages.
    pub(crate) fn key(&self) -> PrefixKey {
        PrefixKey { salt: salt_of(self.cache_salt.as_deref()), tier: self.tier }
    }

    fn validate(&self, limits: &Limits) -> Result<(), EngineError> {
        self.sampling.validate(limits.vocabulary)?;
        if limits.contexts.of_tier(self.tier).is_none() {
            let expected = "a precision that the server offers (--kv-tiers)";
            return Err(EngineError::bad_option("kv_precision", self.tier, expected));
        }
        if self.demote && self.tier != Tier::Exact {
            let expected = "false unless kv_precision is bf16 beside a sealed type";
            return Err(EngineError::bad_option("kv_demote", true, expected));
        }
        if self.demote && limits.deterministic {
            let expected = "false on a server that is --deterministic";
            return Err(EngineError::bad_option("kv_demote", true, expected));
        }
        if self.n == 0 || self.n > limits.choices {
            return Err(EngineError::bad_option("n", self.n, format!("1 to {}", limits.choices)));
        }
        if let Some(most) = self.max_tokens.filter(|&most| self.min_tokens > most) {
            return Err(EngineError::bad_option(
                "min_tokens",
                self.min_tokens,
                format!("at most max_tokens, {most}"),
            ));
        }
        for (name, count) in [("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)] {
            if let Some(count) = count.filter(|&count| count > MAX_TOP_LOGPROBS) {
                return Err(EngineError::bad_option(name, count, format!("at most {MAX_TOP_LOGPROBS}")));
            }
        }
        Ok(())
    }
}

/// A prompt and what to do with it.
#[derive(Default)]
pub struct Request {
    /// The tokens of the prompt.
    pub prompt: Vec<u32>,
    /// How the answer is drawn, when it ends and what is reported of it.
    pub options: GenerateOptions,
    /// A grammar or another filter that restricts the tokens of the answer, if there is one.
    pub filter: Option<Box<dyn TokenFilter>>,
}

impl Request {
    /// A request without a filter.
    pub fn new(prompt: impl AsRef<[u32]>, options: GenerateOptions) -> Request {
        Request { prompt: prompt.as_ref().to_vec(), options, filter: None }
    }

    /// Checks everything that can be known before the request runs.
    pub(crate) fn validate(&self, limits: &Limits) -> Result<(), EngineError> {
        self.options.validate(limits)?;
        if self.prompt.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        let (tokens, context) = (self.prompt.len(), limits.contexts.own);
        if tokens > context {
            return Err(EngineError::PromptTooLong { tokens, context });
        }
        let tier = self.options.tier;
        if let Some(most) = limits.contexts.of_tier(tier)
            && tokens > most
        {
            return Err(EngineError::HistoryTooLong { tier, tokens, most, context });
        }
        let vocabulary = limits.vocabulary;
        match self.prompt.iter().find(|&&token| token as usize >= vocabulary) {
            Some(&token) => Err(EngineError::TokenOutOfRange { token, vocabulary }),
            None => Ok(()),
        }
    }
}

impl std::fmt::Debug for Request {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Request")
            .field("prompt", &self.prompt)
            .field("options", &self.options)
            .field("filter", &self.filter.is_some())
            .finish()
    }
}

/// Limits of the engine that requests are checked against.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) contexts: Contexts,
    /// The number of rows of the embedding; token ids are below it.
    pub(crate) vocabulary: usize,
    /// The largest number of answers to one prompt.
    pub(crate) choices: usize,
    /// Whether the same request gets the same tokens whatever else runs.
    pub(crate) deterministic: bool,
}

/// How many tokens a sequence may have in each tier.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Contexts {
    /// The limit in the cache's own tier.
    pub(crate) own: usize,
    /// The limit in [`Tier::High`], if requests may choose that tier.
    pub(crate) high: Option<usize>,
    /// The limit with the history in bf16, if requests may choose that tier.
    pub(crate) bf16: Option<usize>,
}

impl Contexts {
    /// Tokens that a sequence of a tier may have; `None` for a tier that is not offered.
    pub(crate) fn of_tier(&self, tier: Tier) -> Option<usize> {
        match tier {
            Tier::Sealed => Some(self.own),
            Tier::High => self.high,
            Tier::Exact => self.bf16,
        }
    }

    /// Tokens that the sequence of a request may have. One that can be demoted goes on beyond what bf16 pages hold.
    pub(crate) fn of(&self, options: &GenerateOptions) -> usize {
        self.of_tier(options.tier).filter(|_| !options.demote).unwrap_or(self.own)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits {
        contexts: Contexts { own: 100, high: None, bf16: None },
        vocabulary: 50,
        choices: 4,
        deterministic: false,
    };

    fn refused(options: GenerateOptions) -> String {
        Request::new([1, 2, 3], options).validate(&LIMITS).unwrap_err().to_string()
    }

    fn sampling(sampling: SamplingOptions) -> GenerateOptions {
        GenerateOptions { sampling, ..GenerateOptions::default() }
    }

    #[test]
    fn the_field_the_value_and_what_was_expected_are_named() {
        let plain = SamplingOptions::default;
        for value in [-1.0, f32::NAN, f32::INFINITY] {
            let text = refused(sampling(SamplingOptions { temperature: value, ..plain() }));
            assert_eq!(text, format!("temperature is {value}, expected a number of 0 or more"));
        }
        assert!(refused(sampling(SamplingOptions { top_p: 0.0, ..plain() })).starts_with("top_p is 0,"));
        assert!(refused(sampling(SamplingOptions { min_p: 1.5, ..plain() })).starts_with("min_p is 1.5,"));
        let repetition = SamplingOptions { repetition_penalty: 0.0, ..plain() };
        assert!(refused(sampling(repetition)).starts_with("repetition_penalty is 0,"));
        let presence = SamplingOptions { presence_penalty: f32::NAN, ..plain() };
        assert!(refused(sampling(presence)).starts_with("presence_penalty is NaN,"));
        let frequency = SamplingOptions { frequency_penalty: f32::INFINITY, ..plain() };
        assert!(refused(sampling(frequency)).starts_with("frequency_penalty is inf,"));
        let bias = SamplingOptions { logit_bias: vec![(50, 1.0)], ..plain() };
        assert_eq!(refused(sampling(bias)), "logit_bias is 50, expected token ids below 50");
        let bias = SamplingOptions { logit_bias: vec![(5, f32::NEG_INFINITY)], ..plain() };
        assert!(refused(sampling(bias)).starts_with("logit_bias is -inf,"));
    }

    #[test]
    fn counts_are_bounded() {
        let plain = GenerateOptions::default;
        assert_eq!(refused(GenerateOptions { n: 0, ..plain() }), "n is 0, expected 1 to 4");
        assert_eq!(refused(GenerateOptions { n: 5, ..plain() }), "n is 5, expected 1 to 4");
        let short = GenerateOptions { max_tokens: Some(3), min_tokens: 4, ..plain() };
        assert_eq!(refused(short), "min_tokens is 4, expected at most max_tokens, 3");
        assert!(refused(GenerateOptions { logprobs: Some(101), ..plain() }).starts_with("logprobs is 101"));
        let odd = GenerateOptions { max_tokens: Some(0), logprobs: Some(0), n: 4, ..plain() };
        assert!(Request::new([1], odd).validate(&LIMITS).is_ok());
    }

    #[test]
    fn prompts_are_bounded() {
        let check = |prompt: Vec<u32>| Request::new(prompt, GenerateOptions::default()).validate(&LIMITS);
        assert!(matches!(check(vec![]), Err(EngineError::EmptyPrompt)));
        let long = check(vec![1; 101]);
        assert!(matches!(long, Err(EngineError::PromptTooLong { tokens: 101, context: 100 })));
        let strange = check(vec![1, 50]);
        assert!(matches!(strange, Err(EngineError::TokenOutOfRange { token: 50, vocabulary: 50 })));
        assert!(check(vec![49; 100]).is_ok());
    }

    #[test]
    fn a_history_in_bf16_must_be_offered_and_fit() {
        let exact = |demote| GenerateOptions { tier: Tier::Exact, demote, ..GenerateOptions::default() };
        let offered = Limits { contexts: Contexts { own: 100, high: Some(80), bf16: Some(70) }, ..LIMITS };
        let check = |limits: &Limits, tokens: usize, options: GenerateOptions| {
            Request::new(vec![1; tokens], options).validate(limits).map_err(|error| error.to_string())
        };
        assert!(check(&LIMITS, 1, exact(false)).unwrap_err().contains("--kv-tiers"));
        assert!(
            check(&offered, 70, exact(true)).is_ok()
                && check(&offered, 100, GenerateOptions::default()).is_ok()
        );
        let long = check(&offered, 71, exact(false)).unwrap_err();
        assert!(long.contains("has 71 tokens") && long.contains("bf16 holds 70"), "{long}");
        let high = |demote| GenerateOptions { tier: Tier::High, demote, ..GenerateOptions::default() };
        assert!(check(&LIMITS, 1, high(false)).unwrap_err().starts_with("kv_precision is high"));
        assert!(check(&offered, 80, high(false)).is_ok() && check(&offered, 1, high(true)).is_err());
        assert!(check(&offered, 81, high(false)).unwrap_err().contains("high holds 80"));
        assert_eq!(offered.contexts.of(&high(false)), 80);
        let sealed = GenerateOptions { demote: true, ..GenerateOptions::default() };
        assert!(check(&offered, 1, sealed).unwrap_err().starts_with("kv_demote is true"));
        let deterministic = Limits { deterministic: true, ..offered };
        assert!(check(&deterministic, 1, exact(true)).unwrap_err().contains("--deterministic"));
        assert!(check(&deterministic, 1, exact(false)).is_ok());
        // What can be demoted may grow beyond the bf16 pages.
        let of = |options: &GenerateOptions| offered.contexts.of(options);
        assert_eq!((of(&exact(false)), of(&exact(true)), of(&GenerateOptions::default())), (70, 100, 100));
    }

    #[test]
    fn salts_differ_and_none_is_zero() {
        let salt = |text: Option<&str>| {
            let cache_salt = text.map(str::to_owned);
            GenerateOptions { cache_salt, ..GenerateOptions::default() }.key().salt
        };
        assert_eq!(salt(None), 0);
        assert_ne!(salt(Some("")), 0);
        assert_ne!(salt(Some("a")), salt(Some("b")));
        assert_eq!(salt(Some("a")), salt(Some("a")));
    }
}
