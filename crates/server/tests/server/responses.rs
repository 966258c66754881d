//! `/v1/responses`, as OpenAI's newer clients ask.

use oscar_engine::EngineOptions;
use serde_json::{Value, json};

use crate::parsed::{SCRIPT, parrot};
use crate::support::{mock, tiny};

fn ask(extra: Value) -> Value {
    let mut request = json!({"model": "tiny", "input": "Hello", "temperature": 0});
    for (name, value) in extra.as_object().unwrap() {
        request[name] = value.clone();
    }
    request
}

fn weather() -> Value {
    json!({"type": "function", "name": "weather", "description": "The weather", "parameters":
        {"type": "object", "properties": {"place": {"type": "string"}}}, "strict": false})
}

/// Checks the events of a stream against each other; gives the response of the last one.
fn checked(events: &[Value]) -> Value {
    for (number, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], number);
    }
    assert_eq!(events[0]["type"], "response.created");
    assert_eq!(events[0]["response"]["status"], "in_progress");
    assert_eq!(events[1]["type"], "response.in_progress");
    let (last, between) = events[2..].split_last().unwrap();
    let mut items: Vec<Value> = Vec::new();
    for event in between {
        let index = event["output_index"].as_u64().unwrap() as usize;
        let kind = event["type"].as_str().unwrap().strip_prefix("response.").unwrap();
        if kind == "output_item.added" {
            assert_eq!(index, items.len());
            assert_eq!(event["item"]["status"], "in_progress");
            items.push(event["item"].clone());
            continue;
        }
        assert_eq!(index + 1, items.len(), "items come one after the other");
        let item = &mut items[index];
        if kind == "output_item.done" {
            // What was told in pieces is what is told in the end.
            item["status"] = event["item"]["status"].clone();
            assert_eq!(*item, event["item"]);
            continue;
        }
        assert_eq!(event["item_id"], item["id"]);
        match kind {
            "content_part.added" => item["content"].as_array_mut().unwrap().push(event["part"].clone()),
            "output_text.delta" | "reasoning_text.delta" => {
                let text = &mut item["content"][0]["text"];
                *text = [text.as_str().unwrap(), event["delta"].as_str().unwrap()].concat().into();
            }
            "output_text.done" | "reasoning_text.done" => {
                assert_eq!(event["text"], item["content"][0]["text"])
            }
            "content_part.done" => assert_eq!(event["part"], item["content"][0]),
            "function_call_arguments.delta" => {
                let text = &mut item["arguments"];
                *text = [text.as_str().unwrap(), event["delta"].as_str().unwrap()].concat().into();
            }
            "function_call_arguments.done" => assert_eq!(event["arguments"], item["arguments"]),
            other => panic!("{other}"),
        }
    }
    assert_eq!(Value::from(items), last["response"]["output"]);
    last["response"].clone()
}

/// The same with other names for what is named anew each time.
fn nameless(response: &Value) -> Value {
    let mut response = response.clone();
    response["id"] = "id".into();
    response["created_at"] = 0.into();
    for item in response["output"].as_array_mut().unwrap() {
        item["id"] = "id".into();
        if item.get("call_id").is_some() {
            item["call_id"] = "call".into();
        }
    }
    response
}

#[tokio::test]
async fn an_answer_is_a_list_of_items() {
    let server = mock();
    let body = server.post("/v1/responses", ask(json!({"metadata": {"a": "b"}}))).await.ok();
    assert_eq!(
        (&body["object"], &body["status"], &body["model"]),
        (&json!("response"), &json!("completed"), &json!("tiny"))
    );
    assert!(body["id"].as_str().unwrap().starts_with("resp_"));
    assert_eq!((&body["metadata"], &body["store"]), (&json!({"a": "b"}), &json!(false)));
    assert_eq!(
        (&body["temperature"], &body["tool_choice"], &body["error"]),
        (&json!(0.0), &json!("auto"), &Value::Null)
    );
    // The same words as on the other route.
    let chat = json!({"messages": [{"role": "user", "content": "Hello"}], "temperature": 0});
    let chat = server.post("/v1/chat/completions", chat).await.ok();
    let item = &body["output"][0];
    assert_eq!(
        (&item["type"], &item["role"], &item["status"]),
        (&json!("message"), &json!("assistant"), &json!("completed"))
    );
    let part = json!({"type": "output_text", "text": chat["choices"][0]["message"]["content"], "annotations": [],
        "logprobs": []});
    assert_eq!(item["content"], json!([part]));
    let usage = &body["usage"];
    assert_eq!(usage["input_tokens"], chat["usage"]["prompt_tokens"]);
    assert_eq!(usage["output_tokens"], chat["usage"]["completion_tokens"]);
    assert_eq!(usage["total_tokens"], chat["usage"]["total_tokens"]);
}

