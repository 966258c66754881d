//! The page format that a cache type stands for in a measurement without a model: `auto` counts as 2-bit.

use oscar_codec::{CodecError, PageLayout};
use oscar_rotations::CacheType;

/// The name of the format in a row of results.
pub(crate) fn format_name(kind: CacheType) -> &'static str {
    match kind {
        CacheType::Auto => CacheType::Int2.name(),
        kind => kind.name(),
    }
}

/// The layout of pages of a head; `groups` is for the formats whose channels share scales in groups.
pub(crate) fn page_layout(kind: CacheType, head_dim: usize, groups: usize) -> Result<PageLayout, CodecError> {
    match kind {
        CacheType::Bf16 => Ok(PageLayout::bf16(head_dim)),
        CacheType::Fp8 => PageLayout::fp8(head_dim),
        CacheType::Int4 => PageLayout::int4(head_dim, groups),
        CacheType::Auto | CacheType::Int2 => PageLayout::int2(head_dim, groups),
    }
}
