//! The answers of an engine that has nothing else to do and memory to spare.

use std::collections::HashMap;
use std::sync::Arc;

use oscar_model::LoadedModel;
use oscar_testing::HashBackend;

use super::super::plan::AnswerId;
use super::client::Client;
use super::workload::Planned;
use crate::event::Summary;
use crate::request::GenerateOptions;
use crate::settings::{EngineOptions, KvOptions};

/// What each choice of each request must be.
pub(super) struct Reference {
    client: Client,
    known: HashMap<(usize, usize), Summary>,
}

impl Reference {
    /// An engine with the same rules of computation as `options`, but nothing is shared and nothing is short.
    pub(super) fn new(model: &Arc<LoadedModel<HashBackend>>, options: &EngineOptions) -> Reference {
        let kv = KvOptions { memory: None, host_memory: 0, prefix_tree: false, ..options.kv.clone() };
        let client = Client::new(model, &EngineOptions { max_running: 1, kv, ..options.clone() });
        Reference { client, known: HashMap::new() }
    }

    /// What a choice of a request must be that was demoted after so many tokens, below these pages.
    pub(super) fn answer(
        &mut self,
        index: usize,
        request: &Planned,
        choice: usize,
        demotions: &[(usize, usize)],
    ) -> &Summary {
        self.known.entry((index, choice)).or_insert_with(|| {
            let answer = AnswerId { request: index as u64, choice: 0 };
            self.client.core.force_demotions(answer, demotions);
            let mut options = GenerateOptions { n: 1, ..request.options.clone() };
            options.sampling.seed = options.sampling.seed.map(|seed| seed + choice as u64);
            self.client.submit(index as u64, &request.prompt, options);
            while self.client.core.has_work() {
                self.client.core.turn();
            }
            let answers = self.client.take_ended();
            let (_, summary) = answers.into_iter().next().expect("an answer");
            summary.expect("nothing fails without faults")
        })
    }
}
