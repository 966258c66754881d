//! A small seeded generator: the same seed gives the same text on every machine.

/// SplitMix64. Not for secrets.
#[derive(Clone, Debug)]
pub struct Random {
    state: u64,
}

impl Random {
    /// A generator whose choices depend on `seed` alone.
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

    /// One of `items`, which must not be empty.
    pub fn choose<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len())]
    }

    /// A number in 0..1.
    pub fn fraction(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Puts `items` into a random order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

/// One seed out of several numbers, so that each prompt of a grid has a seed of its own.
pub fn mix(parts: &[u64]) -> u64 {
    parts.iter().fold(0x0c5a_12c0_de5e_ed00, |seed, &part| Random::new(seed ^ part).next_u64())
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

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
    fn mixed_seeds_differ_in_every_part_and_order() {
        let seeds: HashSet<u64> =
            (0..10).flat_map(|a| (0..10).map(move |b| mix(&[a, b]))).chain([mix(&[1]), mix(&[])]).collect();
        assert_eq!(seeds.len(), 102);
    }
}
