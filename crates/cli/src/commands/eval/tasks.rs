//! `oscar eval tasks`: questions with checkable answers.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use oscar_lab::Report;
use oscar_lab::eval::evaluator::Evaluator;
use oscar_lab::eval::history::Reading;
use oscar_lab::eval::tasks::{
    Answerer, AnswererError, Graded, Limits, Prompt, Question, Sandbox, Score, Style, Task, TaskError,
    fetch_dataset, read, run,
};
use oscar_model::source::{FetchPolicy, Settings, SourceError};
use serde_json::json;

use super::served::{ReaderArguments, Readers};
use crate::arguments::{byte_size, positive};
use crate::conversation::Conversation;
use crate::device::Device;
use crate::failure::Failure;
use crate::interrupt::Watch;
use crate::output::print_text;
use crate::progress::DownloadProgress;
use crate::progress::Steps;
use crate::subject::{Subject, SubjectArguments};

/// Multiple choice, maths and code: the share of right answers with each codec.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    oscar eval tasks smollm2 --task math500 --limit 50 --kv bf16,int2\n  \
    oscar eval tasks smollm2 --task math500 --limit 50 --kv-cache-dtype bf16,int4,int2\n  \
    oscar eval tasks qwen15 --task humaneval --allow-code-execution --log answers.jsonl\n  \
    oscar eval tasks qwen15 --task gpqa --data gpqa_diamond.jsonl --json\n\n\
    humaneval and math500 are fetched by package name; gpqa and aime need --data. Files are JSONL (or .jsonl.gz) in\n\
    the layout their authors publish. --kv measures codecs in the lab (bf16 and int2 if neither list is given): the\n\
    prompt is computed exactly once for all codecs; the answer reads it through the codec, outside of the windows.\n\
    --kv-cache-dtype measures caches as they are served, through the engine. Answers are greedy.\n\n\
    Programs that a model writes run in a process without network, with limits on time, memory and files. That\n\
    stops accidents, not attacks: use a machine you can lose for models you do not trust.")]
pub(crate) struct TasksArguments {
    #[command(flatten)]
    lab: SubjectArguments,

    /// Which questions: gpqa, aime, math500 or humaneval.
    #[arg(long, value_name = "TASK", value_parser = |text: &str| text.parse::<Task>().map_err(|error| error.to_string()))]
    task: Task,

    /// File of questions.
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,

    /// Ask the first N questions only.
    #[arg(long, value_name = "N", value_parser = positive)]
    limit: Option<usize>,

    #[command(flatten)]
    readers: ReaderArguments,

    /// Most tokens of an answer; by default 512 for code, 2048 for aime, 1024 for the others.
    #[arg(long, value_name = "TOKENS", value_parser = positive)]
    max_tokens: Option<usize>,

    /// Put questions as text to be continued, for models without a chat template.
    #[arg(long)]
    plain: bool,

    /// Seed of the order of options.
    #[arg(long, default_value_t = 0, value_name = "N")]
    seed: u64,

    /// Run the programs that the model writes.
    #[arg(long)]
    allow_code_execution: bool,

    /// Seconds a program may take.
    #[arg(long, default_value = "10", value_name = "SECONDS", value_parser = positive)]
    code_seconds: usize,

    /// Memory a program may use.
    #[arg(long, default_value = "1GiB", value_name = "SIZE", value_parser = byte_size)]
    code_memory: u64,

