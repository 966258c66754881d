//! Fields within formats of answers and tools, which say what an answer must look like: a wrong name there would be passed
//! over where it matters most.

use serde_json::Value;

use super::{FieldPolicy, MAX_NAME, says_nothing, stranger};
use crate::options::UnknownFields;
use crate::protocol::ApiError;

/// What describes a function to be called. Some generators of schemas describe its result too, which templates show.
const FUNCTION: [&str; 6] = ["name", "description", "parameters", "strict", "return", "returns"];

/// What a tool has around its function; the mark for a cache comes from clients of Anthropic's interface.
const TOOL: [&str; 3] = ["type", "function", "cache_control"];

/// What a tool of `/v1/responses` has, which is a function without that.
const TOOL_OF_RESPONSES: [&str; 7] =
    ["type", "name", "description", "parameters", "strict", "return", "returns"];

/// What a tool of `/v1/messages` has. Arguments are streamed as they come, eagerly or not (pi).
const TOOL_OF_MESSAGES: [&str; 7] =
    ["type", "name", "description", "input_schema", "strict", "cache_control", "eager_input_streaming"];

/// What formats have by their type, in chats and completions.
const FORMATS: [(&str, &[&str]); 4] = [
    ("text", &["type"]),
    ("json_object", &["type", "schema"]),
    ("json_schema", &["type", "json_schema"]),
    ("structural_tag", &["type", "structures", "triggers"]),
];

/// The same in `/v1/responses`.
const FORMATS_OF_RESPONSES: [(&str, &[&str]); 3] = [
    ("text", &["type"]),
    ("json_object", &["type", "schema"]),
    ("json_schema", &["type", "name", "description", "schema", "strict"]),
];

/// The same in `/v1/messages`.
const FORMATS_OF_MESSAGES: [(&str, &[&str]); 1] = [("json_schema", &["type", "schema"])];

/// What there is within the `json_schema` of a format.
const JSON_SCHEMA: [&str; 4] = ["name", "description", "schema", "strict"];

/// What `structured_outputs` may say.
const STRUCTURED_OUTPUTS: [&str; 6] = ["json", "json_object", "regex", "choice", "grammar", "structural_tag"];

/// Refuses unknown fields within the forms of chats and completions, unless such fields are to be ignored.
pub(crate) fn check_forms(
    response_format: Option<&Value>,
    structured_outputs: Option<&Value>,
    tools: Option<&[Value]>,
    policy: &FieldPolicy,
) -> Result<(), ApiError> {
    check_format("response_format", response_format, &FORMATS, policy)?;
    if let Some(schema) = response_format.and_then(|format| format.get("json_schema")) {
        check("response_format.json_schema", schema, &JSON_SCHEMA, policy)?;
    }
    if let Some(outputs) = structured_outputs {
        check("structured_outputs", outputs, &STRUCTURED_OUTPUTS, policy)?;
    }
    for (place, tool) in own_tools(tools, None, "function") {
        check(&place, tool, &TOOL, policy)?;
        if let Some(function) = tool.get("function") {
            check(&format!("{place}.function"), function, &FUNCTION, policy)?;
        }
    }
    Ok(())
}

/// The same of `/v1/responses`, whose tools had these places in the request.
pub(crate) fn check_forms_of_responses(
    format: Option<&Value>,
    tools: Option<&[Value]>,
    places: &[usize],
    policy: &FieldPolicy,
) -> Result<(), ApiError> {
    check_format("text.format", format, &FORMATS_OF_RESPONSES, policy)?;
    let mut tools = own_tools(tools, Some(places), "function");
    tools.try_for_each(|(place, tool)| check(&place, tool, &TOOL_OF_RESPONSES, policy))
}

