//! The 8-bit float E4M3 (the "fn" kind): sign, 4 bits of exponent with bias 7, 3 bits of mantissa.
//!
//! No infinities; `0x7f` and `0xff` are NaN; the largest number is 448; the smallest step is 2⁻⁹.

/// The largest finite E4M3 number.
pub const E4M3_LARGEST: f32 = 448.0;

/// The number an E4M3 byte stands for.
pub fn e4m3_to_f32(bits: u8) -> f32 {
    let sign = if bits & 0x80 == 0 { 1.0 } else { -1.0 };
    let exponent = i32::from(bits >> 3 & 15);
    let mantissa = f32::from(bits & 7);
    match (exponent, bits & 7) {
        (15, 7) => f32::NAN,
        (0, _) => sign * mantissa * power_of_two(-9),
        _ => sign * (8.0 + mantissa) * power_of_two(exponent - 10),
    }
}

/// The nearest E4M3 byte, ties to even; what is too large (infinity included) saturates to ±448, NaN stays NaN.
///
/// Without branches or tables, so that a loop over it becomes vector code.
#[inline]
pub fn f32_to_e4m3(value: f32) -> u8 {
    const LARGEST: u32 = E4M3_LARGEST.to_bits();
    // 2⁻⁶. Below it neighbours are 2⁻⁹ apart, as f32 numbers next to 2¹⁴ are.
    const SMALLEST_NORMAL: u32 = (127 - 6) << 23;
    const ROUNDER: f32 = 16384.0;
    let sign = value.to_bits() >> 24 & 0x80;
    let magnitude = value.to_bits() & 0x7fff_ffff;
    let bits = magnitude.min(LARGEST);
    // Half a step is added, less one bit where the kept part is even; a carry walks into the exponent, whose bias
    // goes from 127 to 7.
    let normal = ((bits + 0x7_ffff + (bits >> 20 & 1)) >> 20).wrapping_sub((127 - 7) << 3);
    let subnormal = (f32::from_bits(bits) + ROUNDER).to_bits() & 0xff;
    let code = if bits < SMALLEST_NORMAL { subnormal } else { normal };
    let code = if magnitude > f32::INFINITY.to_bits() { 0x7f } else { code };
    (sign | code) as u8
}

fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_codes() {
        for (bits, value) in [
            (0x00, 0.0),
            (0x01, 0.001_953_125),
            (0x07, 0.013_671_875),
            (0x08, 0.015_625),
            (0x38, 1.0),
            (0x39, 1.125),
            (0x40, 2.0),
            (0x7e, 448.0),
            (0xb8, -1.0),
            (0xfe, -448.0),
        ] {
            assert_eq!(e4m3_to_f32(bits), value, "{bits:#x}");
            assert_eq!(f32_to_e4m3(value), bits, "{value}");
        }
    }

    #[test]
    fn all_256_codes_round_trip() {
        for bits in 0..=255_u8 {
            let value = e4m3_to_f32(bits);
            if value.is_nan() {
                assert_eq!(bits & 0x7f, 0x7f);
                assert_eq!(f32_to_e4m3(value) & 0x7f, 0x7f);
            } else {
                assert_eq!(f32_to_e4m3(value), bits, "{value}");
            }
        }
    }

    /// Between every pair of neighbours: below the middle rounds down, above up, the middle to the even code.
    #[test]
    fn rounds_to_nearest_even_everywhere() {
        for bits in 0..0x7e_u8 {
            let (low, high) = (e4m3_to_f32(bits), e4m3_to_f32(bits + 1));
            let middle = (low + high) / 2.0;
            let even = if bits % 2 == 0 { bits } else { bits + 1 };
            for sign in [0, 0x80] {
                let signed = |x: f32| if sign == 0 { x } else { -x };
                assert_eq!(f32_to_e4m3(signed(middle)), sign | even, "middle of {low} and {high}");
                assert_eq!(f32_to_e4m3(signed(middle.next_down())), sign | bits);
                assert_eq!(f32_to_e4m3(signed(middle.next_up())), sign | (bits + 1));
            }
        }
    }

    #[test]
    fn saturates_and_keeps_nan() {
        for value in [449.0, 464.0, 1e30, f32::INFINITY] {
            assert_eq!(f32_to_e4m3(value), 0x7e);
            assert_eq!(f32_to_e4m3(-value), 0xfe);
        }
        assert!(e4m3_to_f32(f32_to_e4m3(f32::NAN)).is_nan());
        assert_eq!(f32_to_e4m3(1e-30), 0);
        assert_eq!(f32_to_e4m3(-0.0), 0x80);
        assert_eq!(f32_to_e4m3(f32::MIN_POSITIVE / 2.0), 0);
    }
}
