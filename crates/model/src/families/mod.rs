//! Model families. A family is a table of facts; the loader and the forward pass are shared by all.
//!
//! A new family is a new file and a line in [`FAMILIES`].

mod experts;
pub(crate) mod gemma3;
mod glm4_moe;
mod gpt_oss;
mod granite;
mod llama;
mod minimax_m2;
mod mistral;
mod phi3;
mod qwen2;
mod qwen3;
mod qwen3_moe;
mod smollm3;
mod style;

pub(crate) use experts::{ExpertFacts, ExpertLayout, ExpertNames, Normalise};
pub(crate) use style::{ActivationField, BlockShape, FieldName, StyleFacts};

use oscar_kernels::backend::RopeLayout;

use crate::config::QkNorm;

/// All families, by name.
pub(crate) const FAMILIES: [&ModelFamily; 12] = [
    &llama::LLAMA,
    &qwen2::QWEN2,
    &qwen3::QWEN3,
    &qwen3_moe::QWEN3_MOE,
    &glm4_moe::GLM4_MOE,
    &minimax_m2::MINIMAX_M2,
    &gemma3::GEMMA3,
    &gpt_oss::GPT_OSS,
    &mistral::MISTRAL,
    &smollm3::SMOLLM3,
    &granite::GRANITE,
    &phi3::PHI3,
];

/// What sets a family of models apart from the others.
#[derive(Debug)]
pub(crate) struct ModelFamily {
    /// Short name, as in `ModelConfig::family`.
    pub name: &'static str,
    /// `general.architecture` of its GGUF files.
    pub gguf_architecture: &'static str,
    /// `model_type` of its `config.json`.
    pub model_type: &'static str,
    /// Which channels rotate together in its GGUF files; Hugging Face checkpoints always use halves.
    pub gguf_rope: RopeLayout,
    /// Whether query, key and value projections have a bias.
    pub qkv_bias: Bias,
    /// Whether queries and keys are normed before RoPE.
    pub head_norms: NormRule,
    /// A head's channels over those that rotate, where a description does not say how many do.
    pub rotary_divisor: usize,
    /// What there is to know about experts, in a family that has them.
    pub experts: Option<&'static ExpertFacts>,
    /// What there is to know about blocks, in a family whose blocks are not the plain ones.
    pub style: Option<&'static StyleFacts>,
}

/// Whether queries and keys are normed before RoPE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NormRule {
    /// No model of the family norms them.
    Never,
    /// Every model norms each head by itself.
    Heads,
    /// Each head by itself, where `use_qk_norm` in `config.json` says so; in a GGUF file, if the tensors are there.
    HeadsIfDeclared,
    /// All heads of a layer together, in every model.
    Layer,
}

impl NormRule {
    /// The norms of a model that does, or does not, say that it has them.
    pub(crate) fn norms(self, declared: bool) -> QkNorm {
        match self {
            NormRule::Never => QkNorm::None,
            NormRule::Heads => QkNorm::Heads,
            NormRule::HeadsIfDeclared if declared => QkNorm::Heads,
            NormRule::HeadsIfDeclared => QkNorm::None,
            NormRule::Layer => QkNorm::Layer,
        }
    }
}

/// Whether projections have a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bias {
    /// Every model of the family has it.
    Always,
    /// As `attention_bias` in `config.json` says; in a GGUF file, if the tensors are there. The output projection has one
    /// too.
    IfDeclared,
    /// The same, but the output projection never has one.
    IfDeclaredWithoutOutput,
    /// All four have one, unless `attention_bias` in `config.json` says no; in a GGUF file, if the tensors are there.
    UnlessDenied,
}

impl Bias {
    /// Whether query, key and value projections, and whether the output projection, have a bias, from what a description
    /// declares.
    pub(crate) fn of_projections(self, declared: Option<bool>) -> (bool, bool) {
        let has = declared.unwrap_or(self == Bias::UnlessDenied);
        (self == Bias::Always || has, matches!(self, Bias::IfDeclared | Bias::UnlessDenied) && has)
    }
}

/// The family of a GGUF architecture.
pub(crate) fn by_gguf_architecture(architecture: &str) -> Option<&'static ModelFamily> {
    FAMILIES.into_iter().find(|family| family.gguf_architecture == architecture)
}

/// The family of a `model_type`.
pub(crate) fn by_model_type(model_type: &str) -> Option<&'static ModelFamily> {
    FAMILIES.into_iter().find(|family| family.model_type == model_type)
}

/// Names of all families, for messages.
pub(crate) fn names() -> String {
    FAMILIES.map(|family| family.name).join(", ")
}
