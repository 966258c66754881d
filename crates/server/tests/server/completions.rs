//! Completions in front of a mock.

use serde_json::{Value, json};

use crate::support::mock;

#[tokio::test]
async fn prompts_of_all_forms_are_continued() {
    let server = mock();
    let ids = server.post("/tokenize", json!({"prompt": "one two"})).await.ok()["tokens"].clone();
    let text = |answer: &Value, index: usize| answer["choices"][index]["text"].as_str().unwrap().to_owned();
    let ask = |prompt: Value| server.post("/v1/completions", json!({"prompt": prompt, "temperature": 0}));
    let one = ask(json!("one two")).await.ok();
    assert_eq!((&one["object"], one["choices"].as_array().unwrap().len()), (&json!("text_completion"), 1));
    assert_eq!(text(&ask(ids.clone()).await.ok(), 0), text(&one, 0));
    let two = ask(json!(["one two", "three"])).await.ok();
    assert_eq!((text(&two, 0), &two["choices"][1]["index"]), (text(&one, 0), &json!(1)));
    assert_ne!(text(&two, 0), text(&two, 1));
    assert_eq!(text(&ask(json!([ids, ids])).await.ok(), 1), text(&one, 0));
    let spent = &two["usage"];
    assert!(spent["prompt_tokens"].as_u64() > one["usage"]["prompt_tokens"].as_u64());
}

#[tokio::test]
async fn the_default_limit_is_sixteen() {
    let server = mock();
    let body = server.post("/v1/completions", json!({"prompt": "a", "ignore_eos": true})).await.ok();
    assert_eq!(body["usage"]["completion_tokens"], 16);
    assert_eq!(body["choices"][0]["finish_reason"], "length");
    let request = json!({"prompt": "a", "ignore_eos": true, "max_tokens": 3, "min_tokens": 2});
    assert_eq!(server.post("/v1/completions", request).await.ok()["usage"]["completion_tokens"], 3);
}

#[tokio::test]
async fn prompts_are_echoed() {
    let server = mock();
    let request = json!({"prompt": "one two", "echo": true, "max_tokens": 0});
    let body = server.post("/v1/completions", request.clone()).await.ok();
    assert_eq!(body["choices"][0]["text"], "one two");
    assert_eq!(
        (&body["usage"]["completion_tokens"], &body["choices"][0]["finish_reason"]),
        (&json!(0), &json!("length"))
    );
    for max_tokens in [0, 5] {
        let mut request =
            json!({"prompt": ["one two", "three"], "echo": true, "temperature": 0, "ignore_eos": true});
        request["max_tokens"] = max_tokens.into();
        let whole = server.post("/v1/completions", request.clone()).await.ok();
        request["stream"] = true.into();
        let events = server.post("/v1/completions", request).await.events();
        for index in 0..2 {
            let pieces =
                events.iter().map(|event| &event["choices"][0]).filter(|choice| choice["index"] == index);
            let text: String = pieces.filter_map(|choice| choice["text"].as_str()).collect();
            assert_eq!(text, whole["choices"][index]["text"].as_str().unwrap());
        }
    }
}

#[tokio::test]
async fn a_stream_says_the_same_in_pieces() {
    let server = mock();
    let mut request = json!({"prompt": "one two", "seed": 4, "n": 2, "max_tokens": 30, "logprobs": 1});
    let whole = server.post("/v1/completions", request.clone()).await.ok();
    request["stream"] = true.into();
    request["stream_options"] = json!({"include_usage": true});
    let events = server.post("/v1/completions", request).await.events();
    let (usage, pieces) = events.split_last().unwrap();
    assert_eq!((&usage["choices"], &usage["usage"]), (&json!([]), &whole["usage"]));
    for index in 0..2 {
        let of_choice =
            || pieces.iter().map(|event| &event["choices"][0]).filter(|choice| choice["index"] == index);
        let text: String = of_choice().filter_map(|choice| choice["text"].as_str()).collect();
        let expected = &whole["choices"][index];
        assert_eq!(text, expected["text"].as_str().unwrap());
        for field in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
            let joined: Vec<Value> = of_choice()
                .filter_map(|choice| choice["logprobs"][field].as_array())
                .flatten()
                .cloned()
                .collect();
            assert_eq!(Value::from(joined), expected["logprobs"][field], "{field}");
        }
    }
}

#[tokio::test]
async fn the_drawn_token_is_among_its_alternatives() {
    let server = mock();
    let request = json!({"prompt": "a", "logprobs": 0, "max_tokens": 5, "ignore_eos": true});
    let body = server.post("/v1/completions", request).await.ok();
    let lists = &body["choices"][0]["logprobs"];
    for index in 0..5 {
        let token = lists["tokens"][index].as_str().unwrap();
        assert_eq!(lists["top_logprobs"][index][token], lists["token_logprobs"][index]);
    }
}

#[tokio::test]
async fn a_seed_makes_answers_repeatable() {
    let server = mock();
    let ask =
        |seed: i64| server.post("/v1/completions", json!({"prompt": "a", "seed": seed, "max_tokens": 20}));
    let text = |answer: Value| answer["choices"][0]["text"].clone();
    assert_eq!(text(ask(-3).await.ok()), text(ask(-3).await.ok()));
    assert_ne!(text(ask(-3).await.ok()), text(ask(4).await.ok()));
}
