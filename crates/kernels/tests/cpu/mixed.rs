//! The mixed cache against its definition in f64: sink and window in bf16, history sealed, one softmax.
use std::ops::Range;
use std::sync::Arc;

use half::bf16;
use oscar_codec::{
    BandLayout, BandRows, CodeLayout, ExactSlot, HeadEncoder, HeadIndex, HeadTransform, KeyTurning,
    KvGeometry, PAGE_TOKENS, PageCodec, PageMeans, PageWindows, RowEncoder, Rule, SealedSlot, Side,
    SquareMatrix, hadamard,
};
use oscar_kernels::backend::{
    AttentionSpec, Batch, CacheSpec, HostSlots, KernelError, Rope, RopeLayout, SealPage, SealedRows,
    SealedSpec, SequenceRows, StoredMatrix,
};
use oscar_kernels::cpu::isa::Isa;
use oscar_kernels::cpu::{Cache, CpuBackend, Matrix};
use oscar_kernels::inspect::KvRows;
use oscar_kernels::{Backend, DType, Inspect};
use oscar_random::Random;

pub(crate) const NEVER: usize = usize::MAX;

fn numbers(len: usize, seed: u64) -> Vec<f32> {
    Random::new(seed).signed_vec(len)
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) kv_heads: usize,
    pub(crate) group: usize,
    pub(crate) d: usize,
    pub(crate) layers: usize,
}

impl Shape {
    pub(crate) fn geometry(self) -> KvGeometry {
        KvGeometry { layers: self.layers, kv_heads: self.kv_heads, head_dim: self.d }
    }

    pub(crate) fn cols(self) -> usize {
        self.kv_heads * (self.group + 2) * self.d
    }
}

/// What is taken off the keys of a head.
pub(crate) fn key_mean(d: usize, head: u64) -> Vec<f32> {
    numbers(d, head + 77).iter().map(|x| 5.0 * x).collect()
}

/// A 2-bit codec that centres keys far from zero and mixes channels.
pub(crate) fn int2(shape: Shape, groups: usize) -> PageCodec {
    let heads = shape.layers * shape.kv_heads;
    let layout = CodeLayout::new(2, shape.d, groups).unwrap();
    let encoders = |mean: bool, rule: Rule| -> Vec<HeadEncoder> {
        (0..heads)
            .map(|head| {
                let mean = mean.then(|| key_mean(shape.d, head as u64));
                let transform = HeadTransform::new(mean, &hadamard::matrix(shape.d)).unwrap();
                HeadEncoder::codes(transform, layout, rule, false)
            })
            .collect()
    };
    let (keys, values) = (encoders(true, Rule::Search), encoders(false, Rule::Clip(0.92)));
    PageCodec::new("int2", shape.geometry(), keys, values).unwrap()
}

/// Keys in bands by a matrix that is no rotation, centred page by page, and centred values.
pub(crate) fn banded(shape: Shape) -> PageCodec {
    in_bands(shape, BandLayout::int2(shape.d).unwrap())
}

/// The same for the stronger half of the channels.
fn int15(shape: Shape) -> PageCodec {
    in_bands(shape, BandLayout::int15(shape.d).unwrap())
}

/// The bands of `banded` with four bits each, and 4-bit values.
fn high(shape: Shape) -> PageCodec {
    banded(shape).high().unwrap()
}

