//! What the CPU backend keeps: weights in their stored type, matrices of activations, page pools, step tables.

use std::ops::Range;

use oscar_codec::{PAGE_TOKENS, PageFormat};

use super::attention;
use super::memory::{AlignedBuffer, DisjointSlice};
use crate::backend::{Batch, CacheSpec, KernelError, Rope, RopeLayout, StoredMatrix};
use crate::dtype::DType;
use crate::quant;

/// The slot that padded rows name; nothing is written there and what is read does not matter.
pub(super) const DUMMY_SLOT: u32 = 0;

/// A weight. Matrices stay in the bytes they came from; vectors (norms, biases) are small and widened once.
pub struct Weight {
    stored: StoredMatrix,
    row_bytes: usize,
    vector: Option<Box<[f32]>>,
}

impl Weight {
    pub(super) fn new(stored: &StoredMatrix) -> Result<Weight, KernelError> {
        let data = stored.data()?;
        let vector = (stored.rows == 1).then(|| {
            let mut values = vec![0.0; stored.cols].into_boxed_slice();
            quant::dequantise(stored.dtype, data, &mut values);
            values
        });
        let row_bytes = data.len() / stored.rows.max(1);
        Ok(Weight { stored: stored.clone(), row_bytes, vector })
    }

    /// Some rows as floats, one after the other.
    pub fn dequantise_rows(&self, rows: Range<usize>, out: &mut [f32]) {
        assert_eq!(out.len(), rows.len() * self.cols(), "room for {} rows", rows.len());
        quant::dequantise(self.dtype(), self.row_data(rows), out);
    }

    /// Output channels.
    pub fn rows(&self) -> usize {
        self.stored.rows
    }

    /// Input channels.
    pub fn cols(&self) -> usize {
        self.stored.cols
    }

    /// Stored type.
    pub fn dtype(&self) -> DType {
        self.stored.dtype
    }

    pub(super) fn row_data(&self, rows: Range<usize>) -> &[u8] {
        let all: &[u8] = (*self.stored.bytes).as_ref();
        &all[self.stored.offset + rows.start * self.row_bytes..self.stored.offset + rows.end * self.row_bytes]
    }

    pub(super) fn vector(&self, what: &'static str, len: usize) -> Result<&[f32], KernelError> {
        match &self.vector {
            Some(vector) if vector.len() == len => Ok(vector),
            _ => Err(KernelError::Shape { what, expected: len, got: self.rows() * self.cols() }),
        }
    }
}

/// A matrix of `f32` activations.
pub struct Matrix {
    rows: usize,
    cols: usize,
    values: AlignedBuffer<f32>,
}

impl Matrix {
    pub(super) fn zeroed(rows: usize, cols: usize) -> Result<Matrix, KernelError> {
        let len = rows.saturating_mul(cols);
        Ok(Matrix { rows, cols, values: AlignedBuffer::zeroed(len, "activations")? })
    }

    /// Columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Rows there is room for.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The values of the first `rows` rows; `what` names them in the error if there are fewer.
    pub fn first_rows(&self, what: &'static str, rows: usize) -> Result<&[f32], KernelError> {
        self.values.get(..rows * self.cols).ok_or(KernelError::Shape { what, expected: rows, got: self.rows })
    }

    /// [`Self::first_rows`], to be written.
    pub fn first_rows_mut(&mut self, what: &'static str, rows: usize) -> Result<&mut [f32], KernelError> {
        let got = self.rows;
        self.values.get_mut(..rows * self.cols).ok_or(KernelError::Shape { what, expected: rows, got })
    }
}

/// Page pools in host memory, `[layer][slot][head]` pages of bf16.
pub struct Cache {
    spec: CacheSpec,
    page_len: usize,
    elements: AlignedBuffer<u16>,
}

impl Cache {
    pub(super) fn new(spec: &CacheSpec) -> Result<Cache, KernelError> {
        if spec.format != PageFormat::Bf16 {
            return Err(KernelError::UnsupportedFormat(spec.format));
        }
        let geometry = spec.geometry;
        if !geometry.head_dim.is_multiple_of(2) {
            let got = geometry.head_dim;
            return Err(KernelError::Shape {
                what: "head dimension, an even number",
                expected: got + 1,
                got,
            });
        }
        let page_len = spec.format.page_bytes(geometry.head_dim) / size_of::<u16>();
        let len = [geometry.layers, spec.slots, geometry.kv_heads, page_len]
            .into_iter()
            .try_fold(1usize, usize::checked_mul)
            .unwrap_or(usize::MAX);
        Ok(Cache { spec: *spec, page_len, elements: AlignedBuffer::zeroed(len, "the KV cache")? })
    }

    /// Size and format.
    pub fn spec(&self) -> &CacheSpec {
        &self.spec
    }

    /// Reads the keys and values of consecutive positions of one head; rows of `head_dim` values.
    ///
    /// `pages[p]` is the slot of positions `[64p, 64p + 64)`, as in a batch.
    pub fn read_rows(
        &self,
        layer: usize,
        head: usize,
        pages: &[u32],
        positions: Range<usize>,
        keys: &mut [f32],
        values: &mut [f32],
    ) {
        let d = self.spec.geometry.head_dim;
        let rows = keys.chunks_exact_mut(d).zip(values.chunks_exact_mut(d));
        assert!(rows.len() == positions.len(), "room for {} of {} rows", rows.len(), positions.len());
        for (position, (key, value)) in positions.zip(rows) {
            let page = self.page(layer, pages[position / PAGE_TOKENS], head);
            attention::read_token(page, d, position % PAGE_TOKENS, key, value);
        }
    }

