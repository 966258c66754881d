//! What the bytes of a KV page mean.
//!
//! A page holds [`PAGE_TOKENS`] consecutive tokens of one sequence, for one layer and one KV head. A row of it is
//! transformed ([`hadamard`], [`Composition`], [`HeadTransform`]), quantised ([`quantise`], [`Rule`],
//! [`band`]) and written to a page ([`layout`]: one file per page format); [`PageCodec`] is all of it for a whole cache.
//! [`ExactSlot`] and [`SealedSlot`] number the pages of a pool. [`baselines`] holds the codecs we compare with. This crate knows numbers only: no I/O, no threads, no models.

pub mod band;
pub mod baselines;
mod cache_codec;
mod composition;
mod error;
pub mod fp8;
pub mod hadamard;
pub mod layout;
mod matrix;
mod page_codec;
mod permutation;
pub mod quantise;
pub mod rule;
mod slot;
pub mod transform;
mod turning;
mod windows;

pub use cache_codec::{CacheCodec, HeadIndex, Side};
pub use composition::Composition;
pub use error::CodecError;
pub use layout::banded::{Band, BandLayout, BandRows};
pub use layout::bf16::Bf16Layout;
pub use layout::codes::{CodeLayout, CodeRows};
pub use layout::fp8::Fp8Layout;
pub use layout::widths::KeyWidths;
pub use layout::{KvGeometry, PAGE_TOKENS, PageLayout, RowEncoder};
pub use matrix::SquareMatrix;
pub use page_codec::{HeadEncoder, PageCodec, page_parts};
pub use rule::{Rule, ScaleType};
pub use slot::{ExactSlot, HostCopy, HostPage, HostSlot, SealedSlot};
pub use transform::HeadTransform;
pub use turning::{KeyTurn, KeyTurning, PageMeans, RopeLayout};
pub use windows::{PageWindows, Windows};
