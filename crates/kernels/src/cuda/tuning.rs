//! How the decode kernel is laid out for a shape of heads and a format: warps, stages, blocks, and the macros it is
//! compiled with.
//!
//! Registers decide: at 128 channels, sums take 32 of every lane for each eight query heads (for each four if weights are of
//! two bytes), queries 8 for each four.

use oscar_codec::{PageLayout, band};

use super::compile::{Source, texts};
use super::page_order::{PageOrder, Pages};
use super::plan::MOST_PARTIALS;
use crate::error::CudaError;

/// Heads, and the format of the pages that are not bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeShape {
    /// Channels of a head.
    pub head_dim: usize,
    /// The number of KV heads.
    pub kv_heads: usize,
    /// Query heads per KV head.
    pub group: usize,
    /// Sealed pages; [`PageLayout::Bf16`] if there are none, or if history stays bf16.
    pub sealed: PageLayout,
}

/// Shared memory that a card has, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SharedMemory {
    /// Bytes that one block may have.
    pub block: usize,
    /// Bytes that all blocks of a multiprocessor have together.
    pub multiprocessor: usize,
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

    /// Fours of query heads that a block works on: a matrix instruction on codes has room for four.
    fn quads(&self) -> usize {
        self.group.min(self.rows()).div_ceil(4)
    }

    /// Multiprocessors that each unit of a batch must have for large blocks to pay, as measured: the longer a segment takes,
    /// the fewer.
    pub(super) fn blocks_per_unit(&self) -> usize {
        match (self.group, self.head_dim) {
            (..=4, _) | (5..=8, ..=64) => 4,
            (5..=12, _) => 2,
            _ => 1,
        }
    }

    /// Weights of values are of two bytes, not f16. Measured: with four query heads memory decides, with eight it is 1 %,
    /// and sums of sixteen have no room in registers.
    fn byte_weights(&self) -> bool {
        let two_bits = match self.sealed {
            PageLayout::Codes(layout) => layout.bits() == 2 && layout.groups() == 1,
            PageLayout::Banded(layout) => layout.value_bits() == 2,
            _ => false,
        };
        two_bits && self.head_dim <= 128 && self.quads() == 3
    }

    /// Sealed tiles of a segment, at most, for each warp. The error of weights of two bytes grows with the square root of
    /// their number: with 16384 tokens it is 100 units or less of at least 2^16.
    pub(super) fn most_tiles(&self) -> usize {
        if self.byte_weights() { 256 } else { 8192 }
    }

    /// What a segment costs besides its tiles, in turns of all warps. Measured: where warps are few and busy, beginning and
    /// ending take longer than memory does.
    pub(super) fn segment_turns(&self) -> usize {
        match (self.codes(), self.rows() > 8) {
            (true, true) => 4,
            (true, false) => 3,
            (false, _) => 1,
        }
    }

    pub(super) fn orders(&self) -> Result<[PageOrder; 2], CudaError> {
        Ok([PageOrder::new(PageLayout::bf16(self.head_dim))?, PageOrder::new(self.sealed)?])
    }

    /// Bytes of a stage: the larger of the two tiles.
    fn stage_bytes(&self) -> Result<usize, CudaError> {
        Ok(self.orders()?.map(|order| order.tile_bytes()).into_iter().max().unwrap_or(0))
    }

    /// Shared memory of a block: the stages or what partial results need, and beside them a result that is left; or what
    /// merging needs.
    pub(super) fn block_memory(&self, tuning: &Tuning) -> Result<usize, CudaError> {
        let stages = tuning.warps * tuning.stages * self.stage_bytes()?;
        let partial = tuning.warps * self.rows() * (self.head_dim + 8) * 4;
        // A result that is left for the next segment.
        let left = self.rows() * self.head_dim * 4;
        // Sums of slices, factors, rows, and a product with a matrix of which every warp has a part.
        let merge = tuning.warps * 32 * 16
            + MOST_PARTIALS * self.rows() * 4
            + (1 + tuning.warps) * self.rows() * self.head_dim * 4;
        Ok((stages.max(partial) + left).max(merge))
    }

    /// What a block has besides: 1 KB of its own, barriers, states of warps, queries as operands, and what aligning them
    /// takes.
    fn fixed_memory(&self, tuning: &Tuning) -> Result<usize, CudaError> {
        let [rows, heads] = [self.rows(), 4 * self.quads()];
        let sealed = self.orders()?[1];
        let queries = match sealed.bands() {
            // Steps and starts of every band, the table of scales, and for every warp those of a tile and the products with
            // the means of sixteen pages.
            Some(layout) => {
                let bands = layout.key_scale_count();
                let scales = 4 * 256 + tuning.warps * bands * (4 * sealed.tile_tokens() + 32);
                let means = tuning.warps * 16 * heads * 4;
                heads * (2 * self.head_dim + 8 * bands) + scales + means + 16
            }
            None => heads * (2 * self.head_dim + 4 + 4 * sealed.groups()),
        };
        Ok(1024 + 128 + tuning.warps * (8 * tuning.stages + 8 * rows) + 12 * rows + 32 + queries)
    }

    /// Layouts, each with the bytes of pages per multiprocessor below which it is the fastest: first the usual one, which
    /// has no such limit, then those for less and less work.
    pub(super) fn layouts(&self, memory: SharedMemory) -> Result<Vec<(usize, Tuning)>, CudaError> {
        let most = self.warps_by_registers();
        // Two warps where shared memory has no room for the tiles of four.
        let usual = match self.fitting(4, most, memory)? {
            Some(tuning) => tuning,
            None => self.fitting(2, most, memory)?.ok_or_else(|| {
                let bytes = memory.block;
                CudaError::Unsupported(format!("{bytes} bytes of shared memory are too few for {self:?}"))
            })?,
        };
        let mut layouts = vec![(usize::MAX, usual)];
        let mut add = |limit, tuning: Option<Tuning>| {
            layouts.extend(tuning.filter(|&tuning| tuning != usual).map(|tuning| (limit, tuning)));
        };
        // One large block leaves fewer partial results, which launch and merge make dearer than reading here.
        let large = if self.codes() { 8 } else { most };
        let one = self.fitting(large, large, memory)?;
        // Measured with four and eight query heads, where twelve warps are slower than eight in all but a few cases, by up to
        // 16 %, and never faster by more than 3 %, and with twelve over banded keys; other shapes keep the limits they had.
        let few_rows = self.rows() == 8 || self.orders()?[1].bands().is_some();
        let small = self.codes() && self.orders()?[1].bits() == 2 && few_rows;
        let limit = if small { 1 << 20 } else { 256 << 10 };
        add(limit, if one.is_some() { one } else { self.fitting(4, 4, memory)? });
        if most > large && !small {
            add(96 << 10, self.fitting(most, most, memory)?);
        }
        Ok(layouts)
    }

    fn codes(&self) -> bool {
        matches!(self.sealed, PageLayout::Codes(_) | PageLayout::Banded(_))
    }

    /// Blocks of `warps`, up to `in_all` of them, as many as shared memory has room for.
    fn fitting(
        &self,
        warps: usize,
        in_all: usize,
        memory: SharedMemory,
    ) -> Result<Option<Tuning>, CudaError> {
        // A tile of codes is worked on for so long that one in flight is enough. More of them measure slower, but not with
        // weights of two bytes over scalar codes.
        let more = self.byte_weights() && !matches!(self.sealed, PageLayout::Banded(_));
        let stages: &[usize] = if self.codes() && !more { &[2] } else { &[3, 2] };
        for blocks_per_multiprocessor in (1..=in_all / warps).rev() {
            for &stages in stages {
                let tuning = Tuning { warps, stages, blocks_per_multiprocessor };
                let bytes = self.block_memory(&tuning)? + self.fixed_memory(&tuning)?;
                if bytes <= memory.block && blocks_per_multiprocessor * bytes <= memory.multiprocessor {
                    return Ok(Some(tuning));
                }
            }
        }
        Ok(None)
    }

    /// Warps that a multiprocessor has registers for: a multiple of its four parts, which have their own.
    fn warps_by_registers(&self) -> usize {
        if self.rows() > 8 || self.head_dim > 128 { 8 } else { 12 }
    }

    /// The kernel of this shape.
    pub fn source(&self, tuning: &Tuning) -> Result<Source, CudaError> {
        let [exact, sealed] = self.orders()?;
        let bits = if self.sealed.is_bf16() { 0 } else { sealed.bits() };
        let mut defines = vec![
            ("HEAD_DIM", self.head_dim),
            ("SEALED_BITS", bits),
            ("GROUPS", sealed.groups()),
            ("ROW_TILES", self.rows() / 8),
            ("HEAD_QUADS", self.quads()),
            ("SCALE_BF16", usize::from(sealed.bf16_scales())),
            ("BYTE_WEIGHTS", usize::from(self.byte_weights())),
            ("WARPS", tuning.warps),
            ("STAGES", tuning.stages),
            ("STAGE_BYTES", self.stage_bytes()?),
            ("BLOCKS_PER_SM", tuning.blocks_per_multiprocessor),
        ];
        defines.extend(exact.defines(Pages::Exact));
        defines.extend(sealed.defines(Pages::Sealed));
        defines.extend(sealed.band_defines());
        defines.push(("OCTAVES_BELOW", band::OCTAVES_BELOW as usize));
        let bands = if sealed.bands().is_some() { " in bands" } else { "" };
        let name = format!("decode attention, {} bits{bands}, {} channels", sealed.bits(), self.head_dim);
        let texts = texts![
            "ring.cu",
            "primitives.cu",
            "page_order.cu",
            "mma.cu",
            "codes.cu",
            "bands.cu",
            "halves.cu",
            "bytes.cu",
            "floats.cu",
            "attention.cu"
        ];
        Ok(Source { name, texts, defines, exact: false })
    }
}

