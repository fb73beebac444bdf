//! PyO3 glue: `octavo._core`. No logic lives here.

mod cpu;
mod engine;
mod grammar;
mod ids;
mod plan;
mod server;
mod text;

use pyo3::prelude::*;
use pyo3::types::PyFrozenSet;

#[pymodule]
fn _core(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    m.add("PLAN", plan::constants(m.py())?)?;
    m.add(
        "FIELDS_WITHOUT_MEANING",
        PyFrozenSet::new(m.py(), octavo_server::FIELDS_WITHOUT_MEANING)?,
    )?;
    m.add("TemplateError", m.py().get_type::<text::TemplateError>())?;
    m.add("FieldError", m.py().get_type::<grammar::FieldError>())?;
    m.add_class::<grammar::PyGrammarSource>()?;
    m.add_function(wrap_pyfunction!(grammar::structured_outputs, m)?)?;
    m.add_function(wrap_pyfunction!(grammar::structured_outputs_of_body, m)?)?;
    m.add_function(wrap_pyfunction!(grammar::choose_tools, m)?)?;
    m.add_class::<cpu::PyPackedMatrix>()?;
    m.add_function(wrap_pyfunction!(cpu::rms_norm, m)?)?;
    m.add_function(wrap_pyfunction!(cpu::add_rms_norm, m)?)?;
    m.add_class::<engine::PyEngineCore>()?;
    m.add_class::<engine::PyMailbox>()?;
    m.add_function(wrap_pyfunction!(ids::all_ints, m)?)?;
    m.add_function(wrap_pyfunction!(ids::first_outside, m)?)?;
    m.add_class::<server::PyEngineLink>()?;
    m.add_function(wrap_pyfunction!(server::serve, m)?)?;
    m.add_class::<engine::PyUpdate>()?;
    m.add_class::<engine::PyChoiceUpdate>()?;
    m.add_class::<text::PyTokenizer>()?;
    m.add_class::<text::PyChatTemplate>()?;
    m.add_class::<text::PyToolSchemas>()?;
    m.add_class::<text::PyOutputParser>()?;
    m.add_class::<text::PyGguf>()?;
    Ok(())
}
