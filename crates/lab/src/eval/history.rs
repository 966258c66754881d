//! Attention in which early positions are read back from a codec.
//!
//! Keys and values are computed and stored exactly (bf16) as always. Positions outside the windows of a query are
//! read from a second cache that holds what the codec gives back for them. The codec's round trip is the only
//! difference to an exact run, so one loaded model serves every codec, and rotations are never folded into weights.

use oscar_codec::{CacheCodec, ExactSlot, HeadIndex, Side, Windows};
use oscar_kernels::backend::AttentionSpec;
use oscar_kernels::inspect::{KvRows, StandIn};
use oscar_kernels::{Inspect, KernelError};
use oscar_model::LayerAttention;
use rayon::prelude::*;

/// Rows that a codec encodes at a time, rounded up to whole token groups.
const BLOCK_TOKENS: usize = 512;

/// How queries read positions before them.
#[derive(Clone, Copy)]
pub struct Reading<'a> {
    /// The codec that early positions are read from.
    pub codec: &'a dyn CacheCodec,
    /// The windows that stay exact.
    pub windows: Windows,
    /// Prefill in chunks of so many tokens: a query reads its own chunk exactly, whatever the window. `None` lets
    /// every query read its history as a decode step would.
    pub chunk: Option<usize>,
}

impl Reading<'_> {
    /// Positions below this are read back from the codec by the query at `position`, except the sink.
    ///
    /// The recent window counts the query itself, which is always exact. A codec that encodes tokens in groups reads
    /// whole groups only, so its window is up to a group longer.
    pub fn history_end(&self, position: usize) -> usize {
        let Windows { sink, recent } = self.windows;
        let mut end = (position + 1).saturating_sub(recent.max(1));
        if let Some(chunk) = self.chunk {
            end = end.min(position / chunk.max(1) * chunk.max(1));
        }
        if end <= sink {
            return 0;
        }
        let group = self.codec.token_group().max(1);
        match (end - sink) / group * group {
            0 => 0,
            whole => sink + whole,
        }
    }

    /// [`Self::history_end`], where queries below `exact_until` read everything exactly.
    fn history_end_from(&self, exact_until: usize, position: usize) -> usize {
        if position < exact_until { 0 } else { self.history_end(position) }
    }
}

/// [`LayerAttention`] over an exact cache and a history of one sequence.
pub(super) struct HistoryAttention<'a, B: Inspect> {
    pub(super) exact: &'a mut B::Cache,
    pub(super) history: &'a mut B::Cache,
    pub(super) pages: &'a [Option<ExactSlot>],
    /// Per layer, how many positions the history holds.
    pub(super) filled: &'a mut [usize],
    pub(super) reading: Reading<'a>,
    /// Tokens of the sequence after this step.
    pub(super) end: usize,
    /// Queries below this position read everything exactly.
    pub(super) exact_until: usize,
}

impl<B: Inspect> HistoryAttention<'_, B> {
    /// Extends the history of a layer to what the last query of the step reads.
    fn fill(&mut self, backend: &B, layer: usize, kv_heads: usize) -> Result<(), KernelError> {
        let (from, to) = (self.filled[layer], self.reading.history_end_from(self.exact_until, self.end - 1));
        if from >= to {
            return Ok(());
        }
        let sink = self.reading.windows.sink;
        // Blocks start at whole token groups, counted from the end of the sink.
        let block = BLOCK_TOKENS.next_multiple_of(self.reading.codec.token_group().max(1));
        let mut starts: Vec<usize> = (from.max(sink)..to).step_by(block).collect();
        if from < sink {
            starts.insert(0, from);
        }
        let tasks: Vec<(usize, usize, usize)> = starts
            .iter()
            .enumerate()
            .map(|(index, &start)| (start, starts.get(index + 1).copied().unwrap_or(to)))
            .flat_map(|(start, end)| (0..kv_heads).map(move |head| (head, start, end)))
            .collect();
        let (pages, codec) = (self.pages, self.reading.codec);
        let read = |&(head, start, end): &(usize, usize, usize)| {
            backend.read_kv(self.exact, KvRows { layer, head, pages }, start..end)
        };
        let mut rows: Vec<(Vec<f32>, Vec<f32>)> = tasks.iter().map(read).collect::<Result<_, _>>()?;
        tasks
            .par_iter()
            .zip(&mut rows)
            .filter(|((_, start, _), _)| *start >= sink)
            .try_for_each(|(&(head, start, _), (keys, values))| {
                let index = HeadIndex { layer, head };
                codec.round_trip(index, Side::Key, start, keys)?;
                codec.round_trip(index, Side::Value, start, values)
            })
            .map_err(|error| {
                KernelError::BadSetting(format!("layer {layer}, codec {}: {error}", codec.name()))
            })?;
        for ((head, start, _), (keys, values)) in tasks.into_iter().zip(rows) {
            backend.write_kv(self.history, KvRows { layer, head, pages }, start, &keys, &values)?;
        }
        self.filled[layer] = to;
        Ok(())
    }
}

