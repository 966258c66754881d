//! Fields within `response_format` and `tools`, which say what an answer must look like: a wrong name there would be passed
//! over where it matters most.

use serde_json::Value;

use super::{MAX_NAME, says_nothing, stranger};
use crate::options::UnknownFields;
use crate::protocol::ApiError;

/// What describes a function to be called. Some generators of schemas describe its result too, which templates show.
const FUNCTION: [&str; 6] = ["name", "description", "parameters", "strict", "return", "returns"];

/// What a tool has around its function; the mark for a cache comes from clients of Anthropic's interface.
const TOOL: [&str; 3] = ["type", "function", "cache_control"];

/// Refuses unknown fields within `response_format` and `tools`, unless such fields are to be ignored.
pub(crate) fn check_forms(
    response_format: Option<&Value>,
    tools: Option<&[Value]>,
    policy: UnknownFields,
) -> Result<(), ApiError> {
    if policy == UnknownFields::Ignore {
        return Ok(());
    }
    if let Some(format) = response_format {
        let known: &[&str] = match format.get("type").and_then(Value::as_str) {
            Some("text") => &["type"],
            Some("json_object") => &["type", "schema"],
            Some("json_schema") => &["type", "json_schema"],
            Some("structural_tag") => &["type", "structures", "triggers"],
            // Another type is refused as such.
            _ => return Ok(()),
        };
        check("response_format", format, known)?;
        if let Some(schema) = format.get("json_schema") {
            check("response_format.json_schema", schema, &["name", "description", "schema", "strict"])?;
        }
    }
    // Tools of other types are refused as such.
    let is_function = |tool: &Value| tool.get("type").is_none_or(|kind| kind.is_null() || kind == "function");
    let tools = tools.into_iter().flatten().enumerate().filter(|(_, tool)| is_function(tool));
    for (index, tool) in tools {
        let place = format!("tools[{index}]");
        check(&place, tool, &TOOL)?;
        if let Some(function) = tool.get("function") {
            check(&format!("{place}.function"), function, &FUNCTION)?;
        }
    }
    Ok(())
}

/// Refuses the first field of an object that is not known and says something.
fn check(place: &str, object: &Value, known: &[&str]) -> Result<(), ApiError> {
    let strange = |(name, value): &(&String, &Value)| !known.contains(&name.as_str()) && !says_nothing(value);
    let Some((name, _)) = object.as_object().into_iter().flatten().find(strange) else { return Ok(()) };
    let name = &name[..name.floor_char_boundary(MAX_NAME)];
    Err(stranger(place, name, format!("{place}.{name}")))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(body: &Value, policy: UnknownFields) -> Result<(), ApiError> {
        let tools = body.get("tools").and_then(Value::as_array);
        check_forms(body.get("response_format"), tools.map(Vec::as_slice), policy)
    }

    #[test]
    fn wrong_names_within_forms_are_refused() {
        let schema = || json!({"type": "object", "anything": {"goes": true}});
        let function = |function: Value| json!({"tools": [{"type": "function", "function": function}]});
        for (body, param) in [
            (json!({"response_format": {"type": "text", "schema": schema()}}), "response_format.schema"),
            (json!({"response_format": {"type": "json_object", "nonsense": 1}}), "response_format.nonsense"),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema(), "strictt": true}}}),
                "response_format.json_schema.strictt",
            ),
            (function(json!({"name": "f", "parametres": schema()})), "tools[0].function.parametres"),
            (json!({"tools": [{"function": {"name": "f"}, "name": "g"}]}), "tools[0].name"),
        ] {
            let error = read(&body, UnknownFields::Refuse).unwrap_err();
            assert_eq!((error.param(), error.code()), (Some(param), Some("unknown_parameter")));
            assert_eq!(read(&body, UnknownFields::Ignore), Ok(()));
        }
        for good in [
            json!({"response_format": {"type": "json_object", "schema": schema(), "json_schema": null}}),
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "description": "d", "schema": schema(), "strict": true}}}),
            json!({"response_format": {}}),
            function(json!({"name": "f", "description": "d", "parameters": schema(), "strict": false})),
        ] {
            assert_eq!(read(&good, UnknownFields::Refuse), Ok(()), "{good}");
        }
    }
}
