//! Threads around `octavo-core`: requests in from any thread, steps for the loop, updates out to mailboxes.
//!
//! `docs/engine.md` says which thread may call what.
#![forbid(unsafe_code)]

mod collector;
pub mod engine;
pub mod journal;
pub mod link;
pub mod mailbox;
mod masks;
mod snapshot;
mod steps;
pub mod update;
