//! The front: OpenAI's protocol over HTTP, and the engine process that it keeps alive.
//!
//! Owns the truth of every request (prompt, parameters, all tokens so far) and everything between texts and token ids. Knows nothing of
//! blocks, steps and devices; an engine is a child process at the other end of `octavo_wire`.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod app;
mod auth;
mod config;
mod engine;
mod error;
#[cfg(test)]
mod fuzz;
mod http;
mod latency;
mod log;
mod metrics;
mod model;
mod otlp;
mod page;
mod protocol;
mod run;
mod state;
mod trace;

pub use config::{ServerConfig, UnknownFields};
pub use engine::SupervisorError;
pub use protocol::FIELDS_WITHOUT_MEANING;
pub use run::{ServeError, run};
