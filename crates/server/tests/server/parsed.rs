//! Reasoning and calls of tools, told apart on their way to the client. The words come from a script.

use std::sync::Arc;

use oscar_engine::{
    EngineError, EngineInfo, EngineStats, Event, MockEngine, MockOptions, Request, RequestHandle, Serve, Sink,
};
use oscar_server::{ReasoningFormat, Server, ServerOptions, ToolCallFormat};
use serde_json::{Value, json};

use crate::support::{House, TEMPLATE, served};

/// A mock whose tokens have the texts of a script.
pub(crate) struct Parrot {
    mock: MockEngine,
    script: Vec<&'static str>,
}

impl Serve for Parrot {
    fn submit(&self, mut request: Request, mut sink: Sink) -> Result<RequestHandle, EngineError> {
        request.options.max_tokens = Some(self.script.len());
        request.options.ignore_end = true;
        let script = self.script.clone();
        let mut said = vec![0; request.options.n];
        let rewritten = move |mut event: Event| {
            match &mut event {
                Event::Token { choice, token } => {
                    token.text = script[said[*choice]].to_owned();
                    said[*choice] += 1;
                }
                Event::Finished { summary, .. } => {
                    summary.text = script.concat();
                    summary.finish = oscar_engine::FinishReason::End;
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

pub(crate) fn parrot(script: &[&'static str]) -> House<Parrot> {
    let engine = Arc::new(Parrot { mock: MockEngine::new(MockOptions::default()), script: script.to_vec() });
    let options = ServerOptions {
        reasoning_parser: ReasoningFormat::choose("qwen3", None).unwrap(),
        tool_call_parser: ToolCallFormat::choose("hermes", None).unwrap(),
        ..ServerOptions::default()
    };
    let serve = Arc::clone(&engine) as Arc<dyn Serve>;
    House { engine, server: Arc::new(Server::new(serve, served(TEMPLATE), options)) }
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
    let house = parrot(&SCRIPT);
    let body = house.post("/v1/chat/completions", chat(json!({}))).await.ok();
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
    let house = parrot(&SCRIPT);
    let events = house.post("/v1/chat/completions", chat(json!({"stream": true, "n": 2}))).await.events();
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
    let house = parrot(&SCRIPT);
    let request = chat(json!({"tools": null, "separate_reasoning": false}));
    let body = house.post("/v1/chat/completions", request).await.ok();
    let message = &body["choices"][0]["message"];
    assert_eq!(message["content"], SCRIPT.concat());
    assert!(message.get("tool_calls").is_none() && message.get("reasoning_content").is_none());
    let none = house.post("/v1/chat/completions", chat(json!({"tool_choice": "none"}))).await.ok();
    assert!(none["choices"][0]["message"]["content"].as_str().unwrap().contains("<tool_call>"));
}
