//! Which path leads where, and what happens to every request before and after.

use std::any::Any;
use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::body::HttpBody;
use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::{AllowOrigin, Any as AnyOrigin, CorsLayer};
use uuid::Uuid;

use super::{
    chat, completions, embeddings, generate, health, info, kept, llama, messages, models, observe, openapi,
    responses, score, tokens,
};
use crate::http::{ApiKey, HEAD_BYTES, TrustedSites, changes_something, check_content_type};
use crate::page;
use crate::protocol::ApiError;
use crate::state::AppState;

/// The header that names a request in logs and responses.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Sent by clients of `/v1/messages`: the key, and which year's interface they know.
const API_KEY: HeaderName = HeaderName::from_static("x-api-key");
const ANTHROPIC_VERSION: HeaderName = HeaderName::from_static("anthropic-version");

/// The longest request id in bytes that is taken over from a client.
const MAX_REQUEST_ID: usize = 128;

/// Paths that need no key: probes do not have one, and the description is no secret.
const OPEN_PATHS: [&str; 4] = ["/health", "/health_generate", "/metrics", "/openapi.json"];

/// The router of all routes, with the middleware around them.
pub(crate) fn router(app: Arc<AppState>) -> Router {
    let middleware = Arc::new(Middleware {
        key: app.options.api_key.as_deref().map(ApiKey::new),
        sites: TrustedSites::new(&app.options.allowed_hosts, &app.options.allowed_origins),
        app: Arc::clone(&app),
    });
    let cors = cors(&app.options.allowed_origins);
    Router::new()
        .route("/v1/chat/completions", post(chat::chat_completions))
        .route("/v1/completions", post(completions::completions))
        .route("/v1/responses", post(responses::responses))
        .route("/v1/messages", post(messages::messages))
        .route("/v1/messages/count_tokens", post(messages::count_tokens))
        .route("/v1/embeddings", post(embeddings::embeddings))
        .route("/v1/score", post(score::score))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*name}", get(models::one))
        .route("/generate", post(generate::generate).put(generate::generate))
        .route("/health", get(health::health))
        .route("/health_generate", get(health::health_generate))
        .route("/model_info", get(info::model_info))
        .route("/get_model_info", get(info::model_info))
        .route("/server_info", get(info::server_info))
        .route("/get_server_info", get(info::server_info))
        .route("/get_load", get(info::get_load))
        .route("/v1/loads", get(info::loads))
        .route("/flush_cache", post(info::flush_cache).get(info::flush_cache))
        .route("/abort_request", post(info::abort_request))
        .route("/version", get(info::version))
        .route("/tokenize", post(tokens::tokenize))
        .route("/v1/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/v1/detokenize", post(tokens::detokenize))
        .route("/completion", post(llama::completion))
        .route("/completions", post(llama::completion))
        .route("/apply-template", post(llama::apply_template))
        .route("/props", get(llama::props))
        .route("/slots", get(llama::slots))
        .route("/metrics", get(observe::metrics))
        .route("/oscar/cache", get(observe::cache).post(kept::kept))
        .route("/openapi.json", get(openapi::openapi))
        .merge(page::routes())
        .fallback(|| async { ApiError::new(StatusCode::NOT_FOUND, "there is nothing at this path") })
        .method_not_allowed_fallback(|| async {
            ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "this path does not take this method")
        })
        .with_state(app)
        .layer(CatchPanicLayer::custom(panicked))
        .layer(middleware::from_fn_with_state(middleware, Middleware::pass))
        .layer(cors)
}

/// A bug in one request must not look like a broken connection.
fn panicked(_: Box<dyn Any + Send>) -> Response {
    ApiError::internal(&"a handler panicked").into_response()
}

