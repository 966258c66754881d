//! The names of tensors in each kind of file.

use crate::config::ModelConfig;

/// A tensor of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LayerTensor {
    AttentionNorm,
    Query,
    Key,
    Value,
    Output,
    /// The learned sinks of query heads; the name is whole.
    Sinks,
    QueryNorm,
    KeyNorm,
    MlpNorm,
    /// [`Self::MlpNorm`] where attention has a norm after it too.
    MlpNormBetween,
    /// After attention, before its result is added.
    AttentionOutputNorm,
    /// After the feed-forward block, before its result is added.
    MlpOutputNorm,
    Gate,
    Up,
    Down,
    /// Query, key and value projections in one.
    FusedQkv,
    /// Gate and up projections in one.
    FusedGateUp,
}

/// The names of tensors in one kind of file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TensorNaming {
    Gguf,
    HuggingFace,
}

impl TensorNaming {
    pub(crate) fn embedding(self) -> &'static str {
        match self {
            TensorNaming::Gguf => "token_embd.weight",
            TensorNaming::HuggingFace => "model.embed_tokens.weight",
        }
    }

    pub(crate) fn final_norm(self) -> &'static str {
        match self {
            TensorNaming::Gguf => "output_norm.weight",
            TensorNaming::HuggingFace => "model.norm.weight",
        }
    }

    pub(crate) fn head(self) -> &'static str {
        match self {
            TensorNaming::Gguf => "output.weight",
            TensorNaming::HuggingFace => "lm_head.weight",
        }
    }

    /// Name of a layer's tensor without `.weight` or `.bias`.
    pub(crate) fn layer_tensor(self, layer: usize, tensor: LayerTensor) -> String {
        match self {
            TensorNaming::Gguf => {
                let part = match tensor {
                    LayerTensor::AttentionNorm => "attn_norm",
                    LayerTensor::Query => "attn_q",
                    LayerTensor::Key => "attn_k",
                    LayerTensor::Value => "attn_v",
                    LayerTensor::Output => "attn_output",
                    LayerTensor::Sinks => "attn_sinks.weight",
                    LayerTensor::QueryNorm => "attn_q_norm",
                    LayerTensor::KeyNorm => "attn_k_norm",
                    LayerTensor::MlpNorm | LayerTensor::MlpNormBetween => "ffn_norm",
                    LayerTensor::AttentionOutputNorm => "post_attention_norm",
                    LayerTensor::MlpOutputNorm => "post_ffw_norm",
                    LayerTensor::Gate => "ffn_gate",
                    LayerTensor::Up => "ffn_up",
                    LayerTensor::Down => "ffn_down",
                    LayerTensor::FusedQkv => "attn_qkv",
                    LayerTensor::FusedGateUp => "ffn_up",
                };
                format!("blk.{layer}.{part}")
            }
            TensorNaming::HuggingFace => {
                let part = match tensor {
                    LayerTensor::AttentionNorm => "input_layernorm",
                    LayerTensor::Query => "self_attn.q_proj",
                    LayerTensor::Key => "self_attn.k_proj",
                    LayerTensor::Value => "self_attn.v_proj",
                    LayerTensor::Output => "self_attn.o_proj",
                    LayerTensor::Sinks => "self_attn.sinks",
                    LayerTensor::QueryNorm => "self_attn.q_norm",
                    LayerTensor::KeyNorm => "self_attn.k_norm",
                    LayerTensor::MlpNorm | LayerTensor::AttentionOutputNorm => "post_attention_layernorm",
                    LayerTensor::MlpNormBetween => "pre_feedforward_layernorm",
                    LayerTensor::MlpOutputNorm => "post_feedforward_layernorm",
                    LayerTensor::Gate => "mlp.gate_proj",
                    LayerTensor::Up => "mlp.up_proj",
                    LayerTensor::Down => "mlp.down_proj",
                    LayerTensor::FusedQkv => "self_attn.qkv_proj",
                    LayerTensor::FusedGateUp => "mlp.gate_up_proj",
                };
                format!("model.layers.{layer}.{part}")
            }
        }
    }

    /// What the names of a layer's tensors begin with.
    pub(crate) fn layer_prefix(self, layer: usize) -> String {
        match self {
            TensorNaming::Gguf => format!("blk.{layer}."),
            TensorNaming::HuggingFace => format!("model.layers.{layer}."),
        }
    }

    /// Whether a tensor belongs to a layer that the model has and this program does not run.
    pub(crate) fn is_of_further_layer(self, name: &str, config: &ModelConfig) -> bool {
        let mut further = config.layers..config.layers + config.further_layers;
        further.any(|layer| name.starts_with(&self.layer_prefix(layer)))
    }

    /// Whether a tensor that the model does not use may be there all the same.
    pub(crate) fn may_ignore(self, name: &str, tied: bool) -> bool {
        match self {
            // Read while the rotary frequencies are set up.
            TensorNaming::Gguf => {
                ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"].contains(&name)
            }
            // Old checkpoints store the frequencies, and some tied ones store the embedding a second time.
            TensorNaming::HuggingFace => {
                name.ends_with(".rotary_emb.inv_freq") || tied && name == self.head()
            }
        }
    }
}
