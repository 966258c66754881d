//! Attention of many rows against f64 on what its pages decode to: both kernels, every format, ragged sequences, rows whose
//! histories end on different pages, and histories that end inside a page. Pages that no row may read are NaN.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::CudaSlice;
use oscar_codec::{
    BandLayout, CodeLayout, ExactSlot, Fp8Layout, KeyWidths, PAGE_TOKENS, PageLayout, ScaleType, SealedSlot,
};
use oscar_kernels::cuda::reference::{random_page, reference, shuffled};
use oscar_kernels::cuda::{
    CudaError, DecodeShape, Device, PageOrder, PoolView, PrefillAttention, PrefillPools, PrefillSequence,
};
use oscar_random::Random;

use super::named;

const KV_HEADS: usize = 2;
/// Sequences of a step: the first position, and rows.
const SEQUENCES: [(usize, usize); 6] = [(0, 200), (700, 131), (1000, 1), (0, 5), (1984, 64), (321, 33)];

/// How rows divide what they read.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Histories {
    /// A sink of a page, and a window of two.
    Pages,
    /// No sink; histories end at any position.
    Positions,
    /// There are none.
    None,
    /// There are none, and a row sees so many positions.
    Window(usize),
}

/// Relative error that passes. Queries and weights are bf16 in products of warpgroups, and sealed pages become bf16 for products.
fn limit(portable: bool, sealed: PageLayout) -> f64 {
    match sealed {
        PageLayout::Bf16(_) if portable => 4e-3,
        PageLayout::Bf16(_) => 8e-3,
        _ => 1.5e-2,
    }
}

pub(super) fn run(device: &Arc<Device>, quick: bool) -> usize {
    let mut failures = 0;
    for head_dim in if quick { vec![64] } else { vec![64, 96, 128, 256] } {
        let codes = |bits, groups, scales| {
            PageLayout::Codes(CodeLayout::new(bits, head_dim, groups).unwrap().with_scales(scales))
        };
        let mut formats = vec![
            ("bf16", PageLayout::bf16(head_dim)),
            ("int2", codes(2, 1, ScaleType::F16)),
            ("int2 in groups", codes(2, head_dim / 32, ScaleType::Bf16)),
            ("int4", codes(4, 1, ScaleType::F16)),
            ("banded", PageLayout::banded(head_dim).unwrap()),
            ("high", PageLayout::Banded(BandLayout::high(head_dim).unwrap())),
            ("fp8", PageLayout::Fp8(Fp8Layout::new(head_dim).unwrap())),
        ];
        if head_dim >= 128 {
            formats.push(("int1.5", PageLayout::int15(head_dim).unwrap()));
        }
        let others = KeyWidths::menu(head_dim).filter(|&widths| widths != KeyWidths::default());
        let of = |widths| PageLayout::Banded(BandLayout::of_widths(head_dim, widths).unwrap());
        formats.extend(others.map(|widths| ("widths", of(widths))));
        for (name, sealed) in formats.into_iter().filter(|(name, _)| named(name)) {
            for (portable, group) in [(false, 1), (false, 4), (false, 5), (true, 4), (true, 16)] {
                let shape = DecodeShape { head_dim, kv_heads: KV_HEADS, group, sealed };
                let kinds = match sealed {
                    PageLayout::Bf16(_) => [1, 64, 100, 512].map(Histories::Window).into(),
                    _ => vec![Histories::Pages],
                };
                let others = [Histories::None, Histories::Positions];
                let others = others.iter().take(if kinds.len() > 1 { 2 } else { 1 });
                for &histories in kinds.iter().chain(others) {
                    let what = format!(
                        "many rows, {name} d{head_dim}, {group} heads, {histories:?}, portable: {portable}"
                    );
                    match worst_error(device, shape, histories, portable) {
                        Ok(error) if error <= limit(portable, sealed) => {}
                        Ok(error) => {
                            println!("FAILED {what}: error {error:.2e}");
                            failures += 1;
                        }
                        Err(error) => {
                            println!("FAILED {what}: {error}");
                            failures += 1;
                        }
                    }
                }
            }
        }
    }
    println!("attention of many rows: {failures} failed");
    failures
}

