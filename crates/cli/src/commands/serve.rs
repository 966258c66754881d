//! `oscar serve`: a model behind OpenAI's and SGLang's interfaces.

mod config_file;
mod events;
mod unsupported;

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};
use oscar_engine::{Engine, EngineOptions, Serve};
use oscar_lab::Machine;
use oscar_model::SamplingDefaults;
use oscar_model::source::ModelPath;
use oscar_model::text::TextError;
use oscar_server::{
    CacheShape, KvEventAddress, ReasoningFormat, ServedModel, Server, ServerOptions, ToolCallFormat,
};
use tokio::net::TcpSocket;
use tokio::runtime::Runtime;
use tokio::sync::watch;

use self::events::EventArguments;
use self::unsupported::UnsupportedArguments;
use crate::arguments::{ModelArguments, byte_size, non_empty, positive};
use crate::device::Device;
use crate::failure::Failure;
use crate::kv::Settled;
use crate::loading::{EngineArguments, start};
use crate::output::{binary_bytes, count};
use crate::subject::Subject;

pub(crate) use config_file::with_config_file;

/// Connections that may wait to be accepted.
const BACKLOG: u32 = 1024;

/// Threads for connections: more than these are never busy, as tokens come from the engine.
const MAX_HTTP_THREADS: usize = 4;

/// Serve a model over HTTP.
#[derive(Debug, Args)]
#[command(
    args_override_self = true,
    after_help = "Examples:\n  \
    oscar serve smollm2\n  \
    oscar serve qwen2.5-coder-1.5b --port 8000 --kv-cache-dtype int2 --kv-memory 4GiB\n  \
    oscar serve --model-path ./model.gguf --served-model-name mine --api-key SECRET --host 0.0.0.0\n  \
    oscar serve --config server.toml\n\n\
    Then: curl http://127.0.0.1:30000/v1/chat/completions -H 'content-type: application/json' \
    -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Hello!\"}]}'\n\n\
    SIGTERM and Ctrl-C let answers in progress end first; a second one does not. A configuration file is TOML with \
    the names of flags as keys; flags on the command line win."
)]
pub(crate) struct ServeArguments {
    /// Catalogue name, .gguf file, folder with config.json, or hub id.
    #[arg(value_name = "MODEL")]
    model: Option<String>,

    /// The same as MODEL, which wins.
    #[arg(long, value_name = "MODEL", alias = "model")]
    model_path: Option<String>,

    /// Use only what is on disk; never download.
    #[arg(long, env = "OSCAR_OFFLINE", value_parser = clap::builder::FalseyValueParser::new())]
    offline: bool,

    /// Settings from a TOML file.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Address to listen on; 0.0.0.0 is all of them.
    #[arg(long, default_value = "127.0.0.1", value_name = "ADDRESS")]
    host: String,

    /// Port to listen on; 0 takes a free one.
    #[arg(long, default_value_t = 30000, value_name = "PORT")]
    port: u16,

    /// Key that clients must show; none is asked for without it.
    #[arg(long, env = "OSCAR_API_KEY", hide_env_values = true, value_name = "KEY", value_parser = non_empty)]
    api_key: Option<String>,

    /// Name that clients call the model by; as it was given by default.
    #[arg(long, value_name = "NAME", value_parser = non_empty)]
    served_model_name: Option<String>,

    /// Answers in progress at a time.
    #[arg(long, default_value = "32", value_name = "N", value_parser = positive)]
    max_running_requests: usize,

    /// Requests that may wait; more get 429.
    #[arg(long, default_value = "1024", value_name = "N", value_parser = positive)]
    max_queued_requests: usize,

    /// Prompt tokens computed in one pass; -1 is all of them.
    #[arg(long, default_value = "512", value_name = "TOKENS", value_parser = chunk, allow_negative_numbers = true)]
    chunked_prefill_size: usize,

    /// Share of the machine's memory for weights and cache, instead of --kv-memory.
    #[arg(long, value_name = "SHARE", value_parser = share, conflicts_with = "kv_memory")]
    mem_fraction_static: Option<f64>,

    /// How the model writes its reasoning: a name such as qwen3, auto or none.
    #[arg(long, default_value = "auto", value_name = "NAME")]
    reasoning_parser: String,

    /// How the model writes calls of tools: a name such as qwen25, auto or none.
    #[arg(long, default_value = "auto", value_name = "NAME")]
    tool_call_parser: String,

