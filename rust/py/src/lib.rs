//! PyO3 glue: `octavo._core`. No logic lives here.
use pyo3::prelude::*;

#[pymodule]
fn _core(_m: &Bound<'_, PyModule>) -> PyResult<()> {
    Ok(())
}
