//! Attention of many rows: prompts, and steps that mix prompts with answers. `kernels/prefill.cu` reads bf16 pages and sealed
//! pages as they lie in the pools; `kernels/undo.cu` takes its outputs back to the basis of values.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use cudarc::driver::sys::CUfunction_attribute as FunctionAttribute;
use cudarc::driver::{CudaFunction, CudaSlice, DevicePtr, DevicePtrMut, DeviceRepr, LaunchConfig};
use oscar_codec::{ExactSlot, PageLayout, SealedSlot, band};

use super::attention::ValueTransform;
use super::compile::{Source, texts};
use super::device::{Device, launch};
use super::error::CudaError;
use super::page_order::{PageOrder, Pages};
use super::tuning::DecodeShape;
use crate::sequence::StepSequence;

/// Rows of a block, as the source says: tokens times the query heads of a KV head.
const BLOCK_ROWS: usize = 128;
/// Vectors of a block of `undo.cu`.
const UNDO_VECTORS: usize = 16;

/// The kernel for a shape of heads and the format of sealed pages.
pub(super) fn source(shape: &DecodeShape) -> Result<Source, CudaError> {
    let exact = PageOrder::new(PageLayout::bf16(shape.head_dim))?;
    let sealed = PageOrder::new(shape.sealed)?;
    let bits = if matches!(shape.sealed, PageLayout::Bf16(_)) { 0 } else { sealed.bits() };
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
    let texts = texts!["primitives.cu", "band_order.cu", "prefill.cu"];
    let name = format!("attention of many rows, {} channels, {bits} bits", shape.head_dim);
    Ok(Source { name, texts, defines, exact: false })
}

/// The kernel that takes outputs back to the basis of values.
pub(super) fn undo_source(head_dim: usize) -> Source {
    let texts = texts!["tiles.cu", "undo.cu"];
    let defines = vec![("HEAD_DIM", head_dim)];
    Source { name: format!("outputs of attention, {head_dim} channels"), texts, defines, exact: false }
}

/// Neighbouring rows of one sequence; the kernel's `Item`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
struct Item {
    table: i32,
    pages: i32,
    first_row: i32,
    first_position: i32,
    tokens: i32,
    least_end: i32,
    most_end: i32,
    padding: i32,
}

/// The rows of a step on the card, cut into blocks.
pub(super) struct PrefillPlan {
    items: CudaSlice<u8>,
    tables: CudaSlice<u32>,
    ends: CudaSlice<i32>,
    count: usize,
    rows: usize,
    /// One more than the largest slots that are named: bf16, sealed.
    slots: [usize; 2],
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
    ends: u64,
    query_stride: i64,
    out_stride: i64,
    sealed_stride: i64,
    exact_slots: i32,
    all_layers: i32,
    layer: i32,
    kv_heads: i32,
    group: i32,
    sink: i32,
    scale: f32,
}
// SAFETY: plain numbers in the order of the kernel's `Arguments`.
unsafe impl DeviceRepr for Arguments {}

#[repr(C)]
#[derive(Clone, Copy)]
struct UndoArguments {
    rows: u64,
    matrices: u64,
    means: u64,
    stride: i64,
    row_count: i32,
    group: i32,
}
// SAFETY: plain numbers in the order of the kernel's `Arguments`.
unsafe impl DeviceRepr for UndoArguments {}

/// The pools of a cache, of which one layer is read.
pub(super) struct PrefillPools<'a> {
    pub(super) exact: &'a CudaSlice<u8>,
    /// The number of bf16 slots; slots from this number on are scratch slots.
    pub(super) exact_slots: usize,
    pub(super) scratch: Option<&'a CudaSlice<u8>>,
    /// Sealed pages, or bf16 pages that stand in for history: where the layer begins in a slot, and bytes of a slot.
    pub(super) sealed: Option<(&'a CudaSlice<u8>, usize, usize)>,
    /// Positions below are read in bf16.
    pub(super) sink: usize,
    pub(super) layer: usize,
    pub(super) all_layers: usize,
}

