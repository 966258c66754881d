//! One engine from its start until every request has ended.

use std::collections::HashMap;
use std::sync::Arc;

use oscar_kv::Tier;
use oscar_model::LoadedModel;
use oscar_random::Random;
use oscar_testing::{FaultRates, HashBackend, tiny_model, tiny_sliding_model};

use super::super::core::Core;
use super::super::plan::AnswerId;
use super::client::{Client, Ended};
use super::reference::Reference;
use super::workload::{LONGEST, Planned, engine_options, memory, next_turn, requests};
use crate::error::EngineError;
use crate::event::FinishReason;
use crate::request::Contexts;
use crate::serve::EngineStats;
use crate::settings::{EngineOptions, KvOptions};

/// Requests after which no conversation goes on.
const MOST_REQUESTS: usize = 60;

/// What happened in some episodes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Totals {
    pub(super) turns: u64,
    compared: u64,
    cancelled: u64,
    failed: u64,
    preemptions: u64,
    cached_tokens: u64,
    batched_prompts: u64,
    evicted_pages: u64,
    evicted_warm: u64,
    buffer_faults: u64,
    forward_faults: u64,
    seal_faults: u64,
    sample_faults: u64,
    copy_faults: u64,
    /// Answers with their history in bf16 that were compared.
    bf16_histories: u64,
    /// The same in the high tier.
    high_histories: u64,
    demoted_pages: u64,
    /// Answers that were demoted and lost their pages besides.
    replayed_demotions: u64,
    /// Pages that came back from the host.
    restored_pages: u64,
    steps_ahead: u64,
    lost_devices: u64,
    /// Answers that failed because the device was lost.
    lost_answers: u64,
}

