//! What holds for every family in the registry, and for reasoning and tool calls in one answer.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::testing::{
    check_reasoning, detected_reasoning, detected_tool_calls, parse_cut, parser, reasoning, reasoning_cut,
    template, tool_calls,
};
use super::*;
use crate::parse::{CallLayout, HarmonyParser, Message, OutputParser, ReasoningParser, needs_special_tokens};

/// Formats of calls that stand in the text of an answer, and are no messages of their own.
fn marked_formats() -> impl Iterator<Item = &'static ToolCallFormat> {
    tool_call_formats().filter(|format| !format.is_harmony())
}

#[test]
fn facts_agree_with_each_other() {
    for format in marked_formats() {
        let (open, close) = format.block;
        assert!(open.is_empty() || format.openers.contains(&open.trim()), "{format:?}");
        assert_eq!(close.trim(), format.closer.unwrap_or_default(), "{format:?}");
        assert!(format.openers.iter().chain(&format.closer).all(|marker| !marker.is_empty()));
        // The reader of tags looks for the end of the block, which an empty text would be everywhere.
        assert!(format.closer.is_some() || format.is_json());
        assert!(format.one_block || !matches!(format.layout, CallLayout::Json { list: true, .. }));
        for name in format.names {
            assert_eq!(tool_calls(name), format, "{name} is taken");
        }
    }
    for format in reasoning_formats() {
        assert!(!format.markers.0.is_empty() && !format.markers.1.is_empty(), "{format:?}");
        for name in format.names {
            assert_eq!(reasoning(name), format, "{name} is taken");
        }
    }
}

#[test]
fn written_calls_are_read_back() {
    let arguments = json!({"city": "Rome <3", "days": 3, "where": {"x": [1]}});
    for format in marked_formats() {
        let text = format.written(&[("get_weather", &arguments), ("now", &json!({}))], format.block);
        let message = parse_cut(format, &text, &[]);
        let calls = message.tool_calls.iter();
        let calls: Vec<(&str, Value)> =
            calls.map(|call| (call.name.as_str(), serde_json::from_str(&call.arguments).unwrap())).collect();
        assert_eq!(calls, [("get_weather", arguments.clone()), ("now", json!({}))], "{format:?}: {text}");
        assert_eq!(message.content, "", "{format:?}");
    }
}

/// Wherever the limit cuts calls off, each has the beginning of its arguments, and what has none is no call. Markers are
/// neither.
#[test]
fn a_call_that_is_cut_off_is_a_beginning_or_nothing() {
    let (weather, file) = (json!({"city": "Rome", "days": 3}), json!({"text": "a"}));
    for format in tool_call_formats() {
        let text = format.written(&[("get_weather", &weather), ("write_file", &file)], format.block);
        let read = |text: &str, cut_off: bool, forced: bool| {
            let mut output = match format.is_harmony() {
                true => OutputParser::harmony(HarmonyParser::new(true, Some(String::new()))),
                false => OutputParser::new(None, Some(parser(format).forced(forced))),
            };
            let mut message = Message::default();
            message.extend(output.push(text));
            message.extend(output.finish(cut_off));
            message
        };
        let whole = read(&text, false, false).tool_calls;
        assert_eq!(whole.len(), 2, "{format:?}: {text}");
        for end in 1..text.len() {
            let cut = &text[..end];
            // A control token comes as a whole.
            let in_token = cut.rfind("<|").is_some_and(|open| !cut[open..].contains("|>"));
            if format.is_harmony() && (in_token || cut.ends_with('<')) {
                continue;
            }
            let message = read(cut, true, false);
            assert!(message.tool_calls.len() <= 2);
            for (call, whole) in message.tool_calls.iter().zip(&whole) {
                let is_beginning = !call.arguments.is_empty() && whole.arguments.starts_with(&call.arguments);
                assert!(call.name == whole.name && is_beginning, "{format:?}: {cut:?} gives {call:?}");
            }
            // Where there must be a call, or one has been, there is nothing that it could be but another.
            let called = message.tool_calls.len();
            if !format.is_harmony() {
                let forced = read(cut, true, true);
                assert_eq!(
                    (forced.content.trim(), forced.tool_calls.len()),
                    ("", called),
                    "{format:?}: {cut:?}"
                );
            }
            // Half of a marker may be the beginning of something else, and calls without any may be JSON.
            let longest = format.block.0.trim().len().max(format.closer.unwrap_or_default().len());
            let shown =
                message.content.trim_matches(|byte: char| byte.is_whitespace() || ";,".contains(byte));
            assert!(
                format.block.0.is_empty() || shown.len() * 2 <= if called > 0 { 0 } else { longest },
                "{format:?}: {cut:?} gives {shown:?}"
            );
        }
    }
}

