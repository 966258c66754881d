//! Speed of the 2-bit encoder on every instruction set, against the scalar definition in the same run.
//!
//! Speed is counted in bytes of bf16 input per second and core. Each path encodes the rows that the scalar path has
//! encoded, and its bytes are compared: a fast path that differs would be worth nothing.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use oscar_codec::{
    BandLayout, BandRows, CodeLayout, CodecError, HeadEncoder, HeadIndex, HeadTransform, KvGeometry,
    PAGE_TOKENS, PageCodec, RowEncoder, Rule, Side, SquareMatrix, hadamard,
};
use oscar_kernels::cpu::encode::{FastCodec, SealScratch};
use oscar_kernels::cpu::isa::Isa;
use oscar_random::Random;
use serde::Serialize;

use crate::formats::PageFormat;

/// A measurement of the 2-bit encoder on the CPU.
#[derive(Clone, Debug)]
pub struct CodecBench {
    /// Head dimensions to measure, one part of the table each.
    pub head_dims: Vec<usize>,
    /// Groups of channels with a scale of their own, of scalar codes.
    pub groups: usize,
    /// Rounding rules of scalar codes; keys in bands have a rule of their own.
    pub rules: Vec<Rule>,
    /// Rows per pass and thread.
    pub rows: usize,
    /// Threads that encode at the same time, each its own rows.
    pub threads: usize,
}

/// How long fast paths are measured; at least two passes, of which the fastest counts.
const MEASURE: Duration = Duration::from_millis(150);

/// The part of the encoder that is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum EncoderStage {
    /// Centre, rotate, round to bf16, quantise, write the page.
    Encode,
    /// Centre, rotate, round to bf16.
    Rotate,
    /// Quantise rotated rows and write the page.
    Quantise,
}

/// The only head of the codec that is measured.
const HEAD: HeadIndex = HeadIndex { layer: 0, head: 0 };

/// The result of one measurement.
#[derive(Debug, Serialize)]
struct CodecRow {
    kind: &'static str,
    kv: &'static str,
    head_dim: usize,
    groups: usize,
    stage: EncoderStage,
    side: Option<&'static str>,
    rule: Option<String>,
    path: String,
    threads: usize,
    rows: usize,
    mb_per_s_per_core: f64,
    times_scalar: f64,
    equal: bool,
}

/// Measures; `on_row` is called after each path.
pub fn run(bench: &CodecBench, mut on_row: impl FnMut(serde_json::Value)) -> Result<(), CodecError> {
    for &head_dim in &bench.head_dims {
        let layout = CodeLayout::new(2, head_dim, bench.groups)?;
        let geometry = KvGeometry { layers: 1, kv_heads: 1, head_dim };
        let transform = transform(head_dim)?;
        let input = input(head_dim, bench.rows);
        let mut part = |format: PageFormat, stage: EncoderStage, side: Option<Side>, rule: Option<Rule>| {
            let encoder = match format {
                PageFormat::Int2 => banded(transform.clone())?,
                _ => {
                    let rounding = rule.unwrap_or(Rule::Gaussian);
                    HeadEncoder::codes(transform.clone(), layout, rounding, false)
                }
            };
            let codec = PageCodec::new("bench", geometry, vec![encoder.clone()], vec![encoder])?;
            let mut scalar: Option<(f64, Vec<u8>)> = None;
            // The AMX path of the encoder is that of AVX-512: tiles cannot repeat the order of the sums.
            for isa in Isa::available().filter(|isa| *isa != Isa::Amx) {
                let codec = FastCodec::new(isa, codec.clone());
                let work =
                    TimedStage { codec: &codec, stage, side: side.unwrap_or(Side::Key), input: &input };
                let (bytes_per_s, results) = work.measure(bench.threads)?;
                let (baseline, expected) = scalar.get_or_insert_with(|| (bytes_per_s, results.clone()));
                let row = CodecRow {
                    kind: "codec",
                    kv: format.name(),
                    head_dim,
                    groups: bench.groups,
                    stage,
                    side: side.map(|side| if side == Side::Key { "key" } else { "value" }),
                    rule: rule.map(|rule| rule.to_string()),
                    path: isa.to_string(),
                    threads: bench.threads,
                    rows: bench.rows,
                    mb_per_s_per_core: bytes_per_s / 1e6,
                    times_scalar: bytes_per_s / *baseline,
                    equal: results == *expected,
                };
                on_row(serde_json::to_value(row).expect("a row holds plain values only"));
            }
            Ok::<(), CodecError>(())
        };
        let scalar = PageFormat::Int2Scalar;
        for &rule in &bench.rules {
            part(scalar, EncoderStage::Encode, Some(Side::Key), Some(rule))?;
            part(scalar, EncoderStage::Encode, Some(Side::Value), Some(rule))?;
        }
        part(scalar, EncoderStage::Rotate, None, None)?;
        for &rule in &bench.rules {
            part(scalar, EncoderStage::Quantise, Some(Side::Key), Some(rule))?;
        }
        // Not every head has bands. Values beside them are scalar codes.
        if BandLayout::int2(head_dim).is_ok() {
            part(PageFormat::Int2, EncoderStage::Encode, Some(Side::Key), None)?;
            part(PageFormat::Int2, EncoderStage::Quantise, Some(Side::Key), None)?;
        }
    }
    Ok(())
}

