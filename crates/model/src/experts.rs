//! The weights of a layer with experts, from the tensors of either kind of file.
//!
//! GGUF files hold one tensor `[experts, outputs, inputs]` per projection, Hugging Face checkpoints one matrix per expert, which
//! may lie in different shards. Both are taken expert by expert, where they are: nothing is copied or read here. A third way is
//! that of [`crate::stacked_experts`].

use oscar_kernels::Backend;
use oscar_kernels::backend::{ExpertBiases, Linear, RoutedMlp, SharedExpert, StoredMatrix};
use oscar_kernels::quant::dequantise;

use crate::config::ExpertsConfig;
use crate::error::ModelError;
use crate::families::{ExpertLayout, ExpertNames};
use crate::names::TensorNaming;
use crate::scales::shape_text;
use crate::weights::Loader;

/// A projection of an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Projection {
    Gate,
    Up,
    Down,
}

impl Projection {
    /// Its name in GGUF files.
    fn gguf(self) -> &'static str {
        match self {
            Projection::Gate => "ffn_gate_exps",
            Projection::Up => "ffn_up_exps",
            Projection::Down => "ffn_down_exps",
        }
    }

    /// Its name in the Hugging Face checkpoints of a family.
    fn hugging_face(self, names: &ExpertNames) -> &'static str {
        match self {
            Projection::Gate => names.gate,
            Projection::Up => names.up,
            Projection::Down => names.down,
        }
    }

    /// Outputs and inputs.
    pub(crate) fn shape(self, hidden: usize, inner: usize) -> [usize; 2] {
        match self {
            Projection::Gate | Projection::Up => [inner, hidden],
            Projection::Down => [hidden, inner],
        }
    }
}

