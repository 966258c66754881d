//! `sample.cu`: a token of every row of logits, and what the host needs to know of the row.

use crate::call::{Call, Record, Written};
use crate::memory::Fault;

const NONE: u32 = u32::MAX;

/// How a row is sampled.
#[derive(Clone)]
struct Row {
    temperature: f32,
    draw: f32,
    vocabulary: usize,
    walks: bool,
    wanted: usize,
    reported: usize,
    plain: bool,
    given: u32,
    draws: bool,
    hosts: bool,
    top_k: usize,
    top_p: f32,
    min_p: f32,
}

impl Row {
    fn read(record: &Record<'_>) -> Result<Row, Fault> {
        Ok(Row {
            temperature: record.float("temperature")?,
            draw: record.float("draw")?,
            vocabulary: record.count("vocabulary")?,
            walks: record.flag("walks")?,
            wanted: record.count("wanted")?,
            reported: record.count("reported")?,
            plain: record.flag("plain")?,
            given: record.int("given")? as u32,
            draws: record.flag("draws")?,
            hosts: record.flag("hosts")?,
            top_k: record.count("top_k")?,
            top_p: record.float("top_p")?,
            min_p: record.float("min_p")?,
        })
    }

    fn takes_most_likely(&self) -> bool {
        self.top_k > 0 && self.top_k < self.vocabulary
    }
}

/// What is found out about a row.
#[derive(Clone, Default)]
struct Outcome {
    token: u32,
    bad: u32,
    largest: f32,
    logit: f32,
    listed: usize,
    decided: bool,
    total: f64,
    plain_total: f64,
    /// The largest logits, where there is room for all that were to be listed.
    list: Vec<(u32, f32)>,
}

/// A number as one whose order is that of integers; both zeros are the same.
fn ordered(x: f32) -> u32 {
    let bits = (x + 0.0).to_bits();
    if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }
}

/// Larger logits first, then smaller tokens.
fn sort(list: &mut [(u32, f32)]) {
    list.sort_by_key(|&(token, logit)| (std::cmp::Reverse(ordered(logit)), token));
}

/// The first logit that is NaN or positive infinity, or [`NONE`].
fn first_bad(logits: &[f32]) -> u32 {
    logits.iter().position(|&x| x.is_nan() || x == f32::INFINITY).map_or(NONE, |at| at as u32)
}

/// The token at which sums of weights reach a share of their total, of tokens with weights in some order.
fn reach(weights: impl Iterator<Item = (u32, f64)>, target: f64) -> Option<u32> {
    let (mut sum, mut chosen) = (0.0, None);
    for (token, weight) in weights {
        if sum > target {
            break;
        }
        sum += weight;
        if weight > 0.0 {
            chosen = Some(token);
        }
    }
    chosen
}

/// How many of the listed tokens the filters leave, of weights from the largest on; 0 if more have to be listed to know.
fn kept_by_filters(weights: &[f64], row: &Row, total_of_all: f64) -> usize {
    let mut count = weights.len();
    let mut whole = count == row.vocabulary;
    if row.takes_most_likely() {
        if count < row.top_k {
            return 0;
        }
        count = row.top_k;
        whole = true;
    }
    if row.top_p < 1.0 {
        let total = if whole { weights[..count].iter().sum() } else { total_of_all };
        let mut sum = 0.0;
        let last = weights[..count].iter().position(|weight| {
            sum += weight;
            sum >= f64::from(row.top_p) * total
        });
        match last {
            Some(last) => count = last + 1,
            None if !whole => return 0,
            None => {}
        }
        whole = true;
    }
    if row.min_p > 0.0 {
        let least = f64::from(row.min_p);
        if !whole && (count == 0 || weights[count - 1] >= least) {
            return 0;
        }
        while count > 0 && weights[count - 1] < least {
            count -= 1;
        }
    }
    count
}

/// Draws from what is listed, if that is enough.
fn draw_listed(outcome: &mut Outcome, row: &Row) {
    let mut list = outcome.list.clone();
    sort(&mut list);
    let weight = |logit: f32| (f64::from(logit - outcome.largest) / f64::from(row.temperature)).exp();
    let weights: Vec<f64> = list.iter().map(|&(_, logit)| weight(logit)).collect();
    let kept = kept_by_filters(&weights, row, outcome.total);
    list.truncate(kept);
    if !row.takes_most_likely() && row.top_p >= 1.0 {
        // Nothing has asked for an order, so it is that of numbers.
        list.sort_by_key(|&(token, _)| token);
    }
    let total: f64 = list.iter().map(|&(_, logit)| weight(logit)).sum();
    let weights = list.iter().map(|&(token, logit)| (token, weight(logit)));
    if let Some(token) = reach(weights, f64::from(row.draw) * total) {
        (outcome.token, outcome.decided) = (token, true);
    }
}

