//! Sampling from logits that stay on the card: `kernels/sample.cu` draws a token of each row, from which the next step can
//! begin, and surveys the row, penalties and masks of grammars included. From the survey the host knows the same token, and
//! probabilities. Rows of which too few logits were listed are read whole; typical-p is decided here, from the list.

use std::sync::{Arc, Mutex};

use bytemuck::{Pod, Zeroable};
use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{
    CudaEvent, CudaFunction, CudaSlice, DevicePtr, DevicePtrMut, DeviceRepr, LaunchConfig, PinnedHostSlice,
};

use super::compile::{Source, texts};
use super::device::{Device, launch};
use super::step_tables::lock;
use crate::backend::{Draw, KernelError, LogitChange, Sampled, Sampling};
use crate::error::CudaError;
use crate::sampling::{self, Survey};

/// Logits of a row that there is room for in a list.
const LIST_ROOM: usize = 1024;
/// Rows that are changed on the card in one call, which takes a copy of each; more are read by the host.
const MOST_CHANGED: usize = 64;
/// Logits that are listed where a share of the probability decides: what is left over seldom matters.
const USUAL: usize = 256;
const NONE: u32 = u32::MAX;

/// The source of the kernel.
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
    reported: i32,
    plain: i32,
    given: u32,
    draws: i32,
    hosts: i32,
    top_k: i32,
    top_p: f32,
    min_p: f32,
    changed: i32,
    first_change: i32,
    changes: i32,
    mask: i32,
    mask_words: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Change {
    token: u32,
    penalty: f32,
    add: f32,
}

