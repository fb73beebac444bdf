//! Calibration finds what made the samples, and never a negative cost.
#![allow(clippy::unwrap_used)]

mod common;

use common::{close, h200, llama3_8b};
use octavo_cost::{Batch, CalibrationError, Machine, Row, Sample, StepCost, fit};
use proptest::prelude::*;

/// Steps of every kind on the ideal machine, timed on a slower one.
fn measured(overhead: f64, memory: f64, compute: f64) -> Vec<Sample> {
    let batches = [
        vec![Row::decode(128)],
        vec![Row::decode(4000); 16],
        vec![Row::decode(1000); 200],
        vec![Row::prefill(512)],
        vec![Row::prefill(4096)],
        vec![Row::prefill(300), Row::decode(900)],
    ];
    let time = |cost: &StepCost| overhead + cost.split().0 / memory + cost.split().1 / compute;
    batches
        .into_iter()
        .map(|rows| StepCost::new(&llama3_8b(), &Batch::new(rows, None), &h200()))
        .map(|cost| Sample::new(&cost, time(&cost)))
        .collect()
}

proptest! {
    #[test]
    fn exact_samples_give_back_what_made_them(overhead in 0.0_f64..5e-3, memory in 0.3_f64..1.0, compute in 0.3_f64..1.0) {
        let found = fit(&measured(overhead, memory, compute)).unwrap();
        prop_assert!((found.overhead - overhead).abs() < 1e-8, "{:?}", found);
        prop_assert!(close(found.memory_efficiency, memory, 1e-6), "{:?}", found);
        prop_assert!(close(found.compute_efficiency, compute, 1e-6), "{:?}", found);
        prop_assert!(found.error < 1e-9);
    }

    #[test]
    fn no_other_non_negative_terms_fit_noisy_samples_better(
        noise in prop::collection::vec(0.5_f64..1.5, 6), moves in prop::collection::vec(prop::array::uniform3(0.8_f64..1.25), 50),
    ) {
        let mut samples = measured(1e-3, 0.7, 0.6);
        samples.iter_mut().zip(&noise).for_each(|(sample, noise)| sample.measured *= noise);
        let found = fit(&samples).unwrap();
        let error = |a: f64, m: f64, c: f64| {
            let relative = |s: &Sample| 1.0 - (a + s.memory * m + s.compute * c) / s.measured;
            (samples.iter().map(|s| relative(s).powi(2)).sum::<f64>() / samples.len() as f64).sqrt()
        };
        prop_assert!(found.overhead >= 0.0 && found.memory_efficiency > 0.0 && found.compute_efficiency > 0.0);
        for [a, m, c] in moves {
            let other = error(
                found.overhead * a + if a > 1.0 { 1e-4 } else { 0.0 },
                m / found.memory_efficiency,
                c / found.compute_efficiency,
            );
            prop_assert!(found.error <= other + 1e-9, "{:?} {}", found, other);
        }
    }
}

#[test]
fn a_calibrated_machine_predicts_the_steps_it_was_fitted_to() {
    let samples = measured(2e-3, 0.8, 0.6);
    let machine = h200().calibrated(&fit(&samples).unwrap());
    machine.validate().unwrap();
    let cost = |machine: &Machine| {
        StepCost::new(
            &llama3_8b(),
            &Batch::new([Row::prefill(4096)], None),
            machine,
        )
    };
    assert!(
        close(cost(&machine).time(), samples[4].measured, 0.02),
        "{}",
        cost(&machine).time()
    );
}

#[test]
fn terms_that_samples_do_not_tell_stay_neutral() {
    // Only decode steps of one batch: overhead and bandwidth cannot be told apart, arithmetic not at all.
    let found = fit(&[Sample {
        memory: 1.0,
        compute: 0.0,
        measured: 2.0,
    }; 5])
    .unwrap();
    assert_eq!(found.compute_efficiency, 1.0);
    assert!(found.error < 1e-12);
    let explained = found.overhead + 1.0 / found.memory_efficiency;
    assert!(close(explained, 2.0, 1e-9) || close(found.overhead, 2.0, 1e-9));
}

#[test]
fn bad_samples_are_refused() {
    let good = Sample {
        memory: 1.0,
        compute: 0.0,
        measured: 2.0,
    };
    assert_eq!(fit(&[good]), Err(CalibrationError::TooFew { samples: 1 }));
    for bad in [
        Sample {
            measured: 0.0,
            ..good
        },
        Sample {
            measured: f64::NAN,
            ..good
        },
        Sample {
            memory: -1.0,
            ..good
        },
        Sample {
            compute: f64::INFINITY,
            ..good
        },
    ] {
        assert!(matches!(
            fit(&[good, bad]),
            Err(CalibrationError::BadSample { index: 1, .. })
        ));
    }
}
