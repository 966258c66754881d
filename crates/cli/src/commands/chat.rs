//! `oscar chat`: a conversation in the terminal, or line by line from a pipe.

use std::io::{self, BufRead, IsTerminal, Write};

use clap::Args;
use oscar_engine::{Engine, FinishReason, GenerateOptions, Serve, Summary};
use oscar_kernels::{Backend, Inspect};
use oscar_model::SamplingDefaults;
use oscar_model::files::FileError;
use oscar_model::source::{Catalogue, DEFAULT_MODEL};
use oscar_model::text::RememberedText;

use crate::answer::Answer;
use crate::arguments::{ModelArguments, SamplingArguments, positive};
use crate::conversation::{Conversation, required_template};
use crate::device::OnDevice;
use crate::failure::Failure;
use crate::interrupt::Watch;
use crate::loading::EngineArguments;
use crate::output::decimal_bytes;

/// Text and ids of the conversation that are kept; no context is longer.
const MEMORY_BYTES: usize = 64 << 20;

const HELP: &str = "\
/help   this text
/reset  forget the conversation
/exit   end (so does Ctrl-D)
Ctrl-C stops an answer; without one it ends the program.";

/// Talk to a model in the terminal.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    oscar chat\n  \
    oscar chat smollm2\n  \
    oscar chat qwen2.5-coder-1.5b --system \"You are a terse programmer.\"\n  \
    printf 'Hello!\\nAnd in French?\\n' | oscar chat smollm2 --temperature 0\n\n\
    The model is fetched on first use. In the chat, /help lists what you can type. When standard input is not \
    a terminal, each line is a turn. Answers go to standard output, everything else to standard error. \
    Unless told otherwise, answers are drawn as the model's own files say (generation_config.json), or with \
    --temperature 0.7 --top-p 0.9 where they say nothing.")]
pub(crate) struct ChatArguments {
    /// Catalogue name, .gguf file, folder with config.json, or hub id (org/name, org/name:Q4_K_M); without one, a small
    /// model that answers plain questions.
    #[arg(value_name = "MODEL")]
    model: Option<String>,

    /// Use only what is on disk; never download.
    #[arg(long, env = "OSCAR_OFFLINE", value_parser = clap::builder::FalseyValueParser::new())]
    offline: bool,

    /// Tells the model how to behave.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    system: Option<String>,

    /// Most tokens of one answer.
    #[arg(long, short = 'n', default_value = "1024", value_name = "TOKENS", value_parser = positive)]
    max_tokens: usize,

    #[command(flatten)]
    sampling: SamplingArguments,

    #[command(flatten)]
    engine: EngineArguments,
}

impl ChatArguments {
    /// The model that was named, or the default.
    fn model(&self) -> ModelArguments {
        let model = self.model.clone().unwrap_or_else(|| {
            announce_default();
            DEFAULT_MODEL.to_owned()
        });
        ModelArguments { model, offline: self.offline, shard: None }
    }

    pub(crate) fn run(self) -> Result<(), Failure> {
        let deterministic = self.engine.kv.cache.deterministic;
        self.engine.device.clone().run(deterministic, self)
    }
}

impl OnDevice for ChatArguments {
    type Output = ();

    fn run_on<B: Inspect>(self, backend: B) -> Result<(), Failure> {
        let terminal = io::stdin().is_terminal();
        let model = self.model();
        let engine = self.engine.load(&model, backend)?;
        // Said before the first question rather than after it.
        required_template(engine.model())?;
        let defaults = defaults(engine.model().sampling_defaults())?;
        let mut chat = ChatSession {
            engine,
            conversation: Conversation::new(self.system.as_deref()),
            memory: RememberedText::new(MEMORY_BYTES),
        };
        let options = GenerateOptions {
            max_tokens: Some(self.max_tokens),
            sampling: self.sampling.options(&defaults),
            new_text: true,
            ..GenerateOptions::default()
        };
        if terminal {
            eprintln!("{} is ready. Type /help for help, Ctrl-D to end.", model.model);
        }
        while let Some(line) = read_line(terminal)? {
            match line.trim() {
                "" => {}
                "/help" => eprintln!("{HELP}"),
                "/exit" | "/quit" => break,
                "/reset" => {
                    chat.conversation.reset();
                    chat.memory.clear();
                    chat.engine.reset();
                    eprintln!("The conversation is forgotten.");
                }
                command if is_command(command) => eprintln!("Unknown command {command}.\n{HELP}"),
                text => match chat.turn(text, &options) {
                    // A question that does not fit is no reason to end a conversation; a device that has failed is.
                    Err(failure @ Failure::Error { .. }) if terminal && chat.engine.failure().is_none() => {
                        chat.conversation.take_back();
                        failure.report();
                        eprintln!("Type /reset to start again.");
                    }
                    other => other?,
                },
            }
        }
        Ok(())
    }
}

