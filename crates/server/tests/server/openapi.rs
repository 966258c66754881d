//! The description at `/openapi.json` against the server it describes.
//!
//! The routes and the fields of requests are read from the sources: neither can be asked of a running server, and a
//! second list would be forgotten like the first.

use std::collections::{BTreeMap, BTreeSet};

use axum::body::Body;
use axum::http::{Method, Request};
use oscar_engine::MockOptions;
use oscar_server::ServerOptions;
use serde_json::{Value, json};

use crate::support::{mock, mock_with};

const METHODS: [&str; 4] = ["get", "post", "put", "delete"];

/// A path and a method.
type Operation = (String, String);

fn description() -> Value {
    serde_json::from_str(include_str!("../../src/openapi.json")).unwrap()
}

fn operations(description: &Value) -> BTreeMap<Operation, Value> {
    let mut operations = BTreeMap::new();
    for (path, methods) in description["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            assert!(METHODS.contains(&method.as_str()), "{path} {method}");
            operations.insert((path.clone(), method.clone()), operation.clone());
        }
    }
    operations
}

/// The routes of `router.rs`.
fn routes() -> BTreeSet<Operation> {
    let source = include_str!("../../src/routes/router.rs");
    let mut routes = BTreeSet::new();
    for line in source.split(".route(\"").skip(1) {
        let (path, rest) = line.split_once('"').unwrap();
        let handlers = rest.lines().next().unwrap();
        for method in METHODS.iter().filter(|method| handlers.contains(&format!("{method}("))) {
            routes.insert((path.replace("{*", "{"), (*method).to_owned()));
        }
    }
    assert!(routes.len() > 20 && routes.contains(&("/generate".to_owned(), "put".to_owned())), "{routes:?}");
    routes
}

/// The fields of a request type.
fn fields(source: &str, name: &str) -> BTreeSet<String> {
    let (_, body) = source.split_once(&format!("struct {name} {{\n")).unwrap();
    let (body, _) = body.split_once("\n}").unwrap();
    // What the server adds to it comes last.
    let body = body.split_once("#[serde(skip)]").map_or(body, |(body, _)| body);
    let lines = body
        .lines()
        .map(|line| line.trim().trim_start_matches("pub(crate) ").trim_start_matches("pub(super) "));
    // What is left over is no field of its own.
    let lines = lines.filter(|line| !line.starts_with("//") && !line.starts_with("unread:"));
    lines.filter_map(|line| line.split_once(':')).map(|(name, _)| name.to_owned()).collect()
}

fn properties(description: &Value, schemas: &[&str]) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for name in schemas {
        let schema = &description["components"]["schemas"][name];
        for schema in [schema, &schema["allOf"][1]] {
            names
                .extend(schema["properties"].as_object().into_iter().flatten().map(|(name, _)| name.clone()));
        }
    }
    names
}

/// Every `$ref` of a document.
fn references<'v>(value: &'v Value, found: &mut BTreeSet<&'v str>) {
    match value {
        Value::Object(entries) => {
            found.extend(entries.get("$ref").and_then(Value::as_str));
            entries.values().for_each(|value| references(value, found));
        }
        Value::Array(values) => values.iter().for_each(|value| references(value, found)),
        _ => {}
    }
}

#[test]
fn every_route_is_described_and_nothing_else() {
    let described: BTreeSet<Operation> = operations(&description()).into_keys().collect();
    assert_eq!(described, routes());
}

#[test]
fn requests_have_the_fields_the_server_reads() {
    let description = description();
    let openai = include_str!("../../src/protocol/openai.rs");
    let messages = include_str!("../../src/protocol/messages/mod.rs");
    let responses = include_str!("../../src/protocol/responses/mod.rs");
    let embeddings = include_str!("../../src/protocol/embeddings.rs");
    let score = include_str!("../../src/protocol/score.rs");
    let native = include_str!("../../src/protocol/generate.rs");
    let llama = include_str!("../../src/protocol/llama.rs");
    let tokens = include_str!("../../src/routes/tokens.rs");
    let info = include_str!("../../src/routes/info.rs");
    for (source, name, schemas) in [
        (openai, "OpenAiRequest", &["AnswerSettings", "ChatRequest", "CompletionRequest"][..]),
        (messages, "MessagesRequest", &["MessagesRequest"]),
        (responses, "ResponsesRequest", &["ResponsesRequest"]),
        (embeddings, "EmbeddingsRequest", &["EmbeddingsRequest"]),
        (score, "ScoreRequest", &["ScoreRequest"]),
        (native, "GenerateRequest", &["GenerateRequest"]),
        (native, "SamplingParams", &["SamplingParams"]),
        (llama, "LlamaRequest", &["LlamaRequest"]),
        (tokens, "TokenizeRequest", &["TokenizeRequest"]),
        (tokens, "DetokenizeRequest", &["DetokenizeRequest"]),
        (info, "AbortRequest", &["AbortRequest"]),
    ] {
        let fields = fields(source, name);
        assert!(fields.len() > 1, "{name}");
        assert_eq!(properties(&description, schemas), fields, "{name}");
    }
}

