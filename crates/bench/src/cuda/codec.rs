//! Speed of sealing on a GPU: full bf16 pages of all layers and heads to sealed pages, one launch for a list of pages.
//!
//! Speed is counted in bytes of bf16 input, keys and values, per second. Pages of at least `pool_bytes` are gone through
//! before one is read again. That the bytes are the codec's is shown by the test `cuda` of `oscar-kernels`.

use std::path::PathBuf;

use oscar_codec::{
    BandLayout, CodeLayout, CodecError, HeadEncoder, HeadTransform, KvGeometry, PageCodec, PageLayout, Rule,
    hadamard,
};
use oscar_kernels::cuda::{Device, PageOrder};
use serde::Serialize;

use super::attention::CudaBenchError;
use super::page_means::centred_codec;
use super::pages::measure_sealing;

/// A measurement of sealing on a card.
#[derive(Clone, Debug)]
pub struct CudaCodecBench {
    /// Index of the card.
    pub card: usize,
    /// Folder of compiled kernels, which are compiled anew without one.
    pub kernels: Option<PathBuf>,
    /// Layers of a page.
    pub layers: usize,
    /// KV heads of a layer.
    pub kv_heads: usize,
    /// Head dimensions to measure, one part of the table each.
    pub head_dims: Vec<usize>,
    /// Groups of channels with a scale of their own, in pages of scalar 2-bit codes.
    pub groups: usize,
    /// Rounding rules of scalar 2-bit codes: of keys and values, or of values beside keys in bands.
    pub rules: Vec<Rule>,
    /// Pages that one kernel launch seals or writes.
    pub pages: usize,
    /// Bytes of pages that are read before one is read again.
    pub pool_bytes: usize,
    /// The number of passes that are timed.
    pub repeat: usize,
}

/// The result of one measurement.
#[derive(Clone, Debug, Serialize)]
pub struct CudaCodecRow {
    kind: &'static str,
    card: String,
    /// Version of the CUDA interface of the driver.
    cuda: i32,
    kv: &'static str,
    rule: Option<String>,
    head_dim: usize,
    groups: usize,
    layers: usize,
    kv_heads: usize,
    /// Pages that one kernel launch seals or writes.
    pages: usize,
    /// Megabytes of bf16 of a launch.
    mb: f64,
    /// Microseconds of a launch, median.
    pub us: f64,
    /// Bytes of bf16 per second.
    gb_per_s: f64,
}

/// Measures; `on_row` is called after each row.
pub fn run(bench: &CudaCodecBench, mut on_row: impl FnMut(&CudaCodecRow)) -> Result<(), CudaBenchError> {
    let mut codecs = Vec::new();
    for &head_dim in &bench.head_dims {
        let geometry = KvGeometry { layers: bench.layers, kv_heads: bench.kv_heads, head_dim };
        for &rule in &bench.rules {
            // Not every head dimension has bands.
            if PageLayout::banded(head_dim).is_ok_and(|layout| PageOrder::new(layout).is_ok()) {
                codecs.push(("int2", Some(rule), 1, banded(geometry, rule)?));
            }
            codecs.push(("int2:scalar", Some(rule), bench.groups, int2(geometry, bench.groups, rule)?));
        }
        codecs.push(("int4", None, 1, PageCodec::int4(geometry, None)?));
        codecs.push(("fp8", None, 1, PageCodec::fp8(geometry, None)?));
    }
    let device = Device::open(bench.card, bench.kernels.clone())?;
    for (kv, rule, groups, codec) in codecs {
        let geometry = codec.geometry();
        let measured = measure_sealing(&device, &codec, bench.pages, bench.pool_bytes, bench.repeat)?;
        on_row(&CudaCodecRow {
            kind: "cuda_codec",
            card: device.name().to_owned(),
            cuda: device.driver_version()?,
            kv,
            rule: rule.map(|rule| rule.to_string()),
            head_dim: geometry.head_dim,
            groups,
            layers: geometry.layers,
            kv_heads: geometry.kv_heads,
            pages: bench.pages,
            mb: measured.bytes as f64 / 1e6,
            us: measured.seconds * 1e6,
            gb_per_s: measured.bytes as f64 / measured.seconds / 1e9,
        });
    }
    Ok(())
}

/// Pages hold rows that are rotated already, so one rotation serves all heads.
fn int2(geometry: KvGeometry, groups: usize, rule: Rule) -> Result<PageCodec, CodecError> {
    let KvGeometry { layers, kv_heads, head_dim } = geometry;
    let transform = HeadTransform::new(None, &hadamard::matrix(head_dim))?;
    let layout = CodeLayout::new(2, head_dim, groups)?;
    let encoders = vec![HeadEncoder::codes(transform, layout, rule, false); layers * kv_heads];
    PageCodec::new("int2", geometry, encoders.clone(), encoders)
}

/// Keys in bands, and a rule for values.
fn banded(geometry: KvGeometry, value_rule: Rule) -> Result<PageCodec, CodecError> {
    centred_codec(geometry, BandLayout::int2(geometry.head_dim)?, value_rule)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bench() -> CudaCodecBench {
        CudaCodecBench {
            card: 0,
            kernels: None,
            layers: 2,
            kv_heads: 2,
            head_dims: vec![64],
            groups: 1,
            rules: vec![Rule::Search],
            pages: 3,
            pool_bytes: 1 << 20,
            repeat: 2,
        }
    }

    #[test]
    fn rows_come_from_a_card_or_an_error_says_that_there_is_none() {
        let mut rows = Vec::new();
        match run(&bench(), |row| rows.push(row.clone())) {
            Ok(()) => {
                assert_eq!(rows.len(), 4);
                assert!(rows.iter().all(|row| row.us > 0.0 && row.mb > 0.0), "{rows:?}");
            }
            Err(error) => {
                println!("skipped: {error}");
                assert!(matches!(error, CudaBenchError::Cuda(_)), "{error}");
            }
        }
    }

    #[test]
    fn shapes_that_do_not_fit_are_refused_before_a_card_is_needed() {
        let error = run(&CudaCodecBench { groups: 7, ..bench() }, |_| {}).unwrap_err();
        assert!(matches!(error, CudaBenchError::Codec(_)), "{error}");
    }
}
