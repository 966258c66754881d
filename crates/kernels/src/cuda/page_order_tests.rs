//! Places of elements and scales in pages of every format.

use oscar_codec::{KeyWidths, band};
use oscar_random::Random;

use super::*;

fn orders() -> Vec<PageOrder> {
    let mut orders = Vec::new();
    for d in [32, 64, 96, 128, 256] {
        orders.push(PageOrder::new(PageLayout::bf16(d)).unwrap());
        orders.push(PageOrder::new(PageLayout::Fp8(Fp8Layout::new(d).unwrap())).unwrap());
        for bits in [2, 4] {
            for groups in (1..=d / 32).filter(|groups| (d / 32).is_multiple_of(*groups)) {
                let layout = CodeLayout::new(bits, d, groups).unwrap();
                orders.push(PageOrder::new(PageLayout::Codes(layout)).unwrap());
            }
        }
    }
    for d in [64, 96, 128, 160, 192, 224, 256] {
        orders.push(PageOrder::new(PageLayout::banded(d).unwrap()).unwrap());
        orders.push(PageOrder::new(PageLayout::Banded(BandLayout::high(d).unwrap())).unwrap());
    }
    for d in [128, 160, 192, 224, 256] {
        orders.push(PageOrder::new(PageLayout::int15(d).unwrap()).unwrap());
    }
    for d in [64, 128, 256] {
        let layouts = KeyWidths::menu(d).map(|widths| BandLayout::of_widths(d, widths).unwrap());
        orders.extend(layouts.map(|layout| PageOrder::new(PageLayout::Banded(layout)).unwrap()));
    }
    orders
}

fn noise(len: usize) -> Vec<u8> {
    let mut random = Random::new(9);
    (0..len).map(|_| random.next_u64() as u8).collect()
}

#[test]
fn every_bit_of_a_page_has_one_place() {
    for order in orders() {
        let mut taken = vec![0_u8; order.page_bytes()];
        let mut take = |byte: usize, mask: u8| {
            assert_eq!(taken[byte] & mask, 0, "{order:?}: byte {byte} twice");
            taken[byte] |= mask;
        };
        for side in [Side::Key, Side::Value] {
            for token in 0..PAGE_TOKENS {
                for channel in 0..order.head_dim() {
                    let bits = order.element_bits(side, channel);
                    // Not stored.
                    if bits == 0 {
                        continue;
                    }
                    let (byte, shift) = order.element_position(side, token, channel);
                    match bits {
                        16 => (0..2).for_each(|i| take(byte + i, 0xff)),
                        8 => take(byte, 0xff),
                        bits => take(byte, ((1 << bits) - 1) << shift),
                    }
                }
                let scales = match order.bits() {
                    16 => 0,
                    8 => 2,
                    _ => 4,
                };
                for group in 0..order.groups() {
                    (0..scales).for_each(|i| take(order.scale_position(side, token, group) + i, 0xff));
                }
            }
        }
        assert!(taken.iter().all(|&byte| byte == 0xff), "{order:?}: a gap");
        assert_eq!(order.page_bytes(), order.layout().page_bytes(), "{order:?}");
        assert!(order.tile_bytes().is_multiple_of(16), "{order:?}: copies are of 16 bytes");
    }
}

#[test]
fn codes_and_scales_are_the_same_on_both_sides() {
    for order in orders() {
        let cpu = noise(order.page_bytes());
        let device = order.from_cpu(&cpu).unwrap();
        assert_eq!(order.to_cpu(&device).unwrap(), cpu, "{order:?}");
        let (PageLayout::Codes(layout), groups) = (order.layout(), order.groups()) else { continue };
        let (mut codes, mut scales) = (vec![0; order.head_dim()], vec![(0, 0); groups]);
        let word = |at: usize| u16::from_le_bytes([device[at], device[at + 1]]);
        for side in [Side::Key, Side::Value] {
            for token in 0..PAGE_TOKENS {
                layout.read_token(&cpu, side, token, &mut codes, &mut scales).unwrap();
                for (channel, &code) in codes.iter().enumerate() {
                    let (byte, shift) = order.element_position(side, token, channel);
                    assert_eq!(device[byte] >> shift & layout.largest_code(), code, "{order:?}");
                }
                for (group, &scale) in scales.iter().enumerate() {
                    let at = order.scale_position(side, token, group);
                    assert_eq!((word(at), word(at + 2)), scale, "{order:?}");
                }
            }
        }
    }
}

