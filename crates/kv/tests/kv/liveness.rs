//! A request that is said to fit fits, whatever happened before, once it is alone.

use crate::support::{Cache, Open, text};
use oscar_kv::{
    HostPools, LedgerOptions, PAGE_TOKENS, PageWindows, PrefillMode, PrefixKey, SealedPools, TailPolicy, Tier,
};
use oscar_random::Random;

const TIERS: [Tier; 3] = [Tier::Sealed, Tier::High, Tier::Exact];

#[test]
fn what_could_ever_fit_fits_when_it_is_alone() {
    for seed in 0..3000_u64 {
        let mut random = Random::new(seed);
        let windows = PageWindows { sink: random.below(3), recent: random.below(4) };
        let options = LedgerOptions {
            windows,
            exact_pages: 2 + random.below(14),
            sealed: (random.below(5) > 0).then(|| SealedPools {
                pages: 1 + random.below(24),
                high_pages: 1 + random.below(24),
                scratch_pages: random.below(16),
            }),
            prefix_tree: random.below(8) > 0,
            tail: [TailPolicy::Recompute, TailPolicy::Sealed, TailPolicy::Exact][random.below(3)],
            host: HostPools { exact_pages: random.below(8), sealed_pages: random.below(16) },
        };
        let mut cache = Cache::new(options);
        let fits = |tokens: &usize| TIERS.iter().all(|&tier| cache.ledger.could_ever_fit(tier, *tokens));
        let most = (1..40 * PAGE_TOKENS).rev().find(fits).expect("a token always fits");
        let target = 1 + random.below(most);
        // The same text for all, so that there are copies of everything.
        let all = text(0, target);
        let mut open: Vec<Open> = Vec::new();
        for _ in 0..random.below(60) {
            if open.len() < 3 && random.below(3) == 0 {
                let (key, prompt) = (key(&mut random), &all[..1 + random.below(target)]);
                if random.below(2) == 0 {
                    cache.restore(key, prompt);
                }
                open.push(cache.open(key, prompt));
                continue;
            }
            if open.is_empty() {
                continue;
            }
            let pick = random.below(open.len());
            grow(&mut cache, &mut open[pick], &all, &mut random).ok();
            if random.below(4) == 0 {
                let mut open = open.swap_remove(pick);
                if random.below(3) > 0 {
                    cache.insert(&mut open, true);
                }
                cache.close(open);
            }
        }
        // One of those that are open goes on alone, or a new one begins.
        while open.len() > 1 {
            let other = random.below(open.len());
            cache.close(open.swap_remove(other));
        }
        let mut last = open.pop().unwrap_or_else(|| cache.open(key(&mut random), &all));
        while last.sequence.len() < target {
            if let Err(shortage) = grow(&mut cache, &mut last, &all, &mut random) {
                let length = last.sequence.len();
                panic!("{shortage} at {length} of {target} tokens, seed {seed}, {options:?}");
            }
            if random.below(6) == 0 {
                cache.insert(&mut last, true);
                cache.close(last);
                last = cache.open(key(&mut random), &all);
            }
        }
        cache.audit(&[&last]);
        cache.close(last);
        cache.ledger.flush();
        cache.assert_empty();
    }
}

fn key(random: &mut Random) -> PrefixKey {
    PrefixKey { salt: 0, tier: *random.choose(&TIERS) }
}

/// Some tokens more, by prefill or by decoding, and now and then something for the tree.
fn grow(
    cache: &mut Cache,
    open: &mut Open,
    all: &[u32],
    random: &mut Random,
) -> Result<(), oscar_kv::Shortage> {
    let rest = &all[open.sequence.len()..];
    let count = match random.below(4) {
        0 => rest.len(),
        1 => 1 + random.below(PAGE_TOKENS * 2),
        _ => 1 + random.below(PAGE_TOKENS * 6),
    }
    .min(rest.len());
    match random.below(3) {
        0 => cache.extend(open, &rest[..count], PrefillMode::Exact)?,
        1 => cache.extend(open, &rest[..count], PrefillMode::Uniform)?,
        _ => rest[..count].iter().try_for_each(|&token| cache.append(open, token))?,
    }
    if random.below(3) == 0 {
        cache.insert(open, random.below(2) == 0);
    }
    Ok(())
}
