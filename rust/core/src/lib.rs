//! The control plane: admission, scheduling, preemption, the block pool and the radix tree.
//!
//! Pure: no I/O, no clock, no Python, no tensors. Everything here is driven by its caller and can be replayed.
#![forbid(unsafe_code)]

pub mod cache;
pub mod ids;
pub mod params;
mod pool;
mod tree;