fn in_bands(shape: Shape, layout: BandLayout) -> PageCodec {
    let rows = RowEncoder::Banded(BandRows { layout, value_rule: Rule::Search });
    let mixing = hadamard::matrix(shape.d);
    // Channels of a band are of like strength, bands are not.
    let band = |channel: usize| layout.bands().iter().position(|band| band.range().contains(&channel));
    let strength = |channel: usize| 0.25_f64.powi(band(channel).unwrap_or(0) as i32);
    let scaled = SquareMatrix::from_fn(shape.d, |i, j| mixing.get(i, j) * strength(j));
    let encoder = |head: usize, key: bool| {
        let mean = key_mean(shape.d, head as u64);
        let transform = match key {
            true => HeadTransform::general(Some(mean), &scaled),
            // Values are not far from zero, unlike keys.
            false => HeadTransform::new(Some(mean.iter().map(|x| 0.1 * x).collect()), &mixing),
        };
        // Before they turn keys have another mean, so that every page has one of its own.
        let frequencies = (0..shape.d / 4).map(|pair| 0.3_f32.powi(pair as i32)).collect();
        let turning = Arc::new(KeyTurning::new(frequencies, RopeLayout::Halves));
        let unturned = key_mean(shape.d, 100 + head as u64);
        let page_means = key.then(|| PageMeans::new(&unturned, turning).unwrap());
        HeadEncoder { transform: transform.unwrap(), rows, page_means }
    };
    let heads = shape.layers * shape.kv_heads;
    let keys = (0..heads).map(|head| encoder(head, true)).collect();
    let values = (0..heads).map(|head| encoder(head, false)).collect();
    PageCodec::new("bands", shape.geometry(), keys, values).unwrap()
}

fn seal_page(page: usize, exact: u32, sealed: u32) -> SealPage {
    SealPage { page, exact: ExactSlot::new(exact).unwrap(), sealed: SealedSlot::new(sealed).unwrap() }
}

/// One sequence in a cache, driven by hand.
pub(crate) struct Sequence {
    pub(crate) backend: CpuBackend,
    cache: Cache,
    shape: Shape,
    windows: PageWindows,
    codec: Arc<PageCodec>,
    exact: Vec<Option<ExactSlot>>,
    sealed: Vec<Option<SealedSlot>>,
    /// `[position][q | k | v]` as projected.
    pub(crate) rows: Vec<f32>,
    /// A learned sink for each query head, or nothing.
    pub(crate) sinks: Vec<f32>,
    /// Sealed slots handed out so far.
    next_sealed: u32,
}

impl Sequence {
    pub(crate) fn new(
        isa: Isa,
        shape: Shape,
        codec: PageCodec,
        windows: PageWindows,
        tokens: usize,
    ) -> Sequence {
        let backend = CpuBackend::with_isa(2, isa);
        let pages = tokens.div_ceil(PAGE_TOKENS);
        let codec = Arc::new(codec);
        let spec = CacheSpec {
            geometry: shape.geometry(),
            query_heads: shape.kv_heads * shape.group,
            slots: pages + 1,
            scratch_slots: pages,
            sealed: Some(SealedSpec {
                codec: codec.clone(),
                slots: pages + 1,
                windows,
                sequence_pages: pages,
                high: None,
            }),
            host: HostSlots::default(),
        };
        let cache = backend.cache(&spec).unwrap();
        let mut rows = numbers(tokens * shape.cols(), 5);
        // Keys near their mean, as a model's are.
        for row in rows.chunks_exact_mut(shape.cols()) {
            let keys = &mut row[shape.kv_heads * shape.group * shape.d..][..shape.kv_heads * shape.d];
            for (head, key) in keys.chunks_exact_mut(shape.d).enumerate() {
                let mean = numbers(shape.d, head as u64 + 77);
                key.iter_mut().zip(mean).for_each(|(x, mean)| *x = 2.0 * *x + 5.0 * mean);
            }
        }
        Sequence {
            backend,
            cache,
            shape,
            windows,
            codec,
            exact: vec![None; pages],
            sealed: vec![None; pages],
            rows,
            sinks: Vec::new(),
            next_sealed: 1,
        }
    }

    fn scale(&self) -> f32 {
        2.0 / (self.shape.d as f32).sqrt()
    }

    fn stored_sinks(&self) -> StoredMatrix {
        let bytes: Vec<u8> = self.sinks.iter().flat_map(|sink| sink.to_le_bytes()).collect();
        let cols = self.sinks.len();
        StoredMatrix { bytes: Arc::new(bytes), offset: 0, dtype: DType::F32, rows: 1, cols, scales: None }
    }

    fn spec(&self) -> AttentionSpec<CpuBackend> {
        let Shape { kv_heads, group, d, .. } = self.shape;
        let scale = self.scale();
        AttentionSpec {
            q_heads: kv_heads * group,
            kv_heads,
            head_dim: d,
            scale,
            window: None,
            rotates: true,
            sinks: (!self.sinks.is_empty()).then(|| self.backend.weight(&self.stored_sinks()).unwrap()),
            q_norm: None,
            k_norm: None,
        }
    }

