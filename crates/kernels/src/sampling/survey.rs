//! Drawing a token from what a device tells of a row of logits, so that the row can stay there.

use super::{Candidate, more_likely, pick, typical};
use crate::backend::{Sampled, Sampling};

/// What is known of a row of finite logits that stays on a device.
pub(crate) struct Survey {
    /// The largest logit.
    pub(crate) largest: f32,
    /// The sum of all weights relative to it, where some are listed because tokens are drawn from them.
    pub(crate) total: f64,
    /// The same at temperature 1, where probabilities are reported.
    pub(crate) plain_total: f64,
    /// The token with the largest logit, the one that was given, or the one that was drawn.
    pub(crate) token: u32,
    /// Whether that is the one to be taken, whatever the settings.
    pub(crate) drawn: bool,
    /// The logit of the token.
    pub(crate) logit: f32,
    /// All tokens from some logit on, in any order.
    pub(crate) listed: Vec<(u32, f32)>,
    /// Tokens of the row.
    pub(crate) vocabulary: usize,
}

/// Whether only the most likely tokens may be drawn.
fn takes_most_likely(settings: &Sampling<'_>, vocabulary: usize) -> bool {
    settings.top_k > 0 && settings.top_k < vocabulary
}

/// Whether tokens are drawn in the order of their weights, not of their numbers.
fn is_ordered(settings: &Sampling<'_>, vocabulary: usize) -> bool {
    takes_most_likely(settings, vocabulary) || settings.typical_p < 1.0 || settings.top_p < 1.0
}

/// Whether some tokens may not be drawn.
pub(crate) fn is_filtered(settings: &Sampling<'_>, vocabulary: usize) -> bool {
    is_ordered(settings, vocabulary) || settings.min_p > 0.0
}

/// Draws one token as [`sample`] does, if what is known of the row is enough for that. No logit is changed.
pub(crate) fn from_survey(mut survey: Survey, settings: &Sampling<'_>) -> Option<Sampled> {
    let reported = settings.logprobs.unwrap_or(0).min(survey.vocabulary);
    if survey.listed.len() < reported {
        return None;
    }
    // Both zeros are the same logit.
    let order = |logit: f32| logit + 0.0;
    survey.listed.sort_unstable_by(|a, b| order(b.1).total_cmp(&order(a.1)).then(a.0.cmp(&b.0)));
    let filtered = is_filtered(settings, survey.vocabulary);
    let (mut token, mut logit) = (survey.token, survey.logit);
    if !survey.drawn && settings.given.is_none() && settings.temperature > 0.0 && filtered {
        token = pick(&listed_candidates(&survey, settings)?, settings.draw)? as u32;
        logit = survey.listed.iter().find(|&&(listed, _)| listed == token)?.1;
    }
    if settings.logprobs.is_none() {
        return Some(Sampled { token, logprob: None, top: Vec::new() });
    }
    let normaliser = survey.plain_total.ln();
    let logprob = |logit: f32| (f64::from(logit - survey.largest) - normaliser) as f32;
    let top = survey.listed[..reported].iter().map(|&(token, logit)| (token, logprob(logit))).collect();
    Some(Sampled { token, logprob: Some(logprob(logit)), top })
}

