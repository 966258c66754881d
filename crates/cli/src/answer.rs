//! An answer on its way to the terminal.

use oscar_server::ChannelReader;

/// What the model has said so far. Models that write messages in channels are shown with their thoughts first, which are no part of
/// what was said.
pub(crate) struct Answer {
    channels: Option<ChannelReader>,
    thought: bool,
    said: String,
}

impl Answer {
    /// An answer of a model with this chat template.
    pub(crate) fn new(template: &str) -> Answer {
        Answer { channels: ChannelReader::of_template(template), thought: false, said: String::new() }
    }

    /// Whether special tokens must be part of the text.
    pub(crate) fn needs_special_tokens(&self) -> bool {
        self.channels.is_some()
    }

    /// Takes the next text of the model and gives what is to be shown.
    pub(crate) fn push(&mut self, text: &str) -> String {
        match &mut self.channels {
            None => {
                self.said.push_str(text);
                text.to_owned()
            }
            Some(channels) => {
                let (thoughts, content) = channels.push(text);
                self.show(thoughts, &content)
            }
        }
    }

    /// What is left to be shown when the text has ended.
    pub(crate) fn finish(&mut self) -> String {
        let rest = self.channels.as_mut().map(ChannelReader::finish);
        rest.map_or_else(String::new, |(thoughts, content)| self.show(thoughts, &content))
    }

    /// What the next turn of the conversation remembers.
    pub(crate) fn said(&self) -> &str {
        &self.said
    }

    fn show(&mut self, thoughts: String, content: &str) -> String {
        self.thought |= !thoughts.is_empty();
        let first = self.said.is_empty() && !content.is_empty();
        self.said.push_str(content);
        thoughts + if self.thought && first { "\n\n" } else { "" } + content
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HARMONY: &str = "<|start|>assistant<|channel|>final<|message|>";

    #[test]
    fn channels_are_shown_one_after_the_other() {
        let text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>";
        for size in 1..=text.len() {
            let mut answer = Answer::new(HARMONY);
            assert!(answer.needs_special_tokens());
            let mut shown = String::new();
            for chunk in text.as_bytes().chunks(size) {
                shown += &answer.push(std::str::from_utf8(chunk).unwrap());
            }
            shown += &answer.finish();
            assert_eq!((shown.as_str(), answer.said()), ("Hm.\n\nYes.", "Yes."), "chunks of {size}");
        }
    }

    #[test]
    fn other_answers_are_shown_as_they_are() {
        let mut answer = Answer::new("<|im_start|>");
        assert!(!answer.needs_special_tokens());
        assert_eq!(answer.push("a<|channel|>b") + &answer.finish(), "a<|channel|>b");
        assert_eq!(answer.said(), "a<|channel|>b");
    }
}
