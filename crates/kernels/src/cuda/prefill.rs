//! Attention of many rows: prompts, and steps that mix prompts with answers. `kernels/prefill_wgmma.cu` and `kernels/prefill.cu`
//! read bf16 pages and sealed pages as they lie in the pools; `kernels/undo.cu` takes their outputs back to the basis of values.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys::CUfunction_attribute as FunctionAttribute;
use cudarc::driver::{CudaFunction, CudaSlice, DevicePtr, DevicePtrMut, DeviceRepr, LaunchConfig};
use oscar_codec::{PageLayout, band};

use super::attention::{PoolView, ValueTransform};
use super::compile::{Source, texts};
use super::device::{Device, launch};
use super::outputs::AttentionOutputs;
use super::page_order::{PageOrder, Pages};
use super::row_blocks::{PrefillSequence, RowBlocks};
use super::tuning::DecodeShape;
use crate::error::CudaError;

/// Rows of a block, as the source says: tokens times the query heads of a KV head.
const BLOCK_ROWS: usize = 128;

/// The instructions that a kernel multiplies with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Products {
    /// Instructions of single warps, which all cards have.
    Warps,
    /// Instructions of four warps together, which sm_90 has, for heads that leave enough registers.
    Warpgroups,
}

impl Products {
    /// Stages of pages on their way with products of warpgroups.
    const STAGES: usize = 5;
    /// Sealed pages on their way to be unsealed.
    const SEALED_STAGES: usize = 2;

    pub(super) fn of(architecture: &str, head_dim: usize) -> Products {
        if architecture == "sm_90a" && matches!(head_dim, 64 | 96 | 128) {
            Products::Warpgroups
        } else {
            Products::Warps
        }
    }

    fn threads(self) -> u32 {
        match self {
            Products::Warps => 256,
            Products::Warpgroups => 384,
        }
    }

    /// Shared memory of a block: pages, and with warpgroups sealed pages and barriers.
    fn memory(self, shape: &DecodeShape) -> usize {
        let page = PageLayout::bf16(shape.head_dim).page_bytes();
        match self {
            Products::Warps => 2 * page,
            Products::Warpgroups => {
                let mean = if matches!(shape.sealed, PageLayout::Banded(_)) { 2 * shape.head_dim } else { 0 };
                let sealed = if shape.sealed.is_bf16() { 0 } else { shape.sealed.page_bytes() + mean };
                Self::STAGES * page
                    + Self::SEALED_STAGES * sealed
                    + 8 * (2 * Self::STAGES + Self::SEALED_STAGES)
            }
        }
    }
}

/// The kernel for a shape of heads and the format of sealed pages.
pub(super) fn source(shape: &DecodeShape, products: Products) -> Result<Source, CudaError> {
    let exact = PageOrder::new(PageLayout::bf16(shape.head_dim))?;
    let sealed = PageOrder::new(shape.sealed)?;
    let bits = if shape.sealed.is_bf16() { 0 } else { sealed.bits() };
    let mut defines = vec![
        ("HEAD_DIM", shape.head_dim),
        ("SEALED_BITS", bits),
        ("GROUPS", sealed.groups()),
        ("SCALE_BF16", usize::from(sealed.bf16_scales())),
    ];
    defines.extend(sealed.band_defines());
    defines.push(("OCTAVES_BELOW", band::OCTAVES_BELOW as usize));
    defines.extend(exact.defines(Pages::Exact));
    if bits > 0 {
        defines.extend(sealed.defines(Pages::Sealed));
    }
    let texts = match products {
        Products::Warps => {
            texts!["primitives.cu", "page_order.cu", "unseal.cu", "many_rows.cu", "prefill.cu"]
        }
        Products::Warpgroups => {
            defines.push(("STAGES", Products::STAGES));
            defines.push(("SEALED_STAGES", Products::SEALED_STAGES));
            texts!["primitives.cu", "page_order.cu", "unseal.cu", "many_rows.cu", "prefill_wgmma.cu"]
        }
    };
    let name = format!("attention of many rows, {} channels, {bits} bits", shape.head_dim);
    Ok(Source { name, texts, defines, exact: false })
}

/// What `PrefillAttention` is given as the window of rows that see everything.
const NO_WINDOW: i32 = 1 << 30;

