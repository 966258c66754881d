//! Chats in front of a mock.

use serde_json::{Value, json};

use crate::support::mock;

fn chat(extra: Value) -> Value {
    let mut request = json!({"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]});
    for (name, value) in extra.as_object().unwrap() {
        request[name] = value.clone();
    }
    request
}

#[tokio::test]
async fn an_answer_is_a_message_with_usage() {
    let server = mock();
    let answer = server.post("/v1/chat/completions", chat(json!({"seed": 1}))).await;
    let body = answer.ok();
    assert_eq!((&body["object"], &body["model"]), (&json!("chat.completion"), &json!("tiny")));
    assert!(body["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert_eq!(body["system_fingerprint"], format!("oscar-{}-mock", env!("CARGO_PKG_VERSION")));
    let choice = &body["choices"][0];
    assert_eq!((&choice["index"], &choice["finish_reason"]), (&json!(0), &json!("stop")));
    assert_eq!(choice["message"]["role"], "assistant");
    assert!(choice["message"]["content"].as_str().unwrap().split_whitespace().count() >= 7);
    let usage = &body["usage"];
    let (prompt, said) =
        (usage["prompt_tokens"].as_u64().unwrap(), usage["completion_tokens"].as_u64().unwrap());
    assert!(prompt > 0 && said > 0);
    assert_eq!(usage["total_tokens"], prompt + said);
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0);
    assert!(answer.headers.contains_key("x-request-id"));
}

#[tokio::test]
async fn a_stream_says_the_same_in_pieces() {
    let server = mock();
    let whole = server.post("/v1/chat/completions", chat(json!({"seed": 1}))).await.ok();
    let request = chat(json!({"seed": 1, "stream": true, "stream_options": {"include_usage": true}}));
    let events = server.post("/v1/chat/completions", request).await.events();
    assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    let (usage, pieces) = events.split_last().unwrap();
    assert_eq!((&usage["choices"], &usage["usage"]), (&json!([]), &whole["usage"]));
    let text: String =
        pieces.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, whole["choices"][0]["message"]["content"].as_str().unwrap());
    for event in pieces {
        assert_eq!((&event["object"], &event["usage"]), (&json!("chat.completion.chunk"), &Value::Null));
        assert_eq!((&event["id"], &event["model"]), (&events[0]["id"], &json!("tiny")));
    }
    let last = pieces.last().unwrap();
    assert_eq!(
        (&last["choices"][0]["delta"], &last["choices"][0]["finish_reason"]),
        (&json!({}), &json!("stop"))
    );
    let reasons = pieces.iter().filter(|event| !event["choices"][0]["finish_reason"].is_null()).count();
    assert_eq!(reasons, 1);
    // One event per token with text, one for the role, one for the end.
    let said = whole["usage"]["completion_tokens"].as_u64().unwrap() as usize;
    assert_eq!(pieces.len(), said - 1 + 2);
}

#[tokio::test]
async fn usage_comes_only_when_it_is_asked_for() {
    let server = mock();
    let events = server.post("/v1/chat/completions", chat(json!({"stream": true}))).await.events();
    assert!(events.iter().all(|event| event.get("usage").is_none()));
}

#[tokio::test]
async fn several_choices_are_numbered_and_differ() {
    let server = mock();
    let request = chat(json!({"n": 3, "seed": 5, "max_tokens": 6, "ignore_eos": true}));
    let body = server.post("/v1/chat/completions", request.clone()).await.ok();
    let texts: Vec<&str> =
        (0..3).map(|index| body["choices"][index]["message"]["content"].as_str().unwrap()).collect();
    assert!(texts[0] != texts[1] && texts[1] != texts[2]);
    assert_eq!(body["usage"]["completion_tokens"], 18);
    assert!((0..3).all(|index| body["choices"][index]["finish_reason"] == "length"));
    assert_eq!(server.post("/v1/chat/completions", request.clone()).await.ok()["choices"], body["choices"]);
    let mut streamed = request;
    streamed["stream"] = true.into();
    let events = server.post("/v1/chat/completions", streamed).await.events();
    for (index, text) in texts.iter().enumerate() {
        let pieces =
            events.iter().map(|event| &event["choices"][0]).filter(|choice| choice["index"] == index);
        let joined: String = pieces.filter_map(|choice| choice["delta"]["content"].as_str()).collect();
        assert_eq!(joined, *text);
    }
}

#[tokio::test]
async fn probabilities_come_with_their_tokens() {
    let server = mock();
    let request =
        chat(json!({"logprobs": true, "top_logprobs": 2, "max_tokens": 4, "ignore_eos": true, "seed": 3}));
    let body = server.post("/v1/chat/completions", request.clone()).await.ok();
    let list = body["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(list.len(), 4);
    for entry in list {
        assert!(entry["logprob"].as_f64().unwrap() <= 0.0);
        assert_eq!(entry["top_logprobs"].as_array().unwrap().len(), 2);
        let bytes: Vec<u8> =
            entry["bytes"].as_array().unwrap().iter().map(|byte| byte.as_u64().unwrap() as u8).collect();
        assert_eq!(String::from_utf8(bytes).unwrap(), entry["token"].as_str().unwrap());
    }
    let mut streamed = request;
    streamed["stream"] = true.into();
    let events = server.post("/v1/chat/completions", streamed).await.events();
    let pieces = events.iter().filter_map(|event| event["choices"][0]["logprobs"]["content"].as_array());
    assert_eq!(pieces.flatten().cloned().collect::<Vec<Value>>(), *list);
    let plain = server.post("/v1/chat/completions", chat(json!({}))).await.ok();
    assert_eq!(plain["choices"][0]["logprobs"], Value::Null);
}

#[tokio::test]
async fn stop_texts_end_answers_and_are_named() {
    let server = mock();
    let whole = server.post("/v1/chat/completions", chat(json!({"seed": 1}))).await.ok();
    let text = whole["choices"][0]["message"]["content"].as_str().unwrap();
    let word = text.split_whitespace().nth(2).unwrap();
    let stopped = server.post("/v1/chat/completions", chat(json!({"seed": 1, "stop": word}))).await.ok();
    let before = stopped["choices"][0]["message"]["content"].as_str().unwrap();
    assert_eq!(before, &text[..text.find(word).unwrap()]);
    assert_eq!(stopped["choices"][0]["matched_stop"], word);
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
}

#[tokio::test]
async fn tools_reach_the_template() {
    let server = mock();
    let tool = json!({"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}});
    let plain = server.post("/tokenize", chat(json!({}))).await.ok();
    let with = server.post("/tokenize", chat(json!({"tools": [tool]}))).await.ok();
    let text = server
        .post("/detokenize", json!({"tokens": with["tokens"], "skip_special_tokens": false}))
        .await
        .ok();
    assert!(text["text"].as_str().unwrap().contains("weather"), "{text}");
    assert!(with["count"].as_u64() > plain["count"].as_u64());
    let said =
        server.post("/v1/chat/completions", chat(json!({"tools": [tool], "max_tokens": 2}))).await.ok();
    assert_eq!(said["usage"]["prompt_tokens"], with["count"]);
}

#[tokio::test]
async fn a_named_model_must_be_the_one_served() {
    let server = mock();
    for name in [json!("tiny"), json!("models/tiny"), json!("default"), Value::Null] {
        server.post("/v1/chat/completions", chat(json!({"model": name}))).await.ok();
    }
    let error = server.post("/v1/chat/completions", chat(json!({"model": "gpt-4"}))).await.refused(404);
    assert_eq!((&error["code"], &error["param"]), (&json!("model_not_found"), &json!("model")));
    let list = server.get("/v1/models").await.ok();
    assert_eq!((&list["object"], &list["data"][0]["id"]), (&json!("list"), &json!("tiny")));
    assert_eq!(server.get("/v1/models/tiny").await.ok(), list["data"][0]);
    server.get("/v1/models/org/other").await.refused(404);
}
