//! Experts of a layer in one tensor of a Hugging Face checkpoint, as those of GPT-OSS are.
//!
//! `gate_up_proj` has the outputs of gates and of what they are multiplied with by turns. Its numbers are floats, with the outputs
//! of an input side by side, or MXFP4: `_blocks` with neighbours in one byte, and `_scales`. Neither is how weights are
//! multiplied here, so they are put in order when they are loaded, once, projection by projection.

use std::sync::Arc;

use oscar_kernels::backend::{SharedBytes, StoredMatrix};
use oscar_kernels::quant::mxfp4::{BLOCK, NAN_SCALE, NIBBLES, write_block};
use oscar_kernels::{Backend, DType};

use crate::error::ModelError;
use crate::experts::Projection;
use crate::files::TensorBytes;
use crate::scales::shape_text;
use crate::weights::Loader;

/// Rows and columns that are turned at once, so that both sides stay in a core's cache.
const SQUARE: usize = 32;

/// Which of a tensor's outputs are those of a projection: every `step`th from `first` on.
#[derive(Clone, Copy)]
struct Turns {
    first: usize,
    step: usize,
}

impl Turns {
    fn of(projection: Projection) -> Turns {
        match projection {
            Projection::Gate => Turns { first: 0, step: 2 },
            Projection::Up => Turns { first: 1, step: 2 },
            Projection::Down => Turns { first: 0, step: 1 },
        }
    }

    /// The output of the tensor that is row `row` of the projection.
    fn output(self, row: usize) -> usize {
        self.first + self.step * row
    }
}