#[tokio::test]
async fn a_stream_says_the_same_in_pieces() {
    let server = mock();
    for extra in [json!({}), json!({"max_output_tokens": 3})] {
        let mut request = ask(extra);
        let whole = server.post("/v1/responses", request.clone()).await.ok();
        request["stream"] = true.into();
        let events = server.post("/v1/responses", request).await.named_events();
        assert_eq!(nameless(&checked(&events)), nameless(&whole));
        let deltas = events.iter().filter(|event| event["type"] == "response.output_text.delta").count();
        assert!(deltas > 1, "{deltas}");
        let last = events.last().unwrap()["type"].as_str().unwrap();
        assert_eq!(last, format!("response.{}", whole["status"].as_str().unwrap()));
    }
}

#[tokio::test]
async fn an_answer_that_is_cut_off_says_so() {
    let server = mock();
    let body = server.post("/v1/responses", ask(json!({"max_output_tokens": 2}))).await.ok();
    assert_eq!((&body["status"], &body["output"][0]["status"]), (&json!("incomplete"), &json!("incomplete")));
    assert_eq!(body["incomplete_details"], json!({"reason": "max_output_tokens"}));
    assert_eq!((&body["usage"]["output_tokens"], &body["max_output_tokens"]), (&json!(2), &json!(2)));
}

#[tokio::test]
async fn thoughts_text_and_calls_are_items_in_order() {
    let server = parrot(&SCRIPT);
    let mut request = ask(json!({"tools": [weather()]}));
    let whole = server.post("/v1/responses", request.clone()).await.ok();
    let items = whole["output"].as_array().unwrap();
    let kinds: Vec<&str> = items.iter().map(|item| item["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call"]);
    assert_eq!(items[0]["content"], json!([{"type": "reasoning_text", "text": "Where is it?"}]));
    assert_eq!(items[1]["content"][0]["text"].as_str().unwrap().trim(), "I ask.");
    assert_eq!(items[2]["name"], "weather");
    let arguments: Value = serde_json::from_str(items[2]["arguments"].as_str().unwrap()).unwrap();
    assert_eq!(arguments, json!({"place": "Rome"}));
    assert_eq!(whole["usage"]["output_tokens_details"]["reasoning_tokens"], 5);
    assert_eq!(whole["tools"], json!([weather()]));
    request["stream"] = true.into();
    let events = server.post("/v1/responses", request).await.named_events();
    assert_eq!(nameless(&checked(&events)), nameless(&whole));
    let ids: Vec<&Value> = items.iter().map(|item| &item["id"]).collect();
    assert!(ids[0] != ids[1] && ids[1] != ids[2], "{ids:?}");
}

#[tokio::test]
async fn items_that_are_sent_back_reach_the_template_and_the_cache() {
    let server = tiny(2048, EngineOptions::default());
    let user = json!({"role": "user", "content": "word ".repeat(60)});
    let request = json!({"input": [user], "instructions": "Be brief.", "max_output_tokens": 70, "seed": 5});
    let first = server.post("/v1/responses", request).await.ok();
    let mut input = vec![user.clone()];
    input.extend(first["output"].as_array().unwrap().clone());
    input.push(json!({"role": "user", "content": "And then?"}));
    let request = json!({"input": input, "instructions": "Be brief.", "max_output_tokens": 2, "seed": 5});
    let second = server.post("/v1/responses", request).await.ok();
    let said = &first["output"][0]["content"][0]["text"];
    let chat = json!({"messages": [{"role": "system", "content": "Be brief."}, user,
        {"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]});
    let same = server.post("/tokenize", chat).await.ok();
    assert_eq!(second["usage"]["input_tokens"], same["count"]);
    let before = first["usage"]["total_tokens"].as_u64().unwrap();
    let cached = second["usage"]["input_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(cached + 64 >= before - 1, "{cached} of {before}");
}

#[tokio::test]
async fn an_answer_keeps_to_a_schema() {
    let server = tiny(512, EngineOptions::default());
    let schema = json!({"enum": ["first", "second"]});
    let format = json!({"type": "json_schema", "name": "n", "schema": schema, "strict": true});
    let request = json!({"input": "Hello", "text": {"format": format}, "max_output_tokens": 60, "seed": 2,
        "temperature": 1});
    let body = server.post("/v1/responses", request).await.ok();
    let text = body["output"][0]["content"][0]["text"].as_str().unwrap();
    let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    assert!(value == "first" || value == "second", "{value}");
    assert_eq!(body["text"]["format"], format);
}

#[tokio::test]
async fn what_is_not_there_is_refused_by_name() {
    let server = mock();
    for (extra, param) in [
        (json!({"previous_response_id": "resp_1"}), "previous_response_id"),
        (json!({"conversation": {"id": "conv_1"}}), "conversation"),
        (json!({"store": true}), "store"),
        (json!({"background": true}), "background"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}), "input[0].content[0]"),
    ] {
        let error = server.post("/v1/responses", ask(extra.clone())).await.refused(400);
        assert_eq!(
            (&error["param"], &error["code"]),
            (&json!(param), &json!("unsupported_parameter")),
            "{extra}"
        );
    }
    server.post("/v1/responses", json!({})).await.refused(400);
    server.post("/v1/responses", ask(json!({"model": "gpt-5"}))).await.refused(404);
    server.post("/v1/responses", ask(json!({"temperature": -1}))).await.refused(400);
}
