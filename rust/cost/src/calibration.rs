//! Fitting the model to measured steps: an overhead per step, and the shares of the memory and arithmetic rates that were reached.

use crate::step::StepCost;

/// One measured step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// Predicted seconds of its operations that wait for memory.
    pub memory: f64,
    /// Predicted seconds of its operations that wait for arithmetic.
    pub compute: f64,
    /// Measured seconds of the step.
    pub measured: f64,
}

impl Sample {
    /// What the model predicts for a step without overheads, beside what it took.
    pub fn new(cost: &StepCost, measured: f64) -> Self {
        let (memory, compute) = cost.split();
        Self {
            memory,
            compute,
            measured,
        }
    }
}

/// `measured ≈ overhead + memory / memory_efficiency + compute / compute_efficiency`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Calibration {
    /// Seconds of each step.
    pub overhead: f64,
    /// Share of the bandwidth that is reached; 1 if the samples do not tell.
    pub memory_efficiency: f64,
    /// Share of the arithmetic rate that is reached; 1 if the samples do not tell.
    pub compute_efficiency: f64,
    /// Root mean square of the relative error over the samples.
    pub error: f64,
}

/// Why measured steps say nothing.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CalibrationError {
    /// Fewer than two samples.
    #[error("calibration needs at least 2 measured steps, got {samples}")]
    TooFew {
        /// How many there were.
        samples: usize,
    },
    /// A number is negative, NaN or infinite, or a measured time is 0.
    #[error("calibration needs finite times above 0, sample {index} is {sample:?}")]
    BadSample {
        /// Its place.
        index: usize,
        /// The sample.
        sample: Sample,
    },
}

/// Fits overhead and efficiencies by least squares of the relative error, with none of the three terms below 0.
///
/// With three terms the non-negative optimum is the best of the unconstrained optima of all subsets of terms that come out
/// non-negative (the others being 0), so every subset is tried.
///
/// # Errors
/// Too few samples, or one that cannot be.
pub fn fit(samples: &[Sample]) -> Result<Calibration, CalibrationError> {
    if samples.len() < 2 {
        return Err(CalibrationError::TooFew {
            samples: samples.len(),
        });
    }
    let good = |s: &Sample| {
        s.memory >= 0.0
            && s.compute >= 0.0
            && s.measured > 0.0
            && (s.memory + s.compute + s.measured).is_finite()
    };
    if let Some(index) = samples.iter().position(|sample| !good(sample)) {
        return Err(CalibrationError::BadSample {
            index,
            sample: samples[index],
        });
    }
    // Relative errors: each equation is divided by what was measured.
    let rows: Vec<[f64; 3]> = samples
        .iter()
        .map(|s| {
            [
                1.0 / s.measured,
                s.memory / s.measured,
                s.compute / s.measured,
            ]
        })
        .collect();
    let mut best = ([0.0; 3], f64::INFINITY);
    for subset in 1_u8..8 {
        let terms: Vec<usize> = (0..3).filter(|term| subset >> term & 1 == 1).collect();
        let Some(solution) = least_squares(&rows, &terms) else {
            continue;
        };
        let error = rows
            .iter()
            .map(|row| (1.0 - dot(row, &solution)).powi(2))
            .sum::<f64>();
        // A term more must pay for itself: the smaller subsets come first among equals.
        if solution.iter().all(|term| *term >= 0.0) && error < best.1 * (1.0 - 1e-9) {
            best = (solution, error);
        }
    }
    let ([overhead, memory, compute], error) = best;
    // A share above 1 would mean that the machine's rates were measured too low.
    let efficiency = |inverse: f64| if inverse > 0.0 { 1.0 / inverse } else { 1.0 };
    Ok(Calibration {
        overhead,
        memory_efficiency: efficiency(memory),
        compute_efficiency: efficiency(compute),
        error: (error / samples.len() as f64).sqrt(),
    })
}

fn dot(a: &[f64; 3], b: &[f64; 3]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

/// The coefficients of `terms` that bring `rows · x` closest to 1; the others are 0. `None` if they are not determined.
fn least_squares(rows: &[[f64; 3]], terms: &[usize]) -> Option<[f64; 3]> {
    // Columns are scaled to length 1, or seconds and shares would differ by many powers of ten.
    let scale: Vec<f64> = terms
        .iter()
        .map(|&term| rows.iter().map(|row| row[term].powi(2)).sum::<f64>().sqrt())
        .collect();
    if scale.contains(&0.0) {
        return None;
    }
    let size = terms.len();
    let column = |row: &[f64; 3], i: usize| row[terms[i]] / scale[i];
    // Normal equations, the right-hand side as the last column.
    let sum = |of: &dyn Fn(&[f64; 3]) -> f64| rows.iter().map(of).sum::<f64>();
    let equation = |i: usize| {
        let products = (0..size).map(|j| sum(&|row| column(row, i) * column(row, j)));
        products.chain([sum(&|row| column(row, i))]).collect()
    };
    let mut matrix: Vec<Vec<f64>> = (0..size).map(equation).collect();
    eliminate(&mut matrix)?;
    let mut solution = [0.0; 3];
    for (i, &term) in terms.iter().enumerate() {
        solution[term] = matrix[i][size] / scale[i];
    }
    Some(solution)
}

/// Gauss–Jordan with pivots; the last column becomes the solution. `None` for a singular matrix.
fn eliminate(matrix: &mut [Vec<f64>]) -> Option<()> {
    let size = matrix.len();
    for at in 0..size {
        let pivot =
            (at..size).max_by(|&a, &b| matrix[a][at].abs().total_cmp(&matrix[b][at].abs()))?;
        matrix.swap(at, pivot);
        // Columns have length 1: this small means that they are one and the same but for rounding.
        if matrix[at][at].abs() < 1e-9 {
            return None;
        }
        let lead = matrix[at].clone();
        for (i, row) in matrix.iter_mut().enumerate() {
            let factor = if i == at {
                1.0 - 1.0 / lead[at]
            } else {
                row[at] / lead[at]
            };
            row.iter_mut()
                .zip(&lead)
                .for_each(|(value, above)| *value -= factor * above);
        }
    }
    Some(())
}
