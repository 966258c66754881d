//! The cache type: the page format of history, by name.

use std::fmt;
use std::str::FromStr;

/// The page format in which history is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheType {
    /// 2-bit codes when there are rotations for the model, else bf16.
    #[default]
    Auto,
    /// bf16 pages: nothing is sealed.
    Bf16,
    /// 8-bit floats (E4M3).
    Fp8,
    /// 4-bit codes after a Hadamard rotation.
    Int4,
    /// 2-bit codes after the model's own rotation.
    Int2,
    /// Keys of one bit a channel in bands, values of two.
    Int15,
}

impl CacheType {
    /// Every cache type.
    pub const ALL: [CacheType; 6] = [
        CacheType::Auto,
        CacheType::Bf16,
        CacheType::Fp8,
        CacheType::Int4,
        CacheType::Int2,
        CacheType::Int15,
    ];

    /// The name on the command line and in results.
    pub fn name(self) -> &'static str {
        match self {
            CacheType::Auto => "auto",
            CacheType::Bf16 => "bf16",
            CacheType::Fp8 => "fp8",
            CacheType::Int4 => "int4",
            CacheType::Int2 => "int2",
            CacheType::Int15 => "int1.5",
        }
    }
}

impl fmt::Display for CacheType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for CacheType {
    type Err = String;

    fn from_str(text: &str) -> Result<CacheType, String> {
        let found = CacheType::ALL.into_iter().find(|kind| kind.name() == text);
        found.ok_or_else(|| "must be auto, bf16, fp8, int4, int2 or int1.5".to_owned())
    }
}
