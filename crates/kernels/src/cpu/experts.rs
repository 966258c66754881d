//! Mixtures of experts on the CPU.
//!
//! Rows are sorted by expert: a *slot* is one row at one of its experts, and the slots of an expert are neighbours. So an
//! expert's weights are read once for all rows that chose it, and weights that nobody chose are not read at all. Results stay
//! apart until the end, where each row adds up those of its experts, best first: the order does not depend on other rows.

use std::ops::Range;

use super::elementwise::{activate, rms_norm};
use super::outputs::projection;
use super::project::{Group, Input, Mode, Projection, Projector};
use super::rows::for_each_row;
use super::tensors::Weight;
use crate::backend::{Activation, Backend, KernelError, RoutedMlp, SharedExpert, StoredMatrix, expect};
use crate::routing::{Choice, RoutingRule, RoutingScratch};

/// The same projection of all experts of a layer, each where it lies in the file.
pub struct Experts(Vec<Weight>);

impl Experts {
    pub(super) fn new(stored: &[StoredMatrix]) -> Result<Experts, KernelError> {
        if let Some(first) = stored.first() {
            for other in stored {
                expect("outputs of an expert", first.rows, other.rows)?;
                expect("inputs of an expert", first.cols, other.cols)?;
            }
        }
        Ok(Experts(stored.iter().map(Weight::new).collect::<Result<_, _>>()?))
    }

    /// The number of outputs of each expert.
    fn outputs(&self) -> usize {
        self.0.first().map_or(0, Weight::rows)
    }

    /// The projection of one expert, with what it adds to it.
    fn projection<'a>(
        &'a self,
        biases: Option<&'a Experts>,
        expert: usize,
    ) -> Result<Projection<'a>, KernelError> {
        let weight = &self.0[expert];
        let bias = biases.map(|biases| biases.0[expert].vector("a bias of an expert", weight.rows()));
        Ok(Projection { weight, bias: bias.transpose()? })
    }
}

/// Intermediate results, kept between calls.
#[derive(Default)]
pub(super) struct ExpertScratch {
    normed: Vec<f32>,
    chosen: Chosen,
    gate_up: Vec<f32>,
    results: Vec<f32>,
}

/// Which experts the rows of a call go to, and the buffers that say so.
#[derive(Default)]
struct Chosen {
    logits: Vec<f32>,
    /// The choices of all rows.
    choices: Vec<Choice>,
    slots: Slots,
    routing: RoutingScratch,
}

/// Rows sorted by expert.
#[derive(Default)]
struct Slots {
    /// The row of each slot.
    rows: Vec<usize>,
    /// The slot of each row's choices, best first; none for a row that has no scores.
    of: Vec<Option<usize>>,
    /// Experts that were chosen, with their slots.
    experts: Vec<(usize, Range<usize>)>,
    /// Slots of each expert that are taken, while they are sorted.
    next: Vec<usize>,
}

/// `hidden += mlp(hidden)` for rows of `cols` values.
pub(super) fn routed_mlp<B: Backend<Weight = Weight, Experts = Experts>>(
    projector: &mut Projector<'_>,
    scratch: &mut ExpertScratch,
    mlp: &RoutedMlp<B>,
    hidden: &mut [f32],
    cols: usize,
) -> Result<(), KernelError> {
    let rule = *mlp.routing.rule();
    let biases = mlp.biases.as_ref();
    let [gate, up, down] = [
        (&mlp.gate, biases.map(|biases| &biases.gate)),
        (&mlp.up, biases.map(|biases| &biases.up)),
        (&mlp.down, biases.map(|biases| &biases.down)),
    ];
    for (experts, biases) in [gate, up, down] {
        expect("experts of a layer", rule.experts, experts.0.len())?;
        expect("experts with a bias", rule.experts, biases.map_or(rule.experts, |biases| biases.0.len()))?;
    }
    let inner = mlp.gate.outputs();
    expect("outputs of an expert's up projection", inner, mlp.up.outputs())?;
    let ExpertScratch { normed, chosen, gate_up, results } = scratch;
    let (isa, rows) = (projector.isa, hidden.len() / cols.max(1));
    norm_rows(projector, mlp, hidden, cols, normed)?;
    let normed = &normed[..rows * cols];
    let row = |row: usize| &normed[row * cols..(row + 1) * cols];
    let copy = |index: usize, out: &mut [f32]| out.copy_from_slice(row(index));

    choose(projector, mlp, Input { rows, cols, fill: &copy }, chosen)?;
    let Chosen { choices, slots, .. } = &*chosen;
    let count = slots.rows.len();
    gate_up.resize(count * 2 * inner, 0.0);
    let fill = |slot: usize, out: &mut [f32]| out.copy_from_slice(row(slots.rows[slot]));
    let input = Input { rows: count, cols, fill: &fill };
    projector.run_groups(input, &slots.groups(&[gate, up])?, gate_up)?;
    results.resize(count * cols, 0.0);
    let fill = |slot: usize, out: &mut [f32]| {
        let (gate, up) = gate_up[slot * 2 * inner..(slot + 1) * 2 * inner].split_at(inner);
        activate(isa, mlp.activation, gate, up, out);
    };
    let input = Input { rows: count, cols: inner, fill: &fill };
    projector.run_groups(input, &slots.groups(&[down])?, results)?;
    combine(projector, slots, choices, results, hidden, cols);
    match &mlp.shared {
        Some(shared) => {
            let input = Input { rows, cols, fill: &copy };
            shared_expert(projector, mlp.activation, shared, input, gate_up, hidden)
        }
        None => Ok(()),
    }
}

