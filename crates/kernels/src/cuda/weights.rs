//! Weights on the card, in the tiles of `kernels/tiles.cu`: quantised blocks stay quantised, floats become bf16.
//!
//! A matrix travels in parts of some megabytes: its stored bytes are copied to a staging buffer and put in order from there,
//! so the card never holds it twice and the host holds nothing but the mapped file.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaFunction, CudaSlice, DevicePtr, DevicePtrMut, DeviceRepr, LaunchConfig};

use super::compile::{Source, texts};
use super::device::{Device, launch, launch_overlapping};
use super::tile_kind::{TILE_COLUMNS, TILE_ROWS, TileKind, scale_columns, type_number};
use crate::backend::{KernelError, SharedBytes, StoredMatrix, expect};
use crate::dtype::DType;
use crate::error::CudaError;
use crate::quant;

/// Stored bytes that are put in order at once.
const STAGING_BYTES: usize = 64 << 20;

/// A weight on the card.
pub struct CudaWeight {
    /// A number that no other weight of the process has.
    id: u64,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) kind: TileKind,
    /// The tiles of a matrix, or the f32 numbers of a vector.
    pub(super) memory: WeightMemory,
}

/// The same projection of all experts of a layer on the card.
pub struct CudaExperts {
    pub(super) count: usize,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) kind: TileKind,
    /// The tiles of one expert after those of another, or the numbers where each has one row.
    pub(super) memory: WeightMemory,
}

impl CudaExperts {
    /// The tiles of matrices.
    pub(super) fn tiles(&self) -> Result<&CudaSlice<u8>, KernelError> {
        self.memory.tiles()
    }

    /// A vector of `len` of each of `count` experts.
    pub(super) fn vectors(
        &self,
        what: &'static str,
        count: usize,
        len: usize,
    ) -> Result<&CudaSlice<f32>, KernelError> {
        expect(what, len, self.cols)?;
        self.memory.vector(what, count * len)
    }
}

/// Where the numbers of a weight are.
pub(super) enum WeightMemory {
    Tiles(CudaSlice<u8>),
    Vector(CudaSlice<f32>),
}

impl CudaWeight {
    fn new(rows: usize, cols: usize, kind: TileKind, memory: WeightMemory) -> CudaWeight {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        CudaWeight { id: NEXT.fetch_add(1, Ordering::Relaxed), rows, cols, kind, memory }
    }

    /// The number that tells this weight from all others of the process, also from those that were dropped.
    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// Blocks of 64 columns.
    pub(super) fn steps(&self) -> usize {
        self.cols.div_ceil(TILE_COLUMNS)
    }

    /// Blocks of 16 rows.
    pub(super) fn row_tiles(&self) -> usize {
        self.rows.div_ceil(TILE_ROWS)
    }

    /// The tiles of a matrix.
    pub(super) fn tiles(&self) -> Result<&CudaSlice<u8>, KernelError> {
        self.memory.tiles()
    }

    /// The numbers of a vector of `len`.
    pub(super) fn vector(&self, what: &'static str, len: usize) -> Result<&CudaSlice<f32>, KernelError> {
        self.memory.vector(what, len)
    }
}

impl WeightMemory {
    fn tiles(&self) -> Result<&CudaSlice<u8>, KernelError> {
        match self {
            WeightMemory::Tiles(tiles) => Ok(tiles),
            WeightMemory::Vector(_) => {
                Err(KernelError::Shape { what: "rows of a matrix, at least", expected: 2, got: 1 })
            }
        }
    }

