//! What calibration and evaluation need from a device beyond serving: activations, cached rows and weights on the host.
//!
//! Serving never calls any of this, so a device can serve before it can be inspected.

use std::ops::Range;

use oscar_codec::ExactSlot;

use crate::backend::{AttentionSpec, Backend, KernelError};

/// Where the pages of one layer and KV head are found.
#[derive(Clone, Copy, Debug)]
pub struct KvRows<'a> {
    /// The layer of the cache.
    pub layer: usize,
    /// The KV head of the layer.
    pub head: usize,
    /// Page table: the slot of the bf16 page that holds positions `[64p, 64p + 64)`, as in a batch.
    pub pages: &'a [Option<ExactSlot>],
}

/// Keys and values that queries read in place of the exact ones at early positions.
#[derive(Clone, Copy)]
pub struct StandIn<'a, B: Backend + ?Sized> {
    /// The cache that holds them, with the page slots of the step.
    pub cache: &'a B::Cache,
    /// The query at position `p` reads positions below `ends(p)` from this cache and the others exactly.
    pub ends: &'a (dyn Fn(usize) -> usize + Sync),
}

/// A backend whose state can be read and replaced from the host.
pub trait Inspect: Backend {
    /// Replaces the first rows of a buffer.
    fn write(&self, rows: &[f32], buffer: &mut Self::Buffer) -> Result<(), KernelError>;

    /// All rows of a weight as floats, one after the other.
    fn dequantise(&self, weight: &Self::Weight) -> Result<Vec<f32>, KernelError>;

    /// Keys and values at consecutive positions as their bf16 pages hold them; rows of `head_dim` values.
    fn read_kv(
        &self,
        cache: &Self::Cache,
        rows: KvRows<'_>,
        positions: Range<usize>,
    ) -> Result<(Vec<f32>, Vec<f32>), KernelError>;

    /// Replaces keys and values at consecutive positions from `first` on, rounded to bf16.
    fn write_kv(
        &self,
        cache: &mut Self::Cache,
        rows: KvRows<'_>,
        first: usize,
        keys: &[f32],
        values: &[f32],
    ) -> Result<(), KernelError>;

    /// [`Backend::attend`] in which early positions are read from a stand-in. This is how the effect of a codec is
    /// measured: the stand-in holds what the codec gives back.
    fn attend_with_stand_in(
        &self,
        step: &Self::Step,
        spec: &AttentionSpec<Self>,
        layer: usize,
        qkv: &Self::Buffer,
        exact: &Self::Cache,
        stand_in: StandIn<'_, Self>,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError>;
}
