//! Decode attention on the device: bf16 and sealed pages of a ragged batch in one launch, merge included.
//!
//! [`DecodeAttention`] is the kernel for one shape of heads and one format of sealed pages. A [`Plan`] cuts a batch into
//! work, once per step; [`DecodeAttention::launch`] runs it for a layer.

use std::sync::Arc;

use cudarc::driver::sys::CUfunction_attribute as FunctionAttribute;
use cudarc::driver::{
    CudaFunction, CudaSlice, DevicePtr, DevicePtrMut, DeviceRepr, LaunchConfig, PushKernelArg,
};

use super::compile::Source;
use super::device::Device;
use super::error::CudaError;
use super::page_order::PageOrder;
use super::plan::{DecodeSequence, MOST_PARTIALS, Plan, PlanShape, Split};
use crate::cpu::attention::sealed::SealedFormat;

/// The texts of the kernel, in the order in which they are compiled as one.
const TEXTS: [&str; 4] = [
    include_str!("kernels/primitives.cu"),
    include_str!("kernels/codes.cu"),
    include_str!("kernels/floats.cu"),
    include_str!("kernels/attention.cu"),
];

/// Heads, and the format of the pages that are not bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeShape {
    /// Channels of a head.
    pub head_dim: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Query heads per KV head.
    pub group: usize,
    /// Sealed pages; [`SealedFormat::Bf16`] if there are none.
    pub sealed: SealedFormat,
}

/// How a kernel is laid out on a multiprocessor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Warps of a block.
    pub warps: usize,
    /// Tiles that a warp has in flight or at hand.
    pub stages: usize,
    /// Blocks that share a multiprocessor.
    pub blocks_per_multiprocessor: usize,
}

impl DecodeShape {
    /// Query heads that a block has room for: two row tiles where registers allow.
    pub fn rows(&self) -> usize {
        if self.group > 8 && self.head_dim <= 128 { 16 } else { 8 }
    }

    fn orders(&self) -> Result<[PageOrder; 2], CudaError> {
        Ok([PageOrder::new(SealedFormat::Bf16, self.head_dim)?, PageOrder::new(self.sealed, self.head_dim)?])
    }

    /// Bytes of a stage: the larger of the two tiles.
    fn stage_bytes(&self) -> Result<usize, CudaError> {
        Ok(self.orders()?.map(|order| order.tile_bytes()).into_iter().max().unwrap_or(0))
    }

    /// Shared memory of a block: the stages, or what partial results and their merge need.
    fn block_memory(&self, tuning: &Tuning) -> Result<usize, CudaError> {
        let stages = tuning.warps * tuning.stages * self.stage_bytes()?;
        let partial = tuning.warps * self.rows() * (self.head_dim + 4) * 4;
        let merge = tuning.warps * 32 * 16 + MOST_PARTIALS * self.rows() * 4;
        Ok(stages.max(partial).max(merge))
    }

    /// Four warps, and as many blocks and stages as registers and shared memory allow.
    pub fn tuning(&self, block_memory: usize, multiprocessor_memory: usize) -> Result<Tuning, CudaError> {
        // Sums take a register per eight channels, row and two lanes; several groups have more scales at hand.
        let groups = self.orders()?[1].groups();
        let registers = if self.head_dim * self.rows() > 128 * 8 || groups > 1 { 2 } else { 3 };
        for blocks_per_multiprocessor in (1..=registers).rev() {
            for stages in [3, 2] {
                let tuning = Tuning { warps: 4, stages, blocks_per_multiprocessor };
                // A block has 1 KB of its own, and some for barriers and states.
                let memory = self.block_memory(&tuning)? + 2048;
                if memory <= block_memory && blocks_per_multiprocessor * memory <= multiprocessor_memory {
                    return Ok(tuning);
                }
            }
        }
        Err(CudaError::Unsupported(format!("{block_memory} bytes of shared memory are too few for {self:?}")))
    }

