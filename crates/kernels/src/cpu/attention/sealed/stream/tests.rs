use std::ops::Range;

use half::f16;
use oscar_codec::{PAGE_TOKENS, PageLayout, ScaleType};

use crate::cpu::attention::sealed::codes::Buffers;
use crate::cpu::attention::sealed::{attend_sealed_heads, tiles};
use crate::cpu::attention::tests::Random;
use crate::cpu::attention::{AttentionScratch, SoftmaxState, Span, Work};
use crate::cpu::gemm::aligned::AlignedScratch;
use crate::cpu::isa::Isa;

type Attend = unsafe fn(&Work<'_, u8>, Range<usize>, &mut Buffers, &mut AlignedScratch, &mut [SoftmaxState]);

/// Channels, rows that are read as a stream, how that is done, and more rows, which are read in batches.
const SHAPES: [(usize, usize, Attend, usize); 5] = [
    (64, 3, super::attend::<1, 1, 3, 3>, 5),
    (64, 4, super::attend::<1, 2, 2, 4>, 7),
    (128, 4, super::attend::<2, 2, 2, 4>, 5),
    (128, 6, super::attend::<2, 2, 3, 6>, 7),
    (128, 8, super::attend::<2, 4, 2, 8>, 9),
];

/// Buffers that calls of all shapes share.
#[derive(Default)]
struct Scratch {
    buffers: Buffers,
    tiles: AlignedScratch,
    attention: AttentionScratch,
}

/// What rows see of a number of pages.
type Seen = fn(Range<usize>) -> Range<usize>;

const SCALE: f32 = 0.2;

/// Pages `[page][head]` whose logits grow or shrink with `slope` per page, more or less.
fn pages(d: usize, count: usize, heads: usize, slope: f32, random: &mut Random) -> Vec<Vec<u8>> {
    let format = format(d);
    let mut page_of = |number: usize| {
        let mut page: Vec<u8> =
            (0..format.page_bytes(d)).map(|_| (128.0 * random.next() + 128.0) as u8).collect();
        let codes = page.len() - 4 * 2 * PAGE_TOKENS;
        for (index, number_bytes) in page[codes..].chunks_exact_mut(2).enumerate() {
            let noise = 1.0 + 0.3 * random.next();
            let value = match index / PAGE_TOKENS {
                0 | 2 => 0.2 * noise,
                1 => 0.3 * noise - slope * number as f32 * noise,
                _ => 0.4 * noise,
            };
            number_bytes.copy_from_slice(&f16::from_f32(value).to_le_bytes());
        }
        page
    };
    (0..count * heads).map(|index| page_of(index / heads)).collect()
}

fn format(d: usize) -> PageLayout {
    PageLayout::int2(d, 1).unwrap()
}

#[derive(Clone, Copy, PartialEq)]
enum How {
    Stream,
    Batches,
}

/// Reads pages with as many of the first rows of each head's `q` as are read that way.
fn read(
    how: How,
    (d, few, attend, more): (usize, usize, Attend, usize),
    q: &[Vec<f32>],
    first_page: usize,
    pages: &[Vec<u8>],
    seen: Seen,
    scratch: &mut Scratch,
    states: &mut [SoftmaxState],
) {
    let rows = if how == How::Stream { few } else { more };
    let numbers = seen(first_page..first_page + pages.len() / states.len());
    let mut q: Vec<f32> = q.iter().flat_map(|q| &q[..rows * d]).copied().collect();
    let pages: Vec<&[u8]> = pages.iter().map(Vec::as_slice).collect();
    let spans = vec![Span { from: numbers.start * PAGE_TOKENS, to: numbers.end * PAGE_TOKENS }; rows];
    if how == How::Batches {
        let scratch = &mut scratch.attention;
        return attend_sealed_heads(
            Isa::Amx,
            &format(d),
            &q,
            SCALE,
            &spans,
            first_page,
            &pages,
            scratch,
            states,
        );
    }
    q.iter_mut().for_each(|q| *q *= SCALE * std::f32::consts::LOG2_E);
    let work = Work { q: &q, spans: &spans, first_page, pages: &pages, d };
    // SAFETY: the caller has checked that the instructions are there.
    unsafe { attend(&work, numbers, &mut scratch.buffers, &mut scratch.tiles, states) };
}

fn is_available() -> bool {
    let available = Isa::Amx.is_available() && tiles::is_available();
    if !available {
        println!("no tiles here");
    }
    available
}

fn states(heads: usize, rows: usize, d: usize) -> Vec<SoftmaxState> {
    let mut states = vec![SoftmaxState::default(); heads];
    states.iter_mut().for_each(|state| state.reset(rows, d));
    states
}

fn assert_rows_equal(few: &SoftmaxState, more: &SoftmaxState, d: usize, what: &str) {
    let bits = |numbers: &[f32]| numbers.iter().map(|number| number.to_bits()).collect::<Vec<_>>();
    let rows = few.rows();
    assert_eq!(bits(&few.max[..rows]), bits(&more.max[..rows]), "references, {what}");
    assert_eq!(bits(&few.sum[..rows]), bits(&more.sum[..rows]), "sums, {what}");
    assert_eq!(bits(&few.values[..rows * d]), bits(&more.values[..rows * d]), "values, {what}");
}

/// Streams and batches give the same bits, from any first page, for any number of pages and heads, however logits rise, and
/// when something has been read before.
#[test]
fn a_stream_is_what_batches_are() {
    if !is_available() {
        return;
    }
    let mut random = Random(71);
    let scratch = &mut Scratch::default();
    let all: Seen = |pages| pages;
    let inner: Seen = |pages| pages.start + 1..pages.end - 1;
    for shape in SHAPES {
        let (d, rows, _, more_rows) = shape;
        for heads in [1, 2, 3, 5] {
            for (count, first_page, seen) in [
                (1, 0, all),
                (1, 3, all),
                (2, 3, all),
                (3, 1, all),
                (4, 0, all),
                (4, 2, all),
                (5, 0, all),
                (7, 2, inner),
                (9, 3, all),
                (16, 0, all),
                (22, 5, inner),
                (23, 1, all),
            ] {
                for slope in [0.0, 0.5, 2.0, 9.0, -3.0] {
                    let what = format!(
                        "{d} channels, {rows} rows, {heads} heads, {count} pages from {first_page}, {slope}"
                    );
                    let q: Vec<Vec<f32>> = (0..heads)
                        .map(|_| random.vector(more_rows * d).iter().map(|q| q + 0.2).collect())
                        .collect();
                    let before = pages(d, 1, heads, 0.0, &mut random);
                    let pages = pages(d, count, heads, slope, &mut random);
                    let [mut few, mut more] = [rows, more_rows].map(|rows| states(heads, rows, d));
                    if (count + heads) % 2 == 0 {
                        read(How::Stream, shape, &q, 40, &before, all, scratch, &mut few);
                        read(How::Batches, shape, &q, 40, &before, all, scratch, &mut more);
                    }
                    read(How::Stream, shape, &q, first_page, &pages, seen, scratch, &mut few);
                    read(How::Batches, shape, &q, first_page, &pages, seen, scratch, &mut more);
                    for (few, more) in few.iter().zip(&more) {
                        assert!(few.sum.iter().take(rows).all(|sum| sum.is_finite() && *sum > 0.0), "{what}");
                        assert_rows_equal(few, more, d, &what);
                    }
                }
            }
        }
    }
}

/// A query, a scale or an offset that is not a number shows in the rows and heads that read it and in no others.
#[test]
fn what_is_not_a_number_stays_where_it_is() {
    if !is_available() {
        return;
    }
    let mut random = Random(72);
    let (heads, count) = (3, 11);
    for shape in SHAPES {
        let (d, rows, ..) = shape;
        let read_all = |q: &[Vec<f32>], pages: &[Vec<u8>]| {
            let mut states = states(heads, rows, d);
            read(How::Stream, shape, q, 1, pages, |pages| pages, &mut Scratch::default(), &mut states);
            states
        };
        let q: Vec<Vec<f32>> = (0..heads).map(|_| random.vector(rows * d)).collect();
        let clean_pages = pages(d, count, heads, 0.5, &mut random);
        let clean = read_all(&q, &clean_pages);
        let mut bad_query = q.clone();
        bad_query[1][d] = f32::NAN;
        let few = read_all(&bad_query, &clean_pages);
        for head in 0..heads {
            for row in 0..rows {
                let nan = few[head].sum[row].is_nan();
                assert_eq!(nan, (head, row) == (1, 1), "{d} channels, row {row} of head {head}");
                let values = row * d..(row + 1) * d;
                if !nan {
                    assert_eq!(few[head].values[values.clone()], clean[head].values[values]);
                }
            }
        }
        // Scales and offsets of keys and values, of a page in the middle of a run.
        for kind in 0..4 {
            let mut bad_pages = clean_pages.clone();
            let page = &mut bad_pages[5 * heads + 2];
            let at = page.len() - (4 - kind) * 2 * PAGE_TOKENS + 2 * 17;
            page[at..at + 2].copy_from_slice(&f16::NAN.to_le_bytes());
            let few = read_all(&q, &bad_pages);
            for head in 0..heads {
                let nan = few[head].sum.iter().take(rows).any(|sum| sum.is_nan())
                    || few[head].values[..rows * d].iter().any(|value| value.is_nan());
                // Weights times scales of values become integers, which cannot show it, in batches either.
                assert_eq!(nan, head == 2 && kind != 2, "{d} channels, number {kind}, head {head}");
                if head != 2 {
                    assert_eq!(few[head].values[..rows * d], clean[head].values[..rows * d]);
                }
            }
        }
    }
}
