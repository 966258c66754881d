//! Drawing a token from a row of logits.

use crate::backend::{KernelError, Sampled, Sampling};

/// Draws one token. Temperature first, then top-k, top-p and min-p, each on what the one before has left.
pub fn sample(logits: &[f32], settings: &Sampling) -> Result<Sampled, KernelError> {
    let logits = &logits[..logits.len().min(settings.vocabulary)];
    let best = argmax(logits)?;
    let largest = logits[best];
    let normaliser: f64 = logits.iter().map(|&logit| f64::from(logit - largest).exp()).sum();
    let finish = |token: usize| Sampled {
        token: token as u32,
        logprob: (f64::from(logits[token] - largest) - normaliser.ln()) as f32,
    };
    if settings.temperature <= 0.0 {
        return Ok(finish(best));
    }
    let candidates = candidates(logits, largest, settings);
    let total: f64 = candidates.iter().map(|candidate| candidate.weight).sum();
    let target = f64::from(settings.draw) * total;
    let mut sum = 0.0;
    for candidate in &candidates {
        sum += candidate.weight;
        if sum > target {
            return Ok(finish(candidate.token));
        }
    }
    // Rounding can leave the last sum a hair below the target.
    Ok(finish(candidates.last().map_or(best, |candidate| candidate.token)))
}

/// The largest logit, the lowest token on a tie.
fn argmax(logits: &[f32]) -> Result<usize, KernelError> {
    let mut best: Option<usize> = None;
    for (token, &logit) in logits.iter().enumerate() {
        if logit.is_nan() || logit == f32::INFINITY {
            return Err(KernelError::NotFinite { what: "logits", index: token });
        }
        if best.is_none_or(|best| logit > logits[best]) {
            best = Some(token);
        }
    }
    match best {
        Some(best) if logits[best].is_finite() => Ok(best),
        _ => Err(KernelError::NotFinite { what: "logits", index: 0 }),
    }
}

#[derive(Clone, Copy)]
struct Candidate {
    token: usize,
    /// Probability up to a common factor; the most likely token has 1.
    weight: f64,
}

