//! Every CUDA kernel against its reference, on a card: attention in f64 on what its pages decode to here, sealing and
//! writing in the modules. Without a card, a line says so. Arguments choose: `backend`, `prefill`, `tiers`, `attention`, `tail`, `seal`, `write`.
//! Attention and sealing of some formats only: `OSCAR_CUDA_ONLY` is a part of their names.
//!
//! Memory that no kernel may look at is poisoned: pools outside the pages that are read, tokens of bf16 pages that were
//! not written yet, and outputs all begin as NaN.
#![allow(clippy::unwrap_used)]

#[path = "cuda/attend.rs"]
mod attend;
#[path = "cuda/backend.rs"]
mod backend;
#[path = "cuda/prefill.rs"]
mod prefill;
#[path = "cuda/seal.rs"]
mod seal;
#[path = "cuda/tiers.rs"]
mod tiers;
#[path = "cuda/write.rs"]
mod write;

use std::process::ExitCode;
use std::sync::Arc;

use cudarc::driver::CudaSlice;
use oscar_codec::{
    BandLayout, CodeLayout, ExactSlot, Fp8Layout, KeyWidths, PAGE_TOKENS, PageLayout, ScaleType, SealedSlot,
};
use oscar_kernels::cuda::reference::{
    random_page, reference_of_pages, rounded_query, rounds_queries, shuffled,
};
use oscar_kernels::cuda::{
    DecodeAttention, DecodeSequence, DecodeShape, Device, PoolView, Split, ValueTransform,
};
use oscar_random::Random;

/// Largest relative error that passes; outputs are f32. Queries have 15 bits in products with codes, which shows where logits are
/// in the hundreds. Where they are rounded to bytes, the reference rounds them too, but what sums of a band start from is still
/// off by up to one and a quarter of their unit.
fn limit(kind: Kind, shape: &DecodeShape) -> f64 {
    match (kind == Kind::Sharp, rounds_queries(shape.sealed, shape.group)) {
        (true, true) => 2e-2,
        (true, false) => 4e-3,
        (false, true) => 2e-3,
        (false, false) => 1e-3,
    }
}

