//! How many tokens memory holds, by the cache's own count of bytes: windows, scales and padding included.

use std::sync::Arc;

use oscar_codec::{
    BandLayout, BandRows, HeadEncoder, HeadTransform, PageCodec, PageWindows, RowEncoder, Rule,
};
use oscar_engine::{Budget, EngineError, EngineOptions, KvOptions};
use oscar_model::ModelConfig;
use serde::Serialize;

/// Tokens that memory holds in caches of sequences of one length.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Capacity {
    /// Tokens of a sequence.
    pub sequence_tokens: usize,
    /// Bytes of such a sequence with a 2-bit cache, its windows in bf16 included.
    pub int2_sequence_bytes: usize,
    /// Bytes of such a sequence with a bf16 cache.
    pub bf16_sequence_bytes: usize,
    /// Tokens in 10⁹ bytes, with a 2-bit cache.
    pub int2_tokens_per_gb: u64,
    /// Tokens in 10⁹ bytes, with a bf16 cache.
    pub bf16_tokens_per_gb: u64,
}

impl Capacity {
    /// What sequences of `tokens` tokens of a model cost.
    pub fn of(config: &ModelConfig, windows: PageWindows, tokens: usize) -> Result<Capacity, EngineError> {
        let bytes = |codec: Option<Arc<PageCodec>>| {
            let kv = KvOptions { codec, windows, ..KvOptions::default() };
            let options = EngineOptions { context: Some(tokens), kv, ..EngineOptions::default() };
            Ok::<_, EngineError>(Budget::of(config, &options)?.bytes_at(tokens))
        };
        let (int2, bf16) = (bytes(Some(Arc::new(int2(config)?)))?, bytes(None)?);
        let mut capacity = Capacity {
            sequence_tokens: tokens,
            int2_sequence_bytes: int2,
            bf16_sequence_bytes: bf16,
            int2_tokens_per_gb: 0,
            bf16_tokens_per_gb: 0,
        };
        [capacity.int2_tokens_per_gb, capacity.bf16_tokens_per_gb] = capacity.tokens_in(1_000_000_000);
        Ok(capacity)
    }

    /// Tokens of a 2-bit cache and of a bf16 cache in so many bytes.
    pub fn tokens_in(&self, bytes: u64) -> [u64; 2] {
        let tokens = |each: usize| {
            let tokens = u128::from(bytes) * self.sequence_tokens as u128 / each.max(1) as u128;
            u64::try_from(tokens).unwrap_or(u64::MAX)
        };
        [tokens(self.int2_sequence_bytes), tokens(self.bf16_sequence_bytes)]
    }

    /// How many times as many tokens a 2-bit cache holds.
    pub fn int2_over_bf16(&self) -> f64 {
        self.bf16_sequence_bytes as f64 / self.int2_sequence_bytes as f64
    }
}

/// A codec with the bytes of the 2-bit format. What it makes of numbers does not matter here.
fn int2(config: &ModelConfig) -> Result<PageCodec, EngineError> {
    let geometry = config.kv_geometry();
    let layout = BandLayout::int2(geometry.head_dim)?;
    let rows = RowEncoder::Banded(BandRows { layout, value_rule: Rule::MIN_MAX });
    let head = HeadEncoder { transform: HeadTransform::identity(geometry.head_dim), rows, page_means: None };
    let heads = vec![head; geometry.layers * geometry.kv_heads];
    Ok(PageCodec::new("int2", geometry, heads.clone(), heads)?)
}

#[cfg(test)]
mod tests {
    use oscar_model::random_model;

    use super::*;

    #[test]
    fn bytes_are_those_of_pages() {
        let files = random_model("qwen3-8b").expect("a shape");
        let windows = PageWindows { sink: 1, recent: 4 };
        // 36 layers of 8 heads of 128 channels: 147456 bytes of a token in bf16, 20736 in two bits.
        let capacity = Capacity::of(files.config(), windows, 32 << 10).expect("a capacity");
        assert_eq!(capacity.bf16_sequence_bytes, 147_456 << 15);
        assert_eq!(capacity.int2_sequence_bytes, 64 * (6 * 147_456 + 506 * 20_736));
        assert_eq!(capacity.bf16_tokens_per_gb, 6781);
        let ratio = capacity.int2_over_bf16();
        assert!((ratio - 512.0 / (6.0 + 506.0 * 20_736.0 / 147_456.0)).abs() < 1e-12, "{ratio}");
        assert_eq!(capacity.tokens_in(capacity.int2_sequence_bytes as u64)[0], 32 << 10);
        // What is all window is all bf16.
        let short = Capacity::of(files.config(), windows, 320).expect("a capacity");
        assert_eq!(short.int2_over_bf16(), 1.0);
    }

    /// The row of docs/benchmarks-cuda.md: 46 layers of 8 heads of 128 channels.
    #[test]
    fn a_gigabyte_holds_nearly_seven_times_as_many_tokens_of_glm_air() {
        let files = random_model("glm-4.5-air").expect("a shape");
        let windows = PageWindows { sink: 1, recent: 4 };
        let held = [32 << 10, 100 << 10].map(|tokens| {
            let capacity = Capacity::of(files.config(), windows, tokens).expect("a capacity");
            assert_eq!(capacity.bf16_tokens_per_gb, 1_000_000_000 / (46 * 8 * 128 * 2 * 2));
            (capacity.int2_tokens_per_gb, (100.0 * capacity.int2_over_bf16()).round() / 100.0)
        });
        assert_eq!(held, [(35_219, 6.64), (36_896, 6.95)]);
    }
}
