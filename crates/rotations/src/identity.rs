//! Fingerprints: which model rotations belong to.
//!
//! Rotations fit a checkpoint, not a file: one calibrated on a Q4_K_M file serves the original just as well.
//! The **model fingerprint** is therefore taken from what quantisers leave alone, the norm in front of each
//! attention block, rounded to bf16 so that float32, bf16 and GGUF copies agree. (A copy that went through
//! float16 first may round a weight differently and count as another model; rotations can be forced then.)
//! The **weight fingerprint** tells the very files apart.

use half::{bf16, f16};
use oscar_kernels::DType;
use oscar_model::files::{StoredTensor, TensorSource};
use oscar_model::{ModelConfig, ModelError, ModelFiles};
use sha2::{Digest, Sha256};

use super::error::RotationError;

/// What each hash begins with, so that a change of the rule changes every fingerprint.
const MODEL_RULE: &[u8] = b"oscar model fingerprint 1\n";
const WEIGHT_RULE: &[u8] = b"oscar weight fingerprint 1\n";
/// Bytes taken from the beginning, the middle and the end of a tensor.
const SAMPLE: usize = 4096;

/// Names of a layer's tensors in GGUF files and in Hugging Face checkpoints.
const NORM: [&str; 2] = ["blk.{}.attn_norm.weight", "model.layers.{}.input_layernorm.weight"];
const PROJECTIONS: [[&str; 2]; 3] = [
    ["blk.{}.attn_q.weight", "model.layers.{}.self_attn.q_proj.weight"],
    ["blk.{}.attn_k.weight", "model.layers.{}.self_attn.k_proj.weight"],
    ["blk.{}.attn_v.weight", "model.layers.{}.self_attn.v_proj.weight"],
];

/// A model as rotation files know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelIdentity {
    /// Name of the model, for people.
    pub name: String,
    /// The model fingerprint, as [`model_fingerprint`] computes it.
    pub model_fingerprint: String,
    /// The weight fingerprint, as [`weight_fingerprint`] computes it.
    pub weight_fingerprint: String,
}

impl ModelIdentity {
    /// Takes both fingerprints of an opened model.
    pub fn of(name: impl Into<String>, files: &ModelFiles) -> Result<ModelIdentity, RotationError> {
        Ok(ModelIdentity {
            name: name.into(),
            model_fingerprint: model_fingerprint(files)?,
            weight_fingerprint: weight_fingerprint(files)?,
        })
    }
}

/// Computes the fingerprint that every quantisation of one checkpoint has in common, GGUF or Hugging Face.
pub fn model_fingerprint(files: &ModelFiles) -> Result<String, RotationError> {
    let config = files.config();
    let mut hash = Sha256::new();
    hash.update(MODEL_RULE);
    let ModelConfig { layers, hidden_size, q_heads, kv_heads, head_dim, .. } = *config;
    for size in [layers, hidden_size, q_heads, kv_heads, head_dim] {
        hash.update((size as u64).to_le_bytes());
    }
    for layer in 0..layers {
        let norm = tensor(files.tensors(), &NORM, layer)?;
        let weights = floats(&norm)?;
        if weights.len() != hidden_size {
            let (expected, got) = (hidden_size.to_string(), weights.len().to_string());
            let (path, tensor) = (norm.path.to_path_buf(), norm.name);
            return Err(ModelError::TensorShape { path, tensor, expected, got }.into());
        }
        // Some files store gains less one.
        let gains = weights.into_iter().map(|weight| weight + config.style.norm_offset);
        gains.for_each(|gain| hash.update(bf16::from_f32(gain).to_le_bytes()));
    }
    Ok(hexadecimal(&hash.finalize()))
}

/// Computes the fingerprint of the query, key and value projections as they are stored: names, shapes, types and a
/// sample of the bytes.
pub fn weight_fingerprint(files: &ModelFiles) -> Result<String, RotationError> {
    let mut hash = Sha256::new();
    hash.update(WEIGHT_RULE);
    for layer in 0..files.config().layers {
        for names in &PROJECTIONS {
            let tensor = tensor(files.tensors(), names, layer)?;
            let bytes = bytes(&tensor)?;
            hash.update(format!("{} {:?} {} {}\n", tensor.name, tensor.shape, tensor.dtype, bytes.len()));
            for start in [0, bytes.len().saturating_sub(SAMPLE) / 2, bytes.len().saturating_sub(SAMPLE)] {
                hash.update(&bytes[start..bytes.len().min(start + SAMPLE)]);
            }
        }
    }
    Ok(hexadecimal(&hash.finalize()))
}

/// The tensor under the first of its names that the file has.
fn tensor(source: &dyn TensorSource, names: &[&str], layer: usize) -> Result<StoredTensor, RotationError> {
    let names = names.iter().map(|name| name.replace("{}", &layer.to_string())).collect::<Vec<_>>();
    let name = names.iter().find(|name| source.contains(name)).unwrap_or(&names[0]);
    Ok(source.get(name).map_err(ModelError::from)?)
}

fn bytes(tensor: &StoredTensor) -> Result<&[u8], RotationError> {
    let matrix = tensor.matrix().map_err(ModelError::from)?;
    let length = matrix.data().map_err(ModelError::from)?.len();
    Ok(&(*tensor.bytes).as_ref()[tensor.offset..][..length])
}

fn floats(tensor: &StoredTensor) -> Result<Vec<f32>, RotationError> {
    let bytes = bytes(tensor)?;
    let pairs = || bytes.as_chunks::<2>().0.iter();
    Ok(match tensor.dtype {
        DType::F32 => bytes.as_chunks::<4>().0.iter().map(|&number| f32::from_le_bytes(number)).collect(),
        DType::F16 => pairs().map(|&number| f16::from_le_bytes(number).to_f32()).collect(),
        DType::BF16 => pairs().map(|&number| bf16::from_le_bytes(number).to_f32()).collect(),
        other => {
            let problem = format!("a norm of type {other} has no fingerprint");
            return Err(RotationError::tensor(&tensor.path, &tensor.name, problem));
        }
    })
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
