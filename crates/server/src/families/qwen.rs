//! Qwen2.5 and Qwen3, and Hermes, whose format of tool calls they share:
//! `<tool_call>{"name": …, "arguments": …}</tool_call>`.

use super::Family;
use crate::parse::{CallLayout, ReasoningFormat, THINK, ToolCallFormat};

pub(super) static FAMILY: Family = Family {
    tool_calls: Some(ToolCallFormat {
        names: &["qwen25", "qwen", "hermes"],
        detect: |template| {
            template.contains("<tool_call>")
                && template.contains("arguments")
                && !template.contains("<invoke")
        },
        openers: &["<tool_call>"],
        closer: Some("</tool_call>"),
        layout: CallLayout::Json { arguments: "arguments", list: false },
        block: ("<tool_call>\n", "\n</tool_call>"),
        one_block: false,
        separator: "\n",
    }),
    // They think when they or the prompt open a block.
    reasoning: &[ReasoningFormat {
        names: &["qwen3", "deepseek-v3", "step3p5"],
        detect: |template| template.contains(THINK.1),
        markers: THINK,
        always: false,
        kept_in_content: false,
        harmony: false,
    }],
};

#[cfg(test)]
mod tests {
    use super::super::testing::{
        check, check_reasoning, detected_reasoning, detected_tool_calls, forced_calls_are_calls, no_call,
        parse, parser, reasoning, template, tool_calls,
    };
    use super::*;

    #[test]
    fn names_and_templates() {
        let format = FAMILY.tool_calls.as_ref().unwrap();
        for name in ["qwen25", "qwen", "hermes"] {
            assert_eq!(tool_calls(name), format);
        }
        for file in ["qwen3", "qwen2.5-coder"] {
            assert_eq!(detected_tool_calls(&template(file)), Some(format));
        }
        let format = &FAMILY.reasoning[0];
        assert_eq!(reasoning("qwen3"), format);
        for file in ["qwen3", "smollm3"] {
            assert_eq!(detected_reasoning(&template(file)), Some(format));
        }
        assert_eq!(detected_reasoning("'<｜Assistant｜>' if thinking '</think>'"), Some(format));
    }

    #[test]
    fn calls() {
        let format = FAMILY.tool_calls.as_ref().unwrap();
        check(
            format,
            "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris\", \"days\": 2}}\n</tool_call>",
            "",
            &["get_weather({\"city\": \"Paris\", \"days\": 2})"],
        );
        check(
            format,
            "Let me look.\n\n<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>\n<tool_call>\n{\"name\": \"now\", \"arguments\": {\"a\": [1, {\"b\": \"}\\\"</tool_call>\"}]}}\n</tool_call>\n",
            "Let me look.",
            &["now({})", "now({\"a\": [1, {\"b\": \"}\\\"</tool_call>\"}]})"],
        );
        check(format, "<tool_call>{\"name\": \"now\"}</tool_call> Done.", " Done.", &["now({})"]);
        check(format, "One.\n\n<tool_call>{\"name\": \"now\"}</tool_call>Two.", "One.Two.", &["now({})"]);
        check(
            format,
            "<tool_call>{\"arguments\": {\"a\": 1}, \"name\": \"now\"}</tool_call>",
            "",
            &["now({\"a\": 1})"],
        );
        check(format, "<tool_call>{\"name\": \"now\", \"arguments\": null}</tool_call>", "", &["now({})"]);
        check(
            format,
            "<tool_call>{\"name\": \"now\", \"arguments\": \"{\\\"a\\\": \\\"é\\\"}\"}</tool_call>",
            "",
            &["now({\"a\": \"é\"})"],
        );
        check(
            format,
            "日本<tool_call>{\"name\": \"now\", \"arguments\": {\"日\": \"本😀\"}}</tool_call>",
            "日本",
            &["now({\"日\": \"本😀\"})"],
        );
        let first = &parse(
            format,
            "<tool_call>{\"name\": \"now\"}</tool_call><tool_call>{\"name\": \"now\"}</tool_call>",
        );
        assert_eq!(first.tool_calls[0].id, "call_r7-0");
        assert_eq!(first.tool_calls[1].id, "call_r7-1");
    }

