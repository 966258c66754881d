//! The engine's thread: one loop that owns the model's cache and takes all requests one step further at a time.
//!
//! Each turn hears commands, takes every answer in progress one token further in one batch, and does one bounded item
//! of prompt work. So a long prompt never holds up answers for longer than an item, and answers never hold up a prompt
//! for longer than a step. Prompts are computed in order of arrival, short ones several at a time unless they could share
//! pages, and each is given to the prefix tree when it is done: requests that arrive together share what the first of
//! them has computed.

mod admission;
mod decode;
mod job;
mod prefill;
mod room;
mod together;
mod watch;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use oscar_kernels::Backend;
use oscar_kv::{CacheEvent, Extend, Ledger, Sequence, Shortage};
use oscar_model::text::StreamDecoder;
use oscar_model::{Activations, LoadedModel};

use crate::draw::fresh_seed;
use crate::error::EngineError;
use crate::event::{Event, FinishReason};
use crate::output::{Decode, Output};
use crate::request::{GenerateOptions, Request};
use crate::serve::{EngineStats, SequenceView, SharedSink};
use job::{Job, Running, Segment};
use prefill::Prefill;
pub(crate) use watch::channel as watch_channel;
use watch::{TRY_AGAIN, Watcher};

/// How often a busy engine makes its statistics known.
const PUBLISH_EVERY: Duration = Duration::from_millis(100);

/// What the engine's thread is told.
pub(crate) enum Command {
    Submit(Box<Submitted>),
    Cancel(u64),
    /// Forget the prefix tree; answered when done.
    Flush(Sender<()>),
    /// Statistics as of now.
    Report(Sender<EngineStats>),
    /// Tell what changes in the prefix tree.
    Watch(SyncSender<Vec<CacheEvent>>),
    Stop,
}

pub(crate) struct Submitted {
    pub(crate) id: u64,
    pub(crate) at: Instant,
    pub(crate) request: Request,
    pub(crate) sink: SharedSink,
}

/// What both sides of the channel see.
pub(crate) struct Shared {
    pub(crate) commands: Sender<Command>,
    /// Requests that have not begun.
    pub(crate) waiting: AtomicUsize,
    stats: Mutex<EngineStats>,
}

impl Shared {
    pub(crate) fn new(commands: Sender<Command>) -> Shared {
        Shared { commands, waiting: AtomicUsize::new(0), stats: Mutex::default() }
    }

    pub(crate) fn stats(&self) -> MutexGuard<'_, EngineStats> {
        self.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Everything the engine's thread owns.
pub(crate) struct Scheduler<B: Backend> {
    model: Arc<LoadedModel<B>>,
    ledger: Ledger,
    cache: B::Cache,
    activations: Activations<B>,
    commands: Receiver<Command>,
    shared: Arc<Shared>,
    /// Tokens of a sequence.
    context: usize,
    /// Rows of a chunk of a prompt.
    chunk_rows: usize,
    max_running: usize,
    /// How prompts are read.
    prompt_mode: Extend,
    /// Whether there are sealed pages.
    sealing: bool,
    /// Tokens that may be drawn.
    vocabulary: usize,
    /// In order of arrival.
    waiting: VecDeque<Job>,
    prefill: Option<Prefill<B>>,
    /// In order of arrival.
    running: Vec<Running>,
    /// Somebody lost pages: nobody is let in until somebody is done.
    crowded: bool,
    /// Why the prompt in progress cannot go on.
    shortage: Option<Shortage>,
    /// Scratch pages were written since they were last given back.
    scratch_used: bool,
    next_arrival: u64,
    counters: EngineStats,
    published: Instant,
    /// Who is told what changes in the prefix tree.
    watcher: Option<Watcher>,
}

/// Limits that the scheduler keeps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    pub(crate) context: usize,
    pub(crate) chunk_rows: usize,
    pub(crate) max_running: usize,
    pub(crate) prompt_mode: Extend,
}