    /// Runs the rows of `positions` through layer `layer` and returns the attention output.
    fn step(
        &mut self,
        layer: usize,
        positions: Range<usize>,
        exact_from: usize,
        sealed_until: usize,
        seal: &[SealPage],
    ) -> Result<Vec<f32>, KernelError> {
        let (cols, width) = (self.shape.cols(), self.shape.kv_heads * self.shape.group * self.shape.d);
        let sealed = SealedRows { pages: &self.sealed, exact_from, sealed_until };
        let rows = SequenceRows {
            start: positions.start,
            len: positions.len(),
            pages: &self.exact,
            sealed: Some(sealed),
        };
        let tokens = vec![0; positions.len()];
        let batch = Batch { tokens: &tokens, sequences: &[rows] };
        let rope = Rope { inverse_frequencies: Vec::new(), magnitude: 1.0, layout: RopeLayout::Halves };
        let step = self.backend.begin_step(&batch, &rope, &self.cache)?;
        let mut qkv = self.backend.buffer(positions.len(), cols)?;
        fill(&mut qkv, &self.rows[positions.start * cols..positions.end * cols]);
        let mut out = self.backend.buffer(positions.len(), width)?;
        let spec = self.spec();
        self.backend.rope_store(&step, &spec, layer, &mut qkv, &mut self.cache)?;
        self.backend.seal(layer..layer + 1, seal, &mut self.cache)?;
        self.backend.attend(&step, &spec, layer, &qkv, &self.cache, &mut out)?;
        Ok(out.first_rows("rows", positions.len())?.to_vec())
    }

    /// A sealed slot for a page that is there in bf16.
    fn seal_page(&mut self, page: usize) -> SealPage {
        let pair = seal_page(page, self.exact[page].unwrap().number(), self.next_sealed);
        self.sealed[page] = Some(pair.sealed);
        self.next_sealed += 1;
        pair
    }

    /// One decoded token on all layers: a page that falls out of the window is sealed and its bf16 forgotten.
    pub(crate) fn decode(&mut self, position: usize) -> Vec<f32> {
        let page = position / PAGE_TOKENS;
        if position.is_multiple_of(PAGE_TOKENS) {
            self.exact[page] = ExactSlot::new(page as u32 + 1);
            if let Some(due) = self.windows.due_before(page) {
                let pages = [self.seal_page(due)];
                self.backend.seal(0..self.shape.layers, &pages, &mut self.cache).unwrap();
                self.exact[due] = None;
            }
        }
        (0..self.shape.layers)
            .map(|layer| self.step(layer, position..position + 1, NEVER, 0, &[]).unwrap())
            .last()
            .unwrap()
    }

    /// A prompt, layer by layer, in chunks. Returns the output of the last layer.
    pub(crate) fn prefill(&mut self, tokens: usize, chunk: usize, uniform: bool) -> Vec<f32> {
        let last = (tokens - 1) / PAGE_TOKENS;
        let mut seal = Vec::new();
        let kept = self.windows.history(last, NEVER, 0);
        for page in 0..=last {
            if kept.contains(&page) {
                self.exact[page] = ExactSlot::new((self.cache.spec().slots + page) as u32);
                seal.push((page, self.seal_page(page)));
            } else {
                self.exact[page] = ExactSlot::new(page as u32 + 1);
            }
        }
        let mut out = Vec::new();
        for layer in 0..self.shape.layers {
            out.clear();
            let mut done = 0;
            for start in (0..tokens).step_by(chunk) {
                let end = (start + chunk).min(tokens);
                let mut due = Vec::new();
                if uniform {
                    let needed = self.windows.history((end - 1) / PAGE_TOKENS, NEVER, 0);
                    while done < seal.len() && needed.contains(&seal[done].0) {
                        due.push(seal[done].1);
                        done += 1;
                    }
                }
                let exact_from = if uniform { NEVER } else { 0 };
                out.extend(self.step(layer, start..end, exact_from, 0, &due).unwrap());
            }
            let rest: Vec<SealPage> = seal[done..].iter().map(|entry| entry.1).collect();
            self.backend.seal(layer..layer + 1, &rest, &mut self.cache).unwrap();
        }
        for (page, _) in seal {
            self.exact[page] = None;
        }
        out
    }

