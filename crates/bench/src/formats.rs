//! Page formats in measurements without a model.

use std::fmt;
use std::str::FromStr;

use oscar_codec::{BandLayout, CodecError, KeyWidths, PageLayout};

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
    /// Bands of other widths, as single layers of a 2-bit cache may have them.
    Int2Widths(KeyWidths),
    /// 2-bit codes for all channels.
    Int2Scalar,
    /// Keys of one bit a channel in bands.
    Int15,
    /// The tier beside a 2-bit cache: the same bands with four bits each.
    High,
}

/// Every format with its name on the command line and in results, which is that of the lab's codec.
const NAMES: [(&str, PageFormat); 12] = [
    ("bf16", PageFormat::Bf16),
    ("fp8", PageFormat::Fp8),
    ("int4", PageFormat::Int4),
    ("int2", PageFormat::Int2),
    ("int2:widths=4/0/0/0", PageFormat::Int2Widths(KeyWidths::MENU[0])),
    ("int2:widths=4/2/0/0", PageFormat::Int2Widths(KeyWidths::MENU[1])),
    ("int2:widths=4/2/2/0", PageFormat::Int2Widths(KeyWidths::MENU[3])),
    ("int2:widths=4/2/2/2", PageFormat::Int2Widths(KeyWidths::MENU[4])),
    ("int2:widths=4/4/2/2", PageFormat::Int2Widths(KeyWidths::MENU[5])),
    ("int2:scalar", PageFormat::Int2Scalar),
    ("int1.5", PageFormat::Int15),
    ("high", PageFormat::High),
];

impl PageFormat {
    /// The name on the command line and in results.
    pub fn name(self) -> &'static str {
        let named = NAMES.into_iter().find(|(_, format)| *format == self);
        // Widths of the default are `int2` itself.
        named.map_or("int2", |(name, _)| name)
    }

    /// The layout of pages of a head; `groups` is for the formats whose channels share scales in groups.
    pub(crate) fn layout(self, head_dim: usize, groups: usize) -> Result<PageLayout, CodecError> {
        match self {
            PageFormat::Bf16 => Ok(PageLayout::bf16(head_dim)),
            PageFormat::Fp8 => PageLayout::fp8(head_dim),
            PageFormat::Int4 => PageLayout::int4(head_dim, groups),
            PageFormat::Int2 => PageLayout::banded(head_dim),
            PageFormat::Int2Widths(widths) => {
                Ok(PageLayout::Banded(BandLayout::of_widths(head_dim, widths)?))
            }
            PageFormat::Int2Scalar => PageLayout::int2(head_dim, groups),
            PageFormat::Int15 => PageLayout::int15(head_dim),
            PageFormat::High => Ok(PageLayout::Banded(BandLayout::high(head_dim)?)),
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
        let found = NAMES.into_iter().find(|(name, _)| *name == text);
        let names = || NAMES.map(|(name, _)| name).join(", ");
        found.map(|(_, format)| format).ok_or_else(|| format!("must be one of {}", names()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_width_of_the_menu_has_a_name_and_pages_of_its_size() {
        for widths in KeyWidths::MENU {
            let name = match widths == KeyWidths::default() {
                true => "int2".to_owned(),
                false => format!("int2:widths={widths}"),
            };
            let format: PageFormat = name.parse().expect(&name);
            assert_eq!(format.name(), name);
            assert_eq!(PageFormat::Int2Widths(widths).name(), name);
            // 128 channels: as many bytes of key codes as bits in sum, times four; four scales; 36 bytes of a value.
            let page = 64 * (4 * widths.sum() as usize + 4 + 36);
            assert_eq!(format.layout(128, 1).expect("a layout").page_bytes(), page, "{name}");
        }
        let high: PageFormat = "high".parse().expect("a format");
        assert_eq!(high.layout(128, 1).expect("a layout").page_bytes(), 64 * (64 + 4 + 68));
        assert!("int2:widths=4/1/1/1".parse::<PageFormat>().unwrap_err().contains("int2:widths=4/4/2/2"));
    }
}
