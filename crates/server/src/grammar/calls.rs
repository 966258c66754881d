//! Forced calls: the layout of the model's family, with the schema of each tool in it.

use serde_json::{Value, json};

use super::GrammarError;
use super::factory::with_blanks;
use crate::parse::{Tool, ToolKind, may_be_text};

/// Which calls an answer must consist of.
#[derive(Clone, Copy, Debug)]
pub struct ForcedCalls<'a> {
    /// Layout of the model's family.
    pub kind: ToolKind,
    /// Tools of the request.
    pub tools: &'a [Tool],
    /// The only one that may be called.
    pub name: Option<&'a str>,
    /// More than one call is allowed.
    pub parallel: bool,
}

impl<'a> ForcedCalls<'a> {
    /// Tools that may be called.
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

/// A Lark grammar of calls of these tools. Arguments of `loose` ones are only bound to be an object.
pub(super) fn grammar(forced: &ForcedCalls<'_>, tools: &[&Tool], loose: &[&str]) -> String {
    let mut rules = String::new();
    let mut names = Vec::new();
    for (index, tool) in tools.iter().enumerate() {
        let loose = loose.contains(&tool.name.as_str());
        names.push(format!("tool{index}"));
        let body = match forced.kind {
            ToolKind::Hermes => json_call(tool, "arguments", loose),
            ToolKind::Llama3 => json_call(tool, "parameters", loose),
            ToolKind::QwenCoder | ToolKind::Glm | ToolKind::MiniMaxM2 => {
                tagged_call(forced.kind, tool, index, loose, &mut rules)
            }
        };
        rules += &format!("tool{index}: {body}\n");
    }
    let (open, between, close) = match forced.kind {
        ToolKind::Hermes | ToolKind::QwenCoder => ("<tool_call>\n", "\n", "\n</tool_call>"),
        ToolKind::Llama3 => ("", "; ", ""),
        ToolKind::Glm => ("<tool_call>", "\n", "</tool_call>"),
        ToolKind::MiniMaxM2 => ("", "\n", ""),
    };
    let (outer_open, outer_close) = match forced.kind {
        ToolKind::MiniMaxM2 => ("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
        _ => ("", ""),
    };
    let more = if forced.parallel { format!(" ({} call)*", literal(between)) } else { String::new() };
    let start = joined(&[literal(outer_open), format!("call{more}"), literal(outer_close)]);
    let call = joined(&[literal(open), format!("({})", names.join(" | ")), literal(close)]);
    format!("start: {start}\ncall: {call}\n{rules}")
}

/// Parts in a row, but for empty ones.
fn joined(parts: &[String]) -> String {
    let parts: Vec<_> = parts.iter().map(String::as_str).filter(|part| !part.is_empty()).collect();
    parts.join(" ")
}

/// Text as a literal; nothing for none.
fn literal(text: &str) -> String {
    if text.is_empty() { String::new() } else { Value::from(text).to_string() }
}

fn json_call(tool: &Tool, key: &str, loose: bool) -> String {
    let head = format!("{{\"name\": {}, \"{key}\": ", Value::from(tool.name.as_str()));
    let schema = if loose || !describes_object(&tool.parameters) {
        json!({"type": "object"})
    } else {
        tool.parameters.clone()
    };
    format!("{} %json {} {}", literal(&head), with_blanks(&schema), literal("}"))
}

/// Arguments are an object in any case.
fn describes_object(schema: &Value) -> bool {
    schema.as_object().is_some_and(|fields| !fields.is_empty())
}

/// Arguments in the order of the schema, required ones always, others or not. Those that the schema does not name
/// cannot be given.
fn tagged_call(kind: ToolKind, tool: &Tool, index: usize, loose: bool, rules: &mut String) -> String {
    let (open, close) = match kind {
        ToolKind::QwenCoder => (format!("<function={}>\n", tool.name), "</function>"),
        ToolKind::MiniMaxM2 => (format!("<invoke name=\"{}\">\n", tool.name), "</invoke>"),
        _ => (format!("{}\n", tool.name), ""),
    };
    let mut body = literal(&open);
    let none = serde_json::Map::new();
    let properties = tool.parameters.get("properties").and_then(Value::as_object).unwrap_or(&none);
    let required = |key: &str| {
        let list = tool.parameters.get("required").and_then(Value::as_array);
        list.is_some_and(|list| list.iter().any(|name| name == key))
    };
    for (number, (key, schema)) in properties.iter().enumerate() {
        let (before, behind) = match kind {
            ToolKind::QwenCoder => (format!("<parameter={key}>\n"), ("\n", "</parameter>")),
            ToolKind::MiniMaxM2 => (format!("<parameter name=\"{key}\">"), ("", "</parameter>")),
            _ => (format!("<arg_key>{key}</arg_key>\n<arg_value>"), ("", "</arg_value>")),
        };
        let name = format!("argument{index}_{number}");
        let value = value_rule(schema, &tool.parameters, loose, behind, &name, rules);
        *rules += &format!("{name}: {} {value} \"\\n\"\n", literal(&before));
        body += &format!(" {name}{}", if required(key) { "" } else { "?" });
    }
    joined(&[body, literal(close)])
}

/// A value, and the line break and tag behind it.
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
            let mut schema = with_blanks(schema);
            // References in it are to the schema as a whole.
            for shared in ["$defs", "definitions"] {
                if let Some(definitions) = root.get(shared).filter(|_| schema.is_object()) {
                    schema[shared] = definitions.clone();
                }
            }
            joined(&[format!("%json {schema}"), literal(line_break), literal(tag)])
        }
    }
}
