//! The door between a forward pass and a device.
//!
//! The operations are as large as a device can fuse: a norm with the projections that follow it, QK-norm with
//! RoPE and the cache write, a whole gated MLP. Weights, activations and page pools are the backend's own types,
//! so nothing crosses the door per layer but descriptors. Tables that hold for a whole step (positions, page
//! tables, rotary angles) are prepared once in [`Backend::begin_step`].

use std::ops::Range;
use std::sync::Arc;

use oscar_codec::{CodecError, ExactSlot, HostCopy, KvGeometry, PageCodec, PageWindows, SealedSlot};

use crate::dtype::DType;
use crate::quant::fp8::BlockScales;
use crate::routing::Routing;

/// Bytes owned by somebody else (a file mapping, a vector), shared without a copy.
pub type SharedBytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// A stored matrix before it is handed to a backend: `rows` output channels of `cols` inputs, row-major.
#[derive(Clone)]
pub struct StoredMatrix {
    /// The bytes that contain the matrix.
    pub bytes: SharedBytes,
    /// Where it starts inside `bytes`.
    pub offset: usize,
    /// Element type.
    pub dtype: DType,
    /// Number of rows (output channels); 1 for a vector.
    pub rows: usize,
    /// Number of columns (input channels).
    pub cols: usize,
    /// What elements are multiplied with; FP8 matrices have them.
    pub scales: Option<Arc<BlockScales>>,
}

impl StoredMatrix {
    /// The bytes of the matrix, or an error if the description does not fit them.
    pub fn data(&self) -> Result<&[u8], KernelError> {
        let all: &[u8] = (*self.bytes).as_ref();
        self.byte_len()
            .and_then(|len| all.get(self.offset..self.offset.checked_add(len)?))
            .ok_or(KernelError::MatrixOutOfBounds { rows: self.rows, cols: self.cols, dtype: self.dtype })
    }

    fn byte_len(&self) -> Option<usize> {
        self.dtype.bytes_for(self.cols)?.checked_mul(self.rows)
    }
}

