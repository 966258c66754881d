//! Llama 3.1 and later: `{"name": …, "parameters": …}`, with or without `<|python_tag|>` before it.

use super::{Family, qwen, qwen_coder};
use crate::parse::{CallLayout, ToolCallFormat};

pub(super) static FAMILY: Family = Family {
    tool_calls: Some(ToolCallFormat {
        names: &["llama3"],
        detect: |template| {
            // The tag alone is not enough: templates of other formats of the same family have it too. Templates of
            // models that were trained further on the markers of Qwen may still have the wording.
            let mut marked = [&qwen::FAMILY, &qwen_coder::FAMILY]
                .into_iter()
                .filter_map(|family| family.tool_calls.as_ref());
            template.contains(r#"{"name": function name, "parameters": dictionary"#)
                && !marked.any(|format| (format.detect)(template))
        },
        openers: &["<|python_tag|>"],
        closer: None,
        layout: CallLayout::Json { arguments: "parameters", list: false },
        block: ("", ""),
        one_block: false,
        separator: "; ",
    }),
    reasoning: &[],
};

#[cfg(test)]
mod tests {
    use super::super::testing::{
        check, detected_tool_calls, forced_calls_are_calls, no_call, template, tool_calls,
    };
    use super::*;

    #[test]
    fn names_and_templates() {
        let format = FAMILY.tool_calls.as_ref().unwrap();
        assert_eq!(tool_calls("llama3"), format);
        assert_eq!(detected_tool_calls(&template("llama-3.2")), Some(format));
        let template = r#"'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'"#;
        assert_eq!(detected_tool_calls(template), Some(format));
        let hermes = format!("{template} '<tool_call>' message.tool_calls.arguments");
        assert_eq!(detected_tool_calls(&hermes), qwen::FAMILY.tool_calls.as_ref());
    }

    #[test]
    fn calls() {
        let format = FAMILY.tool_calls.as_ref().unwrap();
        let call = "{\"name\": \"get_weather\", \"parameters\": {\"city\": \"Paris\"}}";
        let expected = "get_weather({\"city\": \"Paris\"})";
        check(format, call, "", &[expected]);
        check(format, &format!("<|python_tag|>{call}"), "", &[expected]);
        check(format, &format!("\n {call}; {call}"), "", &[expected, expected]);
        check(format, &format!("<|python_tag|>{call};{call}\n"), "", &[expected, expected]);
        check(format, &format!("I will.<|python_tag|>{call}"), "I will.", &[expected]);
        check(
            format,
            "{\"type\": \"function\", \"function\": \"now\", \"parameters\": {\"a\": 1}}",
            "",
            &["now({\"a\": 1})"],
        );
        check(format, &format!("{call} and more"), " and more", &[expected]);
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
            no_call(format, text);
        }
    }

    #[test]
    fn forced_calls() {
        forced_calls_are_calls(FAMILY.tool_calls.as_ref().unwrap(), "");
    }
}
