//! What is changed in a schema before the library compiles it: our options, and what the library gets wrong.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

use super::limits::check_schemas;

/// White space that may stand between the parts of a JSON text: enough for every common way to lay it out, and too
/// little for a model to lose itself in.
const JSON_BLANKS: &str = r"[ ]{1,2}|\n[ ]{0,40}|\n\t{0,20}";

/// How far an exclusive bound is moved, as a part of the range.
const STEP: f64 = 1e-9;

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
    guard_exclusive_bounds(&mut schema);
    // Generators of schemas write `oneOf` for unions whose parts exclude each other, where `anyOf` is the same.
    schema["x-guidance"] = json!({"whitespace_pattern": JSON_BLANKS, "coerce_one_of": true});
    schema
}

/// Closes objects that list their properties and say nothing of others: small models would add keys until the answer
/// is full. An object that is put together from several schemas stays open, as each of them sees only a part. So does one
/// that needs more properties than it lists, which nothing could satisfy any more.
///
/// A schema beyond the limits stays as it is: whatever needs a grammar of it refuses it.
pub(crate) fn closed(schema: &Value) -> Value {
    let mut schema = schema.clone();
    if check_schemas("the schema", [&schema]).is_ok()
        && let Some(parts) = parts_of_others(&schema)
    {
        close(&mut schema, "#", &parts);
    }
    schema
}

/// References to schemas that are put together with others, through `allOf` or beside other keywords. There are none to
/// be known where one of them does not lead to a place in this schema.
fn parts_of_others(schema: &Value) -> Option<HashSet<String>> {
    let (mut parts, mut left) = (HashSet::new(), Vec::new());
    find_parts(schema, false, &mut left);
    while let Some(part) = left.pop() {
        let definition = schema.pointer(part.strip_prefix('#')?)?;
        // A place has many names: `~` may stand for itself where it is no escape.
        if parts.insert(part.split('/').map(|name| escaped(&unescaped(name))).collect::<Vec<_>>().join("/")) {
            find_parts(definition, true, &mut left);
        }
    }
    Some(parts)
}

/// A name as it is written in references.
fn escaped(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}

fn unescaped(name: &str) -> String {
    name.replace("~1", "/").replace("~0", "~")
}

/// Finds the references of a schema whose objects other schemas describe too; with `shared`, that holds for its own object
/// and what is in it.
fn find_parts(schema: &Value, shared: bool, parts: &mut Vec<String>) {
    let Some(fields) = schema.as_object() else { return };
    let described = ["properties", "required", "patternProperties", "additionalProperties", "if"];
    let composed = ["$ref", "anyOf", "oneOf"].iter().filter(|keyword| fields.contains_key(**keyword)).count();
    let several = composed + fields.get("allOf").and_then(Value::as_array).map_or(0, Vec::len) > 1;
    let here = shared || several || described.iter().any(|keyword| fields.contains_key(*keyword));
    if let Some(Value::String(reference)) = fields.get("$ref").filter(|_| here) {
        parts.push(reference.clone());
    }
    for (keyword, value) in fields {
        match (keyword.as_str(), value) {
            ("properties" | "patternProperties", Value::Object(named)) => {
                named.values().for_each(|value| find_parts(value, shared, parts));
            }
            ("$defs" | "definitions", Value::Object(named)) => {
                named.values().for_each(|value| find_parts(value, false, parts));
            }
            ("allOf" | "anyOf" | "oneOf", Value::Array(list)) => {
                list.iter().for_each(|value| find_parts(value, here, parts));
            }
            ("not" | "if" | "then" | "else", value) => find_parts(value, true, parts),
            ("items" | "additionalProperties", value) => find_parts(value, shared, parts),
            ("prefixItems", Value::Array(list)) => {
                list.iter().for_each(|value| find_parts(value, shared, parts));
            }
            _ => {}
        }
    }
}