/// The tokens that may be drawn. In order of token id when nothing needs an order, else most likely first.
fn candidates(logits: &[f32], largest: f32, settings: &Sampling) -> Vec<Candidate> {
    let temperature = f64::from(settings.temperature);
    let mut candidates: Vec<Candidate> = logits
        .iter()
        .enumerate()
        .map(|(token, &logit)| Candidate { token, weight: (f64::from(logit - largest) / temperature).exp() })
        .collect();
    let more_likely =
        |a: &Candidate, b: &Candidate| b.weight.total_cmp(&a.weight).then(a.token.cmp(&b.token));
    if settings.top_k > 0 && settings.top_k < candidates.len() {
        candidates.select_nth_unstable_by(settings.top_k - 1, more_likely);
        candidates.truncate(settings.top_k);
        candidates.sort_unstable_by(more_likely);
    }
    if settings.top_p < 1.0 {
        let total: f64 = candidates.iter().map(|candidate| candidate.weight).sum();
        let wanted = f64::from(settings.top_p) * total;
        // A vocabulary is long and the kept set short: sort only as far as needed.
        let mut sorted = 0;
        let mut sum = 0.0;
        'all: while sorted < candidates.len() {
            let next = (sorted * 8).max(64).min(candidates.len());
            if next < candidates.len() {
                candidates[sorted..].select_nth_unstable_by(next - sorted - 1, more_likely);
            }
            candidates[sorted..next].sort_unstable_by(more_likely);
            for index in sorted..next {
                sum += candidates[index].weight;
                if sum >= wanted {
                    candidates.truncate(index + 1);
                    break 'all;
                }
            }
            sorted = next;
        }
    }
    if settings.min_p > 0.0 {
        candidates.retain(|candidate| candidate.weight >= f64::from(settings.min_p));
    }
    candidates
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 5] = [1.0, 3.0, 3.0, -2.0, 2.0];

    fn settings() -> Sampling {
        Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, vocabulary: usize::MAX, draw: 0.0 }
    }

    /// The tokens that any draw can give.
    fn reachable(settings: Sampling) -> Vec<u32> {
        let mut tokens: Vec<u32> = (0..2000)
            .map(|i| sample(&LOGITS, &Sampling { draw: i as f32 / 2000.0, ..settings }).unwrap().token)
            .collect();
        tokens.sort_unstable();
        tokens.dedup();
        tokens
    }

    #[test]
    fn greedy_takes_the_first_of_a_tie() {
        let drawn = sample(&LOGITS, &Sampling { temperature: 0.0, ..settings() }).unwrap();
        assert_eq!(drawn.token, 1);
        let total: f32 = LOGITS.iter().map(|logit| logit.exp()).sum();
        assert!((drawn.logprob - (3.0f32.exp() / total).ln()).abs() < 1e-6);
    }

    #[test]
    fn filters_keep_what_they_say() {
        assert_eq!(reachable(settings()), [0, 1, 2, 3, 4]);
        assert_eq!(reachable(Sampling { vocabulary: 3, ..settings() }), [0, 1, 2]);
        assert_eq!(reachable(Sampling { top_k: 1, ..settings() }), [1]);
        assert_eq!(reachable(Sampling { top_k: 3, ..settings() }), [1, 2, 4]);
        assert_eq!(reachable(Sampling { top_k: 99, ..settings() }), [0, 1, 2, 3, 4]);
        // Probabilities: 0.054, 0.399, 0.399, 0.003, 0.147.
        assert_eq!(reachable(Sampling { top_p: 0.39, ..settings() }), [1]);
        assert_eq!(reachable(Sampling { top_p: 0.9, ..settings() }), [1, 2, 4]);
        assert_eq!(reachable(Sampling { min_p: 0.3, ..settings() }), [1, 2, 4]);
        assert_eq!(reachable(Sampling { top_k: 4, top_p: 0.97, min_p: 0.2, ..settings() }), [1, 2, 4]);
    }

    #[test]
    fn draws_follow_the_probabilities() {
        let total: f64 = LOGITS.iter().map(|&logit| f64::from(logit).exp()).sum();
        let mut counts = [0usize; 5];
        for i in 0..10_000 {
            let draw = (i as f32 + 0.5) / 10_000.0;
            counts[sample(&LOGITS, &Sampling { draw, ..settings() }).unwrap().token as usize] += 1;
        }
        for (token, &count) in counts.iter().enumerate() {
            let expected = f64::from(LOGITS[token]).exp() / total;
            assert!((count as f64 / 10_000.0 - expected).abs() < 2e-3, "{token}");
        }
    }

    #[test]
    fn top_p_over_a_long_vocabulary_equals_a_full_sort() {
        let logits: Vec<f32> =
            (0..5000u32).map(|i| ((i.wrapping_mul(2654435761) >> 7) % 1000) as f32 * 0.002).collect();
        let settings = Sampling { top_p: 0.7, ..settings() };
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        let weights: Vec<f64> = order.iter().map(|&token| f64::from(logits[token]).exp()).collect();
        let total: f64 = weights.iter().sum();
        let mut sum = 0.0;
        let kept = weights
            .iter()
            .take_while(|&&weight| {
                let go = sum < 0.7 * total;
                sum += weight;
                go
            })
            .count();
        let candidates = candidates(&logits, 1.998, &settings);
        assert!(candidates.len().abs_diff(kept) <= 1);
        assert!(candidates.iter().zip(&order).all(|(candidate, &token)| candidate.token == token));
    }

    #[test]
    fn bad_logits_are_an_error() {
        for bad in [&[][..], &[f32::NAN, 1.0], &[1.0, f32::INFINITY], &[f32::NEG_INFINITY]] {
            assert!(sample(bad, &settings()).is_err(), "{bad:?}");
        }
        let masked = [f32::NEG_INFINITY, 0.0];
        assert_eq!(sample(&masked, &Sampling { draw: 0.999, ..settings() }).unwrap().token, 1);
    }
}
