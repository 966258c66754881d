//! 2-bit and 4-bit pages: what happens around the integer products.
//!
//! Both products have the same shape: bytes of queries (or weights) times codes in words `[blocks][width]`, where a
//! word holds the codes of one token (or channel) for 8 or 16 channels (or tokens) in a row, and neighbouring words
//! are neighbouring tokens (or channels). An [`Engine`] multiplies; scales, offsets and softmax are the same for all.
//!
//! Groups: queries are stored once per group with zeros outside it, and weights are split once per group with its
//! scales. A group may begin anywhere; what lies around it in the same word or register is multiplied and dropped.

use std::ops::Range;

use oscar_codec::code_page::CodeLayout;
use oscar_codec::{PAGE_TOKENS, ScaleType, Side};

use super::fixed_point::{Affine, Tokens};
use super::{Reader, read_pages, scalar};
use crate::cpu::attention::{AttentionScratch, SoftmaxState, Work, floats};
use crate::cpu::gemm::aligned::AlignedScratch;
use crate::cpu::isa::Isa;

/// Rows of query bytes are padded to this, a row of a tile.
const STRIDE_STEP: usize = 64;

/// Columns that engines multiply together: results of groups are cut out of such blocks.
pub(super) const COLUMN_STEP: usize = 16;

/// Rows from which tiles beat vectors.
#[cfg(target_arch = "x86_64")]
const TILES_FROM: usize = 3;

/// The shape of pages.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) bits: u32,
    pub(super) scale_type: ScaleType,
    /// Channels as stored.
    pub(super) padded: usize,
    groups: usize,
    /// Channels of a group.
    channels: usize,
}

impl Shape {
    fn new(layout: &CodeLayout, scale_type: ScaleType) -> Shape {
        Shape {
            bits: layout.bits(),
            scale_type,
            padded: layout.padded_dim(),
            groups: layout.groups(),
            channels: layout.head_dim() / layout.groups(),
        }
    }

    fn group(&self, group: usize) -> Range<usize> {
        group * self.channels..(group + 1) * self.channels
    }

    /// Bytes of one side's codes.
    fn side_bytes(&self) -> usize {
        PAGE_TOKENS * self.padded * self.bits as usize / 8
    }

    /// Numbers of one side's scales and offsets.
    fn side_scales(&self) -> usize {
        self.groups * 2 * PAGE_TOKENS
    }
}

/// One side of a page as words `[blocks][width]`.
#[derive(Clone, Copy)]
pub(super) struct Words<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) width: usize,
}

impl<'a> Words<'a> {
    /// The keys (words of channels, tokens side by side) and values of a page.
    pub(super) fn of(shape: &Shape, page: &'a [u8]) -> (Words<'a>, Words<'a>) {
        let (keys, rest) = page.split_at(shape.side_bytes());
        (
            Words { bytes: keys, width: PAGE_TOKENS },
            Words { bytes: &rest[..shape.side_bytes()], width: shape.padded },
        )
    }
}

/// The left side of a product: `[rows][high, low][stride]` bytes, with room for [`Engine::ROWS`] rows.
pub(super) struct Left<'a> {
    pub(super) bytes: &'a [i8],
    /// A multiple of 64.
    pub(super) stride: usize,
    pub(super) rows: usize,
}

/// Integer products on one instruction set, and the steps around them compiled for it. A value exists only where the
/// instruction set does.
pub(super) trait Engine {
    /// Most rows of one product.
    const ROWS: usize;

    /// Turns to a page; `next` will be read after it.
    fn open(&mut self, shape: &Shape, page: &[u8], next: &[u8]);

    /// Scales and offsets as numbers.
    fn numbers(stored: &[u8], scale_type: ScaleType, numbers: &mut [f32]);

    /// `sums[row][part]` = bytes of a part of the row times codes, for all tokens or for the channels in `columns`
    /// (widened to multiples of 16): `[rows][high, low][64 or padded channels]`, with room for [`Self::ROWS`] rows.
    /// Only the bytes in `inner` (channels of keys, tokens of values) are not zero.
    fn product(
        &mut self,
        shape: &Shape,
        page: &[u8],
        side: Side,
        left: &Left<'_>,
        inner: Range<usize>,
        columns: Range<usize>,
        sums: &mut [i32],
    );

