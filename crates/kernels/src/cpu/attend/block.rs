//! The rows of one block: their queries, the pages they read, and what they write.

use std::ops::Range;

use oscar_codec::{HeadIndex, PAGE_TOKENS, Side};

use super::parts::HeadStates;
use super::plan::{Block, Item};
use super::tiers::Tiers;
use crate::cpu::attention::sealed::{SealedPages, attend_sealed_heads};
use crate::cpu::attention::{self, AttentionScratch, SoftmaxState, Span};
use crate::cpu::cache::Cache;
use crate::cpu::encode::SealScratch;
use crate::cpu::heads::Heads;
use crate::cpu::isa::Isa;
use crate::cpu::memory::DisjointSlice;
use crate::sequence::StepSequence;

/// Buffers of one thread.
#[derive(Default)]
pub(in crate::cpu) struct AttendScratch {
    queries: Vec<f32>,
    spans: Vec<Span>,
    kernel: AttentionScratch,
    transform: SealScratch,
    /// Output rows of a head.
    rows: Vec<f32>,
    /// Softmax of a block that is one item.
    pub(super) states: HeadStates,
}

/// A block with what its rows are rows of.
#[derive(Clone, Copy)]
pub(super) struct BlockRows<'a> {
    pub(super) block: &'a Block,
    pub(super) sequence: &'a StepSequence,
    pub(super) heads: Heads,
}

impl BlockRows<'_> {
    /// Collects the query rows of a block, head by head and token by token, and what each row of a head may see.
    fn gather_queries(&self, kv_heads: &Range<usize>, qkv: &[f32], scratch: &mut AttendScratch) {
        let BlockRows { block, sequence, heads } = *self;
        let AttendScratch { queries, spans, .. } = scratch;
        queries.clear();
        spans.clear();
        let width = heads.group() * heads.head_dim;
        for head in kv_heads.clone() {
            for token in block.tokens.clone() {
                let row = &qkv[(sequence.first_row + token) * heads.qkv_cols()..];
                queries.extend_from_slice(&row[head * width..(head + 1) * width]);
            }
        }
        for token in block.tokens.clone() {
            let position = sequence.start + token;
            let span = Span { from: heads.first_seen(position), to: position + 1 };
            spans.extend(std::iter::repeat_n(span, heads.group()));
        }
    }

    /// The softmax of a block's rows over the pages of an item: sink, sealed history, and the rest.
    pub(super) fn read_item(
        &self,
        isa: Isa,
        item: &Item,
        tiers: &Tiers<'_>,
        qkv: &[f32],
        scratch: &mut AttendScratch,
        states: &mut HeadStates,
    ) {
        self.gather_queries(&item.heads, qkv, scratch);
        let (heads, sequence) = (self.heads, self.sequence);
        let AttendScratch { queries, spans, kernel, .. } = scratch;
        states.resize_with(item.heads.len(), SoftmaxState::default);
        states.iter_mut().for_each(|state| state.reset(spans.len(), heads.head_dim));
        let mut attention =
            PageAttention { isa, sequence, kv_heads: &item.heads, heads, queries, kernel, states };
        let (cache, layer) = (tiers.cache, tiers.layer);
        if heads.window.is_some() {
            return attention.exact(cache, layer, spans, item.pages.clone());
        }
        if let Some(history) = &tiers.history {
            let early: Vec<Span> = spans
                .iter_mut()
                .map(|span| {
                    span.from = (history.ends)(span.to - 1).min(span.to);
                    Span::up_to(span.from)
                })
                .collect();
            attention.exact(history.cache, history.layer, &early, item.pages.clone());
            return attention.exact(cache, layer, spans, item.pages.clone());
        }
        let within = |pages: Range<usize>| {
            let start = pages.start.max(item.pages.start);
            start..pages.end.min(item.pages.end).max(start)
        };
        let positions =
            |pages: Range<usize>| Span { from: pages.start * PAGE_TOKENS, to: pages.end * PAGE_TOKENS };
        let history = |span: &Span| sequence.history(span.to - 1);
        // Rows of one block are neighbours: the first has the shortest history, the last the longest.
        let shortest = spans.first().map_or(0..0, history);
        let longest = spans.last().map_or(0..0, history);
        if !longest.is_empty() {
            // A row without a history sees its sink together with the rest.
            let sink = 0..longest.start;
            let early = |span: &Span| positions(if history(span).is_empty() { 0..0 } else { sink.clone() });
            attention.exact(cache, layer, &spans.iter().map(early).collect::<Vec<_>>(), within(sink.clone()));
            let middle: Vec<Span> = spans.iter().map(|span| positions(history(span))).collect();
            attention.sealed(cache, layer, &middle, within(longest));
            for span in spans.iter_mut() {
                span.from = history(span).end * PAGE_TOKENS;
            }
        }
        attention.exact(cache, layer, spans, within(shortest.end..self.block.pages));
    }

    /// The sinks of a block's rows of one KV head, in units of log₂ and relative to the same as logits of stored keys: keys
    /// are stored less their mean, so `q · mean` is missing in every logit of a row.
    fn sink_logits(&self, head: usize, sinks: &[f32], tiers: &Tiers<'_>, qkv: &[f32]) -> Vec<f32> {
        let BlockRows { block, sequence, heads } = *self;
        let (group, d) = (heads.group(), heads.head_dim);
        let sealed = tiers.cache.sealed();
        let mean =
            sealed.and_then(|sealed| sealed.sealer.stored_mean_key(HeadIndex { layer: tiers.layer, head }));
        let queries = block.tokens.clone().flat_map(|token| {
            let row = &qkv[(sequence.first_row + token) * heads.qkv_cols()..];
            row[head * group * d..(head + 1) * group * d].chunks_exact(d).enumerate()
        });
        let logit = |(member, query): (usize, &[f32])| {
            let dot = |mean: &Vec<f32>| query.iter().zip(mean).map(|(q, m)| q * m).sum::<f32>();
            let missing = mean.as_ref().map_or(0.0, dot) * heads.scale;
            (sinks[head * group + member] - missing) * std::f32::consts::LOG2_E
        };
        queries.map(logit).collect()
    }

    /// Writes the output of one KV head of a block, back in the model's basis.
    pub(super) fn write_head(
        &self,
        head: usize,
        tiers: &Tiers<'_>,
        qkv: &[f32],
        parts: &[&SoftmaxState],
        scratch: &mut AttendScratch,
        target: &DisjointSlice<'_, f32>,
    ) {
        let BlockRows { block, sequence, heads } = *self;
        let (group, d) = (heads.group(), heads.head_dim);
        let AttendScratch { rows, transform, .. } = scratch;
        rows.resize(block.tokens.len() * group * d, 0.0);
        let sinks = tiers.sinks.map(|sinks| self.sink_logits(head, sinks, tiers, qkv));
        let mut shares = Vec::new();
        for (row, out) in rows.chunks_exact_mut(d).enumerate() {
            match &sinks {
                None => SoftmaxState::finish_parts(parts, row, out),
                Some(sinks) => shares.push(SoftmaxState::finish_with_sink(parts, row, Some(sinks[row]), out)),
            }
        }
        if let Some(sealed) = tiers.cache.sealed() {
            let index = HeadIndex { layer: tiers.layer, head };
            sealed.sealer.undo_values(index, rows, transform);
            // The weights of a row's values add up to one less the share of its sink, and so does the mean's.
            if let Some(mean) = sealed.sealer.mean(index, Side::Value).filter(|_| sinks.is_some()) {
                for (row, share) in rows.chunks_exact_mut(d).zip(&shares) {
                    row.iter_mut().zip(mean).for_each(|(value, mean)| *value -= share * mean);
                }
            }
        }
        for (rows, token) in rows.chunks_exact(group * d).zip(block.tokens.clone()) {
            let row = sequence.first_row + token;
            let start = (row * heads.q_heads + head * group) * d;
            // SAFETY: every (row, KV head) belongs to one block, whose heads are written once each.
            unsafe { target.part(start..start + group * d) }.copy_from_slice(rows);
        }
    }
}

