//! Regular expressions whose match ends an answer, in an automaton that goes on from token to token: each byte of an
//! answer is looked at once, in all states that the text so far has led to.
//!
//! It is run by the thread of the engine, between two tokens of everybody, so what it may cost matters more than what it
//! costs mostly. A byte costs at most one visit to each state, and the program is bounded. Faster automata make a state
//! of each set of states that comes up, and expressions can be made for which there is a new one with every byte.

use std::error::Error as _;
use std::sync::Arc;

use oscar_model::text::Tokenizer;
use regex_automata::nfa::thompson::{Compiler, Config, NFA, State, WhichCaptures};
use regex_automata::util::primitives::StateID;
use regex_automata::util::syntax;

use super::rule_error::RuleError;

/// The most bytes that the expressions of a request take when they are compiled: some thousands of states.
pub(super) const PROGRAM_BYTES: usize = 128 << 10;

/// How far before a place assertions such as `\b` look: the bytes of the longest character.
const LOOK_BEHIND: usize = 4;

/// Finds the end of an answer.
#[derive(Clone)]
pub(super) struct StopRegex {
    tokenizer: Arc<Tokenizer>,
    program: NFA,
    /// The states that the text so far leads to, before the steps that take no byte: these may depend on what follows.
    states: Vec<StateID>,
    /// The end of the text so far.
    tail: Vec<u8>,
    found: bool,
    visits: Visits,
}

/// The states that have been visited at a place.
#[derive(Clone, Default)]
struct Visits {
    /// The last place at which each state was visited, from the first byte on: until then there is none.
    last: Vec<u64>,
    place: u64,
    open: Vec<StateID>,
    /// The states to which the byte at the place leads.
    next: Vec<StateID>,
}

impl StopRegex {
    /// An automaton for the first match of any of the expressions, if there are expressions.
    pub(super) fn new(texts: &[String], tokenizer: &Arc<Tokenizer>) -> Result<Option<StopRegex>, RuleError> {
        if texts.is_empty() {
            return Ok(None);
        }
        if tokenizer.end_ids().is_empty() {
            return Err(RuleError::NoEnd);
        }
        let program = compile(texts)?;
        Ok(Some(StopRegex {
            tokenizer: Arc::clone(tokenizer),
            states: vec![program.start_unanchored()],
            tail: Vec::new(),
            found: false,
            visits: Visits::default(),
            program,
        }))
    }

    /// Whether an expression has matched.
    pub(super) fn found(&self) -> bool {
        self.found
    }

    /// Takes the next token of the answer.
    pub(super) fn accept(&mut self, token: u32) {
        if self.found || self.tokenizer.is_special(token) {
            return;
        }
        let mut text = std::mem::take(&mut self.tail);
        let begin = text.len();
        text.extend_from_slice(self.tokenizer.token_bytes(token).unwrap_or_default());
        for at in begin..text.len() {
            if self.visits.match_ends(&self.program, &self.states, &text, at) {
                self.found = true;
                return;
            }
            std::mem::swap(&mut self.states, &mut self.visits.next);
        }
        // The end of the answer so far is its end, as long as nothing follows.
        self.found = self.visits.match_ends(&self.program, &self.states, &text, text.len());
        text.drain(..text.len().saturating_sub(LOOK_BEHIND));
        self.tail = text;
    }
}

impl Visits {
    /// Whether a match ends before the byte at a place. Otherwise `self.next` are the states to which the byte leads; behind
    /// the end of the text there is no byte, and so no state.
    fn match_ends(&mut self, program: &NFA, states: &[StateID], text: &[u8], at: usize) -> bool {
        self.last.resize(program.states().len(), 0);
        self.place += 1;
        self.open.clear();
        self.open.extend(states);
        self.next.clear();
        let byte = text.get(at).copied();
        while let Some(id) = self.open.pop() {
            if std::mem::replace(&mut self.last[id.as_usize()], self.place) == self.place {
                continue;
            }
            let to = match program.state(id) {
                State::Match { .. } => return true,
                State::Fail => None,
                State::Look { look, next } => {
                    if program.look_matcher().matches(*look, text, at) {
                        self.open.push(*next);
                    }
                    None
                }
                State::Union { alternates } => {
                    self.open.extend(alternates.iter());
                    None
                }
                State::BinaryUnion { alt1, alt2 } => {
                    self.open.extend([alt1, alt2]);
                    None
                }
                State::Capture { next, .. } => {
                    self.open.push(*next);
                    None
                }
                State::ByteRange { trans } => {
                    byte.filter(|&byte| trans.matches_byte(byte)).map(|_| trans.next)
                }
                State::Sparse(list) => byte.and_then(|byte| list.matches_byte(byte)),
                State::Dense(list) => byte.and_then(|byte| list.matches_byte(byte)),
            };
            self.next.extend(to);
        }
        false
    }
}

fn compile(texts: &[String]) -> Result<NFA, RuleError> {
    let config = Config::new().which_captures(WhichCaptures::None).nfa_size_limit(Some(PROGRAM_BYTES));
    // Tokens may be parts of characters.
    let syntax = syntax::Config::new().utf8(false);
    let program = Compiler::new().configure(config).syntax(syntax).build_many(texts);
    program.map_err(|error| match error.source() {
        // The library draws the expression and points at the fault; the last line says what it is.
        Some(fault) => {
            let text = fault.to_string();
            RuleError::Regex(text.lines().last().unwrap_or_default().trim_start_matches("error: ").to_owned())
        }
        None => RuleError::RegexTooLarge { limit: PROGRAM_BYTES },
    })
}

