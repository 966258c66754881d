//! Models with the shapes of published ones and random weights, for measurements: speed and memory do not depend on what a
//! model has learned. No file is needed, so a model of any size that fits the device can be measured.
//!
//! All matrices of a type are read from the same random bytes, so the host holds as much as the largest of them, or as one
//! projection of all experts of a layer. On a device that copies weights each is a matrix of its own.

mod mixtures;
mod shard;

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use half::{bf16, f16};
use oscar_kernels::DType;
use oscar_kernels::backend::{RopeLayout, SharedBytes};
use oscar_random::Random;

use crate::config::{BlockStyle, ModelConfig, QkNorm, WeightScales};
use crate::error::ModelError;
use crate::files::{ElementType, FileError, StoredTensor, TensorEntry, TensorSource};
use crate::loaded::ModelFiles;
use crate::names::{LayerTensor, TensorNaming};
use crate::rope::{RopeConfig, RopeScaling};
use crate::text::{GgufVocabulary, Tokenizer};
use mixtures::MIXTURES;
pub use shard::{Shard, Slice, random_shard};

/// The blocks of published FP8 files.
const BLOCK: usize = 128;
const FP8_BLOCKS: WeightScales = WeightScales::Block([BLOCK, BLOCK]);

/// How far random bytes go before they repeat.
const PERIOD: usize = 1 << 24;

/// A published shape.
#[derive(Clone, Copy)]
struct Geometry {
    name: &'static str,
    hidden: usize,
    inner: usize,
    layers: usize,
    q_heads: usize,
    kv_heads: usize,
    tied: bool,
}

/// Qwen3, dense: 128 channels a head, a vocabulary of 151936.
const GEOMETRIES: [Geometry; 5] = [
    Geometry {
        name: "qwen3-0.6b",
        hidden: 1024,
        inner: 3072,
        layers: 28,
        q_heads: 16,
        kv_heads: 8,
        tied: true,
    },
    Geometry {
        name: "qwen3-1.7b",
        hidden: 2048,
        inner: 6144,
        layers: 28,
        q_heads: 16,
        kv_heads: 8,
        tied: true,
    },
    Geometry {
        name: "qwen3-4b",
        hidden: 2560,
        inner: 9728,
        layers: 36,
        q_heads: 32,
        kv_heads: 8,
        tied: true,
    },
    Geometry {
        name: "qwen3-8b",
        hidden: 4096,
        inner: 12288,
        layers: 36,
        q_heads: 32,
        kv_heads: 8,
        tied: false,
    },
    Geometry {
        name: "qwen3-32b",
        hidden: 5120,
        inner: 25600,
        layers: 64,
        q_heads: 64,
        kv_heads: 8,
        tied: false,
    },
];

/// The names that [`random_model`] knows.
pub fn random_names() -> Vec<&'static str> {
    let mixtures = MIXTURES.iter().map(|mixture| mixture.name);
    GEOMETRIES.iter().map(|geometry| geometry.name).chain(mixtures).collect()
}

/// A model of random weights by its name, such as `qwen3-8b`, or `qwen3-8b:q4_k_m` with the types of such a file.
pub fn random_model(name: &str) -> Result<ModelFiles, ModelError> {
    Described::by_name(name)?.files(name)
}

/// The first layers of a shape, as many as are asked for, and how many it has.
pub fn random_layers(name: &str, layers: usize) -> Result<(ModelFiles, usize), ModelError> {
    let mut described = Described::by_name(name)?;
    let all = described.config.layers;
    described.config.layers = layers.min(all);
    if let Some(experts) = &mut described.config.experts {
        experts.routed.truncate(layers);
    }
    Ok((described.files(name)?, all))
}

/// The given number of layers with experts, of a shape that has such layers; `None` if it has none.
pub fn random_mixture(name: &str, layers: usize) -> Result<Option<ModelFiles>, ModelError> {
    let mut described = Described::by_name(name)?;
    let Some(experts) = &mut described.config.experts else { return Ok(None) };
    (experts.routed, described.config.layers) = (vec![true; layers], layers);
    described.files(name).map(Some)
}

/// The type of a tensor by its layer and what it is; the embedding and the head have neither.
type TypeOf = fn(Option<usize>, Option<LayerTensor>) -> DType;

/// A shape and the types of its weights.
struct Described {
    config: ModelConfig,
    dtype: TypeOf,
}

