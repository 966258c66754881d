//! Page formats and their exact sizes, scales and padding included.

/// Tokens in a page. Pages are position-aligned: page `p` holds positions `[64p, 64p + 64)`.
pub const PAGE_TOKENS: usize = 64;

/// Head dimensions are padded up to a multiple of this in sealed pages; the padding is counted.
pub const HEAD_DIM_STEP: usize = 32;

/// How the keys and values of a page are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PageFormat {
    /// 16 bits per element, no scales.
    Bf16,
    /// 2-bit codes with one f16 scale and one f16 scale·zero per row and group of channels.
    Int2 {
        /// Groups per row; 1 when the whole head shares a scale.
        groups: usize,
    },
    /// 4-bit codes with one f16 scale and one f16 scale·zero per row and group of channels.
    Int4 {
        /// Groups per row; 1 when the whole head shares a scale.
        groups: usize,
    },
    /// 8-bit floats (E4M3) with one f16 scale per row.
    Fp8,
}

impl PageFormat {
    /// Bytes of one page (keys and values of one layer and one KV head).
    pub fn page_bytes(self, head_dim: usize) -> usize {
        match self {
            PageFormat::Bf16 => PAGE_TOKENS * 2 * head_dim * 2,
            PageFormat::Int2 { groups } => affine_page_bytes(head_dim, 2, groups),
            PageFormat::Int4 { groups } => affine_page_bytes(head_dim, 4, groups),
            PageFormat::Fp8 => PAGE_TOKENS * 2 * (head_dim.next_multiple_of(HEAD_DIM_STEP) + 2),
        }
    }

    /// Bits per stored key or value element, scales and padding included.
    pub fn bits_per_element(self, head_dim: usize) -> f64 {
        self.page_bytes(head_dim) as f64 * 8.0 / (PAGE_TOKENS * 2 * head_dim) as f64
    }
}

/// Codes of all padded channels, and a 16-bit scale and offset per row and group.
fn affine_page_bytes(head_dim: usize, bits: usize, groups: usize) -> usize {
    let codes = PAGE_TOKENS * 2 * head_dim.next_multiple_of(HEAD_DIM_STEP) * bits / 8;
    let scales = PAGE_TOKENS * 2 * groups * (2 + 2);
    codes + scales
}

/// The part of a model's shape that decides how large its KV cache is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvGeometry {
    /// Layers that keep keys and values.
    pub layers: usize,
    /// KV heads per layer.
    pub kv_heads: usize,
    /// Channels per head.
    pub head_dim: usize,
}

impl KvGeometry {
    /// Bytes of one page over all layers and heads.
    pub fn page_bytes(&self, format: PageFormat) -> usize {
        self.layers * self.kv_heads * format.page_bytes(self.head_dim)
    }

    /// Bytes per token over all layers and heads, in full pages of `format`.
    pub fn bytes_per_token(&self, format: PageFormat) -> usize {
        self.page_bytes(format) / PAGE_TOKENS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn int2_pages_have_the_documented_sizes() {
        for (head_dim, bytes) in [(48, 2560), (64, 2560), (96, 3584), (128, 4608), (256, 8704)] {
            assert_eq!(PageFormat::Int2 { groups: 1 }.page_bytes(head_dim), bytes, "d={head_dim}");
        }
        assert_eq!(PageFormat::Int2 { groups: 2 }.page_bytes(128), 4096 + 2 * 512);
    }

    #[test]
    fn bits_per_element_counts_scales_and_padding() {
        assert_eq!(PageFormat::Bf16.bits_per_element(128), 16.0);
        assert_eq!(PageFormat::Int2 { groups: 1 }.bits_per_element(128), 2.25);
        assert_eq!(PageFormat::Int2 { groups: 1 }.bits_per_element(64), 2.5);
        assert!(PageFormat::Int2 { groups: 1 }.bits_per_element(48) > 3.3);
    }

    #[test]
    fn the_safe_tiers_have_the_documented_bits() {
        assert_eq!(PageFormat::Int4 { groups: 1 }.bits_per_element(128), 4.25);
        assert_eq!(PageFormat::Int4 { groups: 2 }.page_bytes(128), 64 * 2 * (64 + 8));
        assert_eq!(PageFormat::Fp8.bits_per_element(128), 8.125);
        assert_eq!(PageFormat::Fp8.page_bytes(48), 64 * 2 * 66);
    }

    #[test]
    fn geometry_matches_hand_arithmetic() {
        // SmolLM2-135M: 30 layers, 3 KV heads, d=64, two tensors of bf16.
        let smollm2 = KvGeometry { layers: 30, kv_heads: 3, head_dim: 64 };
        assert_eq!(smollm2.bytes_per_token(PageFormat::Bf16), 30 * 3 * 64 * 2 * 2);
        assert_eq!(smollm2.bytes_per_token(PageFormat::Int2 { groups: 1 }), 30 * 3 * 40);
    }
}
