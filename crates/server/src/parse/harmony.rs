//! Answers that are messages in channels, as GPT-OSS writes them (OpenAI's Harmony format):
//! `<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>`.
//!
//! The header of a message says its channel and, in `to=functions.NAME`, whom it is for. `analysis` is reasoning, what is for a
//! function is a call with the text as its arguments, and everything else is content. The prompt has written the first
//! `<|start|>assistant`. An answer without any header is content, so grammars of content may leave them out.

use super::Piece;
use super::marker::{Start, find_first, held_back, start_of};
use super::tool_calls::Calls;

const START: &str = "<|start|>";
const CHANNEL: &str = "<|channel|>";
const CONSTRAIN: &str = "<|constrain|>";
const MESSAGE: &str = "<|message|>";
/// Markers that end a message.
const ENDS: [&str; 3] = ["<|end|>", "<|return|>", "<|call|>"];
/// What ends the text of a message: its end, or the next one where the end was forgotten.
const BEHIND_TEXT: [&str; 5] = [ENDS[0], ENDS[1], ENDS[2], START, CHANNEL];
/// What ends a header.
const BEHIND_HEADER: [&str; 4] = [MESSAGE, ENDS[0], ENDS[1], ENDS[2]];
/// What a header begins with.
const HEADER: [&str; 5] = [START, CHANNEL, CONSTRAIN, MESSAGE, " to="];

/// Far longer than any header: what goes on without `<|message|>` is text.
const LONGEST_HEADER: usize = 512;

/// Reads messages from a text that arrives in chunks.
#[derive(Debug)]
pub(crate) struct HarmonyParser {
    separates_reasoning: bool,
    finds_calls: bool,
    state: State,
    buffer: String,
    /// Whether there was reasoning, and content: texts of several messages are put on lines of their own.
    said: [bool; 2],
    /// Whether the message that is being read has said something.
    begun: bool,
    /// The function of a call that has no arguments yet. A call begins with them, so that one which is cut off before is none.
    called: Option<String>,
    calls: Calls,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Before `<|message|>`.
    Header,
    Text(Kind),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Reasoning,
    Content,
    Call,
}

impl HarmonyParser {
    /// Without `separates_reasoning` reasoning is content. Calls are looked for if there is a stem of their ids.
    pub(crate) fn new(separates_reasoning: bool, id_stem: Option<String>) -> HarmonyParser {
        HarmonyParser {
            separates_reasoning,
            finds_calls: id_stem.is_some(),
            state: State::Header,
            buffer: String::new(),
            said: [false; 2],
            begun: false,
            called: None,
            calls: Calls::new(id_stem.unwrap_or_default()),
        }
    }

    /// Takes the next chunk of the text and gives the pieces that are certain by now.
    pub(crate) fn push(&mut self, text: &str) -> Vec<Piece> {
        self.buffer.push_str(text);
        while !self.buffer.is_empty() && self.step() {}
        self.calls.take()
    }

    /// Gives what was held back, because the text has ended. `cut_off` says that the model had more to say: a call whose
    /// arguments had not begun is dropped then, where the end of a whole answer makes them empty.
    pub(crate) fn finish(&mut self, cut_off: bool) -> Vec<Piece> {
        let rest = std::mem::take(&mut self.buffer);
        match self.state {
            // A header without a message says nothing.
            State::Header if matches!(start_of(&rest, &HEADER), Start::Marker(_)) => {}
            State::Header if cut_off && start_of(&rest, &HEADER) == Start::Partial => {}
            State::Header => self.give(Kind::Content, &rest),
            State::Text(kind) => self.give(kind, &rest),
        }
        if cut_off {
            self.called = None;
        }
        self.end_message();
        self.calls.take()
    }

    /// Takes something from the buffer; `false` if more text is needed.
    fn step(&mut self) -> bool {
        match self.state {
            State::Header => self.header(),
            State::Text(kind) => self.text(kind),
        }
    }

    fn header(&mut self) -> bool {
        let is_header = match start_of(&self.buffer, &HEADER) {
            Start::Partial => return false,
            Start::Marker(_) => true,
            Start::Other => false,
        };
        let end = find_first(&self.buffer, &BEHIND_HEADER).filter(|_| is_header);
        match end {
            Some((at, MESSAGE)) => {
                let header: String = self.buffer.drain(..at + MESSAGE.len()).collect();
                self.begin_message(&header[..at]);
            }
            // A header that ends without a message.
            Some((at, marker)) => drop(self.buffer.drain(..at + marker.len())),
            None if is_header && self.buffer.len() < LONGEST_HEADER => return false,
            None => {
                self.state = State::Text(Kind::Content);
                // What looks like the beginning of another header would be taken for one again.
                if is_header {
                    let first = self.buffer.drain(..1).collect::<String>();
                    self.give(Kind::Content, &first);
                }
            }
        }
        true
    }