    fn vector(&self, what: &'static str, expected: usize) -> Result<&CudaSlice<f32>, KernelError> {
        match self {
            WeightMemory::Vector(vector) => {
                expect(what, expected, vector.len())?;
                Ok(vector)
            }
            WeightMemory::Tiles(_) => Err(KernelError::Shape { what, expected, got: 0 }),
        }
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct RepackArguments {
    stored: u64,
    tiles: u64,
    row_bytes: i64,
    dtype: i32,
    kind: i32,
    rows: i32,
    columns: i32,
    steps: i32,
    first_row: i32,
    row_tiles: i32,
    scale_columns: i32,
    scales: u64,
}
// SAFETY: plain numbers in the order of the kernel's `Arguments`.
unsafe impl DeviceRepr for RepackArguments {}

#[repr(C)]
#[derive(Clone, Copy)]
struct UnpackArguments {
    tiles: u64,
    out: u64,
    kind: i32,
    rows: i32,
    columns: i32,
    steps: i32,
}
// SAFETY: plain numbers in the order of the kernel's `UnpackArguments`.
unsafe impl DeviceRepr for UnpackArguments {}

#[repr(C)]
#[derive(Clone, Copy)]
struct EmbedArguments {
    tiles: u64,
    tokens: u64,
    out: u64,
    kind: i32,
    rows: i32,
    columns: i32,
    steps: i32,
}
// SAFETY: plain numbers in the order of the kernel's `EmbedArguments`.
unsafe impl DeviceRepr for EmbedArguments {}

/// The kernel that puts weights in order.
pub(super) fn source() -> Source {
    let texts = texts!["tiles.cu", "repack.cu"];
    Source { name: "weights".into(), texts, defines: Vec::new(), exact: false }
}

/// Brings weights to the card and back.
pub(super) struct WeightLoader {
    device: Arc<Device>,
    repack: CudaFunction,
    unpack_rows: CudaFunction,
    unpack_floats: CudaFunction,
    embed: CudaFunction,
    staging: Mutex<Staging>,
}

/// What a part of a matrix travels through: its stored bytes, and its scales if they are stored beside it.
#[derive(Default)]
struct Staging {
    bytes: Option<CudaSlice<u8>>,
    scales: Option<CudaSlice<f32>>,
}

/// Bytes of so many numbers of a stored type in tiles that are full.
pub(super) fn bytes_of_numbers(dtype: DType, numbers: usize) -> usize {
    numbers.saturating_mul(TileKind::of_type(dtype).tile_bytes()) / (TILE_ROWS * TILE_COLUMNS)
}

/// Bytes of a matrix in tiles.
fn matrix_bytes(stored: &StoredMatrix, kind: TileKind) -> Result<usize, KernelError> {
    let StoredMatrix { rows, cols, .. } = *stored;
    if rows == 0 || cols % 2 != 0 || rows > i32::MAX as usize || cols > i32::MAX as usize {
        return Err(CudaError::Unsupported(format!("a {rows}x{cols} matrix")).into());
    }
    Ok(rows.div_ceil(TILE_ROWS) * cols.div_ceil(TILE_COLUMNS) * kind.tile_bytes())
}

/// All numbers of a stored matrix.
fn floats(stored: &StoredMatrix) -> Result<Vec<f32>, KernelError> {
    let mut values = vec![0.0; stored.rows * stored.cols];
    quant::dequantise(stored.dtype, stored.data()?, &mut values);
    if let Some(scales) = &stored.scales {
        for (row, values) in values.chunks_exact_mut(stored.cols.max(1)).enumerate() {
            scales.apply(row, 0..stored.cols, values);
        }
    }
    Ok(values)
}

impl WeightLoader {
    pub(super) fn new(device: &Arc<Device>) -> Result<WeightLoader, CudaError> {
        let module = device.load_module(&source())?;
        let function = |name: &str| module.load_function(name).map_err(CudaError::Driver);
        Ok(WeightLoader {
            repack: function("repack")?,
            unpack_rows: function("unpack_rows")?,
            unpack_floats: function("unpack_floats")?,
            embed: function("embed")?,
            staging: Mutex::default(),
            device: device.clone(),
        })
    }

    /// Brings a stored matrix to the card; a vector (one row) becomes f32.
    pub(super) fn load(&self, stored: &StoredMatrix) -> Result<CudaWeight, KernelError> {
        let (rows, cols, kind) = (stored.rows, stored.cols, TileKind::of(stored));
        if rows == 1 {
            let vector = self.device.stream().clone_htod(&floats(stored)?).map_err(CudaError::Driver)?;
            return Ok(CudaWeight::new(rows, cols, kind, WeightMemory::Vector(vector)));
        }
        let bytes = matrix_bytes(stored, kind)? + kind.bytes_after();
        let mut tiles = self.device.allocate(bytes, "weights")?;
        self.fill(stored, kind, &mut tiles, 0)?;
        Ok(CudaWeight::new(rows, cols, kind, WeightMemory::Tiles(tiles)))
    }

    /// Brings the matrices of all experts to the card.
    pub(super) fn load_experts(&self, stored: &[StoredMatrix]) -> Result<CudaExperts, KernelError> {
        let Some(first) = stored.first() else {
            return Err(KernelError::Shape { what: "experts of a layer, at least", expected: 1, got: 0 });
        };
        let (count, rows, cols, kind) = (stored.len(), first.rows, first.cols, TileKind::of(first));
        if rows == 1 {
            let numbers = stored.iter().map(floats).collect::<Result<Vec<_>, _>>()?.concat();
            expect("numbers of experts with one row each", count * cols, numbers.len())?;
            let vector = self.device.stream().clone_htod(&numbers).map_err(CudaError::Driver)?;
            return Ok(CudaExperts { count, rows, cols, kind, memory: WeightMemory::Vector(vector) });
        }
        let bytes = matrix_bytes(first, kind)?;
        let mut tiles =
            self.device.allocate(bytes * stored.len() + kind.bytes_after(), "weights of experts")?;
        for (index, stored) in stored.iter().enumerate() {
            expect("outputs of an expert", rows, stored.rows)?;
            expect("inputs of an expert", cols, stored.cols)?;
            if TileKind::of(stored) != kind {
                let problem = "experts of one layer that are stored in different types";
                return Err(CudaError::Unsupported(problem.to_owned()).into());
            }
            self.fill(stored, kind, &mut tiles, index * bytes)?;
        }
        Ok(CudaExperts { count, rows, cols, kind, memory: WeightMemory::Tiles(tiles) })
    }

    /// Puts a matrix in order, from byte `at` of `tiles` on.
    fn fill(
        &self,
        stored: &StoredMatrix,
        kind: TileKind,
        tiles: &mut CudaSlice<u8>,
        at: usize,
    ) -> Result<(), KernelError> {
        if stored.dtype == DType::F8E4M3 && kind == TileKind::Floats {
            let bytes: Vec<u8> = floats(stored)?.into_iter().flat_map(f32::to_le_bytes).collect();
            let bytes: SharedBytes = Arc::new(bytes);
            let wide = StoredMatrix { bytes, offset: 0, dtype: DType::F32, scales: None, ..*stored };
            return self.fill(&wide, kind, tiles, at);
        }
        let data = stored.data()?;
        let (rows, row_tiles) = (stored.rows, stored.rows.div_ceil(TILE_ROWS));
        let row_bytes = data.len() / rows;
        let tiles_at_once = (STAGING_BYTES / (row_bytes * TILE_ROWS).max(1)).max(1);
        for first in (0..row_tiles).step_by(tiles_at_once) {
            let row_tiles = tiles_at_once.min(row_tiles - first);
            let end = ((first + row_tiles) * TILE_ROWS).min(rows);
            let part = first * TILE_ROWS..end;
            self.repack(&data[part.start * row_bytes..end * row_bytes], stored, kind, part, tiles, at)?;
        }
        Ok(())
    }

    /// Puts some rows in order, the first of which begins a tile.
    fn repack(
        &self,
        data: &[u8],
        stored: &StoredMatrix,
        kind: TileKind,
        rows: Range<usize>,
        tiles: &mut CudaSlice<u8>,
        at: usize,
    ) -> Result<(), CudaError> {
        let stream = self.device.stream();
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        let Staging { bytes, scales } = &mut *staging;
        if bytes.as_ref().is_none_or(|bytes| bytes.len() < data.len()) {
            *bytes = None;
            *bytes = Some(self.device.allocate(data.len().max(STAGING_BYTES), "weights on their way")?);
        }
        let Some(bytes) = bytes.as_mut() else { unreachable!("it was made above") };
        stream.memcpy_htod(data, &mut bytes.slice_mut(..data.len()))?;
        let (mut columns, mut scale_address) = (0, 0);
        if let Some(of_matrix) = stored.scales.as_ref().filter(|_| kind == TileKind::Fp8) {
            columns = scale_columns(of_matrix, stored.cols).unwrap_or(0);
            let values: Vec<f32> = rows.clone().flat_map(|row| of_matrix.of_row(row).to_vec()).collect();
            let uploaded = scales.insert(stream.clone_htod(&values)?);
            scale_address = uploaded.device_ptr(stream).0;
        }
        let (steps, row_tiles) = (stored.cols.div_ceil(TILE_COLUMNS), rows.len().div_ceil(TILE_ROWS));
        let arguments = RepackArguments {
            stored: bytes.device_ptr(stream).0,
            tiles: tiles.device_ptr_mut(stream).0 + at as u64,
            row_bytes: (data.len() / rows.len()) as i64,
            dtype: type_number(stored.dtype),
            kind: kind as i32,
            rows: stored.rows as i32,
            columns: stored.cols as i32,
            steps: steps as i32,
            first_row: rows.start as i32,
            row_tiles: row_tiles as i32,
            scale_columns: columns as i32,
            scales: scale_address,
        };
        let config = LaunchConfig {
            grid_dim: ((row_tiles * steps).div_ceil(8) as u32, 1, 1),
            block_dim: (256, 1, 1),
            shared_mem_bytes: 0,
        };
        // SAFETY: the kernel reads the rows that were copied and writes the tiles of these rows, which are allocated.
        unsafe { launch(stream, &self.repack, config, &arguments) }
    }

    /// A matrix as rows of bf16 at the start of `out`, for products of many rows.
    pub(super) fn unpack_bf16(
        &self,
        weight: &CudaWeight,
        out: &mut CudaSlice<u8>,
    ) -> Result<(), KernelError> {
        let expected = weight.rows * weight.cols * 2;
        if out.len() < expected {
            let got = out.len();
            return Err(KernelError::Shape { what: "bytes for an unpacked matrix", expected, got });
        }
        let address = out.device_ptr_mut(self.device.stream()).0;
        let tiles = weight.row_tiles() * weight.steps();
        self.unpack(&self.unpack_rows, weight, address, tiles.div_ceil(8))
    }

    /// All numbers of a weight, on the host.
    pub(super) fn dequantise(&self, weight: &CudaWeight) -> Result<Vec<f32>, KernelError> {
        let stream = self.device.stream();
        if let WeightMemory::Vector(vector) = &weight.memory {
            return Ok(stream.clone_dtoh(vector).map_err(CudaError::Driver)?);
        }
        let mut out: CudaSlice<f32> =
            self.device.allocate(weight.rows * weight.cols, "weights for the host")?;
        let pairs = weight.rows * (weight.cols / 2);
        let address = out.device_ptr_mut(stream).0;
        self.unpack(&self.unpack_floats, weight, address, pairs.div_ceil(256))?;
        let numbers = stream.clone_dtoh(&out).map_err(CudaError::Driver)?;
        stream.synchronize().map_err(CudaError::Driver)?;
        Ok(numbers)
    }

    fn unpack(
        &self,
        function: &CudaFunction,
        weight: &CudaWeight,
        out: u64,
        blocks: usize,
    ) -> Result<(), KernelError> {
        let stream = self.device.stream();
        let arguments = UnpackArguments {
            tiles: weight.tiles()?.device_ptr(stream).0,
            out,
            kind: weight.kind as i32,
            rows: weight.rows as i32,
            columns: weight.cols as i32,
            steps: weight.steps() as i32,
        };
        let config =
            LaunchConfig { grid_dim: (blocks as u32, 1, 1), block_dim: (256, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: the callers have room for as many numbers as the weight has.
        Ok(unsafe { launch(stream, function, config, &arguments) }?)
    }

    /// The rows of a table that tokens name, one after the other. Tokens are below the number of its rows.
    pub(super) fn embed(
        &self,
        table: &CudaWeight,
        tokens: &CudaSlice<u32>,
        rows: usize,
        out: &mut CudaSlice<f32>,
    ) -> Result<(), KernelError> {
        let stream = self.device.stream();
        if rows == 0 {
            return Ok(());
        }
        if tokens.len() < rows || out.len() < rows * table.cols {
            let (expected, got) = (rows, tokens.len().min(out.len() / table.cols));
            return Err(KernelError::Shape { what: "rows of an embedding", expected, got });
        }
        let arguments = EmbedArguments {
            tiles: table.tiles()?.device_ptr(stream).0,
            tokens: tokens.device_ptr(stream).0,
            out: out.device_ptr_mut(stream).0,
            kind: table.kind as i32,
            rows: table.rows as i32,
            columns: table.cols as i32,
            steps: table.steps() as i32,
        };
        let config =
            LaunchConfig { grid_dim: (rows as u32, 1, 1), block_dim: (256, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: there are as many tokens and rows as blocks, and the caller has checked the tokens.
        Ok(unsafe { launch_overlapping(&self.device, &self.embed, config, &arguments) }?)
    }

    /// Gives back the memory that weights travel through, when all are there.
    pub(super) fn release_staging(&self) {
        *self.staging.lock().unwrap_or_else(PoisonError::into_inner) = Staging::default();
    }
}
