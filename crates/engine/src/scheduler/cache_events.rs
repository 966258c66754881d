//! Cache events: one subscriber is told what changes in the prefix tree, and the engine never waits for it.
//!
//! Changes go through a bounded channel once a turn. If the subscriber lets it fill up, what it missed is dropped: it is told
//! everything anew as soon as there is room in the channel.

use std::time::{Duration, Instant};

use oscar_kv::{CacheEvent, Ledger};

use crate::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};

/// Turns that a subscriber may be behind.
const TURNS: usize = 256;

/// How often a subscriber that was too slow is tried again; everything has to be gathered for it each time.
pub(super) const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// The two ends of the channel to a subscriber.
pub(crate) fn channel() -> (SyncSender<Vec<CacheEvent>>, Receiver<Vec<CacheEvent>>) {
    sync_channel(TURNS)
}

/// Somebody who is told what changes in the prefix tree.
pub(super) struct Subscriber {
    sender: SyncSender<Vec<CacheEvent>>,
    /// Since when it has missed something.
    behind: Option<Instant>,
}

impl Subscriber {
    /// Tells a new subscriber what the tree holds; `None` if nobody listens any more.
    pub(super) fn start(sender: SyncSender<Vec<CacheEvent>>, ledger: &mut Ledger) -> Option<Subscriber> {
        let now = ledger.watch();
        Subscriber { sender, behind: None }.send(now, ledger)
    }

    /// Whether it has missed something.
    pub(super) fn is_behind(&self) -> bool {
        self.behind.is_some()
    }

    /// Tells what has changed in the tree since the last turn; `None` if nobody listens any more.
    pub(super) fn tell_changes(self, ledger: &mut Ledger) -> Option<Subscriber> {
        let events = match self.behind {
            None => ledger.take_events(),
            Some(since) if since.elapsed() >= RETRY_INTERVAL => ledger.watch(),
            Some(_) => {
                // Nothing of this will be told, so it must not pile up either.
                drop(ledger.take_events());
                return Some(self);
            }
        };
        if events.is_empty() { Some(self) } else { self.send(events, ledger) }
    }

    fn send(mut self, events: Vec<CacheEvent>, ledger: &mut Ledger) -> Option<Subscriber> {
        match self.sender.try_send(events) {
            Ok(()) => self.behind = None,
            Err(TrySendError::Full(_)) => self.behind = Some(Instant::now()),
            Err(TrySendError::Disconnected(_)) => {
                ledger.unwatch();
                return None;
            }
        }
        Some(self)
    }
}