    fn begin_message(&mut self, header: &str) {
        let recipient = header.split_once("to=").map(|(_, rest)| rest);
        let recipient = recipient.and_then(|rest| rest.split([' ', '<', '\n']).next());
        let recipient = recipient.filter(|name| !["", "assistant", "user", "all"].contains(name));
        let channel = header.rsplit_once(CHANNEL).map_or("", |(_, rest)| rest);
        let channel = channel.split([' ', '<', '\n']).next().unwrap_or_default();
        let kind = match recipient.filter(|_| self.finds_calls) {
            Some(name) => {
                self.called = Some(name.strip_prefix("functions.").unwrap_or(name).to_owned());
                Kind::Call
            }
            None if channel == "analysis" && self.separates_reasoning => Kind::Reasoning,
            None => Kind::Content,
        };
        self.state = State::Text(kind);
    }

    fn text(&mut self, kind: Kind) -> bool {
        let (end, marker) = match find_first(&self.buffer, &BEHIND_TEXT) {
            Some((at, marker)) => (at, Some(marker)),
            None => (self.buffer.len() - held_back(&self.buffer, &BEHIND_TEXT), None),
        };
        let text: String = self.buffer.drain(..end).collect();
        self.give(kind, &text);
        let Some(marker) = marker else { return false };
        if ENDS.contains(&marker) {
            self.buffer.drain(..marker.len());
        }
        self.end_message();
        true
    }

    fn end_message(&mut self) {
        if let Some(name) = self.called.take() {
            self.calls.start(&name);
            self.calls.arguments("{}");
        }
        (self.state, self.begun) = (State::Header, false);
    }

