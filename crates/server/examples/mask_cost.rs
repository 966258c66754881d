//! What constrained answers cost: `mask_cost MODEL.gguf` prints the time to take a vocabulary, to compile constraints,
//! and to compute the tokens that may come next while random answers are drawn.

use std::time::{Duration, Instant};

use oscar_engine::TokenMask;
use oscar_model::files::gguf::Gguf;
use oscar_model::text::Tokenizer;
use oscar_random::Random;
use oscar_server::{Constraint, ForcedCalls, GrammarFactory, Tool, ToolCallFormat};
use serde_json::json;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("usage: mask_cost MODEL.gguf")?;
    let tokenizer = Tokenizer::from_gguf(&Gguf::open(path.as_ref())?)?;
    let start = Instant::now();
    let factory = GrammarFactory::new(&tokenizer)?;
    println!("{} tokens taken in {:.0?}", tokenizer.vocab_size(), start.elapsed());

    let person = json!({"type": "object", "properties": {
        "name": {"type": "string"}, "age": {"type": "integer"},
        "address": {"type": "object", "properties": {"street": {"type": "string"}, "zip": {"type": "string"}}},
        "tags": {"type": "array", "items": {"type": "string"}},
    }, "required": ["name", "age", "address", "tags"]});
    let words: Vec<String> = (0..2000).map(|index| format!("value number {index}")).collect();
    let listed = json!({"enum": words});
    let tools = [Tool { name: "store_person".to_owned(), parameters: person.clone(), strict: true }];
    let format = ToolCallFormat::choose("hermes", None)?.ok_or("the format is known")?;
    let forced = ForcedCalls { format, tools: &tools, name: None, parallel: true };
    let cases = [
        ("json_object", Constraint::JsonObject, None),
        ("json_schema", Constraint::JsonSchema(&person), None),
        ("json_schema after reasoning", Constraint::JsonSchema(&person), Some("</think>")),
        ("enum of 2000", Constraint::JsonSchema(&listed), None),
        ("regex", Constraint::Regex(r"(\w+ ){3,9}\d{4}-\d{2}"), None),
        ("forced call", Constraint::Calls(forced), None),
    ];
    println!("{:28} {:>9} {:>7} {:>9} {:>9} {:>9}", "constraint", "compile", "masks", "mean", "p99", "max");
    for (name, constraint, after) in cases {
        let start = Instant::now();
        let prototype = factory.filter(&constraint, after)?;
        let compile = start.elapsed();
        let mut times = Vec::new();
        let mut random = Random::new(1);
        for _ in 0..20 {
            let mut filter = prototype.fork();
            for step in 0..60 {
                let mut mask = TokenMask::all(tokenizer.vocab_size());
                let start = Instant::now();
                filter.allowed(&mut mask)?;
                times.push(start.elapsed());
                let next: Vec<u32> = (0..mask.tokens() as u32).filter(|&token| mask.allows(token)).collect();
                let closes = |token: &&u32| {
                    tokenizer
                        .token_bytes(**token)
                        .is_ok_and(|bytes| bytes.contains(&b'"') || bytes == b"</think>")
                };
                let closing = next.iter().filter(closes).copied().collect::<Vec<_>>();
                let from = if step % 6 == 5 && !closing.is_empty() { &closing } else { &next };
                let token = *random.choose(from);
                if tokenizer.is_end(token) {
                    break;
                }
                filter.accept(token)?;
            }
        }
        times.sort_unstable();
        let mean = times.iter().sum::<Duration>() / times.len() as u32;
        let (p99, max) = (times[times.len() * 99 / 100], times[times.len() - 1]);
        println!("{name:28} {compile:>9.1?} {:>7} {mean:>9.1?} {p99:>9.1?} {max:>9.1?}", times.len());
    }
    Ok(())
}