/// Attention of many rows for one shape on one card.
pub(super) struct PrefillAttention {
    device: Arc<Device>,
    shape: DecodeShape,
    function: CudaFunction,
    memory: usize,
    undo: CudaFunction,
}

impl PrefillAttention {
    /// Compiles (or finds) and loads the kernels.
    pub(super) fn new(device: &Arc<Device>, shape: DecodeShape) -> Result<PrefillAttention, CudaError> {
        if shape.group == 0 || shape.group > BLOCK_ROWS {
            return Err(CudaError::Unsupported(format!("{} query heads for a KV head", shape.group)));
        }
        let memory = 2 * PageLayout::bf16(shape.head_dim).page_bytes();
        if memory > device.block_memory() {
            return Err(CudaError::Unsupported(format!(
                "heads of {} channels: {} has too little shared memory for two pages of them",
                shape.head_dim,
                device.name()
            )));
        }
        let function = device.load(&source(&shape)?, "attend_rows")?;
        let attribute = FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        function.set_attribute(attribute, memory as i32)?;
        let undo = device.load(&undo_source(shape.head_dim), "undo")?;
        Ok(PrefillAttention { device: device.clone(), shape, function, memory, undo })
    }

    /// Cuts the rows of a step into blocks and puts their page tables on the card. `end` says of a sequence and a position
    /// where its history ends, which is read from sealed pages.
    pub(super) fn plan(
        &self,
        sequences: &[StepSequence],
        end: &dyn Fn(&StepSequence, usize) -> usize,
    ) -> Result<PrefillPlan, CudaError> {
        let at_once = BLOCK_ROWS / self.shape.group;
        let (mut items, mut tables, mut ends) = (Vec::new(), Vec::new(), Vec::new());
        let mut slots = [0, 0];
        let small = |number: usize| i32::try_from(number).unwrap_or(i32::MAX);
        for sequence in sequences {
            let (table, pages) = (tables.len(), sequence.pages.len());
            let exact = sequence.pages.iter().map(|&slot| ExactSlot::table_entry(slot));
            let sealed = sequence.all_sealed_slots().iter().map(|&slot| SealedSlot::table_entry(slot));
            for (most, slot) in [(0, exact.clone().max()), (1, sealed.clone().max())] {
                slots[most] = slots[most].max(slot.unwrap_or(0) as usize + 1);
            }
            tables.extend(exact);
            tables.extend(sealed);
            tables.resize(table + 2 * pages, 0);
            for first in (0..sequence.len).step_by(at_once) {
                let (tokens, position) = (at_once.min(sequence.len - first), sequence.start + first);
                let here = (position..position + tokens).map(|position| small(end(sequence, position)));
                items.push(Item {
                    table: small(table),
                    pages: small(pages),
                    first_row: small(sequence.first_row + first),
                    first_position: small(position),
                    tokens: small(tokens),
                    least_end: here.clone().min().unwrap_or(0),
                    most_end: here.clone().max().unwrap_or(0),
                    padding: 0,
                });
                ends.extend(here);
            }
        }
        let rows = ends.len();
        if i32::try_from(tables.len()).is_err() {
            return Err(CudaError::Unsupported(format!("{} pages in one step", tables.len() / 2)));
        }
        // Blocks with the most to read begin first.
        items.sort_by_key(|item| std::cmp::Reverse(item.first_position));
        let stream = self.device.stream();
        let count = items.len();
        items.push(Item::default());
        tables.push(0);
        ends.push(0);
        Ok(PrefillPlan {
            ends: stream.clone_htod(&ends)?,
            items: stream.clone_htod(bytemuck::cast_slice::<_, u8>(&items))?,
            tables: stream.clone_htod(&tables)?,
            count,
            rows,
            slots,
        })
    }

