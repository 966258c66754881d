//! GLM 4.5 to 4.7: `<tool_call>name<arg_key>…</arg_key><arg_value>…</arg_value></tool_call>`.

use super::Family;
use crate::parse::{CallLayout, ReasoningFormat, THINK, ToolCallFormat, XmlLayout};

pub(super) static FAMILY: Family = Family {
    tool_calls: Some(ToolCallFormat {
        names: &["glm45", "glm47", "glm"],
        detect: |template| template.contains("<tool_call>") && template.contains("<arg_key>"),
        openers: &["<tool_call>"],
        closer: Some("</tool_call>"),
        layout: CallLayout::Xml(XmlLayout {
            call_open: None,
            call_close: "</tool_call>",
            key: ("<arg_key>", "</arg_key>"),
            value: ("<arg_value>", "</arg_value>"),
            values_on_lines: false,
            quoted_names: false,
        }),
        block: ("<tool_call>", "</tool_call>"),
        one_block: false,
        separator: "\n",
    }),
    reasoning: &[ReasoningFormat {
        names: &["glm45"],
        detect: |template| template.contains(THINK.1) && template.contains("[gMASK]"),
        markers: THINK,
        always: false,
        kept_in_content: false,
        harmony: false,
    }],
};

#[cfg(test)]
mod tests {
    use super::super::testing::{
        check, detected_reasoning, detected_tool_calls, forced_calls_are_calls, no_call, reasoning, template,
        tool_calls,
    };
    use super::*;

    #[test]
    fn names_and_templates() {
        let format = FAMILY.tool_calls.as_ref().unwrap();
        for name in ["glm45", "glm"] {
            assert_eq!(tool_calls(name), format);
        }
        assert_eq!(detected_tool_calls(&template("glm-4.6")), Some(format));
        assert_eq!(reasoning("glm45"), &FAMILY.reasoning[0]);
        assert_eq!(detected_reasoning(&template("glm-4.6")), Some(&FAMILY.reasoning[0]));
    }

    #[test]
    fn calls() {
        let format = FAMILY.tool_calls.as_ref().unwrap();
        check(
            format,
            "Looking.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n<arg_key>zip</arg_key>\n<arg_value>00123</arg_value>\n<arg_key>tags</arg_key>\n<arg_value>[\"a\", 1]</arg_value>\n<arg_key>metric</arg_key>\n<arg_value>true</arg_value>\n</tool_call>",
            "Looking.",
            &[
                "get_weather({\"city\": \"Paris\", \"days\": 2, \"zip\": \"00123\", \"tags\": [\"a\", 1], \"metric\": true})",
            ],
        );
        // As the 4.7 template writes it, and without arguments.
        check(
            format,
            "<tool_call>get_weather<arg_key>city</arg_key><arg_value> São Paulo\n</arg_value></tool_call><tool_call>now</tool_call>",
            "",
            &["get_weather({\"city\": \" São Paulo\\n\"})", "now({})"],
        );
        check(format, "<tool_call>now\n</tool_call>", "", &["now({})"]);
        check(
            format,
            "<tool_call>{\"name\": \"now\", \"arguments\": {\"a\": 1}}</tool_call>",
            "",
            &["now({\"a\": 1})"],
        );
        check(
            format,
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
            no_call(format, text);
        }
    }

    #[test]
    fn forced_calls() {
        forced_calls_are_calls(FAMILY.tool_calls.as_ref().unwrap(), "</arg_value>\n");
    }

    #[test]
    fn the_prompt_tells_where_the_answer_begins() {
        let format = &FAMILY.reasoning[0];
        assert!(format.starts_in_reasoning("<|assistant|><think>"));
        assert!(!format.starts_in_reasoning("<|assistant|></think>"));
        assert!(!format.starts_in_reasoning("<|assistant|>"));
    }
}