    fn give(&mut self, kind: Kind, text: &str) {
        // White space before arguments is none of them.
        let text = if self.called.is_some() { text.trim_start() } else { text };
        if text.is_empty() {
            return;
        }
        if let Some(name) = self.called.take() {
            self.calls.start(&name);
        }
        let first = !std::mem::replace(&mut self.begun, true);
        let make = match kind {
            Kind::Call => return self.calls.arguments(text),
            Kind::Reasoning => Piece::Reasoning,
            Kind::Content => Piece::Content,
        };
        let said = std::mem::replace(&mut self.said[usize::from(kind == Kind::Content)], true);
        let line_break = if said && first { "\n" } else { "" };
        self.calls.push(make(format!("{line_break}{text}")));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::parse::Message;

    const ANSWER: &str = "<|channel|>analysis<|message|>They want <b> é.<|end|><|start|>assistant<|channel|>commentary \
                          to=functions.get_weather <|constrain|>json<|message|>{\"city\": \"Roma é\"}<|call|>";

    fn read(parser: fn() -> HarmonyParser, text: &str, cuts: &[usize]) -> Message {
        let (mut parser, mut message, mut from) = (parser(), Message::default(), 0);
        for &cut in cuts.iter().chain([&text.len()]) {
            let to = text.floor_char_boundary(cut.min(text.len())).max(from);
            message.extend(parser.push(&text[from..to]));
            from = to;
        }
        message.extend(parser.finish(false));
        message
    }

    fn all() -> HarmonyParser {
        HarmonyParser::new(true, Some("r7-".to_owned()))
    }

    /// What a text says: reasoning, content and `name(arguments)` of calls, cut at every byte and at none.
    fn check(text: &str, reasoning: &str, content: &str, calls: &[&str]) {
        let every: Vec<usize> = (0..text.len()).collect();
        let mut ways: Vec<Vec<usize>> = every.iter().map(|&cut| vec![cut]).collect();
        ways.extend([vec![], every]);
        for cuts in ways {
            let message = read(all, text, &cuts);
            assert_eq!((&*message.reasoning, &*message.content), (reasoning, content), "{text} at {cuts:?}");
            let found = message.tool_calls.iter().map(|call| format!("{}({})", call.name, call.arguments));
            assert_eq!(found.collect::<Vec<_>>(), calls, "{text} at {cuts:?}");
            let ids = message.tool_calls.iter().map(|call| call.id.clone());
            let expected = (0..calls.len()).map(|index| format!("call_r7-{index}"));
            assert!(ids.eq(expected), "{text}");
        }
    }

    #[test]
    fn channels_are_told_apart() {
        check(
            "<|channel|>analysis<|message|>Hm <|.<|end|><|start|>assistant<|channel|>final<|message|>Hello.<|return|>",
            "Hm <|.",
            "Hello.",
            &[],
        );
        check(ANSWER, "They want <b> é.", "", &["get_weather({\"city\": \"Roma é\"})"]);
        // Words to the user before a call, and two calls.
        check(
            "<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant to=functions.now<|channel|>commentary \
             json<|message|><|call|><|start|>assistant<|channel|>commentary to=browser.open \
             <|constrain|>json<|message|>{\"id\": 1}<|call|>",
            "",
            "One moment.",
            &["now({})", "browser.open({\"id\": 1})"],
        );
    }

    #[test]
    fn several_messages_of_a_channel_have_lines_of_their_own() {
        check(
            "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|>\
             <|start|>assistant<|channel|>commentary<|message|>Three.<|end|><|start|>assistant<|channel|>final<|message|>Four.",
            "One.\nTwo.",
            "Three.\nFour.",
            &[],
        );
    }

    #[test]
    fn what_has_no_header_is_content() {
        check("{\"a\": 1}", "", "{\"a\": 1}", &[]);
        check("<", "", "<", &[]);
        check(" to be", "", " to be", &[]);
        check("", "", "", &[]);
        check("Yes.<|end|><|start|>assistant<|channel|>final<|message|>No.", "", "Yes.\nNo.", &[]);
    }

    #[test]
    fn headers_that_are_broken_do_no_harm() {
        check("<|channel|>analysis", "", "", &[]);
        check("<|channel|>final<|return|>", "", "", &[]);
        check("<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Yes.", "Hm.", "Yes.", &[]);
        check("<|message|>Yes.", "", "Yes.", &[]);
        check("<|start|>assistant<|channel|>odd<|message|>Yes.", "", "Yes.", &[]);
        let endless = format!("<|channel|>{}", "x".repeat(4 * LONGEST_HEADER));
        check(&endless[..LONGEST_HEADER - 1], "", "", &[]);
        let message = read(all, &endless, &[]);
        assert_eq!(message.content, endless);
    }

    #[test]
    fn a_call_that_was_cut_off_keeps_what_was_passed_on() {
        let cut = ANSWER.find("Roma").unwrap();
        check(&ANSWER[..cut], "They want <b> é.", "", &["get_weather({\"city\": \")"]);
    }

    /// Without a word of its arguments a call says nothing if there was more to come, and has none if there was not.
    #[test]
    fn a_call_that_was_cut_off_before_its_arguments_is_none() {
        let begin = ANSWER.find("{\"city").unwrap();
        for behind in ["", " ", "\n "] {
            let text = format!("{}{behind}", &ANSWER[..begin]);
            check(&text, "They want <b> é.", "", &["get_weather({})"]);
            let mut parser = all();
            let mut message = Message::default();
            message.extend(parser.push(&text));
            assert!(message.tool_calls.is_empty(), "{text}: nothing may be passed on that is taken back");
            message.extend(parser.finish(true));
            assert_eq!((message.tool_calls, &*message.content), (vec![], ""), "{text}");
        }
    }

    #[test]
    fn what_nobody_looks_for_is_content() {
        let plain = || HarmonyParser::new(false, None);
        let message = read(plain, ANSWER, &[]);
        assert_eq!(message.content, "They want <b> é.\n{\"city\": \"Roma é\"}");
        assert!(message.tool_calls.is_empty() && message.reasoning.is_empty());
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

        #[test]
        fn cuts_make_no_difference_and_nothing_said_is_lost(
            bits in prop::collection::vec(
                prop::sample::select(vec![
                    START, CHANNEL, MESSAGE, CONSTRAIN, ENDS[0], ENDS[1], ENDS[2], "<|", "|>", "assistant", "analysis",
                    "final", "commentary", " to=functions.f", "A", "B é", "\n", "{}", "<|message|>C<|end|>",
                ]),
                0..20,
            ),
            mut cuts in prop::collection::vec(0_usize..200, 0..8),
        ) {
            let text = bits.concat();
            cuts.sort_unstable();
            let whole = read(all, &text, &[]);
            prop_assert_eq!(&read(all, &text, &cuts), &whole, "{:?}", &text);
            let every: Vec<usize> = (0..text.len()).collect();
            prop_assert_eq!(&read(all, &text, &every), &whole, "{:?}", &text);
            // What stands behind the header of a message is said.
            let said = text.matches("<|message|>C<|end|>").count();
            let calls: String = whole.tool_calls.iter().map(|call| call.arguments.as_str()).collect();
            let out = format!("{}{}{calls}", whole.reasoning, whole.content);
            prop_assert_eq!(out.matches('C').count(), said, "{:?}", &text);
        }
    }
}
