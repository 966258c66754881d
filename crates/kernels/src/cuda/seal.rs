//! Sealing on the device: full bf16 pages to codes or 8-bit floats, for all layers and heads of all pages that are due, in
//! one launch for each format that layers have.
//!
//! Rows are in the codec's basis already ([`super::write`] centred and rotated them), as on the CPU, so a page seals to
//! the same bytes whenever that happens. The bytes are those of `PageCodec::seal_page`, in the order of [`PageOrder`].
//! A page with a number that is not finite stays as it was and is named by [`PageSealer::failure`].

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys::CUfunction_attribute as FunctionAttribute;
use cudarc::driver::{
    CudaFunction, CudaSlice, DevicePtr, DevicePtrMut, DeviceRepr, LaunchConfig, PushKernelArg,
};
use oscar_codec::quantise::step_ratio;
use oscar_codec::rule::{GAUSSIAN_STEP, SEARCH_STEPS, clip_index};
use oscar_codec::{
    HeadIndex, KvGeometry, PAGE_TOKENS, PageCodec, PageLayout, RowEncoder, Rule, SealedSlot, Side, band,
};

use super::compile::{Source, texts};
use super::device::Device;
use super::page_means::{PageMeanTable, places};
use super::page_order::{PageOrder, Pages};
use crate::backend::SealPage;
use crate::error::CudaError;

/// Rows of a page, keys and values: a thread each.
const THREADS: usize = 2 * PAGE_TOKENS;
/// What a kernel is told of layers whose pages are not centred.
const NOT_CENTRED: u32 = u32::MAX;
/// What the memory of the first failure holds if there was none.
const NONE: u64 = u64::MAX;

/// The pools that pages are sealed from and to. Slots are as in a cache: `[slot][layer][head]`, scratch slots follow the
/// bf16 slots in number and hold one layer.
pub struct SealPools<'a> {
    /// The pool of bf16 pages.
    pub exact: &'a CudaSlice<u8>,
    /// bf16 pages of one layer.
    pub scratch: Option<&'a CudaSlice<u8>>,
    /// The pool of sealed pages.
    pub sealed: &'a mut CudaSlice<u8>,
    /// The number of the first slot of sealed pages.
    pub first_sealed: usize,
    /// What the keys of each page are centred by, where the codec does that.
    pub page_means: Option<&'a PageMeanTable>,
}

/// A list of pages on the device.
pub struct SealList {
    pages: Vec<SealPage>,
    device: CudaSlice<u32>,
}

/// A number that is not finite: its page was not sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SealFailure {
    /// Entry of the list.
    pub page: usize,
    /// The layer of the page.
    pub layer: usize,
    /// KV head.
    pub head: usize,
    /// Whether it is a key or a value.
    pub side: Side,
    /// Token of the page.
    pub token: usize,
    /// Channel of the row.
    pub channel: usize,
}

/// What becomes of the pages of a layer; the kernel knows the numbers.
enum SealedLayer {
    /// bf16 pages stay as they are.
    Copied = 0,
    Encoded = 1,
    /// The layer keeps no history.
    None = 2,
}

/// What the kernel is launched with, field by field as in its source.
#[repr(C)]
#[derive(Clone, Copy)]
struct Arguments {
    exact: u64,
    scratch: u64,
    sealed: u64,
    pages: u64,
    layers: u64,
    rules: u64,
    failure: u64,
    means: u64,
    sealed_stride: i64,
    exact_slots: i32,
    all_layers: i32,
    first_layer: i32,
    layers_here: i32,
    kv_heads: i32,
    mean_pages: i32,
}

// SAFETY: plain numbers in the order of the kernel's `Arguments`.
unsafe impl DeviceRepr for Arguments {}

/// What a kernel is compiled for: everything about a codec but its tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SealShape {
    /// Order of sealed pages; layers that are kept in bf16 are copied by any kernel.
    pub order: PageOrder,
    /// Bits of the rules in use, lowest first: min-max, clip, Gaussian, search. Of values alone where keys have bands.
    pub rules: usize,
    /// Codes against the unrounded scale.
    pub published: bool,
    /// Without instructions that only later cards have, on any card: what sm_80 runs.
    pub portable: bool,
}

