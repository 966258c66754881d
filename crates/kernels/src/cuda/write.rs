//! From projected rows to pages on the device, for one layer in one launch: QK-norm, rotary embedding, the codec's basis,
//! and the write of keys and values to bf16 pages in the order of [`PageOrder`]. Queries go to a matrix of their
//! own, as decode attention reads them. Where the matrix of keys is not a rotation, queries are multiplied with its
//! inverse, transposed.
//!
//! Every operation is rounded as on the CPU and sums are added in the same order, so pages and queries are equal to the
//! CPU's to the bit.

use std::sync::Arc;

use cudarc::driver::sys::CUfunction_attribute as FunctionAttribute;
use cudarc::driver::{CudaFunction, CudaSlice, DevicePtr, DevicePtrMut, DeviceRepr, LaunchConfig};
use oscar_codec::{
    ExactSlot, HeadIndex, HeadTransform, KvGeometry, PAGE_TOKENS, PageCodec, PageLayout, Side,
};

use super::compile::{Source, texts};
use super::device::{Device, launch_overlapping};
use super::page_order::{PageOrder, Pages};
use crate::backend::{Rope, RopeLayout};
use crate::error::CudaError;

/// Vectors of a thread: few rows are spread over more threads.
pub(super) const PER_THREAD: [usize; 2] = [2, 8];

/// Shared memory that a block has for rows of a matrix, as the source says.
fn staged_bytes(head_dim: usize, per_thread: usize) -> usize {
    let rows = if head_dim <= 128 { head_dim } else { 64 };
    if per_thread <= 2 { rows * head_dim * 4 } else { 0 }
}

/// The kernel for heads of the channels that `exact` pages have.
pub(super) fn source(exact: &PageOrder, per_thread: usize) -> Source {
    let texts = texts!["rounded.cu", "write.cu"];
    let head_dim = exact.head_dim();
    let mut defines = vec![("HEAD_DIM", head_dim), ("PER_THREAD", per_thread)];
    defines.extend(exact.defines(Pages::Exact));
    Source { name: format!("writing rows, {head_dim} channels"), texts, defines, exact: true }
}

/// Where one row of a step goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowTarget {
    /// Slot of its page, scratch slots included; a row without one, which is padding, is not written.
    pub slot: Option<ExactSlot>,
    /// Position in its sequence.
    pub position: usize,
}

/// The rows of a step on the device: where they go, and their angles.
pub struct StepRows {
    targets: Vec<RowTarget>,
    pairs: usize,
    layout: RopeLayout,
    device_targets: CudaSlice<u32>,
    cos: CudaSlice<f32>,
    sin: CudaSlice<f32>,
}

impl StepRows {
    /// Rows of a step.
    pub fn rows(&self) -> usize {
        self.targets.len()
    }

    /// Where the tables are, and whatever else a recorded launch depends on.
    pub(super) fn signature(&self, device: &Device) -> [u64; 5] {
        let stream = device.stream();
        [
            self.device_targets.device_ptr(stream).0,
            self.cos.device_ptr(stream).0,
            self.sin.device_ptr(stream).0,
            self.targets.len() as u64,
            self.pairs as u64,
        ]
    }
}

/// The pools that rows are written to; see [`super::SealPools`].
pub struct WritePools<'a> {
    /// The pool of bf16 pages.
    pub exact: &'a mut CudaSlice<u8>,
    /// The number of bf16 slots; slots from this number on are scratch slots.
    pub exact_slots: usize,
    /// bf16 pages of one layer.
    pub scratch: Option<&'a mut CudaSlice<u8>>,
}

/// Gains and epsilon of a norm over heads.
#[derive(Clone, Copy)]
pub struct HeadNorm<'a> {
    /// One factor per channel.
    pub gain: &'a CudaSlice<f32>,
    /// Added to the mean square.
    pub epsilon: f32,
}

/// The norms of a layer.
#[derive(Clone, Copy, Default)]
pub struct HeadNorms<'a> {
    /// The norm of queries, if they have one.
    pub queries: Option<HeadNorm<'a>>,
    /// The norm of keys, if they have one.
    pub keys: Option<HeadNorm<'a>>,
}

/// What the kernel is launched with, field by field as in its source.
#[repr(C)]
#[derive(Clone, Copy)]
struct Arguments {
    rows: u64,
    queries: u64,
    query_stride: i64,
    exact: u64,
    scratch: u64,
    targets: u64,
    cos: u64,
    sin: u64,
    q_gain: u64,
    k_gain: u64,
    transforms: u64,
    matrices: u64,
    means: u64,
    q_epsilon: f32,
    k_epsilon: f32,
    row_count: i32,
    kv_heads: i32,
    group: i32,
    pairs: i32,
    interleaved: i32,
    exact_slots: i32,
    all_layers: i32,
    layer: i32,
    query_tiles: i32,
    key_tiles: i32,
    per_row: i32,
}

