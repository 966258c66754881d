//! AMX tile registers: configuration for the life of a scope.
//!
//! The intrinsics are not stable yet, so tiles are driven with `asm!`. The compiler never allocates tile registers
//! itself; only the state set here and used in `asm!` blocks matters.

use std::arch::asm;
use std::marker::PhantomData;

/// Bytes of a full tile: 16 rows of 64 bytes.
pub(crate) const TILE_BYTES: usize = 1024;

/// Rows of a full tile.
pub(crate) const TILE_ROWS: usize = 16;

#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// The tile registers of this thread, configured; released when dropped.
pub(crate) struct Tiles {
    /// Tile state belongs to a thread.
    not_send: PhantomData<*const ()>,
}

impl Tiles {
    /// Configures `tmm0..tmm3` (sums) with `sum_rows` rows and `tmm4..tmm7` (operands) with `operand_rows`, all of
    /// 64 bytes per row.
    ///
    /// # Safety
    /// The CPU has AMX and the kernel permits its use (`Isa::Amx.is_available()`); nothing else on this thread uses
    /// tiles until the value is dropped.
    pub(crate) unsafe fn configure(sum_rows: usize, operand_rows: [usize; 4]) -> Tiles {
        let mut configuration =
            Configuration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        configuration.row_bytes[..8].fill(64);
        configuration.rows[..4].fill(sum_rows as u8);
        for (tile, rows) in operand_rows.into_iter().enumerate() {
            configuration.rows[4 + tile] = rows as u8;
        }
        debug_assert!(configuration.rows[..8].iter().all(|&rows| (1..=16).contains(&rows)));
        // SAFETY: AMX is usable by the caller's promise, and the configuration is a valid palette-1 block of 64 bytes.
        unsafe {
            asm!("ldtilecfg [{configuration}]", configuration = in(reg) &configuration,
                 options(nostack, readonly, preserves_flags));
        }
        Tiles { not_send: PhantomData }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: a value exists only where AMX is usable.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
    }
}
