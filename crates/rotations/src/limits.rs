//! How large a rotation file may be: above any real model, far below what would hurt a machine.

/// Most bytes of a file on disk.
pub(crate) const FILE_LIMIT: u64 = 2 << 30;
/// Most elements of all tensors of a file: 80 layers of 64 heads of 128 channels take 84 million.
pub(crate) const ELEMENT_LIMIT: usize = 1 << 27;
/// Most layers of a model.
pub(crate) const LAYER_LIMIT: usize = 1024;
/// Largest layer id, which may be sparse.
pub(crate) const LAYER_ID_LIMIT: usize = 65_535;
/// Most KV heads of a layer.
pub(crate) const HEAD_LIMIT: usize = 1024;
/// Most channels of a head.
pub(crate) const HEAD_DIM_LIMIT: usize = 1024;
/// How far the columns of a rotation may be from orthonormal; published files are at 1e-7.
pub const ORTHOGONALITY_LIMIT: f64 = 1e-3;
