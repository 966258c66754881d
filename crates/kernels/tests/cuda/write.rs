//! Rows written on the card against the CPU backend, to the bit: queries, and every byte of the pools.

use std::sync::Arc;

use oscar_codec::{
    BandLayout, BandRows, CodeLayout, ExactSlot, HeadEncoder, HeadTransform, KvGeometry, PAGE_TOKENS,
    PageCodec, PageLayout, PageWindows, RowEncoder, Rule, SquareMatrix, hadamard,
};
use oscar_kernels::backend::{
    AttentionSpec, Batch, CacheSpec, HostSlots, RmsNorm, Rope, RopeLayout, SealedSpec, SequenceRows,
    StoredMatrix,
};
use oscar_kernels::cpu::CpuBackend;
use oscar_kernels::cpu::isa::Isa;
use oscar_kernels::cuda::write::{HeadNorm, HeadNorms, RowTarget};
use oscar_kernels::cuda::{CudaError, Device, PageOrder, RowWriter, WritePools};
use oscar_kernels::inspect::KvRows;
use oscar_kernels::{Backend, DType, Inspect};
use oscar_random::Random;

const LAYERS: usize = 2;
const EXACT_SLOTS: usize = 40;
const SCRATCH_SLOTS: usize = 8;

#[derive(Clone, Copy, Debug)]
struct Case {
    head_dim: usize,
    kv_heads: usize,
    group: usize,
    /// Rotary pairs.
    pairs: usize,
    layout: RopeLayout,
    norms: bool,
    codec: Basis,
    /// Long sequences, for the kernel of many rows.
    long: bool,
}

#[derive(Clone, Copy, Debug)]
enum Basis {
    /// No codec.
    None,
    /// Keys centred; keys and values rotated, differently in every head.
    Rotated,
    /// Rotated in bf16.
    Published,
    /// Keys centred, nothing rotated.
    Centred,
    /// One rotation for all heads.
    Shared,
    /// Keys in bands, whose matrix is not a rotation; one layer as it is in a bf16 cache.
    Banded,
}

/// Runs everything; the number of failures.
pub(crate) fn run(device: &Arc<Device>, quick: bool) -> usize {
    let mut failures = 0;
    let cases = cases(quick);
    for case in &cases {
        for problem in check(device, case) {
            println!("FAILED write {case:?}: {problem}");
            failures += 1;
        }
    }
    failures += usize::from(!refuses_bad_rows(device));
    println!(
        "cuda: {} layers of rows written, each equal to the CPU's unless said above",
        cases.len() * LAYERS
    );
    failures
}

fn cases(quick: bool) -> Vec<Case> {
    let mut cases = Vec::new();
    for head_dim in [32, 64, 96, 128, 256] {
        if quick && head_dim != 128 {
            continue;
        }
        for codec in
            [Basis::None, Basis::Rotated, Basis::Published, Basis::Centred, Basis::Shared, Basis::Banded]
        {
            for layout in [RopeLayout::Halves, RopeLayout::Interleaved] {
                let case = Case {
                    head_dim,
                    kv_heads: 2,
                    group: 3,
                    pairs: head_dim / 2,
                    layout,
                    norms: true,
                    codec,
                    long: false,
                };
                cases.push(case);
                // A part of the channels, an odd number of pairs; then no rotation at all.
                let (kv_heads, group) = (3, 1);
                cases.push(Case { pairs: head_dim / 4 - 3, norms: false, kv_heads, group, ..case });
                cases.push(Case { pairs: 0, group: 8, kv_heads: 1, ..case });
                cases.push(Case { long: true, ..case });
            }
        }
    }
    cases
}

fn numbers(len: usize, size: f32, random: &mut Random) -> Vec<f32> {
    (0..len).map(|_| size * random.signed()).collect()
}

