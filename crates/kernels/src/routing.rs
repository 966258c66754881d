//! Which experts a row goes to and how much each of them counts: the plain definition, for every device.
//!
//! A router is a projection to one number per expert. [`Routing::choose`] turns these numbers into scores, picks the best
//! experts and weighs them. Between equal scores the expert with the lower number wins.

use crate::error::KernelError;

/// Added to the sum that weights are divided by, so that scores which are all zero stay zero.
const SMALLEST_SUM: f32 = 1e-20;

/// How the numbers of a router become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scores {
    /// The numbers of all experts go through one softmax.
    Softmax,
    /// Each number by itself through the logistic function.
    Sigmoid,
    /// Experts are chosen by the numbers themselves; the softmax is over those that were chosen.
    SoftmaxOfChosen,
}

/// Experts in groups of equal size, of which only the best groups take part. A group is as good as its two best experts
/// together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    /// The number of groups.
    pub count: usize,
    /// Groups that take part for a row.
    pub chosen: usize,
}

/// What a family says about its routers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RoutingRule {
    /// The number of experts.
    pub experts: usize,
    /// Experts that a row goes to.
    pub top_k: usize,
    /// How the router's numbers become scores.
    pub scores: Scores,
    /// Groups of experts, if there are any.
    pub groups: Option<ExpertGroups>,
    /// Whether the weights of the chosen experts are made to sum to one.
    pub normalise: bool,
    /// Factor on the weights, after that.
    pub scale: f32,
}

/// A rule whose numbers fit together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing(RoutingRule);

/// An expert that a row goes to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// Number of the expert.
    pub expert: usize,
    /// What its output is multiplied with.
    pub weight: f32,
}

/// Buffers of [`Routing::choose`], kept between rows.
#[derive(Default)]
pub struct RoutingScratch {
    scores: Vec<f32>,
    /// What experts are chosen by; `None` for an expert that cannot be chosen (any more).
    choosing: Vec<Option<f32>>,
    groups: Vec<Option<f32>>,
}

impl Routing {
    /// Checks a rule; the error says which numbers do not fit together.
    pub fn new(rule: RoutingRule) -> Result<Routing, KernelError> {
        let RoutingRule { experts, top_k, groups, scale, .. } = rule;
        let groups = groups.unwrap_or(ExpertGroups { count: 1, chosen: 1 });
        let problem = if experts == 0 {
            "a router has no experts".to_owned()
        } else if groups.count == 0 || !experts.is_multiple_of(groups.count) {
            format!("{experts} experts cannot be cut into {} equal groups", groups.count)
        } else if groups.chosen == 0 || groups.chosen > groups.count {
            format!("{} of {} groups of experts cannot be chosen", groups.chosen, groups.count)
        } else if top_k == 0 || top_k > experts / groups.count * groups.chosen {
            let most = experts / groups.count * groups.chosen;
            format!("a row cannot go to {top_k} experts where it has {most} to choose from")
        } else if !scale.is_finite() {
            format!("the weights of experts cannot be scaled by {scale}")
        } else {
            return Ok(Routing(rule));
        };
        Err(KernelError::BadSetting(problem))
    }

    /// The rule by which experts are chosen.
    pub fn rule(&self) -> &RoutingRule {
        &self.0
    }

    /// The experts of one row, best first, from the router's numbers. A `correction` is added to the scores when experts are
    /// chosen, and not when they are weighed.
    ///
    /// NaN, and infinities that leave no scores, are an error. Panics if there is not one number per expert.
    pub fn choose(
        &self,
        logits: &[f32],
        correction: Option<&[f32]>,
        scratch: &mut RoutingScratch,
        choices: &mut [Choice],
    ) -> Result<(), KernelError> {
        let rule = &self.0;
        assert_eq!((logits.len(), choices.len()), (rule.experts, rule.top_k), "numbers and choices of a row");
        let RoutingScratch { scores, choosing, groups } = scratch;
        make_scores(rule.scores, logits, scores)?;
        choosing.clear();
        match correction {
            Some(correction) => choosing.extend(scores.iter().zip(correction).map(|(s, c)| Some(s + c))),
            None => choosing.extend(scores.iter().copied().map(Some)),
        }
        if let Some(rule) = rule.groups {
            keep_best_groups(rule, choosing, groups);
        }
        for choice in choices.iter_mut() {
            let expert = take_best(choosing).ok_or(NOT_FINITE(0))?;
            *choice = Choice { expert, weight: scores[expert] };
        }
        if rule.scores == Scores::SoftmaxOfChosen {
            // The best is first.
            let largest = choices[0].weight;
            choices.iter_mut().for_each(|choice| choice.weight = (choice.weight - largest).exp());
        }
        if rule.normalise || rule.scores == Scores::SoftmaxOfChosen {
            let sum = choices.iter().map(|choice| choice.weight).sum::<f32>() + SMALLEST_SUM;
            choices.iter_mut().for_each(|choice| choice.weight /= sum);
        }
        choices.iter_mut().for_each(|choice| choice.weight *= rule.scale);
        match choices.iter().find(|choice| !choice.weight.is_finite()) {
            Some(choice) => Err(NOT_FINITE(choice.expert)),
            None => Ok(()),
        }
    }
}

