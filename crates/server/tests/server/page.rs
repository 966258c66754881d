//! The web page: all of it is there, it is fenced in, and it opens nothing else.

use axum::body::Body;
use axum::http::Request;
use oscar_engine::MockOptions;
use oscar_server::ServerOptions;
use serde_json::json;

use crate::support::{TestServer, mock, mock_with};

/// Files that the HTML and the scripts name.
async fn files<E>(server: &TestServer<E>) -> Vec<(String, String)> {
    let mut found = vec![("/".to_owned(), server.get("/").await.text)];
    let mut next = 0;
    while next < found.len() {
        let text = found[next].1.clone();
        let quoted = text.split('"').filter_map(|piece| {
            let name = piece.strip_prefix("page/").or_else(|| piece.strip_prefix("./"))?;
            name.contains('.').then(|| format!("/page/{name}"))
        });
        for path in quoted {
            if !found.iter().any(|(known, _)| *known == path) {
                let answer = server.get(&path).await;
                assert_eq!(answer.status, 200, "{path}");
                found.push((path, answer.text));
            }
        }
        next += 1;
    }
    found
}

#[tokio::test]
async fn every_file_comes_with_its_type_and_fences() {
    let server = mock();
    let files = files(&server).await;
    let paths: Vec<&str> = files.iter().map(|(path, _)| path.as_str()).collect();
    for name in ["/page/style.css", "/page/icon.svg", "/page/chat.js", "/page/cache.js", "/page/blocks.js"] {
        assert!(paths.contains(&name), "{name} is not in {paths:?}");
    }
    for (path, _) in &files {
        let answer = server.get(path).await;
        let kind = match path.rsplit_once('.').map_or("", |(_, ending)| ending) {
            "css" => "text/css; charset=utf-8",
            "js" => "text/javascript; charset=utf-8",
            "svg" => "image/svg+xml",
            _ => "text/html; charset=utf-8",
        };
        assert_eq!(answer.headers["content-type"], kind, "{path}");
        assert_eq!(answer.headers["x-content-type-options"], "nosniff", "{path}");
        assert_eq!(answer.headers["referrer-policy"], "no-referrer", "{path}");
        let policy = answer.headers["content-security-policy"].to_str().unwrap();
        for rule in ["default-src 'none'", "script-src 'self'", "style-src 'self'", "frame-ancestors 'none'"]
        {
            assert!(policy.split("; ").any(|part| part == rule), "{path}: {policy}");
        }
        assert!(!policy.contains("unsafe") && !policy.contains('*'), "{path}: {policy}");
    }
}

#[tokio::test]
async fn nothing_is_inline_or_from_elsewhere() {
    for (path, text) in files(&mock()).await {
        let html = path == "/";
        for (index, line) in text.lines().enumerate() {
            let place = format!("{path}:{}: {line}", index + 1);
            // The name of the SVG format is the one address that is no address.
            let line = line.replace("http://www.w3.org/2000/svg", "");
            for foreign in ["http://", "https://", "\"//", "@import", "url("] {
                assert!(!line.contains(foreign), "{place}");
            }
            for parsed in
                ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("]
            {
                assert!(!line.contains(parsed), "{place}");
            }
            if html {
                let inline = ["style=", "<style", "javascript:", " onclick", " onload", " onerror"];
                assert!(!inline.iter().any(|inline| line.contains(inline)), "{place}");
                assert!(!line.contains("<script") || line.contains("src=\"page/"), "{place}");
            }
        }
    }
}

#[tokio::test]
async fn the_page_needs_no_key_and_gives_none() {
    let options = ServerOptions { api_key: Some("secret".to_owned()), ..ServerOptions::default() };
    let server = mock_with(MockOptions::default(), options);
    for (path, text) in files(&server).await {
        assert!(!text.contains("secret"), "{path}");
    }
    let chat = json!({"messages": [{"role": "user", "content": "a"}]});
    server.post("/v1/chat/completions", chat).await.refused(401);
    // Neither what the page reads nor anything near its files is open.
    let near =
        ["/oscar/cache", "/v1/models", "//", "/page", "/page/", "/page/x.js", "/page/mod.rs", "/index.html"];
    for path in near {
        server.get(path).await.refused(401);
    }
    for path in ["/page/../oscar/cache", "/page/%2e%2e/oscar/cache", "/page/chat.js/../../oscar/cache"] {
        server.get(path).await.refused(401);
    }
    let shown = Request::get("/oscar/cache").header("authorization", "Bearer secret");
    server.send(shown.body(Body::empty()).unwrap()).await.ok();
}

#[tokio::test]
async fn other_paths_and_methods_are_refused_as_ever() {
    let server = mock();
    for path in ["/page", "/page/", "/page/mod.rs", "/page/none.js", "/index.html", "/favicon.ico"] {
        server.get(path).await.refused(404);
    }
    server.post("/", json!({})).await.refused(405);
    server.post("/page/chat.js", json!({})).await.refused(405);
    let head = server.send(Request::head("/").body(Body::empty()).unwrap()).await;
    assert_eq!((head.status, head.text.as_str()), (200, ""));
}
