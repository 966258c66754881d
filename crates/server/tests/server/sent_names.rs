//! Errors name fields as the client sent them, also where a request is translated before it is checked.

use std::sync::Arc;

use oscar_engine::{
    EngineError, EngineInfo, EngineStats, Event, MockEngine, MockOptions, Request, RequestHandle, Serve, Sink,
};
use oscar_server::{Server, ServerOptions, UnknownFields};
use serde_json::{Value, json};

use crate::support::{TEMPLATE, TestServer, mock, mock_with, served};

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

/// Tools that are left out because they would be the server's still count.
#[tokio::test]
async fn tools_have_the_index_of_the_request() {
    let options = ServerOptions { unknown_fields: UnknownFields::Ignore, ..ServerOptions::default() };
    let server = mock_with(MockOptions::default(), options);
    let messages = json!([{"role": "user", "content": "a"}]);
    let search = json!({"type": "web_search", "name": "search"});
    for bad in ["no name", "f"] {
        let (function, tool) = tools(bad);
        let flat = json!([search, tools("f").0[0], search, function[0]]);
        let error = server.post("/v1/responses", json!({"input": "a", "tools": flat})).await.refused(400);
        assert_eq!(error["param"], "tools[3].name", "{error}");
        let own = json!([search, tools("f").1[0], search, tool[0]]);
        let request = json!({"messages": messages, "max_tokens": 5, "tools": own});
        for path in ["/v1/messages", "/v1/messages/count_tokens"] {
            let answer = server.post(path, request.clone()).await;
            assert!(answer.status == 400 && answer.text.contains("`tools[3].name`"), "{}", answer.text);
        }
    }
    let request = json!({"messages": messages, "max_tokens": 5, "tools": [search, {"name": "f"}]});
    let answer = server.post("/v1/messages", request).await;
    assert!(answer.status == 400 && answer.text.contains("tools[1].input_schema"), "{}", answer.text);
}

/// Fields that have several names.
#[tokio::test]
async fn fields_with_several_names_are_named_as_they_were_sent() {
    let server = mock();
    let messages = json!([{"role": "user", "content": "a"}]);
    let salt = "s".repeat(2000);
    let both = [
        (json!({"typ_p": 2}), "typ_p"),
        (json!({"typical_p": 2, "typ_p": 0.5}), "typical_p"),
        (json!({"repeat_penalty": -1}), "repeat_penalty"),
        (json!({"repetition_penalty": -1, "repeat_penalty": 1}), "repetition_penalty"),
        (json!({"extra_key": salt}), "extra_key"),
        (json!({"cache_salt": salt}), "cache_salt"),
        (json!({"logprobs": true, "top_logprobs": 101}), "top_logprobs"),
        (json!({"n_probs": 101}), "n_probs"),
    ];
    let generate = [
        (json!({"extra_key": salt}), "extra_key"),
        (json!({"return_logprob": true, "top_logprobs_num": 101}), "top_logprobs_num"),
        (json!({"sampling_params": {"seed": 0.5}}), "sampling_params.seed"),
        (json!({"sampling_params": {"sampling_seed": 0.5}}), "sampling_params.sampling_seed"),
        (json!({"sampling_params": {"typical_p": 2}}), "sampling_params.typical_p"),
        (json!({"sampling_params": {"regex": "("}}), "sampling_params.regex"),
        (json!({"sampling_params": {"n": 0}}), "sampling_params.n"),
        (json!({"sampling_params": [{"top_k": -5}], "text": ["a"]}), "sampling_params.top_k"),
    ];
    let completion =
        [(json!({"repeat_penalty": -1}), "repeat_penalty"), (json!({"n_probs": 101}), "n_probs")];
    let far = json!([4_000_000]);
    for (path, request, cases) in [
        ("/v1/chat/completions", json!({"messages": messages}), &both[..]),
        ("/v1/completions", json!({"prompt": "a"}), &both),
        ("/generate", json!({"text": "a"}), &generate),
        ("/completion", json!({"prompt": "a"}), &completion),
        ("/v1/embeddings", json!({}), &[(json!({"input": far}), "input")]),
        ("/generate", json!({}), &[(json!({"input_ids": far}), "input_ids")]),
    ] {
        for (extra, param) in cases {
            let mut request = request.clone();
            request.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
            let error = server.post(path, request).await.refused(400);
            assert_eq!(error["param"], *param, "{path} {extra:.100}: {error}");
            let message = error["message"].as_str().unwrap();
            let other = |name: &str| message.contains(name) && !param.contains(name);
            let others = ["typical_p", "repetition_penalty", "cache_salt", "logit", " logprobs"];
            assert!(!others.into_iter().any(other), "{path}: {message}");
        }
    }
}

