//! Files under `deploy/` against the server they are for.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use axum::body::Body;
use axum::http::Request;
use oscar_engine::MockOptions;
use oscar_server::ServerOptions;
use serde_json::{Value, json};

use crate::support::{mock, mock_with};

/// Series in an expression: names with one of our prefixes.
fn series(expression: &str) -> impl Iterator<Item = &str> {
    let part_of_name = |letter: char| letter.is_ascii_alphanumeric() || letter == '_' || letter == ':';
    let words = expression.split(move |letter| !part_of_name(letter));
    words.filter(|word| word.starts_with("sglang:") || word.starts_with("oscar_"))
}

/// Every expression of the dashboard.
fn expressions(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(entries) => {
            for (name, value) in entries {
                match value {
                    Value::String(text) if ["expr", "query", "definition"].contains(&name.as_str()) => {
                        found.push(text.clone());
                    }
                    value => expressions(value, found),
                }
            }
        }
        Value::Array(values) => values.iter().for_each(|value| expressions(value, found)),
        _ => {}
    }
}

#[tokio::test]
async fn the_dashboard_asks_for_series_that_are_there() {
    let server = mock();
    server.post("/v1/completions", json!({"prompt": "a", "max_tokens": 3, "ignore_eos": true})).await.ok();
    let metrics = server.get("/metrics").await.text;
    let there: BTreeSet<&str> = metrics
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.split(['{', ' ']).next())
        .collect();
    let dashboard: Value =
        serde_json::from_str(include_str!("../../../../deploy/grafana-dashboard.json")).unwrap();
    let mut asked = Vec::new();
    expressions(&dashboard, &mut asked);
    let asked: BTreeSet<&str> = asked.iter().flat_map(|expression| series(expression)).collect();
    assert!(asked.len() > 15, "{asked:?}");
    let missing: Vec<_> = asked.difference(&there).collect();
    assert!(missing.is_empty(), "{missing:?} are not in {there:?}");
}

/// Names by which the deployed server is asked: with a key all of them, without one those that the settings name.
#[tokio::test]
async fn the_server_is_reached_by_the_names_that_it_is_deployed_under() {
    let ask = |path: &str, host: &str, key: Option<&str>| {
        let mut request = Request::get(path).header("host", host);
        if let Some(key) = key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        request.body(Body::empty()).unwrap()
    };
    // On Kubernetes: services have names, probes and scrapers come by address and without the key.
    let kubernetes = include_str!("../../../../deploy/kubernetes.yaml");
    assert!(kubernetes.contains("name: OSCAR_API_KEY") && !kubernetes.contains("--allowed-hosts"));
    let options = ServerOptions { api_key: Some("secret".to_owned()), ..ServerOptions::default() };
    let server = mock_with(MockOptions::default(), options);
    let services: Vec<&str> = kubernetes
        .split("---")
        .filter(|document| document.contains("kind: Service\n"))
        .filter_map(|document| document.split("name: ").nth(1)?.lines().next())
        .collect();
    assert_eq!(services, ["oscar", "oscar-servers"]);
    for name in services {
        let host = format!("{name}.default.svc.cluster.local");
        server.send(ask("/v1/models", &host, Some("secret"))).await.ok();
        server.send(ask("/v1/models", &host, None)).await.refused(401);
    }
    let probes: Vec<&str> = kubernetes
        .lines()
        .filter_map(|line| line.trim().strip_prefix("httpGet: {path: ")?.split(',').next())
        .chain(kubernetes.contains("prometheus.io/path: /metrics").then_some("/metrics"))
        .collect();
    assert_eq!(probes, ["/health_generate", "/health", "/health_generate", "/metrics"]);
    for path in &probes {
        assert_eq!(server.send(ask(path, "10.1.2.3:30000", None)).await.status, 200, "{path}");
    }
    // Behind a proxy, without a key: the proxies of the guide pass their own name on, and the settings have a place for it.
    let guide = include_str!("../../../../docs/deployment.md");
    assert!(
        guide.contains("proxy_set_header Host $http_host;") && guide.contains("--allowed-hosts\nllm.example")
    );
    assert!(include_str!("../../../../deploy/oscar.toml").contains("\nallowed-hosts = []\n"));
    let options = |hosts: Vec<String>| ServerOptions { allowed_hosts: hosts, ..ServerOptions::default() };
    let server = mock_with(MockOptions::default(), options(Vec::new()));
    server.send(ask("/v1/models", "llm.example", None)).await.refused(403);
    for path in probes {
        assert_eq!(server.send(ask(path, "llm.example", None)).await.status, 200, "{path}");
    }
    let server = mock_with(MockOptions::default(), options(vec!["llm.example".to_owned()]));
    server.send(ask("/v1/models", "llm.example", None)).await.ok();
    // Over plain http a browser says only from which page it asks. The page is ours where the proxy passes on the port, too.
    let flush = |host: &str| {
        let request =
            Request::post("/flush_cache").header("host", host).header("content-type", "application/json");
        request.header("origin", "http://llm.example:8080").body(Body::from("{}")).unwrap()
    };
    server.send(flush("llm.example:8080")).await.ok();
    assert_eq!(server.send(flush("llm.example")).await.refused(403)["code"], "cross_site");
}

