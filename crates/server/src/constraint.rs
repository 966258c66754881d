//! What an answer must look like, as the interfaces ask for it.

use serde_json::Value;

use crate::error::ApiError;
use crate::protocol::{OpenAiRequest, SamplingParams};

/// A form that an answer must have.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Constraint {
    /// Any JSON object.
    JsonObject,
    /// JSON that fits a schema.
    JsonSchema(Value),
    /// Text that matches a regular expression as a whole.
    Regex(String),
    /// Text of a grammar.
    Grammar(String),
}

impl Constraint {
    /// What an OpenAI request asks for.
    pub(crate) fn of_openai(request: &OpenAiRequest) -> Result<Option<Constraint>, ApiError> {
        let mut found = Vec::new();
        if let Some(format) = request.response_format.as_ref().filter(|format| !format.is_null()) {
            found.extend(Constraint::of_response_format(format)?);
        }
        found.extend(request.guided_json.as_ref().map(schema).transpose()?);
        found
            .extend(request.regex.as_ref().or(request.guided_regex.as_ref()).cloned().map(Constraint::Regex));
        found.extend(
            request.ebnf.as_ref().or(request.guided_grammar.as_ref()).cloned().map(Constraint::Grammar),
        );
        one_of(found, "response_format")
    }

    /// What a native request asks for.
    pub(crate) fn of_native(params: &SamplingParams) -> Result<Option<Constraint>, ApiError> {
        let mut found = Vec::new();
        found.extend(params.json_schema.as_ref().filter(|value| !value.is_null()).map(schema).transpose()?);
        found.extend(params.regex.clone().map(Constraint::Regex));
        found.extend(params.ebnf.clone().map(Constraint::Grammar));
        one_of(found, "sampling_params")
    }

    fn of_response_format(format: &Value) -> Result<Option<Constraint>, ApiError> {
        let bad =
            |field: &str, message: &str| ApiError::bad_field(format!("response_format{field}"), message);
        let text = |name: &str| format.get(name).and_then(Value::as_str).map(str::to_owned);
        match format.get("type").and_then(Value::as_str) {
            Some("text") => Ok(None),
            Some("json_object") => Ok(Some(Constraint::JsonObject)),
            Some("json_schema") => {
                let wanted = format.get("json_schema").and_then(|schema| schema.get("schema"));
                match wanted {
                    Some(schema @ (Value::Object(_) | Value::Bool(_))) => {
                        Ok(Some(Constraint::JsonSchema(schema.clone())))
                    }
                    _ => Err(bad(
                        ".json_schema.schema",
                        "response_format.json_schema.schema must be an object",
                    )),
                }
            }
            Some("regex") => {
                let pattern = text("pattern").or_else(|| text("regex"));
                let pattern =
                    pattern.ok_or_else(|| bad(".pattern", "response_format.pattern must be a text"))?;
                Ok(Some(Constraint::Regex(pattern)))
            }
            Some("grammar" | "ebnf") => {
                let grammar = text("grammar").or_else(|| text("ebnf"));
                let grammar =
                    grammar.ok_or_else(|| bad(".grammar", "response_format.grammar must be a text"))?;
                Ok(Some(Constraint::Grammar(grammar)))
            }
            _ => Err(bad(
                ".type",
                "response_format.type must be text, json_object, json_schema, regex or grammar",
            )),
        }
    }
}

/// A schema, which some clients send as a text.
fn schema(value: &Value) -> Result<Constraint, ApiError> {
    let parsed = match value {
        Value::String(text) => serde_json::from_str(text).ok(),
        other => Some(other.clone()),
    };
    match parsed {
        Some(schema @ (Value::Object(_) | Value::Bool(_))) => Ok(Constraint::JsonSchema(schema)),
        _ => Err(ApiError::bad_field("json_schema", "the JSON schema must be an object")),
    }
}

fn one_of(mut found: Vec<Constraint>, param: &str) -> Result<Option<Constraint>, ApiError> {
    if found.len() > 1 {
        return Err(ApiError::bad_field(
            param,
            "an answer can have one form only: a schema, a pattern or a grammar",
        ));
    }
    Ok(found.pop())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn asked(request: Value) -> Result<Option<Constraint>, ApiError> {
        Constraint::of_openai(&serde_json::from_value(request).unwrap())
    }

    #[test]
    fn forms_are_understood() {
        let schema = json!({"type": "object"});
        assert_eq!(asked(json!({})), Ok(None));
        assert_eq!(asked(json!({"response_format": {"type": "text"}})), Ok(None));
        let object = asked(json!({"response_format": {"type": "json_object"}}));
        assert_eq!(object, Ok(Some(Constraint::JsonObject)));
        let wanted = Ok(Some(Constraint::JsonSchema(schema.clone())));
        let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
        assert_eq!(asked(json!({"response_format": format})), wanted);
        assert_eq!(asked(json!({"guided_json": schema.to_string()})), wanted);
        assert_eq!(asked(json!({"regex": "a+"})), Ok(Some(Constraint::Regex("a+".into()))));
    }

    #[test]
    fn nonsense_is_refused() {
        for (request, param) in [
            (json!({"response_format": {"type": "xml"}}), "response_format.type"),
            (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema.schema"),
            (json!({"response_format": {"type": "json_object"}, "regex": "a"}), "response_format"),
            (json!({"guided_json": "not json"}), "json_schema"),
        ] {
            assert_eq!(asked(request).unwrap_err().body()["error"]["param"], param);
        }
    }
}
