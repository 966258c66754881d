//! cuBLASLt, looked for when a card is opened: products of many rows in bf16 with f32 sums.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::cublaslt::{result, sys};
use cudarc::driver::{CudaSlice, DevicePtr, DevicePtrMut};

use super::device::Device;
use crate::error::CudaError;

/// `CUBLAS_OP_T`.
const TRANSPOSED: i32 = 1;
/// Memory that the library may use.
const WORKSPACE_BYTES: usize = 32 << 20;

/// `out[row][first_column + n] (+)= sum of x[row][k] weight[n][k], + bias[n]`.
pub(super) struct DenseProduct<'a> {
    /// `[outputs][inputs]`, bf16.
    pub(super) weight: &'a CudaSlice<u8>,
    /// `[rows][inputs]`, bf16.
    pub(super) x: &'a CudaSlice<u8>,
    pub(super) rows: usize,
    pub(super) inputs: usize,
    pub(super) outputs: usize,
    pub(super) bias: Option<&'a CudaSlice<f32>>,
    pub(super) out: &'a mut CudaSlice<f32>,
    pub(super) first_column: usize,
    /// From one row of `out` to the next.
    pub(super) stride: usize,
    pub(super) adds: bool,
}

/// A shape for which an algorithm was chosen: rows, inputs, outputs, stride, whether there is a bias, whether it adds.
type Shape = (usize, usize, usize, usize, bool, bool);

/// The library on one card.
pub(super) struct Blas {
    device: Arc<Device>,
    handle: sys::cublasLtHandle_t,
    workspace: CudaSlice<u8>,
    algorithms: Mutex<HashMap<Shape, sys::cublasLtMatmulAlgo_t>>,
}

// SAFETY: the library allows calls with one handle from several threads; the workspace is used in the order of one stream.
unsafe impl Send for Blas {}
// SAFETY: as above.
unsafe impl Sync for Blas {}

fn failed(error: result::CublasError) -> CudaError {
    CudaError::Blas(format!("{:?}", error.0))
}

/// Descriptions that the library made, given back when they go out of scope.
struct Description(sys::cublasLtMatmulDesc_t);
struct Layout(sys::cublasLtMatrixLayout_t);
struct Preference(sys::cublasLtMatmulPreference_t);

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: it is destroyed once, here.
        let _ = unsafe { result::destroy_matmul_desc(self.0) };
    }
}
impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: it is destroyed once, here.
        let _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}
impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: it is destroyed once, here.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}

impl Description {
    fn set<T>(&self, attribute: sys::cublasLtMatmulDescAttributes_t, value: &T) -> Result<(), CudaError> {
        let value = std::ptr::from_ref(value).cast::<c_void>();
        // SAFETY: the description is alive, and the library copies as many bytes as the value has.
        unsafe { result::set_matmul_desc_attribute(self.0, attribute, value, size_of::<T>()) }.map_err(failed)
    }
}

impl Blas {
    /// Opens the library, or says that it is not there.
    pub(super) fn open(device: &Arc<Device>) -> Result<Option<Blas>, CudaError> {
        // SAFETY: probing opens and closes the library.
        if !unsafe { sys::is_culib_present() } {
            return Ok(None);
        }
        Ok(Some(Blas {
            handle: result::create_handle().map_err(failed)?,
            workspace: device.allocate(WORKSPACE_BYTES, "cuBLASLt")?,
            algorithms: Mutex::default(),
            device: device.clone(),
        }))
    }

