//! What the lab asks of every codec: give back the rows as a reader of the cache would see them.

use crate::error::CodecError;

/// Which of the two a row is: a key or a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// Keys, after RoPE.
    Key,
    /// Values, as the projection gives them.
    Value,
}

/// Which head of which layer a row belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HeadIndex {
    /// Layer, counted from 0.
    pub layer: usize,
    /// KV head of that layer, counted from 0.
    pub head: usize,
}

/// A way to store keys and values, seen from outside: rows in, what a reader gets out, and the price.
///
/// Every codec goes through the bytes it would store; nothing is simulated in floating point only.
pub trait CacheCodec: Send + Sync {
    /// The name used in tables and on the command line.
    fn name(&self) -> &str;

    /// Tokens that share a scale (KIVI's keys: 32). Rows come in whole groups, starting at a multiple of it.
    fn token_group(&self) -> usize {
        1
    }

    /// Replaces consecutive rows (`tokens x head_dim`) of one head, from position `first` of their sequence on, by what the
    /// cache would read back.
    ///
    /// An error leaves the rows as they were.
    fn round_trip(
        &self,
        head: HeadIndex,
        side: Side,
        first: usize,
        rows: &mut [f32],
    ) -> Result<(), CodecError>;

    /// Bytes for the key and the value of one token of one head, with scales and padding.
    fn token_bytes(&self, head_dim: usize) -> f64;

    /// Bits per key or value element, with scales and padding.
    fn bits_per_element(&self, head_dim: usize) -> f64 {
        self.token_bytes(head_dim) * 8.0 / (2 * head_dim) as f64
    }
}