#[test]
fn the_document_holds_together() {
    let description = description();
    assert!(description["openapi"].as_str().unwrap().starts_with("3.1."));
    assert_eq!(description["info"]["version"], env!("CARGO_PKG_VERSION"));
    let mut used = BTreeSet::new();
    references(&description, &mut used);
    for reference in &used {
        let target = reference.strip_prefix('#').and_then(|pointer| description.pointer(pointer));
        assert!(target.is_some(), "{reference}");
    }
    for kind in ["schemas", "responses"] {
        for name in description["components"][kind].as_object().unwrap().keys() {
            assert!(used.contains(format!("#/components/{kind}/{name}").as_str()), "{name} is not used");
        }
    }
    let mut ids = BTreeSet::new();
    for ((path, method), operation) in operations(&description) {
        let here = format!("{method} {path}");
        assert!(ids.insert(operation["operationId"].as_str().expect(&here).to_owned()), "{here}");
        assert!(operation["summary"].as_str().is_some_and(|summary| !summary.is_empty()), "{here}");
        assert_eq!(
            operation.get("requestBody").is_some(),
            method != "get" && path != "/flush_cache",
            "{here}"
        );
        let responses = operation["responses"].as_object().expect(&here);
        assert!(responses.contains_key("200") && responses.contains_key("500"), "{here}");
        assert!(responses["200"]["content"].is_object(), "{here}");
        let in_path = path.matches('{').count();
        assert_eq!(operation["parameters"].as_array().map_or(0, Vec::len), in_path, "{here}");
    }
}

#[tokio::test]
async fn the_description_is_served_to_anyone() {
    let options = ServerOptions { api_key: Some("secret".to_owned()), ..ServerOptions::default() };
    let server = mock_with(MockOptions::default(), options);
    let answer = server.get("/openapi.json").await;
    assert_eq!(answer.headers["content-type"], "application/json");
    assert_eq!(answer.ok(), description());
}

#[tokio::test]
async fn described_operations_are_there_and_others_are_not() {
    let server = mock();
    let description = description();
    let operations = operations(&description);
    for (path, _) in operations.keys() {
        for method in METHODS {
            let request = Request::builder()
                .method(Method::from_bytes(method.to_uppercase().as_bytes()).unwrap())
                .uri(path.replace("{name}", "tiny"))
                .header("content-type", "application/json");
            let answer = server.send(request.body(Body::from("{}")).unwrap()).await;
            let here = format!("{method} {path}: {}", answer.text);
            match operations.get(&(path.clone(), method.to_owned())) {
                // An empty request may be a bad one; the status must be described.
                Some(operation) => {
                    assert!(operation["responses"].get(answer.status.to_string()).is_some(), "{here}");
                    assert_ne!(answer.status, 404, "{here}");
                }
                // Tested with its own shape of errors.
                None if path.starts_with("/v1/messages") => assert_eq!(answer.status, 405, "{here}"),
                None => drop(answer.refused(405)),
            }
        }
    }
}

#[tokio::test]
async fn keys_are_asked_for_where_the_description_says() {
    let options = ServerOptions { api_key: Some("secret".to_owned()), ..ServerOptions::default() };
    let server = mock_with(MockOptions::default(), options);
    let description = description();
    assert_eq!(description["security"], json!([{"bearer": []}, {"header": []}, {}]));
    for ((path, method), operation) in operations(&description) {
        let request = Request::builder()
            .method(method.to_uppercase().as_str())
            .uri(path.replace("{name}", "tiny"))
            .header("content-type", "application/json");
        let answer = server.send(request.body(Body::from("{}")).unwrap()).await;
        let open = operation["security"] == json!([]);
        assert_eq!(answer.status == 401, !open, "{method} {path}");
        assert_eq!(operation["responses"].get("401").is_some(), !open, "{method} {path}");
    }
}
