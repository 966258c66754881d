//! What the bytes of a KV page mean.
//!
//! A page holds [`PAGE_TOKENS`] consecutive tokens of one sequence, for one layer and one KV head. A row of it is
//! rotated ([`hadamard`], [`permutation`], [`Composition`], [`HeadTransform`]), quantised ([`quantise`], [`Rule`])
//! and packed ([`code_page`], [`fp8_page`]); [`PageCodec`] is all of it for a whole cache. [`baselines`] holds the codecs we compare with. This crate knows
//! numbers only: no I/O, no threads, no models.

pub mod baselines;
pub mod cache_codec;
pub mod code_page;
pub mod composition;
pub mod error;
pub mod fp8;
pub mod fp8_page;
pub mod hadamard;
pub mod int2;
pub mod matrix;
pub mod page;
pub mod page_codec;
pub mod permutation;
pub mod quantise;
pub mod quartered;
pub mod rule;
pub mod transform;
pub mod windows;

pub use cache_codec::{CacheCodec, HeadIndex, Side};
pub use code_page::CodeLayout;
pub use composition::Composition;
pub use error::CodecError;
pub use fp8_page::Fp8Layout;
pub use int2::{HeadEncoder, Int2Codec};
pub use matrix::SquareMatrix;
pub use page::{KvGeometry, PAGE_TOKENS, PageFormat};
pub use page_codec::PageCodec;
pub use rule::{Rule, ScaleType};
pub use transform::HeadTransform;
pub use windows::{PageWindows, Windows};
