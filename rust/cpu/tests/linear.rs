//! The product of packed matrices against f64 arithmetic on the file's bytes, for every instruction set of this processor.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::{Matrix, x_rows};
use octavo_cpu::{PackError, PackedMatrix, Part, Path, ShapeError, Storage};
use proptest::prelude::*;

fn storages() -> impl Strategy<Value = Storage> {
    prop_oneof![
        Just(Storage::Q4_0),
        Just(Storage::Q4_1),
        Just(Storage::Q8_0)
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn a_product_is_within_the_rounding_of_activations_of_the_exact_one(
        storages in prop::collection::vec((storages(), 1usize..40), 1..4),
        groups in 1usize..12,
        rows in 1usize..34,
        threads in 1usize..4,
        seed: u64,
    ) {
        let matrix = Matrix::random(&storages, groups, seed);
        let x = x_rows(rows, matrix.width, seed ^ 1);
        let packed = matrix.pack();
        for path in Path::supported() {
            let mut out = vec![f32::NAN; rows * packed.rows()];
            packed.linear_with(path, &x, &mut out, threads).unwrap();
            for row in 0..rows {
                let x = &x[row * matrix.width..][..matrix.width];
                for column in 0..packed.rows() {
                    let (exact, rounded, tolerance) = matrix.dot(column, x);
                    let found = f64::from(out[row * packed.rows() + column]);
                    // To the exact product: half a step of every activation. To that of the rounded activations: fp32 sums.
                    prop_assert!((found - exact).abs() <= tolerance, "{path:?} {found} {exact} {tolerance}");
                    prop_assert!((found - rounded.0).abs() <= 1e-6 * rounded.1, "{path:?} {found} {rounded:?}");
                }
            }
        }
    }

    #[test]
    fn a_row_is_bitwise_the_same_alone_among_others_and_on_any_number_of_threads(
        storages in prop::collection::vec((storages(), 1usize..300), 1..3),
        groups in 1usize..20,
        rows in 2usize..34,
        seed: u64,
    ) {
        let matrix = Matrix::random(&storages, groups, seed);
        let x = x_rows(rows, matrix.width, seed ^ 1);
        let packed = matrix.pack();
        let columns = packed.rows();
        for path in Path::supported() {
            let mut alone = vec![0.0; rows * columns];
            for (x, out) in x.chunks(matrix.width).zip(alone.chunks_mut(columns)) {
                packed.linear_with(path, x, out, 1).unwrap();
            }
            for threads in 1..5 {
                let mut together = vec![0.0; rows * columns];
                packed.linear_with(path, &x, &mut together, threads).unwrap();
                prop_assert!(alone.iter().zip(&together).all(|(a, b)| a.to_bits() == b.to_bits()), "{path:?} {threads}");
            }
        }
    }

    #[test]
    fn a_row_read_back_is_the_file_s_row(
        storages in prop::collection::vec((storages(), 1usize..40), 1..4),
        groups in 1usize..6,
        seed: u64,
    ) {
        let matrix = Matrix::random(&storages, groups, seed);
        let packed = matrix.pack();
        let mut row = vec![0.0; matrix.width];
        for index in 0..packed.rows() {
            packed.read_rows(&[index as i64], &mut row).unwrap();
            let expected: Vec<f64> = (0..matrix.width).map(|i| matrix.element(index, i)).collect();
            for (found, expected) in row.iter().zip(expected) {
                prop_assert!((f64::from(*found) - expected).abs() <= 1e-6 * expected.abs().max(0.05));
            }
        }
        for id in [-1, packed.rows() as i64] {
            let error = packed.read_rows(&[id], &mut row).unwrap_err();
            prop_assert_eq!(error, ShapeError::Id { id, rows: packed.rows() });
        }
    }
}

#[test]
fn more_rows_than_one_pass_serves_equal_single_rows() {
    let matrix = Matrix::random(&[(Storage::Q4_1, 70)], 3, 5);
    let (packed, rows) = (matrix.pack(), 300);
    let x = x_rows(rows, matrix.width, 6);
    let mut together = vec![0.0; rows * 70];
    packed.linear(&x, &mut together, 3).unwrap();
    for row in [0, 127, 128, 255, 256, 299] {
        let mut alone = vec![0.0; 70];
        packed
            .linear(&x[row * matrix.width..][..matrix.width], &mut alone, 1)
            .unwrap();
        assert_eq!(alone, together[row * 70..][..70]);
    }
}

#[test]
fn extreme_codes_do_not_overflow() {
    for (storage, code) in [
        (Storage::Q4_0, 0xff),
        (Storage::Q4_0, 0x00),
        (Storage::Q4_1, 0xff),
        (Storage::Q8_0, 0x7f),
        (Storage::Q8_0, 0x80),
    ] {
        let mut matrix = Matrix::random(&[(storage, 16)], 4, 1);
        matrix.set_codes(code);
        for sign in [1.0, -1.0] {
            let x = vec![sign * 3.0; matrix.width];
            for path in Path::supported() {
                let mut out = vec![0.0; 16];
                matrix.pack().linear_with(path, &x, &mut out, 1).unwrap();
                for (column, found) in out.iter().enumerate() {
                    let (exact, ..) = matrix.dot(column, &x);
                    assert!(
                        (f64::from(*found) - exact).abs() <= 1e-5 * exact.abs(),
                        "{path:?} {storage:?} {code:x} {found} {exact}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_bad_activation_spoils_its_row_only() {
    for storage in [Storage::Q4_0, Storage::Q4_1, Storage::Q8_0] {
        let matrix = Matrix::random(&[(storage, 20)], 3, 2);
        let mut x = x_rows(3, matrix.width, 3);
        x[matrix.width + 40] = f32::NAN;
        for path in Path::supported() {
            let mut out = vec![0.0; 60];
            matrix.pack().linear_with(path, &x, &mut out, 1).unwrap();
            assert!(out[20..40].iter().all(|v| !v.is_finite()));
            assert!(out[..20].iter().chain(&out[40..]).all(|v| v.is_finite()));
        }
    }
}

#[test]
fn packed_bytes_are_the_file_s_when_rows_fill_tiles() {
    for storage in [Storage::Q4_0, Storage::Q4_1, Storage::Q8_0] {
        let matrix = Matrix::random(&[(storage, 96), (storage, 32)], 18, 4);
        assert_eq!(matrix.pack().num_bytes(), matrix.num_bytes());
    }
}

#[test]
fn no_rows_of_x_give_no_output() {
    let matrix = Matrix::random(&[(Storage::Q8_0, 5)], 1, 1);
    assert_eq!(matrix.pack().linear(&[], &mut [], 2), Ok(()));
}

#[test]
fn wrong_lengths_are_told_by_the_argument_s_name() {
    let matrix = Matrix::random(&[(Storage::Q4_0, 5)], 2, 1);
    let packed = matrix.pack();
    let error = packed.linear(&[0.0; 65], &mut [0.0; 5], 1).unwrap_err();
    assert_eq!(error, ShapeError::X { len: 65, width: 64 });
    assert!(error.to_string().starts_with("x: 65"));
    let error = packed.linear(&[0.0; 128], &mut [0.0; 5], 1).unwrap_err();
    assert_eq!(
        error,
        ShapeError::Out {
            len: 5,
            expected: 10
        }
    );
}

#[test]
fn parts_that_do_not_fit_are_refused() {
    assert_eq!(PackedMatrix::new(&[]).unwrap_err(), PackError::Empty);
    let part = |storage, rows, bytes: &'static [u8]| Part {
        storage,
        rows,
        data: bytes,
    };
    let error = PackedMatrix::new(&[part(Storage::Q4_0, 2, &[0; 37])]).unwrap_err();
    assert!(matches!(error, PackError::RowBytes { bytes: 37, .. }));
    let error = PackedMatrix::new(&[
        part(Storage::Q4_0, 1, &[0; 36]),
        part(Storage::Q8_0, 1, &[0; 34]),
    ])
    .unwrap_err();
    assert_eq!(
        error,
        PackError::Width {
            part: 1,
            width: 32,
            expected: 64
        }
    );
}
