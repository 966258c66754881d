//! Decode attention on a GPU: every format at every batch and context, against the read ceiling of the card.
//!
//! Pages of as many layers as it takes to leave no cache warm are attended to one layer after the other, replayed from a
//! graph; a row is the median over passes, divided by layers. Bytes are those of the pages that are read.

use std::path::PathBuf;

use oscar_codec::{CodecError, PAGE_TOKENS, PageLayout};
use oscar_kernels::cuda::{CudaError, DecodeShape, Device, Split};
use oscar_lab::eval::report::charts::{LineChart, Note, Series, short};
use serde::Serialize;

use super::decode::{DecodeCase, measure, read_ceiling};
use crate::formats::PageFormat;

/// A measurement of decode attention on a card.
#[derive(Clone, Debug)]
pub struct CudaAttentionBench {
    /// Index of the card.
    pub card: usize,
    /// Folder of compiled kernels, which are compiled anew without one.
    pub kernels: Option<PathBuf>,
    /// Query heads, a multiple of `kv_heads`.
    pub q_heads: usize,
    /// The number of KV heads.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Groups of channels with a scale of their own, in formats that have groups.
    pub groups: usize,
    /// Numbers of sequences in a step.
    pub batches: Vec<usize>,
    /// Numbers of tokens in the cache of each sequence.
    pub contexts: Vec<usize>,
    /// Page formats to measure.
    pub formats: Vec<PageFormat>,
    /// Tokens read in bf16 at the start, in whole pages.
    pub sink_tokens: usize,
    /// Tokens read in bf16 before the page of the query, in whole pages.
    pub recent_tokens: usize,
    /// Whether sequences are split at fixed pages, so that results do not depend on the batch.
    pub deterministic: bool,
    /// Bytes of pages that are read before one is read again.
    pub pool_bytes: usize,
    /// The number of passes that are timed.
    pub repeat: usize,
}

/// Pages of a segment in deterministic mode.
const FIXED_PAGES: usize = 32;

/// The result of one measurement.
#[derive(Clone, Debug, Serialize)]
pub struct CudaAttentionRow {
    kind: &'static str,
    card: String,
    /// Version of the CUDA interface of the driver.
    cuda: i32,
    /// The page format.
    pub kv: &'static str,
    batch: usize,
    context: usize,
    q_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    groups: usize,
    sink_tokens: usize,
    recent_tokens: usize,
    deterministic: bool,
    layers: usize,
    /// Bytes of pages that a layer reads.
    bytes: usize,
    /// Microseconds per layer, median.
    pub us_per_layer: f64,
    /// Microseconds per layer of the fastest pass.
    fastest_us: f64,
    /// Bytes of pages per second.
    gb_per_s: f64,
    /// The read ceiling: bytes per second of a kernel that only reads.
    ceiling_gb_per_s: f64,
    /// [`gb_per_s`](Self::gb_per_s) over the read ceiling.
    of_ceiling: f64,
    /// Times faster than bf16 of the same batch and context, if that is measured.
    times_bf16: Option<f64>,
    /// Norm of the difference to f64 over the norm of the result, for one head.
    error: f64,
    registers: usize,
    spilled_bytes: usize,
}

impl CudaAttentionRow {
    /// Multiplications and additions of a layer: queries with keys, weights with values.
    fn operations(&self) -> f64 {
        4.0 * (self.batch * self.context * self.q_heads * self.head_dim) as f64
    }

    /// Operations per byte that is read, and per second.
    fn point(&self) -> (f64, f64) {
        (self.operations() / self.bytes as f64, self.operations() / (self.us_per_layer / 1e6))
    }

    fn series(&self) -> String {
        if self.groups == 1 { self.kv.to_owned() } else { format!("{}, {} groups", self.kv, self.groups) }
    }
}

