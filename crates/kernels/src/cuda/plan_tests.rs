//! Every token of every unit is read once, whatever the batch, and no block has much more to do than another.

use super::*;

fn shape(blocks: usize) -> PlanShape {
    PlanShape {
        kv_heads: 2,
        group: 12,
        rows: 8,
        warps: 4,
        blocks,
        turns: 1,
        most_tiles: 256,
        exact: (8, 4096),
        sealed: (1, 4608),
    }
}

/// The tables of a sequence.
type Tables<'a> = (&'a [Option<ExactSlot>], &'a [Option<SealedSlot>]);

/// Slots that tell pages and pools apart.
struct Slots {
    exact: Vec<Option<ExactSlot>>,
    sealed: Vec<Option<SealedSlot>>,
}

impl Slots {
    fn all(&self) -> Tables<'_> {
        (&self.exact, &self.sealed)
    }

    fn first(&self, pages: usize) -> Tables<'_> {
        (&self.exact[..pages], &self.sealed[..pages])
    }
}

fn slots(pages: usize, first: u32) -> Slots {
    let numbers = |first: u32| (0..pages as u32).map(move |page| first + 3 * page);
    Slots { exact: ExactSlot::table(numbers(first)), sealed: SealedSlot::table(numbers(first + 1)) }
}

/// The segments of a block, as the kernel finds them.
fn of_block(plan: &Plan, block: usize) -> Vec<Segment> {
    let mut segments = Vec::new();
    let mut index = block as i32;
    while index >= 0 && plan.segments[index as usize].unit >= 0 {
        segments.push(plan.segments[index as usize]);
        index = plan.segments[index as usize].next;
    }
    segments
}

/// The positions a unit reads, as the kernel derives them from segments.
fn check(shape: &PlanShape, plan: &Plan, sequences: &[DecodeSequence<'_>]) {
    let parts = shape.group.div_ceil(shape.rows);
    let units = sequences.len() * shape.kv_heads * parts;
    assert_eq!(plan.first_partial.len(), units + 1);
    let mut partials = vec![false; plan.partials];
    let mut seen = vec![Vec::new(); units];
    let all: Vec<Segment> = (0..shape.blocks).flat_map(|block| of_block(plan, block)).collect();
    for block in 0..shape.blocks {
        // What is left is taken by the next segment, which must be of the same unit.
        let segments = of_block(plan, block);
        for (index, segment) in segments.iter().enumerate() {
            let next = segments.get(index + 1).filter(|next| next.result == TAKEN);
            assert_eq!(segment.result == LEFT, next.is_some(), "{segment:?}");
            assert!(next.is_none_or(|next| (next.unit, next.partial) == (segment.unit, segment.partial)));
        }
        assert!(segments.first().is_none_or(|first| first.result != TAKEN));
    }
    assert_eq!(all.iter().filter(|segment| segment.result != LEFT).count(), plan.partials);
    for segment in &all {
        let unit = segment.unit as usize;
        if segment.result != LEFT {
            let twice = std::mem::replace(&mut partials[segment.partial as usize], true);
            assert!(!twice, "a partial result twice");
        }
        let range = plan.first_partial[unit]..plan.first_partial[unit + 1];
        assert_eq!((segment.first_partial, segment.partials), (range.start, range.len() as i32));
        // Longer only where a unit has as many as it may have.
        let long = (segment.end - segment.begin) as usize > shape.most_tiles * shape.warps;
        assert!(!long || range.len() * 3 > MOST_PARTIALS, "{segment:?} {range:?}");
        assert!(range.contains(&segment.partial) && range.len() <= MOST_PARTIALS, "{segment:?} {range:?}");
        assert!(segment.rows as usize <= shape.rows);
        let sequence = &sequences[segment.sequence as usize];
        for tile in segment.begin..segment.end {
            let (per_page, sealed) =
                if segment.kind == 1 { (shape.sealed.0, true) } else { (shape.exact.0, false) };
            let (page, part) = (tile / per_page as i32, tile as usize % per_page);
            let page = match sealed {
                true => segment.sink_pages + page,
                false if page < segment.sink_pages => page,
                false => page - segment.sink_pages + segment.history_end,
            } as usize;
            let history = sequence.sink_pages..sequence.history_end;
            assert_eq!(history.contains(&page), sealed, "{segment:?} page {page}");
            let tokens = PAGE_TOKENS / per_page;
            let first = page * PAGE_TOKENS + part * tokens;
            seen[unit].extend(first..(first + tokens).min(sequence.tokens));
        }
    }
    for (unit, mut seen) in seen.into_iter().enumerate() {
        seen.sort_unstable();
        let tokens = sequences[unit / (shape.kv_heads * parts)].tokens;
        assert!(seen.iter().copied().eq(0..tokens), "unit {unit} of {tokens} tokens");
    }
    for (index, sequence) in sequences.iter().enumerate() {
        let row = &plan.table[index * plan.table_width..][..sequence.exact.len()];
        for (page, &slot) in row.iter().enumerate() {
            let expected = match (sequence.sink_pages..sequence.history_end).contains(&page) {
                true => sequence.sealed[page].map(SealedSlot::number),
                false => sequence.exact[page].map(ExactSlot::number),
            };
            assert_eq!(slot as u32, expected.unwrap_or(0), "page {page}");
        }
    }
}

fn sequence(
    tokens: usize,
    sink_pages: usize,
    history_end: usize,
    (exact, sealed): Tables<'_>,
) -> DecodeSequence<'_> {
    DecodeSequence { row: 0, tokens, sink_pages, history_end, exact, sealed }
}

