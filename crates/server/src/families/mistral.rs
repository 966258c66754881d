//! Mistral: `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`, and since the tokenizers of 2025 (version 11, whose templates
//! have `[ARGS]`) `[TOOL_CALLS]name[ARGS]{…}` for each call. Both forms are read whichever of the two is chosen, which
//! says how calls are forced. Magistral and Ministral think between `[THINK]` and `[/THINK]`.

use super::Family;
use crate::parse::{CallLayout, ReasoningFormat, ToolCallFormat};

const TOOL_CALLS: &str = "[TOOL_CALLS]";

pub(super) static FAMILY: Family = Family {
    tool_calls: Some(ToolCallFormat {
        names: &["mistral"],
        detect: |template| template.contains(TOOL_CALLS),
        openers: &[TOOL_CALLS],
        closer: None,
        layout: CallLayout::Json { arguments: "arguments", list: true },
        block: ("[TOOL_CALLS] ", ""),
        one_block: true,
        separator: ", ",
    }),
    reasoning: &[ReasoningFormat {
        names: &["mistral"],
        detect: |template| template.contains("[THINK]"),
        markers: ("[THINK]", "[/THINK]"),
        always: false,
        kept_in_content: false,
        harmony: false,
    }],
};

pub(super) static FAMILY_V11: Family = Family {
    tool_calls: Some(ToolCallFormat {
        names: &["mistral-v11"],
        detect: |template| template.contains(TOOL_CALLS) && template.contains("[ARGS]"),
        openers: &[TOOL_CALLS],
        closer: None,
        layout: CallLayout::Named { separator: "[ARGS]" },
        block: (TOOL_CALLS, ""),
        one_block: false,
        separator: "",
    }),
    reasoning: &[],
};

#[cfg(test)]
mod tests {
    use super::super::testing::{
        check, check_reasoning, cut_off, detected_reasoning, detected_tool_calls, forced_calls_are_calls,
        no_call, parser, reasoning, template, tool_calls,
    };
    use super::*;

    fn formats() -> [&'static ToolCallFormat; 2] {
        [&FAMILY, &FAMILY_V11].map(|family| family.tool_calls.as_ref().unwrap())
    }

    #[test]
    fn names_and_templates() {
        let [list, named] = formats();
        assert_eq!((tool_calls("mistral"), tool_calls("mistral-v11")), (list, named));
        for file in ["mistral-nemo", "mistral-small-3.1"] {
            assert_eq!(detected_tool_calls(&template(file)), Some(list), "{file}");
            assert_eq!(detected_reasoning(&template(file)), None, "{file}");
        }
        let template = "'[TOOL_CALLS]' + tool['function']['name'] + '[ARGS]' + arguments";
        assert_eq!(detected_tool_calls(template), Some(named));
        let thinks = &FAMILY.reasoning[0];
        assert_eq!(reasoning("mistral"), thinks);
        assert_eq!(detected_reasoning("'[THINK]' + block['thinking'] + '[/THINK]'"), Some(thinks));
    }

    #[test]
    fn lists() {
        for format in formats() {
            check(
                format,
                "[TOOL_CALLS] [{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris\", \"days\": 2}}]",
                "",
                &["get_weather({\"city\": \"Paris\", \"days\": 2})"],
            );
            // Text before, several calls, identifiers, markers and brackets in strings.
            check(
                format,
                "Let me look, then.\n[TOOL_CALLS][{\"name\": \"now\", \"arguments\": {}, \"id\": \"a1B2c3D4e\"}, {\"name\": \"write_file\", \"arguments\": {\"text\": \"[TOOL_CALLS] [{}], }]\\\"\"}}] ",
                "Let me look, then.",
                &["now({})", "write_file({\"text\": \"[TOOL_CALLS] [{}], }]\\\"\"})"],
            );
            check(
                format,
                "[TOOL_CALLS] [ {\"arguments\": {\"where\": {\"a\": [{}, {\"b\": 1}]}}, \"name\": \"get_weather\"} ]",
                "",
                &["get_weather({\"where\": {\"a\": [{}, {\"b\": 1}]}})"],
            );
            // One without a list, a list without its end, one without the marker, one in a block of code.
            check(format, "[TOOL_CALLS] {\"name\": \"now\", \"arguments\": {}}", "", &["now({})"]);
            check(format, "[TOOL_CALLS] [{\"name\": \"now\"}, ", "", &["now({})"]);
            check(format, "[{\"name\": \"now\"}, {\"name\": \"now\"}]", "", &["now({})", "now({})"]);
            check(format, "```json\n[{\"name\": \"now\"}]\n```", "", &["now({})"]);
            check(format, "[TOOL_CALLS] [{\"name\": \"now\"}] Done, so.", " Done, so.", &["now({})"]);
            // What is no call in a list is not lost.
            check(format, "[TOOL_CALLS] [{\"name\": \"now\"}, {\"a\": 1}]", ", {\"a\": 1}]", &["now({})"]);
            check(format, "[{\"name\": \"now\"}, {\"name\": \"x\"}]", ", {\"name\": \"x\"}]", &["now({})"]);
        }
    }

