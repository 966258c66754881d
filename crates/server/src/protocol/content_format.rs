//! What a request says its answer must look like, under the names that OpenAI, SGLang, vLLM and llama.cpp have for it.

use serde_json::Value;

use super::field_error::{FieldError, get, wrong};
use super::says_nothing;
use crate::grammar::{StructuralTag, TagStructure, closed};

/// The fields, of which a request may have one.
const FIELDS: [&str; 11] = [
    "response_format",
    "json_schema",
    "regex",
    "ebnf",
    "grammar",
    "guided_json",
    "guided_regex",
    "guided_grammar",
    "guided_choice",
    "structured_outputs",
    "structural_tag",
];

/// The most texts that an answer may be chosen from, and the most structures of a structural tag.
const MAX_CHOICES: usize = 1024;

/// What the content of an answer must look like.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) enum ContentFormat {
    /// The content may be any text.
    #[default]
    Text,
    /// The content is a JSON object.
    JsonObject,
    /// The content is JSON that satisfies a schema.
    JsonSchema(Value),
    /// A regular expression matches the whole content.
    Regex(String),
    /// The content follows a grammar whose first rule is `root`.
    Ebnf(String),
    /// The content is one of these texts.
    Choice(Vec<String>),
    /// The content is free text in which some texts begin JSON.
    StructuralTag(StructuralTag),
}

/// Reads the fields of a body that say what the content must look like, and the name of the one that does.
pub(super) fn content(body: &Value) -> Result<(ContentFormat, &'static str), FieldError> {
    let mut content = (ContentFormat::Text, FIELDS[0]);
    for field in FIELDS {
        let Some(value) = said(body, field) else { continue };
        let this = match field {
            "response_format" => response_format(value)?,
            "json_schema" | "guided_json" => schema(field, value)?,
            "regex" | "guided_regex" => ContentFormat::Regex(text(field, value)?),
            "guided_choice" => choice(field, value)?,
            "structured_outputs" => structured_outputs(value)?,
            "structural_tag" => structural_tag(field, value)?,
            _ => ContentFormat::Ebnf(text(field, value)?),
        };
        if this == ContentFormat::Text {
            continue;
        }
        if content.0 != ContentFormat::Text {
            return Err(wrong(field, format!("cannot be combined with {}", content.1)));
        }
        content = (this, field);
    }
    Ok(content)
}

/// The value of a field, unless it is what clients send for nothing.
fn said<'v>(body: &'v Value, field: &str) -> Option<&'v Value> {
    body.get(field).filter(|value| match value {
        Value::Array(list) => !list.is_empty(),
        Value::Bool(wanted) => *wanted,
        other => !says_nothing(other),
    })
}

fn response_format(value: &Value) -> Result<ContentFormat, FieldError> {
    let kind = get(value, "type").and_then(Value::as_str);
    match kind.ok_or_else(|| wrong("response_format.type", "must be a string"))? {
        "text" => Ok(ContentFormat::Text),
        // llama.cpp takes a schema beside either type.
        "json_object" => match said(value, "schema") {
            Some(schema) => Ok(ContentFormat::JsonSchema(schema.clone())),
            None => Ok(ContentFormat::JsonObject),
        },
        "json_schema" => {
            let schema = get(value, "json_schema").and_then(|format| get(format, "schema"));
            let schema =
                schema.ok_or_else(|| wrong("response_format.json_schema.schema", "must be a JSON schema"))?;
            let strict = get(value, "json_schema").and_then(|format| get(format, "strict"));
            let strict = strict.and_then(Value::as_bool).unwrap_or(false);
            Ok(ContentFormat::JsonSchema(if strict { closed(schema) } else { schema.clone() }))
        }
        "structural_tag" => structural_tag("response_format", value),
        other => {
            let problem = format!("is `{other}`, expected text, json_object, json_schema or structural_tag");
            Err(wrong("response_format.type", problem))
        }
    }
}

/// Reads the object in which newer clients of vLLM say it.
fn structured_outputs(value: &Value) -> Result<ContentFormat, FieldError> {
    let at = |name: &str| format!("structured_outputs.{name}");
    let fields = value.as_object().ok_or_else(|| wrong("structured_outputs", "must be an object"))?;
    let mut found = ContentFormat::Text;
    for name in fields.keys() {
        let Some(value) = said(value, name) else { continue };
        let this = match name.as_str() {
            "json" => schema(&at(name), value)?,
            "json_object" => ContentFormat::JsonObject,
            "regex" => ContentFormat::Regex(text(&at(name), value)?),
            "choice" => choice(&at(name), value)?,
            "grammar" => ContentFormat::Ebnf(text(&at(name), value)?),
            "structural_tag" => structural_tag(&at(name), value)?,
            // Refused by then, unless such fields are to be ignored.
            _ => continue,
        };
        if found != ContentFormat::Text {
            return Err(wrong(at(name), "cannot be combined with another form of answer"));
        }
        found = this;
    }
    Ok(found)
}

