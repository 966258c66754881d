//! The web page at `/`: a chat, and a picture of the cache.
//!
//! Its files are in the binary as they are written here; nothing is built and nothing is fetched from elsewhere. They
//! hold no secrets, so they need no API key; what the page shows comes from routes that do.

use std::sync::Arc;

use axum::Router;
use axum::http::{HeaderName, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use crate::state::AppState;

/// A file of the page, with the path it is served at and its content type.
struct File {
    path: &'static str,
    kind: &'static str,
    text: &'static str,
}

const HTML: &str = "text/html; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";

const FILES: [File; 8] = [
    File { path: "/", kind: HTML, text: include_str!("index.html") },
    File { path: "/page/style.css", kind: STYLE, text: include_str!("style.css") },
    File { path: "/page/icon.svg", kind: "image/svg+xml", text: include_str!("icon.svg") },
    File { path: "/page/chat.js", kind: SCRIPT, text: include_str!("chat.js") },
    File { path: "/page/cache.js", kind: SCRIPT, text: include_str!("cache.js") },
    File { path: "/page/markdown.js", kind: SCRIPT, text: include_str!("markdown.js") },
    File { path: "/page/server.js", kind: SCRIPT, text: include_str!("server.js") },
    File { path: "/page/settings.js", kind: SCRIPT, text: include_str!("settings.js") },
];

/// Own files only, no code or styles inside the HTML, no text that becomes markup, no frames around it.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
    base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; \
    trusted-types 'none'";

const HEADERS: [(HeaderName, &str); 4] = [
    (header::CONTENT_SECURITY_POLICY, POLICY),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
    // A newer binary has a newer page.
    (header::CACHE_CONTROL, "no-cache"),
];

/// The routes that serve the files of the page.
pub(crate) fn routes() -> Router<Arc<AppState>> {
    FILES.iter().fold(Router::new(), |router, file| router.route(file.path, get(async || file.response())))
}

/// Whether a path is a file of the page.
pub(crate) fn is_part(path: &str) -> bool {
    FILES.iter().any(|file| file.path == path)
}

impl File {
    fn response(&self) -> Response {
        (HEADERS, [(header::CONTENT_TYPE, self.kind)], self.text).into_response()
    }
}