/// Surveys logits and draws from them.
fn survey_logits(logits: &[f32], row: &Row, room: usize) -> Outcome {
    let logits = &logits[..row.vocabulary];
    let mut outcome = Outcome { bad: first_bad(logits), ..Outcome::default() };
    let best = (0..logits.len()).max_by_key(|&at| (ordered(logits[at]), std::cmp::Reverse(at)));
    outcome.token = best.map_or(NONE, |at| at as u32);
    outcome.largest = best.map_or(0.0, |at| logits[at]);
    if outcome.bad != NONE || outcome.largest.is_nan() || outcome.largest == f32::NEG_INFINITY {
        return outcome;
    }
    let largest = outcome.largest;
    let weight = |logit: f32, temperature: f32| (f64::from(logit - largest) / f64::from(temperature)).exp();
    let sum = |temperature: f32| logits.iter().map(|&logit| weight(logit, temperature)).sum::<f64>();
    if row.walks {
        outcome.total = sum(row.temperature);
        let weights =
            logits.iter().enumerate().map(|(at, &logit)| (at as u32, weight(logit, row.temperature)));
        outcome.token = reach(weights, f64::from(row.draw) * outcome.total).unwrap_or(NONE);
    } else if row.wanted > 0 && row.temperature > 0.0 {
        outcome.total = sum(row.temperature);
    }
    if row.plain {
        outcome.plain_total = sum(1.0);
    }
    if row.wanted > 0 {
        let mut keys: Vec<u32> = logits.iter().map(|&logit| ordered(logit)).collect();
        keys.sort_unstable_by_key(|&key| std::cmp::Reverse(key));
        // All from some logit on: as many as are wanted, and those that are equal to the last of them.
        let floor = keys[row.wanted.min(keys.len()) - 1];
        outcome.listed = keys.partition_point(|&key| key >= floor);
        if outcome.listed <= room {
            let all = logits.iter().enumerate().map(|(at, &logit)| (at as u32, logit));
            outcome.list = all.filter(|&(_, logit)| ordered(logit) >= floor).collect();
        }
    }
    outcome.decided = !row.draws && !row.hosts;
    if row.draws && outcome.listed <= room {
        draw_listed(&mut outcome, row);
    }
    if row.given != NONE {
        outcome.token = row.given;
    }
    outcome.logit = logits[(outcome.token as usize).min(logits.len() - 1)];
    outcome
}

/// The changed copy of a row, and what is wrong with the row: its first logit that is NaN or positive infinity, or 0 if none is
/// finite.
fn change(call: &Call<'_>, record: &Record<'_>, logits: &[f32]) -> Result<(Vec<f32>, u32), Fault> {
    let (a, memory) = (&call.arguments, call.memory);
    let mut changed = logits.to_vec();
    if let Ok(mask) = usize::try_from(record.int("mask")?) {
        let words = memory.view::<u32>(a.pointer("masks")? + 4 * mask as u64, record.count("mask_words")?)?;
        for (at, x) in changed.iter_mut().enumerate() {
            if words.get(at / 32).is_none_or(|word| word >> (at % 32) & 1 == 0) {
                *x = f32::NEG_INFINITY;
            }
        }
    }
    let first = record.count("first_change")?;
    for index in first..first + record.count("changes")? {
        let table = call.entry("Change", a.pointer("changes")?, index)?;
        let single = table.get(0);
        let (penalty, add) = (single.float("penalty")?, single.float("add")?);
        let Some(x) = changed.get_mut(single.int("token")? as u32 as usize) else { continue };
        if *x > f32::NEG_INFINITY {
            *x = if *x > 0.0 { *x / penalty } else { *x * penalty } + add;
        }
    }
    let bad = first_bad(logits);
    let some = logits.iter().any(|&x| x > f32::NEG_INFINITY);
    Ok((changed, if bad == NONE && !some { 0 } else { bad }))
}

pub(super) fn survey(call: &Call<'_>) -> Result<(), Fault> {
    let (a, memory) = (&call.arguments, call.memory);
    let (room, stride) = (a.count("list_room")?, a.count("stride")?);
    let rows = call.table("Row", a.pointer("rows")?, call.grid[0])?;
    for block in 0..call.grid[0] {
        let record = rows.get(block);
        let mut row = Row::read(&record)?;
        let logits =
            memory.view::<f32>(a.pointer("logits")? + (4 * block * stride) as u64, row.vocabulary)?;
        let outcome = match usize::try_from(record.int("changed")?) {
            Err(_) => {
                row.wanted = row.wanted.max(row.reported);
                survey_logits(logits, &row, room)
            }
            Ok(place) => {
                let (changed, bad) = change(call, &record, logits)?;
                memory.write(a.pointer("changed")? + (4 * place * stride) as u64, &changed)?;
                let drawn = survey_logits(&changed, &Row { plain: false, ..row.clone() }, room);
                let mut outcome = drawn.clone();
                // Where no token may be drawn that stays to be seen.
                if row.plain && drawn.largest > f32::NEG_INFINITY {
                    let reported = Row {
                        temperature: 0.0,
                        walks: false,
                        wanted: row.reported,
                        given: drawn.token.min(row.vocabulary as u32 - 1),
                        draws: false,
                        hosts: false,
                        ..row.clone()
                    };
                    outcome = survey_logits(logits, &reported, room);
                }
                Outcome { bad, decided: drawn.decided, ..outcome }
            }
        };
        store(call, block, &row, room, &outcome)?;
    }
    Ok(())
}

fn store(call: &Call<'_>, block: usize, row: &Row, room: usize, outcome: &Outcome) -> Result<(), Fault> {
    let (a, memory) = (&call.arguments, call.memory);
    let list: Vec<u32> = outcome.list.iter().flat_map(|&(token, logit)| [token, logit.to_bits()]).collect();
    if !list.is_empty() {
        memory.write(a.pointer("lists")? + (8 * block * room) as u64, &list)?;
    }
    let mut result = Written::new(call.module, "Result")?;
    result.set_int("token", outcome.token)?;
    result.set_int("bad", outcome.bad)?;
    result.set_float("largest", outcome.largest)?;
    result.set_float("logit", outcome.logit)?;
    result.set_int("listed", outcome.listed as u32)?;
    result.set_int("decided", u32::from(outcome.decided))?;
    result.set_double("total", outcome.total)?;
    result.set_double("plain_total", outcome.plain_total)?;
    let at = a.pointer("results")? + (block * result.bytes.len()) as u64;
    memory.write(at, &result.bytes)?;
    let token = if (outcome.token as usize) < row.vocabulary { outcome.token } else { 0 };
    memory.write(a.pointer("tokens")? + 4 * block as u64, &[token])
}
