//! `oscar generate`: one prompt in, one text out.

use std::io::{self, IsTerminal, Read, Write};

use clap::Args;
use oscar_engine::{EngineInfo, FinishReason, GenerateOptions, SamplingOptions, Serve, Summary};
use oscar_kernels::Inspect;
use oscar_model::SamplingDefaults;
use serde_json::{Value, json};

use crate::arguments::{ModelArguments, SamplingArguments, non_empty, positive};
use crate::conversation::Conversation;
use crate::device::{OnDevice, worker_threads};
use crate::failure::Failure;
use crate::interrupt::Watch;
use crate::loading::EngineArguments;
use crate::output::print_json;

/// Longest prompt read from standard input; no model has a context for more.
const MAX_INPUT_BYTES: u64 = 64 << 20;

/// What a prompt is continued with can be compared, unless the user says otherwise.
const GREEDY: SamplingDefaults = SamplingDefaults {
    temperature: Some(0.0),
    top_p: None,
    top_k: None,
    min_p: None,
    repetition_penalty: None,
};

/// Continue a prompt.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    oscar generate smollm2 --prompt \"The capital of France is\" --max-tokens 16\n  \
    oscar generate smollm2 --chat --prompt \"Name three colours.\"\n  \
    oscar generate smollm2 --temperature 0.8 --top-p 0.95 --seed 7 < prompt.txt\n  \
    oscar generate qwen2.5-coder-0.5b --prompt \"def add(a, b):\" --stop \"\\n\\n\" --json\n\n\
    The prompt is continued as it stands; --chat asks it as a question instead. Without --prompt it is read \
    from standard input, less the line end at its end. Text that looks like a control token is read as text. \
    The default is greedy and exactly reproducible.")]
pub(crate) struct GenerateArguments {
    #[command(flatten)]
    model: ModelArguments,

    /// The prompt; read from standard input if absent.
    #[arg(long, short, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,

    /// Put the prompt into the model's chat template as the user's message.
    #[arg(long)]
    chat: bool,

    /// System message for --chat.
    #[arg(long, value_name = "TEXT", requires = "chat", allow_hyphen_values = true)]
    system: Option<String>,

    /// Most tokens to generate.
    #[arg(long, short = 'n', default_value = "256", value_name = "TOKENS", value_parser = positive)]
    max_tokens: usize,

    #[command(flatten)]
    sampling: SamplingArguments,

    /// End at this text, which is not printed; may be given several times. \n, \t and \\ are understood.
    #[arg(long, value_name = "TEXT", value_parser = stop_text, allow_hyphen_values = true)]
    stop: Vec<String>,

    #[command(flatten)]
    engine: EngineArguments,

    /// Print one JSON object instead of the text.
    #[arg(long)]
    json: bool,
}

/// A prompt and what is to be done with it.
struct Generation {
    arguments: GenerateArguments,
    prompt: String,
}

impl OnDevice for Generation {
    type Output = ();

    fn run_on<B: Inspect>(self, backend: B) -> Result<(), Failure> {
        self.arguments.generate(&self.prompt, backend)
    }
}

