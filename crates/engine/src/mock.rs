//! An engine without a model, for tests of what is above: seeded words at a settable speed.
//!
//! Requests are checked, stopped, cancelled and counted as the real engine does it; only the words come from a hash.
//! The same request always gets the same answer.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use oscar_kernels::KernelError;
use oscar_kernels::backend::Sampled;
use oscar_model::text::TextError;

use crate::draw::{draw, fresh_seed};
use crate::error::EngineError;
use crate::event::{Event, FinishReason, PromptLogprob, Sink};
use crate::output::{Decode, Output};
use crate::pooling::HiddenRows;
use crate::request::{Contexts, GenerateOptions, Limits, Request};
use crate::serve::{Admission, Control, EngineInfo, EngineStats, RequestHandle, Serve, SharedSink};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use crate::sync::thread::{self, JoinHandle};
use crate::sync::{Mutex, MutexGuard};

/// The token with which the mock ends its turn; it has no text.
pub const MOCK_END: u32 = 0;

/// Numbers in the embedding of a prompt.
const MOCK_HIDDEN_SIZE: usize = 16;

const WORDS: [&str; 32] = [
    "river", "stone", "light", "table", "seven", "green", "paper", "cloud", "north", "winter", "copper",
    "garden", "letter", "morning", "silver", "window", "bridge", "thunder", "velvet", "harbour", "lantern",
    "meadow", "orchard", "pebble", "quarry", "ribbon", "saddle", "timber", "valley", "willow", "yellow",
    "zephyr",
];

/// Settings of a [`MockEngine`].
#[derive(Clone, Debug)]
pub struct MockOptions {
    /// Tokens per second of each answer; as fast as possible when `None`.
    pub tokens_per_s: Option<f64>,
    /// Time from the start of a request to its first token.
    pub latency: Duration,
    /// Engines with different seeds give different answers.
    pub seed: u64,
    /// Tokens that a sequence may have, prompt and answer together.
    pub context: usize,
    /// Token ids that a prompt may have.
    pub vocabulary: usize,
    /// Answers that may run at a time.
    pub max_running: usize,
    /// Requests that may wait; more are refused.
    pub max_queued: usize,
    /// Tokens that a sequence with its history in bf16 may have, as if there were such; `None` refuses to have one.
    pub bf16_context: Option<usize>,
}

impl Default for MockOptions {
    fn default() -> Self {
        MockOptions {
            tokens_per_s: None,
            latency: Duration::ZERO,
            seed: 0,
            context: 32 * 1024,
            vocabulary: 1 << 18,
            max_running: 1024,
            max_queued: 4096,
            bf16_context: None,
        }
    }
}

/// An engine without a model, whose answers are seeded words.
pub struct MockEngine {
    shared: Arc<Shared>,
    info: EngineInfo,
    limits: Limits,
    next_id: AtomicU64,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    commands: Sender<Command>,
    admission: Admission,
    stats: Mutex<EngineStats>,
}

impl Shared {
    fn stats(&self) -> MutexGuard<'_, EngineStats> {
        self.stats.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

enum Command {
    Submit(Box<Submitted>),
    Cancel(u64),
    /// The device failed.
    FailAll,
    Stop,
}

struct Submitted {
    id: u64,
    request: Request,
    sink: SharedSink,
}

impl Control for Shared {
    fn cancel(&self, id: u64) {
        let _ = self.commands.send(Command::Cancel(id));
    }
}

impl MockEngine {
    /// Starts the mock's thread.
    pub fn new(options: MockOptions) -> MockEngine {
        let (commands, receiver) = mpsc::channel();
        let stats = Mutex::default();
        let shared = Arc::new(Shared { commands, admission: Admission::default(), stats });
        let info = EngineInfo {
            context: options.context,
            vocabulary: options.vocabulary,
            hidden_size: MOCK_HIDDEN_SIZE,
            max_running: options.max_running,
            max_queued: options.max_queued,
            prefill_chunk: options.context,
            deterministic: true,
            prefix_cache: false,
            kv: "mock".to_owned(),
            bits_per_element: 16.0,
            capacity_tokens: options.context.saturating_mul(options.max_running),
            bf16_context: options.bf16_context,
            high_context: None,
        };
        let limits = Limits {
            contexts: Contexts { own: options.context, high: None, bf16: options.bf16_context },
            vocabulary: options.vocabulary,
            choices: options.max_running,
            deterministic: info.deterministic,
        };
        let mut worker = Worker::new(options, receiver, Arc::clone(&shared));
        let thread = Some(thread::spawn(move || worker.run()));
        MockEngine { shared, info, limits, next_id: AtomicU64::new(1), thread }
    }