    /// The sealed bytes of all layers and heads of a page.
    fn bytes(&self, page: usize) -> Vec<u8> {
        let Some(slot) = self.sealed[page] else { panic!("page {page} is not sealed") };
        let heads = (0..self.shape.layers).flat_map(|l| (0..self.shape.kv_heads).map(move |h| (l, h)));
        heads.flat_map(|(layer, head)| self.cache.sealed_bytes(layer, head, slot).unwrap().to_vec()).collect()
    }

    /// The definition in f64: the output of the query at `position` in layer `layer` when the pages of `history` are
    /// read as the codec decodes them. A sink is one more logit, without a value. The second result is the largest number
    /// that would be there without sinks.
    fn oracle(&self, layer: usize, position: usize, history: Range<usize>) -> (Vec<f64>, f64) {
        let Shape { kv_heads, group, d, .. } = self.shape;
        let cols = self.shape.cols();
        let row = |position: usize| &self.rows[position * cols..(position + 1) * cols];
        let (mut out, mut largest) = (Vec::new(), 0.0f64);
        for head in 0..kv_heads {
            let index = HeadIndex { layer, head };
            // Every position as it is stored: transformed, and through the codec where it is history.
            let transformed = |side: Side, positions: Range<usize>| -> Vec<f32> {
                let offset = match side {
                    Side::Key => kv_heads * group + head,
                    Side::Value => kv_heads * (group + 1) + head,
                };
                let mut rows = vec![0.0; positions.len() * d];
                for (position, out) in positions.zip(rows.chunks_exact_mut(d)) {
                    let transform = self.codec.transform(index, side).unwrap();
                    transform.apply(&row(position)[offset * d..][..d], out);
                }
                rows
            };
            let (mut keys, mut values) = (Vec::new(), Vec::new());
            for page in 0..=position / PAGE_TOKENS {
                let positions = page * PAGE_TOKENS..((page + 1) * PAGE_TOKENS).min(position + 1);
                let mut read =
                    [transformed(Side::Key, positions.clone()), transformed(Side::Value, positions)];
                if history.contains(&page) {
                    let mut bytes = vec![0; self.codec.head_bytes(layer)];
                    let [key, value] = &mut read;
                    let mean = self.codec.stored_page_mean(index, Side::Key, page).unwrap();
                    let mean = mean.unwrap_or_else(|| vec![0.0; d]);
                    let each = |keys: &mut [f32], sign: f32| {
                        for key in keys.chunks_exact_mut(d) {
                            key.iter_mut().zip(&mean).for_each(|(x, mean)| *x += sign * mean);
                        }
                    };
                    each(key, -1.0);
                    self.codec.seal_page(index, key, value, &mut bytes).unwrap();
                    self.codec.decode_page(index, &bytes, key, value).unwrap();
                    each(key, 1.0);
                }
                keys.extend(read[0].chunks(d).map(widen));
                values.extend(read[1].chunks(d).map(widen));
            }
            let rotation = self.codec.transform(index, Side::Key).unwrap().query_matrix().clone();
            for member in 0..group {
                let query = &row(position)[(head * group + member) * d..][..d];
                let rotated: Vec<f64> = (0..d)
                    .map(|j| (0..d).map(|i| f64::from(query[i]) * f64::from(rotation[i * d + j])).sum())
                    .collect();
                // What centring took off the keys is in every logit.
                let mean = self.codec.transform(index, Side::Key).unwrap().mean();
                let of_mean: f64 = mean.map_or(0.0, |mean| {
                    query.iter().zip(mean).map(|(q, m)| f64::from(*q) * f64::from(*m)).sum()
                });
                let logits: Vec<f64> = keys
                    .iter()
                    .map(|key| {
                        let dot: f64 = rotated.iter().zip(key).map(|(q, k)| q * k).sum();
                        (dot + of_mean) * f64::from(self.scale())
                    })
                    .collect();
                let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = logits.iter().map(|logit| (logit - max).exp()).collect();
                let of_keys: f64 = weights.iter().sum();
                // Infinite for one that leaves nothing.
                let of_sink =
                    self.sinks.get(head * group + member).map_or(0.0, |sink| (f64::from(*sink) - max).exp());
                let mixed: Vec<f64> = (0..d)
                    .map(|c| values.iter().zip(&weights).map(|(value, w)| w * value[c]).sum())
                    .collect();
                let back = self.codec.transform(index, Side::Value).unwrap();
                let (matrix, mean) = (back.query_matrix(), back.mean());
                for i in 0..d {
                    let rotated: f64 = (0..d).map(|j| mixed[j] * f64::from(matrix[i * d + j])).sum();
                    let sum = rotated + mean.map_or(0.0, |mean| of_keys * f64::from(mean[i]));
                    out.push(sum / (of_keys + of_sink));
                    largest = largest.max((sum / of_keys).abs());
                }
            }
        }
        (out, largest)
    }