    /// Write every answer with its grade to this file, one JSON object a line.
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,

    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl TasksArguments {
    pub(crate) fn run(self) -> Result<(), Failure> {
        // Everything that can fail without the model fails first.
        let sandbox = self.sandbox()?;
        let style = if self.plain { Style::Plain } else { Style::Chat };
        let questions = read(self.task, &self.data()?, style, self.seed, self.limit).map_err(failed)?;
        let mut log = self.log.as_deref().map(Log::create).transpose()?;

        let subject = self.readers.load(&self.lab)?;
        let max_tokens = self.max_tokens();
        let capacity = capacity(&subject, &questions, max_tokens)?;
        let readers = self.readers.readers(&subject, &["bf16", "int2"], capacity)?;
        let mut answerer = ModelAnswerer::new(&subject, &readers, capacity)?;

        let steps = Steps::new(self.task.name(), questions.len() * readers.len());
        let watch = Watch::new();
        let (mut done, mut written) = (0, Ok(()));
        let mut each = |graded: &Graded| {
            done += 1;
            steps.set(done);
            if let Some(log) = &mut log {
                written = log.write(self.task, readers.name(graded.variant), graded);
            }
            written.is_ok() && !watch.caught()
        };
        let scores =
            run(self.task, &questions, &mut answerer, readers.len(), sandbox.as_ref(), max_tokens, &mut each)
                .map_err(failed)?;
        steps.finish();
        written?;
        if watch.caught() {
            return Err(Failure::Interrupted("interrupted".to_owned()));
        }
        let report = self.report(&subject, &readers, &scores, sandbox.as_ref());
        if self.json {
            return print_text(&report.json());
        }
        let columns = ["task", "metric", "kv", "bits_per_element", "score", "correct", "total", "seconds"];
        print_text(report.table(&columns).trim_end())
    }

    fn max_tokens(&self) -> usize {
        self.max_tokens.unwrap_or(match self.task {
            Task::HumanEval => 512,
            Task::Aime => 2048,
            Task::Gpqa | Task::Math500 => 1024,
        })
    }

    /// The process for programs, if this task needs one.
    fn sandbox(&self) -> Result<Option<Sandbox>, Failure> {
        if self.task != Task::HumanEval {
            return Ok(None);
        }
        if !self.allow_code_execution {
            return Err(failed(TaskError::CodeNotAllowed { task: self.task }));
        }
        let limits = Limits {
            wall: Duration::from_secs(self.code_seconds as u64),
            cpu_seconds: self.code_seconds as u64,
            memory_bytes: self.code_memory,
            ..Limits::default()
        };
        let python = Settings::from_environment()?.python;
        let sandbox = Sandbox::new(python, limits).map_err(failed)?;
        tracing::info!("programs run without network ({})", sandbox.network());
        Ok(Some(sandbox))
    }

    fn data(&self) -> Result<PathBuf, Failure> {
        if let Some(path) = &self.data {
            return Ok(path.clone());
        }
        let policy = if self.lab.model.offline { FetchPolicy::Never } else { FetchPolicy::Allow };
        let settings = Settings::from_environment()?;
        fetch_dataset(self.task, policy, &settings, &DownloadProgress::new()).map_err(failed)
    }

    fn report(
        &self,
        subject: &Subject,
        readers: &Readers,
        scores: &[Score],
        sandbox: Option<&Sandbox>,
    ) -> Report {
        let windows = readers.windows;
        let mut report = Report::here();
        for (reader, score) in scores.iter().enumerate() {
            report.push(json!({
                "kind": "tasks",
                "model": subject.name(),
                "task": self.task.name(),
                "metric": self.task.metric(),
                "kv": readers.name(reader),
                "bits_per_element": readers.history_bits(reader),
                "score": score.fraction(),
                "correct": score.correct,
                "total": score.total,
                "seconds": score.seconds,
                "max_tokens": self.max_tokens(),
                "sink": windows.sink,
                "recent": windows.recent,
                "network_off_by": sandbox.map(|sandbox| sandbox.network().to_string()),
            }));
        }
        report
    }
}

/// Tokens of the longest question and its answer.
fn capacity(subject: &Subject, questions: &[Question], max_tokens: usize) -> Result<usize, Failure> {
    let most = subject.model.config().max_context;
    let mut longest = 0;
    for question in questions {
        let tokens = encode(subject, &question.prompt)?.len();
        if tokens >= most {
            return Err(Failure::new(format!(
                "question {} has {tokens} tokens, and the model has room for {most}",
                question.id
            ))
            .with_fix("leave it out, or use a model with a longer context"));
        }
        longest = longest.max(tokens);
    }
    Ok(longest.saturating_add(max_tokens).min(most))
}

fn encode(subject: &Subject, prompt: &Prompt) -> Result<Vec<u32>, Failure> {
    match prompt.style {
        Style::Plain => Ok(subject.model.tokenizer().encode(&prompt.text, true)?),
        Style::Chat => {
            let mut conversation = Conversation::new(None);
            conversation.ask(&prompt.text);
            conversation.encode(&subject.model).map_err(|failure| failure.with_fix("use --plain"))
        }
    }
}

/// A model that answers with each cache. Codecs of the lab share one exact prompt.
struct ModelAnswerer<'a> {
    subject: &'a Subject,
    readers: &'a Readers,
    evaluator: Option<Evaluator<Device>>,
    capacity: usize,
    /// What the evaluator holds.
    prefix: Vec<u32>,
}

