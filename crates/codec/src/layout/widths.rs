//! How many bits the codes of each quarter of a key's channels have.
//!
//! A model does not need all its layers alike: in SmolLM2 the keys of one layer move the output up to forty times as
//! much as those of another when both are stored in the same number of bits. So each layer has one of a few widths, and a
//! calibration gives more bits to the layers that need them and takes them from those that do not, while the average stays:
//!
//! ```text
//!   bits of a channel in each quarter, strongest first      bytes of a key, d=128
//!   4 0 0 0                                                 20
//!   4 2 0 0                                                 28
//!   4 2 1 1   4 2 2 0                                       36, the average
//!   4 2 2 2                                                 44
//!   4 4 2 2                                                 52
//! ```

use std::fmt;
use std::str::FromStr;

use crate::error::CodecError;

/// Channels of a band are a multiple of this.
pub const BAND_STEP: usize = 16;

/// Bits of the codes of four quarters of a key's channels, strongest first: one of [`KeyWidths::MENU`]. Files and commands write
/// them as `4/2/1/1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KeyWidths([u8; 4]);

/// What all layers have when nobody has measured which need more.
impl Default for KeyWidths {
    fn default() -> KeyWidths {
        KeyWidths([4, 2, 1, 1])
    }
}

impl KeyWidths {
    /// All widths that a layer can have, by the bits that they take. Where two take the same, the default comes first.
    pub const MENU: [KeyWidths; 6] = [
        KeyWidths([4, 0, 0, 0]),
        KeyWidths([4, 2, 0, 0]),
        KeyWidths([4, 2, 1, 1]),
        KeyWidths([4, 2, 2, 0]),
        KeyWidths([4, 2, 2, 2]),
        KeyWidths([4, 4, 2, 2]),
    ];

    /// The bits of a code in each quarter, strongest first; 0 where a quarter is not stored.
    pub fn quarters(self) -> [u32; 4] {
        self.0.map(u32::from)
    }

    /// Bits of one channel of each quarter together.
    pub fn sum(self) -> u32 {
        self.quarters().iter().sum()
    }

    /// The widths that keys of so many channels can have. Heads without quarters of a multiple of 16 channels have the default
    /// alone.
    pub fn menu(head_dim: usize) -> impl Iterator<Item = KeyWidths> {
        let has_quarters = head_dim > 0 && head_dim.is_multiple_of(4 * BAND_STEP);
        KeyWidths::MENU.into_iter().filter(move |widths| *widths == KeyWidths::default() || has_quarters)
    }
}

impl fmt::Display for KeyWidths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d] = self.0;
        f.pad(&format!("{a}/{b}/{c}/{d}"))
    }
}

impl FromStr for KeyWidths {
    type Err = CodecError;

    fn from_str(text: &str) -> Result<KeyWidths, CodecError> {
        let found = KeyWidths::MENU.into_iter().find(|widths| widths.to_string() == text);
        found.ok_or_else(|| CodecError::UnknownName {
            what: "widths of keys",
            name: text.to_owned(),
            known: "4/0/0/0, 4/2/0/0, 4/2/1/1, 4/2/2/0, 4/2/2/2, 4/4/2/2",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back_and_others_refused_with_the_list() {
        let refused = "8/0/0/0".parse::<KeyWidths>().unwrap_err().to_string();
        for widths in KeyWidths::MENU {
            assert_eq!(widths.to_string().parse(), Ok(widths));
            assert!(refused.contains(&widths.to_string()), "{refused}");
        }
        for bad in ["", "4/2/1", "4,2,1,1", "1/1/2/4", "4/2/1/1/", "8/0/0/0"] {
            assert!(bad.parse::<KeyWidths>().is_err(), "{bad}");
        }
    }

    #[test]
    fn the_menu_grows_and_its_middle_is_the_default() {
        let sums = KeyWidths::MENU.map(KeyWidths::sum);
        assert_eq!(sums, [4, 6, 8, 8, 10, 12]);
        assert_eq!(KeyWidths::default().sum(), 8);
        let menu = |head_dim| KeyWidths::menu(head_dim).map(KeyWidths::sum).collect::<Vec<_>>();
        assert_eq!(menu(64), sums);
        assert_eq!(menu(128), sums);
        assert_eq!(menu(256), sums);
        // 24 channels are no multiple of 16.
        assert_eq!(menu(96), [8]);
    }
}
