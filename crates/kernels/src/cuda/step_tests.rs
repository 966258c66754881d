//! What the rows of random batches read and write on a card, from page tables to the segments and blocks of its kernels, is what
//! the CPU reads and writes: `StepSequence`, which both share, says so.

use std::sync::Arc;

use oscar_codec::{ExactSlot, KvGeometry, PageCodec, PageWindows, SealedSlot};
use oscar_random::Random;

use super::*;
use crate::backend::{CacheSpec, HighSpec, RopeLayout, SealedRows, SealedSpec, SequenceRows};
use crate::cuda::plan::{Plan, PlanShape};
use crate::cuda::row_blocks::RowBlocks;

const SLOTS: usize = 4096;

/// A token in a page: whether the page is sealed, its slot, and which token of it.
type Place = (bool, u32, usize);

/// A sequence of a batch.
struct Given {
    start: usize,
    len: usize,
    exact: Vec<Option<ExactSlot>>,
    sealed: Option<(Vec<Option<SealedSlot>>, usize, usize)>,
}

/// Sequences with pages of their own, some with a prompt that is read exactly and some with pages that exist only sealed. Some
/// sealed pages are of a second codec.
fn random_sequences(windows: PageWindows, most_rows: usize, random: &mut Random) -> Vec<Given> {
    let mut next = 1;
    let mut slots = |pages: usize| {
        next += pages as u32;
        next - pages as u32..next
    };
    let count = 1 + random.below(4);
    (0..count)
        .map(|_| {
            let (start, len) = (random.below(1500), 1 + random.below(most_rows));
            let pages = (start + len).div_ceil(PAGE_TOKENS);
            let exact = ExactSlot::table(slots(pages));
            let sealed = (random.below(4) > 0).then(|| {
                let exact_from = if random.below(2) == 0 { usize::MAX } else { random.below(pages + 1) };
                let most = start / PAGE_TOKENS + 1;
                let sealed_until =
                    if random.below(2) == 0 { 0 } else { windows.sink.min(most) + random.below(most) };
                let first = if random.below(3) == 0 { SLOTS as u32 } else { 0 };
                let numbers = slots(pages).map(|slot| first + slot);
                (SealedSlot::table(numbers), exact_from, sealed_until.min(most))
            });
            Given { start, len, exact, sealed }
        })
        .collect()
}

/// What a row sees, in order: the pages of its history sealed, all others exactly, up to its own position.
fn seen(sequence: &StepSequence, position: usize) -> Vec<Place> {
    let history = sequence.history(position);
    (0..=position)
        .map(|at| {
            let page = at / PAGE_TOKENS;
            let slot = match history.contains(&page) {
                true => sequence.all_sealed_slots()[page].map(SealedSlot::number),
                false => sequence.pages[page].map(ExactSlot::number),
            };
            (history.contains(&page), slot.expect("a page that is read is there"), at % PAGE_TOKENS)
        })
        .collect()
}

/// What the rows of a decode plan read, as the kernel derives it from segments.
fn read_by_plan(plan: &Plan, shape: &PlanShape, read: &mut [Vec<Place>]) {
    for segment in plan.segments.iter().filter(|segment| segment.unit >= 0) {
        let sealed = segment.kind == 1;
        let tiles = if sealed { shape.sealed.0 } else { shape.exact.0 } as i32;
        let tokens = PAGE_TOKENS / tiles as usize;
        for tile in segment.begin..segment.end {
            let page = match tile / tiles {
                page if sealed => segment.sink_pages + page,
                page if page < segment.sink_pages => page,
                page => page - segment.sink_pages + segment.history_end,
            } as usize;
            let slot = plan.table[segment.sequence as usize * plan.table_width + page] as u32;
            let first = (tile % tiles) as usize * tokens;
            let visible = (segment.tokens as usize).saturating_sub(page * PAGE_TOKENS + first).min(tokens);
            read[segment.sequence as usize]
                .extend((first..first + visible).map(|token| (sealed, slot, token)));
        }
    }
}

/// What the rows of blocks read, by their tables and the ends of histories; `sink` is what kernels are told.
fn read_by_blocks(blocks: &RowBlocks, sink: usize, read: &mut [Vec<Place>]) {
    for item in &blocks.items {
        for (row, position) in item.rows() {
            let end = blocks.ends[row] as usize;
            assert!(read[row].is_empty(), "row {row} twice");
            read[row] = (0..=position)
                .map(|at| {
                    let (page, sealed) = (at / PAGE_TOKENS, (sink..end).contains(&at));
                    (sealed, blocks.tables[item.entry(page, sealed)], at % PAGE_TOKENS)
                })
                .collect();
        }
    }
}