impl<B: Backend> Scheduler<B> {
    pub(crate) fn new(
        model: Arc<LoadedModel<B>>,
        ledger: Ledger,
        cache: B::Cache,
        activations: Activations<B>,
        rules: Rules,
        commands: Receiver<Command>,
        shared: Arc<Shared>,
    ) -> Scheduler<B> {
        let Rules { context, chunk_rows, max_running, prompt_mode } = rules;
        let vocabulary = model.tokenizer().vocab_size();
        Scheduler {
            sealing: ledger.options().sealed.is_some(),
            model,
            ledger,
            cache,
            activations,
            commands,
            shared,
            context,
            chunk_rows,
            max_running,
            prompt_mode,
            vocabulary,
            waiting: VecDeque::new(),
            prefill: None,
            running: Vec::new(),
            crowded: false,
            shortage: None,
            scratch_used: false,
            next_arrival: 0,
            counters: EngineStats::default(),
            published: Instant::now(),
            watcher: None,
        }
    }

    /// Serves until it is told to stop.
    pub(crate) fn run(mut self) {
        while self.hear() {
            if !self.running.is_empty() {
                self.decode();
            }
            self.prefill_item();
            self.tell_changes();
            if self.published.elapsed() >= PUBLISH_EVERY {
                self.publish();
            }
        }
        self.shut_down();
    }

    /// Takes commands; waits for one if there is nothing else to do. `false` ends the thread.
    fn hear(&mut self) -> bool {
        if self.running.is_empty() && self.prefill.is_none() && self.waiting.is_empty() {
            self.publish();
            match self.next_command() {
                Ok(command) => {
                    if !self.obey(command) {
                        return false;
                    }
                }
                // Nothing to do but to let a follower catch up.
                Err(RecvTimeoutError::Timeout) => return true,
                Err(RecvTimeoutError::Disconnected) => return false,
            }
        }
        while let Ok(command) = self.commands.try_recv() {
            if !self.obey(command) {
                return false;
            }
        }
        true
    }

    /// Waits for a command; not for ever if somebody has to be told something.
    fn next_command(&self) -> Result<Command, RecvTimeoutError> {
        if self.watcher.as_ref().is_some_and(Watcher::is_behind) {
            return self.commands.recv_timeout(TRY_AGAIN);
        }
        self.commands.recv().map_err(|_| RecvTimeoutError::Disconnected)
    }

    fn obey(&mut self, command: Command) -> bool {
        match command {
            Command::Submit(submitted) => self.submit(*submitted),
            Command::Cancel(id) => self.cancel(id),
            Command::Flush(done) => {
                self.ledger.flush();
                self.tell_changes();
                let _ = done.send(());
            }
            Command::Report(reply) => {
                let _ = reply.send(self.stats());
            }
            Command::Watch(sender) => self.watch(sender),
            Command::Stop => return false,
        }
        true
    }

    fn submit(&mut self, submitted: Submitted) {
        let Submitted { id, at, request, sink } = submitted;
        let Request { prompt: tokens, options, filter } = request;
        let salt = options.salt();
        let segments = vec![Segment { end: tokens.len(), mode: self.prompt_mode }];
        let options = Arc::new(options);
        let seed = options.sampling.seed.unwrap_or_else(fresh_seed);
        let decoder = self.decoder(&options);
        let endings = self.model.tokenizer().end_ids();
        let mut output = Output::new(&options, seed, &tokens, endings, self.vocabulary, filter, decoder);
        output.submitted = at;
        let (arrival, choices) = (self.next_arrival, options.n);
        self.next_arrival += 1;
        self.counters.requests += 1;
        let next = None;
        let job = Job {
            id,
            arrival,
            salt,
            sink,
            output,
            choices,
            tokens,
            segments,
            next,
            counted: true,
            alone: false,
        };
        self.wait(job);
    }

