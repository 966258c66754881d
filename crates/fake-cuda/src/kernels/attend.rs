//! `attention.cu`: decode attention of a ragged batch. Blocks go through their lists of segments; whoever writes the last partial
//! result of a unit merges them all.

use super::{add_multiple, dot};
use crate::call::{Call, Record, Table};
use crate::memory::Fault;
use crate::pages::{Order, page_mean};

/// What becomes of the result of a segment.
const LEFT: i32 = 1;
const TAKEN: i32 = 2;

/// Softmax of one query row over some tokens.
#[derive(Clone, Default)]
pub(super) struct State {
    /// The largest logit, of those that are multiplied with the logarithm of e (base 2).
    pub(super) most: Option<f32>,
    /// The sum of weights relative to it.
    pub(super) total: f32,
    pub(super) values: Vec<f32>,
}

impl State {
    pub(super) fn new(head_dim: usize) -> State {
        State { most: None, total: 0.0, values: vec![0.0; head_dim] }
    }

    /// Adds tokens with their logits, and values `[token][channel]`.
    pub(super) fn add(&mut self, logits: &[f32], values: &[f32]) {
        if logits.is_empty() {
            return;
        }
        let most = logits.iter().fold(self.most.unwrap_or(f32::NEG_INFINITY), |most, &x| most.max(x));
        self.rescale(most);
        for (logit, value) in logits.iter().zip(values.chunks_exact(self.values.len())) {
            let weight = (logit - most).exp2();
            self.total += weight;
            add_multiple(&mut self.values, weight, value);
        }
    }

    fn rescale(&mut self, most: f32) {
        let factor = self.most.map_or(0.0, |before| (before - most).exp2());
        self.total *= factor;
        self.values.iter_mut().for_each(|x| *x *= factor);
        self.most = Some(most);
    }

    /// Adds what another part of the tokens has come to.
    fn merge(&mut self, other: &State) {
        let Some(theirs) = other.most else { return };
        self.rescale(self.most.map_or(theirs, |most| most.max(theirs)));
        let factor = self.most.map_or(0.0, |most| (theirs - most).exp2());
        self.total += factor * other.total;
        add_multiple(&mut self.values, factor, &other.values);
    }

    /// The values that weights average to; zeros without tokens.
    pub(super) fn finish(mut self) -> Vec<f32> {
        let inverse = if self.total > 0.0 { 1.0 / self.total } else { self.total };
        self.values.iter_mut().for_each(|x| *x *= inverse);
        self.values
    }

    /// The logarithm (base 2) of the sum of weights.
    pub(super) fn total(&self) -> f32 {
        self.most.filter(|_| self.total > 0.0).map_or(-1e30, |most| most + self.total.log2())
    }
}

/// A run of tiles of one kind.
struct Segment {
    history: bool,
    sequence: usize,
    head: usize,
    first_row: usize,
    rows: usize,
    tiles: std::ops::Range<usize>,
    partial: usize,
    unit: usize,
    first_partial: usize,
    partials: usize,
    sink_pages: usize,
    history_end: usize,
    tokens: usize,
    result: i32,
    next: i32,
}

impl Segment {
    /// `None` for a block without work.
    fn read(record: &Record<'_>) -> Result<Option<Segment>, Fault> {
        if record.int("unit")? < 0 {
            return Ok(None);
        }
        Ok(Some(Segment {
            history: record.flag("kind")?,
            sequence: record.count("sequence")?,
            head: record.count("head")?,
            first_row: record.count("first_row")?,
            rows: record.count("rows")?,
            tiles: record.count("begin")?..record.count("end")?,
            partial: record.count("partial")?,
            unit: record.count("unit")?,
            first_partial: record.count("first_partial")?,
            partials: record.count("partials")?,
            sink_pages: record.count("sink_pages")?,
            history_end: record.count("history_end")?,
            tokens: record.count("tokens")?,
            result: record.int("result")?,
            next: record.int("next")?,
        }))
    }
}

/// What all blocks of a launch share.
struct Launch<'a> {
    call: &'a Call<'a>,
    head_dim: usize,
    /// Rows that partial results have room for.
    room: usize,
    exact: Order,
    sealed: Order,
}

pub(super) fn attend(call: &Call<'_>) -> Result<(), Fault> {
    let launch = Launch {
        call,
        head_dim: call.number("HEAD_DIM")?,
        room: 8 * call.number("ROW_TILES")?,
        exact: call.exact_pages()?,
        sealed: call.sealed_pages()?,
    };
    let segments = call.arguments.pointer("segments")?;
    for block in 0..call.grid[0] {
        let (mut index, mut left) = (block as i32, Vec::new());
        while let Ok(at) = usize::try_from(index) {
            let table: Table = call.entry("Segment", segments, at)?;
            let Some(segment) = Segment::read(&table.get(0))? else { break };
            index = segment.next;
            launch.segment(&segment, &mut left)?;
        }
    }
    Ok(())
}

