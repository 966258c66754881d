//! How much of a prefix hit a new request takes over.
//!
//! The tree has sealed pages of everything and bf16 pages ("warm" copies) of some. A request that continues after a
//! hit wants the window before its first new row in bf16; where that is missing, [`TailPolicy`] decides.

use oscar_codec::PageWindows;

/// What a prefix hit does about a window that the tree does not have in bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum TailPolicy {
    /// The part of the window that is missing is computed again: at most R pages.
    #[default]
    Recompute,
    /// The part of the window that is missing is read sealed.
    Sealed,
    /// Only a hit whose whole window is there counts, so that every row is a function of the tokens alone.
    Exact,
}

/// What a new sequence takes of a prefix hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PrefixReuse {
    /// Full pages that are taken.
    pub(crate) pages: usize,
    /// First page that is taken in bf16 too.
    pub(crate) warm_from: usize,
    /// Pages below can only be read sealed although a window wants them; 0 if no window does.
    pub(crate) sealed_until: usize,
}

/// Decides about a hit of `matched` full pages, of which `warm` says whether they are there in bf16. Behind the sink
/// [`TailPolicy::Exact`] takes over as many pages as `can_resume_at` allows.
pub(crate) fn reuse(
    policy: TailPolicy,
    windows: PageWindows,
    matched: usize,
    warm: impl Fn(usize) -> bool,
    can_resume_at: impl Fn(usize) -> bool,
) -> PrefixReuse {
    // First page that a row after so many pages reads in bf16, sinks aside.
    let window = |pages: usize| windows.history(pages, usize::MAX, 0).end;
    let pages = match policy {
        TailPolicy::Sealed => matched,
        // Rows after the hit get their whole window: what is there, and from the first gap on what is computed again.
        TailPolicy::Recompute => (window(matched)..matched).find(|&page| !warm(page)).unwrap_or(matched),
        TailPolicy::Exact => {
            let mut whole = matched.min(windows.sink);
            let mut warm_since = windows.sink;
            for page in windows.sink..matched {
                if !warm(page) {
                    warm_since = page + 1;
                }
                if warm_since <= window(page + 1) && can_resume_at(page + 1) {
                    whole = page + 1;
                }
            }
            whole
        }
    };
    let first_wanted = window(pages).min(pages);
    let missing = (first_wanted..pages).rev().find(|&page| !warm(page));
    PrefixReuse {
        pages,
        warm_from: missing.map_or(first_wanted, |page| page + 1),
        sealed_until: missing.map_or(0, |page| page + 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOWS: PageWindows = PageWindows { sink: 1, recent: 4 };

    fn decide(policy: TailPolicy, matched: usize, warm: &[usize]) -> (usize, usize, usize) {
        let reuse = reuse(policy, WINDOWS, matched, |page| warm.contains(&page), |_| true);
        (reuse.pages, reuse.warm_from, reuse.sealed_until)
    }

    #[test]
    fn a_whole_warm_window_is_taken_by_every_policy() {
        for policy in [TailPolicy::Recompute, TailPolicy::Sealed, TailPolicy::Exact] {
            assert_eq!(decide(policy, 10, &[6, 7, 8, 9]), (10, 6, 0), "{policy:?}");
            // The window of a short hit begins after the sink.
            assert_eq!(decide(policy, 3, &[1, 2]), (3, 1, 0), "{policy:?}");
            assert_eq!(decide(policy, 1, &[]), (1, 1, 0), "{policy:?}");
            assert_eq!(decide(policy, 0, &[]), (0, 0, 0), "{policy:?}");
        }
    }

    #[test]
    fn a_cold_window_is_computed_again_read_sealed_or_not_a_hit() {
        assert_eq!(decide(TailPolicy::Recompute, 10, &[]), (6, 6, 6));
        assert_eq!(decide(TailPolicy::Recompute, 3, &[]), (1, 1, 0));
        assert_eq!(decide(TailPolicy::Sealed, 10, &[]), (10, 10, 10));
        assert_eq!(decide(TailPolicy::Exact, 10, &[]), (1, 1, 0));
    }

    #[test]
    fn half_a_window_saves_half_the_work() {
        // 8 and 9 are missing: computed again; they read 6 and 7 in bf16, 4 and 5 sealed.
        assert_eq!(decide(TailPolicy::Recompute, 10, &[6, 7]), (8, 6, 6));
        // 6 is missing, so everything from 6 on is computed again, whatever else is there.
        assert_eq!(decide(TailPolicy::Recompute, 10, &[7, 8, 9]), (6, 6, 6));
        assert_eq!(decide(TailPolicy::Sealed, 10, &[7, 9]), (10, 9, 9));
        // An older window that is whole.
        assert_eq!(decide(TailPolicy::Exact, 10, &[2, 3, 4, 5, 8, 9]), (6, 2, 0));
    }

    #[test]
    fn a_computation_resumes_where_it_can() {
        let all: Vec<usize> = (1..10).collect();
        let resume = |pages: &[usize], warm: &[usize]| {
            let can_resume_at = |page: usize| pages.contains(&page);
            reuse(TailPolicy::Exact, WINDOWS, 10, |page| warm.contains(&page), can_resume_at).pages
        };
        assert_eq!(resume(&[10], &all), 10);
        assert_eq!(resume(&[3, 7], &all), 7);
        // The window before 7 has a gap.
        assert_eq!(resume(&[3, 7], &[1, 2, 3, 4, 6]), 3);
        // The sink is the same for all.
        assert_eq!(resume(&[], &all), 1);
        assert_eq!(resume(&[7], &[8, 9]), 1);
    }

    /// Every set of warm pages of a small hit against the sentences above.
    #[test]
    fn every_case_keeps_its_promise() {
        for (sink, recent) in [(0, 0), (1, 0), (0, 2), (1, 2), (2, 1), (0, 4), (2, 9)] {
            let windows = PageWindows { sink, recent };
            for matched in 0..8_usize {
                for warm in 0..1_u32 << matched {
                    let warm = |page: usize| page < sink || warm >> page & 1 == 1;
                    let wanted =
                        |pages: usize| (0..pages).filter(move |&page| page >= sink && page + recent >= pages);
                    let whole = |pages: usize| wanted(pages).all(warm);
                    for policy in [TailPolicy::Recompute, TailPolicy::Sealed, TailPolicy::Exact] {
                        let reuse = reuse(policy, windows, matched, warm, |_| true);
                        assert!(reuse.pages <= matched);
                        // What is promised in bf16 is there, and nothing more could be promised.
                        assert!((reuse.warm_from..reuse.pages).all(warm));
                        if reuse.sealed_until > 0 {
                            assert!(!warm(reuse.sealed_until - 1) && reuse.sealed_until == reuse.warm_from);
                            assert!(wanted(reuse.pages).any(|page| page == reuse.sealed_until - 1));
                        } else {
                            assert!(whole(reuse.pages));
                        }
                        let best = match policy {
                            TailPolicy::Sealed => matched,
                            TailPolicy::Exact => {
                                (0..=matched).rev().find(|&pages| pages <= sink || whole(pages)).unwrap()
                            }
                            TailPolicy::Recompute => (0..=matched)
                                .rev()
                                .find(|&pages| wanted(matched).all(|page| warm(page) || page >= pages))
                                .unwrap(),
                        };
                        assert_eq!(reuse.pages, best, "{policy:?} {windows:?} {matched}");
                    }
                }
            }
        }
    }
}