    fn decoder(&self, options: &GenerateOptions) -> Box<dyn Decode> {
        let mut decoder = StreamDecoder::new(Arc::clone(self.model.tokenizer()));
        if options.new_text {
            decoder = decoder.from_start();
        }
        if options.keep_special {
            decoder = decoder.keep_special();
        }
        Box::new(decoder)
    }

    fn uncount(&self) {
        self.shared.waiting.fetch_sub(1, Ordering::SeqCst);
    }

    /// Adds an answer to those in progress.
    fn join(&mut self, running: Running) {
        let place = self.running.partition_point(|other| other.order() < running.order());
        self.running.insert(place, running);
    }

    /// Breaks off whatever a request is doing.
    fn cancel(&mut self, id: u64) {
        while let Some(place) = self.waiting.iter().position(|job| job.id == id) {
            if let Some(job) = self.waiting.remove(place) {
                if job.counted {
                    self.uncount();
                }
                self.cancel_job(job);
            }
        }
        if let Some(prefill) = self.prefill.take_if(|prefill| prefill.job.id == id) {
            let (job, sequence) = self.abandon(prefill);
            self.retire(sequence);
            self.cancel_job(job);
        }
        while let Some(place) = self.running.iter().position(|running| running.id == id) {
            let running = self.running.remove(place);
            self.finish_running(running, FinishReason::Cancelled);
        }
    }

    fn cancel_job(&mut self, job: Job) {
        let Job { sink, output, choices, .. } = job;
        for choice in 1..choices {
            let other = output.fork(choice, self.decoder(output.options()));
            self.end(&sink, &other, FinishReason::Cancelled);
        }
        self.end(&sink, &output, FinishReason::Cancelled);
    }

    /// Tells that an answer has ended.
    fn end(&mut self, sink: &SharedSink, output: &Output, finish: FinishReason) {
        self.crowded = false;
        let counter = match finish {
            FinishReason::Cancelled => &mut self.counters.cancelled,
            _ => &mut self.counters.finished,
        };
        *counter += 1;
        let summary = Box::new(output.summary(finish));
        sink.send(Event::Finished { choice: output.choice, summary });
    }

    /// Tells that some answers cannot be completed.
    fn fail(&mut self, sink: &SharedSink, first: usize, choices: usize, error: Arc<EngineError>) {
        self.crowded = false;
        for choice in first..first + choices {
            self.counters.failed += 1;
            sink.send(Event::Failed { choice, error: Arc::clone(&error) });
        }
    }

    fn stats(&self) -> EngineStats {
        let view = |id, choice, sequence: &Sequence| {
            let count = |slots: &[u32]| slots.iter().filter(|&&slot| slot != 0).count();
            SequenceView {
                request: id,
                choice,
                tokens: sequence.len(),
                cached_tokens: sequence.cached_tokens(),
                exact_pages: count(sequence.exact_slots()),
                sealed_pages: count(sequence.sealed_slots()),
            }
        };
        let prefill = self.prefill.iter().map(|prefill| view(prefill.job.id, 0, &prefill.sequence));
        let running =
            self.running.iter().map(|running| view(running.id, running.output.choice, &running.sequence));
        EngineStats {
            queued: self.waiting.len(),
            prefilling: usize::from(self.prefill.is_some()),
            running: self.running.len(),
            cache: self.ledger.stats(),
            sequences: prefill.chain(running).collect(),
            ..self.counters.clone()
        }
    }

    fn publish(&mut self) {
        *self.shared.stats() = self.stats();
        self.published = Instant::now();
    }

    /// Tells everybody that there will be no answer.
    fn shut_down(&mut self) {
        let error = || Arc::new(EngineError::Stopped);
        if let Some(prefill) = self.prefill.take() {
            self.fail_prefill(prefill, EngineError::Stopped);
        }
        for running in std::mem::take(&mut self.running) {
            self.fail_running(running, EngineError::Stopped);
        }
        for job in std::mem::take(&mut self.waiting) {
            self.fail(&job.sink, job.output.choice, job.choices, error());
        }
        self.publish();
    }
}
