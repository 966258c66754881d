//! Rows into sealed pages, and back, on every instruction set.
//!
//! `oscar_codec` defines every byte with plain loops over one row. Here sixteen rows go side by side, one per lane, so
//! that each lane repeats the scalar arithmetic in its order and all instruction sets write the same bytes.
//!
//! | module | job |
//! |---|---|
//! | `quantise` | grids and codes of a block |
//! | `bands` | codes and scales of the bands of a block of keys |
//! | `pack` | codes into the words of a page |
//! | `kernel` | these together, on up to a page of rows |
//! | `product` | few rows times a matrix, for the rows of a decode step |
//! | `unpack` | rows and bf16 pages into blocks `[channel][16]`, and into 8-bit pages |
//! | [`Sealer`] | all heads and formats of a `PageCodec`: what the cache holds |
//! | [`FastCodec`] | a codec behind the lab's interface, on a sealer |

mod bands;
mod fast;
mod kernel;
mod pack;
mod product;
mod quantise;
mod seal;
#[cfg(test)]
mod seal_tests;
#[cfg(test)]
mod tests;
mod unpack;

pub use fast::FastCodec;
pub use seal::{SealScratch, Sealer};
