//! `PackedMatrix`, and the norms of the CPU op set.

use numpy::ndarray::Dimension;
use numpy::{
    Element, PyReadonlyArray, PyReadonlyArray1, PyReadonlyArray2, PyReadwriteArray,
    PyReadwriteArray2, PyUntypedArrayMethods,
};
use octavo_cpu::norm;
use octavo_cpu::{PackedMatrix, Part, Storage};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

fn value_error(error: impl std::fmt::Display) -> PyErr {
    PyValueError::new_err(error.to_string())
}

fn not_contiguous(argument: &str) -> PyErr {
    PyValueError::new_err(format!("{argument}: not contiguous"))
}

/// The elements, row major.
fn elements<'a, T: Element, D: Dimension>(
    argument: &str,
    array: &'a PyReadonlyArray<'_, T, D>,
) -> PyResult<&'a [T]> {
    // `as_slice` takes column-major arrays as well.
    if !array.is_c_contiguous() {
        return Err(not_contiguous(argument));
    }
    array.as_slice().map_err(|_| not_contiguous(argument))
}

fn elements_mut<'a, T: Element, D: Dimension>(
    argument: &str,
    array: &'a mut PyReadwriteArray<'_, T, D>,
) -> PyResult<&'a mut [T]> {
    if !array.is_c_contiguous() {
        return Err(not_contiguous(argument));
    }
    array.as_slice_mut().map_err(|_| not_contiguous(argument))
}

fn wrong_shape(argument: &str, shape: &[usize], expected: &str) -> PyErr {
    PyValueError::new_err(format!("{argument}: shape {shape:?}, expected {expected}"))
}

/// A quantized matrix `[out, in]`, immutable and shared between threads.
#[pyclass(name = "PackedMatrix", module = "octavo._core", frozen)]
pub(crate) struct PyPackedMatrix(PackedMatrix);

#[pymethods]
impl PyPackedMatrix {
    /// Parts `(storage, uint8 [rows, bytes per row])`, stacked along `out`. `packed(part, rows)` hears of rows that are not read again.
    #[new]
    #[pyo3(signature = (parts, packed=None))]
    fn new(
        py: Python<'_>,
        parts: Vec<(String, PyReadonlyArray2<'_, u8>)>,
        packed: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let parts = parts
            .iter()
            .enumerate()
            .map(|(index, (name, rows))| {
                let storage = Storage::from_name(name).ok_or_else(|| {
                    PyValueError::new_err(format!("parts[{index}]: storage {name:?} is not packed"))
                })?;
                let data = elements(&format!("parts[{index}]"), rows)?;
                Ok(Part {
                    storage,
                    rows: rows.shape()[0],
                    data,
                })
            })
            .collect::<PyResult<Vec<_>>>()?;
        let mut failed = None;
        let matrix = py.detach(|| {
            PackedMatrix::pack(&parts, |part, rows| {
                let Some(packed) = packed.as_ref().filter(|_| failed.is_none()) else {
                    return;
                };
                failed = Python::attach(|py| packed.call1(py, (part, rows)).err());
            })
        });
        match failed {
            Some(error) => Err(error),
            None => matrix.map(Self).map_err(value_error),
        }
    }

    /// `(out, in)`.
    #[getter]
    fn shape(&self) -> (usize, usize) {
        (self.0.rows(), self.0.width())
    }

    #[getter]
    fn num_bytes(&self) -> usize {
        self.0.num_bytes()
    }

    /// Write `x @ self.T` to `out`; both fp32, `[M, in]` and `[M, out]`.
    fn linear(
        &self,
        py: Python<'_>,
        x: PyReadonlyArray2<'_, f32>,
        mut out: PyReadwriteArray2<'_, f32>,
        threads: usize,
    ) -> PyResult<()> {
        let (rows, width) = (self.0.rows(), self.0.width());
        if x.shape()[1] != width {
            return Err(wrong_shape("x", x.shape(), &format!("[M, {width}]")));
        }
        if out.shape() != [x.shape()[0], rows] {
            let expected = format!("[{}, {rows}]", x.shape()[0]);
            return Err(wrong_shape("out", out.shape(), &expected));
        }
        let values = elements("x", &x)?;
        let out = elements_mut("out", &mut out)?;
        py.detach(|| self.0.linear(values, out, threads))
            .map_err(value_error)
    }

    /// Dequantize the rows `ids` to `out`, fp32 `[len(ids), in]`.
    fn read_rows(
        &self,
        py: Python<'_>,
        ids: PyReadonlyArray1<'_, i64>,
        mut out: PyReadwriteArray2<'_, f32>,
    ) -> PyResult<()> {
        let width = self.0.width();
        if out.shape() != [ids.shape()[0], width] {
            let expected = format!("[{}, {width}]", ids.shape()[0]);
            return Err(wrong_shape("out", out.shape(), &expected));
        }
        let indices = elements("ids", &ids)?;
        let out = elements_mut("out", &mut out)?;
        py.detach(|| self.0.read_rows(indices, out))
            .map_err(value_error)
    }
}

/// Write `x / sqrt(mean(x²) + eps) * weight` to `out`, row by row.
#[pyfunction]
pub(crate) fn rms_norm(
    x: PyReadonlyArray2<'_, f32>,
    weight: PyReadonlyArray1<'_, f32>,
    eps: f32,
    mut out: PyReadwriteArray2<'_, f32>,
) -> PyResult<()> {
    let (x, weight) = (elements("x", &x)?, elements("weight", &weight)?);
    norm::rms_norm(x, weight, eps, elements_mut("out", &mut out)?).map_err(value_error)
}

/// Add `scale * x` to `residual` in place, and write the norm of the sum to `out`.
#[pyfunction]
pub(crate) fn add_rms_norm(
    mut residual: PyReadwriteArray2<'_, f32>,
    x: PyReadonlyArray2<'_, f32>,
    scale: f32,
    weight: PyReadonlyArray1<'_, f32>,
    eps: f32,
    mut out: PyReadwriteArray2<'_, f32>,
) -> PyResult<()> {
    let (x, weight) = (elements("x", &x)?, elements("weight", &weight)?);
    let residual = elements_mut("residual", &mut residual)?;
    let out = elements_mut("out", &mut out)?;
    norm::add_rms_norm(residual, x, scale, weight, eps, out).map_err(value_error)
}