/// Chooses the experts of every row, and sorts rows by them.
fn choose<B: Backend<Weight = Weight, Experts = Experts>>(
    projector: &mut Projector<'_>,
    mlp: &RoutedMlp<B>,
    normed: Input<'_>,
    chosen: &mut Chosen,
) -> Result<(), KernelError> {
    let RoutingRule { experts, top_k, .. } = *mlp.routing.rule();
    let Chosen { logits, choices, slots, routing } = chosen;
    logits.resize(normed.rows * experts, 0.0);
    projector.run(normed, &[projection(&mlp.router)?], logits, Mode::Store)?;
    let correction = mlp.correction.as_ref().map(|weight| weight.vector("a correction bias", experts));
    let correction = correction.transpose()?;
    choices.resize(normed.rows * top_k, Choice { expert: 0, weight: 0.0 });
    slots.clear(experts);
    for (logits, choices) in logits.chunks_exact(experts).zip(choices.chunks_exact_mut(top_k)) {
        let has_scores = mlp.routing.choose(logits, correction, routing, choices).is_ok();
        slots.add(choices, has_scores);
    }
    slots.sort(choices, top_k);
    Ok(())
}

fn norm_rows<B: Backend<Weight = Weight, Experts = Experts>>(
    projector: &Projector<'_>,
    mlp: &RoutedMlp<B>,
    hidden: &[f32],
    cols: usize,
    normed: &mut Vec<f32>,
) -> Result<(), KernelError> {
    let (weight, isa) = (mlp.norm.weight.vector("a norm", cols)?, projector.isa);
    normed.resize(hidden.len(), 0.0);
    for_each_row(projector.pool, normed, cols, |row, out| {
        rms_norm(isa, &hidden[row * cols..(row + 1) * cols], weight, mlp.norm.eps, out);
    });
    Ok(())
}

/// Adds to every row what its experts made of it, best first.
fn combine(
    projector: &Projector<'_>,
    slots: &Slots,
    choices: &[Choice],
    results: &[f32],
    hidden: &mut [f32],
    cols: usize,
) {
    let top_k = slots.of.len() / (hidden.len() / cols.max(1)).max(1);
    for_each_row(projector.pool, hidden, cols, |row, out| {
        let ranks = row * top_k..(row + 1) * top_k;
        for (choice, slot) in choices[ranks.clone()].iter().zip(&slots.of[ranks]) {
            let Some(slot) = slot else {
                out.fill(f32::NAN);
                continue;
            };
            for (out, result) in out.iter_mut().zip(&results[slot * cols..(slot + 1) * cols]) {
                *out += choice.weight * result;
            }
        }
    });
}

fn shared_expert<B: Backend<Weight = Weight>>(
    projector: &mut Projector<'_>,
    activation: Activation,
    shared: &SharedExpert<B>,
    normed: Input<'_>,
    gate_up: &mut Vec<f32>,
    hidden: &mut [f32],
) -> Result<(), KernelError> {
    let (isa, rows, inner) = (projector.isa, normed.rows, shared.gate.weight.rows());
    expect("outputs of the shared expert's up projection", inner, shared.up.weight.rows())?;
    gate_up.resize(rows * 2 * inner, 0.0);
    projector.run(normed, &[projection(&shared.gate)?, projection(&shared.up)?], gate_up, Mode::Store)?;
    let fill = |row: usize, out: &mut [f32]| {
        let (gate, up) = gate_up[row * 2 * inner..(row + 1) * 2 * inner].split_at(inner);
        activate(isa, activation, gate, up, out);
    };
    let input = Input { rows, cols: inner, fill: &fill };
    projector.run(input, &[projection(&shared.down)?], hidden, Mode::Add)
}

impl Slots {
    fn clear(&mut self, experts: usize) {
        self.rows.clear();
        self.of.clear();
        self.experts.clear();
        self.next.clear();
        self.next.resize(experts, 0);
    }

    /// The choices of the next row, which count if it has scores.
    fn add(&mut self, choices: &[Choice], has_scores: bool) {
        for choice in choices {
            self.of.push(has_scores.then_some(choice.expert));
            self.next[choice.expert] += usize::from(has_scores);
        }
    }

    /// The slots of each expert that was chosen, with its weights and biases.
    fn groups<'a>(
        &self,
        projections: &[(&'a Experts, Option<&'a Experts>)],
    ) -> Result<Vec<Group<'a>>, KernelError> {
        let of = |expert: usize| projections.iter().map(move |(all, biases)| all.projection(*biases, expert));
        let group = |(expert, rows): &(usize, Range<usize>)| {
            Ok(Group { rows: rows.clone(), projections: of(*expert).collect::<Result<_, _>>()? })
        };
        self.experts.iter().map(group).collect()
    }

    /// Gives every expert its slots.
    fn sort(&mut self, choices: &[Choice], top_k: usize) {
        let mut first = 0;
        for (expert, next) in self.next.iter_mut().enumerate() {
            let count = *next;
            if count > 0 {
                self.experts.push((expert, first..first + count));
            }
            *next = first;
            first += count;
        }
        self.rows.resize(first, 0);
        for (index, slot) in self.of.iter_mut().enumerate() {
            if slot.is_some() {
                let next = &mut self.next[choices[index].expert];
                self.rows[*next] = index / top_k;
                *slot = Some(*next);
                *next += 1;
            }
        }
    }
}
