//! The tile instructions of a stream, one at a time.
//!
//! | tile | holds |
//! |---|---|
//! | 0 to 3 | sums of values |
//! | 4 | queries, then weights |
//! | 5 | codes |
//! | 6 | sums of keys |
//! | 7 | sums of keys in turn with 6, or a second tile as 4 |
//!
//! Every block of `asm!` is a fence for the compiler: loads and stores that stand between two of them stay there.

use std::arch::asm;
use std::arch::x86_64::*;

/// Bytes of a row of codes, queries or weights.
const LINE: usize = 64;

/// Keeps the compiler from moving loads and stores across. That is the order in which they are meant to run.
#[inline(always)]
pub(super) fn fence() {
    // SAFETY: no instruction.
    unsafe { asm!("", options(nostack, preserves_flags)) };
}

/// A number that is computed here, not where it is used: until then its operands would be kept, which are more.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn now(mut number: __m512) -> __m512 {
    // SAFETY: no instruction.
    unsafe { asm!("/* {} */", inout(zmm_reg) number, options(nostack, nomem, preserves_flags)) };
    number
}

/// Chooses the instruction for a tile whose number the compiler knows.
macro_rules! for_tile {
    ($tile:expr, [$($number:literal)*], $before:literal, $after:literal, $operands:tt) => {
        match $tile {
            $($number => for_tile!(@ concat!($before, $number, $after), $operands),)*
            other => unreachable!("tile {other}"),
        }
    };
    (@ $instruction:expr, ($($operands:tt)*)) => {
        asm!($instruction, $($operands)* options(nostack, preserves_flags))
    };
}

/// # Safety
/// Tiles are configured.
#[inline(always)]
pub(super) unsafe fn clear(tile: usize) {
    // SAFETY: the caller's promise.
    unsafe { for_tile!(tile, [0 1 2 3 6 7], "tilezero tmm", "", ()) };
}

/// # Safety
/// Tiles are configured, and all rows of the tile can be read.
#[inline(always)]
pub(super) unsafe fn load(tile: usize, from: *const u8, stride: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        for_tile!(tile, [4 5 7], "tileloadd tmm", ", [{from} + {stride}]", (from = in(reg) from, stride = in(reg) stride,));
    }
}

/// Stores sums in rows `stride` bytes apart.
///
/// # Safety
/// Tiles are configured, and all rows of the tile can be written.
#[inline(always)]
pub(super) unsafe fn store(tile: usize, to: *mut i32, stride: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        for_tile!(tile, [0 1 2 3 6 7], "tilestored [{to} + {stride}], tmm", "", (to = in(reg) to, stride = in(reg) stride,));
    }
}

/// Adds the product of a tile `left` and codes at `codes` to a tile of sums.
///
/// # Safety
/// Tiles are configured, and 16 rows of 64 codes can be read.
#[inline(always)]
pub(super) unsafe fn multiply(sums: usize, left: usize, codes: *const u8) {
    // SAFETY: the caller's promise.
    unsafe {
        load(5, codes, LINE);
        match left {
            4 => for_tile!(sums, [0 1 2 3 6 7], "tdpbsud tmm", ", tmm4, tmm5", ()),
            7 => for_tile!(sums, [0 1 2 3 6], "tdpbsud tmm", ", tmm7, tmm5", ()),
            other => unreachable!("left tile {other}"),
        }
    }
}
