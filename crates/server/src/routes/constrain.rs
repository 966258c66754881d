//! Compiles what a request says about the format of its answer into a filter of tokens.

use std::sync::Arc;

use oscar_engine::{EngineError, TokenFilter, TokenMask};

use crate::grammar::{GrammarError, RuleError};
use crate::http::KeptMemory;
use crate::protocol::{AnswerFormat, ApiError, text_error};
use crate::state::AppState;

/// What is asked of the form of an answer, if there is anything to keep it to.
pub(crate) fn asked_form(app: &AppState, format: AnswerFormat) -> Result<Option<AnswerFormat>, ApiError> {
    let asks = format.constraint(app.options.tool_call_parser)?.is_some() || !format.rules.is_empty();
    Ok(asks.then_some(format))
}

/// Copies of a compiled grammar share most of it; what each has of its own is about this part.
const OWN_PART_OF_COPY: usize = 8;

/// The filter that keeps an answer to its form, if the request asks for one, and of which there will be a copy for each of
/// its prompts. With `after`, the answer is free until it contains this text, the marker that closes the reasoning.
pub(crate) async fn token_filter(
    app: &Arc<AppState>,
    format: Option<AnswerFormat>,
    prompts: usize,
    after: Option<&'static str>,
) -> Result<Option<Box<dyn TokenFilter>>, ApiError> {
    let Some(format) = format else { return Ok(None) };
    // The request keeps its grammar while it waits for its turn, which can be long.
    let constraint = format.constraint(app.options.tool_call_parser)?;
    let bytes = constraint.map_or(0, |constraint| constraint.compiled_bytes());
    let copies = (bytes / OWN_PART_OF_COPY).saturating_mul(prompts);
    let rules = format.rules.kept_bytes(app.model.tokenizer().vocab_size());
    let memory = Arc::new(app.bodies.keep(bytes.saturating_add(copies).saturating_add(rules))?);
    let filter = app.compile(move |app| compile(app, &format, after)).await?;
    Ok(filter.map(|filter| Box::new(KeptFilter { filter, memory }) as Box<dyn TokenFilter>))
}

/// A filter with the memory that it takes, which all choices of a request share.
struct KeptFilter {
    filter: Box<dyn TokenFilter>,
    memory: Arc<KeptMemory>,
}

impl TokenFilter for KeptFilter {
    fn allowed(&mut self, mask: &mut TokenMask) -> Result<(), EngineError> {
        self.filter.allowed(mask)
    }

    fn accept(&mut self, token: u32) -> Result<(), EngineError> {
        self.filter.accept(token)
    }

    fn fork(&self) -> Box<dyn TokenFilter> {
        Box::new(KeptFilter { filter: self.filter.fork(), memory: Arc::clone(&self.memory) })
    }
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
