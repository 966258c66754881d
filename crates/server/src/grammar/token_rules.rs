//! Rules about tokens and words, beside a grammar or without one: which tokens an answer may consist of, which words it
//! must not contain, and which texts end it.

use std::sync::Arc;

use oscar_engine::{EngineError, TokenFilter, TokenMask};
use oscar_model::text::Tokenizer;

use super::rule_error::RuleError;
use super::stop_regex::{PROGRAM_BYTES, StopRegex};

/// What is asked of the tokens of an answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TokenRules {
    /// The only tokens that may be said; any when `None`.
    pub(crate) allowed: Option<Vec<u32>>,
    /// Words that must not be said.
    pub(crate) bad_words: Vec<String>,
    /// Regular expressions of texts with which the answer ends.
    pub(crate) stop_regex: Vec<String>,
}

impl TokenRules {
    /// Whether nothing is asked.
    pub(crate) fn is_empty(&self) -> bool {
        self.allowed.is_none() && self.bad_words.is_empty() && self.stop_regex.is_empty()
    }

    /// About as many bytes as a filter for them keeps while its answer has not begun. Its copies share nearly all of it.
    pub(crate) fn kept_bytes(&self, vocabulary: usize) -> usize {
        let allowed = self.allowed.as_ref().map_or(0, |_| vocabulary / 8);
        // With and without a space, in a token of four bytes for each byte at most.
        let bad = self.bad_words.iter().map(|word| 2 * (size_of::<Vec<u32>>() + 4 * (word.len() + 1)));
        let stop = if self.stop_regex.is_empty() { 0 } else { PROGRAM_BYTES };
        allowed + bad.sum::<usize>() + stop
    }

    /// A filter that keeps to the rules, and to a grammar if there is one.
    ///
    /// A word is known by the tokens it encodes to, with and without a space before it. As in vLLM it can still be said
    /// in other tokens.
    pub(crate) fn filter(
        &self,
        tokenizer: &Arc<Tokenizer>,
        grammar: Option<Box<dyn TokenFilter>>,
    ) -> Result<Box<dyn TokenFilter>, RuleError> {
        let mut bad = Vec::new();
        for word in &self.bad_words {
            let word = word.trim_start();
            for text in [word.to_owned(), format!(" {word}")] {
                let tokens = tokenizer.encode(&text, false)?;
                if !tokens.is_empty() && !bad.contains(&tokens) {
                    bad.push(tokens);
                }
            }
        }
        let allowed = self.allowed.as_ref().map(|tokens| {
            let mut mask = TokenMask::all(tokenizer.vocab_size());
            mask.keep_only(tokens.iter().copied());
            mask.words().into()
        });
        let stop = StopRegex::new(&self.stop_regex, tokenizer)?;
        let end = tokenizer.end_ids().into();
        let said = Vec::new();
        Ok(Box::new(RuledFilter { allowed, bad: bad.into(), said, stop, grammar, end, ended: false }))
    }
}

/// Keeps an answer to rules. Where a stop expression has matched, nothing may be said any more but the end.
struct RuledFilter {
    allowed: Option<Arc<[u32]>>,
    bad: Arc<[Vec<u32>]>,
    /// The end of the answer so far, as much as the longest bad word can need.
    said: Vec<u32>,
    stop: Option<StopRegex>,
    grammar: Option<Box<dyn TokenFilter>>,
    /// The tokens that end an answer.
    end: Arc<[u32]>,
    /// Whether nothing may be said any more but the end.
    ended: bool,
}

