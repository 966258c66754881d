//! MiniMax M2: `<minimax:tool_call><invoke name="…"><parameter name="…">…</parameter></invoke>…`. It always thinks.

use super::Family;
use crate::parse::{CallLayout, ReasoningFormat, THINK, ToolCallFormat, XmlLayout};

pub(super) static FAMILY: Family = Family {
    tool_calls: Some(ToolCallFormat {
        names: &["minimax-m2"],
        detect: |template| template.contains("<minimax:tool_call>"),
        openers: &["<minimax:tool_call>"],
        closer: Some("</minimax:tool_call>"),
        layout: CallLayout::Xml(XmlLayout {
            call_open: Some("<invoke name="),
            call_close: "</invoke>",
            key: ("<parameter name=", ">"),
            value: ("", "</parameter>"),
            values_on_lines: false,
            quoted_names: true,
        }),
        block: ("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
        one_block: true,
        separator: "\n",
    }),
    reasoning: &[
        ReasoningFormat {
            names: &["minimax"],
            detect: |template| template.contains(THINK.1) && template.contains("<minimax:tool_call>"),
            markers: THINK,
            always: true,
            kept_in_content: false,
            harmony: false,
        },
        // The reasoning stays in the content. The prompt has opened the block, so the marker is put back.
        ReasoningFormat {
            names: &["minimax-append-think"],
            detect: |_| false,
            markers: THINK,
            always: false,
            kept_in_content: true,
            harmony: false,
        },
    ],
};

#[cfg(test)]
mod tests {
    use super::super::testing::{
        check, check_reasoning, detected_reasoning, detected_tool_calls, forced_calls_are_calls, no_call,
        reasoning, template, tool_calls,
    };
    use super::*;

    #[test]
    fn names_and_templates() {
        let format = FAMILY.tool_calls.as_ref().unwrap();
        assert_eq!(tool_calls("minimax-m2"), format);
        let words = "'<minimax:tool_call>' <invoke name=\"tool-name-1\">";
        assert_eq!(detected_tool_calls(words), Some(format));
        assert_eq!(detected_tool_calls(&template("minimax-m2")), Some(format));
        let [separate, kept] = FAMILY.reasoning else { panic!("two ways to read the reasoning") };
        assert_eq!(reasoning("minimax-append-think"), kept);
        assert_eq!(reasoning("minimax"), separate);
        assert_eq!(detected_reasoning("'<minimax:tool_call>' '</think>'"), Some(separate));
    }

    #[test]
    fn calls() {
        let format = FAMILY.tool_calls.as_ref().unwrap();
        check(
            format,
            "Well.\n<minimax:tool_call>\n<invoke name=\"get_weather\">\n<parameter name=\"city\">Paris</parameter>\n<parameter name=\"days\">2</parameter>\n<parameter name=\"zip\">00123</parameter>\n</invoke>\n<invoke name=\"now\">\n</invoke>\n</minimax:tool_call>",
            "Well.",
            &["get_weather({\"city\": \"Paris\", \"days\": 2, \"zip\": \"00123\"})", "now({})"],
        );
        check(
            format,
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
            no_call(format, text);
        }
    }

    #[test]
    fn forced_calls() {
        forced_calls_are_calls(FAMILY.tool_calls.as_ref().unwrap(), "</parameter>\n");
    }

    #[test]
    fn reasoning_that_stays_in_the_content() {
        let format = &FAMILY.reasoning[1];
        check_reasoning(format, false, "Hm.\n</think>\n\nYes.", "", "<think>Hm.\n</think>\n\nYes.");
        check_reasoning(format, false, "", "", "");
    }
}