/// All measurements below the read ceiling of their card, as SVG; the fastest and the slowest of every format are named.
pub fn roofline(rows: &[CudaAttentionRow]) -> String {
    let ceiling = rows.first().map_or(0.0, |row| row.ceiling_gb_per_s * 1e9);
    let note = |row: &CudaAttentionRow, below: bool| {
        let (intensity, speed) = row.point();
        let share = speed / (intensity * ceiling);
        let text = format!("{} x {} ({share:.2})", row.batch, short(row.context as f64));
        Note { at: (intensity, speed), text, below }
    };
    let mut series: Vec<Series> = Vec::new();
    for name in rows.iter().map(CudaAttentionRow::series) {
        if series.iter().any(|known| known.name == name) {
            continue;
        }
        let mut own: Vec<&CudaAttentionRow> = rows.iter().filter(|row| row.series() == name).collect();
        own.sort_by(|one, other| one.point().1.total_cmp(&other.point().1));
        // The line climbs to the right, so there is room left of the fastest and right of the slowest.
        let mut notes: Vec<Note> = own.last().map(|row| note(row, false)).into_iter().collect();
        notes.extend((own.len() > 1).then(|| note(own[0], true)));
        series.push(Series { name, points: own.iter().map(|row| row.point()).collect(), notes });
    }
    let intensities = || rows.iter().map(|row| row.point().0);
    let ends = [intensities().fold(f64::INFINITY, f64::min) / 1.5, intensities().fold(0.0, f64::max)];
    LineChart {
        title: format!(
            "Decode attention, {}, {:.2} TB/s",
            rows.first().map_or("no card", |row| &row.card),
            ceiling / 1e12
        ),
        x_axis: "operations per byte of pages".into(),
        y_axis: "operations per second (share of the ceiling)".into(),
        series,
        logarithmic_x: true,
        logarithmic_y: true,
        joined: false,
        limit: ends.map(|at| (at, at * ceiling)).to_vec(),
    }
    .svg()
}

/// Why attention could not be measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaBenchError {
    /// There are no pages of this shape.
    #[error(transparent)]
    Codec(#[from] CodecError),
    /// The card cannot be used.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The query heads do not divide among the KV heads.
    #[error("{q_heads} query heads do not divide among {kv_heads} KV heads")]
    Heads {
        /// The number of query heads.
        q_heads: usize,
        /// The number of KV heads.
        kv_heads: usize,
    },
    /// More pages than the card has memory for.
    #[error(
        "{needed} MB of pages do not fit the {free} MB that are free on the card: fewer sequences or tokens"
    )]
    Memory {
        /// Megabytes that the pages need.
        needed: usize,
        /// Megabytes that are free on the card.
        free: usize,
    },
}

