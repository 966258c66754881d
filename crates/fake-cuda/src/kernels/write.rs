//! `write.cu`: from projected rows to bf16 pages, rounded at every step as the CPU does it.

use half::bf16;
use oscar_codec::Side;

use super::add_multiple;
use crate::call::{Call, Record};
use crate::memory::Fault;
use crate::pages::Order;

/// Vectors that a row of threads has, four of which a block has side by side.
const SIDE_BY_SIDE: usize = 4;

/// What happens to the rows of one head and side.
struct Transform {
    matrix: i32,
    mean: i32,
    query_matrix: i32,
    stored: bool,
    rounds_input: bool,
}

impl Transform {
    fn read(record: &Record<'_>) -> Result<Transform, Fault> {
        Ok(Transform {
            matrix: record.int("matrix")?,
            mean: record.int("mean")?,
            query_matrix: record.int("query_matrix")?,
            stored: record.flag("stored")?,
            rounds_input: record.flag("rounds_input")?,
        })
    }
}

/// A row of the batch in a block: a query of its group, or a key or value.
#[derive(Clone, Copy)]
struct Vector {
    row: usize,
    query: Option<usize>,
}

/// `x / sqrt(mean(x^2) + epsilon) * gain`, with squares summed in 32 lanes and these one after the other.
fn norm(x: &mut [f32], gain: &[f32], epsilon: f32) {
    let mut lanes = [0.0_f32; 32];
    for chunk in x.chunks(32) {
        lanes.iter_mut().zip(chunk).for_each(|(sum, x)| *sum += x * x);
    }
    let mut sum = 0.0_f32;
    lanes.iter().for_each(|squares| sum += squares);
    let inverse = 1.0 / (sum / x.len() as f32 + epsilon).sqrt();
    x.iter_mut().zip(gain).for_each(|(x, gain)| *x *= inverse * gain);
}

/// Rotates the first channels, two for each angle.
fn rotate(x: &mut [f32], cos: &[f32], sin: &[f32], interleaved: bool) {
    let (before, pairs) = (x.to_vec(), cos.len());
    for (channel, x) in x.iter_mut().enumerate().take(2 * pairs) {
        let (second, pair, other) = match (interleaved, channel < pairs) {
            (true, _) => (channel % 2 == 1, channel / 2, channel ^ 1),
            (false, true) => (false, channel, channel + pairs),
            (false, false) => (true, channel - pairs, channel - pairs),
        };
        let turned = before[other] * sin[pair];
        *x = if second { *x * cos[pair] + turned } else { *x * cos[pair] - turned };
    }
}

/// What all blocks of a launch share.
struct Launch<'a> {
    call: &'a Call<'a>,
    head_dim: usize,
    exact: Order,
    kv_heads: usize,
    group: usize,
    row_count: usize,
    per_row: usize,
    query_tiles: usize,
    key_tiles: usize,
    in_place: bool,
}

pub(super) fn write_rows(call: &Call<'_>) -> Result<(), Fault> {
    let a = &call.arguments;
    let launch = Launch {
        call,
        head_dim: call.number("HEAD_DIM")?,
        exact: call.exact_pages()?,
        kv_heads: a.count("kv_heads")?,
        group: a.count("group")?,
        row_count: a.count("row_count")?,
        per_row: a.count("per_row")?,
        query_tiles: a.count("query_tiles")?,
        key_tiles: a.count("key_tiles")?,
        in_place: a.pointer("queries")? == a.pointer("rows")?,
    };
    if call.grid[1] != launch.kv_heads {
        return Err(format!("{} blocks for {} heads", call.grid[1], launch.kv_heads));
    }
    for head in 0..launch.kv_heads {
        for block in 0..call.grid[0] {
            launch.block(block, head)?;
        }
    }
    Ok(())
}

