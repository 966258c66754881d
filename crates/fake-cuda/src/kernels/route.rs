//! `route.cu`: which experts every row goes to, a list of jobs, and the sum of what experts make of a row.

use super::add_multiple;
use crate::call::Call;
use crate::memory::Fault;

/// Rows of a block of `choose_experts`, and threads of a block of `combine`.
const WARPS: usize = 8;
const THREADS: usize = 256;

const SOFTMAX: i32 = 0;
const SIGMOID: i32 = 1;
const SOFTMAX_OF_CHOSEN: i32 = 2;

/// An expert of a row, and what its output is multiplied with.
#[derive(Clone, Copy)]
pub(super) struct Choice {
    pub(super) expert: usize,
    pub(super) weight: f32,
}

/// The choices of some rows, from `at` on.
pub(super) fn choices(call: &Call<'_>, at: u64, count: usize) -> Result<Vec<Choice>, Fault> {
    let table = call.table("Choice", at, count)?;
    (0..count)
        .map(|index| {
            let record = table.get(index);
            Ok(Choice { expert: record.count("expert")?, weight: record.float("weight")? })
        })
        .collect()
}

/// A number as one whose order is that of integers, both zeros the same; nothing for a NaN.
fn key_of(x: f32) -> Option<u32> {
    let bits = (x + 0.0).to_bits();
    (!x.is_nan()).then_some(if bits >> 31 == 1 { !bits } else { bits | 1 << 31 })
}

/// The place of the largest number that is one, of several the first.
fn best(numbers: &[f32]) -> Option<usize> {
    let keys = numbers.iter().enumerate().filter_map(|(at, &x)| Some((key_of(x)?, std::cmp::Reverse(at))));
    keys.max().map(|(_, at)| at.0)
}

/// Leaves only the experts of the best groups; a group is as good as its two best together.
fn keep_best_groups(choosing: &mut [f32], groups: usize, chosen: usize) {
    let size = choosing.len() / groups;
    let mut good: Vec<f32> = choosing
        .chunks(size)
        .map(|group| {
            let mut sorted: Vec<f32> = group.to_vec();
            sorted.sort_by(|a, b| b.total_cmp(a));
            sorted.iter().take(2).sum()
        })
        .collect();
    let mut kept = vec![false; groups];
    for _ in 0..chosen {
        let Some(at) = best(&good) else { break };
        (kept[at], good[at]) = (true, f32::NAN);
    }
    for (group, kept) in choosing.chunks_mut(size).zip(kept) {
        if !kept {
            group.fill(f32::NAN);
        }
    }
}

/// Chooses the experts of a row.
fn choose(call: &Call<'_>, row: usize) -> Result<(), Fault> {
    let (a, memory) = (&call.arguments, call.memory);
    let (experts, top_k, kind) = (a.count("experts")?, a.count("top_k")?, a.int("scores")?);
    let mut scores = memory.read::<f32>(a.pointer("logits")? + (4 * row * experts) as u64, experts)?;
    let largest = scores.iter().fold(f32::NEG_INFINITY, |most, &x| most.max(x));
    let bad = scores.iter().any(|x| x.is_nan()) || (kind == SOFTMAX && largest.is_infinite());
    let chosen: Vec<(i32, f32)> = if bad {
        (0..top_k as i32).map(|expert| (expert, f32::NAN)).collect()
    } else {
        match kind {
            SOFTMAX => {
                scores.iter_mut().for_each(|x| *x = (*x - largest).exp());
                let sum: f32 = scores.iter().sum();
                scores.iter_mut().for_each(|x| *x /= sum);
            }
            SIGMOID => scores.iter_mut().for_each(|x| *x = 1.0 / (1.0 + (-*x).exp())),
            _ => {}
        }
        let mut choosing = scores.clone();
        if let Some(correction) = a.optional("correction")? {
            let correction = memory.view::<f32>(correction, experts)?;
            choosing.iter_mut().zip(correction).for_each(|(x, by)| *x += by);
        }
        let groups = a.count("groups")?;
        if groups > 1 {
            keep_best_groups(&mut choosing, groups, a.count("chosen_groups")?);
        }
        let mut chosen = Vec::new();
        for _ in 0..top_k {
            chosen.push(match best(&choosing) {
                Some(expert) => {
                    choosing[expert] = f32::NAN;
                    (expert as i32, scores[expert])
                }
                None => (0, f32::NAN),
            });
        }
        if kind == SOFTMAX_OF_CHOSEN {
            let first = chosen.first().map_or(0.0, |choice| choice.1);
            chosen.iter_mut().for_each(|(_, weight)| *weight = (*weight - first).exp());
        }
        let total: f32 = chosen.iter().map(|choice| choice.1).sum();
        let divided = a.flag("normalise")? || kind == SOFTMAX_OF_CHOSEN;
        let factor = if divided { 1.0 / (total + 1e-20) } else { 1.0 } * a.float("scale")?;
        chosen.iter_mut().for_each(|(_, weight)| *weight *= factor);
        chosen
    };
    for (index, (expert, weight)) in chosen.into_iter().enumerate() {
        let at = a.pointer("choices")? + (8 * (row * top_k + index)) as u64;
        memory.write(at, &[expert as u32, weight.to_bits()])?;
    }
    Ok(())
}