/// The tokens that may be drawn, as [`candidates`] finds them, if all of them are listed, the most likely first.
fn listed_candidates(survey: &Survey, settings: &Sampling<'_>) -> Option<Vec<Candidate>> {
    let temperature = f64::from(settings.temperature);
    let weight = |logit: f32| (f64::from(logit - survey.largest) / temperature).exp();
    let mut candidates: Vec<Candidate> = survey
        .listed
        .iter()
        .map(|&(token, logit)| Candidate { token: token as usize, weight: weight(logit) })
        .collect();
    let mut whole = candidates.len() == survey.vocabulary;
    if takes_most_likely(settings, survey.vocabulary) {
        if candidates.len() < settings.top_k {
            return None;
        }
        candidates.truncate(settings.top_k);
        whole = true;
    }
    if settings.typical_p < 1.0 {
        if !whole {
            return None;
        }
        candidates = typical(candidates, f64::from(settings.typical_p));
        candidates.sort_unstable_by(more_likely);
    }
    if settings.top_p < 1.0 {
        let total =
            if whole { candidates.iter().map(|candidate| candidate.weight).sum() } else { survey.total };
        let mut sum = 0.0;
        let enough = candidates.iter().position(|candidate| {
            sum += candidate.weight;
            sum >= f64::from(settings.top_p) * total
        });
        match enough {
            Some(last) => candidates.truncate(last + 1),
            None if whole => {}
            None => return None,
        }
        whole = true;
    }
    if settings.min_p > 0.0 {
        let least = f64::from(settings.min_p);
        if !whole && candidates.last().is_none_or(|last| last.weight >= least) {
            return None;
        }
        candidates.retain(|candidate| candidate.weight >= least);
        if !is_ordered(settings, survey.vocabulary) {
            // Nothing needs an order.
            candidates.sort_unstable_by_key(|candidate| candidate.token);
        }
    }
    Some(candidates)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::sample;

    /// A device that lists the largest logits decides as one that reads the row, whenever its list is long enough.
    #[test]
    fn a_survey_is_as_good_as_the_row() {
        let mut random = oscar_random::Random::new(7);
        let (mut decided, mut open) = (0, 0);
        for round in 0..4000 {
            let spread = 1.0 + (round % 7) as f32;
            let row: Vec<f32> = (0..200).map(|_| (spread * random.signed() * 4.0).round() / 4.0).collect();
            let mut pick = |from: &[f32]| from[(random.next_u64() % from.len() as u64) as usize];
            let settings = Sampling {
                temperature: pick(&[0.0, 0.5, 1.0, 2.0]),
                top_k: pick(&[0.0, 1.0, 5.0, 40.0, 500.0]) as usize,
                top_p: pick(&[1.0, 0.3, 0.9]),
                min_p: pick(&[0.0, 0.2]),
                typical_p: pick(&[1.0, 1.0, 0.7]),
                draw: pick(&[0.0, 0.1, 0.37, 0.8, 0.999]),
                logprobs: [None, Some(0), Some(3)][round % 3],
                ..Sampling::default()
            };
            let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let total = |temperature: f64| {
                row.iter().map(|&logit| (f64::from(logit - largest) / temperature).exp()).sum::<f64>()
            };
            let mut order: Vec<u32> = (0..200).collect();
            order.sort_by(|&a, &b| {
                (row[b as usize] + 0.0).total_cmp(&(row[a as usize] + 0.0)).then(a.cmp(&b))
            });
            let expected = sample(&row, &settings).unwrap();
            let drawn = settings.temperature > 0.0 && !is_filtered(&settings, 200);
            let token = if drawn { expected.token } else { order[0] };
            let listed = order[..[8, 60, 200][round % 3]].iter().rev();
            let survey = Survey {
                largest,
                total: total(f64::from(settings.temperature)),
                plain_total: total(1.0),
                token,
                drawn: false,
                logit: row[token as usize],
                listed: listed.map(|&token| (token, row[token as usize])).collect(),
                vocabulary: 200,
            };
            match from_survey(survey, &settings) {
                Some(got) => {
                    assert_eq!(got.token, expected.token, "{settings:?}");
                    assert_eq!(
                        got.top.iter().map(|top| top.0).collect::<Vec<_>>(),
                        expected.top.iter().map(|top| top.0).collect::<Vec<_>>()
                    );
                    if let (Some(a), Some(b)) = (got.logprob, expected.logprob) {
                        assert!((a - b).abs() < 1e-5, "{a} {b}");
                    }
                    decided += 1;
                }
                None => open += 1,
            }
        }
        assert!(decided > 2000 && open > 100, "{decided} {open}");
    }
}
