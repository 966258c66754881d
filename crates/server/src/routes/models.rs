//! `/v1/models`: what is served.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use serde_json::{Value, json};

use crate::protocol::ApiError;
use crate::state::{AppState, unix_seconds};

/// `/v1/models`: the list of models, which is the one that is served.
pub(crate) async fn list(State(app): State<Arc<AppState>>) -> Json<Value> {
    Json(json!({"object": "list", "data": [card(&app)]}))
}

/// `/v1/models/NAME`: one model by its name.
pub(crate) async fn one(
    State(app): State<Arc<AppState>>,
    Path(name): Path<String>,
) -> Result<Json<Value>, ApiError> {
    app.model.check_name(Some(&name))?;
    Ok(Json(card(&app)))
}

fn card(app: &AppState) -> Value {
    json!({
        "id": app.model.name,
        "object": "model",
        "created": unix_seconds(app.started),
        "owned_by": "oscar",
        "root": app.model.name,
        "parent": null,
        "max_model_len": app.engine.info().context,
    })
}
