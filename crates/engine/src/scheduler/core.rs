//! The engine without its thread: requests are submitted and cancelled, and each turn takes all of them further.

use std::sync::Arc;
use std::time::Instant;

use oscar_codec::PAGE_TOKENS;
use oscar_kernels::backend::{CacheSpec, Feature, HighSpec, HostSlots, Sampled, SealedSpec};
use oscar_kernels::{Backend, KernelError};
use oscar_kv::Ledger;
use oscar_model::LoadedModel;

use super::answers::{Answer, Answers};
use super::executor::{Executor, PromptOutput};
use super::fatal::{unless_fatal, unless_one_is_fatal};
use super::pace::Pace;
use super::plan::{AnswerId, Decision, Next, StepPlan};
use super::policy::{NewRequest, Policy, PromptWants, Rules, StepKind};
use crate::attention::CustomAttention;
use crate::budget::{Budget, Shape};
use crate::draw::fresh_seed;
use crate::error::EngineError;
use crate::event::{Event, FinishReason};
use crate::output::Output;
use crate::pooling::HiddenRows;
use crate::request::Request;
use crate::serve::{Admission, EngineStats, SequenceView, SharedSink};
use crate::settings::EngineOptions;

/// The fewest rows whose logits are computed at once where a prompt is scored. The output projection is the largest
/// matrix of a small model, and every block of rows reads it once.
const SCORED_ROWS: usize = 32;

/// Makes custom attention for a cache of so many bf16 slots.
pub(crate) type MakeAttention<'a, B> =
    Box<dyn FnOnce(usize) -> Result<Box<dyn CustomAttention<B>>, KernelError> + 'a>;

/// A request and who listens to it.
pub(crate) struct Submitted {
    pub(crate) id: u64,
    pub(crate) at: Instant,
    pub(crate) request: Request,
    pub(crate) sink: SharedSink,
}

/// The policy, the executor and the answers of an engine.
pub(crate) struct Core<B: Backend> {
    model: Arc<LoadedModel<B>>,
    pub(super) policy: Policy,
    executor: Executor<B>,
    answers: Answers,
    /// What made the device useless, if something has: nothing is asked of it any more.
    pub(super) failure: Option<Arc<EngineError>>,
    /// Shared with those who submit, who count the requests that wait.
    pub(super) admission: Arc<Admission>,
    counters: EngineStats,
    /// Bounds long prompts beside answers by time.
    pace: Option<Pace>,
    /// Rows of a chunk of a prompt.
    chunk_rows: usize,
    /// Which answers were demoted after how many tokens, and below which page.
    #[cfg(test)]
    pub(super) demotions: Vec<(AnswerId, usize, usize)>,
}

impl<B: Backend> Core<B> {
    /// Plans the memory and makes the cache. `admission` is shared with those who submit, who count a request in;
    /// `attention` is custom attention, if there is any.
    pub(crate) fn build(
        model: Arc<LoadedModel<B>>,
        options: &EngineOptions,
        admission: Arc<Admission>,
        attention: Option<MakeAttention<'_, B>>,
    ) -> Result<(Core<B>, Budget), EngineError> {
        let config = model.config();
        // Custom attention reads bf16 pages of the whole sequence.
        let options = &match &attention {
            None => options.for_layers(config)?,
            Some(_) => options.clone(),
        };
        let shape = Shape::from(config);
        let high = options.kv.high_codec()?;
        if high.is_some() && !model.model().backend().supports(Feature::HighTier) {
            return Err(KernelError::Unsupported(Feature::HighTier).into());
        }
        let mut budget = Budget::plan(shape, options)?;
        if options.kv.host_memory > 0 && !model.model().backend().supports(Feature::HostPages) {
            let expected = "0 on a device whose memory is the host's";
            return Err(EngineError::bad_option("host_kv_memory", options.kv.host_memory, expected));
        }
        let ledger = Ledger::new(budget.ledger_options(options))?;
        let slots = ledger.slots();
        let cache = model.model().backend().cache(&CacheSpec {
            geometry: shape.geometry,
            query_heads: model.config().q_heads,
            slots: slots.exact,
            scratch_slots: if options.kv.codec.is_some() { slots.scratch } else { 0 },
            sealed: options.kv.codec.as_ref().map(|codec| SealedSpec {
                codec: Arc::clone(codec),
                slots: slots.sealed,
                windows: budget.windows,
                sequence_pages: budget.context.div_ceil(PAGE_TOKENS),
                high: high.map(|codec| HighSpec { codec, slots: slots.high }),
            }),
            host: match options.kv.host_memory {
                0 => HostSlots::default(),
                _ => HostSlots { exact: budget.host[0].pages + 1, sealed: budget.host[1].pages + 1 },
            },
        })?;
        let max_running = options.max_running;
        let chunk_rows = options.prefill_chunk.min(budget.context);
        let logit_rows = max_running.max(SCORED_ROWS.min(chunk_rows));
        let activations = model.model().activations(chunk_rows.max(max_running), logit_rows)?;
        let attention = attention.map(|make| make(slots.exact)).transpose()?;
        if let Some(attention) = &attention {
            budget.kv = attention.name();
        }
        let rules = Rules {
            layers: config.layers,
            chunk_rows,
            max_running,
            prompt_mode: options.prefill_mode(),
            whole_chunks: attention.is_some(),
        };
        let core = Core {
            policy: Policy::new(ledger, rules),
            pace: options.paced.then(Pace::default),
            chunk_rows,
            executor: Executor::new(Arc::clone(&model), cache, activations, logit_rows, attention),
            answers: Answers::new(Arc::clone(model.tokenizer()), budget.contexts()),
            model,
            admission,
            failure: None,
            counters: EngineStats::default(),
            #[cfg(test)]
            demotions: Vec::new(),
        };
        Ok((core, budget))
    }

