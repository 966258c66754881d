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

/// A value that switches a sampler off is not passed over where the model has a setting of its own.
#[tokio::test]
async fn neutral_values_do_not_stand_for_the_models_settings() {
    let drawn = SamplingDefaults {
        temperature: Some(0.7),
        top_p: Some(0.9),
        top_k: Some(20),
        min_p: Some(0.1),
        repetition_penalty: Some(1.1),
    };
    let (plain, own) = (mock(), mock_drawing(drawn));
    let messages = json!([{"role": "user", "content": "Hello"}]);
    let [chat, completion, generate] = silent();
    let penalties = [
        ("repetition_penalty", json!(1)),
        ("repeat_penalty", json!(1)),
        ("rep_pen", json!(1)),
        ("repeat_last_n", json!(0)),
    ];
    let of_others = [("min_p", json!(0))].into_iter().chain(penalties.clone()).collect();
    let of_all =
        [("temperature", json!(1)), ("top_p", json!([1.0, 1])), ("top_k", json!(-1)), ("top_k", json!(0))];
    for (path, request, fields) in [
        (chat.0, chat.1.clone(), vec![("rep_pen", json!(1))]),
        (completion.0, completion.1, vec![("rep_pen", json!(1))]),
        ("/v1/responses", json!({"input": "Hello"}), of_others),
        ("/v1/messages", json!({"messages": messages, "max_tokens": 2}), penalties.to_vec()),
        (generate.0, generate.1, of_all.into_iter().chain(penalties).collect()),
        ("/completion", json!({"prompt": "one", "n_predict": 2}), vec![("repetition_penalty", json!(1))]),
    ] {
        for (field, value) in fields {
            let mut request = request.clone();
            request[field] = value;
            plain.post(path, request.clone()).await.ok();
            let answer = own.post(path, request).await;
            assert!(answer.status == 400 && answer.text.contains(field), "{path} {field}: {}", answer.text);
        }
    }
    let params = |params: Value| json!({"text": "a", "sampling_params": params});
    for param in ["rep_pen", "repeat_penalty"] {
        let error = own.post("/generate", params(json!({param: 1}))).await.refused(400);
        assert_eq!(error["param"], format!("sampling_params.{param}"));
    }
    // Beside a field that is read they ask for nothing, and some routes draw no token.
    let mut both = chat.1;
    both["rep_pen"] = 1.into();
    both["repetition_penalty"] = 1.into();
    for (path, request) in [
        (chat.0, both),
        ("/generate", params(json!({"repetition_penalty": 1.2, "repeat_penalty": 1}))),
        ("/completion", json!({"prompt": "a", "repeat_penalty": 1, "repetition_penalty": 1, "n_predict": 2})),
        ("/tokenize", json!({"prompt": "a", "temperature": 1, "top_k": -1, "repetition_penalty": 1})),
        ("/v1/embeddings", json!({"input": "a", "temperature": 1, "top_p": 1})),
    ] {
        own.post(path, request).await.ok();
    }
}

/// `repeat_last_n: 0` is no penalty at all, also where the model has one.
#[tokio::test]
async fn penalties_over_no_tokens_are_off() {
    let penalty = SamplingDefaults { repetition_penalty: Some(1.3), ..SamplingDefaults::default() };
    let server = mock_drawing(penalty);
    for (extra, expected) in [
        (json!({}), [1.3, 0.0, 0.0]),
        (json!({"repeat_last_n": -1, "presence_penalty": 0.5}), [1.3, 0.5, 0.0]),
        (json!({"repeat_last_n": 0}), [1.0, 0.0, 0.0]),
        (
            json!({"repeat_last_n": 0, "repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5}),
            [1.0, 0.0, 0.0],
        ),
    ] {
        let mut request = json!({"prompt": "a", "n_predict": 2});
        request.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let used = server.post("/completion", request).await.ok()["generation_settings"].clone();
        let used =
            ["repeat_penalty", "presence_penalty", "frequency_penalty"].map(|name| used[name].as_f64());
        assert_eq!(used, expected.map(Some), "{extra}");
    }
    let [chat, completion, _] = silent();
    for (path, mut request) in [chat, completion] {
        request["repetition_penalty"] = 1.3.into();
        request["repeat_last_n"] = 64.into();
        assert_eq!(server.post(path, request).await.refused(400)["param"], "repeat_last_n");
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