// SAFETY: plain numbers in the order of the kernel's `Arguments`.
unsafe impl DeviceRepr for Arguments {}

/// The kernels of one model's heads on one card, with the matrices and means of its codec.
pub struct RowWriter {
    device: Arc<Device>,
    geometry: KvGeometry,
    group: usize,
    functions: [CudaFunction; 2],
    /// For each layer, whether queries have other matrices than keys.
    apart: Vec<bool>,
    transforms: CudaSlice<i32>,
    matrices: CudaSlice<f32>,
    means: CudaSlice<f32>,
}

impl RowWriter {
    /// Compiles (or finds) and loads the kernels, and puts the transforms of `codec` on the card; without one, rows are
    /// only rounded. `group` is the number of query heads per KV head.
    pub fn new(
        device: &Arc<Device>,
        geometry: KvGeometry,
        group: usize,
        codec: Option<&PageCodec>,
    ) -> Result<RowWriter, CudaError> {
        let KvGeometry { layers, kv_heads, head_dim } = geometry;
        let exact = PageOrder::new(PageLayout::bf16(head_dim))?;
        if kv_heads == 0 || group == 0 || layers == 0 {
            return Err(CudaError::Unsupported("a cache without layers or heads".into()));
        }
        if let Some(got) = codec.map(PageCodec::geometry).filter(|&got| got != geometry) {
            let (expected, got) = (layers, got.layers);
            return Err(CudaError::Shape { what: "layers, heads and channels of a codec", expected, got });
        }
        let mut tables = Tables::default();
        let mut apart = vec![false; layers];
        for (layer, apart) in apart.iter_mut().enumerate() {
            for head in 0..kv_heads {
                for side in [Side::Key, Side::Value] {
                    let transform = codec
                        .map(|codec| codec.transform(HeadIndex { layer, head }, side))
                        .transpose()
                        .map_err(|error| CudaError::Unsupported(error.to_string()))?;
                    *apart |= tables.add(transform)? && side == Side::Key;
                }
            }
        }
        let stream = device.stream();
        let whole = |numbers: Vec<f32>| if numbers.is_empty() { vec![0.0] } else { numbers };
        let load = |count: usize| -> Result<CudaFunction, CudaError> {
            let function = device.load(&source(&exact, count), "write_rows")?;
            let attribute = FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            function.set_attribute(attribute, staged_bytes(head_dim, count) as i32)?;
            Ok(function)
        };
        let [few, many] = PER_THREAD.map(load);
        Ok(RowWriter {
            geometry,
            group,
            functions: [few?, many?],
            apart,
            transforms: stream.clone_htod(&tables.transforms)?,
            matrices: stream.clone_htod(&whole(tables.matrices))?,
            means: stream.clone_htod(&whole(tables.means))?,
            device: device.clone(),
        })
    }

    /// Prepares the tables of a step, once for all layers. No two rows may go to the same place.
    pub fn step(&self, targets: &[RowTarget], rope: &Rope) -> Result<StepRows, CudaError> {
        let stream = self.device.stream();
        let mut step = StepRows {
            targets: Vec::new(),
            pairs: 0,
            layout: rope.layout,
            device_targets: stream.alloc_zeros(1)?,
            cos: stream.alloc_zeros(1)?,
            sin: stream.alloc_zeros(1)?,
        };
        self.update(&mut step, targets, rope)?;
        Ok(step)
    }

