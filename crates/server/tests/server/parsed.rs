//! Reasoning and calls of tools, told apart on their way to the client. The words come from a script.

use std::sync::Arc;

use oscar_engine::{
    EngineError, EngineInfo, EngineStats, Event, FinishReason, MockEngine, MockOptions, Request,
    RequestHandle, Serve, Sink,
};
use oscar_server::{ReasoningFormat, Server, ServerOptions, ToolCallFormat};
use serde_json::{Value, json};

use crate::support::{TEMPLATE, TestServer, served};

/// A mock whose tokens have the texts of a script.
pub(crate) struct Parrot {
    mock: MockEngine,
    script: Vec<&'static str>,
    finish: FinishReason,
}

impl Serve for Parrot {
    fn submit(&self, mut request: Request, mut sink: Sink) -> Result<RequestHandle, EngineError> {
        request.options.max_tokens = Some(self.script.len());
        request.options.ignore_end = true;
        // It says the words of the script, whatever tokens the mock would have to say them with.
        request.filter = None;
        let (script, finish) = (self.script.clone(), self.finish);
        let mut said = vec![0; request.options.n];
        let rewritten = move |mut event: Event| {
            match &mut event {
                Event::Token { choice, token } => {
                    token.text = script[said[*choice]].to_owned();
                    said[*choice] += 1;
                }
                Event::Finished { summary, .. } => {
                    summary.text = script.concat();
                    summary.finish = finish;
                }
                _ => {}
            }
            sink(event);
        };
        self.mock.submit(request, Box::new(rewritten))
    }

    fn info(&self) -> &EngineInfo {
        self.mock.info()
    }

    fn stats(&self) -> EngineStats {
        self.mock.stats()
    }

    fn flush(&self) {}
}

