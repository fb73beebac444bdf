//! `Tokenizer`, `ChatTemplate`, `OutputParser` and `Gguf`.

use std::path::PathBuf;
use std::sync::Arc;

use octavo_text::gguf::{Array, Gguf, Value};
use octavo_text::parser::{self, Event, OutputParser, ToolSchemas};
use octavo_text::template::{ChatTemplate, RenderOptions};
use octavo_text::tokenizer::Tokenizer;
use pyo3::IntoPyObjectExt;
use pyo3::create_exception;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

create_exception!(
    octavo._core,
    TemplateError,
    PyValueError,
    "A chat template cannot be compiled, or refuses a conversation."
);

fn value_error(error: impl std::fmt::Display) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// Text to token ids and back; immutable and shared between threads.
#[pyclass(name = "Tokenizer", module = "octavo._core", frozen)]
pub(crate) struct PyTokenizer(Arc<Tokenizer>);

impl PyTokenizer {
    pub(crate) fn share(&self) -> Arc<Tokenizer> {
        Arc::clone(&self.0)
    }
}

#[pymethods]
impl PyTokenizer {
    /// From a `tokenizer.json` file.
    #[staticmethod]
    fn from_file(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        py.detach(|| Tokenizer::from_file(path))
            .map(|t| Self(Arc::new(t)))
            .map_err(value_error)
    }

    /// From a checkpoint's folder.
    #[staticmethod]
    fn from_dir(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        py.detach(|| Tokenizer::from_dir(path))
            .map(|t| Self(Arc::new(t)))
            .map_err(value_error)
    }

    /// From the metadata of a GGUF file.
    #[staticmethod]
    fn from_gguf(py: Python<'_>, gguf: &PyGguf) -> PyResult<Self> {
        py.detach(|| Tokenizer::from_gguf(&gguf.0))
            .map(|t| Self(Arc::new(t)))
            .map_err(value_error)
    }

    #[pyo3(signature = (text, add_special=false, parse_special=false))]
    fn encode(
        &self,
        py: Python<'_>,
        text: &str,
        add_special: bool,
        parse_special: bool,
    ) -> PyResult<Vec<u32>> {
        py.detach(|| self.0.encode(text, add_special, parse_special))
            .map_err(value_error)
    }

    #[pyo3(signature = (texts, add_special=false, parse_special=false))]
    fn encode_batch(
        &self,
        py: Python<'_>,
        texts: Vec<String>,
        add_special: bool,
        parse_special: bool,
    ) -> PyResult<Vec<Vec<u32>>> {
        py.detach(|| self.0.encode_batch(&texts, add_special, parse_special))
            .map_err(value_error)
    }

    #[pyo3(signature = (ids, skip_special=true))]
    fn decode(&self, py: Python<'_>, ids: Vec<u32>, skip_special: bool) -> String {
        py.detach(|| self.0.decode(&ids, skip_special))
    }

    /// The bytes a token stands for inside a text; empty outside the vocabulary.
    fn token_bytes<'py>(&self, py: Python<'py>, id: u32) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.0.token_bytes(id).unwrap_or_default())
    }

    /// The token as the vocabulary spells it.
    fn token_str(&self, id: u32) -> Option<String> {
        self.0.token_str(id)
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.0.token_to_id(token)
    }

    fn is_special(&self, id: u32) -> bool {
        self.0.is_special(id)
    }

    #[getter]
    fn vocab_size(&self) -> usize {
        self.0.vocab_size()
    }

    #[getter]
    fn bos_token_id(&self) -> Option<u32> {
        self.0.bos_id()
    }

    #[getter]
    fn eos_token_ids(&self) -> Vec<u32> {
        self.0.eos_ids().to_vec()
    }

    /// Every id that ends a generation, those known by name included.
    #[getter]
    fn eog_token_ids(&self) -> Vec<u32> {
        self.0.eog_ids().to_vec()
    }

    /// The chat template that came with the tokenizer.
    #[getter]
    fn chat_template(&self) -> Option<&str> {
        self.0.chat_template()
    }
}

/// A compiled chat template.
#[pyclass(name = "ChatTemplate", module = "octavo._core", frozen)]
pub(crate) struct PyChatTemplate(ChatTemplate);