/// The plan of sequences that are the rows of a batch, in order.
fn planned(shape: &PlanShape, split: Split, batch: &[DecodeSequence<'_>]) -> Result<Plan, CudaError> {
    let rows = batch.iter().enumerate().map(|(row, sequence)| DecodeSequence { row, ..*sequence });
    Plan::new(shape, split, &rows.collect::<Vec<_>>())
}

#[test]
fn every_token_is_read_once() {
    let slots = slots(2000, 1);
    let batches: Vec<Vec<DecodeSequence<'_>>> = vec![
        vec![sequence(1, 1, 0, slots.first(1))],
        vec![sequence(0, 1, 0, (&[], &[]))],
        vec![
            sequence(64, 1, 1, slots.first(1)),
            sequence(65, 1, 1, slots.first(2)),
            sequence(63, 0, 0, slots.first(1)),
        ],
        vec![sequence(100_000, 1, 1558, slots.all())],
        vec![
            sequence(64 * 9, 0, 9, slots.first(9)),
            sequence(0, 0, 0, (&[], &[])),
            sequence(5000, 1, 70, slots.first(200)),
        ],
        (0..40).map(|i| sequence(i * 517, 1, (i * 517 / 64).saturating_sub(5), slots.first(400))).collect(),
    ];
    for blocks in [1, 7, 132, 396] {
        for split in [Split::Balanced, Split::Fixed { pages: 1 }, Split::Fixed { pages: 16 }] {
            for batch in &batches {
                let plan = planned(&shape(blocks), split, batch).unwrap();
                check(&shape(blocks), &plan, batch);
            }
        }
    }
    let none = planned(&shape(3), Split::Balanced, &[]).unwrap();
    assert_eq!((none.partials, none.bytes), (0, 0));
}

