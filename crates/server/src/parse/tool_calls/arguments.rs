//! Converts values between tags, which do not say their type, to JSON by the schema of the tool.

use serde_json::Value;

use super::json_text::is_json;

/// How deep references are followed, and alternatives within alternatives.
const MAX_DEPTH: usize = 16;

/// Keywords that say which type a value has.
const NAMING: [&str; 7] = ["type", "$ref", "enum", "const", "anyOf", "oneOf", "allOf"];

/// The JSON text of a value, by the schema of the tool's arguments.
///
/// A string stays a string whatever it looks like. Other types are taken where the text is one of them. Where the
/// schema says nothing, JSON is taken as such.
pub(super) fn json_of(value: &str, parameters: Option<&Value>, key: &str) -> String {
    let mut types = Types::default();
    match parameters.and_then(|parameters| Some((parameters, parameters.get("properties")?.get(key)?))) {
        Some((root, schema)) => types.add(schema, root, 0),
        None => types.any = true,
    }
    types.read(value).unwrap_or_else(|| Value::from(value).to_string())
}

/// Whether a value by this schema may be text, which stands between tags as it is.
pub(crate) fn may_be_text(schema: &Value, root: &Value) -> bool {
    let mut types = Types::default();
    types.add(schema, root, 0);
    types.any || types.string || types.listed.iter().any(Value::is_string)
}

/// Joins names and JSON texts of arguments to a JSON object.
pub(super) fn arguments_text(arguments: &[(String, String)]) -> String {
    let fields: Vec<_> =
        arguments.iter().map(|(key, value)| format!("{}: {value}", Value::from(key.as_str()))).collect();
    format!("{{{}}}", fields.join(", "))
}

/// The types that a value may have.
#[derive(Debug, Default)]
struct Types {
    any: bool,
    string: bool,
    number: bool,
    integer: bool,
    boolean: bool,
    null: bool,
    object: bool,
    array: bool,
    /// Values that are listed; they need not have a type.
    listed: Vec<Value>,
}

impl Types {
    fn add(&mut self, schema: &Value, root: &Value, depth: usize) {
        let Some(fields) = schema.as_object().filter(|_| depth < MAX_DEPTH) else {
            self.any = true;
            return;
        };
        let mut said = false;
        if let Some(target) = fields.get("$ref").and_then(Value::as_str) {
            said = true;
            match target.strip_prefix('#').and_then(|pointer| root.pointer(pointer)) {
                Some(schema) => self.add(schema, root, depth + 1),
                None => self.any = true,
            }
        }
        match fields.get("type") {
            Some(Value::String(name)) => {
                said = true;
                self.add_name(name);
            }
            Some(Value::Array(names)) => {
                said = true;
                names.iter().filter_map(Value::as_str).for_each(|name| self.add_name(name));
            }
            _ => {}
        }
        let listed = fields.get("enum").and_then(Value::as_array).map(Vec::as_slice);
        let constant = fields.get("const").map(std::slice::from_ref);
        if let Some(values) = listed.or(constant).filter(|_| !said) {
            said = true;
            self.listed.extend_from_slice(values);
        }
        for name in ["anyOf", "oneOf", "allOf"] {
            for schema in fields.get(name).and_then(Value::as_array).into_iter().flatten() {
                // What must hold besides need not name a type; an alternative that does not allows any.
                if name != "allOf" || NAMING.iter().any(|naming| schema.get(naming).is_some()) {
                    said = true;
                    self.add(schema, root, depth + 1);
                }
            }
        }
        // A schema may describe a type without naming it.
        if !said && fields.contains_key("properties") {
            self.object = true;
        } else if !said && fields.contains_key("items") {
            self.array = true;
        } else if !said {
            self.any = true;
        }
    }

    fn add_name(&mut self, name: &str) {
        match name {
            "string" => self.string = true,
            "number" => self.number = true,
            "integer" => self.integer = true,
            "boolean" => self.boolean = true,
            "null" => self.null = true,
            "object" => self.object = true,
            "array" => self.array = true,
            _ => self.any = true,
        }
    }

    /// The text as one of the types other than string.
    fn read(&self, value: &str) -> Option<String> {
        let text = value.trim();
        if let Some(listed) = self.listed.iter().find(|listed| match listed {
            Value::String(string) => string == value,
            other => serde_json::from_str::<Value>(text).is_ok_and(|value| value == **other),
        }) {
            return Some(listed.to_string());
        }
        // Python's words; a string of this type is what it is.
        let word = match text {
            "True" | "TRUE" if self.boolean => "true",
            "False" | "FALSE" if self.boolean => "false",
            "None" if self.null && !self.string => "null",
            _ => text,
        };
        let fits = match word.bytes().next()? {
            b'{' => self.object || self.any,
            b'[' => self.array || self.any,
            b't' | b'f' => self.boolean || self.any,
            b'n' => self.null || self.any,
            b'-' | b'0'..=b'9' => self.number || self.any || (self.integer && is_integer(word)),
            // A string in quotes where a string was not expected.
            b'"' => !self.string && !self.any && self.listed.is_empty(),
            _ => false,
        };
        // The digits stay as they are, however many.
        (fits && is_json(word)).then(|| word.to_owned())
    }
}