/// The image listens to all addresses: its probe and the host ask by address, other containers by a name.
#[tokio::test]
async fn the_server_in_a_container_is_reached() {
    let dockerfile = include_str!("../../../../deploy/Dockerfile");
    assert!(dockerfile.lines().filter(|line| line.starts_with("CMD [\"serve\"")).count() == 2);
    assert!(!dockerfile.contains("--allowed-hosts") && dockerfile.contains("-e OSCAR_API_KEY="));
    let probe = dockerfile.split("OSCAR_HEALTH=http://").nth(1).unwrap().split_whitespace().next().unwrap();
    let (address, path) = probe.split_once('/').unwrap();
    assert!(dockerfile.contains(&format!("EXPOSE {}", address.rsplit_once(':').unwrap().1)));
    let ask = |path: &str, host: &str, key: Option<&str>| {
        let request = Request::get(path).header("host", host);
        let request = key.into_iter().fold(request, |request, key| request.header("x-api-key", key));
        request.body(Body::empty()).unwrap()
    };
    let options = |key: Option<&str>, hosts: &[&str]| ServerOptions {
        api_key: key.map(str::to_owned),
        allowed_hosts: hosts.iter().map(|&host| host.to_owned()).collect(),
        ..ServerOptions::default()
    };
    let (open, keyed) = (options(None, &[]), options(Some("secret"), &[]));
    for options in [open.clone(), keyed.clone()] {
        let server = mock_with(MockOptions::default(), options);
        assert_eq!(server.send(ask(&format!("/{path}"), address, None)).await.status, 200);
    }
    let server = mock_with(MockOptions::default(), open);
    server.send(ask("/v1/models", "localhost:30000", None)).await.ok();
    let error = server.send(ask("/v1/models", "oscar:30000", None)).await.refused(403);
    assert_eq!(error["code"], "host_not_allowed");
    assert!(include_str!("../../../../docs/deployment.md").contains("(`http://oscar:30000`)"));
    let server = mock_with(MockOptions::default(), options(None, &["oscar"]));
    server.send(ask("/v1/models", "oscar:30000", None)).await.ok();
    let server = mock_with(MockOptions::default(), keyed);
    server.send(ask("/v1/models", "oscar:30000", Some("secret"))).await.ok();
}

#[test]
fn the_time_to_stop_is_longer_than_the_servers_own() {
    let own = ServerOptions::default().shutdown.as_secs();
    for (file, text, name) in [
        ("oscar.service", include_str!("../../../../deploy/oscar.service"), "TimeoutStopSec="),
        (
            "kubernetes.yaml",
            include_str!("../../../../deploy/kubernetes.yaml"),
            "terminationGracePeriodSeconds: ",
        ),
    ] {
        let value = text.lines().find_map(|line| line.trim().strip_prefix(name));
        let seconds: u64 = value.and_then(|value| value.parse().ok()).expect(file);
        assert!(seconds > own + 5, "{file}: {seconds}");
    }
}

/// The folder of the whole project.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// What the image is built from: sources of `COPY` that come from the project and not from another stage.
fn copied() -> Vec<String> {
    let dockerfile = include_str!("../../../../deploy/Dockerfile");
    let copies = dockerfile.lines().filter_map(|line| line.strip_prefix("COPY "));
    let mut sources = Vec::new();
    for copy in copies.filter(|copy| !copy.contains("--from=")) {
        let words: Vec<&str> = copy.split_whitespace().filter(|word| !word.starts_with("--")).collect();
        let (_, from) = words.split_last().expect(copy);
        sources.extend(from.iter().map(|&source| source.to_owned()));
    }
    assert!(sources.len() >= 3, "{sources:?}");
    sources
}

#[test]
fn the_image_is_built_from_what_is_there() {
    let ignore = include_str!("../../../../deploy/Dockerfile.dockerignore");
    let sent: Vec<&str> = ignore.lines().filter_map(|line| line.strip_prefix('!')).collect();
    for source in copied() {
        assert!(root().join(&source).exists(), "{source}");
        assert!(sent.contains(&source.as_str()), "{source} is not sent to the builder: {sent:?}");
    }
    let manifest = std::fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let version = |text: &str, before: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(before)).expect(before).to_owned();
        line.trim_matches('"').to_owned()
    };
    let dockerfile = include_str!("../../../../deploy/Dockerfile");
    assert_eq!(version(dockerfile, "ARG RUST_VERSION="), version(&manifest, "rust-version = "));
    assert!(dockerfile.contains("--package oscar ") && root().join("crates/cli/Cargo.toml").exists());
}

/// Files that are built into the binary must be in the image's sources, too.
#[test]
fn the_image_has_every_file_that_is_compiled_in() {
    let copied = copied();
    let mut found = 0;
    let mut folders: Vec<PathBuf> = std::fs::read_dir(root().join("crates"))
        .unwrap()
        .flatten()
        .map(|entry| entry.path().join("src"))
        .collect();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap().flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            if path.extension().is_none_or(|kind| kind != "rs") {
                continue;
            }
            let source = std::fs::read_to_string(&path).unwrap();
            let mut files: Vec<PathBuf> = Vec::new();
            for include in ["include_str!(\"", "include_bytes!(\"", "include_bytes!(concat!(\""] {
                let names = source.split(include).skip(1).map(|rest| rest.split('"').next().unwrap());
                files.extend(names.map(|name| folder.join(name)));
            }
            // Sources of CUDA kernels are named in lists.
            for list in source.split("texts![").skip(1) {
                let names = list.split(']').next().unwrap().split('"').skip(1).step_by(2);
                files.extend(names.map(|name| folder.join("kernels").join(name)));
            }
            for file in files {
                let file = file.canonicalize().unwrap_or_else(|error| panic!("{}: {error}", file.display()));
                let inside = file.strip_prefix(root()).unwrap();
                assert!(copied.iter().any(|source| inside.starts_with(source)), "{}", inside.display());
                found += 1;
            }
        }
    }
    assert!(found > 30, "{found}");
}
