//! What a forward pass asks of a device.
//!
//! The operations are as large as a device can fuse: a norm with the projections that follow it, QK-norm with
//! RoPE and the cache write, a whole gated MLP. Weights, activations and page pools are the backend's own types,
//! so a layer hands over nothing but descriptors. Tables that hold for a whole step (positions, page
//! tables, rotary angles) are prepared once in [`Backend::begin_step`].

mod cache;
mod layers;
mod sampling;

use std::ops::Range;
use std::sync::Arc;

pub use oscar_codec::RopeLayout;
use oscar_codec::{ExactSlot, HostCopy};

pub use cache::{Batch, CacheSpec, HighSpec, HostSlots, SealPage, SealedRows, SealedSpec, SequenceRows};
pub use layers::{
    Activation, AttentionSpec, ExpertBiases, GatedMlp, Linear, RmsNorm, Rope, RoutedMlp, SharedExpert,
};
pub use sampling::{Draw, LogitChange, Sampled, Sampling};

use crate::dtype::DType;
pub(crate) use crate::error::expect;
pub use crate::error::{Feature, KernelError};
use crate::quant::fp8::BlockScales;

/// Bytes owned by somebody else (a file mapping, a vector), shared without a copy.
pub type SharedBytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// A stored matrix before it is handed to a backend: `rows` output channels of `cols` inputs, row-major.
#[derive(Clone)]
pub struct StoredMatrix {
    /// The bytes that contain the matrix.
    pub bytes: SharedBytes,
    /// Where it starts inside `bytes`.
    pub offset: usize,
    /// The type in which the elements are stored.
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
    /// Tokens that the device is drawing, one for each row of some logits.
    type Draws: Send;

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

    /// Bytes that so many numbers of a stored type take on the device at least.
    fn weight_bytes(&self, dtype: DType, numbers: usize) -> usize {
        dtype.bytes_for(numbers).unwrap_or(0)
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

    /// Whether steps can begin before the tokens that they compute are known to the host; see
    /// [`Backend::begin_step_of_draws`].
    fn computes_ahead(&self) -> bool {
        false
    }

    /// As [`Backend::begin_step`] for tokens that are still being drawn: row `i` of the batch gets what is drawn from row `i`
    /// of the logits, and the tokens of `batch` say nothing. `None` if the host has to know them first, because it takes part
    /// in drawing them. The draws must be the latest.
    fn begin_step_of_draws(
        &self,
        draws: &Self::Draws,
        batch: &Batch<'_>,
        rope: &Rope,
        cache: &Self::Cache,
    ) -> Result<Option<Self::Step>, KernelError> {
        let _ = (draws, batch, rope, cache);
        Ok(None)
    }

    /// Runs a part of a step that does the same for every step with as many rows on the same cache and buffers, and that
    /// waits for nothing. A device may record what it does and replay that the next time instead of running it. Bodies that
    /// use different buffers have different numbers as `variant`.
    fn record(
        &self,
        step: &Self::Step,
        variant: usize,
        body: &mut dyn FnMut() -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        let _ = (step, variant);
        body()
    }

    /// Looks up embeddings: `hidden[r] = table[token r]`.
    fn embed(
        &self,
        table: &Self::Weight,
        step: &Self::Step,
        hidden: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// Multiplies the hidden states with a number: `hidden *= factor`.
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
    /// [`PageWindows::history`](oscar_codec::PageWindows::history) says, or over its window in bf16 in a layer that has one; `out` has `q_heads * head_dim` columns, back in the model's basis.
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

    /// Adds a projection to the hidden states: `hidden += linear(x)`.
    fn linear_add(
        &self,
        step: &Self::Step,
        x: &Self::Buffer,
        linear: &Linear<Self>,
        hidden: &mut Self::Buffer,
    ) -> Result<(), KernelError>;

    /// Adds a projection with a norm after it to the hidden states: `hidden += norm(linear(x))`.
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

    /// Adds a feed-forward block to the hidden states: `hidden += mlp(hidden)`.
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

    /// Begins to draw one token per row of logits, which must stay as they are until [`Backend::finish_draws`].
    fn begin_draws(
        &self,
        logits: &Self::Buffer,
        settings: &[Sampling<'_>],
    ) -> Result<Self::Draws, KernelError>;

    /// Waits for the tokens of the same logits and settings. A row that is not finite is an error of that row only.
    fn finish_draws(
        &self,
        draws: Self::Draws,
        logits: &Self::Buffer,
        settings: &[Sampling<'_>],
    ) -> Result<Vec<Draw>, KernelError>;

    /// Draws one token per row of logits. A row that is not finite is an error of that row only.
    fn sample(
        &self,
        logits: &Self::Buffer,
        settings: &[Sampling<'_>],
    ) -> Result<Vec<Result<Sampled, KernelError>>, KernelError> {
        let draws = self.begin_draws(logits, settings)?;
        Ok(self.finish_draws(draws, logits, settings)?.into_iter().map(|draw| draw.sampled).collect())
    }
}

#[cfg(test)]
mod tests {
    use oscar_codec::SealedSlot;

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