    pub(crate) fn check(&self, position: usize, history: Range<usize>, got: &[f32], what: &str) {
        let layer = self.shape.layers - 1;
        // Errors are those of the values that are summed, however little a sink leaves of them.
        let (expected, largest) = self.oracle(layer, position, history);
        // Weights are rounded to 15 bits. What that does to the mean code is alike in all stored channels, and the Hadamard
        // matrix gathers it in one channel of the output: the more, the larger the codes. The largest errors of these tests
        // with three seeds were 2.7e-3 for codes of two bits, 2.9e-3 for codes of four, and 3e-6 without codes. Rounding a key to
        // bf16 moves its logit, which a sink is compared with as it is.
        let most = match (self.codec.name(), self.sinks.is_empty()) {
            (_, false) => 5e-3,
            ("high" | "int4", true) => 4e-3,
            ("fp8", true) => 1e-5,
            (_, true) => 3e-3,
        };
        for (index, (got, expected)) in got.iter().zip(&expected).enumerate() {
            let error = (f64::from(*got) - expected).abs() / largest;
            assert!(error < most, "{what}, position {position}, channel {index}: {got} against {expected}");
        }
    }
}

/// The fast paths; plain Rust has its turn where it costs little.
pub(crate) fn fast_paths() -> impl Iterator<Item = Isa> {
    Isa::available().filter(|&isa| isa != Isa::Scalar)
}

fn widen(row: &[f32]) -> Vec<f64> {
    row.iter().map(|&x| f64::from(x)).collect()
}

fn fill(matrix: &mut Matrix, rows: &[f32]) {
    let count = matrix.rows();
    matrix.first_rows_mut("rows", count).unwrap().copy_from_slice(rows);
}

/// Positions around every edge up to the second seal.
fn edges(windows: PageWindows) -> Vec<usize> {
    let PageWindows { sink, recent } = windows;
    let pages = [0, 1, sink, sink + recent, sink + recent + 1, sink + recent + 2];
    let mut positions: Vec<usize> =
        pages.into_iter().flat_map(|page| (64 * page).saturating_sub(1)..64 * page + 2).collect();
    positions.sort_unstable();
    positions.dedup();
    positions
}

/// Decodes a sequence and compares what the rows at every edge read.
fn check_edges(isa: Isa, shape: Shape, codec: PageCodec, windows: PageWindows) {
    let edges = edges(windows);
    let tokens = edges.last().unwrap() + 1;
    let what = format!("{isa} {} {shape:?} {windows:?}", codec.name());
    let mut sequence = Sequence::new(isa, shape, codec, windows, tokens);
    for position in 0..tokens {
        let out = sequence.decode(position);
        if edges.contains(&position) {
            let history = windows.history(position / PAGE_TOKENS, NEVER, 0);
            sequence.check(position, history, &out, &what);
        }
    }
}

