//! What outputs must be: from fields to the grammar that goes with a request.

use std::sync::Arc;

use octavo_grammar::calls::{self, Calls, Force};
use octavo_grammar::constraint::{self, FieldError as Wrong, Given};
use octavo_grammar::reasoning::{self, Reasoning};
use octavo_wire::GrammarSource;
use pyo3::create_exception;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use serde_json::Value;

use crate::text::PyTokenizer;

create_exception!(
    octavo._core,
    FieldError,
    PyValueError,
    "A field cannot be used; the arguments are its name and what it must be."
);

fn field_error(error: Wrong) -> PyErr {
    FieldError::new_err((error.param, error.allowed))
}

fn parse(json: &str) -> PyResult<Value> {
    serde_json::from_str(json).map_err(|error| PyValueError::new_err(error.to_string()))
}

fn told(given: Given) -> (String, String) {
    (given.param, given.constraint.to_options().to_string())
}

/// Checks the fields of `structured_outputs`, given as JSON; returns the one that is given, and the same in its normal form.
#[pyfunction]
pub(crate) fn structured_outputs(json: &str) -> PyResult<(String, String)> {
    constraint::structured_outputs(&parse(json)?)
        .map(told)
        .map_err(field_error)
}

/// What a body's `response_format`, `structured_outputs` and `guided_*` ask for, as the function above returns it.
#[pyfunction]
pub(crate) fn structured_outputs_of_body(json: &str) -> PyResult<Option<(String, String)>> {
    let mut body = parse(json)?;
    let Some(fields) = body.as_object_mut() else {
        return Err(PyValueError::new_err("the body is no object"));
    };
    let given = constraint::take(fields).map_err(field_error)?;
    Ok(given.map(told))
}

/// Resolves `tools` and `tool_choice`, given as JSON: the tools that the model is told of, whether it must call, and which one alone.
#[pyfunction]
#[pyo3(signature = (tools, choice=None))]
pub(crate) fn choose_tools(
    tools: &str,
    choice: Option<&str>,
) -> PyResult<(String, bool, Option<String>)> {
    let Value::Array(tools) = parse(tools)? else {
        return Err(FieldError::new_err(("tools", "a list of tools")));
    };
    let choice = choice.map(parse).transpose()?;
    let chosen = calls::choose(tools, choice.as_ref()).map_err(field_error)?;
    let told = Value::Array(chosen.told).to_string();
    Ok(match chosen.force {
        None => (told, false, None),
        Some(Force::Required) => (told, true, None),
        Some(Force::Named(name)) => (told, true, Some(name)),
    })
}

/// The grammar of a request's outputs.
#[pyclass(name = "GrammarSource", module = "octavo._core", frozen)]
pub(crate) struct PyGrammarSource(pub(crate) Arc<GrammarSource>);

#[pymethods]
impl PyGrammarSource {
    /// `options` is `structured_outputs` and `tools` those that may be called, as JSON. None if calls of this format cannot be forced.
    #[staticmethod]
    #[pyo3(signature = (tokenizer, *, options=None, tools=None, name=None, several=true, tool_parser=None, reasoning_parser=None,
        reasoning_open=false))]
    #[expect(
        clippy::too_many_arguments,
        reason = "keyword arguments of the Python method"
    )]
    fn make(
        tokenizer: &PyTokenizer,
        options: Option<&str>,
        tools: Option<&str>,
        name: Option<String>,
        several: bool,
        tool_parser: Option<&str>,
        reasoning_parser: Option<&str>,
        reasoning_open: bool,
    ) -> PyResult<Option<Self>> {
        let tokenizer = tokenizer.share();
        let constraint = match options {
            None => None,
            Some(json) => Some(
                constraint::structured_outputs(&parse(json)?)
                    .map_err(field_error)?
                    .constraint,
            ),
        };
        let calls = match tools {
            None => None,
            Some(json) => {
                let tools: Vec<Value> = serde_json::from_str(json)
                    .map_err(|error| PyValueError::new_err(error.to_string()))?;
                let force = name.map(Force::Named);
                let parser = tool_parser.unwrap_or_default();
                let Some(calls) = Calls::new(parser, &tools, force.as_ref(), several, &tokenizer)
                else {
                    return Ok(None);
                };
                Some(calls)
            }
        };
        let reasoning = Reasoning::of(reasoning_parser, reasoning_open);
        let source = reasoning::outputs(constraint.as_ref(), calls.as_ref(), reasoning, &tokenizer);
        Ok(Some(Self(Arc::new(source))))
    }
}