/// The rows of an item while they read pages.
struct PageAttention<'a> {
    isa: Isa,
    sequence: &'a StepSequence,
    kv_heads: &'a Range<usize>,
    heads: Heads,
    queries: &'a [f32],
    kernel: &'a mut AttentionScratch,
    states: &'a mut [SoftmaxState],
}

impl PageAttention<'_> {
    /// Adds bf16 pages to the softmax of the rows.
    fn exact(&mut self, cache: &Cache, layer: usize, spans: &[Span], pages: Range<usize>) {
        let (first, Heads { head_dim, scale, .. }) = (pages.start, self.heads);
        let slots = &self.sequence.pages[pages];
        if slots.is_empty() {
            return;
        }
        let PageAttention { isa, kv_heads, queries, kernel, states, .. } = self;
        let rows = queries.chunks_exact(spans.len() * head_dim);
        for ((head, queries), state) in kv_heads.clone().zip(rows).zip(states.iter_mut()) {
            let pages: Vec<&[u16]> = slots.iter().map(|&slot| cache.page(layer, slot, head)).collect();
            attention::attend(*isa, queries, scale, spans, first, &pages, head_dim, kernel, state);
        }
    }

    /// Adds sealed pages to the softmax of the rows.
    fn sealed(&mut self, cache: &Cache, layer: usize, spans: &[Span], pages: Range<usize>) {
        let first = pages.start;
        let PageAttention { isa, sequence, kv_heads, heads, queries, kernel, states } = self;
        let slots = sequence.sealed_slots(pages);
        // All are in the pool of the first.
        let Some(sealed) = slots.first().and_then(|&slot| cache.sealed_with(slot)) else { return };
        let mut found: Vec<&[u8]> = Vec::with_capacity(slots.len() * kv_heads.len());
        let page = sealed.pages(layer);
        for &slot in slots {
            found.extend(kv_heads.clone().map(|head| page(head, slot)));
        }
        let means: Vec<&[u16]> = match cache.page_means(layer) {
            None => Vec::new(),
            Some(mean) => (first..first + slots.len())
                .flat_map(|page| kv_heads.clone().map(move |head| (page, head)))
                .map(|(page, head)| mean(page, head))
                .collect(),
        };
        let pages = SealedPages { layout: &sealed.layouts[layer], first, bytes: &found, means: &means };
        attend_sealed_heads(*isa, pages, queries, heads.scale, spans, kernel, states);
    }
}