#[test]
fn decoding_equals_the_oracle_at_every_edge() {
    let windows = [(1, 4), (0, 0), (1, 0), (0, 1), (2, 1)];
    let shapes = [(1, 64), (3, 64), (4, 96), (6, 128), (8, 128), (12, 64), (2, 256)];
    for (index, (group, d)) in shapes.into_iter().enumerate() {
        let (sink, recent) = windows[index % windows.len()];
        let windows = PageWindows { sink, recent };
        let shape = Shape { kv_heads: 2, group, d, layers: 1 };
        for isa in fast_paths() {
            check_edges(isa, shape, int2(shape, 1), windows);
            check_edges(isa, shape, banded(shape), windows);
        }
    }
}

/// Every number of query heads with every head dimension and every format, on the path this machine takes.
#[test]
fn every_geometry_equals_the_oracle_in_every_format() {
    let windows = PageWindows { sink: 1, recent: 1 };
    let isa = CpuBackend::new(1).unwrap().isa();
    let usual = [1, 3, 4, 6, 8, 12].into_iter().flat_map(|group| [64, 96, 128, 256].map(|d| (group, d)));
    for (group, d) in usual.chain([(5, 80), (3, 192), (2, 512)]) {
        let shape = Shape { kv_heads: 1, group, d, layers: 1 };
        let geometry = shape.geometry();
        let means = Some(vec![key_mean(d, 0)]);
        let codecs = [
            int2(shape, 1),
            banded(shape),
            int15(shape),
            high(shape),
            PageCodec::int4(geometry, means.clone()).unwrap(),
            PageCodec::fp8(geometry, means).unwrap(),
        ];
        for codec in codecs {
            check_edges(isa, shape, codec, windows);
        }
    }
}

/// From some length on a lone sequence is cut by what pages cost: sealed pages for all heads together, bf16 pages head by
/// head.
#[test]
fn a_long_sequence_is_cut_and_put_together_again() {
    let windows = PageWindows { sink: 1, recent: 4 };
    let shape = Shape { kv_heads: 3, group: 3, d: 64, layers: 1 };
    // Four pages are read together by one thread, sixteen by two.
    let checked = [64 * 3, 64 * 4, 64 * 15 - 1, 64 * 15, 64 * 16, 64 * 21 + 17];
    for isa in fast_paths() {
        for threads in [1, 2] {
            let mut sequence = Sequence::new(isa, shape, int2(shape, 1), windows, checked[5] + 1);
            sequence.backend = CpuBackend::with_isa(threads, isa);
            for position in 0..=checked[5] {
                let out = sequence.decode(position);
                if checked.contains(&position) {
                    let history = windows.history(position / PAGE_TOKENS, NEVER, 0);
                    sequence.check(position, history, &out, &format!("{isa}, {threads} threads"));
                }
            }
        }
    }
}

#[test]
fn every_format_reads_what_it_sealed() {
    let shape = Shape { kv_heads: 2, group: 3, d: 64, layers: 2 };
    let windows = PageWindows { sink: 1, recent: 1 };
    let means = Some((0..4).map(|head| key_mean(64, head % 2)).collect());
    let codecs = [
        int2(shape, 2),
        banded(shape),
        int15(shape),
        high(shape),
        banded(shape).keep_bf16(&[1]).unwrap(),
        PageCodec::int4(shape.geometry(), means.clone()).unwrap(),
        PageCodec::fp8(shape.geometry(), means).unwrap(),
        int2(shape, 1).keep_bf16(&[1]).unwrap(),
        int2(shape, 1).keep_bf16(&[0]).unwrap(),
    ];
    for codec in codecs {
        for isa in Isa::available() {
            let name = format!("{isa} {} {:?}", codec.name(), codec.layout(1));
            let mut sequence = Sequence::new(isa, shape, codec.clone(), windows, 300);
            for position in 0..300 {
                let out = sequence.decode(position);
                if [63, 64, 191, 192, 193, 256, 299].contains(&position) {
                    let history = windows.history(position / PAGE_TOKENS, NEVER, 0);
                    sequence.check(position, history, &out, &name);
                }
            }
        }
    }
}

