//! Weights of a model, taken from a container and handed to a backend.
//!
//! Every tensor is checked against the model's description, and every tensor of the file must be used: a file with
//! tensors left over is a model that this program does not know.

use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::Arc;

use oscar_kernels::backend::{AttentionSpec, GatedMlp, Linear, RmsNorm, RoutedMlp, StoredMatrix};
use oscar_kernels::quant::dequantise;
use oscar_kernels::{Backend, DType};

use crate::config::{ModelConfig, QkNorm};
use crate::error::ModelError;
use crate::files::TensorSource;
use crate::names::{LayerTensor, TensorNaming};

/// The weights of one transformer layer.
pub struct LayerWeights<B: Backend> {
    /// The norm before attention.
    pub norm: RmsNorm<B>,
    /// Query, key and value projections.
    pub qkv: [Linear<B>; 3],
    /// Number of heads, softmax scale and head norms.
    pub attention: AttentionSpec<B>,
    /// The projection of what attention gives back to the hidden states.
    pub output: Linear<B>,
    /// Norm of what it returns.
    pub output_norm: Option<RmsNorm<B>>,
    /// The feed-forward block, dense or with experts.
    pub mlp: FeedForward<B>,
}

/// The feed-forward block of a layer.
pub enum FeedForward<B: Backend> {
    /// The same weights for every row.
    Dense(GatedMlp<B>),
    /// Experts that a router chooses.
    Routed(RoutedMlp<B>),
}

/// All weights of a model.
pub struct ModelWeights<B: Backend> {
    /// The embedding table, with a row for each token.
    pub embedding: B::Weight,
    /// The layers, first to last.
    pub layers: Vec<LayerWeights<B>>,
    /// Norm before the output projection.
    pub norm: RmsNorm<B>,
    /// The gain of that norm on the host, for those who want hidden states there.
    pub norm_gain: Vec<f32>,
    /// Output projection; `None` when it is the embedding.
    pub head: Option<B::Weight>,
}

impl<B: Backend> ModelWeights<B> {
    /// Loads the weights that `config` describes; `on_layer` hears how many layers are loaded.
    pub(crate) fn load(
        backend: &B,
        source: &dyn TensorSource,
        naming: TensorNaming,
        config: &ModelConfig,
        mut on_layer: impl FnMut(usize),
    ) -> Result<ModelWeights<B>, ModelError> {
        let loader = Loader { backend, source, config, naming, used: RefCell::default() };
        let embedding = loader.matrix(naming.embedding(), config.vocab_size, config.hidden_size)?;
        let norm_gain = loader.vector(naming.final_norm(), config.hidden_size)?;
        let norm_gain: Vec<f32> = norm_gain.iter().map(|gain| gain * config.style.logit_scale).collect();
        let norm = loader.norm_with(&norm_gain)?;
        let tied = config.tied_embeddings.unwrap_or_else(|| !source.contains(naming.head()));
        let head = if tied {
            None
        } else {
            Some(loader.matrix(naming.head(), config.vocab_size, config.hidden_size)?)
        };
        // No room ahead of time: the number may lie, and the tensors tell.
        let mut layers = Vec::new();
        for layer in 0..config.layers {
            layers.push(loader.layer(layer)?);
            on_layer(layers.len());
        }
        loader.check_all_tensors_used(tied)?;
        Ok(ModelWeights { embedding, layers, norm, norm_gain, head })
    }
}

/// Takes tensors from a container to a device.
pub(crate) struct Loader<'a, B: Backend> {
    pub(crate) backend: &'a B,
    pub(crate) source: &'a dyn TensorSource,
    pub(crate) config: &'a ModelConfig,
    pub(crate) naming: TensorNaming,
    used: RefCell<HashSet<String>>,
}

