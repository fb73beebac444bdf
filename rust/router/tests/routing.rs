//! What prefix-aware routing is worth, on the real scheduler and radix tree.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use common::{Policy, simulate};

#[test]
fn two_replicas_hit_nearly_as_often_as_one_with_both_caches_and_far_more_often_than_in_turn() {
    for (at_once, seed) in [(1, 1), (8, 2), (16, 3)] {
        let routed = simulate(Policy::PrefixAware, 2, 36, at_once, seed);
        let single = simulate(Policy::RoundRobin, 1, 72, at_once, seed);
        let in_turn = simulate(Policy::RoundRobin, 2, 36, at_once, seed);
        assert!(
            routed.hit_rate >= 0.9 * single.hit_rate,
            "{at_once} at once: {routed:?}, one replica {single:?}"
        );
        assert!(
            routed.hit_rate >= 1.5 * in_turn.hit_rate,
            "{at_once} at once: {routed:?}, in turn {in_turn:?}"
        );
        let [first, second] = routed.requests[..] else {
            panic!("two replicas");
        };
        assert!(first.abs_diff(second) * 4 <= first + second, "{routed:?}");
    }
}

#[test]
fn a_run_is_the_same_every_time() {
    let run = || simulate(Policy::PrefixAware, 2, 36, 8, 5);
    assert_eq!(run(), run());
}