    /// Takes a request, which counts as queued already.
    pub(crate) fn submit(&mut self, submitted: Submitted) {
        let Submitted { id, at, request, sink } = submitted;
        let Request { prompt: tokens, options, filter } = request;
        let options = Arc::new(options);
        let seed = options.sampling.seed.unwrap_or_else(fresh_seed);
        let decoder = self.answers.decoder(&options);
        let tokenizer = self.model.tokenizer();
        let endings = tokenizer.end_ids();
        let mut output =
            Output::new(&options, seed, &tokens, endings, tokenizer.vocab_size(), filter, decoder);
        output.submitted = at;
        self.counters.requests += 1;
        tracing::debug!(id, tokens = tokens.len(), choices = options.n, "a request is queued");
        self.answers.insert(AnswerId { request: id, choice: 0 }, sink, output);
        self.policy.submit(NewRequest {
            id,
            key: options.key(),
            demote: options.demote,
            tokens,
            choices: options.n,
            wants: PromptWants {
                prompt_logprobs: options.prompt_logprobs,
                score_from: options.score_from,
                embedding: options.embedding,
            },
            generates: options.max_tokens != Some(0),
        });
        // It came in at the last moment.
        if let Some(cause) = &self.failure {
            self.fail_everything(Arc::clone(cause));
        }
    }

    /// Breaks off a request if it has not ended.
    pub(crate) fn cancel(&mut self, id: u64) {
        self.policy.cancel(id);
        self.run_steps();
    }

    /// Takes every running answer one token further and does a bounded amount of prompt work.
    pub(crate) fn turn(&mut self) {
        let long = match &mut self.pace {
            Some(pace) => {
                let (running, done) = (self.policy.has_running(), self.policy.long_rows());
                pace.turn(Instant::now(), running, done, self.chunk_rows)
            }
            None => usize::MAX,
        };
        self.turn_with(long);
    }

    /// A turn with at most `long` rows times layers of prompts of several chunks, and the rest of the last piece.
    pub(crate) fn turn_with(&mut self, long: usize) {
        self.policy.begin_turn(long);
        self.run_steps();
    }

    /// Whether a turn would do anything.
    pub(crate) fn has_work(&self) -> bool {
        self.failure.is_none() && self.policy.has_work()
    }

    /// The pages, to forget or to follow the prefix tree.
    pub(crate) fn ledger_mut(&mut self) -> &mut Ledger {
        self.policy.ledger_mut()
    }

    /// Fails every request, because the engine stops.
    pub(crate) fn shut_down(&mut self) {
        self.policy.shut_down();
        self.announce();
    }

    fn run_steps(&mut self) {
        while self.failure.is_none() {
            let step = self.policy.next_step();
            // Whoever is admitted hears of it before its work is done.
            self.announce();
            let Some(step) = step else { return };
            if let Err(fatal) = self.run_step(step) {
                self.fail_device(fatal);
            }
        }
    }