    /// Ids for a text, one per word; the same word has the same id.
    pub fn encode(&self, text: &str) -> Vec<u32> {
        let id = |word: &str| {
            let known = WORDS.iter().position(|known| *known == word).map(|index| index as u64);
            let hash = word.bytes().fold(0u64, |hash, byte| hash.wrapping_mul(31).wrapping_add(byte.into()));
            (known.unwrap_or(hash % (self.limits.vocabulary as u64 - 1)) + 1) as u32
        };
        text.split_whitespace().map(id).collect()
    }

    /// Acts as an engine does whose device fails with this error: everything in progress and everything that waits fails,
    /// and new requests are refused.
    pub fn fail_device(&self, error: KernelError) {
        self.shared.admission.close(Arc::new(EngineError::Kernel(error)));
        let _ = self.send(Command::FailAll);
    }

    fn send(&self, command: Command) -> Result<(), EngineError> {
        self.shared.commands.send(command).map_err(|_| EngineError::Stopped)
    }
}

impl Drop for MockEngine {
    fn drop(&mut self) {
        let _ = self.shared.commands.send(Command::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Serve for MockEngine {
    fn submit(&self, request: Request, sink: Sink) -> Result<RequestHandle, EngineError> {
        request.validate(&self.limits)?;
        self.shared.admission.reserve(self.info.max_queued)?;
        let id = self.next_id.fetch_add(1, Ordering::SeqCst);
        self.shared.stats().requests += 1;
        let sent =
            self.send(Command::Submit(Box::new(Submitted { id, request, sink: SharedSink::new(sink) })));
        sent.inspect_err(|_| {
            self.shared.admission.remove();
        })?;
        Ok(RequestHandle::new(id, Arc::clone(&self.shared) as Arc<dyn Control>))
    }

    fn info(&self) -> &EngineInfo {
        &self.info
    }

    fn stats(&self) -> EngineStats {
        let queued = self.shared.admission.queued();
        EngineStats { queued, ..self.shared.stats().clone() }
    }

    fn failure(&self) -> Option<EngineError> {
        self.shared.admission.failure()
    }

    fn flush(&self) {}
}

/// An answer that the mock is giving.
struct Active {
    id: u64,
    output: Output,
    sink: SharedSink,
    /// What the words depend on.
    seed: u64,
    /// Tokens before the answer.
    prompt: Arc<[u32]>,
}

struct Worker {
    options: MockOptions,
    commands: Receiver<Command>,
    shared: Arc<Shared>,
    waiting: VecDeque<Submitted>,
    active: HashMap<u64, Active>,
    /// When each of `active` gets its next token.
    due: BinaryHeap<Reverse<(Instant, u64)>>,
    next_key: u64,
}

impl Worker {
    fn new(options: MockOptions, commands: Receiver<Command>, shared: Arc<Shared>) -> Worker {
        Worker {
            options,
            commands,
            shared,
            waiting: VecDeque::new(),
            active: HashMap::new(),
            due: BinaryHeap::new(),
            next_key: 0,
        }
    }

    fn run(&mut self) {
        loop {
            while let Some(command) = self.next_command() {
                if !self.handle(command) {
                    return;
                }
                // The next command may be long in coming.
                self.count();
            }
            self.admit();
            let now = Instant::now();
            // One word per answer and round, so that commands are heard in between.
            for _ in 0..self.due.len() {
                match self.due.peek() {
                    Some(&Reverse((due, key))) if due <= now => {
                        self.due.pop();
                        self.generate(key, due);
                    }
                    _ => break,
                }
            }
            self.count();
        }
    }

    fn count(&self) {
        self.shared.stats().running = self.active.len();
    }

    /// The next command; waits for one as long as there is nothing else to do.
    fn next_command(&mut self) -> Option<Command> {
        // A request that can begin must not wait for another one's word to be due.
        let free = self.options.max_running.saturating_sub(self.active.len());
        if self.waiting.front().is_some_and(|submitted| submitted.request.options.n <= free) {
            return self.commands.try_recv().ok();
        }
        match self.due.peek() {
            None => Some(self.commands.recv().unwrap_or(Command::Stop)),
            Some(Reverse((due, _))) => {
                let wait = due.saturating_duration_since(Instant::now());
                if wait.is_zero() {
                    return self.commands.try_recv().ok();
                }
                match self.commands.recv_timeout(wait) {
                    Ok(command) => Some(command),
                    Err(RecvTimeoutError::Timeout) => None,
                    Err(RecvTimeoutError::Disconnected) => Some(Command::Stop),
                }
            }
        }
    }

    fn handle(&mut self, command: Command) -> bool {
        match command {
            Command::Submit(submitted) => self.waiting.push_back(*submitted),
            Command::Cancel(id) => self.cancel(id),
            Command::FailAll => {}
            Command::Stop => return false,
        }
        // A request may have come in at the last moment.
        if self.shared.admission.failure().is_some() {
            self.fail_all();
        }
        true
    }

    fn fail_all(&mut self) {
        while let Some(mut submitted) = self.waiting.pop_front() {
            submitted.request.options.max_tokens = None;
            self.begin(submitted);
        }
        self.due.clear();
        let Some(error) = self.shared.admission.failure().map(Arc::new) else { return };
        for (_, active) in self.active.drain() {
            self.shared.stats().failed += 1;
            active.sink.send(Event::Failed { choice: active.output.choice, error: Arc::clone(&error) });
        }
    }

    fn cancel(&mut self, id: u64) {
        if let Some(place) = self.waiting.iter().position(|submitted| submitted.id == id)
            && let Some(mut submitted) = self.waiting.remove(place)
        {
            // One that generates nothing would end as soon as it begins.
            submitted.request.options.max_tokens = None;
            self.begin(submitted);
        }
        let keys: Vec<u64> =
            self.active.iter().filter(|(_, active)| active.id == id).map(|(&key, _)| key).collect();
        for key in &keys {
            if let Some(active) = self.active.remove(key) {
                self.finish(active, FinishReason::Cancelled);
            }
        }
        self.due.retain(|Reverse((_, key))| !keys.contains(key));
    }

    fn admit(&mut self) {
        while let Some(submitted) = self.waiting.front() {
            let free = self.options.max_running.saturating_sub(self.active.len());
            if submitted.request.options.n > free {
                return;
            }
            if let Some(submitted) = self.waiting.pop_front() {
                self.begin(submitted);
            }
        }
    }

    fn begin(&mut self, submitted: Submitted) {
        let Submitted { id, request, sink } = submitted;
        self.shared.admission.remove();
        let options = Arc::new(request.options);
        let vocabulary = self.options.vocabulary;
        let seed = options.sampling.seed.unwrap_or_else(fresh_seed);
        let prompt: Arc<[u32]> = request.prompt.into();
        let mut output =
            Output::new(&options, seed, &prompt, &[MOCK_END], vocabulary, request.filter, Box::new(Words));
        output.begin_prompt();
        self.score(&prompt, &options, &mut output);
        let total = prompt.len();
        self.shared.stats().prompt_tokens += total as u64;
        sink.send(Event::Prefill { done: total, total, cached: 0 });
        if !output.prompt_logprobs.is_empty() {
            sink.send(Event::Scored { prompt: output.prompt_logprobs.as_slice().into() });
        }
        let outputs: Vec<Output> =
            (1..options.n).map(|choice| output.fork(choice, Box::new(Words))).collect();
        let drawn = options.sampling.temperature > 0.0;
        let due = Instant::now() + self.options.latency;
        for output in std::iter::once(output).chain(outputs) {
            let own = if drawn { seed.wrapping_add(output.choice as u64) } else { 0 };
            let seed = prompt.iter().fold(mix(self.options.seed ^ own.rotate_left(17)), |state, &token| {
                mix(state ^ u64::from(token))
            });
            let active = Active { id, output, sink: sink.clone(), seed, prompt: Arc::clone(&prompt) };
            if options.max_tokens == Some(0) {
                self.finish(active, FinishReason::Length);
                continue;
            }
            self.active.insert(self.next_key, active);
            self.due.push(Reverse((due, self.next_key)));
            self.next_key += 1;
        }
    }

    /// Reports what the request wants of the prompt itself: hashes of all tokens up to each.
    fn score(&self, prompt: &[u32], options: &GenerateOptions, output: &mut Output) {
        if options.prompt_logprobs.is_none() && options.embedding.is_none() {
            return;
        }
        let mut state = mix(self.options.seed);
        for (index, &token) in prompt.iter().enumerate() {
            state = mix(state ^ u64::from(token));
            if options.prompt_logprobs.is_some() && index >= options.score_from.max(1) {
                let scored = PromptLogprob { token, logprob: Some(-draw(state, 0)), top: Vec::new() };
                output.prompt_logprobs.push(scored);
            }
        }
        if options.embedding.is_some() {
            let values = (0..MOCK_HIDDEN_SIZE).map(|index| draw(state, index as u64) - 0.5).collect();
            output.pooled.add(&HiddenRows { count: 1, values });
        }
    }

    /// Generates the next token of an answer.
    fn generate(&mut self, key: u64, due: Instant) {
        let Some(mut active) = self.active.remove(&key) else { return };
        let context = self.options.context;
        match active.step(context) {
            Ok(finish) => {
                self.shared.stats().generated_tokens += 1;
                match finish {
                    Some(finish) => self.finish(active, finish),
                    None => {
                        let pause = self.options.tokens_per_s.map_or(0.0, |speed| 1.0 / speed.max(1e-3));
                        self.due.push(Reverse((due + Duration::from_secs_f64(pause), key)));
                        self.active.insert(key, active);
                    }
                }
            }
            Err(error) => {
                self.shared.stats().failed += 1;
                let choice = active.output.choice;
                active.sink.send(Event::Failed { choice, error: Arc::new(error) });
            }
        }
    }

    fn finish(&mut self, active: Active, finish: FinishReason) {
        let Active { output, sink, .. } = active;
        {
            let mut stats = self.shared.stats();
            let counter =
                if finish == FinishReason::Cancelled { &mut stats.cancelled } else { &mut stats.finished };
            *counter += 1;
        }
        let summary = Box::new(output.summary(finish));
        sink.send(Event::Finished { choice: output.choice, summary });
    }
}

impl Active {
    fn step(&mut self, context: usize) -> Result<Option<FinishReason>, EngineError> {
        let index = self.output.tokens().len() as u64;
        let bits = mix(self.seed.wrapping_add(index));
        let last = index >= 8 + self.seed % 57;
        let wanted = if last { MOCK_END } else { 1 + (bits % WORDS.len() as u64) as u32 };
        self.output.prepare()?;
        let candidates = (0..=WORDS.len() as u32).map(|step| (wanted + step) % (WORDS.len() as u32 + 1));
        let Some(token) = candidates.into_iter().find(|&token| self.output.allows(token)) else {
            return Err(EngineError::Filter("no word of the mock is allowed".to_owned()));
        };
        let setting = self.output.setting(usize::MAX);
        let logprob = setting.logprobs.map(|_| -draw(self.seed, index));
        let top = (0..setting.logprobs.unwrap_or(0).min(WORDS.len()) as u32)
            .map(|rank| ((token + rank) % (WORDS.len() as u32 + 1), logprob.unwrap_or(0.0) - rank as f32))
            .collect();
        let room = self.prompt.len() + self.output.tokens().len() + 1 < context;
        let (token, finish) = self.output.push(Sampled { token, logprob, top }, token == MOCK_END, room)?;
        self.sink.send(Event::Token { choice: self.output.choice, token });
        Ok(finish)
    }
}

/// Words with a space after each.
struct Words;

impl Decode for Words {
    fn push(&mut self, id: u32) -> Result<Option<String>, TextError> {
        let word = (id as usize).checked_sub(1).and_then(|index| WORDS.get(index));
        Ok(word.map(|word| format!("{word} ")))
    }

    fn finish(&mut self) -> Option<String> {
        None
    }
}

fn mix(value: u64) -> u64 {
    let z = (value ^ (value >> 31)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z ^ (z >> 29)
}
