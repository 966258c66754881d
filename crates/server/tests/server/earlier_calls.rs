//! Calls of earlier messages are in the prompt whatever the template does with them, or the chat is refused.

use std::sync::Arc;

use oscar_engine::{MockEngine, MockOptions};
use oscar_server::{Server, ServerOptions, ToolCallFormat};
use serde_json::{Value, json};

use crate::support::{TestServer, served};

/// A template of the structure that DeepSeek-R1's has: calls are written where there is no content at all, with arguments
/// that are text.
const DEEPSEEK: &str = "{%- for message in messages %}{%- if message['role'] == 'user' %}\
    {{- '<｜User｜>' + message['content'] }}{%- endif %}\
    {%- if message['role'] == 'assistant' and message['content'] is none %}\
    {%- for tool in message['tool_calls'] %}\
    {{- '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\n```json\n' + tool['function']['arguments'] + '\n```<｜tool▁call▁end｜>' }}\
    {%- endfor %}{%- endif %}\
    {%- if message['role'] == 'assistant' and message['content'] is not none %}\
    {{- '<｜Assistant｜>' + message['content'] + '<｜end▁of▁sentence｜>' }}{%- endif %}\
    {%- if message['role'] == 'tool' %}{{- '<｜tool▁output▁begin｜>' + message['content'] }}{%- endif %}\
    {%- endfor -%}{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}";

fn server(template: &str, calls: &str) -> TestServer<MockEngine> {
    let tool_call_parser = ToolCallFormat::choose(calls, Some(template)).unwrap();
    let options = ServerOptions { tool_call_parser, ..ServerOptions::default() };
    let engine = Arc::new(MockEngine::new(MockOptions::default()));
    let server = Server::new(engine.clone(), served(template), options);
    TestServer { engine, server: Arc::new(server) }
}

fn published(name: &str) -> String {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../model/tests/fixtures/text/templates/");
    std::fs::read_to_string(format!("{folder}{name}.jinja")).unwrap()
}

async fn prompt(server: &TestServer<MockEngine>, messages: &Value) -> String {
    let body = server.post("/apply-template", json!({"messages": messages})).await.ok();
    body["prompt"].as_str().unwrap().to_owned()
}

/// A message of the assistant with calls in it, and their results.
fn called(content: Value, places: &[&str]) -> Value {
    let call = |(index, place): (usize, &&str)| {
        let function = json!({"name": "weather", "arguments": json!({"place": place}).to_string()});
        json!({"id": format!("call0000{index}"), "type": "function", "function": function})
    };
    let calls: Vec<Value> = places.iter().enumerate().map(call).collect();
    let result = |(index, place): (usize, &&str)| json!({"role": "tool", "tool_call_id": format!("call0000{index}"), "content": format!("sun in {place}")});
    let mut messages = vec![
        json!({"role": "user", "content": "Where?"}),
        json!({"role": "assistant", "content": content, "tool_calls": calls}),
    ];
    messages.extend(places.iter().enumerate().map(result));
    messages.into()
}

#[tokio::test]
async fn calls_are_written_where_the_template_asks_for_no_content() {
    let server = server(DEEPSEEK, "none");
    let call = |place: &str| {
        format!(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{{\"place\":\"{place}\"}}\n```<｜tool▁call▁end｜>"
        )
    };
    let (rome, oslo) = (call("Rome"), call("Oslo"));
    let rest = "<｜tool▁output▁begin｜>sun in Rome<｜tool▁output▁begin｜>sun in Oslo<｜Assistant｜><think>\n";
    for content in [Value::Null, "".into()] {
        let text = prompt(&server, &called(content, &["Rome", "Oslo"])).await;
        assert_eq!(text, format!("<｜User｜>Where?{rome}{oslo}{rest}"));
    }
    // What was said before a call is there too.
    let text = prompt(&server, &called("I ask.".into(), &["Rome", "Oslo"])).await;
    assert_eq!(text, format!("<｜User｜>Where?<｜Assistant｜>I ask.<｜end▁of▁sentence｜>{rome}{oslo}{rest}"));
}

#[tokio::test]
async fn every_one_of_parallel_calls_is_written() {
    let text =
        prompt(&server(&published("harmony"), "auto"), &called("I ask.".into(), &["Rome", "Oslo"])).await;
    let call = |place: &str| {
        format!(
            "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{{\"place\": \"{place}\"}}<|call|>\
             <|start|>functions.weather to=assistant<|channel|>commentary<|message|>\"sun in {place}\"<|end|>"
        )
    };
    let expected = format!(
        "<|start|>assistant<|channel|>analysis<|message|>I ask.<|end|>{}{}<|start|>assistant",
        call("Rome"),
        call("Oslo")
    );
    assert!(text.ends_with(&expected), "{text}");
    for name in ["qwen3", "glm-4.6", "llama-3.2", "mistral-nemo", "minimax-m2", "granite-3.2", "phi-4-mini"] {
        let text = prompt(&server(&published(name), "auto"), &called(Value::Null, &["Rome", "Oslo"])).await;
        for place in ["Rome", "Oslo"] {
            let sun = format!("sun in {place}");
            let (called, answered) = (text.find(place).unwrap(), text.find(&sun).unwrap());
            assert!(called < answered && text.matches(place).count() == 2, "{name}: {text}");
        }
        assert!(text.matches("weather").count() >= 2, "{name}: {text}");
    }
}

/// A template that only mentions calls is one that knows none.
#[tokio::test]
async fn calls_that_the_template_leaves_out_are_written_or_refused() {
    let silent = "{% for message in messages %}{% if message.tool_calls is defined %}{% endif %}\
        {{ message.role }}: {{ message.content }}\n{% endfor %}";
    let messages = called(Value::Null, &["Rome"]);
    let text = prompt(&server(silent, "hermes"), &messages).await;
    assert!(
        text.contains("assistant: <tool_call>\n{\"name\": \"weather\", \"arguments\": {\"place\":\"Rome\"}}")
    );
    let error = server(silent, "none").post("/v1/chat/completions", json!({"messages": messages})).await;
    assert_eq!(error.refused(400)["param"], "messages[1].tool_calls");

    // One that writes calls in some chats and not in this one.
    let moody = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n\
        {% if message.tool_calls and messages[0].content != 'Where?' %}{{ message.tool_calls | tojson }}{% endif %}{% endfor %}";
    let server = server(moody, "hermes");
    let error = server.post("/v1/chat/completions", json!({"messages": messages})).await.refused(400);
    assert_eq!(error["param"], "messages[1].tool_calls");
    assert!(error["message"].as_str().unwrap().contains("leaves some of them out"), "{error}");
    let items = json!([{"role": "user", "content": "Where?"},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "sun"}]);
    let error = server.post("/v1/responses", json!({"input": items})).await.refused(400);
    assert_eq!(error["param"], "input[1]");
}