    /// Has a step carried out and reports its outcome to the policy. An error is one after which the device is of no use; all
    /// others are part of the outcome.
    fn run_step(&mut self, step: StepKind) -> Result<(), EngineError> {
        // What was evicted for it leaves before anything is written, and what it reads comes back.
        let copies = self.policy.take_host_copies();
        if !copies.is_empty()
            && let Err(error) = unless_fatal(self.executor.copy_host_pages(&copies))?
        {
            self.policy.host_lost(error);
            return Ok(());
        }
        let plan = self.policy.plan(step);
        let _span = tracing::trace_span!("step", kind = plan.kind()).entered();
        match plan {
            StepPlan::Seal(pages) => {
                let outcome = unless_fatal(self.executor.seal(pages))?;
                self.policy.sealed(outcome);
            }
            StepPlan::Demote(pages) => {
                let outcome = unless_fatal(self.executor.seal(pages))?;
                self.policy.demoted(outcome);
            }
            StepPlan::Decode(plan) => {
                let sampled = unless_one_is_fatal(self.executor.decode(&plan, &mut self.answers))?;
                let ids = plan.rows.iter().map(|row| row.answer);
                let outcomes = self.take_tokens_of(ids.collect(), sampled);
                self.policy.decoded(outcomes);
            }
            StepPlan::StartExtension(extension) => {
                let outcome = unless_fatal(self.executor.start_extension(&extension))?;
                self.policy.extension_started(outcome);
            }
            StepPlan::PrefillChunk(chunk) => {
                let outcome = unless_fatal(self.executor.prefill_chunk(&chunk))?;
                let request = self.policy.prompt_in_progress();
                let outcome = outcome.map(|computed| self.add_prompt_output(request, computed));
                self.policy.chunk_computed(outcome);
            }
            StepPlan::PrefillBatch(batch) => {
                let outcome = unless_fatal(self.executor.prefill_batch(&batch))?;
                let pooled: Vec<AnswerId> = batch.hidden.iter().map(|&(answer, _)| answer).collect();
                let outcome = outcome.map(|rows| {
                    for (answer, rows) in pooled.into_iter().zip(rows) {
                        self.add_hidden(answer, &rows);
                    }
                });
                self.policy.batch_computed(outcome);
            }
            StepPlan::SampleFirst(first) => {
                let sampled = unless_one_is_fatal(self.executor.sample_first(&first, &mut self.answers))?;
                let outcomes = self.take_tokens_of(first.answers, sampled);
                self.policy.started(outcomes);
            }
            StepPlan::ReleasePrefill => {
                self.executor.release_prefill();
                self.policy.released();
            }
        }
        Ok(())
    }
}

impl<B: Backend> Core<B> {
    fn take_tokens_of(
        &mut self,
        ids: Vec<AnswerId>,
        sampled: Vec<Result<Sampled, EngineError>>,
    ) -> Vec<Next> {
        let taken = ids.into_iter().zip(sampled).map(|(id, sampled)| {
            let next = self.answers.take_token(id, sampled);
            self.counters.generated_tokens += u64::from(!matches!(next, Next::Failed(_)));
            next
        });
        taken.collect()
    }

    fn add_prompt_output(&mut self, request: Option<AnswerId>, computed: PromptOutput) {
        let PromptOutput { scores, hidden } = computed;
        let Some(id) = request else { return };
        self.add_hidden(id, &hidden);
        if let Some(answer) = self.answers.get_mut(id) {
            answer.output.prompt_logprobs.extend(scores);
        }
    }

    fn add_hidden(&mut self, id: AnswerId, rows: &HiddenRows) {
        if let Some(answer) = self.answers.get_mut(id) {
            answer.output.pooled.add(rows);
        }
    }

    /// Tells everybody what was decided about their requests.
    pub(super) fn announce(&mut self) {
        for decision in self.policy.take_decisions() {
            match decision {
                Decision::Admitted { answer, cached, was_queued } => {
                    self.admitted(answer, cached, was_queued)
                }
                Decision::PutBack { request } => {
                    tracing::trace!(request, "a request waits again");
                    self.admission.add();
                }
                Decision::Dequeued { was_queued } => self.dequeue(was_queued),
                Decision::Progress { request, done, total } => {
                    if let Some(answer) = self.answers.get_mut(AnswerId { request, choice: 0 }) {
                        let cached = answer.output.cached_tokens;
                        answer.sink.send(Event::Prefill { done, total, cached });
                    }
                }
                Decision::Preempted { answer: id, tokens } => {
                    if let Some(answer) = self.answers.get_mut(id) {
                        answer.output.preemptions += 1;
                        answer.span.in_scope(|| {
                            tracing::debug!(tokens, "preempted: an older request needs the pages")
                        });
                    }
                }
                Decision::Demoted { answer: id, at, pages, end } => self.demoted(id, at, pages, end),
                Decision::PromptDone { request, tokens, cached, choices } => {
                    self.prompt_done(AnswerId { request, choice: 0 }, tokens, cached, choices);
                }
                Decision::Ended { first, choices } => self.ended(first, choices),
                Decision::Failed { first, choices, error } => self.failed(first, choices, error),
            }
        }
    }