impl GenerateArguments {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let prompt = match &self.prompt {
            Some(prompt) => prompt.clone(),
            None => read_prompt(io::stdin().lock())?,
        };
        if prompt.is_empty() {
            return Err(
                Failure::new("the prompt is empty").with_fix("give --prompt TEXT, or text on standard input")
            );
        }
        let deterministic = self.engine.kv.cache.deterministic;
        self.engine.device.clone().run(deterministic, Generation { arguments: self, prompt })
    }

    fn generate<B: Inspect>(&self, prompt: &str, backend: B) -> Result<(), Failure> {
        let engine = self.engine.load(&self.model, backend)?;
        let model = engine.model();
        let ids = if self.chat {
            let mut conversation = Conversation::new(self.system.as_deref());
            conversation.ask(prompt);
            conversation.encode(model)?
        } else {
            model.tokenizer().encode(prompt, true)?
        };
        let options = GenerateOptions {
            max_tokens: Some(self.max_tokens),
            sampling: self.sampling.options(&GREEDY),
            stop: self.stop.clone(),
            new_text: self.chat,
            ..GenerateOptions::default()
        };
        let watch = Watch::new();
        let mut text = String::new();
        let mut written = Ok(());
        let summary = engine.generate(&ids, &options, |event| {
            if let Some(piece) = event.text() {
                if !self.json {
                    written = show(piece);
                }
                text.push_str(piece);
            }
            watch.go_on(&written)
        })?;
        written?;
        if self.json {
            print_json([self.row(prompt, text, engine.info(), &summary, &options.sampling)])?;
        } else {
            show("\n")?;
        }
        if summary.finish == FinishReason::Cancelled {
            return Err(Failure::Interrupted("interrupted".to_owned()));
        }
        Ok(())
    }

    fn row(
        &self,
        prompt: &str,
        text: String,
        engine: &EngineInfo,
        summary: &Summary,
        sampling: &SamplingOptions,
    ) -> Value {
        let seconds = summary.first_token.as_secs_f64();
        let computed = summary.prompt_tokens - summary.cached_tokens;
        json!({
            "model": self.model.model,
            "prompt": prompt,
            "text": text,
            "finish_reason": summary.finish.name(),
            "prompt_tokens": summary.prompt_tokens,
            "gen_tokens": summary.tokens.len(),
            "kv": engine.kv,
            "bits_per_element": engine.bits_per_element,
            "threads": worker_threads(self.engine.device.threads),
            "context": engine.context,
            "ttft_ms": seconds * 1e3,
            "prefill_tokens_per_s": if seconds > 0.0 { Some(computed as f64 / seconds) } else { None },
            "decode_tokens_per_s": summary.decode_tokens_per_s(),
            "temperature": as_typed(sampling.temperature),
            "top_p": as_typed(sampling.top_p),
            "top_k": sampling.top_k,
            "min_p": as_typed(sampling.min_p),
            "seed": if sampling.temperature > 0.0 { Some(summary.seed) } else { None },
        })
    }
}

/// The number the user typed: 0.9, not the nearest f32 written out in f64.
fn as_typed(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}

/// Writes a piece at once, so that it can be read while the next one is computed.
fn show(piece: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(piece.as_bytes())?;
    out.flush()
}

/// All of the input, less one line end at its end.
fn read_prompt(input: impl Read + IsTerminal) -> Result<String, Failure> {
    if input.is_terminal() {
        eprintln!("Type the prompt and end it with Ctrl-D on a line of its own.");
    }
    let mut bytes = Vec::new();
    let read = input.take(MAX_INPUT_BYTES + 1).read_to_end(&mut bytes);
    read.map_err(|error| Failure::new(format!("cannot read standard input: {error}")))?;
    if bytes.len() as u64 > MAX_INPUT_BYTES {
        return Err(Failure::new(format!("standard input is longer than {MAX_INPUT_BYTES} bytes")));
    }
    let mut text = String::from_utf8(bytes).map_err(|error| {
        let position = error.utf8_error().valid_up_to();
        Failure::new(format!("standard input is not UTF-8: bad byte at position {position}"))
            .with_fix("convert the prompt to UTF-8")
    })?;
    if text.ends_with('\n') {
        text.truncate(text.len() - if text.ends_with("\r\n") { 2 } else { 1 });
    }
    Ok(text)
}

/// A stop text; shells make it hard to type a line end, so escapes are understood.
fn stop_text(text: &str) -> Result<String, String> {
    let mut plain = String::with_capacity(text.len());
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        if character != '\\' {
            plain.push(character);
            continue;
        }
        match characters.next() {
            Some('n') => plain.push('\n'),
            Some('t') => plain.push('\t'),
            Some('r') => plain.push('\r'),
            Some('\\') | None => plain.push('\\'),
            Some(other) => plain.extend(['\\', other]),
        }
    }
    non_empty(&plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stop_texts_understand_escapes() {
        for (typed, meant) in [(r"\n\n", "\n\n"), (r"a\\n", "a\\n"), (r"\d", r"\d"), ("\\", "\\"), ("é", "é")]
        {
            assert_eq!(stop_text(typed).as_deref(), Ok(meant), "{typed}");
        }
        assert!(stop_text("").is_err());
    }
}
