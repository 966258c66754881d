//! Requests in flight, by the id their client gave (`rid`): `/abort_request` and the shutdown of the server need them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use oscar_engine::RequestHandle;

/// All requests in flight.
#[derive(Debug, Default)]
pub(crate) struct InFlightRequests {
    list: Arc<Mutex<List>>,
}

#[derive(Debug, Default)]
struct List {
    next: u64,
    entries: HashMap<u64, (Arc<str>, Arc<RequestHandle>)>,
}

/// Keeps a request in the list. Dropping it aborts the request if it has not finished.
#[derive(Debug)]
pub(crate) struct InFlightGuard {
    key: u64,
    list: Arc<Mutex<List>>,
}

impl InFlightRequests {
    /// Adds a request that was handed to the engine.
    pub(crate) fn enter(&self, id: Arc<str>, handle: RequestHandle) -> InFlightGuard {
        let mut list = lock(&self.list);
        let key = list.next;
        list.next += 1;
        list.entries.insert(key, (id, Arc::new(handle)));
        InFlightGuard { key, list: Arc::clone(&self.list) }
    }

    /// Aborts the requests with this id, or all of them, and says how many there were.
    pub(crate) fn abort(&self, id: Option<&str>) -> usize {
        let list = lock(&self.list);
        let chosen = list.entries.values().filter(|(known, _)| id.is_none_or(|id| *id == **known));
        let handles: Vec<Arc<RequestHandle>> = chosen.map(|(_, handle)| Arc::clone(handle)).collect();
        drop(list);
        handles.iter().for_each(|handle| handle.cancel());
        handles.len()
    }

    /// The ids that clients gave to requests, by the engine's numbers of these.
    pub(crate) fn ids(&self) -> HashMap<u64, Arc<str>> {
        let list = lock(&self.list);
        list.entries.values().map(|(id, handle)| (handle.id(), Arc::clone(id))).collect()
    }

    /// The number of requests in flight.
    pub(crate) fn len(&self) -> usize {
        lock(&self.list).entries.len()
    }
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        // The handle is dropped after the lock: aborting a request sends a command to the engine.
        let entry = lock(&self.list).entries.remove(&self.key);
        drop(entry);
    }
}

fn lock(list: &Mutex<List>) -> MutexGuard<'_, List> {
    list.lock().unwrap_or_else(PoisonError::into_inner)
}