impl Launch<'_> {
    /// Takes the tiles of a segment, and merges if it is the last of its unit. `left` is what the segment before left here.
    fn segment(&self, s: &Segment, left: &mut Vec<State>) -> Result<(), Fault> {
        if s.rows > self.room {
            return Err(format!("{} rows of a segment, with room for {}", s.rows, self.room));
        }
        let (a, memory) = (&self.call.arguments, self.call.memory);
        let mut states = self.tiles(s)?;
        if s.result == TAKEN {
            let before = std::mem::take(left);
            states.iter_mut().zip(&before).for_each(|(state, before)| state.merge(before));
        }
        if s.result == LEFT {
            *left = states;
            return Ok(());
        }
        for (row, state) in states.iter().enumerate() {
            let place = s.partial * self.room + row;
            memory.write(a.pointer("partial_values")? + (4 * place * self.head_dim) as u64, &state.values)?;
            let numbers = [state.most.unwrap_or(f32::NEG_INFINITY), state.total];
            memory.write(a.pointer("partial_states")? + (8 * place) as u64, &numbers)?;
        }
        let arrivals = a.pointer("arrivals")? + 4 * s.unit as u64;
        let before = memory.get::<i32>(arrivals)?;
        let last = before + 1 == s.partials as i32;
        memory.write(arrivals, &[if last { 0 } else { before + 1 }])?;
        if last { self.merge(s) } else { Ok(()) }
    }

    /// Attention over the tiles of a segment, a state for each row.
    fn tiles(&self, s: &Segment) -> Result<Vec<State>, Fault> {
        let (a, memory, d) = (&self.call.arguments, self.call.memory, self.head_dim);
        let order = if s.history { &self.sealed } else { &self.exact };
        let (tile_tokens, tiles) = (order.order.tile_tokens(), order.order.tiles());
        let query = s.sequence * a.count("query_stride")? + (s.head * a.count("group")? + s.first_row) * d;
        let queries = memory.read::<f32>(a.pointer("queries")? + 4 * query as u64, s.rows * d)?;
        let mut states = vec![State::new(d); s.rows];
        let mut at = s.tiles.start;
        while at < s.tiles.end {
            // All tiles of a page at once.
            let end = (at / tiles * tiles + tiles).min(s.tiles.end);
            let page = match at / tiles {
                page if s.history => s.sink_pages + page,
                page if page < s.sink_pages => page,
                page => page - s.sink_pages + s.history_end,
            };
            let first = at % tiles * tile_tokens;
            let mut tokens = first..first + (end - at) * tile_tokens;
            if !s.history {
                // The last tile may have tokens that are not there yet.
                tokens.end = tokens.end.min(s.tokens.saturating_sub(page * 64)).max(first);
            }
            let rows = order.rows(memory, self.page(s, page, order.bytes())?)?;
            let mean = match s.history {
                true => page_mean(self.call, page, [a.count("kv_heads")?, s.head], d)?,
                false => None,
            };
            let [keys, values] = [&rows[0], &rows[1]].map(|side| &side[tokens.start * d..tokens.end * d]);
            for (query, state) in queries.chunks_exact(d).zip(&mut states) {
                let scale = a.float("scale")?;
                let more = mean.as_ref().map_or(0.0, |mean| dot(query, mean));
                let logits: Vec<f32> =
                    keys.chunks_exact(d).map(|key| (more + dot(query, key)) * scale).collect();
                state.add(&logits, values);
            }
            at = end;
        }
        Ok(states)
    }

    /// Where the page of a segment's head lies.
    fn page(&self, s: &Segment, page: usize, bytes: usize) -> Result<u64, Fault> {
        let a = &self.call.arguments;
        let entry = s.sequence * a.count("table_width")? + page;
        let slot = self.call.memory.get::<u32>(a.pointer("table")? + 4 * entry as u64)?;
        let stride = |name: &str| Ok::<u64, Fault>(u64::from(a.int(name)? as u32));
        let head = (s.head * bytes) as u64;
        let exact_slots = a.int("exact_slots")? as u32;
        // The address that slot 0 would have may lie before all memory.
        let at = |pool: u64, slot: u32, stride: u64| {
            pool.wrapping_add(u64::from(slot) * stride).wrapping_add(head)
        };
        Ok(if s.history {
            at(a.pointer("sealed_pool")?, slot, stride("sealed_stride")?)
        } else if slot >= exact_slots {
            at(a.pointer("scratch_pool")?, slot - exact_slots, stride("scratch_stride")?)
        } else {
            at(a.pointer("exact_pool")?, slot, stride("exact_stride")?)
        })
    }

    /// All partial results of a unit are there: the output.
    fn merge(&self, s: &Segment) -> Result<(), Fault> {
        let (a, memory, d) = (&self.call.arguments, self.call.memory, self.head_dim);
        let (kv_heads, group) = (a.count("kv_heads")?, a.count("group")?);
        for row in 0..s.rows {
            let mut merged = State::new(d);
            for partial in s.first_partial..s.first_partial + s.partials {
                let place = partial * self.room + row;
                let numbers = memory.read::<f32>(a.pointer("partial_states")? + (8 * place) as u64, 2)?;
                merged.merge(&State {
                    most: Some(numbers[0]).filter(|most| *most != f32::NEG_INFINITY),
                    total: numbers[1],
                    values: memory.read(a.pointer("partial_values")? + (4 * place * d) as u64, d)?,
                });
            }
            let out_row = (s.sequence * kv_heads + s.head) * group + s.first_row + row;
            if let Some(totals) = a.optional("totals")? {
                memory.write(totals + 4 * out_row as u64, &[merged.total()])?;
            }
            let mut out = merged.finish();
            if let Some(undo) = a.optional("undo")? {
                let matrix = memory.view::<f32>(undo + (4 * s.head * d * d) as u64, d * d)?;
                let mut sums = match a.optional("mean")? {
                    Some(mean) => memory.read::<f32>(mean + (4 * s.head * d) as u64, d)?,
                    None => vec![0.0; d],
                };
                for (x, weights) in out.iter().zip(matrix.chunks_exact(d)) {
                    add_multiple(&mut sums, *x, weights);
                }
                out = sums;
            }
            memory.write(a.pointer("out")? + (4 * out_row * d) as u64, &out)?;
        }
        Ok(())
    }
}