/// The same of `/v1/messages`.
pub(crate) fn check_forms_of_messages(
    format: Option<&Value>,
    tools: Option<&[Value]>,
    places: &[usize],
    policy: &FieldPolicy,
) -> Result<(), ApiError> {
    check_format("output_config.format", format, &FORMATS_OF_MESSAGES, policy)?;
    let mut tools = own_tools(tools, Some(places), "custom");
    tools.try_for_each(|(place, tool)| check(&place, tool, &TOOL_OF_MESSAGES, policy))
}

fn check_format(
    place: &str,
    format: Option<&Value>,
    formats: &[(&str, &[&str])],
    policy: &FieldPolicy,
) -> Result<(), ApiError> {
    let Some(format) = format else { return Ok(()) };
    match formats.iter().find(|(name, _)| kind(format) == Some(name)) {
        Some((_, known)) => check(place, format, known, policy),
        // Another type is refused as such.
        None => Ok(()),
    }
}

/// The tools whose type is `own`, each with its path; those of other types are refused as such. The request had them at
/// `places`, if others have been left out.
fn own_tools<'v>(
    tools: Option<&'v [Value]>,
    places: Option<&'v [usize]>,
    own: &str,
) -> impl Iterator<Item = (String, &'v Value)> {
    let tools = tools.into_iter().flatten().enumerate();
    let own_tools = tools.filter(move |(_, tool)| kind(tool).unwrap_or(own) == own);
    own_tools.map(move |(index, tool)| {
        let place = places.and_then(|places| places.get(index)).unwrap_or(&index);
        (format!("tools[{place}]"), tool)
    })
}

fn kind(object: &Value) -> Option<&str> {
    object.get("type").and_then(Value::as_str)
}

/// Refuses the first field of an object that is not known and says something, unless such fields are to be ignored. A flag
/// that is off asks for nothing.
fn check(place: &str, object: &Value, known: &[&str], policy: &FieldPolicy) -> Result<(), ApiError> {
    let says = |value: &Value| *value != false && !says_nothing(value);
    let strange = |(name, value): &(&String, &Value)| !known.contains(&name.as_str()) && says(value);
    match object.as_object().into_iter().flatten().find(strange) {
        Some((name, _)) if policy.unknown == UnknownFields::Refuse => {
            let name = &name[..name.floor_char_boundary(MAX_NAME)];
            Err(stranger(place, name, format!("{place}.{name}")))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(body: &Value, unknown: UnknownFields) -> Result<(), ApiError> {
        let policy = FieldPolicy { unknown, ..FieldPolicy::default() };
        let tools = body.get("tools").and_then(Value::as_array).map(Vec::as_slice);
        check_forms(body.get("response_format"), body.get("structured_outputs"), tools, &policy)
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
            (json!({"structured_outputs": {"regexp": "a"}}), "structured_outputs.regexp"),
        ] {
            let error = read(&body, UnknownFields::Refuse).unwrap_err();
            assert_eq!((error.param(), error.code()), (Some(param), Some("unknown_parameter")));
            assert_eq!(read(&body, UnknownFields::Ignore), Ok(()));
        }
        for good in [
            json!({"response_format": {"type": "json_object", "schema": schema(), "json_schema": null}}),
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "description": "d", "schema": schema(), "strict": true}}}),
            json!({"response_format": {}}),
            // Refused for its type.
            json!({"response_format": {"type": "grammar", "grammar": "a"}}),
            json!({"structured_outputs": {"regex": "a", "disable_any_whitespace": false, "backend": ""}}),
            function(json!({"name": "f", "description": "d", "parameters": schema(), "strict": false})),
        ] {
            assert_eq!(read(&good, UnknownFields::Refuse), Ok(()), "{good}");
        }
    }

    #[test]
    fn tools_without_a_shell_have_their_place_in_the_request() {
        let policy = FieldPolicy::default();
        let tools = [json!({"type": "web_search", "x": 1}), json!({"name": "f", "x": 1})];
        for check in [check_forms_of_responses, check_forms_of_messages] {
            let error = check(None, Some(&tools), &[2, 5], &policy).unwrap_err();
            assert_eq!(error.param(), Some("tools[5].x"));
        }
    }
}
