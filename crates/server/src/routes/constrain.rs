//! Compiles what a request says about the format of its answer into a filter of tokens.

use std::sync::Arc;

use oscar_engine::TokenFilter;

use crate::protocol::{AnswerFormat, ApiError};
use crate::state::AppState;

/// The filter that keeps an answer to its format, if the request asks for one. With `after`, the answer is free until
/// it contains this text, the marker that closes the reasoning.
pub(crate) async fn token_filter(
    app: &Arc<AppState>,
    format: AnswerFormat,
    after: Option<&'static str>,
) -> Result<Option<Box<dyn TokenFilter>>, ApiError> {
    if format.constraint(app.options.tool_call_parser)?.is_none() {
        return Ok(None);
    }
    // Compiling a grammar can take as long as tokenizing a long text.
    let compile = move |app: &AppState| {
        let Some(constraint) = format.constraint(app.options.tool_call_parser)? else { return Ok(None) };
        let factory = app.grammars.get_or_init(|| app.new_grammars()).as_ref().map_err(Clone::clone)?;
        Ok(Some(factory.filter(&constraint, after)?))
    };
    app.encode(usize::MAX, compile).await
}
