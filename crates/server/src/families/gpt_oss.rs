//! GPT-OSS: answers are messages in channels (OpenAI's Harmony format), and a call is a message for a function. It always thinks.

use super::Family;
use crate::parse::{CallLayout, ReasoningFormat, ToolCallFormat};

pub(super) static FAMILY: Family = Family {
    tool_calls: Some(ToolCallFormat {
        names: &["gpt-oss"],
        detect: is_harmony,
        openers: &[],
        closer: Some("<|call|>"),
        layout: CallLayout::Harmony,
        block: ("<|channel|>commentary to=", "<|call|>"),
        one_block: false,
        separator: "<|start|>assistant",
    }),
    reasoning: &[ReasoningFormat {
        names: &["gpt-oss"],
        detect: is_harmony,
        markers: ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
        always: true,
        kept_in_content: false,
        harmony: true,
    }],
};

fn is_harmony(template: &str) -> bool {
    template.contains("<|channel|>") && template.contains("<|start|>assistant")
}

#[cfg(test)]
mod tests {
    use oscar_random::Random;
    use serde_json::{Value, json};

    use super::super::testing::{detected_reasoning, detected_tool_calls, reasoning, tool_calls};
    use super::*;
    use crate::grammar::{Constraint, ForcedCalls, GrammarFactory, testing as grammar};
    use crate::parse::{HarmonyParser, Message, OutputParser};

    #[test]
    fn names_and_templates() {
        let (calls, thoughts) = (FAMILY.tool_calls.as_ref().unwrap(), &FAMILY.reasoning[0]);
        assert_eq!((tool_calls("gpt-oss"), reasoning("gpt-oss")), (calls, thoughts));
        let template = "'<|start|>assistant<|channel|>final<|message|>'";
        assert_eq!(detected_tool_calls(template), Some(calls));
        assert_eq!(detected_reasoning(template), Some(thoughts));
    }

    #[test]
    fn forced_calls_are_calls() {
        let format = FAMILY.tool_calls.as_ref().unwrap();
        let (tokenizer, tools) = (grammar::tokenizer("qwen2"), grammar::tools());
        let factory = GrammarFactory::new(&tokenizer).unwrap();
        let mut random = Random::new(12);
        for parallel in [false, true] {
            let forced = ForcedCalls { format, tools: &tools, name: None, parallel };
            let prototype = factory.filter(&Constraint::Calls(forced), None).unwrap();
            for _ in 0..10 {
                let text = grammar::draw(&mut *prototype.fork(), &tokenizer, &mut random, 40, "");
                let message = read(&text);
                assert_eq!((&*message.content, &*message.reasoning), ("", ""), "{text}");
                assert!(parallel || message.tool_calls.len() == 1, "{text}");
                for call in message.tool_calls {
                    let tool = tools.iter().find(|tool| tool.name == call.name).expect("a known tool");
                    let arguments: Value = serde_json::from_str(&call.arguments).unwrap();
                    if call.name == "get_weather" {
                        let wrong = grammar::wrong(&arguments, &tool.parameters, &tool.parameters);
                        assert_eq!(wrong, None, "{text}");
                    }
                }
            }
        }
    }

    fn read(text: &str) -> Message {
        let mut parser = OutputParser::harmony(HarmonyParser::new(true, Some(String::new())));
        let mut message = Message::default();
        message.extend(parser.push(text));
        message.extend(parser.finish(false));
        message
    }

    #[test]
    fn written_calls_are_read_back() {
        let arguments = json!({"city": "Rome <3", "days": 3});
        let format = FAMILY.tool_calls.as_ref().unwrap();
        let text = format.written(&[("get_weather", &arguments), ("now", &json!({}))], format.block);
        let message = read(&text);
        let calls: Vec<_> = message.tool_calls.iter().map(|call| (&*call.name, &*call.arguments)).collect();
        assert_eq!(calls, [("get_weather", &*arguments.to_string()), ("now", "{}")], "{text}");
        assert_eq!((message.content, message.reasoning), (String::new(), String::new()));
    }
}
