//! What is changed in a schema before the library compiles it: our options, and what the library gets wrong.

use serde_json::{Map, Value, json};

/// White space that may stand between the parts of a JSON text: enough for every common way to lay it out, and too
/// little for a model to lose itself in.
const JSON_BLANKS: &str = r"[ ]{1,2}|\n[ ]{0,40}|\n\t{0,20}";

/// Keywords whose values are data rather than schemas.
const DATA: [&str; 5] = ["enum", "const", "default", "examples", "example"];

/// Keywords that say which other properties an object may have.
const OTHERS: [&str; 3] = ["additionalProperties", "patternProperties", "unevaluatedProperties"];

/// Keywords beside which an object is left open: its properties are not all in one place.
const COMPOSED: [&str; 9] = ["$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "then", "else"];

/// The schema as the library gets it, with our choice of its options, whatever the schema says about them itself.
pub(super) fn prepared(schema: &Value) -> Value {
    let mut schema = match schema {
        Value::Object(_) => schema.clone(),
        // `true` and `null` say nothing; anything else is for the library to refuse.
        Value::Bool(true) | Value::Null => json!({}),
        other => return other.clone(),
    };
    each_schema(&mut schema, &mut guard_exclusive_bounds);
    // Generators of schemas write `oneOf` for unions whose parts exclude each other, where `anyOf` is the same.
    schema["x-guidance"] = json!({"whitespace_pattern": JSON_BLANKS, "coerce_one_of": true});
    schema
}

/// Closes objects that list their properties and say nothing of others: small models would add keys until the answer
/// is full. An object that is put together from several schemas stays open, as each of them sees only a part.
pub(crate) fn closed(schema: &Value) -> Value {
    let mut schema = schema.clone();
    close(&mut schema);
    schema
}

fn close(schema: &mut Value) {
    let Some(fields) = schema.as_object_mut() else { return };
    let composed = COMPOSED.iter().any(|keyword| fields.contains_key(*keyword));
    let open = !OTHERS.iter().any(|keyword| fields.contains_key(*keyword));
    if fields.contains_key("properties") && open && !composed {
        fields.insert("additionalProperties".to_owned(), false.into());
    }
    for (keyword, value) in fields.iter_mut() {
        match (keyword.as_str(), value) {
            ("properties" | "$defs" | "definitions", Value::Object(named)) => {
                named.values_mut().for_each(close)
            }
            ("items" | "additionalProperties", value) => close(value),
            ("prefixItems", Value::Array(list)) => list.iter_mut().for_each(close),
            _ => {}
        }
    }
}

/// Calls a function for a schema and for all schemas in it.
fn each_schema(schema: &mut Value, change: &mut impl FnMut(&mut Map<String, Value>)) {
    match schema {
        Value::Object(fields) => {
            change(fields);
            let schemas = fields.iter_mut().filter(|(keyword, _)| !DATA.contains(&keyword.as_str()));
            schemas.for_each(|(_, value)| each_schema(value, change));
        }
        Value::Array(list) => list.iter_mut().for_each(|value| each_schema(value, change)),
        _ => {}
    }
}

/// Between bounds that share their integer part the library takes the fraction for optional, and with it an exclusive
/// bound for a value: 0 where `{"exclusiveMinimum": 0, "maximum": 0.5}`. Such a bound is moved by a billionth of the range.
fn guard_exclusive_bounds(fields: &mut Map<String, Value>) {
    let number = |name: &str| fields.get(name).and_then(Value::as_f64);
    let (above, below) = (number("exclusiveMinimum"), number("exclusiveMaximum"));
    let (least, most) = (number("minimum"), number("maximum"));
    let low = above.filter(|&above| least.is_none_or(|least| above >= least));
    let high = below.filter(|&below| most.is_none_or(|most| below <= most));
    let floor = low.or(least);
    let ceiling = high.or(most);
    let (Some(floor), Some(ceiling)) = (floor, ceiling) else { return };
    let step = (ceiling - floor) * 1e-9;
    if step <= 0.0 || floor.trunc() != ceiling.trunc() {
        return;
    }
    if low.is_some_and(|low| low >= 0.0 && low.fract() == 0.0) {
        fields.remove("exclusiveMinimum");
        fields.insert("minimum".to_owned(), (floor + step).into());
    }
    if high.is_some_and(|high| high <= 0.0 && high.fract() == 0.0) {
        fields.remove("exclusiveMaximum");
        fields.insert("maximum".to_owned(), (ceiling - step).into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_with_properties_are_closed_where_nothing_else_is_said() {
        let point = || json!({"type": "object", "properties": {"x": {"type": "integer"}}});
        let shut = || json!({"type": "object", "properties": {"x": {"type": "integer"}}, "additionalProperties": false});
        assert_eq!(closed(&point()), shut());
        let nested = |inner: Value| {
            json!({"type": "object", "properties": {"p": inner, "list": {"type": "array", "items": inner}},
                "$defs": {"P": inner}, "additionalProperties": inner})
        };
        assert_eq!(closed(&nested(point())), nested(shut()));
        for open in [
            json!({"type": "object"}),
            json!({"properties": {}, "additionalProperties": true}),
            json!({"properties": {}, "patternProperties": {"^x": {}}}),
            json!({"properties": {}, "unevaluatedProperties": {"type": "integer"}}),
            json!({"properties": {}, "$ref": "#/$defs/A", "$defs": {}}),
            json!({"properties": {}, "allOf": [point()]}),
            json!({"anyOf": [point(), {"properties": {"y": point()}}]}),
            json!({"enum": [point()], "const": point()}),
            json!(true),
        ] {
            assert_eq!(closed(&open), open);
        }
    }

    #[test]
    fn exclusive_bounds_are_moved_only_where_the_library_needs_it() {
        let guarded = |schema: Value| {
            let mut schema = schema;
            each_schema(&mut schema, &mut guard_exclusive_bounds);
            schema
        };
        for same in [
            json!({"type": "number", "exclusiveMinimum": 0, "maximum": 1.5}),
            json!({"type": "number", "exclusiveMinimum": 0.25, "maximum": 0.5}),
            json!({"type": "number", "minimum": 0, "exclusiveMaximum": 0.5}),
            json!({"type": "number", "exclusiveMinimum": 0}),
            json!({"const": {"exclusiveMinimum": 0, "maximum": 0.5}}),
        ] {
            assert_eq!(guarded(same.clone()), same);
        }
        assert_eq!(
            guarded(json!({"items": {"exclusiveMinimum": 2, "minimum": 1, "maximum": 2.5}})),
            json!({"items": {"minimum": 2.0 + 0.5e-9, "maximum": 2.5}})
        );
        assert_eq!(
            guarded(json!({"minimum": -0.5, "exclusiveMaximum": 0})),
            json!({"minimum": -0.5, "maximum": -0.5e-9})
        );
    }
}
