//! What kernels are compared with: attention in f64, and random pages of which it is known what they hold.
//!
//! For the tests of this crate and for benchmarks, which report the error of what they time.

use oscar_codec::band::quantise_band;
use oscar_codec::{BandRows, PAGE_TOKENS, PageLayout, Rule, Side};
use oscar_random::Random;

use super::page_order::PageOrder;

/// Attention of one query in f64.
pub fn reference<'a>(
    query: &[f32],
    scale: f32,
    tokens: usize,
    rows: impl Fn(usize) -> &'a [Vec<f32>; 2],
) -> Vec<f64> {
    reference_of_pages(query.len(), scale, tokens, |page| (query, rows(page)))
}

/// The same, where pages meet queries that are rounded in different ways.
pub fn reference_of_pages<'q, 'a>(
    d: usize,
    scale: f32,
    tokens: usize,
    page: impl Fn(usize) -> (&'q [f32], &'a [Vec<f32>; 2]),
) -> Vec<f64> {
    let row = |token: usize, side: usize| &page(token / PAGE_TOKENS).1[side][token % PAGE_TOKENS * d..][..d];
    let logits: Vec<f64> = (0..tokens)
        .map(|token| {
            let (query, key) = (page(token / PAGE_TOKENS).0, row(token, 0));
            let dot: f64 = query.iter().zip(key).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum();
            dot * f64::from(scale)
        })
        .collect();
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let (mut out, mut total) = (vec![0.0; d], 0.0);
    for (token, logit) in logits.iter().enumerate() {
        let weight = (logit - largest).exp();
        total += weight;
        out.iter_mut().zip(row(token, 1)).for_each(|(out, &v)| *out += weight * f64::from(v));
    }
    if tokens > 0 {
        out.iter_mut().for_each(|out| *out /= total);
    }
    out
}

/// Whether the decode kernel rounds `group` queries of a KV head to bytes in some bands: with more than four of them, in bands of
/// one or two bits.
pub fn rounds_queries(sealed: PageLayout, group: usize) -> bool {
    let PageLayout::Banded(layout) = sealed else { return false };
    group > 4 && layout.bands().iter().any(|band| band.bits <= 2)
}

/// A query, one of `group` of a KV head, as the decode kernel multiplies it with sealed pages.
pub fn rounded_query(order: &PageOrder, group: usize, query: &[f32]) -> Vec<f32> {
    const MAGIC: f32 = 12_582_912.0;
    let mut rounded = query.to_vec();
    let Some(layout) = order.bands().filter(|_| rounds_queries(order.layout(), group)) else {
        return rounded;
    };
    for band in layout.bands().iter().filter(|band| band.bits <= 2) {
        let factors: Vec<f32> = band.range().map(|channel| order.code_factor(channel) as f32).collect();
        let row = &mut rounded[band.range()];
        let most = row.iter().zip(&factors).fold(0.0_f32, |most, (x, factor)| most.max(x.abs() / factor));
        let inverse = if most < 1e-30 { 0.0 } else { 127.0 / most };
        for (x, factor) in row.iter_mut().zip(factors) {
            let step = if inverse > 0.0 { factor / inverse } else { 0.0 };
            // Adding this rounds to an integer, in one step with the product as in the kernel.
            *x = (x.mul_add(inverse / factor, MAGIC) - MAGIC) * step;
        }
    }
    rounded
}

/// A page that holds about these rows, with scales that differ from token to token, and what it holds exactly.
pub fn random_page(order: &PageOrder, rows: &[Vec<f32>; 2], random: &mut Random) -> (Vec<u8>, [Vec<f32>; 2]) {
    let d = order.head_dim();
    let mut cpu = vec![0; order.page_bytes()];
    let mut held = [vec![0.0; PAGE_TOKENS * d], vec![0.0; PAGE_TOKENS * d]];
    for token in 0..PAGE_TOKENS {
        let range = token * d..(token + 1) * d;
        for (index, side) in [Side::Key, Side::Value].into_iter().enumerate() {
            let row = &rows[index][range.clone()];
            match order.layout() {
                PageLayout::Bf16(layout) => {
                    layout.write_token(&mut cpu, side, token, row).expect("rows of the right length");
                }
                PageLayout::Fp8(layout) => {
                    layout.write_token(&mut cpu, side, token, row).expect("finite rows of the right length");
                }
                PageLayout::Banded(layout) if side == Side::Key => {
                    let mut codes = vec![0; d];
                    let mut scales = Vec::new();
                    for band in layout.bands() {
                        let scale = quantise_band(&row[band.range()], band.bits, &mut codes[band.range()]);
                        // One step more or less now and then, and a band that is not there.
                        let other = scale.saturating_add_signed(random.below(3) as i8 - 1).max(1);
                        scales.push(if scale == 0 || random.below(64) == 0 { 0 } else { other });
                    }
                    layout.write_key(&mut cpu, token, &codes, &scales).expect("codes of one row");
                }
                PageLayout::Banded(layout) => {
                    let rows = BandRows { layout, value_rule: Rule::MIN_MAX };
                    rows.write_token(&mut cpu, side, token, row).expect("finite rows of the right length");
                }
                PageLayout::Codes(layout) => {
                    let scale_type = layout.scale_type();
                    let top = f32::from(layout.largest_code());
                    let group = d / layout.groups();
                    let (mut codes, mut scales) = (Vec::new(), Vec::new());
                    for row in row.chunks_exact(group) {
                        let (low, high) = row
                            .iter()
                            .fold((f32::MAX, f32::MIN), |(low, high), &x| (low.min(x), high.max(x)));
                        let step = ((high - low) / top * (1.0 + 0.05 * random.signed())).max(1e-4);
                        let bits = (scale_type.to_bits(step), scale_type.to_bits(-low));
                        let (step, offset) = (scale_type.to_f32(bits.0), scale_type.to_f32(bits.1));
                        scales.push(bits);
                        codes.extend(row.iter().map(|x| ((x + offset) / step).round().clamp(0.0, top) as u8));
                    }
                    layout.write_token(&mut cpu, side, token, &codes, &scales).expect("codes of one row");
                }
            }
            let held = &mut held[index][range.clone()];
            order.layout().decode_token(&cpu, side, token, held).expect("as above");
        }
    }
    (order.from_cpu(&cpu).expect("a page of the right size"), held)
}

