//! SGLang's routes for routers and operators: what is served, how busy the server is, flushing the cache, aborting.

use std::sync::Arc;
use std::time::SystemTime;

use axum::Json;
use axum::extract::State;
use oscar_model::SamplingDefaults;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::http::OptionalJsonBody;
use crate::metrics::{hit_rate, token_usage, used_tokens};
use crate::protocol::{ApiError, RequestKind, UnreadFields, short};
use crate::state::{AppState, unix_seconds};
use crate::tiers::offered;

/// The version of this program.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// `/model_info`: the model that is served.
pub(crate) async fn model_info(State(app): State<Arc<AppState>>) -> Json<Value> {
    Json(json!({
        "model_path": app.model.path,
        "served_model_name": app.model.name,
        "tokenizer_path": app.model.path,
        "is_generation": true,
        "model_type": app.model.family,
        "architectures": [architecture(&app.model.family)],
        "has_image_understanding": false,
        "has_audio_understanding": false,
        "max_model_len": app.engine.info().context,
        "weight_version": "default",
        "preferred_sampling_params": preferred(&app.model.sampling),
    }))
}

/// The sampling parameters of requests that do not give their own; null where the model comes with none.
fn preferred(sampling: &SamplingDefaults) -> Value {
    let SamplingDefaults { temperature, top_p, top_k, min_p, repetition_penalty } = *sampling;
    let all = [
        ("temperature", temperature.map(short)),
        ("top_p", top_p.map(short)),
        ("top_k", top_k.map(Value::from)),
        ("min_p", min_p.map(short)),
        ("repetition_penalty", repetition_penalty.map(short)),
    ];
    let said: Map<String, Value> =
        all.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect();
    if said.is_empty() { Value::Null } else { said.into() }
}

/// `qwen3` is `Qwen3ForCausalLM` in Hugging Face's names.
fn architecture(family: &str) -> String {
    let mut letters = family.chars();
    let first = letters.next().map(|letter| letter.to_ascii_uppercase());
    format!("{}ForCausalLM", first.into_iter().chain(letters).collect::<String>())
}

/// `/server_info`: the settings of the server and the engine.
pub(crate) async fn server_info(State(app): State<Arc<AppState>>) -> Json<Value> {
    let (info, stats) = (app.engine.info(), app.engine.stats());
    let kv_events = app.options.kv_events.as_ref().map(|address| {
        json!({
            "publisher": "zmq",
            "endpoint_host": address.host,
            "endpoint_port_base": address.port,
            "replay_port_base": address.replay_port,
            "topic": address.topic,
            "block_size": PAGE_TOKENS,
            "dp_size": 1,
        })
    });
    let status = match app.engine.failure() {
        Some(_) => "failed",
        None if app.is_draining() => "draining",
        None => "ready",
    };
    Json(json!({
        "model_path": app.model.path,
        "served_model_name": app.model.name,
        "tokenizer_path": app.model.path,
        "version": VERSION,
        "tp_size": 1,
        "dp_size": 1,
        "pp_size": 1,
        "load_balance_method": "round_robin",
        "disaggregation_mode": "null",
        "status": status,
        "context_length": info.context,
        "max_total_tokens": info.capacity_tokens,
        "max_total_num_tokens": info.capacity_tokens,
        "max_prefill_tokens": info.context,
        "chunked_prefill_size": info.prefill_chunk,
        "max_running_requests": info.max_running,
        "max_num_reqs": info.max_running,
        "max_queued_requests": info.max_queued,
        "kv_cache_dtype": info.kv,
        "kv_precisions": offered(info).map(|tier| tier.name).collect::<Vec<_>>(),
        "bits_per_element": info.bits_per_element,
        "page_size": PAGE_TOKENS,
        "disable_radix_cache": !info.prefix_cache,
        "deterministic": info.deterministic,
        "enable_metrics": true,
        "kv_events": kv_events,
        "internal_states": [{
            "memory_usage": {"token_capacity": info.capacity_tokens},
            "effective_max_running_requests_per_dp": info.max_running,
            "num_running_reqs": stats.running + stats.prefilling,
            "num_waiting_reqs": stats.queued,
        }],
    }))
}