    /// How answers are drawn when a request does not say: as the model's own files do (generation_config.json), or
    /// with temperature 1 and all tokens, as OpenAI's do.
    #[arg(long, value_enum, default_value_t, value_name = "SOURCE")]
    sampling_defaults: SamplingSource,

    #[command(flatten)]
    engine: EngineArguments,

    #[command(flatten)]
    events: EventArguments,

    #[command(flatten)]
    limits: LimitArguments,

    #[command(flatten)]
    unsupported: UnsupportedArguments,
}

/// Where settings come from that a request does not make.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum SamplingSource {
    #[default]
    Model,
    Openai,
}

/// What clients may do to the server.
#[derive(Debug, Args)]
#[command(next_help_heading = "Limits")]
struct LimitArguments {
    /// Open connections; more get 503.
    #[arg(long, default_value = "4096", value_name = "N", value_parser = positive)]
    max_connections: usize,

    /// Largest body of a request.
    #[arg(long, default_value = "32MiB", value_name = "SIZE", value_parser = byte_size)]
    max_body: u64,

    /// Seconds a client may take for the head of a request; also how long a connection may be idle.
    #[arg(long, default_value = "15", value_name = "S", value_parser = positive)]
    header_seconds: usize,

    /// Seconds a client may take to send a body, and to take what it is sent.
    #[arg(long, default_value = "60", value_name = "S", value_parser = positive)]
    transfer_seconds: usize,

    /// Seconds answers in progress may go on after the server was told to stop.
    #[arg(long, default_value = "30", value_name = "S")]
    shutdown_seconds: u64,

    /// Web origin whose pages may ask, such as `https://chat.example`; * is any. May be given several times.
    #[arg(long, value_name = "ORIGIN")]
    cors_allow_origin: Vec<String>,

    /// Threads for connections; up to 4 by default.
    #[arg(long, value_name = "N", value_parser = positive)]
    http_threads: Option<usize>,
}

impl ServeArguments {
    pub(crate) fn run(self) -> Result<(), Failure> {
        self.unsupported.check()?;
        let Some(model) = self.model.clone().or_else(|| self.model_path.clone()) else {
            return Err(Failure::new("there is no model to serve")
                .with_fix("give a MODEL, such as `oscar serve smollm2`, or --model-path"));
        };
        let model = ModelArguments { model, offline: self.offline };
        // What can be wrong without a model is said before one is loaded.
        self.parsers(None)?;
        let runtime = self.runtime()?;
        // A port that is taken should not cost the loading of a model.
        let socket = self.bind(&runtime)?;
        let publisher = self.events.publisher(&runtime)?;
        let subject = self.engine.load_model(&model)?;
        let settled = self.engine.kv.settle(&subject)?;
        let options = self.engine_options(&model, &settled)?;
        let engine = Arc::new(start(&subject, &options, &settled)?);
        let (served, mut options) = self.server(&subject, &engine)?;
        let name = served.name.clone();
        if let Some(publisher) = publisher {
            if !engine.info().prefix_cache {
                tracing::warn!("--kv-events has nothing to tell without a prefix cache");
            }
            options.kv_events = Some(publisher.address().clone());
            let _context = runtime.enter();
            publisher.start(engine.cache_events()).map_err(|error| Failure::new(error.to_string()))?;
        }
        let events = options.kv_events.clone();
        let server = Server::new(Arc::clone(&engine) as Arc<dyn Serve>, served, options);
        let ended = runtime.block_on(async {
            let listener = socket.listen(BACKLOG).map_err(|error| self.cannot_listen(&error))?;
            let address = listener.local_addr().map_err(|error| self.cannot_listen(&error))?;
            let signals =
                Signals::new().map_err(|error| Failure::new(format!("cannot watch signals: {error}")))?;
            // Whoever runs a server wants to know where its memory goes; in the log it is from `info` on.
            if !tracing::enabled!(tracing::Level::INFO) {
                eprintln!("{}", engine.budget());
            }
            eprintln!("{}", banner(address, &name, &engine));
            if let Some(KvEventAddress { host, port, .. }) = &events {
                eprintln!("  events    tcp://{host}:{port}");
            }
            Ok::<_, Failure>(server.serve(listener, signals.nth(1), signals.nth(2)).await)
        })?;
        runtime.shutdown_timeout(Duration::from_secs(1));
        match ended.broken_off {
            0 => eprintln!("The server has stopped."),
            requests => eprintln!("The server has stopped; {requests} requests were broken off."),
        }
        Ok(())
    }

