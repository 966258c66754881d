//! `/v1/messages`, as Anthropic's clients ask.

use axum::body::Body;
use axum::http::Request;
use oscar_engine::{EngineOptions, MockOptions};
use oscar_server::ServerOptions;
use serde_json::{Value, json};

use crate::parsed::{SCRIPT, parrot};
use crate::support::{Answer, mock, mock_with, tiny};

fn ask(extra: Value) -> Value {
    let mut request = json!({"model": "tiny", "max_tokens": 40, "temperature": 0,
        "messages": [{"role": "user", "content": "Hello"}]});
    for (name, value) in extra.as_object().unwrap() {
        request[name] = value.clone();
    }
    request
}

fn weather() -> Value {
    json!({"name": "weather", "description": "The weather", "input_schema": {"type": "object",
        "properties": {"place": {"type": "string"}}}})
}

/// What a client puts together from a stream.
fn assembled(events: &[Value]) -> Value {
    let mut message = events[0]["message"].clone();
    let mut open = None;
    for event in &events[1..] {
        let index = event["index"].as_u64().map(|index| index as usize);
        match event["type"].as_str().unwrap() {
            "ping" | "message_stop" => {}
            "content_block_start" => {
                assert_eq!((open, index), (None, Some(message["content"].as_array().unwrap().len())));
                message["content"].as_array_mut().unwrap().push(event["content_block"].clone());
                open = index;
            }
            "content_block_delta" => {
                assert_eq!(open, index);
                let block = &mut message["content"][index.unwrap()];
                let delta = &event["delta"];
                let (field, text) = match delta["type"].as_str().unwrap() {
                    "text_delta" => ("text", &delta["text"]),
                    "thinking_delta" => ("thinking", &delta["thinking"]),
                    "input_json_delta" => ("json", &delta["partial_json"]),
                    other => panic!("{other}"),
                };
                let before = block[field].as_str().unwrap_or_default();
                block[field] = [before, text.as_str().unwrap()].concat().into();
            }
            "content_block_stop" => {
                assert_eq!(open.take(), index);
                let block = message["content"][index.unwrap()].as_object_mut().unwrap();
                if let Some(text) = block.remove("json") {
                    block["input"] = serde_json::from_str(text.as_str().unwrap()).unwrap();
                }
            }
            "message_delta" => {
                assert_eq!(open, None);
                for (name, value) in event["delta"].as_object().unwrap() {
                    message[name] = value.clone();
                }
                message["usage"] = event["usage"].clone();
            }
            other => panic!("{other}"),
        }
    }
    message
}

#[tokio::test]
async fn an_answer_is_a_message_of_blocks() {
    let server = mock();
    let answer = server.post("/v1/messages", ask(json!({}))).await;
    let body = answer.ok();
    assert_eq!(
        (&body["type"], &body["role"], &body["model"]),
        (&json!("message"), &json!("assistant"), &json!("tiny"))
    );
    assert!(body["id"].as_str().unwrap().starts_with("msg_"));
    assert_eq!((&body["stop_reason"], &body["stop_sequence"]), (&json!("end_turn"), &Value::Null));
    assert_eq!(answer.headers["request-id"], answer.headers["x-request-id"]);
    // The same words as on the other route.
    let chat = server.post("/v1/chat/completions", ask(json!({}))).await.ok();
    let text = &chat["choices"][0]["message"]["content"];
    assert_eq!(body["content"], json!([{"type": "text", "text": text}]));
    assert_eq!(body["usage"]["input_tokens"], chat["usage"]["prompt_tokens"]);
    assert_eq!(body["usage"]["output_tokens"], chat["usage"]["completion_tokens"]);
}

