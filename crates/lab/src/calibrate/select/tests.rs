use oscar_random::Random;

use super::*;

/// Numbers in [-1, 1).
fn numbers(len: usize, seed: u64) -> Vec<f32> {
    let mut random = Random::new(seed);
    (0..len).map(|_| (2.0 * random.fraction() - 1.0) as f32).collect()
}

const DIM: usize = 32;
const TOKENS: usize = 200;

fn queries() -> Vec<HeldOutQuery> {
    [(100, 0), (150, 1), (199, 0)]
        .into_iter()
        .map(|(position, member)| HeldOutQuery {
            position,
            member,
            row: numbers(DIM, position as u64).iter().map(|x| 3.0 * x).collect(),
        })
        .collect()
}

fn with_trial(windows: Windows, check: impl Fn(&RuleTrial<'_>)) {
    let rotation = HeadTransform::new(None, &oscar_codec::hadamard::matrix(DIM)).unwrap();
    with_sinks(windows, &[], &rotation, check);
}

fn with_sinks(windows: Windows, sinks: &[f32], transform: &HeadTransform, check: impl Fn(&RuleTrial<'_>)) {
    let (keys, values) = (numbers(TOKENS * DIM, 1), numbers(TOKENS * DIM, 2));
    let queries = queries();
    let metrics = [SquareMatrix::identity(DIM), SquareMatrix::identity(DIM)];
    let held_out = HeldOut {
        first: 0,
        keys: &keys,
        values: &values,
        queries: &queries,
        output_metrics: &metrics,
        scale: 0.3,
        sinks,
        windows,
    };
    check(&RuleTrial::new(Isa::detect(), &held_out, transform, transform).unwrap());
}

/// Centring changes neither what a sink leaves to tokens nor what comes of it.
#[test]
fn a_sink_takes_part_in_the_softmax() {
    let mean = numbers(DIM, 5).iter().map(|x| 1.5 * x).collect();
    let transform = HeadTransform::new(Some(mean), &oscar_codec::hadamard::matrix(DIM)).unwrap();
    let sinks = [6.0, 6.5];
    with_sinks(Windows { sink: 4, recent: 16 }, &sinks, &transform, |trial| {
        let held_out = trial.held_out;
        let mut length = 0.0;
        for (index, query) in held_out.queries.iter().enumerate() {
            let row = |rows: &[f32], token: usize| rows[token * DIM..][..DIM].to_vec();
            let weight = |token: usize| -> f64 {
                let key = row(held_out.keys, token);
                let dot: f32 = query.row.iter().zip(key).map(|(q, k)| q * k).sum();
                f64::from(0.3 * dot).exp()
            };
            let of_tokens: f64 = (0..=query.position).map(weight).sum();
            let sum = of_tokens + f64::from(sinks[query.member]).exp();
            let got: f32 = trial.weights[index * TOKENS..][..TOKENS].iter().sum();
            let want = of_tokens / sum;
            assert!((0.2..0.9).contains(&want), "{want}");
            assert!((f64::from(got) - want).abs() < 0.01, "{got} for {want}");
            let mut output = vec![0.0; DIM];
            for token in 0..=query.position {
                let value = row(held_out.values, token);
                output.iter_mut().zip(value).for_each(|(o, v)| *o += weight(token) / sum * f64::from(v));
            }
            length += output.iter().map(|x| x * x).sum::<f64>();
        }
        assert!((trial.energy / length - 1.0).abs() < 0.02, "{} for {length}", trial.energy);
    });
}

#[test]
fn attention_in_rotated_coordinates_is_attention() {
    with_trial(Windows { sink: 4, recent: 16 }, |trial| {
        let held_out = trial.held_out;
        for (index, query) in held_out.queries.iter().enumerate() {
            for token in [0, 50, 99] {
                let key = &held_out.keys[token * DIM..][..DIM];
                let dot: f32 = query.row.iter().zip(key).map(|(q, k)| q * k).sum();
                let got = trial.logits[index * TOKENS + token];
                assert!((got - 0.3 * dot).abs() < 0.02, "{got} for {}", 0.3 * dot);
            }
            let row = &trial.weights[index * TOKENS..][..TOKENS];
            assert!((row.iter().sum::<f32>() - 1.0).abs() < 1e-4);
            assert!(row[query.position + 1..].iter().all(|&weight| weight == 0.0));
        }
        // The identity as metric: energy is the squared length of the outputs.
        let outputs = trial.outputs(&trial.weights, &trial.values);
        let length: f64 = outputs.iter().map(|&x| f64::from(x).powi(2)).sum();
        assert!((trial.energy / length - 1.0).abs() < 1e-4);
    });
}

#[test]
fn the_choice_is_the_best_of_what_was_tried() {
    with_trial(Windows { sink: 4, recent: 16 }, |trial| {
        let (key, value) = trial.choose(&CANDIDATES).unwrap();
        let choice = trial.measure(KeyCodes::Scalar(key), value).unwrap();
        for rule in CANDIDATES {
            let score = |rule| {
                trial.key_error(KeyCodes::Scalar(rule)).map(|(error, shrinkage)| error + shrinkage.powi(2))
            };
            assert!(score(key).unwrap() <= score(rule).unwrap() + 1e-12, "{rule}");
            assert!(choice.value_error <= trial.value_error(rule).unwrap() + 1e-12, "{rule}");
        }
        assert!(choice.output_error > 0.0 && choice.output_error < 1.0, "{choice:?}");
        assert!(choice.logit_error > 0.0);
        // Plain min-max is worse than the best.
        let plain = trial.measure(KeyCodes::Scalar(Rule::MIN_MAX), Rule::MIN_MAX).unwrap();
        assert!(plain.output_error > choice.output_error);
    });
}

#[test]
fn shrunk_logits_are_noticed() {
    with_trial(Windows { sink: 4, recent: 16 }, |trial| {
        let shrunk: Vec<f32> = trial.logits.iter().map(|logit| 0.75 * logit + 3.0).collect();
        assert!((trial.shrinkage(&shrunk) - 0.25).abs() < 1e-4, "{}", trial.shrinkage(&shrunk));
        assert!(trial.shrinkage(&trial.logits).abs() < 1e-9);
        // Scales of the search are unbiased, clipping is not.
        let [search, clipped] =
            [Rule::Search, Rule::Clip(0.5)].map(|rule| trial.key_error(KeyCodes::Scalar(rule)).unwrap().1);
        assert!(search.abs() < 0.05 && clipped > 0.2, "{search} {clipped}");
    });
}

#[test]
fn windows_that_cover_everything_leave_no_error() {
    with_trial(Windows { sink: 100, recent: 100 }, |trial| {
        let choice = trial.measure(KeyCodes::Scalar(Rule::MIN_MAX), Rule::MIN_MAX).unwrap();
        assert!(choice.output_error < 1e-9, "{choice:?}");
        assert_eq!(choice.logit_error, 0.0);
    });
}
