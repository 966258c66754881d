//! The subscribers, and the batches that are kept for those who missed some.
//!
//! Every batch has a number, so whoever misses one can tell. A subscriber that does not read misses batches once as much
//! waits for it as may wait; nobody else notices.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use oscar_kv::CacheEvent;
use tokio::sync::mpsc;

use super::{batch, zmtp};

/// The most messages and bytes that may be queued for a subscriber.
const WAITING_MESSAGES: usize = 4096;
const WAITING_BYTES: usize = 16 << 20;

/// The most batches and bytes that are kept for replay.
const KEPT_BATCHES: usize = 10_000;
const KEPT_BYTES: usize = 64 << 20;

/// The most topics of a subscriber.
const TOPICS: usize = 64;

/// All subscribers, and the batches that are kept for replay.
#[derive(Debug)]
pub(super) struct Hub {
    topic: Vec<u8>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The sequence number of the next batch.
    next: u64,
    kept: VecDeque<(u64, Bytes)>,
    kept_bytes: usize,
    subscribers: Vec<Arc<Subscriber>>,
}

/// A subscriber: its topics, and the queue of what it is to be sent.
#[derive(Debug)]
pub(super) struct Subscriber {
    topics: Mutex<Vec<Vec<u8>>>,
    sender: mpsc::Sender<Bytes>,
    waiting: AtomicUsize,
    missed: AtomicUsize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Hub {
    pub(super) fn new(topic: &str) -> Hub {
        Hub { topic: topic.as_bytes().to_vec(), state: Mutex::default() }
    }

    /// Publishes events that the engine sent together as one batch.
    pub(super) fn publish(&self, events: &[CacheEvent]) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
        match batch::encode(now, events) {
            Ok(payload) => self.send(&payload),
            Err(error) => tracing::error!("cache events cannot be told: {error}"),
        }
    }

    fn send(&self, payload: &[u8]) {
        let mut state = lock(&self.state);
        let number = state.next;
        state.next += 1;
        let mut message = Vec::with_capacity(payload.len() + self.topic.len() + 32);
        zmtp::put_frame(&mut message, &self.topic, true);
        zmtp::put_frame(&mut message, &number.to_be_bytes(), true);
        zmtp::put_frame(&mut message, payload, false);
        let message = Bytes::from(message);
        state.kept_bytes += payload.len();
        state.kept.push_back((number, message.slice(message.len() - payload.len()..)));
        while state.kept.len() > KEPT_BATCHES || state.kept_bytes > KEPT_BYTES {
            let Some((_, oldest)) = state.kept.pop_front() else { break };
            state.kept_bytes -= oldest.len();
        }
        let told = state.subscribers.iter().filter(|subscriber| subscriber.wants(&self.topic));
        told.for_each(|subscriber| subscriber.tell(&message));
    }

    /// Adds a subscriber, and gives the queue of what it is to be sent.
    pub(super) fn subscribe(&self) -> (Arc<Subscriber>, mpsc::Receiver<Bytes>) {
        let (sender, messages) = mpsc::channel(WAITING_MESSAGES);
        let subscriber = Arc::new(Subscriber {
            topics: Mutex::default(),
            sender,
            waiting: AtomicUsize::new(0),
            missed: AtomicUsize::new(0),
        });
        lock(&self.state).subscribers.push(Arc::clone(&subscriber));
        (subscriber, messages)
    }

    pub(super) fn unsubscribe(&self, subscriber: &Arc<Subscriber>) {
        lock(&self.state).subscribers.retain(|other| !Arc::ptr_eq(other, subscriber));
    }

    /// The first kept batch with this sequence number or a later one.
    pub(super) fn kept_from(&self, number: u64) -> Option<(u64, Bytes)> {
        let state = lock(&self.state);
        let first = state.kept.front()?.0;
        state.kept.get(usize::try_from(number.saturating_sub(first)).ok()?).cloned()
    }
}

impl Subscriber {
    fn wants(&self, topic: &[u8]) -> bool {
        lock(&self.topics).iter().any(|prefix| topic.starts_with(prefix))
    }

    /// Takes a subscriber's message: 1 and a topic to subscribe to, or 0 and one to unsubscribe from. It is false if
    /// there are too many topics.
    pub(super) fn change_topics(&self, message: &[u8]) -> bool {
        let mut topics = lock(&self.topics);
        match message.split_first() {
            Some((1, topic)) if topics.len() < TOPICS => topics.push(topic.to_vec()),
            Some((1, _)) => return false,
            Some((0, topic)) => {
                if let Some(place) = topics.iter().position(|other| other == topic) {
                    topics.swap_remove(place);
                }
            }
            _ => {}
        }
        true
    }

    /// Queues a message, unless the queue is full.
    pub(super) fn tell(&self, message: &Bytes) {
        let waiting = self.waiting.fetch_add(message.len(), Ordering::SeqCst);
        let fits = waiting == 0 || waiting + message.len() <= WAITING_BYTES;
        if fits && self.sender.try_send(message.clone()).is_ok() {
            return;
        }
        self.waiting.fetch_sub(message.len(), Ordering::SeqCst);
        if self.missed.fetch_add(1, Ordering::SeqCst) == 0 {
            tracing::warn!("a subscriber of cache events reads too slowly and misses some");
        }
    }

    /// Takes note that a queued message has been sent.
    pub(super) fn sent(&self, message: &Bytes) {
        self.waiting.fetch_sub(message.len(), Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_does_not_read_misses_batches_and_nothing_grows() {
        let hub = Hub::new("kv");
        let (slow, mut messages) = hub.subscribe();
        let (other, _unread) = hub.subscribe();
        assert!(slow.change_topics(b"\x01k") && other.change_topics(b"\x01elsewhere"));
        let payload = vec![0; 1 << 20];
        for _ in 0..100 {
            hub.send(&payload);
        }
        assert_eq!(other.waiting.load(Ordering::SeqCst), 0);
        assert!(slow.waiting.load(Ordering::SeqCst) <= WAITING_BYTES);
        assert_eq!(slow.missed.load(Ordering::SeqCst), 85);
        assert!(lock(&hub.state).kept_bytes <= KEPT_BYTES);
        let mut numbers = Vec::new();
        while let Ok(message) = messages.try_recv() {
            numbers.push(message[4 + 2 + 7]);
            slow.sent(&message);
        }
        assert_eq!(numbers, (0..15).collect::<Vec<u8>>());
        hub.send(&payload);
        assert_eq!(messages.try_recv().unwrap()[4 + 2 + 7], 100, "the gap shows");
        assert_eq!(hub.kept_from(0).unwrap().0, 37);
        assert_eq!(hub.kept_from(99).unwrap().0, 99);
        assert!(hub.kept_from(101).is_none());
        hub.unsubscribe(&slow);
        assert_eq!(lock(&hub.state).subscribers.len(), 1);
    }

    #[test]
    fn topics_come_and_go() {
        let hub = Hub::new("");
        let (subscriber, _messages) = hub.subscribe();
        assert!(!subscriber.wants(b""));
        assert!(subscriber.change_topics(b"\x01") && subscriber.wants(b""));
        assert!(subscriber.change_topics(b"\x00") && !subscriber.wants(b""));
        assert!(subscriber.change_topics(b"") && subscriber.change_topics(b"\x02x"));
        assert!(
            (0..TOPICS).all(|_| subscriber.change_topics(b"\x01a")) && !subscriber.change_topics(b"\x01a")
        );
    }
}
