//! Forced tool calls: a grammar of the family's format, with the schema of each tool in it.

use serde_json::{Value, json};

use super::GrammarError;
use super::schema::prepared;
use crate::parse::{CallLayout, Tool, ToolCallFormat, XmlLayout, may_be_text};

/// The tool calls that an answer must consist of (`tool_choice` is `required` or names a function).
#[derive(Clone, Copy, Debug)]
pub struct ForcedCalls<'a> {
    /// How the model writes tool calls.
    pub format: &'static ToolCallFormat,
    /// The tools of the request.
    pub tools: &'a [Tool],
    /// The name of the only tool that may be called, if `tool_choice` has one.
    pub name: Option<&'a str>,
    /// Whether the answer may have more than one call.
    pub parallel: bool,
}

impl<'a> ForcedCalls<'a> {
    /// The tools that may be called.
    pub(super) fn chosen(&self) -> Result<Vec<&'a Tool>, GrammarError> {
        let fits = |tool: &&Tool| self.name.is_none_or(|name| tool.name == name);
        let chosen: Vec<_> = self.tools.iter().filter(fits).collect();
        match (chosen.is_empty(), self.name) {
            (false, _) => Ok(chosen),
            (true, Some(name)) => Err(GrammarError::UnknownTool { name: name.to_owned() }),
            (true, None) => Err(GrammarError::NoTools),
        }
    }
}

/// A Lark grammar of calls of these tools. The arguments of tools named in `loose` need only be an object.
pub(super) fn grammar(forced: &ForcedCalls<'_>, tools: &[&Tool], loose: &[&str]) -> String {
    let mut rules = String::new();
    let mut names = Vec::new();
    for (index, tool) in tools.iter().enumerate() {
        let loose = loose.contains(&tool.name.as_str());
        names.push(format!("tool{index}"));
        let body = match &forced.format.layout {
            CallLayout::Json { arguments, .. } => json_call(tool, arguments, loose),
            CallLayout::Named { separator } => named_call(tool, separator, loose),
            CallLayout::Xml(layout) => xml_call(layout, tool, index, loose, &mut rules),
            CallLayout::Harmony => harmony_call(tool, loose),
        };
        rules += &format!("tool{index}: {body}\n");
    }
    let ToolCallFormat { block, one_block, separator, .. } = *forced.format;
    let (outer, inner) = if one_block { (block, ("", "")) } else { (("", ""), block) };
    let more = if forced.parallel { format!(" ({} call)*", literal(separator)) } else { String::new() };
    let brackets = match forced.format.layout {
        CallLayout::Json { list: true, .. } => ("[", "]"),
        _ => ("", ""),
    };
    let outer = ([outer.0, brackets.0].concat(), [brackets.1, outer.1].concat());
    let start = joined(&[literal(&outer.0), format!("call{more}"), literal(&outer.1)]);
    let call = joined(&[literal(inner.0), format!("({})", names.join(" | ")), literal(inner.1)]);
    format!("start: {start}\ncall: {call}\n{rules}")
}

/// Joins the parts of a rule that are not empty.
fn joined(parts: &[String]) -> String {
    let parts: Vec<_> = parts.iter().map(String::as_str).filter(|part| !part.is_empty()).collect();
    parts.join(" ")
}

/// A text as a literal of the grammar; an empty text has none.
fn literal(text: &str) -> String {
    if text.is_empty() { String::new() } else { Value::from(text).to_string() }
}

fn json_call(tool: &Tool, key: &str, loose: bool) -> String {
    let head = format!("{{\"name\": {}, \"{key}\": ", Value::from(tool.name.as_str()));
    format!("{} {} {}", literal(&head), arguments(tool, loose), literal("}"))
}

/// The rule of a name with its arguments behind a marker.
fn named_call(tool: &Tool, separator: &str, loose: bool) -> String {
    let head = [&tool.name, separator].concat();
    format!("{} {}", literal(&head), arguments(tool, loose))
}

