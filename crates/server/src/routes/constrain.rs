//! Compiles what a request says about the format of its answer into a filter of tokens.

use std::sync::Arc;

use oscar_engine::TokenFilter;

use crate::grammar::{GrammarError, RuleError};
use crate::protocol::{AnswerFormat, ApiError, text_error};
use crate::state::AppState;

/// What is asked of the form of an answer, if there is anything to keep it to.
pub(crate) fn asked_form(app: &AppState, format: AnswerFormat) -> Result<Option<AnswerFormat>, ApiError> {
    let asks = format.constraint(app.options.tool_call_parser)?.is_some() || !format.rules.is_empty();
    Ok(asks.then_some(format))
}

/// The filter that keeps an answer to its form, if the request asks for one. With `after`, the answer is free until
/// it contains this text, the marker that closes the reasoning.
pub(crate) async fn token_filter(
    app: &Arc<AppState>,
    format: Option<AnswerFormat>,
    after: Option<&'static str>,
) -> Result<Option<Box<dyn TokenFilter>>, ApiError> {
    let Some(format) = format else { return Ok(None) };
    // Compiling a grammar can take as long as tokenizing a long text.
    app.encode(usize::MAX, move |app| compile(app, &format, after)).await
}

fn compile(
    app: &AppState,
    format: &AnswerFormat,
    after: Option<&'static str>,
) -> Result<Option<Box<dyn TokenFilter>>, ApiError> {
    let grammar = match format.constraint(app.options.tool_call_parser)? {
        None => None,
        Some(constraint) => {
            let factory = app.grammars.get_or_init(|| app.new_grammars()).as_ref();
            let filter = factory.map_err(Clone::clone).and_then(|factory| factory.filter(&constraint, after));
            Some(filter.map_err(|error| about(format, error))?)
        }
    };
    if format.rules.is_empty() {
        return Ok(grammar);
    }
    let tokenizer = app.model.tokenizer();
    let vocabulary = tokenizer.vocab_size();
    if format.rules.allowed.iter().flatten().any(|&id| id as usize >= vocabulary) {
        let message = format!("allowed_token_ids: token ids must be below {vocabulary}");
        return Err(ApiError::bad_field("allowed_token_ids", message));
    }
    let filter = format.rules.filter(tokenizer, grammar);
    filter.map(Some).map_err(|error| match error {
        RuleError::Text(error) => text_error("bad_words", &error),
        error => ApiError::bad_field("stop_regex", error.to_string()),
    })
}

/// The error of a grammar that cannot be used, with the field that has it.
fn about(format: &AnswerFormat, error: GrammarError) -> ApiError {
    let of_content = matches!(
        error,
        GrammarError::TooLarge { .. } | GrammarError::TooDeep { .. } | GrammarError::Invalid { .. }
    );
    let error = ApiError::from(error);
    if of_content && error.param() == Some("response_format") {
        return error.with_param(format.content_field);
    }
    error
}