fn main() -> ExitCode {
    let device = match Device::open(0, Some(std::env::temp_dir().join("oscar-cuda-kernels"))) {
        Ok(device) => device,
        Err(error) => {
            println!("skipped: no CUDA kernel was run: {error}");
            return ExitCode::SUCCESS;
        }
    };
    println!(
        "cuda: {} ({}, driver {})",
        device.name(),
        device.architecture(),
        device.driver_version().unwrap()
    );
    // A quick run for checkers that slow everything down a hundredfold.
    let quick = std::env::var_os("OSCAR_CUDA_QUICK").is_some();
    let chosen: Vec<String> =
        std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let wanted = |name: &str| chosen.is_empty() || chosen.iter().any(|chosen| chosen == name);
    let mut failures = 0;
    let runs = [
        ("backend", backend::run as fn(&Arc<Device>, bool) -> usize),
        ("prefill", prefill::run),
        ("tiers", tiers::run),
        ("seal", seal::run),
        ("write", write::run),
    ];
    for (name, run) in runs {
        if wanted(name) {
            failures += run(&device, quick);
        }
    }
    let (mut runs, mut worst) = (0, 0.0_f64);
    for (name, shape) in shapes(quick).into_iter().filter(|(name, _)| wanted("attention") && named(name)) {
        // As it chooses its layout itself, and in every layout.
        let made = DecodeAttention::new(&device, shape).and_then(|kernel| {
            let layouts =
                kernel.tunings().map(|&tuning| DecodeAttention::with_tuning(&device, shape, tuning));
            let layouts = layouts.collect::<Result<Vec<_>, _>>()?;
            Ok((kernel, layouts))
        });
        let (kernel, layouts) = match made {
            Ok(kernels) => kernels,
            Err(error) => {
                println!("FAILED {name}: {error}");
                failures += 1;
                continue;
            }
        };
        let (registers, spilled) = kernel.resources().unwrap();
        let mut worst_here = 0.0_f64;
        let banded = matches!(shape.sealed, PageLayout::Banded(_));
        for (kind, batch) in batches(quick).into_iter().filter(|(kind, _)| banded || *kind != Kind::Steep) {
            let case = Batch::new(&device, &kernel, kind, &batch);
            let fixed = Split::Fixed { pages: 4 };
            let chosen = [(&kernel, Split::Balanced, false), (&kernel, fixed, true)];
            let every =
                layouts.iter().flat_map(|kernel| [false, true].map(|undo| (kernel, Split::Balanced, undo)));
            for (kernel, split, undo) in chosen.into_iter().chain(every) {
                let (error, got) = case.run(kernel, split, None, undo);
                // A second time: nothing may be left over, and nothing may depend on who comes first.
                let again = case.run(kernel, split, None, undo).1;
                let same = got.iter().zip(&again).all(|(a, b)| a.to_bits() == b.to_bits());
                runs += 1;
                if error.is_nan() || error > limit(kind, &shape) || !same {
                    println!(
                        "FAILED {name}, {kind:?} {batch:?}, {split:?}, rotation undone: {undo}: \
                         error {error:.2e}, repeatable: {same}"
                    );
                    failures += 1;
                }
                worst_here = if error.is_nan() { error } else { worst_here.max(error) };
            }
            if !case.alone_is_the_same(&kernel) {
                println!("FAILED {name}, {kind:?} {batch:?}: a fixed split depends on the batch");
                failures += 1;
            }
        }
        println!(
            "{name:34} largest error {worst_here:.1e}  ({registers} registers, {spilled} bytes spilled)"
        );
        worst = worst.max(worst_here);
    }
    if wanted("tail") && !quick {
        failures += long_tail(&device);
    }
    println!("cuda: {runs} runs, largest error {worst:.1e}, {failures} failed");
    if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Whether a format was asked for.
fn named(name: &str) -> bool {
    std::env::var("OSCAR_CUDA_ONLY").map_or(true, |part| name.contains(&part))
}

/// Thousands of small weights next to a large one, all in one block: none may be lost for being small.
fn long_tail(device: &Arc<Device>) -> usize {
    let mut failures = 0;
    let usual = 1e-3;
    let codes = |bits, groups| PageLayout::Codes(CodeLayout::new(bits, 128, groups).unwrap());
    let banded = PageLayout::banded(128).unwrap();
    let [high, fewer] = [PageLayout::Banded(BandLayout::high(128).unwrap()), PageLayout::int15(128).unwrap()];
    for (name, sealed, group, kind, pages, limit) in [
        ("int2 x1", codes(2, 1), 4, Kind::Needle, 260, usual),
        ("int2 x2", codes(2, 2), 8, Kind::Needle, 260, usual),
        ("int2 x1", codes(2, 1), 12, Kind::Needle, 260, usual),
        ("int4 x1", codes(4, 1), 4, Kind::Needle, 260, usual),
        // Weights of two bytes lose more the more tokens there are, and here most are below half a unit.
        ("int2 x1", codes(2, 1), 12, Kind::Needle, 2060, 3.0 * usual),
        ("int2 x1", codes(2, 1), 12, Kind::Spike, 2060, 3.0 * usual),
        ("int2 x1", codes(2, 1), 4, Kind::Spike, 2060, usual),
        ("banded", banded, 4, Kind::Needle, 260, usual),
        ("banded", banded, 12, Kind::Needle, 260, usual),
        ("banded", banded, 12, Kind::Spike, 2060, 3.0 * usual),
        ("high", high, 4, Kind::Needle, 260, usual),
        ("high", high, 12, Kind::Needle, 260, usual),
        ("int1.5", fewer, 12, Kind::Spike, 2060, 3.0 * usual),
    ] {
        if !named(name) {
            continue;
        }
        let kernel =
            DecodeAttention::new(device, DecodeShape { head_dim: 128, kv_heads: 1, group, sealed }).unwrap();
        let case = Batch::new(device, &kernel, kind, &[(64 * pages, pages - 5)]);
        let (error, _) = case.run(&kernel, Split::Fixed { pages }, None, false);
        println!("{name}, {group} rows, {kind:?} among {} tokens: error {error:.1e}", 64 * pages);
        failures += usize::from(error.is_nan() || error > limit);
    }
    failures
}

fn shapes(quick: bool) -> Vec<(String, DecodeShape)> {
    let mut shapes = Vec::new();
    for head_dim in [64, 96, 128, 256] {
        let codes = |bits, groups, scale| {
            (
                format!("int{bits} x{groups}{}", if scale == ScaleType::Bf16 { " bf16 scales" } else { "" }),
                PageLayout::Codes(CodeLayout::new(bits, head_dim, groups).unwrap().with_scales(scale)),
            )
        };
        let mut formats = vec![
            codes(2, 1, ScaleType::F16),
            codes(4, 1, ScaleType::F16),
            ("fp8".into(), PageLayout::Fp8(Fp8Layout::new(head_dim).unwrap())),
            ("bf16".into(), PageLayout::bf16(head_dim)),
            codes(2, head_dim / 32, ScaleType::F16),
            ("banded".into(), PageLayout::banded(head_dim).unwrap()),
            ("high".into(), PageLayout::Banded(BandLayout::high(head_dim).unwrap())),
        ];
        if head_dim >= 128 {
            // Smaller heads have fewer bands than kernels need.
            formats.push(("int1.5".into(), PageLayout::int15(head_dim).unwrap()));
        }
        let others = KeyWidths::menu(head_dim).filter(|&widths| widths != KeyWidths::default());
        formats.extend(others.map(|widths| {
            (format!("widths {widths}"), PageLayout::Banded(BandLayout::of_widths(head_dim, widths).unwrap()))
        }));
        if head_dim == 128 {
            formats.push(codes(2, 2, ScaleType::F16));
            formats.push(codes(4, 2, ScaleType::F16));
            formats.push(codes(2, 1, ScaleType::Bf16));
        }
        for (name, sealed) in formats {
            let groups: &[usize] = match head_dim {
                128 if quick => &[4, 12],
                _ if quick => continue,
                128 => &[1, 4, 8, 12, 16],
                _ => &[3, 16],
            };
            for &group in groups {
                let shape = DecodeShape { head_dim, kv_heads: 2, group, sealed };
                shapes.push((format!("{name}, d {head_dim}, {group} rows"), shape));
            }
        }
    }
    // Weights of two bytes, where registers have room for more or for less, and where query heads do not fill a column.
    if !quick {
        for (head_dim, group) in [(64, 12), (96, 12), (128, 9)] {
            let codes = PageLayout::Codes(CodeLayout::new(2, head_dim, 1).unwrap());
            let mut formats = vec![("int2 x1", codes), ("banded", PageLayout::banded(head_dim).unwrap())];
            formats.push(("high", PageLayout::Banded(BandLayout::high(head_dim).unwrap())));
            formats
                .extend(PageLayout::int15(head_dim).ok().filter(|_| head_dim == 128).map(|l| ("int1.5", l)));
            for (name, sealed) in formats {
                let shape = DecodeShape { head_dim, kv_heads: 2, group, sealed };
                shapes.push((format!("{name}, d {head_dim}, {group} rows"), shape));
            }
        }
    }
    shapes
}

/// What the numbers of a batch are like.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Plain,
    /// Logits of hundreds: one token takes all.
    Sharp,
    /// Queries of zero: all tokens weigh the same.
    Equal,
    /// Keys and values far from zero, as with biases.
    Offset,
    /// Logits that grow along the sequence: the running maximum changes with every page.
    Growing,
    /// Numbers close to zero.
    Tiny,
    /// Queries that are the larger the weaker the keys of a band, as where keys were divided by their strength.
    Steep,
    /// One key has a logit ten above all others: as large a weight as 22,000 of them.
    Needle,
    /// The same with thirteen: 440,000.
    Spike,
}

