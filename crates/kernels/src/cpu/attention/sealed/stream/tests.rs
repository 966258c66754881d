use half::f16;
use oscar_codec::code_page::CodeLayout;
use oscar_codec::{PAGE_TOKENS, ScaleType};

use crate::cpu::attention::sealed::{SealedFormat, attend_sealed_heads};
use crate::cpu::attention::tests::Random;
use crate::cpu::attention::{AttentionScratch, SoftmaxState, Span};
use crate::cpu::isa::Isa;

/// Channels, rows that are read as a stream, and more rows, which are read in batches.
const SHAPES: [(usize, usize, usize); 5] = [(64, 3, 5), (64, 4, 7), (128, 4, 5), (128, 6, 7), (128, 8, 9)];

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

fn format(d: usize) -> SealedFormat {
    SealedFormat::Codes(CodeLayout::new(2, d, 1).unwrap(), ScaleType::F16)
}

/// A call for the first `rows` of a head's `q`.
fn attend(
    d: usize,
    rows: usize,
    q: &[Vec<f32>],
    first_page: usize,
    pages: &[Vec<u8>],
    scratch: &mut AttentionScratch,
    states: &mut [SoftmaxState],
) {
    let q: Vec<f32> = q.iter().flat_map(|q| q[..rows * d].iter().copied()).collect();
    let pages: Vec<&[u8]> = pages.iter().map(Vec::as_slice).collect();
    let spans = vec![Span::up_to(PAGE_TOKENS * (first_page + pages.len())); rows];
    attend_sealed_heads(Isa::Amx, &format(d), &q, 0.2, &spans, first_page, &pages, scratch, states);
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
    if !Isa::Amx.is_available() || !super::super::tiles::is_available() {
        return println!("no tiles here");
    }
    let mut random = Random(71);
    let mut scratch = AttentionScratch::default();
    for (d, rows, more_rows) in SHAPES {
        for heads in [1, 2, 3, 5] {
            for (count, first_page) in
                [(1, 0), (1, 3), (2, 3), (3, 1), (4, 0), (4, 2), (5, 0), (9, 3), (16, 0), (23, 1)]
            {
                for slope in [0.0, 0.5, 2.0, 9.0, -3.0] {
                    let what = format!("{d} channels, {rows} rows, {heads} heads, {count} pages, {slope}");
                    let q: Vec<Vec<f32>> = (0..heads)
                        .map(|_| random.vector(more_rows * d).iter().map(|q| q + 0.2).collect())
                        .collect();
                    let before = pages(d, 1, heads, 0.0, &mut random);
                    let pages = pages(d, count, heads, slope, &mut random);
                    let [mut few, mut more] = [rows, more_rows].map(|rows| states(heads, rows, d));
                    if count % 2 == 0 {
                        attend(d, rows, &q, 40, &before, &mut scratch, &mut few);
                        attend(d, more_rows, &q, 40, &before, &mut scratch, &mut more);
                    }
                    attend(d, rows, &q, first_page, &pages, &mut scratch, &mut few);
                    attend(d, more_rows, &q, first_page, &pages, &mut scratch, &mut more);
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
    if !Isa::Amx.is_available() || !super::super::tiles::is_available() {
        return println!("no tiles here");
    }
    let mut random = Random(72);
    let (heads, count) = (3, 11);
    for (d, rows, _) in SHAPES {
        let q: Vec<Vec<f32>> = (0..heads).map(|_| random.vector(rows * d)).collect();
        let clean_pages = pages(d, count, heads, 0.5, &mut random);
        let mut clean = states(heads, rows, d);
        attend(d, rows, &q, 1, &clean_pages, &mut AttentionScratch::default(), &mut clean);
        let mut bad_query = q.clone();
        bad_query[1][d] = f32::NAN;
        let mut few = states(heads, rows, d);
        attend(d, rows, &bad_query, 1, &clean_pages, &mut AttentionScratch::default(), &mut few);
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
            let page = &mut bad_pages[6 * heads + 2];
            let at = page.len() - (4 - kind) * 2 * PAGE_TOKENS + 2 * 17;
            page[at..at + 2].copy_from_slice(&f16::NAN.to_le_bytes());
            let mut few = states(heads, rows, d);
            attend(d, rows, &q, 1, &bad_pages, &mut AttentionScratch::default(), &mut few);
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
