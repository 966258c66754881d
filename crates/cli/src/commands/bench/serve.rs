//! `oscar bench serve`: what clients of a server see, and what the server costs without a model.

use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use oscar_bench::{
    Arrival, GoodputLimits, Pace, ServeBench, ServeBenchError, Workload, added_latency, serve, streamed,
};
use oscar_engine::{EngineOptions, MockEngine, MockOptions, Serve};
use oscar_kernels::Inspect;
use oscar_model::text::{ChatTemplate, Tokenizer};
use oscar_report::Report;
use oscar_server::{ServedModel, Server, ServerOptions};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

use crate::arguments::{ModelArguments, non_empty, positive};
use crate::device::OnDevice;
use crate::failure::Failure;
use crate::loading::{EngineArguments, start};
use crate::output::print_text;

/// Streams at a time when throughput is measured without a model.
const MOCK_STREAMS: usize = 256;
/// Clients when latency is measured without a model.
const MOCK_CLIENTS: usize = 64;
/// Tokens per second that each of them gets.
const MOCK_TOKENS_PER_S: f64 = 50.0;
/// Time that the mock takes for the first token of an answer.
const MOCK_LATENCY: Duration = Duration::from_millis(20);
/// The same for an outside load tool: long enough that a tool's own milliseconds do not count.
const HELD_LATENCY: Duration = Duration::from_millis(250);

/// Just enough of a tokenizer for the prompt that a mock gets.
const MOCK_TOKENIZER: &str = r#"{"version": "1.0", "added_tokens": [], "normalizer": null, "post_processor": null,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
    "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
    "model": {"type": "BPE", "vocab": {"g": 0, "o": 1, "n": 2, "Ġ": 3}, "merges": []}}"#;

/// Latency, throughput and cache hits of a server, as its clients see them.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    oscar bench serve smollm2\n  \
    oscar bench serve --url http://127.0.0.1:30000 --rate 4 --requests 200\n  \
    oscar bench serve --url http://127.0.0.1:30000 --clients 16 --shared 0.9 --prefix-words 800 --json\n  \
    oscar bench serve --mock\n\n\
    A MODEL is served in this process, on loopback. --url takes any server that speaks OpenAI's protocol over HTTP.\n\
    --mock measures the server alone, with an engine that says words without a model: events per second with 256\n\
    streams, and how much later than they were due tokens arrive at 64 clients.\n\n\
    ttft is the time to the first piece of text, tpot an answer's mean time per token after it, itl the time from\n\
    piece to piece. Good answers keep to --ttft-limit-ms and --tpot-limit-ms. hit_rate is what the server says in\n\
    usage.prompt_tokens_details.")]
pub(super) struct ServeBenchArguments {
    /// Model to serve: catalogue name, .gguf file, folder with config.json, or hub id.
    #[arg(value_name = "MODEL", conflicts_with_all = ["url", "mock"])]
    model: Option<String>,

    /// Random weights instead of a model's, in a published shape such as qwen3-8b or qwen3-8b:q4_k_m.
    #[arg(long, value_name = "SHAPE", conflicts_with_all = ["model", "url", "mock"])]
    random_weights: Option<String>,

    /// Use only what is on disk; never download.
    #[arg(long, env = "OSCAR_OFFLINE", value_parser = clap::builder::FalseyValueParser::new())]
    offline: bool,

    /// A server that runs already.
    #[arg(long, value_name = "URL", conflicts_with = "mock")]
    url: Option<String>,

    /// The server alone, without a model.
    #[arg(long)]
    mock: bool,

    /// Do not measure: keep the mock listening at its steady pace, for an outside load tool, until interrupted.
    #[arg(long, requires = "mock")]
    hold: bool,

    /// Key for that server.
    #[arg(long, env = "OSCAR_API_KEY", hide_env_values = true, value_name = "KEY", value_parser = non_empty)]
    api_key: Option<String>,

    /// Name by which that server knows the model.
    #[arg(long, value_name = "NAME", value_parser = non_empty)]
    model_name: Option<String>,

    /// Chats instead of plain texts.
    #[arg(long)]
    chat: bool,

    /// Requests per second, at random times, however long answers take; without it clients wait for their answers.
    #[arg(long, value_name = "N", value_parser = rate, conflicts_with = "clients")]
    rate: Option<f64>,

    /// Clients that send their next request when they have the answer to the one before.
    #[arg(long, default_value = "8", value_name = "N", value_parser = positive)]
    clients: usize,

    /// Requests that are measured.
    #[arg(long, default_value = "64", value_name = "N", value_parser = positive)]
    requests: usize,

    /// Requests before, with prompts that have nothing in common with the measured ones.
    #[arg(long, default_value = "2", value_name = "N", value_parser = positive)]
    warmup: usize,

