//! The forms that answers can be given, under the names that other servers have for them. A random model says nothing
//! sensible, so whatever has the form has it because it must.

use oscar_engine::{Engine, EngineOptions};
use oscar_kernels::cpu::CpuBackend;
use oscar_server::{ServerOptions, ToolCallFormat};
use serde_json::{Value, json};

use crate::support::{TestServer, tiny, tiny_with, tokenizer};

async fn completion(server: &TestServer<Engine<CpuBackend>>, extra: Value) -> String {
    let mut request = json!({"prompt": "So:", "max_tokens": 60, "seed": 3});
    for (name, value) in extra.as_object().unwrap() {
        request[name] = value.clone();
    }
    let body = server.post("/v1/completions", request).await.ok();
    body["choices"][0]["text"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn names_of_other_servers_are_understood() {
    let server = tiny(1024, EngineOptions::default());
    let yes_no = ["yes", "no"];
    for extra in [
        json!({"guided_choice": yes_no}),
        json!({"guided_regex": "yes|no"}),
        json!({"guided_grammar": "root ::= \"yes\" | \"no\""}),
        json!({"structured_outputs": {"choice": yes_no}}),
        json!({"structured_outputs": {"regex": "yes|no"}}),
        json!({"structured_outputs": {"grammar": "root ::= \"yes\" | \"no\""}}),
        json!({"grammar": "root ::= answer\nanswer ::= \"yes\" | \"no\""}),
    ] {
        let text = completion(&server, extra.clone()).await;
        assert!(yes_no.contains(&text.as_str()), "{extra}: {text}");
    }
    let schema = json!({"type": "integer", "minimum": 5, "maximum": 7});
    for extra in [
        json!({"guided_json": schema}),
        json!({"json_schema": schema}),
        json!({"structured_outputs": {"json": schema}}),
        json!({"response_format": {"type": "json_object", "schema": schema}}),
    ] {
        let text = completion(&server, extra.clone()).await;
        assert!(["5", "6", "7"].contains(&text.trim()), "{extra}: {text}");
    }
    let error =
        server.post("/v1/completions", json!({"prompt": "a", "guided_regex": "(["})).await.refused(400);
    assert_eq!(error["param"], "guided_regex");
}

#[tokio::test]
async fn prompts_of_a_batch_share_their_grammar() {
    let server = tiny(1024, EngineOptions::default());
    let params = |regex: &str| json!({"max_new_tokens": 2, "temperature": 0, "regex": regex});
    let one = server.post("/generate", json!({"text": "q", "sampling_params": params("ab*")})).await.ok();
    let body =
        json!({"text": ["q", "q", "q"], "sampling_params": [params("ab*"), params("ab*"), params("xy*")]});
    let batch = server.post("/generate", body).await.ok();
    assert_eq!((&batch[0]["text"], &batch[1]["text"]), (&one["text"], &one["text"]));
    assert!(batch[2]["text"].as_str().unwrap().starts_with('x'), "{batch}");
    let body = json!({"text": ["q", "q"], "sampling_params": params("ab*")});
    let batch = server.post("/generate", body).await.ok();
    assert_eq!((&batch[0]["text"], &batch[1]["text"]), (&one["text"], &one["text"]));
}

#[tokio::test]
async fn rules_about_tokens_are_kept() {
    let server = tiny(1024, EngineOptions::default());
    let ids = [40, 41, 42];
    let texts = ids.map(|id| tokenizer().token_text(id).unwrap());
    let text = completion(&server, json!({"allowed_token_ids": ids})).await;
    let mut rest = text.as_str();
    while let Some(found) = texts.iter().find(|token| rest.starts_with(token.as_str())) {
        rest = &rest[found.len()..];
    }
    assert!(!text.is_empty() && rest.is_empty(), "{text}");
    let ids: Vec<u32> = (40..43).collect();
    let banned = tokenizer().decode(&[41], false).unwrap();
    let text = completion(&server, json!({"allowed_token_ids": ids, "bad_words": [banned]})).await;
    assert!(!text.is_empty() && !text.contains(&banned), "{text} has {banned}");
    let request = json!({"prompt": "a", "allowed_token_ids": [4_000_000]});
    let error = server.post("/v1/completions", request).await.refused(400);
    assert_eq!(error["param"], "allowed_token_ids");
}

#[tokio::test]
async fn objects_of_tools_and_strict_schemas_are_closed() {
    let options = ServerOptions {
        tool_call_parser: ToolCallFormat::choose("hermes", None).unwrap(),
        ..ServerOptions::default()
    };
    let server = tiny_with(1024, EngineOptions::default(), options);
    let schema = json!({"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["n"]});
    let messages = json!([{"role": "user", "content": "Roll."}]);
    let tool = json!({"type": "function", "function": {"name": "roll", "parameters": schema}});
    let format =
        json!({"type": "json_schema", "json_schema": {"name": "r", "schema": schema, "strict": true}});
    for seed in 0..4 {
        let request =
            json!({"messages": messages, "seed": seed, "max_tokens": 400, "response_format": format});
        let body = server.post("/v1/chat/completions", request).await.ok();
        let object: Value =
            serde_json::from_str(body["choices"][0]["message"]["content"].as_str().unwrap()).unwrap();
        assert_eq!(object.as_object().unwrap().len(), 1, "{object}");
        let request = json!({"messages": messages, "seed": seed, "max_tokens": 400, "tools": [tool],
            "tool_choice": "required", "parallel_tool_calls": false});
        let body = server.post("/v1/chat/completions", request).await.ok();
        let call = &body["choices"][0]["message"]["tool_calls"][0]["function"];
        let arguments: Value = serde_json::from_str(call["arguments"].as_str().expect("a call")).unwrap();
        assert_eq!(arguments.as_object().unwrap().len(), 1, "{arguments}");
    }
}

#[tokio::test]
async fn a_regex_ends_an_answer() {
    let server = tiny(1024, EngineOptions::default());
    let whole = completion(&server, json!({"max_tokens": 40, "ignore_eos": true})).await;
    let letter = whole.chars().filter(char::is_ascii_alphabetic).nth(5).expect("letters");
    let until = completion(&server, json!({"max_tokens": 40, "stop_regex": format!("[{letter}]")})).await;
    let first = whole.find(letter).unwrap();
    assert!(
        until.len() < whole.len() && whole.starts_with(&until) && until.len() > first,
        "{until:?} {whole:?}"
    );
    let sampling =
        json!({"max_new_tokens": 40, "sampling_seed": 3, "stop_regex": ["\\d{9}", format!("[{letter}]")]});
    let body = server.post("/generate", json!({"text": "So:", "sampling_params": sampling})).await.ok();
    assert_eq!((&body["text"], &body["meta_info"]["finish_reason"]["type"]), (&json!(until), &json!("stop")));
    let sampling = json!({"max_new_tokens": 4, "stop_regex": ["("]});
    let error =
        server.post("/generate", json!({"text": "a", "sampling_params": sampling})).await.refused(400);
    assert_eq!(error["param"], "sampling_params.stop_regex");
}

#[tokio::test]
async fn what_follows_a_trigger_has_the_form_of_its_tag() {
    let server = tiny(1024, EngineOptions::default());
    let whole = completion(&server, json!({"max_tokens": 40, "ignore_eos": true})).await;
    let letter = whole.chars().filter(char::is_ascii_alphabetic).nth(3).expect("letters");
    let structure = json!({"begin": format!("{letter}<"), "schema": {"enum": [12345]}, "end": ">"});
    let format = json!({"type": "structural_tag", "triggers": [letter], "structures": [structure]});
    let text = completion(&server, json!({"max_tokens": 60, "response_format": format})).await;
    let mut followed = 0;
    for (at, _) in text.match_indices(letter) {
        // The last one may be cut off.
        let form = format!("{letter}<12345>");
        let rest = &text[at..(at + form.len()).min(text.len())];
        assert!(form.starts_with(rest), "{text}");
        followed += usize::from(rest == form);
    }
    assert!(followed > 0, "{letter} in {text}");
}

#[tokio::test]
async fn only_typical_tokens_are_drawn() {
    let server = tiny(1024, EngineOptions::default());
    let drawn = |extra: Value| completion(&server, extra);
    let plain = drawn(json!({"temperature": 1.0})).await;
    assert_eq!(drawn(json!({"temperature": 1.0, "typical_p": 1.0})).await, plain);
    assert_ne!(drawn(json!({"temperature": 1.0, "typical_p": 0.01})).await, plain);
    let error = server.post("/v1/completions", json!({"prompt": "a", "typical_p": 0})).await.refused(400);
    assert_eq!(error["param"], "typical_p");
}

/// Names that other servers have for a sampler do what ours does, on every route that draws.
#[tokio::test]
async fn samplers_have_the_same_effect_under_all_names() {
    let server = tiny(1024, EngineOptions::default());
    let drawn = |extra: Value| completion(&server, extra);
    let (plain, typical) = (drawn(json!({})).await, drawn(json!({"typical_p": 0.01})).await);
    assert_ne!(plain, typical);
    assert_eq!(drawn(json!({"typ_p": 0.01})).await, typical);
    let penalised = drawn(json!({"repetition_penalty": 1.8})).await;
    assert_ne!(plain, penalised);
    assert_eq!(drawn(json!({"repeat_penalty": 1.8, "repeat_last_n": -1})).await, penalised);
    assert_eq!(drawn(json!({"repeat_penalty": 1.8, "repeat_last_n": 0})).await, plain);
    let sampling = json!({"max_new_tokens": 60, "sampling_seed": 3, "typical_p": 0.01});
    let body = server.post("/generate", json!({"text": "So:", "sampling_params": sampling})).await.ok();
    assert_eq!(body["text"], typical);

    let messages = json!([{"role": "user", "content": "So?"}]);
    for typical_p in [1.0, 0.01] {
        let chat = json!({"messages": messages, "max_tokens": 20, "seed": 3, "typical_p": typical_p});
        let chat = server.post("/v1/chat/completions", chat).await.ok();
        let said = &chat["choices"][0]["message"]["content"];
        let request = json!({"input": messages, "max_output_tokens": 20, "seed": 3, "typical_p": typical_p});
        let response = server.post("/v1/responses", request).await.ok();
        assert_eq!(&response["output"][0]["content"][0]["text"], said);
        let request = json!({"messages": messages, "max_tokens": 20, "seed": 3, "typical_p": typical_p});
        let message = server.post("/v1/messages", request).await.ok();
        assert_eq!(&message["content"][0]["text"], said);
    }

    // What is asked for by one name is listed as by the other.
    for (path, request, other) in [
        ("/v1/completions", json!({"prompt": "So:"}), json!({"logprobs": 3})),
        ("/v1/chat/completions", json!({"messages": messages}), json!({"logprobs": true, "top_logprobs": 3})),
    ] {
        let mut listed = Vec::new();
        for names in [json!({"n_probs": 3}), other] {
            let mut request = request.clone();
            let asked = json!({"max_tokens": 2, "seed": 3});
            for (name, value) in asked.as_object().unwrap().iter().chain(names.as_object().unwrap()) {
                request[name] = value.clone();
            }
            listed.push(server.post(path, request).await.ok()["choices"][0]["logprobs"].clone());
        }
        assert!(listed[0].is_object() && listed[0] == listed[1], "{listed:?}");
    }
}