/// How much larger queries are in a band of keys.
fn steepness(sealed: PageLayout, channel: usize) -> f32 {
    let PageLayout::Banded(layout) = sealed else { return 1.0 };
    let band = layout.bands().iter().position(|band| band.range().contains(&channel));
    // Channels after the last band are larger still, and must not matter.
    [1.0 / 64.0, 0.25, 8.0, 128.0, 1024.0][band.unwrap_or(layout.bands().len())]
}

/// Lengths of sequences, with the number of sealed pages after the sink that is aimed at.
fn batches(quick: bool) -> Vec<(Kind, Vec<(usize, usize)>)> {
    let ragged = vec![(1, 0), (0, 0), (63, 0), (64, 0), (65, 0), (128, 1), (129, 1), (700, 8), (2100, 28)];
    if quick {
        return vec![(Kind::Plain, ragged)];
    }
    vec![
        (Kind::Plain, vec![(0, 0)]),
        (Kind::Plain, vec![(1, 0)]),
        (Kind::Plain, ragged.clone()),
        (Kind::Plain, vec![(64 * 12, 11)]),
        (Kind::Plain, vec![(5003, 70)]),
        (Kind::Sharp, ragged.clone()),
        (Kind::Equal, ragged.clone()),
        (Kind::Offset, ragged.clone()),
        (Kind::Growing, ragged.clone()),
        (Kind::Tiny, ragged.clone()),
        (Kind::Steep, ragged),
    ]
}

