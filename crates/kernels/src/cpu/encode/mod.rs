//! The fast path of the 2-bit encoder: many rows of one head and side into pages, and back.
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
//! | [`FastInt2`] | all heads: what the lab and the cache hold |

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod encoder;
mod fast;
mod kernel;
mod lanes;
mod pack;
mod quantise;
mod rotate;
mod seal;
#[cfg(test)]
mod tests;

pub use encoder::{Int2Encoder, Scratch};
pub use fast::FastInt2;
pub use rotate::Element;
pub use seal::{SealScratch, Sealer};