/// What can go wrong in a backend.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
#[non_exhaustive]
pub enum KernelError {
    #[error("a {rows}x{cols} {dtype} matrix does not fit the bytes it was given")]
    MatrixOutOfBounds { rows: usize, cols: usize, dtype: DType },
    #[error("{what}: expected {expected}, got {got}")]
    Shape { what: &'static str, expected: usize, got: usize },
    #[error("token id {token} is outside the vocabulary of {vocab}")]
    TokenOutOfRange { token: u32, vocab: usize },
    #[error("page slot {slot} is outside the pool of {slots} pages")]
    PageOutOfRange { slot: u32, slots: usize },
    #[error("cannot allocate {bytes} bytes for {what}")]
    OutOfMemory { what: &'static str, bytes: usize },
    #[error("page {page} of {tier} is read but has no slot")]
    PageMissing { page: usize, tier: &'static str },
    #[error("sealing entry {page} of the list, layer {layer}, KV head {head}: {source}")]
    Seal { page: usize, layer: usize, head: usize, source: CodecError },
    #[error("{what} hold a value that is not finite at index {index}")]
    NotFinite { what: &'static str, index: usize },
    #[error("page slot {slot} is written by two sequences of one step")]
    PageWrittenTwice { slot: u32 },
    #[error(transparent)]
    Cuda(#[from] crate::cuda::CudaError),
    #[error("{0}")]
    BadSetting(String),
    #[error("{0} are not supported on this device yet; run the model on the CPU (`--device cpu`)")]
    Unsupported(Feature),
}

/// Two sizes that must be equal; `what` names them in the error.
pub(crate) fn expect(what: &'static str, expected: usize, got: usize) -> Result<(), KernelError> {
    if expected == got { Ok(()) } else { Err(KernelError::Shape { what, expected, got }) }
}

/// A root-mean-square norm: `x / sqrt(mean(x²) + eps) * weight`.
pub struct RmsNorm<B: Backend + ?Sized> {
    /// Per-channel gain.
    pub weight: B::Weight,
    /// Added to the mean square.
    pub eps: f32,
}

/// A projection `x · Wᵀ + bias`.
pub struct Linear<B: Backend + ?Sized> {
    /// `[outputs, inputs]`.
    pub weight: B::Weight,
    /// One value per output.
    pub bias: Option<B::Weight>,
}

/// What some families need beyond the plain transformer; see [`Backend::supports`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Feature {
    /// [`AttentionSpec::window`] and [`Backend::add_windows`].
    SlidingWindows,
    /// [`Backend::linear_norm_add`] and [`GatedMlp::output_norm`].
    OutputNorms,
    /// [`Activation::GeluTanh`].
    GeluTanh,
    /// [`Backend::scale`].
    ScaledEmbeddings,
    /// [`AttentionSpec::sinks`].
    LearnedSinks,
    /// [`Activation::ClampedSwiglu`].
    ClampedSwiglu,
    /// [`RoutedMlp::biases`].
    ExpertBiases,
    /// Layers without [`AttentionSpec::rotates`].
    LayersWithoutRope,
    /// [`CacheSpec::host`] and [`Backend::copy_host_pages`].
    HostPages,
    /// [`SealedSpec::high`].
    HighTier,
}

impl std::fmt::Display for Feature {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Feature::SlidingWindows => "sliding windows",
            Feature::OutputNorms => "norms of a block's output",
            Feature::GeluTanh => "GELU activations",
            Feature::ScaledEmbeddings => "scaled embeddings",
            Feature::LearnedSinks => "learned sinks",
            Feature::ClampedSwiglu => "clamped activations",
            Feature::ExpertBiases => "biases of experts",
            Feature::LayersWithoutRope => "layers without rotary embedding",
            Feature::HostPages => "pages in the host's memory",
            Feature::HighTier => "sealed pages of two codecs (`--kv-tiers high`)",
        })
    }
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
    /// Goes through the activation.
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
    /// One number per expert.
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
    /// Goes through the activation.
    pub gate: Linear<B>,
    /// Multiplied with the activated gate.
    pub up: Linear<B>,
    /// Back to the hidden size.
    pub down: Linear<B>,
}

/// Shape of an attention layer and its optional per-head norms.
pub struct AttentionSpec<B: Backend + ?Sized> {
    /// Query heads.
    pub q_heads: usize,
    /// KV heads; divides `q_heads`.
    pub kv_heads: usize,
    /// Channels per head.
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

/// Which channels of a head rotate together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeLayout {
    /// Channel `i` with `i + rotary_dim/2` (Hugging Face checkpoints, Qwen GGUF files).
    Halves,
    /// Channel `2i` with `2i + 1` (Llama GGUF files).
    Interleaved,
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

/// Size of the page pools of a cache. Slot 0 of every pool is a dummy that padded rows may name.
#[derive(Clone, Debug)]
pub struct CacheSpec {
    /// Layers, KV heads and head dimension.
    pub geometry: KvGeometry,
    /// Query heads of a layer, which read the KV heads in equal groups.
    pub query_heads: usize,
    /// Slots of bf16 pages.
    pub slots: usize,
    /// Slots of bf16 pages that hold one layer only: a prompt on its way to sealed pages, layer by layer. They follow
    /// the bf16 slots in number, `slots..slots + scratch_slots`.
    pub scratch_slots: usize,
    /// The sealed pages, if pages are ever sealed.
    pub sealed: Option<SealedSpec>,
    /// Room in the host's memory for pages that leave the device.
    pub host: HostSlots,
}

/// Slots in the host's memory, the dummies included, which hold nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostSlots {
    /// Slots that hold a bf16 page each.
    pub exact: usize,
    /// Slots that hold a sealed page each.
    pub sealed: usize,
}

/// The sealed pages of a cache.
#[derive(Clone, Debug)]
pub struct SealedSpec {
    /// What sealed bytes mean, and the maps that rows go through before they are stored in any pool.
    pub codec: Arc<PageCodec>,
    /// Slots of sealed pages.
    pub slots: usize,
    /// Which pages a query reads exactly.
    pub windows: PageWindows,
    /// Sealed pages of a second codec, if some sequences have those instead; see [`Feature::HighTier`].
    pub high: Option<HighSpec>,
}

/// Sealed pages of a codec of more bits. All sealed pages of a sequence are of one codec.
#[derive(Clone, Debug)]
pub struct HighSpec {
    /// [`PageCodec::high`] of the codec beside it: rows go through the same maps.
    pub codec: Arc<PageCodec>,
    /// Slots of its pages. They follow those of the other codec in number.
    pub slots: usize,
}

impl SealedSpec {
    /// Slots of sealed pages of either codec.
    pub fn all_slots(&self) -> usize {
        self.slots + self.high.as_ref().map_or(0, |high| high.slots)
    }
}

impl CacheSpec {
    /// A cache of bf16 pages alone.
    pub fn exact(geometry: KvGeometry, query_heads: usize, slots: usize) -> CacheSpec {
        let host = HostSlots::default();
        CacheSpec { geometry, query_heads, slots, scratch_slots: 0, sealed: None, host }
    }

