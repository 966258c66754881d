//! What is changed in a schema before the library compiles it: our options, and what the library gets wrong.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

/// White space that may stand between the parts of a JSON text: enough for every common way to lay it out, and too
/// little for a model to lose itself in.
const JSON_BLANKS: &str = r"[ ]{1,2}|\n[ ]{0,40}|\n\t{0,20}";

/// Keywords whose values are data rather than schemas.
const DATA: [&str; 5] = ["enum", "const", "default", "examples", "example"];

/// Keywords whose values are schemas by name.
const NAMED: [&str; 5] = ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"];

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
    let parts = parts_of_others(&schema);
    close(&mut schema, &parts);
    schema
}

/// Definitions that are put together with others, through `allOf` or beside other keywords, as `#/$defs/NAME`.
fn parts_of_others(schema: &Value) -> HashSet<String> {
    let (mut parts, mut left) = (HashSet::new(), Vec::new());
    find_parts(schema, false, &mut left);
    while let Some(part) = left.pop() {
        let definition = part.strip_prefix('#').and_then(|path| schema.pointer(path));
        if let Some(definition) = definition.filter(|_| parts.insert(part.clone())) {
            find_parts(definition, true, &mut left);
        }
    }
    parts
}

/// Finds the references of a schema whose objects other schemas describe too; with `shared`, that holds for its own object.
fn find_parts(schema: &Value, shared: bool, parts: &mut Vec<String>) {
    let Some(fields) = schema.as_object() else { return };
    let described = ["properties", "required", "allOf", "patternProperties", "additionalProperties", "if"];
    let shared = shared || described.iter().any(|keyword| fields.contains_key(*keyword));
    if let Some(Value::String(reference)) = fields.get("$ref").filter(|_| shared) {
        parts.push(reference.clone());
    }
    for (keyword, value) in fields {
        match (keyword.as_str(), value) {
            ("properties" | "patternProperties" | "$defs" | "definitions", Value::Object(named)) => {
                named.values().for_each(|value| find_parts(value, false, parts));
            }
            ("allOf", Value::Array(list)) => list.iter().for_each(|value| find_parts(value, true, parts)),
            ("anyOf" | "oneOf", Value::Array(list)) => {
                list.iter().for_each(|value| find_parts(value, shared, parts));
            }
            ("not" | "if" | "then" | "else", value) => find_parts(value, true, parts),
            ("items" | "additionalProperties", value) => find_parts(value, false, parts),
            ("prefixItems", Value::Array(list)) => {
                list.iter().for_each(|value| find_parts(value, false, parts));
            }
            _ => {}
        }
    }
}

/// Closes a schema and those in it, without the definitions that are `parts` of others.
fn close(schema: &mut Value, parts: &HashSet<String>) {
    let Some(fields) = schema.as_object_mut() else { return };
    let composed = COMPOSED.iter().any(|keyword| fields.contains_key(*keyword));
    let open = !OTHERS.iter().any(|keyword| fields.contains_key(*keyword));
    if fields.contains_key("properties") && open && !composed {
        fields.insert("additionalProperties".to_owned(), false.into());
    }
    for (keyword, value) in fields.iter_mut() {
        match (keyword.as_str(), value) {
            ("properties", Value::Object(named)) => {
                named.values_mut().for_each(|value| close(value, parts));
            }
            ("$defs" | "definitions", Value::Object(named)) => {
                let whole =
                    named.iter_mut().filter(|(name, _)| !parts.contains(&format!("#/{keyword}/{name}")));
                whole.for_each(|(_, value)| close(value, parts));
            }
            ("items" | "additionalProperties", value) => close(value, parts),
            ("prefixItems", Value::Array(list)) => list.iter_mut().for_each(|value| close(value, parts)),
            _ => {}
        }
    }
}

/// Calls a function for a schema and for all schemas in it.
fn each_schema(schema: &mut Value, change: &mut impl FnMut(&mut Map<String, Value>)) {
    match schema {
        Value::Object(fields) => {
            change(fields);
            for (keyword, value) in fields.iter_mut() {
                match (keyword.as_str(), value) {
                    // Names that clients choose, which may be those of keywords.
                    (keyword, Value::Object(named)) if NAMED.contains(&keyword) => {
                        named.values_mut().for_each(|value| each_schema(value, change));
                    }
                    (keyword, value) if !DATA.contains(&keyword) => each_schema(value, change),
                    _ => {}
                }
            }
        }
        Value::Array(list) => list.iter_mut().for_each(|value| each_schema(value, change)),
        _ => {}
    }
}

/// Between bounds that share their integer part the library takes the fraction for optional, and with it an exclusive
/// bound for a value: 0 where `{"exclusiveMinimum": 0, "maximum": 0.5}`. Such a bound is moved by a billionth of the range.
fn guard_exclusive_bounds(fields: &mut Map<String, Value>) {
    // The library puts bounds of `allOf` together with those beside it.
    let others = fields.get("allOf").and_then(Value::as_array).into_iter().flatten();
    let all: Vec<&Map<String, Value>> =
        std::iter::once(&*fields).chain(others.filter_map(Value::as_object)).collect();
    let number = |name: &str, tighter: fn(f64, f64) -> f64| {
        all.iter().filter_map(|fields| fields.get(name).and_then(Value::as_f64)).reduce(tighter)
    };
    let (above, below) = (number("exclusiveMinimum", f64::max), number("exclusiveMaximum", f64::min));
    let (least, most) = (number("minimum", f64::max), number("maximum", f64::min));
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
        // Definitions that others are put together with stay open, at any distance.
        let parts =
            |defs: Value| json!({"allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], "$defs": defs});
        let defs = json!({"A": point(), "B": {"anyOf": [{"$ref": "#/$defs/C"}]}, "C": point(), "D": point()});
        let mut some = defs.clone();
        some["D"] = shut();
        assert_eq!(closed(&parts(defs)), parts(some));
        let beside = |d: Value| json!({"$ref": "#/$defs/A", "required": ["x"], "$defs": {"A": d}});
        assert_eq!(closed(&beside(point())), beside(point()));
        let maybe = |d: Value| {
            json!({"type": "object", "properties": {"p": {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}]}},
                "additionalProperties": false, "$defs": {"A": d}})
        };
        assert_eq!(closed(&maybe(point())), maybe(shut()));
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
        // Bounds in several places, and a property with the name of a keyword.
        let several = json!({"allOf": [{"exclusiveMinimum": 3}, {"maximum": 3.5}]});
        assert_eq!(guarded(several)["minimum"], 3.0 + 0.5e-9);
        let named = json!({"properties": {"default": {"exclusiveMinimum": 3, "maximum": 3.5}}});
        assert_eq!(guarded(named)["properties"]["default"]["minimum"], 3.0 + 0.5e-9);
    }
}