impl TokenFilter for RuledFilter {
    fn allowed(&mut self, mask: &mut TokenMask) -> Result<(), EngineError> {
        self.ended |= self.stop.as_ref().is_some_and(StopRegex::found);
        if self.ended {
            mask.keep_only(self.end.iter().copied());
            return Ok(());
        }
        if let Some(grammar) = &mut self.grammar {
            grammar.allowed(mask)?;
        }
        if let Some(allowed) = &self.allowed {
            // The model may have more rows than the vocabulary has tokens.
            let allowed = allowed.iter().copied().chain(std::iter::repeat(0));
            for (word, allowed) in mask.words_mut().iter_mut().zip(allowed) {
                *word &= allowed;
            }
        }
        for word in self.bad.iter() {
            if let Some((last, before)) = word.split_last()
                && self.said.ends_with(before)
            {
                mask.forbid(*last);
            }
        }
        // Rules and grammar may leave nothing that could be said.
        if mask.words().iter().all(|&word| word == 0) {
            self.ended = true;
            mask.keep_only(self.end.iter().copied());
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<(), EngineError> {
        let longest = self.bad.iter().map(Vec::len).max().unwrap_or(0);
        self.said.push(token);
        let surplus = self.said.len().saturating_sub(longest);
        self.said.drain(..surplus);
        if let Some(stop) = &mut self.stop {
            stop.accept(token);
        }
        match &mut self.grammar {
            Some(grammar) if !self.ended => grammar.accept(token),
            _ => Ok(()),
        }
    }

    fn fork(&self) -> Box<dyn TokenFilter> {
        Box::new(RuledFilter {
            allowed: self.allowed.clone(),
            bad: Arc::clone(&self.bad),
            said: self.said.clone(),
            stop: self.stop.clone(),
            grammar: self.grammar.as_ref().map(|grammar| grammar.fork()),
            end: Arc::clone(&self.end),
            ended: self.ended,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::GrammarFactory;
    use super::super::testing::{allowed, tokenizer};
    use super::*;

    #[test]
    fn only_allowed_tokens_may_be_said() {
        let tokenizer = Arc::new(tokenizer("qwen2"));
        let rules = TokenRules { allowed: Some(vec![5, 7, 9]), ..TokenRules::default() };
        let mut filter = rules.filter(&tokenizer, None).unwrap();
        assert_eq!(allowed(&mut *filter, tokenizer.vocab_size() + 37), [5, 7, 9]);
        filter.accept(7).unwrap();
        assert_eq!(allowed(&mut *filter.fork(), tokenizer.vocab_size() + 37), [5, 7, 9]);
    }

    #[test]
    fn words_cannot_be_completed() {
        let tokenizer = Arc::new(tokenizer("qwen2"));
        let word = "unbelievable nonsense";
        let tokens = tokenizer.encode(word, false).unwrap();
        assert!(tokens.len() > 1, "{tokens:?}");
        let rules = TokenRules { bad_words: vec![word.to_owned()], ..TokenRules::default() };
        let mut filter = rules.filter(&tokenizer, None).unwrap();
        let (last, before) = tokens.split_last().unwrap();
        let may = |filter: &mut dyn TokenFilter| allowed(filter, tokenizer.vocab_size()).contains(last);
        for &token in before {
            assert!(may(&mut *filter));
            filter.accept(token).unwrap();
        }
        let mut other = filter.fork();
        assert!(!may(&mut *filter) && !may(&mut *other));
        other.accept(before[0]).unwrap();
        assert!(may(&mut *other));
    }

    #[test]
    fn an_answer_ends_where_a_regex_matches() {
        let tokenizer = Arc::new(tokenizer("qwen2"));
        let rules =
            TokenRules { stop_regex: vec!["x".to_owned(), "[0-9]\\.".to_owned()], ..TokenRules::default() };
        let mut filter = rules.filter(&tokenizer, None).unwrap();
        let ends = |filter: &mut dyn TokenFilter| {
            let next = allowed(filter, tokenizer.vocab_size());
            next.iter().all(|&token| tokenizer.is_end(token))
        };
        for token in tokenizer.encode("It is 1 or 2", false).unwrap() {
            filter.accept(token).unwrap();
            assert!(!ends(&mut *filter));
        }
        let mut other = filter.fork();
        for token in tokenizer.encode(". So", false).unwrap() {
            filter.accept(token).unwrap();
        }
        assert!(ends(&mut *filter) && !ends(&mut *other));
        let bad = TokenRules { stop_regex: vec!["(".to_owned()], ..TokenRules::default() };
        assert!(matches!(bad.filter(&tokenizer, None), Err(RuleError::Regex(_))));
    }

    #[test]
    fn rules_hold_beside_a_grammar() {
        let tokenizer = Arc::new(tokenizer("qwen2"));
        let factory = GrammarFactory::new(&tokenizer).unwrap();
        let grammar = factory.regex("[ab]+").unwrap();
        let rules = TokenRules { bad_words: vec!["a".to_owned()], ..TokenRules::default() };
        let mut filter = rules.filter(&tokenizer, Some(grammar)).unwrap();
        let next = allowed(&mut *filter, tokenizer.vocab_size());
        let texts: Vec<_> = next.iter().map(|&token| tokenizer.token_text(token).unwrap()).collect();
        assert!(texts.contains(&"b".to_owned()) && !texts.contains(&"a".to_owned()), "{texts:?}");
    }

    #[test]
    fn an_answer_ends_where_nothing_is_left_to_say() {
        let tokenizer = Arc::new(tokenizer("qwen2"));
        let factory = GrammarFactory::new(&tokenizer).unwrap();
        let rules = TokenRules { bad_words: vec!["a".to_owned()], ..TokenRules::default() };
        let mut filter = rules.filter(&tokenizer, Some(factory.regex("a").unwrap())).unwrap();
        assert_eq!(allowed(&mut *filter, tokenizer.vocab_size()), tokenizer.end_ids());
        filter.accept(tokenizer.end_ids()[0]).unwrap();
    }
}
