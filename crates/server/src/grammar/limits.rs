//! Limits on the grammars and schemas that clients may have compiled.

use serde_json::Value;

use super::GrammarError;

/// The most bytes of all schemas of a request, as JSON text.
const MAX_SCHEMA: usize = 256 << 10;
/// The most bytes of a regular expression.
const MAX_REGEX: usize = 16 << 10;
/// The most bytes of a grammar.
const MAX_GRAMMAR: usize = 64 << 10;
/// The most levels of values in a schema, or of brackets in a grammar.
const MAX_DEPTH: usize = 64;

/// The most properties of one object; the time to compile them grows with the square.
const MAX_PROPERTIES: usize = 500;
/// The most properties of all objects of a request together.
const MAX_ALL_PROPERTIES: usize = 2000;
/// The largest `multipleOf`, with its digits read as an integer: the grammar has a state for each remainder.
const MAX_MULTIPLE: f64 = 1000.0;

/// Checks size and depth of the schemas of a request; errors call them `what`.
pub(super) fn check_schemas<'a>(
    what: &'static str,
    schemas: impl IntoIterator<Item = &'a Value>,
) -> Result<(), GrammarError> {
    let refused = |reason| Err(GrammarError::Invalid { what, reason });
    let mut size = 0;
    let mut properties = 0;
    // Not by recursion: the depth is what is to be found out.
    let mut open: Vec<_> = schemas.into_iter().map(|schema| (schema, 0)).collect();
    while let Some((value, depth)) = open.pop() {
        if depth > MAX_DEPTH {
            return Err(GrammarError::TooDeep { what, limit: MAX_DEPTH });
        }
        size += match value {
            Value::Array(items) => {
                open.extend(items.iter().map(|item| (item, depth + 1)));
                2 + items.len()
            }
            Value::Object(fields) => {
                let here =
                    fields.get("properties").and_then(Value::as_object).map_or(0, serde_json::Map::len);
                properties += here;
                if here > MAX_PROPERTIES || properties > MAX_ALL_PROPERTIES {
                    return refused(format!(
                        "an object may have {MAX_PROPERTIES} properties, all of them {MAX_ALL_PROPERTIES}"
                    ));
                }
                if let Some(Value::Number(multiple)) = fields.get("multipleOf").filter(|at| !countable(at)) {
                    return refused(format!("multipleOf {multiple} has too many digits"));
                }
                open.extend(fields.values().map(|field| (field, depth + 1)));
                fields.keys().map(|key| key.len() + 4).sum::<usize>() + 2
            }
            Value::String(text) => text.len() + 2,
            Value::Null | Value::Bool(_) | Value::Number(_) => 5,
        };
    }
    at_most(what, size, MAX_SCHEMA)
}

/// Whether a grammar can count in steps of this number, disregarding where its point is.
fn countable(multiple: &Value) -> bool {
    let text = multiple.to_string();
    let digits = text.trim_end_matches(".0").replace('.', "");
    digits.parse::<f64>().is_ok_and(|number| number.abs() <= MAX_MULTIPLE)
}

/// Checks the size of a regular expression.
pub(super) fn check_regex(regex: &str) -> Result<(), GrammarError> {
    at_most("the regular expression", regex.len(), MAX_REGEX)
}

/// Checks size and depth of a grammar.
pub(super) fn check_grammar(grammar: &str) -> Result<(), GrammarError> {
    let what = "the grammar";
    at_most(what, grammar.len(), MAX_GRAMMAR)?;
    let mut depth = 0_usize;
    let mut quote = None;
    let mut escaped = false;
    for byte in grammar.bytes() {
        match (byte, quote) {
            _ if escaped => escaped = false,
            (b'\\', Some(_)) => escaped = true,
            // A quote that is not closed ends with its line.
            (b'\n', _) => quote = None,
            (_, Some(closing)) if byte == closing => quote = None,
            (b'"' | b'/', None) => quote = Some(byte),
            (b'(' | b'[' | b'{', None) => depth += 1,
            (b')' | b']' | b'}', None) => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > MAX_DEPTH {
            return Err(GrammarError::TooDeep { what, limit: MAX_DEPTH });
        }
    }
    Ok(())
}

fn at_most(what: &'static str, size: usize, limit: usize) -> Result<(), GrammarError> {
    if size > limit { Err(GrammarError::TooLarge { what, size, limit }) } else { Ok(()) }
}