impl Described {
    fn by_name(name: &str) -> Result<Described, ModelError> {
        let unknown = |problem: String| ModelError::BadConfig { path: name.into(), problem };
        let (shape, kind) = name.split_once(':').unwrap_or((name, ""));
        let dense = GEOMETRIES.iter().find(|known| known.name == shape).map(|known| Ok(known.config()));
        let mixture = || MIXTURES.iter().find(|known| known.name == shape).map(|known| known.config());
        let config = dense.or_else(mixture).ok_or_else(|| {
            unknown(format!("there is no such shape; there are {}", random_names().join(", ")))
        })??;
        let described = |dtype: TypeOf| Described { config: config.clone(), dtype };
        match (kind.to_ascii_lowercase().as_str(), config.fp8) {
            ("", Some(_)) => Ok(described(fp8)),
            (_, Some(_)) => Err(unknown(format!("the weights of {shape} are what the file has: FP8"))),
            ("" | "bf16", None) => Ok(described(|_, _| DType::BF16)),
            ("fp8", None) => {
                Ok(Described { config: ModelConfig { fp8: Some(FP8_BLOCKS), ..config }, dtype: fp8 })
            }
            ("q8_0", None) => Ok(described(|_, _| DType::Q8_0)),
            ("q4_k_m", None) => Ok(described(q4_k_m)),
            _ => Err(unknown("the weights are bf16, fp8, q8_0 or q4_k_m".to_owned())),
        }
    }

    /// The files of a model that does not exist.
    fn files(&self, name: &str) -> Result<ModelFiles, ModelError> {
        let tokenizer = tokenizer(self.config.vocab_size)
            .map_err(|source| ModelError::Text { path: name.into(), source })?;
        let tensors = RandomTensors::new(name, &self.config, self.dtype);
        Ok(ModelFiles::made(self.config.clone(), TensorNaming::HuggingFace, Box::new(tensors), tokenizer))
    }
}

impl Geometry {
    fn config(&self) -> ModelConfig {
        ModelConfig {
            family: "qwen3",
            vocab_size: 151_936,
            hidden_size: self.hidden,
            intermediate_size: self.inner,
            layers: self.layers,
            q_heads: self.q_heads,
            kv_heads: self.kv_heads,
            head_dim: 128,
            max_context: 131_072,
            norm_eps: 1e-6,
            rope: RopeConfig {
                theta: 1e6,
                rotary_dim: 128,
                layout: RopeLayout::Halves,
                scaling: RopeScaling::None,
            },
            tied_embeddings: Some(self.tied),
            qkv_bias: false,
            output_bias: false,
            mlp_bias: false,
            head_norms: QkNorm::Heads,
            experts: None,
            further_layers: 0,
            fp8: None,
            style: BlockStyle::plain(128),
            sliding: None,
        }
    }
}

/// FP8 in the layers, and nowhere else.
fn fp8(layer: Option<usize>, _: Option<LayerTensor>) -> DType {
    if layer.is_some() { DType::F8E4M3 } else { DType::BF16 }
}

/// The types in a file of the usual mixture: more bits for the output, and for values and down projections of half of the
/// layers.
fn q4_k_m(layer: Option<usize>, tensor: Option<LayerTensor>) -> DType {
    match (layer, tensor) {
        (None, _) => DType::Q6K,
        (Some(layer), Some(LayerTensor::Value | LayerTensor::Down)) if layer % 2 == 0 => DType::Q6K,
        _ => DType::Q4K,
    }
}

/// A tokenizer whose tokens are bytes, and of which most tokens stand for nothing.
fn tokenizer(vocabulary: usize) -> Result<Tokenizer, crate::text::TextError> {
    // The letters that byte-level vocabularies write bytes with: printable ones as they are, others from 256 on.
    let printable = |byte: u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut others = 256..;
    let mut tokens: Vec<String> = (0..256)
        .map(|byte| if printable(byte) { byte } else { others.next().unwrap_or(byte) })
        .filter_map(char::from_u32)
        .map(String::from)
        .collect();
    tokens.extend((tokens.len()..vocabulary).map(|id| format!("token{id}")));
    Tokenizer::from_gguf_vocabulary(&GgufVocabulary {
        model: "gpt2".to_owned(),
        pre: Some("qwen2".to_owned()),
        tokens,
        ..GgufVocabulary::default()
    })
}

/// Tensors of random numbers.
struct RandomTensors {
    path: Arc<Path>,
    entries: Vec<TensorEntry>,
    index: HashMap<String, usize>,
    /// The bytes of each type, made when they are first needed.
    bytes: HashMap<DType, OnceLock<SharedBytes>>,
}