/// Says which model this is when none was named, and what it costs to fetch.
fn announce_default() {
    if let Some(entry) = Catalogue::built_in().find(DEFAULT_MODEL) {
        let size = decimal_bytes(entry.size);
        eprintln!(
            "No model was named, so this is {DEFAULT_MODEL} ({size}, fetched once). `oscar models` lists others."
        );
    }
}

/// What the model's files say about drawing, or what suits most models.
fn defaults(said: Result<&SamplingDefaults, &FileError>) -> Result<SamplingDefaults, Failure> {
    let said = said.map_err(|error| {
        Failure::new(format!("how to draw answers: {error}"))
            .with_fix("correct the file, or remove the field")
    })?;
    let usual = SamplingDefaults { temperature: Some(0.7), top_p: Some(0.9), ..SamplingDefaults::default() };
    Ok(if said.is_empty() { usual } else { *said })
}

/// A word of letters after a slash: a path or a regular expression is a question.
fn is_command(line: &str) -> bool {
    line.strip_prefix('/')
        .is_some_and(|word| !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_lowercase()))
}

/// The next line, `None` at the end.
fn read_line(terminal: bool) -> Result<Option<String>, Failure> {
    if terminal {
        eprint!("> ");
    }
    let mut bytes = Vec::new();
    let read = io::stdin().lock().read_until(b'\n', &mut bytes);
    if read.map_err(|error| Failure::new(format!("cannot read standard input: {error}")))? == 0 {
        if terminal {
            eprintln!();
        }
        return Ok(None);
    }
    String::from_utf8(bytes).map(Some).map_err(|error| {
        let position = error.utf8_error().valid_up_to();
        Failure::new(format!("standard input is not UTF-8: bad byte at position {position} of the line"))
    })
}

/// A conversation with an engine.
struct ChatSession<B: Backend> {
    engine: Engine<B>,
    conversation: Conversation,
    /// The ids of what was said, so that every turn finds the pages of the turns before it.
    memory: RememberedText,
}

impl<B: Backend> ChatSession<B> {
    /// One question and its answer. On failure the question is still in the conversation.
    fn turn(&mut self, question: &str, options: &GenerateOptions) -> Result<(), Failure> {
        let ChatSession { engine, conversation, memory } = self;
        conversation.ask(question);
        let text = conversation.render(engine.model())?;
        let tokenizer = engine.model().tokenizer();
        let prompt = memory.encode(tokenizer, "", &text)?.ids;
        let watch = Watch::new();
        let template = engine.model().chat_template().map_or("", |template| template.source());
        let mut answer = Answer::new(template);
        let options = GenerateOptions { keep_special: answer.needs_special_tokens(), ..options.clone() };
        let mut written: io::Result<()> = Ok(());
        let summary = engine.generate(&prompt, &options, |event| {
            if let Some(piece) = event.text() {
                written = show(&answer.push(piece));
            }
            watch.go_on(&written)
        })?;
        written?;
        show(&answer.finish())?;
        show("\n")?;
        conversation.answer(answer.said());
        memory.remember(tokenizer, "", &text, &prompt, &summary.tokens)?;
        eprintln!("{}", status(&summary, engine.context()));
        Ok(())
    }
}

fn show(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

fn status(summary: &Summary, context: usize) -> String {
    let used = summary.prompt_tokens + summary.tokens.len();
    let speed =
        summary.decode_tokens_per_s().map_or_else(String::new, |speed| format!(", {speed:.1} tokens/s"));
    let ended = match summary.finish {
        FinishReason::End | FinishReason::Stop => "",
        FinishReason::Length => ", stopped at --max-tokens",
        FinishReason::Context => ", the context is full: /reset to start again",
        FinishReason::Cancelled => ", interrupted",
    };
    format!(
        "[{} tokens{speed}, first after {:.2} s, context {used}/{context}, {} of {} prompt tokens cached{ended}]",
        summary.tokens.len(),
        summary.first_token.as_secs_f64(),
        summary.cached_tokens,
        summary.prompt_tokens
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_says_how_answers_are_drawn() {
        let usual = defaults(Ok(&SamplingDefaults::default())).unwrap();
        assert_eq!((usual.temperature, usual.top_p), (Some(0.7), Some(0.9)));
        let own = SamplingDefaults { top_k: Some(20), ..SamplingDefaults::default() };
        assert_eq!(defaults(Ok(&own)).unwrap(), own);
        let broken = FileError::NotAFile { path: "generation_config.json".into() };
        assert!(defaults(Err(&broken)).is_err());
    }

    #[test]
    fn only_words_after_a_slash_are_commands() {
        assert!(is_command("/unknown"));
        assert!(["/usr/bin?", "/", "what is /etc", "/Regex"].iter().all(|line| !is_command(line)));
    }
}