#[cfg(test)]
mod tests {
    use oscar_codec::{BandLayout, CodeLayout, Fp8Layout, ScaleType};

    use super::*;

    fn shapes() -> Vec<DecodeShape> {
        let mut shapes = Vec::new();
        for head_dim in [64, 96, 128, 256] {
            for group in [4, 8, 12, 16] {
                let codes =
                    |bits, groups| PageLayout::Codes(CodeLayout::new(bits, head_dim, groups).unwrap());
                let mut formats =
                    vec![codes(2, 1), codes(4, 1), PageLayout::Fp8(Fp8Layout::new(head_dim).unwrap())];
                formats.push(PageLayout::bf16(head_dim));
                formats.push(codes(2, head_dim / 32));
                formats.push(PageLayout::banded(head_dim).unwrap());
                formats.push(PageLayout::Banded(BandLayout::high(head_dim).unwrap()));
                if head_dim >= 128 {
                    formats.push(PageLayout::int15(head_dim).unwrap());
                }
                // With 6 and 10 bits in four quarters of 64 channels, keys end in half a load.
                let others = match (head_dim, group) {
                    (64, 4) => ["4/0/0/0", "4/2/0/0", "4/2/2/2", "4/4/2/2"].as_slice(),
                    (128, 4) => ["4/2/0/0", "4/2/2/0"].as_slice(),
                    _ => &[],
                };
                formats.extend(others.iter().map(|widths| {
                    PageLayout::Banded(BandLayout::of_widths(head_dim, widths.parse().unwrap()).unwrap())
                }));
                if head_dim == 128 {
                    formats.push(codes(2, 2));
                    let layout = CodeLayout::new(2, head_dim, 1).unwrap();
                    formats.push(PageLayout::Codes(layout.with_scales(ScaleType::Bf16)));
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

    /// Every source with every kind of operand, but not every combination: compiling takes seconds each.
    fn listed() -> Vec<(DecodeShape, Tuning)> {
        let mut listed = Vec::new();
        for shape in shapes() {
            let groups = shape.orders().unwrap()[1].groups();
            let (int2, int4) = match shape.sealed {
                PageLayout::Codes(layout) => {
                    let f16 = layout.scale_type() == ScaleType::F16;
                    (layout.bits() == 2 && groups == 1 && f16, layout.bits() == 4)
                }
                PageLayout::Banded(layout) => (layout == int2_bands(shape.head_dim), false),
                _ => (false, false),
            };
            let rare = match (shape.head_dim, shape.group) {
                (128, 4) => false,
                (128, 12) => groups > 2,
                (128, _) => !int2,
                (96, 4) => matches!(shape.sealed, PageLayout::Fp8(_)),
                (_, 4) => int4,
                _ => true,
            };
            if rare {
                continue;
            }
            let layouts = shape.layouts(H200).unwrap();
            // Layers of fewer bits differ in constants alone.
            let fewer = matches!(shape.sealed, PageLayout::Banded(layout) if layout.bands().len() < 4);
            let all = shape.head_dim == 128 && shape.group == 4 && groups == 1 && !fewer;
            let count = if all { layouts.len() } else { 1 };
            listed.extend(layouts.into_iter().take(count).map(|(_, tuning)| (shape, tuning)));
        }
        listed
    }

    fn int2_bands(head_dim: usize) -> BandLayout {
        BandLayout::int2(head_dim).unwrap()
    }

    const H200: SharedMemory = SharedMemory { block: 232_448, multiprocessor: 233_472 };

    fn name(shape: &DecodeShape) -> String {
        let format = match shape.sealed {
            PageLayout::Bf16(_) => "bf16".to_owned(),
            PageLayout::Fp8(_) => "fp8".to_owned(),
            PageLayout::Banded(layout) if layout.value_bits() == 4 => "banded high".to_owned(),
            PageLayout::Banded(layout) if layout == int2_bands(shape.head_dim) => "banded".to_owned(),
            PageLayout::Banded(layout) if !layout.has_bands_of_int2() => "banded int1.5".to_owned(),
            PageLayout::Banded(layout) => {
                let bits: Vec<_> = layout.bands().iter().map(|band| band.bits.to_string()).collect();
                format!("banded {}", bits.join("/"))
            }
            PageLayout::Codes(layout) if layout.scale_type() == ScaleType::F16 => {
                format!("int{} x{}", layout.bits(), layout.groups())
            }
            PageLayout::Codes(layout) => {
                format!("int{} x{} bf16 scales", layout.bits(), layout.groups())
            }
        };
        format!("{format} d{} heads {}", shape.head_dim, shape.group)
    }

    /// What `tools/check-cuda-kernels` compiles is compiled on a card. `OSCAR_WRITE=1` writes the file.
    #[test]
    fn the_list_of_configurations_is_that_of_the_product() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/cuda/kernels/configurations.json");
        let mut kernels = Vec::new();
        for (shape, tuning) in listed() {
            let Tuning { warps, blocks_per_multiprocessor: blocks, .. } = tuning;
            let name = format!("{}, {blocks} x {warps} warps", name(&shape));
            kernels.push(shape.source(&tuning).unwrap().configuration(&name));
        }
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
        for (block, multiprocessor) in [(166_912, 167_936), (101_376, 102_400), (232_448, 233_472)] {
            for shape in shapes() {
                for (_, tuning) in shape.layouts(SharedMemory { block, multiprocessor }).unwrap() {
                    assert!(shape.block_memory(&tuning).unwrap() <= block, "{shape:?}");
                }
            }
        }
        let int2 = PageLayout::Codes(CodeLayout::new(2, 128, 1).unwrap());
        let shape = DecodeShape { head_dim: 128, kv_heads: 8, group: 4, sealed: int2 };
        let layouts = [(usize::MAX, 4, 3), (1 << 20, 8, 1)];
        let expected = layouts.map(|(limit, warps, blocks_per_multiprocessor)| {
            (limit, Tuning { warps, stages: 2, blocks_per_multiprocessor })
        });
        assert_eq!(shape.layouts(H200).unwrap(), expected);
        assert!(shape.layouts(SharedMemory { block: 1000, multiprocessor: 1000 }).is_err());
        // Twelve query heads: weights of two bytes, a third stage, shorter segments.
        let twelve = DecodeShape { group: 12, ..shape };
        let usual = Tuning { warps: 4, stages: 3, blocks_per_multiprocessor: 2 };
        assert_eq!((twelve.layouts(H200).unwrap()[0].1, twelve.most_tiles()), (usual, 256));
        assert_eq!(
            [1, 4, 8, 9, 12, 13, 16].map(|group| DecodeShape { group, ..shape }.byte_weights()),
            [false, false, false, true, true, false, false]
        );
    }
}