/// A field that nobody reads has the name that was sent, which may be that of another field elsewhere.
#[tokio::test]
async fn unread_fields_are_named_as_they_were_sent() {
    let server = mock();
    let messages = json!([{"role": "user", "content": "a"}]);
    for (path, request, param) in [
        ("/generate", json!({"text": "a", "temperature": 0.5}), "temperature"),
        ("/generate", json!({"text": "a", "prompt": "b"}), "prompt"),
        ("/generate", json!({"input_ids": [5], "prompt": "b"}), "prompt"),
        (
            "/generate",
            json!({"text": "a", "sampling_params": {"max_tokens": 5}}),
            "sampling_params.max_tokens",
        ),
        ("/generate", json!({"text": "a", "sampling_params": {"logprobs": 5}}), "sampling_params.logprobs"),
        ("/completion", json!({"prompt": "a", "max_tokens": 5}), "max_tokens"),
        ("/completion", json!({"prompt": "a", "logprobs": 5}), "logprobs"),
        ("/completion", json!({"prompt": "a", "repetition_penalty": 2}), "repetition_penalty"),
        ("/v1/completions", json!({"prompt": "a", "typ_p": 0.5, "typical": 0.5}), "typical"),
        ("/v1/chat/completions", json!({"messages": messages, "prompt": "b"}), "prompt"),
        ("/v1/responses", json!({"input": "a", "max_tokens": 5}), "max_tokens"),
        ("/v1/responses", json!({"input": "a", "messages": messages}), "messages"),
    ] {
        let error = server.post(path, request).await.refused(400);
        assert_eq!(error["param"], param, "{path}: {error}");
        let name = param.rsplit('.').next().unwrap();
        assert!(error["message"].as_str().unwrap().contains(name), "{path}: {error}");
    }
}

/// Fails every answer when it would have finished, with an error about this option.
struct FailsLate(MockEngine, &'static str);

impl Serve for FailsLate {
    fn submit(&self, request: Request, mut sink: Sink) -> Result<RequestHandle, EngineError> {
        let name = self.1;
        let failing = move |event| {
            sink(match event {
                Event::Finished { choice, .. } => {
                    let (value, expected) = ("9".to_owned(), "less".to_owned());
                    let error = EngineError::BadOption { name, value, expected };
                    Event::Failed { choice, error: Arc::new(error) }
                }
                event => event,
            });
        };
        self.0.submit(request, Box::new(failing))
    }

    fn info(&self) -> &EngineInfo {
        self.0.info()
    }

    fn stats(&self) -> EngineStats {
        self.0.stats()
    }

    fn flush(&self) {
        self.0.flush();
    }
}

#[tokio::test]
async fn errors_in_streams_name_the_fields_that_were_sent() {
    let messages = json!([{"role": "user", "content": "a"}]);
    for (path, request, name, sent) in [
        ("/v1/chat/completions", json!({"messages": messages, "max_tokens": 3}), "prompt", "messages"),
        ("/v1/chat/completions", json!({"messages": messages, "typ_p": 0.9}), "typical_p", "typ_p"),
        ("/v1/completions", json!({"prompt": "a", "typ_p": 0.9}), "typical_p", "typ_p"),
        ("/v1/responses", json!({"input": "a"}), "max_tokens", "max_output_tokens"),
        ("/v1/messages", json!({"messages": messages, "max_tokens": 3}), "stop", "stop_sequences"),
        ("/generate", json!({"input_ids": [3]}), "prompt", "input_ids"),
        ("/completion", json!({"prompt": "a", "n_predict": 3}), "max_tokens", "n_predict"),
    ] {
        let engine = Arc::new(FailsLate(MockEngine::new(MockOptions::default()), name));
        let serve = Arc::clone(&engine) as Arc<dyn Serve>;
        let server = Server::new(serve, served(TEMPLATE), ServerOptions::default());
        let server = TestServer { engine, server: Arc::new(server) };
        let told = |text: &str| text.contains(&format!("\"{sent} is 9, expected less\""));
        let whole = server.post(path, request.clone()).await;
        assert!(whole.status == 400 && told(&whole.text), "{path}: {}", whole.text);
        let mut streamed = request;
        streamed["stream"] = true.into();
        let answer = server.post(path, streamed).await;
        let (_, last) = answer.text.trim_end().rsplit_once("data: {").unwrap();
        assert!(answer.status == 200 && told(last), "{path}: {}", answer.text);
    }
}