/// Weights become integers; those of tokens that count only together must not vanish beside a large one.
#[test]
fn one_large_weight_leaves_a_thousand_small_ones() {
    let shape = Shape { kv_heads: 1, group: 3, d: 64, layers: 1 };
    let windows = PageWindows { sink: 1, recent: 1 };
    let (tokens, needle) = (64 * 24, 64 * 9 + 5);
    for codec in
        [int2(shape, 1), int2(shape, 2), banded(shape), PageCodec::int4(shape.geometry(), None).unwrap()]
    {
        for isa in fast_paths() {
            let name = format!("{isa} {}", codec.name());
            let mut sequence = Sequence::new(isa, shape, codec.clone(), windows, tokens);
            // The key that the first query of the last token looks for: it weighs about as much as all others.
            let (cols, keys) = (shape.cols(), shape.group * shape.d);
            let query = sequence.rows[(tokens - 1) * cols..][..shape.d].to_vec();
            let key = &mut sequence.rows[needle * cols + keys..][..shape.d];
            key.iter_mut().zip(query).for_each(|(k, q)| *k += 1.6 * q);
            let out = sequence.prefill(tokens, 256, true);
            let history = windows.history((tokens - 1) / PAGE_TOKENS, NEVER, 0);
            assert!(history.contains(&(needle / PAGE_TOKENS)));
            sequence.check(tokens - 1, history, &out[(tokens - 1) * shape.group * shape.d..], &name);
        }
    }
}

/// A token seals to the same bytes by every path, and both prefills read what they should.
#[test]
fn prefill_seals_the_bytes_that_decoding_seals() {
    let shape = Shape { kv_heads: 2, group: 3, d: 64, layers: 2 };
    let windows = PageWindows { sink: 1, recent: 2 };
    for isa in fast_paths() {
        let tokens = 64 * 7 + 1;
        let mut decoded = Sequence::new(isa, shape, int2(shape, 1), windows, tokens);
        (0..tokens).for_each(|position| {
            decoded.decode(position);
        });
        let kept = windows.history((tokens - 1) / PAGE_TOKENS, NEVER, 0);
        assert_eq!(kept, 1..5);
        for uniform in [false, true] {
            for chunk in [tokens, 64, 100, 448] {
                let mut prompt = Sequence::new(isa, shape, int2(shape, 1), windows, tokens);
                let out = prompt.prefill(tokens, chunk, uniform);
                for page in kept.clone() {
                    assert_eq!(prompt.bytes(page), decoded.bytes(page), "{isa} page {page} chunk {chunk}");
                }
                let width = shape.kv_heads * shape.group * shape.d;
                for position in [0, 63, 64, 191, 192, 255, 256, 320, 447, 448] {
                    let page = position / PAGE_TOKENS;
                    let history = if uniform { windows.history(page, NEVER, 0) } else { 0..0 };
                    let out = &out[position * width..(position + 1) * width];
                    let what = format!("{isa} uniform {uniform} chunk {chunk}");
                    prompt.check(position, history, out, &what);
                }
            }
        }
    }
}

#[test]
fn what_came_from_elsewhere_may_be_sealed_inside_the_window() {
    let shape = Shape { kv_heads: 1, group: 3, d: 64, layers: 1 };
    let windows = PageWindows { sink: 1, recent: 2 };
    let mut sequence = Sequence::new(Isa::detect(), shape, int2(shape, 1), windows, 400);
    sequence.prefill(384, 384, false);
    // As after a prefix hit without its warm tail: pages 3 and 4 exist only sealed.
    for page in [3, 4] {
        let pages = [sequence.seal_page(page)];
        sequence.backend.seal(0..1, &pages, &mut sequence.cache).unwrap();
        sequence.exact[page] = None;
    }
    sequence.exact[6] = ExactSlot::new(7);
    assert!(matches!(
        sequence.step(0, 384..400, NEVER, 0, &[]),
        Err(KernelError::PageMissing { page: 4, tier: "the bf16 pool" })
    ));
    let out = sequence.step(0, 384..400, NEVER, 5, &[]).unwrap();
    sequence.check(399, 1..5, &out[15 * 3 * 64..], "sealed until page 5");
}

