//! Tool calls in every layout: as the families' templates write them, as models get them wrong, and cut anywhere.

#![allow(clippy::unwrap_used)] // helpers of tests are tests too

use std::sync::Arc;

use oscar_server::parse::{
    Message, OutputParser, ReasoningKind, ReasoningParser, Tool, ToolKind, ToolParser,
};
use proptest::prelude::*;
use serde_json::{Value, json};

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

fn parser(kind: ToolKind) -> ToolParser {
    ToolParser::new(kind, tools(), "r7-")
}

/// The message from a text cut at these places.
fn parse_cut(kind: ToolKind, text: &str, cuts: &[usize]) -> Message {
    let mut parser = parser(kind);
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

fn parse(kind: ToolKind, text: &str) -> Message {
    let whole = parse_cut(kind, text, &[]);
    let bytes: Vec<usize> = (1..text.len()).collect();
    assert_eq!(parse_cut(kind, text, &bytes), whole, "cut into characters: {text:?}");
    whole
}

/// Content, and `name(arguments)` of each call.
fn brief(kind: ToolKind, text: &str) -> (String, Vec<String>) {
    let message = parse(kind, text);
    let calls = message.tool_calls.iter().map(|call| format!("{}({})", call.name, call.arguments));
    (message.content.clone(), calls.collect())
}

fn check(kind: ToolKind, text: &str, content: &str, calls: &[&str]) {
    let (got_content, got_calls) = brief(kind, text);
    assert_eq!(got_content, content, "{text}");
    assert_eq!(got_calls, calls, "{text}");
}

/// It is not a call: all of it is content.
fn no_call(kind: ToolKind, text: &str) {
    check(kind, text, text, &[]);
}

#[test]
fn hermes() {
    let kind = ToolKind::Hermes;
    check(
        kind,
        "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris\", \"days\": 2}}\n</tool_call>",
        "",
        &["get_weather({\"city\": \"Paris\", \"days\": 2})"],
    );
    check(
        kind,
        "Let me look.\n\n<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>\n<tool_call>\n{\"name\": \"now\", \"arguments\": {\"a\": [1, {\"b\": \"}\\\"</tool_call>\"}]}}\n</tool_call>\n",
        "Let me look.",
        &["now({})", "now({\"a\": [1, {\"b\": \"}\\\"</tool_call>\"}]})"],
    );
    check(kind, "<tool_call>{\"name\": \"now\"}</tool_call> Done.", " Done.", &["now({})"]);
    check(
        kind,
        "<tool_call>{\"arguments\": {\"a\": 1}, \"name\": \"now\"}</tool_call>",
        "",
        &["now({\"a\": 1})"],
    );
    check(kind, "<tool_call>{\"name\": \"now\", \"arguments\": null}</tool_call>", "", &["now({})"]);
    check(
        kind,
        "<tool_call>{\"name\": \"now\", \"arguments\": \"{\\\"a\\\": \\\"é\\\"}\"}</tool_call>",
        "",
        &["now({\"a\": \"é\"})"],
    );
    check(
        kind,
        "日本<tool_call>{\"name\": \"now\", \"arguments\": {\"日\": \"本😀\"}}</tool_call>",
        "日本",
        &["now({\"日\": \"本😀\"})"],
    );
    let first =
        &parse(kind, "<tool_call>{\"name\": \"now\"}</tool_call><tool_call>{\"name\": \"now\"}</tool_call>");
    assert_eq!(first.tool_calls[0].id, "call_r7-0");
    assert_eq!(first.tool_calls[1].id, "call_r7-1");
}

#[test]
fn hermes_as_models_get_it_wrong() {
    let kind = ToolKind::Hermes;
    // The marker twice, no closing marker, two calls in one block, no outer brace, a brace too many.
    check(kind, "<tool_call>\n<tool_call>\n{\"name\": \"now\"}\n</tool_call>", "<tool_call>", &["now({})"]);
    check(kind, "<tool_call>\n{\"name\": \"now\", \"arguments\": {}}", "", &["now({})"]);
    check(
        kind,
        "<tool_call>\n{\"name\": \"now\"}\n{\"name\": \"now\", \"arguments\": {\"a\": 1}}\n</tool_call>",
        "",
        &["now({})", "now({\"a\": 1})"],
    );
    check(
        kind,
        "<tool_call>\n{\"name\": \"now\", \"arguments\": {\"a\": 1}\n</tool_call>\nYes",
        "\nYes",
        &["now({\"a\": 1})"],
    );
    check(kind, "<tool_call>{\"name\": \"now\"}}</tool_call>", "}</tool_call>", &["now({})"]);
    // A line break in a string is mended.
    check(
        kind,
        "<tool_call>{\"name\": \"write_file\", \"arguments\": {\"text\": \"a\n\tb\"}}</tool_call>",
        "",
        &["write_file({\"text\": \"a\\u000a\\u0009b\"})"],
    );
    // Arguments that cease to be JSON are passed on as they are.
    check(
        kind,
        "<tool_call>{\"name\": \"now\", \"arguments\": {'a': 1}}</tool_call> So.",
        " So.",
        &["now({'a': 1}})"],
    );
    // Cut off.
    check(kind, "<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": [1, 2", "", &["now({\"a\": [1, 2)"]);
    for text in [
        "<tool_call>",
        "<tool_call>\n{\"na",
        "<tool_call>\n{\"name\": \"now\", \"argum",
        "<tool_call>hello</tool_call>",
        "<tool_call>\n[1]\n</tool_call>",
        "<tool_call>{\"name\": 5, \"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"\", \"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"now\", \"arguments\": 5}</tool_call>",
        "<tool_call>{\"name\": \"now\", \"arguments\": \"x\"}</tool_call>",
        "<tool_call>{\"arguments\": {\"a\": 1}}</tool_call>",
        "<tool_call>{\"name\": \"now\", \"args\": {\"a\": 1}}</tool_call>",
        "<tool_call>{}</tool_call>",
        "Use the `<tool_call>` tag.\n",
        "a < b, <tool, </tool_call>  \n\n",
        "  \n",
        "",
        "{\"name\": \"now\", \"arguments\": {}}",
    ] {
        no_call(kind, text);
    }
}

#[test]
fn llama() {
    let kind = ToolKind::Llama3;
    let call = "{\"name\": \"get_weather\", \"parameters\": {\"city\": \"Paris\"}}";
    let expected = "get_weather({\"city\": \"Paris\"})";
    check(kind, call, "", &[expected]);
    check(kind, &format!("<|python_tag|>{call}"), "", &[expected]);
    check(kind, &format!("\n {call}; {call}"), "", &[expected, expected]);
    check(kind, &format!("<|python_tag|>{call};{call}\n"), "", &[expected, expected]);
    check(kind, &format!("I will.<|python_tag|>{call}"), "I will.", &[expected]);
    check(
        kind,
        "{\"type\": \"function\", \"function\": \"now\", \"parameters\": {\"a\": 1}}",
        "",
        &["now({\"a\": 1})"],
    );
    check(kind, &format!("{call} and more"), " and more", &[expected]);
    for text in [
        // Answers that are JSON, an unknown name, a call that is not at the start, code.
        "{\"city\": \"Paris\"}",
        "{\"name\": \"Bob\", \"parameters\": {}}",
        "{\"name\": \"Bob\", \"age\": 5}",
        "Here: {\"name\": \"now\", \"parameters\": {}}",
        "<|python_tag|>print(1)",
        "{\"name\": \"now\"",
        "{}",
        "{",
    ] {
        no_call(kind, text);
    }
}

#[test]
fn qwen_coder() {
    let kind = ToolKind::QwenCoder;
    check(
        kind,
        "I'll look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n</parameter>\n<parameter=zip>\n00123\n</parameter>\n<parameter=where>\n{\"lat\": 1.50}\n</parameter>\n</function>\n</tool_call>",
        "I'll look.",
        &["get_weather({\"city\": \"Paris\", \"days\": 2, \"zip\": \"00123\", \"where\": {\"lat\": 1.50}})"],
    );
    // Several lines, with tags of other kinds among them; white space inside is the value's own.
    check(
        kind,
        "<tool_call>\n<function=write_file>\n<parameter=text>\n\n  <a>\n</function>\n\"x\"\n\n</parameter>\n</function>\n</tool_call>",
        "",
        &["write_file({\"text\": \"\\n  <a>\\n</function>\\n\\\"x\\\"\\n\"})"],
    );
    check(kind, "<tool_call>\n<function=now>\n</function>\n</tool_call>\n", "", &["now({})"]);
    // Without the outer marker, without the inner closing one, two in one block, JSON after all.
    check(kind, "<function=now>\n</function>\n</tool_call>", "", &["now({})"]);
    check(kind, "<tool_call>\n<function=now>\n</tool_call>", "", &["now({})"]);
    check(
        kind,
        "<tool_call>\n<function=now>\n</function>\n<function=now>\n</function>\n</tool_call>",
        "",
        &["now({})", "now({})"],
    );
    check(
        kind,
        "<tool_call>\n{\"name\": \"now\", \"arguments\": {\"a\": 1}}\n</tool_call>",
        "",
        &["now({\"a\": 1})"],
    );
    check(
        kind,
        "<tool_call><function=now><parameter=a>1</parameter><parameter=a>2</parameter></function></tool_call>",
        "",
        &["now({\"a\": 2})"],
    );
    for text in [
        "<tool_call>\n<function=now>\n<parameter=a>\n5",
        "<tool_call>\n<function=now\n",
        "<tool_call>\n<function=no such name>\n</function>\n</tool_call>",
        "<tool_call>\n<function=now>\nhello\n</function>\n</tool_call>",
        "<tool_call>\n</tool_call>",
        "<tool_call>\n<function=now>\n<parameter=>\n1\n</parameter>\n</function>\n</tool_call>",
        "a <function b",
    ] {
        no_call(kind, text);
    }
}

#[test]
fn glm() {
    let kind = ToolKind::Glm;
    check(
        kind,
        "Looking.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n<arg_key>zip</arg_key>\n<arg_value>00123</arg_value>\n<arg_key>tags</arg_key>\n<arg_value>[\"a\", 1]</arg_value>\n<arg_key>metric</arg_key>\n<arg_value>true</arg_value>\n</tool_call>",
        "Looking.",
        &[
            "get_weather({\"city\": \"Paris\", \"days\": 2, \"zip\": \"00123\", \"tags\": [\"a\", 1], \"metric\": true})",
        ],
    );
    // As the 4.7 template writes it, and without arguments.
    check(
        kind,
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value> São Paulo\n</arg_value></tool_call><tool_call>now</tool_call>",
        "",
        &["get_weather({\"city\": \" São Paulo\\n\"})", "now({})"],
    );
    check(kind, "<tool_call>now\n</tool_call>", "", &["now({})"]);
    check(
        kind,
        "<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": 1}}</tool_call>",
        "",
        &["now({\"a\": 1})"],
    );
    check(
        kind,
        "<tool_call>\n{\"name\": \"now\", \"arguments\": {\"a\": 1}}</tool_call>",
        "",
        &["now({\"a\": 1})"],
    );
    for text in [
        "Use <tool_call> and </tool_call>.",
        "<tool_call>",
        "<tool_call>now",
        "<tool_call>now\n<arg_key>a</arg_key>\n",
        "<tool_call>now\n<arg_key>a</arg_key>\n5</tool_call>",
        "<tool_call>now and then</tool_call>",
        "<tool_call>jetzt é</tool_call>",
    ] {
        no_call(kind, text);
    }
}

#[test]
fn minimax() {
    let kind = ToolKind::MiniMaxM2;
    check(
        kind,
        "Well.\n<minimax:tool_call>\n<invoke name=\"get_weather\">\n<parameter name=\"city\">Paris</parameter>\n<parameter name=\"days\">2</parameter>\n<parameter name=\"zip\">00123</parameter>\n</invoke>\n<invoke name=\"now\">\n</invoke>\n</minimax:tool_call>",
        "Well.",
        &["get_weather({\"city\": \"Paris\", \"days\": 2, \"zip\": \"00123\"})", "now({})"],
    );
    check(
        kind,
        "<minimax:tool_call><invoke name='write_file'><parameter name=text>\na < b && c > d\n</parameter></invoke></minimax:tool_call>",
        "",
        &["write_file({\"text\": \"\\na < b && c > d\\n\"})"],
    );
    for text in [
        "<minimax:tool_call>\n</minimax:tool_call>",
        "<minimax:tool_call>\n<invoke name=\"now\">",
        "<minimax:tool_call>\nhello",
        "<minimax:tool",
    ] {
        no_call(kind, text);
    }
}

/// JSON arguments arrive while the model writes them, and content is not held back longer than need be.
#[test]
fn what_is_sure_comes_at_once() {
    let mut hermes = parser(ToolKind::Hermes);
    let mut shown = |text: &str| format!("{:?}", hermes.push(text));
    assert_eq!(shown("Hello"), "[Content(\"Hello\")]");
    assert_eq!(shown(" a <"), "[Content(\" a\")]");
    assert_eq!(shown("b>"), "[Content(\" <b>\")]");
    assert_eq!(shown("\n<tool_call>{\"name\": \"now\", \"arguments\": "), "[]");
    assert!(shown("{\"a\"").contains("ToolCallStart { index: 0, id: \"call_r7-0\", name: \"now\" }"));
    assert_eq!(shown(": 1"), "[ToolCallArguments { index: 0, text: \": 1\" }]");
    assert_eq!(shown("}}</tool_call>"), "[ToolCallArguments { index: 0, text: \"}\" }]");
    assert_eq!(format!("{:?}", hermes.finish()), "[]");
}

#[test]
fn a_call_ends_reasoning() {
    let kind = ToolKind::Glm;
    for (open, calls) in [(kind.openers(), 1), (&[][..], 0)] {
        let reasoning = ReasoningParser::new(ReasoningKind::Glm45, true, open);
        let mut parser = OutputParser::new(Some(reasoning), Some(parser(kind)));
        let mut message = Message::default();
        message.extend(parser.push("I need the time.\n<tool_call>now</tool_call>"));
        message.extend(parser.finish());
        assert_eq!(message.tool_calls.len(), calls);
        assert!(message.reasoning.starts_with("I need the time."));
        assert_eq!(message.content, "");
    }
}

#[test]
fn reasoning_content_and_calls_in_one_answer() {
    let text = "<think>\nHm <tool_ca.\n</think>\n\nOne moment.\n<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>";
    for size in 1..text.len() {
        let reasoning = ReasoningParser::new(ReasoningKind::Qwen3, false, ToolKind::Hermes.openers());
        let mut parser = OutputParser::new(Some(reasoning), Some(parser(ToolKind::Hermes)));
        let mut message = Message::default();
        for chunk in text.as_bytes().chunks(size) {
            message.extend(parser.push(std::str::from_utf8(chunk).unwrap()));
        }
        message.extend(parser.finish());
        assert_eq!(message.reasoning, "Hm <tool_ca.");
        assert_eq!(message.content, "One moment.");
        assert_eq!(message.tool_calls.len(), 1);
    }
}

#[test]
fn names_and_templates() {
    for (name, kind) in [
        ("qwen25", ToolKind::Hermes),
        ("qwen", ToolKind::Hermes),
        ("hermes", ToolKind::Hermes),
        ("qwen3_coder", ToolKind::QwenCoder),
        ("llama3", ToolKind::Llama3),
        ("glm45", ToolKind::Glm),
        ("glm", ToolKind::Glm),
        ("minimax-m2", ToolKind::MiniMaxM2),
    ] {
        assert_eq!(ToolKind::choose(name, None), Ok(Some(kind)));
    }
    assert_eq!(ToolKind::choose("none", None), Ok(None));
    assert_eq!(ToolKind::choose("auto", None), Ok(None));
    let error = ToolKind::choose("pythonic", None).unwrap_err().to_string();
    assert!(error.starts_with("--tool-call-parser is `pythonic`, expected one of: qwen25, "), "{error}");

    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../model/tests/fixtures/text/templates/");
    let auto = |file: &str| {
        let template = std::fs::read_to_string(format!("{folder}{file}.jinja")).unwrap();
        ToolKind::choose("auto", Some(&template)).unwrap()
    };
    assert_eq!(auto("qwen3"), Some(ToolKind::Hermes));
    assert_eq!(auto("qwen2.5-coder"), Some(ToolKind::Hermes));
    assert_eq!(auto("glm-4.6"), Some(ToolKind::Glm));
    assert_eq!(auto("smollm2"), None);
    assert_eq!(auto("tinyllama"), None);
    let of = ToolKind::of_template;
    let coder = "'<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\n'";
    assert_eq!(of(coder), Some(ToolKind::QwenCoder));
    assert_eq!(of("'<minimax:tool_call>' <invoke name=\"tool-name-1\">"), Some(ToolKind::MiniMaxM2));
    let llama = r#"'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'"#;
    assert_eq!(of(llama), Some(ToolKind::Llama3));
}

const KINDS: [ToolKind; 5] =
    [ToolKind::Hermes, ToolKind::QwenCoder, ToolKind::Llama3, ToolKind::Glm, ToolKind::MiniMaxM2];

/// Bits of all layouts, to be put together at random. Words in capitals must not get lost.
fn fragments() -> impl Strategy<Value = String> {
    let bits = [
        "<tool_call>",
        "</tool_call>",
        "<function=now>",
        "<function=",
        "</function>",
        "<parameter=A>",
        "</parameter>",
        "<|python_tag|>",
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        "<invoke name=\"now\">",
        "</invoke>",
        "<parameter name=\"B\">",
        "now",
        "get_weather\n",
        "<arg_key>C</arg_key>",
        "<arg_value>D</arg_value>",
        "<arg_value>",
        "{\"name\": \"now\"",
        "\"name\": \"E\"",
        ", \"arguments\": ",
        "\"parameters\":",
        "{\"F\": \"G\"}",
        "{",
        "}",
        "[1, 2]",
        "H I",
        "é😀",
        "\n",
        "  ",
        ";",
        "<",
        ">",
        "\"",
        "\\",
        ":",
        ",",
        "5",
        "<tool_call>\n{\"name\": \"now\", \"arguments\": {\"J\": 1}}\n</tool_call>",
        "<tool_call>now<arg_key>K</arg_key><arg_value>L</arg_value></tool_call>",
        "<tool_call><function=now><parameter=M>N</parameter></function></tool_call>",
        "<minimax:tool_call><invoke name=\"now\"><parameter name=\"O\">P</parameter></invoke></minimax:tool_call>",
    ];
    prop::collection::vec(prop::sample::select(bits.to_vec()), 0..14).prop_map(|bits| bits.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn cuts_make_no_difference_and_nothing_is_lost(
        text in fragments(),
        mut cuts in prop::collection::vec(0_usize..400, 0..12),
    ) {
        cuts.sort_unstable();
        for kind in KINDS {
            let whole = parse_cut(kind, &text, &[]);
            prop_assert_eq!(&parse_cut(kind, &text, &cuts), &whole, "{:?} {:?}", kind, text);
            let all: Vec<usize> = (0..text.len()).collect();
            prop_assert_eq!(&parse_cut(kind, &text, &all), &whole, "{:?} {:?}", kind, text);
            if whole.tool_calls.is_empty() {
                prop_assert_eq!(&whole.content, &text);
            }
            let mut out = whole.content.clone();
            whole.tool_calls.iter().for_each(|call| out += &format!("{} {}", call.name, call.arguments));
            for word in text.chars().filter(char::is_ascii_uppercase) {
                prop_assert!(out.contains(word), "{kind:?} lost {word} of {text:?}: {out:?}");
            }
        }
    }
}
