//! Random operations on small pools, checked after every one against naive counts.
//!
//! `OSCAR_MODEL_CHECK_SEED` repeats a run, `OSCAR_MODEL_CHECK_OPERATIONS` makes it longer.

use crate::support::follower::Follower;
use crate::support::{Cache, Flight, Open, mix};
use oscar_kv::{
    HostPools, LedgerOptions, PAGE_TOKENS, PageWindows, PoolKind, PrefillMode, PrefixKey, SealedPools,
    Shortage, TailPolicy, Tier, TreeEntry,
};
use oscar_random::Random;

/// Operations per cache.
const EPISODE: usize = 1000;
/// Operations of one test; there are two.
const OPERATIONS: usize = 700_000;

/// Says how to repeat what failed.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("to repeat: OSCAR_MODEL_CHECK_SEED={}", self.0);
        }
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().expect("a number"))
}

#[derive(Default, Debug)]
struct Seen {
    shortages: [usize; 4],
    cached: usize,
    copies: usize,
    forks: usize,
    abandoned: usize,
    evicted: u64,
    tails: usize,
    early: usize,
    cut: usize,
    exact_hits: usize,
    high_hits: usize,
    demoted: usize,
    restored: u64,
}

struct Episode {
    random: Random,
    cache: Cache,
    options: LedgerOptions,
    open: Vec<Open>,
    /// Texts that were computed before, to be asked for again.
    past: Vec<Vec<u32>>,
    follower: Follower,
    seen: Seen,
}

impl Episode {
    fn new(seed: u64) -> Episode {
        let mut random = Random::new(seed);
        let windows =
            PageWindows { sink: *random.choose(&[0, 1, 1, 2, 4]), recent: *random.choose(&[0, 1, 2, 2, 4]) };
        let options = LedgerOptions {
            windows,
            exact_pages: *random.choose(&[2, 8, 14, 20, 32, 60]) + random.below(8),
            sealed: (!random.one_in(5)).then(|| SealedPools {
                pages: *random.choose(&[1, 8, 16, 32, 80]) + random.below(10),
                high_pages: *random.choose(&[0, 8, 16, 32, 80]),
                scratch_pages: random.below(16),
            }),
            prefix_tree: !random.one_in(12),
            tail: *random.choose(&[TailPolicy::Recompute, TailPolicy::Sealed, TailPolicy::Exact]),
            host: match random.one_in(3) {
                true => HostPools::default(),
                false => HostPools { exact_pages: random.below(30), sealed_pages: random.below(40) },
            },
        };
        let mut cache = Cache::new(options);
        let follower = Follower::new(&mut cache.ledger);
        let (open, past, seen) = (Vec::new(), Vec::new(), Seen::default());
        Episode { random, cache, options, open, past, follower, seen }
    }

    fn seals(&self, key: PrefixKey) -> bool {
        self.options.sealed.is_some() && key.tier != Tier::Exact
    }

    /// A length, more often than not near the edge of a page.
    fn length(&mut self, pages: usize) -> usize {
        if self.random.one_in(3) {
            return 1 + self.random.below(pages * PAGE_TOKENS);
        }
        let edge = (self.random.below(pages + 1) * PAGE_TOKENS) as isize;
        (edge + *self.random.choose(&[-1, 0, 0, 1, 2, 10])).max(1) as usize
    }

    /// A text that begins like others do and goes on somehow.
    fn prompt(&mut self) -> Vec<u32> {
        let mut prompt = if !self.past.is_empty() && self.random.one_in(2) {
            let past = self.random.below(self.past.len());
            self.past[past].clone()
        } else {
            Vec::new()
        };
        if self.random.one_in(3) {
            let length = self.length(8).min(prompt.len());
            prompt.truncate(length);
        }
        let (text, length) = (self.random.below(3) as u32, self.length(5));
        prompt.extend(crate::support::text(text, length));
        prompt.truncate(14 * PAGE_TOKENS);
        prompt
    }