impl Totals {
    pub(super) fn counts(&self) -> [(&'static str, u64); 21] {
        [
            ("answers compared", self.compared),
            ("cancelled", self.cancelled),
            ("failed", self.failed),
            ("preemptions", self.preemptions),
            ("cached tokens", self.cached_tokens),
            ("batched prompts", self.batched_prompts),
            ("evicted pages", self.evicted_pages),
            ("evicted warm copies", self.evicted_warm),
            ("faults of buffers", self.buffer_faults),
            ("faults of forward passes", self.forward_faults),
            ("faults of seals", self.seal_faults),
            ("faults of sampling", self.sample_faults),
            ("faults of copies", self.copy_faults),
            ("histories in bf16", self.bf16_histories),
            ("histories in the high tier", self.high_histories),
            ("demoted pages", self.demoted_pages),
            ("demotions that were repeated", self.replayed_demotions),
            ("pages from the host", self.restored_pages),
            ("decode steps ahead", self.steps_ahead),
            ("lost devices", self.lost_devices),
            ("answers that a lost device failed", self.lost_answers),
        ]
    }

    pub(super) fn add(&mut self, other: &Totals) {
        self.turns += other.turns;
        self.compared += other.compared;
        self.cancelled += other.cancelled;
        self.failed += other.failed;
        self.preemptions += other.preemptions;
        self.cached_tokens += other.cached_tokens;
        self.batched_prompts += other.batched_prompts;
        self.evicted_pages += other.evicted_pages;
        self.evicted_warm += other.evicted_warm;
        self.buffer_faults += other.buffer_faults;
        self.forward_faults += other.forward_faults;
        self.seal_faults += other.seal_faults;
        self.sample_faults += other.sample_faults;
        self.copy_faults += other.copy_faults;
        self.bf16_histories += other.bf16_histories;
        self.high_histories += other.high_histories;
        self.demoted_pages += other.demoted_pages;
        self.replayed_demotions += other.replayed_demotions;
        self.restored_pages += other.restored_pages;
        self.steps_ahead += other.steps_ahead;
        self.lost_devices += other.lost_devices;
        self.lost_answers += other.lost_answers;
    }
}

/// One engine, its requests, and the answers they must get.
pub(super) struct Episode {
    random: Random,
    model: Arc<LoadedModel<HashBackend>>,
    options: EngineOptions,
    requests: Vec<Planned>,
    /// Requests may begin alike or continue each other without any change of their answers.
    may_share: bool,
    /// Tokens that sequences may have.
    contexts: Contexts,
    /// How often operations of the device fail.
    faults: FaultRates,
    /// After how many operations the device is lost, if it is.
    lost_after: Option<u64>,
}

thread_local! {
    /// Loaded once, because that takes longer than an episode; by each test, because they do not fail together.
    static MODEL: Arc<LoadedModel<HashBackend>> = tiny_model(LONGEST, Arc::new(HashBackend::default()));
    /// Models with windows of less than a page, of one page, and of several.
    static SLIDING: [Arc<LoadedModel<HashBackend>>; 4] = [40, 64, 130, 300]
        .map(|window| tiny_sliding_model("gemma3", LONGEST, window, Arc::new(HashBackend::default())));
}

impl Episode {
    pub(super) fn new(seed: u64) -> Episode {
        let mut random = Random::new(seed);
        let model = match seed % 3 {
            2 => SLIDING.with(|models| Arc::clone(&models[(seed / 3 % 4) as usize])),
            _ => MODEL.with(Arc::clone),
        };
        let context = random.between(128, LONGEST);
        let (mut options, may_share) = engine_options(&mut random, &model, context);
        let tiers: Vec<Tier> = tiers(&options).collect();
        let requests = requests(&mut random, context, may_share, &tiers);
        let percent = if random.one_in(2) { random.between(15, 30) } else { random.between(15, 100) };
        let bytes = memory(&model, &options, &requests, percent);
        options.kv.memory = Some(bytes);
        if random.one_in(2) {
            options.kv.host_memory = bytes * random.between(1, 400) / 100;
        }
        let faults = match random.below(6) {
            0..3 => FaultRates::default(),
            3 => FaultRates { forward: random.between(8, 60), ..FaultRates::default() },
            4 => {
                let (often, seldom) = (random.between(4, 60), random.between(60, 2000));
                FaultRates { buffer: often, forward: seldom, copy: often, seal: often, sample: seldom }
            }
            // Of what fails at sealing, much must be computed again and nothing may be found in the tree.
            _ => FaultRates { seal: random.between(2, 8), ..FaultRates::default() },
        };
        let contexts = Client::new(&model, &options).contexts;
        // Some are over by then, others have hardly begun.
        let lost_after = random.one_in(6).then(|| {
            let most = 10_usize.pow(random.between(1, 5) as u32);
            random.between(0, most) as u64
        });
        let requests_so_far = Vec::new();
        let mut episode = Episode {
            random,
            model,
            options,
            requests: requests_so_far,
            may_share,
            contexts,
            faults,
            lost_after,
        };
        episode.requests = requests.into_iter().map(|request| episode.limited(request)).collect();
        episode
    }

