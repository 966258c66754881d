//! `experts.cu` and `experts_few.cu`: products of the experts that were chosen.

use super::activations::{activated, packed_row, source_row, to_bf16, to_f16};
use super::route::choices;
use super::tiles::{COLUMNS, Kind, ROWS, tile_row};
use super::{add_multiple, dot};
use crate::call::{Call, Record};
use crate::memory::Fault;

/// What all products of a launch share.
struct Experts<'a> {
    call: &'a Call<'a>,
    kind: Kind,
    outputs: usize,
    steps: usize,
    tile_rows: usize,
}

impl<'a> Experts<'a> {
    fn new(call: &'a Call<'a>) -> Result<Experts<'a>, Fault> {
        let a = &call.arguments;
        let kind = i32::try_from(call.number("KIND")?).map_err(|_| "a kind of tiles")?;
        let (outputs, steps, tile_rows) = (a.count("outputs")?, a.count("steps")?, a.count("tile_rows")?);
        if tile_rows != outputs.div_ceil(ROWS) {
            return Err(format!("{tile_rows} rows of tiles for {outputs} outputs"));
        }
        Ok(Experts { call, kind: Kind::of(kind)?, outputs, steps, tile_rows })
    }

    fn wide(&self) -> bool {
        self.kind == Kind::Floats
    }

    /// The tiles of an expert among those of all.
    fn tiles_of(&self, all: u64, expert: usize) -> u64 {
        all + (expert * self.tile_rows * self.steps * self.kind.tile_bytes()) as u64
    }

    /// Products of rows with a matrix, `[row][output]`, and biases of an expert where there are any.
    fn products(
        &self,
        tiles: u64,
        rows: &[(Vec<f32>, f32)],
        biases: Option<u64>,
        expert: usize,
    ) -> Result<Vec<Vec<f32>>, Fault> {
        let biases = match biases {
            Some(at) => {
                self.call.memory.read::<f32>(at + (4 * expert * self.outputs) as u64, self.outputs)?
            }
            None => vec![0.0; self.outputs],
        };
        let mut results = vec![Vec::with_capacity(self.outputs); rows.len()];
        for tile in 0..self.tile_rows {
            let at = tiles + (tile * self.steps * self.kind.tile_bytes()) as u64;
            let weights = tile_row(self.call.memory, self.kind, at, self.steps)?;
            let here = ROWS.min(self.outputs - tile * ROWS);
            for ((x, factor), results) in rows.iter().zip(&mut results) {
                for (channel, weights) in weights.chunks_exact(self.steps * COLUMNS).take(here).enumerate() {
                    results.push(dot(x, weights) * factor + biases[tile * ROWS + channel]);
                }
            }
        }
        Ok(results)
    }

    /// Rounds a row to what tiles of this kind are multiplied with; what results are multiplied with.
    fn rounded(&self, mut x: Vec<f32>) -> (Vec<f32>, f32) {
        x.resize(self.steps * COLUMNS, 0.0);
        let factor = if self.wide() {
            to_bf16(&mut x);
            1.0
        } else {
            to_f16(&mut x)
        };
        (x, factor)
    }
}

/// Applies the activation of gates to the products of both halves.
fn gate(a: &Record<'_>, gates: &mut [f32], ups: &[f32]) -> Result<(), Fault> {
    let (activation, alpha, limit) = (a.int("activation")?, a.float("alpha")?, a.float("limit")?);
    gates.iter_mut().zip(ups).for_each(|(gate, up)| *gate = activated(activation, alpha, limit, *gate, *up));
    Ok(())
}

