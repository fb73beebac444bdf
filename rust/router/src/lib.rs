//! Which replica a request goes to: where most of its prompt is likely to be cached, unless that replica has too much to do.
//!
//! Pure: no clock, no I/O, no randomness. The router sees no cache; it remembers what it sent where, in as many tokens as a replica's
//! cache holds, and forgets what was used least recently, as the caches do. A wrong guess costs time, never an answer.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod prefix;
mod prefix_set;
mod router;

pub use prefix::{CHUNK, Prefix};
pub use router::Router;