    /// The kernel of this shape.
    pub fn source(&self, tuning: &Tuning) -> Result<Source, CudaError> {
        let [_, sealed] = self.orders()?;
        let bits = if self.sealed == SealedFormat::Bf16 { 0 } else { sealed.bits() };
        let defines = vec![
            ("HEAD_DIM", self.head_dim),
            ("SEALED_BITS", bits),
            ("GROUPS", sealed.groups()),
            ("ROW_TILES", self.rows() / 8),
            ("SCALE_BF16", usize::from(sealed.bf16_scales())),
            ("WARPS", tuning.warps),
            ("STAGES", tuning.stages),
            ("STAGE_BYTES", self.stage_bytes()?),
            ("BLOCKS_PER_SM", tuning.blocks_per_multiprocessor),
        ];
        let name = format!("decode attention, {} bits, {} channels", sealed.bits(), self.head_dim);
        Ok(Source { name, text: TEXTS.concat(), defines, exact: false })
    }
}

/// Pages of one layer in device memory: head `h` of slot `s` at `offset + s·stride + h·page bytes`.
#[derive(Clone, Copy)]
pub struct PoolView<'a> {
    /// The memory of the pool.
    pub memory: &'a CudaSlice<u8>,
    /// Where the layer's part of slot 0 lies.
    pub offset: usize,
    /// From one slot to the next.
    pub stride: usize,
}

impl PoolView<'_> {
    /// Address of slot 0, if `slots` slots of `bytes` lie inside.
    fn address(&self, device: &Device, slots: usize, bytes: usize) -> Result<u64, CudaError> {
        if !self.offset.is_multiple_of(16) || !self.stride.is_multiple_of(16) {
            return Err(CudaError::Unsupported("pages lie on multiples of 16 bytes".into()));
        }
        let end = slots.checked_sub(1).map_or(Some(0), |last| {
            last.checked_mul(self.stride)?.checked_add(self.offset)?.checked_add(bytes)
        });
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
        Ok(self.memory.device_ptr(device.stream()).0 + self.offset as u64)
    }
}

/// A plan on the device, with room for partial results.
pub struct DevicePlan {
    plan: Plan,
    shape: PlanShape,
    segments: CudaSlice<u8>,
    first_partial: CudaSlice<i32>,
    table: CudaSlice<i32>,
    partial_values: CudaSlice<f32>,
    partial_states: CudaSlice<f32>,
    arrivals: CudaSlice<i32>,
}

impl DevicePlan {
    /// The tables.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }
}

/// The kernel's argument.
#[repr(C)]
#[derive(Clone, Copy)]
struct Arguments {
    queries: u64,
    exact_pool: u64,
    sealed_pool: u64,
    exact_stride: i64,
    sealed_stride: i64,
    table: u64,
    table_width: i64,
    segments: u64,
    first_partial: u64,
    partial_values: u64,
    partial_states: u64,
    arrivals: u64,
    out: u64,
    kv_heads: i32,
    group: i32,
    scale: f32,
}

// SAFETY: plain numbers in the order of the kernel's `Arguments`.
unsafe impl DeviceRepr for Arguments {}

/// The decode kernel of one shape on one card.
pub struct DecodeAttention {
    device: Arc<Device>,
    shape: DecodeShape,
    tuning: Tuning,
    orders: [PageOrder; 2],
    function: CudaFunction,
    memory: usize,
}

impl DecodeAttention {
    /// Compiles (or finds) and loads the kernel.
    pub fn new(device: &Arc<Device>, shape: DecodeShape) -> Result<DecodeAttention, CudaError> {
        let tuning = shape.tuning(device.block_memory(), device.multiprocessor_memory())?;
        Self::with_tuning(device, shape, tuning)
    }

    /// With a layout of one's own choice.
    pub fn with_tuning(
        device: &Arc<Device>,
        shape: DecodeShape,
        tuning: Tuning,
    ) -> Result<DecodeAttention, CudaError> {
        if shape.kv_heads == 0 || shape.group == 0 {
            return Err(CudaError::Unsupported("attention without heads".into()));
        }
        let function = device.load(&shape.source(&tuning)?, "attend")?;
        let memory = shape.block_memory(&tuning)?;
        let attribute = FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        function.set_attribute(attribute, memory as i32)?;
        Ok(DecodeAttention {
            device: device.clone(),
            shape,
            tuning,
            orders: shape.orders()?,
            function,
            memory,
        })
    }

    /// The shape it was made for.
    pub fn shape(&self) -> &DecodeShape {
        &self.shape
    }

    /// How it is laid out.
    pub fn tuning(&self) -> &Tuning {
        &self.tuning
    }

    /// Registers and bytes of local memory (spills) of a thread.
    pub fn resources(&self) -> Result<(usize, usize), CudaError> {
        Ok((self.function.num_regs()? as usize, self.function.local_size_bytes()? as usize))
    }