pub(crate) fn parrot(script: &[&'static str]) -> TestServer<Parrot> {
    parrot_with(script, FinishReason::End, TEMPLATE)
}

fn parrot_with(script: &[&'static str], finish: FinishReason, template: &str) -> TestServer<Parrot> {
    parrot_of(script, finish, template, "qwen3", "hermes")
}

pub(crate) fn parrot_of(
    script: &[&'static str],
    finish: FinishReason,
    template: &str,
    reasoning: &str,
    calls: &str,
) -> TestServer<Parrot> {
    let mock = MockEngine::new(MockOptions::default());
    let engine = Arc::new(Parrot { mock, script: script.to_vec(), finish });
    let options = ServerOptions {
        reasoning_parser: ReasoningFormat::choose(reasoning, None).unwrap(),
        tool_call_parser: ToolCallFormat::choose(calls, None).unwrap(),
        ..ServerOptions::default()
    };
    let serve = Arc::clone(&engine) as Arc<dyn Serve>;
    TestServer { engine, server: Arc::new(Server::new(serve, served(template), options)) }
}

fn chat(extra: Value) -> Value {
    let tool = json!({"type": "function", "function": {"name": "weather", "parameters": {"type": "object",
        "properties": {"place": {"type": "string"}}}}});
    let mut request = json!({"messages": [{"role": "user", "content": "Rome?"}], "tools": [tool]});
    for (name, value) in extra.as_object().unwrap() {
        request[name] = value.clone();
    }
    request
}

pub(crate) const SCRIPT: [&str; 12] = [
    "<th",
    "ink>\n",
    "Where",
    " is it?\n",
    "</think>\n\n",
    "I ask. ",
    "<tool_",
    "call>\n{\"name\": \"wea",
    "ther\", \"arguments\": {\"pl",
    "ace\": \"Rome\"}}\n",
    "</tool_call>",
    "",
];

#[tokio::test]
async fn parts_of_a_whole_answer_are_told_apart() {
    let server = parrot(&SCRIPT);
    let body = server.post("/v1/chat/completions", chat(json!({}))).await.ok();
    let choice = &body["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    let message = &choice["message"];
    assert_eq!(message["reasoning_content"], "Where is it?");
    assert_eq!(message["content"].as_str().unwrap().trim(), "I ask.");
    let call = &message["tool_calls"][0];
    assert_eq!((&call["type"], &call["function"]["name"]), (&json!("function"), &json!("weather")));
    let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
    assert_eq!(arguments, json!({"place": "Rome"}));
    assert!(call["id"].as_str().unwrap().starts_with("call_"));
}

#[tokio::test]
async fn parts_of_a_stream_are_told_apart() {
    let server = parrot(&SCRIPT);
    let events = server.post("/v1/chat/completions", chat(json!({"stream": true, "n": 2}))).await.events();
    let mut ids = Vec::new();
    for index in 0..2 {
        let mut seen = (String::new(), String::new(), String::new(), String::new());
        let mut finish = Value::Null;
        for choice in
            events.iter().map(|event| &event["choices"][0]).filter(|choice| choice["index"] == index)
        {
            let delta = &choice["delta"];
            seen.0.push_str(delta["reasoning_content"].as_str().unwrap_or_default());
            seen.1.push_str(delta["content"].as_str().unwrap_or_default());
            let call = &delta["tool_calls"][0];
            assert!(call.is_null() || call["index"] == 0);
            seen.2.push_str(call["function"]["name"].as_str().unwrap_or_default());
            seen.3.push_str(call["function"]["arguments"].as_str().unwrap_or_default());
            ids.extend(call["id"].as_str().map(str::to_owned));
            finish = choice["finish_reason"].clone();
        }
        let (reasoning, content, name, arguments) = seen;
        assert_eq!(
            (reasoning.as_str(), content.trim(), name.as_str()),
            ("Where is it?", "I ask.", "weather")
        );
        assert_eq!(serde_json::from_str::<Value>(&arguments).unwrap(), json!({"place": "Rome"}));
        assert_eq!(finish, "tool_calls");
    }
    assert!(ids.len() == 2 && ids[0] != ids[1], "every call has an id of its own: {ids:?}");
}

#[tokio::test]
async fn what_nobody_asked_for_stays_in_the_answer() {
    let server = parrot(&SCRIPT);
    // llama.cpp has another name for it.
    for (name, value) in [("separate_reasoning", json!(false)), ("reasoning_format", json!("none"))] {
        let request = chat(json!({"tools": null, name: value}));
        let body = server.post("/v1/chat/completions", request).await.ok();
        let message = &body["choices"][0]["message"];
        assert_eq!(message["content"], SCRIPT.concat());
        assert!(message.get("tool_calls").is_none() && message.get("reasoning_content").is_none());
    }
    let none = server.post("/v1/chat/completions", chat(json!({"tool_choice": "none"}))).await.ok();
    assert!(none["choices"][0]["message"]["content"].as_str().unwrap().contains("<tool_call>"));
}

/// An answer as GPT-OSS writes it.
const HARMONY: [&str; 9] = [
    "<|channel|>",
    "analysis<|message|>Where is it?",
    "<|end|><|start|>assistant<|chan",
    "nel|>commentary<|message|>I ask.<|end|>",
    "<|start|>assistant<|channel|>commentary to=functions.wea",
    "ther <|constrain|>json",
    "<|message|>{\"place\":",
    " \"Rome\"}<|call|>",
    "",
];

/// A template of the structure that GPT-OSS has.
fn harmony() -> String {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../model/tests/fixtures/text/templates/");
    std::fs::read_to_string(format!("{folder}harmony.jinja")).unwrap()
}

fn harmony_parrot(script: &[&'static str]) -> TestServer<Parrot> {
    parrot_of(script, FinishReason::End, &harmony(), "gpt-oss", "gpt-oss")
}

#[tokio::test]
async fn messages_in_channels_are_told_apart() {
    let server = harmony_parrot(&HARMONY);
    let body = server.post("/v1/chat/completions", chat(json!({}))).await.ok();
    let choice = &body["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    let message = &choice["message"];
    assert_eq!(
        (&message["reasoning_content"], &message["content"]),
        (&json!("Where is it?"), &json!("I ask."))
    );
    let function = &message["tool_calls"][0]["function"];
    assert_eq!(
        (&function["name"], &function["arguments"]),
        (&json!("weather"), &json!("{\"place\": \"Rome\"}"))
    );

    let events = server.post("/v1/chat/completions", chat(json!({"stream": true}))).await.events();
    let joined = |part: &dyn Fn(&Value) -> Value| -> String {
        let texts = events.iter().map(|event| part(&event["choices"][0]["delta"]));
        texts.filter_map(|text| text.as_str().map(str::to_owned)).collect()
    };
    assert_eq!(joined(&|delta| delta["reasoning_content"].clone()), "Where is it?");
    assert_eq!(joined(&|delta| delta["content"].clone()), "I ask.");
    let arguments = joined(&|delta| delta["tool_calls"][0]["function"]["arguments"].clone());
    assert_eq!(arguments, "{\"place\": \"Rome\"}");

    // Nobody sees markers, whatever was asked for.
    let plain = json!({"tools": null, "separate_reasoning": false});
    let body = server.post("/v1/chat/completions", chat(plain)).await.ok();
    let content = body["choices"][0]["message"]["content"].as_str().unwrap();
    assert_eq!(content, "Where is it?\nI ask.\n{\"place\": \"Rome\"}");
    let tool = json!({"name": "weather", "input_schema": {"type": "object"}});
    let request =
        json!({"max_tokens": 9, "tools": [tool], "messages": [{"role": "user", "content": "Rome?"}]});
    let message = server.post("/v1/messages", request).await.ok();
    let kinds: Vec<_> = message["content"].as_array().unwrap().iter().map(|block| &block["type"]).collect();
    assert_eq!(kinds, ["thinking", "text", "tool_use"], "{message}");
}

/// What was thought before a call is sent back to the model, as its template wants it.
#[tokio::test]
async fn thoughts_before_a_call_go_back_to_the_model() {
    let server = harmony_parrot(&HARMONY);
    let call = json!({"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{\"place\": \"Rome\"}"}});
    let messages = json!([{"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": null, "reasoning_content": "Where is it?", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "Sun"}]);
    let text = rendered(&server, chat(json!({"messages": messages}))).await;
    let thought = "<|start|>assistant<|channel|>analysis<|message|>Where is it?<|end|>";
    let called = "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>";
    assert!(text.contains(&format!("{thought}{called}")), "{text}");
    assert!(
        text.ends_with("to=assistant<|channel|>commentary<|message|>\"Sun\"<|end|><|start|>assistant"),
        "{text}"
    );
}

/// The text of a chat as the model gets it.
async fn rendered<E>(server: &TestServer<E>, chat: Value) -> String {
    let tokens = server.post("/tokenize", chat).await.ok()["tokens"].clone();
    let text = server.post("/detokenize", json!({"tokens": tokens, "skip_special_tokens": false})).await.ok();
    text["text"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn a_call_that_was_cut_off_is_neither_markup_nor_empty() {
    let before = ["I ask. ", "<tool_call>\n", "{\"name\": \"wea"];
    let inside = ["I ask. ", "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"pl", "ace\": \"Ro"];
    let marker = ["I ask. ", "<tool_", "call"];
    for (script, arguments) in [(before, None), (marker, None), (inside, Some("{\"place\": \"Ro"))] {
        let server = parrot_with(&script, FinishReason::Length, TEMPLATE);
        let body = server.post("/v1/chat/completions", chat(json!({}))).await.ok();
        let choice = &body["choices"][0];
        assert_eq!(choice["finish_reason"], "length");
        assert_eq!(choice["message"]["content"].as_str().unwrap().trim(), "I ask.", "{choice}");
        assert_eq!(choice["message"]["tool_calls"][0]["function"]["arguments"].as_str(), arguments);
        let events = server.post("/v1/chat/completions", chat(json!({"stream": true}))).await.events();
        let said = events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str());
        assert_eq!(said.collect::<String>().trim(), "I ask.");
        let tool = json!({"name": "weather", "input_schema": {"type": "object"}});
        let request =
            json!({"max_tokens": 9, "tools": [tool], "messages": [{"role": "user", "content": "Rome?"}]});
        let message = server.post("/v1/messages", request).await.ok();
        assert_eq!(message["stop_reason"], "max_tokens");
        let blocks = message["content"].as_array().unwrap();
        assert!(blocks.len() == 1 && blocks[0]["text"].as_str().unwrap().trim() == "I ask.", "{message}");
    }
}

#[tokio::test]
async fn tools_and_calls_do_not_vanish_from_a_prompt() {
    let plain = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}";
    let call = json!({"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{\"place\": \"Rome\"}"}});
    let after = json!([{"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "Sun"}]);
    // Where it is known how the model writes calls, they are described and written as text.
    let server = parrot_with(&SCRIPT, FinishReason::End, plain);
    let text = rendered(&server, chat(json!({"messages": after}))).await;
    assert!(text.starts_with("system: ") && text.contains("\"place\":{\"type\":\"string\"}"), "{text}");
    assert!(
        text.contains("assistant: <tool_call>\n{\"name\": \"weather\", \"arguments\": {\"place\":\"Rome\"}}")
    );
    let body = server.post("/v1/chat/completions", chat(json!({"messages": after}))).await.ok();
    assert_eq!(body["choices"][0]["finish_reason"], "tool_calls");
    // Where it is not, the request is refused.
    let engine = Arc::new(MockEngine::new(MockOptions::default()));
    let server = Server::new(engine.clone(), served(plain), ServerOptions::default());
    let silent = TestServer { engine, server: Arc::new(server) };
    let error = silent.post("/v1/chat/completions", chat(json!({}))).await.refused(400);
    assert_eq!(error["param"], "tools");
    assert!(error["message"].as_str().unwrap().contains("--tool-call-parser"), "{error}");
    let error = silent.post("/v1/chat/completions", json!({"messages": after})).await.refused(400);
    assert_eq!(error["param"], "messages[1].tool_calls");
}