    /// As the functions of [`super::fixed_point`].
    fn split_row(row: &[f32], high: &mut [i8], low: &mut [i8]) -> f32;
    fn finish_logits(
        sums: [&Tokens<i32>; 2],
        step: f32,
        sum: f32,
        affine: &Affine<'_>,
        add: bool,
        logits: &mut Tokens<f32>,
    );
    fn split_weights(
        weights: &Tokens<f32>,
        affine: &Affine<'_>,
        high: &mut Tokens<i8>,
        low: &mut Tokens<i8>,
    ) -> (f32, f32);
    fn finish_values(sums: [&[i32]; 2], step: f32, offset: f32, values: &mut [f32]);
}

/// Buffers of one thread.
#[derive(Default)]
pub(super) struct CodeScratch {
    buffers: Buffers,
    /// Unpacked codes.
    #[cfg(target_arch = "x86_64")]
    tiles: AlignedScratch,
}

#[derive(Default)]
struct Buffers {
    queries: AlignedScratch,
    query_numbers: AlignedScratch,
    scales: AlignedScratch,
    weights: AlignedScratch,
    weight_numbers: AlignedScratch,
    sums: AlignedScratch,
}

/// Attends all rows to all pages. The instruction set must be available, which [`super::attend_sealed`] has checked.
pub(super) fn attend(
    isa: Isa,
    layout: &CodeLayout,
    scale_type: ScaleType,
    work: &Work<'_, u8>,
    scratch: &mut AttentionScratch,
    state: &mut SoftmaxState,
) {
    let shape = Shape::new(layout, scale_type);
    let CodeScratch {
        buffers,
        #[cfg(target_arch = "x86_64")]
        tiles,
    } = &mut scratch.sealed.codes;
    let scores = &mut scratch.scores;
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Amx if work.spans.len() >= TILES_FROM && super::tiles::is_available() => {
            // SAFETY: AMX is available; nothing else uses tiles until the end of the call.
            let engine = unsafe { super::tiles::Tdpbsud::new(&shape, work.spans.len(), tiles) };
            let reader = CodeReader::new(engine, shape, work, buffers);
            read_pages(reader, &floats::AVX512, work, scores, state);
        }
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Amx => {
            let reader = CodeReader::new(super::vnni::Vpdpbusd, shape, work, buffers);
            read_pages(reader, &floats::AVX512, work, scores, state);
        }
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => {
            let reader = CodeReader::new(super::maddubs::Maddubs, shape, work, buffers);
            read_pages(reader, &floats::AVX2, work, scores, state);
        }
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => {
            let reader = CodeReader::new(super::sdot::Sdot, shape, work, buffers);
            read_pages(reader, &floats::NEON, work, scores, state);
        }
        _ => {
            scalar::attend(
                work,
                |page, side, token, row| layout.decode_token(page, side, token, scale_type, row),
                state,
            );
        }
    }
}

/// The queries of a call as bytes, and the page that is open.
struct CodeReader<'a, E> {
    engine: E,
    shape: Shape,
    page: &'a [u8],
    stride: usize,
    /// `[group][row][high, low][stride]`, zero outside the group; room for more rows at the end.
    queries: &'a [i8],
    /// Unit of each row.
    query_steps: &'a [f32],
    /// `[group][row]`: sum of the channels of the group.
    query_sums: &'a [f32],
    /// `[K, V][group][scale, offset][64 tokens]` of the page.
    scales: &'a mut [f32],
    /// `[row][high, low][64 tokens]` of one group of channels.
    weights: &'a mut [i8],
    /// `[row][unit, offset]` of the weights.
    weight_numbers: &'a mut [f32],
    /// Of the product at hand.
    sums: &'a mut [i32],
}

impl<'a, E: Engine> CodeReader<'a, E> {
    fn new(engine: E, shape: Shape, work: &Work<'a, u8>, buffers: &'a mut Buffers) -> Self {
        let (d, rows) = (work.d, work.spans.len());
        let stride = shape.padded.next_multiple_of(STRIDE_STEP);
        let row_bytes = 2 * stride;
        // The last rows are read as part of a full product.
        let queries = buffers.queries.at_least::<i8>((shape.groups * rows + E::ROWS) * row_bytes);
        let (query_steps, query_sums) =
            buffers.query_numbers.at_least::<f32>((1 + shape.groups) * rows).split_at_mut(rows);
        queries.fill(0);
        for (row, q) in work.q.chunks_exact(d).enumerate() {
            let (high, low) = queries[row * row_bytes..][..row_bytes].split_at_mut(stride);
            query_steps[row] = E::split_row(q, high, low);
            for group in 0..shape.groups {
                let sum: f64 = q[shape.group(group)].iter().copied().map(f64::from).sum();
                query_sums[group * rows + row] = sum as f32;
            }
        }
        // Groups after the first get their channels of the first copy, which then loses them.
        let (first, others) = queries.split_at_mut(rows * row_bytes);
        for (group, copy) in (1..shape.groups).zip(others.chunks_exact_mut(rows * row_bytes)) {
            let channels = shape.group(group);
            for (from, to) in first.chunks_exact_mut(stride).zip(copy.chunks_exact_mut(stride)) {
                to[channels.clone()].copy_from_slice(&from[channels.clone()]);
                from[channels.clone()].fill(0);
            }
        }
        CodeReader {
            engine,
            shape,
            page: &[],
            stride,
            queries,
            query_steps,
            query_sums,
            scales: buffers.scales.at_least(2 * shape.side_scales()),
            weights: buffers.weights.at_least(E::ROWS * 2 * PAGE_TOKENS),
            weight_numbers: buffers.weight_numbers.at_least(E::ROWS * 2),
            sums: buffers.sums.at_least(E::ROWS * 2 * shape.padded.max(PAGE_TOKENS)),
        }
    }
}