/// The rule of a message for a function. Grammars have no control tokens: its markers are written as text, and read alike.
fn harmony_call(tool: &Tool, loose: bool) -> String {
    let head = format!("functions.{} <|constrain|>json<|message|>", tool.name);
    format!("{} {}", literal(&head), arguments(tool, loose))
}

/// The JSON object of a call's arguments.
fn arguments(tool: &Tool, loose: bool) -> String {
    let schema = if loose || !describes_object(&tool.parameters) {
        json!({"type": "object"})
    } else {
        tool.parameters.clone()
    };
    format!("%json {}", prepared(&schema))
}

/// Whether a schema says anything about the arguments, which are an object in any case.
fn describes_object(schema: &Value) -> bool {
    schema.as_object().is_some_and(|fields| !fields.is_empty())
}

/// The rule of a call written with tags. Arguments come in the order of the schema, and those that are not required
/// may be left out. Arguments that the schema does not name cannot be given.
fn xml_call(layout: &XmlLayout, tool: &Tool, index: usize, loose: bool, rules: &mut String) -> String {
    let quoted = |name: &str| if layout.quoted_names { format!("\"{name}\"") } else { name.to_owned() };
    let (open, close) = match layout.call_open {
        Some(open) => (format!("{open}{}>\n", quoted(&tool.name)), layout.call_close),
        // The tag that closes the call is the one that closes its block.
        None => (format!("{}\n", tool.name), ""),
    };
    let after_key = if layout.values_on_lines || !layout.value.0.is_empty() { "\n" } else { "" };
    let behind = (if layout.values_on_lines { "\n" } else { "" }, layout.value.1);
    let mut body = literal(&open);
    let none = serde_json::Map::new();
    let properties = tool.parameters.get("properties").and_then(Value::as_object).unwrap_or(&none);
    let required = |key: &str| {
        let list = tool.parameters.get("required").and_then(Value::as_array);
        list.is_some_and(|list| list.iter().any(|name| name == key))
    };
    for (number, (key, schema)) in properties.iter().enumerate() {
        let before = [layout.key.0, &quoted(key), layout.key.1, after_key, layout.value.0].concat();
        let name = format!("argument{index}_{number}");
        let value = value_rule(schema, &tool.parameters, loose, behind, &name, rules);
        *rules += &format!("{name}: {} {value} \"\\n\"\n", literal(&before));
        body += &format!(" {name}{}", if required(key) { "" } else { "?" });
    }
    joined(&[body, literal(close)])
}

/// The rule of a value with the line break and tag behind it.
fn value_rule(
    schema: &Value,
    root: &Value,
    loose: bool,
    (line_break, tag): (&str, &str),
    name: &str,
    rules: &mut String,
) -> String {
    let texts = |values: &Vec<Value>| {
        let literals: Option<Vec<_>> = values.iter().map(|value| Some(literal(value.as_str()?))).collect();
        literals.filter(|literals| !literals.is_empty() && literals.iter().all(|text| !text.is_empty()))
    };
    match schema.get("enum").and_then(Value::as_array).and_then(texts).filter(|_| !loose) {
        Some(listed) => joined(&[format!("({})", listed.join(" | ")), literal(line_break), literal(tag)]),
        // Text stands there as it is, and ends at the first closing tag.
        None if loose || may_be_text(schema, root) => {
            *rules += &format!("text_{name}[suffix={}]: /(?s:.*)/\n", literal(tag));
            format!("text_{name}")
        }
        None => {
            let mut schema = schema.clone();
            // References in it are to the schema as a whole.
            for shared in ["$defs", "definitions"] {
                if let Some(definitions) = root.get(shared).filter(|_| schema.is_object()) {
                    schema[shared] = definitions.clone();
                }
            }
            joined(&[format!("%json {}", prepared(&schema)), literal(line_break), literal(tag)])
        }
    }
}
