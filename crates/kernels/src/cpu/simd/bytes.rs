//! Groups of 32 codes of a weight matrix, one signed byte each.

/// 32 bytes in registers. Methods are inlined into functions that enable the instructions.
///
/// # Safety of the methods
/// The CPU has the instructions, and pointers lead to as many readable bytes as a method says.
#[allow(clippy::missing_safety_doc)]
pub(crate) trait Bytes: Copy {
    /// Activations of a group in the form the products need.
    type Activations: Copy;
    /// Integer sums, apart for the first and the second 16 products.
    type Integers: Copy;
    /// Accumulators of floats, a register of them.
    type Sums: Copy;

    /// Reads 32 bytes.
    unsafe fn load(at: *const u8) -> Self;
    /// Low nibbles of 16 bytes, then their high nibbles.
    unsafe fn nibbles(at: *const u8) -> Self;
    unsafe fn splat(byte: u8) -> Self;
    unsafe fn and(self, other: Self) -> Self;
    unsafe fn or(self, other: Self) -> Self;
    unsafe fn subtract(self, other: Self) -> Self;
    /// Shifts each byte; bits of other bytes may come in from the left.
    unsafe fn shift_right(self, by: usize) -> Self;
    /// Shifts each byte; bits of other bytes may come in from the right.
    unsafe fn shift_left(self, by: usize) -> Self;
    /// `value` in the bytes that share a bit with `mask`, else 0.
    unsafe fn where_set(self, mask: Self, value: u8) -> Self;
    /// The entries of a table that each byte, of 0 to 15, points at.
    unsafe fn look_up(self, table: &[i8; 16]) -> Self;
    /// All ones in byte `i` where bit `i` is set.
    unsafe fn from_bits(bits: u32) -> Self;

    /// Reads 32 high bytes and 32 low bytes.
    unsafe fn activations(high: *const i8, low: *const i8) -> Self::Activations;
    unsafe fn dot(self, x: Self::Activations) -> Self::Integers;

    unsafe fn zero() -> Self::Sums;
    /// `sums + integers * scale`, with one scale for each 16 products.
    unsafe fn accumulate(sums: Self::Sums, integers: Self::Integers, scales: [f32; 2]) -> Self::Sums;
    unsafe fn total(sums: Self::Sums) -> f32;

    unsafe fn widen_half(bits: u16) -> f32;
}