    /// Slots of bf16 pages, scratch included.
    pub fn exact_slots(&self) -> usize {
        self.slots + self.scratch_slots
    }
}

/// Consecutive tokens of one sequence inside a step.
#[derive(Clone, Copy, Debug)]
pub struct SequenceRows<'a> {
    /// Position of the first token.
    pub start: usize,
    /// Number of tokens.
    pub len: usize,
    /// Page table: `pages[p]` is the slot of the bf16 page that holds positions `[64p, 64p + 64)`, if there is one.
    /// Covers `start + len` tokens. Padded rows have no page at all and read the dummy.
    pub pages: &'a [Option<ExactSlot>],
    /// The sealed pages of a sequence that has any.
    pub sealed: Option<SealedRows<'a>>,
}

/// The sealed side of a page table, and what is read from it; see [`PageWindows::history`].
#[derive(Clone, Copy, Debug)]
pub struct SealedRows<'a> {
    /// Sealed slot of each page that has one.
    pub pages: &'a [Option<SealedSlot>],
    /// Pages from here on are read exactly, whatever the windows say; `usize::MAX` if that holds for none.
    pub exact_from: usize,
    /// Pages below (and after the sink) are read sealed, whatever the windows say.
    pub sealed_until: usize,
}

impl<'a> SequenceRows<'a> {
    /// Rows of a sequence whose pages are all bf16.
    pub fn exact(start: usize, len: usize, pages: &'a [Option<ExactSlot>]) -> SequenceRows<'a> {
        SequenceRows { start, len, pages, sealed: None }
    }
}

/// A full bf16 page and the sealed page it becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SealPage {
    /// Slot of the bf16 page, scratch slots included.
    pub exact: ExactSlot,
    /// Slot of the sealed page.
    pub sealed: SealedSlot,
}

/// The tokens of one step: the rows of all sequences, one after the other.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// Token ids, `sequences` laid end to end.
    pub tokens: &'a [u32],
    /// The sequences they belong to.
    pub sequences: &'a [SequenceRows<'a>],
}

/// How one token is drawn from a row of logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling<'a> {
    /// 0 takes the most likely token, the lowest id on a tie.
    pub temperature: f32,
    /// Keep the `top_k` most likely tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep the smallest set of tokens whose probability reaches this; 1 keeps all.
    pub top_p: f32,
    /// Keep the tokens whose information is nearest to the entropy, until their probability reaches this; 1 keeps all.
    pub typical_p: f32,
    /// Drop tokens less likely than this share of the most likely one; 0 keeps all.
    pub min_p: f32,
    /// Only the first so many tokens may be drawn: an embedding can have more rows than the tokenizer has tokens.
    pub vocabulary: usize,
    /// Uniform draw in `[0, 1)`; ignored when greedy. The caller owns the random state, so devices agree.
    pub draw: f32,
    /// Changes of single logits before anything else (penalties, biases).
    pub changes: &'a [LogitChange],
    /// One bit per token, lowest first: tokens without a bit are not drawn. `None` allows all.
    pub allowed: Option<&'a [u32]>,
    /// Takes this token instead of drawing one: its probability is what is asked for.
    pub given: Option<u32>,
    /// Report the probability of the token and of this many most likely ones; `None` saves the work.
    pub logprobs: Option<usize>,
}

impl Default for Sampling<'_> {
    /// Greedy, nothing reported.
    fn default() -> Self {
        Sampling {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            typical_p: 1.0,
            min_p: 0.0,
            vocabulary: usize::MAX,
            draw: 0.0,
            changes: &[],
            allowed: None,
            given: None,
            logprobs: None,
        }
    }
}