/// One stage of one path, ready to be timed.
struct TimedStage<'a> {
    codec: &'a FastCodec,
    stage: EncoderStage,
    side: Side,
    input: &'a [f32],
}

impl TimedStage<'_> {
    /// Bytes of bf16 per second and core, and what came out.
    fn measure(&self, threads: usize) -> Result<(f64, Vec<u8>), CodecError> {
        let barrier = Barrier::new(threads);
        let outcomes: Vec<Result<(f64, Vec<u8>), CodecError>> = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads).map(|_| scope.spawn(|| self.time_passes(&barrier))).collect();
            let join = |worker: std::thread::ScopedJoinHandle<'_, _>| worker.join().expect("no pass panics");
            workers.into_iter().map(join).collect()
        });
        let mut total = 0.0;
        let mut results = Vec::new();
        for outcome in outcomes {
            let (speed, bytes) = outcome?;
            total += speed;
            results = bytes;
        }
        Ok((total / threads as f64, results))
    }

    /// The speed of the fastest pass of this thread.
    fn time_passes(&self, barrier: &Barrier) -> Result<(f64, Vec<u8>), CodecError> {
        let prepared = self.prepare();
        barrier.wait();
        let mut prepared = prepared?;
        let mut fastest = f64::INFINITY;
        let start = Instant::now();
        let mut passes = 0;
        while passes < 2 || start.elapsed() < MEASURE {
            let pass = Instant::now();
            self.pass(&mut prepared)?;
            fastest = fastest.min(pass.elapsed().as_secs_f64());
            passes += 1;
        }
        let results = match self.stage {
            EncoderStage::Encode | EncoderStage::Quantise => prepared.pages,
            EncoderStage::Rotate => prepared.rows.iter().flat_map(|x| x.to_le_bytes()).collect(),
        };
        // Rows come in bf16 in a cache, whatever they are here.
        Ok((2.0 * self.input.len() as f64 / fastest, results))
    }

    fn prepare(&self) -> Result<StageBuffers, CodecError> {
        let (values, page_bytes) = self.page_sizes();
        let mut prepared = StageBuffers {
            scratch: SealScratch::default(),
            pages: vec![0; self.input.len().div_ceil(values) * page_bytes],
            rows: self.input.to_vec(),
        };
        if self.stage == EncoderStage::Quantise {
            self.codec.transform_rows(HEAD, self.side, &mut prepared.rows, &mut prepared.scratch)?;
        }
        Ok(prepared)
    }

    /// Encodes all rows once.
    fn pass(&self, prepared: &mut StageBuffers) -> Result<(), CodecError> {
        let (values, page_bytes) = self.page_sizes();
        let StageBuffers { scratch, pages, rows } = prepared;
        let parts =
            self.input.chunks(values).zip(rows.chunks_mut(values)).zip(pages.chunks_exact_mut(page_bytes));
        for ((input, rows), page) in parts {
            if self.stage != EncoderStage::Quantise {
                rows.copy_from_slice(input);
                self.codec.transform_rows(HEAD, self.side, rows, scratch)?;
            }
            if self.stage != EncoderStage::Rotate {
                self.codec.write_rows(HEAD, self.side, rows, page, scratch)?;
            }
        }
        Ok(())
    }

    /// Values of one side and bytes of a page.
    fn page_sizes(&self) -> (usize, usize) {
        let codec = self.codec.codec();
        (PAGE_TOKENS * codec.geometry().head_dim, codec.head_bytes(0))
    }
}

