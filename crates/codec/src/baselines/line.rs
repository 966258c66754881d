//! A line of numbers, along channels or along tokens, as bytes: packed codes, then f16 scale and offset per group.

use crate::error::{CodecError, check_length};
use crate::quantise::{RowFormat, ScalePair, dequantise_row, quantise_row};
use crate::rule::{Rule, ScaleType};

/// Lines of `length` numbers with `bits` bits each in `groups` equal groups, min-max, f16 scales.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LineFormat {
    length: usize,
    bits: usize,
    groups: usize,
}

impl LineFormat {
    pub(crate) fn new(length: usize, bits: usize, groups: usize) -> Result<Self, CodecError> {
        let format = LineFormat { length, bits, groups };
        format.row_format().check(length)?;
        Ok(format)
    }

    /// Bits of a code.
    pub(crate) fn bits(&self) -> usize {
        self.bits
    }

    /// Bytes of a line: codes padded to a whole byte, and four bytes per group.
    pub(crate) fn bytes(&self) -> usize {
        (self.length * self.bits).div_ceil(8) + 4 * self.groups
    }

    fn row_format(&self) -> RowFormat {
        RowFormat {
            groups: self.groups,
            rule: Rule::MIN_MAX,
            scale_type: ScaleType::F16,
            published: false,
            levels: 1 << self.bits,
        }
    }

    /// Appends one line to `out`.
    pub(crate) fn store(&self, line: &[f32], out: &mut Vec<u8>) -> Result<(), CodecError> {
        let mut codes = vec![0; self.length];
        let mut scales = vec![(0, 0); self.groups];
        quantise_row(line, &self.row_format(), &mut codes, &mut scales)?;
        pack(&codes, self.bits, out);
        for (scale, offset) in scales {
            out.extend(scale.to_le_bytes());
            out.extend(offset.to_le_bytes());
        }
        Ok(())
    }

    /// Reads one line back.
    pub(crate) fn load(&self, bytes: &[u8], line: &mut [f32]) -> Result<(), CodecError> {
        check_length("bytes of a line", self.bytes(), bytes.len())?;
        let (codes, scales) = bytes.split_at(bytes.len() - 4 * self.groups);
        let codes = unpack(codes, self.bits, self.length);
        let scales: Vec<ScalePair> = scales
            .chunks_exact(4)
            .map(|pair| (u16::from_le_bytes([pair[0], pair[1]]), u16::from_le_bytes([pair[2], pair[3]])))
            .collect();
        dequantise_row(&codes, &scales, ScaleType::F16, line)
    }
}

/// Appends codes of `bits` bits (1 to 8), lowest bit first, padded to a whole byte.
pub(crate) fn pack(codes: &[u8], bits: usize, out: &mut Vec<u8>) {
    let mut waiting = 0_u32;
    let mut filled = 0;
    for &code in codes {
        waiting |= u32::from(code) << filled;
        filled += bits;
        while filled >= 8 {
            out.push(waiting as u8);
            waiting >>= 8;
            filled -= 8;
        }
    }
    if filled > 0 {
        out.push(waiting as u8);
    }
}

/// The first `count` codes of [`pack`]'s bytes.
pub(crate) fn unpack(bytes: &[u8], bits: usize, count: usize) -> Vec<u8> {
    let mask = (1_u32 << bits) - 1;
    let mut bytes = bytes.iter();
    let mut waiting = 0_u32;
    let mut filled = 0;
    (0..count)
        .map(|_| {
            while filled < bits {
                waiting |= u32::from(*bytes.next().unwrap_or(&0)) << filled;
                filled += 8;
            }
            let code = (waiting & mask) as u8;
            waiting >>= bits;
            filled -= bits;
            code
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn three_bit_codes_cross_bytes_lowest_bit_first() {
        let mut bytes = Vec::new();
        pack(&[1, 2, 7, 5], 3, &mut bytes);
        // 001 010 111 101, lowest first: 0b1_1_010_001 = 0b11010001, then the upper bits 0b1011.
        assert_eq!(bytes, [0b1101_0001, 0b0000_1011]);
    }

    proptest! {
        #[test]
        fn packing_is_lossless(bits in 1_usize..=8, codes in prop::collection::vec(any::<u8>(), 0..100)) {
            let codes: Vec<u8> = codes.iter().map(|code| code & ((1_u16 << bits) - 1) as u8).collect();
            let mut bytes = Vec::new();
            pack(&codes, bits, &mut bytes);
            prop_assert_eq!(bytes.len(), (codes.len() * bits).div_ceil(8));
            prop_assert_eq!(unpack(&bytes, bits, codes.len()), codes);
        }
    }

    #[test]
    fn a_line_counts_its_padding_and_scales() {
        assert_eq!(LineFormat::new(128, 2, 1).unwrap().bytes(), 36);
        assert_eq!(LineFormat::new(50, 3, 2).unwrap().bytes(), 19 + 8);
        assert!(LineFormat::new(50, 3, 3).is_err());
        assert!(LineFormat::new(50, 5, 1).is_err());
    }
}
