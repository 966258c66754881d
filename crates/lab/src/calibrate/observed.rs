//! What one layer computes on the text: the moments of its heads, and the held-out sequence as it is.

use oscar_kernels::Inspect;
use rayon::prelude::*;

use super::CalibrateError;
use super::corpus::Corpus;
use super::moments::{HeadCounts, HeadMoments, ObservedRows};
use super::observe::Observer;
use super::select::HeldOutQuery;
use super::spread::Positions;

/// Held-out queries per query head.
const QUERIES: usize = 64;

/// Moments of all heads of a layer and what the held-out sequence computed there.
pub struct ObservedLayer {
    /// The moments of each KV head.
    pub moments: Vec<HeadMoments>,
    /// Keys and values of the held-out sequence, per KV head.
    pub(super) held_out: Vec<(Vec<f32>, Vec<f32>)>,
    /// The position that its first token is taken to be at.
    pub(super) first_held_out: usize,
    /// Some of its queries, per KV head: for choosing rules, and for certifying the choice.
    pub(super) queries: Vec<(Vec<HeldOutQuery>, Vec<HeldOutQuery>)>,
    pub(super) heads: HeadCounts,
}

/// Runs one layer and sums its moments. The last sequence of the observer is the held-out one.
pub fn observe_layer<B: Inspect>(
    observer: &mut Observer<'_, B>,
    layer: usize,
    corpus: &Corpus,
) -> Result<ObservedLayer, CalibrateError> {
    let (heads, context) = (observer.heads(), observer.context());
    let turning = observer.key_turning(layer);
    let held_out = corpus.sequences.len();
    let spread: Vec<Positions> =
        corpus.sequences.iter().map(|ids| Positions::spread(ids.len(), context)).collect();
    let middle = Positions::middle(corpus.held_out.len(), context);
    let mut moments: Vec<HeadMoments> =
        (0..heads.kv).map(|_| HeadMoments::new(heads.dim, turning.clone())).collect();
    // Keys and values of each sequence and head.
    let mut stored: Vec<Vec<(Vec<f32>, Vec<f32>)>> = Vec::new();
    let mut queries = Vec::new();
    observer.run_layer(layer, |index, rows| {
        let positions = spread.get(index).unwrap_or(&middle);
        let turned = positions.turned(&rows, &turning);
        let rows = ObservedRows { qkv: &turned, ..rows };
        stored.push((0..heads.kv).into_par_iter().map(|head| rows.stored(head)).collect());
        if index < held_out {
            moments
                .par_iter_mut()
                .enumerate()
                .for_each(|(head, moments)| moments.add(&rows, head, positions));
        } else {
            queries = (0..heads.kv).into_par_iter().map(|head| held_out_queries(&rows, head)).collect();
        }
    })?;
    let held_out = stored.pop().unwrap_or_default();
    moments.par_iter_mut().enumerate().for_each(|(head, moments)| {
        let sequences = || stored.iter().map(|heads| &heads[head]);
        sequences().zip(&spread).for_each(|((keys, _), positions)| moments.add_centred_keys(keys, positions));
        let keys: Vec<f32> = sequences().flat_map(|(keys, _)| keys.iter().copied()).collect();
        let values: Vec<f32> = sequences().flat_map(|(_, values)| values.iter().copied()).collect();
        moments.add_weighted_values(&keys, &values);
    });
    let first_held_out = middle.of(0);
    Ok(ObservedLayer { moments, held_out, first_held_out, queries, heads })
}

/// Queries spread over the second half of a sequence, for every member of the group, dealt out to two sets in turn.
fn held_out_queries(rows: &ObservedRows<'_>, head: usize) -> (Vec<HeldOutQuery>, Vec<HeldOutQuery>) {
    let group = rows.heads.group();
    let (mut even, mut odd) = (Vec::new(), Vec::new());
    for member in 0..group {
        let all: Vec<&[f32]> = rows.queries(head * group + member).collect();
        let first = all.len() / 2;
        let step = (all.len() - first).div_ceil(QUERIES).max(1);
        for (index, position) in (first..all.len()).step_by(step).enumerate() {
            let query = HeldOutQuery { position, member, row: all[position].to_vec() };
            if index % 2 == 0 { even.push(query) } else { odd.push(query) }
        }
    }
    (even, odd)
}
