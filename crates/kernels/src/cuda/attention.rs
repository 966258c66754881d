//! Decode attention on the device: bf16 and sealed pages of a ragged batch in one launch, merge included.
//!
//! [`DecodeAttention`] is the kernel for one shape of heads and one format of sealed pages. A [`Plan`] cuts a batch into
//! work, once per step; [`DecodeAttention::launch`] runs it for a layer.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys::CUfunction_attribute as FunctionAttribute;
use cudarc::driver::{CudaFunction, CudaSlice, DevicePtr, DevicePtrMut, DeviceRepr, LaunchConfig};

use super::device::{Device, launch_overlapping};
use super::page_means::PageMeansView;
use super::page_order::PageOrder;
use super::plan::{DecodeSequence, Plan, PlanShape, Split};
use super::tuning::{DecodeShape, SharedMemory, Tuning};
use crate::error::CudaError;

/// What memory for results of parts is called in errors.
const PARTIALS: &str = "partial results of attention";

/// Pages of one layer in device memory: head `h` of slot `s` at `offset + (s - first)·stride + h·page bytes`.
#[derive(Clone, Copy)]
pub struct PoolView<'a> {
    /// The memory of the pool.
    pub memory: &'a CudaSlice<u8>,
    /// The number of the first slot.
    pub first: usize,
    /// Where the layer's part of the first slot lies.
    pub offset: usize,
    /// Bytes from one slot to the next.
    pub stride: usize,
    /// Pages that hold one layer, whose slots follow those of the pool.
    pub scratch: Option<ScratchView<'a>>,
    /// What the stored keys of sealed pages are less of, where those of each page have a mean of their own.
    pub means: Option<PageMeansView<'a>>,
}

/// bf16 pages of one layer in device memory: head `h` of slot `s` at `(s - first)·stride + h·page bytes`.
#[derive(Clone, Copy)]
pub struct ScratchView<'a> {
    /// The memory of the pages.
    pub memory: &'a CudaSlice<u8>,
    /// The first slot that lies here.
    pub first: usize,
    /// Bytes from one slot to the next.
    pub stride: usize,
}

impl PoolView<'_> {
    /// The address that slot 0 has or would have, if `slots` of `bytes` lie inside.
    pub(super) fn address(
        &self,
        device: &Device,
        slots: &Range<usize>,
        bytes: usize,
    ) -> Result<u64, CudaError> {
        if !self.offset.is_multiple_of(16) || !self.stride.is_multiple_of(16) {
            return Err(CudaError::Unsupported("pages lie on multiples of 16 bytes".into()));
        }
        if u32::try_from(self.stride).is_err() {
            return Err(CudaError::Unsupported("slots of a pool that are 4 GB apart".into()));
        }
        let end = self.scratch.map_or(slots.end, |scratch| slots.end.min(scratch.first));
        let end = match slots.start < end {
            // A slot before the first one lies nowhere.
            true if slots.start < self.first => None,
            true => (end - 1 - self.first)
                .checked_mul(self.stride)
                .and_then(|at| at.checked_add(self.offset)?.checked_add(bytes)),
            false => Some(0),
        };
        match end {
            Some(end) if end <= self.memory.len() => {}
            _ => {
                return Err(CudaError::Shape {
                    what: "bytes of a pool",
                    expected: end.unwrap_or(usize::MAX),
                    got: self.memory.len(),
                });
            }
        }
        let first = self.memory.device_ptr(device.stream()).0 + self.offset as u64;
        Ok(first.wrapping_sub((self.first * self.stride) as u64))
    }
}

/// What turns outputs in the basis of the pages back into values, where the layer after attention has not been folded
/// together with it: `out = row · matrix + mean`.
#[derive(Clone, Copy)]
pub struct ValueTransform<'a> {
    /// `[KV head][channel of the pages][channel of the outputs]`, of one layer.
    pub matrices: &'a CudaSlice<f32>,
    /// `[KV head][channel of the outputs]`, of the same layer.
    pub means: Option<&'a CudaSlice<f32>>,
    /// The layer: where its first matrix lies, in matrices of all KV heads.
    pub layer: usize,
}

impl ValueTransform<'_> {
    /// Addresses of matrices and means.
    pub(super) fn addresses(&self, device: &Device, shape: &DecodeShape) -> Result<(u64, u64), CudaError> {
        let row = shape.kv_heads * shape.head_dim;
        let place = |what, slice: &CudaSlice<f32>, size: usize| {
            let expected = (self.layer + 1).saturating_mul(size);
            if slice.len() < expected {
                return Err(CudaError::Shape { what, expected, got: slice.len() });
            }
            Ok(slice.device_ptr(device.stream()).0 + (self.layer * size * size_of::<f32>()) as u64)
        };
        let matrices = place("matrices of value rotations", self.matrices, row * shape.head_dim)?;
        Ok((matrices, self.means.map_or(Ok(0), |means| place("means of values", means, row))?))
    }
}