/// Measures; `on_row` is called after each row.
pub fn run(
    bench: &CudaAttentionBench,
    mut on_row: impl FnMut(&CudaAttentionRow),
) -> Result<(), CudaBenchError> {
    let CudaAttentionBench { q_heads, kv_heads, head_dim, groups, .. } = *bench;
    if kv_heads == 0 || q_heads == 0 || !q_heads.is_multiple_of(kv_heads) {
        return Err(CudaBenchError::Heads { q_heads, kv_heads });
    }
    let formats: Vec<(PageFormat, PageLayout)> = bench
        .formats
        .iter()
        .map(|&format| Ok((format, format.layout(head_dim, groups)?)))
        .collect::<Result<_, CodecError>>()?;
    let device = Device::open(bench.card, bench.kernels.clone())?;
    let ceiling = read_ceiling(&device)?;
    let mut exact = Vec::new();
    for &(format, sealed) in &formats {
        for &batch in &bench.batches {
            for &context in &bench.contexts {
                let shape = DecodeShape { head_dim, kv_heads, group: q_heads / kv_heads, sealed };
                let split = match bench.deterministic {
                    true => Split::Fixed { pages: FIXED_PAGES },
                    false => Split::Balanced,
                };
                let layer = batch * kv_heads * context.div_ceil(PAGE_TOKENS) * sealed.page_bytes();
                let (needed, free) = ((layer + bench.pool_bytes) >> 20, device.free_memory()? >> 20);
                if needed > free * 9 / 10 {
                    return Err(CudaBenchError::Memory { needed, free });
                }
                let case = DecodeCase {
                    shape,
                    batch,
                    tokens: context,
                    sink_pages: bench.sink_tokens.div_ceil(PAGE_TOKENS),
                    recent_pages: bench.recent_tokens.div_ceil(PAGE_TOKENS),
                    split,
                    tuning: None,
                    pool_bytes: bench.pool_bytes,
                    passes: bench.repeat,
                };
                let measured = measure(&device, &case)?;
                if format == PageFormat::Bf16 {
                    exact.push((batch, context, measured.seconds));
                }
                let same = exact.iter().find(|(b, c, _)| (*b, *c) == (batch, context));
                let rate = measured.bytes as f64 / measured.seconds;
                on_row(&CudaAttentionRow {
                    kind: "cuda_attention",
                    card: device.name().to_owned(),
                    cuda: device.driver_version()?,
                    kv: format.name(),
                    batch,
                    context,
                    q_heads,
                    kv_heads,
                    head_dim,
                    groups,
                    sink_tokens: bench.sink_tokens,
                    recent_tokens: bench.recent_tokens,
                    deterministic: bench.deterministic,
                    layers: measured.layers,
                    bytes: measured.bytes,
                    us_per_layer: measured.seconds * 1e6,
                    fastest_us: measured.fastest * 1e6,
                    gb_per_s: rate / 1e9,
                    ceiling_gb_per_s: ceiling / 1e9,
                    of_ceiling: rate / ceiling,
                    times_bf16: same.map(|(_, _, seconds)| seconds / measured.seconds),
                    error: measured.error,
                    registers: measured.registers,
                    spilled_bytes: measured.spilled,
                });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bench() -> CudaAttentionBench {
        CudaAttentionBench {
            card: 0,
            kernels: None,
            q_heads: 8,
            kv_heads: 2,
            head_dim: 64,
            groups: 1,
            batches: vec![1, 3],
            contexts: vec![1000],
            formats: vec![PageFormat::Bf16, PageFormat::Int2, PageFormat::Int2Scalar],
            sink_tokens: 64,
            recent_tokens: 256,
            deterministic: false,
            pool_bytes: 1 << 20,
            repeat: 2,
        }
    }

    #[test]
    fn rows_come_from_a_card_or_an_error_says_that_there_is_none() {
        let mut rows = Vec::new();
        match run(&bench(), |row| rows.push(row.clone())) {
            Ok(()) => {
                assert_eq!(rows.len(), 6);
                assert_eq!(roofline(&rows).matches("<circle").count(), 6);
                assert!(rows.iter().all(|row| row.error < 1e-3 && row.us_per_layer > 0.0), "{rows:?}");
            }
            Err(error) => {
                println!("skipped: {error}");
                assert!(matches!(error, CudaBenchError::Cuda(_)), "{error}");
            }
        }
    }

    #[test]
    fn a_roofline_says_how_far_from_the_ceiling_every_row_is() {
        let row = |kv, groups, us_per_layer| CudaAttentionRow {
            kind: "cuda_attention",
            card: "a card".into(),
            cuda: 13000,
            kv,
            batch: 2,
            context: 1000,
            q_heads: 8,
            kv_heads: 2,
            head_dim: 64,
            groups,
            sink_tokens: 64,
            recent_tokens: 256,
            deterministic: false,
            layers: 1,
            bytes: 1_000_000,
            us_per_layer,
            fastest_us: us_per_layer,
            gb_per_s: 1e3 / us_per_layer,
            ceiling_gb_per_s: 1e3,
            of_ceiling: 1.0 / us_per_layer,
            times_bf16: None,
            error: 1e-4,
            registers: 168,
            spilled_bytes: 0,
        };
        assert!(!roofline(&[]).contains("NaN"));
        let between = roofline(&[row("int2", 1, 2.0), row("int2", 1, 5.0), row("int2", 1, 4.0)]);
        assert!(between.contains("(0.50)") && between.contains("(0.20)") && !between.contains("(0.25)"));
        assert_eq!((between.matches("<circle").count(), between.matches("<polyline").count()), (3, 1));
        let svg = roofline(&[row("bf16", 1, 1.25), row("int2", 2, 2.0)]);
        for text in ["bf16", "int2, 2 groups", "2 x 1000 (0.80)", "2 x 1000 (0.50)", "1.00 TB/s"] {
            assert!(svg.contains(text), "{text}: {svg}");
        }
    }

    #[test]
    fn shapes_that_do_not_fit_are_refused_before_a_card_is_needed() {
        let refused = |change: &dyn Fn(&mut CudaAttentionBench)| {
            let mut bench = bench();
            change(&mut bench);
            run(&bench, |_| {}).unwrap_err()
        };
        assert!(matches!(refused(&|bench| bench.kv_heads = 3), CudaBenchError::Heads { .. }));
        assert!(matches!(refused(&|bench| bench.kv_heads = 0), CudaBenchError::Heads { .. }));
        assert!(matches!(refused(&|bench| bench.groups = 7), CudaBenchError::Codec(_)));
    }
}