#[test]
fn keys_in_bands_are_the_same_on_both_sides() {
    for order in orders() {
        let Some(layout) = order.bands() else { continue };
        let cpu = noise(order.page_bytes());
        let device = order.from_cpu(&cpu).unwrap();
        let mut row = vec![0.0; order.head_dim()];
        for token in 0..PAGE_TOKENS {
            layout.decode_token(&cpu, Side::Key, token, &mut row).unwrap();
            for (channel, &expected) in row.iter().enumerate() {
                if order.element_bits(Side::Key, channel) == 0 {
                    assert_eq!(expected, 0.0, "{order:?}");
                    continue;
                }
                let (index, band) = layout.band_of(channel);
                let (byte, shift) = order.element_position(Side::Key, token, channel);
                let code = device[byte] >> shift & ((1 << band.bits) - 1);
                let scale = band::scale(device[order.band_scale_position(token, index)]);
                assert_eq!((f32::from(code) - band::half_range(band.bits)) * scale, expected, "{order:?}");
            }
        }
    }
    let order = PageOrder::new(PageLayout::banded(128).unwrap()).unwrap();
    assert_eq!(order.band_defines(), [("BAND_UNITS", 0x2222), ("BAND_BITS", 0x1124)]);
    let order = PageOrder::new(PageLayout::banded(96).unwrap()).unwrap();
    assert_eq!(order.band_defines(), [("BAND_UNITS", 0x1131), ("BAND_BITS", 0x1124)]);
    let order = PageOrder::new(PageLayout::Banded(BandLayout::high(96).unwrap())).unwrap();
    assert_eq!(order.band_defines(), [("BAND_UNITS", 0x1131), ("BAND_BITS", 0x4444)]);
    let order = PageOrder::new(PageLayout::int15(128).unwrap()).unwrap();
    assert_eq!(order.band_defines(), [("BAND_UNITS", 0x1111), ("BAND_BITS", 0x1124)]);
    let order = PageOrder::new(PageLayout::bf16(128)).unwrap();
    assert_eq!(order.band_defines(), [("BAND_UNITS", 0), ("BAND_BITS", 0)]);
}

/// What is drawn above.
#[test]
fn sixteens_of_a_token_follow_one_another() {
    let order = PageOrder::new(PageLayout::banded(128).unwrap()).unwrap();
    let expected = [(0, 0), (0, 4), (4, 0), (4, 2), (4, 4), (4, 5), (4, 6), (4, 7)];
    for (unit, expected) in expected.into_iter().enumerate() {
        assert_eq!(order.element_position(Side::Key, 0, 16 * unit), expected, "unit {unit}");
        let (byte, shift) = order.element_position(Side::Key, 0, 16 * unit + 4 * 3 + 2);
        assert_eq!((byte, shift), (expected.0 + 3 * 16 + 2, expected.1), "unit {unit}");
    }
}

#[test]
fn shapes_the_kernels_do_not_have_are_refused() {
    assert!(matches!(PageOrder::new(PageLayout::bf16(48)), Err(CudaError::Unsupported(_))));
    assert!(matches!(PageOrder::new(PageLayout::bf16(288)), Err(CudaError::Unsupported(_))));
    let codes = |d, groups| PageLayout::Codes(CodeLayout::new(2, d, groups).unwrap());
    assert!(matches!(PageOrder::new(codes(128, 8)), Err(CudaError::Unsupported(_))));
    assert!(matches!(PageOrder::new(codes(96, 2)), Err(CudaError::Unsupported(_))));
    for d in [32, 80] {
        let banded = PageLayout::banded(d).unwrap();
        assert!(matches!(PageOrder::new(banded), Err(CudaError::Unsupported(_))), "{d}");
    }
    // Fewer than four bands.
    for d in [32, 64, 96] {
        let fewer = PageLayout::int15(d).unwrap();
        assert!(matches!(PageOrder::new(fewer), Err(CudaError::Unsupported(_))), "{d}");
    }
    let order = PageOrder::new(codes(64, 1)).unwrap();
    assert!(matches!(order.from_cpu(&[0; 7]), Err(CudaError::Shape { .. })));
}