pub(super) fn multiply_experts(call: &Call<'_>) -> Result<(), Fault> {
    let (a, memory, experts) = (&call.arguments, call.memory, Experts::new(call)?);
    let per_row = a.count("choices_per_row")?;
    let count = memory.get::<i32>(a.pointer("job_count")?)?;
    let jobs =
        call.table("Job", a.pointer("jobs")?, usize::try_from(count).map_err(|_| format!("{count} jobs"))?)?;
    if a.count("rows.rows")? != experts.steps * COLUMNS * 2 {
        return Err(format!("rows of {} bytes", a.count("rows.rows")?));
    }
    for index in 0..count as usize {
        let job = jobs.get(index);
        let (expert, first, rows) = (job.count("expert")?, job.count("first")?, job.count("count")?);
        if rows > 8 * call.number("COLUMN_TILES")? {
            return Err(format!("a job of {rows} rows"));
        }
        let chosen = memory.read::<u32>(a.pointer("order")? + 4 * first as u64, rows)?;
        let packed = a.pointer(if experts.wide() { "rows.bf16" } else { "rows.f16" })?;
        let activations = chosen
            .iter()
            .map(|&choice| {
                let row = choice as usize / per_row;
                let x = packed_row(memory, packed, row, experts.steps, experts.wide())?;
                let factor = match experts.wide() {
                    true => 1.0,
                    false => memory.get::<f32>(a.pointer("factors")? + 4 * row as u64)?,
                };
                Ok((x, factor))
            })
            .collect::<Result<Vec<_>, Fault>>()?;
        let half = |half: usize| {
            let tiles = experts.tiles_of(a.pointer(&format!("tiles[{half}]"))?, expert);
            experts.products(tiles, &activations, a.optional(&format!("biases[{half}]"))?, expert)
        };
        let mut results = half(0)?;
        if a.int("halves")? == 2 {
            for (gates, ups) in results.iter_mut().zip(half(1)?) {
                gate(a, gates, &ups)?;
            }
        }
        for (&choice, result) in chosen.iter().zip(&results) {
            memory.write(a.pointer("out")? + 4 * u64::from(choice) * experts.outputs as u64, result)?;
        }
    }
    Ok(())
}

/// An expert of a row, or the shared one, which has no weight of its own.
struct Slot {
    expert: Option<usize>,
    weight: f32,
}

impl Slot {
    /// All slots of a row.
    fn of_row(call: &Call<'_>, row: usize) -> Result<Vec<Slot>, Fault> {
        let (a, top_k) = (&call.arguments, call.arguments.count("top_k")?);
        let chosen = choices(call, a.pointer("choices")? + (8 * row * top_k) as u64, top_k)?;
        let slots = chosen.iter().map(|choice| Slot { expert: Some(choice.expert), weight: choice.weight });
        let shared = (top_k..a.count("slots")?).map(|_| Slot { expert: None, weight: 1.0 });
        Ok(slots.chain(shared).collect())
    }

    /// The products of a row with one matrix of this slot.
    fn products(&self, experts: &Experts<'_>, half: usize, row: &(Vec<f32>, f32)) -> Result<Vec<f32>, Fault> {
        let a = &experts.call.arguments;
        let (tiles, biases) = match self.expert {
            Some(expert) => (
                experts.tiles_of(a.pointer(&format!("tiles[{half}]"))?, expert),
                a.optional(&format!("biases[{half}]"))?,
            ),
            None => (a.pointer(&format!("shared_tiles[{half}]"))?, None),
        };
        let mut results =
            experts.products(tiles, std::slice::from_ref(row), biases, self.expert.unwrap_or(0))?;
        results.pop().ok_or_else(|| "no products".to_owned())
    }
}

pub(super) fn open_experts(call: &Call<'_>) -> Result<(), Fault> {
    let (a, experts) = (&call.arguments, Experts::new(call)?);
    for row in 0..a.count("rows")? {
        let x = experts.rounded(source_row(a, "source.", call.memory, row)?);
        let slots = Slot::of_row(call, row)?;
        for (index, slot) in slots.iter().enumerate() {
            let mut results = slot.products(&experts, 0, &x)?;
            gate(a, &mut results, &slot.products(&experts, 1, &x)?)?;
            let at = (row * slots.len() + index) * experts.outputs;
            call.memory.write(a.pointer("inner")? + 4 * at as u64, &results)?;
        }
    }
    Ok(())
}

pub(super) fn close_experts(call: &Call<'_>) -> Result<(), Fault> {
    let (a, memory, experts) = (&call.arguments, call.memory, Experts::new(call)?);
    let inputs = a.count("inputs")?;
    for row in 0..a.count("rows")? {
        let slots = Slot::of_row(call, row)?;
        let mut sum = vec![0.0_f32; experts.outputs];
        for (index, slot) in slots.iter().enumerate() {
            let at = (row * slots.len() + index) * inputs;
            let x = experts.rounded(memory.read::<f32>(a.pointer("inner")? + 4 * at as u64, inputs)?);
            let results = slot.products(&experts, 0, &x)?;
            add_multiple(&mut sum, slot.weight, &results);
        }
        let at = a.pointer("hidden")? + (4 * row * experts.outputs) as u64;
        let mut hidden = memory.read::<f32>(at, experts.outputs)?;
        hidden.iter_mut().zip(&sum).for_each(|(hidden, sum)| *hidden += sum);
        memory.write(at, &hidden)?;
    }
    Ok(())
}