impl<'a> ModelAnswerer<'a> {
    fn new(subject: &'a Subject, readers: &'a Readers, capacity: usize) -> Result<Self, Failure> {
        let evaluator = match readers.codecs.is_empty() {
            true => None,
            false => Some(Evaluator::new(subject.model.clone(), capacity)?),
        };
        Ok(ModelAnswerer { subject, readers, evaluator, capacity, prefix: Vec::new() })
    }
}

impl Answerer for ModelAnswerer<'_> {
    fn answer(
        &mut self,
        prompt: &Prompt,
        variant: usize,
        max_tokens: usize,
    ) -> Result<String, AnswererError> {
        let ids = encode(self.subject, prompt).map_err(|failure| match failure {
            Failure::Error { message, .. } | Failure::Interrupted(message) => message,
            Failure::OutputClosed => "the output is closed".to_owned(),
        })?;
        // The last token is read as the cache says, so that the first word of the answer is too.
        let Some((last, prefix)) = ids.split_last() else { return Err("the prompt is empty".into()) };
        let most = max_tokens.min(self.capacity - prefix.len());
        let Readers { codecs, windows, served, .. } = self.readers;
        let answer = match (&mut self.evaluator, codecs.get(variant)) {
            (Some(evaluator), Some(codec)) => {
                if self.prefix != prefix {
                    evaluator.prefill(prefix, |_| ())?;
                    self.prefix = prefix.to_vec();
                }
                let reading = Reading { codec: &**codec, windows: *windows, chunk: None };
                evaluator.answer(&[*last], Some(reading), most)?
            }
            _ => {
                let Some(served) = served.get(variant - codecs.len()) else {
                    return Err(format!("there is no cache {variant}").into());
                };
                served.answer(prefix, &[*last], &prompt.stop, most, |_| ())?
            }
        };
        Ok(self.subject.model.tokenizer().decode(&answer, true)?)
    }
}

/// Answers with their grades, one JSON object a line.
struct Log {
    path: PathBuf,
    file: BufWriter<File>,
}

impl Log {
    fn create(path: &std::path::Path) -> Result<Log, Failure> {
        let file = File::create(path).map_err(|error| Log::failure(path, &error))?;
        Ok(Log { path: path.to_owned(), file: BufWriter::new(file) })
    }

    fn write(&mut self, task: Task, kv: &str, graded: &Graded) -> Result<(), Failure> {
        let mut line = json!({"task": task.name(), "kv": kv});
        if let (Some(line), Ok(serde_json::Value::Object(graded))) =
            (line.as_object_mut(), serde_json::to_value(graded))
        {
            line.extend(graded);
        }
        // An interrupted run leaves whole lines behind.
        writeln!(self.file, "{line}")
            .and_then(|()| self.file.flush())
            .map_err(|error| Log::failure(&self.path, &error))
    }

    fn failure(path: &std::path::Path, error: &std::io::Error) -> Failure {
        Failure::new(format!("{}: cannot write: {error}", path.display()))
    }
}

fn failed(error: TaskError) -> Failure {
    let fix = match &error {
        TaskError::NoPackage { .. } => Some("give its JSONL file with --data"),
        TaskError::CodeNotAllowed { .. } => {
            Some("add --allow-code-execution if you trust the model that far")
        }
        TaskError::Sandbox { .. } => Some("set OSCAR_PYTHON to a Python 3 interpreter"),
        _ => None,
    };
    match error {
        // The fix of these names a command for models.
        TaskError::Source(
            error @ (SourceError::NotCached { .. }
            | SourceError::Network { .. }
            | SourceError::Download { .. }
            | SourceError::Corrupt { .. }),
        ) => Failure::new(error).with_fix("give the file with --data, or try again while online"),
        TaskError::Source(error) => error.into(),
        error => match fix {
            Some(fix) => Failure::new(error).with_fix(fix),
            None => Failure::new(error),
        },
    }
}
