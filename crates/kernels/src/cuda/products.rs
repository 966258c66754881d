//! Products of activations with weights.
//!
//! Up to 64 rows go through `multiply.cu`, which reads every weight once, straight from its tiles. More rows go through
//! cuBLASLt on a copy of one matrix in bf16; without that library, or where the bits of a row must not depend on the batch,
//! they go through `multiply.cu` 64 at a time.

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::CudaSlice;

use super::blas::{Blas, DenseProduct};
use super::device::Device;
use super::multiply::{Format, MOST_MATRICES, MOST_ROWS, Multiply, Scratch};
use super::norm::Norms;
use super::operands::{Ends, GatedBlock, Input, InputSource, Output, OutputNorm, Projection};
use super::weights::WeightLoader;
use crate::backend::{KernelError, expect};
use crate::error::CudaError;

/// The products of one card.
pub(super) struct Products {
    multiply: Multiply,
    blas: Option<Blas>,
    norms: Norms,
    scratch: Mutex<Scratch>,
    /// Activations inside a gated block.
    gated: Mutex<Option<CudaSlice<f32>>>,
    /// Results before their norm.
    outputs: Mutex<Option<CudaSlice<f32>>>,
}

impl Products {
    /// Compiles (or finds) and loads the kernels. With `deterministic`, the bits of a row do not depend on the batch, and
    /// cuBLASLt is not used even if it is there.
    pub(super) fn new(device: &Arc<Device>, deterministic: bool) -> Result<Products, CudaError> {
        Ok(Products {
            multiply: Multiply::new(device, deterministic)?,
            blas: if deterministic { None } else { Blas::open(device)? },
            norms: Norms::new(device)?,
            scratch: Mutex::default(),
            gated: Mutex::default(),
            outputs: Mutex::default(),
        })
    }

    /// How often memory was replaced that recorded launches may name.
    pub(super) fn replaced(&self) -> u64 {
        self.multiply.replaced()
    }

    /// Products of few rows, and what they share.
    pub(super) fn multiply(&self) -> &Multiply {
        &self.multiply
    }

    /// Norms that are launches of their own.
    pub(super) fn norms(&self) -> &Norms {
        &self.norms
    }

    /// Whether products of many rows go through cuBLASLt.
    pub(super) fn has_blas(&self) -> bool {
        self.blas.is_some()
    }

    /// cuBLASLt, for so many rows.
    fn dense(&self, rows: usize) -> Option<&Blas> {
        self.blas.as_ref().filter(|_| rows > MOST_ROWS)
    }

    /// Adds `down(activation(gate(x)) * up(x))`, or the norm of that, to the first rows of `hidden`, where `x` is what
    /// `source` makes of them.
    pub(super) fn run_gated(
        &self,
        loader: &WeightLoader,
        hidden: &mut CudaSlice<f32>,
        rows: usize,
        source: InputSource<'_>,
        block: GatedBlock<'_>,
        norm: Option<OutputNorm<'_>>,
    ) -> Result<(), KernelError> {
        let GatedBlock { activation, gate, up, down } = block;
        let (stride, columns) = (gate.weight.cols, gate.weight.rows);
        let input = Input { x: &*hidden, stride, rows, columns: stride, source };
        let mut inner = self.gated.lock().unwrap_or_else(PoisonError::into_inner);
        let inner = self.multiply.grown(&mut inner, rows * 2 * columns)?;
        // A gate and what it multiplies are one unit only if they are of one kind and there is memory for both.
        let apart =
            self.dense(rows).is_some() || gate.weight.kind != up.weight.kind || !self.multiply.gates(rows);
        let (inner_stride, source) = match apart {
            true => {
                let up = Projection { first_column: columns, ..up };
                let output = Output { out: &mut *inner, stride: 2 * columns, ends: Ends::Set };
                self.run(loader, input, &[gate, up], output)?;
                (2 * columns, InputSource::Gated(activation))
            }
            false => {
                let output = Output { out: &mut *inner, stride: columns, ends: Ends::Gate(activation) };
                self.run(loader, input, &[gate, up], output)?;
                (columns, InputSource::Plain)
            }
        };
        let input = Input { x: &*inner, stride: inner_stride, rows, columns, source };
        self.run_added(loader, input, down, norm, hidden)
    }

