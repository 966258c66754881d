//! Fields that requests do not have: refused by name, unless they are known to change nothing.

use oscar_engine::MockOptions;
use oscar_server::{ServerOptions, UnknownFields};
use serde_json::{Value, json};

use crate::support::{mock, mock_with};

/// A good request for each door.
fn doors() -> [(&'static str, Value); 11] {
    let messages = json!([{"role": "user", "content": "Hello"}]);
    [
        ("/v1/chat/completions", json!({"messages": messages, "max_tokens": 2})),
        ("/v1/completions", json!({"prompt": "Hello", "max_tokens": 2})),
        ("/v1/responses", json!({"input": "Hello", "max_output_tokens": 2})),
        ("/v1/messages", json!({"messages": messages, "max_tokens": 2})),
        ("/v1/messages/count_tokens", json!({"messages": messages})),
        ("/generate", json!({"text": "Hello", "sampling_params": {"max_new_tokens": 2}})),
        ("/completion", json!({"prompt": "Hello", "n_predict": 2})),
        ("/tokenize", json!({"prompt": "Hello"})),
        ("/detokenize", json!({"tokens": [5]})),
        ("/v1/embeddings", json!({"input": "Hello"})),
        ("/v1/score", json!({"text_1": "Hello", "text_2": " you"})),
    ]
}

fn with(mut request: Value, extra: &Value) -> Value {
    for (name, value) in extra.as_object().unwrap() {
        request[name] = value.clone();
    }
    request
}

/// What the error of a request says: `/v1/messages` has only a message.
fn told(answer: &crate::support::Answer, field: &str) {
    assert_eq!(answer.status, 400, "{field}: {}", answer.text);
    assert!(answer.json()["error"]["message"].as_str().unwrap().contains(field), "{}", answer.text);
}

#[tokio::test]
async fn every_door_refuses_what_it_does_not_know() {
    let server = mock();
    for (path, request) in doors() {
        server.post(path, request.clone()).await.ok();
        for (field, value) in [
            ("temprature", json!(0.5)),
            ("use_beam_search", json!(true)),
            ("tfs_z", json!(0.9)),
            ("mirostat", json!(2)),
            ("dry_multiplier", json!(0.8)),
            ("xtc_probability", json!(0.5)),
            ("custom_logit_processor", json!("code")),
            ("lora_path", json!("adapter")),
            ("chat_template", json!("{{ messages }}")),
            ("documents", json!([{"text": "a"}])),
            ("truncate_prompt_tokens", json!(5)),
            ("functions", json!([{"name": "f"}])),
            ("modalities", json!(["audio"])),
            ("session_params", json!({"id": "s"})),
            ("token_ids_logprob", json!([1])),
        ] {
            told(&server.post(path, with(request.clone(), &json!({field: value}))).await, field);
        }
    }
    let request = json!({"text": "a", "sampling_params": [{"max_new_tokens": 2, "beams": 4}]});
    let error = server.post("/generate", request).await.refused(400);
    assert_eq!(
        (&error["param"], &error["code"]),
        (&json!("sampling_params.beams"), &json!("unknown_parameter"))
    );
}

#[tokio::test]
async fn fields_of_another_door_are_refused_too() {
    let server = mock();
    let [chat, completion, ..] = doors();
    for (path, request, field, value) in [
        (chat.0, &chat.1, "prompt", json!("a")),
        (chat.0, &chat.1, "echo", json!(true)),
        (completion.0, &completion.1, "messages", json!([{"role": "user", "content": "a"}])),
        (completion.0, &completion.1, "tools", json!([{"type": "function", "function": {"name": "f"}}])),
        (completion.0, &completion.1, "tool_choice", json!("required")),
        (completion.0, &completion.1, "chat_template_kwargs", json!({"enable_thinking": true})),
    ] {
        let error = server.post(path, with(request.clone(), &json!({field: value}))).await.refused(400);
        assert_eq!((&error["param"], &error["code"]), (&json!(field), &json!("unsupported_parameter")));
    }
    for extra in [json!({"prompt": ""}), json!({"prompt": null, "echo": false})] {
        server.post(chat.0, with(chat.1.clone(), &extra)).await.ok();
    }
    let neutral = json!({"tools": [], "tool_choice": "none", "messages": [], "chat_template_kwargs": {}});
    server.post(completion.0, with(completion.1.clone(), &neutral)).await.ok();
}

#[tokio::test]
async fn null_empty_and_neutral_values_are_fine_everywhere() {
    let server = mock();
    let neutral = json!({
        "anything": null, "something": [], "nothing": {}, "none": "", "mirostat": 0, "dry_multiplier": 0.0,
        "xtc_probability": 0, "typical_p": 1.0, "cache_prompt": true, "use_beam_search": false, "user": "u",
        "metadata": {"a": "b"}, "service_tier": "auto", "truncate_prompt_tokens": null, "modalities": ["text"],
        "function_call": "auto", "functions": [], "lora_path": null, "top_n_sigma": -1, "log_metrics": true,
    });
    for (path, request) in doors() {
        server.post(path, with(request, &neutral)).await.ok();
    }
    let params = with(json!({"max_new_tokens": 2}), &neutral);
    server.post("/generate", json!({"text": "a", "sampling_params": params})).await.ok();
}

#[tokio::test]
async fn the_operator_may_have_them_ignored() {
    let options = ServerOptions { unknown_fields: UnknownFields::Ignore, ..ServerOptions::default() };
    let server = mock_with(MockOptions::default(), options);
    for (path, request) in doors() {
        let extra = json!({"temprature": 0.5, "mirostat": 2, "lora_path": "adapter"});
        server.post(path, with(request, &extra)).await.ok();
    }
}

#[tokio::test]
async fn messages_may_have_more_than_is_read() {
    let server = mock();
    let messages = json!([
        {"role": "user", "content": "Hello", "name": "ann", "id": "1", "timestamp": 5},
        {"role": "assistant", "content": "Hi", "reasoning_content": "hm", "refusal": null, "annotations": [],
         "audio": null, "function_call": null, "tool_calls": null, "provider_specific_fields": {"a": 1}},
        {"role": "user", "content": [{"type": "text", "text": "And?", "cache_control": {"type": "ephemeral"}}]},
    ]);
    server.post("/v1/chat/completions", json!({"messages": messages, "max_tokens": 2})).await.ok();
}

/// Bodies as front ends make them, with what the user typed cut short.
#[tokio::test]
async fn front_ends_are_served() {
    let server = mock();
    let messages = json!([{"role": "system", "content": "s"}, {"role": "user", "content": "Hello"}]);
    let llama_page = json!({
        "messages": messages, "stream": false, "return_progress": true, "reasoning_format": "auto",
        "temperature": 0.8, "max_tokens": 4, "dynatemp_range": 0, "dynatemp_exponent": 1, "top_k": 40,
        "top_p": 0.95, "min_p": 0.05, "xtc_probability": 0, "xtc_threshold": 0.1, "typ_p": 1,
        "repeat_last_n": 64, "repeat_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0,
        "dry_multiplier": 0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1,
        "samplers": ["top_k", "typ_p", "top_p", "min_p", "temperature"], "backend_sampling": false,
        "timings_per_token": true, "cache_prompt": true, "reasoning_control": true, "sse_ping_interval": 1,
        "max_completion_tokens": -1,
    });
    let open_webui = json!({
        "model": "tiny", "messages": messages, "stream": false, "temperature": 0.7, "top_p": 0.9, "seed": 1,
        "max_tokens": 4, "frequency_penalty": 0, "presence_penalty": 0, "stop": ["x"], "logit_bias": {},
        "user": {"name": "ann", "id": "1", "email": "a@b", "role": "admin"}, "metadata": {"chat_id": "1"},
        "chat_id": "1", "session_id": "2",
    });
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
    let tool = json!({"name": "ls", "description": "d", "parameters": {"type": "object"}, "strict": false});
    let continue_dev = json!({
        "model": "tiny", "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "frequency_penalty": 0,
        "presence_penalty": 0, "stream": false, "stop": ["\n\n"],
        "prediction": {"type": "content", "content": "fn main() {}"},
        "messages": [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": " ",
             "tool_calls": [{"id": "1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}]},
            {"role": "tool", "content": "a.rs", "tool_call_id": "1"},
        ],
        "tools": [{"type": "function", "function": tool}],
    });
    for request in [llama_page, open_webui, sglang_router, openai, continue_dev] {
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
    let codex = json!({
        "model": "tiny", "instructions": "i", "input": "Hello", "tools": [], "tool_choice": "auto", "store": false,
        "parallel_tool_calls": false, "reasoning": null, "stream": false, "include": [], "prompt_cache_key": "k",
        "text": {"verbosity": "low"}, "max_output_tokens": 4, "client_metadata": {"a": "b"}, "max_tool_calls": 3,
    });
    server.post("/v1/responses", codex).await.ok();
    let claude_code = json!({
        "model": "tiny", "max_tokens": 4, "system": [{"type": "text", "text": "s"}], "temperature": 1,
        "messages": [{"role": "user", "content": "Hello"}], "metadata": {"user_id": "u"}, "betas": ["b"],
        "context_management": {"edits": [{"type": "clear_thinking_20251015"}]}, "service_tier": "auto",
    });
    server.post("/v1/messages", claude_code).await.ok();
    let native = json!({
        "text": "Hello", "stream": false, "log_metrics": true, "return_logprob": false, "model": "tiny",
        "return_hidden_states": false, "bootstrap_host": "h", "bootstrap_room": 1, "data_parallel_rank": 0,
        "sampling_params": {"max_new_tokens": 2, "spaces_between_special_tokens": true, "stream_interval": 1},
    });
    server.post("/generate", native).await.ok();
}
