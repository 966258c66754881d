//! What a user can expect of the rotations of a model: errors per head on text that calibration did not see.

use serde::{Deserialize, Serialize};

use crate::probe::RetrievalProbe;
use crate::verdict::Verdict;

/// Relative squared error of a head's output above which the head is listed as bad.
const HEAD_LIMIT: f64 = 0.5;

/// Mean error over heads above which the verdict is `bad`: the model should not be served with this cache.
const MEAN_LIMIT: f64 = 0.25;

/// Mean error over heads above which the verdict is `caution`: answers will show it.
const CAUTION_LIMIT: f64 = 0.10;

/// Number of worst heads that are listed.
const WORST: usize = 8;

/// The errors of one KV head.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
pub struct HeadCertificate {
    /// Layer of the head.
    pub layer: usize,
    /// Index of the KV head in its layer.
    pub head: usize,
    /// Rule by which keys are rounded.
    pub key_rule: String,
    /// Rule by which values are rounded.
    pub value_rule: String,
    /// Root mean square change of a logit, weighted with the attention it gets.
    pub logit_error: f64,
    /// Relative squared error of the attention output, after the output projection, when only keys are encoded.
    pub key_error: f64,
    /// The same error when only values are encoded.
    pub value_error: f64,
    /// The same error when both are encoded.
    pub output_error: f64,
    /// [`output_error`](Self::output_error) of the published encoder: one rotation per layer, not centred, fixed clip.
    pub paper_output_error: f64,
    /// Share of the largest eigenvalue in the trace of C_Q.
    pub key_top1_share: f64,
    /// Share of the eight largest eigenvalues in the trace of C_Q.
    pub key_top8_share: f64,
    /// `exp` of the entropy of the spectrum: how many directions queries use.
    pub key_effective_rank: f64,
    /// [`key_top1_share`](Self::key_top1_share) of the matrix that value rotations are fitted to.
    pub value_top1_share: f64,
    /// [`key_top8_share`](Self::key_top8_share) of the matrix that value rotations are fitted to.
    pub value_top8_share: f64,
    /// [`key_effective_rank`](Self::key_effective_rank) of the matrix that value rotations are fitted to.
    pub value_effective_rank: f64,
    /// Share of the mean in the squared length of keys: what centring takes away.
    pub key_mean_share: f64,
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
    /// Tokens that the rotations were calibrated on.
    pub tokens: usize,
    /// Tokens the errors were measured on; not part of the calibration.
    pub held_out_tokens: usize,
    /// Tokens at the start that are read exactly.
    pub sink: usize,
    /// Tokens before the query that are read exactly.
    pub recent: usize,
    /// Whether the cache can be used.
    pub verdict: Verdict,
    /// The reason of the verdict, for people.
    pub reason: String,
    /// Mean output error over heads.
    pub mean_output_error: f64,
    /// Mean output error over heads with the published encoder.
    pub mean_paper_output_error: f64,
    /// `[layer, head]` of the heads with the largest errors.
    pub worst: Vec<[usize; 2]>,
    /// Whether the model still copies what it read long ago; `None` if that was not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probe: Option<RetrievalProbe>,
    /// The errors of all heads.
    pub heads: Vec<HeadCertificate>,
}

impl Certificate {
    /// Takes a probe in, in place of an earlier one, and judges again.
    pub fn set_probe(&mut self, probe: Option<RetrievalProbe>) {
        (self.verdict, self.reason) = judge(&self.heads, probe.as_ref());
        self.probe = probe;
    }
}

/// How the trace of a matrix is spread over its eigenvalues.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SpectrumShares {
    /// Share of the largest eigenvalue.
    pub top1: f64,
    /// Share of the eight largest eigenvalues.
    pub top8: f64,
    /// `exp` of the entropy of the shares.
    pub effective_rank: f64,
}

impl SpectrumShares {
    /// Computes the shares of eigenvalues in ascending order; tiny negative ones of a rounded matrix count as zero.
    pub fn of(eigenvalues: &[f64]) -> SpectrumShares {
        let total: f64 = eigenvalues.iter().map(|value| value.max(0.0)).sum();
        let shares: Vec<f64> =
            eigenvalues.iter().rev().map(|value| value.max(0.0) / total.max(f64::MIN_POSITIVE)).collect();
        let entropy: f64 = shares.iter().filter(|share| **share > 0.0).map(|share| -share * share.ln()).sum();
        SpectrumShares {
            top1: shares.first().copied().unwrap_or(0.0),
            top8: shares.iter().take(8).sum(),
            effective_rank: entropy.exp(),
        }
    }
}