    /// Adds the product of rows with one matrix, or the norm of that, to the first rows of `hidden`.
    pub(super) fn run_added(
        &self,
        loader: &WeightLoader,
        input: Input<'_>,
        projection: Projection<'_>,
        norm: Option<OutputNorm<'_>>,
        hidden: &mut CudaSlice<f32>,
    ) -> Result<(), KernelError> {
        let (rows, stride) = (input.rows, projection.weight.rows);
        let Some(norm) = norm else {
            return self.run(loader, input, &[projection], Output { out: hidden, stride, ends: Ends::Add });
        };
        let mut outputs = self.outputs.lock().unwrap_or_else(PoisonError::into_inner);
        let outputs = self.multiply.grown(&mut outputs, rows * stride)?;
        self.run(loader, input, &[projection], Output { out: &mut *outputs, stride, ends: Ends::Set })?;
        Ok(self.norms.add_normed(outputs, rows, stride, norm.gain, norm.epsilon, hidden)?)
    }

    /// Multiplies rows with up to three matrices of the same number of columns.
    pub(super) fn run(
        &self,
        loader: &WeightLoader,
        input: Input<'_>,
        projections: &[Projection<'_>],
        output: Output<'_>,
    ) -> Result<(), KernelError> {
        self.check(&input, projections, &output)?;
        let scratch = &mut *self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(blas) = self.dense(input.rows) {
            return self.run_dense(blas, loader, &input, projections, output, scratch);
        }
        for first in (0..input.rows).step_by(MOST_ROWS) {
            let rows = MOST_ROWS.min(input.rows - first);
            self.multiply.run(&input, first, rows, projections, &output, scratch)?;
        }
        Ok(())
    }

    fn check(
        &self,
        input: &Input<'_>,
        projections: &[Projection<'_>],
        output: &Output<'_>,
    ) -> Result<(), KernelError> {
        let at_least = |what, expected: usize, got: usize| {
            if got >= expected { Ok(()) } else { Err(KernelError::Shape { what, expected, got }) }
        };
        at_least("matrices of a product, at most", projections.len(), MOST_MATRICES)?;
        if matches!(output.ends, Ends::Gate(_)) {
            let rows: Vec<usize> = projections.iter().map(|projection| projection.weight.rows).collect();
            let [gate, up] = rows[..] else {
                return Err(KernelError::Shape { what: "matrices of a gate", expected: 2, got: rows.len() });
            };
            expect("outputs of the up projection", gate, up)?;
        }
        let width =
            if matches!(input.source, InputSource::Gated(_)) { 2 * input.columns } else { input.columns };
        at_least("columns of activations", width, input.stride)?;
        if !input.columns.is_multiple_of(4) || !input.stride.is_multiple_of(4) {
            let problem = format!("rows of {} numbers, which is no multiple of four", input.columns);
            return Err(CudaError::Unsupported(problem).into());
        }
        match input.source {
            InputSource::Normed { gain, indices, .. } => {
                at_least("gains of a norm", input.columns, gain.len())?;
                match indices {
                    Some(indices) => at_least("rows that are named", input.rows, indices.len())?,
                    None => at_least("activations", input.rows * input.stride, input.x.len())?,
                }
            }
            _ => at_least("activations", input.rows * input.stride, input.x.len())?,
        }
        at_least("results", input.rows * output.stride, output.out.len())?;
        for projection in projections {
            if projection.weight.cols != input.columns {
                let (expected, got) = (projection.weight.cols, input.columns);
                return Err(KernelError::Shape { what: "columns of a projection", expected, got });
            }
            at_least("columns of results", projection.first_column + projection.weight.rows, output.stride)?;
        }
        Ok(())
    }

    /// Any number of rows, a matrix at a time in bf16. Results are stored or added.
    fn run_dense(
        &self,
        blas: &Blas,
        loader: &WeightLoader,
        input: &Input<'_>,
        projections: &[Projection<'_>],
        output: Output<'_>,
        scratch: &mut Scratch,
    ) -> Result<(), KernelError> {
        self.multiply.pack(input, 0, input.rows, 0, Format::Bf16Rows, scratch)?;
        let Output { out, stride, ends } = output;
        for projection in projections {
            let weight = projection.weight;
            let Scratch { unpacked, slab, bf16: Some(x), .. } = &mut *scratch else {
                unreachable!("rows were packed above")
            };
            let unpacked = match projection.kept {
                true => unpacked.matrix(self.multiply.device(), loader, weight)?,
                false => {
                    let slab = self.multiply.grown(slab, weight.rows * weight.cols * 2)?;
                    loader.unpack_bf16(weight, slab)?;
                    slab
                }
            };
            blas.run(DenseProduct {
                weight: unpacked,
                x,
                rows: input.rows,
                inputs: weight.cols,
                outputs: weight.rows,
                bias: projection.bias,
                out: &mut *out,
                first_column: projection.first_column,
                stride,
                adds: ends == Ends::Add,
            })?;
        }
        Ok(())
    }
}
