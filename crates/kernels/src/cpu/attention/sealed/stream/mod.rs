//! 2-bit pages on AMX for few rows that see all of them, as in decoding: what `batch` computes, to the bit, in another order.
//!
//! Reading a page is unpacking its keys, a product, softmax, unpacking its values, another product. Done one after the
//! other each keeps one part of a core busy, and waits: a tile cannot be loaded before what was stored for it has reached
//! the cache, a product takes 50 cycles to appear, and stores of unpacked codes fill their queue. So pages pass as a stream,
//! and a step does a piece of each for different pages, in small turns:
//!
//! | slot, counted from the current one | what is done |
//! |---|---|
//! | next run | asked for |
//! | +1 | keys unpacked |
//! | 0 | keys multiplied |
//! | -1 | softmax |
//! | -5 | weights turned into bytes, values unpacked |
//! | -6 | values multiplied |
//!
//! Values wait for the unit of their run of four pages. With 128 channels their sums do not fit into the tiles, so a run is
//! read in two passes of two steps, each with half of the channels of two pages.

mod instructions;
mod late;
mod plan;
mod products;
mod room;
mod slots;
mod softmax;
#[cfg(test)]
mod tests;

use std::marker::PhantomData;
use std::ops::Range;

use oscar_codec::{PAGE_TOKENS, ScaleType};

use self::instructions::{fence, load};
use self::late::Late;
use self::plan::Step;
use self::room::Room;
use self::slots::{FIRST, Slots};
use self::softmax::Weighing;
use super::batch::{running, tile_queries};
use super::codes::{Buffers, Queries};
use super::engine::{LANES, Shape};
use super::registers::REGISTERS;
use super::run::PAGES;
use super::tiles::ROWS;
use super::weigh;
use crate::cpu::attention::{SoftmaxState, Work};
use crate::cpu::gemm::aligned::AlignedScratch;
use crate::cpu::gemm::tiles::{TILE_ROWS, Tiles};

/// Slots between the product with keys and that with values.
const LAG: usize = PAGES + 2;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Channels of a step: a row of a tile.
const STEP: usize = 64;

/// Parts of a step for each group of rows: logits and weights of a page's four registers.
const PARTS: usize = 2 * REGISTERS;

/// Attends `ALL` rows of all heads, in `GROUPS` of `R`, which see all of `pages`. Keys and values have `STEPS` times 64 channels
/// in one group, with scales in f16.
///
/// # Safety
/// As `batch::attend`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,gfni")]
pub(super) unsafe fn attend<const STEPS: usize, const GROUPS: usize, const R: usize, const ALL: usize>(
    work: &Work<'_, u8>,
    pages: Range<usize>,
    buffers: &mut Buffers,
    tiles: &mut AlignedScratch,
    states: &mut [SoftmaxState],
) {
    const { assert!(STEPS <= 2 && GROUPS.is_power_of_two() && GROUPS <= 4 && GROUPS * R == ALL && ALL <= ROWS) };
    // Weights of a run become bytes in the first phases of a step, and those of the next take their place in the others.
    const { assert!(R <= REGISTERS) };
    // SAFETY: the caller's promise.
    let registers = unsafe { Tiles::configure(2 * ALL, [2 * ALL, TILE_ROWS, 2 * ALL, 2 * ALL]) };
    let slots = Slots::new(work, states.len(), pages);
    // They come while the queries are made ready.
    slots.ask_for_first_run();
    let mut stream = Stream::<STEPS, GROUPS, R, ALL>::new(registers, work, slots, buffers, tiles);
    // SAFETY: the caller's promise, and the stream has what its steps need.
    unsafe {
        stream.open();
        for slot in FIRST..stream.slots.end() + LAG {
            stream.slots.advance();
            // What is known to be there need not be looked for at every turn.
            match stream.slots.are_filled(LAG + PAGES - PAGES / STEPS) {
                true => stream.step::<true>(slot, states),
                false => stream.step::<false>(slot, states),
            }
        }
    }
    for (head, state) in states.iter_mut().enumerate() {
        // SAFETY: the steps are done.
        let lanes = unsafe { stream.all_lanes() };
        let running = running(&stream.shape, 0..ALL, STEPS * STEP, head * ALL, lanes, state);
        weigh::finish(&stream.shape, running);
    }
}

/// The queries of a call, its pages and buffers for some of them.
struct Stream<'a, const STEPS: usize, const GROUPS: usize, const R: usize, const ALL: usize> {
    _registers: Tiles,
    shape: Shape,
    slots: Slots<'a>,
    queries: Queries<'a>,
    /// Addresses and not references, because a step has addresses inside.
    room: *mut Room<STEPS, ALL>,
    /// Of all heads, as [`super::engine::Running::lanes`].
    lanes: *mut f32,
    borrow: PhantomData<&'a mut [u8]>,
    late: Late,
}

/// Calls a step's parts, whose numbers must be known to the compiler.
macro_rules! parts {
    ($stream:ident, $step:ident, $weighing:ident, $states:ident, [$($part:literal)*]) => {
        $($stream.part::<$part, FULL>(&$step, &mut $weighing, $states);)*
    };
}

