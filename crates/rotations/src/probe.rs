//! The retrieval probe of a certificate: strings that a model copies from far back, with an exact cache and a sealed one.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::verdict::Verdict;

/// Least mean log-probability with an exact cache at which the probe judges. A model that only reads the prose of the probe
/// gives its tokens about -2.25 (SmolLM2); where copying is no better than that, what the cache holds makes no difference.
const COPYING: f64 = -2.0;

/// Loss above which the verdict is `caution`. On SmolLM2 bands lose 0.24 and find 100 % of needles at 4K, scalar codes lose
/// 0.48 and find 65 %: the limit lies between them.
const CAUTION_LIMIT: f64 = 0.35;

/// Loss above which the verdict is `bad`: twice that of scalar codes. Plain rounding to 2 bits loses 2.5.
const LOSS_LIMIT: f64 = 1.0;

/// What was measured with one string.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq)]
pub struct ProbeDistance {
    /// How many tokens before it was begun again the string was read.
    pub tokens: usize,
    /// Mean log-probability of its tokens with an exact cache.
    pub exact: f64,
    /// The same with the sealed cache.
    pub sealed: f64,
}

/// How well a model copies strings that it read long ago, with an exact cache and with a sealed one.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
pub struct RetrievalProbe {
    /// Tokens of the text, with one string that is begun again.
    pub tokens: usize,
    /// Number of strings.
    pub strings: usize,
    /// Mean log-probability of a copied token with an exact cache.
    pub exact: f64,
    /// The same with the sealed cache.
    pub sealed: f64,
    /// All strings, nearest first.
    pub distances: Vec<ProbeDistance>,
}

impl RetrievalProbe {
    /// The means over some strings.
    pub fn new(tokens: usize, distances: Vec<ProbeDistance>) -> RetrievalProbe {
        let mean = |value: fn(&ProbeDistance) -> f64| {
            distances.iter().map(value).sum::<f64>() / distances.len().max(1) as f64
        };
        RetrievalProbe {
            tokens,
            strings: distances.len(),
            exact: mean(|string| string.exact),
            sealed: mean(|string| string.sealed),
            distances,
        }
    }

    /// What sealing costs, in nats of log-probability for a copied token.
    pub fn loss(&self) -> f64 {
        self.exact - self.sealed
    }

    /// What the probe says of the cache; `None` if the model cannot copy even with an exact cache.
    pub fn verdict(&self) -> Option<Verdict> {
        if self.exact < COPYING {
            return None;
        }
        let loss = self.loss();
        Some(match loss {
            _ if loss.is_nan() || loss > LOSS_LIMIT => Verdict::Bad,
            _ if loss > CAUTION_LIMIT => Verdict::Caution,
            _ => Verdict::Good,
        })
    }
}

impl fmt::Display for RetrievalProbe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (nearest, farthest) = match (self.distances.first(), self.distances.last()) {
            (Some(first), Some(last)) => (first.tokens, last.tokens),
            _ => (0, 0),
        };
        write!(
            f,
            "copying {} strings from {nearest} to {farthest} tokens back: log-probability of a token {:.3} exactly, {:.3} \
             with the sealed cache",
            self.strings, self.exact, self.sealed
        )?;
        match self.verdict() {
            Some(_) => write!(f, ", a loss of {:.3}", self.loss()),
            None => write!(f, "; the model itself does not copy, so this says nothing about the cache"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn probe(exact: f64, sealed: f64) -> RetrievalProbe {
        let distances =
            [1000, 8000].map(|tokens| ProbeDistance { tokens, exact: exact - 0.1, sealed: sealed - 0.1 });
        let mut distances = distances.to_vec();
        distances.push(ProbeDistance { tokens: 8100, exact: exact + 0.2, sealed: sealed + 0.2 });
        RetrievalProbe::new(8192, distances)
    }

    #[test]
    fn verdicts_follow_the_loss() {
        assert!((probe(-0.2, -0.3).loss() - 0.1).abs() < 1e-12, "means are over strings");
        assert_eq!(probe(-0.2, -0.2 - 0.9 * CAUTION_LIMIT).verdict(), Some(Verdict::Good));
        assert_eq!(probe(-0.2, -0.2 - 1.1 * CAUTION_LIMIT).verdict(), Some(Verdict::Caution));
        assert_eq!(probe(-0.2, -0.2 - 1.1 * LOSS_LIMIT).verdict(), Some(Verdict::Bad));
        assert_eq!(probe(-0.2, f64::NAN).verdict(), Some(Verdict::Bad));
        assert_eq!(probe(-0.2, -0.1).verdict(), Some(Verdict::Good), "better than exact is noise");
    }

    #[test]
    fn a_model_that_cannot_copy_is_not_judged() {
        let probe = probe(1.1 * COPYING, -9.0);
        assert_eq!(probe.verdict(), None);
        assert!(probe.to_string().contains("says nothing"), "{probe}");
    }
}
