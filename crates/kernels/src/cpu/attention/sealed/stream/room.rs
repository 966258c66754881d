//! The memory of a stream besides pages and softmax states.

use bytemuck::{Pod, Zeroable};
use oscar_codec::PAGE_TOKENS;

use super::STEP;
use crate::cpu::attention::sealed::engine::LANES;
use crate::cpu::attention::sealed::registers::REGISTERS;
use crate::cpu::attention::sealed::run::PAGES;
use crate::cpu::attention::sealed::tiles;
use crate::cpu::gemm::tiles::TILE_BYTES;

/// A number for each row, in a line of its own.
pub(super) type Numbers = [f32; LANES];

/// Everything at a known distance from one address, because a step has too few registers for an address of each; and
/// without gaps, so that no part of the first-level cache gets more than its share.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Room<const STEPS: usize, const ROWS: usize> {
    /// Codes as bytes.
    pub(super) keys: [[[u8; TILE_BYTES]; REGISTERS]; STEPS],
    pub(super) values: [[[u8; TILE_BYTES]; REGISTERS]; STEPS],
    /// Of this slot and of the one before, in turn: `[row][high, low][64 tokens]`.
    pub(super) key_sums: [[[[i32; PAGE_TOKENS]; 2]; ROWS]; 2],
    /// `[row][high, low][channels]`.
    pub(super) value_sums: [[[[i32; STEP]; STEPS]; 2]; ROWS],
    /// Weights times scales.
    pub(super) scaled: [[[f32; PAGE_TOKENS]; ROWS]; PAGES],
    /// The largest of them in lanes.
    pub(super) largest: [[f32; LANES]; tiles::ROWS],
    /// Their bytes: `[page][row][high, low][64 tokens]`.
    pub(super) weights: [[[[i8; PAGE_TOKENS]; 2]; ROWS]; PAGES],
    /// Of the last run and the one before, in turn.
    pub(super) units: [Numbers; 2],
    /// What the numbers of the last run are multiplied with to get integers.
    pub(super) inverses: Numbers,
    /// Of the head that is weighed: units and sums of its queries, what its logits are relative to, and by how much they may
    /// exceed that.
    pub(super) steps: Numbers,
    pub(super) totals: Numbers,
    pub(super) reference: Numbers,
    pub(super) limit: Numbers,
}

// SAFETY: arrays of numbers, for which all zeros are fine.
unsafe impl<const STEPS: usize, const ROWS: usize> Zeroable for Room<STEPS, ROWS> {}

// SAFETY: arrays of numbers, each of a multiple of 64 bytes, so there is nothing between or after them.
unsafe impl<const STEPS: usize, const ROWS: usize> Pod for Room<STEPS, ROWS> {}
