//! Drawing a token from a row of logits.

mod survey;

pub(crate) use survey::{Survey, from_survey, is_filtered};

use crate::backend::{KernelError, Sampled, Sampling};

/// Draws one token. Changes of single logits first, then temperature, top-k, typical-p, top-p and min-p, each on what the one
/// before has left. Probabilities that are reported are those of the unmodified logits.
pub(crate) fn sample(logits: &[f32], settings: &Sampling<'_>) -> Result<Sampled, KernelError> {
    let logits = &logits[..logits.len().min(settings.vocabulary)];
    let largest = check(logits)?;
    let token = match settings.given {
        Some(token) if (token as usize) < logits.len() => token as usize,
        Some(token) => return Err(KernelError::TokenOutOfRange { token, vocab: logits.len() }),
        None if settings.changes.is_empty() && settings.allowed.is_none() => draw(logits, largest, settings),
        None => {
            let changed = changed(logits, settings);
            let largest = changed.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            if !largest.is_finite() {
                return Err(KernelError::BadSetting("no token may be drawn".into()));
            }
            draw(&changed, largest, settings)
        }
    };
    let Some(count) = settings.logprobs else {
        return Ok(Sampled { token: token as u32, logprob: None, top: Vec::new() });
    };
    let normaliser = logits.iter().map(|&logit| f64::from(logit - largest).exp()).sum::<f64>().ln();
    let logprob = |token: usize| (f64::from(logits[token] - largest) - normaliser) as f32;
    let top = most_likely(logits, count).into_iter().map(|token| (token as u32, logprob(token))).collect();
    Ok(Sampled { token: token as u32, logprob: Some(logprob(token)), top })
}

/// The largest logit, if there is one and nothing is NaN or infinite upwards.
fn check(logits: &[f32]) -> Result<f32, KernelError> {
    // Lanes, because this is all a greedy step does with a vocabulary of 150,000.
    let mut lanes = [f32::NEG_INFINITY; 16];
    let mut bad = false;
    let (chunks, rest) = logits.as_chunks::<16>();
    for chunk in chunks {
        for (lane, &logit) in lanes.iter_mut().zip(chunk) {
            bad |= logit.is_nan() | (logit == f32::INFINITY);
            *lane = if logit > *lane { logit } else { *lane };
        }
    }
    for &logit in rest {
        bad |= logit.is_nan() | (logit == f32::INFINITY);
        lanes[0] = lanes[0].max(logit);
    }
    let largest = lanes.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if bad || !largest.is_finite() {
        let index = logits.iter().position(|&logit| logit.is_nan() || logit == f32::INFINITY).unwrap_or(0);
        return Err(KernelError::NotFinite { what: "logits", index });
    }
    Ok(largest)
}

