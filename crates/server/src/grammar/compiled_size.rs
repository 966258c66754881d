//! How much memory a grammar takes when it is compiled, estimated before that: from above, by what was measured.

use serde_json::Value;

use super::factory::Constraint;

/// What every grammar takes.
const LEAST: usize = 256 << 10;

/// What it takes for each byte of a text, whether of an expression, a grammar or choices.
const PER_BYTE: usize = 96;

/// The same for a schema, which is longer for what it says.
const PER_SCHEMA_BYTE: usize = 24;

/// What it takes for each object of a schema: that of a property, of the items of a list and so on.
const PER_OBJECT: usize = 4 << 10;

impl Constraint<'_> {
    /// About as many bytes as the filter for it keeps.
    pub(crate) fn compiled_bytes(&self) -> usize {
        let more = match self {
            Constraint::JsonObject => 0,
            Constraint::JsonSchema(schema) => of_schema(schema),
            Constraint::Regex(text) | Constraint::Lark(text) | Constraint::Ebnf(text) => {
                text.len() * PER_BYTE
            }
            Constraint::Choice(texts) => texts.iter().map(String::len).sum::<usize>() * PER_BYTE,
            Constraint::StructuralTag(tag) => {
                tag.structures.iter().map(|structure| of_schema(&structure.schema)).sum()
            }
            Constraint::Calls(forced) => {
                forced.chosen().into_iter().flatten().map(|tool| of_schema(&tool.parameters)).sum()
            }
        };
        LEAST + more
    }
}

/// Values were parsed from a body, which bounds their depth.
fn of_schema(value: &Value) -> usize {
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => 5 * PER_SCHEMA_BYTE,
        Value::String(text) => (text.len() + 3) * PER_SCHEMA_BYTE,
        Value::Array(list) => list.iter().map(of_schema).sum(),
        Value::Object(fields) => {
            let fields =
                fields.iter().map(|(name, value)| (name.len() + 4) * PER_SCHEMA_BYTE + of_schema(value));
            PER_OBJECT + fields.sum::<usize>()
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn properties_count_more_than_texts() {
        let size = |schema: &Value| Constraint::JsonSchema(schema).compiled_bytes();
        assert_eq!(size(&json!({})), LEAST + PER_OBJECT);
        let names = (0..1000).map(|name| (format!("p{name}"), json!({"type": "integer"})));
        let wide = json!({"properties": names.collect::<serde_json::Map<_, _>>()});
        let long = json!({"enum": (0..1000).map(|value| format!("value {value}")).collect::<Vec<_>>()});
        assert!(size(&wide) > 4 << 20 && size(&long) < 1 << 20);
        assert_eq!(Constraint::Regex(&"a".repeat(100)).compiled_bytes(), LEAST + 100 * PER_BYTE);
    }
}
