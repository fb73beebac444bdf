//! Checks of long lists of token ids, which Python would take milliseconds for.

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyList;

/// Index of the first entry for which `test` is false. Entries are borrowed from the list: owned references would take three times as
/// long as what is done with them.
fn first_not(
    values: &Bound<'_, PyList>,
    mut test: impl FnMut(*mut ffi::PyObject) -> bool,
) -> Option<usize> {
    // SAFETY: the GIL is held and no `test` runs Python code, so the list and its entries stay as they are; indices are below its length.
    (0..values.len())
        .find(|&i| !test(unsafe { ffi::PyList_GetItem(values.as_ptr(), i.cast_signed()) }))
}

/// Whether a list holds nothing but `int`s: no `bool`s, no numbers of other kinds.
#[pyfunction]
pub(crate) fn all_ints(values: &Bound<'_, PyList>) -> bool {
    // SAFETY: an entry of a list is an object.
    first_not(values, |value| unsafe {
        ffi::PyLong_CheckExact(value) != 0
    })
    .is_none()
}

/// Index of the first entry that is not an `int` below `vocab_size`.
#[pyfunction]
pub(crate) fn first_outside(token_ids: &Bound<'_, PyList>, vocab_size: u32) -> Option<usize> {
    let found = first_not(token_ids, |id| {
        // SAFETY: an entry of a list is an object; of an exact `int` no method is called.
        let number = unsafe {
            if ffi::PyLong_CheckExact(id) == 0 {
                return false;
            }
            ffi::PyLong_AsLong(id)
        };
        u32::try_from(number).is_ok_and(|id| id < vocab_size)
    });
    // A number beyond a `long` has left an `OverflowError`.
    let _ = PyErr::take(token_ids.py());
    found
}