impl SealShape {
    /// The shapes for a codec: one for each format of its layers, or the one that copies bf16 pages.
    pub fn all_of(codec: &PageCodec) -> Result<Vec<SealShape>, CudaError> {
        let KvGeometry { layers, kv_heads, head_dim } = codec.geometry();
        let of = |layout| {
            let order = PageOrder::new(layout)?;
            Ok::<_, CudaError>(SealShape { order, rules: 0, published: false, portable: false })
        };
        let mut shapes: Vec<SealShape> = Vec::new();
        for layer in (0..layers).filter(|&layer| !codec.layout(layer).is_bf16()) {
            let layout = codec.layout(layer);
            let at = shapes.iter().position(|shape| shape.order.layout() == layout).unwrap_or(shapes.len());
            if at == shapes.len() {
                shapes.push(of(layout)?);
            }
            let shape = &mut shapes[at];
            for (head, side) in (0..kv_heads).flat_map(|head| [(head, Side::Key), (head, Side::Value)]) {
                if let Some((rule, published)) = code_rule(codec, HeadIndex { layer, head }, side)? {
                    shape.published = published;
                    shape.rules |= 1 << (rule_bits(rule, head_dim) & 255);
                }
            }
        }
        if shapes.is_empty() {
            shapes.push(of(PageLayout::bf16(head_dim))?);
        }
        Ok(shapes)
    }

    /// Order of the pages that are sealed.
    fn exact(&self) -> PageOrder {
        PageOrder::new(PageLayout::bf16(self.order.head_dim()))
            .expect("a head dimension that sealed pages have")
    }

    /// Shared memory of a block: the page, and what it is sealed to.
    pub(super) fn block_memory(&self) -> usize {
        let exact = self.exact().page_bytes();
        if self.order.bits() == 16 { exact } else { exact + self.order.page_bytes() }
    }

    /// The source of the kernel.
    pub fn source(&self) -> Source {
        let mut defines = vec![
            ("HEAD_DIM", self.order.head_dim()),
            ("BITS", self.order.bits()),
            ("GROUPS", self.order.groups()),
            ("RULES", self.rules),
            ("SCALE_BF16", usize::from(self.order.bf16_scales())),
            ("PUBLISHED", usize::from(self.published)),
            ("PORTABLE", usize::from(self.portable)),
        ];
        defines.extend(self.exact().defines(Pages::Exact));
        defines.extend(self.order.defines(Pages::Sealed));
        defines.extend(self.order.band_defines());
        if self.order.bands().is_some() {
            defines.extend(band_numbers());
        }
        if self.order.bits() < 8 {
            let ratio = step_ratio(1 << self.order.bits());
            let bits = |step: f32| (step * ratio).to_bits() as usize;
            let names = ["STEP_0", "STEP_1", "STEP_2", "STEP_3", "STEP_4", "STEP_5", "STEP_6"];
            defines.push(("GAUSSIAN_STEP", bits(GAUSSIAN_STEP)));
            defines.extend(names.into_iter().zip(SEARCH_STEPS.map(bits)));
        }
        let texts = texts!["rounded.cu", "page_order.cu", "rows.cu", "seal_bands.cu", "seal.cu"];
        let bands = if self.order.bands().is_some() { " in bands" } else { "" };
        let name = format!("sealing, {} bits{bands}, {} channels", self.order.bits(), self.order.head_dim());
        Source { name, texts, defines, exact: true }
    }
}

