//! Requests handed to the engine, and their events as they come back.
//!
//! The engine calls a sink on its own thread; the sink puts the event into a channel and never waits. A channel holds
//! at most the tokens of its answers, which the context bounds.

use std::collections::HashMap;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use oscar_engine::{Event, GenerateOptions, Request, TokenFilter};
use tokio::sync::mpsc::{self, UnboundedReceiver};

use crate::in_flight::InFlightGuard;
use crate::protocol::ApiError;
use crate::state::AppState;

/// The most bytes of an id that a client gives to a request.
const MAX_ID: usize = 256;

/// One prompt of a request, ready for the engine.
pub(crate) struct PromptRequest {
    /// The id by which it can be aborted.
    pub(crate) id: Arc<str>,
    pub(crate) prompt: Vec<u32>,
    pub(crate) options: GenerateOptions,
    pub(crate) filter: Option<Box<dyn TokenFilter>>,
}

/// The id by which a request can be aborted: the one that its client gives it (`rid`), or else its `own`.
pub(crate) fn request_id(given: Option<&str>, own: &str) -> Result<Arc<str>, ApiError> {
    let id = given.filter(|id| !id.is_empty()).unwrap_or(own);
    if id.len() > MAX_ID {
        let message = format!("rid has {} bytes, at most {MAX_ID} are kept", id.len());
        return Err(ApiError::bad_field("rid", message));
    }
    Ok(id.into())
}

/// An event of the engine for one of the prompts of a request.
#[derive(Debug)]
pub(crate) struct PromptEvent {
    /// The index of the prompt in the request.
    pub(crate) prompt: usize,
    /// The time at which the engine sent the event.
    pub(crate) at: Instant,
    pub(crate) event: Event,
}

/// The events of all answers to a request. Dropping it aborts those that have not finished.
pub(crate) struct AnswerStream {
    app: Arc<AppState>,
    events: UnboundedReceiver<PromptEvent>,
    guards: Vec<InFlightGuard>,
    /// The number of choices that have not finished.
    open: usize,
    begun: Instant,
    /// The time of the last token of each choice, by prompt and choice.
    latest: HashMap<(usize, usize), Instant>,
}

impl AnswerStream {
    /// Hands the prompts of a request to the engine. If it refuses one, none of them is answered.
    pub(crate) fn submit(app: &Arc<AppState>, asked: Vec<PromptRequest>) -> Result<AnswerStream, ApiError> {
        app.check_serving()?;
        let (sender, events) = mpsc::unbounded_channel();
        let begun = Instant::now();
        let mut answers = AnswerStream {
            app: Arc::clone(app),
            events,
            guards: Vec::with_capacity(asked.len()),
            open: 0,
            begun,
            latest: HashMap::new(),
        };
        for (prompt, PromptRequest { id, prompt: ids, options, filter }) in asked.into_iter().enumerate() {
            let sender = sender.clone();
            // Whoever does not listen any more has nothing to be told.
            let sink = move |event| drop(sender.send(PromptEvent { prompt, at: Instant::now(), event }));
            let choices = options.n;
            let context = app.engine.info().context;
            if ids.len() == context && options.max_tokens != Some(0) {
                let message = format!(
                    "the prompt has {context} tokens, the whole context: there is no room for an answer"
                );
                return Err(ApiError::bad_field("prompt", message).with_code("context_length_exceeded"));
            }
            let handle = app.engine.submit(Request { prompt: ids, options, filter }, Box::new(sink))?;
            answers.guards.push(app.in_flight.enter(id, handle));
            answers.open += choices;
        }
        app.metrics.requests.inc_by(answers.guards.len() as u64);
        Ok(answers)
    }

    /// The next event; `None` after the last one of the last choice.
    pub(crate) fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<PromptEvent>> {
        if self.open == 0 {
            return Poll::Ready(None);
        }
        let Poll::Ready(delivered) = self.events.poll_recv(context) else { return Poll::Pending };
        match &delivered {
            Some(delivered) => {
                self.measure(delivered);
                self.open -= usize::from(delivered.event.is_last());
            }
            // Every sink is gone without a last event: the engine has died.
            None => self.open = 0,
        }
        Poll::Ready(delivered)
    }

    /// Waits for the next event, as [`Self::poll_next`] gives it.
    pub(crate) async fn next(&mut self) -> Option<PromptEvent> {
        std::future::poll_fn(|context| self.poll_next(context)).await
    }

    /// The time at which the request was handed to the engine.
    pub(crate) fn begun(&self) -> Instant {
        self.begun
    }

    fn measure(&mut self, delivered: &PromptEvent) {
        let metrics = &self.app.metrics;
        match &delivered.event {
            Event::Token { choice, .. } => {
                match self.latest.insert((delivered.prompt, *choice), delivered.at) {
                    Some(before) => metrics.inter_token.observe((delivered.at - before).as_secs_f64()),
                    None => metrics.first_token.observe((delivered.at - self.begun).as_secs_f64()),
                }
            }
            Event::Finished { .. } => {
                metrics.finished.inc();
                metrics.end_to_end.observe((delivered.at - self.begun).as_secs_f64());
            }
            Event::Failed { .. } => drop(metrics.failed.inc()),
            Event::Prefill { .. } | Event::Scored { .. } => {}
        }
    }
}

impl Drop for AnswerStream {
    fn drop(&mut self) {
        self.app.metrics.abandoned.inc_by(self.open as u64);
    }
}
