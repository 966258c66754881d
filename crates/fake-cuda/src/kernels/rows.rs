//! `many_rows.cu`: attention of many rows, whichever of the two kernels for it a card has. A block has neighbouring rows of one KV
//! head and walks over the pages that any of them sees.

use super::attend::State;
use super::dot;
use crate::call::Call;
use crate::memory::Fault;
use crate::pages::{Order, page_mean};

const PAGE: i32 = 64;
/// Rows of a block: tokens times the query heads of a KV head.
const ROWS: i32 = 128;

/// Neighbouring rows of one sequence.
struct Item {
    table: usize,
    pages: usize,
    first_row: usize,
    first_position: i32,
    tokens: i32,
    least_end: i32,
    most_end: i32,
}

/// One page of one kind.
#[derive(Clone, Copy)]
struct Turn {
    page: i32,
    sealed: bool,
}

/// The way through the pages of a block.
struct Walk {
    item: Item,
    sink: i32,
    window: i32,
}

impl Walk {
    fn last(&self) -> i32 {
        self.item.first_position + self.item.tokens - 1
    }

    fn first(&self, page: i32) -> Turn {
        Turn { page, sealed: page * PAGE >= self.sink && page * PAGE < self.item.most_end }
    }

    fn begin(&self) -> Turn {
        self.first((self.item.first_position - self.window + 1).max(0) / PAGE)
    }

    fn next(&self, turn: Turn) -> Turn {
        if turn.sealed && turn.page * PAGE + PAGE > self.item.least_end {
            return Turn { page: turn.page, sealed: false };
        }
        self.first(turn.page + 1)
    }

    fn seen_by_all(&self, turn: Turn) -> bool {
        let begin = turn.page * PAGE;
        if turn.sealed {
            return begin + PAGE <= self.item.least_end;
        }
        begin + PAGE <= self.item.first_position + 1
            && (begin < self.sink || begin >= self.item.most_end)
            && begin > self.last() - self.window
    }

    /// Keys of a page that the row at a position sees, whose history ends at `end`.
    fn seen(&self, turn: Turn, position: i32, end: i32) -> std::ops::Range<usize> {
        if self.seen_by_all(turn) {
            return 0..PAGE as usize;
        }
        let first = turn.page * PAGE;
        let from = if turn.sealed || first < self.sink { 0 } else { end - first };
        let begin = from.max(position - self.window + 1 - first).clamp(0, PAGE);
        let until = if turn.sealed { end - first } else { position - first + 1 };
        begin as usize..until.clamp(begin, PAGE) as usize
    }
}

/// A row of the batch with one query head.
struct Row {
    query: Vec<f32>,
    position: i32,
    end: i32,
    state: State,
}

pub(super) fn attend_rows(call: &Call<'_>) -> Result<(), Fault> {
    let a = &call.arguments;
    let (exact, sealed) = (call.exact_pages()?, call.sealed_pages()?);
    let items = call.table("Item", a.pointer("items")?, call.grid[0])?;
    for index in 0..call.grid[0] {
        for head in 0..call.grid[1] {
            let record = items.get(index);
            let item = Item {
                table: record.count("table")?,
                pages: record.count("pages")?,
                first_row: record.count("first_row")?,
                first_position: record.int("first_position")?,
                tokens: record.int("tokens")?,
                least_end: record.int("least_end")?,
                most_end: record.int("most_end")?,
            };
            if item.tokens * a.int("group")? > ROWS {
                return Err(format!("{} tokens in a block of {ROWS} rows", item.tokens));
            }
            block(
                call,
                &Walk { item, sink: a.int("sink")?, window: a.int("window")? },
                head,
                [&exact, &sealed],
            )?;
        }
    }
    Ok(())
}

fn block(call: &Call<'_>, walk: &Walk, head: usize, orders: [&Order; 2]) -> Result<(), Fault> {
    let (a, memory, d) = (&call.arguments, call.memory, call.number("HEAD_DIM")?);
    let (group, scale) = (a.count("group")?, a.float("scale")?);
    let item = &walk.item;
    let mut rows = Vec::new();
    for token in 0..item.tokens as usize {
        let row = item.first_row + token;
        let end = memory.get::<i32>(a.pointer("ends")? + 4 * row as u64)?;
        for query_head in head * group..(head + 1) * group {
            let at = row * a.count("query_stride")? + query_head * d;
            rows.push(Row {
                query: memory.read(a.pointer("queries")? + 4 * at as u64, d)?,
                position: item.first_position + token as i32,
                end,
                state: State::new(d),
            });
        }
    }
    let mut turn = walk.begin();
    while turn.page <= walk.last() / PAGE {
        let order = orders[usize::from(turn.sealed)];
        let at = page_of(call, walk, turn, head, order.bytes())?;
        let page = order.rows(memory, at)?;
        let [keys, values] = &*page;
        let mean = match turn.sealed {
            true => page_mean(call, turn.page as usize, [call.grid[1], head], d)?,
            false => None,
        };
        for row in &mut rows {
            let seen = walk.seen(turn, row.position, row.end);
            let keys = &keys[seen.start * d..seen.end * d];
            let more = mean.as_ref().map_or(0.0, |mean| dot(&row.query, mean));
            let logits: Vec<f32> =
                keys.chunks_exact(d).map(|key| (more + dot(&row.query, key)) * scale).collect();
            row.state.add(&logits, &values[seen.start * d..seen.end * d]);
        }
        turn = walk.next(turn);
    }
    for (index, row) in rows.into_iter().enumerate() {
        let at =
            (item.first_row + index / group) * a.count("out_stride")? + (head * group + index % group) * d;
        if let Some(totals) = a.optional("totals")? {
            memory.write(totals + (4 * (at / d)) as u64, &[row.state.total()])?;
        }
        memory.write(a.pointer("out")? + 4 * at as u64, &row.state.finish())?;
    }
    Ok(())
}

/// Finds the address of the page that a turn reads.
fn page_of(call: &Call<'_>, walk: &Walk, turn: Turn, head: usize, bytes: usize) -> Result<u64, Fault> {
    let a = &call.arguments;
    let entry = walk.item.table + turn.page as usize + if turn.sealed { walk.item.pages } else { 0 };
    let slot = call.memory.get::<u32>(a.pointer("tables")? + 4 * entry as u64)? as usize;
    let exact_slots = a.count("exact_slots")?;
    let at = |pool: u64, offset: usize| pool.wrapping_add((offset + head * bytes) as u64);
    Ok(if turn.sealed {
        at(a.pointer("sealed")?, slot * a.count("sealed_stride")?)
    } else if slot < exact_slots {
        at(a.pointer("exact")?, slot * a.count("exact_stride")?)
    } else {
        at(a.pointer("scratch")?, (slot - exact_slots) * call.grid[1] * bytes)
    })
}