    pub(super) fn run(mut self) -> Totals {
        let KvOptions { windows, memory, host_memory, prefix_tree, tail, prefill, codec, .. } =
            &self.options.kv;
        // Shown when a test fails.
        println!(
            "window {:?}, context {:?}, chunks of {}, {} at a time, sealed {}, {windows:?}, {memory:?} bytes, {host_memory} of the host, tree {prefix_tree}, \
             {tail:?}, {prefill:?}, {} requests, {:?}, the device is lost after {:?} operations",
            self.model.config().window(0),
            self.options.context,
            self.options.prefill_chunk,
            self.options.max_running,
            codec.is_some(),
            self.requests.len(),
            self.faults,
            self.lost_after,
        );
        let backend = Arc::clone(self.model.model().backend());
        // What is expected is computed step by step.
        backend.compute_ahead(true);
        let mut client = Client::new(&self.model, &self.options);
        backend.compute_ahead(false);
        let mut reference = Reference::new(&self.model, &self.options);
        let faults_before = backend.fault_counts();
        backend.inject_faults(self.random.next_u64(), self.faults);
        backend.lose_after(self.lost_after);
        backend.compute_ahead(true);
        let mut totals = Totals::default();
        let mut ended: Vec<Ended> = Vec::new();
        let (mut next, mut pause) = (0, 0);
        while next < self.requests.len() || client.core.has_work() {
            while next < self.requests.len() && pause == 0 {
                let request = &self.requests[next];
                client.submit(next as u64, &request.prompt, request.options.clone());
                next += 1;
                pause = self.requests.get(next).map_or(0, |request| request.pause);
            }
            pause = pause.saturating_sub(1);
            if self.random.one_in(60) && next > 0 {
                client.core.cancel(self.random.below(next) as u64);
            }
            if self.random.one_in(500) {
                client.core.ledger_mut().flush();
            }
            // Long prompts go on in pieces of any size, and sometimes not at all.
            let long = if self.random.one_in(2) { usize::MAX } else { self.random.below(600) };
            client.core.turn_with(long);
            if self.random.one_in(64) {
                client.core.audit().expect("the books are right");
            }
            for answer in client.take_ended() {
                self.go_on_after(&answer);
                ended.push(answer);
            }
            totals.turns += 1;
            assert!(totals.turns < 100_000, "no end in sight");
        }
        ended.append(&mut client.take_ended());
        backend.inject_faults(0, FaultRates::default());
        backend.lose_after(None);
        backend.compute_ahead(false);
        let asked_in_vain = backend.fault_counts().after_loss - faults_before.after_loss;
        assert!(asked_in_vain <= 1, "{asked_in_vain} operations were asked of a lost device");
        assert_eq!(client.admission.failure().is_some(), asked_in_vain > 0, "requests are refused");
        totals.lost_devices = asked_in_vain;
        self.check(ended, &mut reference, &client.core.demotions, &mut totals);
        check_nothing_is_held(&mut client.core);
        let choices: u64 = self.requests.iter().map(|request| request.options.n as u64).sum();
        let EngineStats { finished, cancelled, failed, .. } = client.core.stats();
        assert_eq!(finished + cancelled + failed, choices, "every answer is counted once");
        assert_eq!(client.admission.queued(), 0, "requests that wait");

        let stats: EngineStats = client.core.stats();
        let faults = backend.fault_counts();
        totals.preemptions = stats.preemptions;
        totals.demoted_pages = stats.demoted_pages;
        totals.cached_tokens = stats.cached_tokens;
        totals.batched_prompts = stats.batched_prompts;
        totals.evicted_pages = stats.cache.evicted_pages;
        totals.evicted_warm = stats.cache.evicted_warm;
        totals.steps_ahead = client.core.taken_ahead();
        totals.restored_pages = stats.cache.host.restored;
        totals.buffer_faults = faults.buffer - faults_before.buffer;
        totals.forward_faults = faults.forward - faults_before.forward;
        totals.seal_faults = faults.seal - faults_before.seal;
        totals.sample_faults =
            faults.sample + faults.sample_row - faults_before.sample - faults_before.sample_row;
        totals.copy_faults = faults.copy - faults_before.copy;
        totals
    }

    /// Sometimes the answer to a request is followed by the next turn of a conversation.
    fn go_on_after(&mut self, ended: &Ended) {
        let ((id, _), Ok(summary)) = ended else { return };
        if self.may_share && self.requests.len() < MOST_REQUESTS && self.random.one_in(2) {
            let context = self.options.context.unwrap_or(LONGEST);
            let said = &self.requests[*id as usize];
            let tiers: Vec<Tier> = tiers(&self.options).collect();
            let turn = next_turn(&mut self.random, context, said, &summary.tokens, &tiers);
            self.requests.extend(turn.map(|turn| self.limited(turn)));
        }
    }

