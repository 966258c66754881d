//! Registers of packed codes of 1, 2 or 4 bits, as sealed pages store them.

/// A register of words of 32 bits, whose bytes hold packed codes. Methods are inlined into functions that enable the
/// instructions.
///
/// Products are of the low code of each byte with a signed byte, summed over the four bytes of a word. Some instruction
/// sets sum them in 16 bits first, which have room for a bounded number of products.
///
/// # Safety of the methods
/// The CPU has the instructions, and pointers lead to as many elements as a method says, on any address.
#[allow(clippy::missing_safety_doc)]
pub(crate) trait CodeWords: Copy {
    /// Words of a register.
    const LANES: usize;
    /// Sums of products, one of 32 bits for each word.
    type Sums: Copy;
    /// Sums that are not widened yet.
    type Partial: Copy;
    /// A register of numbers with as many lanes.
    type Numbers;

    /// How many words of codes may be multiplied, each with all its codes of `bits` bits, before sums are widened.
    fn words_before_widening(bits: u32) -> usize;

    /// Reads [`CodeWords::LANES`] words.
    unsafe fn load(at: *const u8) -> Self;
    /// Four bytes, repeated for every word.
    unsafe fn splat(bytes: i32) -> Self;
    /// The low code of every byte.
    unsafe fn low_codes<const BITS: u32>(self) -> Self;
    /// Moves the next code of every byte to its low bits. Above them there may be anything.
    unsafe fn next_codes<const BITS: u32>(self) -> Self;

    unsafe fn zero() -> Self::Sums;
    /// What products are added to.
    unsafe fn begin(sums: Self::Sums) -> Self::Partial;
    /// Adds the products of low codes with signed bytes.
    unsafe fn add_products(partial: Self::Partial, codes: Self, bytes: Self) -> Self::Partial;
    /// What was summed since [`CodeWords::begin`], widened and added to the sums it began with.
    unsafe fn widen(sums: Self::Sums, partial: Self::Partial) -> Self::Sums;
    /// `256·high + low` as numbers.
    unsafe fn join(high: Self::Sums, low: Self::Sums) -> Self::Numbers;
    /// Writes [`CodeWords::LANES`] sums.
    unsafe fn store(sums: Self::Sums, at: *mut i32);
}
