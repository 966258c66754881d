//! A model behind HTTP: where the server listens, what clients may do, and how it starts and stops.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};
use oscar_engine::{Engine, Serve};
use oscar_kernels::Backend;
use oscar_model::SamplingDefaults;
use oscar_model::text::TextError;
use oscar_server::{
    CacheShape, KvEventAddress, ReasoningFormat, ServedModel, Server, ServerOptions, ToolCallFormat,
    UnknownFields,
};
use tokio::net::TcpSocket;
use tokio::runtime::Runtime;

use crate::arguments::{byte_size, non_empty, positive};
use crate::failure::Failure;
use crate::named_model::NamedModel;
use crate::output::{binary_bytes, count};
use crate::signals::Signals;

/// Connections that may wait to be accepted.
const BACKLOG: u32 = 1024;

/// Threads for connections: more than these are never busy, as tokens come from the engine.
const MAX_HTTP_THREADS: usize = 4;

/// Where the server listens, and how it speaks for the model.
#[derive(Debug, Args)]
pub(crate) struct HttpArguments {
    /// Address to listen on; 0.0.0.0 is all of them.
    #[arg(long, default_value = "127.0.0.1", value_name = "ADDRESS")]
    host: String,

    /// Port to listen on; 0 takes a free one.
    #[arg(long, default_value_t = 30000, value_name = "PORT")]
    port: u16,

    /// Key that clients must show; without it no key is needed.
    #[arg(long, env = "OSCAR_API_KEY", hide_env_values = true, value_name = "KEY", value_parser = non_empty)]
    api_key: Option<String>,

    /// Name that clients call the model by; as it was given by default.
    #[arg(long, value_name = "NAME", value_parser = non_empty)]
    served_model_name: Option<String>,

    /// How the model writes its reasoning: a name such as qwen3, auto or none.
    #[arg(long, default_value = "auto", value_name = "NAME")]
    reasoning_parser: String,

    /// How the model writes calls of tools: a name such as qwen25, auto or none.
    #[arg(long, default_value = "auto", value_name = "NAME")]
    tool_call_parser: String,

    /// Read control tokens such as <|im_end|> in messages and tools as tokens, not as text: whoever writes part of a
    /// message can then begin and end turns.
    #[arg(long)]
    parse_special_in_messages: bool,

    /// How answers are drawn when a request does not say: as the model's own files do (generation_config.json), or
    /// with temperature 1 and all tokens, as OpenAI's do.
    #[arg(long, value_enum, default_value_t, value_name = "SOURCE")]
    sampling_defaults: SamplingSource,

    /// What happens to fields of requests that the server does not know: they are refused by name, or ignored as if they
    /// were not there.
    #[arg(long, value_enum, default_value_t, value_name = "POLICY")]
    unknown_fields: UnknownFieldPolicy,

    #[command(flatten)]
    limits: LimitArguments,
}

/// Where settings come from that a request does not make.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum SamplingSource {
    #[default]
    Model,
    Openai,
}

/// What happens to fields of requests that the server does not know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum UnknownFieldPolicy {
    #[default]
    Refuse,
    Ignore,
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

    /// Names of this server besides localhost and addresses, separated by commas; * is any. Without a key a request for
    /// another name is refused: a web page could have its own name lead here.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    allowed_hosts: Vec<String>,

    /// Memory for large bodies that are being read at a time, and as much for what they become; others wait.
    #[arg(long, default_value = "128MiB", value_name = "SIZE", value_parser = byte_size)]
    max_body_memory: u64,

    /// Threads for connections; up to 4 by default.
    #[arg(long, value_name = "N", value_parser = positive)]
    http_threads: Option<usize>,
}

/// A port that was taken, and the threads that will serve it.
pub(crate) struct Listener {
    runtime: Runtime,
    socket: TcpSocket,
}

impl Listener {
    /// The threads that answer requests.
    pub(crate) fn runtime(&self) -> &Runtime {
        &self.runtime
    }
}

impl HttpArguments {
    /// Starts the threads and takes the port. What can be wrong without a model is said here, because loading one takes
    /// long.
    pub(crate) fn open(&self) -> Result<Listener, Failure> {
        self.parsers(None)?;
        if self.api_key.is_none() && self.limits.allowed_hosts.iter().any(|name| name == "*") {
            tracing::warn!(
                "--allowed-hosts * without a key: any web page can have its name lead to this server"
            );
        }
        let runtime = self.runtime()?;
        let socket = self.bind(&runtime)?;
        Ok(Listener { runtime, socket })
    }

