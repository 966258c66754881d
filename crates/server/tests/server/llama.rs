//! llama.cpp's own routes, as editors and scripts call them.

use oscar_engine::{EngineOptions, MockOptions};
use oscar_server::ServerOptions;
use serde_json::{Value, json};

use crate::support::{mock, mock_with, tiny, tokenizer};

#[tokio::test]
async fn a_completion_is_told_in_llama_cpps_words() {
    let server = mock();
    let request =
        json!({"prompt": "Hello", "n_predict": 5, "ignore_eos": true, "seed": 1, "return_tokens": true});
    let body = server.post("/completion", request.clone()).await.ok();
    assert_eq!(body["content"].as_str().unwrap().split_whitespace().count(), 5, "{body}");
    assert_eq!((&body["stop"], &body["stop_type"]), (&json!(true), &json!("limit")));
    assert_eq!((&body["tokens_predicted"], &body["prompt"]), (&json!(5), &json!("Hello")));
    assert_eq!(body["tokens"].as_array().unwrap().len(), 5);
    assert_eq!((&body["model"], &body["truncated"]), (&json!("tiny"), &json!(false)));
    assert_eq!(body["generation_settings"]["n_predict"], 5);
    assert_eq!(body["timings"]["predicted_n"], 5);
    assert!(body.get("completion_probabilities").is_none());
    let mut streamed = request.clone();
    streamed["stream"] = true.into();
    let answer = server.post("/completion", streamed).await;
    let events: Vec<Value> = answer
        .text
        .split_terminator("\n\n")
        .map(|block| serde_json::from_str(block.strip_prefix("data: ").unwrap()).unwrap())
        .collect();
    let (last, tokens) = events.split_last().unwrap();
    assert!(tokens.len() == 5 && tokens.iter().all(|event| event["stop"] == false));
    let text: String = tokens.iter().filter_map(|event| event["content"].as_str()).collect();
    assert_eq!(body["content"], text);
    assert_eq!(
        (&last["stop"], &last["content"], &last["stop_type"]),
        (&json!(true), &json!(""), &json!("limit"))
    );
    let word = text.split_whitespace().nth(2).unwrap();
    let stopped = json!({"prompt": "Hello", "ignore_eos": true, "seed": 1, "stop": [word]});
    let body = server.post("/completions", stopped).await.ok();
    assert_eq!((&body["stop_type"], &body["stopping_word"]), (&json!("word"), &json!(word)));
    let many = server.post("/completion", json!({"prompt": ["a", "b"], "n_predict": 1})).await.ok();
    assert_eq!(many.as_array().unwrap().len(), 2);
    assert_eq!(many[1]["index"], 1);
}

#[tokio::test]
async fn settings_have_llama_cpps_names() {
    let server = tiny(512, EngineOptions::default());
    let ask = |extra: Value| {
        let mut request = json!({"prompt": "So:", "n_predict": 6, "temperature": 0, "cache_prompt": true,
            "samplers": ["top_k"], "mirostat": 0, "id_slot": -1, "seed": -1, "n_keep": 0, "model": "gpt-4"});
        for (name, value) in extra.as_object().unwrap() {
            request[name] = value.clone();
        }
        server.post("/completion", request)
    };
    let plain = ask(json!({"return_tokens": true})).await.ok();
    let first = plain["tokens"][0].as_u64().unwrap() as u32;
    // A token that is forbidden by its id, or by its text, does not come.
    let text = tokenizer().token_text(first).unwrap();
    let by_text = tokenizer().encode(&text, false).unwrap() == [first];
    let mut forbidden = vec![json!([[first, false]]), json!({first.to_string(): -1000.0})];
    forbidden.extend(by_text.then(|| json!([[text, -1000]])));
    for bias in forbidden {
        let body = ask(json!({"logit_bias": bias, "return_tokens": true})).await.ok();
        assert_ne!(body["tokens"][0].as_u64().unwrap() as u32, first, "{bias}");
    }
    let body = ask(json!({"n_probs": 3})).await.ok();
    let entry = &body["completion_probabilities"][0];
    assert_eq!((&entry["id"], entry["top_logprobs"].as_array().unwrap().len()), (&json!(first), 3));
    assert_eq!(entry["top_logprobs"][0]["id"], first);
    let body = ask(json!({"grammar": "root ::= \"yes\" | \"no\"", "n_predict": 20})).await.ok();
    assert!(["yes", "no"].contains(&body["content"].as_str().unwrap()), "{body}");
    assert_eq!(body["stop_type"], "eos");
    let body = ask(json!({"json_schema": {"enum": [7]}, "n_predict": 20, "repeat_penalty": 1.3})).await.ok();
    assert_eq!(body["content"].as_str().unwrap().trim(), "7");
    for (extra, param) in [
        (json!({"mirostat": 2}), "mirostat"),
        (json!({"typical_p": 1.5}), "typical_p"),
        (json!({"repeat_penalty": 1.1, "repeat_last_n": 64}), "repeat_last_n"),
        (json!({"logit_bias": [[1]]}), "logit_bias"),
        (json!({"logit_bias": [["a", true]]}), "logit_bias"),
        (json!({"prompt": null}), "prompt"),
        (json!({"n_predict": "many"}), "n_predict"),
        (json!({"repeat_penalty": -1}), "repeat_penalty"),
        (json!({"n_probs": 100_000}), "n_probs"),
    ] {
        assert_eq!(ask(extra).await.refused(400)["param"], param);
    }
}

