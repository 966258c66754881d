//! What a user can expect of the rotations of a model: errors per head on text that calibration did not see.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A head whose output moves by more than this share (of squared length) is in danger.
const HEAD_LIMIT: f64 = 0.5;

/// The mean over heads above which a model should not be served with this cache.
const MEAN_LIMIT: f64 = 0.25;

/// The mean over heads above which answers will show it.
const CAUTION_LIMIT: f64 = 0.10;

/// Worst heads listed on their own.
const WORST: usize = 8;

/// One KV head.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
pub struct HeadCertificate {
    /// Layer.
    pub layer: usize,
    /// KV head.
    pub head: usize,
    /// How keys are rounded.
    pub key_rule: String,
    /// How values are rounded.
    pub value_rule: String,
    /// Root mean square change of a logit, weighted with the attention it gets.
    pub logit_error: f64,
    /// Squared change of the attention output after the output projection, relative; only keys encoded.
    pub key_error: f64,
    /// Only values encoded.
    pub value_error: f64,
    /// Both encoded.
    pub output_error: f64,
    /// The same with the published encoder: one rotation per layer, not centred, fixed clip.
    pub paper_output_error: f64,
    /// Share of the largest eigenvalue of C_Q.
    pub key_top1_share: f64,
    /// Share of the eight largest.
    pub key_top8_share: f64,
    /// `exp` of the entropy of the spectrum: how many directions queries use.
    pub key_effective_rank: f64,
    /// The same for the value target.
    pub value_top1_share: f64,
    /// The same for the value target.
    pub value_top8_share: f64,
    /// The same for the value target.
    pub value_effective_rank: f64,
    /// Share of the mean in the squared length of keys: what centring takes away.
    pub key_mean_share: f64,
}

/// Whether the cache can be used.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Serve it.
    Good,
    /// Measure on your own task first.
    Caution,
    /// Use `int4` or `fp8`.
    Bad,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Verdict::Good => "good",
            Verdict::Caution => "caution",
            Verdict::Bad => "bad",
        })
    }
}

/// The certificate of one model and one set of rotations.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
pub struct Certificate {
    /// Name of the model.
    pub model: String,
    /// Page format.
    pub format: String,
    /// Bits per element of sealed pages.
    pub bits_per_element: f64,
    /// Tokens of calibration.
    pub tokens: usize,
    /// Tokens the errors were measured on; not part of the calibration.
    pub held_out_tokens: usize,
    /// Exact tokens at the start and at the end.
    pub sink: usize,
    /// Exact tokens at the end.
    pub recent: usize,
    /// Verdict.
    pub verdict: Verdict,
    /// In words.
    pub reason: String,
    /// Mean over heads.
    pub mean_output_error: f64,
    /// Mean over heads with the published encoder.
    pub mean_paper_output_error: f64,
    /// `[layer, head]` of the worst ones.
    pub worst: Vec<[usize; 2]>,
    /// All heads.
    pub heads: Vec<HeadCertificate>,
}

/// Shares of a spectrum.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shares {
    /// Of the largest eigenvalue.
    pub top1: f64,
    /// Of the eight largest.
    pub top8: f64,
    /// `exp` of the entropy.
    pub effective_rank: f64,
}

impl Shares {
    /// Of eigenvalues in ascending order; tiny negative ones of a rounded matrix count as zero.
    pub fn of(eigenvalues: &[f64]) -> Shares {
        let total: f64 = eigenvalues.iter().map(|value| value.max(0.0)).sum();
        let shares: Vec<f64> =
            eigenvalues.iter().rev().map(|value| value.max(0.0) / total.max(f64::MIN_POSITIVE)).collect();
        let entropy: f64 = shares.iter().filter(|share| **share > 0.0).map(|share| -share * share.ln()).sum();
        Shares {
            top1: shares.first().copied().unwrap_or(0.0),
            top8: shares.iter().take(8).sum(),
            effective_rank: entropy.exp(),
        }
    }
}