    /// Prepares the tables of another step where those of an earlier one are, which is over by the time that the stream
    /// gets there. They stay in the same memory if they fit.
    pub fn update(&self, step: &mut StepRows, targets: &[RowTarget], rope: &Rope) -> Result<(), CudaError> {
        let pairs = rope.inverse_frequencies.len();
        if 2 * pairs > self.geometry.head_dim {
            let (expected, got) = (self.geometry.head_dim, 2 * pairs);
            return Err(CudaError::Shape { what: "rotary channels, at most the head", expected, got });
        }
        let mut places: Vec<(ExactSlot, usize)> =
            targets.iter().filter_map(|target| Some((target.slot?, target.position % PAGE_TOKENS))).collect();
        places.sort_unstable();
        if let Some(pair) = places.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(CudaError::PageWrittenTwice { slot: pair[0].0.number() });
        }
        let mut numbers: Vec<u32> = targets
            .iter()
            .flat_map(|target| [ExactSlot::table_entry(target.slot), (target.position % PAGE_TOKENS) as u32])
            .collect();
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        for target in targets {
            for frequency in &rope.inverse_frequencies {
                let (s, c) = (target.position as f32 * frequency).sin_cos();
                cos.push(c * rope.magnitude);
                sin.push(s * rope.magnitude);
            }
        }
        // An empty slice has no address.
        numbers.push(0);
        cos.push(0.0);
        sin.push(0.0);
        self.device.upload(&numbers, &mut step.device_targets)?;
        self.device.upload(&cos, &mut step.cos)?;
        self.device.upload(&sin, &mut step.sin)?;
        step.targets = targets.to_vec();
        (step.pairs, step.layout) = (pairs, rope.layout);
        Ok(())
    }

    /// Takes `rows`, `[row][query heads, key heads, value heads][channel]` as projected, to `queries`,
    /// `[row][query head][channel]` in the basis of the pages, and to the pages of `layer`.
    pub fn launch(
        &self,
        step: &StepRows,
        layer: usize,
        norms: HeadNorms<'_>,
        rows: &CudaSlice<f32>,
        queries: &mut CudaSlice<f32>,
        pools: WritePools<'_>,
    ) -> Result<(), CudaError> {
        let stride = self.geometry.kv_heads * self.group * self.geometry.head_dim;
        let (expected, got) = (step.rows() * stride, queries.len());
        if got < expected {
            return Err(CudaError::Shape { what: "queries", expected, got });
        }
        let queries = (queries.device_ptr_mut(self.device.stream()).0, stride);
        self.write(step, layer, true, norms, rows, queries, pools)
    }

    /// The same; queries and keys take the place of those in `rows`, and have no rotary embedding unless the layer `rotates`.
    pub fn launch_in_place(
        &self,
        step: &StepRows,
        layer: usize,
        rotates: bool,
        norms: HeadNorms<'_>,
        rows: &mut CudaSlice<f32>,
        pools: WritePools<'_>,
    ) -> Result<(), CudaError> {
        let stride = (self.group + 2) * self.geometry.kv_heads * self.geometry.head_dim;
        let queries = (rows.device_ptr_mut(self.device.stream()).0, stride);
        self.write(step, layer, rotates, norms, rows, queries, pools)
    }

    /// `queries`: where they go, and from one row to the next. A block reads all of its vectors before it writes any, and no
    /// other block reads them.
    fn write(
        &self,
        step: &StepRows,
        layer: usize,
        rotates: bool,
        norms: HeadNorms<'_>,
        rows: &CudaSlice<f32>,
        queries: (u64, usize),
        pools: WritePools<'_>,
    ) -> Result<(), CudaError> {
        let KvGeometry { layers, kv_heads, head_dim } = self.geometry;
        let (count, q_heads) = (step.rows(), kv_heads * self.group);
        let shape = |what, expected: usize, got: usize| {
            if got >= expected { Ok(()) } else { Err(CudaError::Shape { what, expected, got }) }
        };
        shape("layers of the cache", layer + 1, layers)?;
        shape("queries, keys and values", count * (q_heads + 2 * kv_heads) * head_dim, rows.len())?;
        for norm in [norms.queries, norms.keys].into_iter().flatten() {
            shape("gains of a norm", head_dim, norm.gain.len())?;
        }
        let head = PageLayout::bf16(head_dim).page_bytes() * kv_heads;
        shape("bf16 slots of a pool", pools.exact_slots, pools.exact.len() / (head * layers))?;
        let slots = pools.exact_slots + pools.scratch.as_ref().map_or(0, |scratch| scratch.len() / head);
        let mut named = step.targets.iter().filter_map(|target| target.slot);
        if let Some(slot) = named.find(|slot| slot.index() >= slots) {
            return Err(CudaError::PageOutOfRange { slot: slot.number(), slots });
        }
        if count == 0 {
            return Ok(());
        }
        // With few rows a block has few vectors, so that there are more blocks.
        let vectors = count * (self.group + 1) * kv_heads;
        let many = usize::from(vectors >= 4 * 4 * PER_THREAD[1] * self.device.multiprocessors());
        let tile = 4 * PER_THREAD[many];
        // Keys are multiplied together with their queries, unless these have another matrix.
        let apart = self.apart[layer];
        let per_row = if apart { self.group } else { self.group + 1 };
        let (query_tiles, value_tiles) = ((count * per_row).div_ceil(tile), count.div_ceil(tile));
        let key_tiles = if apart { value_tiles } else { 0 };
        let stream = self.device.stream();
        let gain = |norm: Option<HeadNorm<'_>>| norm.map_or(0, |norm| norm.gain.device_ptr(stream).0);
        let arguments = Arguments {
            rows: rows.device_ptr(stream).0,
            queries: queries.0,
            query_stride: queries.1 as i64,
            exact: pools.exact.device_ptr_mut(stream).0,
            scratch: pools.scratch.map_or(0, |scratch| scratch.device_ptr_mut(stream).0),
            targets: step.device_targets.device_ptr(stream).0,
            cos: step.cos.device_ptr(stream).0,
            sin: step.sin.device_ptr(stream).0,
            q_gain: gain(norms.queries),
            k_gain: gain(norms.keys),
            transforms: self.transforms.device_ptr(stream).0,
            matrices: self.matrices.device_ptr(stream).0,
            means: self.means.device_ptr(stream).0,
            q_epsilon: norms.queries.map_or(0.0, |norm| norm.epsilon),
            k_epsilon: norms.keys.map_or(0.0, |norm| norm.epsilon),
            row_count: count as i32,
            kv_heads: kv_heads as i32,
            group: self.group as i32,
            pairs: if rotates { step.pairs as i32 } else { 0 },
            interleaved: i32::from(step.layout == RopeLayout::Interleaved),
            exact_slots: pools.exact_slots as i32,
            all_layers: layers as i32,
            layer: layer as i32,
            query_tiles: query_tiles as i32,
            key_tiles: key_tiles as i32,
            per_row: per_row as i32,
        };
        let config = LaunchConfig {
            grid_dim: ((query_tiles + key_tiles + value_tiles) as u32, kv_heads as u32, 1),
            block_dim: (head_dim as u32, 1, 1),
            shared_mem_bytes: staged_bytes(head_dim, PER_THREAD[many]) as u32,
        };
        // SAFETY: slots, layer and the lengths of all buffers were checked, no two rows have the same place in a page,
        // and one stream orders all uses.
        unsafe { launch_overlapping(&self.device, &self.functions[many], config, &arguments) }
    }
}

