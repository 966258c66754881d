//! The forward pass: tokens in, logits out, over any backend.

use std::ops::Range;
use std::sync::Arc;

use oscar_kernels::backend::{AttentionSpec, Batch, CacheSpec, Rope, SealPage};
use oscar_kernels::{Backend, KernelError};

use crate::config::ModelConfig;
use crate::weights::{FeedForward, LayerWeights, ModelWeights};

/// A model on a device.
pub struct Model<B: Backend> {
    backend: Arc<B>,
    config: ModelConfig,
    rope: Rope,
    /// The rotary embedding of layers with a sliding window, if the model has such layers.
    window_rope: Option<Rope>,
    weights: ModelWeights<B>,
}

/// Activations of one step, reused by the next.
pub struct Activations<B: Backend> {
    hidden: B::Buffer,
    qkv: B::Buffer,
    attended: B::Buffer,
    /// Those of the last step. On a device that begins a step before the tokens of the one before it are known, the logits
    /// that these are drawn from stay while those of the next step are computed.
    logits: Vec<B::Buffer>,
    latest: usize,
    max_rows: usize,
    max_logit_rows: usize,
}

/// What happens between the projections of a layer and its output projection.
///
/// The ordinary way is [`PagedAttention`]; measurements put themselves in its place, because they look at queries, keys and
/// values on their way or change what is read back.
pub trait LayerAttention<B: Backend> {
    /// Takes the projected rows `qkv` (`[queries | keys | values]`, before norms and rotary embedding) to the
    /// attention output, `q_heads * head_dim` columns of `out`.
    fn attend(
        &mut self,
        backend: &B,
        step: &B::Step,
        spec: &AttentionSpec<B>,
        layer: usize,
        qkv: &mut B::Buffer,
        out: &mut B::Buffer,
    ) -> Result<(), KernelError>;
}

/// Attention over the pages of a cache.
pub struct PagedAttention<'a, B: Backend>(pub &'a mut B::Cache);

impl<B: Backend> LayerAttention<B> for PagedAttention<'_, B> {
    fn attend(
        &mut self,
        backend: &B,
        step: &B::Step,
        spec: &AttentionSpec<B>,
        layer: usize,
        qkv: &mut B::Buffer,
        out: &mut B::Buffer,
    ) -> Result<(), KernelError> {
        backend.rope_store(step, spec, layer, qkv, self.0)?;
        backend.attend(step, spec, layer, qkv, self.0, out)
    }
}

/// Attention over the pages of a cache, some of which are sealed on the way, layer by layer.
pub struct PagedSealing<'a, B: Backend> {
    /// The cache whose pages are read, written and sealed.
    pub cache: &'a mut B::Cache,
    /// Pages that rows of this step read sealed: sealed after the layer's keys and values are written, before they are
    /// read.
    pub before: &'a [SealPage],
    /// Pages that rows of this step may still read in bf16: sealed when the layer's attention is done.
    pub after: &'a [SealPage],
}

impl<B: Backend> LayerAttention<B> for PagedSealing<'_, B> {
    fn attend(
        &mut self,
        backend: &B,
        step: &B::Step,
        spec: &AttentionSpec<B>,
        layer: usize,
        qkv: &mut B::Buffer,
        out: &mut B::Buffer,
    ) -> Result<(), KernelError> {
        backend.rope_store(step, spec, layer, qkv, self.cache)?;
        backend.seal(layer..layer + 1, self.before, self.cache)?;
        backend.attend(step, spec, layer, qkv, self.cache, out)?;
        backend.seal(layer..layer + 1, self.after, self.cache)
    }
}

impl<B: Backend> Model<B> {
    /// A model of weights that are on the device.
    pub fn new(backend: Arc<B>, config: ModelConfig, weights: ModelWeights<B>) -> Model<B> {
        let rope = config.rope.build();
        let window_rope =
            config.sliding.as_ref().map(|sliding| sliding.rope.as_ref().unwrap_or(&config.rope).build());
        Model { backend, config, rope, window_rope, weights }
    }

    /// The device that the weights are on.
    pub fn backend(&self) -> &Arc<B> {
        &self.backend
    }

    /// The shape of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The weights of one layer.
    pub fn layer(&self, index: usize) -> &LayerWeights<B> {
        &self.weights.layers[index]
    }