/// Changes of single logits and masks of all rows of a call.
#[derive(Default)]
struct Changes {
    rows: usize,
    changes: Vec<Change>,
    masks: Vec<u32>,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct Outcome {
    token: u32,
    bad: u32,
    largest: f32,
    logit: f32,
    listed: u32,
    decided: u32,
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
    tokens: u64,
    changed: u64,
    changes: u64,
    masks: u64,
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
    tokens: CudaSlice<u32>,
    /// Copies of rows with other logits, and what is changed.
    changed: CudaSlice<f32>,
    changes: CudaSlice<u8>,
    masks: CudaSlice<u32>,
    /// Calls so far: which of them the tokens are of.
    calls: u64,
}

/// What the card has found out about the rows of a call, in the host's memory.
struct Answers {
    results: PinnedHostSlice<u8>,
    lists: PinnedHostSlice<u32>,
    /// Happens when both have arrived.
    there: CudaEvent,
}

impl Drop for Answers {
    fn drop(&mut self) {
        // What is on its way arrives before the memory goes. Where the card has failed, nothing can be done about errors.
        let _ = self.there.synchronize();
    }
}

type SpareAnswers = Arc<Mutex<Vec<Answers>>>;

/// Tokens that the card is drawing.
pub struct CudaDraws {
    call: u64,
    rows: usize,
    /// Logits of each row were listed and are on their way to the host.
    lists: bool,
    /// The host takes part in drawing some of them.
    shared: bool,
    /// Rows that the host draws from whole.
    whole: Vec<bool>,
    /// Taken only when the draws are over. What is on its way to it arrives before anything else is sent there.
    answers: Option<Answers>,
    spare: SpareAnswers,
}

impl Drop for CudaDraws {
    fn drop(&mut self) {
        lock(&self.spare).extend(self.answers.take());
    }
}

/// The sampler of a card.
pub(super) struct Sampler {
    device: Arc<Device>,
    survey: CudaFunction,
    memory: Mutex<Memory>,
    spare: SpareAnswers,
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
                tokens: device.allocate(1, "sampling")?,
                changed: device.allocate(1, "sampling")?,
                changes: device.allocate(1, "sampling")?,
                masks: device.allocate(1, "sampling")?,
                calls: 0,
            }),
            spare: SpareAnswers::default(),
            device: device.clone(),
        })
    }

    /// Begins to draw one token per row of `logits`, `[row][columns]`.
    pub(super) fn begin(
        &self,
        logits: &CudaSlice<f32>,
        columns: usize,
        settings: &[Sampling<'_>],
    ) -> Result<CudaDraws, CudaError> {
        let stream = self.device.stream();
        let count = settings.len();
        if logits.len() < count * columns {
            let (expected, got) = (count * columns, logits.len());
            return Err(CudaError::Shape { what: "logits", expected, got });
        }
        let mut changes = Changes::default();
        let rows: Vec<Row> =
            settings.iter().map(|settings| question(settings, columns, &mut changes)).collect();
        let whole: Vec<bool> = settings
            .iter()
            .zip(&rows)
            .map(|(settings, row)| is_changed(settings) && row.changed < 0 || needs_row(settings, columns))
            .collect();
        let memory = &mut *lock(&self.memory);
        memory.calls += 1;
        let mut draws = CudaDraws {
            call: memory.calls,
            rows: count,
            lists: settings.iter().any(|settings| needs_list(settings, columns)),
            shared: settings
                .iter()
                .zip(&whole)
                .any(|(settings, whole)| *whole || needs_list_to_draw(settings, columns)),
            whole,
            answers: None,
            spare: self.spare.clone(),
        };
        if count == 0 {
            return Ok(draws);
        }
        self.device.upload(bytemuck::cast_slice::<_, u8>(&rows), &mut memory.rows)?;
        self.device.upload(bytemuck::cast_slice::<_, u8>(&changes.changes), &mut memory.changes)?;
        self.device.upload(&changes.masks, &mut memory.masks)?;
        self.device.grow(&mut memory.changed, changes.rows * columns, "sampling")?;
        let lists = rows.iter().any(|row| row.wanted.max(row.reported) > 0);
        let (result_bytes, list_words) = (count * size_of::<Outcome>(), count * LIST_ROOM * 2);
        self.device.grow(&mut memory.lists, if lists { list_words } else { 1 }, "sampling")?;
        self.device.grow(&mut memory.results, result_bytes, "sampling")?;
        self.device.grow(&mut memory.tokens, count, "sampling")?;
        let arguments = Arguments {
            logits: logits.device_ptr(stream).0,
            rows: memory.rows.device_ptr(stream).0,
            results: memory.results.device_ptr_mut(stream).0,
            lists: memory.lists.device_ptr_mut(stream).0,
            tokens: memory.tokens.device_ptr_mut(stream).0,
            changed: memory.changed.device_ptr_mut(stream).0,
            changes: memory.changes.device_ptr(stream).0,
            masks: memory.masks.device_ptr(stream).0,
            stride: columns as i64,
            list_room: LIST_ROOM as i32,
        };
        let config =
            LaunchConfig { grid_dim: (count as u32, 1, 1), block_dim: (1024, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: there are as many rows of logits, questions, answers and tokens as blocks, and as many changed rows, changes
        // and masks as questions name; a vocabulary is at most a row.
        unsafe { launch(stream, &self.survey, config, &arguments) }?;
        let mut answers = self.answers(result_bytes, if draws.lists { list_words } else { 1 })?;
        stream.memcpy_dtoh(&memory.results.slice(..result_bytes), &mut answers.results)?;
        if draws.lists {
            stream.memcpy_dtoh(&memory.lists.slice(..list_words), &mut answers.lists)?;
        }
        answers.there.record(stream)?;
        draws.answers = Some(answers);
        Ok(draws)
    }

    /// Memory of the host for the answers of a call.
    fn answers(&self, result_bytes: usize, list_words: usize) -> Result<Answers, CudaError> {
        if let Some(spare) = lock(&self.spare).pop()
            && spare.results.len() >= result_bytes
            && spare.lists.len() >= list_words
        {
            return Ok(spare);
        }
        let context = self.device.stream().context();
        // SAFETY: nothing is read but what a copy has written.
        let (results, lists) = unsafe {
            (
                context.alloc_pinned_with_flags(result_bytes.next_power_of_two(), 0)?,
                context.alloc_pinned_with_flags(list_words.next_power_of_two(), 0)?,
            )
        };
        // Waiting for an event without such flags does not put the thread to sleep, which would take longer than most waits.
        Ok(Answers {
            results,
            lists,
            there: context.new_event(Some(CUevent_flags::CU_EVENT_DISABLE_TIMING))?,
        })
    }

    /// Copies the tokens of the latest call to where a step reads them; false, and nothing copied, if the host has to draw some.
    pub(super) fn pass_on(&self, draws: &CudaDraws, to: &mut CudaSlice<u32>) -> Result<bool, CudaError> {
        let memory = lock(&self.memory);
        if draws.shared || draws.call != memory.calls || to.len() < draws.rows {
            return Ok(false);
        }
        let stream = self.device.stream();
        stream.memcpy_dtod(&memory.tokens.slice(..draws.rows), &mut to.slice_mut(..draws.rows))?;
        Ok(true)
    }

    /// The tokens of a call, whose logits and settings these are.
    pub(super) fn finish(
        &self,
        mut draws: CudaDraws,
        logits: &CudaSlice<f32>,
        columns: usize,
        settings: &[Sampling<'_>],
    ) -> Result<Vec<Draw>, CudaError> {
        let (stream, count) = (self.device.stream(), settings.len());
        if count != draws.rows {
            return Err(CudaError::Shape { what: "settings of the draws", expected: draws.rows, got: count });
        }
        let Some(answers) = &mut draws.answers else { return Ok(Vec::new()) };
        answers.there.synchronize()?;
        let outcomes: Vec<Outcome> = answers
            .results
            .as_slice()?
            .chunks_exact(size_of::<Outcome>())
            .take(count)
            .map(bytemuck::pod_read_unaligned)
            .collect();
        let lists = if draws.lists { answers.lists.as_slice()? } else { &[] };
        let mut drawn = Vec::with_capacity(count);
        for (row, (outcome, settings)) in outcomes.iter().zip(settings).enumerate() {
            let list = lists.get(row * LIST_ROOM * 2..(row + 1) * LIST_ROOM * 2).unwrap_or_default();
            // What is listed of a row that was changed is of the row before that.
            let undecided = is_changed(settings) && outcome.decided == 0 && outcome.bad == NONE;
            let decided = match draws.whole[row] || undecided {
                true => None,
                false => decide(outcome, list, settings, columns),
            };
            let sampled = match decided {
                Some(decided) => decided,
                None => {
                    let whole = logits.slice(row * columns..(row + 1) * columns);
                    let whole = stream.clone_dtoh(&whole)?;
                    stream.synchronize()?;
                    sampling::sample(&whole, settings)
                }
            };
            let passed_on = outcome.decided != 0 && !draws.whole[row] && sampled.is_ok();
            drawn.push(Draw { passed_on, sampled });
        }
        Ok(drawn)
    }
}

/// Whether single logits are changed.
fn is_changed(settings: &Sampling<'_>) -> bool {
    (!settings.changes.is_empty() || settings.allowed.is_some()) && settings.given.is_none()
}

/// Whether the host draws from the row itself: what was listed is of logits that were changed, or it is of those that were not.
fn needs_row(settings: &Sampling<'_>, columns: usize) -> bool {
    is_changed(settings) && needs_list_to_draw(settings, columns)
}

/// Whether the host draws from what was listed.
fn needs_list_to_draw(settings: &Sampling<'_>, columns: usize) -> bool {
    draws_listed(settings, columns) && settings.typical_p < 1.0
}

/// Whether the host looks at what was listed.
fn needs_list(settings: &Sampling<'_>, columns: usize) -> bool {
    needs_list_to_draw(settings, columns) || settings.logprobs.is_some_and(|count| count > 0)
}

/// Whether a token is drawn, and not from all of them.
fn draws_listed(settings: &Sampling<'_>, columns: usize) -> bool {
    draws(settings) && sampling::is_filtered(settings, settings.vocabulary.min(columns))
}

/// Whether a token is drawn, not the most likely one taken.
fn draws(settings: &Sampling<'_>) -> bool {
    settings.temperature > 0.0 && settings.given.is_none()
}

/// How a row is sampled; what is changed of it is added to `changes`.
fn question(settings: &Sampling<'_>, columns: usize, changes: &mut Changes) -> Row {
    let vocabulary = settings.vocabulary.min(columns);
    let (draws, listed) = (draws(settings), draws_listed(settings, columns));
    let choice = match settings.top_k {
        0 => USUAL,
        count => count,
    };
    let wanted = if listed { choice } else { 0 };
    let none = (-1, 0);
    let (mut changed, mut mask) = (-1, none);
    let first_change = changes.changes.len();
    if is_changed(settings) && changes.rows < MOST_CHANGED {
        changed = changes.rows as i32;
        changes.rows += 1;
        let change =
            |change: &LogitChange| Change { token: change.token, penalty: change.penalty, add: change.add };
        changes.changes.extend(settings.changes.iter().map(change));
        if let Some(allowed) = settings.allowed {
            let words = &allowed[..allowed.len().min(vocabulary.div_ceil(32))];
            mask = (changes.masks.len() as i32, words.len() as i32);
            changes.masks.extend_from_slice(words);
        }
    }
    Row {
        temperature: if draws { settings.temperature } else { 0.0 },
        draw: settings.draw,
        vocabulary: vocabulary as i32,
        walks: i32::from(draws && !listed),
        wanted: wanted.min(vocabulary) as i32,
        reported: settings.logprobs.unwrap_or(0).min(vocabulary) as i32,
        plain: i32::from(settings.logprobs.is_some()),
        given: settings.given.unwrap_or(NONE),
        draws: i32::from(listed && settings.typical_p >= 1.0),
        hosts: i32::from(needs_list_to_draw(settings, columns)),
        top_k: settings.top_k.min(vocabulary) as i32,
        top_p: settings.top_p,
        min_p: settings.min_p,
        changed,
        first_change: first_change as i32,
        changes: (changes.changes.len() - first_change) as i32,
        mask: mask.0,
        mask_words: mask.1,
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
        let nothing_left = || KernelError::BadSetting("no token may be drawn".into());
        return Some(Err(match is_changed(settings) {
            true => nothing_left(),
            false => KernelError::NotFinite { what: "logits", index: 0 },
        }));
    }
    if let Some(token) = settings.given.filter(|&token| token as usize >= vocabulary) {
        return Some(Err(KernelError::TokenOutOfRange { token, vocab: vocabulary }));
    }
    // Lists are read only where somebody needs them.
    let listed = list.as_chunks::<2>().0.get(..outcome.listed as usize);
    if listed.is_none() && needs_list(settings, columns) || outcome.decided == 0 && listed.is_none() {
        return None;
    }
    let survey = Survey {
        largest: outcome.largest,
        total: outcome.total,
        plain_total: outcome.plain_total,
        token: outcome.token,
        logit: outcome.logit,
        drawn: outcome.decided != 0,
        listed: listed
            .unwrap_or_default()
            .iter()
            .map(|&[token, bits]| (token, f32::from_bits(bits)))
            .collect(),
        vocabulary,
    };
    sampling::from_survey(survey, settings).map(Ok)
}
