//! The shape of an attention layer, without its weights.

use std::ops::Range;

use oscar_codec::Side;

use crate::backend::{AttentionSpec, Backend};

/// Heads of an attention layer.
#[derive(Clone, Copy)]
pub(super) struct Heads {
    pub(super) q_heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    /// What `q · k` is multiplied with to get a logit.
    pub(super) scale: f32,
    /// Positions that a row sees, itself included; all of them if there is none.
    pub(super) window: Option<usize>,
}

impl Heads {
    pub(super) fn of<B: Backend>(spec: &AttentionSpec<B>) -> Heads {
        let AttentionSpec { q_heads, kv_heads, head_dim, scale, window, .. } = *spec;
        Heads { q_heads, kv_heads, head_dim, scale, window }
    }

    /// The first position that a row at `position` sees.
    pub(super) fn first_seen(&self, position: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }

    /// Query heads that share a KV head.
    pub(super) fn group(&self) -> usize {
        self.q_heads / self.kv_heads
    }

    /// Columns of the projection to queries, keys and values.
    pub(super) fn qkv_cols(&self) -> usize {
        (self.q_heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Where the key or the value of a KV head is among these columns.
    pub(super) fn stored_cols(&self, head: usize, side: Side) -> Range<usize> {
        let before = match side {
            Side::Key => self.q_heads,
            Side::Value => self.q_heads + self.kv_heads,
        };
        (before + head) * self.head_dim..(before + head + 1) * self.head_dim
    }
}
