//! From projected rows to pages: norms, rotary embedding, the codec's basis, and the write.

use std::ops::Range;

use oscar_codec::{ExactSlot, HeadIndex, PAGE_TOKENS, Side};

use super::attention;
use super::cache::PageWriter;
use super::elementwise::{rms_norm_in_place, rotate};
use super::encode::SealScratch;
use super::heads::Heads;
use super::isa::Isa;
use super::memory::DisjointSlice;
use super::step::Step;

/// Gain and epsilon of a norm over one head.
pub(super) type HeadNorm<'a> = Option<(&'a [f32], f32)>;

/// One layer's way of storing rows.
pub(super) struct Store<'a> {
    pub(super) isa: Isa,
    pub(super) heads: Heads,
    pub(super) q_norm: HeadNorm<'a>,
    pub(super) k_norm: HeadNorm<'a>,
    pub(super) rotates: bool,
    pub(super) layer: usize,
}

/// One page of one head that a step writes to.
pub(super) struct WriteTask {
    sequence: usize,
    page: usize,
    slot: ExactSlot,
    head: usize,
}

impl Store<'_> {
    /// Norms and rotates what one side of a KV head has in a row: the key and the queries that read it, or the value.
    /// With a codec they then go to its basis: `q·M` and `(k - mean)·M` differ from `q·k` by the same amount for all
    /// keys, which softmax does not see.
    ///
    /// # Safety
    /// No two calls at the same time may be of the same row, head and side. `rows` has whole rows.
    pub(super) unsafe fn prepare_side(
        &self,
        step: &Step,
        writer: &PageWriter<'_>,
        row: usize,
        (head, side): (usize, Side),
        rows: &DisjointSlice<'_, f32>,
        scratch: &mut SealScratch,
    ) {
        let (sealer, d) = (writer.sealer, self.heads.head_dim);
        let part = |cols: Range<usize>| {
            let start = row * self.heads.qkv_cols();
            // SAFETY: these heads are nobody else's, by the caller's promise, and the parts do not overlap.
            unsafe { rows.part(start + cols.start..start + cols.end) }
        };
        let index = HeadIndex { layer: self.layer, head };
        let stored = part(self.heads.stored_cols(head, side));
        if side == Side::Value {
            if let Some(sealer) = sealer {
                sealer.transform_rows(index, side, stored, scratch);
            }
            return;
        }
        let angles = step.angles(self.heads.window.is_some());
        let (cos, sin) = angles.of_row(row);
        let width = self.heads.group() * d;
        let queries = part(head * width..(head + 1) * width);
        for (values, norm) in [(&mut *queries, self.q_norm), (&mut *stored, self.k_norm)] {
            for values in values.chunks_exact_mut(d) {
                if let Some((weight, eps)) = norm {
                    rms_norm_in_place(self.isa, values, weight, eps);
                }
                if self.rotates {
                    rotate(self.isa, values, cos, sin, angles.layout);
                }
            }
        }
        if let Some(sealer) = sealer {
            sealer.rotate_queries(index, queries, scratch);
            sealer.transform_rows(index, side, stored, scratch);
        }
    }

    /// [`Self::prepare_side`] and the write, of a step that writes one token to a page.
    ///
    /// # Safety
    /// As [`Self::prepare_side`]. No two sequences of the step write to the same slot, and each has one token.
    pub(super) unsafe fn store_side(
        &self,
        step: &Step,
        writer: &PageWriter<'_>,
        row: usize,
        (head, side): (usize, Side),
        rows: &DisjointSlice<'_, f32>,
        scratch: &mut SealScratch,
    ) {
        let sequence = &step.sequences[row];
        let (slot, token) = (sequence.pages[sequence.start / PAGE_TOKENS], sequence.start % PAGE_TOKENS);
        let (start, cols) = (row * self.heads.qkv_cols(), self.heads.stored_cols(head, side));
        // SAFETY: the caller's promise: this side of this slot is nobody else's, and neither are these values.
        unsafe {
            let half = slot.map(|slot| writer.side(slot, head, side));
            if let Some(half) = &half {
                attention::prefetch_side(half, side, token);
            }
            // In a larger batch the row before has just used it.
            if let Some(sealer) = writer.sealer.filter(|_| step.rows() == 1) {
                sealer.prefetch_rotation(HeadIndex { layer: self.layer, head }, side);
            }
            self.prepare_side(step, writer, row, (head, side), rows, scratch);
            if let Some(half) = half {
                attention::write_side(half, side, token, rows.part(start + cols.start..start + cols.end));
            }
        }
    }

    /// The pages a step writes to, head by head.
    pub(super) fn tasks(&self, step: &Step) -> Vec<WriteTask> {
        let pages = step
            .sequences
            .iter()
            .enumerate()
            .flat_map(|(index, sequence)| sequence.written_pages().map(move |page| (index, page)))
            .filter_map(|(index, page)| Some((index, page, step.sequences[index].pages[page]?)));
        pages
            .flat_map(|(sequence, page, slot)| {
                (0..self.heads.kv_heads).map(move |head| WriteTask { sequence, page, slot, head })
            })
            .collect()
    }

    /// Writes the prepared rows that belong to one page.
    ///
    /// # Safety
    /// No two tasks that run at the same time may be of the same slot and head.
    pub(super) unsafe fn write_page(
        &self,
        step: &Step,
        task: &WriteTask,
        rows: &[f32],
        writer: &PageWriter<'_>,
    ) {
        let &WriteTask { sequence, page, slot, head } = task;
        let sequence = &step.sequences[sequence];
        // SAFETY: the caller's promise.
        let target = unsafe { writer.page(slot, head) };
        let first = sequence.start.max(page * PAGE_TOKENS);
        let last = (sequence.start + sequence.len).min((page + 1) * PAGE_TOKENS);
        let (cols, d) = (self.heads.qkv_cols(), self.heads.head_dim);
        for position in first..last {
            let row = &rows[(sequence.first_row + position - sequence.start) * cols..][..cols];
            let [key, value] = [Side::Key, Side::Value].map(|side| &row[self.heads.stored_cols(head, side)]);
            attention::write_token(target, d, position % PAGE_TOKENS, key, value);
        }
    }
}
