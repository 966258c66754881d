//! Chooses how the rows of a head are rounded, by the error that attention makes with them.
//!
//! Mean squared error is a poor judge: it treats a key nobody looks at like one that everybody does. So every
//! candidate encodes the keys (or values) of a held-out sequence, real queries read them as they would in a cache
//! with windows, and what counts is how far the output of attention moves after the output projection.
//!
//! Everything happens in rotated coordinates, where scores and outputs are the same and nothing has to be undone.

use std::fmt;

use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, ArrayView2};
use oscar_codec::{
    BandLayout, BandRows, CodeLayout, CodecError, HeadEncoder, HeadIndex, HeadTransform, KvGeometry,
    PageCodec, PageMeans, RowEncoder, Rule, Side, SquareMatrix, Windows,
};
use oscar_kernels::cpu::encode::{FastCodec, SealScratch};
use oscar_kernels::cpu::isa::Isa;
use rayon::prelude::*;

/// The one head of a codec that is tried.
const HEAD: HeadIndex = HeadIndex { layer: 0, head: 0 };

/// Rules tried for keys and for values.
pub const CANDIDATES: [Rule; 8] = [
    Rule::Clip(0.90),
    Rule::Clip(0.92),
    Rule::Clip(0.94),
    Rule::Clip(0.96),
    Rule::Clip(0.98),
    Rule::MIN_MAX,
    Rule::Gaussian,
    Rule::Search,
];

/// What one KV head saw and computed on the held-out sequence.
pub struct HeldOut<'a> {
    /// `[tokens][d]`, as stored in bf16, not rotated.
    pub keys: &'a [f32],
    /// `[tokens][d]`, as the keys.
    pub values: &'a [f32],
    /// The position of the first token, a multiple of a page.
    pub first: usize,
    /// Some queries that read this head.
    pub queries: &'a [HeldOutQuery],
    /// Per member of the group, W_oᵀW_o of its slice of the output projection, not rotated.
    pub output_metrics: &'a [SquareMatrix],
    /// The scale of logits, `1 / sqrt(d)` as a rule.
    pub scale: f32,
    /// Per member of the group, the learned logit that takes part in its softmax; empty in models without.
    pub sinks: &'a [f32],
    /// The windows that are read exactly.
    pub windows: Windows,
}

/// A query of the held-out sequence.
pub struct HeldOutQuery {
    /// Position of the query.
    pub position: usize,
    /// Index of the query head in its GQA group.
    pub member: usize,
    /// The query after rotary embedding, not rotated.
    pub row: Vec<f32>,
}

/// How keys are encoded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KeyCodes {
    /// 2 bits for every channel, by a rule.
    Scalar(Rule),
    /// Bands of channels with codes of different widths.
    Bands,
}

impl fmt::Display for KeyCodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KeyCodes::Scalar(rule) => rule.fmt(f),
            KeyCodes::Bands => f.pad("bands"),
        }
    }
}

/// Relative errors of a head with chosen rules.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RuleErrors {
    /// How the keys are encoded.
    pub key: KeyCodes,
    /// Rule of the values.
    pub value: Rule,
    /// Root mean square change of a logit, weighted with the attention it gets.
    pub logit_error: f64,
    /// ‖ΔO·W_o‖² / ‖O·W_o‖² with only the keys encoded.
    pub key_error: f64,
    /// ‖ΔO·W_o‖² / ‖O·W_o‖² with only the values encoded.
    pub value_error: f64,
    /// ‖ΔO·W_o‖² / ‖O·W_o‖² with both encoded.
    pub output_error: f64,
}

/// The attention of a head in rotated coordinates, ready to try rules on.
pub struct RuleTrial<'a> {
    held_out: &'a HeldOut<'a>,
    isa: Isa,
    dim: usize,
    tokens: usize,
    key_transform: &'a HeadTransform,
    page_means: Option<&'a PageMeans>,
    value_transform: &'a HeadTransform,
    /// Rotated, in whole numbers of bf16.
    keys: Vec<f32>,
    values: Vec<f32>,
    queries: Vec<f32>,
    metrics: Vec<Vec<f32>>,
    /// `[queries][tokens]` exact logits and weights.
    logits: Vec<f32>,
    weights: Vec<f32>,
    /// The learned logit of each query, relative to logits of centred keys.
    sinks: Vec<f32>,
    /// The mean value that was subtracted from all values, rotated.
    mean_value: Option<Vec<f32>>,
    /// Exact outputs, and Σ o M oᵀ over queries.
    exact: Vec<f32>,
    energy: f64,
}

