//! Filters in a real engine: a model without training says valid JSON, in several choices at once.

use std::path::Path;
use std::sync::Arc;

use oscar_engine::{Engine, EngineOptions, FinishReason, GenerateOptions, Request, SamplingOptions, Serve};
use oscar_kernels::cpu::CpuBackend;
use oscar_model::LoadedModel;
use oscar_model::source::ModelPath;
use serde_json::{Value, json};

use super::testing::wrong;
use super::{Constraint, ForcedCalls, GrammarFactory};
use crate::parse::{Message, Tool, ToolCallFormat, ToolCallParser};

fn model() -> Arc<LoadedModel<CpuBackend>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures/models/qwen3");
    let backend = Arc::new(CpuBackend::new(1).unwrap());
    Arc::new(LoadedModel::load(&ModelPath::Folder(folder), backend).unwrap())
}

fn options(seed: u64) -> GenerateOptions {
    let sampling = SamplingOptions { temperature: 1.0, seed: Some(seed), ..SamplingOptions::default() };
    GenerateOptions { max_tokens: Some(200), n: 3, sampling, ..GenerateOptions::default() }
}

#[test]
fn an_untrained_model_says_what_it_may() {
    let model = model();
    let factory = GrammarFactory::new(model.tokenizer()).unwrap();
    let engine = Engine::new(Arc::clone(&model), &EngineOptions::default()).unwrap();
    let schema = json!({"type": "object", "properties": {
        "name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    }, "required": ["name", "age", "tags"], "additionalProperties": false});
    let mut seen = Vec::new();
    for seed in 0..4 {
        let filter = Some(factory.json_schema(&schema).unwrap());
        let request = Request { filter, ..Request::new([5, 6, 7], options(seed * 10)) };
        for summary in engine.answer(request).unwrap().wait().unwrap() {
            assert_eq!(summary.finish, FinishReason::End);
            let value: Value = serde_json::from_str(&summary.text).unwrap();
            assert_eq!(wrong(&value, &schema, &schema), None, "{}", summary.text);
            seen.push(summary.text);
        }
    }
    seen.sort();
    seen.dedup();
    assert!(seen.len() > 6, "draws differ: {seen:?}");
}

#[test]
fn an_untrained_model_calls_a_tool() {
    let model = model();
    let factory = GrammarFactory::new(model.tokenizer()).unwrap();
    let engine = Engine::new(Arc::clone(&model), &EngineOptions::default()).unwrap();
    let parameters = json!({"type": "object", "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["days"], "additionalProperties": false});
    let tools = [Tool { name: "forecast".to_owned(), parameters, strict: true }];
    // This vocabulary has no line break, which the layouts with markers need.
    let format = ToolCallFormat::choose("llama3", None).unwrap().unwrap();
    let forced = ForcedCalls { format, tools: &tools, name: Some("forecast"), parallel: false };
    let filter = Some(factory.filter(&Constraint::Calls(forced), None).unwrap());
    let request = Request { filter, ..Request::new([5, 6, 7], options(1)) };
    for summary in engine.answer(request).unwrap().wait().unwrap() {
        let mut parser = ToolCallParser::new(format, tools.to_vec().into(), "");
        let mut message = Message::default();
        message.extend(parser.push(&summary.text));
        message.extend(parser.finish());
        assert_eq!(message.content, "");
        assert_eq!(message.tool_calls.len(), 1, "{}", summary.text);
        let arguments: Value = serde_json::from_str(&message.tool_calls[0].arguments).unwrap();
        assert!((1..=9).contains(&arguments["days"].as_i64().unwrap()));
    }
}
