//! The cost model: bytes moved and operations done by a step, and the time they take at a machine's rates.
#![forbid(unsafe_code)]