    /// Texts that several requests begin with.
    #[arg(long, default_value = "4", value_name = "N", value_parser = positive)]
    prefixes: usize,

    /// Words of each prefix.
    #[arg(long, default_value = "200", value_name = "WORDS", value_parser = positive)]
    prefix_words: usize,

    /// Words of a request's own after it.
    #[arg(long, default_value = "20", value_name = "WORDS", value_parser = positive)]
    own_words: usize,

    /// Share of requests that begin with one of the texts.
    #[arg(long, default_value = "0.75", value_name = "SHARE", value_parser = share)]
    shared: f64,

    /// Tokens of each answer.
    #[arg(long, default_value = "32", value_name = "TOKENS", value_parser = positive)]
    output_tokens: usize,

    /// What prompts and arrivals depend on.
    #[arg(long, default_value = "1", value_name = "N")]
    seed: u64,

    /// Longest time to the first piece of a good answer.
    #[arg(long, default_value = "2000", value_name = "MS", value_parser = positive)]
    ttft_limit_ms: usize,

    /// Longest mean time per further token of a good answer.
    #[arg(long, default_value = "100", value_name = "MS", value_parser = positive)]
    tpot_limit_ms: usize,

    /// Answers in progress at a time, for a MODEL.
    #[arg(long, default_value = "32", value_name = "N", value_parser = positive)]
    max_running_requests: usize,

    #[command(flatten)]
    engine: EngineArguments,

    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate > 0.0 && rate < 1e6 => Ok(rate),
        _ => Err("must be a number above 0".to_owned()),
    }
}

fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err("must be a number from 0 to 1".to_owned()),
    }
}

impl ServeBenchArguments {
    pub(super) fn run(self) -> Result<(), Failure> {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let runtime = builder.enable_all().build();
        let runtime = runtime
            .map_err(|error| Failure::new(format!("cannot start threads for connections: {error}")))?;
        if self.hold {
            return serve_mock_until_interrupted(&runtime);
        }
        let mut report = Report::here();
        let columns = if self.mock {
            self.run_mock(&runtime, &mut report)?;
            vec![]
        } else {
            self.run_served(&runtime, &mut report)?;
            vec![
                "arrival",
                "requests",
                "failed",
                "prompt_tokens",
                "output_tokens_per_s",
                "ttft_ms_p50",
                "ttft_ms_p99",
                "tpot_ms_p50",
                "tpot_ms_p99",
                "itl_ms_p99",
                "goodput_per_s",
                "good",
                "hit_rate",
            ]
        };
        runtime.shutdown_background();
        if self.json { print_text(&report.json()) } else { print_text(report.table(&columns).trim_end()) }
    }

    fn run_served(&self, runtime: &Runtime, report: &mut Report) -> Result<(), Failure> {
        let random = self.random_weights.as_deref().map(ModelArguments::random_name);
        let url = match (&self.url, random.as_ref().or(self.model.as_ref())) {
            (Some(url), _) => url.clone(),
            (None, Some(model)) => {
                let model = ModelArguments { model: model.clone(), offline: self.offline, shard: None };
                self.start_model(runtime, &model)?
            }
            (None, None) => {
                return Err(Failure::new("there is no server to measure")
                    .with_fix("give a MODEL to serve, the --url of a server, or --mock"));
            }
        };
        let arrival = match self.rate {
            Some(rate) => Arrival::Poisson { rate },
            None => Arrival::Closed { clients: self.clients },
        };
        let milliseconds = |count: usize| Duration::from_millis(count as u64);
        let bench = ServeBench {
            url,
            api_key: self.api_key.clone(),
            model: self.model_name.clone(),
            chat: self.chat,
            workload: Workload {
                prefixes: self.prefixes,
                prefix_words: self.prefix_words,
                own_words: self.own_words,
                shared: self.shared,
                output_tokens: self.output_tokens,
                seed: self.seed,
            },
            arrival,
            requests: self.requests,
            warmup: self.warmup,
            limits: GoodputLimits {
                ttft: milliseconds(self.ttft_limit_ms),
                tpot: milliseconds(self.tpot_limit_ms),
            },
        };
        report.push(runtime.block_on(serve(&bench)).map_err(failure)?);
        Ok(())
    }

    /// Serves a model on loopback.
    fn start_model(&self, runtime: &Runtime, model: &ModelArguments) -> Result<String, Failure> {
        let service = BenchService { arguments: self, runtime, model };
        self.engine.device.run(self.engine.kv.cache.deterministic, service)
    }

