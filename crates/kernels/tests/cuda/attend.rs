//! Attention of a layer on the card against the CPU's, over a cache that is written in chunks, sealed, and continued token by
//! token.

use std::ops::Range;
use std::sync::Arc;

use oscar_codec::{
    BandLayout, BandRows, CodeLayout, ExactSlot, HeadEncoder, HeadTransform, KeyTurning, KvGeometry,
    PAGE_TOKENS, PageCodec, PageMeans, PageWindows, RowEncoder, Rule, SealedSlot, SquareMatrix, hadamard,
};
use oscar_kernels::backend::{
    AttentionSpec, Batch, CacheSpec, HostSlots, RmsNorm, Rope, RopeLayout, SealPage, SealedRows, SealedSpec,
    SequenceRows, StoredMatrix,
};
use oscar_kernels::cpu::CpuBackend;
use oscar_kernels::cuda::CudaBackend;
use oscar_kernels::cuda::reference::rounds_queries;
use oscar_kernels::{Backend, DType, Inspect};
use oscar_random::Random;

use super::backend::{error, report, vector};

/// A cache of one sequence on a device.
struct Attending<'a, B: Backend> {
    backend: &'a B,
    spec: AttentionSpec<B>,
    cache: B::Cache,
    rope: Rope,
    pages: Vec<Option<ExactSlot>>,
    sealed: Option<Vec<Option<SealedSlot>>>,
    windows: PageWindows,
    /// Queries and keys of the rows that came last.
    stored: Vec<f32>,
}

pub(super) const KV_HEADS: usize = 2;
const LAYER: usize = 1;
/// Tokens that there is room for.
const TOKENS: usize = 700;

impl<B: Inspect> Attending<'_, B> {
    /// Attention of some rows; pages that leave the window are sealed first, as an engine does it.
    fn rows(&mut self, start: usize, rows: &[f32]) -> Vec<f32> {
        let due = self.windows.history(start / PAGE_TOKENS, usize::MAX, 0);
        self.rows_after(due, start, rows)
    }

    /// The same; of the pages before, those that are `due` are read sealed.
    fn rows_after(&mut self, due: Range<usize>, start: usize, rows: &[f32]) -> Vec<f32> {
        let cols = self.spec.qkv_cols();
        let len = rows.len() / cols;
        let exact_from = due.end;
        if let Some(sealed) = &mut self.sealed {
            for page in due {
                if sealed[page].is_none() {
                    sealed[page] = SealedSlot::new(page as u32 + 1);
                    let (exact, to) = (self.pages[page].unwrap(), sealed[page].unwrap());
                    let pair = SealPage { page, exact, sealed: to };
                    self.backend.seal(0..2, &[pair], &mut self.cache).unwrap();
                    self.pages[page] = None;
                }
            }
        }
        let sequences = [SequenceRows {
            start,
            len,
            pages: &self.pages,
            sealed: self.sealed.as_deref().map(|pages| SealedRows { pages, exact_from, sealed_until: 0 }),
        }];
        let batch = Batch { tokens: &vec![0; len], sequences: &sequences };
        let mut step = self.backend.begin_step(&batch, &self.rope, &self.cache).unwrap();
        if let Some(window) = self.spec.window {
            let rope = Rope { magnitude: 0.75, ..self.rope.clone() };
            self.backend.add_windows(&mut step, &rope, window, &self.cache).unwrap();
        }
        let mut out = self.backend.buffer(len, self.spec.q_heads * self.spec.head_dim).unwrap();
        for layer in 0..2 {
            let mut copy = self.backend.buffer(len, cols).unwrap();
            self.backend.write(rows, &mut copy).unwrap();
            self.backend.rope_store(&step, &self.spec, layer, &mut copy, &mut self.cache).unwrap();
            if layer == LAYER {
                self.backend.attend(&step, &self.spec, layer, &copy, &self.cache, &mut out).unwrap();
                // Queries and keys, which calibration looks at, take the place of what was projected.
                let stored = self.backend.read(&copy, 0..len).unwrap();
                let part = cols - KV_HEADS * self.spec.head_dim;
                self.stored = stored.chunks_exact(cols).flat_map(|row| row[..part].to_vec()).collect();
            }
        }
        self.backend.read(&out, 0..len).unwrap()
    }
}