#[pymethods]
impl PyChatTemplate {
    #[new]
    fn new(source: &str, tokenizer: &PyTokenizer) -> PyResult<Self> {
        ChatTemplate::new(source, &tokenizer.0)
            .map(Self)
            .map_err(template_error)
    }

    #[getter]
    fn source(&self) -> &str {
        self.0.source()
    }

    /// Text and token ids of a conversation; `messages`, `tools` and `kwargs` are JSON.
    #[expect(
        clippy::too_many_arguments,
        reason = "the arguments of the Python method"
    )]
    fn render(
        &self,
        py: Python<'_>,
        tokenizer: &PyTokenizer,
        messages: &str,
        tools: Option<&str>,
        add_generation_prompt: bool,
        continue_final_message: bool,
        kwargs: &str,
    ) -> PyResult<(String, Vec<u32>)> {
        py.detach(|| {
            let messages: serde_json::Value =
                serde_json::from_str(messages).map_err(value_error)?;
            let tools: Option<serde_json::Value> = tools
                .map(serde_json::from_str)
                .transpose()
                .map_err(value_error)?;
            let kwargs = serde_json::from_str(kwargs).map_err(value_error)?;
            let options = RenderOptions {
                tools: tools.as_ref(),
                add_generation_prompt,
                continue_final_message,
                kwargs: Some(&kwargs),
            };
            let prompt = self.0.render(&messages, &options).map_err(template_error)?;
            let ids = tokenizer.0.encode_prompt(&prompt).map_err(value_error)?;
            Ok((prompt.text, ids))
        })
    }
}

/// Types of the parameters of tools, for parsers; immutable and shared.
#[pyclass(name = "ToolSchemas", module = "octavo._core", frozen)]
pub(crate) struct PyToolSchemas(Arc<ToolSchemas>);

#[pymethods]
impl PyToolSchemas {
    /// `tools` is the JSON of a list of tools.
    #[new]
    fn new(tools: &str) -> PyResult<Self> {
        let tools = serde_json::from_str(tools).map_err(value_error)?;
        Ok(Self(Arc::new(ToolSchemas::new(&tools))))
    }
}

/// Reasoning and tool calls in the growing text of one choice.
#[pyclass(name = "OutputParser", module = "octavo._core")]
pub(crate) struct PyOutputParser(OutputParser);

#[pymethods]
impl PyOutputParser {
    #[new]
    #[pyo3(signature = (tool_parser=None, reasoning_parser=None, reasoning_open=false, schemas=None))]
    fn new(
        tool_parser: Option<&str>,
        reasoning_parser: Option<&str>,
        reasoning_open: bool,
        schemas: Option<&PyToolSchemas>,
    ) -> PyResult<Self> {
        let schemas = schemas.map(|schemas| Arc::clone(&schemas.0));
        OutputParser::for_tools(
            tool_parser,
            reasoning_parser,
            reasoning_open,
            &schemas.unwrap_or_default(),
        )
        .map(Self)
        .map_err(value_error)
    }

    #[staticmethod]
    fn tool_parsers() -> Vec<&'static str> {
        parser::TOOL_PARSERS.to_vec()
    }

    #[staticmethod]
    fn reasoning_parsers() -> Vec<&'static str> {
        parser::REASONING_PARSERS.to_vec()
    }

    /// The tool parser and the reasoning parser that a chat template calls for.
    #[staticmethod]
    fn detect(chat_template: &str) -> (Option<&'static str>, Option<&'static str>) {
        (
            parser::detect_tool_parser(chat_template),
            parser::detect_reasoning_parser(chat_template),
        )
    }

    /// Whether a rendered prompt ends inside the reasoning.
    #[staticmethod]
    fn prompt_opens_reasoning(prompt: &str) -> bool {
        parser::prompt_opens_reasoning(prompt)
    }

    #[getter]
    fn markers(&self) -> Vec<&'static str> {
        self.0.markers().to_vec()
    }

    /// Special tokens that must stay in the text.
    fn special_ids(&self, tokenizer: &PyTokenizer) -> Vec<u32> {
        self.0.special_ids(&tokenizer.0)
    }

    fn push(&mut self, py: Python<'_>, delta: &str) -> PyResult<Vec<Py<PyAny>>> {
        event_tuples(py, self.0.push(delta))
    }

    fn finish(&mut self, py: Python<'_>) -> PyResult<Vec<Py<PyAny>>> {
        event_tuples(py, self.0.finish())
    }
}