/// A schema, as such or as text.
fn schema(field: &str, value: &Value) -> Result<ContentFormat, FieldError> {
    Ok(ContentFormat::JsonSchema(parsed(field, value)?))
}

fn choice(field: &str, value: &Value) -> Result<ContentFormat, FieldError> {
    let problem = || wrong(field, format!("must be a list of 1 to {MAX_CHOICES} texts that are not empty"));
    let list = value.as_array().filter(|list| list.len() <= MAX_CHOICES).ok_or_else(problem)?;
    let texts = list.iter().map(|text| text.as_str().filter(|text| !text.is_empty()).map(str::to_owned));
    texts.collect::<Option<Vec<String>>>().map(ContentFormat::Choice).ok_or_else(problem)
}

/// Reads a structural tag: where one of `triggers` comes up, the text goes on as one of `structures` has it.
fn structural_tag(field: &str, value: &Value) -> Result<ContentFormat, FieldError> {
    let value = parsed(field, value)?;
    let at = |name: String| format!("{field}.{name}");
    let list = |name: &str| {
        let list = get(&value, name).and_then(Value::as_array);
        let list = list.filter(|list| !list.is_empty() && list.len() <= MAX_CHOICES);
        list.ok_or_else(|| {
            wrong(at(name.to_owned()), format!("must be a list of 1 to {MAX_CHOICES} entries"))
        })
    };
    let filled = |name: String, value: Option<&Value>| {
        let text = value.and_then(Value::as_str).filter(|text| !text.is_empty()).map(str::to_owned);
        text.ok_or_else(|| wrong(at(name), "must be a text that is not empty"))
    };
    let mut triggers = Vec::new();
    for (index, trigger) in list("triggers")?.iter().enumerate() {
        triggers.push(filled(format!("triggers[{index}]"), Some(trigger))?);
    }
    let mut structures = Vec::new();
    for (index, structure) in list("structures")?.iter().enumerate() {
        let here = |name: &str| format!("structures[{index}].{name}");
        let begin = filled(here("begin"), structure.get("begin"))?;
        let end = filled(here("end"), structure.get("end"))?;
        if !triggers.iter().any(|trigger| begin.starts_with(trigger.as_str())) {
            return Err(wrong(at(here("begin")), "must begin with one of the triggers"));
        }
        let schema = get(structure, "schema").cloned().unwrap_or(Value::Bool(true));
        structures.push(TagStructure { begin, schema, end });
    }
    Ok(ContentFormat::StructuralTag(StructuralTag { triggers, structures }))
}

fn text(field: &str, value: &Value) -> Result<String, FieldError> {
    value.as_str().map(str::to_owned).ok_or_else(|| wrong(field, "must be a string"))
}

