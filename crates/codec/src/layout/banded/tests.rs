//! Shapes, sizes and places of banded pages.

use super::*;

fn widths(head_dim: usize) -> Vec<(usize, u32)> {
    let layout = BandLayout::int2(head_dim).expect("a layout");
    layout.bands().iter().map(|band| (band.channels, band.bits)).collect()
}

#[test]
fn every_head_has_two_bits_a_channel() {
    assert_eq!(widths(16), [(16, 2)]);
    assert_eq!(widths(32), [(32, 2)]);
    assert_eq!(widths(48), [(16, 4), (16, 1), (16, 1)]);
    assert_eq!(widths(64), [(16, 4), (16, 2), (16, 1), (16, 1)]);
    assert_eq!(widths(80), [(16, 4), (32, 2), (16, 1), (16, 1)]);
    assert_eq!(widths(96), [(16, 4), (48, 2), (16, 1), (16, 1)]);
    assert_eq!(widths(128), [(32, 4), (32, 2), (32, 1), (32, 1)]);
    assert_eq!(widths(256), [(64, 4), (64, 2), (64, 1), (64, 1)]);
    for head_dim in (16..=4096).step_by(16) {
        let layout = BandLayout::int2(head_dim).expect("a layout");
        assert_eq!(32 * layout.key_words(), 2 * head_dim.next_multiple_of(16), "d={head_dim}");
        let mut next = 0;
        for band in layout.bands() {
            assert_eq!(band.first, next, "d={head_dim}");
            next += band.channels;
        }
        assert_eq!(next, head_dim);
    }
    assert!(BandLayout::int2(0).is_err() && BandLayout::int2(40).is_err());
}

#[test]
fn the_larger_format_has_the_same_bands_with_four_bits() {
    for head_dim in (16..=4096).step_by(16) {
        let [int2, high] =
            [BandLayout::int2(head_dim), BandLayout::high(head_dim)].map(|layout| layout.expect("a layout"));
        assert!(int2.bands().iter().map(Band::range).eq(high.bands().iter().map(Band::range)));
        assert!(high.bands().iter().all(|band| band.bits == 4 && band.region == 0));
        assert_eq!((high.key_words(), high.value_bits()), (head_dim / 8, 4), "d={head_dim}");
    }
    // As many bytes as `int4` pages.
    for (head_dim, bytes) in [(64, 4608), (96, 6656), (128, 8704), (256, 16896)] {
        assert_eq!(BandLayout::high(head_dim).expect("a layout").page_bytes(), bytes, "d={head_dim}");
    }
    assert!(BandLayout::high(40).is_err());
}

#[test]
fn the_smaller_format_keeps_the_stronger_half() {
    let widths = |head_dim: usize| -> Vec<(usize, usize, u32)> {
        let layout = BandLayout::int15(head_dim).expect("a layout");
        layout.bands().iter().map(|band| (band.first, band.channels, band.bits)).collect()
    };
    assert_eq!(widths(16), [(0, 16, 2)]);
    assert_eq!(widths(48), [(0, 32, 2)]);
    assert_eq!(widths(64), [(0, 32, 2)]);
    assert_eq!(widths(80), [(0, 16, 4), (16, 16, 1), (32, 16, 1)]);
    assert_eq!(widths(96), [(0, 16, 4), (16, 16, 1), (32, 16, 1)]);
    assert_eq!(widths(128), [(0, 16, 4), (16, 16, 2), (32, 16, 1), (48, 16, 1)]);
    assert_eq!(widths(256), [(0, 32, 4), (32, 32, 2), (64, 32, 1), (96, 32, 1)]);
    for (head_dim, bytes) in [(64, 1856), (96, 2752), (128, 3584), (256, 6656)] {
        assert_eq!(BandLayout::int15(head_dim).expect("a layout").page_bytes(), bytes, "d={head_dim}");
    }
    // What the name promises: fewer than 1.8 bits an element at 128 channels.
    assert!((3584 * 8) as f64 / (2 * 128 * PAGE_TOKENS) as f64 <= 1.75);
}

