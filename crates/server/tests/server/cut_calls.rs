//! Calls that the limit of tokens cuts off, as every family writes them, of chats, responses and messages, whole
//! and streamed.

use oscar_engine::FinishReason;
use serde_json::{Value, json};

use crate::parsed::{Parrot, parrot_of};
use crate::support::{TEMPLATE, TestServer};

/// How a family begins a call, up to its arguments, and how those begin where they are passed on as they come.
const FAMILIES: [(&str, &str, Option<&str>); 10] = [
    ("hermes", "<tool_call>\n{\"name\": \"weather\", \"arguments\": ", Some("{\"pl")),
    ("llama3", "<|python_tag|>{\"name\": \"weather\", \"parameters\": ", Some("{\"pl")),
    ("granite", "<|tool_call|>[{\"name\": \"weather\", \"arguments\": ", Some("{\"pl")),
    ("phi4-mini", "<|tool_call|>[{\"name\": \"weather\", \"arguments\": ", Some("{\"pl")),
    ("mistral", "[TOOL_CALLS] [{\"name\": \"weather\", \"arguments\": ", Some("{\"pl")),
    ("mistral-v11", "[TOOL_CALLS]weather[ARGS]", Some("{\"pl")),
    ("qwen3_coder", "<tool_call>\n<function=weather>\n", None),
    ("glm", "<tool_call>weather\n", None),
    ("minimax-m2", "<minimax:tool_call>\n<invoke name=\"weather\">\n", None),
    (
        "gpt-oss",
        "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>",
        Some("{\"pl"),
    ),
];

/// A server whose model says something, begins a call and is cut off.
fn server(family: &str, script: &[&'static str]) -> TestServer<Parrot> {
    let reasoning = if family == "gpt-oss" { "gpt-oss" } else { "none" };
    parrot_of(script, FinishReason::Length, TEMPLATE, reasoning, family)
}

fn said(family: &str) -> &'static str {
    if family == "gpt-oss" { "<|channel|>commentary<|message|>I ask. <|end|>" } else { "I ask. " }
}

/// What an answer has of a call: whether there is one, and its arguments.
type Seen = Option<String>;

async fn chat(server: &TestServer<Parrot>) -> [Seen; 2] {
    let parameters = json!({"type": "object", "properties": {"place": {"type": "string"}}});
    let tool = json!({"type": "function", "function": {"name": "weather", "parameters": parameters}});
    let request = |stream: bool| json!({"messages": [{"role": "user", "content": "Rome?"}], "tools": [tool], "stream": stream});
    let body = server.post("/v1/chat/completions", request(false)).await.ok();
    let choice = &body["choices"][0];
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(choice["message"]["content"].as_str().unwrap().trim(), "I ask.", "{choice}");
    let arguments = |call: &Value| call["function"]["arguments"].as_str().map(str::to_owned);
    let calls = choice["message"].get("tool_calls");
    let whole = calls.map(|calls| arguments(&calls[0]).unwrap());

    let events = server.post("/v1/chat/completions", request(true)).await.events();
    let deltas = || events.iter().map(|event| &event["choices"][0]["delta"]);
    let text: String = deltas().filter_map(|delta| delta["content"].as_str()).collect();
    assert_eq!(text.trim(), "I ask.");
    let calls: Vec<&Value> = deltas().filter_map(|delta| delta.get("tool_calls")).collect();
    let streamed = calls.iter().filter_map(|calls| arguments(&calls[0])).collect();
    [whole, (!calls.is_empty()).then_some(streamed)]
}