/// A plan on the device, with room for partial results.
pub struct DevicePlan {
    plan: Plan,
    shape: PlanShape,
    layout: usize,
    segments: CudaSlice<u8>,
    table: CudaSlice<i32>,
    partial_values: CudaSlice<f32>,
    partial_states: CudaSlice<f32>,
    arrivals: CudaSlice<i32>,
}

impl DevicePlan {
    /// The tables of a step.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Where the tables are, and whatever else a recorded launch depends on.
    pub(super) fn signature(&self, device: &Device) -> [u64; 8] {
        let stream = device.stream();
        [
            self.segments.device_ptr(stream).0,
            self.table.device_ptr(stream).0,
            self.partial_values.device_ptr(stream).0,
            self.partial_states.device_ptr(stream).0,
            self.arrivals.device_ptr(stream).0,
            self.layout as u64,
            self.plan.table_width as u64,
            self.plan.rows as u64,
        ]
    }
}

/// What the kernel is launched with, field by field as in its source.
#[repr(C)]
#[derive(Clone, Copy)]
struct Arguments {
    queries: u64,
    query_stride: i64,
    exact_pool: u64,
    sealed_pool: u64,
    exact_stride: u32,
    sealed_stride: u32,
    scratch_pool: u64,
    scratch_stride: u32,
    exact_slots: u32,
    table: u64,
    table_width: i64,
    segments: u64,
    partial_values: u64,
    partial_states: u64,
    arrivals: u64,
    out: u64,
    undo: u64,
    mean: u64,
    totals: u64,
    means: u64,
    kv_heads: i32,
    group: i32,
    scale: f32,
}

// SAFETY: plain numbers in the order of the kernel's `Arguments`.
unsafe impl DeviceRepr for Arguments {}

/// The kernel in one layout.
struct Layout {
    /// Bytes of pages per multiprocessor below which it is the fastest.
    limit: usize,
    tuning: Tuning,
    function: CudaFunction,
    memory: usize,
}

/// The decode kernel of one shape on one card.
pub struct DecodeAttention {
    device: Arc<Device>,
    shape: DecodeShape,
    orders: [PageOrder; 2],
    /// The usual one, then those for less and less work.
    layouts: Vec<Layout>,
}

impl DecodeAttention {
    /// Compiles (or finds) and loads the kernel.
    pub fn new(device: &Arc<Device>, shape: DecodeShape) -> Result<DecodeAttention, CudaError> {
        let memory =
            SharedMemory { block: device.block_memory(), multiprocessor: device.multiprocessor_memory() };
        Self::with_layouts(device, shape, &shape.layouts(memory)?)
    }

    /// The kernel with a layout of warps and stages that the caller chooses.
    pub fn with_tuning(
        device: &Arc<Device>,
        shape: DecodeShape,
        tuning: Tuning,
    ) -> Result<DecodeAttention, CudaError> {
        Self::with_layouts(device, shape, &[(usize::MAX, tuning)])
    }

    fn with_layouts(
        device: &Arc<Device>,
        shape: DecodeShape,
        layouts: &[(usize, Tuning)],
    ) -> Result<DecodeAttention, CudaError> {
        if shape.kv_heads == 0 || shape.group == 0 {
            return Err(CudaError::Unsupported("attention without heads".into()));
        }
        Ok(DecodeAttention {
            device: device.clone(),
            shape,
            orders: shape.orders()?,
            layouts: layouts
                .iter()
                .map(|&(limit, tuning)| layout(device, &shape, limit, tuning))
                .collect::<Result<_, _>>()?,
        })
    }

    /// The shape it was made for.
    pub fn shape(&self) -> &DecodeShape {
        &self.shape
    }

    /// How it is laid out: the usual way, then where there are others for less work, those.
    pub fn tunings(&self) -> impl Iterator<Item = &Tuning> {
        self.layouts.iter().map(|layout| &layout.tuning)
    }

    /// Registers and bytes of local memory (spills) of a thread.
    pub fn resources(&self) -> Result<(usize, usize), CudaError> {
        let function = &self.layouts[0].function;
        Ok((function.num_regs()? as usize, function.local_size_bytes()? as usize))
    }

    /// Order of bytes in bf16 pages and in sealed pages.
    pub fn orders(&self) -> &[PageOrder; 2] {
        &self.orders
    }