/// A change of the logit of one token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogitChange {
    /// Token id; one outside the vocabulary changes nothing.
    pub token: u32,
    /// Divides a positive logit and multiplies a negative one (repetition penalty); 1 changes nothing.
    pub penalty: f32,
    /// Added after that; negative infinity rules the token out.
    pub add: f32,
}

/// A drawn token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// Token id.
    pub token: u32,
    /// Natural logarithm of its probability under the unmodified logits, if asked for.
    pub logprob: Option<f32>,
    /// The most likely tokens under the unmodified logits, most likely first, as many as asked for.
    pub top: Vec<(u32, f32)>,
}

/// A device that can run a decoder-only transformer.
///
/// Buffers are `f32` matrices; the first `rows` rows in use are those of the step's batch.
pub trait Backend: Send + Sync + 'static {
    /// A weight resident on the device.
    type Weight: Send + Sync;
    /// The same projection of all experts of a layer, resident on the device or mapped.
    type Experts: Send + Sync;
    /// A matrix of activations on the device.
    type Buffer: Send;
    /// The page pools on the device.
    type Cache: Send;
    /// Tables of one step on the device.
    type Step: Send;

    /// Whether the result of a row is the same to the bit whatever else is computed with it.
    fn is_deterministic(&self) -> bool {
        false
    }

    /// Bytes that are free on a device with memory of its own; `None` if its memory is the host's.
    fn free_memory(&self) -> Option<usize> {
        None
    }

    /// Whether the device has what some families need. A model is refused when it is loaded, not in its first step.
    fn supports(&self, feature: Feature) -> bool {
        let _ = feature;
        false
    }

    /// Takes over a stored matrix; it stays in its stored type.
    fn weight(&self, stored: &StoredMatrix) -> Result<Self::Weight, KernelError>;
    /// Takes over the same projection of all experts of a layer, in their order and of one shape.
    fn experts(&self, stored: &[StoredMatrix]) -> Result<Self::Experts, KernelError>;
    /// All weights of a model are on the device: memory that they came through may be given back.
    fn finish_weights(&self) {}

    /// A zeroed matrix of activations.
    fn buffer(&self, rows: usize, cols: usize) -> Result<Self::Buffer, KernelError>;
    /// Page pools. Memory is reserved here and becomes resident as pages are written.
    fn cache(&self, spec: &CacheSpec) -> Result<Self::Cache, KernelError>;
    /// Copies `rows` of a buffer to the host.
    fn read(&self, buffer: &Self::Buffer, rows: Range<usize>) -> Result<Vec<f32>, KernelError>;

    /// Checks a batch against the cache and prepares its tables.
    fn begin_step(
        &self,
        batch: &Batch<'_>,
        rope: &Rope,
        cache: &Self::Cache,
    ) -> Result<Self::Step, KernelError>;

    /// Adds to a step what layers with a window need: their rotary angles, and how many positions a row sees.
    fn add_windows(
        &self,
        step: &mut Self::Step,
        rope: &Rope,
        window: usize,
        cache: &Self::Cache,
    ) -> Result<(), KernelError> {
        let _ = (step, rope, window, cache);
        Err(KernelError::Unsupported(Feature::SlidingWindows))
    }

    /// Runs a part of a step that does the same for every step with as many rows on the same cache and buffers, and that
    /// waits for nothing. A device may record what it does and replay that the next time instead of running it.
    fn record(
        &self,
        step: &Self::Step,
        body: &mut dyn FnMut() -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        let _ = step;
        body()
    }

    /// `hidden[r] = table[token r]`.
    fn embed(
        &self,
        table: &Self::Weight,
        step: &Self::Step,
        hidden: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// `hidden *= factor`.
    fn scale(&self, step: &Self::Step, factor: f32, hidden: &mut Self::Buffer) -> Result<(), KernelError> {
        let _ = (step, factor, hidden);
        Err(KernelError::Unsupported(Feature::ScaledEmbeddings))
    }

    /// `out = [linears[0](norm x) | linears[1](norm x) | ...]`, side by side in the columns of `out`.
    fn norm_linear(
        &self,
        step: &Self::Step,
        x: &Self::Buffer,
        norm: &RmsNorm<Self>,
        linears: &[&Linear<Self>],
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// Norms and rotates the query and key heads of `qkv`, takes queries, keys and values to the codec's basis, and
    /// writes keys and values to their bf16 pages.
    fn rope_store(
        &self,
        step: &Self::Step,
        spec: &AttentionSpec<Self>,
        layer: usize,
        qkv: &mut Self::Buffer,
        cache: &mut Self::Cache,
    ) -> Result<(), KernelError>;

    /// Causal attention of every row over the pages of its sequence, each read exactly or sealed as
    /// [`PageWindows::history`] says, or over its window in bf16 in a layer that has one; `out` has `q_heads * head_dim` columns, back in the model's basis.
    fn attend(
        &self,
        step: &Self::Step,
        spec: &AttentionSpec<Self>,
        layer: usize,
        qkv: &Self::Buffer,
        cache: &Self::Cache,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// Encodes full bf16 pages into sealed pages, for some layers. Rows that are not finite are an error that names
    /// the entry of `pages`; the other pages may have been written.
    fn seal(
        &self,
        layers: Range<usize>,
        pages: &[SealPage],
        cache: &mut Self::Cache,
    ) -> Result<(), KernelError>;

    /// Copies bf16 pages, all layers: `(from, to)`. A page that several sequences share is copied before it is written.
    fn copy_pages(
        &self,
        pages: &[(ExactSlot, ExactSlot)],
        cache: &mut Self::Cache,
    ) -> Result<(), KernelError>;

    /// Copies pages, all layers, between the device and the host's memory, in this order.
    fn copy_host_pages(&self, copies: &[HostCopy], cache: &mut Self::Cache) -> Result<(), KernelError> {
        let _ = cache;
        if copies.is_empty() { Ok(()) } else { Err(KernelError::Unsupported(Feature::HostPages)) }
    }

    /// Nobody needs what the scratch pages hold any more: their memory may be given back until they are written again.
    fn release_scratch(&self, cache: &mut Self::Cache);

    /// `hidden += linear(x)`.
    fn linear_add(
        &self,
        step: &Self::Step,
        x: &Self::Buffer,
        linear: &Linear<Self>,
        hidden: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// `hidden += norm(linear(x))`.
    fn linear_norm_add(
        &self,
        step: &Self::Step,
        x: &Self::Buffer,
        linear: &Linear<Self>,
        norm: &RmsNorm<Self>,
        hidden: &mut Self::Buffer,
    ) -> Result<(), KernelError> {
        let _ = (step, x, linear, norm, hidden);
        Err(KernelError::Unsupported(Feature::OutputNorms))
    }

    /// `hidden += mlp(hidden)`.
    fn gated_mlp(
        &self,
        step: &Self::Step,
        mlp: &GatedMlp<Self>,
        hidden: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// `hidden += mlp(hidden)`. No weight of an expert that no row chose is read. A row whose router gives no scores (it has
    /// NaN) becomes NaN, which is an error of that row alone where it is sampled.
    fn routed_mlp(
        &self,
        step: &Self::Step,
        mlp: &RoutedMlp<Self>,
        hidden: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// Logits of the given rows of `hidden`; row `i` of `out` belongs to `rows[i]`.
    fn logits(
        &self,
        hidden: &Self::Buffer,
        rows: &[usize],
        norm: &RmsNorm<Self>,
        head: &Self::Weight,
        out: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// Draws one token per row of logits. A row that is not finite is an error of that row only.
    fn sample(
        &self,
        logits: &Self::Buffer,
        settings: &[Sampling<'_>],
    ) -> Result<Vec<Result<Sampled, KernelError>>, KernelError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device may copy a page table as it is: an entry is the number of its slot, or 0, the dummy, for none.
    #[test]
    fn an_entry_of_a_page_table_has_the_bits_of_its_number() {
        let numbers = [0, 1, 2, 0x0102_0304, u32::MAX];
        // SAFETY: an `Option` of a transparent non-zero number is as large as the number and always initialised.
        let exact: [u32; 5] = unsafe { std::mem::transmute(numbers.map(ExactSlot::new)) };
        // SAFETY: as above.
        let sealed: [u32; 5] = unsafe { std::mem::transmute(numbers.map(SealedSlot::new)) };
        assert_eq!((exact, sealed), (numbers, numbers));
    }
}
