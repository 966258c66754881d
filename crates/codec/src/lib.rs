//! What the bytes of a KV page mean.
//!
//! A page holds [`PAGE_TOKENS`] consecutive tokens of one sequence, for one layer and one KV head. A row of it is
//! transformed ([`hadamard`], [`permutation`], [`Composition`], [`HeadTransform`]), quantised ([`quantise`], [`Rule`],
//! [`band`]) and written to a page ([`layout`]: one file per page format); [`PageCodec`] is all of it for a whole cache.
//! [`slot`] numbers the pages of a pool. [`baselines`] holds the codecs we compare with. This crate knows numbers only: no I/O, no threads, no models.

pub mod band;
pub mod baselines;
pub mod cache_codec;
pub mod composition;
pub mod error;
pub mod fp8;
pub mod hadamard;
pub mod layout;
pub mod matrix;
pub mod page_codec;
pub mod permutation;
pub mod quantise;
pub mod rule;
pub mod slot;
pub mod transform;
pub mod windows;

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
pub use page_codec::{HeadEncoder, PageCodec};
pub use rule::{Rule, ScaleType};
pub use slot::{ExactSlot, HostCopy, HostPage, HostSlot, SealedSlot};
pub use transform::HeadTransform;
pub use windows::{PageWindows, Windows};
