//! `POST /oscar/cache`: which pages of a chat are still in the cache, for the web page's picture of it.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use oscar_engine::{KeptPage, KeptPrefix};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::oneshot;

use super::chat::render;
use super::info::PAGE_TOKENS;
use crate::http::JsonBody;
use crate::options::CacheShape;
use crate::protocol::{ApiError, OpenAiRequest, RequestKind, UnreadFields, check_forms};
use crate::state::AppState;

/// The body of a request: a chat as it was said so far.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct KeptRequest {
    model: Option<String>,
    messages: Option<Vec<Value>>,
    tools: Option<Vec<Value>>,
    cache_salt: Option<String>,

    #[serde(flatten)]
    unread: UnreadFields,
}

/// The states of a chat's pages, from first to last, as `GET /oscar/cache` has them for a request.
pub(crate) async fn kept(
    State(app): State<Arc<AppState>>,
    JsonBody(request, memory): JsonBody<KeptRequest>,
) -> Result<Json<Value>, ApiError> {
    let read = move |app: &AppState| {
        let policy = app.field_policy();
        request.unread.check(RequestKind::Cache, &policy)?;
        check_forms(None, None, request.tools.as_deref(), &policy)?;
        app.model.check_name(request.model.as_deref())?;
        let mut chat = OpenAiRequest::of_chat(request.messages, request.tools, None);
        // Only what was said: the marks after the last message have not been computed.
        chat.continue_final_message = Some(true);
        // Calls at the end are behind the text that is looked for.
        let last = chat.messages.as_mut().and_then(|messages| messages.last_mut()?.as_object_mut());
        last.and_then(|last| last.remove("tool_calls"));
        let rendered = render(app, &mut chat, request.cache_salt.as_deref())?;
        Ok((rendered.ids, request.cache_salt))
    };
    let ((ids, salt), memory) = app.encode_body(memory, read).await?;
    drop(memory);
    let tokens = ids.len();
    let (reply, found) = oneshot::channel();
    // Whoever does not listen any more has nothing to be told.
    app.engine.find_kept(ids, salt, Box::new(move |kept| drop(reply.send(kept))));
    let mut kept = found.await.map_err(|_| ApiError::shutting_down())?;
    let shape = app.options.cache;
    // The last token may have been drawn without being computed, so that it needs no page.
    let computed = tokens.saturating_sub(1);
    let pages = computed.div_ceil(PAGE_TOKENS).max(kept.pages.len());
    if kept.pages.len() * PAGE_TOKENS + kept.tail_tokens < computed {
        // The page of another chat that begins alike.
        kept.tail_tokens = 0;
    }
    Ok(Json(json!({
        "tokens": tokens,
        "runs": runs(&kept, pages, shape),
        "stored_bytes": stored_bytes(&kept, shape),
        "bf16_bytes": pages * shape.exact_page_bytes,
    })))
}

/// The states of `pages` pages, from the first to the last: `[["sink", 1], ["sealed", 12], ["evicted", 5]]`.
fn runs(kept: &KeptPrefix, pages: usize, shape: CacheShape) -> Vec<(&'static str, usize)> {
    let states = kept.pages.iter().enumerate().map(|(index, page)| match page {
        KeptPage::Exact if index < shape.sink_pages => "sink",
        KeptPage::Exact => "recent",
        KeptPage::Sealed => "sealed",
        KeptPage::Warm => "warm",
    });
    let states = states.chain((kept.tail_tokens > 0).then_some("filling"));
    let mut runs: Vec<(&'static str, usize)> = Vec::new();
    for state in states.chain(std::iter::repeat("evicted")).take(pages) {
        match runs.last_mut() {
            Some((last, count)) if *last == state => *count += 1,
            _ => runs.push((state, 1)),
        }
    }
    runs
}

fn stored_bytes(kept: &KeptPrefix, shape: CacheShape) -> usize {
    let of_page = |page: &KeptPage| match page {
        KeptPage::Exact => shape.exact_page_bytes,
        KeptPage::Sealed => shape.sealed_page_bytes,
        KeptPage::Warm => shape.exact_page_bytes + shape.sealed_page_bytes,
    };
    let tail = usize::from(kept.tail_tokens > 0) * shape.exact_page_bytes;
    kept.pages.iter().map(of_page).sum::<usize>() + tail
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_that_are_gone_come_last() {
        let shape = CacheShape {
            sink_pages: 1,
            exact_page_bytes: 100,
            sealed_page_bytes: 10,
            ..CacheShape::default()
        };
        let pages = vec![KeptPage::Exact, KeptPage::Sealed, KeptPage::Sealed, KeptPage::Warm];
        let kept = KeptPrefix { pages, tail_tokens: 3 };
        let shown = [("sink", 1), ("sealed", 2), ("warm", 1), ("filling", 1)];
        assert_eq!(runs(&kept, 5, shape), shown);
        assert_eq!(stored_bytes(&kept, shape), 330);
        assert_eq!(runs(&kept, 9, shape)[4..], [("evicted", 4)]);
        assert_eq!(runs(&KeptPrefix::default(), 2, shape), [("evicted", 2)]);
        assert_eq!(runs(&KeptPrefix::default(), 0, shape), []);
    }
}