#[test]
fn parsers_are_chosen_by_name() {
    assert_eq!(ToolCallFormat::choose("none", None), Ok(None));
    assert_eq!(ToolCallFormat::choose("auto", None), Ok(None));
    let error = ToolCallFormat::choose("pythonic", None).unwrap_err().to_string();
    assert!(error.starts_with("--tool-call-parser is `pythonic`, expected one of: qwen25, "), "{error}");
    assert_eq!(ReasoningFormat::choose("none", Some("</think>")), Ok(None));
    let error = ReasoningFormat::choose("gemma", None).unwrap_err().to_string();
    assert!(error.starts_with("--reasoning-parser is `gemma`, expected one of: qwen3, "), "{error}");
}

#[test]
fn templates_that_teach_nothing() {
    for file in ["smollm2", "tinyllama", "gemma-3", "phi-3"] {
        assert_eq!(detected_tool_calls(&template(file)), None, "{file}");
    }
    for file in ["qwen2.5-coder", "smollm2", "tinyllama", "gemma-3", "phi-3", "phi-4-mini", "llama-3.2"] {
        assert_eq!(detected_reasoning(&template(file)), None, "{file}");
    }
}

#[test]
fn reasoning_that_the_prompt_opened() {
    for format in ["qwen3", "deepseek-r1", "minimax", "glm45"].map(reasoning) {
        check_reasoning(format, true, "Hm.\n</think>\n\nYes.", "Hm.", "Yes.");
        // Some open it again.
        check_reasoning(format, true, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes.");
        check_reasoning(format, true, "Hm <think> hm", "Hm <think> hm", "");
        check_reasoning(format, true, "</think>\n\nYes.", "", "Yes.");
    }
}

#[test]
fn a_call_ends_reasoning() {
    let format = tool_calls("glm");
    for (open, calls) in [(format.openers, 1), (&[][..], 0)] {
        let reasoning_parser = ReasoningParser::new(reasoning("glm45"), true, open);
        let mut output = OutputParser::new(Some(reasoning_parser), Some(parser(format)));
        let mut message = Message::default();
        message.extend(output.push("I need the time.\n<tool_call>now</tool_call>"));
        message.extend(output.finish(false));
        assert_eq!(message.tool_calls.len(), calls);
        assert!(message.reasoning.starts_with("I need the time."));
        assert_eq!(message.content, "");
    }
}

#[test]
fn reasoning_content_and_calls_in_one_answer() {
    let format = tool_calls("hermes");
    let text = "<think>\nHm <tool_ca.\n</think>\n\nOne moment.\n<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>";
    for size in 1..text.len() {
        let reasoning_parser = ReasoningParser::new(reasoning("qwen3"), false, format.openers);
        let mut output = OutputParser::new(Some(reasoning_parser), Some(parser(format)));
        let mut message = Message::default();
        for chunk in text.as_bytes().chunks(size) {
            message.extend(output.push(std::str::from_utf8(chunk).unwrap()));
        }
        message.extend(output.finish(false));
        assert_eq!(message.reasoning, "Hm <tool_ca.");
        assert_eq!(message.content, "One moment.");
        assert_eq!(message.tool_calls.len(), 1);
    }
}

/// Markers that the vocabulary hides as special tokens have to be asked for.
#[test]
fn special_tokens_are_asked_for_where_they_are_markers() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../model/tests/fixtures/text/tokenizers/");
    let text = std::fs::read_to_string(format!("{folder}qwen2.tokenizer.json")).unwrap();
    let mut json: Value = serde_json::from_str(&text).unwrap();
    let needs = |json: &Value, name| {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), json.to_string()).unwrap();
        let tokenizer = oscar_model::text::Tokenizer::from_file(file.path()).unwrap();
        needs_special_tokens(&tokenizer, Some(reasoning("qwen3")), Some(tool_calls(name)))
    };
    assert!(!needs(&json, "hermes"));
    for token in json["added_tokens"].as_array_mut().unwrap() {
        token["special"] = (token["special"] == true || token["content"] == "<tool_call>").into();
    }
    assert!(needs(&json, "hermes"));
    assert!(!needs(&json, "minimax-m2"));
    assert!(!needs(&json, "mistral-v11"));
    json["added_tokens"][4]["content"] = "[ARGS]".into();
    json["added_tokens"][4]["special"] = true.into();
    assert!(needs(&json, "mistral-v11"));
}

