//! An engine core without a thread, and what it has told those who asked it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use oscar_model::LoadedModel;
use oscar_testing::HashBackend;

use super::super::core::{Core, Submitted};
use crate::error::EngineError;
use crate::event::{Event, Summary};
use crate::request::{Contexts, GenerateOptions, Request};
use crate::serve::{Admission, SharedSink};
use crate::settings::EngineOptions;

type Events = Arc<Mutex<Vec<(u64, Event)>>>;
/// Request and choice of an answer that has ended, and how.
pub(super) type Ended = ((u64, usize), Result<Summary, Arc<EngineError>>);

/// An engine core and what its listeners have heard.
pub(super) struct Client {
    pub(super) core: Core<HashBackend>,
    pub(super) contexts: Contexts,
    events: Events,
    /// Counts the requests that are submitted and not admitted.
    pub(super) admission: Arc<Admission>,
    /// Tokens of answers that have not ended.
    heard: HashMap<(u64, usize), Vec<u32>>,
}

impl Client {
    pub(super) fn new(model: &Arc<LoadedModel<HashBackend>>, options: &EngineOptions) -> Client {
        let admission = Arc::default();
        let (core, budget) =
            Core::build(Arc::clone(model), options, Arc::clone(&admission), None).expect("an engine");
        let contexts = budget.contexts();
        Client { core, contexts, events: Events::default(), admission, heard: HashMap::new() }
    }

    pub(super) fn submit(&mut self, id: u64, prompt: &[u32], options: GenerateOptions) {
        let events = Arc::clone(&self.events);
        let sink = SharedSink::new(Box::new(move |event| events.lock().expect("no panic").push((id, event))));
        let request = Request::new(prompt, options);
        self.admission.add();
        self.core.submit(Submitted { id, at: Instant::now(), request, sink });
    }

    /// The answers that have ended since this was last called. What was streamed must be what their summaries say.
    pub(super) fn take_ended(&mut self) -> Vec<Ended> {
        let mut ended = Vec::new();
        for (id, event) in std::mem::take(&mut *self.events.lock().expect("no panic")) {
            match event {
                Event::Token { choice, token } => self.heard.entry((id, choice)).or_default().push(token.id),
                Event::Finished { choice, summary } => {
                    let heard = self.heard.remove(&(id, choice)).unwrap_or_default();
                    assert_eq!(heard, summary.tokens, "what was streamed of request {id}, choice {choice}");
                    ended.push(((id, choice), Ok(*summary)));
                }
                Event::Failed { choice, error } => {
                    self.heard.remove(&(id, choice));
                    ended.push(((id, choice), Err(error)));
                }
                Event::Prefill { done, total, .. } => assert!(done <= total),
                Event::Scored { .. } => {}
            }
        }
        ended
    }
}
