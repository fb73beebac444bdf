//! When the masks of a step can be made, and what waits for that.
#![allow(clippy::unwrap_used)]

use octavo_core::config::CoreConfig;
use octavo_core::ids::{RequestId, StepId};
use octavo_core::output::{Output, StepResults};
use octavo_core::params::SamplingParams;
use octavo_core::plan::{flags, header};
use octavo_core::request::AddRequest;
use octavo_core::scheduler::Core;

fn core(max_in_flight: u32) -> Core {
    Core::new(CoreConfig {
        max_in_flight,
        host_state: false,
        ..CoreConfig::default()
    })
    .unwrap()
}

fn add(core: &mut Core, id: u64, has_grammar: bool) {
    let params = SamplingParams {
        max_tokens: 8,
        ..SamplingParams::default()
    };
    core.add(AddRequest {
        has_grammar,
        ..AddRequest::new(RequestId(id), vec![id as u32, 2, 3], params)
    })
    .unwrap();
}

/// Schedules; the step and after which one its masks can be made.
fn schedule(core: &mut Core) -> Option<(u64, i64)> {
    let mut plan = vec![0; core.layout().total_words];
    let step = core.schedule(&mut plan)?;
    let (low, high) = (plan[header::MASK_AFTER_LO], plan[header::MASK_AFTER_HI]);
    assert_eq!(plan[header::FLAGS] & flags::GRAMMAR != 0, high >= 0);
    Some((
        step.0,
        (i64::from(high) << 32) | i64::from(low.cast_unsigned()),
    ))
}

fn commit(core: &mut Core, step: u64, tokens: &[i32]) {
    let results = StepResults {
        step_id: StepId(step),
        tokens,
        num_sampled: &vec![1; tokens.len()],
        next_drafts: None,
    };
    core.commit(&results, &mut |_: Output<'_>| {}).unwrap();
    core.check_integrity().unwrap();
}

#[test]
fn nothing_is_scheduled_behind_a_step_whose_masks_wait_for_a_commit() {
    let mut core = core(3);
    add(&mut core, 1, true);
    assert_eq!(schedule(&mut core), Some((1, 0)));
    assert_eq!(schedule(&mut core), Some((2, 1)));
    assert!(core.waits_for_masks(StepId(2)));
    assert_eq!(schedule(&mut core), None);
    commit(&mut core, 1, &[7]);
    assert!(!core.waits_for_masks(StepId(2)));
    let rows: Vec<_> = core.masked_rows(StepId(2)).collect();
    assert_eq!(rows.len(), 1);
    assert_eq!(
        (rows[0].row, rows[0].id, rows[0].choice),
        (0, RequestId(1), 0)
    );
    assert_eq!(rows[0].outputs, [7]);
    assert_eq!(schedule(&mut core), Some((3, 2)));
}

#[test]
fn steps_without_a_grammar_have_no_masks_and_wait_for_nothing() {
    let mut core = core(3);
    add(&mut core, 1, false);
    for step in 1..=3 {
        assert_eq!(schedule(&mut core), Some((step, -1)));
        assert_eq!(core.masked_rows(StepId(step)).count(), 0);
    }
}

#[test]
fn one_row_with_a_grammar_is_masked_among_others() {
    let mut core = core(2);
    add(&mut core, 1, false);
    add(&mut core, 2, true);
    assert_eq!(schedule(&mut core), Some((1, 0)));
    let ids: Vec<_> = core
        .masked_rows(StepId(1))
        .map(|row| (row.row, row.id))
        .collect();
    assert_eq!(ids, [(1, RequestId(2))]);
    // A request that is gone needs none.
    core.abort(RequestId(2));
    assert_eq!(core.masked_rows(StepId(1)).count(), 0);
    assert!(!core.has_request(RequestId(2)));
}