fn codec(case: &Case, random: &mut Random) -> Option<PageCodec> {
    let geometry = geometry(case);
    let (d, heads) = (case.head_dim, LAYERS * case.kv_heads);
    let mut means = || (0..heads).map(|_| numbers(d, 5.0, random)).collect::<Vec<_>>();
    let int2 = |keys: Vec<HeadTransform>, values: Vec<HeadTransform>| {
        let encoders = |transforms: Vec<HeadTransform>| -> Vec<HeadEncoder> {
            let layout = CodeLayout::new(2, d, 1).unwrap();
            let encoder = |transform| HeadEncoder::codes(transform, layout, Rule::Search, false);
            transforms.into_iter().map(encoder).collect()
        };
        let (keys, values) = (encoders(keys), encoders(values));
        PageCodec::new("int2", geometry, keys, values).unwrap()
    };
    // A rotation that is not symmetric and differs from head to head.
    let rotation = |head: usize| {
        let order: Vec<usize> = (0..d).map(|channel| (channel * 7 + head + 1) % d).collect();
        hadamard::matrix(d).permute_columns(&if d % 7 == 0 { (0..d).rev().collect() } else { order })
    };
    match case.codec {
        Basis::None => None,
        Basis::Rotated => {
            let means = means();
            let keys = means.into_iter().enumerate();
            let keys = keys.map(|(head, mean)| HeadTransform::new(Some(mean), &rotation(head)).unwrap());
            let values = (0..heads).map(|head| HeadTransform::new(None, &rotation(head + heads)).unwrap());
            Some(int2(keys.collect(), values.collect()))
        }
        Basis::Published => {
            let transforms = |first: usize| {
                (first..first + heads).map(|head| HeadTransform::published(&rotation(head)).unwrap())
            };
            Some(int2(transforms(0).collect(), transforms(heads).collect()))
        }
        Basis::Centred => Some(PageCodec::fp8(geometry, Some(means())).unwrap()),
        Basis::Banded => {
            let layout = BandLayout::int2(d).unwrap();
            let rows = RowEncoder::Banded(BandRows { layout, value_rule: Rule::Search });
            let encoder = |transform| HeadEncoder { transform, rows, page_means: None };
            let means = means();
            let keys = means.into_iter().enumerate().map(|(head, mean)| {
                // The last head of a layer has a rotation among those that have not.
                if head % case.kv_heads + 1 == case.kv_heads && case.kv_heads > 1 {
                    return encoder(HeadTransform::new(Some(mean), &rotation(head)).unwrap());
                }
                let turned = rotation(head);
                let matrix = SquareMatrix::from_fn(d, |i, j| {
                    (turned.get(i, j) + if i == j { 0.3 } else { 0.0 })
                        * 30.0_f64.powf(-(j as f64) / d as f64)
                });
                encoder(HeadTransform::general(Some(mean), &matrix).unwrap())
            });
            let keys = keys.collect();
            let values = (0..heads).map(|head| HeadTransform::new(None, &rotation(head + heads)).unwrap());
            let values = values.map(encoder).collect();
            Some(PageCodec::new("int2", geometry, keys, values).unwrap().keep_bf16(&[1]).unwrap())
        }
        // One layer as it is in a bf16 cache.
        Basis::Shared => Some(PageCodec::int4(geometry, Some(means())).unwrap().keep_bf16(&[1]).unwrap()),
    }
}

fn geometry(case: &Case) -> KvGeometry {
    KvGeometry { layers: LAYERS, kv_heads: case.kv_heads, head_dim: case.head_dim }
}

/// Starts and lengths; whether pages are those of one layer, or the dummy.
fn sequences(case: &Case) -> Vec<(usize, usize, Place)> {
    let mut sequences = vec![
        (0, 1, Place::Exact),
        (63, 1, Place::Exact),
        (130, 1, Place::Exact),
        (5, 1, Place::Dummy),
        (60, 10, Place::Exact),
        (64, 64, Place::Scratch),
    ];
    if case.long {
        sequences.push((1, 700, Place::Exact));
        sequences.push((0, 200, Place::Scratch));
    }
    sequences
}

#[derive(Clone, Copy, PartialEq)]
enum Place {
    Exact,
    Scratch,
    Dummy,
}