    /// A request with no more choices than may run at a time, and no longer than its tier can have.
    fn limited(&self, mut request: Planned) -> Planned {
        let options = &mut request.options;
        options.n = options.n.min(self.options.max_running);
        if let (Tier::Exact | Tier::High, Some(most)) = (options.tier, self.contexts.of_tier(options.tier)) {
            request.prompt.truncate(most - 1);
            if !options.demote {
                let room = most - 1 - request.prompt.len();
                options.max_tokens = options.max_tokens.map(|tokens| tokens.min(room));
            }
        }
        request
    }

    /// Every choice of every request has ended once, and as it must.
    fn check(
        &self,
        ended: Vec<Ended>,
        reference: &mut Reference,
        demoted: &[(AnswerId, usize, usize)],
        totals: &mut Totals,
    ) {
        let mut open: HashMap<(u64, usize), ()> = HashMap::new();
        for (index, request) in self.requests.iter().enumerate() {
            open.extend((0..request.options.n).map(|choice| ((index as u64, choice), ())));
        }
        for ((id, choice), outcome) in ended {
            assert!(open.remove(&(id, choice)).is_some(), "request {id}, choice {choice} ended twice");
            let request = &self.requests[id as usize];
            let summary = match outcome {
                Ok(summary) => summary,
                Err(error) => {
                    let text = error.to_string();
                    totals.failed += 1;
                    if let EngineError::DeviceFailed(cause) = &*error {
                        assert!(totals.lost_devices > 0 && cause.is_fatal(), "request {id}: {text}");
                        totals.lost_answers += 1;
                        continue;
                    }
                    let injected = text.contains("injected fault") || text.contains("finite");
                    assert!(self.faults != FaultRates::default() && injected, "request {id}: {text}");
                    continue;
                }
            };
            let answer = AnswerId { request: id, choice };
            let demotions: Vec<(usize, usize)> =
                demoted.iter().filter(|of| of.0 == answer).map(|&(_, at, end)| (at, end)).collect();
            assert!(demotions.is_empty() || request.options.demote, "request {id} did not allow a demotion");
            assert_eq!(demotions.is_empty(), summary.demoted_tokens == 0, "request {id}");
            totals.replayed_demotions += u64::from(!demotions.is_empty() && summary.preemptions > 0);
            totals.bf16_histories += u64::from(request.options.tier == Tier::Exact);
            totals.high_histories += u64::from(request.options.tier == Tier::High);
            let expected = reference.answer(id as usize, request, choice, &demotions);
            let what =
                format!("request {id}, choice {choice}, {} prompt tokens: {summary:?}", request.prompt.len());
            if summary.finish == FinishReason::Cancelled {
                totals.cancelled += 1;
                assert!(expected.tokens.starts_with(&summary.tokens), "{what}\n{:?}", expected.tokens);
            } else {
                totals.compared += 1;
                assert_eq!(summary.tokens, expected.tokens, "{what}");
                assert_eq!((summary.finish, &summary.text), (expected.finish, &expected.text), "{what}");
                assert_eq!(summary.logprobs, expected.logprobs, "{what}");
                assert_eq!(summary.prompt_logprobs, expected.prompt_logprobs, "{what}");
                assert_eq!(summary.embedding, expected.embedding, "{what}");
            }
        }
        assert!(open.is_empty(), "these never ended: {:?}", open.keys());
    }
}

/// The tiers that requests may have.
fn tiers(options: &EngineOptions) -> impl Iterator<Item = Tier> {
    std::iter::once(Tier::Sealed).chain(options.kv.other_tiers())
}

fn check_nothing_is_held(core: &mut Core<HashBackend>) {
    core.audit().expect("the books are right");
    core.ledger_mut().flush();
    core.audit().expect("the books are right");
    let stats = core.stats();
    let cache = stats.cache;
    assert_eq!((stats.queued, stats.prefilling, stats.running), (0, 0, 0));
    let used = [cache.exact, cache.sealed, cache.high, cache.scratch].map(|pool| pool.used());
    assert_eq!((used, cache.sequences), ([0; 4], 0), "{cache:?}");
}
