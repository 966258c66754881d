//! The work items of a call over sealed pages, and their order.

use std::ops::Range;

use oscar_codec::PAGE_TOKENS;

use crate::cpu::attention::work::Work;

/// Fewest rows that read codes in tiles where there are any: two tiles of them, more than the query heads of one token that
/// share a KV head.
pub(super) const PREFILL_ROWS: usize = 32;

/// Rows of a call that are attended together, and a page they see.
pub(super) struct WorkItem<'a> {
    pub(super) head: usize,
    /// Rows of the head's queries.
    pub(super) rows: Range<usize>,
    pub(super) page: &'a [u8],
    /// Position of the page's first token.
    pub(super) start: usize,
    /// Number of the page, counted over the pages that any row sees.
    pub(super) index: usize,
}

/// Every group of up to `most` rows with every page that one of its rows sees, page by page and head by head.
pub(super) fn schedule<'a>(work: &Work<'a, u8>, heads: usize, most: usize) -> Vec<WorkItem<'a>> {
    let rows = work.spans.len();
    let group = equal_groups(rows, most);
    let mut items = Vec::with_capacity(work.pages.len() * rows.div_ceil(group));
    let (from, to) = (work.first_seen(), work.end());
    for (number, pages) in work.pages.chunks_exact(heads).enumerate() {
        let start = (work.first_page + number) * PAGE_TOKENS;
        if start + PAGE_TOKENS <= from || start >= to {
            continue;
        }
        for (head, page) in pages.iter().enumerate() {
            for first in (0..rows).step_by(group) {
                let rows = first..(first + group).min(rows);
                if work.spans[rows.clone()].iter().any(|span| !span.in_page(start).is_empty()) {
                    items.push(WorkItem { head, rows, page, start, index: number * heads + head });
                }
            }
        }
    }
    items
}

/// The size of groups of at most `most` rows that differ little: nine rows are five and four, not eight and one.
fn equal_groups(rows: usize, most: usize) -> usize {
    rows.div_ceil(rows.div_ceil(most).max(1)).max(1)
}