/// Sorts the choices of all rows by expert, and makes jobs of them.
fn sort(call: &Call<'_>) -> Result<(), Fault> {
    let (a, memory) = (&call.arguments, call.memory);
    let (pairs, job_rows) = (a.count("rows")? * a.count("top_k")?, a.count("job_rows")?.max(1));
    let choices = choices(call, a.pointer("choices")?, pairs)?;
    let mut order: Vec<u32> = (0..pairs as u32).collect();
    order.sort_by_key(|&choice| choices[choice as usize].expert);
    memory.write(a.pointer("order")?, &order)?;
    let (mut jobs, mut first) = (Vec::new(), 0);
    for of_expert in order.chunk_by(|&a, &b| choices[a as usize].expert == choices[b as usize].expert) {
        for rows in of_expert.chunks(job_rows) {
            jobs.extend([choices[rows[0] as usize].expert as i32, first, rows.len() as i32, 0]);
            first += rows.len() as i32;
        }
    }
    memory.write(a.pointer("jobs")?, &jobs)?;
    memory.write(a.pointer("job_count")?, &[jobs.len() as i32 / 4])
}

pub(super) fn choose_experts(call: &Call<'_>) -> Result<(), Fault> {
    let rows = call.arguments.count("rows")?.min(call.grid[0] * WARPS);
    (0..rows).try_for_each(|row| choose(call, row))
}

pub(super) fn sort_choices(call: &Call<'_>) -> Result<(), Fault> {
    sort(call)
}

pub(super) fn route(call: &Call<'_>) -> Result<(), Fault> {
    (0..call.arguments.count("rows")?).try_for_each(|row| choose(call, row))?;
    if call.arguments.count("job_rows")? == 0 { Ok(()) } else { sort(call) }
}

pub(super) fn combine(call: &Call<'_>) -> Result<(), Fault> {
    let (a, memory) = (&call.arguments, call.memory);
    let (top_k, columns) = (a.count("top_k")?, a.count("columns")?);
    let here = columns.min(call.grid[0] * THREADS);
    for row in 0..call.grid[1] {
        let choices = choices(call, a.pointer("choices")? + (8 * row * top_k) as u64, top_k)?;
        let mut sum = vec![0.0_f32; here];
        for (index, choice) in choices.iter().enumerate() {
            let at = a.pointer("products")? + (4 * (row * top_k + index) * columns) as u64;
            let products = memory.view::<f32>(at, here)?;
            add_multiple(&mut sum, choice.weight, products);
        }
        let at = a.pointer("hidden")? + (4 * row * columns) as u64;
        let mut hidden = memory.read::<f32>(at, here)?;
        hidden.iter_mut().zip(sum).for_each(|(hidden, sum)| *hidden += sum);
        memory.write(at, &hidden)?;
    }
    Ok(())
}
