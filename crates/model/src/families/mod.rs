//! Model families. A family is a table of facts; the loader and the forward pass are shared by all.
//!
//! A new family is a new file and a line in [`FAMILIES`].

pub(crate) mod gemma3;
mod llama;
mod qwen2;
mod qwen3;

use oscar_kernels::backend::RopeLayout;

/// All families, by name.
pub(crate) const FAMILIES: [&ModelFamily; 4] = [&gemma3::GEMMA3, &llama::LLAMA, &qwen2::QWEN2, &qwen3::QWEN3];

/// What sets a family of models apart from the others.
#[derive(Debug, PartialEq, Eq)]
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
    /// Whether query and key heads are normed before RoPE.
    pub head_norms: bool,
}

/// Whether projections have a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bias {
    /// Every model of the family has it.
    Always,
    /// As `attention_bias` in `config.json` says; in a GGUF file, if the tensors are there.
    IfDeclared,
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