/// What some layers have beyond the plain ones.
#[derive(Clone, Copy, Default)]
struct Extras {
    window: Option<usize>,
    sinks: bool,
    /// No rotary embedding.
    still: bool,
}

impl Extras {
    fn window(window: usize) -> Extras {
        Extras { window: Some(window), ..Extras::default() }
    }

    fn name(self) -> String {
        let words = [(self.window.is_some(), "a window"), (self.sinks, "sinks"), (self.still, "no rotation")];
        words.into_iter().filter(|word| word.0).map(|word| format!(", {}", word.1)).collect()
    }
}

fn attending<'a, B: Inspect>(
    backend: &'a B,
    d: usize,
    group: usize,
    codec: Option<Arc<PageCodec>>,
    extras: Extras,
) -> Attending<'a, B> {
    let geometry = KvGeometry { layers: 2, kv_heads: KV_HEADS, head_dim: d };
    let pages = TOKENS.div_ceil(PAGE_TOKENS);
    let windows = PageWindows { sink: 1, recent: 2 };
    let sealed =
        codec.map(|codec| SealedSpec { codec, slots: pages + 1, windows, sequence_pages: pages, high: None });
    let has_sealed = sealed.is_some();
    let query_heads = KV_HEADS * group;
    let host = HostSlots::default();
    let spec = CacheSpec { geometry, query_heads, slots: pages + 1, scratch_slots: 0, sealed, host };
    // No norms, norms of each head, and norms over all heads.
    let norm = |heads: usize| {
        let gains = match d {
            128 => d,
            256 => heads * d,
            _ => return None,
        };
        let weight = backend.weight(&vector(gains, &mut Random::new(7))).unwrap();
        Some(RmsNorm { weight, eps: 1e-6 })
    };
    Attending {
        backend,
        spec: AttentionSpec {
            q_heads: query_heads,
            kv_heads: KV_HEADS,
            head_dim: d,
            scale: 1.0 / (d as f32).sqrt(),
            window: extras.window,
            rotates: !extras.still,
            sinks: extras.sinks.then(|| backend.weight(&sinks(query_heads)).unwrap()),
            q_norm: norm(KV_HEADS * group),
            k_norm: norm(KV_HEADS),
        },
        cache: backend.cache(&spec).unwrap(),
        rope: Rope { inverse_frequencies: frequencies(d), magnitude: 1.0, layout: RopeLayout::Halves },
        pages: ExactSlot::first(pages),
        sealed: has_sealed.then(|| vec![None; pages]),
        stored: Vec::new(),
        windows,
    }
}

/// By how much pairs of channels turn for a position.
fn frequencies(d: usize) -> Vec<f32> {
    (0..d / 2).map(|i| 1e4_f32.powf(-2.0 * i as f32 / d as f32)).collect()
}

/// Logits of learned sinks that take all, some and nothing of a row's weights.
pub(super) fn sinks(heads: usize) -> StoredMatrix {
    let logits = [8.0_f32, 3.0, 30.0, -20.0, 6.0, f32::NEG_INFINITY];
    let bytes: Vec<u8> = logits.iter().cycle().take(heads).flat_map(|logit| logit.to_le_bytes()).collect();
    StoredMatrix { bytes: Arc::new(bytes), offset: 0, dtype: DType::F32, rows: 1, cols: heads, scales: None }
}

/// Keys in bands, of channels that differ in size. With `centres_pages` each page has a mean of its own.
pub(super) fn banded(layout: BandLayout, centres_pages: bool) -> Arc<PageCodec> {
    let d = layout.head_dim();
    let geometry = KvGeometry { layers: 2, kv_heads: KV_HEADS, head_dim: d };
    let rows = RowEncoder::Banded(BandRows { layout, value_rule: Rule::Search });
    let sizes = SquareMatrix::from_fn(d, |i, j| if i == j { 1.5 - i as f64 / d as f64 } else { 0.0 });
    let key = HeadTransform::general(Some(vec![0.25; d]), &hadamard::matrix(d).multiply(&sizes)).unwrap();
    let value = HeadTransform::new(None, &hadamard::matrix(d)).unwrap();
    let turning = Arc::new(KeyTurning::new(frequencies(d), RopeLayout::Halves));
    let mut random = Random::new(59);
    let mut encoders = |transform: HeadTransform, centred: bool| -> Vec<HeadEncoder> {
        let of_head = |_| {
            let unturned: Vec<f32> = (0..d).map(|_| random.signed()).collect();
            let page_means = centred.then(|| PageMeans::new(&unturned, turning.clone()).unwrap());
            HeadEncoder { transform: transform.clone(), rows, page_means }
        };
        (0..4).map(of_head).collect()
    };
    let (keys, values) = (encoders(key, centres_pages), encoders(value, false));
    let name = if centres_pages { "centred bands" } else { "bands" };
    Arc::new(PageCodec::new(name, geometry, keys, values).unwrap())
}