/// The worse of the verdicts over heads and of the probe, with its reason.
pub fn judge(heads: &[HeadCertificate], probe: Option<&RetrievalProbe>) -> (Verdict, String) {
    let (verdict, reason) = judge_heads(heads);
    match probe.and_then(|probe| Some((probe, probe.verdict()?))) {
        Some((probe, Verdict::Bad)) if verdict != Verdict::Bad => {
            let reason = format!(
                "what was read long ago is lost ({:.2} nats for a copied token); use int4 or fp8",
                probe.loss()
            );
            (Verdict::Bad, reason)
        }
        Some((probe, probed)) if verdict != Verdict::Bad => {
            let reason = format!("{reason}; a token copied from far back loses {:.3} nats", probe.loss());
            (verdict.max(probed), reason)
        }
        _ => (verdict, reason),
    }
}

/// The verdict over heads, with its reason.
fn judge_heads(heads: &[HeadCertificate]) -> (Verdict, String) {
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

/// Mean of a number over heads.
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
    use crate::probe::ProbeDistance;

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
        assert_eq!(judge(&heads(&errors), None).0, Verdict::Good);
        errors[3] = 0.6;
        assert_eq!(judge(&heads(&errors), None).0, Verdict::Caution);
        errors[4] = f64::NAN;
        assert_eq!(judge(&heads(&errors), None).0, Verdict::Bad);
        assert_eq!(judge(&heads(&[0.15; 30]), None).0, Verdict::Caution);
        assert_eq!(judge(&heads(&[0.3; 30]), None).0, Verdict::Bad);
        assert_eq!(worst(&heads(&[0.1, 0.4, 0.2]))[..2], [[1, 0], [2, 0]]);
    }

    #[test]
    fn the_probe_can_only_make_a_verdict_worse() {
        let probe = |sealed: f64| {
            RetrievalProbe::new(8192, vec![ProbeDistance { tokens: 1024, exact: -0.1, sealed }])
        };
        let (good, caution) = ([head(0, 0.02)], [head(0, 0.15)]);
        assert_eq!(judge(&good, Some(&probe(-0.1))).0, Verdict::Good);
        assert_eq!(judge(&good, Some(&probe(-0.6))).0, Verdict::Caution);
        assert_eq!(judge(&caution, Some(&probe(-0.1))).0, Verdict::Caution);
        assert_eq!(judge(&[head(0, 0.9)], Some(&probe(-0.1))).0, Verdict::Bad);
        let (verdict, reason) = judge(&good, Some(&probe(-9.0)));
        assert!(verdict == Verdict::Bad && reason.contains("int4"), "{reason}");
        // A model that cannot copy is judged by its heads.
        let unable =
            RetrievalProbe::new(8192, vec![ProbeDistance { tokens: 1024, exact: -5.0, sealed: -9.0 }]);
        assert_eq!(judge(&good, Some(&unable)), judge(&good, None));
    }

    #[test]
    fn certificates_without_a_probe_are_read() {
        let shipped = crate::shipped::SHIPPED[0].certificate().expect("a certificate");
        // Short numbers, which come back from JSON as they were.
        let mut certificate = Certificate {
            mean_output_error: 0.02,
            mean_paper_output_error: 0.03,
            heads: vec![head(0, 0.02)],
            ..shipped
        };
        certificate.set_probe(None);
        let text = serde_json::to_string(&certificate).expect("JSON");
        assert!(!text.contains("probe"), "an old certificate has no such field");
        assert_eq!(serde_json::from_str::<Certificate>(&text).expect("a certificate"), certificate);
        let probe =
            RetrievalProbe::new(8192, vec![ProbeDistance { tokens: 1024, exact: -0.1, sealed: -9.0 }]);
        certificate.set_probe(Some(probe));
        assert_eq!(certificate.verdict, Verdict::Bad);
        let text = serde_json::to_string(&certificate).expect("JSON");
        assert_eq!(serde_json::from_str::<Certificate>(&text).expect("a certificate"), certificate);
    }

    #[test]
    fn shares_of_flat_and_peaked_spectra() {
        let flat = SpectrumShares::of(&[1.0; 64]);
        assert!((flat.top1 - 1.0 / 64.0).abs() < 1e-12 && (flat.effective_rank - 64.0).abs() < 1e-9);
        let mut peaked = vec![0.0; 64];
        peaked[63] = 5.0;
        let peaked = SpectrumShares::of(&peaked);
        assert_eq!((peaked.top1, peaked.top8), (1.0, 1.0));
        assert!((peaked.effective_rank - 1.0).abs() < 1e-12);
        assert_eq!(SpectrumShares::of(&[-1e-12, 0.0]).top1, 0.0);
    }
}
