//! Uniform draws that depend on the seed and the index of the token only.
//!
//! A stateless generator makes a seeded answer independent of how steps are batched or replayed.

use std::hash::{BuildHasher, RandomState};

/// The uniform draw in `[0, 1)` for token `index` of an answer with this seed.
pub fn draw(seed: u64, index: u64) -> f32 {
    // Two rounds of SplitMix64, so that neighbouring seeds and indices have nothing in common.
    let bits = mix(mix(seed).wrapping_add(index));
    (bits >> 40) as f32 / (1u64 << 24) as f32
}

fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A seed nobody chose. Kept to 53 bits so that it survives JSON.
pub(crate) fn fresh_seed() -> u64 {
    RandomState::new().hash_one(std::process::id()) >> 11
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_are_uniform_enough() {
        let mut buckets = [0usize; 10];
        for index in 0..10_000 {
            let value = draw(7, index);
            assert!((0.0..1.0).contains(&value));
            buckets[(value * 10.0) as usize] += 1;
        }
        assert!(buckets.iter().all(|&count| (850..1150).contains(&count)), "{buckets:?}");
    }

    #[test]
    fn draws_repeat_and_differ_by_seed() {
        assert_eq!(draw(1, 5), draw(1, 5));
        assert_ne!(draw(1, 5), draw(2, 5));
        assert_ne!(draw(1, 5), draw(1, 6));
    }
}