    fn step(&mut self) {
        let operation = self.random.below(100);
        let pick = (!self.open.is_empty()).then(|| self.random.below(self.open.len().max(1)));
        match (operation, pick) {
            (0..12, _) | (_, None) if self.open.len() < 6 => self.open_one(),
            (12..45, Some(pick)) => self.append(pick),
            (45..60, Some(pick)) => self.extend(pick),
            (60..72, Some(pick)) => {
                self.cache.finish(&mut self.open[pick]);
            }
            (72..75, Some(pick)) => {
                let part = self.random.below(5);
                self.seen.abandoned += usize::from(self.open[pick].flight.is_some());
                self.cache.abandon(&mut self.open[pick], part);
            }
            (75..85, Some(pick)) => {
                let finished = self.random.one_in(3);
                if self.open[pick].flight.is_some() {
                    // In the middle of something only what was there before can be given.
                    self.cache.ledger.insert(&self.open[pick].sequence, finished);
                } else {
                    self.seen.early += self.cache.insert(&mut self.open[pick], finished);
                }
            }
            (85..89, Some(pick)) if self.open.len() < 6 => {
                let fork = self.cache.fork(&self.open[pick]);
                self.open.push(fork);
                self.seen.forks += 1;
            }
            (89..93, Some(pick)) if !matches!(self.open[pick].flight, Some(Flight::Extension(_))) => {
                let pages = 1 + self.random.below(4);
                self.seen.demoted += self.cache.demote(&mut self.open[pick], pages);
            }
            (99, _) if self.random.one_in(4) => self.cache.ledger.flush(),
            (_, Some(pick)) => self.close(pick),
            (_, None) => {}
        }
    }

    fn open_one(&mut self) {
        let prompt = self.prompt();
        let salt = *self.random.choose(&[0, 0, 0, 5]);
        let tier = *self.random.choose(&[Tier::Sealed, Tier::Sealed, Tier::Sealed, Tier::High, Tier::Exact]);
        let key = PrefixKey { salt, tier };
        if self.random.one_in(2) {
            self.cache.restore(key, &prompt);
            self.cache.audit(&self.open.iter().collect::<Vec<_>>());
        }
        let expected = self.random.one_in(4).then(|| self.expected_hit(key, &prompt));
        let mut open = self.cache.open(key, &prompt);
        let (cached, sealed_until) = (open.sequence.cached_tokens(), open.sequence.sealed_until());
        if let Some(expected) = expected {
            assert_eq!((cached, sealed_until), expected, "{:?}", self.options);
        }
        if self.options.tail == TailPolicy::Exact {
            assert_eq!(sealed_until, 0);
        }
        self.seen.cached += usize::from(cached > 0);
        self.seen.tails += usize::from(!cached.is_multiple_of(PAGE_TOKENS));
        self.seen.cut += usize::from(sealed_until > 0);
        self.seen.exact_hits += usize::from(tier == Tier::Exact && cached >= PAGE_TOKENS);
        let is_sealed = open.sequence.sealed_slots().iter().any(Option::is_some);
        self.seen.high_hits += usize::from(tier == Tier::High && is_sealed);
        let mode = *self.random.choose(&[PrefillMode::Exact, PrefillMode::Uniform]);
        let rest = &prompt[cached..];
        let possible = self.possible(&open, rest.len());
        match self.cache.begin_extend(&mut open, rest, mode) {
            Ok(()) => assert!(possible.is_ok()),
            Err(shortage) => self.short(shortage, possible),
        }
        self.open.push(open);
    }

    fn append(&mut self, pick: usize) {
        let mut open = self.open.swap_remove(pick);
        if !matches!(open.flight, Some(Flight::Extension(_))) {
            self.cache.finish(&mut open);
            // Often many at once, so that pages fill; the checks in between are the cache's own.
            let count = *self.random.choose(&[1, 1, 2, 30, 64]);
            for step in 0..count {
                let token = self.random.below(2) as u32;
                let possible = (step == 0 || open.sequence.len().is_multiple_of(PAGE_TOKENS))
                    .then(|| self.possible(&open, 1));
                match self.cache.begin_append(&mut open, token) {
                    Ok(()) => assert!(possible.is_none_or(|possible| possible.is_ok())),
                    Err(shortage) => {
                        self.short(shortage, possible.expect("pages are taken at edges only"));
                        break;
                    }
                }
                if let Some(Flight::Append(append)) = &open.flight {
                    self.seen.copies += usize::from(append.copy.is_some());
                }
                if step + 1 < count {
                    self.cache.finish(&mut open);
                }
            }
        }
        self.open.push(open);
    }