fn event_tuples(py: Python<'_>, events: Vec<Event>) -> PyResult<Vec<Py<PyAny>>> {
    let tuple = |event| match event {
        Event::Content(text) => ("content", text).into_py_any(py),
        Event::Reasoning(text) => ("reasoning", text).into_py_any(py),
        Event::ToolCallStart { index, name } => ("tool_call_start", index, name).into_py_any(py),
        Event::ToolCallArguments { index, delta } => {
            ("tool_call_arguments", index, delta).into_py_any(py)
        }
        Event::ToolCallEnd { index, valid } => ("tool_call_end", index, valid).into_py_any(py),
    };
    events.into_iter().map(tuple).collect()
}

fn template_error(error: impl std::fmt::Display) -> PyErr {
    TemplateError::new_err(error.to_string())
}

/// Metadata and tensor infos of a GGUF file.
#[pyclass(name = "Gguf", module = "octavo._core", frozen)]
pub(crate) struct PyGguf(Gguf);

#[pymethods]
impl PyGguf {
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        py.detach(|| Gguf::open(path))
            .map(Self)
            .map_err(value_error)
    }

    /// All metadata as plain Python values, but for the arrays of the tokenizer, which are long and read in Rust.
    fn metadata<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let found = PyDict::new(py);
        for (key, value) in self.0.entries() {
            if !(key.starts_with("tokenizer.ggml.") && matches!(value, Value::Array(_))) {
                found.set_item(key, scalar_or_list(py, value)?)?;
            }
        }
        Ok(found)
    }

    /// `(name, dimensions in ggml's order, storage type, offset, bytes)` of each tensor.
    fn tensors(&self) -> Vec<(&str, Vec<u64>, &'static str, u64, u64)> {
        let infos = self.0.tensors().iter();
        infos
            .map(|t| {
                (
                    t.name.as_str(),
                    t.dims.clone(),
                    t.ggml_type.name(),
                    t.offset,
                    t.byte_len,
                )
            })
            .collect()
    }
}

fn scalar_or_list(py: Python<'_>, value: &Value) -> PyResult<Py<PyAny>> {
    match value {
        Value::U8(v) => v.into_py_any(py),
        Value::I8(v) => v.into_py_any(py),
        Value::U16(v) => v.into_py_any(py),
        Value::I16(v) => v.into_py_any(py),
        Value::U32(v) => v.into_py_any(py),
        Value::I32(v) => v.into_py_any(py),
        Value::U64(v) => v.into_py_any(py),
        Value::I64(v) => v.into_py_any(py),
        Value::F32(v) => v.into_py_any(py),
        Value::F64(v) => v.into_py_any(py),
        Value::Bool(v) => v.into_py_any(py),
        Value::String(v) => v.into_py_any(py),
        Value::Array(array) => list(py, array),
    }
}

fn list(py: Python<'_>, array: &Array) -> PyResult<Py<PyAny>> {
    match array {
        Array::U8(v) => PyList::new(py, v)?.into_py_any(py),
        Array::I8(v) => v.into_py_any(py),
        Array::U16(v) => v.into_py_any(py),
        Array::I16(v) => v.into_py_any(py),
        Array::U32(v) => v.into_py_any(py),
        Array::I32(v) => v.into_py_any(py),
        Array::U64(v) => v.into_py_any(py),
        Array::I64(v) => v.into_py_any(py),
        Array::F32(v) => v.into_py_any(py),
        Array::F64(v) => v.into_py_any(py),
        Array::Bool(v) => v.into_py_any(py),
        Array::String(v) => v.iter().collect::<Vec<_>>().into_py_any(py),
        Array::Array(v) => v
            .iter()
            .map(|inner| list(py, inner))
            .collect::<PyResult<Vec<_>>>()?
            .into_py_any(py),
    }
}