impl<'a> RuleTrial<'a> {
    /// Rotates everything and computes the exact attention.
    pub fn new(
        isa: Isa,
        held_out: &'a HeldOut<'a>,
        key_transform: &'a HeadTransform,
        value_transform: &'a HeadTransform,
    ) -> Result<RuleTrial<'a>, CodecError> {
        let dim = key_transform.dim();
        let all: Vec<f32> = held_out.queries.iter().flat_map(|query| query.row.iter().copied()).collect();
        let metrics = held_out.output_metrics.iter();
        let mut trial = RuleTrial {
            held_out,
            isa,
            dim,
            tokens: held_out.keys.len() / dim,
            key_transform,
            page_means: None,
            value_transform,
            keys: rotated(isa, key_transform, held_out.keys)?,
            values: rotated(isa, value_transform, held_out.values)?,
            queries: product(
                matrix(&all, held_out.queries.len(), dim),
                matrix(key_transform.matrix(), dim, dim),
            ),
            metrics: metrics.map(|metric| rotated_metric(metric, value_transform)).collect(),
            sinks: held_out.queries.iter().map(|query| sink_logit(held_out, key_transform, query)).collect(),
            mean_value: value_transform
                .mean()
                .map(|mean| product(matrix(mean, 1, dim), matrix(value_transform.matrix(), dim, dim))),
            logits: Vec::new(),
            weights: Vec::new(),
            exact: Vec::new(),
            energy: 0.0,
        };
        trial.logits = trial.logits_with(&trial.keys);
        trial.weights = trial.weights_of(&trial.logits);
        trial.exact = trial.attended(&trial.weights);
        trial.energy = trial.squared_norm(&trial.exact);
        Ok(trial)
    }

    /// The same trial of bands of keys that are centred page by page.
    pub fn with_page_means(self, page_means: Option<&'a PageMeans>) -> RuleTrial<'a> {
        RuleTrial { page_means, ..self }
    }

    /// Tries every candidate on keys and on values; the best rule for each.
    pub fn choose(&self, candidates: &[Rule]) -> Result<(Rule, Rule), CodecError> {
        let tried = candidates
            .par_iter()
            .map(|&rule| Ok((rule, [self.key_score(KeyCodes::Scalar(rule))?, self.value_error(rule)?])));
        let mut best = [(f64::INFINITY, Rule::Search); 2];
        for (rule, errors) in tried.collect::<Result<Vec<_>, CodecError>>()? {
            for (best, error) in best.iter_mut().zip(errors) {
                if error < best.0 {
                    *best = (error, rule);
                }
            }
        }
        Ok((best[0].1, best[1].1))
    }

    /// How bad an encoding of keys is.
    ///
    /// The error of attention alone would prefer rules that shrink logits: on ordinary text few logits are large, and losing
    /// those costs little. They are what retrieval stands on, so what a rule takes from them is added.
    pub fn key_score(&self, codes: KeyCodes) -> Result<f64, CodecError> {
        let (error, shrinkage) = self.key_error(codes)?;
        Ok(error + shrinkage.powi(2))
    }

    /// Measures the errors with given rules.
    pub fn measure(&self, key: KeyCodes, value: Rule) -> Result<RuleErrors, CodecError> {
        let logits = self.mixed(&self.logits_with(&self.encoded_keys(key)?));
        let weights = self.weights_of(&logits);
        let values = self.encoded_values(value)?;
        let keys_only = self.attended(&weights);
        Ok(RuleErrors {
            key,
            value,
            logit_error: self.logit_error(&logits),
            key_error: self.relative_error(&keys_only),
            value_error: self.relative_change(&self.value_change(&self.weights, &values)),
            output_error: self.relative_error(&sum(&keys_only, &self.value_change(&weights, &values))),
        })
    }

    /// The error of attention with encoded keys, and the share by which their logits shrink.
    fn key_error(&self, codes: KeyCodes) -> Result<(f64, f64), CodecError> {
        let logits = self.mixed(&self.logits_with(&self.encoded_keys(codes)?));
        let error = self.relative_error(&self.attended(&self.weights_of(&logits)));
        Ok((error, self.shrinkage(&logits)))
    }

    /// By how much logits of history shrink towards the mean of their query: one minus the slope of a line through them.
    fn shrinkage(&self, logits: &[f32]) -> f64 {
        let (mut along, mut squares) = (0.0, 0.0);
        let rows = logits.chunks_exact(self.tokens).zip(self.logits.chunks_exact(self.tokens));
        for (query, (logits, exact)) in self.held_out.queries.iter().zip(rows) {
            let history = |token: &usize| self.is_history(query, *token);
            let tokens: Vec<usize> = (0..self.tokens).filter(history).collect();
            let mean = tokens.iter().map(|&token| f64::from(exact[token])).sum::<f64>() / tokens.len() as f64;
            for token in tokens {
                let above = f64::from(exact[token]) - mean;
                along += above * f64::from(logits[token]);
                squares += above * above;
            }
        }
        if squares > 0.0 { 1.0 - along / squares } else { 0.0 }
    }

    /// ‖ΔO·W_o‖² / ‖O·W_o‖² with values encoded by a rule.
    pub fn value_error(&self, rule: Rule) -> Result<f64, CodecError> {
        Ok(self.relative_change(&self.value_change(&self.weights, &self.encoded_values(rule)?)))
    }

    fn encoded_keys(&self, codes: KeyCodes) -> Result<Vec<f32>, CodecError> {
        let codec = codec(self.isa, self.key_transform, codes, self.page_means)?;
        encoded(&codec, Side::Key, self.held_out.first, &self.keys)
    }

    fn encoded_values(&self, rule: Rule) -> Result<Vec<f32>, CodecError> {
        let codec = codec(self.isa, self.value_transform, KeyCodes::Scalar(rule), None)?;
        encoded(&codec, Side::Value, self.held_out.first, &self.values)
    }

    fn logits_with(&self, keys: &[f32]) -> Vec<f32> {
        let queries = matrix(&self.queries, self.held_out.queries.len(), self.dim);
        let mut logits = product(queries, matrix(keys, self.tokens, self.dim).t());
        logits.iter_mut().for_each(|logit| *logit *= self.held_out.scale);
        logits
    }

    /// Whether the query reads the token from the codec.
    fn is_history(&self, query: &HeldOutQuery, token: usize) -> bool {
        let Windows { sink, recent } = self.held_out.windows;
        token >= sink && token.saturating_add(recent.max(1)) <= query.position
    }

    /// Encoded logits for history, exact ones for the windows.
    fn mixed(&self, encoded: &[f32]) -> Vec<f32> {
        let rows = self.held_out.queries.iter().zip(encoded.chunks_exact(self.tokens));
        rows.zip(self.logits.chunks_exact(self.tokens))
            .flat_map(|((query, encoded), exact)| {
                (0..self.tokens).map(move |token| {
                    if self.is_history(query, token) { encoded[token] } else { exact[token] }
                })
            })
            .collect()
    }

    fn weights_of(&self, logits: &[f32]) -> Vec<f32> {
        let mut weights = vec![0.0; logits.len()];
        let rows = logits.chunks_exact(self.tokens).zip(weights.chunks_exact_mut(self.tokens));
        for ((query, &sink), (logits, weights)) in self.held_out.queries.iter().zip(&self.sinks).zip(rows) {
            let seen = query.position + 1;
            let max = logits[..seen].iter().copied().fold(sink, f32::max);
            let mut sum = f64::from((sink - max).exp());
            for (weight, logit) in weights[..seen].iter_mut().zip(logits) {
                *weight = (logit - max).exp();
                sum += f64::from(*weight);
            }
            weights[..seen].iter_mut().for_each(|weight| *weight = (f64::from(*weight) / sum) as f32);
        }
        weights
    }

    fn outputs(&self, weights: &[f32], values: &[f32]) -> Vec<f32> {
        let weights = matrix(weights, self.held_out.queries.len(), self.tokens);
        product(weights, matrix(values, self.tokens, self.dim))
    }

    /// Outputs with exact values, and with the mean that was subtracted from all of them, as often as weights add up to.
    fn attended(&self, weights: &[f32]) -> Vec<f32> {
        let mut outputs = self.outputs(weights, &self.values);
        let Some(mean) = &self.mean_value else { return outputs };
        for (row, weights) in outputs.chunks_exact_mut(self.dim).zip(weights.chunks_exact(self.tokens)) {
            let share: f32 = weights.iter().sum();
            row.iter_mut().zip(mean).for_each(|(value, mean)| *value += share * mean);
        }
        outputs
    }

    /// What encoded values change in the outputs: history reads them, the windows do not.
    fn value_change(&self, weights: &[f32], encoded: &[f32]) -> Vec<f32> {
        let mut history = weights.to_vec();
        for (query, weights) in self.held_out.queries.iter().zip(history.chunks_exact_mut(self.tokens)) {
            for (token, weight) in weights.iter_mut().enumerate() {
                if !self.is_history(query, token) {
                    *weight = 0.0;
                }
            }
        }
        let errors: Vec<f32> =
            encoded.iter().zip(&self.values).map(|(encoded, exact)| encoded - exact).collect();
        self.outputs(&history, &errors)
    }

    /// Σ x M xᵀ over queries, each with the metric of its member.
    fn squared_norm(&self, rows: &[f32]) -> f64 {
        let mut total = 0.0;
        for (query, row) in self.held_out.queries.iter().zip(rows.chunks_exact(self.dim)) {
            for (i, weights) in self.metrics[query.member].chunks_exact(self.dim).enumerate() {
                let inner: f32 = weights.iter().zip(row).map(|(weight, x)| weight * x).sum();
                total += f64::from(row[i]) * f64::from(inner);
            }
        }
        total
    }

    /// How far outputs are from the exact ones, relative to their size.
    fn relative_error(&self, outputs: &[f32]) -> f64 {
        let change: Vec<f32> =
            outputs.iter().zip(&self.exact).map(|(output, exact)| output - exact).collect();
        self.relative_change(&change)
    }

    /// How large a change of the outputs is, relative to their size.
    fn relative_change(&self, change: &[f32]) -> f64 {
        self.squared_norm(change) / self.energy.max(f64::MIN_POSITIVE)
    }

    fn logit_error(&self, logits: &[f32]) -> f64 {
        let sum: f64 = logits
            .iter()
            .zip(&self.logits)
            .zip(&self.weights)
            .map(|((logit, exact), weight)| f64::from(*weight) * f64::from(logit - exact).powi(2))
            .sum();
        (sum / self.held_out.queries.len().max(1) as f64).sqrt()
    }
}

