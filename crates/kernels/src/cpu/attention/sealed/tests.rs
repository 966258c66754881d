use oscar_codec::{BandLayout, CodeLayout, KeyWidths, PAGE_TOKENS, ScaleType, Side};
use oscar_random::Random;

use super::*;

mod sequence;

use sequence::*;

#[test]
fn codes_of_every_shape_agree_with_the_definition() {
    let mut random = Random::new(31);
    for bits in [2, 4] {
        let mut worst = 0.0_f64;
        for layout in layouts(bits) {
            for scale_type in SCALE_TYPES {
                let sealed = Sealed::usual(layout, scale_type, 3, &mut random);
                let scale = 1.0 / (layout.head_dim() as f32).sqrt();
                for rows in [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 40] {
                    let q = random.signed_vec(rows * layout.head_dim());
                    let spans = vec![Span::up_to(sealed.tokens()); rows];
                    // So many rows are different from fewer on AMX alone.
                    let takes = |isa: &Isa| match isa {
                        Isa::Scalar => rows == 3,
                        Isa::Amx => true,
                        _ => rows <= 16,
                    };
                    for isa in Isa::available().filter(takes) {
                        worst = worst.max(sealed.check(isa, &q, scale, &spans, &[], TOLERANCE));
                    }
                }
            }
        }
        println!("{bits} bits: largest error {worst:.1e} of the largest value");
    }
}

#[test]
fn other_formats_agree_with_the_definition() {
    let mut random = Random::new(32);
    for d in [32, 48, 64, 96, 128, 256] {
        let scale = 1.0 / (d as f32).sqrt();
        for sealed in [Sealed::fp8(d, 3, &mut random), Sealed::bf16(d, 3, &mut random)] {
            for rows in [1, 3, 4, 6, 8, 12, 16] {
                let q = random.signed_vec(rows * d);
                for isa in Isa::available() {
                    let spans = vec![Span::up_to(sealed.tokens()); rows];
                    sealed.check(isa, &q, scale, &spans, &[1], 1e-5);
                }
            }
        }
    }
    // Channels that fill no register; with sharp logits the maximum of most rows rises after the first page.
    for d in [20, 50, 100] {
        let odd = Sealed::fp8(d, 6, &mut random);
        let q = random.signed_vec(4 * d);
        for isa in Isa::available() {
            odd.check(isa, &q, 0.6, &[Span::up_to(6 * PAGE_TOKENS - 9); 4], &[], 1e-5);
        }
    }
}

#[test]
fn bands_of_every_shape_agree_with_the_definition() {
    let mut random = Random::new(31);
    for d in [16, 32, 48, 64, 80, 96, 112, 128, 192, 256, 512] {
        let scale = 0.3 / (d as f32).sqrt();
        let of_widths = KeyWidths::menu(d).map(|widths| BandLayout::of_widths(d, widths));
        for layout in of_widths.chain([BandLayout::int15(d), BandLayout::high(d)]) {
            let sealed = Sealed::banded(layout.unwrap(), 3, &mut random);
            for rows in [1, 2, 3, 4, 5, 6, 7, 8, 12, 33] {
                let q = random.signed_vec(rows * d);
                for isa in Isa::available() {
                    let spans = vec![Span::up_to(sealed.tokens() - 5); rows];
                    sealed.check(isa, &q, scale, &spans, &[1], TOLERANCE);
                }
            }
        }
    }
}

/// One sequence of each format.
fn all_formats(d: usize, pages: usize, random: &mut Random) -> Vec<Sealed> {
    let of_widths = KeyWidths::menu(d).map(|widths| BandLayout::of_widths(d, widths));
    let layouts = of_widths.chain([BandLayout::int15(d), BandLayout::high(d)]).flatten();
    let mut bands: Vec<Sealed> = layouts.map(|layout| Sealed::banded(layout, pages, random)).collect();
    for layout in [BandLayout::int2(d), BandLayout::high(d)].into_iter().flatten() {
        let sealed = Sealed::banded(layout, pages, random);
        bands.push(sealed.with_means(random));
    }
    let others = [
        Sealed::usual(CodeLayout::new(2, d, 2).unwrap(), ScaleType::F16, pages, random),
        Sealed::usual(CodeLayout::new(4, d, 1).unwrap(), ScaleType::Bf16, pages, random),
        Sealed::fp8(d, pages, random),
        Sealed::bf16(d, pages, random),
    ];
    bands.into_iter().chain(others).collect()
}

