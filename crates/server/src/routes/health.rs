//! Health checks: whether the server is up (`/health`), and whether it still generates tokens (`/health_generate`).

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use oscar_engine::{Event, GenerateOptions};
use serde_json::{Value, json};

use super::fresh_id;
use crate::protocol::ApiError;
use crate::requests::{AnswerStream, PromptRequest};
use crate::state::AppState;

/// How long a token may take before the engine counts as stuck.
const PATIENCE: Duration = Duration::from_secs(20);

/// How often a busy engine is checked for new tokens.
const LOOK: Duration = Duration::from_millis(200);

/// `/health`: whether the server is up and takes requests.
pub(crate) async fn health(State(app): State<Arc<AppState>>) -> Result<Json<Value>, ApiError> {
    app.check_serving()?;
    Ok(Json(json!({"status": "ok"})))
}

/// `/health_generate`: generates one token. An engine that generates tokens for others is healthy, too.
pub(crate) async fn health_generate(State(app): State<Arc<AppState>>) -> Result<Json<Value>, ApiError> {
    let drawn = app.engine.stats().generated_tokens;
    let options = GenerateOptions {
        max_tokens: Some(1),
        // Whatever is in the cache must not be changed by this.
        cache_salt: Some("health".to_owned()),
        ..GenerateOptions::default()
    };
    let asked = PromptRequest { id: fresh_id("health").into(), prompt: vec![0], options, filter: None };
    let busy = AnswerStream::submit(&app, vec![asked]);
    let mut answers = match busy {
        Ok(answers) => Some(answers),
        Err(error) if error.status() == StatusCode::TOO_MANY_REQUESTS => None,
        Err(error) => return Err(error),
    };
    let well = async {
        loop {
            let token = async {
                match &mut answers {
                    Some(answers) => answers.next().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                delivered = token => match delivered.map(|delivered| delivered.event) {
                    Some(Event::Token { .. } | Event::Finished { .. }) => return true,
                    Some(Event::Prefill { .. } | Event::Scored { .. }) => {}
                    Some(Event::Failed { .. }) | None => return false,
                },
                () = tokio::time::sleep(LOOK) => {
                    if app.engine.stats().generated_tokens > drawn {
                        return true;
                    }
                }
            }
        }
    };
    match tokio::time::timeout(PATIENCE, well).await {
        Ok(true) => Ok(Json(json!({"status": "ok"}))),
        _ => {
            app.check_serving()?;
            Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "the engine does not answer"))
        }
    }
}