    fn runtime(&self) -> Result<Runtime, Failure> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = self.limits.http_threads.unwrap_or(cores.min(MAX_HTTP_THREADS));
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let runtime = builder.worker_threads(threads).thread_name("oscar-http").enable_all().build();
        runtime.map_err(|error| Failure::new(format!("cannot start threads for connections: {error}")))
    }

    /// Takes the port without listening yet: whoever connects while the model loads is refused at once.
    fn bind(&self, runtime: &Runtime) -> Result<TcpSocket, Failure> {
        let unknown = |reason: &str| {
            Failure::new(format!("{} is not an address of this machine: {reason}", self.host))
                .with_fix("give --host 127.0.0.1, or 0.0.0.0 for all addresses")
        };
        let mut addresses =
            (self.host.as_str(), self.port).to_socket_addrs().map_err(|error| unknown(&error.to_string()))?;
        let address = addresses.next().ok_or_else(|| unknown("it has no address"))?;
        let _context = runtime.enter();
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() };
        let socket = socket.map_err(|error| self.cannot_listen(&error))?;
        socket.set_reuseaddr(true).map_err(|error| self.cannot_listen(&error))?;
        socket.bind(address).map_err(|error| self.cannot_listen(&error))?;
        Ok(socket)
    }

    fn cannot_listen(&self, error: &io::Error) -> Failure {
        Failure::new(format!("cannot listen on {}:{}: {error}", self.host, self.port))
            .with_fix("give another --port, or end the program that has this one")
    }

    fn engine_options(&self, model: &ModelArguments, settled: &Settled) -> Result<EngineOptions, Failure> {
        let mut options = EngineOptions {
            max_running: self.max_running_requests,
            max_queued: self.max_queued_requests,
            prefill_chunk: self.chunked_prefill_size,
            ..self.engine.options(settled)
        };
        if let Some(share) = self.mem_fraction_static {
            options.kv.memory = Some(memory_for_cache(share, &model.resolve()?)?);
        }
        Ok(options)
    }

    /// How a model with this chat template writes its reasoning and its calls.
    fn parsers(
        &self,
        template: Option<&str>,
    ) -> Result<(Option<&'static ReasoningFormat>, Option<&'static ToolCallFormat>), Failure> {
        let reasoning = ReasoningFormat::choose(&self.reasoning_parser, template).map_err(Failure::new)?;
        let calls = ToolCallFormat::choose(&self.tool_call_parser, template).map_err(Failure::new)?;
        Ok((reasoning, calls))
    }

    /// How answers are drawn when a request does not say.
    fn sampling(&self, subject: &Subject) -> Result<SamplingDefaults, Failure> {
        match self.sampling_defaults {
            SamplingSource::Openai => Ok(SamplingDefaults::default()),
            SamplingSource::Model => subject.model.sampling_defaults().copied().map_err(|error| {
                Failure::new(format!("how to draw answers: {error}"))
                    .with_fix("correct the file, or give --sampling-defaults openai")
            }),
        }
    }

    /// The model under its name, and the settings of the server.
    fn server(
        &self,
        subject: &Subject,
        engine: &Engine<Device>,
    ) -> Result<(ServedModel, ServerOptions), Failure> {
        let sampling = self.sampling(subject)?;
        let template = match subject.model.chat_template() {
            Ok(template) => Some(template.clone()),
            Err(TextError::NoChatTemplate) => {
                tracing::warn!("{} has no chat template: only plain text can be continued", subject.name());
                None
            }
            Err(error) => {
                tracing::warn!("chats are refused: {error}");
                None
            }
        };
        let name = self.served_model_name.clone().unwrap_or_else(|| subject.name().to_owned());
        let tokenizer = Arc::clone(subject.model.tokenizer());
        let family = subject.model.config().family;
        let served = ServedModel::new(name, subject.name().to_owned(), family, tokenizer, template)
            .with_sampling(sampling);
        let (reasoning_parser, tool_call_parser) = self.parsers(served.template_source())?;
        let seconds = |count: usize| Duration::from_secs(count as u64);
        let budget = engine.budget();
        let options = ServerOptions {
            api_key: self.api_key.clone(),
            allowed_origins: self.limits.cors_allow_origin.clone(),
            body_bytes: usize::try_from(self.limits.max_body).unwrap_or(usize::MAX),
            header_timeout: seconds(self.limits.header_seconds),
            body_timeout: seconds(self.limits.transfer_seconds),
            write_timeout: seconds(self.limits.transfer_seconds),
            connections: self.limits.max_connections,
            shutdown: Duration::from_secs(self.limits.shutdown_seconds),
            reasoning_parser,
            tool_call_parser,
            cache: CacheShape {
                sink_pages: budget.windows.sink,
                recent_pages: budget.windows.recent,
                exact_page_bytes: budget.exact.page_bytes,
                sealed_page_bytes: budget.sealed.page_bytes,
                scratch_page_bytes: budget.scratch.page_bytes,
            },
            kv_events: None,
        };
        Ok((served, options))
    }
}