    fn extend(&mut self, pick: usize) {
        let mut open = self.open.swap_remove(pick);
        if !matches!(open.flight, Some(Flight::Extension(_))) && open.sequence.len() < 16 * PAGE_TOKENS {
            self.cache.finish(&mut open);
            let (text, length) = (self.random.below(2) as u32, self.length(6));
            let tokens = crate::support::text(text, length);
            let tokens = if self.random.one_in(3) { &tokens[..1] } else { &tokens };
            let mode = *self.random.choose(&[PrefillMode::Exact, PrefillMode::Uniform]);
            let possible = self.possible(&open, tokens.len());
            match self.cache.begin_extend(&mut open, tokens, mode) {
                Ok(()) => assert!(possible.is_ok()),
                Err(shortage) => self.short(shortage, possible),
            }
        }
        self.open.push(open);
    }

    fn close(&mut self, pick: usize) {
        let mut open = self.open.swap_remove(pick);
        if open.flight.is_none() && !self.random.one_in(4) {
            self.seen.early += self.cache.insert(&mut open, true);
        }
        if self.past.len() >= 8 {
            let oldest = self.random.below(8);
            self.past.swap_remove(oldest);
        }
        self.past.push(open.sequence.tokens().to_vec());
        self.cache.close(open);
    }

    fn short(&mut self, shortage: Shortage, possible: Result<(), Shortage>) {
        assert_eq!(Err(shortage), possible);
        self.seen.shortages[shortage.pool as usize] += 1;
    }

    /// Whether `count` tokens more could be had for a sequence without anything in flight, counted page by page.
    fn possible(&self, open: &Open, count: usize) -> Result<(), Shortage> {
        let (exact, sealed) = (open.sequence.exact_slots(), open.sequence.sealed_slots());
        let PageWindows { sink, recent } = self.options.windows;
        let (start, end) = (open.sequence.len(), open.sequence.len() + count);
        let last = (end - 1) / PAGE_TOKENS;
        // bf16, sealed, high and scratch pages, as pools are numbered.
        let mut need = [0; 4];
        let codes = if open.sequence.tier() == Tier::High { 2 } else { 1 };
        for page in 0..=last {
            let is_new = page >= exact.len();
            let ends_sealed = self.seals(open.sequence.key()) && page >= sink && page + recent < last;
            if is_new && !ends_sealed {
                need[0] += 1;
            }
            if is_new && ends_sealed {
                need[3] += 1;
            }
            if ends_sealed && (is_new || sealed[page].is_none()) {
                need[codes] += 1;
            }
        }

        let entries = self.cache.ledger.tree_entries();
        let slots = self.cache.ledger.slots();
        let mut exact_uses = vec![0; slots.exact + slots.scratch];
        let mut sealed_uses = vec![0; slots.sealed + slots.high];
        for open in self.open.iter().chain([open]) {
            open.sequence.exact_slots().iter().flatten().for_each(|slot| exact_uses[slot.index()] += 1);
            open.sequence.sealed_slots().iter().flatten().for_each(|slot| sealed_uses[slot.index()] += 1);
            let copies = match &open.flight {
                Some(Flight::Extension(extension)) => extension.copies.as_slice(),
                Some(Flight::Append(append)) => append.copy.as_slice(),
                None => &[],
            };
            copies.iter().for_each(|(from, _)| exact_uses[from.index()] += 1);
        }
        let busy = busy(&entries, |entry| match (entry.exact, entry.sealed) {
            (_, Some(page)) => sealed_uses[page.index()] > 0,
            (Some(page), None) => exact_uses[page.index()] > 0,
            (None, None) => true,
        });
        // Pages that a sequence does not hold: free, or in the tree where they can be had or not.
        let unheld = |uses: &[u32]| uses.iter().skip(1).filter(|&&uses| uses == 0).count();
        let mut available = [
            unheld(&exact_uses[..slots.exact]),
            unheld(&sealed_uses[..slots.sealed]),
            unheld(&sealed_uses[slots.sealed..]),
            unheld(&exact_uses[slots.exact..]),
        ];
        let mut free = available[0];
        for (entry, busy) in entries.iter().zip(&busy) {
            if let Some(page) = entry.exact
                && exact_uses[page.index()] == 0
            {
                free -= 1;
                available[0] -= usize::from(*busy && entry.sealed.is_none());
            }
            if let Some(page) = entry.sealed
                && sealed_uses[page.index()] == 0
            {
                available[if page.index() < slots.sealed { 1 } else { 2 }] -= usize::from(*busy);
            }
        }

        // Where the tree has a second copy of a page of this sequence that only nodes below keep there, it can be had.
        let mut parent = None;
        let like_others = if open.demotion > 0 { sink } else { usize::MAX };
        for (page, block) in open.sequence.tokens().chunks_exact(PAGE_TOKENS).take(like_others).enumerate() {
            let found = entries.iter().position(|entry| {
                entry.parent == parent && entry.key == open.sequence.key() && entry.tokens == block
            });
            let Some(index) = found else { break };
            if let Some(copy) = entries[index].sealed {
                let unused = sealed_uses[copy.index()] == 0 && sealed[page].is_some();
                available[codes] += usize::from(busy[index] && unused);
            } else if let Some(copy) = entries[index].exact {
                let unused = exact_uses[copy.index()] == 0 && exact[page].is_some();
                available[0] += usize::from(busy[index] && unused);
            }
            parent = found;
        }

        // The page being filled is copied if somebody else has it too. If that is only a tail of the tree and there is
        // no room, the tree gives it up.
        if !start.is_multiple_of(PAGE_TOKENS) {
            let slot = exact[exact.len() - 1].expect("the page being filled is bf16");
            let owner = entries.iter().find(|entry| entry.exact == Some(slot));
            let uses = exact_uses[slot.index()];
            let only_tail = uses == 1 && owner.is_some_and(|entry| entry.tokens.len() < PAGE_TOKENS);
            need[0] += usize::from(uses > 1 || owner.is_some());
            need[0] -= usize::from(only_tail && need[0] > free);
        }
        let none = SealedPools { pages: 0, high_pages: 0, scratch_pages: 0 };
        let sealed = self.options.sealed.unwrap_or(none);
        let pages = [self.options.exact_pages, sealed.pages, sealed.high_pages, sealed.scratch_pages];
        let pools = [PoolKind::Exact, PoolKind::Sealed, PoolKind::High, PoolKind::Scratch];
        for (index, pool) in pools.into_iter().enumerate() {
            if need[index] > available[index] {
                let (needed, available) = (need[index], available[index]);
                return Err(Shortage { pool, needed, available, pages: pages[index] });
            }
        }
        Ok(())
    }

