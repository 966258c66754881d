//! Kimi, whose reasoning has markers of its own.

use super::Family;
use crate::parse::ReasoningFormat;

pub(super) static FAMILY: Family = Family {
    tool_calls: None,
    reasoning: &[ReasoningFormat {
        names: &["kimi"],
        detect: |template| template.contains("◁think▷"),
        markers: ("◁think▷", "◁/think▷"),
        always: false,
        kept_in_content: false,
        harmony: false,
    }],
};

#[cfg(test)]
mod tests {
    use super::super::testing::{check_reasoning, detected_reasoning, reasoning};
    use super::*;

    #[test]
    fn markers() {
        let format = &FAMILY.reasoning[0];
        check_reasoning(format, false, "◁think▷Hm.◁/think▷Yes.", "Hm.", "Yes.");
        check_reasoning(format, false, "◁thin", "", "◁thin");
        assert_eq!(reasoning("kimi"), format);
        assert_eq!(detected_reasoning("'◁think▷' '</think>' [gMASK]"), Some(format));
    }
}