/// What users want to know when the server is ready.
fn banner(address: SocketAddr, name: &str, engine: &Engine<Device>) -> String {
    let (info, budget) = (engine.info(), engine.budget());
    let host = if address.ip().is_unspecified() { "127.0.0.1".to_owned() } else { host(address) };
    format!(
        "{name} is ready at http://{host}:{}\n  \
         cache     {}, {:.2} bits per element, {}\n  \
         capacity  {} tokens, {} per request, {} requests at a time",
        address.port(),
        info.kv,
        info.bits_per_element,
        binary_bytes(budget.total_bytes() as u64),
        count(info.capacity_tokens as u64),
        count(info.context as u64),
        info.max_running,
    )
}

fn host(address: SocketAddr) -> String {
    if address.is_ipv6() { format!("[{}]", address.ip()) } else { address.ip().to_string() }
}

/// What is left for the cache of a share of this machine's memory.
fn memory_for_cache(share: f64, path: &ModelPath) -> Result<usize, Failure> {
    let Some(all) = Machine::here().memory_bytes else {
        return Err(Failure::new("the memory of this machine is not known").with_fix("give --kv-memory SIZE"));
    };
    let weights = weight_bytes(path.path());
    let allowed = (all as f64 * share) as u64;
    match allowed.checked_sub(weights).filter(|&rest| rest > 0) {
        Some(rest) => Ok(usize::try_from(rest).unwrap_or(usize::MAX)),
        None => Err(Failure::new(format!(
            "{share} of this machine's memory is {}, and the weights alone have {}",
            binary_bytes(allowed),
            binary_bytes(weights)
        ))
        .with_fix("give a larger --mem-fraction-static, or --kv-memory SIZE")),
    }
}

/// Bytes of a model's files.
fn weight_bytes(path: &Path) -> u64 {
    let size = |path: &Path| path.metadata().map_or(0, |data| data.len());
    match path.read_dir() {
        Ok(files) => {
            let weights = files.flatten().map(|file| file.path());
            weights
                .filter(|path| path.extension().is_some_and(|kind| kind == "safetensors"))
                .map(|path| size(&path))
                .sum()
        }
        Err(_) => size(path),
    }
}

/// How often the user has asked the server to stop.
struct Signals(watch::Receiver<usize>);

impl Signals {
    /// Watches from now on.
    fn new() -> io::Result<Signals> {
        let (sender, receiver) = watch::channel(0);
        #[cfg(unix)]
        {
            use tokio::signal::unix::{SignalKind, signal};
            let mut terminate = signal(SignalKind::terminate())?;
            let mut interrupt = signal(SignalKind::interrupt())?;
            tokio::spawn(async move {
                loop {
                    tokio::select! {
                        _ = terminate.recv() => {}
                        _ = interrupt.recv() => {}
                    }
                    sender.send_modify(|count| *count += 1);
                }
            });
        }
        #[cfg(not(unix))]
        tokio::spawn(async move {
            while tokio::signal::ctrl_c().await.is_ok() {
                sender.send_modify(|count| *count += 1);
            }
        });
        Ok(Signals(receiver))
    }

    /// Done when a signal has come for the `n`-th time.
    fn nth(&self, n: usize) -> impl Future<Output = ()> + use<> {
        let mut count = self.0.clone();
        async move {
            if count.wait_for(|&count| count >= n).await.is_err() {
                std::future::pending::<()>().await;
            }
            if n == 1 {
                eprintln!("Stopping; answers in progress may end. Once more stops at once.");
            }
        }
    }
}

/// Tokens of a pass; -1 puts no bound on them.
fn chunk(text: &str) -> Result<usize, String> {
    if text == "-1" { Ok(usize::MAX) } else { positive(text) }
}

fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if share > 0.0 && share < 1.0 => Ok(share),
        _ => Err("must be a number between 0 and 1".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_bounded() {
        assert_eq!(chunk("-1"), Ok(usize::MAX));
        assert_eq!(chunk("8192"), Ok(8192));
        assert!(chunk("0").is_err() && chunk("-2").is_err());
        assert!(
            share("0.85").is_ok() && ["0", "1", "-1", "nan", "x"].iter().all(|text| share(text).is_err())
        );
    }
}