    /// Buffers for steps of up to `rows` tokens, `logit_rows` of which want logits.
    pub fn activations(&self, rows: usize, logit_rows: usize) -> Result<Activations<B>, KernelError> {
        let config = &self.config;
        let q = config.q_heads * config.head_dim;
        let kv = config.kv_heads * config.head_dim;
        let logits = if self.backend.computes_ahead() { 2 } else { 1 };
        Ok(Activations {
            hidden: self.backend.buffer(rows, config.hidden_size)?,
            qkv: self.backend.buffer(rows, q + 2 * kv)?,
            attended: self.backend.buffer(rows, q)?,
            logits: (0..logits)
                .map(|_| self.backend.buffer(logit_rows, config.vocab_size))
                .collect::<Result<_, _>>()?,
            latest: 0,
            max_rows: rows,
            max_logit_rows: logit_rows,
        })
    }

    /// A cache of `slots` bf16 pages for this model.
    pub fn cache(&self, slots: usize) -> Result<B::Cache, KernelError> {
        self.backend.cache(&CacheSpec::exact(self.config.kv_geometry(), self.config.q_heads, slots))
    }

    /// Runs a batch through the model. Keys and values go to the cache; the logits of `logit_rows` (rows of the
    /// batch) are left in the activations, in that order.
    pub fn forward(
        &self,
        batch: &Batch<'_>,
        logit_rows: &[usize],
        cache: &mut B::Cache,
        activations: &mut Activations<B>,
    ) -> Result<(), KernelError> {
        let step = self.begin_step(batch, cache)?;
        self.embed(batch, &step, activations)?;
        self.run_layers(0..self.config.layers, &step, &mut PagedAttention(cache), activations)?;
        self.logits(logit_rows, activations)
    }

    /// Checks a batch against a cache and prepares its tables.
    pub fn begin_step(&self, batch: &Batch<'_>, cache: &B::Cache) -> Result<B::Step, KernelError> {
        let step = self.backend.begin_step(batch, &self.rope, cache)?;
        self.with_windows(step, cache)
    }

    fn with_windows(&self, mut step: B::Step, cache: &B::Cache) -> Result<B::Step, KernelError> {
        if let (Some(rope), Some(sliding)) = (&self.window_rope, &self.config.sliding) {
            self.backend.add_windows(&mut step, rope, sliding.window, cache)?;
        }
        Ok(step)
    }

    /// Computes one token of each sequence of a batch; the logits are in their order.
    pub fn decode(
        &self,
        batch: &Batch<'_>,
        cache: &mut B::Cache,
        activations: &mut Activations<B>,
    ) -> Result<(), KernelError> {
        let step = self.begin_step(batch, cache)?;
        self.run_decode(&step, batch, cache, activations)
    }

    /// The same for tokens that are still being drawn ([`Backend::begin_step_of_draws`]); its logits do not replace those that
    /// the tokens are drawn from. False, and nothing computed, if the host takes part in drawing them.
    pub fn decode_draws(
        &self,
        draws: &B::Draws,
        batch: &Batch<'_>,
        cache: &mut B::Cache,
        activations: &mut Activations<B>,
    ) -> Result<bool, KernelError> {
        let Some(step) = self.backend.begin_step_of_draws(draws, batch, &self.rope, cache)? else {
            return Ok(false);
        };
        let step = self.with_windows(step, cache)?;
        activations.latest = (activations.latest + 1) % activations.logits.len();
        self.run_decode(&step, batch, cache, activations)?;
        Ok(true)
    }

    fn run_decode(
        &self,
        step: &B::Step,
        batch: &Batch<'_>,
        cache: &mut B::Cache,
        activations: &mut Activations<B>,
    ) -> Result<(), KernelError> {
        let logit_rows: Vec<usize> = (0..batch.tokens.len()).collect();
        self.backend.record(step, activations.latest, &mut || {
            self.embed(batch, step, activations)?;
            self.run_layers(0..self.config.layers, step, &mut PagedAttention(cache), activations)?;
            self.logits(&logit_rows, activations)
        })
    }

