//! Several requests at a time, an answer in several choices, and a conversation.
//!
//! `cargo run --release -p oscar-engine --example answers -- MODEL` with a `.gguf` file or a model folder.

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use oscar_engine::{Engine, EngineOptions, Event, GenerateOptions, Request, SamplingOptions, Serve};
use oscar_kernels::cpu::CpuBackend;
use oscar_kernels::cpu::pool::Pool;
use oscar_model::LoadedModel;
use oscar_model::source::ModelPath;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = PathBuf::from(std::env::args().nth(1).ok_or("give a .gguf file or a model folder")?);
    let path = if path.is_dir() { ModelPath::Folder(path) } else { ModelPath::Gguf(path) };
    let backend = Arc::new(CpuBackend::new(Pool::default_threads())?);
    let model = Arc::new(LoadedModel::load(&path, backend)?);
    let engine = Engine::new(Arc::clone(&model), &EngineOptions::default())?;
    println!("{}\n", engine.budget());

    // Submitted together, computed together: each answer is a blocking iterator over its events.
    let options = GenerateOptions { max_tokens: Some(24), ..GenerateOptions::default() };
    let prompts = ["The capital of France is", "Water boils at", "The first prime numbers are"];
    let answers = prompts
        .iter()
        .map(|prompt| {
            let ids = model.tokenizer().encode(prompt, true)?;
            Ok(engine.answer(Request::new(ids, options.clone()))?)
        })
        .collect::<Result<Vec<_>, Box<dyn std::error::Error>>>()?;
    for (prompt, answer) in prompts.iter().zip(answers) {
        println!("{prompt}{}", answer.wait()?[0].text);
    }

    // One prompt, three answers that share its pages. A sink is called on the engine's thread as tokens come.
    let sampling = SamplingOptions { temperature: 0.8, seed: Some(7), ..SamplingOptions::default() };
    let options = GenerateOptions { n: 3, sampling, ..options };
    let ids = model.tokenizer().encode("Once upon a time", true)?;
    let (sender, ends) = std::sync::mpsc::channel();
    let sink = move |event: Event| {
        if let Event::Finished { choice, summary } = event {
            let _ = sender.send(format!("{choice}: {:?}", summary.text));
        }
    };
    let handle = engine.submit(Request::new(ids, options.clone()), Box::new(sink))?;
    ends.iter().take(3).for_each(|end| println!("{end}"));
    drop(handle);

    // A conversation: the next turn repeats what was said and finds it in the prefix tree.
    let options = GenerateOptions { n: 1, ..options };
    let mut history = model.tokenizer().encode("A short poem about the sea:\n", true)?;
    for event in engine.answer(Request::new(&history, options.clone()))? {
        print!("{}", event.text().unwrap_or_default());
        std::io::stdout().flush()?;
        if let Event::Finished { summary, .. } = event {
            history.extend(&summary.tokens);
        }
    }
    history.extend(model.tokenizer().encode("\nAnd one about mountains:\n", false)?);
    let next = engine.answer(Request::new(&history, options))?.wait()?.remove(0);
    println!("\n...\n{}", next.text);
    println!("{} of {} prompt tokens were in the cache", next.cached_tokens, next.prompt_tokens);
    Ok(())
}