/// The numbers below `count` in random order.
pub fn shuffled(count: usize, random: &mut Random) -> Vec<u32> {
    let mut numbers: Vec<u32> = (0..count as u32).collect();
    random.shuffle(&mut numbers);
    numbers
}

#[cfg(test)]
mod tests {
    use oscar_codec::CodeLayout;

    use super::*;

    #[test]
    fn a_page_holds_about_the_rows_it_was_made_of() {
        for bits in [2, 4] {
            let layout = CodeLayout::new(bits, 64, 2).unwrap();
            let order = PageOrder::new(PageLayout::Codes(layout)).unwrap();
            let mut random = Random::new(3);
            let rows = [0, 1].map(|_| (0..64 * 64).map(|_| random.signed()).collect::<Vec<f32>>());
            let (page, held) = random_page(&order, &rows, &mut random);
            assert_eq!(page.len(), order.page_bytes());
            let step = 2.0 / f32::from(layout.largest_code());
            for (held, rows) in held.iter().zip(&rows) {
                assert!(held.iter().zip(rows).all(|(a, b)| (a - b).abs() < 1.3 * step), "{bits} bits");
            }
        }
    }

    #[test]
    fn a_page_of_bands_holds_about_the_rows_it_was_made_of() {
        let order = PageOrder::new(PageLayout::banded(128).unwrap()).unwrap();
        let mut random = Random::new(3);
        let rows = [0, 1].map(|_| (0..64 * 128).map(|_| random.signed()).collect::<Vec<f32>>());
        let (page, held) = random_page(&order, &rows, &mut random);
        assert_eq!(page.len(), order.page_bytes());
        let error = |band: std::ops::Range<usize>| {
            let (mut error, mut all) = (0.0, 0.0);
            for (held, row) in held[0].chunks_exact(128).zip(rows[0].chunks_exact(128)) {
                error += band.clone().map(|at| (held[at] - row[at]).powi(2)).sum::<f32>();
                all += band.clone().map(|at| row[at].powi(2)).sum::<f32>();
            }
            error / all
        };
        let errors = [error(0..32), error(32..64), error(64..128)];
        assert!(errors[0] < 0.15 && errors[1] < 0.2 && errors[2] < 0.6, "{errors:?}");
        assert!(held[1].iter().zip(&rows[1]).all(|(a, b)| (a - b).abs() < 0.5));
    }

    #[test]
    fn the_reference_is_attention() {
        // Two tokens with logits 0 and ln 3: weights 1/4 and 3/4.
        let page = [[0.0, 3_f32.ln()].repeat(32), [4.0, 8.0].repeat(32)];
        let out = reference(&[1.0], 1.0, 2, |_| &page);
        assert!((out[0] - 7.0).abs() < 1e-6, "{out:?}");
        assert_eq!(reference(&[1.0], 1.0, 0, |_| &page), [0.0]);
    }

    #[test]
    fn queries_are_rounded_where_codes_are_coarse() {
        let order = PageOrder::new(PageLayout::banded(128).unwrap()).unwrap();
        let query: Vec<f32> = (0..128).map(|channel| (channel as f32).sin()).collect();
        let rounded = rounded_query(&order, 8, &query);
        assert_eq!(rounded_query(&order, 4, &query), query);
        assert_eq!(query[..32], rounded[..32]);
        for (band, levels) in [(32..64, 4.0), (64..96, 2.0), (96..128, 2.0)] {
            let differ = band.clone().filter(|&at| query[at] != rounded[at]).count();
            assert!(differ > 16, "{differ} in {band:?}");
            assert!(band.clone().all(|at| (query[at] - rounded[at]).abs() <= levels * 0.5 / 127.0));
        }
        let codes = PageOrder::new(PageLayout::Codes(CodeLayout::new(2, 128, 1).unwrap())).unwrap();
        assert_eq!(rounded_query(&codes, 8, &query), query);
    }

    #[test]
    fn shuffling_keeps_every_number() {
        let mut numbers = shuffled(1000, &mut Random::new(1));
        assert!(numbers.iter().enumerate().filter(|(i, n)| *i as u32 == **n).count() < 20);
        numbers.sort_unstable();
        assert!(numbers.into_iter().eq(0..1000));
    }
}