/// A codec of a cache, by a name of its own: `bands`, `fewer bands` (`int1.5`), the widths of bands, or the bits of scalar
/// codes. `centred` before bands: page by page.
fn named_codec(d: usize, name: &str) -> Arc<PageCodec> {
    let centred = name.strip_prefix("centred ");
    let of = |layout: Option<BandLayout>| banded(layout.unwrap(), centred.is_some());
    match centred.unwrap_or(name) {
        "bands" => of(BandLayout::int2(d).ok()),
        "fewer bands" => of(BandLayout::int15(d).ok()),
        widths if widths.contains('/') => of(BandLayout::of_widths(d, widths.parse().unwrap()).ok()),
        bits => codec(d, bits.parse().unwrap()),
    }
}

pub(super) fn codec(d: usize, bits: u32) -> Arc<PageCodec> {
    let geometry = KvGeometry { layers: 2, kv_heads: KV_HEADS, head_dim: d };
    let mut random = Random::new(3);
    let mut encoders = || -> Vec<HeadEncoder> {
        (0..4)
            .map(|_| {
                let mean = (0..d).map(|_| random.signed()).collect();
                let transform = HeadTransform::new(Some(mean), &hadamard::matrix(d)).unwrap();
                HeadEncoder::codes(transform, CodeLayout::new(bits, d, 1).unwrap(), Rule::Search, false)
            })
            .collect()
    };
    let (keys, values) = (encoders(), encoders());
    Arc::new(PageCodec::new("codes", geometry, keys, values).unwrap())
}

pub(super) fn attention(cpu: &CpuBackend, cuda: &CudaBackend, quick: bool) -> usize {
    let mut failures = 0;
    for d in [64, 128, 256] {
        let plain = Extras::default();
        let sinks = Extras { sinks: true, ..plain };
        for (group, codec, extras) in [
            (3, None, plain),
            (1, Some("2"), plain),
            (7, Some("2"), plain),
            (4, Some("4"), plain),
            (3, Some("bands"), plain),
            (8, Some("bands"), plain),
            (3, Some("fewer bands"), plain),
            (12, Some("fewer bands"), plain),
            (4, Some("4/0/0/0"), plain),
            (4, Some("4/2/0/0"), plain),
            (3, Some("4/2/2/0"), plain),
            (7, Some("4/2/2/2"), plain),
            (4, Some("4/4/2/2"), plain),
            (3, Some("centred bands"), plain),
            (8, Some("centred bands"), plain),
            (12, Some("centred bands"), plain),
            (4, Some("centred fewer bands"), plain),
            (7, Some("centred 4/2/2/2"), plain),
            (4, Some("centred bands"), sinks),
            (4, None, Extras::window(100)),
            (4, Some("bands"), Extras::window(100)),
            (3, None, sinks),
            (8, Some("2"), sinks),
            (8, Some("bands"), sinks),
            (8, Some("bands"), Extras { sinks: true, ..Extras::window(128) }),
            (4, Some("bands"), Extras { still: true, ..plain }),
        ] {
            if (quick && d != 128) || (d < 128 && codec.is_some_and(|name| name.ends_with("fewer bands"))) {
                continue;
            }
            let codec = codec.map(|name| named_codec(d, name));
            let codec = match (codec, extras.window) {
                (Some(codec), Some(_)) => {
                    Some(Arc::new(PageCodec::clone(&codec).without_history(&[LAYER]).unwrap()))
                }
                (codec, _) => codec,
            };
            let name = codec.as_ref().map_or("bf16", |codec| codec.name()).to_owned();
            let sealed = codec.as_ref().map(|codec| codec.layout(LAYER));
            let mut here = attending(cpu, d, group, codec.clone(), extras);
            let mut there = attending(cuda, d, group, codec, extras);
            let mut random = Random::new(d as u64);
            let (mut start, mut worst) = (0, [0.0_f64; 2]);
            // Chunks, single tokens, a chunk over a sealed prefix.
            for len in [190, 1, 1, 67, 1, 300, 1, 130, 1, 1] {
                let rows: Vec<f32> = (0..len * here.spec.qkv_cols()).map(|_| 2.0 * random.signed()).collect();
                let (expected, got) = (here.rows(start, &rows), there.rows(start, &rows));
                let kind = usize::from(len == 1);
                worst[kind] = worst[kind].max(error(&expected, &got));
                if name == "bf16" && error(&here.stored, &there.stored) > 1e-2 {
                    println!("FAILED {d} channels: queries and keys are not where they were projected to");
                    failures += 1;
                }
                start += len;
            }
            // The processor's queries have 15 bits in all bands, those of the card one byte in some.
            let bytes = sealed.is_some_and(|sealed| rounds_queries(sealed, group));
            // Windows are read by the kernel of chunks.
            let limit: f64 = match (bytes, extras.window.is_some()) {
                (true, _) => 4e-2,
                (false, true) => 1e-2,
                (false, false) => 2e-3,
            };
            // With one numeric path chunks are read by the kernel of single tokens, otherwise by one that rounds no queries.
            let of_chunks = if cuda.is_deterministic() { limit.max(1e-2) } else { 1e-2 };
            let what = format!("attention of {name}, {d} channels, {group} query heads{}", extras.name());
            failures += report(&format!("{what}, chunks"), worst[0], of_chunks);
            failures += report(&format!("{what}, tokens"), worst[1], limit);
        }
    }
    failures
}

