//! The control plane: admission, scheduling, preemption, the block pool and the radix tree.
//!
//! Pure: no I/O, no clock, no Python, no tensors. Everything here is driven by its caller and can be replayed.
#![forbid(unsafe_code)]

mod admission;
pub mod cache;
mod companions;
pub mod config;
pub mod ids;
mod integrity;
pub mod output;
pub mod params;
pub mod plan;
mod policy;
mod pool;
mod preemption;
mod queue;
pub mod request;
pub mod rng;
pub mod scheduler;
mod settling;
pub mod stats;
mod tree;
pub mod view;
pub mod window;