impl<B: Backend> Loader<'_, B> {
    fn layer(&self, layer: usize) -> Result<LayerWeights<B>, ModelError> {
        let config = self.config;
        let (hidden, d) = (config.hidden_size, config.head_dim);
        let (q, kv) = (config.q_heads * d, config.kv_heads * d);
        let linear =
            |part, rows, cols, bias| self.linear(&self.naming.layer_tensor(layer, part), rows, cols, bias);
        let norm = |part, len| self.norm(&format!("{}.weight", self.naming.layer_tensor(layer, part)), len);
        let of_heads = |norm| Some(RmsNorm { eps: config.norm_eps, ..norm });
        let head_norm = |part, heads: usize| match config.head_norms {
            QkNorm::None => Ok(None),
            QkNorm::Heads => norm(part, d).map(of_heads),
            QkNorm::Layer => norm(part, heads * d).map(of_heads),
        };
        Ok(LayerWeights {
            norm: norm(LayerTensor::AttentionNorm, hidden)?,
            qkv: match config.style.fused_projections {
                true => self.parts_of(layer, LayerTensor::FusedQkv, [q, kv, kv], hidden)?,
                false => [
                    linear(LayerTensor::Query, q, hidden, config.qkv_bias)?,
                    linear(LayerTensor::Key, kv, hidden, config.qkv_bias)?,
                    linear(LayerTensor::Value, kv, hidden, config.qkv_bias)?,
                ],
            },
            attention: AttentionSpec {
                q_heads: config.q_heads,
                kv_heads: config.kv_heads,
                head_dim: d,
                scale: config.style.attention_scale,
                window: config.window(layer),
                rotates: !config.style.unrotated.contains(&layer),
                sinks: self.sinks(layer)?,
                q_norm: head_norm(LayerTensor::QueryNorm, config.q_heads)?,
                k_norm: head_norm(LayerTensor::KeyNorm, config.kv_heads)?,
            },
            output: linear(LayerTensor::Output, hidden, q, config.output_bias)?,
            output_norm: self.output_norm(layer, LayerTensor::AttentionOutputNorm)?,
            mlp: match config.experts.as_ref().filter(|experts| experts.routed[layer]) {
                Some(experts) => FeedForward::Routed(self.routed_mlp(layer, experts)?),
                None => FeedForward::Dense(self.dense_mlp(layer)?),
            },
        })
    }

    /// The learned sinks of a layer, in models that have them.
    fn sinks(&self, layer: usize) -> Result<Option<B::Weight>, ModelError> {
        let name = self.naming.layer_tensor(layer, LayerTensor::Sinks);
        self.config.style.learned_sinks.then(|| self.finite(&name, 1, self.config.q_heads)).transpose()
    }

    fn dense_mlp(&self, layer: usize) -> Result<GatedMlp<B>, ModelError> {
        let (hidden, inner) = (self.config.hidden_size, self.config.intermediate_size);
        let linear = |part, rows, cols| {
            self.linear(&self.naming.layer_tensor(layer, part), rows, cols, self.config.mlp_bias)
        };
        let [gate, up] = match self.config.style.fused_projections {
            true => self.parts_of(layer, LayerTensor::FusedGateUp, [inner, inner], hidden)?,
            false => [linear(LayerTensor::Gate, inner, hidden)?, linear(LayerTensor::Up, inner, hidden)?],
        };
        Ok(GatedMlp {
            norm: self.mlp_norm(layer)?,
            activation: self.config.style.activation,
            gate,
            up,
            down: linear(LayerTensor::Down, hidden, inner)?,
            output_norm: self.output_norm(layer, LayerTensor::MlpOutputNorm)?,
        })
    }

    /// The projections whose outputs follow each other in one matrix, each where it lies.
    fn parts_of<const N: usize>(
        &self,
        layer: usize,
        tensor: LayerTensor,
        outputs: [usize; N],
        cols: usize,
    ) -> Result<[Linear<B>; N], ModelError> {
        let name = format!("{}.weight", self.naming.layer_tensor(layer, tensor));
        let all = self.stored(&name, outputs.iter().sum(), cols)?;
        if all.scales.is_some() {
            let problem = format!("tensor `{name}` holds FP8 numbers, which fused projections cannot");
            return Err(ModelError::BadConfig { path: self.source.path().to_path_buf(), problem });
        }
        let row_bytes = all.data()?.len() / all.rows.max(1);
        let mut offset = all.offset;
        let parts = outputs.map(|rows| {
            let part = StoredMatrix { offset, rows, ..all.clone() };
            offset += rows * row_bytes;
            part
        });
        let mut linears = Vec::with_capacity(N);
        for part in &parts {
            linears.push(Linear { weight: self.backend.weight(part)?, bias: None });
        }
        linears.try_into().map_err(|_| unreachable!("one projection for each part"))
    }

    /// A norm of what a block returns, in models that have them.
    fn output_norm(&self, layer: usize, part: LayerTensor) -> Result<Option<RmsNorm<B>>, ModelError> {
        let name = || format!("{}.weight", self.naming.layer_tensor(layer, part));
        let has = self.config.style.output_norms;
        has.then(|| self.norm(&name(), self.config.hidden_size)).transpose()
    }

    /// The norm before the feed-forward block.
    pub(crate) fn mlp_norm(&self, layer: usize) -> Result<RmsNorm<B>, ModelError> {
        let name = match (self.naming, &self.config.experts) {
            (TensorNaming::Gguf, Some(experts)) => {
                format!("{}{}", self.naming.layer_prefix(layer), experts.facts.gguf_norm)
            }
            _ if self.config.style.output_norms => {
                self.naming.layer_tensor(layer, LayerTensor::MlpNormBetween)
            }
            _ => self.naming.layer_tensor(layer, LayerTensor::MlpNorm),
        };
        self.norm(&format!("{name}.weight"), self.config.hidden_size)
    }

    pub(crate) fn linear(
        &self,
        name: &str,
        rows: usize,
        cols: usize,
        bias: bool,
    ) -> Result<Linear<B>, ModelError> {
        Ok(Linear {
            weight: self.matrix(&format!("{name}.weight"), rows, cols)?,
            bias: bias.then(|| self.matrix(&format!("{name}.bias"), 1, rows)).transpose()?,
        })
    }

    fn norm(&self, name: &str, len: usize) -> Result<RmsNorm<B>, ModelError> {
        if self.config.style.norm_offset == 0.0 {
            return Ok(RmsNorm { weight: self.matrix(name, 1, len)?, eps: self.eps() });
        }
        self.norm_with(&self.vector(name, len)?)
    }

    /// A norm with a gain that is no longer the file's.
    fn norm_with(&self, gain: &[f32]) -> Result<RmsNorm<B>, ModelError> {
        let bytes: Vec<u8> = gain.iter().flat_map(|gain| gain.to_le_bytes()).collect();
        let gain = StoredMatrix {
            bytes: Arc::new(bytes),
            offset: 0,
            dtype: DType::F32,
            rows: 1,
            cols: gain.len(),
            scales: None,
        };
        Ok(RmsNorm { weight: self.backend.weight(&gain)?, eps: self.eps() })
    }

    /// The epsilon of norms of the residual stream, which is kept divided by what blocks are multiplied with.
    fn eps(&self) -> f32 {
        self.config.norm_eps / self.config.style.residual_scale.powi(2)
    }

    /// The gain of a norm on the host.
    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, ModelError> {
        let stored = self.stored(name, 1, len)?;
        let mut values = vec![0.0; len];
        dequantise(stored.dtype, stored.data()?, &mut values);
        values.iter_mut().for_each(|value| *value += self.config.style.norm_offset);
        Ok(values)
    }

    pub(crate) fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<B::Weight, ModelError> {
        Ok(self.backend.weight(&self.stored(name, rows, cols)?)?)
    }

    /// A matrix of the file, which counts as used.
    pub(crate) fn stored(&self, name: &str, rows: usize, cols: usize) -> Result<StoredMatrix, ModelError> {
        let tensor = self.source.get(name)?;
        let mut stored: StoredMatrix = tensor.matrix()?;
        if (stored.rows, stored.cols) != (rows, cols) {
            return Err(ModelError::TensorShape {
                path: tensor.path.to_path_buf(),
                tensor: name.to_owned(),
                expected: format!("{rows}x{cols}"),
                got: format!("{}x{}", stored.rows, stored.cols),
            });
        }
        self.mark_used(name);
        stored.scales = self.scales(name, stored.dtype, [rows, cols])?;
        Ok(stored)
    }

    pub(crate) fn mark_used(&self, name: &str) {
        self.used.borrow_mut().insert(name.to_owned());
    }

    fn check_all_tensors_used(&self, tied: bool) -> Result<(), ModelError> {
        let used = self.used.borrow();
        let known = |name: &str| {
            used.contains(name)
                || self.naming.may_ignore(name, tied)
                || self.naming.is_of_further_layer(name, self.config)
        };
        match self.source.names().find(|name| !known(name)) {
            None => Ok(()),
            Some(name) => Err(ModelError::UnexpectedTensor {
                path: self.source.path().to_path_buf(),
                tensor: name.to_owned(),
                family: self.config.family,
            }),
        }
    }
}
