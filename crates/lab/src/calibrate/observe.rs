//! Runs a model layer by layer over whole sequences and shows what each layer computes.
//!
//! Layer-major order means that all tokens of a layer are seen before the next layer begins: statistics that need
//! two looks at a layer (a weight made from the mean of all queries) are exact, only one layer's keys and values are
//! ever stored, and what was learned about a layer can be tried on the spot.

use std::sync::Arc;

use oscar_codec::{ExactSlot, KeyTurning, KvGeometry, PAGE_TOKENS};
use oscar_kernels::backend::{AttentionSpec, Batch, CacheSpec, SequenceRows};
use oscar_kernels::{Inspect, KernelError};
use oscar_model::{Activations, LayerAttention, LoadedModel};

use super::moments::{HeadCounts, ObservedRows};

/// Runs sequences through a model layer by layer and shows what each layer computes.
pub struct Observer<'a, B: Inspect> {
    model: &'a LoadedModel<B>,
    heads: HeadCounts,
    sequences: Vec<ObservedSequence<B>>,
    /// Keys and values of one layer, of all sequences.
    cache: B::Cache,
}

struct ObservedSequence<B: Inspect> {
    tokens: usize,
    step: B::Step,
    activations: Activations<B>,
}

impl<'a, B: Inspect> Observer<'a, B> {
    /// Embeds the sequences. Each begins at position 0.
    pub fn new(model: &'a LoadedModel<B>, sequences: &[&[u32]]) -> Result<Observer<'a, B>, KernelError> {
        let config = model.config();
        let heads = HeadCounts { query: config.q_heads, kv: config.kv_heads, dim: config.head_dim };
        let slots = 1 + sequences.iter().map(|ids| ids.len().div_ceil(PAGE_TOKENS)).sum::<usize>();
        let geometry = KvGeometry { layers: 1, ..config.kv_geometry() };
        let cache = model.model().backend().cache(&CacheSpec::exact(geometry, config.q_heads, slots))?;
        let mut next_slot = 1;
        let sequences = sequences
            .iter()
            .map(|ids| {
                let pages = ExactSlot::table((next_slot..).take(ids.len().div_ceil(PAGE_TOKENS)));
                next_slot += pages.len() as u32;
                let rows = SequenceRows::exact(0, ids.len(), &pages);
                let batch = Batch { tokens: ids, sequences: &[rows] };
                let step = model.model().begin_step(&batch, &cache)?;
                let mut activations = model.model().activations(ids.len(), 1)?;
                model.model().embed(&batch, &step, &mut activations)?;
                Ok(ObservedSequence { tokens: ids.len(), step, activations })
            })
            .collect::<Result<_, KernelError>>()?;
        Ok(Observer { model, heads, sequences, cache })
    }

    /// The heads of the rows that are shown.
    pub fn heads(&self) -> HeadCounts {
        self.heads
    }

    /// Layers of the model.
    pub fn layers(&self) -> usize {
        self.model.config().layers
    }

    /// Longest context of the model.
    pub fn context(&self) -> usize {
        self.model.config().max_context
    }

    /// How the keys of a layer turn with their position.
    pub fn key_turning(&self, layer: usize) -> Arc<KeyTurning> {
        Arc::new(self.model.config().key_turning(layer))
    }

    /// How many of the first `layers` layers keep a history, which is what rotations are for.
    pub fn layers_with_history(&self, layers: usize) -> usize {
        (0..layers).filter(|&layer| self.model.config().window(layer).is_none()).count()
    }

    /// Takes all sequences through one layer and shows each to `visit`, which also gets its index.
    pub fn run_layer(
        &mut self,
        layer: usize,
        mut visit: impl FnMut(usize, ObservedRows<'_>),
    ) -> Result<(), KernelError> {
        for (index, sequence) in self.sequences.iter_mut().enumerate() {
            let mut attention = ObservedAttention {
                cache: &mut self.cache,
                heads: self.heads,
                tokens: sequence.tokens,
                visit: &mut |rows| visit(index, rows),
            };
            let ObservedSequence { step, activations, .. } = sequence;
            self.model.model().run_layers(layer..layer + 1, step, &mut attention, activations)?;
        }
        Ok(())
    }

    /// The hidden states of one sequence.
    pub fn hidden(&self, sequence: usize) -> Result<Vec<f32>, KernelError> {
        let ObservedSequence { tokens, activations, .. } = &self.sequences[sequence];
        self.model.model().backend().read(activations.hidden(), 0..*tokens)
    }

    /// Number of values in the hidden states of one sequence.
    pub fn hidden_len(&self, sequence: usize) -> usize {
        self.sequences[sequence].tokens * self.model.config().hidden_size
    }

    /// Replaces the hidden states of one sequence by stored ones.
    pub fn set_hidden(&mut self, sequence: usize, rows: &[f32]) -> Result<(), KernelError> {
        self.model.model().backend().write(rows, self.sequences[sequence].activations.hidden_mut())
    }

    /// Number of sequences.
    pub fn sequences(&self) -> usize {
        self.sequences.len()
    }
}

/// Ordinary attention that also reads its rows back for the visitor.
struct ObservedAttention<'a, B: Inspect> {
    cache: &'a mut B::Cache,
    heads: HeadCounts,
    tokens: usize,
    visit: &'a mut dyn FnMut(ObservedRows<'_>),
}

impl<B: Inspect> LayerAttention<B> for ObservedAttention<'_, B> {
    fn attend(
        &mut self,
        backend: &B,
        step: &B::Step,
        spec: &AttentionSpec<B>,
        _layer: usize,
        qkv: &mut B::Buffer,
        out: &mut B::Buffer,
    ) -> Result<(), KernelError> {
        backend.rope_store(step, spec, 0, qkv, self.cache)?;
        backend.attend(step, spec, 0, qkv, self.cache, out)?;
        let (qkv, attended) = (backend.read(qkv, 0..self.tokens)?, backend.read(out, 0..self.tokens)?);
        (self.visit)(ObservedRows { heads: self.heads, qkv: &qkv, attended: &attended });
        Ok(())
    }
}
