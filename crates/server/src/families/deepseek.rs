//! DeepSeek R1 and those that always think as it does, whether or not a block is opened.

use super::Family;
use crate::parse::{ReasoningFormat, THINK};

pub(super) static FAMILY: Family = Family {
    tool_calls: None,
    reasoning: &[ReasoningFormat {
        names: &["deepseek-r1", "qwen3-thinking", "step3"],
        // DeepSeek's later templates can switch thinking off; R1 cannot, and its first template opens no block.
        detect: |template| {
            template.contains(THINK.1)
                && template.contains("<｜Assistant｜>")
                && !template.contains("thinking")
        },
        markers: THINK,
        always: true,
        kept_in_content: false,
        harmony: false,
    }],
};

#[cfg(test)]
mod tests {
    use super::super::testing::{detected_reasoning, reasoning};
    use super::*;

    #[test]
    fn names_and_templates() {
        let format = &FAMILY.reasoning[0];
        for name in ["qwen3-thinking", "deepseek-r1"] {
            assert_eq!(reasoning(name), format);
        }
        let template = "'<｜Assistant｜><think>\\n' content.split('</think>')";
        assert_eq!(detected_reasoning(template), Some(format));
    }

    #[test]
    fn it_thinks_unless_the_prompt_closes_the_block() {
        let format = &FAMILY.reasoning[0];
        assert!(format.starts_in_reasoning("<｜Assistant｜>"));
        assert!(!format.starts_in_reasoning("<|assistant|></think>"));
    }
}