#[tokio::test]
async fn text_and_tokens_are_converted_in_llama_cpps_form() {
    let server = mock();
    let plain = server.post("/tokenize", json!({"content": "Hello<|im_end|>"})).await.ok();
    let ids = plain["tokens"].as_array().unwrap();
    let pieces =
        server.post("/tokenize", json!({"content": "Hello<|im_end|>", "with_pieces": true})).await.ok();
    let texts: String =
        pieces["tokens"].as_array().unwrap().iter().filter_map(|token| token["piece"].as_str()).collect();
    assert_eq!(texts, "Hello<|im_end|>");
    assert_eq!(pieces["tokens"][0]["id"], ids[0]);
    let split =
        server.post("/tokenize", json!({"content": "Hello<|im_end|>", "parse_special": false})).await.ok();
    assert!(split["tokens"].as_array().unwrap().len() > ids.len(), "{split}");
    let text = server.post("/detokenize", json!({"tokens": ids})).await.ok();
    assert_eq!((&text["content"], &text["text"]), (&json!("Hello<|im_end|>"), &json!("Hello")));
    server.post("/tokenize", json!({"prompt": ["a"], "with_pieces": true})).await.refused(400);
}

#[tokio::test]
async fn clients_find_what_they_ask_about() {
    let server =
        mock_with(MockOptions { max_running: 3, ..MockOptions::default() }, ServerOptions::default());
    let props = server.get("/props").await.ok();
    assert_eq!((&props["total_slots"], &props["model_path"]), (&json!(3), &json!("models/tiny")));
    assert!(props["chat_template"].as_str().unwrap().contains("<|im_start|>"));
    assert_eq!(props["default_generation_settings"]["params"]["temperature"], 1.0);
    assert!(props["default_generation_settings"]["n_ctx"].as_u64() > Some(0));
    let slots = server.get("/slots").await.ok();
    assert_eq!(slots.as_array().unwrap().len(), 3);
    assert!(slots.as_array().unwrap().iter().all(|slot| slot["is_processing"] == false));
    let chat = json!({"messages": [{"role": "user", "content": "Hello"}]});
    let text = server.post("/apply-template", chat).await.ok();
    assert_eq!(text["prompt"], "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n");
    server
        .post("/apply-template", json!({"messages": [{"role": "wizard", "content": "a"}]}))
        .await
        .refused(400);
}

#[tokio::test]
async fn what_ended_an_answer_stays_in_it_when_asked() {
    let server = mock();
    let request = json!({"prompt": "Hello", "max_tokens": 6, "ignore_eos": true, "seed": 1});
    let whole = server.post("/v1/completions", request.clone()).await.ok();
    let text = whole["choices"][0]["text"].as_str().unwrap();
    let word = text.split_whitespace().nth(2).unwrap();
    let end = text.find(word).unwrap() + word.len();
    for name in ["no_stop_trim", "include_stop_str_in_output"] {
        let mut kept = request.clone();
        kept["stop"] = word.into();
        kept[name] = true.into();
        let body = server.post("/v1/completions", kept.clone()).await.ok();
        assert_eq!(body["choices"][0]["text"], text[..end], "{name}");
        kept["stream"] = true.into();
        let events = server.post("/v1/completions", kept).await.events();
        let said: String = events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect();
        assert_eq!(said, text[..end]);
    }
    let params =
        json!({"max_new_tokens": 6, "ignore_eos": true, "seed": 1, "stop": word, "no_stop_trim": true});
    let body = server.post("/generate", json!({"text": "Hello", "sampling_params": params})).await.ok();
    assert_eq!(body["text"], text[..end]);
}