#[tokio::test]
async fn a_stream_says_the_same_in_pieces() {
    let server = mock();
    let mut whole = server.post("/v1/messages", ask(json!({}))).await.ok();
    let events = server.post("/v1/messages", ask(json!({"stream": true}))).await.named_events();
    assert_eq!(events[0]["type"], "message_start");
    assert_eq!(events[0]["message"]["content"], json!([]));
    assert_eq!(events[0]["message"]["usage"]["input_tokens"], whole["usage"]["input_tokens"]);
    assert_eq!(events[1], json!({"type": "ping"}));
    let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(kinds[kinds.len() - 3..], ["content_block_stop", "message_delta", "message_stop"]);
    let message = assembled(&events);
    whole["id"] = message["id"].clone();
    assert_eq!(message, whole);
}

#[tokio::test]
async fn thoughts_text_and_calls_are_blocks_in_order() {
    let server = parrot(&SCRIPT);
    let request = ask(json!({"tools": [weather()], "thinking": {"type": "enabled", "budget_tokens": 1024}}));
    let whole = server.post("/v1/messages", request.clone()).await.ok();
    assert_eq!(whole["stop_reason"], "tool_use");
    let blocks = whole["content"].as_array().unwrap();
    assert_eq!(blocks.len(), 3, "{whole}");
    assert_eq!(blocks[0], json!({"type": "thinking", "thinking": "Where is it?", "signature": ""}));
    assert_eq!(blocks[1]["text"].as_str().unwrap().trim(), "I ask.");
    assert_eq!((&blocks[2]["type"], &blocks[2]["name"]), (&json!("tool_use"), &json!("weather")));
    assert_eq!(blocks[2]["input"], json!({"place": "Rome"}));
    assert!(blocks[2]["id"].as_str().unwrap().starts_with("call_"));
    // Five tokens up to the end of the thoughts.
    assert_eq!(whole["usage"]["output_tokens_details"]["thinking_tokens"], 5);
    let mut streamed = request;
    streamed["stream"] = true.into();
    let mut message = assembled(&server.post("/v1/messages", streamed).await.named_events());
    message["id"] = whole["id"].clone();
    message["content"][2]["id"] = blocks[2]["id"].clone();
    assert_eq!(message, whole);
}

#[tokio::test]
async fn a_conversation_reaches_the_template() {
    let server = mock();
    let call = json!({"type": "tool_use", "id": "call_1", "name": "weather", "input": {"place": "Rome"}});
    let result = json!({"type": "tool_result", "tool_use_id": "call_1", "content": "Sun"});
    let request = ask(json!({"system": "Be brief.", "tools": [weather()], "messages": [
        {"role": "user", "content": "Rome?"}, {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]}]}));
    let count = server.post("/v1/messages/count_tokens", request.clone()).await.ok();
    let body = server.post("/v1/messages", request).await.ok();
    assert_eq!(count["input_tokens"], body["usage"]["input_tokens"]);
    // The same conversation as a chat has the same tokens.
    let function = json!({"name": "weather", "description": "The weather",
        "parameters": weather()["input_schema"]});
    let chat = json!({"tools": [{"type": "function", "function": function}], "messages": [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "call_1", "type": "function",
            "function": {"name": "weather", "arguments": {"place": "Rome"}}}]},
        {"role": "tool", "content": "Sun"}]});
    let same = server.post("/tokenize", chat).await.ok();
    assert_eq!(count["input_tokens"], same["count"]);
    let less = server.post("/v1/messages/count_tokens", ask(json!({"max_tokens": null}))).await.ok();
    assert!(less["input_tokens"].as_u64().unwrap() < count["input_tokens"].as_u64().unwrap());
}

#[tokio::test]
async fn stop_sequences_and_limits_are_told_apart() {
    let server = mock();
    let whole = server.post("/v1/messages", ask(json!({}))).await.ok();
    let text = whole["content"][0]["text"].as_str().unwrap().to_owned();
    let word = text.split_whitespace().nth(2).unwrap();
    let stopped = server.post("/v1/messages", ask(json!({"stop_sequences": ["zzz", word]}))).await.ok();
    assert_eq!((&stopped["stop_reason"], &stopped["stop_sequence"]), (&json!("stop_sequence"), &json!(word)));
    assert_eq!(stopped["content"][0]["text"].as_str().unwrap(), &text[..text.find(word).unwrap()]);
    let short = server.post("/v1/messages", ask(json!({"max_tokens": 2}))).await.ok();
    assert_eq!((&short["stop_reason"], &short["usage"]["output_tokens"]), (&json!("max_tokens"), &json!(2)));
}

