//! Answers drawn at random through a filter, and a checker of JSON schemas that shares no code with the library.

use oscar_engine::{TokenFilter, TokenMask};
use oscar_model::text::Tokenizer;
use oscar_random::Random;
use serde_json::{Value, json};

use crate::parse::Tool;

/// One of the small tokenizers that the tests of the model crate come with.
pub(crate) fn tokenizer(name: &str) -> Tokenizer {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../model/tests/fixtures/text/tokenizers/");
    Tokenizer::from_file(format!("{folder}{name}.tokenizer.json")).unwrap()
}

/// The tokens that may come next.
pub(crate) fn allowed(filter: &mut dyn TokenFilter, rows: usize) -> Vec<u32> {
    let mut mask = TokenMask::all(rows);
    filter.allowed(&mut mask).unwrap();
    (0..rows as u32).filter(|&token| mask.allows(token)).collect()
}

/// Feeds a text, one byte-sized token after the other, as far as it is allowed; the bytes taken.
pub(crate) fn feed(filter: &mut dyn TokenFilter, tokenizer: &Tokenizer, text: &str) -> usize {
    for (index, byte) in text.bytes().enumerate() {
        let next = allowed(filter, tokenizer.vocab_size());
        let Some(&token) = next.iter().find(|&&token| tokenizer.token_bytes(token).unwrap() == [byte]) else {
            return index;
        };
        filter.accept(token).unwrap();
    }
    text.len()
}

/// Whether the answer may end here.
pub(crate) fn may_end(filter: &mut dyn TokenFilter, tokenizer: &Tokenizer) -> bool {
    let next = allowed(filter, tokenizer.vocab_size());
    let ends: Vec<_> = next.iter().filter(|&&token| tokenizer.is_end(token)).collect();
    // All of the tokens that end an answer, or none.
    assert!(ends.is_empty() || ends.len() == tokenizer.end_ids().len());
    !ends.is_empty()
}

/// An answer drawn at random. After `patience` tokens, one that helps to end it is taken where there is one, and the
/// text `ending` where it is allowed.
pub(crate) fn draw(
    filter: &mut dyn TokenFilter,
    tokenizer: &Tokenizer,
    random: &mut Random,
    mut patience: usize,
    ending: &str,
) -> String {
    let rows = tokenizer.vocab_size() + 37;
    let mut bytes = Vec::new();
    for step in 0..2000 {
        if step > patience
            && !ending.is_empty()
            && feed(&mut *filter.fork(), tokenizer, ending) == ending.len()
        {
            feed(filter, tokenizer, ending);
            bytes.extend_from_slice(ending.as_bytes());
            patience = step + 20;
        }
        let next = allowed(filter, rows);
        assert!(!next.is_empty(), "stuck after {:?}", String::from_utf8_lossy(&bytes));
        assert!(next.iter().all(|&token| (token as usize) < tokenizer.vocab_size()));
        let closes = |token: &&u32| {
            tokenizer.is_end(**token)
                || matches!(tokenizer.token_bytes(**token).unwrap(), b"\"" | b"}" | b"]" | b"</tool_call>")
        };
        let closing: Vec<u32> = next.iter().filter(closes).copied().collect();
        let from = if step > patience && !closing.is_empty() { &closing } else { &next };
        let token = from[random.below(from.len())];
        filter.accept(token).unwrap();
        if tokenizer.is_end(token) {
            return String::from_utf8(bytes).expect("an answer that ends is whole characters");
        }
        bytes.extend_from_slice(tokenizer.token_bytes(token).unwrap());
    }
    panic!("no end: {:?}", String::from_utf8_lossy(&bytes));
}

/// What is wrong with a value by a schema, if anything. Knows the keywords that the tests use, and no others.
pub(crate) fn wrong(value: &Value, schema: &Value, root: &Value) -> Option<String> {
    let Some(fields) = schema.as_object() else {
        return (schema == &Value::Bool(false)).then(|| "nothing is allowed here".to_owned());
    };
    let length = value.as_str().map(|text| text.chars().count() as f64);
    for (keyword, rule) in fields {
        let good = match (keyword.as_str(), value) {
            ("type", _) => match rule {
                Value::Array(names) => names.iter().any(|name| is_type(value, name.as_str().unwrap())),
                name => is_type(value, name.as_str().unwrap()),
            },
            ("enum", _) => rule.as_array().unwrap().contains(value),
            ("const", _) => rule == value,
            ("$ref", _) => {
                let target = root.pointer(rule.as_str().unwrap().trim_start_matches('#')).unwrap();
                wrong(value, target, root).is_none()
            }
            ("anyOf" | "oneOf", _) => {
                rule.as_array().unwrap().iter().any(|schema| wrong(value, schema, root).is_none())
            }
            ("required", Value::Object(given)) => {
                rule.as_array().unwrap().iter().all(|name| given.contains_key(name.as_str().unwrap()))
            }
            ("properties", Value::Object(given)) => {
                let known = rule.as_object().unwrap();
                given.iter().all(|(key, value)| {
                    known.get(key).is_none_or(|schema| wrong(value, schema, root).is_none())
                })
            }
            ("additionalProperties", Value::Object(given)) => {
                let known = fields.get("properties").and_then(Value::as_object);
                let extra =
                    given.iter().filter(|(key, _)| !known.is_some_and(|known| known.contains_key(*key)));
                extra.into_iter().all(|(_, value)| wrong(value, rule, root).is_none())
            }
            ("items", Value::Array(items)) => items.iter().all(|item| wrong(item, rule, root).is_none()),
            ("minItems", Value::Array(items)) => items.len() as u64 >= rule.as_u64().unwrap(),
            ("maxItems", Value::Array(items)) => items.len() as u64 <= rule.as_u64().unwrap(),
            ("minLength", Value::String(_)) => length.unwrap() >= rule.as_f64().unwrap(),
            ("maxLength", Value::String(_)) => length.unwrap() <= rule.as_f64().unwrap(),
            ("minimum", Value::Number(number)) => number.as_f64().unwrap() >= rule.as_f64().unwrap(),
            ("maximum", Value::Number(number)) => number.as_f64().unwrap() <= rule.as_f64().unwrap(),
            ("$defs" | "title" | "description", _) => true,
            (
                "required"
                | "properties"
                | "additionalProperties"
                | "items"
                | "minItems"
                | "maxItems"
                | "minLength"
                | "maxLength"
                | "minimum"
                | "maximum",
                _,
            ) => true,
            (other, _) => panic!("the checker does not know `{other}`"),
        };
        if !good {
            return Some(format!("{value} does not satisfy {keyword}: {rule}"));
        }
    }
    None
}

fn is_type(value: &Value, name: &str) -> bool {
    match name {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "integer" => value.as_f64().is_some_and(|number| number.fract() == 0.0),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        other => panic!("no type `{other}`"),
    }
}

/// Tools to be called: with a schema, without one, and with one that cannot be compiled.
pub(crate) fn tools() -> Vec<Tool> {
    let tool = |name: &str, parameters, strict| Tool { name: name.to_owned(), parameters, strict };
    vec![
        tool(
            "get_weather",
            json!({"type": "object", "properties": {
                "city": {"type": "string", "maxLength": 6}, "unit": {"type": "string", "enum": ["C", "F"]},
                "days": {"$ref": "#/$defs/Days"},
            }, "required": ["city", "days"], "additionalProperties": false,
            "$defs": {"Days": {"type": "integer", "minimum": 1, "maximum": 9}}}),
            true,
        ),
        tool("now", Value::Null, false),
        tool("odd", json!({"type": "object", "not": {"required": ["x"]}}), false),
    ]
}