impl<'a, E: Engine> Reader<'a> for CodeReader<'a, E> {
    const ROWS: usize = E::ROWS;

    fn open(&mut self, page: &'a [u8], next: &'a [u8]) {
        self.page = page;
        self.engine.open(&self.shape, page, next);
        E::numbers(&page[2 * self.shape.side_bytes()..], self.shape.scale_type, self.scales);
    }

    fn logits(&mut self, rows: Range<usize>, scores: &mut [f32]) {
        let all_rows = self.query_steps.len();
        let row_bytes = 2 * self.stride;
        for group in 0..self.shape.groups {
            let bytes = &self.queries[(group * all_rows + rows.start) * row_bytes..];
            let left = Left { bytes, stride: self.stride, rows: rows.len() };
            let (channels, tokens) = (self.shape.group(group), 0..PAGE_TOKENS);
            self.engine.product(&self.shape, self.page, Side::Key, &left, channels, tokens, self.sums);
            let affine = affine(self.scales, group);
            let sums = self.sums.chunks_exact(2 * PAGE_TOKENS);
            for ((row, sums), logits) in rows.clone().zip(sums).zip(scores.as_chunks_mut().0) {
                let (high, low) = halves(sums);
                let (step, sum) = (self.query_steps[row], self.query_sums[group * all_rows + row]);
                E::finish_logits([high, low], step, sum, &affine, group > 0, logits);
            }
        }
    }

    fn add_values(&mut self, rows: Range<usize>, weights: &mut [f32], values: &mut [f32]) {
        let (padded, d) = (self.shape.padded, self.shape.channels * self.shape.groups);
        for group in 0..self.shape.groups {
            let affine = affine(&self.scales[self.shape.side_scales()..], group);
            for (row, weights) in weights.as_chunks().0.iter().enumerate() {
                let parts = &mut self.weights[row * 2 * PAGE_TOKENS..][..2 * PAGE_TOKENS];
                let [high, low] = parts.as_chunks_mut().0 else { unreachable!("two parts of a row") };
                let (step, offset) = E::split_weights(weights, &affine, high, low);
                self.weight_numbers[2 * row..2 * row + 2].copy_from_slice(&[step, offset]);
            }
            let left = Left { bytes: self.weights, stride: PAGE_TOKENS, rows: rows.len() };
            let (tokens, channels) = (0..PAGE_TOKENS, self.shape.group(group));
            let columns =
                channels.start / COLUMN_STEP * COLUMN_STEP..channels.end.next_multiple_of(COLUMN_STEP);
            self.engine.product(&self.shape, self.page, Side::Value, &left, tokens, columns, self.sums);
            for (row, values) in values.chunks_exact_mut(d).enumerate() {
                let sums = &self.sums[row * 2 * padded..][..2 * padded];
                let (high, low) = (&sums[channels.clone()], &sums[padded..][channels.clone()]);
                let [step, offset] = [self.weight_numbers[2 * row], self.weight_numbers[2 * row + 1]];
                E::finish_values([high, low], step, offset, &mut values[channels.clone()]);
            }
        }
    }
}

/// Scales and offsets of a group.
fn affine(scales: &[f32], group: usize) -> Affine<'_> {
    let (scale, offset) = halves(&scales[group * 2 * PAGE_TOKENS..][..2 * PAGE_TOKENS]);
    Affine { scale, offset }
}

/// Two pages' worth of numbers, one after the other.
fn halves<T>(both: &[T]) -> (&Tokens<T>, &Tokens<T>) {
    let [first, second] = both.as_chunks().0 else { unreachable!("two numbers per token") };
    (first, second)
}
