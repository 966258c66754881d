//! Sampling from logits that stay on the card: `kernels/sample.cu` surveys a row, and the host decides from the survey as it
//! would from the row. Rows whose logits are changed one by one (penalties, grammars) are read whole.

use std::sync::{Arc, Mutex};

use bytemuck::{Pod, Zeroable};
use cudarc::driver::{CudaFunction, CudaSlice, DevicePtr, DevicePtrMut, DeviceRepr, LaunchConfig};

use super::compile::{Source, texts};
use super::device::{Device, launch};
use super::error::CudaError;
use super::step::lock;
use crate::backend::{KernelError, Sampled, Sampling};
use crate::sampling::{self, Survey};

/// Logits of a row that there is room for in a list.
const LIST_ROOM: usize = 1024;
/// Logits that are listed where a share of the probability decides: what is left over seldom matters.
const USUAL: usize = 256;
const NONE: u32 = u32::MAX;

/// The kernel.
pub(super) fn source() -> Source {
    let texts = texts!["tiles.cu", "sample.cu"];
    Source { name: "sampling".into(), texts, defines: Vec::new(), exact: false }
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Row {
    temperature: f32,
    draw: f32,
    vocabulary: i32,
    walks: i32,
    wanted: i32,
    plain: i32,
    given: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct Outcome {
    token: u32,
    bad: u32,
    largest: f32,
    logit: f32,
    listed: u32,
    padding: u32,
    total: f64,
    plain_total: f64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Arguments {
    logits: u64,
    rows: u64,
    results: u64,
    lists: u64,
    stride: i64,
    list_room: i32,
}
// SAFETY: plain numbers in the order of the kernel's `Arguments`.
unsafe impl DeviceRepr for Arguments {}

/// Memory for the rows of a call, which grows with the most of them.
struct Memory {
    rows: CudaSlice<u8>,
    results: CudaSlice<u8>,
    lists: CudaSlice<u32>,
}

/// The sampler of a card.
pub(super) struct Sampler {
    device: Arc<Device>,
    survey: CudaFunction,
    memory: Mutex<Memory>,
}

impl Sampler {
    /// Compiles (or finds) and loads the kernel.
    pub(super) fn new(device: &Arc<Device>) -> Result<Sampler, CudaError> {
        Ok(Sampler {
            survey: device.load(&source(), "survey")?,
            memory: Mutex::new(Memory {
                rows: device.allocate(1, "sampling")?,
                results: device.allocate(1, "sampling")?,
                lists: device.allocate(1, "sampling")?,
            }),
            device: device.clone(),
        })
    }

    /// Draws one token per row of `logits`, `[row][columns]`.
    pub(super) fn sample(
        &self,
        logits: &CudaSlice<f32>,
        columns: usize,
        settings: &[Sampling<'_>],
    ) -> Result<Vec<Result<Sampled, KernelError>>, CudaError> {
        let stream = self.device.stream();
        if logits.len() < settings.len() * columns {
            let (expected, got) = (settings.len() * columns, logits.len());
            return Err(CudaError::Shape { what: "logits", expected, got });
        }
        if settings.is_empty() {
            return Ok(Vec::new());
        }
        let rows: Vec<Row> = settings.iter().map(|settings| question(settings, columns)).collect();
        let memory = &mut *lock(&self.memory);
        self.device.upload(bytemuck::cast_slice::<_, u8>(&rows), &mut memory.rows)?;
        let lists = rows.iter().any(|row| row.wanted > 0);
        let room = if lists { settings.len() * LIST_ROOM * 2 } else { 1 };
        if memory.lists.len() < room {
            memory.lists = self.device.allocate(room, "sampling")?;
        }
        let result_bytes = settings.len() * size_of::<Outcome>();
        if memory.results.len() < result_bytes {
            memory.results = self.device.allocate(result_bytes.next_power_of_two(), "sampling")?;
        }
        let arguments = Arguments {
            logits: logits.device_ptr(stream).0,
            rows: memory.rows.device_ptr(stream).0,
            results: memory.results.device_ptr_mut(stream).0,
            lists: memory.lists.device_ptr_mut(stream).0,
            stride: columns as i64,
            list_room: LIST_ROOM as i32,
        };
        let config = LaunchConfig {
            grid_dim: (settings.len() as u32, 1, 1),
            block_dim: (1024, 1, 1),
            shared_mem_bytes: 0,
        };
        // SAFETY: there are as many rows of logits, questions and answers as blocks; a vocabulary is at most a row.
        unsafe { launch(stream, &self.survey, config, &arguments) }?;
        let read = stream.clone_dtoh(&memory.results.slice(..result_bytes))?;
        let listed = match lists {
            true => stream.clone_dtoh(&memory.lists.slice(..room))?,
            false => Vec::new(),
        };
        stream.synchronize()?;
        let outcomes: Vec<Outcome> =
            read.chunks_exact(size_of::<Outcome>()).map(bytemuck::pod_read_unaligned).collect();
        let mut sampled = Vec::with_capacity(settings.len());
        for (row, (outcome, settings)) in outcomes.iter().zip(settings).enumerate() {
            let list = listed.get(row * LIST_ROOM * 2..(row + 1) * LIST_ROOM * 2).unwrap_or_default();
            let decided = match needs_row(settings) {
                true => None,
                false => decide(outcome, list, settings, columns),
            };
            sampled.push(match decided {
                Some(decided) => decided,
                None => {
                    let whole = logits.slice(row * columns..(row + 1) * columns);
                    let whole = stream.clone_dtoh(&whole)?;
                    stream.synchronize()?;
                    sampling::sample(&whole, settings)
                }
            });
        }
        Ok(sampled)
    }
}

/// Whether single logits are changed.
fn needs_row(settings: &Sampling<'_>) -> bool {
    (!settings.changes.is_empty() || settings.allowed.is_some()) && settings.given.is_none()
}

/// What a row is asked.
fn question(settings: &Sampling<'_>, columns: usize) -> Row {
    let draws = settings.temperature > 0.0 && settings.given.is_none() && !needs_row(settings);
    let vocabulary = settings.vocabulary.min(columns);
    let filtered = sampling::is_filtered(settings, vocabulary);
    let choice = match settings.top_k {
        0 => USUAL,
        count => count,
    };
    let wanted = if draws && filtered { choice } else { 0 };
    Row {
        temperature: if draws { settings.temperature } else { 0.0 },
        draw: settings.draw,
        vocabulary: vocabulary as i32,
        walks: i32::from(draws && !filtered),
        wanted: wanted.max(settings.logprobs.unwrap_or(0)).min(vocabulary) as i32,
        plain: i32::from(settings.logprobs.is_some()),
        given: settings.given.unwrap_or(NONE),
    }
}

/// The token of a row, if what is known of it is enough.
fn decide(
    outcome: &Outcome,
    list: &[u32],
    settings: &Sampling<'_>,
    columns: usize,
) -> Option<Result<Sampled, KernelError>> {
    let vocabulary = settings.vocabulary.min(columns);
    if outcome.bad != NONE {
        return Some(Err(KernelError::NotFinite { what: "logits", index: outcome.bad as usize }));
    }
    if !outcome.largest.is_finite() {
        return Some(Err(KernelError::NotFinite { what: "logits", index: 0 }));
    }
    if let Some(token) = settings.given.filter(|&token| token as usize >= vocabulary) {
        return Some(Err(KernelError::TokenOutOfRange { token, vocab: vocabulary }));
    }
    let listed = list.as_chunks::<2>().0.get(..outcome.listed as usize)?;
    let survey = Survey {
        largest: outcome.largest,
        total: outcome.total,
        plain_total: outcome.plain_total,
        token: outcome.token,
        logit: outcome.logit,
        listed: listed.iter().map(|&[token, bits]| (token, f32::from_bits(bits))).collect(),
        vocabulary,
    };
    sampling::from_survey(survey, settings).map(Ok)
}
