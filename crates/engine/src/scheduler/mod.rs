//! Continuous batching: who runs next, the forward passes that follow from it, and the thread that does both.
//!
//! | module | job |
//! |---|---|
//! | `policy` | decides: admission order, batches, preemption, prefix insertion. Ids, counts and the page ledger only |
//! | `plan` | what the policy tells the executor: one [`StepPlan`](plan::StepPlan) at a time |
//! | `executor` | carries a plan out on a device: copies, seals, forward passes, sampling |
//! | `answers` | the text, the sampling state and the listeners of every request |
//! | `core` | the loop of plan, execution and report, without a thread |
//! | `fatal` | tells an error that ends the work of the device from one that ends an operation |
//! | `failure` | the end of all requests when the device fails for good |
//! | `pace` | how much of a long prompt is computed between two tokens of running answers |
//! | `worker` | the engine's thread: commands in, events and statistics out |
//! | `cache_events` | tells one subscriber what changes in the prefix tree |
//!
//! Each turn takes every running answer one token further in one batch and then does a bounded amount of prompt work. So a
//! prompt never delays answers for longer than one chunk, one of several chunks hardly longer than a decode step takes, and answers
//! never delay a prompt for longer than one step.

mod answers;
mod cache_events;
mod core;
mod executor;
mod failure;
mod fatal;
mod pace;
mod plan;
mod policy;
mod segment;
#[cfg(test)]
mod simulation;
mod worker;

pub(crate) use cache_events::channel as cache_event_channel;
pub(crate) use core::{Core, MakeAttention, Submitted};
pub(crate) use worker::{Command, Shared, Worker};
