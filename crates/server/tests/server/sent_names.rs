//! Errors name fields as the client sent them, also where a request is translated before it is checked.

use oscar_engine::MockOptions;
use oscar_server::ServerOptions;
use serde_json::{Value, json};

use crate::support::{mock, mock_with};

/// A tool of OpenAI's `/v1/responses` and of `/v1/messages`.
fn tools(name: &str) -> (Value, Value) {
    let schema = json!({"type": "object", "properties": {}});
    let function = json!([{"type": "function", "name": name, "parameters": schema}]);
    (function, json!([{"name": name, "input_schema": schema}]))
}

#[tokio::test]
async fn responses_name_their_items() {
    let server = mock();
    let user = json!({"role": "user", "content": "Rome?"});
    let call = |id: &str, name: &str| json!({"type": "function_call", "call_id": id, "name": name, "arguments": "{}"});
    let result = |id: &str| json!({"type": "function_call_output", "call_id": id, "output": "Sun"});
    for (input, param) in [
        (json!([user, result("a")]), "input[1]"),
        // Three items are one message of the chat, so places differ from those of messages.
        (
            json!([user, {"role": "assistant", "content": "I ask."}, call("a", "f"), call("b", "f"), result("c")]),
            "input[4].call_id",
        ),
        (
            json!([user, {"role": "assistant", "content": "I ask."}, call("a", "f"), call("b", ""), result("a")]),
            "input[3].name",
        ),
    ] {
        let request = json!({"input": input, "instructions": "Be brief."});
        let error = server.post("/v1/responses", request).await.refused(400);
        assert_eq!(error["param"], param, "{error}");
        let message = error["message"].as_str().unwrap();
        assert!(message.starts_with(param) && !message.contains("messages["), "{message}");
    }
    for (extra, param) in [
        (json!({"tools": tools("no name").0}), "tools[0].name"),
        (
            json!({"tools": tools("f").0, "tool_choice": {"type": "function", "name": "g"}}),
            "tool_choice.name",
        ),
        (json!({"chat_template_kwargs": {"messages": []}}), "chat_template_kwargs.messages"),
        (json!({"temperature": -1}), "temperature"),
    ] {
        let mut request = json!({"input": "Rome?"});
        request.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let error = server.post("/v1/responses", request).await.refused(400);
        assert_eq!(error["param"], param, "{error}");
        assert!(error["message"].as_str().unwrap().contains(param), "{error}");
    }
}

#[tokio::test]
async fn messages_name_their_blocks() {
    let server = mock();
    let user = json!({"role": "user", "content": "Rome?"});
    let call = json!({"role": "assistant", "content": [
        {"type": "text", "text": "I ask."}, {"type": "tool_use", "id": "a", "name": "", "input": {}}]});
    let result = |id: &str| {
        json!({"role": "user", "content": [
            {"type": "text", "text": "Well."}, {"type": "tool_result", "tool_use_id": id, "content": "Sun"}]})
    };
    let mut named = call.clone();
    named["content"][1]["name"] = "f".into();
    let tool = tools("no name").1;
    for (messages, extra, name) in [
        (
            json!([user, {"role": "assistant", "content": "Hm."}, result("a")]),
            json!([]),
            "messages[2].content[1]",
        ),
        (json!([user, named, result("b")]), json!([]), "messages[2].content[1].tool_use_id"),
        (json!([user, call, result("a")]), json!([]), "messages[1].content[1].name"),
        (json!([user]), tool, "tools[0].name"),
    ] {
        for path in ["/v1/messages", "/v1/messages/count_tokens"] {
            let request =
                json!({"messages": messages, "system": "Be brief.", "tools": extra, "max_tokens": 5});
            let answer = server.post(path, request).await;
            assert_eq!(answer.status, 400, "{}", answer.text);
            let body = answer.json();
            let message = body["error"]["message"].as_str().unwrap();
            let words: Vec<&str> = message.trim_matches('`').split([' ', '`']).collect();
            assert_eq!(words[0], name, "{message}");
        }
    }
}

#[tokio::test]
async fn a_prompt_that_does_not_fit_has_the_name_of_its_route() {
    let server = mock_with(MockOptions { context: 64, ..MockOptions::default() }, ServerOptions::default());
    let long = "word ".repeat(90);
    let messages = json!([{"role": "user", "content": long}]);
    for (path, request, param) in [
        ("/v1/completions", json!({"prompt": long}), "prompt"),
        ("/v1/chat/completions", json!({"messages": messages}), "messages"),
        ("/v1/responses", json!({"input": long}), "input"),
        ("/generate", json!({"text": long}), "text"),
        ("/generate", json!({"input_ids": vec![5; 70]}), "input_ids"),
        ("/generate", json!({"input_ids": []}), "input_ids"),
    ] {
        let error = server.post(path, request.clone()).await.refused(400);
        assert_eq!(error["param"], param, "{request}: {error}");
    }
    let params = json!({"max_new_tokens": 3, "min_new_tokens": 5});
    let request = json!({"text": "a", "sampling_params": params});
    let error = server.post("/generate", request).await.refused(400);
    assert_eq!(error["param"], "sampling_params.min_new_tokens", "{error}");
    assert!(error["message"].as_str().unwrap().starts_with("sampling_params.min_new_tokens"), "{error}");
}
