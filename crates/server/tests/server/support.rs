//! A server in this process, and a client that asks it.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::http::{Request, Response};
use http_body_util::BodyExt;
use oscar_engine::{Engine, EngineOptions, KvOptions, MockEngine, MockOptions, Serve};
use oscar_kernels::cpu::CpuBackend;
use oscar_model::source::ModelPath;
use oscar_model::text::{ChatTemplate, Tokenizer};
use oscar_model::{LoadedModel, SamplingDefaults};
use oscar_server::{ServedModel, Server, ServerOptions};
use serde_json::Value;
use tower::ServiceExt;

/// The layout of many models, with tools listed before the messages.
pub(crate) const TEMPLATE: &str = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}\
    {% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}\
    {% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

pub(crate) fn fixture() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures/models/qwen3")
}

pub(crate) fn tokenizer() -> Arc<Tokenizer> {
    Arc::new(Tokenizer::from_folder(fixture()).unwrap())
}

pub(crate) fn served(template: &str) -> ServedModel {
    let template = ChatTemplate::from_source(template).unwrap();
    ServedModel::new("tiny", "models/tiny", "qwen3", tokenizer(), Some(template))
}

/// A server and the engine behind it.
pub(crate) struct TestServer<E> {
    pub(crate) engine: Arc<E>,
    pub(crate) server: Arc<Server>,
}

pub(crate) fn mock() -> TestServer<MockEngine> {
    mock_with(MockOptions::default(), ServerOptions::default())
}

pub(crate) fn mock_with(engine: MockOptions, options: ServerOptions) -> TestServer<MockEngine> {
    let engine = Arc::new(MockEngine::new(engine));
    let server = Server::new(Arc::clone(&engine) as Arc<dyn Serve>, served(TEMPLATE), options);
    TestServer { engine, server: Arc::new(server) }
}

/// A mock in front of which a model is served that comes with settings of its own.
pub(crate) fn mock_drawing(sampling: SamplingDefaults) -> TestServer<MockEngine> {
    let engine = Arc::new(MockEngine::new(MockOptions::default()));
    let served = served(TEMPLATE).with_sampling(sampling);
    let server = Server::new(Arc::clone(&engine) as Arc<dyn Serve>, served, ServerOptions::default());
    TestServer { engine, server: Arc::new(server) }
}

/// A tiny random model with room for `context` tokens.
pub(crate) fn tiny(context: usize, options: EngineOptions) -> TestServer<Engine<CpuBackend>> {
    tiny_with(context, options, ServerOptions::default())
}

pub(crate) fn tiny_with(
    context: usize,
    options: EngineOptions,
    server: ServerOptions,
) -> TestServer<Engine<CpuBackend>> {
    tiny_chatting(context, EngineOptions { kv: KvOptions::default(), ..options }, server, TEMPLATE)
}

/// The same with a chat template, and with the cache that the options say.
pub(crate) fn tiny_chatting(
    context: usize,
    options: EngineOptions,
    server: ServerOptions,
    template: &str,
) -> TestServer<Engine<CpuBackend>> {
    let folder = tempfile::tempdir().unwrap();
    for file in ["generation_config.json", "tokenizer.json", "model.safetensors"] {
        fs::copy(fixture().join(file), folder.path().join(file)).unwrap();
    }
    let config = fs::read_to_string(fixture().join("config.json")).unwrap();
    let longer = format!("\"max_position_embeddings\": {context}");
    let config = config.replace("\"max_position_embeddings\": 256", &longer);
    fs::write(folder.path().join("config.json"), config).unwrap();
    // Tests run side by side, and workers that spin would take turns on few cores.
    let backend = CpuBackend::new(1).unwrap();
    let backend = Arc::new(if options.deterministic { backend.deterministic() } else { backend });
    let model = LoadedModel::load(&ModelPath::Folder(folder.path().to_path_buf()), backend).unwrap();
    let options = EngineOptions { prefill_chunk: 64, ..options };
    let engine = Arc::new(Engine::new(Arc::new(model), &options).unwrap());
    let serve = Arc::clone(&engine) as Arc<dyn Serve>;
    TestServer { engine, server: Arc::new(Server::new(serve, served(template), server)) }
}

impl<E> TestServer<E> {
    pub(crate) fn router(&self) -> Router {
        self.server.router()
    }

    /// Posts JSON.
    pub(crate) async fn post(&self, path: &str, body: Value) -> Answer {
        let request = Request::post(path).header("content-type", "application/json");
        self.send(request.body(Body::from(body.to_string())).unwrap()).await
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.send(Request::get(path).body(Body::empty()).unwrap()).await
    }

    pub(crate) async fn send(&self, request: Request<Body>) -> Answer {
        Answer::of(self.router().oneshot(request).await.unwrap()).await
    }

    /// Binds a port of this machine and serves it until the returned sender is dropped or used.
    pub(crate) async fn listen(&self) -> Listening {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let server = Arc::clone(&self.server);
        let task = tokio::spawn(async move {
            let stop = async { drop(stopped.await) };
            server.serve(listener, stop, std::future::pending()).await
        });
        Listening { address, stop: Some(stop), task }
    }
}

/// A server that listens.
pub(crate) struct Listening {
    pub(crate) address: std::net::SocketAddr,
    pub(crate) stop: Option<tokio::sync::oneshot::Sender<()>>,
    pub(crate) task: tokio::task::JoinHandle<oscar_server::Ended>,
}

/// What came back.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: axum::http::HeaderMap,
    pub(crate) text: String,
}

impl Answer {
    async fn of(response: Response<Body>) -> Answer {
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        Answer { status, headers, text: String::from_utf8(bytes.to_vec()).unwrap() }
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }

    /// The body of a successful answer.
    pub(crate) fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.text);
        self.json()
    }

    /// The error of a refused request.
    pub(crate) fn refused(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{}", self.text);
        let error = self.json()["error"].clone();
        let fields: Vec<&String> = error.as_object().expect(&self.text).keys().collect();
        assert_eq!(fields, ["message", "type", "param", "code"]);
        assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()));
        error
    }

    /// The events of a stream whose events have names, which their data repeat as `type`.
    pub(crate) fn named_events(&self) -> Vec<Value> {
        assert_eq!(self.status, 200, "{}", self.text);
        assert_eq!(self.headers["content-type"], "text/event-stream; charset=utf-8");
        let event = |block: &str| {
            let (name, data) = block.split_once('\n').unwrap_or_else(|| panic!("{block:?}"));
            let (name, data) = (name.strip_prefix("event: ").unwrap(), data.strip_prefix("data: ").unwrap());
            let event: Value = serde_json::from_str(data).unwrap_or_else(|error| panic!("{error}: {data}"));
            assert_eq!(event["type"], name);
            event
        };
        self.text.split_terminator("\n\n").map(event).collect()
    }

    /// The events of a stream, which must end as streams end.
    pub(crate) fn events(&self) -> Vec<Value> {
        assert_eq!(self.status, 200, "{}", self.text);
        assert_eq!(self.headers["content-type"], "text/event-stream; charset=utf-8");
        let mut blocks: Vec<&str> = self.text.split_terminator("\n\n").collect();
        assert_eq!(blocks.pop(), Some("data: [DONE]"));
        let event = |block: &str| {
            let data = block.strip_prefix("data: ").unwrap_or_else(|| panic!("{block:?}"));
            serde_json::from_str(data).unwrap_or_else(|error| panic!("{error}: {data}"))
        };
        blocks.into_iter().map(event).collect()
    }
}

/// Waits until something holds.
pub(crate) async fn eventually(what: &str, holds: impl Fn() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < Duration::from_secs(20), "{what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