/// Pages of a pool: bytes on the card, and rows of every page and head.
struct Pool {
    memory: CudaSlice<u8>,
    held: Vec<[Vec<f32>; 2]>,
    stride: usize,
}

impl Pool {
    fn new(device: &Device, order: &PageOrder, slots: usize, random: &mut Random) -> Result<Pool, CudaError> {
        let (mut bytes, mut held) = (Vec::new(), Vec::new());
        // Slot 0 is read by nobody.
        bytes.resize(KV_HEADS * order.page_bytes(), 0xff);
        held.resize(KV_HEADS, [vec![f32::NAN; 1], vec![f32::NAN; 1]]);
        for _ in 0..slots * KV_HEADS {
            let rows = [1.5, 1.0].map(|size| {
                (0..PAGE_TOKENS * order.head_dim()).map(|_| size * random.signed()).collect::<Vec<f32>>()
            });
            let (page, rows) = random_page(order, &rows, random);
            bytes.extend(page);
            held.push(rows);
        }
        let memory = device.stream().clone_htod(&bytes)?;
        Ok(Pool { memory, held, stride: KV_HEADS * order.page_bytes() })
    }

    fn view(&self) -> PoolView<'_> {
        PoolView {
            memory: &self.memory,
            first: 0,
            offset: 0,
            stride: self.stride,
            scratch: None,
            means: None,
        }
    }
}

fn worst_error(
    device: &Arc<Device>,
    shape: DecodeShape,
    histories: Histories,
    portable: bool,
) -> Result<f64, CudaError> {
    let DecodeShape { head_dim, group, sealed, .. } = shape;
    let kernel = match portable {
        true => PrefillAttention::portable(device, shape)?,
        false => PrefillAttention::new(device, shape)?,
    };
    let mut random = Random::new(5);
    let pages_of = |&(start, rows): &(usize, usize)| (start + rows).div_ceil(PAGE_TOKENS);
    let pages: usize = SEQUENCES.iter().map(pages_of).sum();
    let exact_pool = Pool::new(device, &PageOrder::new(PageLayout::bf16(head_dim))?, pages, &mut random)?;
    let sealed_pool = Pool::new(device, &PageOrder::new(sealed)?, pages, &mut random)?;
    let mut free = shuffled(pages, &mut random).into_iter().map(|slot| slot + 1);
    let tables: Vec<(Vec<_>, Vec<_>)> = SEQUENCES
        .iter()
        .map(|sequence| {
            let slots: Vec<u32> = free.by_ref().take(pages_of(sequence)).collect();
            let exact = slots.iter().map(|&slot| ExactSlot::new(slot));
            (exact.collect(), slots.iter().map(|&slot| SealedSlot::new(slot)).collect())
        })
        .collect();
    let sink = if histories == Histories::Pages { PAGE_TOKENS } else { 0 };
    let end = |position: usize| match histories {
        Histories::Pages => (position.saturating_sub(128) / PAGE_TOKENS * PAGE_TOKENS).max(sink),
        Histories::Positions => position * 2 / 3,
        Histories::None | Histories::Window(_) => 0,
    };
    let window = match histories {
        Histories::Window(window) => Some(window),
        _ => None,
    };
    let mut first_row = 0;
    let mut sequences = Vec::new();
    for (&(start, rows), (exact, sealed)) in SEQUENCES.iter().zip(&tables) {
        let ends = (start..start + rows).map(end).collect();
        sequences.push(PrefillSequence { first_row, start, exact, sealed, ends });
        first_row += rows;
    }
    let plan = kernel.plan(&sequences, window)?;
    let width = KV_HEADS * group * head_dim;
    // Rows lie further apart than they are long.
    let stride = width + 8;
    let queries: Vec<f32> = (0..first_row * stride).map(|_| 2.0 * random.signed()).collect();
    let on_card = device.stream().clone_htod(&queries)?;
    let mut out = device.stream().clone_htod(&vec![f32::NAN; first_row * width])?;
    let scale = 1.0 / (head_dim as f32).sqrt();
    let pools = PrefillPools { exact: exact_pool.view(), sealed: Some(sealed_pool.view()), sink };
    kernel.launch(&plan, &pools, &on_card, stride, scale, None, &mut out)?;
    let got = device.stream().clone_dtoh(&out)?;
    device.synchronise()?;

    let mut worst = 0.0_f64;
    for (sequence, &(start, rows)) in sequences.iter().zip(&SEQUENCES) {
        for row in (0..rows).filter(|row| row % 13 == 0 || row + 1 == rows) {
            let position = start + row;
            for head in 0..KV_HEADS {
                let seen =
                    seen_pages(sequence, position, end(position), sink, head, &exact_pool, &sealed_pool);
                for query in 0..group {
                    let column = (head * group + query) * head_dim;
                    let query = &queries[(sequence.first_row + row) * stride + column..][..head_dim];
                    let got = &got[(sequence.first_row + row) * width + column..][..head_dim];
                    let first = window.map_or(0, |window| (position + 1).saturating_sub(window));
                    let expected = windowed(query, scale, first..position + 1, &seen);
                    let difference: f64 =
                        expected.iter().zip(got).map(|(x, &y)| (x - f64::from(y)).powi(2)).sum();
                    let norm: f64 = expected.iter().map(|x| x * x).sum();
                    let error = (difference / norm).sqrt();
                    worst = if error.is_nan() { return Ok(error) } else { worst.max(error) };
                }
            }
        }
    }
    Ok(worst)
}

