//! Kernels of the CPU op set: matrix products of quantized weights, norms.
//!
//! Knows bytes, floats and threads; knows no model and no Python. `unsafe` is confined to the files of one instruction set each.
#![deny(unsafe_code)]
#![deny(unsafe_op_in_unsafe_fn)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod activations;
mod kernels;
pub mod linear;
pub mod norm;
pub mod packed;
mod pool;

pub use kernels::Path;
pub use linear::ShapeError;
pub use packed::{PackError, PackedMatrix, Part, Storage};