/// Closes a schema and those in it, without those that are `parts` of others. `place` is the reference to it.
fn close(schema: &mut Value, place: &str, parts: &HashSet<String>) {
    let Some(fields) = schema.as_object_mut().filter(|_| !parts.contains(place)) else { return };
    let composed = COMPOSED.iter().any(|keyword| fields.contains_key(*keyword));
    let open = !OTHERS.iter().any(|keyword| fields.contains_key(*keyword));
    if open && !composed && lists_what_it_needs(fields) {
        fields.insert("additionalProperties".to_owned(), false.into());
    }
    for (keyword, value) in fields.iter_mut() {
        match (keyword.as_str(), value) {
            ("properties" | "$defs" | "definitions", Value::Object(named)) => {
                for (name, value) in named {
                    close(value, &format!("{place}/{keyword}/{}", escaped(name)), parts);
                }
            }
            ("items" | "additionalProperties", value) => close(value, &format!("{place}/{keyword}"), parts),
            ("prefixItems", Value::Array(list)) => {
                for (index, value) in list.iter_mut().enumerate() {
                    close(value, &format!("{place}/{keyword}/{index}"), parts);
                }
            }
            _ => {}
        }
    }
}

/// Whether an object has `properties`, and among them all that it must have.
fn lists_what_it_needs(fields: &Map<String, Value>) -> bool {
    let Some(listed) = fields.get("properties").and_then(Value::as_object) else { return false };
    let required = fields.get("required").and_then(Value::as_array).into_iter().flatten();
    let least = fields.get("minProperties").and_then(Value::as_f64).unwrap_or(0.0);
    least <= listed.len() as f64
        && required.into_iter().all(|name| name.as_str().is_some_and(|name| listed.contains_key(name)))
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

/// The bounds of numbers anywhere in a schema. Any two of them may come together, through references or in `allOf`, `anyOf`
/// and their like.
#[derive(Default)]
struct Bounds {
    lower: Vec<f64>,
    upper: Vec<f64>,
}

impl Bounds {
    fn of(schema: &mut Value) -> Bounds {
        let mut bounds = Bounds::default();
        each_schema(schema, &mut |fields| {
            let number = |name| fields.get(name).and_then(Value::as_f64);
            bounds.lower.extend(number("minimum").into_iter().chain(number("exclusiveMinimum")));
            bounds.upper.extend(number("maximum").into_iter().chain(number("exclusiveMaximum")));
        });
        bounds
    }

    /// A number just above this one, which numbers must be greater than, if some upper bound has the same integer part.
    fn just_above(&self, bound: f64) -> Option<f64> {
        let shared = |&&other: &&f64| other > bound && other.trunc() == bound;
        let nearest = self.upper.iter().filter(shared).copied().reduce(f64::min)?;
        (bound >= 0.0).then(|| (bound + (nearest - bound) * STEP).max(bound.next_up()))
    }

    /// A number just below this one, which numbers must be less than, if some lower bound has the same integer part.
    fn just_below(&self, bound: f64) -> Option<f64> {
        let shared = |&&other: &&f64| other < bound && other.trunc() == bound;
        let nearest = self.lower.iter().filter(shared).copied().reduce(f64::max)?;
        (bound <= 0.0).then(|| (bound - (bound - nearest) * STEP).min(bound.next_down()))
    }
}

/// Between bounds that share their integer part the library takes the fraction for optional, and with it an exclusive
/// bound for a value: 0 where `{"exclusiveMinimum": 0, "maximum": 0.5}`. Such a bound is moved by a billionth of the range.
fn guard_exclusive_bounds(schema: &mut Value) {
    let bounds = Bounds::of(schema);
    each_schema(schema, &mut |fields| {
        for (inclusive, exclusive, lower) in
            [("minimum", "exclusiveMinimum", true), ("maximum", "exclusiveMaximum", false)]
        {
            let beside = fields.get(inclusive).and_then(Value::as_f64);
            let bound = match fields.get(exclusive) {
                // The first drafts of JSON Schema say so of the bound beside it.
                Some(Value::Bool(true)) => beside,
                other => other.and_then(Value::as_f64),
            };
            let moved = bound.and_then(|bound| match lower {
                true => Some(bounds.just_above(bound)?.max(beside.unwrap_or(bound))),
                false => Some(bounds.just_below(bound)?.min(beside.unwrap_or(bound))),
            });
            if let Some(moved) = moved {
                fields.remove(exclusive);
                fields.insert(inclusive.to_owned(), moved.into());
            }
        }
    });
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
        // So do those that are put together at other places, and what is in them.
        let inside = json!({"properties": {"base": {"properties": {"p": {"$ref": "#/$defs/P"}}},
            "both": {"allOf": [{"$ref": "#/properties/base"}, {"properties": {"p": {"properties": {"y": {}}}}}]}},
            "additionalProperties": false, "$defs": {"P": point()}});
        assert_eq!(closed(&inside), inside);
        let far =
            json!({"properties": {"a": point()}, "allOf": [{"$ref": "other.json"}, {"required": ["x"]}]});
        assert_eq!(closed(&far), far);
        // Old generators write a reference with a description so.
        let only = |a: Value| {
            json!({"properties": {"p": {"allOf": [{"$ref": "#/definitions/A"}], "description": "d"}},
                "additionalProperties": false, "definitions": {"A": a}})
        };
        assert_eq!(closed(&only(point())), only(shut()));
        for open in [
            json!({"type": "object"}),
            json!({"properties": {"x": {}}, "required": ["x", "y"]}),
            json!({"properties": {"x": {}}, "minProperties": 2}),
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
    fn a_place_is_one_whatever_a_reference_calls_it() {
        let point = || json!({"type": "object", "properties": {"x": {"type": "integer"}}});
        let list = |names: &[&str]| {
            let references = names.iter().map(|name| json!({"$ref": format!("#/$defs/{name}")}));
            let references: Vec<Value> = references.collect();
            json!({"allOf": references, "$defs": {"~a/~": point(), "b": point()}})
        };
        for names in [&["~a~1~", "b"][..], &["~0a~1~", "b"], &["~a~1~0", "b"], &["~0a~1~0", "b"]] {
            assert_eq!(closed(&list(names)), list(names));
        }
        let all = list(&["~a~1~", "~0a~1~", "~a~1~0", "~0a~1~0", "b"]);
        let parts = parts_of_others(&all).unwrap();
        assert_eq!(parts, HashSet::from(["#/$defs/~0a~1~0".to_owned(), "#/$defs/b".to_owned()]));
        // What is too large for a grammar is not looked at.
        let large = json!({"properties": {"x": {"enum": vec!["a".repeat(1000); 300]}}});
        assert_eq!(closed(&large), large);
    }

    #[test]
    fn exclusive_bounds_are_moved_only_where_the_library_needs_it() {
        let guarded = |schema: Value| {
            let mut schema = schema;
            guard_exclusive_bounds(&mut schema);
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
        assert_eq!(guarded(several)["allOf"][0], json!({"minimum": 3.0 + 0.5e-9}));
        let branches = json!({"exclusiveMinimum": 0, "anyOf": [{"maximum": 0.5}, {"maximum": 0.25}]});
        assert_eq!(guarded(branches)["minimum"], 0.25e-9);
        let part = json!({"$ref": "#/$defs/p", "maximum": 0.5, "$defs": {"p": {"exclusiveMinimum": 0}}});
        assert_eq!(guarded(part)["$defs"]["p"], json!({"minimum": 0.5e-9}));
        // The form of the first drafts, and bounds between which a billionth of the range is no number.
        let flag = json!({"minimum": 0, "exclusiveMinimum": true, "maximum": 0.5, "exclusiveMaximum": false});
        assert_eq!(guarded(flag), json!({"minimum": 0.5e-9, "maximum": 0.5, "exclusiveMaximum": false}));
        let large = json!({"exclusiveMinimum": 1e7, "maximum": 1e7 + 0.5});
        assert_eq!(guarded(large)["minimum"], 1e7_f64.next_up());
        let stricter = json!({"minimum": 0.25, "exclusiveMinimum": 0, "maximum": 0.5});
        assert_eq!(guarded(stricter)["minimum"], 0.25);
        let named = json!({"properties": {"default": {"exclusiveMinimum": 3, "maximum": 3.5}}});
        assert_eq!(guarded(named)["properties"]["default"]["minimum"], 3.0 + 0.5e-9);
    }
}