/// Sealed slots of a plan are those of one pool.
fn check_slots(tier: usize, slots: &std::ops::Range<usize>) {
    let pool = if tier == HIGH { SLOTS..2 * SLOTS } else { 0..SLOTS };
    assert!(slots.is_empty() || (pool.start <= slots.start && slots.end <= pool.end), "{slots:?} of {tier}");
}

#[test]
fn a_card_reads_and_writes_what_the_cpu_does() {
    let geometry = KvGeometry { layers: 1, kv_heads: 1, head_dim: 64 };
    let codec = Arc::new(PageCodec::fp8(geometry, None).unwrap());
    let rope = Rope { inverse_frequencies: vec![1.0; 4], magnitude: 1.0, layout: RopeLayout::Halves };
    let mut random = Random::new(71);
    let (mut sealed_places, mut high_rows, mut steps) = (0, 0, 0);
    for round in 0..160 {
        let windows = PageWindows { sink: random.below(3), recent: random.below(5) };
        let mut spec = CacheSpec::exact(geometry, 1, SLOTS);
        spec.sealed = Some(SealedSpec {
            codec: codec.clone(),
            slots: SLOTS,
            windows,
            sequence_pages: SLOTS,
            high: Some(HighSpec { codec: codec.clone(), slots: SLOTS }),
        });
        let decodes = round % 2 == 0;
        let given = random_sequences(windows, if decodes { 1 } else { 40 }, &mut random);
        let rows: Vec<SequenceRows<'_>> = given
            .iter()
            .map(|given| SequenceRows {
                start: given.start,
                len: given.len,
                pages: &given.exact,
                sealed: given.sealed.as_ref().map(|(pages, exact_from, sealed_until)| SealedRows {
                    pages,
                    exact_from: *exact_from,
                    sealed_until: *sealed_until,
                }),
            })
            .collect();
        let tokens = vec![0; given.iter().map(|given| given.len).sum()];
        let batch = Batch { tokens: &tokens, sequences: &rows };
        let sequences = step_sequences(&batch, &rope, &spec).unwrap();
        let mut expected: Vec<Vec<Place>> = Vec::new();
        let mut written = Vec::new();
        for sequence in &sequences {
            for position in sequence.start..sequence.start + sequence.len {
                expected.push(seen(sequence, position));
                written.push((sequence.pages[position / PAGE_TOKENS], position));
            }
        }
        let targets: Vec<_> =
            row_targets(&sequences).iter().map(|target| (target.slot, target.position)).collect();
        assert_eq!(targets, written, "round {round}");

        let end = |sequence: &StepSequence, position| sequence.history(position).end * PAGE_TOKENS;
        let mut read = vec![Vec::new(); expected.len()];
        for (tier, rows) in by_tier(&sequences, prefill_sequences(&sequences, &end)).iter().enumerate() {
            let blocks = RowBlocks::new(rows, 48).unwrap();
            check_slots(tier, &blocks.slots[1]);
            read_by_blocks(&blocks, windows.sink * PAGE_TOKENS, &mut read);
        }
        assert!(read == expected, "round {round}: blocks of rows read other places");

        // Several rows of a sequence go through the decode kernel only if all of them must.
        assert_eq!(decode_sequences(&sequences, false).is_some(), given.iter().all(|given| given.len == 1));
        let decode = decode_sequences(&sequences, true).unwrap();
        let shape = PlanShape {
            kv_heads: 1,
            group: 4,
            rows: 8,
            warps: 4,
            blocks: 20,
            turns: 1,
            most_tiles: 256,
            exact: (8, 4096),
            sealed: (4, 4160),
        };
        for split in [Split::Balanced, Split::Fixed { pages: 8 }] {
            let mut read = vec![Vec::new(); expected.len()];
            for (tier, rows) in decode.iter().enumerate() {
                let plan = Plan::new(&shape, split, rows).unwrap();
                check_slots(tier, &plan.slots[1]);
                read_by_plan(&plan, &shape, &mut read);
            }
            read.iter_mut().for_each(|places| places.sort_unstable());
            high_rows += decode[HIGH].len();
            for (row, (read, expected)) in read.iter().zip(&expected).enumerate() {
                let mut expected = expected.clone();
                sealed_places += expected.iter().filter(|place| place.0).count();
                expected.sort_unstable();
                assert!(*read == expected, "round {round}, {split:?}, row {row}");
            }
        }
        steps += 1;
    }
    assert!(steps == 160 && sealed_places > 1_000_000, "{sealed_places} tokens were read sealed");
    assert!(high_rows > 500, "{high_rows} rows read pages of the second codec");
}
