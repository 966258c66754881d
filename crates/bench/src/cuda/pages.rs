//! Sealing and writing timed as they run in a model: pages of many slots, so that none is in a cache when its turn comes,
//! launches replayed from a graph.

use std::sync::Arc;

use cudarc::driver::CudaSlice;
use half::bf16;
use oscar_codec::{ExactSlot, KvGeometry, PAGE_TOKENS, PageCodec, SealedSlot};
use oscar_kernels::backend::{Rope, RopeLayout, SealPage};
use oscar_kernels::cuda::reference::shuffled;
use oscar_kernels::cuda::write::{HeadNorm, HeadNorms, RowTarget};
use oscar_kernels::cuda::{CudaError, Device, PageMeanTable, PageSealer, RowWriter, SealPools, WritePools};
use oscar_random::Random;

use super::decode::replay;

/// Pages of a sequence, which have means of their own.
const SEQUENCE_PAGES: usize = 512;

/// The measurement of sealing or writing.
#[derive(Clone, Copy, Debug)]
pub struct MeasuredPages {
    /// Seconds of a launch, median over passes.
    pub seconds: f64,
    /// Seconds of a launch in the fastest pass.
    pub fastest: f64,
    /// bf16 bytes of keys and values that a launch goes through.
    pub bytes: usize,
    /// How many kernel launches are timed together.
    pub launches: usize,
}

/// Seals `pages` pages of all layers and heads per launch, until at least `pool_bytes` bytes of bf16 have been read.
pub fn measure_sealing(
    device: &Arc<Device>,
    codec: &PageCodec,
    pages: usize,
    pool_bytes: usize,
    passes: usize,
) -> Result<MeasuredPages, CudaError> {
    let mut sealer = PageSealer::new(device, codec)?;
    let geometry = codec.geometry();
    let slot = geometry.page_bytes(geometry.bf16());
    let bytes = pages * slot;
    let launches = pool_bytes.div_ceil(bytes.max(1)).clamp(1, 4096);
    let slots = launches * pages + 1;
    let page_means = PageMeanTable::new(device, codec, SEQUENCE_PAGES)?;
    let mut random = Random::new(3);
    let exact = random_pool(device, slots * slot, &mut random)?;
    let mut sealed = device.zeroed(slots * codec.page_bytes())?;
    let (from, to) = (shuffled(slots - 1, &mut random), shuffled(slots - 1, &mut random));
    let due: Vec<SealPage> = from
        .iter()
        .zip(&to)
        .enumerate()
        .filter_map(|(index, (from, to))| {
            let (exact, sealed) = (ExactSlot::new(from + 1)?, SealedSlot::new(to + 1)?);
            Some(SealPage { page: index % SEQUENCE_PAGES, exact, sealed })
        })
        .collect();
    let lists = due.chunks(pages.max(1)).map(|part| sealer.list(part)).collect::<Result<Vec<_>, _>>()?;
    let layers = 0..geometry.layers;
    let seconds = replay(device, passes, || {
        lists.iter().try_for_each(|list| {
            let pools = SealPools {
                exact: &exact,
                scratch: None,
                sealed: &mut sealed,
                first_sealed: 0,
                page_means: page_means.as_ref(),
            };
            sealer.launch(list, layers.clone(), slots, pools)
        })
    })?;
    if let Some(failure) = sealer.failure(layers)? {
        return Err(CudaError::Unsupported(format!("random rows that are not finite: {failure:?}")));
    }
    Ok(measured(&seconds, bytes, launches))
}

/// Writes one row per sequence (`tokens` 1) or a prompt of `tokens` rows per sequence, one layer per launch, with norms and
/// rotary embedding over whole heads.
pub fn measure_writing(
    device: &Arc<Device>,
    geometry: KvGeometry,
    group: usize,
    codec: Option<&PageCodec>,
    sequences: usize,
    tokens: usize,
    passes: usize,
) -> Result<MeasuredPages, CudaError> {
    let KvGeometry { layers, kv_heads, head_dim } = geometry;
    let writer = RowWriter::new(device, geometry, group, codec)?;
    let pages = tokens.div_ceil(PAGE_TOKENS);
    let slots = sequences * pages + 1;
    let mut random = Random::new(4);
    let order = shuffled(slots - 1, &mut random);
    let targets: Vec<RowTarget> = (0..sequences * tokens)
        .map(|row| {
            let (sequence, position) = (row / tokens, row % tokens);
            let slot = ExactSlot::new(order[sequence * pages + position / PAGE_TOKENS] + 1);
            RowTarget { slot, position }
        })
        .collect();
    let rope = Rope {
        inverse_frequencies: (0..head_dim / 2).map(|pair| 0.9_f32.powi(pair as i32)).collect(),
        magnitude: 1.0,
        layout: RopeLayout::Halves,
    };
    let step = writer.step(&targets, &rope)?;
    let cols = kv_heads * (group + 2) * head_dim;
    let numbers: Vec<f32> = (0..targets.len() * cols).map(|_| random.signed()).collect();
    let rows = device.stream().clone_htod(&numbers)?;
    let mut queries =
        device.stream().clone_htod(&vec![0.0_f32; targets.len() * kv_heads * group * head_dim])?;
    let gain = device.stream().clone_htod(&vec![1.0_f32; head_dim])?;
    let norm = Some(HeadNorm { gain: &gain, epsilon: 1e-6 });
    let mut exact = device.zeroed(slots * geometry.page_bytes(geometry.bf16()))?;
    let seconds = replay(device, passes, || {
        (0..layers).try_for_each(|layer| {
            let pools = WritePools { exact: &mut exact, exact_slots: slots, scratch: None };
            let norms = HeadNorms { queries: norm, keys: norm };
            writer.launch(&step, layer, norms, &rows, &mut queries, pools)
        })
    })?;
    Ok(measured(&seconds, targets.len() * 2 * kv_heads * head_dim * 2, layers))
}

fn measured(seconds: &[f64], bytes: usize, launches: usize) -> MeasuredPages {
    MeasuredPages {
        seconds: seconds[seconds.len() / 2] / launches as f64,
        fastest: seconds[0] / launches as f64,
        bytes,
        launches,
    }
}

/// Device memory full of bf16 numbers that are about normally distributed.
fn random_pool(device: &Device, bytes: usize, random: &mut Random) -> Result<CudaSlice<u8>, CudaError> {
    let mut memory = device.zeroed(bytes)?;
    let chunk: Vec<u8> = (0..(8 << 20) / 2)
        .flat_map(|_| bf16::from_f32((0..4).map(|_| random.signed()).sum()).to_le_bytes())
        .collect();
    let staged = device.stream().clone_htod(&chunk)?;
    for begin in (0..bytes).step_by(chunk.len()) {
        let len = chunk.len().min(bytes - begin);
        device.stream().memcpy_dtod(&staged.slice(..len), &mut memory.slice_mut(begin..begin + len))?;
    }
    device.synchronise()?;
    Ok(memory)
}
