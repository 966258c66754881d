//! The products of a step, and what goes into and comes out of them: codes as bytes, weights as bytes, sums.

use std::arch::x86_64::*;
use std::ops::Range;

use oscar_codec::PAGE_TOKENS;

use super::instructions::{clear, load, multiply, store};
use super::plan::Step;
use super::{STEP, Stream};
use crate::cpu::attention::SoftmaxState;
use crate::cpu::attention::sealed::engine::LANES;
use crate::cpu::attention::sealed::registers::{REGISTERS, split};
use crate::cpu::attention::sealed::run::PAGES;
use crate::cpu::attention::sealed::tiles::{COLUMNS, unpack_register};
use crate::cpu::attention::sealed::weigh;
use crate::cpu::gemm::tiles::TILE_BYTES;

/// Bytes of the high and low parts of a row's weights.
pub(super) const ROW_BYTES: usize = 2 * PAGE_TOKENS;

/// Bytes of a tile that one register of codes becomes.
const BLOCK: usize = TILE_BYTES / REGISTERS;

impl<const STEPS: usize, const GROUPS: usize, const R: usize, const ALL: usize>
    Stream<'_, STEPS, GROUPS, R, ALL>
{
    /// The product of a tile: of the keys of 16 tokens, or of 16 channels of values.
    ///
    /// # Safety
    /// As [`Self::part`].
    #[inline(always)]
    pub(super) unsafe fn multiply<const FULL: bool>(&mut self, position: usize, step: &Step<STEPS>) {
        // SAFETY: tiles are configured, and buffers have the lengths of all tiles.
        unsafe {
            if STEPS == 2 {
                // There is one tile for sums of keys.
                self.store_keys::<FULL>(position, step);
            }
            if position < REGISTERS {
                if FULL || !step.left.is_null() {
                    let sums = Self::key_tile(position);
                    clear(sums);
                    for index in 0..STEPS {
                        let codes = &raw const (*self.room).keys[index][position];
                        multiply(sums, Self::left_tile(index), codes.cast());
                    }
                }
                return;
            }
            if position == REGISTERS {
                if step.clear {
                    (0..REGISTERS).for_each(|tile| clear(tile));
                }
                for index in 0..STEPS {
                    if FULL || !step.weights[index].is_null() {
                        load(Self::left_tile(index), step.weights[index].cast(), PAGE_TOKENS);
                    }
                }
            }
            let tile = position - REGISTERS;
            for index in 0..STEPS {
                if FULL || !step.weights[index].is_null() {
                    let codes = &raw const (*self.room).values[index][tile];
                    multiply(tile, Self::left_tile(index), codes.cast());
                }
            }
        }
    }

    /// The tile for the sums of keys at a position.
    #[inline(always)]
    fn key_tile(position: usize) -> usize {
        if STEPS == 1 { 6 + position % 2 } else { 6 }
    }

    /// The tile for queries and weights of a step.
    #[inline(always)]
    fn left_tile(index: usize) -> usize {
        if index == 0 { 4 } else { 7 }
    }

    /// Stores the sums of keys at the position before this one.
    ///
    /// # Safety
    /// As [`Self::part`].
    #[inline(always)]
    pub(super) unsafe fn store_keys<const FULL: bool>(&mut self, position: usize, step: &Step<STEPS>) {
        if (1..=REGISTERS).contains(&position) && (FULL || !step.left.is_null()) {
            let tile = position - 1;
            // SAFETY: tiles are configured, and there is room for 64 sums of every row.
            unsafe {
                store(Self::key_tile(tile), step.key_sums.add(tile * COLUMNS), size_of::<i32>() * PAGE_TOKENS)
            };
        }
    }

    /// Unpacks some of the codes of a tile. What was there has been multiplied.
    ///
    /// # Safety
    /// As [`Self::part`].
    #[inline(always)]
    pub(super) unsafe fn unpack<const FULL: bool>(
        &mut self,
        position: usize,
        codes: Range<usize>,
        step: &Step<STEPS>,
    ) {
        // SAFETY: what was planned is there.
        unsafe {
            if position < REGISTERS {
                if FULL || !step.unpacked_keys.is_null() {
                    self.unpack_keys(step.unpacked_keys, position, codes);
                }
                return;
            }
            let tile = position - REGISTERS;
            for code in codes {
                let (index, block) = (code / REGISTERS, code % REGISTERS);
                if FULL || !step.unpacked_values[index].is_null() {
                    let from = step.unpacked_values[index]
                        .add(size_of::<u32>() * (block * Self::D + tile * COLUMNS));
                    let to = &raw mut (*self.room).values[index][tile];
                    unpack_register::<2>(from, to.cast::<u8>().add(block * BLOCK));
                }
            }
        }
    }

    /// Unpacks blocks of 16 channels of the keys of 16 tokens.
    ///
    /// # Safety
    /// The CPU has the instructions of [`super::attend`]; there are so many blocks in a page, and 64 tokens.
    #[inline(always)]
    pub(super) unsafe fn unpack_keys(&mut self, page: *const u8, position: usize, blocks: Range<usize>) {
        for block in blocks {
            // SAFETY: the caller's promise; a block fills a quarter of a tile.
            unsafe {
                let from = page.add(size_of::<u32>() * (block * PAGE_TOKENS + position * COLUMNS));
                let to = &raw mut (*self.room).keys[block / REGISTERS][position];
                unpack_register::<2>(from, to.cast::<u8>().add(block % REGISTERS * BLOCK));
            }
        }
    }

    /// The bytes of a row's weights.
    ///
    /// # Safety
    /// As [`Self::part`].
    #[inline(always)]
    pub(super) unsafe fn split<const FULL: bool>(&mut self, row: usize, step: &Step<STEPS>) {
        for index in 0..STEPS {
            // There are none in the second of two passes.
            if (FULL && STEPS == 1) || !step.split[index].is_null() {
                // SAFETY: 64 numbers and two parts of 64 bytes for each row.
                unsafe {
                    let numbers = step.scaled[index].add(row * PAGE_TOKENS);
                    let mut values = [_mm512_setzero_ps(); REGISTERS];
                    for j in 0..REGISTERS {
                        values[j] = _mm512_loadu_ps(numbers.add(j * LANES));
                    }
                    let high = step.split[index].add(row * ROW_BYTES);
                    split(values, _mm512_set1_ps((*self.room).inverses[row]), high, high.add(PAGE_TOKENS));
                }
            }
        }
    }

    /// Stores the sums of a pass and adds them to the values of its head.
    ///
    /// # Safety
    /// As [`Self::step`]; all slots of the pass have been multiplied.
    #[inline(always)]
    pub(super) unsafe fn add_values(&mut self, slot: usize, states: &mut [SoftmaxState]) {
        let (run, first) = (slot / PAGES, Self::first_channel(slot));
        let state = &mut states[self.slots.get(slot).head];
        let values = &mut state.values[..ALL * Self::D];
        // SAFETY: there is room for all channels of every row; the instruction set of this module is there.
        unsafe {
            for tile in 0..REGISTERS {
                let to = &raw mut (*self.room).value_sums;
                store(tile, to.cast::<i32>().add(first + tile * COLUMNS), size_of::<i32>() * Self::D);
            }
            let (units, channels) = (&(*self.room).units[run % 2], first..first + STEP);
            let sums = (*self.room).value_sums.as_flattened().as_flattened().as_flattened();
            weigh::add_values(sums, units, Self::D, channels, ALL, Self::D, values);
        }
        self.late.added(run, self.slots.heads(), first, Self::D, values);
    }
}
