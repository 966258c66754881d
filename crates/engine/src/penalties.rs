//! Changes of logits that a request wants: penalties for what was said, biases, tokens that may not end it yet.
//!
//! Kept up to date token by token, so a step costs what it changes and not what was said so far.

use std::collections::{HashMap, HashSet};

use oscar_kernels::backend::LogitChange;

use crate::request::SamplingOptions;

/// The changes for one answer.
#[derive(Clone, Debug)]
pub(crate) struct LogitChanges {
    repetition: f32,
    presence: f32,
    frequency: f32,
    changes: Vec<LogitChange>,
    places: HashMap<u32, usize>,
    /// Tokens that the answer holds.
    said: HashSet<u32>,
    /// Ending tokens, ruled out while the answer is too short.
    endings: Vec<u32>,
    /// The changes with the endings ruled out, while that is so.
    before_ending: Option<Vec<LogitChange>>,
}

impl LogitChanges {
    /// Changes before the first token.
    pub(crate) fn new(options: &SamplingOptions, prompt: &[u32], endings: Vec<u32>) -> LogitChanges {
        let mut changes = LogitChanges {
            repetition: options.repetition_penalty,
            presence: options.presence_penalty,
            frequency: options.frequency_penalty,
            changes: Vec::new(),
            places: HashMap::new(),
            said: HashSet::new(),
            endings,
            before_ending: None,
        };
        for &(token, bias) in &options.logit_bias {
            changes.of(token).add += bias;
        }
        changes.read(prompt);
        changes
    }

    /// Takes note of prompt tokens.
    pub(crate) fn read(&mut self, prompt: &[u32]) {
        if self.repetition != 1.0 {
            for &token in prompt {
                self.of(token).penalty = self.repetition;
            }
        }
    }

    /// Takes note of a drawn token.
    pub(crate) fn drawn(&mut self, token: u32) {
        let (repetition, presence, frequency) = (self.repetition, self.presence, self.frequency);
        if repetition == 1.0 && presence == 0.0 && frequency == 0.0 {
            return;
        }
        let first = self.said.insert(token);
        let change = self.of(token);
        change.penalty = repetition;
        change.add -= frequency + if first { presence } else { 0.0 };
    }

    /// Gets ready for the next token, which may end the answer or not.
    pub(crate) fn prepare(&mut self, may_end: bool) {
        self.before_ending = (!may_end).then(|| {
            let mut changes = self.changes.clone();
            for &token in &self.endings {
                match self.places.get(&token) {
                    Some(&place) => changes[place].add = f32::NEG_INFINITY,
                    None => changes.push(LogitChange { token, penalty: 1.0, add: f32::NEG_INFINITY }),
                }
            }
            changes
        });
    }

    /// Whether nothing is changed from now on, whatever is drawn, for an answer that may end or not.
    pub(crate) fn are_none(&self, may_end: bool) -> bool {
        let penalties = (self.repetition, self.presence, self.frequency) != (1.0, 0.0, 0.0);
        !penalties && self.changes.is_empty() && (may_end || self.endings.is_empty())
    }

    /// The changes for the next token.
    pub(crate) fn current(&self) -> &[LogitChange] {
        self.before_ending.as_deref().unwrap_or(&self.changes)
    }

    fn of(&mut self, token: u32) -> &mut LogitChange {
        let next = self.changes.len();
        let place = *self.places.entry(token).or_insert(next);
        if place == next {
            self.changes.push(LogitChange { token, penalty: 1.0, add: 0.0 });
        }
        &mut self.changes[place]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn penalties_count_and_biases_stay() {
        let options = SamplingOptions {
            repetition_penalty: 1.5,
            presence_penalty: 1.0,
            frequency_penalty: 0.25,
            logit_bias: vec![(7, 2.0), (7, 1.0)],
            ..SamplingOptions::default()
        };
        let mut changes = LogitChanges::new(&options, &[3, 3], vec![0]);
        changes.drawn(7);
        changes.drawn(9);
        changes.drawn(9);
        let mut list = changes.current().to_vec();
        list.sort_by_key(|change| change.token);
        let triple = |change: &LogitChange| (change.token, change.penalty, change.add);
        let expected = [(3, 1.5, 0.0), (7, 1.5, 3.0 - 1.25), (9, 1.5, -1.5)];
        assert_eq!(list.iter().map(triple).collect::<Vec<_>>(), expected);
        changes.prepare(false);
        assert_eq!(changes.current().len(), 4);
        assert_eq!(changes.current()[3].add, f32::NEG_INFINITY);
        changes.prepare(true);
        assert_eq!(changes.current().len(), 3);
    }

    #[test]
    fn an_ordinary_request_changes_nothing() {
        let mut changes = LogitChanges::new(&SamplingOptions::default(), &[1, 2], vec![]);
        changes.drawn(5);
        changes.prepare(true);
        assert!(changes.current().is_empty());
    }
}
