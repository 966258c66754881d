//! A long chat with a model that thinks: its template leaves earlier thoughts out, so each prompt is another text than
//! what the model read and wrote, up to the last question.

use std::sync::Arc;

use oscar_codec::PageCodec;
use oscar_engine::{EngineOptions, KvOptions};
use oscar_server::ServerOptions;
use serde_json::json;

use crate::support::tiny_chatting;

/// Thoughts of earlier answers are left out, as templates of thinking models do.
const TEMPLATE: &str = "{%- for message in messages -%}<|im_start|>{{ message.role }}\n\
    {%- if message.role == 'assistant' and '</think>' in message.content -%}\
    {{ '\n' + message.content.split('</think>')[-1].lstrip('\n') }}\
    {%- else -%}{{ '\n' + message.content }}{%- endif -%}<|im_end|>{{ '\n' }}{%- endfor -%}\
    {%- if add_generation_prompt -%}<|im_start|>assistant{{ '\n' }}{%- endif -%}";

const TURNS: usize = 20;

/// One turn: the answer, and tokens of the prompt, of the answer, and from the cache.
struct Turn {
    answer: String,
    prompt: u64,
    completion: u64,
    cached: u64,
}

async fn chat(kv: KvOptions) -> Vec<Turn> {
    let options = EngineOptions { deterministic: true, kv, ..EngineOptions::default() };
    let server = tiny_chatting(8192, options, ServerOptions::default(), TEMPLATE);
    let system = "You weigh every word before you answer. ".repeat(5);
    let mut messages = vec![json!({"role": "system", "content": system})];
    let mut turns = Vec::new();
    for turn in 0..TURNS {
        let question = format!("Question {turn}: what follows from what was said so far, and what does not?");
        messages.push(json!({"role": "user", "content": question}));
        // A random model thinks nothing, so it is held to the form of a thought and an answer.
        let request = json!({"messages": messages, "max_tokens": 400, "temperature": 1.0, "seed": turn,
            "regex": "<think>\n[a-z ]{50,90}\n</think>\n\n[a-z ]{30,60}"});
        let body = server.post("/v1/chat/completions", request).await.ok();
        let choice = &body["choices"][0];
        assert_eq!(choice["finish_reason"], "stop", "{body}");
        let answer = choice["message"]["content"].as_str().unwrap().to_owned();
        assert!(answer.starts_with("<think>\n") && answer.contains("\n</think>\n\n"), "{answer}");
        messages.push(json!({"role": "assistant", "content": answer}));
        let usage = &body["usage"];
        turns.push(Turn {
            answer,
            prompt: usage["prompt_tokens"].as_u64().unwrap(),
            completion: usage["completion_tokens"].as_u64().unwrap(),
            cached: usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap(),
        });
    }
    turns
}

/// Ids allow a hit up to where the last thought began, which is where the prompt before ended.
#[tokio::test]
async fn twenty_turns_hit_the_cache_and_say_the_same_without_it() {
    let geometry = {
        let server = tiny_chatting(256, EngineOptions::default(), ServerOptions::default(), TEMPLATE);
        server.engine.model().config().kv_geometry()
    };
    let int4 = Arc::new(PageCodec::int4(geometry, None).unwrap());
    for codec in [None, Some(int4)] {
        let name = if codec.is_some() { "int4" } else { "bf16" };
        let with = chat(KvOptions { codec: codec.clone(), ..KvOptions::default() }).await;
        let without = chat(KvOptions { codec, prefix_tree: false, ..KvOptions::default() }).await;
        for (index, (one, other)) in with.iter().zip(&without).enumerate() {
            assert_eq!(one.answer, other.answer, "{name}, turn {index}");
            assert_eq!((one.prompt, other.cached), (other.prompt, 0));
        }
        let (mut sent_again, mut found) = (0, 0);
        for pair in with.windows(2) {
            let (before, now) = (&pair[0], &pair[1]);
            assert!(now.prompt < before.prompt + before.completion + 80, "thoughts are left out");
            assert!(now.cached <= before.prompt, "{name}: pages of a thought that is not there any more");
            sent_again += before.prompt;
            found += now.cached;
        }
        let share = found as f64 / sent_again as f64;
        eprintln!("{name}: {found} of {sent_again} tokens, {share:.3}");
        assert!(share >= 0.9, "{name}: {found} of {sent_again}");
    }
}