    #[test]
    fn bare_names() {
        for format in formats() {
            check(
                format,
                "I look.[TOOL_CALLS]get_weather[ARGS]{\"city\": \"Paris\", \"where\": {\"x\": \"}[ARGS]{\"}}",
                "I look.",
                &["get_weather({\"city\": \"Paris\", \"where\": {\"x\": \"}[ARGS]{\"}})"],
            );
            // Several, with an identifier, without the second marker, with white space.
            check(
                format,
                "[TOOL_CALLS]now[CALL_ID]a1B2c3D4e[ARGS]{}[TOOL_CALLS]now{\"a\": 1}\n[TOOL_CALLS]now[ARGS] {\"a\": 2}",
                "",
                &["now({})", "now({\"a\": 1})", "now({\"a\": 2})"],
            );
            check(format, "[TOOL_CALLS]now[ARGS]{\"a\": 1} Done", " Done", &["now({\"a\": 1})"]);
            // Arguments that the limit cuts off.
            check(format, "[TOOL_CALLS]now[ARGS]{\"a\": [1, 2", "", &["now({\"a\": [1, 2)"]);
        }
    }

    #[test]
    fn what_is_no_call() {
        for format in formats() {
            for text in [
                "[TOOL_CALLS]",
                "[TOOL_CALLS] []",
                "[TOOL_CALLS] [1, 2]",
                "[TOOL_CALLS] [{\"na",
                "[TOOL_CALLS] [{\"name\": 5}]",
                "[TOOL_CALLS] [[{\"name\": \"now\"}]]",
                "[TOOL_CALLS]now[ARGS]",
                "[TOOL_CALLS]now[ARGS]x{}",
                "[TOOL_CALLS]now and then {}",
                "[TOOL_CALLS]no[w]{}",
                "[TOOL",
                "[1, 2, 3]",
                "[{\"name\": \"later\", \"arguments\": {}}]",
                "now{}",
                "See [1], [2], ",
                "[",
            ] {
                no_call(format, text);
            }
        }
    }

    /// Text that looks like a long name is not held back for ever.
    #[test]
    fn endless_names_are_text() {
        for long in ["a", "[", "[ARGS] ", "[ARGS]"].map(|bit| format!("[TOOL_CALLS]now{}", bit.repeat(2000)))
        {
            let mut calls = parser(FAMILY.tool_calls.as_ref().unwrap());
            assert!(!calls.push(&long).is_empty(), "{}", &long[..40]);
            no_call(FAMILY.tool_calls.as_ref().unwrap(), &long);
        }
    }

    #[test]
    fn calls_that_the_limit_cuts_off() {
        for format in formats() {
            for text in ["Hm. [TOOL_CALLS] [{\"name\": \"now\", ", "Hm. [TOOL_CALLS]now[ARG", "Hm. [TOOL_CAL"]
            {
                let message = cut_off(format, text);
                assert_eq!((&*message.content, message.tool_calls.len()), ("Hm.", 0), "{text}");
            }
            for text in
                ["[TOOL_CALLS] [{\"name\": \"now\", \"arguments\": {\"a\"", "[TOOL_CALLS]now[ARGS]{\"a\""]
            {
                let message = cut_off(format, text);
                assert_eq!(&*message.tool_calls[0].arguments, "{\"a\"", "{text}");
            }
            let one = cut_off(format, "[TOOL_CALLS] [{\"name\": \"now\", \"arguments\": {}}, {\"name\"");
            assert_eq!((&*one.content, one.tool_calls.len()), ("", 1));
        }
    }

    /// Arguments arrive while the model writes them, in both forms.
    #[test]
    fn what_is_sure_comes_at_once() {
        for begun in ["[TOOL_CALLS] [{\"name\": \"now\", \"arguments\": ", "[TOOL_CALLS]now[ARGS]"] {
            let mut calls = parser(FAMILY.tool_calls.as_ref().unwrap());
            let mut shown = |text: &str| format!("{:?}", calls.push(text));
            assert_eq!(shown("Hello, "), "[Content(\"Hello,\")]");
            assert_eq!(shown(begun), "[]");
            assert!(shown("{\"a\"").contains("ToolCallStart { index: 0, id: \"call_r7-0\", name: \"now\" }"));
            assert_eq!(shown(": 1"), "[ToolCallArguments { index: 0, text: \": 1\" }]");
        }
    }

    #[test]
    fn forced_calls() {
        for format in formats() {
            forced_calls_are_calls(format, "");
        }
    }

    #[test]
    fn thoughts() {
        let format = &FAMILY.reasoning[0];
        check_reasoning(format, false, "[THINK]Hm [1].[/THINK]Yes.", "Hm [1].", "Yes.");
        check_reasoning(format, false, "[1] Yes.", "", "[1] Yes.");
        assert!(!format.starts_in_reasoning(
            "[SYSTEM_PROMPT]Use [THINK]thoughts[/THINK].[/SYSTEM_PROMPT][INST]a[/INST]"
        ));
    }
}
