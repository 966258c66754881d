//! Checks that the tests of families share.

use std::sync::Arc;

use oscar_random::Random;
use serde_json::{Value, json};

use crate::grammar::testing::{draw, tokenizer, tools as grammar_tools, wrong};
use crate::grammar::{Constraint, ForcedCalls, GrammarFactory};
use crate::parse::{Message, ReasoningFormat, ReasoningParser, Tool, ToolCallFormat, ToolCallParser};

/// The format that `--tool-call-parser NAME` chooses.
pub(super) fn tool_calls(name: &str) -> &'static ToolCallFormat {
    ToolCallFormat::choose(name, None).unwrap().unwrap()
}

/// The format that `--reasoning-parser NAME` chooses.
pub(super) fn reasoning(name: &str) -> &'static ReasoningFormat {
    ReasoningFormat::choose(name, None).unwrap().unwrap()
}

/// The format of tool calls that a chat template is taken for.
pub(super) fn detected_tool_calls(template: &str) -> Option<&'static ToolCallFormat> {
    ToolCallFormat::choose("auto", Some(template)).unwrap()
}

/// The format of reasoning that a chat template is taken for.
pub(super) fn detected_reasoning(template: &str) -> Option<&'static ReasoningFormat> {
    ReasoningFormat::choose("auto", Some(template)).unwrap()
}

/// A published chat template.
pub(super) fn template(file: &str) -> String {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../model/tests/fixtures/text/templates/");
    std::fs::read_to_string(format!("{folder}{file}.jinja")).unwrap()
}

/// The tools that parsers know.
fn tools() -> Arc<[Tool]> {
    let tool = |name: &str, parameters: Value| Tool { name: name.to_owned(), parameters, strict: false };
    Arc::from([
        tool(
            "get_weather",
            json!({"type": "object", "properties": {
                "city": {"type": "string"}, "days": {"type": "integer"}, "metric": {"type": "boolean"},
                "where": {"type": "object"}, "zip": {"type": "string"}, "tags": {"type": "array"},
            }}),
        ),
        tool("now", json!({"type": "object", "properties": {}})),
        tool("write_file", json!({"type": "object", "properties": {"text": {"type": "string"}}})),
    ])
}

/// A parser that knows the tools above.
pub(super) fn parser(format: &'static ToolCallFormat) -> ToolCallParser {
    ToolCallParser::new(format, tools(), "r7-")
}

/// The message that comes of a text which arrives cut at these places.
pub(super) fn parse_cut(format: &'static ToolCallFormat, text: &str, cuts: &[usize]) -> Message {
    let mut parser = parser(format);
    let mut message = Message::default();
    let mut rest = text;
    let mut at = 0;
    for &cut in cuts {
        let length = rest.floor_char_boundary(cut.saturating_sub(at).min(rest.len()));
        let (now, later) = rest.split_at(length);
        message.extend(parser.push(now));
        at += length;
        rest = later;
    }
    message.extend(parser.push(rest));
    message.extend(parser.finish());
    assert_eq!(parser.calls(), message.tool_calls.len());
    message
}

/// The message that comes of a text, whole or one character at a time.
pub(super) fn parse(format: &'static ToolCallFormat, text: &str) -> Message {
    let whole = parse_cut(format, text, &[]);
    let bytes: Vec<usize> = (1..text.len()).collect();
    assert_eq!(parse_cut(format, text, &bytes), whole, "cut into characters: {text:?}");
    whole
}

/// Checks the content of a text, and `name(arguments)` of each call in it.
pub(super) fn check(format: &'static ToolCallFormat, text: &str, content: &str, calls: &[&str]) {
    let message = parse(format, text);
    let found = message.tool_calls.iter().map(|call| format!("{}({})", call.name, call.arguments));
    assert_eq!(message.content, content, "{text}");
    assert_eq!(found.collect::<Vec<_>>(), calls, "{text}");
}

/// The message that comes of a text which the limit of tokens cut off.
pub(super) fn cut_off(format: &'static ToolCallFormat, text: &str) -> Message {
    let mut parser = parser(format);
    let mut message = Message::default();
    message.extend(parser.push(text));
    message.extend(parser.cut_off());
    message
}

/// Checks that a text has no call in it: all of it is content.
pub(super) fn no_call(format: &'static ToolCallFormat, text: &str) {
    check(format, text, text, &[]);
}

/// The message that comes of a text with reasoning which arrives cut at these places.
pub(super) fn reasoning_cut(format: &ReasoningFormat, inside: bool, text: &str, cuts: &[usize]) -> Message {
    let mut parser = ReasoningParser::new(format, inside, &["<tool_call>"]);
    let mut message = Message::default();
    let mut from = 0;
    for &cut in cuts.iter().chain([&text.len()]) {
        let to = text.floor_char_boundary(cut.min(text.len())).max(from);
        message.extend(parser.push(&text[from..to]));
        from = to;
    }
    message.extend(parser.finish());
    message
}

/// Checks what reasoning and content a text has, however it is cut.
pub(super) fn check_reasoning(
    format: &ReasoningFormat,
    inside: bool,
    text: &str,
    reasoning: &str,
    content: &str,
) {
    for cuts in [vec![], (0..text.len()).collect::<Vec<_>>()] {
        let message = reasoning_cut(format, inside, text, &cuts);
        assert_eq!((message.reasoning.as_str(), message.content.as_str()), (reasoning, content), "{text:?}");
    }
}

/// Checks that what is drawn under a forced call is a call to the parser of the same format, with arguments by the
/// schema. `ending` is the text that ends a value, for models that draw at random and would never write it.
pub(super) fn forced_calls_are_calls(format: &'static ToolCallFormat, ending: &str) {
    let tokenizer = tokenizer("qwen2");
    let factory = GrammarFactory::new(&tokenizer).unwrap();
    let tools = grammar_tools();
    let mut random = Random::new(11);
    for (name, parallel) in [(None, true), (None, false), (Some("get_weather"), false)] {
        let forced = ForcedCalls { format, tools: &tools, name, parallel };
        let prototype = factory.filter(&Constraint::Calls(forced), None).unwrap();
        for _ in 0..10 {
            let text = draw(&mut *prototype.fork(), &tokenizer, &mut random, 40, ending);
            let mut parser = ToolCallParser::new(format, tools.clone().into(), "");
            let mut message = Message::default();
            message.extend(parser.push(&text));
            message.extend(parser.finish());
            assert_eq!(message.content, "", "{format:?}: {text}");
            assert!(!message.tool_calls.is_empty(), "{format:?}: {text}");
            assert!(parallel || message.tool_calls.len() == 1, "{text}");
            for call in message.tool_calls {
                assert!(name.is_none_or(|name| name == call.name), "{text}");
                let tool = tools.iter().find(|tool| tool.name == call.name).expect("a known tool");
                let arguments: Value = serde_json::from_str(&call.arguments).unwrap();
                assert!(arguments.is_object());
                if call.name == "get_weather" {
                    let mut schema = tool.parameters.clone();
                    if !format.is_json() {
                        // Text between tags has no length to be counted.
                        schema["properties"]["city"] = json!({"type": "string"});
                    }
                    assert_eq!(wrong(&arguments, &schema, &schema), None, "{format:?}: {text}");
                }
            }
        }
    }
}
