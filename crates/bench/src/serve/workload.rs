//! Prompts of which some begin alike, and the times at which they come; the same seed gives the same of both.

use std::time::Duration;

use oscar_random::Random;

const WORDS: [&str; 32] = [
    "anchor", "basket", "candle", "desert", "engine", "forest", "guitar", "hammer", "island", "jacket",
    "kitchen", "ladder", "market", "needle", "ocean", "pencil", "quilt", "rocket", "summer", "ticket",
    "umbrella", "village", "wagon", "yard", "zebra", "apple", "bottle", "castle", "dinner", "evening",
    "feather", "gallery",
];

/// The prompts of a measurement.
#[derive(Clone, Copy, Debug)]
pub struct Workload {
    /// Number of texts that several requests begin with.
    pub prefixes: usize,
    /// Words of each of these texts.
    pub prefix_words: usize,
    /// Words of each prompt after that text.
    pub own_words: usize,
    /// Share of requests that begin with one of the texts; the others are their own from the first word.
    pub shared: f64,
    /// Tokens of each answer.
    pub output_tokens: usize,
    /// Seed of prompts and arrivals.
    pub seed: u64,
}

/// How the times are chosen at which requests are sent.
#[derive(Clone, Copy, Debug)]
pub enum Arrival {
    /// Requests come at random times, so many a second, however long answers take.
    Poisson {
        /// The number of requests per second, on average.
        rate: f64,
    },
    /// Each client sends its next request when it has the answer to the one before.
    Closed {
        /// The number of clients that wait for their answers.
        clients: usize,
    },
}

impl Workload {
    /// The prompts of a run.
    pub(super) fn prompts(&self, requests: usize) -> Vec<String> {
        let prefixes: Vec<String> = (0..self.prefixes.max(1) as u64)
            .map(|number| words(&mut Random::new(self.seed ^ (number << 32)), self.prefix_words))
            .collect();
        let mut random = Random::new(self.seed.wrapping_add(1));
        let prompt = |_| {
            let prefix = if random.fraction() < self.shared {
                prefixes[(random.fraction() * prefixes.len() as f64) as usize].clone()
            } else {
                words(&mut random, self.prefix_words)
            };
            format!("{prefix} {}", words(&mut random, self.own_words))
        };
        (0..requests).map(prompt).collect()
    }

    /// The same workload with other texts, which have nothing in common with these.
    pub(super) fn unrelated(&self) -> Workload {
        Workload { seed: !self.seed, ..*self }
    }

    /// Times from one arrival to the next.
    pub(super) fn arrival_intervals(&self, rate: f64) -> impl Iterator<Item = Duration> {
        let mut random = Random::new(self.seed.wrapping_add(2));
        std::iter::from_fn(move || Some(Duration::from_secs_f64(-(1.0 - random.fraction()).ln() / rate)))
    }
}

fn words(random: &mut Random, count: usize) -> String {
    let words: Vec<&str> = (0..count).map(|_| WORDS[(random.next_u64() % 32) as usize]).collect();
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIX: Workload =
        Workload { prefixes: 3, prefix_words: 20, own_words: 5, shared: 0.75, output_tokens: 8, seed: 7 };

    fn beginning(prompt: &str) -> String {
        prompt.split(' ').take(20).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn prompts_begin_alike_as_often_as_asked() {
        let prompts = MIX.prompts(400);
        assert!(prompts.iter().all(|prompt| prompt.split(' ').count() == 25));
        let mut counts = std::collections::HashMap::new();
        for prompt in &prompts {
            *counts.entry(beginning(prompt)).or_insert(0) += 1;
        }
        let alike: Vec<i32> = counts.into_values().filter(|&count| count > 1).collect();
        assert_eq!(alike.len(), 3, "{alike:?}");
        assert!((270..330).contains(&alike.iter().sum::<i32>()), "{alike:?}");
        let alone = Workload { shared: 0.0, ..MIX }.prompts(50);
        assert_eq!(
            alone.iter().map(|prompt| beginning(prompt)).collect::<std::collections::HashSet<_>>().len(),
            50
        );
    }

    #[test]
    fn the_seed_decides_everything() {
        assert_eq!(MIX.prompts(9), MIX.prompts(9));
        assert_ne!(MIX.prompts(9), Workload { seed: 8, ..MIX }.prompts(9));
        let known = MIX.prompts(50);
        for prompt in MIX.unrelated().prompts(50) {
            assert!(known.iter().all(|other| beginning(other) != beginning(&prompt)));
        }
    }

    #[test]
    fn arrivals_have_the_rate_that_was_asked_for() {
        let gaps: Vec<f64> = MIX.arrival_intervals(50.0).take(4000).map(|gap| gap.as_secs_f64()).collect();
        let mean = gaps.iter().sum::<f64>() / 4000.0;
        assert!((mean * 50.0 - 1.0).abs() < 0.05, "{mean}");
        // Exponential: the standard deviation is the mean.
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / 4000.0;
        assert!((variance.sqrt() / mean - 1.0).abs() < 0.1, "{variance}");
        assert!(MIX.arrival_intervals(50.0).take(20).eq(MIX.arrival_intervals(50.0).take(20)));
    }
}
