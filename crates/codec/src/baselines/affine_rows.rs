//! The shape most baselines share: mix the channels of a row, then quantise the row on its own.

use super::line::LineFormat;
use super::{check_head_dim, count_rows};
use crate::cache_codec::{CacheCodec, HeadIndex, Side};
use crate::error::{CodecError, check_finite, check_length};
use crate::hadamard;

/// Calibrated means of the keys, one per layer and KV head, that a codec subtracts before it quantises.
#[derive(Clone, Debug)]
pub struct KeyMeans {
    kv_heads: usize,
    means: Vec<Vec<f32>>,
}

impl KeyMeans {
    /// Means indexed by `layer * kv_heads + head`.
    pub fn new(kv_heads: usize, means: Vec<Vec<f32>>) -> Result<Self, CodecError> {
        if kv_heads == 0 || !means.len().is_multiple_of(kv_heads) {
            return Err(CodecError::Shape {
                what: "key means (a multiple of the KV heads)",
                expected: kv_heads,
                got: means.len(),
            });
        }
        for (row, mean) in means.iter().enumerate() {
            check_finite(mean, row)?;
        }
        Ok(KeyMeans { kv_heads, means })
    }

    fn of(&self, index: HeadIndex) -> Result<&[f32], CodecError> {
        let HeadIndex { layer, head } = index;
        let layers = self.means.len() / self.kv_heads;
        if head >= self.kv_heads || layer >= layers {
            return Err(CodecError::UnknownHead { layer, head, layers, heads: self.kv_heads });
        }
        Ok(&self.means[layer * self.kv_heads + head])
    }
}

/// Rows quantised one by one, min-max, after an optional (block) Hadamard and an optional centring of the keys.
/// Mixing is done in f32 on the row as given; the result is not rounded before it is quantised.
#[derive(Clone, Debug)]
pub struct AffineRows {
    name: String,
    head_dim: usize,
    /// Channels a Hadamard mixes; 1 mixes nothing.
    block: usize,
    line: LineFormat,
    key_means: Option<KeyMeans>,
}

impl AffineRows {
    pub(super) fn new(name: &str, head_dim: usize, bits: usize, block: usize) -> Result<Self, CodecError> {
        check_head_dim(head_dim)?;
        let line = LineFormat::new(head_dim, bits, 1)?;
        Ok(AffineRows { name: name.to_owned(), head_dim, block, line, key_means: None })
    }

    /// The same codec with centred keys. The means belong to the model, not to a token, and are not counted.
    pub fn with_key_means(mut self, means: KeyMeans) -> Result<Self, CodecError> {
        for mean in &means.means {
            check_length("channels of a key mean", self.head_dim, mean.len())?;
        }
        self.name.push_str("+centred");
        self.key_means = Some(means);
        Ok(self)
    }
}

impl CacheCodec for AffineRows {
    fn name(&self) -> &str {
        &self.name
    }

    fn round_trip(&self, head: HeadIndex, side: Side, _: usize, rows: &mut [f32]) -> Result<(), CodecError> {
        count_rows(rows, self.head_dim)?;
        let mean = match (side, &self.key_means) {
            (Side::Key, Some(means)) => Some(means.of(head)?),
            _ => None,
        };
        let mut bytes = Vec::with_capacity(rows.len() / self.head_dim * self.line.bytes());
        let mut work = vec![0.0; self.head_dim];
        for (index, row) in rows.chunks_exact(self.head_dim).enumerate() {
            check_finite(row, index)?;
            work.copy_from_slice(row);
            if let Some(mean) = mean {
                work.iter_mut().zip(mean).for_each(|(x, mean)| *x -= mean);
            }
            hadamard::transform_blocks(&mut work, self.block);
            self.line.store(&work, &mut bytes).map_err(|error| error.in_row(index))?;
        }
        for (row, line) in rows.chunks_exact_mut(self.head_dim).zip(bytes.chunks_exact(self.line.bytes())) {
            self.line.load(line, row)?;
            hadamard::transform_blocks(row, self.block);
            if let Some(mean) = mean {
                row.iter_mut().zip(mean).for_each(|(x, mean)| *x += mean);
            }
        }
        Ok(())
    }

    fn token_bytes(&self, head_dim: usize) -> f64 {
        LineFormat::new(head_dim, self.line.bits(), 1).map_or(f64::NAN, |line| 2.0 * line.bytes() as f64)
    }
}
