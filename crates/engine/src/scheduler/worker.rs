//! The engine's thread: commands in, turns as long as there is work, statistics out.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use oscar_kernels::Backend;
use oscar_kv::CacheEvent;

use super::cache_events::{RETRY_INTERVAL, Subscriber};
use super::core::{Core, Submitted};
use crate::serve::{Admission, EngineStats, KeptReply};
use crate::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender};
use crate::sync::{Mutex, MutexGuard};

/// How often a busy engine makes its statistics known.
const STATS_INTERVAL: Duration = Duration::from_millis(100);

/// What the engine's thread is told.
pub(crate) enum Command {
    Submit(Box<Submitted>),
    Cancel(u64),
    /// Forget the prefix tree; answered when done.
    Flush(Sender<()>),
    /// Say what the prefix tree keeps of a text.
    FindKept {
        tokens: Vec<u32>,
        salt: u64,
        reply: KeptReply,
    },
    /// Send the statistics of this moment.
    Report(Sender<EngineStats>),
    /// Tell what changes in the prefix tree.
    Subscribe(SyncSender<Vec<CacheEvent>>),
    Stop,
}

/// What both sides of the channel see.
pub(crate) struct Shared {
    pub(crate) commands: Sender<Command>,
    pub(crate) admission: Arc<Admission>,
    stats: Mutex<EngineStats>,
}

impl Shared {
    pub(crate) fn new(commands: Sender<Command>) -> Shared {
        Shared { commands, admission: Arc::default(), stats: Mutex::default() }
    }

    pub(crate) fn stats(&self) -> MutexGuard<'_, EngineStats> {
        self.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Everything the engine's thread owns.
pub(crate) struct Worker<B: Backend> {
    core: Core<B>,
    commands: Receiver<Command>,
    shared: Arc<Shared>,
    stats_sent: Instant,
    /// The listener that is told what changes in the prefix tree, if there is one.
    subscriber: Option<Subscriber>,
}

impl<B: Backend> Worker<B> {
    pub(crate) fn new(core: Core<B>, commands: Receiver<Command>, shared: Arc<Shared>) -> Worker<B> {
        Worker { core, commands, shared, stats_sent: Instant::now(), subscriber: None }
    }

    /// Serves until it is told to stop.
    pub(crate) fn run(mut self) {
        while self.take_commands() {
            self.core.turn();
            self.send_cache_events();
            if self.stats_sent.elapsed() >= STATS_INTERVAL {
                self.send_stats();
            }
        }
        self.core.shut_down();
        self.send_stats();
    }

    /// Takes commands; waits for one if there is nothing else to do. False ends the thread.
    fn take_commands(&mut self) -> bool {
        if !self.core.has_work() {
            self.send_stats();
            match self.wait_for_command() {
                Ok(command) => {
                    if !self.handle(command) {
                        return false;
                    }
                }
                // Nothing to do but to let a subscriber catch up.
                Err(RecvTimeoutError::Timeout) => return true,
                Err(RecvTimeoutError::Disconnected) => return false,
            }
        }
        while let Ok(command) = self.commands.try_recv() {
            if !self.handle(command) {
                return false;
            }
        }
        true
    }

    /// Waits for a command; not for ever if a subscriber has to be told something.
    fn wait_for_command(&self) -> Result<Command, RecvTimeoutError> {
        if self.subscriber.as_ref().is_some_and(Subscriber::is_behind) {
            return self.commands.recv_timeout(RETRY_INTERVAL);
        }
        self.commands.recv().map_err(|_| RecvTimeoutError::Disconnected)
    }

    fn handle(&mut self, command: Command) -> bool {
        match command {
            Command::Submit(submitted) => self.core.submit(*submitted),
            Command::Cancel(id) => self.core.cancel(id),
            Command::Flush(done) => {
                self.core.ledger_mut().flush();
                self.send_cache_events();
                let _ = done.send(());
            }
            Command::FindKept { tokens, salt, reply } => reply(self.core.ledger_mut().kept(salt, &tokens)),
            Command::Report(reply) => {
                let _ = reply.send(self.core.stats());
            }
            Command::Subscribe(sender) => self.subscriber = Subscriber::start(sender, self.core.ledger_mut()),
            Command::Stop => return false,
        }
        true
    }

    fn send_cache_events(&mut self) {
        let subscriber = self.subscriber.take();
        self.subscriber = subscriber.and_then(|subscriber| subscriber.tell_changes(self.core.ledger_mut()));
    }

    fn send_stats(&mut self) {
        *self.shared.stats() = self.core.stats();
        self.stats_sent = Instant::now();
    }
}
