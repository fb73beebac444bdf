//! What `octavo serve` is told; the command line has checked names and types.

use std::path::PathBuf;

use serde::Deserialize;

/// What to do with a field that no part of the protocol knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum UnknownFields {
    /// An error that names it.
    #[default]
    Reject,
    /// A line in the log; the request runs.
    Warn,
}

/// Arguments of the front.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServerConfig {
    /// Address to listen at.
    pub host: String,
    /// Port; 0 takes a free one.
    pub port: u16,
    /// What the operator called the model.
    pub model: String,
    /// Names by which requests may ask for it; the first is the one in replies.
    pub served_model_name: Vec<String>,
    /// Whoever has one of them may use every route; without any, everybody may.
    pub api_key: Vec<String>,
    /// Origins of web pages that may read replies; `*` is all.
    pub allowed_origin: Vec<String>,
    /// Files of the certificate chain and its key, both PEM; with them the server speaks TLS.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// What becomes of fields that nobody knows.
    pub unknown_fields: UnknownFields,
    /// Bytes of a request body at most.
    pub max_body_bytes: usize,
    /// Sequences that may wait besides those that run.
    pub max_queued_requests: usize,
    /// Seconds that running requests have after the first signal to end.
    pub shutdown_timeout: f64,
    /// Seconds without progress, while work waits, after which an engine counts as hung; more if its steps are long.
    pub engine_timeout: f64,
    /// Engine processes, each with the whole model.
    pub data_parallel_size: usize,
    /// URL of an OpenTelemetry collector that takes OTLP over HTTP; without one nothing is traced.
    #[serde(default)]
    pub otlp_endpoint: Option<String>,
    /// Name of a parser, `auto` or `none`.
    pub tool_call_parser: String,
    /// Name of a parser, `auto` or `none`.
    pub reasoning_parser: String,
    /// Program and first arguments of an engine process; the folder of its socket is added.
    pub engine_command: Vec<String>,
    /// The engine's own arguments, for it alone to read.
    pub engine_config: serde_json::Value,
}