    fn serve_model<B: Inspect>(
        &self,
        runtime: &Runtime,
        model: &ModelArguments,
        backend: B,
    ) -> Result<String, Failure> {
        let named = self.engine.load_model(model, backend)?;
        let chosen = self.engine.kv.settle(&named)?;
        let options =
            EngineOptions { max_running: self.max_running_requests, ..self.engine.options(&chosen) };
        let engine = Arc::new(start(&named, &options, &chosen)?);
        let tokenizer = Arc::clone(named.model.tokenizer());
        let template = named.model.chat_template().ok().cloned();
        let family = named.model.config().family;
        let served =
            ServedModel::new(named.name().to_owned(), named.name().to_owned(), family, tokenizer, template);
        listen(runtime, engine, served)
    }

    fn run_mock(&self, runtime: &Runtime, report: &mut Report) -> Result<(), Failure> {
        // Latency first: hundreds of streams that were just broken off take a while to be cleared away.
        let pace = Pace { latency: MOCK_LATENCY, interval: Duration::from_secs_f64(1.0 / MOCK_TOKENS_PER_S) };
        let url = listen(runtime, Arc::new(MockEngine::new(paced(MOCK_LATENCY))), mock_model()?)?;
        let added = runtime.block_on(added_latency(&url, pace, MOCK_CLIENTS, 4, 100)).map_err(failure)?;
        let unbound = MockOptions { context: 1 << 30, ..MockOptions::default() };
        let url = listen(runtime, Arc::new(MockEngine::new(unbound)), mock_model()?)?;
        report.push(runtime.block_on(streamed(&url, MOCK_STREAMS, 5.0)).map_err(failure)?);
        report.push(added);
        Ok(())
    }
}

/// A model that is served to be measured.
struct BenchService<'a> {
    arguments: &'a ServeBenchArguments,
    runtime: &'a Runtime,
    model: &'a ModelArguments,
}

impl OnDevice for BenchService<'_> {
    type Output = String;

    fn run_on<B: Inspect>(self, backend: B) -> Result<String, Failure> {
        self.arguments.serve_model(self.runtime, self.model, backend)
    }
}

/// A mock whose tokens are due at known times.
fn paced(latency: Duration) -> MockOptions {
    MockOptions { tokens_per_s: Some(MOCK_TOKENS_PER_S), latency, ..MockOptions::default() }
}

/// Keeps a mock listening until interrupted.
fn serve_mock_until_interrupted(runtime: &Runtime) -> Result<(), Failure> {
    let url = listen(runtime, Arc::new(MockEngine::new(paced(HELD_LATENCY))), mock_model()?)?;
    print_text(&format!(
        "The mock is ready at {url}: the first token after {} ms, then {MOCK_TOKENS_PER_S} per second and answer. \
         Ctrl-C ends it.",
        HELD_LATENCY.as_millis()
    ))?;
    let interrupted = runtime.block_on(tokio::signal::ctrl_c());
    interrupted.map_err(|error| Failure::new(format!("cannot wait for an interrupt: {error}")))
}

/// Serves on a free port of this machine until the runtime ends.
fn listen(runtime: &Runtime, engine: Arc<dyn Serve>, model: ServedModel) -> Result<String, Failure> {
    let cannot = |error| Failure::new(format!("cannot listen on 127.0.0.1: {error}"));
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).map_err(cannot)?;
    let address = listener.local_addr().map_err(cannot)?;
    let server = Server::new(engine, model, ServerOptions::default());
    runtime.spawn(async move { server.serve(listener, pending(), pending()).await });
    Ok(format!("http://{address}"))
}

fn mock_model() -> Result<ServedModel, Failure> {
    let folder = tempfile::tempdir()?;
    std::fs::write(folder.path().join("tokenizer.json"), MOCK_TOKENIZER)?;
    let tokenizer = Tokenizer::from_folder(folder.path()).map_err(Failure::new)?;
    let template = "{% for message in messages %}{{ message.content }}{% endfor %}";
    let template = ChatTemplate::from_source(template).map_err(Failure::new)?;
    Ok(ServedModel::new("mock", "mock", "mock", Arc::new(tokenizer), Some(template)))
}

fn failure(error: ServeBenchError) -> Failure {
    let fix = match &error {
        ServeBenchError::Connect { .. } => Some("start it, or give another --url"),
        ServeBenchError::Status { status: 401, .. } => Some("give its key with --api-key"),
        ServeBenchError::Status { status: 404, .. } => {
            Some("give the name of the model with --model-name, and the --url without /v1/...")
        }
        _ => None,
    };
    let failure = Failure::new(error);
    match fix {
        Some(fix) => failure.with_fix(fix),
        None => failure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_bounded() {
        assert!(rate("0.5").is_ok() && ["0", "-1", "nan", "x"].iter().all(|text| rate(text).is_err()));
        assert!(share("0").is_ok() && share("1").is_ok() && share("1.1").is_err() && share("nan").is_err());
    }
}