/// The learned logit of a query less `q · mean`, which is missing in its logits of centred keys.
fn sink_logit(held_out: &HeldOut<'_>, key_transform: &HeadTransform, query: &HeldOutQuery) -> f32 {
    let Some(sink) = held_out.sinks.get(query.member) else { return f32::NEG_INFINITY };
    let dot = |mean: &[f32]| query.row.iter().zip(mean).map(|(q, m)| q * m).sum::<f32>();
    sink - key_transform.mean().map_or(0.0, dot) * held_out.scale
}

/// A codec of one head and side.
fn codec(
    isa: Isa,
    transform: &HeadTransform,
    codes: KeyCodes,
    page_means: Option<&PageMeans>,
) -> Result<FastCodec, CodecError> {
    let mut keys = match codes {
        KeyCodes::Scalar(rule) => {
            // A published transform comes with the published choice of codes.
            let published = transform.rounds_input();
            HeadEncoder::codes(transform.clone(), CodeLayout::new(2, transform.dim(), 1)?, rule, published)
        }
        KeyCodes::Bands => {
            let rows = BandRows { layout: BandLayout::int2(transform.dim())?, value_rule: Rule::Search };
            HeadEncoder { transform: transform.clone(), rows: RowEncoder::Banded(rows), page_means: None }
        }
    };
    let values = keys.clone();
    keys.page_means = page_means.cloned();
    let geometry = KvGeometry { layers: 1, kv_heads: 1, head_dim: transform.dim() };
    Ok(FastCodec::new(isa, PageCodec::new("trial", geometry, vec![keys], vec![values])?))
}

