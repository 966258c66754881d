//! The feed-forward block of a mixture of experts alone. Its rows are random and independent, so that experts are chosen as
//! evenly and independently as a router can.

use std::collections::HashSet;
use std::time::Instant;

use oscar_codec::ExactSlot;
use oscar_kernels::backend::{Batch, RoutedMlp, SequenceRows};
use oscar_kernels::routing::{Choice, RoutingScratch};
use oscar_kernels::{Backend, KernelError};
use oscar_model::{FeedForward, Model};
use serde::Serialize;

use crate::model::synthetic_tokens;

/// Passes over all layers before those that are timed.
const WARM_UP: usize = 3;

/// A measurement of layers with experts.
#[derive(Clone, Debug)]
pub struct ExpertsBench {
    /// Rows that go through a layer at once, one measurement each.
    pub rows: Vec<usize>,
    /// Passes over all layers that are timed together.
    pub passes: usize,
    /// How often; the fastest counts.
    pub repeat: usize,
    /// Bytes of the weights of one expert.
    pub expert_bytes: usize,
}

/// The times and rates of one layer of experts.
#[derive(Clone, Debug, Serialize)]
pub struct ExpertsRow {
    /// Rows that went through a layer at once.
    pub rows: usize,
    /// Experts of a layer.
    pub experts: usize,
    /// Experts that a row goes to.
    pub top_k: usize,
    /// Experts that some row went to, a mean over layers.
    pub distinct_experts: f64,
    /// Bytes of their weights.
    pub expert_mb: f64,
    /// Time of a layer: norm, router, experts, and the sum of what they say.
    pub layer_us: f64,
    /// Bytes of the weights of experts over that time.
    pub gb_per_s: f64,
}

/// Measures the feed-forward blocks of a model whose layers all have experts.
pub fn experts<B: Backend>(model: &Model<B>, bench: &ExpertsBench) -> Result<Vec<ExpertsRow>, KernelError> {
    bench.rows.iter().map(|&rows| measure(model, bench, rows)).collect()
}

fn measure<B: Backend>(
    model: &Model<B>,
    bench: &ExpertsBench,
    rows: usize,
) -> Result<ExpertsRow, KernelError> {
    let (config, backend) = (model.config(), model.backend());
    let mlps: Vec<&RoutedMlp<B>> = (0..config.layers)
        .filter_map(|layer| match &model.layer(layer).mlp {
            FeedForward::Routed(mlp) => Some(mlp),
            FeedForward::Dense(_) => None,
        })
        .collect();
    // Every row is a sequence of its own; their keys and values are never written.
    let cache = model.cache(rows + 1)?;
    let slots: Vec<_> = (1..=rows as u32).map(|slot| ExactSlot::table([slot])).collect();
    let sequences: Vec<_> = slots.iter().map(|slots| SequenceRows::exact(0, 1, slots)).collect();
    let tokens = synthetic_tokens(rows, config.vocab_size);
    let batch = Batch { tokens: &tokens, sequences: &sequences };
    let step = model.begin_step(&batch, &cache)?;
    let mut activations = model.activations(rows, 1)?;
    model.embed(&batch, &step, &mut activations)?;

    let rule = mlps[0].routing.rule();
    let mut numbers = backend.buffer(rows, rule.experts)?;
    let mut distinct = 0;
    for mlp in &mlps {
        backend.norm_linear(&step, activations.hidden(), &mlp.norm, &[&mlp.router], &mut numbers)?;
        distinct += chosen(mlp, &backend.read(&numbers, 0..rows)?)?.len();
        backend.routed_mlp(&step, mlp, activations.hidden_mut())?;
    }
    let mut fastest = f64::INFINITY;
    for repetition in 0..=bench.repeat {
        // The same rows again: what blocks add makes rows alike in the end.
        let passes = if repetition == 0 { WARM_UP } else { bench.passes };
        model.embed(&batch, &step, &mut activations)?;
        backend.read(activations.hidden(), 0..1)?;
        let start = Instant::now();
        for _ in 0..passes {
            for mlp in &mlps {
                backend.routed_mlp(&step, mlp, activations.hidden_mut())?;
            }
        }
        backend.read(activations.hidden(), 0..1)?;
        if repetition > 0 {
            fastest = fastest.min(start.elapsed().as_secs_f64() / (passes * mlps.len()) as f64);
        }
    }
    let distinct_experts = distinct as f64 / mlps.len() as f64;
    let bytes = distinct_experts * bench.expert_bytes as f64;
    Ok(ExpertsRow {
        rows,
        experts: rule.experts,
        top_k: rule.top_k,
        distinct_experts,
        expert_mb: bytes / 1e6,
        layer_us: fastest * 1e6,
        gb_per_s: bytes / fastest / 1e9,
    })
}

/// The experts that rows go to by the numbers of their router. Corrections of random weights are all alike and change nothing.
fn chosen<B: Backend>(mlp: &RoutedMlp<B>, numbers: &[f32]) -> Result<HashSet<usize>, KernelError> {
    let rule = mlp.routing.rule();
    let mut scratch = RoutingScratch::default();
    let mut choices = vec![Choice { expert: 0, weight: 0.0 }; rule.top_k];
    let mut all = HashSet::new();
    for row in numbers.chunks_exact(rule.experts) {
        mlp.routing.choose(row, None, &mut scratch, &mut choices)?;
        all.extend(choices.iter().map(|choice| choice.expert));
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use oscar_kernels::cpu::CpuBackend;

    use super::*;

    #[test]
    fn the_experts_of_independent_rows_are_counted() {
        let files = oscar_model::random_mixture("qwen3-30b-a3b", 1).unwrap().unwrap();
        let model = files.load_model(Arc::new(CpuBackend::new(1).unwrap())).unwrap();
        let bench = ExpertsBench { rows: vec![1, 32], passes: 1, repeat: 1, expert_bytes: 1000 };
        let rows = experts(&model, &bench).unwrap();
        assert_eq!((rows[0].experts, rows[0].top_k, rows[0].distinct_experts), (128, 8, 8.0));
        // 128 (1 - (1 - 8/128)³²) of them if all are as likely.
        assert!((100.0..122.0).contains(&rows[1].distinct_experts), "{rows:?}");
        assert!(rows.iter().all(|row| row.layer_us > 0.0 && row.gb_per_s > 0.0), "{rows:?}");
    }
}