struct StageBuffers {
    scratch: SealScratch,
    pages: Vec<u8>,
    rows: Vec<f32>,
}

/// Keys in bands behind a transform; the time does not depend on what it does to the bands.
fn banded(transform: HeadTransform) -> Result<HeadEncoder, CodecError> {
    let layout = BandLayout::int2(transform.dim())?;
    let rows = RowEncoder::Banded(BandRows { layout, value_rule: Rule::Gaussian });
    Ok(HeadEncoder { transform, rows, page_means: None })
}

/// A dense rotation (a Hadamard matrix behind a reflection) and a mean.
fn transform(head_dim: usize) -> Result<HeadTransform, CodecError> {
    let mut random = Random::new(1);
    let normal: Vec<f64> = (0..head_dim).map(|_| f64::from(random.signed())).collect();
    let length: f64 = normal.iter().map(|x| x * x).sum();
    let reflection = SquareMatrix::from_fn(head_dim, |i, j| {
        f64::from(u8::from(i == j)) - 2.0 * normal[i] * normal[j] / length
    });
    let mean = (0..head_dim).map(|_| random.signed() * 4.0).collect();
    HeadTransform::new(Some(mean), &reflection.multiply(&hadamard::matrix(head_dim)))
}

/// Rows like those of keys: bell-shaped, with channels of very different sizes.
fn input(head_dim: usize, rows: usize) -> Vec<f32> {
    let mut random = Random::new(2);
    let sizes: Vec<f32> = (0..head_dim).map(|_| (2.0 * random.signed()).exp()).collect();
    let mut value = |channel: usize| {
        half::bf16::from_f32((random.signed() + random.signed() + random.signed()) * sizes[channel]).to_f32()
    };
    (0..rows * head_dim).map(|index| value(index % head_dim)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_path_is_measured_and_equal() {
        let bench = CodecBench {
            head_dims: vec![32],
            groups: 2,
            rules: vec![Rule::Clip(0.96), Rule::Search],
            rows: 70,
            threads: 2,
        };
        let mut rows = Vec::new();
        run(&bench, |row| rows.push(row)).unwrap();
        let paths = Isa::available().filter(|isa| *isa != Isa::Amx).count();
        // Scalar codes with two rules, and keys in bands encoded and quantised.
        assert_eq!(rows.len(), paths * (2 * 2 + 1 + 2 + 2));
        let bands = rows.iter().filter(|row| row["kv"] == "int2" && row["side"] == "key");
        assert_eq!(bands.count(), 2 * paths);
        for row in &rows {
            assert_eq!(row["equal"], true, "{row}");
            assert!(row["mb_per_s_per_core"].as_f64().unwrap() > 0.0, "{row}");
        }
        assert!(rows.iter().filter(|row| row["path"] == "scalar").all(|row| row["times_scalar"] == 1.0));
    }

    #[test]
    fn groups_that_do_not_fit_are_refused() {
        let bench =
            CodecBench { head_dims: vec![32], groups: 5, rules: vec![Rule::Search], rows: 1, threads: 1 };
        assert!(matches!(run(&bench, |_| {}), Err(CodecError::Groups { .. })));
    }
}
