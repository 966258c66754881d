//! Compiles constraints into token filters, for the vocabulary of one model.

use std::sync::Arc;

use llguidance::api::{GrammarWithLexer, ParserLimits, StopReason, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use oscar_engine::TokenFilter;
use oscar_model::text::Tokenizer;
use serde_json::{Value, json};

use super::GrammarError;
use super::ebnf;
use super::filter::GrammarFilter;
use super::limits::{check_grammar, check_regex, check_schemas};
use super::schema::prepared;
use super::structural_tag::{self, StructuralTag};
use super::tool_calls::{self, ForcedCalls};
use crate::parse::Tool;

/// Longer tokens, of which real vocabularies have none, are left out: the library's tree cannot hold them.
const LONGEST_TOKEN: usize = 1000;

/// So many tokens fit into the library's tree.
const MAX_TOKENS: usize = 1 << 21;

/// The most bytes of the library's complaint that a client is shown.
const LONGEST_REASON: usize = 400;

/// Grammars are compiled by recursion. Their depth is limited, but rules may refer to rules in long chains.
const COMPILER_STACK: usize = 256 << 20;

/// What an answer must look like (guided decoding, structured output).
#[derive(Clone, Debug)]
pub enum Constraint<'a> {
    /// The answer is a JSON object.
    JsonObject,
    /// The answer is JSON that satisfies a schema.
    JsonSchema(&'a Value),
    /// A regular expression matches the whole answer.
    Regex(&'a str),
    /// The answer follows a grammar in llguidance's variant of Lark, whose first rule is `start`.
    Lark(&'a str),
    /// The answer follows a grammar as SGLang's `ebnf` takes it, whose first rule is `root`.
    Ebnf(&'a str),
    /// The answer is one of these texts.
    Choice(&'a [String]),
    /// The answer is free text in which some texts begin JSON.
    StructuralTag(&'a StructuralTag),
    /// The answer consists of tool calls and nothing else.
    Calls(ForcedCalls<'a>),
}

/// Makes the [`TokenFilter`] of a request from a [`Constraint`]. It is built once for a model and shared.
///
/// It is public for programs that use the engine without the server and want answers in a given form, as the example
/// `mask_cost` does.
pub struct GrammarFactory {
    parsers: ParserFactory,
}

impl GrammarFactory {
    /// Takes the vocabulary of a model. Answers end with any of the tokens at which its generations stop.
    pub fn new(tokenizer: &Tokenizer) -> Result<GrammarFactory, GrammarError> {
        let mut tokens = Vec::with_capacity(tokenizer.vocab_size());
        for id in 0..tokenizer.vocab_size() as u32 {
            let bytes =
                tokenizer.token_bytes(id).map_err(|error| GrammarError::Vocabulary(error.to_string()))?;
            tokens.push((!tokenizer.is_special(id)).then_some(bytes));
        }
        GrammarFactory::from_tokens(&tokens, tokenizer.end_ids())
    }

    /// Takes the bytes of each token, `None` for those that are not text, and the tokens that end an answer.
    pub fn from_tokens(tokens: &[Option<&[u8]>], end: &[u32]) -> Result<GrammarFactory, GrammarError> {
        let count = tokens.len();
        let refused = |reason: String| Err(GrammarError::Vocabulary(reason));
        let Some(&first) = end.first() else {
            return refused("it has no token that ends an answer".to_owned());
        };
        if let Some(token) = end.iter().find(|&&token| token as usize >= count) {
            return refused(format!("token {token} ends an answer and is not one of the {count} tokens"));
        }
        if count > MAX_TOKENS {
            return refused(format!("{count} tokens are more than {MAX_TOKENS}"));
        }
        let text = |(id, bytes): (usize, &Option<&[u8]>)| {
            // The byte 0xff, which no text contains, has a meaning of its own in the library.
            let usable = |bytes: &&[u8]| bytes.len() <= LONGEST_TOKEN && !bytes.contains(&0xff);
            let ends = end.contains(&(id as u32));
            bytes.filter(usable).filter(|_| !ends).map(<[u8]>::to_vec).unwrap_or_default()
        };
        let words: Vec<Vec<u8>> = tokens.iter().enumerate().map(text).collect();
        let trie = TokTrie::from(&TokRxInfo::new(count as u32, first), &words).with_eos_tokens(end);
        let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let capabilities = InferenceCapabilities::default();
        let slices = SlicedBiasComputer::general_slices();
        let mut parsers = ParserFactory::new(&environment, capabilities, &slices)
            .map_err(|error| GrammarError::Vocabulary(error.to_string()))?;
        parsers.quiet();
        *parsers.limits_mut() = ParserLimits {
            // One or two KB each, for every answer under way.
            max_lexer_states: 20_000,
            max_grammar_size: 200_000,
            // The client should hear what is wrong, not what the library was doing.
            verbose_errors: false,
            ..ParserLimits::default()
        };
        Ok(GrammarFactory { parsers })
    }

    /// A filter for any JSON object.
    pub fn json_object(&self) -> Result<Box<dyn TokenFilter>, GrammarError> {
        self.filter(&Constraint::JsonObject, None)
    }

    /// A filter for JSON that satisfies a schema.
    pub fn json_schema(&self, schema: &Value) -> Result<Box<dyn TokenFilter>, GrammarError> {
        self.filter(&Constraint::JsonSchema(schema), None)
    }

    /// A filter for texts that a regular expression matches as a whole.
    pub fn regex(&self, regex: &str) -> Result<Box<dyn TokenFilter>, GrammarError> {
        self.filter(&Constraint::Regex(regex), None)
    }

    /// A filter for a grammar in llguidance's variant of Lark.
    pub fn lark(&self, grammar: &str) -> Result<Box<dyn TokenFilter>, GrammarError> {
        self.filter(&Constraint::Lark(grammar), None)
    }

    /// A filter for a grammar as SGLang's `ebnf` takes it.
    pub fn ebnf(&self, grammar: &str) -> Result<Box<dyn TokenFilter>, GrammarError> {
        self.filter(&Constraint::Ebnf(grammar), None)
    }

    /// Makes the filter of a request. With `after`, anything may be said until this text has been: the marker that
    /// ends the reasoning of an answer that begins with it.
    ///
    /// Compiling takes from under a millisecond to some tens of them, for the largest schemas.
    pub fn filter(
        &self,
        constraint: &Constraint<'_>,
        after: Option<&str>,
    ) -> Result<Box<dyn TokenFilter>, GrammarError> {
        if let Constraint::Calls(calls) = constraint {
            return self.forced_calls(calls, after);
        }
        let (what, grammar) = grammar_of(constraint)?;
        let matcher = self.compile(within(grammar, after)).map_err(|reason| {
            let ours = matches!(constraint, Constraint::StructuralTag(_));
            GrammarError::Invalid { what, reason: if ours { without_place(&reason) } else { reason } }
        })?;
        Ok(Box::new(GrammarFilter::new(matcher)))
    }

    fn forced_calls(
        &self,
        forced: &ForcedCalls<'_>,
        after: Option<&str>,
    ) -> Result<Box<dyn TokenFilter>, GrammarError> {
        let what = "the set of tools";
        let chosen = forced.chosen()?;
        check_schemas(what, chosen.iter().map(|tool| &tool.parameters))?;
        let compile = |tools: &[&Tool], loose: &[&str], after| {
            self.compile(within(
                GrammarWithLexer::from_lark(tool_calls::grammar(forced, tools, loose)),
                after,
            ))
        };
        let matcher = match compile(&chosen, &[], after) {
            Ok(matcher) => matcher,
            Err(_) => {
                // Each by itself, so that the one at fault can be named, or done without.
                let mut loose = Vec::new();
                for tool in &chosen {
                    match compile(&[tool], &[], None) {
                        Ok(_) => {}
                        Err(_) if !tool.strict => loose.push(tool.name.as_str()),
                        Err(reason) => {
                            let (tool, reason) = (tool.name.clone(), without_place(&reason));
                            return Err(GrammarError::Tool { tool, reason });
                        }
                    }
                }
                compile(&chosen, &loose, after)
                    .map_err(|reason| GrammarError::Invalid { what, reason: without_place(&reason) })?
            }
        };
        Ok(Box::new(GrammarFilter::new(matcher)))
    }

    fn compile(&self, grammar: TopLevelGrammar) -> Result<Matcher, String> {
        std::thread::scope(|scope| {
            let compile = || {
                let mut matcher = Matcher::new(self.parsers.create_parser(grammar));
                // The first mask is where a lexer that is too large shows.
                if matcher.get_error().is_none() && !matcher.is_stopped() {
                    let _ = matcher.compute_mask();
                }
                match matcher.get_error() {
                    Some(error) => Err(tidy(&error)),
                    None if !matcher.stop_reason().is_ok() => Err("it is too complex".to_owned()),
                    None => Ok(matcher),
                }
            };
            let thread = std::thread::Builder::new().stack_size(COMPILER_STACK).spawn_scoped(scope, compile);
            let thread = thread.map_err(|error| format!("no thread to compile it: {error}"))?;
            thread.join().unwrap_or_else(|_| Err("it cannot be compiled".to_owned()))
        })
    }
}

/// What a client may read of the library's complaint: no backtraces, and not a whole schema again.
fn tidy(error: &str) -> String {
    if error.starts_with("panic") {
        return "it cannot be compiled".to_owned();
    }
    // The library's mark for the details that it leaves out.
    let error = error.trim_end().trim_end_matches("<non-verbose/>").trim_end();
    if error == StopReason::NoExtensionBias.to_string() {
        return "no answer can satisfy it".to_owned();
    }
    let end = error.floor_char_boundary(LONGEST_REASON);
    if end < error.len() { format!("{}…", &error[..end]) } else { error.to_owned() }
}

/// The library's complaint about a grammar that was written here, without the place in it, which the client has not seen.
fn without_place(error: &str) -> String {
    let line = error.lines().next().unwrap_or_default();
    let place = line.strip_prefix("at ").and_then(|line| line.split_once("): ")).map(|(_, error)| error);
    let error = place.unwrap_or(line);
    error.strip_prefix("failed to compile JSON schema: ").unwrap_or(error).to_owned()
}

impl std::fmt::Debug for GrammarFactory {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let tokens = self.parsers.tok_env().tok_trie().vocab_size();
        formatter.debug_struct("GrammarFactory").field("tokens", &tokens).finish_non_exhaustive()
    }
}

/// The grammar, and what to call it when it cannot be used.
fn grammar_of(constraint: &Constraint<'_>) -> Result<(&'static str, GrammarWithLexer), GrammarError> {
    Ok(match constraint {
        Constraint::JsonObject => ("JSON", from_schema(&json!({"type": "object"}))),
        Constraint::JsonSchema(schema) => {
            check_schemas("the JSON schema", [*schema])?;
            ("the JSON schema", from_schema(schema))
        }
        Constraint::Regex(regex) => {
            check_regex(regex)?;
            ("the regular expression", GrammarWithLexer::from_regex(regex))
        }
        Constraint::Lark(grammar) => {
            check_grammar(grammar)?;
            ("the grammar", GrammarWithLexer::from_lark((*grammar).to_owned()))
        }
        Constraint::Ebnf(grammar) => {
            check_grammar(grammar)?;
            ("the grammar", GrammarWithLexer::from_lark(ebnf::to_lark(grammar)?))
        }
        Constraint::Choice(texts) => {
            let literals: Vec<_> = texts.iter().map(|text| Value::from(text.as_str()).to_string()).collect();
            let grammar = format!("start: {}", literals.join(" | "));
            check_grammar(&grammar)?;
            ("the list of choices", GrammarWithLexer::from_lark(grammar))
        }
        Constraint::StructuralTag(tag) => {
            let what = "the structural tag";
            check_schemas(what, tag.structures.iter().map(|structure| &structure.schema))?;
            (what, GrammarWithLexer::from_lark(structural_tag::to_lark(tag)))
        }
        Constraint::Calls(_) => unreachable!("forced calls are compiled tool by tool"),
    })
}

fn from_schema(schema: &Value) -> GrammarWithLexer {
    GrammarWithLexer::from_json_schema(prepared(schema))
}

/// The grammar behind the end of the reasoning.
fn within(grammar: GrammarWithLexer, after: Option<&str>) -> TopLevelGrammar {
    let Some(marker) = after else { return TopLevelGrammar::from_grammar(grammar) };
    let marker = Value::from(marker);
    let outer = format!(
        "start: reasoning BREAKS? @answer\nreasoning[suffix={marker}]: /(?s:.*)/\nBREAKS: /\\n{{1,4}}/\n"
    );
    let answer = GrammarWithLexer { name: Some("answer".to_owned()), ..grammar };
    TopLevelGrammar { grammars: vec![GrammarWithLexer::from_lark(outer), answer], max_tokens: None }
}