fn rotated(isa: Isa, transform: &HeadTransform, rows: &[f32]) -> Result<Vec<f32>, CodecError> {
    let mut out = rows.to_vec();
    let codec = codec(isa, transform, KeyCodes::Scalar(Rule::MIN_MAX), None)?;
    codec.transform_rows(HEAD, Side::Key, &mut out, &mut SealScratch::default())?;
    Ok(out)
}

/// Rotated rows as they come back from their pages, still rotated.
fn encoded(codec: &FastCodec, side: Side, first: usize, rows: &[f32]) -> Result<Vec<f32>, CodecError> {
    let mut out = rows.to_vec();
    codec.through_pages(HEAD, side, first, &mut out, &mut SealScratch::default())?;
    Ok(out)
}

fn sum(one: &[f32], other: &[f32]) -> Vec<f32> {
    one.iter().zip(other).map(|(a, b)| a + b).collect()
}

/// `values` as `[rows][cols]`.
fn matrix(values: &[f32], rows: usize, cols: usize) -> ArrayView2<'_, f32> {
    ArrayView2::from_shape((rows, cols), values).expect("rows · cols values")
}

/// `left · right`, row by row.
fn product(left: ArrayView2<'_, f32>, right: ArrayView2<'_, f32>) -> Vec<f32> {
    let mut out = Array2::zeros((left.nrows(), right.ncols()));
    general_mat_mul(1.0, &left, &right, 0.0, &mut out);
    out.into_raw_vec_and_offset().0
}

/// A metric of outputs in the coordinates of rotated values.
fn rotated_metric(metric: &SquareMatrix, transform: &HeadTransform) -> Vec<f32> {
    let dim = transform.dim();
    let rotation = matrix(transform.matrix(), dim, dim);
    let inner = product(matrix(&metric.to_f32(), dim, dim), rotation);
    product(rotation.t(), matrix(&inner, dim, dim))
}

#[cfg(test)]
mod tests;