/// The number of tokens in a page of the KV cache.
pub(crate) const PAGE_TOKENS: usize = 64;

/// `/get_load`: one entry per rank, of which there is one.
pub(crate) async fn get_load(State(app): State<Arc<AppState>>) -> Json<Value> {
    let stats = app.engine.stats();
    let running = stats.running + stats.prefilling;
    Json(json!([{
        "dp_rank": 0,
        "num_reqs": running + stats.queued,
        "num_waiting_reqs": stats.queued,
        "num_tokens": used_tokens(&stats),
    }]))
}

/// `/v1/loads`: the load of the server in more detail than `/get_load`.
pub(crate) async fn loads(State(app): State<Arc<AppState>>) -> Json<Value> {
    let (info, stats) = (app.engine.info(), app.engine.stats());
    let running = stats.running + stats.prefilling;
    let (used, usage) = (used_tokens(&stats), token_usage(info, &stats));
    let utilization = if info.max_running > 0 { running as f64 / info.max_running as f64 } else { 0.0 };
    let load = json!({
        "dp_rank": 0,
        "timestamp": unix_seconds(SystemTime::now()),
        "num_running_reqs": running,
        "num_waiting_reqs": stats.queued,
        "num_total_reqs": running + stats.queued,
        "num_used_tokens": used,
        "num_total_tokens": used,
        "max_total_num_tokens": info.capacity_tokens,
        "max_running_requests": info.max_running,
        "token_usage": usage,
        "gen_throughput": 0.0,
        "cache_hit_rate": hit_rate(&stats),
        "utilization": utilization,
        "memory": {"token_capacity": info.capacity_tokens},
        "queues": {"waiting": stats.queued, "grammar": 0, "paused": 0, "retracted": 0},
        "disaggregation": {"mode": "null"},
    });
    Json(json!({
        "timestamp": unix_seconds(SystemTime::now()).to_string(),
        "version": VERSION,
        "dp_rank_count": 1,
        "loads": [load],
        "aggregate": {
            "total_running_reqs": running,
            "total_waiting_reqs": stats.queued,
            "total_reqs": running + stats.queued,
            "avg_token_usage": usage,
            "avg_throughput": 0.0,
            "avg_utilization": utilization,
        },
    }))
}

/// `/flush_cache`: drops the cached prefixes that no request uses.
pub(crate) async fn flush_cache(State(app): State<Arc<AppState>>) -> Json<Value> {
    app.engine.flush();
    app.memory.clear();
    Json(json!({"success": true, "message": "cached prompts that no request uses are forgotten"}))
}

/// The body of `/abort_request`: which requests are aborted.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct AbortRequest {
    rid: Option<String>,
    abort_all: Option<bool>,

    #[serde(flatten)]
    unread: UnreadFields,
}

/// `/abort_request`: aborts a request by the id its client gave, or all of them.
pub(crate) async fn abort_request(
    State(app): State<Arc<AppState>>,
    OptionalJsonBody(request): OptionalJsonBody<AbortRequest>,
) -> Result<Json<Value>, ApiError> {
    request.unread.check(RequestKind::Abort, &app.field_policy())?;
    let aborted = match (request.rid.as_deref().filter(|id| !id.is_empty()), request.abort_all) {
        (_, Some(true)) => app.in_flight.abort(None),
        (Some(id), _) => app.in_flight.abort(Some(id)),
        (None, _) => return Err(ApiError::bad_field("rid", "there is neither rid nor abort_all: true")),
    };
    Ok(Json(json!({"success": true, "aborted": aborted})))
}

/// `/version`: the version of this program.
pub(crate) async fn version() -> Json<Value> {
    Json(json!({"version": VERSION}))
}

#[cfg(test)]
mod tests {
    #[test]
    fn families_have_an_architecture() {
        assert_eq!(super::architecture("qwen3"), "Qwen3ForCausalLM");
        assert_eq!(super::architecture("llama"), "LlamaForCausalLM");
    }
}