#[cfg(test)]
mod tests {
    use regex::bytes::Regex;

    use super::super::testing::tokenizer;
    use super::*;

    fn stop(tokenizer: &Arc<Tokenizer>, texts: &[&str]) -> Result<StopRegex, RuleError> {
        let texts: Vec<String> = texts.iter().map(|&text| text.to_owned()).collect();
        StopRegex::new(&texts, tokenizer).map(Option::unwrap)
    }

    /// After each token it says what a search of the whole text says.
    #[test]
    fn it_finds_what_a_search_finds() {
        let tokenizer = Arc::new(tokenizer("qwen2"));
        let texts = [
            "It is 1 or 2.\n\nSo the end comes, not now: später, naïve über-end 😀 x!",
            "a\r\nbb\nccc 12:34:56 <end> the\u{2028}END\n",
            "\n",
            "éé e\u{301} word",
        ];
        for pattern in [
            "x",
            r"[0-9]\.",
            r"\n\n",
            "(?i)END",
            r"\bend\b",
            r"\Bend",
            r"(?-u:\b)end",
            "^It",
            "^a$",
            "(?m)^bb$",
            r"(?mR)^ccc",
            r"\z",
            "$",
            r"\w+:\w+",
            "s.ä",
            "(?s)1.*6",
            "[^a-z]{3}",
            "\\d{2}:",
            "p{1,3}ä?t",
            "😀",
            r"ü\b{start}",
            r"(?-u:\xc3)",
            "the|then|thence END",
            "a*",
            "",
            "[^\\s\\S]",
            r"\p{Greek}",
        ] {
            let search = Regex::new(pattern).unwrap();
            for text in texts {
                let mut stop = stop(&tokenizer, &["[^\\s\\S]", pattern]).unwrap();
                let mut said = Vec::new();
                for token in tokenizer.encode(text, false).unwrap() {
                    stop.accept(token);
                    said.extend_from_slice(tokenizer.token_bytes(token).unwrap());
                    assert_eq!(
                        stop.found(),
                        search.is_match(&said),
                        "{pattern:?} in {:?}",
                        said.escape_ascii()
                    );
                    if stop.found() {
                        break;
                    }
                }
            }
        }
    }

    /// What is far behind is not read again, and not forgotten either.
    #[test]
    fn a_match_may_be_longer_than_any_window() {
        let tokenizer = Arc::new(tokenizer("qwen2"));
        let mut stop = stop(&tokenizer, &["BEGIN[^!]*END"]).unwrap();
        let text = format!("BEGIN{} EN", " on and on".repeat(2000));
        for token in tokenizer.encode(&text, false).unwrap() {
            stop.accept(token);
        }
        assert!(!stop.found() && stop.tail.len() <= LOOK_BEHIND);
        for token in tokenizer.encode("D", false).unwrap() {
            stop.accept(token);
        }
        assert!(stop.found());
    }

    /// These make an automaton of sets of states new ones for nearly every byte, without end.
    #[test]
    fn expressions_made_to_cost_much_are_refused_or_cost_a_visit_per_state() {
        let tokenizer = Arc::new(tokenizer("qwen2"));
        for pattern in ["(a{1000}){1000}", "[ab]*a[ab]{9000}c", r"(\w{1,40} ){40}", "(?:a?){500}{50}"] {
            let refused = stop(&tokenizer, &[pattern]);
            assert!(matches!(refused, Err(RuleError::RegexTooLarge { .. })), "{pattern}");
        }
        let mut stop = stop(&tokenizer, &["[ab]*a[ab]{900}c", "(?:a?){400}a{400}c"]).unwrap();
        let states = stop.program.states().len();
        assert!(states <= PROGRAM_BYTES / 16, "{states}");
        let tokens = tokenizer.encode(&"abaababbab".repeat(300), false).unwrap();
        let mut bytes = 0;
        for token in tokens {
            bytes += tokenizer.token_bytes(token).unwrap().len() as u64;
            let before = stop.visits.place;
            stop.accept(token);
            assert!(stop.visits.place - before <= 1 + tokenizer.token_bytes(token).unwrap().len() as u64);
            assert!(stop.states.len() <= states);
        }
        assert!(bytes == 3000 && !stop.found());
    }

    #[test]
    fn expressions_that_people_write_fit() {
        let tokenizer = Arc::new(tokenizer("qwen2"));
        for pattern in
            [r"\bthe end\b", r"\w+@\w+\.\w+", r"(?i)\n\s*(user|human):", r"\d{4}-\d{2}-\d{2}", "[^\\n]{200}"]
        {
            assert!(stop(&tokenizer, &[pattern]).is_ok(), "{pattern}");
        }
    }

    #[test]
    fn faults_are_told_in_a_line() {
        let tokenizer = Arc::new(tokenizer("qwen2"));
        // Each has to be an expression by itself.
        for texts in [&["("][..], &["a)", "(b"]] {
            let error = stop(&tokenizer, texts).err().unwrap().to_string();
            assert!(error.contains("group") && !error.contains('\n'), "{error}");
        }
    }
}
