//! Qwen3-Coder and Step 3.5: `<tool_call><function=…><parameter=…>…</parameter></function></tool_call>`.

use super::Family;
use crate::parse::{CallLayout, ToolCallFormat, XmlLayout};

pub(super) static FAMILY: Family = Family {
    tool_calls: Some(ToolCallFormat {
        names: &["qwen3_coder", "step3p5"],
        detect: |template| {
            ["<tool_call>", "<function=", "<parameter="].iter().all(|marker| template.contains(marker))
        },
        // The outer marker is forgotten now and then.
        openers: &["<tool_call>", "<function="],
        closer: Some("</tool_call>"),
        layout: CallLayout::Xml(XmlLayout {
            call_open: Some("<function="),
            call_close: "</function>",
            key: ("<parameter=", ">"),
            value: ("", "</parameter>"),
            values_on_lines: true,
            quoted_names: false,
        }),
        block: ("<tool_call>\n", "\n</tool_call>"),
        one_block: false,
        separator: "\n",
    }),
    reasoning: &[],
};

#[cfg(test)]
mod tests {
    use super::super::testing::{check, detected_tool_calls, forced_calls_are_calls, no_call, tool_calls};
    use super::*;

    #[test]
    fn names_and_templates() {
        let format = FAMILY.tool_calls.as_ref().unwrap();
        assert_eq!(tool_calls("qwen3_coder"), format);
        let template = "'<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\n'";
        assert_eq!(detected_tool_calls(template), Some(format));
    }

    #[test]
    fn calls() {
        let format = FAMILY.tool_calls.as_ref().unwrap();
        check(
            format,
            "I'll look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n</parameter>\n<parameter=zip>\n00123\n</parameter>\n<parameter=where>\n{\"lat\": 1.50}\n</parameter>\n</function>\n</tool_call>",
            "I'll look.",
            &[
                "get_weather({\"city\": \"Paris\", \"days\": 2, \"zip\": \"00123\", \"where\": {\"lat\": 1.50}})",
            ],
        );
        // Several lines, with tags of other kinds among them; white space inside is the value's own.
        check(
            format,
            "<tool_call>\n<function=write_file>\n<parameter=text>\n\n  <a>\n</function>\n\"x\"\n\n</parameter>\n</function>\n</tool_call>",
            "",
            &["write_file({\"text\": \"\\n  <a>\\n</function>\\n\\\"x\\\"\\n\"})"],
        );
        // The closing tag itself, too.
        check(
            format,
            "<tool_call>\n<function=write_file>\n<parameter=text>\n<x></parameter> </parameter\n</parameter>\n</function>\n</tool_call>",
            "",
            &["write_file({\"text\": \"<x></parameter> </parameter\"})"],
        );
        check(format, "<tool_call>\n<function=now>\n</function>\n</tool_call>\n", "", &["now({})"]);
        // Without the outer marker, without the inner closing one, two in one block, JSON after all.
        check(format, "<function=now>\n</function>\n</tool_call>", "", &["now({})"]);
        check(format, "<tool_call>\n<function=now>\n</tool_call>", "", &["now({})"]);
        check(
            format,
            "<tool_call>\n<function=now>\n</function>\n<function=now>\n</function>\n</tool_call>",
            "",
            &["now({})", "now({})"],
        );
        check(
            format,
            "<tool_call>\n{\"name\": \"now\", \"arguments\": {\"a\": 1}}\n</tool_call>",
            "",
            &["now({\"a\": 1})"],
        );
        check(
            format,
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
            "The literal token \"<tool_call>\" opens a call; \"<function=\" names it.",
        ] {
            no_call(format, text);
        }
    }

    #[test]
    fn forced_calls() {
        forced_calls_are_calls(FAMILY.tool_calls.as_ref().unwrap(), "</parameter>\n");
    }
}
