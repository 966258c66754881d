//! Reasoning told from answers, however the text is cut.

use oscar_server::parse::{Message, ReasoningKind, ReasoningParser};
use proptest::prelude::*;

fn parse_cut(kind: ReasoningKind, inside: bool, text: &str, cuts: &[usize]) -> Message {
    let mut parser = ReasoningParser::new(kind, inside, &["<tool_call>"]);
    let mut message = Message::default();
    let mut from = 0;
    for &cut in cuts.iter().chain([&text.len()]) {
        let to = text.floor_char_boundary(cut.min(text.len())).max(from);
        message.extend(parser.push(&text[from..to]));
        from = to;
    }
    message.extend(parser.finish());
    message
}

fn check(kind: ReasoningKind, inside: bool, text: &str, reasoning: &str, content: &str) {
    for cuts in [vec![], (0..text.len()).collect::<Vec<_>>()] {
        let message = parse_cut(kind, inside, text, &cuts);
        assert_eq!((message.reasoning.as_str(), message.content.as_str()), (reasoning, content), "{text:?}");
    }
}

#[test]
fn blocks_the_model_opens() {
    let kind = ReasoningKind::Qwen3;
    check(kind, false, "<think>\nHm.\n\nSo.\n</think>\n\nYes.\n", "Hm.\n\nSo.", "Yes.\n");
    check(kind, false, "\n<think>Hm.</think>Yes.", "Hm.", "Yes.");
    check(kind, false, "<think>\n\n</think>\n\nYes.", "", "Yes.");
    check(kind, false, "Yes.", "", "Yes.");
    check(kind, false, "  Yes <think> no </think>", "", "  Yes <think> no </think>");
    check(kind, false, "<think>Hm", "Hm", "");
    check(kind, false, "<think>Hm\n</thi", "Hm\n</thi", "");
    check(kind, false, "<thi", "", "<thi");
    check(kind, false, "<think>a </thinks> <b> </think>\n c </think> d", "a </thinks> <b> ", " c </think> d");
    check(kind, false, "<think>é日\n</think>\n日é", "é日", "日é");
    check(kind, false, "<think>Hm\n<tool_call>x", "Hm", "<tool_call>x");
    check(kind, false, "", "", "");
}

#[test]
fn blocks_the_prompt_opened() {
    for kind in
        [ReasoningKind::Qwen3, ReasoningKind::DeepSeekR1, ReasoningKind::MiniMax, ReasoningKind::Glm45]
    {
        check(kind, true, "Hm.\n</think>\n\nYes.", "Hm.", "Yes.");
        // Some open it again.
        check(kind, true, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes.");
        check(kind, true, "Hm <think> hm", "Hm <think> hm", "");
        check(kind, true, "</think>\n\nYes.", "", "Yes.");
    }
}

#[test]
fn other_markers() {
    check(ReasoningKind::Kimi, false, "◁think▷Hm.◁/think▷Yes.", "Hm.", "Yes.");
    check(ReasoningKind::Kimi, false, "◁thin", "", "◁thin");
    let kind = ReasoningKind::MiniMaxAppendThink;
    check(kind, false, "Hm.\n</think>\n\nYes.", "", "<think>Hm.\n</think>\n\nYes.");
    check(kind, false, "", "", "");
}

#[test]
fn the_prompt_tells_where_the_answer_begins() {
    let kind = ReasoningKind::Qwen3;
    assert!(kind.starts_in_reasoning("<|im_start|>assistant\n<think>\n"));
    assert!(!kind.starts_in_reasoning("<|im_start|>assistant\n"));
    assert!(!kind.starts_in_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n"));
    assert!(ReasoningKind::DeepSeekR1.starts_in_reasoning("<｜Assistant｜>"));
    assert!(ReasoningKind::Glm45.starts_in_reasoning("<|assistant|><think>"));
    assert!(!ReasoningKind::Glm45.starts_in_reasoning("<|assistant|></think>"));
    assert!(!ReasoningKind::Glm45.starts_in_reasoning("<|assistant|>"));
    assert!(!ReasoningKind::DeepSeekR1.starts_in_reasoning("<|assistant|></think>"));
}

#[test]
fn names_and_templates() {
    for (name, kind) in [
        ("qwen3", ReasoningKind::Qwen3),
        ("qwen3-thinking", ReasoningKind::DeepSeekR1),
        ("deepseek-r1", ReasoningKind::DeepSeekR1),
        ("glm45", ReasoningKind::Glm45),
        ("minimax", ReasoningKind::MiniMax),
        ("minimax-append-think", ReasoningKind::MiniMaxAppendThink),
    ] {
        assert_eq!(ReasoningKind::choose(name, None), Ok(Some(kind)));
    }
    assert_eq!(ReasoningKind::choose("none", Some("</think>")), Ok(None));
    let error = ReasoningKind::choose("gpt-oss", None).unwrap_err().to_string();
    assert!(error.starts_with("--reasoning-parser is `gpt-oss`, expected one of: qwen3, "), "{error}");

    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../model/tests/fixtures/text/templates/");
    let auto = |file: &str| {
        let template = std::fs::read_to_string(format!("{folder}{file}.jinja")).unwrap();
        ReasoningKind::choose("auto", Some(&template)).unwrap()
    };
    assert_eq!(auto("qwen3"), Some(ReasoningKind::Qwen3));
    assert_eq!(auto("smollm3"), Some(ReasoningKind::Qwen3));
    assert_eq!(auto("glm-4.6"), Some(ReasoningKind::Glm45));
    for file in ["qwen2.5-coder", "smollm2", "tinyllama"] {
        assert_eq!(auto(file), None, "{file}");
    }
    let of = ReasoningKind::of_template;
    assert_eq!(of("'<minimax:tool_call>' '</think>'"), Some(ReasoningKind::MiniMax));
    assert_eq!(of("'<｜Assistant｜><think>\\n' content.split('</think>')"), Some(ReasoningKind::DeepSeekR1));
    assert_eq!(of("'<｜Assistant｜>' if thinking '</think>'"), Some(ReasoningKind::Qwen3));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn cuts_make_no_difference_and_nothing_is_lost(
        bits in prop::collection::vec(
            prop::sample::select(vec!["<think>", "</think>", "<tool_call>", "\n", "a", " b", "é", "<", "</th", "nk>"]),
            0..16,
        ),
        inside in any::<bool>(),
        mut cuts in prop::collection::vec(0_usize..100, 0..8),
    ) {
        let text = bits.concat();
        cuts.sort_unstable();
        let whole = parse_cut(ReasoningKind::Qwen3, inside, &text, &[]);
        prop_assert_eq!(&parse_cut(ReasoningKind::Qwen3, inside, &text, &cuts), &whole, "{:?}", &text);
        // Only markers and the line breaks beside them go.
        let plain = |text: &str| text.replace("<think>", "").replace("</think>", "").replace(['\n', ' '], "");
        let out = format!("{}{}", whole.reasoning, whole.content);
        prop_assert_eq!(plain(&out), plain(&text), "{:?}", text);
    }
}