#[test]
fn spans_begin_and_end_anywhere() {
    let mut random = Random::new(33);
    let edges = [0, 1, 15, 16, 63, 64, 65, 127, 128, 200, 255, 256];
    let spans: Vec<Span> = edges
        .iter()
        .flat_map(|&from| edges.iter().map(move |&to| Span { from, to }))
        .filter(|span| span.from <= span.to)
        .collect();
    for d in [48, 128] {
        for sealed in all_formats(d, 4, &mut random) {
            for rows in [1, 4, 7, 20, 64] {
                for spans in spans.chunks(rows) {
                    let q = random.signed_vec(spans.len() * d);
                    for isa in Isa::available().filter(|isa| *isa != Isa::Scalar || rows == 20) {
                        sealed.check(isa, &q, 0.2, spans, &[], TOLERANCE);
                        sealed.check(isa, &q, 0.2, spans, &[1, 3], TOLERANCE);
                    }
                }
            }
        }
    }
}

#[test]
fn many_pages() {
    let mut random = Random::new(34);
    for sealed in all_formats(64, 60, &mut random) {
        let q = random.signed_vec(6 * 64);
        for isa in Isa::available() {
            let spans = [64 * 60, 64 * 60, 64 * 60 - 1, 1, 64 * 30, 0].map(Span::up_to);
            sealed.check(isa, &q, 0.2, &spans, &[], TOLERANCE);
            sealed.check(isa, &q, 2.0, &spans, &[7, 8, 50], TOLERANCE);
        }
    }
}

#[test]
fn nasty_grids() {
    let (d, pages) = (64, 3);
    let ones = vec![1.0; 4 * d];
    let q: Vec<f32> = Random::new(36).signed_vec(4 * d);
    let zeros = vec![0.0; 4 * d];
    let mut lone = zeros.clone();
    lone.iter_mut().step_by(d).for_each(|x| *x = 1e-20);
    for layout in [CodeLayout::new(2, d, 1).unwrap(), CodeLayout::new(4, d, 2).unwrap()] {
        for scale_type in SCALE_TYPES {
            let with = |grid: Grid<'_>| Sealed::codes(layout, scale_type, pages, &mut Random::new(35), grid);
            let mut random = Random::new(37);
            let cases = [
                (
                    "huge key offsets",
                    with(&mut |side, _, _| match side {
                        // Sums of q that do not vanish times an offset of thousands: it cancels in the softmax.
                        Side::Key => (0.5, 4096.0),
                        Side::Value => (1.0, 1.5),
                    }),
                ),
                ("huge value offsets", with(&mut |_, _, _| (0.25, 30000.0))),
                ("negative offsets", with(&mut |_, _, _| (0.25, -700.0))),
                ("no scales", with(&mut |_, _, _| (0.0, 0.5))),
                ("nothing", with(&mut |_, _, _| (0.0, 0.0))),
                (
                    "one huge key",
                    with(&mut |side, token, _| {
                        (if side == Side::Key && token == 70 { 3e4 } else { 0.1 }, 0.2)
                    }),
                ),
                (
                    "one huge value",
                    with(&mut |side, token, _| {
                        (if side == Side::Value && token == 70 { 3e4 } else { 0.1 }, 0.2)
                    }),
                ),
                ("tiny scales", with(&mut |_, _, _| (1e-7, 0.3))),
                (
                    "scales far apart",
                    with(&mut |_, _, _| {
                        let scale = (12.0 * random.signed()).exp2();
                        (scale, 1.5 * scale)
                    }),
                ),
            ];
            for (name, sealed) in &cases {
                for isa in Isa::available() {
                    for q in [&q, &ones, &zeros, &lone] {
                        println!("{name} {layout:?} {scale_type} {isa}");
                        // An f32 offset of 4096·64·q leaves 2^-6 for the differences between logits.
                        let scale = if *name == "huge key offsets" { 1e-3 } else { 0.1 };
                        sealed.check(isa, q, scale, &[Span::up_to(192); 4], &[], 2.0 * TOLERANCE);
                        sealed.check(isa, q, scale, &[Span { from: 66, to: 190 }; 4], &[2], 2.0 * TOLERANCE);
                        if isa == Isa::Amx {
                            let spans = [Span { from: 66, to: 190 }; 36];
                            sealed.check(isa, &q.repeat(9), scale, &spans, &[2], 2.0 * TOLERANCE);
                        }
                    }
                }
            }
            let (_, one_huge_key) = &cases[5];
            for isa in Isa::available() {
                // Logits of ±1e5 and more: one token takes all, or none of it.
                one_huge_key.check(isa, &q, 1e3, &[Span::up_to(192); 4], &[1], TOLERANCE);
            }
        }
    }
}