    /// Tokens that a prompt should get from the tree, and below which page they are sealed only.
    fn expected_hit(&self, key: PrefixKey, prompt: &[u32]) -> (usize, usize) {
        if !self.options.prefix_tree {
            return (0, 0);
        }
        let usable = &prompt[..prompt.len() - 1];
        let entries = self.cache.ledger.tree_entries();
        let children = |parent: Option<usize>| {
            entries.iter().enumerate().filter(move |(_, entry)| entry.parent == parent && entry.key == key)
        };
        let mut path: Vec<usize> = Vec::new();
        while let Some(block) = usable.get(path.len() * PAGE_TOKENS..(path.len() + 1) * PAGE_TOKENS)
            && let Some((index, _)) = children(path.last().copied()).find(|(_, entry)| entry.tokens == block)
        {
            path.push(index);
        }
        let matched = path.len();
        let rest = &usable[matched * PAGE_TOKENS..];
        let common = |tail: &TreeEntry<'_>| tail.tokens.iter().zip(rest).take_while(|(a, b)| a == b).count();
        let tail = children(path.last().copied())
            .filter(|(_, entry)| entry.tokens.len() < PAGE_TOKENS)
            .map(|(_, entry)| common(entry))
            .max()
            .unwrap_or(0);
        if !self.seals(key) {
            return (matched * PAGE_TOKENS + tail, 0);
        }
        let PageWindows { sink, recent } = self.options.windows;
        let warm = |page: usize| entries[path[page]].exact.is_some();
        let wanted = |pages: usize| (sink..pages).filter(move |page| page + recent >= pages);
        let pages = (0..=matched)
            .rev()
            .find(|&pages| match self.options.tail {
                TailPolicy::Sealed => true,
                TailPolicy::Exact => pages <= sink || wanted(pages).all(warm),
                TailPolicy::Recompute => wanted(matched).all(|page| warm(page) || page >= pages),
            })
            .expect("nothing can always be had");
        let sealed_until = wanted(pages).rev().find(|&page| !warm(page)).map_or(0, |page| page + 1);
        (pages * PAGE_TOKENS + if pages == matched { tail } else { 0 }, sealed_until)
    }