    /// Order of bytes in bf16 pages and in sealed pages.
    pub fn orders(&self) -> &[PageOrder; 2] {
        &self.orders
    }

    /// What plans need to know.
    pub fn plan_shape(&self) -> PlanShape {
        let tile = |order: &PageOrder| (order.tiles(), order.tile_bytes());
        PlanShape {
            kv_heads: self.shape.kv_heads,
            group: self.shape.group,
            rows: self.shape.rows(),
            warps: self.tuning.warps,
            blocks: self.device.multiprocessors() * self.tuning.blocks_per_multiprocessor,
            exact: tile(&self.orders[0]),
            sealed: tile(&self.orders[1]),
        }
    }

    /// Cuts a batch into work and puts the tables on the device.
    pub fn plan(&self, split: Split, sequences: &[DecodeSequence<'_>]) -> Result<DevicePlan, CudaError> {
        let none = self.shape.sealed == SealedFormat::Bf16;
        if none && sequences.iter().any(|sequence| sequence.history_end > sequence.sink_pages) {
            return Err(CudaError::Unsupported("sealed pages for a kernel of bf16 pages".into()));
        }
        let shape = self.plan_shape();
        let plan = Plan::new(&shape, split, sequences)?;
        let stream = self.device.stream();
        let rows = self.shape.rows();
        let partials = plan.partials.max(1);
        let whole = |numbers: &[i32]| if numbers.is_empty() { vec![0] } else { numbers.to_vec() };
        Ok(DevicePlan {
            segments: stream.clone_htod(bytemuck::cast_slice::<_, u8>(&plan.segments))?,
            first_partial: stream.clone_htod(&plan.first_partial)?,
            table: stream.clone_htod(&whole(&plan.table))?,
            partial_values: stream.alloc_zeros(partials * rows * self.shape.head_dim)?,
            partial_states: stream.alloc_zeros(partials * rows * 2)?,
            arrivals: stream.alloc_zeros(plan.first_partial.len())?,
            plan,
            shape,
        })
    }

    /// Attention of one query token per sequence. `queries` and `out` are `[sequence][query head][channel]`, queries in
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
        let DecodeShape { head_dim, kv_heads, group, .. } = self.shape;
        let numbers = plan.plan.sequences * kv_heads * group * head_dim;
        for (what, got) in [("queries", queries.len()), ("outputs", out.len())] {
            if got < numbers {
                return Err(CudaError::Shape { what, expected: numbers, got });
            }
        }
        if plan.shape != self.plan_shape() {
            return Err(CudaError::Unsupported("a plan for another kernel".into()));
        }
        if plan.plan.sequences == 0 {
            return Ok(());
        }
        let stream = self.device.stream();
        let bytes = |order: &PageOrder| order.page_bytes() * kv_heads;
        let slots = plan.plan.slots;
        let sealed_pool = match sealed {
            Some(pool) => (pool.address(&self.device, slots[1], bytes(&self.orders[1]))?, pool.stride as i64),
            None if slots[1] == 0 => (0, 0),
            None => return Err(CudaError::Unsupported("sealed pages without a pool of them".into())),
        };
        let arguments = Arguments {
            queries: queries.device_ptr(stream).0,
            exact_pool: exact.address(&self.device, slots[0], bytes(&self.orders[0]))?,
            sealed_pool: sealed_pool.0,
            exact_stride: exact.stride as i64,
            sealed_stride: sealed_pool.1,
            table: plan.table.device_ptr(stream).0,
            table_width: plan.plan.table_width as i64,
            segments: plan.segments.device_ptr(stream).0,
            first_partial: plan.first_partial.device_ptr(stream).0,
            partial_values: plan.partial_values.device_ptr_mut(stream).0,
            partial_states: plan.partial_states.device_ptr_mut(stream).0,
            arrivals: plan.arrivals.device_ptr_mut(stream).0,
            out: out.device_ptr_mut(stream).0,
            kv_heads: kv_heads as i32,
            group: group as i32,
            scale: scale * std::f32::consts::LOG2_E,
        };
        let config = LaunchConfig {
            grid_dim: (self.plan_shape().blocks as u32, 1, 1),
            block_dim: (32 * self.tuning.warps as u32, 1, 1),
            shared_mem_bytes: self.memory as u32,
        };
        let mut launch = stream.launch_builder(&self.function);
        launch.arg(&arguments);
        // SAFETY: the plan names pages below `slots`, which were checked to lie inside the pools, partial results below
        // `partials`, and rows below `sequences`; all of that has been allocated. One stream orders all uses.
        unsafe { launch.launch(config) }?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use oscar_codec::{CodeLayout, Fp8Layout, ScaleType};

    use super::super::read::ReadAll;
    use super::*;

    fn shapes() -> Vec<DecodeShape> {
        let mut shapes = Vec::new();
        for head_dim in [64, 96, 128, 256] {
            for group in [4, 16] {
                let codes = |bits, groups| {
                    SealedFormat::Codes(CodeLayout::new(bits, head_dim, groups).unwrap(), ScaleType::F16)
                };
                let mut formats =
                    vec![codes(2, 1), codes(4, 1), SealedFormat::Fp8(Fp8Layout::new(head_dim).unwrap())];
                formats.push(SealedFormat::Bf16);
                formats.push(codes(2, head_dim / 32));
                if head_dim == 128 {
                    formats.push(codes(2, 2));
                    let layout = CodeLayout::int2(head_dim, 1).unwrap();
                    formats.push(SealedFormat::Codes(layout, ScaleType::Bf16));
                }
                shapes.extend(formats.into_iter().map(|sealed| DecodeShape {
                    head_dim,
                    kv_heads: 8,
                    group,
                    sealed,
                }));
            }
        }
        shapes.retain(|shape| shape.group <= 8 || shape.head_dim <= 128);
        shapes
    }

    fn name(shape: &DecodeShape) -> String {
        let format = match shape.sealed {
            SealedFormat::Bf16 => "bf16".to_owned(),
            SealedFormat::Fp8(_) => "fp8".to_owned(),
            SealedFormat::Codes(layout, ScaleType::F16) => {
                format!("int{} x{}", layout.bits(), layout.groups())
            }
            SealedFormat::Codes(layout, _) => {
                format!("int{} x{} bf16 scales", layout.bits(), layout.groups())
            }
        };
        format!("{format} d{} rows {}", shape.head_dim, shape.rows())
    }

    /// What `tools/check-cuda-kernels` compiles is what is compiled on a card. `OSCAR_WRITE=1` writes the file.
    #[test]
    fn the_list_of_configurations_is_that_of_the_product() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/cuda/kernels/configurations.json");
        let texts = ["primitives.cu", "codes.cu", "floats.cu", "attention.cu"];
        let mut kernels = Vec::new();
        for shape in shapes() {
            // The limits of an H200.
            let tuning = shape.tuning(232_448, 233_472).unwrap();
            let defines: serde_json::Map<String, serde_json::Value> = shape
                .source(&tuning)
                .unwrap()
                .defines
                .into_iter()
                .map(|(key, value)| (key.to_owned(), value.into()))
                .collect();
            kernels.push(serde_json::json!({ "name": name(&shape), "sources": texts, "defines": defines }));
        }
        let read = ReadAll::source();
        kernels.push(serde_json::json!({ "name": read.name, "sources": ["read.cu"], "defines": {} }));
        let expected = serde_json::json!({ "options": super::super::compile::OPTIONS, "kernels": kernels });
        if std::env::var_os("OSCAR_WRITE").is_some() {
            std::fs::write(path, format!("{expected:#}\n")).unwrap();
        }
        let listed: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        assert_eq!(listed, expected, "run this test with OSCAR_WRITE=1");
    }

    #[test]
    fn every_shape_fits_the_cards_it_should_run_on() {
        // Shared memory of a block and of a multiprocessor: sm_80, sm_89, sm_90.
        for (block, whole) in [(166_912, 167_936), (101_376, 102_400), (232_448, 233_472)] {
            for shape in shapes() {
                let tuning = shape.tuning(block, whole).unwrap();
                assert!(shape.block_memory(&tuning).unwrap() <= block, "{shape:?}");
            }
        }
        let int2 = SealedFormat::Codes(CodeLayout::int2(128, 1).unwrap(), ScaleType::F16);
        let shape = DecodeShape { head_dim: 128, kv_heads: 8, group: 4, sealed: int2 };
        let tuning = shape.tuning(232_448, 233_472).unwrap();
        assert_eq!(tuning, Tuning { warps: 4, stages: 3, blocks_per_multiprocessor: 3 });
        assert!(shape.tuning(1000, 1000).is_err());
    }
}
