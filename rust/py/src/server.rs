//! `EngineLink`, the engine's end of the wire, and `serve`, the front.

use std::path::PathBuf;

use octavo_engine::journal::Journal;
use octavo_engine::link::Link;
use octavo_server::{ServeError, ServerConfig, SupervisorError};
use octavo_wire::ModelInfo;
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use serde::de::DeserializeOwned;

use crate::engine::PyEngineCore;

/// A connection to the front that started this process; the process ends when the front does.
#[pyclass(name = "EngineLink", module = "octavo._core", frozen)]
pub(crate) struct PyEngineLink {
    link: Link,
    folder: PathBuf,
}

#[pymethods]
impl PyEngineLink {
    /// Connects to the socket in a front's private folder.
    #[new]
    fn new(folder: PathBuf) -> PyResult<Self> {
        let link = Link::connect(&folder.join("engine.sock")).map_err(os_error)?;
        Ok(Self { link, folder })
    }

    /// Takes requests for `core` from now on; `info` is what the front must know of the model, as JSON.
    fn serve(&self, py: Python<'_>, core: &PyEngineCore, info: &str) -> PyResult<()> {
        let info: ModelInfo = parse("info", info)?;
        let engine = core.share();
        py.detach(|| {
            engine.keep_journal(Journal::create(&self.folder.join("journal"))?);
            self.link.serve(engine, info)
        })
        .map_err(os_error)
    }

    /// Tells the front why the process is about to end.
    fn fail(&self, py: Python<'_>, reason: &str) {
        py.detach(|| self.link.fail(reason));
    }
}

/// Runs the front until a signal ends it and returns the exit code; `config` is JSON. Takes over SIGTERM, SIGINT and SIGHUP.
#[pyfunction]
pub(crate) fn serve(py: Python<'_>, config: &str) -> PyResult<u8> {
    let config: ServerConfig = parse("config", config)?;
    py.detach(|| octavo_server::run(config))
        .map_err(|error| match error {
            ServeError::Config(message) => PyValueError::new_err(message),
            ServeError::Engine(SupervisorError::Failed(message)) => {
                PyRuntimeError::new_err(message)
            }
            other => PyOSError::new_err(other.to_string()),
        })
}

fn parse<T: DeserializeOwned>(name: &str, json: &str) -> PyResult<T> {
    serde_json::from_str(json).map_err(|error| PyValueError::new_err(format!("{name}: {error}")))
}

fn os_error(error: std::io::Error) -> PyErr {
    PyOSError::new_err(error.to_string())
}
