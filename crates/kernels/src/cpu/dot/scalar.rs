//! The reference: integer dot products as they are defined, one block at a time.

use super::Product;
use super::stripes::STRIPES;
use crate::cpu::activation::{GROUP as SCALE_GROUP, QuantisedRow};
use crate::dtype::DType;
use crate::quant::GROUP;
use crate::quant::block::{Unpacked, unpack};

pub(super) fn quantised_rows(dtype: DType, product: Product<'_>) {
    let Product { mut stripes, x } = product;
    let mut block = Unpacked::default();
    let mut sums = vec![[0.0; STRIPES]; x.rows()];
    for pass in 0..stripes.passes() {
        sums.fill([0.0; STRIPES]);
        for (stripe, row) in stripes.rows(pass).into_iter().enumerate() {
            for (index, bytes) in row.chunks_exact(dtype.block_bytes()).enumerate() {
                unpack(dtype, bytes, &mut block);
                for (m, sums) in sums.iter_mut().enumerate() {
                    sums[stripe] += block_dot(&block, dtype.block_len(), x.row(m), index);
                }
            }
        }
        sums.iter().enumerate().for_each(|(m, sums)| stripes.write(m, pass, *sums));
    }
}

/// Product of block `index` of a weight row with the activations it meets.
fn block_dot(block: &Unpacked, len: usize, x: QuantisedRow<'_>, index: usize) -> f32 {
    let mut sum = 0.0;
    for group in 0..len / GROUP {
        let start = index * len + group * GROUP;
        let mut integer = 0i32;
        for i in 0..GROUP {
            let fixed = i32::from(x.high[start + i]) * 256 + i32::from(x.low[start + i]);
            integer += i32::from(block.codes[group * GROUP + i]) * fixed;
        }
        sum += block.scales[group] * x.scales[start / SCALE_GROUP] * integer as f32;
        sum += block.offsets[group] * x.sums[start / GROUP];
    }
    sum
}