/// The rows of a step on the card, cut into blocks.
pub struct PrefillPlan {
    window: i32,
    items: CudaSlice<u8>,
    tables: CudaSlice<u32>,
    ends: CudaSlice<i32>,
    count: usize,
    /// Rows of the batch up to the last one that is planned here.
    rows: usize,
    /// Slots from the first to the last that is named: of bf16 pages, of sealed ones.
    slots: [Range<usize>; 2],
    /// Pages of the longest history, those of the sink included.
    history_pages: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Arguments {
    queries: u64,
    out: u64,
    exact: u64,
    scratch: u64,
    sealed: u64,
    tables: u64,
    items: u64,
    totals: u64,
    ends: u64,
    means: u64,
    query_stride: i64,
    out_stride: i64,
    exact_stride: i64,
    sealed_stride: i64,
    exact_slots: i32,
    group: i32,
    sink: i32,
    window: i32,
    scale: f32,
}
// SAFETY: plain numbers in the order of the kernel's `Arguments`.
unsafe impl DeviceRepr for Arguments {}

/// The pages of one layer.
pub struct PrefillPools<'a> {
    /// The pool of bf16 pages.
    pub exact: PoolView<'a>,
    /// Sealed pages, or bf16 pages of history.
    pub sealed: Option<PoolView<'a>>,
    /// Positions below are read in bf16; a multiple of a page.
    pub sink: usize,
}

/// Some rows of a step with what they read: its plan, the kernel of that, and pools.
pub(super) struct PlannedRows<'a> {
    pub(super) kernel: &'a PrefillAttention,
    pub(super) plan: &'a PrefillPlan,
    pub(super) pools: PrefillPools<'a>,
}

/// Attention of many rows for one shape on one card.
pub struct PrefillAttention {
    device: Arc<Device>,
    shape: DecodeShape,
    products: Products,
    function: CudaFunction,
    outputs: AttentionOutputs,
}

impl PrefillPlan {
    /// Where the tables are, and whatever else a recorded launch depends on.
    pub(super) fn signature(&self, device: &Device) -> [u64; 4] {
        let stream = device.stream();
        [
            self.items.device_ptr(stream).0,
            self.tables.device_ptr(stream).0,
            self.ends.device_ptr(stream).0,
            self.count as u64,
        ]
    }
}

impl PrefillAttention {
    /// Compiles (or finds) and loads the kernels.
    pub fn new(device: &Arc<Device>, shape: DecodeShape) -> Result<PrefillAttention, CudaError> {
        Self::with(device, shape, Products::of(&device.architecture(), shape.head_dim))
    }

    /// The kernel for cards that have no products of warpgroups.
    pub fn portable(device: &Arc<Device>, shape: DecodeShape) -> Result<PrefillAttention, CudaError> {
        Self::with(device, shape, Products::Warps)
    }

    fn with(
        device: &Arc<Device>,
        shape: DecodeShape,
        products: Products,
    ) -> Result<PrefillAttention, CudaError> {
        if shape.group == 0 || shape.group > BLOCK_ROWS {
            return Err(CudaError::Unsupported(format!("{} query heads for a KV head", shape.group)));
        }
        let memory = products.memory(&shape);
        if memory > device.block_memory() {
            return Err(CudaError::Unsupported(format!(
                "heads of {} channels: {} has too little shared memory for pages of them",
                shape.head_dim,
                device.name()
            )));
        }
        let function = device.load(&source(&shape, products)?, "attend_rows")?;
        let attribute = FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        function.set_attribute(attribute, memory as i32)?;
        let outputs = AttentionOutputs::new(device, shape)?;
        Ok(PrefillAttention { device: device.clone(), shape, products, function, outputs })
    }

    /// What comes after attention, for all kernels of this shape.
    pub(super) fn outputs(&self) -> &AttentionOutputs {
        &self.outputs
    }

