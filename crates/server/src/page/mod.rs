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
const PICTURE: &str = "image/svg+xml";

/// A file of this folder, served under `/page/`.
macro_rules! file {
    ($name:literal, $kind:ident) => {
        File { path: concat!("/page/", $name), kind: $kind, text: include_str!($name) }
    };
}

const FILES: [File; 17] = [
    File { path: "/", kind: HTML, text: include_str!("index.html") },
    file!("icon.svg", PICTURE),
    file!("style.css", STYLE),
    file!("messages.css", STYLE),
    file!("cache.css", STYLE),
    file!("theme.js", SCRIPT),
    file!("chat.js", SCRIPT),
    file!("turn.js", SCRIPT),
    file!("growing.js", SCRIPT),
    file!("blocks.js", SCRIPT),
    file!("inline.js", SCRIPT),
    file!("copy.js", SCRIPT),
    file!("cache.js", SCRIPT),
    file!("strips.js", SCRIPT),
    file!("server.js", SCRIPT),
    file!("settings.js", SCRIPT),
    file!("key.js", SCRIPT),
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
