//! The numeric type ids of GGUF tensors.
//!
//! Types without a kernel are listed with their block size too: their tensors can be bounds-checked and shown,
//! and the error can name them.

use std::borrow::Cow;

use oscar_kernels::DType;

use crate::files::ElementType;

/// A tensor type id: what it is called and how its blocks are laid out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct GgmlType {
    pub(super) element_type: ElementType,
    /// Elements and bytes per block; `None` for an unknown id.
    pub(super) block: Option<(usize, usize)>,
}

/// Types without a kernel: id, name, elements per block, bytes per block.
const UNSUPPORTED: [(u32, &str, usize, usize); 22] = [
    (9, "Q8_1", 32, 40),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (40, "NVFP4", 64, 36),
    (41, "Q1_0", 128, 18),
];

impl GgmlType {
    pub(super) fn from_id(id: u32) -> Self {
        let dtype = match id {
            0 => DType::F32,
            1 => DType::F16,
            2 => DType::Q4_0,
            3 => DType::Q4_1,
            6 => DType::Q5_0,
            7 => DType::Q5_1,
            8 => DType::Q8_0,
            12 => DType::Q4K,
            13 => DType::Q5K,
            14 => DType::Q6K,
            30 => DType::BF16,
            39 => DType::Mxfp4,
            _ => return Self::unsupported(id),
        };
        Self {
            element_type: ElementType::Supported(dtype),
            block: Some((dtype.block_len(), dtype.block_bytes())),
        }
    }

    fn unsupported(id: u32) -> Self {
        match UNSUPPORTED.iter().find(|known| known.0 == id) {
            Some(&(_, name, elements, bytes)) => Self {
                element_type: ElementType::Unsupported(Cow::Borrowed(name)),
                block: Some((elements, bytes)),
            },
            None => Self {
                element_type: ElementType::Unsupported(Cow::Owned(format!("unknown ({id})"))),
                block: None,
            },
        }
    }
}