async fn responses(server: &TestServer<Parrot>) -> [Seen; 2] {
    let tool = json!({"type": "function", "name": "weather", "parameters": {"type": "object"}});
    let request = |stream: bool| json!({"input": "Rome?", "tools": [tool], "stream": stream});
    let body = server.post("/v1/responses", request(false)).await.ok();
    assert_eq!((&body["status"], &body["output"][0]["type"]), (&json!("incomplete"), &json!("message")));
    let call = |body: &Value| {
        let item = body["output"].as_array().unwrap().iter().find(|item| item["type"] == "function_call")?;
        assert_eq!(item["status"], "incomplete");
        Some(item["arguments"].as_str().unwrap().to_owned())
    };
    let events = server.post("/v1/responses", request(true)).await.named_events();
    let last = &events.last().unwrap()["response"];
    let begun = events.iter().any(|event| event["item"]["type"] == "function_call");
    let deltas = events.iter().filter(|event| event["type"] == "response.function_call_arguments.delta");
    let streamed = deltas.map(|event| event["delta"].as_str().unwrap()).collect();
    assert_eq!(call(last), begun.then_some(streamed));
    [call(&body), call(last)]
}

async fn messages(server: &TestServer<Parrot>) -> [Seen; 2] {
    let tool = json!({"name": "weather", "input_schema": {"type": "object"}});
    let request = |stream: bool| json!({"max_tokens": 9, "tools": [tool], "messages": [{"role": "user", "content": "Rome?"}], "stream": stream});
    let body = server.post("/v1/messages", request(false)).await.ok();
    assert_eq!(body["stop_reason"], "max_tokens");
    let blocks = body["content"].as_array().unwrap();
    let whole =
        blocks.iter().find(|block| block["type"] == "tool_use").map(|block| block["input"].to_string());
    let events = server.post("/v1/messages", request(true)).await.named_events();
    let begun = events.iter().any(|event| event["content_block"]["type"] == "tool_use");
    let streamed = events.iter().filter_map(|event| event["delta"]["partial_json"].as_str()).collect();
    [whole, begun.then_some(streamed)]
}

#[tokio::test]
async fn a_call_that_is_cut_off_before_its_arguments_is_none() {
    for (family, head, _) in FAMILIES {
        let server = server(family, &[said(family), head]);
        assert_eq!(chat(&server).await, [None, None], "{family}");
        assert_eq!(responses(&server).await, [None, None], "{family}");
        assert_eq!(messages(&server).await, [None, None], "{family}");
    }
}

#[tokio::test]
async fn arguments_that_are_cut_off_are_a_beginning() {
    for (family, head, begun) in FAMILIES {
        let arguments: &'static str = if begun.is_some() { "{\"pl" } else { "<" };
        let server = server(family, &[said(family), head, arguments]);
        let begun = begun.map(str::to_owned);
        assert_eq!(chat(&server).await, [begun.clone(), begun.clone()], "{family}");
        assert_eq!(responses(&server).await, [begun.clone(), begun.clone()], "{family}");
        // An input is an object, so a whole message has none of it; in a stream it is text.
        assert_eq!(messages(&server).await, [None, begun], "{family}");
    }
}

/// Where a call is demanded, or one has been made, a beginning of a marker is nothing that was said.
#[tokio::test]
async fn markers_that_are_cut_off_are_no_content_of_forced_calls() {
    let parameters = json!({"type": "object", "properties": {"place": {"type": "string"}}});
    let tool = json!({"type": "function", "function": {"name": "weather", "parameters": parameters}});
    let call = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"place\": \"Rome\"}}";
    for (script, calls) in [
        (&["<"][..], 0),
        (&["<tool"], 0),
        (&[call], 1),
        (&[call, "\n<"], 1),
        (&[call, "\n</tool"], 1),
        (&[call, "\n</tool_call>", "\n<tool"], 1),
    ] {
        let server = server("hermes", script);
        for choice in ["required", "auto"] {
            let request = json!({"messages": [{"role": "user", "content": "Rome?"}], "tools": [tool], "tool_choice": choice});
            let body = server.post("/v1/chat/completions", request).await.ok();
            let message = &body["choices"][0]["message"];
            let count = message["tool_calls"].as_array().map_or(0, Vec::len);
            assert_eq!(count, calls, "{script:?}");
            let content = message["content"].as_str().unwrap_or_default();
            let free = choice == "auto" && calls == 0;
            assert_eq!(content, if free { script[0] } else { "" }, "{script:?}");
        }
    }
}
