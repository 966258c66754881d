//! What an answer must look like: from the fields of a request to a filter of tokens.

use std::sync::Arc;

use oscar_engine::TokenFilter;
use serde_json::{Map, Value, json};

use crate::app::App;
use crate::error::ApiError;
use crate::grammar::GrammarError;
use crate::parse::{AnswerRequest, FieldError};
use crate::protocol::{OpenAiRequest, SamplingParams};

/// The form an OpenAI request asks for. Names of vLLM's extensions are understood, too.
pub(crate) fn of_openai(request: &OpenAiRequest) -> Result<AnswerRequest, ApiError> {
    let mut fields = Map::new();
    let mut put = |name: &str, value: Option<Value>| {
        fields.insert(name.to_owned(), value.unwrap_or_default());
    };
    put("tools", request.tools.clone().map(Value::from));
    put("tool_choice", request.tool_choice.clone());
    put("parallel_tool_calls", request.parallel_tool_calls.map(Value::from));
    put("response_format", request.response_format.clone());
    put("json_schema", request.guided_json.clone());
    put("regex", request.regex.clone().or_else(|| request.guided_regex.clone()).map(Value::from));
    put("ebnf", request.ebnf.clone().or_else(|| request.guided_grammar.clone()).map(Value::from));
    Ok(AnswerRequest::from_body(&fields.into())?)
}

/// The form a native request asks for.
pub(crate) fn of_native(params: &SamplingParams) -> Result<AnswerRequest, ApiError> {
    let fields = json!({"json_schema": params.json_schema, "regex": params.regex, "ebnf": params.ebnf});
    Ok(AnswerRequest::from_body(&fields)?)
}

/// What keeps an answer to its form, if it must have one. With `after`, only from this text on.
pub(crate) async fn filter(
    app: &Arc<App>,
    form: AnswerRequest,
    after: Option<&'static str>,
) -> Result<Option<Box<dyn TokenFilter>>, ApiError> {
    if form.constraint(app.options.tool_call_parser)?.is_none() {
        return Ok(None);
    }
    // Compiling a grammar can take as long as encoding a long text.
    let compile = move |app: &App| {
        let Some(constraint) = form.constraint(app.options.tool_call_parser)? else { return Ok(None) };
        let factory = app.grammars.get_or_init(|| app.new_grammars()).as_ref().map_err(Clone::clone)?;
        Ok(Some(factory.filter(&constraint, after)?))
    };
    app.encode(usize::MAX, compile).await
}

impl From<FieldError> for ApiError {
    fn from(error: FieldError) -> ApiError {
        let message = error.to_string();
        ApiError::bad_field(error.field, message)
    }
}

impl From<GrammarError> for ApiError {
    fn from(error: GrammarError) -> ApiError {
        let param = match &error {
            GrammarError::Vocabulary(reason) => return ApiError::internal(reason),
            GrammarError::UnknownTool { .. } | GrammarError::NoTools => "tool_choice",
            GrammarError::Tool { .. } => "tools",
            GrammarError::TooLarge { .. } | GrammarError::TooDeep { .. } | GrammarError::Invalid { .. } => {
                "response_format"
            }
        };
        ApiError::bad_field(param, error.to_string())
    }
}