impl RandomTensors {
    fn new(name: &str, config: &ModelConfig, dtype: TypeOf) -> RandomTensors {
        let naming = TensorNaming::HuggingFace;
        let mut tensors = Tensors { entries: Vec::new(), fp8: config.fp8 };
        let table = [config.vocab_size, config.hidden_size];
        tensors.matrix(naming.embedding().to_owned(), dtype(None, None), table);
        tensors.vector(naming.final_norm().to_owned(), config.hidden_size);
        if config.tied_embeddings == Some(false) {
            tensors.matrix(naming.head().to_owned(), dtype(None, None), table);
        }
        for layer in 0..config.layers {
            tensors.layer(config, layer, &|tensor| dtype(Some(layer), Some(tensor)));
        }
        let entries = tensors.entries;
        let index = entries.iter().enumerate().map(|(at, entry)| (entry.name.clone(), at)).collect();
        let types = DType::ALL.into_iter().chain([DType::F8E4M3]);
        let bytes = types.map(|dtype| (dtype, OnceLock::new())).collect();
        RandomTensors { path: Path::new(name).into(), entries, index, bytes }
    }

    /// Random bytes of a type, enough for its largest tensor.
    fn bytes(&self, dtype: DType) -> SharedBytes {
        let make = || -> SharedBytes {
            let kind = ElementType::Supported(dtype);
            let uses = self.entries.iter().filter(|entry| entry.element_type == kind);
            let ends = uses.filter_map(|entry| Some(entry.offset + entry.byte_len?));
            Arc::new(random_bytes(dtype, ends.max().unwrap_or(0)))
        };
        self.bytes.get(&dtype).map_or_else(make, |bytes| bytes.get_or_init(make).clone())
    }
}

/// A table of tensors.
struct Tensors {
    entries: Vec<TensorEntry>,
    /// How FP8 weights are scaled.
    fp8: Option<WeightScales>,
}

impl Tensors {
    fn add(&mut self, name: String, dtype: DType, shape: Vec<usize>, before: usize) {
        let byte_len = dtype.bytes_for(shape.iter().product());
        // Experts lie one after the other: they are read by turns, and must not be found in a core's cache for that.
        let offset = before * byte_len.unwrap_or(0);
        let element_type = ElementType::Supported(dtype);
        self.entries.push(TensorEntry { name, shape, element_type, offset, byte_len });
    }

    fn vector(&mut self, name: String, len: usize) {
        self.add(name, DType::F32, vec![len], 0);
    }

    fn matrix(&mut self, name: String, dtype: DType, shape: [usize; 2]) {
        self.matrix_behind(name, dtype, shape, 0);
    }

    /// A matrix that lies behind so many others of its shape.
    fn matrix_behind(&mut self, name: String, dtype: DType, shape: [usize; 2], before: usize) {
        // As makers of files do where a row is no whole number of large blocks.
        let dtype = if shape[1].is_multiple_of(dtype.block_len()) { dtype } else { DType::Q8_0 };
        if let (DType::F8E4M3, Some(scales)) = (dtype, self.fp8) {
            let (suffix, scales) = match scales {
                WeightScales::Block([rows, cols]) => {
                    ("_scale_inv", vec![shape[0].div_ceil(rows), shape[1].div_ceil(cols)])
                }
                WeightScales::Channel => ("_scale", vec![shape[0], 1]),
                WeightScales::Tensor => ("_scale", vec![1]),
            };
            self.add(format!("{name}{suffix}"), DType::F32, scales, 0);
        }
        self.add(name, dtype, shape.to_vec(), before);
    }

