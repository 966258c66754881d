//! Page formats in measurements without a model.

use std::fmt;
use std::str::FromStr;

use oscar_codec::{CodecError, PageLayout};
use oscar_rotations::CacheType;

/// A page format to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageFormat {
    /// Pages of 16-bit floats.
    Bf16,
    /// Pages of 8-bit floats.
    Fp8,
    /// Pages of 4-bit codes.
    Int4,
    /// What a 2-bit cache is served with: keys in bands.
    Int2,
    /// 2-bit codes for all channels.
    Int2Scalar,
    /// Keys of one bit a channel in bands.
    Int15,
}

impl PageFormat {
    /// Every format.
    const ALL: [PageFormat; 6] = [
        PageFormat::Bf16,
        PageFormat::Fp8,
        PageFormat::Int4,
        PageFormat::Int2,
        PageFormat::Int2Scalar,
        PageFormat::Int15,
    ];

    /// The name on the command line and in results.
    pub fn name(self) -> &'static str {
        match self {
            PageFormat::Int2Scalar => "int2:scalar",
            format => format.cache_type().name(),
        }
    }

    /// The cache type that pages of the format belong to.
    pub fn cache_type(self) -> CacheType {
        match self {
            PageFormat::Bf16 => CacheType::Bf16,
            PageFormat::Fp8 => CacheType::Fp8,
            PageFormat::Int4 => CacheType::Int4,
            PageFormat::Int2 | PageFormat::Int2Scalar => CacheType::Int2,
            PageFormat::Int15 => CacheType::Int15,
        }
    }

    /// The layout of pages of a head; `groups` is for the formats whose channels share scales in groups.
    pub(crate) fn layout(self, head_dim: usize, groups: usize) -> Result<PageLayout, CodecError> {
        match self {
            PageFormat::Bf16 => Ok(PageLayout::bf16(head_dim)),
            PageFormat::Fp8 => PageLayout::fp8(head_dim),
            PageFormat::Int4 => PageLayout::int4(head_dim, groups),
            PageFormat::Int2 => PageLayout::banded(head_dim),
            PageFormat::Int2Scalar => PageLayout::int2(head_dim, groups),
            PageFormat::Int15 => PageLayout::int15(head_dim),
        }
    }
}

impl fmt::Display for PageFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for PageFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<PageFormat, String> {
        let found = PageFormat::ALL.into_iter().find(|format| format.name() == text);
        found.ok_or_else(|| "must be bf16, fp8, int4, int2, int2:scalar or int1.5".to_owned())
    }
}