    pub(super) fn run(&self, product: DenseProduct<'_>) -> Result<(), CudaError> {
        let DenseProduct { rows, inputs, outputs, stride, adds, first_column, .. } = product;
        let stream = self.device.stream();
        let enough = |what, expected: usize, got: usize| {
            if got >= expected { Ok(()) } else { Err(CudaError::Shape { what, expected, got }) }
        };
        enough("bytes of weights", outputs * inputs * 2, product.weight.len())?;
        enough("bytes of activations", rows * inputs * 2, product.x.len())?;
        enough("results", rows.saturating_sub(1) * stride + first_column + outputs, product.out.len())?;
        if let Some(bias) = product.bias {
            enough("numbers of a bias", outputs, bias.len())?;
        }
        // The library counts columns first: its result is `outputs x rows`.
        let description = Description(
            result::create_matmul_desc(
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                sys::cudaDataType::CUDA_R_32F,
            )
            .map_err(failed)?,
        );
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        description.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &TRANSPOSED)?;
        if let Some(bias) = product.bias {
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as i32;
            description.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
            let address = bias.device_ptr(stream).0;
            description.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &address)?;
            let kind = sys::cudaDataType::CUDA_R_32F as i32;
            description.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &kind)?;
        }
        let layout = |kind, rows: usize, columns: usize, stride: usize| {
            result::create_matrix_layout(kind, rows as u64, columns as u64, stride as i64)
                .map(Layout)
                .map_err(failed)
        };
        let bf16 = sys::cudaDataType::CUDA_R_16BF;
        let a = layout(bf16, inputs, outputs, inputs)?;
        let b = layout(bf16, inputs, rows, inputs)?;
        let c = layout(sys::cudaDataType::CUDA_R_32F, outputs, rows, stride)?;
        let shape = (rows, inputs, outputs, stride, product.bias.is_some(), adds);
        let known = self.algorithms.lock().unwrap_or_else(PoisonError::into_inner).get(&shape).copied();
        let algorithm = match known {
            Some(algorithm) => algorithm,
            None => {
                let algorithm = self.choose(&description, &a, &b, &c)?;
                self.algorithms.lock().unwrap_or_else(PoisonError::into_inner).insert(shape, algorithm);
                algorithm
            }
        };
        let (alpha, beta) = (1.0_f32, if adds { 1.0_f32 } else { 0.0 });
        let out = product.out.device_ptr_mut(stream).0 + (first_column * 4) as u64;
        // SAFETY: descriptions are alive, all matrices were checked to be as large as described, and the stream orders
        // their uses and those of the workspace.
        unsafe {
            result::matmul(
                self.handle,
                description.0,
                std::ptr::from_ref(&alpha).cast(),
                std::ptr::from_ref(&beta).cast(),
                product.weight.device_ptr(stream).0 as *const c_void,
                a.0,
                product.x.device_ptr(stream).0 as *const c_void,
                b.0,
                out as *const c_void,
                c.0,
                out as *mut c_void,
                c.0,
                &algorithm,
                self.workspace.device_ptr(stream).0 as *mut c_void,
                WORKSPACE_BYTES,
                stream.cu_stream() as *mut _,
            )
        }
        .map_err(|error| self.cause_of(error))
    }

    /// The error of a product. Of a card that has failed before the library says no more than that something failed, and the
    /// driver says what.
    fn cause_of(&self, error: result::CublasError) -> CudaError {
        match self.device.synchronise() {
            Err(cause) if cause.is_fatal() => cause,
            _ => failed(error),
        }
    }

    fn choose(
        &self,
        description: &Description,
        a: &Layout,
        b: &Layout,
        c: &Layout,
    ) -> Result<sys::cublasLtMatmulAlgo_t, CudaError> {
        let preference = Preference(result::create_matmul_pref().map_err(failed)?);
        let attribute = sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let bytes = std::ptr::from_ref(&WORKSPACE_BYTES).cast::<c_void>();
        // SAFETY: all descriptions are alive; the library copies the attribute.
        let found = unsafe {
            result::set_matmul_pref_attribute(preference.0, attribute, bytes, size_of::<usize>()).and_then(
                |()| {
                    result::get_matmul_algo_heuristic(
                        self.handle,
                        description.0,
                        a.0,
                        b.0,
                        c.0,
                        c.0,
                        preference.0,
                    )
                },
            )
        };
        Ok(found.map_err(|error| self.cause_of(error))?.algo)
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        // SAFETY: the handle is destroyed once, here.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}