fn check(device: &Arc<Device>, case: &Case) -> Vec<String> {
    let Case { head_dim: d, kv_heads, group, .. } = *case;
    let q_heads = kv_heads * group;
    let mut random = Random::new(d as u64 * 1000 + case.pairs as u64 * 7 + group as u64);
    let codec = codec(case, &mut random).map(Arc::new);
    let rope = Rope {
        inverse_frequencies: (0..case.pairs).map(|pair| 0.97_f32.powi(pair as i32)).collect(),
        magnitude: 1.125,
        layout: case.layout,
    };
    let sequences = sequences(case);
    let (mut next_exact, mut next_scratch) = (1, EXACT_SLOTS as u32);
    let tables: Vec<Vec<Option<ExactSlot>>> = sequences
        .iter()
        .map(|&(start, len, place)| {
            let page = |_| {
                let next = match place {
                    Place::Exact => &mut next_exact,
                    Place::Scratch => &mut next_scratch,
                    Place::Dummy => return None,
                };
                *next += 1;
                ExactSlot::new(*next - 1)
            };
            (0..(start + len).div_ceil(PAGE_TOKENS)).map(page).collect()
        })
        .collect();
    assert!(next_exact as usize <= EXACT_SLOTS && next_scratch as usize <= EXACT_SLOTS + SCRATCH_SLOTS);
    let rows: usize = sequences.iter().map(|&(_, len, _)| len).sum();
    let cols = (q_heads + 2 * kv_heads) * d;
    let mut projected = numbers(rows * cols, 4.0, &mut random);
    // A row of zeros of both signs, and small and large ones.
    for (channel, x) in projected[..3 * cols].iter_mut().enumerate() {
        *x *= [0.0, 1e-30, 1e15][channel / cols];
    }
    let gains = [0, 1].map(|_| numbers(d, 2.0, &mut random));

    let backend = CpuBackend::with_isa(4, Isa::detect());
    let spec = CacheSpec {
        geometry: geometry(case),
        query_heads: case.kv_heads * case.group,
        slots: EXACT_SLOTS,
        scratch_slots: SCRATCH_SLOTS,
        sealed: codec.clone().map(|codec| SealedSpec {
            codec,
            slots: 2,
            windows: PageWindows { sink: 1, recent: 1 },
            sequence_pages: 1,
            high: None,
        }),
        host: HostSlots::default(),
    };
    let mut cache = backend.cache(&spec).unwrap();
    let batch_rows: Vec<SequenceRows<'_>> = sequences
        .iter()
        .zip(&tables)
        .map(|(&(start, len, _), pages)| SequenceRows::exact(start, len, pages))
        .collect();
    let tokens = vec![0; rows];
    let step = backend.begin_step(&Batch { tokens: &tokens, sequences: &batch_rows }, &rope, &cache).unwrap();
    let norm = |side: usize| {
        let bytes: Vec<u8> = gains[side].iter().flat_map(|gain| gain.to_le_bytes()).collect();
        let stored = StoredMatrix {
            bytes: Arc::new(bytes),
            offset: 0,
            dtype: DType::F32,
            rows: 1,
            cols: d,
            scales: None,
        };
        RmsNorm { weight: backend.weight(&stored).unwrap(), eps: 1e-6 * (side + 1) as f32 }
    };
    let [q_norm, k_norm] = [0, 1].map(|side| case.norms.then(|| norm(side)));
    let attention = AttentionSpec {
        q_heads,
        kv_heads,
        head_dim: d,
        scale: 1.0,
        window: None,
        rotates: true,
        sinks: None,
        q_norm,
        k_norm,
    };

    let stream = device.stream();
    let writer = RowWriter::new(device, geometry(case), group, codec.as_deref()).unwrap();
    let targets: Vec<RowTarget> = sequences
        .iter()
        .zip(&tables)
        .flat_map(|(&(start, len, _), pages)| {
            (start..start + len).map(|position| RowTarget { slot: pages[position / PAGE_TOKENS], position })
        })
        .collect();
    let device_step = writer.step(&targets, &rope).unwrap();
    let device_rows = stream.clone_htod(&projected).unwrap();
    let device_gains = [0, 1].map(|side| stream.clone_htod(&gains[side]).unwrap());
    let norms = [0, 1].map(|side| {
        case.norms.then_some(HeadNorm { gain: &device_gains[side], epsilon: 1e-6 * (side + 1) as f32 })
    });
    let order = PageOrder::new(PageLayout::bf16(d)).unwrap();
    let page = order.page_bytes();
    let mut expected_exact = vec![0xff_u8; EXACT_SLOTS * LAYERS * kv_heads * page];
    let mut exact = stream.clone_htod(&expected_exact).unwrap();
    let mut problems = Vec::new();
    for layer in 0..LAYERS {
        let mut qkv = backend.buffer(rows, cols).unwrap();
        qkv.first_rows_mut("rows", rows).unwrap().copy_from_slice(&projected);
        backend.rope_store(&step, &attention, layer, &mut qkv, &mut cache).unwrap();
        let stored = backend.read(&qkv, 0..rows).unwrap();

        // Scratch slots hold one layer: the last one that was written.
        let mut expected_scratch = vec![0xff_u8; SCRATCH_SLOTS * kv_heads * page];
        let mut scratch = stream.clone_htod(&expected_scratch).unwrap();
        let mut queries = stream.clone_htod(&vec![f32::NAN; rows * q_heads * d]).unwrap();
        let pools = WritePools { exact: &mut exact, exact_slots: EXACT_SLOTS, scratch: Some(&mut scratch) };
        let norms = HeadNorms { queries: norms[0], keys: norms[1] };
        writer.launch(&device_step, layer, norms, &device_rows, &mut queries, pools).unwrap();
        let got = stream.clone_dtoh(&queries).unwrap();
        device.synchronise().unwrap();
        let expected = stored.chunks_exact(cols).flat_map(|row| &row[..q_heads * d]);
        if let Some((at, (expected, got))) =
            expected.zip(&got).enumerate().find(|(_, (expected, got))| expected.to_bits() != got.to_bits())
        {
            let (row, channel) = (at / (q_heads * d), at % (q_heads * d));
            problems.push(format!("layer {layer}, query {row}, {channel}: {got:e} instead of {expected:e}"));
        }

        for (&(start, len, place), pages) in sequences.iter().zip(&tables) {
            for (position, head) in
                (start..start + len).flat_map(|position| (0..kv_heads).map(move |head| (position, head)))
            {
                let Some(slot) = pages[position / PAGE_TOKENS].map(ExactSlot::index) else { continue };
                let rows = KvRows { layer, head, pages };
                let (key, value) = backend.read_kv(&cache, rows, position..position + 1).unwrap();
                let bytes = match place {
                    Place::Dummy => unreachable!("padded rows have no slot"),
                    Place::Exact => {
                        &mut expected_exact[((slot * LAYERS + layer) * kv_heads + head) * page..][..page]
                    }
                    Place::Scratch => {
                        &mut expected_scratch[((slot - EXACT_SLOTS) * kv_heads + head) * page..][..page]
                    }
                };
                order.write_bf16(bytes, position % PAGE_TOKENS, &key, &value);
            }
        }
        let pools = [("bf16", &exact, &expected_exact), ("scratch", &scratch, &expected_scratch)];
        for (name, pool, expected) in pools {
            let got = stream.clone_dtoh(pool).unwrap();
            device.synchronise().unwrap();
            let wrong = got.iter().zip(expected).filter(|(got, expected)| got != expected).count();
            if let Some(at) = got.iter().zip(expected).position(|(got, expected)| got != expected) {
                let (page, byte) = (at / page, at % page);
                problems.push(format!(
                    "layer {layer}: {wrong} bytes of the {name} pool, first byte {byte} of page {page}"
                ));
            }
        }
    }
    problems
}