    /// What plans need to know of a layout.
    fn plan_shape(&self, layout: usize) -> PlanShape {
        let tile = |order: &PageOrder| (order.tiles(), order.tile_bytes());
        let tuning = &self.layouts[layout].tuning;
        PlanShape {
            kv_heads: self.shape.kv_heads,
            group: self.shape.group,
            rows: self.shape.rows(),
            warps: tuning.warps,
            blocks: self.device.multiprocessors() * tuning.blocks_per_multiprocessor,
            turns: self.shape.segment_turns(),
            most_tiles: self.shape.most_tiles(),
            exact: tile(&self.orders[0]),
            sealed: tile(&self.orders[1]),
        }
    }

    /// Cuts a batch into work and puts the tables on the device.
    pub fn plan(&self, split: Split, sequences: &[DecodeSequence<'_>]) -> Result<DevicePlan, CudaError> {
        let stream = self.device.stream();
        let mut plan = DevicePlan {
            plan: Plan::default(),
            shape: self.plan_shape(0),
            layout: 0,
            segments: stream.alloc_zeros(1)?,
            table: stream.alloc_zeros(1)?,
            partial_values: stream.alloc_zeros(1)?,
            partial_states: stream.alloc_zeros(1)?,
            arrivals: stream.alloc_zeros(1)?,
        };
        self.replan(&mut plan, split, sequences)?;
        Ok(plan)
    }

    /// Makes the plan of another step in the memory of an earlier one, which is over by the time that the stream gets there.
    pub fn replan(
        &self,
        on_device: &mut DevicePlan,
        split: Split,
        sequences: &[DecodeSequence<'_>],
    ) -> Result<(), CudaError> {
        let mut layout = 0;
        let mut shape = self.plan_shape(layout);
        let mut plan = Plan::new(&shape, split, sequences)?;
        // With fixed splits nothing may depend on the batch, so neither may the layout.
        let share = plan.bytes / self.device.multiprocessors();
        let fastest = self.layouts.iter().rposition(|layout| share < layout.limit).unwrap_or(0);
        // With many units a large block begins and ends many segments, and has nothing to do meanwhile. More query heads
        // take longer for a segment, so that it matters less.
        let units = plan.first_partial.len() - 1;
        let most_units = self.device.multiprocessors() / self.shape.blocks_per_unit();
        if split == Split::Balanced && fastest > 0 && units <= most_units {
            layout = fastest;
            shape = self.plan_shape(layout);
            plan = Plan::new(&shape, split, sequences)?;
        }
        let rows = self.shape.rows();
        let partials = plan.partials.max(1);
        let device = &self.device;
        device.upload(bytemuck::cast_slice::<_, u8>(&plan.segments), &mut on_device.segments)?;
        device.upload(&plan.table, &mut on_device.table)?;
        device.grow(&mut on_device.partial_values, partials * rows * self.shape.head_dim, PARTIALS)?;
        device.grow(&mut on_device.partial_states, partials * rows * 2, PARTIALS)?;
        device.grow(&mut on_device.arrivals, plan.first_partial.len(), PARTIALS)?;
        (on_device.plan, on_device.shape, on_device.layout) = (plan, shape, layout);
        Ok(())
    }

    /// Attention of one query token per sequence, in the row of each. `queries` and `out` are `[row][query head][channel]`, queries in
    /// the basis of the pages and not scaled; `scale` is that of the logits.
    pub fn launch(
        &self,
        plan: &mut DevicePlan,
        exact: PoolView<'_>,
        sealed: Option<PoolView<'_>>,
        queries: &CudaSlice<f32>,
        scale: f32,
        out: &mut CudaSlice<f32>,
    ) -> Result<(), CudaError> {
        let stride = self.shape.kv_heads * self.shape.group * self.shape.head_dim;
        self.launch_and_undo(plan, exact, sealed, queries, stride, scale, None, out)
    }

    /// The same, with outputs turned back into the basis of values, and queries of rows `query_stride` numbers apart.
    pub fn launch_and_undo(
        &self,
        plan: &mut DevicePlan,
        exact: PoolView<'_>,
        sealed: Option<PoolView<'_>>,
        queries: &CudaSlice<f32>,
        query_stride: usize,
        scale: f32,
        undo: Option<ValueTransform<'_>>,
        out: &mut CudaSlice<f32>,
    ) -> Result<(), CudaError> {
        self.attend(plan, exact, sealed, queries, query_stride, scale, undo, None, out)
    }

    /// The same; `totals` gets the logarithm (base 2) of the sum of each row's weights, `[row][query head]`.
    pub(super) fn attend(
        &self,
        plan: &mut DevicePlan,
        exact: PoolView<'_>,
        sealed: Option<PoolView<'_>>,
        queries: &CudaSlice<f32>,
        query_stride: usize,
        scale: f32,
        undo: Option<ValueTransform<'_>>,
        totals: Option<&mut CudaSlice<f32>>,
        out: &mut CudaSlice<f32>,
    ) -> Result<(), CudaError> {
        let DecodeShape { head_dim, kv_heads, group, .. } = self.shape;
        let row = kv_heads * group * head_dim;
        let numbers = plan.plan.rows * row;
        let last = plan.plan.rows.saturating_sub(1) * query_stride.max(row) + row;
        let rows = plan.plan.rows * kv_heads * group;
        let room = totals.as_ref().map_or(rows, |totals| totals.len());
        for (what, expected, got) in [
            ("queries", last, queries.len()),
            ("outputs", numbers, out.len()),
            ("sums of weights", rows, room),
        ] {
            if got < expected {
                return Err(CudaError::Shape { what, expected, got });
            }
        }
        let Some(layout) = self.layouts.get(plan.layout) else {
            return Err(CudaError::Unsupported("a plan for another kernel".into()));
        };
        if plan.shape != self.plan_shape(plan.layout) {
            return Err(CudaError::Unsupported("a plan for another kernel".into()));
        }
        if plan.plan.rows == 0 {
            return Ok(());
        }
        let stream = self.device.stream();
        let bytes = |order: &PageOrder| order.page_bytes() * kv_heads;
        let [exact_slots, sealed_slots] = &plan.plan.slots;
        let sealed_pool = match sealed {
            Some(pool) => {
                (pool.address(&self.device, sealed_slots, bytes(&self.orders[1]))?, pool.stride as u32)
            }
            None if sealed_slots.is_empty() => (0, 0),
            None => return Err(CudaError::Unsupported("sealed pages without a pool of them".into())),
        };
        if let Some(scratch) = exact.scratch {
            let expected = exact_slots.end.saturating_sub(scratch.first) * scratch.stride;
            if scratch.memory.len() < expected || scratch.stride < bytes(&self.orders[0]) {
                let got = scratch.memory.len();
                return Err(CudaError::Shape { what: "bytes of scratch pages", expected, got });
            }
        }
        let means = sealed.and_then(|pool| pool.means).map_or(Ok(0), |means| {
            means.address(&self.device, plan.plan.history_pages, kv_heads * head_dim)
        })?;
        let (undo, mean) = match undo {
            Some(transform) => transform.addresses(&self.device, &self.shape)?,
            None => (0, 0),
        };
        let arguments = Arguments {
            queries: queries.device_ptr(stream).0,
            query_stride: query_stride as i64,
            exact_pool: exact.address(&self.device, exact_slots, bytes(&self.orders[0]))?,
            sealed_pool: sealed_pool.0,
            exact_stride: exact.stride as u32,
            sealed_stride: sealed_pool.1,
            scratch_pool: exact.scratch.map_or(0, |scratch| scratch.memory.device_ptr(stream).0),
            scratch_stride: exact.scratch.map_or(0, |scratch| scratch.stride as u32),
            exact_slots: exact.scratch.map_or(u32::MAX, |scratch| scratch.first as u32),
            table: plan.table.device_ptr(stream).0,
            table_width: plan.plan.table_width as i64,
            segments: plan.segments.device_ptr(stream).0,
            partial_values: plan.partial_values.device_ptr_mut(stream).0,
            partial_states: plan.partial_states.device_ptr_mut(stream).0,
            arrivals: plan.arrivals.device_ptr_mut(stream).0,
            out: out.device_ptr_mut(stream).0,
            undo,
            mean,
            totals: totals.map_or(0, |totals| totals.device_ptr_mut(stream).0),
            means,
            kv_heads: kv_heads as i32,
            group: group as i32,
            scale: scale * std::f32::consts::LOG2_E,
        };
        // SAFETY: the plan names pages of `slots`, which were checked to lie inside the pools, partial results below
        // `partials`, and rows below `rows`; all of that has been allocated. One stream orders all uses, and the
        // kernel waits for the launch before it ahead of all that others write.
        unsafe {
            let config = LaunchConfig {
                grid_dim: (plan.shape.blocks as u32, 1, 1),
                block_dim: (32 * layout.tuning.warps as u32, 1, 1),
                shared_mem_bytes: layout.memory as u32,
            };
            launch_overlapping(&self.device, &layout.function, config, &arguments)
        }
    }
}

/// Compiles (or finds) and loads the kernel in a layout.
fn layout(device: &Device, shape: &DecodeShape, limit: usize, tuning: Tuning) -> Result<Layout, CudaError> {
    let function = device.load(&shape.source(&tuning)?, "attend")?;
    let memory = shape.block_memory(&tuning)?;
    let attribute = FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    function.set_attribute(attribute, memory as i32)?;
    Ok(Layout { limit, tuning, function, memory })
}