    /// Attention of the rows of a plan. `queries` and `out` are `[row][query head][channel]`, queries in the basis of the
    /// pages and `query_stride` numbers from row to row; `scale` is that of the logits.
    pub(super) fn launch(
        &self,
        plan: &PrefillPlan,
        pools: &PrefillPools<'_>,
        queries: &CudaSlice<f32>,
        query_stride: usize,
        scale: f32,
        undo: Option<ValueTransform<'_>>,
        out: &mut CudaSlice<f32>,
    ) -> Result<(), CudaError> {
        let DecodeShape { head_dim, kv_heads, group, sealed } = self.shape;
        let stride = kv_heads * group * head_dim;
        let enough = |what, expected: usize, got: usize| {
            if got >= expected { Ok(()) } else { Err(CudaError::Shape { what, expected, got }) }
        };
        enough("queries", plan.rows.saturating_sub(1) * query_stride + stride, queries.len())?;
        enough("outputs", plan.rows * stride, out.len())?;
        let head = PageLayout::bf16(head_dim).page_bytes() * kv_heads;
        enough("bytes of bf16 pages", pools.exact_slots * head * pools.all_layers, pools.exact.len())?;
        let scratch_slots = pools.scratch.map_or(0, |scratch| scratch.len() / head);
        if plan.slots[0] > pools.exact_slots + scratch_slots {
            let (slot, slots) = (plan.slots[0] as u32 - 1, pools.exact_slots + scratch_slots);
            return Err(CudaError::PageOutOfRange { slot, slots });
        }
        if let Some((memory, first, slot_bytes)) = pools.sealed {
            let named = plan.slots[usize::from(!matches!(sealed, PageLayout::Bf16(_)))];
            let end = named.saturating_sub(1) * slot_bytes + first + kv_heads * sealed.page_bytes();
            enough("bytes of sealed pages", end, memory.len())?;
        } else if plan.slots[1] > 1 {
            return Err(CudaError::Unsupported("sealed pages without a pool of them".into()));
        }
        if plan.count == 0 {
            return Ok(());
        }
        let stream = self.device.stream();
        let out_address = out.device_ptr_mut(stream).0;
        let arguments = Arguments {
            queries: queries.device_ptr(stream).0,
            out: out_address,
            exact: pools.exact.device_ptr(stream).0,
            scratch: pools.scratch.map_or(0, |scratch| scratch.device_ptr(stream).0),
            sealed: pools.sealed.map_or(0, |(memory, first, _)| memory.device_ptr(stream).0 + first as u64),
            tables: plan.tables.device_ptr(stream).0,
            items: plan.items.device_ptr(stream).0,
            ends: plan.ends.device_ptr(stream).0,
            query_stride: query_stride as i64,
            out_stride: stride as i64,
            sealed_stride: pools.sealed.map_or(0, |(_, _, slot_bytes)| slot_bytes as i64),
            exact_slots: pools.exact_slots as i32,
            all_layers: pools.all_layers as i32,
            layer: pools.layer as i32,
            kv_heads: kv_heads as i32,
            group: group as i32,
            sink: pools.sink as i32,
            scale: scale * std::f32::consts::LOG2_E,
        };
        let config = LaunchConfig {
            grid_dim: (plan.count as u32, kv_heads as u32, 1),
            block_dim: (256, 1, 1),
            shared_mem_bytes: self.memory as u32,
        };
        // SAFETY: every slot, the layer and the lengths of queries and outputs were checked; one stream orders all uses.
        unsafe { launch(stream, &self.function, config, &arguments) }?;
        let Some(transform) = undo else { return Ok(()) };
        let (matrices, means) = transform.addresses(&self.device, &self.shape)?;
        let arguments = UndoArguments {
            rows: out_address,
            matrices,
            means,
            stride: stride as i64,
            row_count: plan.rows as i32,
            group: group as i32,
        };
        let config = LaunchConfig {
            grid_dim: ((plan.rows * group).div_ceil(UNDO_VECTORS) as u32, kv_heads as u32, 1),
            block_dim: (head_dim as u32, 1, 1),
            shared_mem_bytes: 0,
        };
        // SAFETY: as above; matrices and means are those of the layer.
        unsafe { launch(stream, &self.undo, config, &arguments) }
    }
}
