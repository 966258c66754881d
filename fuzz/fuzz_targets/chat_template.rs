//! A chat template of any text is refused, or renders or fails within its limits.

#![no_main]

use std::time::SystemTime;

use libfuzzer_sys::fuzz_target;
use oscar_model::text::{ChatTemplate, RenderOptions, TextError};

fuzz_target!(|bytes: &[u8]| {
    let Ok(source) = std::str::from_utf8(bytes) else { return };
    let template = match ChatTemplate::from_source(source) {
        Ok(template) => template,
        Err(error) => return assert!(!error.to_string().contains('\n'), "{error}"),
    };
    let messages = [
        serde_json::json!({"role": "system", "content": "Be <b>brief</b>.\n"}),
        serde_json::json!({"role": "user", "content": [{"type": "text", "text": "é 日本 '\""}]}),
        serde_json::json!({"role": "assistant", "content": null, "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": {"x": 1.5, "y": [true, null]}}}
        ]}),
    ];
    let tools = [serde_json::json!({"type": "function", "function": {"name": "f", "parameters": {}}})];
    let options = RenderOptions {
        tools: Some(&tools),
        add_generation_prompt: true,
        bos_token: "<s>",
        eos_token: "</s>",
        now: Some(SystemTime::UNIX_EPOCH),
        ..RenderOptions::default()
    };
    match template.render(&messages, &options) {
        // The budget of one render, and the literal text that fuel allows.
        Ok(text) => assert!(text.len() <= 5 << 30),
        // What a template says of itself may have lines.
        Err(TextError::TemplateRefused { .. }) => {}
        Err(error) => {
            let message = error.to_string();
            assert!(!message.contains('\n') && !message.contains("unexpectedly"), "{message}");
        }
    }
});