#[test]
fn logits_that_rise_from_page_to_page() {
    let (d, pages) = (64, 8);
    let q = vec![1.0; 4 * d];
    let layout = CodeLayout::new(2, d, 2).unwrap();
    // By less than the references follow, by more, and down again.
    for rise in [0.02, 0.1, 0.5, -0.3] {
        let sealed =
            Sealed::codes(layout, ScaleType::F16, pages, &mut Random::new(46), &mut |side, token, _| {
                match side {
                    Side::Key => (0.05, 0.5 - rise * (token / PAGE_TOKENS) as f32),
                    Side::Value => (0.5, 0.7),
                }
            });
        for isa in Isa::available() {
            for ranges in [&[][..], &[1, 4]] {
                sealed.check(isa, &q, 1.0, &[Span::up_to(64 * pages - 3); 4], ranges, TOLERANCE);
            }
        }
    }
}

#[test]
fn a_row_does_not_depend_on_the_others() {
    let mut random = Random::new(38);
    let d = 96;
    for sealed in all_formats(d, 5, &mut random).iter().take(5) {
        let q = random.signed_vec(40 * d);
        let spans: Vec<Span> = (0..40).map(|row| Span { from: 3 * row, to: 320 - 5 * row }).collect();
        for isa in Isa::available() {
            let all = sealed.attend(isa, &q, 0.2, &spans, &[2]);
            // As with bf16, few rows are multiplied as vectors and many as tiles, which round differently.
            let least = match sealed.layout {
                _ if isa != Isa::Amx => 1,
                PageLayout::Banded(_) => 1,
                PageLayout::Codes(layout) if layout.groups() > 1 => 1,
                PageLayout::Codes(_) => 32,
                _ => 5,
            };
            for rows in
                [0..1, 0..3, 1..6, 4..12, 19..20, 3..20, 3..38].into_iter().filter(|rows| rows.len() >= least)
            {
                let (channels, spans) = (rows.start * d..rows.end * d, &spans[rows.clone()]);
                let some = sealed.attend(isa, &q[channels.clone()], 0.2, spans, &[2]);
                assert_eq!(some, all[channels], "{isa} {:?} rows {rows:?}", sealed.layout);
            }
        }
    }
}

/// Heads read together give the bits that each gives alone, whatever its pages and queries.
#[test]
fn a_head_does_not_depend_on_the_others() {
    let mut random = Random::new(40);
    const HEADS: usize = 3;
    let d = 64;
    let formats: Vec<Vec<Sealed>> = (0..HEADS).map(|_| all_formats(d, 7, &mut random)).collect();
    for format in 0..formats[0].len() {
        let heads: Vec<&Sealed> = formats.iter().map(|of_head| &of_head[format]).collect();
        // One group of rows, and several; pages that nobody sees on either side.
        for rows in [1, 3, 11] {
            let q = random.signed_vec(HEADS * rows * d);
            let spans: Vec<Span> = (0..rows).map(|row| Span { from: 70 + row, to: 400 - 9 * row }).collect();
            let bytes: Vec<&[u8]> =
                (0..7).flat_map(|page| heads.iter().map(move |head| head.pages[page].as_slice())).collect();
            let means: Vec<&[u16]> = (0..7)
                .flat_map(|page| heads.iter().filter_map(move |head| Some(head.means.get(page)?.as_slice())))
                .collect();
            for isa in Isa::available() {
                let mut states = vec![SoftmaxState::default(); HEADS];
                states.iter_mut().for_each(|state| state.reset(rows, d));
                let scratch = &mut AttentionScratch::default();
                let pages = SealedPages { layout: &heads[0].layout, first: 0, bytes: &bytes, means: &means };
                attend_sealed_heads(isa, pages, &q, 0.2, &spans, scratch, &mut states);
                for (head, q) in q.chunks_exact(rows * d).enumerate() {
                    let alone = heads[head].attend(isa, q, 0.2, &spans, &[]);
                    // Merging into an empty state, as `attend` does, changes nothing.
                    assert_eq!(
                        finish(&[&states[head]]),
                        alone,
                        "{isa} {format:?} head {head} of {rows} rows"
                    );
                }
            }
        }
    }
}