    /// Fills the hidden states from the token embedding.
    pub fn embed(
        &self,
        batch: &Batch<'_>,
        step: &B::Step,
        activations: &mut Activations<B>,
    ) -> Result<(), KernelError> {
        if batch.tokens.len() > activations.max_rows {
            let (expected, got) = (activations.max_rows, batch.tokens.len());
            return Err(KernelError::Shape { what: "tokens of a step, at most", expected, got });
        }
        self.backend.embed(&self.weights.embedding, step, &mut activations.hidden)?;
        match self.config.style.embedding_scale {
            Some(scale) => self.backend.scale(step, scale, &mut activations.hidden),
            None => Ok(()),
        }
    }

    /// Takes the hidden states through some layers. A prompt can be computed layer by layer and chunk by chunk.
    pub fn run_layers(
        &self,
        layers: Range<usize>,
        step: &B::Step,
        attention: &mut dyn LayerAttention<B>,
        activations: &mut Activations<B>,
    ) -> Result<(), KernelError> {
        let Activations { hidden, qkv, attended, .. } = activations;
        for index in layers {
            let layer = &self.weights.layers[index];
            let [q, k, v] = &layer.qkv;
            self.backend.norm_linear(step, hidden, &layer.norm, &[q, k, v], qkv)?;
            attention.attend(&self.backend, step, &layer.attention, index, qkv, attended)?;
            match &layer.output_norm {
                None => self.backend.linear_add(step, attended, &layer.output, hidden)?,
                Some(norm) => self.backend.linear_norm_add(step, attended, &layer.output, norm, hidden)?,
            }
            match &layer.mlp {
                FeedForward::Dense(mlp) => self.backend.gated_mlp(step, mlp, hidden)?,
                FeedForward::Routed(mlp) => self.backend.routed_mlp(step, mlp, hidden)?,
            }
        }
        Ok(())
    }

    /// Logits of some rows of the hidden states.
    pub fn logits(&self, rows: &[usize], activations: &mut Activations<B>) -> Result<(), KernelError> {
        if rows.len() > activations.max_logit_rows {
            let (expected, got) = (activations.max_logit_rows, rows.len());
            return Err(KernelError::Shape { what: "rows with logits, at most", expected, got });
        }
        let head = self.weights.head.as_ref().unwrap_or(&self.weights.embedding);
        let Activations { hidden, logits, latest, .. } = activations;
        self.backend.logits(hidden, rows, &self.weights.norm, head, &mut logits[*latest])
    }

    /// Some rows of the hidden states after the final norm, on the host, one after the other. The output projection of
    /// such a row is its logits.
    pub fn final_hidden(
        &self,
        rows: Range<usize>,
        activations: &Activations<B>,
    ) -> Result<Vec<f32>, KernelError> {
        let count = rows.len();
        let mut values = self.backend.read(&activations.hidden, rows)?;
        let width = (values.len() / count.max(1)).max(1);
        for row in values.chunks_exact_mut(width) {
            let squares: f64 = row.iter().map(|&value| f64::from(value) * f64::from(value)).sum();
            let scale = 1.0 / (squares / width as f64 + f64::from(self.weights.norm.eps)).sqrt();
            for (value, gain) in row.iter_mut().zip(&self.weights.norm_gain) {
                *value = (f64::from(*value) * scale) as f32 * gain;
            }
        }
        Ok(values)
    }
}

impl<B: Backend> Activations<B> {
    /// Logits of the last step, in the order of its `logit_rows`.
    pub fn logits(&self) -> &B::Buffer {
        &self.logits[self.latest]
    }

    /// Where the logits of the last step are; those of a step of [`Model::decode_draws`] have another place.
    pub fn place_of_logits(&self) -> usize {
        self.latest
    }

    /// The logits that were computed there last.
    pub fn logits_at(&self, place: usize) -> &B::Buffer {
        &self.logits[place]
    }

    /// Hidden states of the last step, one row per token.
    pub fn hidden(&self) -> &B::Buffer {
        &self.hidden
    }

    /// The hidden states to be written: a prompt that was interrupted between layers continues from stored ones.
    pub fn hidden_mut(&mut self) -> &mut B::Buffer {
        &mut self.hidden
    }

    /// Most tokens that a step may have.
    pub fn max_rows(&self) -> usize {
        self.max_rows
    }
}
