//! A cache without numbers: every row of every page is a tag of the token it belongs to and of all tokens before it.
//!
//! It does what the ledger says, in the order a backend would, and at every read checks that the page a query would
//! look at holds exactly the rows it should.

#![allow(dead_code, unreachable_pub)]

pub mod follower;

use oscar_kv::{
    Append, ExactSlot, Extension, HostCopy, HostPools, Ledger, LedgerOptions, PAGE_TOKENS, PageWindows,
    PoolKind, PrefillMode, PrefixKey, SealWork, SealedPools, Sequence, Shortage, TailPolicy, Tier,
};

pub type Row = u64;

/// Slots full of tags; 0 is "nothing was ever written here".
pub struct Cache {
    pub ledger: Ledger,
    pub windows: PageWindows,
    /// bf16 slots, then scratch slots.
    rows: Vec<[Row; PAGE_TOKENS]>,
    /// The tag of the last row of a sealed page stands for all of them.
    sealed: Vec<Row>,
    /// The same in the host's memory.
    host_rows: Vec<[Row; PAGE_TOKENS]>,
    host_sealed: Vec<Row>,
}

/// A sequence with the tags its rows should have.
pub struct Open {
    pub sequence: Sequence,
    pub tags: Vec<Row>,
    pub flight: Option<Flight>,
    /// Not 0 in a sequence that was demoted: its rows from then on are like nobody else's.
    pub demotion: u64,
}

/// What has been begun and not carried out yet.
pub enum Flight {
    Extension(Extension),
    Append(Append),
}

