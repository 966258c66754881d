//! What llama.cpp's clients ask about a server: its model, how busy it is, and what a chat looks like to the model.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use oscar_engine::GenerateOptions;
use serde_json::{Value, json};

use super::answer::settings;
use crate::http::JsonBody;
use crate::protocol::{ApiError, OpenAiRequest, RequestKind};
use crate::state::AppState;
use crate::text::Chat;

/// `/props`: the model and the settings of requests that make none.
pub(crate) async fn props(State(app): State<Arc<AppState>>) -> Result<Json<Value>, ApiError> {
    let info = app.engine.info();
    let defaults = GenerateOptions {
        sampling: crate::protocol::SamplingFields::default().options(&app.model.sampling)?.sampling,
        ..GenerateOptions::default()
    };
    let mut params = settings(&defaults, 0);
    params["seed"] = (-1).into();
    Ok(Json(json!({
        "default_generation_settings": {"id": 0, "n_ctx": info.context, "params": params},
        "total_slots": info.max_running,
        "model_alias": app.model.name,
        "model_path": app.model.path,
        "chat_template": app.model.template_source().unwrap_or_default(),
        "bos_token": app.model.bos(),
        "eos_token": app.model.eos(),
        "modalities": {"vision": false, "audio": false},
        "build_info": app.fingerprint,
    })))
}

/// `/slots`: one entry for each request that may run at a time. Which request runs where says nothing here: pages are
/// shared, and slots are only counted.
pub(crate) async fn slots(State(app): State<Arc<AppState>>) -> Json<Value> {
    let (info, stats) = (app.engine.info(), app.engine.stats());
    let busy = stats.running + stats.prefilling;
    let slot = |index: usize| {
        let tokens = stats.sequences.get(index).map_or(0, |sequence| sequence.tokens);
        json!({"id": index, "n_ctx": info.context, "is_processing": index < busy, "n_past": tokens})
    };
    Json((0..info.max_running.max(busy)).map(slot).collect())
}

/// `/apply-template`: a chat as the text that the model reads.
pub(crate) async fn apply_template(
    State(app): State<Arc<AppState>>,
    JsonBody(mut request, memory): JsonBody<OpenAiRequest>,
) -> Result<Json<Value>, ApiError> {
    let work = move |app: &AppState| {
        request.leave_fields_of_completions();
        request.check_fields(RequestKind::Chat, &app.field_policy())?;
        // What a chat would be refused for has no text either.
        request.answer_format()?;
        Chat::new(&mut request)?.render(&app.model, &app.options)
    };
    let (text, _memory) = app.encode_body(memory, work).await?;
    Ok(Json(json!({"prompt": text.as_str()})))
}
