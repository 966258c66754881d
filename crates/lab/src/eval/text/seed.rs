//! Seeds for the parts of a generated text.

use oscar_random::Random;

/// One seed out of several numbers, so that each prompt of a grid has a seed of its own.
pub fn mix(parts: &[u64]) -> u64 {
    parts.iter().fold(0x0c5a_12c0_de5e_ed00, |seed, &part| Random::new(seed ^ part).next_u64())
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn mixed_seeds_differ_in_every_part_and_order() {
        let seeds: HashSet<u64> =
            (0..10).flat_map(|a| (0..10).map(move |b| mix(&[a, b]))).chain([mix(&[1]), mix(&[])]).collect();
        assert_eq!(seeds.len(), 102);
    }
}