/// Buffers keep what the last call left in them, of whatever format, channels and rows.
#[test]
fn used_buffers_change_nothing() {
    let mut random = Random::new(53);
    let sealed: Vec<Sealed> =
        [64, 20, 128, 96, 32].into_iter().flat_map(|d| all_formats(d, 6, &mut random)).collect();
    for isa in Isa::available() {
        let (scratch, sealed_count) = (&mut AttentionScratch::default(), sealed.len());
        for turn in 0..5 * sealed_count {
            // Neighbours in this order differ in format, channels and rows; every page meets every number of rows.
            let sealed = &sealed[turn * 7 % sealed_count];
            let rows = [3, 17, 1, 6, 9][(turn + turn / sealed_count) % 5];
            let q = random.signed_vec(rows * sealed.d);
            let spans: Vec<Span> = (0..rows).map(|row| Span { from: 3 * row, to: 384 - 5 * row }).collect();
            let used = sealed.attend_with(scratch, isa, &q, 0.2, &spans, &[2]);
            let fresh = sealed.attend(isa, &q, 0.2, &spans, &[2]);
            assert_eq!(used, fresh, "{isa} {:?} {rows} rows, turn {turn}", sealed.layout);
        }
    }
}

/// The most channels there may be, with the largest codes under the largest queries of one sign: 32-bit sums hold them.
#[test]
fn the_largest_sums_do_not_overflow() {
    let d = 4096;
    assert!(CodeLayout::new(4, d + 1, 1).is_err() && CodeLayout::new(2, d + 1, 1).is_err());
    let layout = CodeLayout::new(4, d, 1).unwrap();
    // Logits from 0 to 8, which a sum that turned around would give the other sign.
    let mut numbers = |side, token: usize, _| match side {
        Side::Key => (8.0 / 3072.0 * token as f32 / 64.0, 0.0),
        Side::Value => (token as f32, 0.0),
    };
    let sealed = Sealed::with_codes(layout, ScaleType::F16, 1, &mut || 15, &mut numbers);
    for sign in [1.0, -1.0] {
        let q = vec![sign; 2 * d];
        for isa in Isa::available() {
            sealed.check(isa, &q, 0.05, &[Span::up_to(64), Span::up_to(33)], &[], TOLERANCE);
        }
    }
}

/// Rows may see any of the pages and raise their reference between them: the largest logits and scales come late, early, or
/// in a page that some rows do not see.
#[test]
fn pages_may_differ_by_orders_of_magnitude() {
    let (d, pages) = (64, 11);
    let mut random = Random::new(47);
    let q: Vec<f32> = (0..7 * d).map(|_| 1.0 + random.signed() * 0.1).collect();
    let spans: Vec<Span> = [(0, 704), (0, 300), (65, 641), (200, 703), (448, 449), (0, 1), (640, 704)]
        .map(|(from, to)| Span { from, to })
        .into();
    for factors in [[1.0, 1e-3, 30.0], [30.0, 1.0, 1e-3], [1e-3, 30.0, 1.0]] {
        for bits in [2, 4] {
            let layout = CodeLayout::new(bits, d, 1).unwrap();
            let mut numbers = |side, token: usize, _| {
                let factor = factors[token / PAGE_TOKENS % 3];
                match side {
                    // Logits of a page lie around the logarithm of its factor.
                    Side::Key => (0.02, 0.1 - f32::ln(factor) / d as f32),
                    Side::Value => (0.5 * factor, 0.7 * factor),
                }
            };
            let sealed = Sealed::codes(layout, ScaleType::F16, pages, &mut random, &mut numbers);
            for isa in Isa::available() {
                for ranges in [&[][..], &[2, 9], &[5]] {
                    sealed.check(isa, &q, 1.0, &spans, ranges, TOLERANCE);
                }
            }
        }
    }
}

