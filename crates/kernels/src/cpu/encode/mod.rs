//! Rows into sealed pages, and back, on every instruction set.
//!
//! `oscar_codec` defines every byte with plain loops over one row. Here sixteen rows go side by side, one per lane, so
//! that each lane repeats the scalar arithmetic in its order and all instruction sets write the same bytes.
//!
//! | module | job |
//! |---|---|
//! | `lanes`, `avx2`, `avx512` | registers of rows |
//! | `rotate` | rows to blocks `[channel][16]`, centring, the product with the rotation |
//! | `quantise` | grids and codes of a block |
//! | `pack` | codes into the words of a page and out of them |
//! | `kernel` | these together, once per instruction set |
//! | [`Int2Encoder`] | one head and side, with its checks |
//! | [`FastInt2`] | all heads of a 2-bit codec: what the lab holds |
//! | `product` | few rows times a matrix, for the rows of a decode step |
//! | `unpack` | bf16 pages into blocks, and into 8-bit pages |
//! | [`Sealer`] | all heads and formats of a `PageCodec`: what the cache holds |

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod encoder;
mod fast;
mod kernel;
mod lanes;
mod pack;
mod product;
mod quantise;
mod rotate;
mod seal;
#[cfg(test)]
mod seal_tests;
#[cfg(test)]
mod tests;
mod unpack;

pub use encoder::{Int2Encoder, Scratch};
pub use fast::FastInt2;
pub use rotate::Element;
pub use seal::{SealScratch, Sealer};
