//! The plan's layout for Python: names and offsets of `octavo_core::plan`.

use octavo_core::plan::{self, Layout, flags, header};
use pyo3::prelude::*;
use pyo3::types::PyDict;

const HEADER: [(&str, usize); 19] = [
    ("magic", header::MAGIC),
    ("step_lo", header::STEP_LO),
    ("step_hi", header::STEP_HI),
    ("num_rows", header::NUM_ROWS),
    ("num_tokens", header::NUM_TOKENS),
    ("num_decode_rows", header::NUM_DECODE_ROWS),
    ("max_query_len", header::MAX_QUERY_LEN),
    ("max_seq_len", header::MAX_SEQ_LEN),
    ("num_block_writes", header::NUM_BLOCK_WRITES),
    ("block_writes_offset", header::BLOCK_WRITES_OFFSET),
    ("num_freed_slots", header::NUM_FREED_SLOTS),
    ("freed_slots_offset", header::FREED_SLOTS_OFFSET),
    ("num_slot_inits", header::NUM_SLOT_INITS),
    ("slot_inits_offset", header::SLOT_INITS_OFFSET),
    ("used_words", header::USED_WORDS),
    ("mask_after_lo", header::MASK_AFTER_LO),
    ("graph_key", header::GRAPH_KEY),
    ("flags", header::FLAGS),
    ("mask_after_hi", header::MASK_AFTER_HI),
];

/// Fixed words of a `slot_init` entry, in order.
const SLOT_INIT: [&str; plan::SLOT_INIT_HEADER_WORDS] = [
    "total_words",
    "slot",
    "num_prompt_tokens",
    "num_tokens",
    "choice",
    "seed_lo",
    "seed_hi",
    "temperature",
    "top_p",
    "min_p",
    "presence",
    "frequency",
    "repetition",
    "top_k",
    "min_tokens",
    "max_tokens",
    "num_logprobs",
    "num_prompt_logprobs",
    "param_flags",
    "n_bias",
    "n_stop",
    "n_bad_words",
    "n_allowed",
];

const ROW_FLAGS: [(&str, i32); 11] = [
    ("HOST_STATE", flags::HOST_STATE),
    ("SAMPLE", flags::SAMPLE),
    ("GRAMMAR", flags::GRAMMAR),
    ("PROMPT_LOGPROBS", flags::PROMPT_LOGPROBS),
    ("LOGPROBS", flags::LOGPROBS),
    ("PENALTIES", flags::PENALTIES),
    ("RANDOM", flags::RANDOM),
    ("FILTER", flags::FILTER),
    ("BIAS", flags::BIAS),
    ("POOL", flags::POOL),
    ("POOL_MEAN", flags::POOL_MEAN),
];

/// `_core.PLAN`: what does not depend on a configuration.
pub(crate) fn constants(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let slot_init = PyDict::new(py);
    for (index, name) in SLOT_INIT.iter().enumerate() {
        slot_init.set_item(name, index)?;
    }
    let plan = PyDict::new(py);
    plan.set_item("header", PyDict::from_sequence(&HEADER.into_pyobject(py)?)?)?;
    plan.set_item("slot_init", slot_init)?;
    plan.set_item(
        "row_flags",
        PyDict::from_sequence(&ROW_FLAGS.into_pyobject(py)?)?,
    )?;
    Ok(plan)
}

/// Offsets and length of a plan of this layout.
pub(crate) fn offsets<'py>(py: Python<'py>, layout: &Layout) -> PyResult<Bound<'py, PyDict>> {
    let parts = [
        ("slot", layout.slot),
        ("query_start_loc", layout.query_start_loc),
        ("num_computed_tokens", layout.num_computed_tokens),
        ("num_draft_tokens", layout.num_draft_tokens),
        ("flags", layout.flags),
        ("ragged", layout.ragged),
        ("total_words", layout.total_words),
    ];
    PyDict::from_sequence(&parts.into_pyobject(py)?)
}
