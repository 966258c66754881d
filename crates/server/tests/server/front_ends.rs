//! What front ends send: requests that were recorded from them, and those that their documentation has.

use oscar_model::SamplingDefaults;
use serde_json::{Value, json};

use crate::support::{mock, mock_drawing};

/// What limits an answer of a route; the first is given to a request without any.
fn limits(path: &str) -> &'static [&'static str] {
    match path {
        "/v1/responses" => &["max_output_tokens"],
        "/v1/chat/completions" => &["max_tokens", "max_completion_tokens", "n_predict"],
        _ => &["max_tokens"],
    }
}

/// Requests recorded from front ends, which `tools/check-clients` sends to a model: here every field of them is known.
#[tokio::test]
async fn recorded_requests_of_front_ends_are_served() {
    // What they send of samplers must be read, or be fine where the model has settings of its own.
    let server = mock_drawing(SamplingDefaults {
        temperature: Some(0.7),
        top_p: Some(0.9),
        top_k: Some(20),
        min_p: Some(0.1),
        repetition_penalty: Some(1.1),
    });
    let front_ends: Value = serde_json::from_str(include_str!("../python/front_ends.json")).unwrap();
    let mut answered = 0;
    for (name, front_end) in front_ends.as_object().unwrap() {
        for request in front_end["requests"].as_array().unwrap() {
            let (path, mut body) = (request["path"].as_str().unwrap(), request["body"].clone());
            if body.get("model").is_some() {
                body["model"] = "tiny".into();
            }
            // Anthropic's clients have the names of features behind the path.
            let limits = limits(path.split('?').next().unwrap());
            if !limits.iter().any(|limit| body.get(limit).is_some()) {
                body[limits[0]] = 4.into();
            }
            for limit in limits {
                // None of an answer is a length, too: a page has prompts computed ahead.
                if body.get(limit).is_some_and(|most| *most != 0) {
                    body[limit] = 4.into();
                }
            }
            let answer = server.post(path, body).await;
            match request["refused"].as_str() {
                Some(field) => assert_eq!(answer.refused(400)["param"], field, "{name}"),
                None => {
                    assert_eq!(answer.status, 200, "{name} {path}: {}", answer.text);
                    answered += 1;
                }
            }
        }
    }
    assert!(answered > 30, "{answered}");
}

/// Bodies of programs that have not been recorded, as their documentation and sources have them.
#[tokio::test]
async fn front_ends_that_were_not_recorded_are_served() {
    let server = mock();
    let messages = json!([{"role": "system", "content": "s"}, {"role": "user", "content": "Hello"}]);
    let sglang_router = json!({
        "model": "tiny", "messages": messages, "max_tokens": 4, "stream": false, "ignore_eos": false,
        "no_stop_trim": false, "skip_special_tokens": true, "continue_final_message": false,
        "separate_reasoning": true, "stream_reasoning": true, "return_hidden_states": false, "n": 1,
    });
    let openai = json!({
        "model": "tiny", "messages": messages, "max_completion_tokens": 4, "store": true, "service_tier": "flex",
        "metadata": {"k": "v"}, "prompt_cache_key": "k", "safety_identifier": "s", "modalities": ["text"],
        "prediction": {"type": "content", "content": "x"}, "verbosity": "low", "parallel_tool_calls": true,
    });
    for request in [sglang_router, openai] {
        server.post("/v1/chat/completions", request).await.ok();
    }
    let continue_completes = json!({
        "model": "tiny", "prompt": "fn ", "max_tokens": 4, "temperature": 0.01, "top_p": null, "stream": false,
        "frequency_penalty": null, "presence_penalty": null, "stop": ["<fim>", "\n\n"],
    });
    server.post("/v1/completions", continue_completes).await.ok();
    let silly_tavern = json!({
        "model": "tiny", "prompt": "Hello", "max_tokens": 4, "temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0,
        "n": 1, "repetition_penalty": 1, "use_beam_search": false, "length_penalty": 1, "early_stopping": false,
        "stop": ["\n"], "ignore_eos": false, "min_tokens": 0, "skip_special_tokens": true, "mirostat_mode": 0,
        "spaces_between_special_tokens": true, "add_special_tokens": true, "typical": 1, "tfs": 1, "top_a": 0,
        "epsilon_cutoff": 0, "dynatemp_low": 1, "smoothing_factor": 0, "custom_token_bans": "",
        "sampler_priority": ["temperature", "top_p"], "api_type": "vllm", "api_server": "http://x",
    });
    server.post("/v1/completions", silly_tavern).await.ok();
    let native = json!({
        "text": "Hello", "stream": false, "log_metrics": true, "return_logprob": false, "model": "tiny",
        "return_hidden_states": false, "bootstrap_host": "h", "bootstrap_room": 1, "data_parallel_rank": 0,
        "sampling_params": {"max_new_tokens": 2, "spaces_between_special_tokens": true, "stream_interval": 1},
    });
    server.post("/generate", native).await.ok();
}
