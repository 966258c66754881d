//! `/openapi.json`: what all routes take and give, for programs. The file is written by hand; tests hold it to the
//! routes and to the fields of the requests.

use axum::http::header;
use axum::response::{IntoResponse, Response};

const DESCRIPTION: &str = include_str!("../openapi.json");

/// `/openapi.json`: the description of all routes as OpenAPI 3.1.
pub(crate) async fn openapi() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], DESCRIPTION).into_response()
}
