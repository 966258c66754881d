//! Fields that requests do not have: refused by name, unless they are known to change nothing.

use oscar_engine::MockOptions;
use oscar_server::{ServerOptions, UnknownFields};
use serde_json::{Value, json};

use crate::support::{mock, mock_with};

/// A good request for each route.
fn routes() -> [(&'static str, Value); 11] {
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

/// The error of a request is about this field: `/v1/messages` has only a message.
fn told(path: &str, answer: &crate::support::Answer, field: &str) {
    assert_eq!(answer.status, 400, "{path} {field}: {}", answer.text);
    let error = &answer.json()["error"];
    let name = field.rsplit('.').next().unwrap();
    assert!(error["message"].as_str().unwrap().contains(name), "{path}: {}", answer.text);
    assert!(error["param"] == field || path.starts_with("/v1/messages"), "{path}: {}", answer.text);
}

#[tokio::test]
async fn every_door_refuses_what_it_does_not_know() {
    let server = mock();
    for (path, request) in routes() {
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
            told(path, &server.post(path, with(request.clone(), &json!({field: value}))).await, field);
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
    let [chat, completion, ..] = routes();
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
    for (path, request) in routes() {
        server.post(path, with(request, &neutral)).await.ok();
    }
    let params = with(json!({"max_new_tokens": 2}), &neutral);
    server.post("/generate", json!({"text": "a", "sampling_params": params})).await.ok();
}

/// Clients that know one door send its defaults to another.
#[tokio::test]
async fn neutral_values_of_fields_of_other_doors_are_fine() {
    let server = mock();
    let of_answers = json!({
        "min_p": 0, "min_tokens": 0, "best_of": 1, "include_stop_str_in_output": false, "no_stop_trim": false,
        "separate_reasoning": true, "parallel_tool_calls": true, "skip_special_tokens": true, "ignore_eos": false,
        "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1, "n": 1, "detokenize": true,
        "response_format": {"type": "text"},
    });
    for (path, request) in routes() {
        let fields = with(json!({"stream": false, "temperature": 1, "n": 1}), &of_answers);
        server.post(path, with(request.clone(), &fields)).await.ok();
        let fields = match path {
            // A chat has these, and templates decide about special tokens.
            "/v1/chat/completions" => json!({"echo": false, "logprobs": false, "top_logprobs": 0}),
            "/v1/completions" => json!({"logprobs": 0, "add_special_tokens": true}),
            _ => json!({"echo": false, "logprobs": false, "top_logprobs": 0}),
        };
        server.post(path, with(request.clone(), &fields)).await.ok();
        if !["/v1/chat/completions", "/v1/completions"].contains(&path) {
            told(path, &server.post(path, with(request, &json!({"best_of": 2}))).await, "best_of");
        }
    }
    let params = json!({"max_new_tokens": 2, "detokenize": true});
    server.post("/generate", json!({"text": "a", "sampling_params": params})).await.ok();
}

/// A wrong name within a field is no better than one beside it.
#[tokio::test]
async fn fields_within_forms_of_answers_are_known() {
    let format = json!({"response_format": {"type": "text", "nonsense": 1}});
    let object = json!({"type": "object"});
    let tool = json!({"tools": [{"type": "function", "function": {"name": "f", "parametres": object}}]});
    let flat = json!({"tools": [{"type": "function", "name": "f", "parametres": object}]});
    let own = json!({"tools": [{"name": "f", "input_schema": object, "input_shema": object}]});
    let strict = json!({"type": "json_schema", "name": "n", "schema": object, "strictt": true});
    let pattern = json!({"structured_outputs": {"regex": "[a-z]+", "whitespace_pattern": " ?"}});
    let messages = json!({"messages": [{"role": "user", "content": "Hello"}]});
    let output = json!({"output_config": {"format": {"type": "json_schema", "schema": object, "shcema": 1}}});
    let ignores = ServerOptions { unknown_fields: UnknownFields::Ignore, ..ServerOptions::default() };
    let (strictly, loosely) = (mock(), mock_with(MockOptions::default(), ignores));
    let doors =
        routes().into_iter().chain([("/oscar/cache", messages.clone()), ("/apply-template", messages)]);
    let doors: Vec<(&str, Value)> = doors.collect();
    let chat = doors[0].1["messages"].clone();
    for (path, extra, field) in [
        ("/v1/chat/completions", format.clone(), "response_format.nonsense"),
        ("/v1/completions", format, "response_format.nonsense"),
        ("/v1/chat/completions", tool.clone(), "tools[0].function.parametres"),
        ("/apply-template", tool.clone(), "tools[0].function.parametres"),
        ("/oscar/cache", tool.clone(), "tools[0].function.parametres"),
        ("/tokenize", with(tool, &json!({"prompt": null, "messages": chat})), "tools[0].function.parametres"),
        ("/v1/responses", flat, "tools[0].parametres"),
        ("/v1/responses", json!({"text": {"format": strict}}), "text.format.strictt"),
        ("/v1/messages", own.clone(), "tools[0].input_shema"),
        ("/v1/messages/count_tokens", own, "tools[0].input_shema"),
        ("/v1/messages", output, "output_config.format.shcema"),
        ("/v1/chat/completions", pattern.clone(), "structured_outputs.whitespace_pattern"),
        ("/v1/completions", pattern, "structured_outputs.whitespace_pattern"),
    ] {
        let request = with(doors.iter().find(|(door, _)| *door == path).unwrap().1.clone(), &extra);
        let refused = strictly.post(path, request.clone()).await;
        told(path, &refused, field);
        assert!(refused.text.contains("has no field"), "{}", refused.text);
        // The mock says what no grammar allows, which is an error of another kind.
        let answer = loosely.post(path, request).await;
        assert!(answer.status != 400, "{path} {field}: {}", answer.text);
    }
    // Flags that are off, and what clients are known to send.
    let off = json!({"structured_outputs": {"disable_any_whitespace": false, "whitespace_pattern": null}});
    let eager = json!({"tools": [{"name": "f", "input_schema": object, "eager_input_streaming": true,
        "cache_control": {"type": "ephemeral"}, "defer_loading": false}]});
    for (path, extra) in [("/v1/chat/completions", off), ("/v1/messages", eager)] {
        let request = with(doors.iter().find(|(door, _)| *door == path).unwrap().1.clone(), &extra);
        strictly.post(path, request).await.ok();
    }
}

#[tokio::test]
async fn two_names_of_a_field_must_not_differ() {
    let server = mock();
    let [chat, ..] = routes();
    let params = |params: Value| json!({"text": "a", "sampling_params": params});
    let messages = json!([{"role": "user", "content": "a"}]);
    for (path, body, names) in [
        (chat.0, with(chat.1.clone(), &json!({"typical_p": 0.5, "typ_p": 0.25})), ["typical_p", "typ_p"]),
        (
            chat.0,
            with(chat.1.clone(), &json!({"max_tokens": 2, "n_predict": 3})),
            ["max_tokens", "n_predict"],
        ),
        ("/generate", params(json!({"seed": 1, "sampling_seed": 2})), ["seed", "sampling_seed"]),
        ("/generate", json!({"text": "a", "cache_salt": "a", "extra_key": "b"}), ["cache_salt", "extra_key"]),
        ("/tokenize", json!({"prompt": "a", "messages": messages}), ["prompt", "messages"]),
        ("/tokenize", json!({"prompt": "a", "content": "b"}), ["prompt", "content"]),
        ("/tokenize", json!({}), ["content", "messages"]),
    ] {
        let error = server.post(path, body).await.refused(400);
        let message = error["message"].as_str().unwrap();
        assert!(names.iter().all(|name| message.contains(name)), "{message}");
    }
    for (path, body) in [
        (chat.0, with(chat.1, &json!({"repetition_penalty": 1, "repeat_penalty": 1.5}))),
        ("/generate", params(json!({"seed": 1, "sampling_seed": 1, "max_new_tokens": 1}))),
        ("/tokenize", json!({"prompt": "", "messages": messages})),
        ("/tokenize", json!({"prompt": "a", "messages": [], "content": ""})),
        ("/tokenize", json!({"content": ""})),
    ] {
        server.post(path, body).await.ok();
    }
}

/// What clients send for nothing, at fields that have a type.
#[tokio::test]
async fn empty_and_neutral_values_of_typed_fields_change_nothing() {
    let server = mock();
    let (none, text, list) = (json!({}), json!(""), json!([]));
    let forms = || {
        let names = ["response_format", "json_schema", "guided_json", "structured_outputs", "structural_tag"];
        let empty = names.into_iter().flat_map(|name| [(name, json!({})), (name, json!(""))]);
        empty.chain([("guided_choice", json!([])), ("grammar", json!("")), ("regex", json!(""))])
    };
    let sampling = || {
        [
            ("stop", text.clone()),
            ("stop", list.clone()),
            ("stop_regex", text.clone()),
            ("logit_bias", none.clone()),
            ("cache_salt", text.clone()),
            ("kv_precision", text.clone()),
            ("kv_precision", none.clone()),
            ("bad_words", list.clone()),
            ("allowed_token_ids", list.clone()),
            ("stream_options", none.clone()),
            ("typical_p", json!(1)),
            ("typ_p", json!(1)),
            ("repeat_penalty", json!(1)),
            ("n_probs", json!(0)),
            ("logprobs", json!(false)),
            ("model", text.clone()),
            ("reasoning_format", text.clone()),
            ("suffix", text.clone()),
            ("tools", list.clone()),
            ("tool_choice", text.clone()),
            ("tool_choice", none.clone()),
            ("reasoning_effort", text.clone()),
            ("chat_template_kwargs", none.clone()),
        ]
    };
    let chat = [("logprobs", json!(0)), ("top_logprobs", json!(0)), ("functions", list.clone())];
    let responses = [
        ("text", none.clone()),
        ("text", json!({"format": {}})),
        ("reasoning", json!({"effort": "", "summary": null})),
        ("tool_choice", none.clone()),
        ("tool_choice", text.clone()),
        ("instructions", text.clone()),
        ("conversation", none.clone()),
        ("prompt", none.clone()),
        ("previous_response_id", text.clone()),
        ("truncation", text.clone()),
        ("top_logprobs", json!(0)),
        ("typical_p", json!(1)),
        ("metadata", none.clone()),
        ("kv_precision", text.clone()),
    ];
    let messages = [
        ("thinking", none.clone()),
        ("thinking", json!({"type": ""})),
        ("output_config", json!({"format": {}, "effort": ""})),
        ("tool_choice", none.clone()),
        ("tool_choice", text.clone()),
        ("system", text.clone()),
        ("system", list.clone()),
        ("container", none.clone()),
        ("container", text.clone()),
        ("mcp_servers", list.clone()),
        ("stop_sequences", list.clone()),
        ("typical_p", json!(1)),
        ("kv_precision", text.clone()),
    ];
    let generate = [
        (
            "sampling_params",
            json!({"max_new_tokens": 2, "seed": 1, "json_schema": {}, "structural_tag": "", "regex": "", "stop": ""}),
        ),
        (
            "sampling_params",
            json!({"max_new_tokens": 2, "seed": 1, "typical_p": 1, "json_schema": "", "stop_regex": []}),
        ),
        ("input_ids", list.clone()),
        ("kv_precision", text.clone()),
    ];
    let completion = [
        ("json_schema", none.clone()),
        ("logit_bias", list.clone()),
        ("n_probs", json!(0)),
        ("kv_precision", none.clone()),
    ];
    let embeddings = [("encoding_format", text.clone()), ("pooling", text.clone())];
    for (path, request) in routes() {
        let fields: Vec<(&str, Value)> = match path {
            "/v1/chat/completions" => forms().chain(sampling()).chain(chat.clone()).collect(),
            "/v1/completions" => forms().chain(sampling()).collect(),
            "/v1/responses" => responses.to_vec(),
            "/v1/messages" | "/v1/messages/count_tokens" => messages.to_vec(),
            "/generate" => generate.to_vec(),
            "/completion" => completion.to_vec(),
            "/v1/embeddings" => embeddings.to_vec(),
            _ => Vec::new(),
        };
        // The words of an answer and what it counts, without the names and times of answers.
        let said = |mut body: Value| {
            for name in [
                "id",
                "created",
                "created_at",
                "metadata",
                "output",
                "timings",
                "meta_info",
                "generation_settings",
            ] {
                body.as_object_mut().unwrap().remove(name);
            }
            body
        };
        let seeded = match path {
            "/generate" => with(request, &json!({"sampling_params": {"max_new_tokens": 2, "seed": 1}})),
            "/v1/embeddings" | "/v1/score" | "/tokenize" | "/detokenize" => request,
            _ => with(request, &json!({"seed": 1})),
        };
        let plain = said(server.post(path, seeded.clone()).await.ok());
        for (field, value) in fields {
            let extra = json!({field: value});
            let answer = server.post(path, with(seeded.clone(), &extra)).await;
            assert_eq!(said(answer.ok()), plain, "{path} {extra}");
        }
    }
}

/// Each field that the description has may be null, but for the prompt.
#[tokio::test]
async fn every_typed_field_may_be_null() {
    let server = mock();
    let description: Value = serde_json::from_str(include_str!("../../src/openapi.json")).unwrap();
    let schemas = |path: &str| match path {
        "/v1/chat/completions" => &["AnswerSettings", "ChatRequest"][..],
        "/v1/completions" => &["AnswerSettings", "CompletionRequest"],
        "/v1/responses" => &["ResponsesRequest"],
        "/v1/messages" | "/v1/messages/count_tokens" => &["MessagesRequest"],
        "/generate" => &["GenerateRequest"],
        "/completion" => &["LlamaRequest"],
        "/tokenize" => &["TokenizeRequest"],
        "/detokenize" => &["DetokenizeRequest"],
        "/v1/embeddings" => &["EmbeddingsRequest"],
        _ => &["ScoreRequest"],
    };
    for (path, request) in routes() {
        let schemas = schemas(path).iter().map(|name| &description["components"]["schemas"][name]);
        let parts = schemas.flat_map(|schema| [&schema["properties"], &schema["allOf"][1]["properties"]]);
        let names: Vec<&String> =
            parts.filter_map(Value::as_object).flat_map(|fields| fields.keys()).collect();
        assert!(names.len() > 2, "{path}");
        let mut nulls = request.clone();
        for name in names {
            if request.get(name).is_none() {
                nulls[name] = Value::Null;
            }
        }
        server.post(path, nulls).await.ok();
    }
}

/// Fields within a field are refused by name as those beside it are, and what official clients send there is not.
#[tokio::test]
async fn fields_within_fields_are_refused_too() {
    let cache = json!({"messages": [{"role": "user", "content": "Hello"}]});
    let doors: Vec<(&str, Value)> = routes()
        .into_iter()
        .chain([("/oscar/cache", cache), ("/abort_request", json!({"rid": "r"}))])
        .collect();
    let request = |path: &str| doors.iter().find(|(door, _)| *door == path).unwrap().1.clone();
    let ignoring = ServerOptions { unknown_fields: UnknownFields::Ignore, ..ServerOptions::default() };
    let (server, ignoring) = (mock(), mock_with(MockOptions::default(), ignoring));
    for (path, extra, field) in [
        (
            "/v1/chat/completions",
            json!({"stream_options": {"include_usge": true}}),
            "stream_options.include_usge",
        ),
        ("/v1/completions", json!({"stream_options": {"include_usge": true}}), "stream_options.include_usge"),
        ("/v1/responses", json!({"text": {"fromat": {"type": "json_object"}}}), "text.fromat"),
        ("/v1/responses", json!({"reasoning": {"max_tokens": 9}}), "reasoning.max_tokens"),
        ("/v1/responses", json!({"reasoning": {"effrot": "low"}}), "reasoning.effrot"),
        (
            "/v1/messages",
            json!({"output_config": {"schema": {}, "fromat": {"type": "x"}}}),
            "output_config.fromat",
        ),
        ("/v1/messages", json!({"thinking": {"type": "enabled", "budget": 5}}), "thinking.budget"),
        (
            "/v1/messages/count_tokens",
            json!({"thinking": {"type": "enabled", "budget": 5}}),
            "thinking.budget",
        ),
        ("/oscar/cache", json!({"temprature": 1}), "temprature"),
        ("/abort_request", json!({"abrot_all": true}), "abrot_all"),
    ] {
        let answer = server.post(path, with(request(path), &extra)).await;
        told(path, &answer, field);
        ignoring.post(path, with(request(path), &extra)).await.ok();
    }
    for (path, extra) in [
        (
            "/v1/chat/completions",
            json!({"stream_options": {"include_usage": null, "include_obfuscation": false}}),
        ),
        (
            "/v1/chat/completions",
            json!({"stream_options": {"include_usage": true, "continuous_usage_stats": true}}),
        ),
        (
            "/v1/responses",
            json!({"text": {"verbosity": "low"}, "reasoning": {"summary": "auto", "effort": "low"}}),
        ),
        (
            "/v1/messages",
            json!({"thinking": {"type": "enabled", "budget_tokens": 2000, "display": "omitted"}}),
        ),
        ("/abort_request", json!({"abort_message": "gone"})),
    ] {
        server.post(path, with(request(path), &extra)).await.ok();
    }
}

#[tokio::test]
async fn the_operator_may_have_them_ignored() {
    let options = ServerOptions { unknown_fields: UnknownFields::Ignore, ..ServerOptions::default() };
    let server = mock_with(MockOptions::default(), options);
    for (path, request) in routes() {
        let extra = json!({"temprature": 0.5, "mirostat": 2, "lora_path": "adapter"});
        server.post(path, with(request, &extra)).await.ok();
    }
    // Tools that the server would have to have itself, as Codex and Claude Code send them.
    let parameters = json!({"type": "object", "properties": {}});
    let response = json!({"input": "Hello", "max_output_tokens": 2, "tools": [
        {"type": "web_search"}, {"type": "function", "name": "look", "parameters": parameters},
        {"type": "namespace", "name": "agents", "tools": []},
    ]});
    let message = json!({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2, "tools": [
        {"type": "web_search_20250305", "name": "web_search"}, {"name": "look", "input_schema": parameters},
    ]});
    for (path, request) in [("/v1/responses", response), ("/v1/messages", message)] {
        server.post(path, request.clone()).await.ok();
        let refused = mock().post(path, request).await;
        assert_eq!(refused.status, 400);
        assert!(refused.text.contains("--unknown-fields ignore"), "{}", refused.text);
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
