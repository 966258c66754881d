//! Seeded random numbers.

/// A SplitMix64 generator. The same seed gives the same numbers on every machine.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A generator for a seed; neighbouring seeds have nothing in common.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `limit`, which must not be 0.
    pub fn below(&mut self, limit: usize) -> usize {
        (self.bits() % limit as u64) as usize
    }

    /// A number from `least` to `most`, both included.
    pub fn between(&mut self, least: usize, most: usize) -> usize {
        least + self.below(most - least + 1)
    }

    /// True once in `count` calls, on average.
    pub fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    /// One of some items, of which there must be at least one.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len())]
    }

    /// A number from 0 to 1, 1 excluded.
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1_u64 << 24) as f32
    }

    /// A number of the normal distribution with mean 0 and variance 1.
    pub fn normal(&mut self) -> f32 {
        let radius = (-2.0 * (1.0 - f64::from(self.unit())).ln()).sqrt();
        (radius * (std::f64::consts::TAU * f64::from(self.unit())).cos()) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_repeat_and_are_spread() {
        let draw = |seed| {
            let mut random = Random::new(seed);
            (0..1000).map(|_| random.below(10)).collect::<Vec<_>>()
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
        for digit in 0..10 {
            let count = draw(1).into_iter().filter(|&drawn| drawn == digit).count();
            assert!((60..140).contains(&count), "{digit}: {count}");
        }
    }

    #[test]
    fn normal_numbers_have_their_moments() {
        let mut random = Random::new(7);
        let numbers: Vec<f64> = (0..20_000).map(|_| f64::from(random.normal())).collect();
        let mean = numbers.iter().sum::<f64>() / 20_000.0;
        let variance = numbers.iter().map(|number| number * number).sum::<f64>() / 20_000.0;
        assert!(mean.abs() < 0.03 && (variance - 1.0).abs() < 0.05, "{mean} {variance}");
    }
}