#[test]
fn segments_are_no_longer_than_they_may_be() {
    let (slots, slots_of_longest) = (slots(1 << 17, 0), slots(1 << 18, 0));
    let long = [sequence(64 << 17, 1, (1 << 17) - 5, slots.all())];
    for split in [Split::Balanced, Split::Fixed { pages: 1 << 20 }] {
        let plan = planned(&shape(1), split, &long).unwrap();
        check(&PlanShape { kv_heads: 2, ..shape(1) }, &plan, &long);
        assert!(plan.partials > 4, "{}", plan.partials);
    }
    // As long as a sequence may be: segments are longer, so that there are no more partial results than may be.
    let longest = [sequence(1 << 24, 1, (1 << 18) - 5, slots_of_longest.all())];
    for split in [Split::Balanced, Split::Fixed { pages: 1 }] {
        check(&shape(1), &planned(&shape(1), split, &longest).unwrap(), &longest);
    }
    assert!(
        planned(&shape(1), Split::Balanced, &[sequence((1 << 24) + 1, 0, 0, (&[None; 1 << 19], &[]))])
            .is_err()
    );
}

#[test]
fn blocks_have_about_the_same_to_do() {
    let slots = slots(2000, 1);
    // The most that a block has to do over the mean; whole turns of all warps count, and beginning a segment.
    let load = |shape: &PlanShape, batch: &[DecodeSequence<'_>]| -> f64 {
        let plan = planned(shape, Split::Balanced, batch).unwrap();
        let segment = |s: &Segment| {
            let turns = ((s.end - s.begin) as usize).div_ceil(shape.warps);
            overhead(shape) + turns * shape.warps * if s.kind == 1 { shape.sealed.1 } else { shape.exact.1 }
        };
        let loads: Vec<usize> =
            (0..shape.blocks).map(|block| of_block(&plan, block).iter().map(segment).sum()).collect();
        let mean = loads.iter().sum::<usize>() as f64 / shape.blocks as f64;
        *loads.iter().max().unwrap() as f64 / mean
    };
    let shape = PlanShape { kv_heads: 8, group: 4, ..shape(396) };
    let batch: Vec<DecodeSequence<'_>> = (0..32).map(|_| sequence(32768, 1, 507, slots.first(512))).collect();
    assert!(load(&shape, &batch) < 1.02, "{}", load(&shape, &batch));
    assert!(load(&shape, &batch[..8]) < 1.08, "{}", load(&shape, &batch[..8]));
    // Sealed and bf16 tiles of a unit are mostly the work of one block.
    let plan = planned(&shape, Split::Balanced, &batch).unwrap();
    assert!(plan.segments.len() - plan.partials > 200, "{} of {}", plan.partials, plan.segments.len());
    let ragged: Vec<DecodeSequence<'_>> =
        (0..32).map(|i| sequence(1000 + 3000 * i, 1, (1000 + 3000 * i) / 64 - 4, slots.all())).collect();
    assert!(load(&shape, &ragged) < 1.08, "{}", load(&shape, &ragged));
    // One sequence: few turns for each, so that one more shows.
    let single = [sequence(100_000, 1, 1558, slots.all())];
    assert!(load(&shape, &single) < 1.2, "{}", load(&shape, &single));
    let short = [sequence(30_000, 1, 464, slots.all())];
    let large = PlanShape { warps: 8, blocks: 132, ..shape };
    assert!(load(&large, &short) < 1.2, "{}", load(&large, &short));
    // Where segments are dear, as with twelve query heads, blocks do not spend their share on beginning them.
    for (shape, batch, most) in [
        (PlanShape { turns: 4, blocks: 264, ..shape }, &batch[..], 1.02),
        (PlanShape { turns: 4, blocks: 264, ..shape }, &batch[..8], 1.08),
        (PlanShape { turns: 4, blocks: 264, ..shape }, &single[..], 1.2),
        (PlanShape { turns: 4, ..large }, &short[..], 1.2),
    ] {
        assert!(load(&shape, batch) < most, "{shape:?}: {}", load(&shape, batch));
    }
}

