//! The blocks of a layer as a device gets them: norms, projections, attention, feed-forward blocks.

use oscar_codec::RopeLayout;

use super::Backend;
use crate::routing::Routing;

/// A root-mean-square norm: `x / sqrt(mean(x²) + eps) * weight`.
pub struct RmsNorm<B: Backend + ?Sized> {
    /// Per-channel gain.
    pub weight: B::Weight,
    /// The number that is added to the mean square, so that a row of zeros is not divided by zero.
    pub eps: f32,
}

/// A projection `x · Wᵀ + bias`.
pub struct Linear<B: Backend + ?Sized> {
    /// The matrix, `[outputs, inputs]`.
    pub weight: B::Weight,
    /// One value per output.
    pub bias: Option<B::Weight>,
}

/// How the gate of a feed-forward block and what it is multiplied with become one.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Activation {
    /// `gate · sigmoid(gate) · up`.
    #[default]
    Silu,
    /// `gelu(gate) · up`, with GELU by its tanh approximation, `x/2 · (1 + tanh(√(2/π)(x + 0.044715 x³)))`.
    GeluTanh,
    /// `gate · sigmoid(alpha · gate) · (up + 1)`, where the gate is at most `limit`, and `up` between that and its negative
    /// (GPT-OSS).
    ClampedSwiglu {
        /// Factor on the gate inside the logistic function.
        alpha: f32,
        /// The largest number that takes part.
        limit: f32,
    },
}

/// The gated feed-forward block `x + output_norm(down(activation(gate(norm x)) * up(norm x)))`.
pub struct GatedMlp<B: Backend + ?Sized> {
    /// Applied to the input first.
    pub norm: RmsNorm<B>,
    /// What the gate goes through.
    pub activation: Activation,
    /// The projection whose outputs go through the activation.
    pub gate: Linear<B>,
    /// Multiplied with the activated gate.
    pub up: Linear<B>,
    /// Back to the hidden size.
    pub down: Linear<B>,
    /// Applied to the result before it is added (Gemma).
    pub output_norm: Option<RmsNorm<B>>,
}

/// The feed-forward block of a mixture of experts: `x + Σ weight · expert(norm x)` over the experts that the router chooses
/// for a row, and an expert that all rows share if there is one. An expert is `down(activation(gate x, up x))`.
pub struct RoutedMlp<B: Backend + ?Sized> {
    /// Applied to the input first; the router and all experts read the result.
    pub norm: RmsNorm<B>,
    /// The projection that gives each row one number per expert.
    pub router: Linear<B>,
    /// Added to the scores when experts are chosen, and not when they are weighed; one number per expert.
    pub correction: Option<B::Weight>,
    /// What becomes of the router's numbers.
    pub routing: Routing,
    /// How an expert's gate and what it is multiplied with become one.
    pub activation: Activation,
    /// The gates of all experts; they go through the activation.
    pub gate: B::Experts,
    /// Multiplied with the activated gates.
    pub up: B::Experts,
    /// Back to the hidden size.
    pub down: B::Experts,
    /// What experts add to their projections (GPT-OSS).
    pub biases: Option<ExpertBiases<B>>,
    /// The expert that every row goes to, with a weight of one.
    pub shared: Option<SharedExpert<B>>,
}

/// What the experts of a layer add to their projections: for each of them one row, of as many numbers as it has outputs.
pub struct ExpertBiases<B: Backend + ?Sized> {
    /// What is added to the gates.
    pub gate: B::Experts,
    /// What is added to the numbers that activated gates are multiplied with.
    pub up: B::Experts,
    /// What is added to the projections back to the hidden size.
    pub down: B::Experts,
}

/// An expert that every row goes to.
pub struct SharedExpert<B: Backend + ?Sized> {
    /// The projection whose outputs go through the activation.
    pub gate: Linear<B>,
    /// Multiplied with the activated gate.
    pub up: Linear<B>,
    /// Back to the hidden size.
    pub down: Linear<B>,
}

/// Shape of an attention layer and its optional per-head norms.
pub struct AttentionSpec<B: Backend + ?Sized> {
    /// The number of query heads.
    pub q_heads: usize,
    /// KV heads; divides `q_heads`.
    pub kv_heads: usize,
    /// The number of channels of a head.
    pub head_dim: usize,
    /// Logit scale, usually `1/sqrt(head_dim)`.
    pub scale: f32,
    /// A row sees itself and so many positions less one before it; `None` sees all. Layers with a window have rotary
    /// angles of their own ([`Backend::add_windows`]) and read bf16 pages only.
    pub window: Option<usize>,
    /// Whether queries and keys get rotary embedding (SmolLM3 has layers that do not).
    pub rotates: bool,
    /// One logit for each query head that takes part in the softmax of every row and has no value (GPT-OSS).
    pub sinks: Option<B::Weight>,
    /// Norm over each query head (Qwen3), with a gain of `head_dim`; or over all query heads together (MiniMax), with a
    /// gain of `q_heads * head_dim`.
    pub q_norm: Option<RmsNorm<B>>,
    /// The same for key heads.
    pub k_norm: Option<RmsNorm<B>>,
}

impl<B: Backend + ?Sized> AttentionSpec<B> {
    /// Columns of the fused query, key and value activations.
    pub fn qkv_cols(&self) -> usize {
        (self.q_heads + 2 * self.kv_heads) * self.head_dim
    }
}

/// Rotary position embedding, scaling already folded into the frequencies.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Angle per position of each pair; `rotary_dim / 2` of them.
    pub inverse_frequencies: Vec<f32>,
    /// Factor on cosine and sine (YaRN); 1 otherwise.
    pub magnitude: f32,
    /// Which channels form a pair.
    pub layout: RopeLayout,
}