fn cors(origins: &[String]) -> CorsLayer {
    let layer = CorsLayer::new()
        .allow_methods([Method::GET, Method::POST, Method::PUT])
        .allow_headers([header::AUTHORIZATION, header::CONTENT_TYPE, REQUEST_ID, API_KEY, ANTHROPIC_VERSION])
        .expose_headers([REQUEST_ID, header::RETRY_AFTER]);
    if origins.iter().any(|origin| origin == "*") {
        return layer.allow_origin(AnyOrigin);
    }
    let known = origins.iter().filter_map(|origin| HeaderValue::from_str(origin).ok());
    layer.allow_origin(AllowOrigin::list(known))
}

/// The middleware of all routes: names the request, checks where it comes from and the API key, counts and logs.
struct Middleware {
    app: Arc<AppState>,
    key: Option<ApiKey>,
    sites: TrustedSites,
}

impl Middleware {
    async fn pass(State(this): State<Arc<Middleware>>, request: Request, next: Next) -> Response {
        let begun = Instant::now();
        let id = request_id(&request);
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        let mut response = match this.admit(&request) {
            Ok(()) => next.run(request).await,
            Err(error) => error.into_response(),
        };
        if messages::is_path(&path) {
            response = messages::reshape(response, &id);
        }
        let status = response.status().as_u16();
        this.app.metrics.responded(status);
        let milliseconds = begun.elapsed().as_secs_f64() * 1e3;
        let path: String = path.chars().take(200).collect();
        let request = id.to_str().unwrap_or("?");
        // Pages and dashboards ask for these all the time.
        match path.as_str() {
            "/oscar/cache" | "/metrics" | "/health" => {
                tracing::debug!(request, %method, path, status, milliseconds, "answered");
            }
            _ => tracing::info!(request, %method, path, status, milliseconds, "answered"),
        }
        response.headers_mut().insert(REQUEST_ID, id);
        response
    }

    fn admit(&self, request: &Request) -> Result<(), ApiError> {
        check_head(request)?;
        let path = request.uri().path();
        if changes_something(request.method(), path) {
            self.sites.check_origin(request)?;
            // Routers post to `/flush_cache` without a body or a type. A page cannot do that without an origin, which has
            // been looked at; an address in a page can make a browser GET or HEAD, in old ones without saying for whom.
            // Other methods are refused by the routes.
            let untyped =
                !request.headers().contains_key(header::CONTENT_TYPE) && request.body().is_end_stream();
            let may_be_untyped = match *request.method() {
                Method::GET | Method::HEAD => false,
                Method::POST => path != "/abort_request",
                _ => true,
            };
            if self.key.is_none() && !(untyped && may_be_untyped) {
                check_content_type(request.headers())?;
            }
        }
        let open = OPEN_PATHS.contains(&path);
        match &self.key {
            Some(key) if !open && !page::is_part(path) => key.check(request.headers()),
            None if !open => self.sites.check_host(request),
            _ => Ok(()),
        }
    }
}

/// Refuses a head beyond the limit: a connection reads in large pieces, and the last may go beyond it.
fn check_head(request: &Request) -> Result<(), ApiError> {
    let line = request.uri().path_and_query().map_or(0, |target| target.as_str().len());
    // Each header has a colon, a space and a line break.
    let headers = request.headers().iter().map(|(name, value)| name.as_str().len() + value.len() + 4);
    if line + headers.sum::<usize>() > HEAD_BYTES {
        let message = format!("the headers have more than {HEAD_BYTES} bytes, the limit of this server");
        return Err(ApiError::new(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, message));
    }
    Ok(())
}

/// The client's own id if it is printable and short, else a new one.
fn request_id(request: &Request) -> HeaderValue {
    let given = request.headers().get(REQUEST_ID);
    let good = |value: &&HeaderValue| {
        value.to_str().is_ok_and(|text| !text.is_empty() && text.len() <= MAX_REQUEST_ID)
    };
    given.filter(good).cloned().unwrap_or_else(|| {
        HeaderValue::from_str(&Uuid::new_v4().to_string()).unwrap_or(HeaderValue::from_static("unnamed"))
    })
}