/// With one numeric path, rows have the same bits in a chunk and one by one, whatever their pages hold.
pub(super) fn chunks(cuda: &CudaBackend) -> usize {
    let mut failures = 0;
    for d in [32, 64, 128] {
        let plain = Extras::default();
        for (group, name, extras) in [
            (2, None, plain),
            (2, Some("2"), plain),
            (7, Some("2"), plain),
            (2, Some("4"), plain),
            (3, Some("bands"), plain),
            (8, Some("bands"), plain),
            (3, Some("fewer bands"), plain),
            (12, Some("fewer bands"), plain),
            (3, Some("4/0/0/0"), plain),
            (3, Some("4/2/2/2"), plain),
            (3, Some("4/4/2/2"), plain),
            (3, Some("centred bands"), plain),
            (12, Some("centred fewer bands"), plain),
            (2, None, Extras::window(77)),
            (3, Some("bands"), Extras { sinks: true, ..plain }),
        ] {
            let has_bands = name.is_some_and(|name| name.ends_with("bands") || name.contains('/'));
            if (d == 32 && has_bands) || (d < 128 && name.is_some_and(|name| name.ends_with("fewer bands"))) {
                continue;
            }
            let codec = name.map(|name| named_codec(d, name));
            let mut random = Random::new(17);
            let mut sequences = [(); 2].map(|()| attending(cuda, d, group, codec.clone(), extras));
            let cols = sequences[0].spec.qkv_cols();
            let mut numbers =
                |rows: usize| -> Vec<f32> { (0..rows * cols).map(|_| random.signed()).collect() };
            let (prompt, rows) = (numbers(500), numbers(100));
            let due = sequences[0].windows.history(500 / PAGE_TOKENS, usize::MAX, 0);
            for sequence in &mut sequences {
                sequence.rows(0, &prompt);
            }
            let together = sequences[0].rows_after(due.clone(), 500, &rows);
            let alone: Vec<f32> = rows
                .chunks_exact(cols)
                .enumerate()
                .flat_map(|(index, row)| sequences[1].rows_after(due.clone(), 500 + index, row))
                .collect();
            let different = together.iter().zip(&alone).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
            let what =
                format!("{d} channels, {group} query heads, {}{}", name.unwrap_or("bf16"), extras.name());
            match different {
                0 => println!("chunks of {what}: the same bits as row by row"),
                _ => {
                    let (count, by) = (alone.len(), error(&alone, &together));
                    println!("FAILED {what}: {different} of {count} numbers differ in a chunk, by {by:.1e}");
                    failures += 1;
                }
            }
        }
    }
    failures
}