    fn dequeue(&self, was_queued: bool) {
        if was_queued {
            self.admission.remove();
        }
    }

    fn admitted(&mut self, id: AnswerId, cached: Option<usize>, was_queued: bool) {
        self.dequeue(was_queued);
        let Some(Answer { output, span, .. }) = self.answers.get_mut(id) else { return };
        span.in_scope(|| tracing::debug!(cached, "admitted"));
        if let Some(cached) = cached {
            output.cached_tokens = cached;
        }
        output.begin_prompt();
    }

    fn demoted(&mut self, id: AnswerId, at: usize, pages: usize, end: usize) {
        #[cfg(test)]
        self.demotions.push((id, at, end));
        let Some(Answer { output, span, .. }) = self.answers.get_mut(id) else { return };
        output.demoted_tokens += pages * PAGE_TOKENS;
        span.in_scope(|| tracing::debug!(at, pages, end, "demoted: bf16 pages are short"));
    }

    fn prompt_done(&mut self, id: AnswerId, total: usize, cached: usize, choices: usize) {
        self.counters.prompt_tokens += total as u64;
        self.counters.cached_tokens += cached as u64;
        let Some(Answer { sink, output, finish, span }) = self.answers.get_mut(id) else { return };
        span.in_scope(|| tracing::debug!(tokens = total, cached, "the prompt is computed"));
        sink.send(Event::Prefill { done: total, total, cached });
        if !output.prompt_logprobs.is_empty() {
            sink.send(Event::Scored { prompt: output.prompt_logprobs.as_slice().into() });
        }
        if output.options().max_tokens == Some(0) {
            *finish = Some(FinishReason::Length);
        }
        self.answers.fork(id, choices);
    }

    fn ended(&mut self, first: AnswerId, choices: usize) {
        for Answer { sink, output, finish, span } in self.answers.remove(first, choices) {
            // Nobody but the caller ends an answer without a reason of its own.
            let finish = finish.unwrap_or(FinishReason::Cancelled);
            let counter = match finish {
                FinishReason::Cancelled => &mut self.counters.cancelled,
                _ => &mut self.counters.finished,
            };
            *counter += 1;
            span.in_scope(|| {
                tracing::debug!(reason = finish.name(), tokens = output.tokens().len(), "ended")
            });
            let summary = Box::new(output.summary(finish));
            sink.send(Event::Finished { choice: output.choice, summary });
        }
    }

    fn failed(&mut self, first: AnswerId, choices: usize, error: EngineError) {
        let error = Arc::new(error);
        for Answer { sink, output, span, .. } in self.answers.remove(first, choices) {
            self.counters.failed += 1;
            span.in_scope(|| tracing::debug!(%error, "failed"));
            sink.send(Event::Failed { choice: output.choice, error: Arc::clone(&error) });
        }
    }

    /// Has one answer demoted after so many tokens, below some pages, whatever pages there are.
    #[cfg(test)]
    pub(super) fn force_demotions(&mut self, answer: AnswerId, demotions: &[(usize, usize)]) {
        self.policy.forced_demotions = demotions.iter().map(|&(at, end)| ((answer, at), end)).collect();
    }

    /// Decode steps whose tokens were computed before those of the step before them were known.
    #[cfg(test)]
    pub(super) fn taken_ahead(&self) -> u64 {
        self.executor.taken_ahead
    }

    /// Counts the owners of every page anew and compares with the books. For tests, between turns.
    #[cfg(test)]
    pub(super) fn audit(&self) -> Result<(), String> {
        let sequences: Vec<_> = self.policy.sequences().map(|(_, sequence)| sequence).collect();
        self.policy.ledger().audit(&sequences)
    }

    /// How busy the engine is and what it has done.
    pub(crate) fn stats(&self) -> EngineStats {
        let sequences =
            self.policy.sequences().map(|(AnswerId { request, choice }, sequence)| SequenceView {
                request,
                choice,
                tokens: sequence.len(),
                cached_tokens: sequence.cached_tokens(),
                tier: sequence.tier(),
                exact_pages: sequence.exact_slots().iter().flatten().count(),
                sealed_pages: sequence.sealed_slots().iter().flatten().count(),
            });
        let (queued, prefilling, running) = self.policy.counts();
        EngineStats {
            queued,
            prefilling,
            running,
            preemptions: self.policy.preemptions(),
            demoted_pages: self.policy.demoted_pages(),
            batched_prompts: self.policy.batched_prompts(),
            cache: self.policy.ledger().stats(),
            sequences: sequences.collect(),
            ..self.counters.clone()
        }
    }
}