    /// Serves an engine until the user stops it, or until its device fails, which is a failure.
    pub(crate) fn serve<B: Backend>(
        &self,
        listener: Listener,
        named: &NamedModel<B>,
        engine: Arc<Engine<B>>,
        events: Option<KvEventAddress>,
    ) -> Result<(), Failure> {
        let Listener { runtime, socket } = listener;
        let (served, options) = self.server(named, &engine, events.clone())?;
        let name = served.name.clone();
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
        if let Some(failure) = ended.failure {
            return Err(failure.into());
        }
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
    fn sampling<B: Backend>(&self, named: &NamedModel<B>) -> Result<SamplingDefaults, Failure> {
        match self.sampling_defaults {
            SamplingSource::Openai => Ok(SamplingDefaults::default()),
            SamplingSource::Model => named.model.sampling_defaults().copied().map_err(|error| {
                Failure::new(format!("how to draw answers: {error}"))
                    .with_fix("correct the file, or give --sampling-defaults openai")
            }),
        }
    }

    /// The model under its name, and the settings of the server.
    fn server<B: Backend>(
        &self,
        named: &NamedModel<B>,
        engine: &Engine<B>,
        kv_events: Option<KvEventAddress>,
    ) -> Result<(ServedModel, ServerOptions), Failure> {
        let sampling = self.sampling(named)?;
        let template = match named.model.chat_template() {
            Ok(template) => Some(template.clone()),
            Err(TextError::NoChatTemplate) => {
                tracing::warn!("{} has no chat template: only plain text can be continued", named.name());
                None
            }
            Err(error) => {
                tracing::warn!("chats are refused: {error}");
                None
            }
        };
        let name = self.served_model_name.clone().unwrap_or_else(|| named.name().to_owned());
        let tokenizer = Arc::clone(named.model.tokenizer());
        let family = named.model.config().family;
        let served = ServedModel::new(name, named.name().to_owned(), family, tokenizer, template)
            .with_sampling(sampling);
        let (reasoning_parser, tool_call_parser) = self.parsers(served.template_source())?;
        let seconds = |count: usize| Duration::from_secs(count as u64);
        let budget = engine.budget();
        let options = ServerOptions {
            api_key: self.api_key.clone(),
            allowed_origins: self.limits.cors_allow_origin.clone(),
            allowed_hosts: self.limits.allowed_hosts.clone(),
            body_bytes: usize::try_from(self.limits.max_body).unwrap_or(usize::MAX),
            all_bodies_bytes: usize::try_from(self.limits.max_body_memory).unwrap_or(usize::MAX),
            header_timeout: seconds(self.limits.header_seconds),
            body_timeout: seconds(self.limits.transfer_seconds),
            write_timeout: seconds(self.limits.transfer_seconds),
            connections: self.limits.max_connections,
            shutdown: Duration::from_secs(self.limits.shutdown_seconds),
            reasoning_parser,
            tool_call_parser,
            parse_special_in_messages: self.parse_special_in_messages,
            unknown_fields: match self.unknown_fields {
                UnknownFieldPolicy::Refuse => UnknownFields::Refuse,
                UnknownFieldPolicy::Ignore => UnknownFields::Ignore,
            },
            cache: CacheShape {
                sink_pages: budget.windows.sink,
                recent_pages: budget.windows.recent,
                exact_page_bytes: budget.exact.page_bytes,
                sealed_page_bytes: budget.sealed.page_bytes,
                high_page_bytes: budget.high.page_bytes,
                scratch_page_bytes: budget.scratch.page_bytes,
            },
            kv_events,
        };
        Ok((served, options))
    }
}

/// What users want to know when the server is ready.
fn banner<B: Backend>(address: SocketAddr, name: &str, engine: &Engine<B>) -> String {
    let (info, budget) = (engine.info(), engine.budget());
    let host = if address.ip().is_unspecified() { "127.0.0.1".to_owned() } else { host(address) };
    format!(
        "{name} is ready at http://{host}:{}\n  \
         cache     {}, {:.2} bits per element, {} that become resident as they fill\n  \
         capacity  {} tokens or {} requests of {}, {} requests at a time",
        address.port(),
        info.kv,
        info.bits_per_element,
        binary_bytes(budget.total_bytes() as u64),
        count(info.capacity_tokens as u64),
        info.capacity_tokens / info.context.max(1),
        count(info.context as u64),
        info.max_running,
    )
}

fn host(address: SocketAddr) -> String {
    if address.is_ipv6() { format!("[{}]", address.ip()) } else { address.ip().to_string() }
}

#[cfg(test)]
mod tests;