/// With fixed numerics a row has the same bits alone, in a batch, and in any chunk.
#[test]
fn a_deterministic_row_does_not_depend_on_its_company() {
    let shape = Shape { kv_heads: 2, group: 3, d: 64, layers: 1 };
    let windows = PageWindows { sink: 1, recent: 2 };
    for isa in fast_paths() {
        let run = |chunk: usize| {
            let mut sequence = Sequence::new(isa, shape, int2(shape, 1), windows, 1200);
            sequence.backend = CpuBackend::with_isa(2, isa).deterministic();
            sequence.prefill(1200, chunk, true)
        };
        let whole = run(1200);
        for chunk in [64, 128, 500, 1199] {
            assert_eq!(run(chunk), whole, "{isa} chunks of {chunk}");
        }
        let mut decoded = Sequence::new(isa, shape, int2(shape, 1), windows, 1200);
        decoded.backend = CpuBackend::with_isa(1, isa).deterministic();
        let rows: Vec<f32> = (0..1200).flat_map(|position| decoded.decode(position)).collect();
        assert_eq!(rows, whole, "{isa} token by token");
    }
}

#[test]
fn bad_pages_are_refused_and_nan_is_named() {
    let shape = Shape { kv_heads: 2, group: 1, d: 64, layers: 2 };
    let windows = PageWindows { sink: 0, recent: 1 };
    let mut sequence = Sequence::new(Isa::detect(), shape, int2(shape, 1), windows, 256);
    let Sequence { backend, cache, .. } = &mut sequence;
    for (exact, sealed) in [(1, 99), (99, 1)] {
        let error = backend.seal(0..2, &[seal_page(0, exact, sealed)], cache).unwrap_err();
        assert!(matches!(error, KernelError::PageOutOfRange { .. }), "{error}");
    }
    let twice = [seal_page(0, 1, 1), seal_page(0, 2, 1)];
    assert!(matches!(backend.seal(0..1, &twice, cache), Err(KernelError::PageWrittenTwice { slot: 1 })));
    assert!(backend.seal(0..3, &[seal_page(0, 1, 1)], cache).is_err());
    let [first, outside] = [1, 77].map(|slot| ExactSlot::new(slot).unwrap());
    for copy in [(first, outside), (outside, first)] {
        assert!(backend.copy_pages(&[copy], cache).is_err());
    }
    let bad = sequence.shape.cols() * 70 + sequence.shape.kv_heads * sequence.shape.d;
    sequence.rows[bad] = f32::NAN;
    (0..128).for_each(|position| {
        sequence.decode(position);
    });
    let two = [seal_page(0, 1, 1), seal_page(0, 2, 2)];
    let error = sequence.backend.seal(0..2, &two, &mut sequence.cache).unwrap_err();
    assert!(matches!(error, KernelError::Seal { page: 1, head: 0, .. }), "{error}");
    // The rest of the cache is unharmed.
    assert!(sequence.backend.seal(0..2, &two[..1], &mut sequence.cache).is_ok());
}

#[test]
fn copies_are_whole_and_sources_stay() {
    let shape = Shape { kv_heads: 2, group: 1, d: 64, layers: 3 };
    let geometry = shape.geometry();
    let backend = CpuBackend::with_isa(1, Isa::detect());
    let mut cache = backend.cache(&CacheSpec::exact(geometry, 2, 4)).unwrap();
    let rows = numbers(64 * 64, 3);
    let [from, to] = [2, 3].map(|slot| ExactSlot::new(slot).unwrap());
    for layer in 0..3 {
        let place = KvRows { layer, head: 1, pages: &[Some(from)] };
        backend.write_kv(&mut cache, place, 0, &rows, &rows).unwrap();
    }
    backend.copy_pages(&[(from, to)], &mut cache).unwrap();
    for (slot, layer) in [(to, 0), (to, 2), (from, 2)] {
        let place = KvRows { layer, head: 1, pages: &[Some(slot)] };
        let (keys, values) = backend.read_kv(&cache, place, 0..64).unwrap();
        let rounded: Vec<f32> = rows.iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
        assert_eq!((&keys, &values), (&rounded, &rounded), "{slot:?} layer {layer}");
    }
}