impl<B: Backend> Loader<'_, B> {
    pub(crate) fn routed_mlp(
        &self,
        layer: usize,
        experts: &ExpertsConfig,
    ) -> Result<RoutedMlp<B>, ModelError> {
        let (hidden, count) = (self.config.hidden_size, experts.count());
        let (prefix, names) = (self.naming.layer_prefix(layer), &experts.facts.names);
        let (router, correction) = match self.naming {
            TensorNaming::Gguf => ("ffn_gate_inp", names.correction.map(|_| "exp_probs_b.bias")),
            TensorNaming::HuggingFace => (names.router, names.correction),
        };
        let all = |projection| self.experts(layer, experts, projection);
        let shared = |inner| self.shared_expert(layer, experts, inner);
        Ok(RoutedMlp {
            norm: self.mlp_norm(layer)?,
            router: Linear {
                weight: self.finite(&format!("{prefix}{router}.weight"), count, hidden)?,
                bias: experts
                    .facts
                    .biases
                    .then(|| self.finite(&format!("{prefix}{router}.bias"), 1, count))
                    .transpose()?,
            },
            correction: correction
                .map(|name| self.finite(&format!("{prefix}{name}"), 1, count))
                .transpose()?,
            routing: experts.routing,
            activation: self.config.style.activation,
            gate: all(Projection::Gate)?,
            up: all(Projection::Up)?,
            down: all(Projection::Down)?,
            biases: experts.facts.biases.then(|| self.expert_biases(layer, experts)).transpose()?,
            shared: experts.shared_inner.map(shared).transpose()?,
        })
    }

    /// A small matrix that every row depends on: a number in it that is not finite would spoil all answers.
    pub(crate) fn finite(&self, name: &str, rows: usize, cols: usize) -> Result<B::Weight, ModelError> {
        let stored = self.stored(name, rows, cols)?;
        if stored.scales.is_some() {
            let problem = format!(
                "tensor `{name}` holds FP8 numbers, which are too few bits for what every row depends on"
            );
            return Err(ModelError::BadConfig { path: self.source.path().to_path_buf(), problem });
        }
        let mut values = vec![0.0; rows * cols];
        dequantise(stored.dtype, stored.data()?, &mut values);
        if let Some(value) = values.iter().find(|value| !value.is_finite()) {
            let problem = format!("tensor `{name}` holds {value}, expected finite numbers");
            return Err(ModelError::BadConfig { path: self.source.path().to_path_buf(), problem });
        }
        Ok(self.backend.weight(&stored)?)
    }

    fn experts(
        &self,
        layer: usize,
        experts: &ExpertsConfig,
        projection: Projection,
    ) -> Result<B::Experts, ModelError> {
        let (hidden, inner, count) = (self.config.hidden_size, experts.inner, experts.count());
        let [rows, cols] = projection.shape(hidden, inner);
        let (prefix, names) = (self.naming.layer_prefix(layer), &experts.facts.names);
        let name = projection.hugging_face(names);
        let stored: Vec<StoredMatrix> = match (self.naming, experts.facts.layout) {
            (TensorNaming::Gguf, _) => {
                self.stored_stack(&format!("{prefix}{}.weight", projection.gguf()), [count, rows, cols])?
            }
            (TensorNaming::HuggingFace, ExpertLayout::Apart) => {
                let tensor = |expert: usize| format!("{prefix}{}.{expert}.{name}.weight", names.experts);
                (0..count).map(|expert| self.stored(&tensor(expert), rows, cols)).collect::<Result<_, _>>()?
            }
            (TensorNaming::HuggingFace, ExpertLayout::Stacked) => {
                let name = format!("{prefix}{}.{name}", names.experts);
                self.stacked_experts(&name, projection, [count, rows, cols])?
            }
        };
        Ok(self.backend.experts(&stored)?)
    }

    fn expert_biases(&self, layer: usize, experts: &ExpertsConfig) -> Result<ExpertBiases<B>, ModelError> {
        let (hidden, inner, count) = (self.config.hidden_size, experts.inner, experts.count());
        let (prefix, names) = (self.naming.layer_prefix(layer), &experts.facts.names);
        let all = |projection: Projection| -> Result<B::Experts, ModelError> {
            let [outputs, _] = projection.shape(hidden, inner);
            let biases = match self.naming {
                TensorNaming::Gguf => {
                    let name = format!("{prefix}{}.bias", projection.gguf());
                    self.stored_rows(&name, count, outputs)?
                }
                TensorNaming::HuggingFace => {
                    let name = format!("{prefix}{}.{}_bias", names.experts, projection.hugging_face(names));
                    self.stacked_biases(&name, projection, count, outputs)?
                }
            };
            Ok(self.backend.experts(&biases)?)
        };
        Ok(ExpertBiases {
            gate: all(Projection::Gate)?,
            up: all(Projection::Up)?,
            down: all(Projection::Down)?,
        })
    }

    /// The rows of a matrix, each as one.
    pub(crate) fn stored_rows(
        &self,
        name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<Vec<StoredMatrix>, ModelError> {
        let all = self.stored(name, rows, cols)?;
        let bytes = all.data()?.len() / rows.max(1);
        let row = |row: usize| StoredMatrix { offset: all.offset + row * bytes, rows: 1, ..all.clone() };
        Ok((0..rows).map(row).collect())
    }

    /// The matrices of a tensor of three dimensions.
    fn stored_stack(&self, name: &str, shape: [usize; 3]) -> Result<Vec<StoredMatrix>, ModelError> {
        let tensor = self.source.get(name)?;
        if tensor.shape != shape {
            return Err(ModelError::TensorShape {
                path: tensor.path.to_path_buf(),
                tensor: name.to_owned(),
                expected: shape_text(&shape),
                got: shape_text(&tensor.shape),
            });
        }
        self.mark_used(name);
        Ok(tensor.matrices()?)
    }

    fn shared_expert(
        &self,
        layer: usize,
        experts: &ExpertsConfig,
        inner: usize,
    ) -> Result<SharedExpert<B>, ModelError> {
        let (hidden, prefix) = (self.config.hidden_size, self.naming.layer_prefix(layer));
        let [gate, up, down] = match self.naming {
            TensorNaming::Gguf => ["ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"].map(str::to_owned),
            TensorNaming::HuggingFace => {
                let (names, shared) = (&experts.facts.names, experts.facts.names.shared.unwrap_or_default());
                [names.gate, names.up, names.down].map(|name| format!("{shared}.{name}"))
            }
        };
        let linear = |name: &str, rows, cols| self.linear(&format!("{prefix}{name}"), rows, cols, false);
        Ok(SharedExpert {
            gate: linear(&gate, inner, hidden)?,
            up: linear(&up, inner, hidden)?,
            down: linear(&down, hidden, inner)?,
        })
    }
}