#[test]
fn layers_of_other_widths_share_bands_and_average_bytes() {
    for head_dim in [64, 128, 256] {
        let int2 = BandLayout::int2(head_dim).expect("a layout");
        for widths in KeyWidths::menu(head_dim) {
            let layout = BandLayout::of_widths(head_dim, widths).expect("a layout");
            let bits: Vec<u32> = layout.bands().iter().map(|band| band.bits).collect();
            let stored = widths.quarters().into_iter().filter(|&bits| bits > 0);
            assert!(stored.eq(bits), "d={head_dim} {widths}");
            assert!(layout.has_bands_of_int2() && layout.key_scale_count() == 4);
            // As much larger or smaller as their bits say.
            let bits = layout.page_bytes() as i64 - int2.page_bytes() as i64;
            assert_eq!(bits * 8, (i64::from(widths.sum()) - 8) * (head_dim / 4 * PAGE_TOKENS) as i64);
        }
    }
    assert!(!BandLayout::int15(128).expect("a layout").has_bands_of_int2());
    assert!(!BandLayout::int15(64).expect("a layout").has_bands_of_int2());
    let odd = BandLayout::of_widths(96, "4/2/2/2".parse().expect("widths"));
    assert!(matches!(odd, Err(CodecError::HeadDim { .. })), "{odd:?}");
    assert_eq!(BandLayout::of_widths(96, KeyWidths::default()), BandLayout::int2(96));
}

#[test]
fn channels_without_a_band_are_read_as_zero() {
    let few = |head_dim| BandLayout::of_widths(head_dim, "4/0/0/0".parse().expect("widths"));
    let int15 = [48, 64, 96, 128].map(BandLayout::int15);
    for layout in int15.into_iter().chain([64, 128].map(few)) {
        let layout = layout.expect("a layout");
        let head_dim = layout.head_dim();
        let rows = BandRows { layout, value_rule: Rule::Gaussian };
        let mut page = vec![0; layout.page_bytes()];
        let row: Vec<f32> = (0..head_dim).map(|channel| 1.0 - 0.01 * channel as f32).collect();
        rows.write_token(&mut page, Side::Key, 5, &row).expect("a row");
        let mut read = vec![f32::NAN; head_dim];
        layout.decode_token(&page, Side::Key, 5, &mut read).expect("a token");
        let stored = layout.bands().last().expect("a band").range().end;
        assert!(read[..stored].iter().all(|&x| x > 0.0 && x.is_finite()), "d={head_dim}: {read:?}");
        assert!(read[stored..].iter().all(|&x| x == 0.0), "d={head_dim}: {read:?}");
    }
}

#[test]
fn pages_have_the_documented_sizes() {
    for (head_dim, bytes) in [(48, 2240), (64, 2560), (80, 3328), (96, 3584), (128, 4608), (256, 8704)] {
        assert_eq!(BandLayout::int2(head_dim).expect("a layout").page_bytes(), bytes, "d={head_dim}");
    }
}

#[test]
fn every_code_has_a_place_of_its_own() {
    let dims = [16, 48, 64, 96, 128];
    let layouts =
        dims.into_iter().flat_map(|d| [BandLayout::int2(d), BandLayout::int15(d), BandLayout::high(d)]);
    let of_widths =
        [64, 128].into_iter().flat_map(|d| KeyWidths::menu(d).map(move |w| BandLayout::of_widths(d, w)));
    let layouts = layouts.chain(of_widths);
    for layout in layouts.map(|layout| layout.expect("a layout")) {
        let head_dim = layout.head_dim();
        let mut used = vec![0_u8; layout.page_bytes()];
        let mut take = |(byte, shift): (usize, u32), bits: u32| {
            let mask = ((1_u16 << bits) - 1) as u8;
            assert_eq!(used[byte] & mask << shift, 0, "d={head_dim}, byte {byte}");
            used[byte] |= mask << shift;
        };
        for token in 0..PAGE_TOKENS {
            for band in layout.bands() {
                for channel in band.range() {
                    take(layout.key_position(band, token, channel), band.bits);
                }
            }
            for channel in 0..layout.padded_dim() {
                take(layout.value_position(token, channel), layout.value_bits());
            }
        }
        assert!(used[..layout.key_scales()].iter().all(|&byte| byte == 255), "d={head_dim}");
        assert!(used[layout.key_scales()..].iter().all(|&byte| byte == 0), "d={head_dim}");
    }
}
