//! Answers in a given shape: JSON by a schema, a regular expression, a grammar, a tool call.
//!
//! A [`GrammarFactory`] knows the bytes of every token and is built once for a model. Each request gets a
//! [`TokenFilter`](oscar_engine::TokenFilter) from it, which the engine asks which tokens may come next. The work is
//! bounded on the way in (size and depth of what the client sent) and by the library's limits on what it compiles to.

mod compiled_size;
mod ebnf;
#[cfg(test)]
mod engine_tests;
mod factory;
mod filter;
mod limits;
mod rule_error;
mod schema;
mod stop_regex;
mod structural_tag;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
mod token_rules;
mod tool_calls;

pub use factory::{Constraint, GrammarFactory};
pub(crate) use rule_error::RuleError;
pub(crate) use schema::closed;
pub use structural_tag::{StructuralTag, TagStructure};
pub(crate) use token_rules::TokenRules;
pub use tool_calls::ForcedCalls;

/// Why an answer cannot be constrained as asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
#[non_exhaustive]
pub enum GrammarError {
    #[error("the model's vocabulary cannot be used for constrained answers: {0}")]
    Vocabulary(String),
    #[error("{what} has {size} bytes, at most {limit} are allowed")]
    TooLarge { what: &'static str, size: usize, limit: usize },
    #[error("{what} is nested more than {limit} levels deep")]
    TooDeep { what: &'static str, limit: usize },
    #[error("{what} cannot be used: {reason}")]
    Invalid { what: &'static str, reason: String },
    #[error("tool_choice names `{name}`, which is not among the tools")]
    UnknownTool { name: String },
    #[error("tool_choice demands a call, and there are no tools")]
    NoTools,
    #[error("the schema of tool `{tool}` cannot be used: {reason}")]
    Tool { tool: String, reason: String },
}