#[test]
fn fixed_splits_do_not_see_the_rest_of_the_batch() {
    let slots = slots(2000, 1);
    let cuts = |batch: &[DecodeSequence<'_>], blocks: usize, index: i32| {
        let plan = planned(&shape(blocks), Split::Fixed { pages: 8 }, batch).unwrap();
        let first = plan.first_partial[index as usize * 4];
        let mut cuts: Vec<_> =
            plan.segments.iter().filter(|segment| segment.unit >= 0 && segment.sequence == index).collect();
        cuts.sort_by_key(|segment| segment.partial);
        cuts.iter()
            .map(|s| (s.head, s.first_row, s.kind, s.begin, s.end, s.partial - first))
            .collect::<Vec<_>>()
    };
    let long = sequence(20_000, 1, 300, slots.all());
    let plan = planned(&shape(1), Split::Fixed { pages: 8 }, &[long]).unwrap();
    assert!(plan.segments.iter().all(|segment| segment.result == PARTIAL));
    let alone = cuts(&[long], 132, 0);
    assert!(alone.len() > 8);
    assert_eq!(
        alone,
        cuts(&[sequence(7777, 1, 100, slots.all()), sequence(64, 1, 0, slots.all()), long], 17, 2)
    );
}

#[test]
fn batches_that_cannot_be_read_are_refused() {
    let slots = slots(10, 1);
    let refused = |s: DecodeSequence<'_>| planned(&shape(4), Split::Balanced, &[s]).unwrap_err();
    assert!(matches!(
        refused(sequence(65, 0, 0, slots.first(1))),
        CudaError::Shape { expected: 2, got: 1, .. }
    ));
    assert!(matches!(
        refused(sequence(100, 0, 2, slots.all())),
        CudaError::Shape { expected: 2, got: 1, .. }
    ));
    let unsealed = (slots.all().0, slots.first(6).1);
    assert!(matches!(refused(sequence(640, 1, 7, unsealed)), CudaError::Shape { expected: 7, got: 6, .. }));
    assert!(matches!(refused(sequence(1 << 40, 0, 0, slots.all())), CudaError::Shape { .. }));
    assert!(matches!(
        refused(sequence(64, 0, 0, (&ExactSlot::table([u32::MAX]), &[]))),
        CudaError::Unsupported(_)
    ));
    let plan = planned(&shape(4), Split::Balanced, &[sequence(640, 1, 7, slots.all())]).unwrap();
    assert_eq!(plan.slots, [1..28 + 1, 5..20 + 1]);
}

/// Sequences of other kernels have rows of the batch too, which a plan leaves alone.
#[test]
fn rows_between_those_of_a_plan_are_left_alone() {
    let slots = slots(400, 1);
    let batch: Vec<DecodeSequence<'_>> = (0..9).map(|i| sequence(i * 517, 1, 1, slots.first(400))).collect();
    for split in [Split::Balanced, Split::Fixed { pages: 4 }] {
        let together = planned(&shape(20), split, &batch).unwrap();
        let apart: Vec<_> = (0..).zip(&batch).map(|(i, s)| DecodeSequence { row: 3 * i + 2, ..*s }).collect();
        let plan = Plan::new(&shape(20), split, &apart).unwrap();
        assert_eq!((plan.rows, plan.table.len()), (27, 27 * plan.table_width));
        let moved = |segment: &Segment| Segment {
            sequence: if segment.unit < 0 { 0 } else { 3 * segment.sequence + 2 },
            ..*segment
        };
        assert!(plan.segments.iter().copied().eq(together.segments.iter().map(moved)));
        for row in 0..plan.rows {
            let table = &plan.table[row * plan.table_width..][..plan.table_width];
            let expected = &together.table[row / 3 * plan.table_width..][..plan.table_width];
            assert!(if row % 3 == 2 { table == expected } else { table.iter().all(|&slot| slot == 0) });
        }
    }
    let twice = [batch[1], batch[2]];
    assert!(matches!(Plan::new(&shape(4), Split::Balanced, &twice), Err(CudaError::Shape { .. })));
}
