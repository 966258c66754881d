//! Sealing by the definition.
use std::sync::Arc;

use half::bf16;
use oscar_codec::{CodecError, HeadIndex, PAGE_TOKENS, PageCodec, Side};

use crate::cpu::attention;
use crate::cpu::isa::Isa;

/// Buffers.
#[derive(Default)]
pub struct SealScratch;

/// Seals pages.
pub struct Sealer {
    codec: Arc<PageCodec>,
}

impl Sealer {
    /// New.
    pub fn new(_isa: Isa, codec: Arc<PageCodec>) -> Sealer {
        Sealer { codec }
    }

    /// Codec.
    pub fn codec(&self) -> &Arc<PageCodec> {
        &self.codec
    }

    /// Seal.
    pub fn seal(&self, head: HeadIndex, page: &[u16], out: &mut [u8], _: &mut SealScratch) -> Result<(), CodecError> {
        let d = self.codec.geometry().head_dim;
        let (mut keys, mut values) = (vec![0.0; PAGE_TOKENS * d], vec![0.0; PAGE_TOKENS * d]);
        for token in 0..PAGE_TOKENS {
            attention::read_token(page, d, token, &mut keys[token * d..][..d], &mut values[token * d..][..d]);
        }
        self.codec.seal_page(head, &keys, &values, out)
    }

    /// Transform.
    pub fn transform_rows(&self, head: HeadIndex, side: Side, rows: &mut [f32], _: &mut SealScratch) {
        let transform = self.codec.transform(head, side).expect("a head");
        for row in rows.chunks_exact_mut(transform.dim()) {
            let copy = row.to_vec();
            transform.apply(&copy, row);
        }
        let _ = bf16::ZERO;
    }

    /// Queries.
    pub fn rotate_queries(&self, head: HeadIndex, rows: &mut [f32], _: &mut SealScratch) {
        let transform = self.codec.transform(head, Side::Key).expect("a head");
        let d = transform.dim();
        for row in rows.chunks_exact_mut(d) {
            let copy = row.to_vec();
            row.fill(0.0);
            for (i, x) in copy.iter().enumerate() {
                for (out, w) in row.iter_mut().zip(&transform.rotation()[i * d..]) {
                    *out = x.mul_add(*w, *out);
                }
            }
        }
    }

    /// Undo.
    pub fn undo_values(&self, head: HeadIndex, rows: &mut [f32], _: &mut SealScratch) {
        let transform = self.codec.transform(head, Side::Value).expect("a head");
        for row in rows.chunks_exact_mut(transform.dim()) {
            let copy = row.to_vec();
            transform.undo(&copy, row);
        }
    }
}