/// Bits of all layouts, to be put together at random. Words in capitals must not get lost.
fn fragments() -> impl Strategy<Value = String> {
    #[rustfmt::skip]
    let bits = [
        "<tool_call>", "</tool_call>", "<function=now>", "<function=", "</function>", "<parameter=A>",
        "</parameter>", "<|python_tag|>", "<minimax:tool_call>", "</minimax:tool_call>",
        "<invoke name=\"now\">", "</invoke>", "<parameter name=\"B\">", "now", "get_weather\n",
        "<arg_key>C</arg_key>", "<arg_value>D</arg_value>", "<arg_value>", "{\"name\": \"now\"",
        "\"name\": \"E\"", ", \"arguments\": ", "\"parameters\":", "{\"F\": \"G\"}", "{", "}", "[1, 2]",
        "```json\n", "```\n", "H I", "é😀", "\n", "  ", ";", "<", ">", "\"", "\\", ":", ",", "5",
        "<tool_call>\n{\"name\": \"now\", \"arguments\": {\"J\": 1}}\n</tool_call>",
        "<tool_call>now<arg_key>K</arg_key><arg_value>L</arg_value></tool_call>",
        "<tool_call><function=now><parameter=M>N</parameter></function></tool_call>",
        "[TOOL_CALLS]", "[TOOL_CALLS] [", "[ARGS]", "<|tool_call|>", "<|/tool_call|>", "functools[", "]", "[",
        "[TOOL_CALLS]now[ARGS]{\"Q\": 1}", ", {\"name\": \"now\", \"arguments\": {\"R\": 1}}",
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
        for format in marked_formats() {
            let whole = parse_cut(format, &text, &[]);
            prop_assert_eq!(&parse_cut(format, &text, &cuts), &whole, "{:?} {:?}", format, text);
            let all: Vec<usize> = (0..text.len()).collect();
            prop_assert_eq!(&parse_cut(format, &text, &all), &whole, "{:?} {:?}", format, text);
            if whole.tool_calls.is_empty() {
                prop_assert_eq!(&whole.content, &text);
            }
            let mut out = whole.content.clone();
            whole.tool_calls.iter().for_each(|call| out += &format!("{} {}", call.name, call.arguments));
            let words = text.replace("TOOL_CALLS", "").replace("ARGS", "");
            for word in words.chars().filter(char::is_ascii_uppercase) {
                prop_assert!(out.contains(word), "{format:?} lost {word} of {text:?}: {out:?}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn cuts_of_reasoning_make_no_difference_and_nothing_is_lost(
        bits in prop::collection::vec(
            prop::sample::select(vec!["<think>", "</think>", "<tool_call>", "\n", "a", " b", "é", "<", "</th", "nk>"]),
            0..16,
        ),
        inside in any::<bool>(),
        mut cuts in prop::collection::vec(0_usize..100, 0..8),
    ) {
        let text = bits.concat();
        cuts.sort_unstable();
        let whole = reasoning_cut(reasoning("qwen3"), inside, &text, &[]);
        prop_assert_eq!(&reasoning_cut(reasoning("qwen3"), inside, &text, &cuts), &whole, "{:?}", &text);
        // Only markers and the line breaks beside them go.
        let plain = |text: &str| text.replace("<think>", "").replace("</think>", "").replace(['\n', ' '], "");
        let out = format!("{}{}", whole.reasoning, whole.content);
        prop_assert_eq!(plain(&out), plain(&text), "{:?}", text);
    }
}