    /// Cuts the rows of a step into blocks and puts their page tables on the card. With a `window`, a row sees itself and so
    /// many positions less one before it.
    pub fn plan(
        &self,
        sequences: &[PrefillSequence<'_>],
        window: Option<usize>,
    ) -> Result<PrefillPlan, CudaError> {
        let stream = self.device.stream();
        let mut plan = PrefillPlan {
            window: NO_WINDOW,
            items: stream.alloc_zeros(1)?,
            tables: stream.alloc_zeros(1)?,
            ends: stream.alloc_zeros(1)?,
            count: 0,
            rows: 0,
            slots: [0..0, 0..0],
            history_pages: 0,
        };
        self.replan(&mut plan, sequences, window)?;
        Ok(plan)
    }

    /// Plans another step where the tables of an earlier one are, which is over by the time that the stream gets there. They
    /// stay in the same memory if they fit.
    pub(super) fn replan(
        &self,
        plan: &mut PrefillPlan,
        sequences: &[PrefillSequence<'_>],
        window: Option<usize>,
    ) -> Result<(), CudaError> {
        let RowBlocks { items, tables, ends, slots, history_pages } =
            RowBlocks::new(sequences, BLOCK_ROWS / self.shape.group)?;
        (plan.count, plan.rows, plan.slots) = (items.len(), ends.len(), slots);
        plan.history_pages = history_pages;
        plan.window =
            window.and_then(|window| i32::try_from(window).ok()).map_or(NO_WINDOW, |w| w.min(NO_WINDOW));
        self.device.upload(bytemuck::cast_slice::<_, u8>(&items), &mut plan.items)?;
        self.device.upload(&tables, &mut plan.tables)?;
        self.device.upload(&ends, &mut plan.ends)
    }

    /// Attention of the rows of a plan. `queries` and `out` are `[row][query head][channel]`, queries in the basis of the
    /// pages and `query_stride` numbers from row to row; `scale` is that of the logits.
    pub fn launch(
        &self,
        plan: &PrefillPlan,
        pools: &PrefillPools<'_>,
        queries: &CudaSlice<f32>,
        query_stride: usize,
        scale: f32,
        undo: Option<ValueTransform<'_>>,
        out: &mut CudaSlice<f32>,
    ) -> Result<(), CudaError> {
        self.attend(plan, pools, queries, query_stride, scale, None, out)?;
        self.outputs.launch(plan.rows, undo, None, out)
    }

    /// The same before anything is done to the outputs; `totals` gets the logarithm (base 2) of the sum of each row's weights,
    /// `[row][query head]`.
    pub(super) fn attend(
        &self,
        plan: &PrefillPlan,
        pools: &PrefillPools<'_>,
        queries: &CudaSlice<f32>,
        query_stride: usize,
        scale: f32,
        totals: Option<&mut CudaSlice<f32>>,
        out: &mut CudaSlice<f32>,
    ) -> Result<(), CudaError> {
        let DecodeShape { head_dim, kv_heads, group, sealed } = self.shape;
        let stride = kv_heads * group * head_dim;
        let enough = |what, expected: usize, got: usize| {
            if got >= expected { Ok(()) } else { Err(CudaError::Shape { what, expected, got }) }
        };
        enough("queries", plan.rows.saturating_sub(1) * query_stride + stride, queries.len())?;
        enough("outputs", plan.rows * stride, out.len())?;
        if let Some(totals) = &totals {
            enough("sums of weights", plan.rows * kv_heads * group, totals.len())?;
        }
        if plan.count == 0 {
            return Ok(());
        }
        let (device, stream) = (&self.device, self.device.stream());
        let exact_bytes = PageLayout::bf16(head_dim).page_bytes() * kv_heads;
        let (scratch, exact_slots) = match pools.exact.scratch {
            Some(scratch) => {
                let slots = plan.slots[0].end.saturating_sub(scratch.first);
                enough("bytes of scratch pages", slots * exact_bytes, scratch.memory.len())?;
                (scratch.memory.device_ptr(stream).0, scratch.first)
            }
            // A number that no slot reaches, whatever the step: launches are recorded.
            None => (0, i32::MAX as usize),
        };
        let (history, sealed_stride) = match &pools.sealed {
            Some(view) => {
                (view.address(device, &plan.slots[1], kv_heads * sealed.page_bytes())?, view.stride)
            }
            None if !plan.slots[1].is_empty() => {
                return Err(CudaError::Unsupported("sealed pages without a pool of them".into()));
            }
            None => (0, 0),
        };
        let means = pools
            .sealed
            .and_then(|pool| pool.means)
            .map_or(Ok(0), |means| means.address(device, plan.history_pages, kv_heads * head_dim))?;
        let arguments = Arguments {
            queries: queries.device_ptr(stream).0,
            out: out.device_ptr_mut(stream).0,
            exact: pools.exact.address(device, &plan.slots[0], exact_bytes)?,
            scratch,
            sealed: history,
            tables: plan.tables.device_ptr(stream).0,
            items: plan.items.device_ptr(stream).0,
            totals: totals.map_or(0, |totals| totals.device_ptr_mut(stream).0),
            ends: plan.ends.device_ptr(stream).0,
            means,
            query_stride: query_stride as i64,
            out_stride: stride as i64,
            exact_stride: pools.exact.stride as i64,
            sealed_stride: sealed_stride as i64,
            exact_slots: exact_slots as i32,
            group: group as i32,
            sink: pools.sink as i32,
            window: plan.window,
            scale: scale * std::f32::consts::LOG2_E,
        };
        let config = LaunchConfig {
            grid_dim: (plan.count as u32, kv_heads as u32, 1),
            block_dim: (self.products.threads(), 1, 1),
            shared_mem_bytes: self.products.memory(&self.shape) as u32,
        };
        // SAFETY: every slot, the layer and the lengths of queries and outputs were checked; one stream orders all uses.
        unsafe { launch(stream, &self.function, config, &arguments) }
    }
}