    /// Writes the keys and values of consecutive positions of one head, rounded to bf16.
    pub fn write_rows(
        &mut self,
        layer: usize,
        head: usize,
        pages: &[u32],
        first: usize,
        keys: &[f32],
        values: &[f32],
    ) {
        let d = self.spec.geometry.head_dim;
        assert_eq!(keys.len(), values.len(), "as many keys as values");
        for (index, (key, value)) in keys.chunks_exact(d).zip(values.chunks_exact(d)).enumerate() {
            let position = first + index;
            let range = self.range(layer, pages[position / PAGE_TOKENS], head);
            attention::write_token(&mut self.elements[range], d, position % PAGE_TOKENS, key, value);
        }
    }

    fn range(&self, layer: usize, slot: u32, head: usize) -> Range<usize> {
        let index = (layer * self.spec.slots + slot as usize) * self.spec.geometry.kv_heads + head;
        index * self.page_len..(index + 1) * self.page_len
    }

    pub(super) fn page(&self, layer: usize, slot: u32, head: usize) -> &[u16] {
        &self.elements[self.range(layer, slot, head)]
    }

    pub(super) fn writer(&mut self, layer: usize) -> PageWriter<'_> {
        let kv_heads = self.spec.geometry.kv_heads;
        let layer_len = self.spec.slots * kv_heads * self.page_len;
        let pages = DisjointSlice::new(&mut self.elements[layer * layer_len..(layer + 1) * layer_len]);
        PageWriter { pages, kv_heads, page_len: self.page_len }
    }
}

/// Pages of one layer, written by several threads.
pub(super) struct PageWriter<'a> {
    pages: DisjointSlice<'a, u16>,
    kv_heads: usize,
    page_len: usize,
}

impl PageWriter<'_> {
    /// One page.
    ///
    /// # Safety
    /// Nobody else may hold the same page at the same time.
    #[allow(clippy::mut_from_ref)]
    pub(super) unsafe fn page(&self, slot: u32, head: usize) -> &mut [u16] {
        let index = slot as usize * self.kv_heads + head;
        // SAFETY: different (slot, head) pairs give disjoint ranges; the caller promises the rest.
        unsafe { self.pages.part(index * self.page_len..(index + 1) * self.page_len) }
    }
}

/// Tables that hold for a whole step.
pub struct Step {
    pub(super) tokens: Vec<u32>,
    pub(super) sequences: Vec<StepSequence>,
    /// Rotary pairs per head.
    pub(super) pairs: usize,
    pub(super) layout: RopeLayout,
    /// Cosines and sines, `pairs` per row.
    pub(super) cos: Vec<f32>,
    pub(super) sin: Vec<f32>,
}

/// Rows of one sequence inside a step.
pub(super) struct StepSequence {
    pub(super) first_row: usize,
    pub(super) start: usize,
    pub(super) len: usize,
    pub(super) pages: Vec<u32>,
}

impl StepSequence {
    /// Pages that this step writes to.
    pub(super) fn written_pages(&self) -> Range<usize> {
        self.start / PAGE_TOKENS..(self.start + self.len).div_ceil(PAGE_TOKENS)
    }
}

impl Step {
    pub(super) fn new(batch: &Batch<'_>, rope: &Rope, spec: &CacheSpec) -> Result<Step, KernelError> {
        let rows: usize = batch.sequences.iter().map(|sequence| sequence.len).sum();
        if rows != batch.tokens.len() {
            return Err(KernelError::Shape {
                what: "tokens of a batch",
                expected: rows,
                got: batch.tokens.len(),
            });
        }
        let pairs = rope.inverse_frequencies.len();
        if 2 * pairs > spec.geometry.head_dim {
            let expected = spec.geometry.head_dim;
            return Err(KernelError::Shape {
                what: "rotary channels, at most the head",
                expected,
                got: 2 * pairs,
            });
        }
        let mut step = Step {
            tokens: batch.tokens.to_vec(),
            sequences: Vec::with_capacity(batch.sequences.len()),
            pairs,
            layout: rope.layout,
            cos: Vec::with_capacity(rows * pairs),
            sin: Vec::with_capacity(rows * pairs),
        };
        let mut written = Vec::new();
        let mut first_row = 0;
        for sequence in batch.sequences {
            let needed = (sequence.start + sequence.len).div_ceil(PAGE_TOKENS);
            let Some(pages) = sequence.pages.get(..needed) else {
                let got = sequence.pages.len();
                return Err(KernelError::Shape { what: "pages of a sequence", expected: needed, got });
            };
            if let Some(&slot) = pages.iter().find(|&&slot| slot as usize >= spec.slots) {
                return Err(KernelError::PageOutOfRange { slot, slots: spec.slots });
            }
            for position in sequence.start..sequence.start + sequence.len {
                for frequency in &rope.inverse_frequencies {
                    let (sin, cos) = (position as f32 * frequency).sin_cos();
                    step.cos.push(cos * rope.magnitude);
                    step.sin.push(sin * rope.magnitude);
                }
            }
            let sequence =
                StepSequence { first_row, start: sequence.start, len: sequence.len, pages: pages.to_vec() };
            first_row += sequence.len;
            let slots = &sequence.pages[sequence.written_pages()];
            written.extend(slots.iter().filter(|&&slot| slot != DUMMY_SLOT));
            step.sequences.push(sequence);
        }
        written.sort_unstable();
        if let Some(pair) = written.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(KernelError::PageWrittenTwice { slot: pair[0] });
        }
        Ok(step)
    }

    pub(super) fn rows(&self) -> usize {
        self.tokens.len()
    }
}