pub fn mix(seed: u64, value: u64) -> u64 {
    let mut x = (seed ^ value).wrapping_add(0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^= x >> 29;
    (x.wrapping_mul(0x94d0_49bb_1331_11eb) ^ x >> 32) | 1
}

/// Options of a cache with sealed pages and enough of everything.
pub fn options(sink: usize, recent: usize) -> LedgerOptions {
    LedgerOptions {
        windows: PageWindows { sink, recent },
        exact_pages: 200,
        sealed: Some(SealedPools { pages: 400, high_pages: 200, scratch_pages: 200 }),
        prefix_tree: true,
        tail: TailPolicy::Recompute,
        host: HostPools::default(),
    }
}

/// `count` tokens of text number `text`.
pub fn text(text: u32, count: usize) -> Vec<u32> {
    (0..count as u32).map(|position| text * 1_000_000 + position).collect()
}

impl Cache {
    pub fn new(options: LedgerOptions) -> Cache {
        let ledger = Ledger::new(options).expect("valid options");
        let slots = ledger.slots();
        Cache {
            ledger,
            windows: options.windows,
            rows: vec![[0; PAGE_TOKENS]; slots.exact + slots.scratch],
            sealed: vec![0; slots.sealed + slots.high],
            host_rows: vec![[0; PAGE_TOKENS]; options.host.exact_pages + 1],
            host_sealed: vec![0; options.host.sealed_pages + 1],
        }
    }

    /// Brings back what the host has of a prompt.
    pub fn restore(&mut self, key: impl Into<PrefixKey>, prompt: &[u32]) {
        self.ledger.restore(key, prompt);
        self.copy_host_pages();
    }

    /// Carries out the copies between device and host that are due.
    fn copy_host_pages(&mut self) {
        for copy in self.ledger.take_host_copies() {
            match copy {
                HostCopy::ExactOut { from, to } => self.host_rows[to.index()] = self.rows[from.index()],
                HostCopy::SealedOut { from, to } => self.host_sealed[to.index()] = self.sealed[from.index()],
                HostCopy::ExactIn { from, to } => self.rows[to.index()] = self.host_rows[from.index()],
                HostCopy::SealedIn { from, to } => self.sealed[to.index()] = self.host_sealed[from.index()],
            }
        }
    }

    fn has_sealed(&self) -> bool {
        self.ledger.options().sealed.is_some()
    }

    /// Whether pages of sequences with this key are sealed when they leave the window.
    fn seals(&self, key: PrefixKey) -> bool {
        self.has_sealed() && key.tier != Tier::Exact
    }

    pub fn open(&mut self, key: impl Into<PrefixKey>, prompt: &[u32]) -> Open {
        let sequence = self.ledger.open(key, prompt);
        assert_eq!(sequence.len(), sequence.cached_tokens());
        assert!(sequence.len() < prompt.len().max(1));
        assert_eq!(sequence.tokens(), &prompt[..sequence.len()]);
        let mut open = Open { sequence, tags: Vec::new(), flight: None, demotion: 0 };
        open.grow_tags();
        self.check(&open);
        open
    }

    /// Opens and computes all of a prompt.
    pub fn prompt(&mut self, key: impl Into<PrefixKey>, prompt: &[u32], mode: PrefillMode) -> Open {
        let mut open = self.open(key, prompt);
        let cached = open.sequence.len();
        self.extend(&mut open, &prompt[cached..], mode).expect("room for the prompt");
        open
    }

    pub fn begin_extend(
        &mut self,
        open: &mut Open,
        tokens: &[u32],
        mode: PrefillMode,
    ) -> Result<(), Shortage> {
        let (start, pages) = (open.sequence.len(), open.sequence.exact_slots().len());
        let extension = self.ledger.extend(&mut open.sequence, tokens, mode)?;
        assert_eq!((extension.start, extension.len), (start, tokens.len()));
        assert_eq!(
            extension.exact_from,
            if mode == PrefillMode::Exact { start / PAGE_TOKENS } else { usize::MAX }
        );
        self.begun(open, pages, &extension.copies, &extension.seal);
        open.flight = Some(Flight::Extension(extension));
        Ok(())
    }

    pub fn begin_append(&mut self, open: &mut Open, token: u32) -> Result<(), Shortage> {
        let pages = open.sequence.exact_slots().len();
        let append = self.ledger.append(&mut open.sequence, token)?;
        self.begun(open, pages, append.copy.as_slice(), append.seal.as_slice());
        open.flight = Some(Flight::Append(append));
        Ok(())
    }

    /// What was just taken holds nothing.
    fn begun(&mut self, open: &mut Open, pages: usize, copies: &[(ExactSlot, ExactSlot)], seal: &[SealWork]) {
        open.grow_tags();
        self.copy_host_pages();
        for slot in &open.sequence.exact_slots()[pages..] {
            self.rows[slot.expect("a new page is bf16 first").index()] = [0; PAGE_TOKENS];
        }
        for (from, to) in copies {
            assert_ne!(from, to);
            self.rows[to.index()] = [0; PAGE_TOKENS];
        }
        for work in seal {
            self.sealed[work.to.index()] = 0;
            assert_eq!(open.sequence.sealed_slots()[work.page], Some(work.to));
            assert_eq!(open.sequence.exact_slots()[work.page], Some(work.from));
        }
        assert!(seal.is_sorted_by_key(|work| work.page));
    }

    /// Carries out what is in flight.
    pub fn finish(&mut self, open: &mut Open) {
        match open.flight.take() {
            Some(Flight::Extension(extension)) => {
                self.copy(&extension.copies);
                self.run(open, extension.start, extension.exact_from, &extension.seal);
                self.ledger.finish_extension(&mut open.sequence, extension);
            }
            Some(Flight::Append(append)) => {
                self.copy(append.copy.as_slice());
                if let Some(work) = &append.seal {
                    self.seal(open, work);
                }
                self.run(open, open.sequence.len() - 1, usize::MAX, &[]);
                self.ledger.finish_append(&mut open.sequence, append);
            }
            None => {}
        }
        self.check(open);
    }

    /// Does part of what is in flight (`part` of 4) and gives it up.
    pub fn abandon(&mut self, open: &mut Open, part: usize) {
        let (copies, start) = match &open.flight {
            Some(Flight::Extension(extension)) => (extension.copies.clone(), extension.start),
            Some(Flight::Append(append)) => (append.copy.into_iter().collect(), open.sequence.len() - 1),
            None => return,
        };
        if part > 0 {
            self.copy(&copies);
        }
        for position in start..start + (open.sequence.len() - start) * part / 4 {
            self.write(open, position, mix(99, position as u64));
        }
        match open.flight.take() {
            Some(Flight::Extension(extension)) => {
                self.ledger.abandon_extension(&mut open.sequence, extension);
            }
            Some(Flight::Append(append)) => self.ledger.abandon_append(&mut open.sequence, append),
            None => {}
        }
        open.tags.truncate(start);
        assert_eq!(open.sequence.len(), start);
        self.check(open);
    }

    pub fn extend(&mut self, open: &mut Open, tokens: &[u32], mode: PrefillMode) -> Result<(), Shortage> {
        self.begin_extend(open, tokens, mode)?;
        self.finish(open);
        Ok(())
    }

    pub fn append(&mut self, open: &mut Open, token: u32) -> Result<(), Shortage> {
        self.begin_append(open, token)?;
        self.finish(open);
        Ok(())
    }

    /// Seals what the tree wants sealed and gives it what it lacks. Returns how many pages were sealed early.
    pub fn insert(&mut self, open: &mut Open, finished: bool) -> usize {
        let work = self.ledger.plan_insert(&mut open.sequence);
        self.copy_host_pages();
        for work in &work {
            self.sealed[work.to.index()] = 0;
        }
        for work in &work {
            self.seal(open, work);
        }
        self.ledger.insert(&open.sequence, finished);
        self.check(open);
        work.len()
    }

    pub fn fork(&mut self, open: &Open) -> Open {
        let sequence = self.ledger.fork(&open.sequence);
        let tags = open.tags[..sequence.len()].to_vec();
        let fork = Open { sequence, tags, flight: None, demotion: open.demotion };
        self.check(&fork);
        fork
    }

    /// Demotes a sequence so that `pages` bf16 pages can be had. Returns how many of its pages were demoted.
    pub fn demote(&mut self, open: &mut Open, pages: usize) -> usize {
        let Some(end) = self.ledger.demotion_for(&open.sequence, pages) else { return 0 };
        let before = self.ledger.available(PoolKind::Exact);
        let work = self.ledger.demote(&mut open.sequence, end).expect("no more than there are sealed pages");
        self.copy_host_pages();
        for work in &work {
            self.seal(open, work);
        }
        self.ledger.finish_demotion(&mut open.sequence, end);
        assert!(self.ledger.available(PoolKind::Exact) > before, "a demotion brings pages");
        // A token in flight is computed after the demotion.
        if open.flight.is_some() {
            open.tags.pop();
        }
        open.demotion = mix(open.demotion, open.tags.len() as u64);
        open.grow_tags();
        self.check(open);
        work.len()
    }

    pub fn close(&mut self, open: Open) {
        self.ledger.close(open.sequence);
    }

    fn copy(&mut self, copies: &[(ExactSlot, ExactSlot)]) {
        for (from, to) in copies {
            self.rows[to.index()] = self.rows[from.index()];
        }
    }

    fn seal(&mut self, open: &Open, work: &SealWork) {
        let rows = work.page * PAGE_TOKENS..(work.page + 1) * PAGE_TOKENS;
        assert_eq!(
            self.rows[work.from.index()],
            open.tags[rows.clone()],
            "page {} is sealed too early",
            work.page
        );
        self.sealed[work.to.index()] = open.tags[rows.end - 1];
    }

    fn write(&mut self, open: &Open, position: usize, row: Row) {
        let Some(slot) = open.sequence.exact_slots()[position / PAGE_TOKENS] else {
            panic!("position {position} has no page to be written to")
        };
        self.rows[slot.index()][position % PAGE_TOKENS] = row;
    }

    /// Writes the rows from `start` on and lets each page of them attend, sealing when it is time.
    fn run(&mut self, open: &Open, start: usize, exact_from: usize, seal: &[SealWork]) {
        let end = open.sequence.len();
        for position in start..end {
            self.write(open, position, open.tags[position]);
        }
        let mut rest = seal.iter().peekable();
        for query in start / PAGE_TOKENS..end.div_ceil(PAGE_TOKENS) {
            while let Some(work) =
                rest.next_if(|work| work.page < exact_from && work.page + self.windows.recent < query)
            {
                self.seal(open, work);
            }
            self.read(open, query, end.min((query + 1) * PAGE_TOKENS), exact_from);
        }
        for work in rest {
            self.seal(open, work);
        }
    }

    /// What a query in page `query` reads of the tokens before `end`.
    fn read(&self, open: &Open, query: usize, end: usize, exact_from: usize) {
        let sequence = &open.sequence;
        let exact_from = if sequence.tier() == Tier::Exact { 0 } else { exact_from };
        let history = if self.has_sealed() {
            self.windows.history(query, exact_from, sequence.sealed_until())
        } else {
            0..0
        };
        for page in 0..end.div_ceil(PAGE_TOKENS) {
            let rows = page * PAGE_TOKENS..end.min((page + 1) * PAGE_TOKENS);
            if history.contains(&page) {
                let Some(slot) = sequence.sealed_slots()[page] else {
                    panic!("page {page} of {end} is not sealed for a query in {query}")
                };
                assert_eq!(self.sealed[slot.index()], open.tags[rows.end - 1], "sealed page {page} of {end}");
            } else {
                let Some(slot) = sequence.exact_slots()[page] else {
                    panic!("page {page} of {end} is not there in bf16 for a query in {query}")
                };
                assert_eq!(
                    self.rows[slot.index()][..rows.len()],
                    open.tags[rows],
                    "bf16 page {page} of {end}"
                );
            }
        }
    }

    /// What the next token would read, and that nothing is held that no token can read.
    pub fn check(&self, open: &Open) {
        let sequence = &open.sequence;
        assert_eq!(sequence.len(), open.tags.len());
        if open.flight.is_some() {
            return;
        }
        let length = sequence.len();
        let next = length / PAGE_TOKENS;
        match self.windows.due_before(next) {
            // The page that will be sealed when the next one begins is still to be read in bf16.
            Some(due) if self.seals(sequence.key()) && sequence.sealed_slots()[due].is_none() => {
                assert!(length.is_multiple_of(PAGE_TOKENS));
                self.read(open, next, length, due);
            }
            _ => self.read(open, next, length, usize::MAX),
        }
        let window = length.saturating_sub(1) / PAGE_TOKENS;
        for page in 0..length.div_ceil(PAGE_TOKENS) {
            let (exact, sealed) = (sequence.exact_slots()[page], sequence.sealed_slots()[page]);
            let may_be_exact = match self.seals(sequence.key()) {
                true => page < self.windows.sink || page + self.windows.recent >= window,
                false => page < self.windows.sink || page >= sequence.sealed_until(),
            };
            assert!(exact.is_none() || may_be_exact, "page {page} of {length} tokens is kept in bf16");
            assert!(sealed.is_none() || self.seals(sequence.key()) || page < sequence.sealed_until());
            let in_scratch = exact.is_some_and(|slot| slot.index() >= self.ledger.slots().exact);
            assert!(!in_scratch, "page {page} is still in scratch");
            assert!(sealed.is_none() || self.has_sealed() && page >= self.windows.sink);
        }
    }

    /// Every page of the tree holds what the tree says.
    pub fn check_tree(&self) {
        let entries = self.ledger.tree_entries();
        let mut ends: Vec<Row> = Vec::new();
        for entry in &entries {
            let mut tag = entry.parent.map_or_else(|| first_tag(entry.key), |parent| ends[parent]);
            let page = entry.parent.map_or(0, |parent| entries[parent].page + 1);
            assert_eq!(entry.page, page);
            let tags: Vec<Row> = entry
                .tokens
                .iter()
                .map(|&token| {
                    tag = mix(tag, token.into());
                    tag
                })
                .collect();
            ends.push(tag);
            if let Some(exact) = entry.exact {
                assert_eq!(self.rows[exact.index()][..tags.len()], tags);
            }
            if let Some(sealed) = entry.sealed {
                assert_eq!(self.sealed[sealed.index()], tag);
            }
            let stays_exact =
                !self.seals(entry.key) || entry.page < self.windows.sink || tags.len() < PAGE_TOKENS;
            assert_eq!(entry.sealed.is_none(), stays_exact);
            assert!(entry.exact.is_some() || entry.sealed.is_some());
        }
    }

    /// Nothing is open and nothing is kept: every page is free.
    pub fn assert_empty(&self) {
        self.ledger.audit(&[]).expect("right books");
        let stats = self.ledger.stats();
        for pool in [stats.exact, stats.sealed, stats.high, stats.scratch] {
            assert_eq!(pool.free, pool.pages);
        }
    }

    pub fn audit(&self, open: &[&Open]) {
        let sequences: Vec<&Sequence> = open.iter().map(|open| &open.sequence).collect();
        self.ledger.audit(&sequences).expect("right books");
    }
}

/// What the tags of all sequences with this key begin from.
fn first_tag(key: PrefixKey) -> Row {
    mix(mix(7, key.salt), key.tier as u64)
}

impl Open {
    fn grow_tags(&mut self) {
        let mut tag = self.tags.last().copied().unwrap_or_else(|| first_tag(self.sequence.key()));
        for &token in &self.sequence.tokens()[self.tags.len()..] {
            tag = mix(tag, u64::from(token) ^ self.demotion);
            self.tags.push(tag);
        }
    }

    /// Pages that have a bf16 slot, and pages that have a sealed slot.
    pub fn pages(&self) -> (Vec<usize>, Vec<usize>) {
        fn present<Slot>(slots: &[Option<Slot>]) -> Vec<usize> {
            (0..slots.len()).filter(|&page| slots[page].is_some()).collect()
        }
        (present(self.sequence.exact_slots()), present(self.sequence.sealed_slots()))
    }
}