/// Transforms as the kernel reads them. Heads that share a matrix share it here too.
#[derive(Default)]
struct Tables {
    transforms: Vec<i32>,
    matrices: Vec<f32>,
    means: Vec<f32>,
    known: Vec<Arc<[f32]>>,
}

impl Tables {
    /// Adds the transform of a head and side. Returns whether queries have a matrix of their own.
    fn add(&mut self, transform: Option<&HeadTransform>) -> Result<bool, CudaError> {
        let Some(transform) = transform else {
            self.transforms.extend([-1, -1, -1, 0, 0]);
            return Ok(false);
        };
        let (mut matrix, mut query_matrix, mut mean) = (-1, -1, -1);
        if transform.rotates() {
            matrix = self.matrix(transform.matrix())?;
            query_matrix = self.matrix(transform.query_matrix())?;
        }
        if let Some(values) = transform.mean() {
            mean = index(self.means.len() / transform.dim())?;
            self.means.extend_from_slice(values);
        }
        self.transforms.extend([matrix, mean, query_matrix, 1, i32::from(transform.rounds_input())]);
        Ok(matrix != query_matrix)
    }

    /// Which matrix it is; a new one is added.
    fn matrix(&mut self, matrix: &Arc<[f32]>) -> Result<i32, CudaError> {
        let known = self.known.iter().position(|known| Arc::ptr_eq(known, matrix));
        if known.is_none() {
            self.known.push(matrix.clone());
            self.matrices.extend_from_slice(matrix);
        }
        index(known.unwrap_or(self.known.len() - 1))
    }
}

fn index(count: usize) -> Result<i32, CudaError> {
    i32::try_from(count).map_err(|_| CudaError::Unsupported(format!("{count} matrices or means")))
}

#[cfg(test)]
mod tests {
    use oscar_codec::{SquareMatrix, hadamard};

    use super::*;

    #[test]
    fn queries_have_a_matrix_of_their_own_where_that_of_keys_is_no_rotation() {
        let mut tables = Tables::default();
        let rotation = HeadTransform::new(None, &hadamard::matrix(32)).unwrap();
        let matrix = SquareMatrix::from_fn(32, |i, j| hadamard::matrix(32).get(i, j) * (1.0 + j as f64));
        let general = HeadTransform::general(Some(vec![0.5; 32]), &matrix).unwrap();
        assert!(!tables.add(None).unwrap());
        assert!(!tables.add(Some(&rotation)).unwrap());
        assert!(tables.add(Some(&general)).unwrap());
        assert!(!tables.add(Some(&rotation)).unwrap());
        assert!(tables.add(Some(&general)).unwrap());
        let expected =
            [[-1, -1, -1, 0, 0], [0, -1, 0, 1, 0], [1, 0, 2, 1, 0], [0, -1, 0, 1, 0], [1, 1, 2, 1, 0]];
        assert_eq!(tables.transforms, expected.concat());
        let [first, second, third] = [rotation.matrix(), general.matrix(), general.query_matrix()];
        assert_eq!(tables.matrices, [&first[..], &second[..], &third[..]].concat());
    }
}
