//! `/metrics` for Prometheus, and `/oscar/cache` for the web page's picture of the KV cache.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use oscar_engine::{SequenceView, Tier};
use oscar_kv::PoolStats;
use serde_json::{Value, json};

use super::info::PAGE_TOKENS;
use crate::metrics::hit_rate;
use crate::options::CacheShape;
use crate::protocol::ApiError;
use crate::state::AppState;
use crate::tiers::{OfferedTier, offered, tier_use};

/// The content type of `/metrics`.
const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// `/metrics`: metrics for Prometheus.
pub(crate) async fn metrics(State(app): State<Arc<AppState>>) -> Result<Response, ApiError> {
    let text = app.metrics.text(app.engine.info(), &app.engine.stats(), app.engine.failure().is_some());
    let text = text.map_err(|error| ApiError::internal(&error))?;
    Ok(([(header::CONTENT_TYPE, METRICS_TYPE)], text).into_response())
}

/// `/oscar/cache`: the page pools, and for each request the states of its pages from first to last.
pub(crate) async fn cache(State(app): State<Arc<AppState>>) -> Json<Value> {
    let (info, stats, shape) = (app.engine.info(), app.engine.stats(), app.options.cache);
    let ids = app.in_flight.ids();
    let name = |tier: Tier| offered(info).find(|offered| offered.tier == tier).map(|offered| offered.name);
    let requests = stats.sequences.iter().map(|sequence| {
        let mut view = request(sequence, ids.get(&sequence.request), shape);
        view["kv_precision"] = name(sequence.tier).into();
        view
    });
    let tiers = offered(info).map(|OfferedTier { name, tier, context }| {
        let held = tier_use(&stats, tier);
        json!({
            "name": name,
            "context": context,
            "sequences": held.sequences,
            "exact_pages": held.exact_pages,
            "sealed_pages": held.sealed_pages,
        })
    });
    let pool = |pool: PoolStats, page_bytes: usize| {
        json!({
            "pages": pool.pages,
            "free": pool.free,
            "tree": pool.tree_only,
            "shared": pool.shared,
            "request": pool.request_only,
            "page_bytes": page_bytes,
        })
    };
    let cache = stats.cache;
    // Nothing but the prefix tree has pages in the host's memory.
    let host = |pages: usize, used: usize, page_bytes: usize| {
        let count = PoolStats { pages, free: pages - used, tree_only: used, ..PoolStats::default() };
        pool(count, page_bytes)
    };
    let stored = cache.exact.used() * shape.exact_page_bytes
        + cache.sealed.used() * shape.sealed_page_bytes
        + cache.high.used() * shape.high_page_bytes;
    // A sealed page that is in bf16 too would be one page in a bf16 cache.
    let pages = cache.exact.used() + cache.sealed.used() + cache.high.used();
    let pages = pages.saturating_sub(cache.states.both.max(cache.warm_pages));
    let as_bf16 = pages * shape.exact_page_bytes;
    Json(json!({
        "model": app.model.name,
        "kv": info.kv,
        "bits_per_element": info.bits_per_element,
        "page_tokens": PAGE_TOKENS,
        "sink_pages": shape.sink_pages,
        "recent_pages": shape.recent_pages,
        "capacity_tokens": info.capacity_tokens,
        "hit_rate": hit_rate(&stats),
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.cached_tokens,
        "generated_tokens": stats.generated_tokens,
        "running": stats.running,
        "prefilling": stats.prefilling,
        "queued": stats.queued,
        "pools": {
            "exact": pool(cache.exact, shape.exact_page_bytes),
            "sealed": pool(cache.sealed, shape.sealed_page_bytes),
            "high": pool(cache.high, shape.high_page_bytes),
            "scratch": pool(cache.scratch, shape.scratch_page_bytes),
            "host_exact": host(cache.host.exact_pages, cache.host.exact_used, shape.exact_page_bytes),
            "host_sealed": host(cache.host.sealed_pages, cache.host.sealed_used, shape.sealed_page_bytes),
        },
        "tiers": tiers.collect::<Vec<_>>(),
        "demoted_pages": stats.demoted_pages,
        "host": {"stored": cache.host.stored, "restored": cache.host.restored},
        "tree": {"pages": cache.tree_pages, "tails": cache.tree_tails, "warm": cache.warm_pages,
            "evicted": cache.evicted_pages},
        "stored_bytes": stored,
        "bf16_bytes": as_bf16,
        "saved_bytes": as_bf16.saturating_sub(stored),
        "requests": requests.collect::<Vec<_>>(),
    }))
}

fn request(sequence: &SequenceView, id: Option<&Arc<str>>, shape: CacheShape) -> Value {
    let sealed_page_bytes = match sequence.tier {
        Tier::High => shape.high_page_bytes,
        Tier::Sealed | Tier::Exact => shape.sealed_page_bytes,
    };
    let stored = sequence.exact_pages * shape.exact_page_bytes + sequence.sealed_pages * sealed_page_bytes;
    json!({
        "request": sequence.request,
        "rid": id.map(|id| &**id),
        "choice": sequence.choice,
        "tokens": sequence.tokens,
        "cached_tokens": sequence.cached_tokens,
        "shared_pages": sequence.cached_tokens / PAGE_TOKENS,
        "runs": runs(sequence, shape),
        "stored_bytes": stored,
        "bf16_bytes": sequence.tokens.div_ceil(PAGE_TOKENS) * shape.exact_page_bytes,
    })
}

/// The states of a sequence's pages, from the first to the last: `[["sink", 1], ["sealed", 12], ["recent", 5]]`.
fn runs(sequence: &SequenceView, shape: CacheShape) -> Vec<(&'static str, usize)> {
    let pages = sequence.tokens.div_ceil(PAGE_TOKENS);
    // Pages of the window that are sealed already are still read in bf16.
    let both = (sequence.exact_pages + sequence.sealed_pages).saturating_sub(pages);
    let sealed = sequence.sealed_pages.saturating_sub(both).min(pages);
    let exact = pages - sealed;
    let sink = shape.sink_pages.min(exact);
    let filling = usize::from(!sequence.tokens.is_multiple_of(PAGE_TOKENS)).min(exact - sink);
    let recent = exact - sink - filling;
    let runs = [("sink", sink), ("sealed", sealed), ("recent", recent), ("filling", filling)];
    runs.into_iter().filter(|&(_, count)| count > 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_shown_in_their_order() {
        let shape = CacheShape { sink_pages: 1, recent_pages: 2, ..CacheShape::default() };
        let view = |tokens, exact_pages, sealed_pages| SequenceView {
            tokens,
            exact_pages,
            sealed_pages,
            ..SequenceView::default()
        };
        assert_eq!(runs(&view(10, 1, 0), shape), [("sink", 1)]);
        assert_eq!(
            runs(&view(64 * 8 + 1, 4, 5), shape),
            [("sink", 1), ("sealed", 5), ("recent", 2), ("filling", 1)]
        );
        assert_eq!(
            runs(&view(64 * 8 + 1, 4, 7), shape),
            [("sink", 1), ("sealed", 5), ("recent", 2), ("filling", 1)]
        );
        assert_eq!(runs(&view(0, 0, 0), shape), []);
    }
}
