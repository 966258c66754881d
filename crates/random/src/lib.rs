//! Seeded random numbers: the same seed gives the same numbers on every machine, so a failed test or a generated text is
//! repeated by its seed. For tests, measurements and texts; not for secrets.

/// A SplitMix64 generator.
///
/// The texts and needles of `oscar eval` are made with it, so its numbers must not change.
#[derive(Clone, Debug)]
pub struct Random {
    state: u64,
}

impl Random {
    /// A generator whose numbers depend on `seed` alone; neighbouring seeds have nothing in common.
    pub fn new(seed: u64) -> Random {
        Random { state: seed }
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A whole number below `bound`, which must not be 0. The product keeps the bias below 2⁻⁵⁰ for our bounds.
    pub fn below(&mut self, bound: usize) -> usize {
        assert!(bound > 0, "nothing to choose from");
        ((u128::from(self.next_u64()) * bound as u128) >> 64) as usize
    }

    /// A whole number from `least` to `most`, both included.
    pub fn between(&mut self, least: usize, most: usize) -> usize {
        least + self.below(most - least + 1)
    }

    /// True once in `count` calls, on average.
    pub fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    /// One of `items`, which must not be empty.
    pub fn choose<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len())]
    }

    /// Puts `items` into a random order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }

    /// A number from 0 to 1, 1 excluded.
    pub fn fraction(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A number from -1 to 1, 1 excluded, with all 24 bits of an `f32`.
    pub fn signed(&mut self) -> f32 {
        (self.next_u64() >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    }

    /// Numbers from -1 to 1, 1 excluded.
    pub fn signed_vec(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.signed()).collect()
    }

    /// A number of the normal distribution with mean 0 and variance 1.
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.fraction()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.fraction()).cos()
    }

    /// Numbers of the normal distribution with mean 0 and variance 1.
    pub fn normal_vec(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.normal() as f32).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_numbers_are_those_of_the_published_generator() {
        let mut random = Random::new(1_234_567);
        assert_eq!(random.next_u64(), 6_457_827_717_110_365_317);
        assert_eq!(random.next_u64(), 3_203_168_211_198_807_973);
    }

    #[test]
    fn choices_cover_their_range_evenly() {
        let mut random = Random::new(7);
        let mut counts = [0usize; 6];
        for _ in 0..6000 {
            counts[random.below(6)] += 1;
        }
        assert!(counts.iter().all(|&count| (800..1200).contains(&count)), "{counts:?}");
        assert!((0..1000).all(|_| (0.0..1.0).contains(&random.fraction())));
        assert!(random.signed_vec(1000).iter().all(|number| (-1.0..1.0).contains(number)));
        assert!((0..1000).all(|_| (3..=5).contains(&random.between(3, 5))));
    }

    #[test]
    fn a_shuffle_keeps_everything() {
        let mut items: Vec<usize> = (0..50).collect();
        Random::new(3).shuffle(&mut items);
        assert_ne!(items, (0..50).collect::<Vec<_>>());
        items.sort_unstable();
        assert_eq!(items, (0..50).collect::<Vec<_>>());
    }

    #[test]
    fn normal_numbers_have_their_moments() {
        let numbers = Random::new(7).normal_vec(20_000);
        let mean = numbers.iter().map(|&number| f64::from(number)).sum::<f64>() / 20_000.0;
        let variance = numbers.iter().map(|&number| f64::from(number).powi(2)).sum::<f64>() / 20_000.0;
        assert!(mean.abs() < 0.03 && (variance - 1.0).abs() < 0.05, "{mean} {variance}");
    }
}