impl<B: Inspect> LayerAttention<B> for HistoryAttention<'_, B> {
    fn attend(
        &mut self,
        backend: &B,
        step: &B::Step,
        spec: &AttentionSpec<B>,
        layer: usize,
        qkv: &mut B::Buffer,
        out: &mut B::Buffer,
    ) -> Result<(), KernelError> {
        backend.rope_store(step, spec, layer, qkv, self.exact)?;
        // A layer with a window keeps no history that a codec could change.
        if spec.window.is_some() {
            return backend.attend(step, spec, layer, qkv, self.exact, out);
        }
        self.fill(backend, layer, spec.kv_heads)?;
        let (reading, exact_until) = (self.reading, self.exact_until);
        let ends = move |position: usize| reading.history_end_from(exact_until, position);
        let stand_in = StandIn { cache: &*self.history, ends: &ends };
        backend.attend_with_stand_in(step, spec, layer, qkv, self.exact, stand_in, out)
    }
}

#[cfg(test)]
mod tests {
    use oscar_codec::CodecError;

    use super::*;

    struct Groups(usize);

    impl CacheCodec for Groups {
        fn name(&self) -> &str {
            "groups"
        }
        fn token_group(&self) -> usize {
            self.0
        }
        fn round_trip(&self, _: HeadIndex, _: Side, _: usize, _: &mut [f32]) -> Result<(), CodecError> {
            Ok(())
        }
        fn token_bytes(&self, head_dim: usize) -> f64 {
            head_dim as f64
        }
    }

    #[test]
    fn the_window_counts_the_query_and_the_sink_stays() {
        let codec = Groups(1);
        let reading = Reading { codec: &codec, windows: Windows { sink: 64, recent: 256 }, chunk: None };
        // The query at 319 sees 64 sink tokens and itself with 255 before it: all exact.
        assert_eq!(reading.history_end(319), 0);
        assert_eq!(reading.history_end(320), 65);
        assert_eq!(reading.history_end(4095), 3840);
        let none = Reading { windows: Windows { sink: 0, recent: 0 }, ..reading };
        assert_eq!((none.history_end(0), none.history_end(7)), (0, 7));
    }

    #[test]
    fn groups_are_read_whole_and_chunks_exactly() {
        let codec = Groups(32);
        let reading = Reading { codec: &codec, windows: Windows { sink: 10, recent: 100 }, chunk: None };
        assert_eq!(reading.history_end(140), 0);
        assert_eq!(reading.history_end(141), 42);
        assert_eq!(reading.history_end(172), 42);
        assert_eq!(reading.history_end(173), 74);
        let codec = Groups(1);
        let chunked = Reading { codec: &codec, windows: Windows { sink: 0, recent: 8 }, chunk: Some(100) };
        assert_eq!(chunked.history_end(99), 0);
        assert_eq!(chunked.history_end(103), 96);
        assert_eq!(chunked.history_end(199), 100);
    }
}