    fn layer(&mut self, config: &ModelConfig, layer: usize, dtype: &dyn Fn(LayerTensor) -> DType) {
        use LayerTensor::*;
        let (hidden, d) = (config.hidden_size, config.head_dim);
        let (q, kv) = (config.q_heads * d, config.kv_heads * d);
        let name = |tensor| format!("{}.weight", TensorNaming::HuggingFace.layer_tensor(layer, tensor));
        for (tensor, rows) in [(Query, q), (Key, kv), (Value, kv)] {
            self.matrix(name(tensor), dtype(tensor), [rows, hidden]);
            if config.qkv_bias {
                self.vector(name(tensor).replace(".weight", ".bias"), rows);
            }
        }
        self.matrix(name(Output), dtype(Output), [hidden, q]);
        self.vector(name(AttentionNorm), hidden);
        self.vector(name(MlpNorm), hidden);
        for (tensor, heads) in [(QueryNorm, q), (KeyNorm, kv)] {
            match config.head_norms {
                QkNorm::None => {}
                QkNorm::Heads => self.vector(name(tensor), d),
                QkNorm::Layer => self.vector(name(tensor), heads),
            }
        }
        let shapes = |inner: usize| [(Gate, [inner, hidden]), (Up, [inner, hidden]), (Down, [hidden, inner])];
        let Some(experts) = config.experts.as_ref().filter(|experts| experts.routed[layer]) else {
            for (tensor, shape) in shapes(config.intermediate_size) {
                self.matrix(name(tensor), dtype(tensor), shape);
            }
            return;
        };
        let (prefix, names) = (TensorNaming::HuggingFace.layer_prefix(layer), &experts.facts.names);
        // Vectors are all one; a router of ones would choose the same experts for everybody.
        self.matrix(format!("{prefix}{}.weight", names.router), DType::BF16, [experts.count(), hidden]);
        if let Some(correction) = names.correction {
            self.vector(format!("{prefix}{correction}"), experts.count());
        }
        let parts = [names.gate, names.up, names.down];
        for ((tensor, shape), part) in shapes(experts.inner).into_iter().zip(parts) {
            for expert in 0..experts.count() {
                let name = format!("{prefix}{}.{expert}.{part}.weight", names.experts);
                self.matrix_behind(name, dtype(tensor), shape, expert);
            }
        }
        if let (Some(shared), Some(inner)) = (names.shared, experts.shared_inner) {
            for ((tensor, shape), part) in shapes(inner).into_iter().zip(parts) {
                self.matrix(format!("{prefix}{shared}.{part}.weight"), dtype(tensor), shape);
            }
        }
    }
}

impl TensorSource for RandomTensors {
    fn path(&self) -> &Path {
        &self.path
    }

    fn entries(&self) -> &[TensorEntry] {
        &self.entries
    }

    fn position(&self, name: &str) -> Option<usize> {
        self.index.get(name).copied()
    }

    fn get(&self, name: &str) -> Result<StoredTensor, FileError> {
        let missing = || FileError::MissingTensor { path: self.path.to_path_buf(), tensor: name.to_owned() };
        let entry = self.position(name).map(|index| &self.entries[index]).ok_or_else(missing)?;
        let ElementType::Supported(dtype) = entry.element_type else { return Err(missing()) };
        Ok(StoredTensor {
            path: self.path.clone(),
            name: name.to_owned(),
            shape: entry.shape.clone(),
            dtype,
            bytes: self.bytes(dtype),
            offset: entry.offset,
        })
    }
}

/// Blocks of a type whose numbers are of the size that weights have; vectors, which are f32, are all one.
fn random_bytes(dtype: DType, len: usize) -> Vec<u8> {
    let block = dtype.block_bytes();
    let period = len.min(PERIOD).next_multiple_of(block);
    let mut bytes: Vec<u8> = Vec::with_capacity(len + period);
    let mut random = Random::new(1);
    while bytes.len() < period {
        match dtype {
            DType::F32 => bytes.extend(1.0_f32.to_le_bytes()),
            // Up to 0.03: larger exponents are left out.
            DType::F8E4M3 => bytes.push(random.next_u64() as u8 & 0x8f),
            DType::F16 | DType::BF16 => {
                let x = 0.03 * random.signed();
                match dtype {
                    DType::F16 => bytes.extend(f16::from_f32(x).to_le_bytes()),
                    _ => bytes.extend(bf16::from_f32(x).to_le_bytes()),
                }
            }
            _ => {
                let first = bytes.len();
                while bytes.len() < first + block {
                    bytes.extend(random.next_u64().to_le_bytes());
                }
                bytes.truncate(first + block);
                // Scales, and offsets that make the mean about zero.
                let scales: &[(usize, f32)] = match dtype {
                    DType::Q6K => &[(208, 1e-5)],
                    DType::Q4K => &[(0, 1e-4), (2, 7.5e-4)],
                    DType::Q5K => &[(0, 5e-5), (2, 7.5e-4)],
                    DType::Q8_0 => &[(0, 2e-4)],
                    DType::Q4_1 => &[(0, 4e-3), (2, -0.03)],
                    DType::Q5_1 => &[(0, 2e-3), (2, -0.03)],
                    _ => &[(0, 2e-3)],
                };
                if dtype == DType::Mxfp4 {
                    // 2⁻⁸ times up to 6.
                    bytes[first] = 119;
                    continue;
                }
                for &(at, scale) in scales {
                    let scale = f16::from_f32(scale).to_le_bytes();
                    bytes[first + at..first + at + 2].copy_from_slice(&scale);
                }
            }
        }
    }
    while bytes.len() < len {
        let more = (len - bytes.len()).min(period);
        bytes.extend_from_within(..more);
    }
    bytes.truncate(len);
    bytes
}

#[cfg(test)]
mod tests;