/// Rows that cannot be written are refused before anything is launched.
fn refuses_bad_rows(device: &Arc<Device>) -> bool {
    let geometry = KvGeometry { layers: 1, kv_heads: 1, head_dim: 64 };
    let writer = RowWriter::new(device, geometry, 1, None).unwrap();
    let rope =
        |pairs| Rope { inverse_frequencies: vec![0.5; pairs], magnitude: 1.0, layout: RopeLayout::Halves };
    let row = |slot, position| RowTarget { slot: ExactSlot::new(slot), position };
    let stream = device.stream();
    let rows = stream.clone_htod(&vec![0.0_f32; 3 * 64]).unwrap();
    let mut queries = stream.clone_htod(&vec![0.0_f32; 64]).unwrap();
    let mut exact = device.zeroed(3 * 64 * 64 * 4).unwrap();
    let mut attempt = |targets: &[RowTarget], layer: usize| {
        let step = writer.step(targets, &rope(32))?;
        let pools = WritePools { exact: &mut exact, exact_slots: 3, scratch: None };
        writer.launch(&step, layer, HeadNorms::default(), &rows, &mut queries, pools)
    };
    let right = attempt(&[row(2, 9)], 0).is_ok()
        && attempt(&[], 0).is_ok()
        && matches!(attempt(&[row(3, 9)], 0), Err(CudaError::PageOutOfRange { slot: 3, slots: 3 }))
        && matches!(attempt(&[row(2, 9)], 1), Err(CudaError::Shape { .. }))
        && matches!(attempt(&[row(2, 9), row(1, 9)], 0), Err(CudaError::Shape { .. }))
        && matches!(attempt(&[row(2, 9), row(2, 73)], 0), Err(CudaError::PageWrittenTwice { slot: 2 }))
        && matches!(writer.step(&[row(1, 0)], &rope(33)), Err(CudaError::Shape { .. }));
    if !right {
        println!("FAILED write: rows that cannot be written were not refused");
    }
    right
}
