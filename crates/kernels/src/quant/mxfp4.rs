//! MXFP4 weights: four bits per element, and a byte for each 32 that says by which power of two they are multiplied.
//!
//! E2M1 is a sign, two bits of exponent (bias 1) and one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4 and 6 of either sign. Twice such a
//! number is a small integer, so a block is one of codes, and half its scale goes with them. E8M0 is an exponent alone (bias
//! 127); all ones is NaN in the standard. A block with that scale makes every product with it NaN, so that a request that meets it
//! fails instead of going on with a number that nobody stored.
//!
//! Two arrangements are in use. GGUF files have the scale in front of the elements, the first sixteen of them in low nibbles and
//! the others in high ones: that is [`crate::DType::Mxfp4`]. Hugging Face checkpoints have scales in a tensor of their own, and
//! neighbours in one byte; [`write_block`] makes blocks of these.

/// Elements of a block.
pub const BLOCK: usize = 32;
/// Bytes of a block's elements.
pub const NIBBLES: usize = BLOCK / 2;
/// The scale that is no number.
pub const NAN_SCALE: u8 = 255;

/// What the scale that is no number becomes.
pub(crate) const NAN_BITS: u32 = 0x7fc0_0000;

/// Twice the numbers that four bits stand for.
pub(crate) const TWICE: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Twice the number that the low four bits of a byte stand for.
#[inline(always)]
pub(crate) fn twice(nibble: u8) -> i8 {
    TWICE[usize::from(nibble & 15)]
}

/// Half the power of two that a scale stands for; NaN for [`NAN_SCALE`].
#[inline(always)]
pub(crate) fn half_power(scale: u8) -> f32 {
    // The two smallest are below the smallest normal number.
    f32::from_bits(match scale {
        0 | 1 => 0x0020_0000 << scale,
        NAN_SCALE => NAN_BITS,
        _ => (u32::from(scale) - 1) << 23,
    })
}

/// Writes a block of [`crate::DType::Mxfp4`] from a scale and sixteen bytes in which neighbours share a byte, the first in its
/// low nibble.
pub fn write_block(scale: u8, neighbours: &[u8; NIBBLES], block: &mut [u8; NIBBLES + 1]) {
    let element = |index: usize| neighbours[index / 2] >> (4 * (index % 2)) & 15;
    block[0] = scale;
    for (index, byte) in block[1..].iter_mut().enumerate() {
        *byte = element(index) | element(index + NIBBLES) << 4;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::quant::dequantise;

    #[test]
    fn a_block_holds_what_the_standard_says() {
        let magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        // 16 different nibbles twice, as neighbours.
        let neighbours: [u8; NIBBLES] = std::array::from_fn(|at| {
            let first = (2 * at % 16) as u8;
            first | (first + 1) << 4
        });
        for scale in 0..NAN_SCALE {
            let mut block = [0; NIBBLES + 1];
            write_block(scale, &neighbours, &mut block);
            let mut values = [f32::NAN; BLOCK];
            dequantise(DType::Mxfp4, &block, &mut values);
            for (index, value) in values.into_iter().enumerate() {
                let sign = if index % 16 < 8 { 1.0 } else { -1.0 };
                let exact = sign * magnitudes[index % 8] * 2f64.powi(i32::from(scale) - 127);
                // The largest do not fit a float of 32 bits.
                let exact = exact as f32;
                assert_eq!(value, exact, "element {index} at scale {scale}");
            }
        }
        let (mut block, mut values) = ([0; NIBBLES + 1], [0.0; BLOCK]);
        write_block(NAN_SCALE, &neighbours, &mut block);
        dequantise(DType::Mxfp4, &block, &mut values);
        assert!(values.iter().all(|value| value.is_nan()), "{values:?}");
    }
}
