//! What tensors are called in each kind of file.

/// A tensor of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    AttentionNorm,
    Query,
    Key,
    Value,
    Output,
    QueryNorm,
    KeyNorm,
    MlpNorm,
    Gate,
    Up,
    Down,
}

/// A naming scheme.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Naming {
    Gguf,
    HuggingFace,
}

impl Naming {
    pub(crate) fn embedding(self) -> &'static str {
        match self {
            Naming::Gguf => "token_embd.weight",
            Naming::HuggingFace => "model.embed_tokens.weight",
        }
    }

    pub(crate) fn final_norm(self) -> &'static str {
        match self {
            Naming::Gguf => "output_norm.weight",
            Naming::HuggingFace => "model.norm.weight",
        }
    }

    pub(crate) fn head(self) -> &'static str {
        match self {
            Naming::Gguf => "output.weight",
            Naming::HuggingFace => "lm_head.weight",
        }
    }

    /// Name of a layer's tensor without `.weight` or `.bias`.
    pub(crate) fn part(self, layer: usize, part: Part) -> String {
        match self {
            Naming::Gguf => {
                let part = match part {
                    Part::AttentionNorm => "attn_norm",
                    Part::Query => "attn_q",
                    Part::Key => "attn_k",
                    Part::Value => "attn_v",
                    Part::Output => "attn_output",
                    Part::QueryNorm => "attn_q_norm",
                    Part::KeyNorm => "attn_k_norm",
                    Part::MlpNorm => "ffn_norm",
                    Part::Gate => "ffn_gate",
                    Part::Up => "ffn_up",
                    Part::Down => "ffn_down",
                };
                format!("blk.{layer}.{part}")
            }
            Naming::HuggingFace => {
                let part = match part {
                    Part::AttentionNorm => "input_layernorm",
                    Part::Query => "self_attn.q_proj",
                    Part::Key => "self_attn.k_proj",
                    Part::Value => "self_attn.v_proj",
                    Part::Output => "self_attn.o_proj",
                    Part::QueryNorm => "self_attn.q_norm",
                    Part::KeyNorm => "self_attn.k_norm",
                    Part::MlpNorm => "post_attention_layernorm",
                    Part::Gate => "mlp.gate_proj",
                    Part::Up => "mlp.up_proj",
                    Part::Down => "mlp.down_proj",
                };
                format!("model.layers.{layer}.{part}")
            }
        }
    }

    /// Whether a tensor that the model does not use may be there all the same.
    pub(crate) fn may_ignore(self, name: &str, tied: bool) -> bool {
        match self {
            // Read while the rotary frequencies are set up.
            Naming::Gguf => name == "rope_freqs.weight",
            // Old checkpoints store the frequencies, and some tied ones store the embedding a second time.
            Naming::HuggingFace => name.ends_with(".rotary_emb.inv_freq") || tied && name == self.head(),
        }
    }
}