const NOT_FINITE: fn(usize) -> KernelError =
    |index| KernelError::NotFinite { what: "the scores of a router", index };

fn make_scores(kind: Scores, logits: &[f32], scores: &mut Vec<f32>) -> Result<(), KernelError> {
    if let Some(index) = logits.iter().position(|logit| logit.is_nan()) {
        return Err(NOT_FINITE(index));
    }
    scores.clear();
    match kind {
        Scores::Softmax => {
            let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            if !largest.is_finite() {
                return Err(NOT_FINITE(logits.iter().position(|&logit| logit == largest).unwrap_or(0)));
            }
            scores.extend(logits.iter().map(|logit| (logit - largest).exp()));
            let sum: f32 = scores.iter().sum();
            scores.iter_mut().for_each(|score| *score /= sum);
        }
        Scores::Sigmoid => scores.extend(logits.iter().map(|logit| 1.0 / (1.0 + (-logit).exp()))),
        Scores::SoftmaxOfChosen => scores.extend(logits),
    }
    Ok(())
}

/// Takes the experts of all but the best groups out of the choice.
fn keep_best_groups(rule: ExpertGroups, choosing: &mut [Option<f32>], groups: &mut Vec<Option<f32>>) {
    let size = choosing.len() / rule.count;
    groups.clear();
    groups.extend(choosing.chunks_exact(size).map(|group| {
        let (mut best, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
        for &score in group.iter().flatten() {
            (best, second) = if score > best { (score, best) } else { (best, second.max(score)) };
        }
        Some(if size == 1 { best } else { best + second })
    }));
    for _ in 0..rule.chosen {
        take_best(groups);
    }
    // Those that were taken take part.
    for (experts, group) in choosing.chunks_exact_mut(size).zip(groups) {
        if group.is_some() {
            experts.fill(None);
        }
    }
}

/// Takes the best score that is left, and says whose it is.
fn take_best(scores: &mut [Option<f32>]) -> Option<usize> {
    let mut best: Option<(usize, f32)> = None;
    for (index, score) in scores.iter().enumerate() {
        if let Some(score) = *score
            && best.is_none_or(|(_, best)| score > best)
        {
            best = Some((index, score));
        }
    }
    let (index, _) = best?;
    scores[index] = None;
    Some(index)
}

#[cfg(test)]
mod tests {
    use oscar_random::Random;

    use super::*;

    const RULE: RoutingRule = RoutingRule {
        experts: 8,
        top_k: 3,
        scores: Scores::Softmax,
        groups: None,
        normalise: true,
        scale: 1.0,
    };

    fn choose(
        rule: RoutingRule,
        logits: &[f32],
        correction: Option<&[f32]>,
    ) -> Result<Vec<Choice>, KernelError> {
        let mut choices = vec![Choice { expert: 0, weight: 0.0 }; rule.top_k];
        // Scratch of another row must not matter.
        let mut scratch = RoutingScratch {
            scores: vec![9.0; 3],
            choosing: vec![Some(9.0); 11],
            groups: vec![Some(9.0); 2],
        };
        Routing::new(rule)?.choose(logits, correction, &mut scratch, &mut choices)?;
        Ok(choices)
    }

    fn experts(choices: &[Choice]) -> Vec<usize> {
        choices.iter().map(|choice| choice.expert).collect()
    }

    fn close(got: f32, exact: f64) -> bool {
        (f64::from(got) - exact).abs() <= 1e-6 * exact.abs().max(1e-3)
    }

    #[test]
    fn softmax_weights_are_those_of_f64() {
        let mut random = Random::new(5);
        for normalise in [false, true] {
            let logits: Vec<f32> = (0..8).map(|_| 4.0 * random.signed()).collect();
            let choices = choose(RoutingRule { normalise, scale: 2.5, ..RULE }, &logits, None).unwrap();
            let mut order: Vec<usize> = (0..8).collect();
            order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
            assert_eq!(experts(&choices), order[..3]);
            let exp = |expert: usize| f64::from(logits[expert]).exp();
            let sum: f64 = if normalise { order[..3].iter() } else { order.iter() }.map(|&e| exp(e)).sum();
            for choice in choices {
                assert!(close(choice.weight, 2.5 * exp(choice.expert) / sum), "{choice:?}");
            }
        }
    }

    #[test]
    fn a_correction_chooses_and_does_not_weigh() {
        let rule = RoutingRule { scores: Scores::Sigmoid, normalise: false, ..RULE };
        let logits = [0.0, 1.0, 2.0, 3.0, -1.0, -2.0, 4.0, 0.5];
        assert_eq!(experts(&choose(rule, &logits, None).unwrap()), [6, 3, 2]);
        let mut correction = [0.0; 8];
        correction[5] = 3.0;
        correction[6] = -0.5;
        let choices = choose(rule, &logits, Some(&correction)).unwrap();
        assert_eq!(experts(&choices), [5, 3, 2]);
        assert!(close(choices[0].weight, 1.0 / (1.0 + 2f64.exp())), "{choices:?}");
    }

    #[test]
    fn groups_are_as_good_as_their_two_best_experts() {
        // The best expert of all is alone in its group.
        let groups = Some(ExpertGroups { count: 4, chosen: 2 });
        let rule = RoutingRule { top_k: 3, scores: Scores::Sigmoid, groups, ..RULE };
        let logits = [9.0, -9.0, 1.0, 1.5, 2.0, 0.0, -3.0, -3.0];
        assert_eq!(experts(&choose(rule, &logits, None).unwrap()), [4, 3, 2]);
        // Corrections count for groups, and negative scores are no worse than groups that do not take part.
        let correction = [-2.0; 8];
        assert_eq!(experts(&choose(rule, &logits, Some(&correction)).unwrap()), [4, 3, 2]);
        let single = RoutingRule { groups: Some(ExpertGroups { count: 8, chosen: 3 }), ..rule };
        assert_eq!(experts(&choose(single, &logits, None).unwrap()), [0, 4, 3]);
    }

    #[test]
    fn the_softmax_of_those_chosen_ignores_the_others() {
        let rule = RoutingRule { scores: Scores::SoftmaxOfChosen, normalise: false, top_k: 2, ..RULE };
        let logits = [-5.0, f32::NEG_INFINITY, 3.0, 2.0, 1.9, 0.0, -1.0, -2.0];
        let choices = choose(rule, &logits, None).unwrap();
        assert_eq!(experts(&choices), [2, 3]);
        assert!(close(choices[0].weight, 1.0 / (1.0 + (-1f64).exp())), "{choices:?}");
        assert!((choices[0].weight + choices[1].weight - 1.0).abs() < 1e-6);
    }

    #[test]
    fn between_equals_the_lower_number_wins() {
        for scores in [Scores::Softmax, Scores::Sigmoid, Scores::SoftmaxOfChosen] {
            let choices = choose(RoutingRule { scores, ..RULE }, &[1.0; 8], None).unwrap();
            assert_eq!(experts(&choices), [0, 1, 2]);
            assert!(choices.iter().all(|choice| close(choice.weight, 1.0 / 3.0)), "{choices:?}");
        }
        let groups = Some(ExpertGroups { count: 4, chosen: 2 });
        let choices = choose(RoutingRule { groups, ..RULE }, &[1.0; 8], None).unwrap();
        assert_eq!(experts(&choices), [0, 1, 2]);
    }

    #[test]
    fn what_is_not_a_number_is_an_error() {
        for scores in [Scores::Softmax, Scores::Sigmoid, Scores::SoftmaxOfChosen] {
            let rule = RoutingRule { scores, ..RULE };
            let mut logits = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
            logits[4] = f32::NAN;
            let error = choose(rule, &logits, None).unwrap_err();
            assert!(matches!(error, KernelError::NotFinite { index: 4, .. }), "{error}");
            assert!(choose(rule, &[f32::NAN; 8], None).is_err());
        }
        for all in [f32::INFINITY, f32::NEG_INFINITY] {
            assert!(choose(RULE, &[all; 8], None).is_err());
            let rule = RoutingRule { scores: Scores::SoftmaxOfChosen, ..RULE };
            assert!(choose(rule, &[all; 8], None).is_err());
        }
    }

    #[test]
    fn infinities_that_leave_scores_are_numbers() {
        let mut logits = [0.0; 8];
        logits[1] = f32::NEG_INFINITY;
        let choices = choose(RULE, &logits, None).unwrap();
        assert_eq!(experts(&choices), [0, 2, 3]);
        logits[2] = f32::INFINITY;
        assert!(choose(RULE, &logits, None).is_err(), "softmax of infinity has no other scores");
        let rule = RoutingRule { scores: Scores::Sigmoid, ..RULE };
        let choices = choose(rule, &logits, None).unwrap();
        assert_eq!(experts(&choices), [2, 0, 3]);
        assert!(close(choices[0].weight, 0.5), "{choices:?}");
        // Nothing to normalise by: nothing comes of it, and nothing fails.
        let choices = choose(rule, &[f32::NEG_INFINITY; 8], None).unwrap();
        assert!(choices.iter().all(|choice| choice.weight == 0.0), "{choices:?}");
    }

    #[test]
    fn rules_that_cannot_be_followed_are_refused() {
        let groups = |count, chosen| Some(ExpertGroups { count, chosen });
        for rule in [
            RoutingRule { experts: 0, ..RULE },
            RoutingRule { top_k: 0, ..RULE },
            RoutingRule { top_k: 9, ..RULE },
            RoutingRule { groups: groups(0, 0), ..RULE },
            RoutingRule { groups: groups(3, 1), ..RULE },
            RoutingRule { groups: groups(4, 0), ..RULE },
            RoutingRule { groups: groups(4, 5), ..RULE },
            RoutingRule { groups: groups(4, 1), ..RULE },
            RoutingRule { scale: f32::NAN, ..RULE },
        ] {
            assert!(Routing::new(rule).is_err(), "{rule:?}");
        }
        assert!(Routing::new(RoutingRule { groups: groups(4, 2), ..RULE }).is_ok());
    }
}