/// The logits that tokens are drawn from.
fn changed(logits: &[f32], settings: &Sampling<'_>) -> Vec<f32> {
    let mut changed = logits.to_vec();
    for change in settings.changes {
        if let Some(logit) = changed.get_mut(change.token as usize) {
            *logit = if *logit > 0.0 { *logit / change.penalty } else { *logit * change.penalty };
            *logit += change.add;
        }
    }
    if let Some(allowed) = settings.allowed {
        for (token, logit) in changed.iter_mut().enumerate() {
            if allowed.get(token / 32).is_none_or(|word| word >> (token % 32) & 1 == 0) {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
    changed
}

/// Draws from finite logits, the largest of which is `largest`.
fn draw(logits: &[f32], largest: f32, settings: &Sampling<'_>) -> usize {
    let best = logits.iter().position(|&logit| logit == largest).unwrap_or(0);
    if settings.temperature <= 0.0 {
        return best;
    }
    pick(&candidates(logits, largest, settings), settings.draw).unwrap_or(best)
}

/// The candidate where the sum of weights reaches a draw.
fn pick(candidates: &[Candidate], draw: f32) -> Option<usize> {
    let total: f64 = candidates.iter().map(|candidate| candidate.weight).sum();
    let target = f64::from(draw) * total;
    let mut sum = 0.0;
    for candidate in candidates {
        sum += candidate.weight;
        if sum > target {
            return Some(candidate.token);
        }
    }
    // Rounding can leave the last sum a hair below the target.
    candidates.iter().rfind(|candidate| candidate.weight > 0.0).map(|candidate| candidate.token)
}

/// The `count` tokens with the largest logits, largest first, the lowest id first on a tie.
fn most_likely(logits: &[f32], count: usize) -> Vec<usize> {
    let mut best: Vec<usize> = Vec::with_capacity(count.min(logits.len()) + 1);
    if count == 0 {
        return best;
    }
    for (token, &logit) in logits.iter().enumerate() {
        if best.len() == count && best.last().is_some_and(|&last| logit <= logits[last]) {
            continue;
        }
        let place = best.partition_point(|&other| logits[other] >= logit);
        best.insert(place, token);
        best.truncate(count);
    }
    best
}

#[derive(Clone, Copy)]
struct Candidate {
    token: usize,
    /// Probability up to a common factor; the most likely token has 1.
    weight: f64,
}

/// Orders candidates by their weight, the heaviest first, and then by their token.
fn more_likely(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    b.weight.total_cmp(&a.weight).then(a.token.cmp(&b.token))
}

/// The tokens that may be drawn. In order of token id when nothing needs an order, else most likely first.
fn candidates(logits: &[f32], largest: f32, settings: &Sampling<'_>) -> Vec<Candidate> {
    let temperature = f64::from(settings.temperature);
    let mut candidates: Vec<Candidate> = logits
        .iter()
        .enumerate()
        .map(|(token, &logit)| Candidate { token, weight: (f64::from(logit - largest) / temperature).exp() })
        .collect();
    if settings.top_k > 0 && settings.top_k < candidates.len() {
        candidates.select_nth_unstable_by(settings.top_k - 1, more_likely);
        candidates.truncate(settings.top_k);
        candidates.sort_unstable_by(more_likely);
    }
    if settings.typical_p < 1.0 {
        candidates = typical(candidates, f64::from(settings.typical_p));
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

/// The candidates whose information (the negative logarithm of the probability) is nearest to its mean, the entropy: the
/// smallest set of them whose probability reaches `wanted`.
fn typical(mut candidates: Vec<Candidate>, wanted: f64) -> Vec<Candidate> {
    let total: f64 = candidates.iter().map(|candidate| candidate.weight).sum();
    candidates.retain(|candidate| candidate.weight > 0.0);
    let information = |candidate: &Candidate| (total / candidate.weight).ln();
    let entropy: f64 =
        candidates.iter().map(|candidate| candidate.weight / total * information(candidate)).sum();
    let far = |candidate: &Candidate| (information(candidate) - entropy).abs();
    candidates.sort_by(|a, b| far(a).total_cmp(&far(b)));
    let mut sum = 0.0;
    let enough = candidates.iter().position(|candidate| {
        sum += candidate.weight;
        sum >= wanted * total
    });
    candidates.truncate(enough.map_or(candidates.len(), |last| last + 1));
    candidates
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::LogitChange;

    const LOGITS: [f32; 5] = [1.0, 3.0, 3.0, -2.0, 2.0];

    fn settings() -> Sampling<'static> {
        Sampling { temperature: 1.0, ..Sampling::default() }
    }

    /// The tokens that any draw can give.
    fn reachable(settings: Sampling<'_>) -> Vec<u32> {
        let mut tokens: Vec<u32> = (0..2000)
            .map(|i| sample(&LOGITS, &Sampling { draw: i as f32 / 2000.0, ..settings }).unwrap().token)
            .collect();
        tokens.sort_unstable();
        tokens.dedup();
        tokens
    }

    #[test]
    fn greedy_takes_the_first_of_a_tie() {
        let drawn = sample(&LOGITS, &Sampling { logprobs: Some(0), ..Sampling::default() }).unwrap();
        assert_eq!((drawn.token, drawn.top.len()), (1, 0));
        assert!((drawn.logprob.unwrap() - logprob(1)).abs() < 1e-6);
        assert_eq!(sample(&LOGITS, &Sampling::default()).unwrap().logprob, None);
    }

    fn logprob(token: usize) -> f32 {
        let total: f32 = LOGITS.iter().map(|logit| logit.exp()).sum();
        (LOGITS[token].exp() / total).ln()
    }

    #[test]
    fn top_logprobs_are_sorted_and_belong_to_the_unmodified_logits() {
        let rule_out = [LogitChange { token: 1, penalty: 1.0, add: f32::NEG_INFINITY }];
        let settings = Sampling { changes: &rule_out, logprobs: Some(4), ..Sampling::default() };
        let drawn = sample(&LOGITS, &settings).unwrap();
        assert_eq!(drawn.token, 2);
        assert_eq!(drawn.top.iter().map(|&(token, _)| token).collect::<Vec<_>>(), [1, 2, 4, 0]);
        for (token, value) in drawn.top.into_iter().chain([(2, drawn.logprob.unwrap())]) {
            assert!((value - logprob(token as usize)).abs() < 1e-6, "{token}");
        }
        let all = sample(&LOGITS, &Sampling { logprobs: Some(99), ..Sampling::default() }).unwrap();
        assert_eq!(all.top.len(), LOGITS.len());
    }

    #[test]
    fn changes_of_logits_do_what_they_say() {
        let draw = |changes: &[LogitChange]| {
            sample(&LOGITS, &Sampling { changes, ..Sampling::default() }).map(|drawn| drawn.token)
        };
        let change = |token, penalty, add| LogitChange { token, penalty, add };
        assert_eq!(draw(&[change(0, 1.0, 2.5)]).unwrap(), 0);
        // A penalty pulls positive logits down and pushes negative ones further down.
        assert_eq!(draw(&[change(1, 2.0, 0.0), change(2, 2.0, 0.0)]).unwrap(), 4);
        assert_eq!(draw(&[change(3, 0.1, 3.3)]).unwrap(), 3);
        assert_eq!(draw(&[change(3, 2.0, 3.3)]).unwrap(), 1);
        assert_eq!(draw(&[change(77, 1.0, 50.0)]).unwrap(), 1);
        let none: Vec<LogitChange> = (0..5).map(|token| change(token, 1.0, f32::NEG_INFINITY)).collect();
        assert!(matches!(draw(&none), Err(KernelError::BadSetting(_))));
    }

    #[test]
    fn only_allowed_tokens_are_drawn() {
        let allowed = [0b11001];
        assert_eq!(reachable(Sampling { allowed: Some(&allowed), ..settings() }), [0, 3, 4]);
        let all: Vec<f32> = (0..40).map(|i| i as f32).collect();
        let setting = Sampling { allowed: Some(&[u32::MAX]), ..Sampling::default() };
        assert_eq!(sample(&all, &setting).unwrap().token, 31, "no word is no permission");
        assert!(sample(&all, &Sampling { allowed: Some(&[]), ..Sampling::default() }).is_err());
    }

    #[test]
    fn a_given_token_is_scored_and_not_drawn() {
        let score =
            |token| sample(&LOGITS, &Sampling { given: Some(token), logprobs: Some(0), ..settings() });
        assert!((score(3).unwrap().logprob.unwrap() - logprob(3)).abs() < 1e-6);
        assert!(matches!(score(5), Err(KernelError::TokenOutOfRange { token: 5, vocab: 5 })));
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
        // Information: 2.92, 0.92, 0.92, 5.92, 1.92, of which 1.19 is the mean.
        assert_eq!(reachable(Sampling { typical_p: 0.7, ..settings() }), [1, 2]);
        assert_eq!(reachable(Sampling { typical_p: 0.9, ..settings() }), [1, 2, 4]);
        assert_eq!(reachable(Sampling { typical_p: 0.7, top_p: 0.39, ..settings() }), [1]);
        assert_eq!(reachable(Sampling { top_k: 4, top_p: 0.97, min_p: 0.2, ..settings() }), [1, 2, 4]);
    }

    #[test]
    fn the_likeliest_token_need_not_be_typical() {
        // Probabilities 0.4 and twelve times 0.05: the entropy is 2.16, the information 0.92 and 3.00.
        let mut logits = vec![0.05_f32.ln(); 13];
        logits[0] = 0.4_f32.ln();
        let settings = Sampling { typical_p: 0.3, draw: 0.0, ..settings() };
        assert_ne!(sample(&logits, &settings).unwrap().token, 0);
        assert_eq!(sample(&logits, &Sampling { typical_p: 0.7, ..settings }).unwrap().token, 0);
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
        for index in [0, 15, 16, 38] {
            for value in [f32::NAN, f32::INFINITY] {
                let mut row = [0.5; 39];
                row[index] = value;
                let error = sample(&row, &settings()).unwrap_err();
                assert!(matches!(error, KernelError::NotFinite { index: at, .. } if at == index), "{error}");
            }
        }
        let masked = [f32::NEG_INFINITY, 0.0];
        assert_eq!(sample(&masked, &Sampling { draw: 0.999, ..settings() }).unwrap().token, 1);
    }
}