/// What a text stands for, or the value itself.
fn parsed(field: &str, value: &Value) -> Result<Value, FieldError> {
    match value {
        Value::String(text) => {
            serde_json::from_str(text).map_err(|error| wrong(field, format!("is not JSON: {error}")))
        }
        other => Ok(other.clone()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(body: Value) -> ContentFormat {
        content(&body).unwrap().0
    }

    fn ebnf(text: &str) -> ContentFormat {
        ContentFormat::Ebnf(text.to_owned())
    }

    #[test]
    fn every_name_is_understood() {
        let schema = || json!({"type": "integer"});
        let openai = json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema(), "strict": true}}});
        assert_eq!(read(openai), ContentFormat::JsonSchema(schema()));
        assert_eq!(read(json!({"response_format": {"type": "json_object"}})), ContentFormat::JsonObject);
        let llama = json!({"response_format": {"type": "json_object", "schema": schema()}});
        assert_eq!(read(llama), ContentFormat::JsonSchema(schema()));
        for name in ["json_schema", "guided_json"] {
            assert_eq!(read(json!({name: schema()})), ContentFormat::JsonSchema(schema()));
            assert_eq!(read(json!({name: schema().to_string()})), ContentFormat::JsonSchema(schema()));
        }
        for name in ["regex", "guided_regex"] {
            assert_eq!(read(json!({name: "a+"})), ContentFormat::Regex("a+".to_owned()));
        }
        for name in ["ebnf", "grammar", "guided_grammar"] {
            assert_eq!(read(json!({name: "root ::= \"a\""})), ebnf("root ::= \"a\""));
        }
        let both = ContentFormat::Choice(vec!["yes".to_owned(), "no".to_owned()]);
        assert_eq!(read(json!({"guided_choice": ["yes", "no"]})), both);
        assert_eq!(
            read(
                json!({"regex": "a", "response_format": {"type": "text"}, "grammar": "", "guided_choice": []})
            ),
            ContentFormat::Regex("a".to_owned())
        );
        for (inner, expected) in [
            (json!({"choice": ["yes", "no"], "regex": null}), both),
            (json!({"json": schema()}), ContentFormat::JsonSchema(schema())),
            (json!({"json_object": true, "disable_any_whitespace": false}), ContentFormat::JsonObject),
            (json!({"grammar": "root ::= \"a\""}), ebnf("root ::= \"a\"")),
            (json!({"json_object": false}), ContentFormat::Text),
            (json!({"json": {}}), ContentFormat::Text),
            (json!({}), ContentFormat::Text),
        ] {
            assert_eq!(read(json!({"structured_outputs": inner})), expected);
        }
    }

    #[test]
    fn what_is_empty_asks_for_nothing() {
        for field in FIELDS {
            for nothing in [Value::Null, json!({}), json!(""), json!([])] {
                assert_eq!(read(json!({field: nothing})), ContentFormat::Text, "{field}: {nothing}");
            }
        }
        // A schema of OpenAI's is one even if it is empty: any JSON. That of llama.cpp stands beside a type that says more.
        let openai =
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}});
        assert_eq!(read(openai), ContentFormat::JsonSchema(json!({})));
        let llama = json!({"response_format": {"type": "json_object", "schema": {}}});
        assert_eq!(read(llama), ContentFormat::JsonObject);
    }

    #[test]
    fn structural_tags_are_read_in_three_places() {
        let tag = json!({"type": "structural_tag", "triggers": ["<f="], "structures": [
            {"begin": "<f=a>", "schema": {"type": "object"}, "end": "</f>"}, {"begin": "<f=b>", "end": "</f>"}]});
        let expected = |schema: Value, name: &str| TagStructure {
            begin: format!("<f={name}>"),
            schema,
            end: "</f>".to_owned(),
        };
        let structures = vec![expected(json!({"type": "object"}), "a"), expected(json!(true), "b")];
        let expected =
            ContentFormat::StructuralTag(StructuralTag { triggers: vec!["<f=".to_owned()], structures });
        assert_eq!(read(json!({"response_format": tag})), expected);
        assert_eq!(read(json!({"structural_tag": tag.to_string()})), expected);
        assert_eq!(read(json!({"structured_outputs": {"structural_tag": tag}})), expected);
    }

    #[test]
    fn errors_name_the_field() {
        let structure = json!({"begin": "<f>", "end": ""});
        for (body, field) in [
            (json!({"response_format": "json"}), "response_format.type"),
            (json!({"response_format": {"type": "xml"}}), "response_format.type"),
            (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema.schema"),
            (json!({"json_schema": "{"}), "json_schema"),
            (json!({"regex": 5}), "regex"),
            (json!({"regex": "a", "ebnf": "b"}), "ebnf"),
            (json!({"regex": "a", "response_format": {"type": "json_object"}}), "regex"),
            (json!({"regex": "a", "guided_regex": "b"}), "guided_regex"),
            (json!({"guided_choice": ["a", 3]}), "guided_choice"),
            (json!({"guided_choice": [""]}), "guided_choice"),
            (json!({"guided_choice": "a"}), "guided_choice"),
            (json!({"structured_outputs": 5}), "structured_outputs"),
            (json!({"structured_outputs": {"regex": 5}}), "structured_outputs.regex"),
            (json!({"structured_outputs": {"regex": "a", "choice": ["a"]}}), "structured_outputs.choice"),
            (json!({"structural_tag": {"triggers": ["<f"]}}), "structural_tag.structures"),
            (json!({"structural_tag": {"structures": [structure]}}), "structural_tag.triggers"),
            (
                json!({"structural_tag": {"triggers": ["<f"], "structures": [structure]}}),
                "structural_tag.structures[0].end",
            ),
            (
                json!({"structural_tag": {"triggers": ["<g"], "structures": [{"begin": "<f>", "end": "e"}]}}),
                "structural_tag.structures[0].begin",
            ),
        ] {
            let error = content(&body).unwrap_err();
            assert_eq!(error.field, field, "{body}");
        }
    }
}
