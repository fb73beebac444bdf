//! Root-mean-square norms of rows, alone or after an addition to the residual stream.

use crate::linear::ShapeError;

/// Partial sums of a row's squares, so that the compiler can use vectors; their order is fixed.
const LANES: usize = 16;

/// `out = x / sqrt(mean(x²) + eps) * weight` for each row of `x`, rows as long as `weight`.
///
/// # Errors
/// [`ShapeError`] if a length does not fit.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) -> Result<(), ShapeError> {
    check(x.len(), weight.len(), out.len())?;
    let width = weight.len().max(1);
    for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
        normalise(x, weight, eps, out);
    }
    Ok(())
}

/// `residual += scale * x`, then [`rms_norm`] of `residual`.
///
/// # Errors
/// [`ShapeError`] if a length does not fit; nothing is changed then.
pub fn add_rms_norm(
    residual: &mut [f32],
    x: &[f32],
    scale: f32,
    weight: &[f32],
    eps: f32,
    out: &mut [f32],
) -> Result<(), ShapeError> {
    check(x.len(), weight.len(), out.len())?;
    if residual.len() != x.len() {
        return Err(ShapeError::Residual {
            len: residual.len(),
            expected: x.len(),
        });
    }
    let width = weight.len().max(1);
    let outs = out.chunks_exact_mut(width);
    let rows = residual.chunks_exact_mut(width).zip(x.chunks_exact(width));
    for ((residual, x), out) in rows.zip(outs) {
        for (residual, x) in residual.iter_mut().zip(x) {
            *residual += scale * x;
        }
        normalise(residual, weight, eps, out);
    }
    Ok(())
}

fn check(x: usize, width: usize, out: usize) -> Result<(), ShapeError> {
    if width == 0 || !x.is_multiple_of(width) {
        return Err(ShapeError::X { len: x, width });
    }
    if out != x {
        return Err(ShapeError::Out {
            len: out,
            expected: x,
        });
    }
    Ok(())
}

fn normalise(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let (chunks, rest) = x.as_chunks::<LANES>();
    let mut sums = [0.0f32; LANES];
    for chunk in chunks {
        for (sum, x) in sums.iter_mut().zip(chunk) {
            *sum += x * x;
        }
    }
    let sum = sums.iter().sum::<f32>() + rest.iter().map(|x| x * x).sum::<f32>();
    let inverse = 1.0 / (sum / x.len() as f32 + eps).sqrt();
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = x * inverse * weight;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(count: usize, seed: usize) -> Vec<f32> {
        (0..count)
            .map(|i| ((i * 7919 + seed * 31) % 1009) as f32 / 300.0 - 1.5)
            .collect()
    }

    fn naive(x: &[f32], weight: &[f32], eps: f64) -> Vec<f64> {
        let mean = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / x.len() as f64;
        let values = x.iter().zip(weight);
        values
            .map(|(x, w)| f64::from(*x) / (mean + eps).sqrt() * f64::from(*w))
            .collect()
    }

    #[test]
    fn a_norm_and_a_norm_after_addition_equal_f64_arithmetic() {
        for (rows, width) in [(1, 1), (3, 5), (2, 16), (4, 100), (2, 576)] {
            let (residual, x, weight) = (
                values(rows * width, 1),
                values(rows * width, 2),
                values(width, 3),
            );
            let mut out = vec![0.0; rows * width];
            let mut sum = residual.clone();
            add_rms_norm(&mut sum, &x, 0.5, &weight, 1e-5, &mut out).unwrap();
            for i in 0..rows * width {
                assert_eq!(sum[i], residual[i] + 0.5 * x[i]);
            }
            let mut alone = vec![0.0; rows * width];
            rms_norm(&sum, &weight, 1e-5, &mut alone).unwrap();
            assert_eq!(alone, out);
            for row in 0..rows {
                let span = row * width..(row + 1) * width;
                for (found, expected) in out[span.clone()]
                    .iter()
                    .zip(naive(&sum[span], &weight, 1e-5))
                {
                    assert!((f64::from(*found) - expected).abs() <= 1e-6 * expected.abs().max(1.0));
                }
            }
        }
    }

    #[test]
    fn a_row_of_zeros_stays_zero_and_nan_spreads_in_its_row_only() {
        let mut out = [1.0; 4];
        rms_norm(&[0.0, 0.0, 1.0, f32::NAN], &[2.0, 3.0], 1e-6, &mut out).unwrap();
        assert_eq!(out[..2], [0.0, 0.0]);
        assert!(out[2..].iter().all(|v| v.is_nan()));
    }

    #[test]
    fn lengths_that_do_not_fit_are_refused() {
        let mut out = [0.0; 4];
        assert!(rms_norm(&[0.0; 3], &[1.0; 2], 0.0, &mut out).is_err());
        assert!(rms_norm(&[0.0; 2], &[1.0; 2], 0.0, &mut out).is_err());
        assert!(rms_norm(&[], &[], 0.0, &mut out).is_err());
        let mut residual = [0.0; 2];
        assert!(
            add_rms_norm(&mut residual, &[0.0; 4], 1.0, &[1.0; 2], 0.0, &mut out)
                .is_err_and(|error| error.to_string().starts_with("residual"))
        );
    }
}