/// The verdict over heads, with its reason.
pub fn judge(heads: &[HeadCertificate]) -> (Verdict, String) {
    let mean = mean_of(heads, |head| head.output_error);
    let failing =
        heads.iter().filter(|head| head.output_error.is_nan() || head.output_error > HEAD_LIMIT).count();
    if mean.is_nan() || mean > MEAN_LIMIT || failing * 10 > heads.len() {
        let reason = format!(
            "the output of attention moves by {:.0} % of its energy on average, and by more than {:.0} % in {failing} \
             of {} heads; use int4 or fp8",
            100.0 * mean,
            100.0 * HEAD_LIMIT,
            heads.len()
        );
        return (Verdict::Bad, reason);
    }
    let reason = format!(
        "the output of attention moves by {:.1} % of its energy on average; {failing} of {} heads move by more than \
         {:.0} %",
        100.0 * mean,
        heads.len(),
        100.0 * HEAD_LIMIT
    );
    if mean > CAUTION_LIMIT || failing > 0 { (Verdict::Caution, reason) } else { (Verdict::Good, reason) }
}

/// Mean of something over heads.
pub fn mean_of(heads: &[HeadCertificate], value: impl Fn(&HeadCertificate) -> f64) -> f64 {
    heads.iter().map(value).sum::<f64>() / heads.len().max(1) as f64
}

/// The heads with the largest output error, worst first.
pub fn worst(heads: &[HeadCertificate]) -> Vec<[usize; 2]> {
    let mut order: Vec<&HeadCertificate> = heads.iter().collect();
    order.sort_by(|a, b| b.output_error.total_cmp(&a.output_error));
    order.iter().take(WORST).map(|head| [head.layer, head.head]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(layer: usize, output_error: f64) -> HeadCertificate {
        HeadCertificate {
            layer,
            head: 0,
            key_rule: "search".into(),
            value_rule: "search".into(),
            logit_error: 0.1,
            key_error: output_error,
            value_error: 0.0,
            output_error,
            paper_output_error: output_error,
            key_top1_share: 0.1,
            key_top8_share: 0.5,
            key_effective_rank: 20.0,
            value_top1_share: 0.1,
            value_top8_share: 0.5,
            value_effective_rank: 20.0,
            key_mean_share: 0.0,
        }
    }

    #[test]
    fn verdicts_follow_the_mean_and_the_worst() {
        let heads = |errors: &[f64]| -> Vec<HeadCertificate> {
            errors.iter().enumerate().map(|(layer, &error)| head(layer, error)).collect()
        };
        let mut errors = vec![0.02; 30];
        assert_eq!(judge(&heads(&errors)).0, Verdict::Good);
        errors[3] = 0.6;
        assert_eq!(judge(&heads(&errors)).0, Verdict::Caution);
        errors[4] = f64::NAN;
        assert_eq!(judge(&heads(&errors)).0, Verdict::Bad);
        assert_eq!(judge(&heads(&[0.15; 30])).0, Verdict::Caution);
        assert_eq!(judge(&heads(&[0.3; 30])).0, Verdict::Bad);
        assert_eq!(worst(&heads(&[0.1, 0.4, 0.2]))[..2], [[1, 0], [2, 0]]);
    }

    #[test]
    fn shares_of_flat_and_peaked_spectra() {
        let flat = Shares::of(&[1.0; 64]);
        assert!((flat.top1 - 1.0 / 64.0).abs() < 1e-12 && (flat.effective_rank - 64.0).abs() < 1e-9);
        let mut peaked = vec![0.0; 64];
        peaked[63] = 5.0;
        let peaked = Shares::of(&peaked);
        assert_eq!((peaked.top1, peaked.top8), (1.0, 1.0));
        assert!((peaked.effective_rank - 1.0).abs() < 1e-12);
        assert_eq!(Shares::of(&[-1e-12, 0.0]).top1, 0.0);
    }
}