/// The two page tables of a sequence.
type PageTables = (Vec<Option<ExactSlot>>, Vec<Option<SealedSlot>>);

/// A batch with its pages on the device and what they hold.
struct Batch {
    device: Arc<Device>,
    lengths: Vec<(usize, usize)>,
    tables: Vec<PageTables>,
    pools: [CudaSlice<u8>; 2],
    queries: Vec<f32>,
    /// Attention in f64, `[sequence][query head]`.
    expected: Vec<Vec<Vec<f64>>>,
    scale: f32,
    /// What outputs are multiplied with and what is added, of the second of two layers, per KV head.
    matrices: Vec<f32>,
    means: Vec<f32>,
}

impl Batch {
    fn new(device: &Arc<Device>, kernel: &DecodeAttention, kind: Kind, lengths: &[(usize, usize)]) -> Batch {
        let DecodeShape { head_dim: d, kv_heads, group, sealed } = *kernel.shape();
        let mut random = Random::new(kind as u64 + 17 * d as u64 + group as u64);
        let total: usize = lengths.iter().map(|(tokens, _)| tokens.div_ceil(PAGE_TOKENS)).sum();
        // Twice as many slots as pages, so that there is something to keep away from.
        let slots = 2 * total + 1;
        let mut free = shuffled(slots - 1, &mut random).into_iter().map(|number| number + 1);
        let orders = kernel.orders();
        let mut pools = orders.map(|order| vec![0xff_u8; slots * kv_heads * order.page_bytes()]);
        let (mut tables, mut rows) = (Vec::new(), Vec::new());
        for &(tokens, sealed_pages) in lengths {
            let pages = tokens.div_ceil(PAGE_TOKENS);
            let numbers: Vec<u32> = free.by_ref().take(pages).collect();
            let is_sealed = |page: usize| (1..1 + sealed_pages).contains(&page);
            let mut heads = Vec::new();
            for head in 0..kv_heads {
                let mut held = Vec::new();
                for (page, &slot) in numbers.iter().enumerate() {
                    let pool = usize::from(is_sealed(page));
                    let drawn = [0, 1].map(|side| -> Vec<f32> {
                        let value = |index: usize| {
                            let x = random.signed();
                            match kind {
                                Kind::Offset => x + if side == 0 { 40.0 } else { 7.0 },
                                Kind::Tiny => x * 1e-3,
                                Kind::Steep if side == 0 => 2.0 * x / steepness(sealed, index % d),
                                Kind::Growing if side == 0 => {
                                    x + (page * PAGE_TOKENS + index / d) as f32 * 0.01
                                }
                                // Queries are 1 in the mean and all positive.
                                Kind::Needle | Kind::Spike if side == 0 => {
                                    let above = if kind == Kind::Needle { 10.0 } else { 13.0 };
                                    let needle = page == 7 && index / d == 5;
                                    x * 0.5 + if needle { above / (d as f32).sqrt() } else { 0.0 }
                                }
                                _ => 2.0 * x,
                            }
                        };
                        (0..PAGE_TOKENS * d).map(value).collect()
                    });
                    let (mut bytes, rows) = random_page(&orders[pool], &drawn, &mut random);
                    if pool == 0 {
                        let nan = vec![f32::NAN; d];
                        let written = tokens.saturating_sub(page * PAGE_TOKENS).min(PAGE_TOKENS);
                        for token in written..PAGE_TOKENS {
                            orders[0].write_bf16(&mut bytes, token, &nan, &nan);
                        }
                    }
                    let at = (slot as usize * kv_heads + head) * bytes.len();
                    pools[pool][at..at + bytes.len()].copy_from_slice(&bytes);
                    held.push(rows);
                }
                heads.push(held);
            }
            let slots = |(page, &number): (usize, &u32)| match is_sealed(page) {
                false => (ExactSlot::new(number), None),
                true => (None, SealedSlot::new(number)),
            };
            tables.push(numbers.iter().enumerate().map(slots).unzip());
            rows.push(heads);
        }
        let factor = match kind {
            Kind::Sharp => 60.0,
            Kind::Equal => 0.0,
            _ => 2.0,
        };
        let numbers = lengths.len() * kv_heads * group * d;
        let positive = matches!(kind, Kind::Growing | Kind::Needle | Kind::Spike);
        let queries: Vec<f32> = (0..numbers)
            .map(|index| {
                let steep = if kind == Kind::Steep { steepness(sealed, index % d) } else { 1.0 };
                let x = factor * steep * random.signed();
                if positive { x.abs() } else { x }
            })
            .collect();
        let pools = pools.map(|bytes| device.stream().clone_htod(&bytes).unwrap());
        let scale = 1.0 / (d as f32).sqrt();
        let expected = queries
            .chunks_exact(kv_heads * group * d)
            .zip(lengths.iter().zip(&rows))
            .map(|(queries, (&(tokens, sealed_pages), heads))| {
                let row = |(index, query): (usize, &[f32])| {
                    let pages: &Vec<[Vec<f32>; 2]> = &heads[index / group];
                    let rounded = rounded_query(&orders[1], group, query);
                    reference_of_pages(d, scale, tokens, |page| {
                        let is_sealed = (1..1 + sealed_pages).contains(&page);
                        (if is_sealed { rounded.as_slice() } else { query }, &pages[page])
                    })
                };
                queries.chunks_exact(d).enumerate().map(row).collect()
            })
            .collect();
        let matrices = (0..kv_heads * d * d).map(|_| random.signed() * scale).collect();
        let means = (0..kv_heads * d).map(|_| 0.1 * random.signed()).collect();
        Batch {
            device: device.clone(),
            lengths: lengths.to_vec(),
            tables,
            pools,
            queries,
            expected,
            scale,
            matrices,
            means,
        }
    }

