//! Loads a model, settles a 2-bit cache for it, and streams an answer: `embed [MODEL [QUESTION]]`.

use std::io::Write;
use std::sync::Arc;

use oscar_engine::{Engine, EngineOptions, GenerateOptions, KvOptions, Request, Serve};
use oscar_kernels::cpu::{CpuBackend, pool::Pool};
use oscar_model::ModelFiles;
use oscar_model::source::{FetchPolicy, Silent, resolve};
use oscar_rotations::{CacheOptions, CachePlan, CacheType, ModelIdentity};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let name = arguments.next().unwrap_or_else(|| "smollm2".to_owned());
    let question = arguments.next().unwrap_or_else(|| "Why is the sky blue?".to_owned());

    let files = ModelFiles::open(&resolve(&name, FetchPolicy::Allow, &Silent)?)?;
    let identity = ModelIdentity::of(&name, &files)?;
    let model = Arc::new(files.load(Arc::new(CpuBackend::new(Pool::default_threads())?))?);

    let wanted = CacheOptions { dtype: CacheType::Int2, ..CacheOptions::default() };
    let plan = CachePlan::settle(&model, &identity, &wanted)?;
    eprintln!("cache: {}, {}", plan.kind, plan.source);

    let kv = KvOptions { codec: plan.codec, ..KvOptions::default() };
    let engine = Engine::new(Arc::clone(&model), &EngineOptions { kv, ..EngineOptions::default() })?;
    let messages = [serde_json::json!({"role": "user", "content": question})];
    let prompt = model.encode_chat(&messages).map_err(|error| error.to_string())?;
    let options = GenerateOptions { max_tokens: Some(64), new_text: true, ..GenerateOptions::default() };
    for event in engine.answer(Request::new(prompt, options))? {
        print!("{}", event.text().unwrap_or_default());
        std::io::stdout().flush()?;
    }
    println!();
    Ok(())
}
