//! Checks of long lists of token ids, which Python would take milliseconds for.

use pyo3::prelude::*;
use pyo3::types::{PyInt, PyList};

/// Whether a list holds nothing but `int`s: no `bool`s, no numbers of other kinds.
#[pyfunction]
pub(crate) fn all_ints(values: &Bound<'_, PyList>) -> bool {
    values
        .iter()
        .all(|value| value.is_exact_instance_of::<PyInt>())
}

/// Index of the first entry of a list of `int`s that is not a token id below `vocab_size`.
#[pyfunction]
pub(crate) fn first_outside(token_ids: &Bound<'_, PyList>, vocab_size: u32) -> Option<usize> {
    token_ids
        .iter()
        .position(|id| id.extract::<u32>().map_or(true, |id| id >= vocab_size))
}
