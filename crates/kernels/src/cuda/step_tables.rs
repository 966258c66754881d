//! What kernels read of a step: tokens, where their rows go, and plans of attention.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::{CudaSlice, DevicePtr};

use super::attention::{DecodeAttention, DevicePlan};
use super::device::Device;
use super::graphs::{Recordings, Signature};
use super::plan::{DecodeSequence, Split};
use super::prefill::PrefillPlan;
use super::write::StepRows;
use crate::error::CudaError;

/// What kernels read of a step.
pub(super) enum StepTables {
    /// One row of every sequence.
    Decode(Box<Mutex<DecodeTables>>),
    /// Several rows of some.
    Prefill(Box<PrefillTables>),
}

/// The tables of a step with several rows of a sequence.
pub(super) struct PrefillTables {
    pub(super) tokens: CudaSlice<u32>,
    pub(super) targets: StepRows,
    /// Of each reading of the cache, if any rows have it.
    pub(super) plans: Vec<Option<PrefillPlan>>,
    pub(super) windows: Option<WindowTables>,
}

/// What layers with a window read of a step.
pub(super) struct WindowTables {
    pub(super) targets: StepRows,
    pub(super) plan: PrefillPlan,
}

/// The tables of a decode step.
pub(super) struct DecodeTables {
    pub(super) tokens: CudaSlice<u32>,
    pub(super) targets: StepRows,
    plans: Vec<ReadingPlan>,
    pub(super) windows: Option<WindowTables>,
    pub(super) recordings: Recordings,
}

/// The plan of a reading in tables that many steps use.
#[derive(Default)]
struct ReadingPlan {
    /// Made for the first step that has rows of the reading.
    plan: Option<DevicePlan>,
    /// Whether the step that is under way has any.
    has_rows: bool,
}

impl DecodeTables {
    pub(super) fn new(tokens: CudaSlice<u32>, targets: StepRows) -> DecodeTables {
        let recordings = Recordings::default();
        DecodeTables { tokens, targets, plans: Vec::new(), windows: None, recordings }
    }

    /// Everything in the tables that a recording depends on.
    pub(super) fn signature(&self, device: &Device) -> Signature {
        let mut signature = vec![self.tokens.device_ptr(device.stream()).0];
        signature.extend(self.targets.signature(device));
        for reading in &self.plans {
            signature.push(u64::from(reading.has_rows));
            if let Some(plan) = reading.plan.as_ref().filter(|_| reading.has_rows) {
                signature.extend(plan.signature(device));
            }
        }
        if let Some(windows) = &self.windows {
            signature.extend(windows.targets.signature(device));
            signature.extend(windows.plan.signature(device));
        }
        signature
    }

    /// The plan of a reading, if any rows have it.
    pub(super) fn plan(&mut self, reading: usize) -> Option<&mut DevicePlan> {
        let ReadingPlan { plan, has_rows } = &mut self.plans[reading];
        plan.as_mut().filter(|_| *has_rows)
    }

    /// Plans a step; `passes` are the kernel and the rows of each reading.
    pub(super) fn replan<'a>(
        &mut self,
        split: Split,
        passes: impl ExactSizeIterator<Item = (&'a DecodeAttention, &'a [DecodeSequence<'a>])>,
    ) -> Result<(), CudaError> {
        self.plans.resize_with(passes.len(), ReadingPlan::default);
        for (held, (kernel, rows)) in self.plans.iter_mut().zip(passes) {
            held.has_rows = !rows.is_empty();
            if rows.is_empty() {
                continue;
            }
            match &mut held.plan {
                Some(plan) => kernel.replan(plan, split, rows)?,
                None => held.plan = Some(kernel.plan(split, rows)?),
            }
        }
        Ok(())
    }
}

/// Tables of decode steps that are over, which a later one may have.
pub(super) type SpareTables = Arc<Mutex<Vec<Box<Mutex<DecodeTables>>>>>;

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
