//! Rules about tokens and words, beside a grammar or without one: which tokens an answer may consist of, and which
//! words it must not contain.

use std::sync::Arc;

use oscar_engine::{EngineError, TokenFilter, TokenMask};
use oscar_model::text::{TextError, Tokenizer};

/// What is asked of the tokens of an answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TokenRules {
    /// The only tokens that may be said; any when `None`.
    pub(crate) allowed: Option<Vec<u32>>,
    /// Words that must not be said.
    pub(crate) bad_words: Vec<String>,
}

impl TokenRules {
    /// Whether nothing is asked.
    pub(crate) fn is_empty(&self) -> bool {
        self.allowed.is_none() && self.bad_words.is_empty()
    }

    /// A filter that keeps to the rules, and to a grammar if there is one.
    ///
    /// A word is known by the tokens it encodes to, with and without a space before it. As in vLLM it can still be said
    /// in other tokens.
    pub(crate) fn filter(
        &self,
        tokenizer: &Tokenizer,
        grammar: Option<Box<dyn TokenFilter>>,
    ) -> Result<Box<dyn TokenFilter>, TextError> {
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
        Ok(Box::new(RuledFilter { allowed, bad: bad.into(), said: Vec::new(), grammar }))
    }
}

struct RuledFilter {
    allowed: Option<Arc<[u32]>>,
    bad: Arc<[Vec<u32>]>,
    /// The end of the answer so far, as much as the longest bad word can need.
    said: Vec<u32>,
    grammar: Option<Box<dyn TokenFilter>>,
}

impl TokenFilter for RuledFilter {
    fn allowed(&mut self, mask: &mut TokenMask) -> Result<(), EngineError> {
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
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<(), EngineError> {
        let longest = self.bad.iter().map(Vec::len).max().unwrap_or(0);
        self.said.push(token);
        let surplus = self.said.len().saturating_sub(longest);
        self.said.drain(..surplus);
        self.grammar.as_mut().map_or(Ok(()), |grammar| grammar.accept(token))
    }

    fn fork(&self) -> Box<dyn TokenFilter> {
        Box::new(RuledFilter {
            allowed: self.allowed.clone(),
            bad: Arc::clone(&self.bad),
            said: self.said.clone(),
            grammar: self.grammar.as_ref().map(|grammar| grammar.fork()),
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
        let tokenizer = tokenizer("qwen2");
        let rules = TokenRules { allowed: Some(vec![5, 7, 9]), ..TokenRules::default() };
        let mut filter = rules.filter(&tokenizer, None).unwrap();
        assert_eq!(allowed(&mut *filter, tokenizer.vocab_size() + 37), [5, 7, 9]);
        filter.accept(7).unwrap();
        assert_eq!(allowed(&mut *filter.fork(), tokenizer.vocab_size() + 37), [5, 7, 9]);
    }

    #[test]
    fn words_cannot_be_completed() {
        let tokenizer = tokenizer("qwen2");
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
    fn rules_hold_beside_a_grammar() {
        let tokenizer = tokenizer("qwen2");
        let factory = GrammarFactory::new(&tokenizer).unwrap();
        let grammar = factory.regex("[ab]+").unwrap();
        let rules = TokenRules { bad_words: vec!["a".to_owned()], ..TokenRules::default() };
        let mut filter = rules.filter(&tokenizer, Some(grammar)).unwrap();
        let next = allowed(&mut *filter, tokenizer.vocab_size());
        let texts: Vec<_> = next.iter().map(|&token| tokenizer.token_text(token).unwrap()).collect();
        assert!(texts.contains(&"b".to_owned()) && !texts.contains(&"a".to_owned()), "{texts:?}");
    }
}