    fn check(&mut self, operation: usize) {
        for open in &self.open {
            self.cache.check(open);
        }
        self.cache.audit(&self.open.iter().collect::<Vec<_>>());
        if operation.is_multiple_of(32) {
            self.cache.check_tree();
            self.follow();
        }
    }

    /// Who hears what changes in the tree knows what is in it, and so does who begins to listen now.
    fn follow(&mut self) {
        self.follower.hear(self.cache.ledger.take_events());
        self.follower.assert_knows(&self.cache.ledger);
        if self.random.one_in(8) {
            self.follower = Follower::new(&mut self.cache.ledger);
            self.follower.assert_knows(&self.cache.ledger);
        }
    }

    fn run(mut self, operations: usize) -> Seen {
        for operation in 0..operations {
            self.step();
            self.check(operation);
        }
        while !self.open.is_empty() {
            self.close(0);
        }
        self.check(0);
        self.cache.ledger.flush();
        self.cache.assert_empty();
        let stats = self.cache.ledger.stats();
        self.seen.evicted = stats.evicted_pages + stats.evicted_warm;
        self.seen.restored = stats.host.restored;
        self.seen
    }
}

/// Which entries a sequence holds, or one below of which it holds.
fn busy(entries: &[TreeEntry<'_>], held: impl Fn(&TreeEntry<'_>) -> bool) -> Vec<bool> {
    let mut busy: Vec<bool> = entries.iter().map(held).collect();
    for index in (0..entries.len()).rev() {
        if let Some(parent) = entries[index].parent {
            assert!(parent < index);
            busy[parent] |= busy[index];
        }
    }
    busy
}

fn model_check(stream: u64) {
    let operations = number("OSCAR_MODEL_CHECK_OPERATIONS").map_or(OPERATIONS, |count| count as usize);
    let given = number("OSCAR_MODEL_CHECK_SEED");
    let episodes = if given.is_some() { 1 } else { operations.div_ceil(EPISODE) };
    let mut total = Seen::default();
    for episode in 0..episodes {
        let seed = Seed(given.unwrap_or_else(|| mix(mix(1, stream), episode as u64)));
        let seen = Episode::new(seed.0).run(EPISODE);
        for (sum, count) in total.shortages.iter_mut().zip(seen.shortages) {
            *sum += count;
        }
        for (sum, count) in [
            (&mut total.cached, seen.cached),
            (&mut total.copies, seen.copies),
            (&mut total.forks, seen.forks),
            (&mut total.abandoned, seen.abandoned),
            (&mut total.tails, seen.tails),
            (&mut total.early, seen.early),
            (&mut total.cut, seen.cut),
            (&mut total.exact_hits, seen.exact_hits),
            (&mut total.high_hits, seen.high_hits),
            (&mut total.demoted, seen.demoted),
        ] {
            *sum += count;
        }
        total.evicted += seen.evicted;
        total.restored += seen.restored;
    }
    eprintln!("{total:?}");
    if given.is_none() && operations >= OPERATIONS {
        // A check that never gets into trouble checks nothing.
        let rare = [
            [total.copies, total.forks, total.abandoned, total.tails],
            [total.early, total.cut, total.cached, total.exact_hits],
        ];
        assert!(total.demoted > 500 && total.high_hits > 100, "{total:?}");
        assert!(rare.as_flattened().iter().chain(&total.shortages).all(|&count| count > 500), "{total:?}");
        assert!(total.evicted > 1000 && total.restored > 1000, "{total:?}");
    }
}

#[test]
fn random_operations_keep_every_page_right() {
    model_check(1);
}

#[test]
fn random_operations_keep_every_page_right_again() {
    model_check(2);
}