/// The numbers that keys in bands are sealed with, as bits: steps that are tried, and where scales end.
fn band_numbers() -> impl Iterator<Item = (&'static str, usize)> {
    const ONE: [&str; 1] = ["ONE_BIT_STEP"];
    const TWO: [&str; 5] =
        ["TWO_BIT_STEP_0", "TWO_BIT_STEP_1", "TWO_BIT_STEP_2", "TWO_BIT_STEP_3", "TWO_BIT_STEP_4"];
    const FOUR: [&str; 5] =
        ["FOUR_BIT_STEP_0", "FOUR_BIT_STEP_1", "FOUR_BIT_STEP_2", "FOUR_BIT_STEP_3", "FOUR_BIT_STEP_4"];
    const BOUND: [&str; 16] = [
        "BOUND_0", "BOUND_1", "BOUND_2", "BOUND_3", "BOUND_4", "BOUND_5", "BOUND_6", "BOUND_7", "BOUND_8",
        "BOUND_9", "BOUND_10", "BOUND_11", "BOUND_12", "BOUND_13", "BOUND_14", "BOUND_15",
    ];
    let lists: [(&[&'static str], &'static [f32]); 4] =
        [(&ONE, band::steps(1)), (&TWO, band::steps(2)), (&FOUR, band::steps(4)), (&BOUND, &band::BOUNDS)];
    let numbers = lists.into_iter().flat_map(|(names, numbers)| {
        assert_eq!(names.len(), numbers.len(), "a name for every number");
        names.iter().zip(numbers).map(|(&name, number)| (name, number.to_bits() as usize))
    });
    numbers.chain([("OCTAVES_BELOW", band::OCTAVES_BELOW as usize)])
}

/// How the rows of a head become codes, and whether against the unrounded scale; `None` where pages hold no codes, or keys
/// in bands, for which there is one way.
fn code_rule(codec: &PageCodec, head: HeadIndex, side: Side) -> Result<Option<(Rule, bool)>, CudaError> {
    let encoder = codec.encoder(head, side).map_err(|error| CudaError::Unsupported(error.to_string()))?;
    Ok(match encoder.rows {
        RowEncoder::Codes(rows) => Some((rows.rule, rows.published)),
        RowEncoder::Banded(rows) if side == Side::Value => Some((rows.value_rule, false)),
        RowEncoder::Bf16(_) | RowEncoder::Fp8(_) | RowEncoder::Banded(_) => None,
    })
}

/// A rule as the kernel knows it: its number, and from bit 8 on the rank of the magnitude to clip at.
fn rule_bits(rule: Rule, head_dim: usize) -> u32 {
    match rule {
        Rule::Clip(ratio) if ratio > 0.0 => 1 | ((head_dim - clip_index(ratio, head_dim)) as u32) << 8,
        Rule::Clip(_) => 0,
        Rule::Gaussian => 2,
        Rule::Search => 3,
    }
}

/// The sealing kernels of one codec on one card.
pub struct PageSealer {
    device: Arc<Device>,
    geometry: KvGeometry,
    sealed_stride: usize,
    /// Whether pages of any layer are centred.
    centres: bool,
    kernels: Vec<FormatSealer>,
    rules: CudaSlice<u32>,
    failure: CudaSlice<u64>,
}

/// The sealing kernel of one format.
struct FormatSealer {
    shape: SealShape,
    function: CudaFunction,
    /// `[layer]`: where a layer begins in a sealed slot, what becomes of its pages, and its place among the layers whose pages are
    /// centred, [`NOT_CENTRED`] for others.
    layers: CudaSlice<u32>,
    /// `[layer]`: whether this kernel has anything to do for it.
    seals: Vec<bool>,
}

impl FormatSealer {
    /// `copies`: whether this kernel is the one that copies layers that are kept in bf16.
    fn new(
        device: &Arc<Device>,
        codec: &PageCodec,
        shape: SealShape,
        copies: bool,
    ) -> Result<FormatSealer, CudaError> {
        let (mut layers, mut seals) = (Vec::new(), Vec::new());
        for (layer, place) in places(codec).into_iter().enumerate() {
            let offset = u32::try_from(codec.layer_offset(layer))
                .map_err(|_| CudaError::Unsupported("a sealed page of more than 4 GB".into()))?;
            let kind = match codec.layout(layer) {
                _ if !codec.has_history(layer) => SealedLayer::None,
                layout if copies && layout.is_bf16() => SealedLayer::Copied,
                layout if layout == shape.order.layout() => SealedLayer::Encoded,
                _ => SealedLayer::None,
            };
            seals.push(!matches!(kind, SealedLayer::None));
            layers.extend([offset, kind as u32, place.map_or(NOT_CENTRED, |place| place as u32)]);
        }
        let function = device.load(&shape.source(), "seal")?;
        let attribute = FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        function.set_attribute(attribute, shape.block_memory() as i32)?;
        Ok(FormatSealer { shape, function, layers: device.stream().clone_htod(&layers)?, seals })
    }
}

impl PageSealer {
    /// Compiles (or finds) and loads the kernels, and puts the codec's tables on the card.
    pub fn new(device: &Arc<Device>, codec: &PageCodec) -> Result<PageSealer, CudaError> {
        Self::with_shapes(device, codec, |shape| shape)
    }

    /// With kernels that are asked for in another way: with more rules, or those that any card runs.
    pub fn with_shapes(
        device: &Arc<Device>,
        codec: &PageCodec,
        change: impl Fn(SealShape) -> SealShape,
    ) -> Result<PageSealer, CudaError> {
        let geometry = codec.geometry();
        let kernels = SealShape::all_of(codec)?.into_iter().enumerate().map(|(index, needed)| {
            let shape = change(needed);
            if (shape.order, shape.published) != (needed.order, needed.published)
                || shape.rules & needed.rules != needed.rules
            {
                return Err(CudaError::Unsupported("a sealing kernel for another codec".into()));
            }
            FormatSealer::new(device, codec, shape, index == 0)
        });
        let kernels = kernels.collect::<Result<_, _>>()?;
        let mut rules = Vec::new();
        for layer in 0..geometry.layers {
            for head in 0..geometry.kv_heads {
                for side in [Side::Key, Side::Value] {
                    let rule = code_rule(codec, HeadIndex { layer, head }, side)?;
                    rules.push(rule.map_or(0, |(rule, _)| rule_bits(rule, geometry.head_dim)));
                }
            }
        }
        let stream = device.stream();
        Ok(PageSealer {
            geometry,
            sealed_stride: codec.page_bytes(),
            centres: places(codec).iter().any(Option::is_some),
            kernels,
            rules: stream.clone_htod(&rules)?,
            failure: stream.clone_htod(&[NONE])?,
            device: device.clone(),
        })
    }

    /// The most registers and bytes of local memory (spills) that a thread of the kernels has.
    pub fn resources(&self) -> Result<(usize, usize), CudaError> {
        self.kernels.iter().try_fold((0, 0), |(registers, spilled), FormatSealer { function, .. }| {
            let here = (function.num_regs()? as usize, function.local_size_bytes()? as usize);
            Ok((registers.max(here.0), spilled.max(here.1)))
        })
    }

    /// Puts a list of pages on the device. No two may become the same sealed page.
    pub fn list(&self, pages: &[SealPage]) -> Result<SealList, CudaError> {
        let mut targets: Vec<SealedSlot> = pages.iter().map(|page| page.sealed).collect();
        targets.sort_unstable();
        if let Some(pair) = targets.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(CudaError::PageWrittenTwice { slot: pair[0].number() });
        }
        let mut numbers: Vec<u32> = pages
            .iter()
            .flat_map(|page| [page.exact.number(), page.sealed.number(), page.page as u32])
            .collect();
        if numbers.is_empty() {
            numbers.extend([0; 3]);
        }
        Ok(SealList { pages: pages.to_vec(), device: self.device.stream().clone_htod(&numbers)? })
    }

    /// Seals the pages of a list, for some layers. `exact_slots` is where scratch slots begin. Numbers that are not
    /// finite are found by [`PageSealer::failure`]; their pages stay as they were.
    pub fn launch(
        &mut self,
        list: &SealList,
        layers: Range<usize>,
        exact_slots: usize,
        pools: SealPools<'_>,
    ) -> Result<(), CudaError> {
        let KvGeometry { layers: all_layers, kv_heads, head_dim } = self.geometry;
        if layers.end > all_layers {
            let (expected, got) = (all_layers, layers.end);
            return Err(CudaError::Shape { what: "layers of the codec, at most", expected, got });
        }
        let head = PageLayout::bf16(head_dim).page_bytes() * kv_heads;
        let scratch_slots = pools.scratch.map_or(0, |scratch| scratch.len() / head);
        let held = pools.exact.len() / (head * all_layers);
        if held < exact_slots {
            return Err(CudaError::Shape { what: "bf16 slots of a pool", expected: exact_slots, got: held });
        }
        let sealed_end = pools.first_sealed + pools.sealed.len() / self.sealed_stride;
        for page in &list.pages {
            let (exact, sealed) = (page.exact.number(), page.sealed.number());
            let all_exact = 0..exact_slots + scratch_slots;
            for (slot, slots) in [(exact, all_exact), (sealed, pools.first_sealed..sealed_end)] {
                if !slots.contains(&(slot as usize)) {
                    return Err(CudaError::PageOutOfRange { slot, slots: slots.end });
                }
            }
            if page.exact.index() >= exact_slots && layers.len() > 1 {
                return Err(CudaError::Unsupported(format!("slot {exact} holds one layer only")));
            }
        }
        let (means, mean_pages) = match pools.page_means.filter(|_| self.centres) {
            Some(table) => {
                let pages = list.pages.iter().map(|page| page.page + 1).max().unwrap_or(0);
                (table.address(&self.device, pages)?, table.pages())
            }
            None if self.centres => {
                return Err(CudaError::Unsupported("pages that are centred without their means".into()));
            }
            None => (0, 0),
        };
        let blocks = list.pages.len() * layers.len() * kv_heads;
        if blocks == 0 {
            return Ok(());
        }
        let blocks = u32::try_from(blocks)
            .ok()
            .filter(|&blocks| i32::try_from(blocks).is_ok())
            .ok_or_else(|| CudaError::Unsupported(format!("{blocks} pages of heads in one launch")))?;
        let stream = self.device.stream();
        // Where slot 0 would lie.
        let before = (pools.first_sealed * self.sealed_stride) as u64;
        let arguments = Arguments {
            exact: pools.exact.device_ptr(stream).0,
            scratch: pools.scratch.map_or(0, |scratch| scratch.device_ptr(stream).0),
            sealed: pools.sealed.device_ptr_mut(stream).0.wrapping_sub(before),
            pages: list.device.device_ptr(stream).0,
            layers: 0,
            rules: self.rules.device_ptr(stream).0,
            failure: self.failure.device_ptr_mut(stream).0,
            means,
            sealed_stride: self.sealed_stride as i64,
            exact_slots: exact_slots as i32,
            all_layers: all_layers as i32,
            first_layer: layers.start as i32,
            layers_here: layers.len() as i32,
            kv_heads: kv_heads as i32,
            mean_pages: mean_pages as i32,
        };
        // Each kernel passes over layers of other formats, so that blocks have the same numbers in all of them.
        for kernel in self.kernels.iter().filter(|kernel| kernel.seals[layers.clone()].contains(&true)) {
            let arguments = Arguments { layers: kernel.layers.device_ptr(stream).0, ..arguments };
            let config = LaunchConfig {
                grid_dim: (blocks, 1, 1),
                block_dim: (THREADS as u32, 1, 1),
                shared_mem_bytes: kernel.shape.block_memory() as u32,
            };
            let mut launch = stream.launch_builder(&kernel.function);
            launch.arg(&arguments);
            // SAFETY: every slot and layer was checked to lie inside its pool, no sealed page is written by two blocks, and
            // one stream orders all uses.
            unsafe { launch.launch(config) }?;
        }
        Ok(())
    }

    /// Waits for what was launched and says where the first number that is not finite was, if there was any: in the
    /// order of list, layers, heads, sides, tokens and channels. `layers` are those of the launch. Forgets it.
    pub fn failure(&mut self, layers: Range<usize>) -> Result<Option<SealFailure>, CudaError> {
        let stream = self.device.stream().clone();
        let found = stream.clone_dtoh(&self.failure)?;
        self.device.synchronise()?;
        if found[0] == NONE {
            return Ok(None);
        }
        stream.memcpy_htod(&[NONE], &mut self.failure)?;
        let mut rest = found[0] as usize;
        let mut next = |count: usize| {
            let index = rest % count.max(1);
            rest /= count.max(1);
            index
        };
        let (channel, token) = (next(self.geometry.head_dim), next(PAGE_TOKENS));
        let side = if next(2) == 0 { Side::Key } else { Side::Value };
        let (head, layer) = (next(self.geometry.kv_heads), layers.start + next(layers.len()));
        Ok(Some(SealFailure { page: rest, layer, head, side, token, channel }))
    }
}
