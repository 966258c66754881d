//! The scales of FP8 weights.

use std::sync::Arc;

use oscar_kernels::quant::dequantise;
use oscar_kernels::quant::fp8::BlockScales;
use oscar_kernels::{Backend, DType};

use crate::config::WeightScales;
use crate::error::ModelError;
use crate::weights::Loader;

/// What is added to the name of a matrix to name its scales, in the files of different makers.
const SUFFIXES: [&str; 2] = ["_scale_inv", "_scale"];

/// Scales of activations, which are not rounded here.
const OF_ACTIVATIONS: &str = "input_scale";

impl<B: Backend> Loader<'_, B> {
    /// The scales of a matrix of FP8 numbers; none for other types. Vectors (norms, biases) are never FP8.
    pub(crate) fn scales(
        &self,
        name: &str,
        dtype: DType,
        [rows, cols]: [usize; 2],
    ) -> Result<Option<Arc<BlockScales>>, ModelError> {
        if dtype != DType::F8E4M3 {
            return Ok(None);
        }
        let bad = |problem: String| ModelError::BadConfig { path: self.source.path().to_path_buf(), problem };
        if rows == 1 {
            return Err(bad(format!("tensor `{name}` is a vector of FP8 numbers; only matrices may be")));
        }
        let Some(kind) = self.config.fp8 else {
            let problem = "but `config.json` has no `quantization_config` that says how they are scaled";
            return Err(bad(format!("tensor `{name}` holds FP8 numbers, {problem}")));
        };
        let names = SUFFIXES.map(|suffix| format!("{name}{suffix}"));
        let Some(found) = names.iter().find(|name| self.source.contains(name)) else {
            let [first, second] = &names;
            return Err(bad(format!(
                "tensor `{name}` holds FP8 numbers without scales: there is no `{first}` and no `{second}`; \
                 was the file converted to the end?"
            )));
        };
        let tensor = self.source.get(found)?;
        let (block, shapes): ([usize; 2], [Vec<usize>; 2]) = match kind {
            WeightScales::Block([r, c]) => {
                let shape = vec![rows.div_ceil(r), cols.div_ceil(c)];
                ([r, c], [shape.clone(), shape])
            }
            WeightScales::Channel => ([1, cols], [vec![rows, 1], vec![rows]]),
            WeightScales::Tensor => ([rows, cols], [vec![1], vec![]]),
        };
        if !shapes.contains(&tensor.shape) {
            return Err(ModelError::TensorShape {
                path: tensor.path.to_path_buf(),
                tensor: found.clone(),
                expected: shape_text(&shapes[0]),
                got: shape_text(&tensor.shape),
            });
        }
        let mut values = vec![0.0; tensor.shape.iter().product()];
        dequantise(tensor.dtype, tensor.data()?, &mut values);
        self.mark_used(found);
        let activations = name.strip_suffix("weight").map(|module| format!("{module}{OF_ACTIVATIONS}"));
        activations.iter().for_each(|name| self.mark_used(name));
        let scales = BlockScales::new(values, [rows, cols], block);
        scales.map(|scales| Some(Arc::new(scales))).map_err(|error| bad(format!("tensor `{found}`: {error}")))
    }
}

/// A shape as errors write it, such as `2x3`.
pub(crate) fn shape_text(shape: &[usize]) -> String {
    match shape {
        [] => "a single number".to_owned(),
        _ => shape.iter().map(usize::to_string).collect::<Vec<_>>().join("x"),
    }
}