fn is_integer(text: &str) -> bool {
    text.strip_prefix('-').unwrap_or(text).bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(value: &str, schema: Value) -> String {
        json_of(value, Some(&json!({"type": "object", "properties": {"x": schema}})), "x")
    }

    #[test]
    fn the_schema_decides() {
        let string = || json!({"type": "string"});
        for text in ["123", "true", "null", "{\"a\": 1}", "[1]", "", " x ", "é\"\n", "None"] {
            assert_eq!(read(text, string()), Value::from(text).to_string());
        }
        assert_eq!(read("123", json!({"type": "integer"})), "123");
        assert_eq!(read("-7", json!({"type": "integer"})), "-7");
        assert_eq!(read("12345678901234567890123", json!({"type": "integer"})), "12345678901234567890123");
        assert_eq!(read("1.5", json!({"type": "integer"})), "\"1.5\"");
        assert_eq!(read("1.50", json!({"type": "number"})), "1.50");
        assert_eq!(read("5e3", json!({"type": "number"})), "5e3");
        assert_eq!(read("many", json!({"type": "number"})), "\"many\"");
        for text in ["true", "True", " TRUE\n"] {
            assert_eq!(read(text, json!({"type": "boolean"})), "true");
        }
        assert_eq!(read("False", json!({"type": "boolean"})), "false");
        assert_eq!(read("1", json!({"type": "boolean"})), "\"1\"");
        assert_eq!(read("{\"a\": [1, 2]}", json!({"type": "object"})), "{\"a\": [1, 2]}");
        assert_eq!(read("{'a': 1}", json!({"type": "object"})), "\"{'a': 1}\"");
        assert_eq!(read("[\"a\"]", json!({"type": "array"})), "[\"a\"]");
        assert_eq!(read("null", json!({"type": "null"})), "null");
    }

    #[test]
    fn several_types_prefer_what_fits() {
        let either = || json!({"type": ["string", "null"]});
        assert_eq!(read("null", either()), "null");
        assert_eq!(read("None", either()), "\"None\"");
        assert_eq!(read("12", either()), "\"12\"");
        let any_of = || json!({"anyOf": [{"type": "integer"}, {"type": "string"}]});
        assert_eq!(read("12", any_of()), "12");
        assert_eq!(read("12a", any_of()), "\"12a\"");
        assert_eq!(read("2", json!({"enum": [1, 2, "3"]})), "2");
        assert_eq!(read("3", json!({"enum": [1, 2, "3"]})), "\"3\"");
        assert_eq!(read("2", json!({"type": "string", "enum": ["1", "2"]})), "\"2\"");
        assert_eq!(read("{\"a\": 1}", json!({"properties": {"a": {}}})), "{\"a\": 1}");
        assert_eq!(read("12", json!({"allOf": [{"type": "string"}, {"minLength": 1}]})), "\"12\"");
    }

    #[test]
    fn references_are_followed_and_loops_end() {
        let parameters = json!({
            "$defs": {"Count": {"type": "integer"}, "Loop": {"$ref": "#/$defs/Loop"}},
            "properties": {"n": {"$ref": "#/$defs/Count"}, "l": {"$ref": "#/$defs/Loop"}, "m": {"$ref": "#/no"}},
        });
        assert_eq!(json_of("7", Some(&parameters), "n"), "7");
        assert_eq!(json_of("seven", Some(&parameters), "n"), "\"seven\"");
        assert_eq!(json_of("7", Some(&parameters), "l"), "7");
        assert_eq!(json_of("7", Some(&parameters), "m"), "7");
    }

    #[test]
    fn without_a_schema_json_is_json() {
        for parameters in [None, Some(json!({})), Some(Value::Null), Some(json!({"properties": {"y": {}}}))] {
            let read = |value| json_of(value, parameters.as_ref(), "x");
            assert_eq!(read("5"), "5");
            assert_eq!(read("[1]"), "[1]");
            assert_eq!(read("Paris"), "\"Paris\"");
            assert_eq!(read("05"), "\"05\"");
            assert_eq!(read("\"a\""), "\"\\\"a\\\"\"");
        }
        assert_eq!(arguments_text(&[]), "{}");
        let fields = [("a\"".to_owned(), "1".to_owned()), ("b".to_owned(), "\"x\"".to_owned())];
        assert_eq!(arguments_text(&fields), "{\"a\\\"\": 1, \"b\": \"x\"}");
    }
}
