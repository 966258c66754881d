//! Telling a follower what changes in the prefix tree, without ever waiting for it.
//!
//! Changes go through a bounded channel once a turn. If the follower lets it fill up, what it missed is not kept: it is
//! told everything anew as soon as there is room.

use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

use oscar_kernels::Backend;
use oscar_kv::CacheEvent;

use super::Scheduler;

/// Turns that a follower may be behind.
const TURNS: usize = 256;

/// How often a follower that was too slow is tried again; everything has to be gathered for it each time.
pub(super) const TRY_AGAIN: Duration = Duration::from_millis(100);

/// Somebody who follows the tree.
pub(super) struct Watcher {
    sender: SyncSender<Vec<CacheEvent>>,
    /// Since when it has missed something.
    behind: Option<Instant>,
}

/// The two ends for a follower.
pub(crate) fn channel() -> (SyncSender<Vec<CacheEvent>>, Receiver<Vec<CacheEvent>>) {
    sync_channel(TURNS)
}

impl Watcher {
    pub(super) fn is_behind(&self) -> bool {
        self.behind.is_some()
    }
}

impl<B: Backend> Scheduler<B> {
    /// Follows the tree from now on, in place of whoever did so before.
    pub(super) fn watch(&mut self, sender: SyncSender<Vec<CacheEvent>>) {
        let now = self.ledger.watch();
        self.watcher = Some(Watcher { sender, behind: None });
        self.tell(now);
    }

    /// Tells what has changed in the tree since the last turn.
    pub(super) fn tell_changes(&mut self) {
        let Some(watcher) = &self.watcher else { return };
        let events = match watcher.behind {
            None => self.ledger.take_events(),
            Some(since) if since.elapsed() >= TRY_AGAIN => self.ledger.watch(),
            // Nothing of this will be told, so that it is not kept either.
            Some(_) => return drop(self.ledger.take_events()),
        };
        if !events.is_empty() {
            self.tell(events);
        }
    }

    fn tell(&mut self, events: Vec<CacheEvent>) {
        let Some(watcher) = &mut self.watcher else { return };
        match watcher.sender.try_send(events) {
            Ok(()) => watcher.behind = None,
            Err(TrySendError::Full(_)) => watcher.behind = Some(Instant::now()),
            Err(TrySendError::Disconnected(_)) => {
                self.watcher = None;
                self.ledger.unwatch();
            }
        }
    }
}