/// Attention of one query in f64 over some positions: pages that begin with the first of them.
fn windowed(query: &[f32], scale: f32, positions: Range<usize>, seen: &[[Vec<f32>; 2]]) -> Vec<f64> {
    if positions.start == 0 {
        return reference(query, scale, positions.end, |page| &seen[page]);
    }
    let d = query.len();
    let mut moved: Vec<[Vec<f32>; 2]> = Vec::new();
    for (index, position) in positions.clone().enumerate() {
        if index % PAGE_TOKENS == 0 {
            moved.push([0, 1].map(|_| vec![0.0; PAGE_TOKENS * d]));
        }
        for side in 0..2 {
            let row = &seen[position / PAGE_TOKENS][side][position % PAGE_TOKENS * d..][..d];
            let page = moved.last_mut().unwrap();
            page[side][index % PAGE_TOKENS * d..][..d].copy_from_slice(row);
        }
    }
    reference(query, scale, positions.len(), |page| &moved[page])
}

/// The pages of a sequence as one row reads them: sealed from the sink up to the end of its history.
fn seen_pages(
    sequence: &PrefillSequence<'_>,
    position: usize,
    end: usize,
    sink: usize,
    head: usize,
    exact: &Pool,
    sealed: &Pool,
) -> Vec<[Vec<f32>; 2]> {
    (0..=position / PAGE_TOKENS)
        .map(|page| {
            let slot = ExactSlot::table_entry(sequence.exact[page]) as usize;
            let (exact, sealed) = (&exact.held[slot * KV_HEADS + head], &sealed.held[slot * KV_HEADS + head]);
            [0, 1].map(|side| {
                let d = exact[side].len() / PAGE_TOKENS;
                let from = |token: usize| {
                    let position = page * PAGE_TOKENS + token;
                    if (sink..end).contains(&position) { &sealed[side] } else { &exact[side] }
                };
                (0..PAGE_TOKENS * d).map(|at| from(at / d)[at]).collect()
            })
        })
        .collect()
}