#[test]
fn a_row_that_is_not_a_number_stays_alone() {
    let mut random = Random::new(40);
    let d = 64;
    for sealed in all_formats(d, 2, &mut random) {
        let q = random.signed_vec(9 * d);
        let spans = [Span::up_to(128); 9];
        for isa in Isa::available() {
            let good = sealed.attend(isa, &q, 0.2, &spans, &[]);
            for poison in [f32::NAN, f32::INFINITY] {
                let mut bad = q.clone();
                bad[4 * d + 3] = poison;
                let out = sealed.attend(isa, &bad, 0.2, &spans, &[]);
                assert!(
                    out[4 * d..5 * d].iter().all(|x| x.is_nan()),
                    "{isa} {:?} {poison}: {:?}",
                    sealed.layout,
                    &out[4 * d..5 * d]
                );
                assert_eq!(out[..4 * d], good[..4 * d], "{isa}");
                assert_eq!(out[5 * d..], good[5 * d..], "{isa}");
            }
        }
    }
}

/// A sink page in bf16, history in a sealed format, the recent window in bf16: one state, in any order.
#[test]
fn tiers_merge_in_one_state() {
    let mut random = Random::new(41);
    let d = 64;
    let exact = Sealed::bf16(d, 8, &mut random);
    for mut sealed in all_formats(d, 8, &mut random) {
        let q = random.signed_vec(6 * d);
        let history = PAGE_TOKENS..5 * PAGE_TOKENS;
        let end = 8 * PAGE_TOKENS - 20;
        let (middle, tail) =
            (Span { from: history.start, to: history.end }, Span { from: history.end, to: end });
        for isa in Isa::available() {
            let (mut scratch, mut state) = (AttentionScratch::default(), SoftmaxState::default());
            state.reset(6, d);
            let elements: Vec<&[u16]> = exact.pages.iter().map(|page| bytemuck::cast_slice(page)).collect();
            let bytes: Vec<&[u8]> = sealed.pages.iter().map(Vec::as_slice).collect();
            let scratch = &mut scratch;
            let first = [Span::up_to(PAGE_TOKENS); 6];
            super::super::attend(isa, &q, 0.3, &first, 0, &elements, d, scratch, &mut state);
            let means: Vec<&[u16]> = sealed.means.iter().map(Vec::as_slice).collect();
            let pages = SealedPages { layout: &sealed.layout, first: 0, bytes: &bytes, means: &means };
            attend_sealed(isa, pages, &q, 0.3, &[middle; 6], scratch, &mut state);
            super::super::attend(isa, &q, 0.3, &[tail; 6], 5, &elements[5..], d, scratch, &mut state);
            let out = finish(&[&state]);

            // What a reader of the mixed cache sees.
            let (keys, values) = (sealed.keys.clone(), sealed.values.clone());
            for t in (0..sealed.tokens()).filter(|t| !history.contains(t)) {
                let row = t * d..(t + 1) * d;
                sealed.keys[row.clone()].copy_from_slice(&exact.keys[row.clone()]);
                sealed.values[row.clone()].copy_from_slice(&exact.values[row]);
            }
            for row in 0..6 {
                let (expected, size) = sealed.exact(&q[row * d..][..d], 0.3, Span::up_to(end));
                for (got, expected) in out[row * d..][..d].iter().zip(expected) {
                    let error = (f64::from(*got) - expected).abs();
                    assert!(error <= TOLERANCE * size, "{isa} {:?}: {got} for {expected}", sealed.layout);
                }
            }
            (sealed.keys, sealed.values) = (keys, values);
        }
    }
}
