//! The cost model: bytes moved and operations done by a step, and the time they take at a machine's rates.
//!
//! A *model* says how many numbers there are and how they are stored, a *batch* what a step computes, a *machine* how fast it
//! reads, computes and talks. [`StepCost::new`] counts each operation of the step; an operation takes the longer of its memory
//! and its arithmetic time (the roofline of Williams, Waterman and Patterson, CACM 2009), a step the sum of its operations.
//! Pure: no clock, no I/O; what was measured comes in through [`calibration::fit`].
#![forbid(unsafe_code)]

pub mod batch;
pub mod calibration;
pub mod machine;
pub mod model;
pub mod step;

pub use batch::{Batch, Row};
pub use calibration::{Calibration, CalibrationError, Sample, fit};
pub use machine::{Compute, Link, Machine, Rates};
pub use model::{Attention, Experts, Model, StorageBytes, Window};
pub use step::{Bound, Op, OpCost, StepCost};

/// Why a description cannot be costed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CostError {
    /// A size is 0, or a rate is not a positive finite number.
    #[error("{field} must be positive and finite, got {value}")]
    NotPositive {
        /// Which number.
        field: &'static str,
        /// What it was.
        value: f64,
    },
    /// A part is larger than the whole it belongs to.
    #[error("{field} must be at most {limit}, got {value}")]
    TooLarge {
        /// Which number.
        field: &'static str,
        /// What it was.
        value: u32,
        /// The whole.
        limit: u32,
    },
}

/// Refuses NaN, infinities, zero and negatives.
fn positive(fields: &[(&'static str, f64)]) -> Result<(), CostError> {
    match fields
        .iter()
        .find(|(_, value)| !(value.is_finite() && *value > 0.0))
    {
        Some(&(field, value)) => Err(CostError::NotPositive { field, value }),
        None => Ok(()),
    }
}

fn at_most(field: &'static str, value: u32, limit: u32) -> Result<(), CostError> {
    if value > limit {
        Err(CostError::TooLarge {
            field,
            value,
            limit,
        })
    } else {
        Ok(())
    }
}