impl<B: Backend> Loader<'_, B> {
    /// The matrices of a projection, `shape` of them with rows and columns, from the tensors that `name` begins.
    pub(crate) fn stacked_experts(
        &self,
        name: &str,
        projection: Projection,
        shape: [usize; 3],
    ) -> Result<Vec<StoredMatrix>, ModelError> {
        let blocks = format!("{name}_blocks");
        let (dtype, bytes) = match self.source.contains(&blocks) {
            true => (DType::Mxfp4, self.blocks_in_order(name, &blocks, Turns::of(projection), shape)?),
            false => self.floats_in_order(name, Turns::of(projection), shape)?,
        };
        Ok(matrices(bytes, dtype, shape))
    }

    /// The biases of a projection, a row for each expert.
    pub(crate) fn stacked_biases(
        &self,
        name: &str,
        projection: Projection,
        count: usize,
        outputs: usize,
    ) -> Result<Vec<StoredMatrix>, ModelError> {
        let turns = Turns::of(projection);
        let size = self.stored(name, count, turns.step * outputs)?;
        let (dtype, element) = (size.dtype, size.dtype.block_bytes());
        if !dtype.is_float() {
            return Err(self.not_floats(name, &dtype.to_string()));
        }
        let data = size.data()?;
        let mut bytes = Vec::with_capacity(count * outputs * element);
        for expert in 0..count {
            for row in 0..outputs {
                let at = (expert * turns.step * outputs + turns.output(row)) * element;
                bytes.extend_from_slice(&data[at..at + element]);
            }
        }
        Ok(matrices(bytes, dtype, [count, 1, outputs]))
    }

    /// Blocks in the order of [`DType::Mxfp4`].
    fn blocks_in_order(
        &self,
        name: &str,
        blocks_name: &str,
        turns: Turns,
        [count, rows, cols]: [usize; 3],
    ) -> Result<Vec<u8>, ModelError> {
        let scales_name = format!("{name}_scales");
        let outputs = turns.step * rows;
        if !cols.is_multiple_of(BLOCK) {
            let problem = format!("tensor `{blocks_name}`: {cols} inputs are no whole blocks of {BLOCK}");
            return Err(ModelError::BadConfig { path: self.source.path().to_path_buf(), problem });
        }
        let across = cols / BLOCK;
        let blocks = self.unsigned(blocks_name, &[count, outputs, across, NIBBLES])?;
        let scales = self.unsigned(&scales_name, &[count, outputs, across])?;
        let (blocks, scales) = (blocks.data().as_chunks::<NIBBLES>().0, scales.data());
        let mut bytes = vec![0; count * rows * across * (NIBBLES + 1)];
        let targets = bytes.as_chunks_mut::<{ NIBBLES + 1 }>().0;
        for (row, targets) in targets.chunks_exact_mut(across.max(1)).enumerate() {
            let from = (row / rows * outputs + turns.output(row % rows)) * across;
            for (index, target) in (from..).zip(targets) {
                if scales[index] == NAN_SCALE {
                    let problem = format!(
                        "tensor `{scales_name}` holds {NAN_SCALE} at index {index}, which is the scale of no number"
                    );
                    return Err(ModelError::BadConfig { path: self.source.path().to_path_buf(), problem });
                }
                write_block(scales[index], &blocks[index], target);
            }
        }
        Ok(bytes)
    }

    /// Floats with the inputs of an output side by side, from those with the outputs of an input side by side.
    fn floats_in_order(
        &self,
        name: &str,
        turns: Turns,
        [count, rows, cols]: [usize; 3],
    ) -> Result<(DType, Vec<u8>), ModelError> {
        let outputs = turns.step * rows;
        let tensor = self.source.get(name)?;
        if !tensor.dtype.is_float() {
            return Err(self.not_floats(name, &tensor.dtype.to_string()));
        }
        self.check_shape(name, &tensor.path, &tensor.shape, &[count, cols, outputs])?;
        self.mark_used(name);
        let (element, data) = (tensor.dtype.block_bytes(), tensor.data()?);
        let mut bytes = vec![0; count * rows * cols * element];
        let matrix_bytes = (rows * cols * element).max(1);
        for (expert, target) in bytes.chunks_exact_mut(matrix_bytes).enumerate() {
            let from = &data[expert * cols * outputs * element..];
            for first_row in (0..rows).step_by(SQUARE) {
                for first_col in (0..cols).step_by(SQUARE) {
                    for row in first_row..(first_row + SQUARE).min(rows) {
                        for col in first_col..(first_col + SQUARE).min(cols) {
                            let (to, at) = (row * cols + col, col * outputs + turns.output(row));
                            target[to * element..][..element]
                                .copy_from_slice(&from[at * element..][..element]);
                        }
                    }
                }
            }
        }
        Ok((tensor.dtype, bytes))
    }

    /// A tensor of bytes of a given shape, which counts as used.
    fn unsigned(&self, name: &str, shape: &[usize]) -> Result<TensorBytes, ModelError> {
        let tensor = self.source.bytes(name)?;
        if tensor.element_type.to_string() != "U8" {
            let problem = format!("tensor `{name}` has type {}, expected U8", tensor.element_type);
            return Err(ModelError::BadConfig { path: tensor.path.to_path_buf(), problem });
        }
        self.check_shape(name, &tensor.path, &tensor.shape, shape)?;
        self.mark_used(name);
        Ok(tensor)
    }

    fn check_shape(
        &self,
        name: &str,
        path: &std::path::Path,
        got: &[usize],
        expected: &[usize],
    ) -> Result<(), ModelError> {
        match got == expected {
            true => Ok(()),
            false => Err(ModelError::TensorShape {
                path: path.to_path_buf(),
                tensor: name.to_owned(),
                expected: shape_text(expected),
                got: shape_text(got),
            }),
        }
    }

    fn not_floats(&self, name: &str, found: &str) -> ModelError {
        let problem = format!("tensor `{name}` has type {found}, expected F32, F16 or BF16");
        ModelError::BadConfig { path: self.source.path().to_path_buf(), problem }
    }
}

/// Matrices that lie one after the other.
fn matrices(bytes: Vec<u8>, dtype: DType, [count, rows, cols]: [usize; 3]) -> Vec<StoredMatrix> {
    let size = bytes.len() / count.max(1);
    let bytes: SharedBytes = Arc::new(bytes);
    let at = |index: usize| StoredMatrix {
        bytes: bytes.clone(),
        offset: index * size,
        dtype,
        rows,
        cols,
        scales: None,
    };
    (0..count).map(at).collect()
}
