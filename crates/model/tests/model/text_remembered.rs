//! Ids of what was said: a chat keeps them however its text would be encoded anew.

use std::path::Path;

use oscar_model::text::{ChatTemplate, RememberedText, RenderOptions, RenderedText, Tokenizer};
use serde_json::{Value, json};

const PLAIN: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n\
                     {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// Leaves out what was thought in all turns but the last.
const FORGETFUL: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n\
                         {{ message.content.split('</think>')[-1] }}<|im_end|>\n\
                         {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// Trims what was said, and adds a space of its own.
const TRIMMING: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content | trim }} <|im_end|>\n\
                        {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

fn tokenizer(name: &str) -> Tokenizer {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/text/tokenizers");
    Tokenizer::from_file(folder.join(format!("{name}.tokenizer.json"))).expect("a sound file")
}

/// A text in which every control token is meant.
fn meant(text: &str) -> RenderedText {
    RenderedText::from(text.to_owned())
}

fn encode(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode_with_special_tokens_parsed(text, false).expect("encodes")
}

/// The text in single characters: ids that no encoder would choose.
fn spelled_out(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    text.chars().flat_map(|character| encode(tokenizer, &character.to_string())).collect()
}

struct Chat {
    template: ChatTemplate,
    messages: Vec<Value>,
    /// What the model has seen and said.
    seen: Vec<u32>,
}

impl Chat {
    fn new(template: &str) -> Chat {
        Chat {
            template: ChatTemplate::from_source(template).expect("template"),
            messages: Vec::new(),
            seen: Vec::new(),
        }
    }

    fn ask(&mut self, question: &str) -> String {
        self.messages.push(json!({"role": "user", "content": question}));
        let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
        self.template.render(&self.messages, &options).expect("renders")
    }

    /// The model says `answer` in single characters and ends its turn.
    fn answer(
        &mut self,
        tokenizer: &Tokenizer,
        memory: &mut RememberedText,
        prompt: &str,
        ids: &[u32],
        answer: &str,
    ) {
        let end = tokenizer.token_id("<|im_end|>").expect("an end token");
        let said = [spelled_out(tokenizer, answer), vec![end]].concat();
        memory.remember(tokenizer, "", &meant(prompt), ids, &said).expect("remembers");
        self.seen = [ids, &said[..]].concat();
        self.messages.push(json!({"role": "assistant", "content": answer}));
    }
}

fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[test]
fn thirty_turns_keep_every_id_that_was_said() {
    for name in ["smollm", "qwen2"] {
        let tokenizer = tokenizer(name);
        let (mut memory, mut chat) = (RememberedText::new(1 << 20), Chat::new(PLAIN));
        let (mut prompt_tokens, mut cached, mut without) = (0, 0, 0);
        for turn in 0..30 {
            let text = chat.ask(&format!("question {turn} about the river"));
            let encoded = memory.encode(&tokenizer, "", &meant(&text)).expect("encodes");
            assert_eq!(tokenizer.decode(&encoded.ids, false).expect("text"), text, "the same text");
            // All that was seen is a prefix of what is seen next.
            assert_eq!(common(&chat.seen, &encoded.ids), chat.seen.len(), "{name}, turn {turn}");
            assert_eq!(encoded.remembered, chat.seen.len());
            prompt_tokens += encoded.ids.len();
            cached += encoded.remembered;
            without += common(&chat.seen, &encode(&tokenizer, &text));
            let answer =
                format!("{turn}: that the page of the cache with the naïve model of the cache and the page");
            chat.answer(&tokenizer, &mut memory, &text, &encoded.ids, &answer);
        }
        assert!(cached * 100 >= prompt_tokens * 90, "{cached} of {prompt_tokens}");
        assert!(without * 4 < cached, "encoded anew, {without} would have been found instead of {cached}");
    }
}

#[test]
fn the_rest_is_encoded_as_in_the_whole_text() {
    // The encoder's own ids this time: then remembering must change nothing at all.
    for name in ["smollm", "qwen2"] {
        let tokenizer = tokenizer(name);
        let end = tokenizer.token_id("<|im_end|>").expect("an end token");
        for answer in ["yes", " yes ", "yes\n", "\n\nyes", "12 + 30 = 42", "naïve 中文 🦀"] {
            for ending in [vec![end], Vec::new()] {
                let (mut memory, mut chat) = (RememberedText::new(1 << 20), Chat::new(PLAIN));
                let text = chat.ask("hello");
                let ids = encode(&tokenizer, &text);
                let said = [encode(&tokenizer, answer), ending].concat();
                memory.remember(&tokenizer, "", &meant(&text), &ids, &said).expect("remembers");
                chat.messages.push(json!({"role": "assistant", "content": answer}));
                let next = chat.ask("\n and then? ");
                let encoded = memory.encode(&tokenizer, "", &meant(&next)).expect("encodes");
                assert_eq!(encoded.remembered, ids.len() + said.len(), "{answer:?}");
                let behind = &encode(&tokenizer, &next[text.len() + answer.len()..]);
                assert!(encoded.ids.ends_with(&behind[said.len() - encode(&tokenizer, answer).len()..]));
                assert_eq!(tokenizer.decode(&encoded.ids, false).expect("text"), next);
            }
        }
    }
}

#[test]
fn what_a_template_drops_is_not_remembered() {
    let tokenizer = tokenizer("smollm");
    let (mut memory, mut chat) = (RememberedText::new(1 << 20), Chat::new(FORGETFUL));
    for turn in 0..6 {
        let text = chat.ask(&format!("question {turn}"));
        let encoded = memory.encode(&tokenizer, "", &meant(&text)).expect("encodes");
        assert_eq!(tokenizer.decode(&encoded.ids, false).expect("text"), text);
        assert!(!text.contains("hmm"), "{text}");
        if turn > 0 {
            // Everything before the answer that lost its thoughts is shared.
            let kept = text.rfind("the water").expect("the last answer");
            let before = encode(&tokenizer, &text[..kept]).len();
            assert!(common(&chat.seen, &encoded.ids) + 1 >= before, "turn {turn}");
        }
        let answer = format!("<think>hmm, question {turn}</think>the water runs down");
        chat.answer(&tokenizer, &mut memory, &text, &encoded.ids, &answer);
    }
    // Only the last turn is lost where a template trims what was said.
    let (mut memory, mut chat) = (RememberedText::new(1 << 20), Chat::new(TRIMMING));
    let first = chat.ask("question");
    let ids = encode(&tokenizer, &first);
    chat.answer(&tokenizer, &mut memory, &first, &ids, "the water");
    let second = chat.ask("and?");
    let encoded = memory.encode(&tokenizer, "", &meant(&second)).expect("encodes");
    assert_eq!(tokenizer.decode(&encoded.ids, false).expect("text"), second);
    // Cut before the end token: the space that the template adds is not what the model said.
    assert_eq!(encoded.remembered, chat.seen.len() - 1);
    chat.answer(&tokenizer, &mut memory, &second, &encoded.ids, "runs down\n");
    let third = chat.ask("why?");
    let encoded = memory.encode(&tokenizer, "", &meant(&third)).expect("encodes");
    assert_eq!(tokenizer.decode(&encoded.ids, false).expect("text"), third);
    assert_eq!(encoded.remembered, ids.len() + "the water".len());
}

#[test]
fn a_space_that_is_put_before_a_text_is_not_put_into_it() {
    let tokenizer = tokenizer("spm-prefix");
    let mut memory = RememberedText::new(1 << 20);
    let prompt = "hello";
    let ids = encode(&tokenizer, prompt);
    let answer = tokenizer.encode("world", false).expect("encodes");
    memory.remember(&tokenizer, "", &meant(prompt), &ids, &answer).expect("remembers");
    // The model said " world". What follows begins in the middle of a text, and this encoder would begin a new one.
    let next = "hello world and more";
    let encoded = memory.encode(&tokenizer, "", &meant(next)).expect("encodes");
    assert_eq!(encoded.ids, encode(&tokenizer, next));
}

#[test]
fn memory_is_bounded_and_the_oldest_goes_first() {
    let tokenizer = tokenizer("smollm");
    let limit = 8 << 10;
    let mut memory = RememberedText::new(limit);
    let say = |memory: &mut RememberedText, scope: &str, prompt: &str| {
        let ids = encode(&tokenizer, prompt);
        let said = spelled_out(&tokenizer, "an answer");
        memory.remember(&tokenizer, scope, &meant(prompt), &ids, &said).expect("remembers");
    };
    let known = |memory: &mut RememberedText, scope: &str, prompt: &str| {
        let text = format!("{prompt}an answer<|im_end|>");
        memory.encode(&tokenizer, scope, &meant(&text)).expect("encodes").remembered > 0
    };
    say(&mut memory, "", "kept by use ");
    for turn in 0..1000 {
        say(&mut memory, "", &format!("conversation {turn} "));
        assert!(memory.bytes() <= limit, "{} bytes", memory.bytes());
        assert!(known(&mut memory, "", "kept by use "), "turn {turn}");
    }
    assert!(known(&mut memory, "", "conversation 999 ") && !known(&mut memory, "", "conversation 3 "));
    // A scope is an island.
    assert!(!known(&mut memory, "another", "conversation 999 "));
    say(&mut memory, "another", "conversation 999 ");
    assert!(known(&mut memory, "another", "conversation 999 "));
    // What is too large alone is not kept, and pushes nothing out.
    let before = memory.bytes();
    say(&mut memory, "", &"long ".repeat(4000));
    assert_eq!(memory.bytes(), before);
    memory.clear();
    assert_eq!(memory.bytes(), 0);
    assert!(!known(&mut memory, "", "kept by use "));
}

/// What the model has said as a token and what somebody sends as text are not the same.
#[test]
fn a_token_that_was_said_is_not_remembered_for_its_text() {
    let tokenizer = tokenizer("qwen2");
    let template = ChatTemplate::from_source(PLAIN).expect("template");
    let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
    let render = |messages: &[Value]| {
        template.render_literally(messages, &options, tokenizer.control_tokens()).expect("renders")
    };
    let start = tokenizer.token_id("<|im_start|>").expect("a control token");
    let end = tokenizer.token_id("<|im_end|>").expect("an end token");
    let mut memory = RememberedText::new(1 << 20);
    let mut messages = vec![json!({"role": "user", "content": "say <|im_start|>"})];
    let first = render(&messages);
    let ids = memory.encode(&tokenizer, "", &first).expect("encodes").ids;
    let said = [encode(&tokenizer, "well "), vec![start], encode(&tokenizer, "so"), vec![end]].concat();
    memory.remember(&tokenizer, "", &first, &ids, &said).expect("remembers");
    messages.push(json!({"role": "assistant", "content": "well <|im_start|>so"}));
    messages.push(json!({"role": "user", "content": "thanks"}));
    let next = memory.encode(&tokenizer, "", &render(&messages)).expect("encodes");
    assert_eq!(next.remembered, 0);
    assert_eq!(next.ids.iter().filter(|&&id| id == start).count(), messages.len() + 1);
    // An answer without such a token is remembered although the question has its text.
    let said = [spelled_out(&tokenizer, "well so"), vec![end]].concat();
    memory.remember(&tokenizer, "", &first, &ids, &said).expect("remembers");
    messages[1]["content"] = "well so".into();
    let next = memory.encode(&tokenizer, "", &render(&messages)).expect("encodes");
    assert_eq!(next.remembered, ids.len() + said.len());
    assert_eq!(next.ids[..next.remembered], [ids, said].concat());
    // The same question with the token itself in it is another one.
    let parsed = template.render(&messages, &options).expect("renders");
    assert_eq!(memory.encode(&tokenizer, "", &meant(&parsed)).expect("encodes").remembered, 0);
}

#[test]
fn half_a_character_and_nothing_at_all_are_not_remembered() {
    let tokenizer = tokenizer("smollm");
    let mut memory = RememberedText::new(1 << 20);
    let crab = encode(&tokenizer, "🦀");
    assert!(crab.len() > 1, "a character of several tokens");
    let prompt = encode(&tokenizer, "a ");
    memory.remember(&tokenizer, "", &meant("a "), &prompt, &crab[..1]).expect("half");
    memory.remember(&tokenizer, "", &meant("a "), &prompt, &[]).expect("nothing");
    assert_eq!(memory.bytes(), 0);
    assert!(memory.remember(&tokenizer, "", &meant("a "), &prompt, &[u32::MAX]).is_err());
}
