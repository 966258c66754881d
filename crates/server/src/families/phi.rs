//! Phi-4-mini: `<|tool_call|>[{"name": …, "arguments": {…}}, …]<|/tool_call|>`, or `functools[…]` with another template.

use super::Family;
use crate::parse::{CallLayout, ToolCallFormat};

pub(super) static FAMILY: Family = Family {
    tool_calls: Some(ToolCallFormat {
        names: &["phi4-mini"],
        detect: |template| template.contains("<|/tool|>") || template.contains("functools["),
        openers: &["<|tool_call|>", "functools["],
        closer: Some("<|/tool_call|>"),
        layout: CallLayout::Json { arguments: "arguments", list: true },
        block: ("<|tool_call|>", "<|/tool_call|>"),
        one_block: true,
        separator: ", ",
    }),
    reasoning: &[],
};

#[cfg(test)]
mod tests {
    use super::super::testing::{
        check, cut_off, detected_tool_calls, forced_calls_are_calls, no_call, template, tool_calls,
    };
    use super::*;

    #[test]
    fn names_and_templates() {
        let format = FAMILY.tool_calls.as_ref().unwrap();
        assert_eq!(tool_calls("phi4-mini"), format);
        assert_eq!(detected_tool_calls(&template("phi-4-mini")), Some(format));
        assert_eq!(detected_tool_calls("formatted as functools[{\"name\": [function name]}]"), Some(format));
        assert_eq!(detected_tool_calls(&template("phi-3")), None);
    }

    #[test]
    fn calls() {
        let format = FAMILY.tool_calls.as_ref().unwrap();
        let two = "{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris\"}}, {\"name\": \"now\", \"arguments\": {}}";
        let expected = ["get_weather({\"city\": \"Paris\"})", "now({})"];
        check(format, &format!("<|tool_call|>[{two}]<|/tool_call|>"), "", &expected);
        check(format, &format!("functools[{two}]"), "", &expected);
        check(
            format,
            &format!("I use functools, so:\nfunctools[{two}]\n"),
            "I use functools, so:",
            &expected,
        );
        check(format, &format!("[{two}]<|/tool_call|>"), "", &expected);
        check(
            format,
            "<|tool_call|>[{\"name\": \"write_file\", \"parameters\": {\"text\": \"]<|/tool_call|>functools[\"}}]<|/tool_call|> So.",
            " So.",
            &["write_file({\"text\": \"]<|/tool_call|>functools[\"})"],
        );
        // Arguments that are not JSON end at the marker.
        check(
            format,
            "<|tool_call|>[{\"name\": \"now\"}, {\"name\": \"now\", \"arguments\": {'a': 1}}]<|/tool_call|>",
            "",
            &["now({})", "now({'a': 1}}])"],
        );
        for text in [
            "import functools\n@functools.cache",
            "functools[0]",
            "functools[",
            "functools[]",
            "<|tool_call|>[{}]<|/tool_call|>",
            "<|tool_call|>hello<|/tool_call|>",
            "func",
        ] {
            no_call(format, text);
        }
    }

    #[test]
    fn calls_that_the_limit_cuts_off() {
        let format = FAMILY.tool_calls.as_ref().unwrap();
        let message = cut_off(format, "Hm.\nfunctools[{\"name\"");
        assert_eq!((&*message.content, message.tool_calls.len()), ("Hm.", 0));
        let message = cut_off(format, "functools[{\"name\": \"now\", \"arguments\": {\"a\": 1");
        assert_eq!(&*message.tool_calls[0].arguments, "{\"a\": 1");
    }

    #[test]
    fn forced_calls() {
        forced_calls_are_calls(FAMILY.tool_calls.as_ref().unwrap(), "");
    }
}