    #[test]
    fn calls_as_models_get_them_wrong() {
        let format = FAMILY.tool_calls.as_ref().unwrap();
        // No marker at all, the marker twice, no closing marker, two calls in one block, no outer brace, a brace too many.
        check(format, "{\"name\": \"now\", \"arguments\": {\"a\": 1}}", "", &["now({\"a\": 1})"]);
        check(
            format,
            "```json\n{\n  \"name\": \"now\",\n  \"arguments\": {\n    \"a\": 1\n  }\n}\n```\n",
            "",
            &["now({\n    \"a\": 1\n  })"],
        );
        check(format, "```\n{\"name\": \"now\"}\n``` Done", " Done", &["now({})"]);
        let quoted = "```json\n{}\n```\n<tool_call>{\"name\": \"now\"}</tool_call>```";
        check(format, quoted, "```json\n{}\n``````", &["now({})"]);
        check(
            format,
            "<tool_call>\n<tool_call>\n{\"name\": \"now\"}\n</tool_call>",
            "<tool_call>",
            &["now({})"],
        );
        check(format, "<tool_call>\n{\"name\": \"now\", \"arguments\": {}}", "", &["now({})"]);
        check(
            format,
            "<tool_call>\n{\"name\": \"now\"}\n{\"name\": \"now\", \"arguments\": {\"a\": 1}}\n</tool_call>",
            "",
            &["now({})", "now({\"a\": 1})"],
        );
        check(
            format,
            "<tool_call>\n{\"name\": \"now\", \"arguments\": {\"a\": 1}\n</tool_call>\nYes",
            "\nYes",
            &["now({\"a\": 1})"],
        );
        check(format, "<tool_call>{\"name\": \"now\"}}</tool_call>", "}</tool_call>", &["now({})"]);
        // A line break in a string is mended.
        check(
            format,
            "<tool_call>{\"name\": \"write_file\", \"arguments\": {\"text\": \"a\n\tb\"}}</tool_call>",
            "",
            &["write_file({\"text\": \"a\\u000a\\u0009b\"})"],
        );
        // Arguments that cease to be JSON are passed on as they are.
        check(
            format,
            "<tool_call>{\"name\": \"now\", \"arguments\": {'a': 1}}</tool_call> So.",
            " So.",
            &["now({'a': 1}})"],
        );
        // Cut off.
        check(
            format,
            "<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": [1, 2",
            "",
            &["now({\"a\": [1, 2)"],
        );
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
            "{\"name\": \"later\", \"arguments\": {}}",
            "```json\n{\"name\": \"later\"}\n```",
            "```json\n{\"a\": 1}\n```",
            "```js\nnow()\n```",
            "```json\n",
            "``",
            "So: {\"name\": \"now\", \"arguments\": {}}",
        ] {
            no_call(format, text);
        }
    }

    /// JSON arguments arrive while the model writes them, and content is not held back longer than need be.
    #[test]
    fn what_is_sure_comes_at_once() {
        let mut hermes = parser(FAMILY.tool_calls.as_ref().unwrap());
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
    fn forced_calls() {
        forced_calls_are_calls(FAMILY.tool_calls.as_ref().unwrap(), "");
    }

    #[test]
    fn reasoning_that_the_model_opens() {
        let format = &FAMILY.reasoning[0];
        check_reasoning(format, false, "<think>\nHm.\n\nSo.\n</think>\n\nYes.\n", "Hm.\n\nSo.", "Yes.\n");
        check_reasoning(format, false, "\n<think>Hm.</think>Yes.", "Hm.", "Yes.");
        check_reasoning(format, false, "<think>\n\n</think>\n\nYes.", "", "Yes.");
        check_reasoning(format, false, "Yes.", "", "Yes.");
        check_reasoning(format, false, "  Yes <think> no </think>", "", "  Yes <think> no </think>");
        check_reasoning(format, false, "<think>Hm", "Hm", "");
        check_reasoning(format, false, "<think>Hm\n</thi", "Hm\n</thi", "");
        check_reasoning(format, false, "<thi", "", "<thi");
        check_reasoning(
            format,
            false,
            "<think>a </thinks> <b> </think>\n c </think> d",
            "a </thinks> <b> ",
            " c </think> d",
        );
        check_reasoning(format, false, "<think>é日\n</think>\n日é", "é日", "日é");
        check_reasoning(format, false, "<think>Hm\n<tool_call>x", "Hm", "<tool_call>x");
        check_reasoning(format, false, "", "", "");
    }

    #[test]
    fn the_prompt_tells_where_the_answer_begins() {
        let format = &FAMILY.reasoning[0];
        assert!(format.starts_in_reasoning("<|im_start|>assistant\n<think>\n"));
        assert!(!format.starts_in_reasoning("<|im_start|>assistant\n"));
        assert!(!format.starts_in_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n"));
    }
}
