//! How answers are drawn when a request does not say.

use oscar_model::SamplingDefaults;
use serde_json::{Value, json};

use crate::support::{mock, mock_drawing};

/// Everything that asks for an answer, without a word about drawing.
fn silent() -> [(&'static str, Value); 3] {
    let messages = json!([{"role": "user", "content": "Hello"}]);
    [
        ("/v1/chat/completions", json!({"messages": messages, "max_tokens": 20})),
        ("/v1/completions", json!({"prompt": "one two", "max_tokens": 20})),
        ("/generate", json!({"text": "one two", "sampling_params": {"max_new_tokens": 20}})),
    ]
}

/// What was said.
fn said(body: &Value) -> Value {
    match body.get("choices") {
        Some(choices) => json!([choices[0]["text"], choices[0]["message"]["content"]]),
        None => body["text"].clone(),
    }
}

#[tokio::test]
async fn the_models_settings_hold_for_requests_that_make_none() {
    let greedy = mock_drawing(SamplingDefaults { temperature: Some(0.0), ..SamplingDefaults::default() });
    let plain = mock();
    for (path, request) in silent() {
        let first = said(&greedy.post(path, request.clone()).await.ok());
        assert_eq!(said(&greedy.post(path, request.clone()).await.ok()), first, "{path}");
        // Without settings of the model, an answer is drawn, and no two are the same.
        let drawn = said(&plain.post(path, request.clone()).await.ok());
        assert_ne!(said(&plain.post(path, request.clone()).await.ok()), drawn, "{path}");
        // The request wins.
        let mut warm = request;
        if path == "/generate" {
            warm["sampling_params"]["temperature"] = 1.into();
        } else {
            warm["temperature"] = 1.into();
        }
        let drawn = said(&greedy.post(path, warm.clone()).await.ok());
        assert_ne!(said(&greedy.post(path, warm).await.ok()), drawn, "{path}");
    }
}

#[tokio::test]
async fn the_settings_are_told() {
    let server = mock_drawing(SamplingDefaults {
        temperature: Some(0.6),
        top_k: Some(20),
        top_p: Some(0.95),
        ..SamplingDefaults::default()
    });
    for path in ["/get_model_info", "/model_info"] {
        let told = server.get(path).await.ok()["preferred_sampling_params"].clone();
        assert_eq!(told, json!({"temperature": 0.6, "top_p": 0.95, "top_k": 20}));
    }
    assert_eq!(mock().get("/model_info").await.ok()["preferred_sampling_params"], Value::Null);
}
