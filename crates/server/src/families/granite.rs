//! Granite 3: `<|tool_call|>[{"name": …, "arguments": {…}}, …]`; version 3.1 writes `<tool_call>` in place of the marker.
//! Version 3.2 thinks where it was asked to, between two sentences.

use super::Family;
use crate::parse::{CallLayout, ReasoningFormat, ToolCallFormat};

pub(super) static FAMILY: Family = Family {
    tool_calls: Some(ToolCallFormat {
        names: &["granite"],
        detect: |template| template.contains("<|tool_call|>") && template.contains("<|start_of_role|>"),
        openers: &["<|tool_call|>", "<tool_call>"],
        // None was taught, but some close what they opened.
        closer: None,
        layout: CallLayout::Json { arguments: "arguments", list: true },
        block: ("<|tool_call|>", ""),
        one_block: true,
        separator: ", ",
    }),
    reasoning: &[ReasoningFormat {
        names: &["granite"],
        detect: |template| template.contains("Here is my thought process:"),
        markers: ("Here is my thought process:", "Here is my response:"),
        always: false,
        kept_in_content: false,
        harmony: false,
    }],
};

#[cfg(test)]
mod tests {
    use super::super::testing::{
        check, check_reasoning, cut_off, detected_reasoning, detected_tool_calls, forced_calls_are_calls,
        no_call, reasoning, template, tool_calls,
    };
    use super::*;

    #[test]
    fn names_and_templates() {
        let (calls, thoughts) = (FAMILY.tool_calls.as_ref().unwrap(), &FAMILY.reasoning[0]);
        assert_eq!((tool_calls("granite"), reasoning("granite")), (calls, thoughts));
        assert_eq!(detected_tool_calls(&template("granite-3.2")), Some(calls));
        assert_eq!(detected_reasoning(&template("granite-3.2")), Some(thoughts));
    }

    #[test]
    fn calls() {
        let format = FAMILY.tool_calls.as_ref().unwrap();
        check(
            format,
            "<|tool_call|>[{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris\"}}, {\"name\": \"now\", \"arguments\": {}}]",
            "",
            &["get_weather({\"city\": \"Paris\"})", "now({})"],
        );
        check(
            format,
            "<tool_call> [{\"arguments\": {\"a\": {\"b\": 1}}, \"name\": \"now\"}]",
            "",
            &["now({\"a\": {\"b\": 1}})"],
        );
        check(
            format,
            "One moment, please.\n<|tool_call|>\n[\n{\"name\": \"write_file\", \"arguments\": {\"text\": \"<|tool_call|>[{}]\"}}\n]\n",
            "One moment, please.",
            &["write_file({\"text\": \"<|tool_call|>[{}]\"})"],
        );
        // Without a list, without a marker, with a second marker.
        check(format, "<tool_call>{\"name\": \"now\", \"arguments\": {}}", "", &["now({})"]);
        check(format, "[{\"name\": \"now\", \"arguments\": {\"a\": 1}}]", "", &["now({\"a\": 1})"]);
        check(
            format,
            "<tool_call>[{\"name\": \"now\"}]<tool_call>[{\"name\": \"now\"}]",
            "",
            &["now({})", "now({})"],
        );
        for text in [
            "<|tool_call|>",
            "<|tool_call|>[]",
            "<|tool_call|>[{\"name\": \"now\", \"argum",
            "<tool_call>now</tool_call>",
            "[{\"city\": \"Paris\"}, {\"city\": \"Rome\"}]",
        ] {
            no_call(format, text);
        }
    }

    #[test]
    fn calls_that_the_limit_cuts_off() {
        let format = FAMILY.tool_calls.as_ref().unwrap();
        let message = cut_off(format, "Hm.\n<|tool_call|>[{\"name\": \"now\", \"argu");
        assert_eq!((&*message.content, message.tool_calls.len()), ("Hm.", 0));
        let message = cut_off(format, "<|tool_call|>[{\"name\": \"now\", \"arguments\": {\"a\": \"b");
        assert_eq!(&*message.tool_calls[0].arguments, "{\"a\": \"b");
    }

    #[test]
    fn forced_calls() {
        forced_calls_are_calls(FAMILY.tool_calls.as_ref().unwrap(), "");
    }

    #[test]
    fn thoughts() {
        let format = &FAMILY.reasoning[0];
        let text = "Here is my thought process:\n\nHm: so.\n\nHere is my response:\n\nYes.";
        check_reasoning(format, false, text, "Hm: so.", "Yes.");
        check_reasoning(format, false, "Here is my answer: yes.", "", "Here is my answer: yes.");
    }
}