    /// The relative error of the worst sequence, and the outputs. `only` runs one sequence by itself; with `undo` outputs
    /// are multiplied with a matrix.
    fn run(
        &self,
        kernel: &DecodeAttention,
        split: Split,
        only: Option<usize>,
        undo: bool,
    ) -> (f64, Vec<f32>) {
        let DecodeShape { head_dim: d, kv_heads, group, .. } = *kernel.shape();
        let width = kv_heads * group * d;
        let chosen: Vec<usize> = only.map_or((0..self.lengths.len()).collect(), |index| vec![index]);
        let sequences: Vec<DecodeSequence<'_>> = chosen
            .iter()
            .enumerate()
            .map(|(row, &index)| DecodeSequence {
                row,
                tokens: self.lengths[index].0,
                sink_pages: 1,
                history_end: 1 + self.lengths[index].1,
                exact: &self.tables[index].0,
                sealed: &self.tables[index].1,
            })
            .collect();
        let queries: Vec<f32> = chosen
            .iter()
            .flat_map(|&index| &self.queries[index * width..(index + 1) * width])
            .copied()
            .collect();
        let stream = self.device.stream();
        let mut plan = kernel.plan(split, &sequences).unwrap();
        let device_queries = stream.clone_htod(&queries).unwrap();
        let mut out = stream.clone_htod(&vec![f32::NAN; queries.len()]).unwrap();
        let view = |pool: usize| PoolView {
            memory: &self.pools[pool],
            first: 0,
            offset: 0,
            stride: kernel.orders()[pool].page_bytes() * kv_heads,
            scratch: None,
            means: None,
        };
        // Matrices of another layer come first, and are poison.
        let second = |numbers: &[f32]| {
            stream.clone_htod(&[vec![f32::NAN; numbers.len()], numbers.to_vec()].concat()).unwrap()
        };
        let (matrices, means) = (second(&self.matrices), second(&self.means));
        let transform = ValueTransform { matrices: &matrices, means: Some(&means), layer: 1 };
        kernel
            .launch_and_undo(
                &mut plan,
                view(0),
                Some(view(1)),
                &device_queries,
                queries.len() / sequences.len().max(1),
                self.scale,
                undo.then_some(transform),
                &mut out,
            )
            .unwrap();
        let got = stream.clone_dtoh(&out).unwrap();
        self.device.synchronise().unwrap();
        let mut worst = 0.0_f64;
        for (place, &index) in chosen.iter().enumerate() {
            let (mut difference, mut norm) = (0.0, 0.0);
            for row in 0..kv_heads * group {
                let at = place * width + row * d;
                let mut expected = self.expected[index][row].clone();
                if undo {
                    expected = self.undone(&expected, row / group);
                }
                for (expected, &got) in expected.iter().zip(&got[at..at + d]) {
                    difference += (expected - f64::from(got)).powi(2);
                    norm += expected.powi(2);
                }
            }
            let error = if norm > 0.0 { (difference / norm).sqrt() } else { difference.sqrt() };
            worst = if error.is_nan() { f64::NAN } else { worst.max(error) };
            if error.is_nan() {
                break;
            }
        }
        (worst, got)
    }

    /// A row times the matrix of a head, and the mean.
    fn undone(&self, row: &[f64], head: usize) -> Vec<f64> {
        let d = row.len();
        let matrix = &self.matrices[head * d * d..(head + 1) * d * d];
        let mut out: Vec<f64> = self.means[head * d..(head + 1) * d].iter().map(|&x| f64::from(x)).collect();
        for (x, weights) in row.iter().zip(matrix.chunks_exact(d)) {
            out.iter_mut().zip(weights).for_each(|(out, &weight)| *out += x * f64::from(weight));
        }
        out
    }

    /// Whether the longest sequence gets the same bits alone as in the batch, with fixed splits.
    fn alone_is_the_same(&self, kernel: &DecodeAttention) -> bool {
        let split = Split::Fixed { pages: 4 };
        let longest = (0..self.lengths.len()).max_by_key(|&index| self.lengths[index].0).unwrap();
        let width = kernel.shape().kv_heads * kernel.shape().group * kernel.shape().head_dim;
        let together = self.run(kernel, split, None, false).1;
        let alone = self.run(kernel, split, Some(longest), false).1;
        let part = &together[longest * width..(longest + 1) * width];
        part.iter().zip(&alone).all(|(a, b)| a.to_bits() == b.to_bits())
    }
}