impl<'a, const STEPS: usize, const GROUPS: usize, const R: usize, const ALL: usize>
    Stream<'a, STEPS, GROUPS, R, ALL>
{
    /// Channels.
    const D: usize = STEPS * STEP;

    /// Bytes of one side's codes.
    const SIDE: usize = Self::D * PAGE_TOKENS / 4;

    /// Bytes of a page: two sides, and scales and offsets of both in 16 bits.
    const PAGE_BYTES: usize = 2 * Self::SIDE + 8 * PAGE_TOKENS;

    const LINES: usize = Self::PAGE_BYTES / LINE;

    /// Slots of a pass over the values of a run.
    const PASS: usize = PAGES / STEPS;

    fn new(
        registers: Tiles,
        work: &Work<'_, u8>,
        slots: Slots<'a>,
        buffers: &'a mut Buffers,
        tiles: &'a mut AlignedScratch,
    ) -> Self {
        assert!(work.spans.len() == ALL && work.d == Self::D);
        assert!(work.pages.iter().all(|page| page.len() == Self::PAGE_BYTES));
        let shape = Shape::plain(Self::D, ScaleType::F16);
        let Buffers { queries, query_numbers, lanes, .. } = buffers;
        // SAFETY: the instruction set of this module is there.
        let queries = unsafe { tile_queries(&shape, work, queries, query_numbers) };
        let room = bytemuck::from_bytes_mut(tiles.at_least::<u8>(size_of::<Room<STEPS, ALL>>()));
        let lanes = lanes.at_least::<f32>(queries.rows * 2 * LANES);
        lanes.fill(0.0);
        let (lanes, late) = (lanes.as_mut_ptr(), Late::default());
        Stream { _registers: registers, shape, slots, queries, room, lanes, borrow: PhantomData, late }
    }

    /// The lanes of all heads.
    ///
    /// # Safety
    /// The slice must be gone before anything else touches lanes.
    unsafe fn all_lanes(&mut self) -> &'a mut [f32] {
        // SAFETY: that is their length, and the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.lanes, self.queries.rows * 2 * LANES) }
    }

    /// Unpacks the first keys.
    ///
    /// # Safety
    /// The CPU has the instructions of [`attend`].
    #[inline(always)]
    unsafe fn open(&mut self) {
        let page = self.slots.get(FIRST).page;
        if !page.is_empty() {
            for position in 0..REGISTERS {
                // SAFETY: all of a page's keys.
                unsafe { self.unpack_keys(page.as_ptr(), position, 0..STEPS * REGISTERS) };
            }
        }
    }

    /// One slot of everything.
    ///
    /// # Safety
    /// The CPU has the instructions of [`attend`]; slots come one after the other and are known, and if `FULL` all that are
    /// touched have pages.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,gfni")]
    unsafe fn step<const FULL: bool>(&mut self, slot: usize, states: &mut [SoftmaxState]) {
        let (weighed, multiplied) = (slot - 1, slot - LAG);
        let head = self.slots.get(weighed).head;
        if weighed % PAGES == 0 {
            self.begin_run(head, &states[head]);
        }
        let step = self.plan(slot);
        // SAFETY: all parts of a step in their order, with what was planned for them.
        unsafe {
            let mut weighing = Weighing::new();
            if FULL || !step.left.is_null() {
                load(4, step.left.cast(), Self::D);
                if STEPS == 2 {
                    load(7, step.left.add(STEP).cast(), Self::D);
                }
            }
            let state = &mut states[head];
            parts!(self, step, weighing, state, [0 1 2 3 4 5 6 7]);
            if GROUPS > 1 {
                parts!(self, step, weighing, state, [8 9 10 11 12 13 14 15]);
            }
            if GROUPS > 2 {
                parts!(self, step, weighing, state, [16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31]);
            }
        }
        if multiplied % Self::PASS == Self::PASS - 1 && multiplied >= FIRST {
            // SAFETY: the sums of a pass are complete.
            unsafe { self.add_values(multiplied, states) };
        }
        if weighed % PAGES == PAGES - 1 {
            self.end_run(weighed / PAGES);
        }
    }

    /// Part `PART` of a step. Products and codes of a tile are spread over as many parts as there are groups of rows.
    ///
    /// # Safety
    /// As [`Self::step`], of which it is a part.
    #[inline(always)]
    unsafe fn part<const PART: usize, const FULL: bool>(
        &mut self,
        step: &Step<STEPS>,
        weighing: &mut Weighing<R>,
        state: &mut SoftmaxState,
    ) {
        let (position, turn) = (PART / GROUPS, PART % GROUPS);
        let (group, phase) = (PART / PARTS, PART % PARTS);
        let codes = STEPS * REGISTERS / GROUPS;
        let codes = turn * codes..(turn + 1) * codes;
        let middle = codes.start.midpoint(codes.end);
        // SAFETY: what was planned is there. Null pointers are not followed, and there are none if `FULL`.
        unsafe {
            if turn == 0 {
                self.multiply::<FULL>(position, step);
            }
            let (from, to) = (PART * Self::LINES, (PART + 1) * Self::LINES);
            for number in from / (PARTS * GROUPS)..to / (PARTS * GROUPS) {
                step.ask(number);
            }
            self.unpack::<FULL>(position, codes.start..middle, step);
            fence();
            if phase < R {
                self.split::<FULL>(group * R + phase, step);
            }
            if FULL || !step.numbers.is_null() {
                self.weigh(group, phase, step, weighing, state);
            }
            fence();
            self.unpack::<FULL>(position, middle..codes.end, step);
            fence();
            if STEPS == 1 && turn == GROUPS - 1 {
                self.store_keys::<FULL>(position, step);
            }
        }
    }
}
