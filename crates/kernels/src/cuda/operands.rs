//! What products are told: inputs, matrices, and where results go. Dense layers and experts share these.

use cudarc::driver::CudaSlice;

use super::weights::{CudaExperts, CudaWeight};
use crate::backend::Activation;
use crate::error::CudaError;
use crate::routing::Routing;

/// What is multiplied.
#[derive(Clone, Copy)]
pub(super) struct Input<'a> {
    /// Rows of numbers, `[row][stride]`.
    pub(super) x: &'a CudaSlice<f32>,
    /// Elements from one row to the next.
    pub(super) stride: usize,
    /// The number of rows.
    pub(super) rows: usize,
    /// Numbers of a row that are multiplied.
    pub(super) columns: usize,
    /// What happens to a row first.
    pub(super) source: InputSource<'a>,
}

/// What happens to a row before it is multiplied.
#[derive(Clone, Copy)]
pub(super) enum InputSource<'a> {
    /// A root-mean-square norm; `indices` names the rows where they are not the first ones.
    Normed { gain: &'a CudaSlice<f32>, epsilon: f32, indices: Option<&'a CudaSlice<u32>> },
    /// `activation(first half) * second half`.
    Gated(Activation),
    /// It is multiplied as it is.
    Plain,
}

/// A matrix, its bias, and where its outputs begin in a row of results.
#[derive(Clone, Copy)]
pub(super) struct Projection<'a> {
    pub(super) weight: &'a CudaWeight,
    pub(super) bias: Option<&'a CudaSlice<f32>>,
    pub(super) first_column: usize,
    /// Whether the matrix is kept unpacked, because other chunks of a prompt need it next. A recorded step must unpack what it
    /// multiplies with itself: nobody sees what its replays leave where.
    pub(super) kept: bool,
}

/// Where results go.
pub(super) struct Output<'a> {
    /// Rows of numbers, `[row][stride]`.
    pub(super) out: &'a mut CudaSlice<f32>,
    /// Elements from one row to the next.
    pub(super) stride: usize,
    /// What happens to results.
    pub(super) ends: Ends,
}

/// What happens to the results of a product.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Ends {
    /// They replace what is there.
    Set,
    /// The same, and later launches may read the inputs of this one before they wait for it.
    SetLate,
    /// They are added to what is there.
    Add,
    /// `activation(first matrix) * second matrix` is stored.
    Gate(Activation),
}

/// The three matrices of a gated feed-forward block.
pub(super) struct GatedBlock<'a> {
    pub(super) activation: Activation,
    pub(super) gate: Projection<'a>,
    pub(super) up: Projection<'a>,
    pub(super) down: Projection<'a>,
}

/// A norm of what a block adds to the hidden rows.
#[derive(Clone, Copy)]
pub(super) struct OutputNorm<'a> {
    pub(super) gain: &'a CudaSlice<f32>,
    pub(super) epsilon: f32,
}

/// The experts of a layer and what chooses them.
pub(super) struct RoutedBlock<'a> {
    pub(super) router: Projection<'a>,
    pub(super) correction: Option<&'a CudaSlice<f32>>,
    pub(super) routing: &'a Routing,
    pub(super) gate: &'a CudaExperts,
    pub(super) up: &'a CudaExperts,
    pub(super) down: &'a CudaExperts,
    pub(super) activation: Activation,
    /// What experts add: to gates, to what these multiply, and to the results.
    pub(super) biases: Option<[&'a CudaSlice<f32>; 3]>,
}

/// The number of an activation of gates, and what it is told.
pub(super) fn gate_settings(activation: Activation) -> Result<(i32, f32, f32), CudaError> {
    Ok(match activation {
        Activation::ClampedSwiglu { alpha, limit } => (2, alpha, limit),
        plain => (activation_number(plain)?, 0.0, 0.0),
    })
}

/// What the kernels call an activation, where it has no settings.
pub(super) fn activation_number(activation: Activation) -> Result<i32, CudaError> {
    match activation {
        Activation::Silu => Ok(0),
        Activation::GeluTanh => Ok(1),
        Activation::ClampedSwiglu { .. } => {
            Err(CudaError::Unsupported("clamped activations outside of experts".into()))
        }
    }
}
