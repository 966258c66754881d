//! The two ends of a sequence that stay in bf16.

/// The first `sink` and the last `recent` tokens are read exactly; what lies between is read from the codec.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Windows {
    /// Tokens at the start.
    pub sink: usize,
    /// Tokens at the end, the query's own included.
    pub recent: usize,
}

impl Default for Windows {
    /// 64 and 256, as published.
    fn default() -> Self {
        Windows { sink: 64, recent: 256 }
    }
}