impl Launch<'_> {
    fn vectors(&self, queries: bool, first: usize) -> Result<Vec<Vector>, Fault> {
        let most = SIDE_BY_SIDE * self.call.number("PER_THREAD")?;
        let all = self.row_count * if queries { self.per_row } else { 1 };
        Ok((first..all.min(first + most))
            .map(|index| match queries {
                false => Vector { row: index, query: None },
                true => {
                    let (row, which) = (index / self.per_row, index % self.per_row);
                    Vector { row, query: Some(which).filter(|which| *which < self.group) }
                }
            })
            .collect())
    }

    fn block(&self, block: usize, head: usize) -> Result<(), Fault> {
        let (a, memory, d) = (&self.call.arguments, self.call.memory, self.head_dim);
        let queries = block < self.query_tiles;
        let values = block >= self.query_tiles + self.key_tiles;
        let before = match (queries, values) {
            (true, _) => 0,
            (false, false) => self.query_tiles,
            (false, true) => self.query_tiles + self.key_tiles,
        };
        let vectors =
            self.vectors(queries, (block - before) * SIDE_BY_SIDE * self.call.number("PER_THREAD")?)?;
        let layer = a.count("layer")?;
        let index = (layer * self.kv_heads + head) * 2 + usize::from(values);
        let table = self.call.entry("Transform", a.pointer("transforms")?, index)?;
        let transform = Transform::read(&table.get(0))?;
        let which = if queries { transform.query_matrix } else { transform.matrix };
        let matrix = match usize::try_from(which) {
            Ok(which) => {
                Some(memory.view::<f32>(a.pointer("matrices")? + (4 * which * d * d) as u64, d * d)?)
            }
            Err(_) => None,
        };
        // A block reads all of its vectors before it writes any.
        let inputs = vectors
            .iter()
            .map(|&vector| self.input(vector, head, values, &transform))
            .collect::<Result<Vec<_>, Fault>>()?;
        for (&vector, input) in vectors.iter().zip(inputs) {
            let output = match matrix {
                None => input,
                Some(matrix) => {
                    let mut sums = vec![0.0_f32; d];
                    for (x, weights) in input.iter().zip(matrix.chunks_exact(d)) {
                        add_multiple(&mut sums, *x, weights);
                    }
                    sums
                }
            };
            self.store(vector, head, values, &transform, &output)?;
        }
        Ok(())
    }

    /// Columns of a projected row.
    fn columns(&self) -> usize {
        (self.group + 2) * self.kv_heads * self.head_dim
    }

    /// A vector before the matrix.
    fn input(
        &self,
        vector: Vector,
        head: usize,
        values: bool,
        transform: &Transform,
    ) -> Result<Vec<f32>, Fault> {
        let (a, memory, d) = (&self.call.arguments, self.call.memory, self.head_dim);
        let q_heads = self.kv_heads * self.group;
        let place = match vector.query {
            Some(query) => head * self.group + query,
            None if values => q_heads + self.kv_heads + head,
            None => q_heads + head,
        };
        let at = vector.row * self.columns() + place * d;
        let mut x = memory.read::<f32>(a.pointer("rows")? + 4 * at as u64, d)?;
        if !values {
            let (gain, epsilon) =
                if vector.query.is_some() { ("q_gain", "q_epsilon") } else { ("k_gain", "k_epsilon") };
            if let Some(gain) = a.optional(gain)? {
                norm(&mut x, memory.view(gain, d)?, a.float(epsilon)?);
            }
            let pairs = a.count("pairs")?;
            if pairs > 0 {
                let of_row = (4 * vector.row * pairs) as u64;
                let cos = memory.view(a.pointer("cos")? + of_row, pairs)?;
                let sin = memory.view(a.pointer("sin")? + of_row, pairs)?;
                rotate(&mut x, cos, sin, a.flag("interleaved")?);
            }
        }
        if vector.query.is_none() {
            if transform.rounds_input {
                x.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32());
            }
            if let Ok(mean) = usize::try_from(transform.mean) {
                let mean = memory.view::<f32>(a.pointer("means")? + (4 * mean * d) as u64, d)?;
                x.iter_mut().zip(mean).for_each(|(x, mean)| *x -= mean);
            }
        }
        Ok(x)
    }

    fn store(
        &self,
        vector: Vector,
        head: usize,
        values: bool,
        transform: &Transform,
        output: &[f32],
    ) -> Result<(), Fault> {
        let (a, memory, d) = (&self.call.arguments, self.call.memory, self.head_dim);
        if let Some(query) = vector.query {
            let at = vector.row * a.count("query_stride")? + (head * self.group + query) * d;
            return memory.write(a.pointer("queries")? + 4 * at as u64, output);
        }
        if self.in_place && !values {
            let at = vector.row * self.columns() + (self.kv_heads * self.group + head) * d;
            memory.write(a.pointer("rows")? + 4 * at as u64, output)?;
        }
        let target = memory.read::<u32>(a.pointer("targets")? + (8 * vector.row) as u64, 2)?;
        let [slot, token] = [target[0] as usize, target[1] as usize];
        if slot == 0 {
            return Ok(());
        }
        let (exact_slots, bytes) = (a.count("exact_slots")?, self.exact.bytes());
        let page = if slot < exact_slots {
            let page = (slot * a.count("all_layers")? + a.count("layer")?) * self.kv_heads + head;
            a.pointer("exact")? + (page * bytes) as u64
        } else {
            a.pointer("scratch")? + (((slot - exact_slots) * self.kv_heads + head) * bytes) as u64
        };
        let side = if values { Side::Value } else { Side::Key };
        for (channel, &x) in output.iter().enumerate() {
            // A stored row is a sum that began at zero, which takes the sign of a negative zero.
            let x = if transform.stored { x + 0.0 } else { x };
            let byte = self.exact.byte(side, token, channel)?;
            memory.write(page + byte as u64, &[bf16::from_f32(x).to_bits()])?;
        }
        Ok(())
    }
}