#[tokio::test]
async fn an_answer_that_was_begun_goes_on_and_the_cache_is_counted() {
    let server = tiny(1024, EngineOptions::default());
    let long = "word ".repeat(120);
    let ask = || {
        let begun = json!({"role": "assistant", "content": "It is"});
        let messages = json!([{"role": "user", "content": long}, begun]);
        server.post("/v1/messages", json!({"messages": messages, "max_tokens": 3, "temperature": 0}))
    };
    let first = ask().await.ok();
    let usage = |body: &Value, name: &str| body["usage"][name].as_u64().unwrap();
    let prompt = usage(&first, "input_tokens");
    assert_eq!(usage(&first, "cache_read_input_tokens"), 0);
    let second = ask().await.ok();
    let read = usage(&second, "cache_read_input_tokens");
    assert!(read >= 64 && read + usage(&second, "input_tokens") == prompt, "{second}");
    assert_eq!(second["content"], first["content"]);
    let request = json!({"messages": [{"role": "user", "content": long}], "max_tokens": 1});
    let without = server.post("/v1/messages/count_tokens", request).await.ok();
    assert!(without["input_tokens"].as_u64().unwrap() < prompt, "the beginning is part of the prompt");
}

/// The error of a refused request, in this interface's shape.
fn refused(answer: &Answer, status: u16) -> Value {
    assert_eq!(answer.status, status, "{}", answer.text);
    let body = answer.json();
    let fields: Vec<&String> = body.as_object().unwrap().keys().collect();
    assert_eq!(fields, ["type", "error", "request_id"]);
    assert_eq!(body["type"], "error");
    assert_eq!(body["request_id"], answer.headers["request-id"].to_str().unwrap());
    assert!(body["error"]["message"].as_str().is_some_and(|message| !message.is_empty()));
    body["error"].clone()
}

#[tokio::test]
async fn errors_have_the_shape_clients_expect() {
    let options = ServerOptions { api_key: Some("secret".to_owned()), ..ServerOptions::default() };
    let server = mock_with(MockOptions::default(), options);
    let post = |key: &'static str, body: String| {
        let request = Request::post("/v1/messages").header("content-type", "application/json");
        server.send(request.header("x-api-key", key).body(Body::from(body)).unwrap())
    };
    post("secret", ask(json!({})).to_string()).await.ok();
    assert_eq!(refused(&post("guess", "{}".into()).await, 401)["type"], "authentication_error");
    let missing = refused(&post("secret", ask(json!({"max_tokens": null})).to_string()).await, 400);
    assert_eq!(missing["type"], "invalid_request_error");
    assert!(missing["message"].as_str().unwrap().contains("max_tokens"));
    let model = refused(&post("secret", ask(json!({"model": "claude"})).to_string()).await, 404);
    assert_eq!(model["type"], "not_found_error");
    refused(&post("secret", "{".into()).await, 400);
    refused(&post("secret", ask(json!({"temperature": -1})).to_string()).await, 400);
    let image = json!([{"role": "user", "content": [{"type": "image", "source": {}}]}]);
    let error = refused(&post("secret", ask(json!({"messages": image})).to_string()).await, 400);
    assert!(error["message"].as_str().unwrap().contains("messages[0].content[0]"), "{error}");
    let get = Request::get("/v1/messages").header("x-api-key", "secret").body(Body::empty()).unwrap();
    refused(&server.send(get).await, 405);
    // Other interfaces keep their shape.
    server.post("/v1/chat/completions", json!({})).await.refused(401);
}
