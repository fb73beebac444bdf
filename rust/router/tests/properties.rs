//! What always holds, whatever comes in whatever order.
#![allow(missing_docs, clippy::unwrap_used)]

use octavo_router::{CHUNK, Prefix, Router};
use proptest::prelude::*;

const REPLICAS: usize = 3;
const CACHE_TOKENS: usize = 20 * CHUNK;

#[derive(Clone, Debug)]
enum Event {
    Up(usize),
    Down(usize),
    /// A prompt of chunks, how many sequences, and a replica that is left out.
    Request(Vec<u32>, u64, usize, usize),
    /// The oldest request that is still there ends.
    End,
}

fn event() -> impl Strategy<Value = Event> {
    let request = (
        prop::collection::vec(0..3_u32, 0..6),
        0..2_u64,
        1..20_usize,
        0..2 * REPLICAS,
    );
    prop_oneof![
        1 => (0..REPLICAS).prop_map(Event::Up),
        1 => (0..REPLICAS).prop_map(Event::Down),
        8 => request.prop_map(|(path, salt, n, out)| Event::Request(path, salt, n, out)),
        3 => Just(Event::End),
    ]
}

fn prefix(path: &[u32], namespace: u64) -> Prefix {
    let tokens: Vec<u32> = path.iter().flat_map(|&step| [step; CHUNK]).collect();
    Prefix::new(namespace, &tokens)
}

/// Feeds events to a router beside a naive account of who is up and has how much, and returns where everything went.
fn run(events: &[Event]) -> Result<Vec<Option<usize>>, TestCaseError> {
    let mut router = Router::new(REPLICAS);
    let mut up = [false; REPLICAS];
    let mut running: Vec<(usize, usize)> = Vec::new();
    let mut routed = Vec::new();
    for event in events {
        match event {
            Event::Up(replica) => {
                up[*replica] = true;
                running.retain(|(other, _)| other != replica);
                router.connect(*replica, CACHE_TOKENS);
            }
            Event::Down(replica) => {
                up[*replica] = false;
                running.retain(|(other, _)| other != replica);
                router.disconnect(*replica);
            }
            Event::End if running.is_empty() => {}
            Event::End => {
                let (replica, sequences) = running.remove(0);
                router.finish(replica, sequences);
            }
            Event::Request(path, salt, sequences, out) => {
                let load = |replica: usize| -> usize {
                    let here = running.iter().filter(|(other, _)| *other == replica);
                    here.map(|(_, sequences)| sequences).sum()
                };
                let open: Vec<usize> = (0..REPLICAS).filter(|&r| up[r] && r != *out).collect();
                let least = open.iter().map(|&replica| load(replica)).min();
                let chosen = router.route(&prefix(path, *salt), *sequences, |r| r != *out);
                prop_assert_eq!(chosen.is_some(), !open.is_empty());
                if let (Some(replica), Some(least)) = (chosen, least) {
                    prop_assert!(open.contains(&replica), "it is up and not left out");
                    let more = load(replica) - least;
                    prop_assert!(more <= Router::slack(least), "{} more than the least", more);
                    running.push((replica, *sequences));
                }
                routed.push(chosen);
            }
        }
        for replica in 0..REPLICAS {
            prop_assert!(
                router.cached_tokens(replica) <= CACHE_TOKENS,
                "memory is bounded"
            );
            let here = running.iter().filter(|(other, _)| *other == replica);
            prop_assert_eq!(
                router.num_sequences(replica),
                here.map(|(_, n)| n).sum::<usize>()
            );
        }
    }
    Ok(routed)
}

proptest! {
    #[test]
    fn requests_go_to_a_replica_that_is_up_and_not_much_busier_than_the_others(
        events in prop::collection::vec(event(), 0..200),
    ) {
        let routed = run(&events)?;
        prop_assert_eq!(run(&events)?, routed, "the same events, the same choices");
    }
}

fn two() -> Router {
    let mut router = Router::new(2);
    router.connect(0, CACHE_TOKENS);
    router.connect(1, CACHE_TOKENS);
    router
}

fn all(_: usize) -> bool {
    true
}

#[test]
fn a_prompt_follows_its_beginning_while_the_load_allows_it() {
    let mut router = two();
    assert_eq!(router.route(&prefix(&[1, 2, 3, 4], 0), 1, all), Some(0));
    assert_eq!(
        router.route(&prefix(&[9], 0), 1, all),
        Some(1),
        "the other one is idle"
    );
    let longer = prefix(&[1, 2, 3, 4, 5], 0);
    assert_eq!(router.route(&longer, 1, all), Some(0));
    // Four cached chunks are worth one sequence of imbalance, no more.
    let counts = [0, 1].map(|replica| router.num_sequences(replica));
    assert_eq!(counts, [2, 1]);
    assert_eq!(router.route(&prefix(&[1, 2], 0), 1, all), Some(1));
}

#[test]
fn a_salted_prompt_does_not_follow_one_with_another_salt() {
    let mut router = two();
    assert_eq!(router.route(&prefix(&[1, 2, 3], 5), 1, all), Some(0));
    router.finish(0, 1);
    assert_eq!(router.route(&prefix(&[1, 2, 3], 5), 1, all), Some(0));
    router.finish(0, 1);
    assert_eq!(
        router.route(&prefix(&[1, 2, 3], 6), 1, all),
        Some(1),
        "it is new everywhere, and that cache is emptier"
    );
}

#[test]
fn new_prompts_fill_all_caches_before_any_forgets() {
    let mut router = two();
    let mut counts = [0, 0];
    for group in 0..8 {
        let path: Vec<u32> = (0..5).map(|step| 100 * group + step).collect();
        let chosen = router.route(&prefix(&path, 0), 1, all).unwrap();
        router.finish(chosen, 1);
        counts[chosen] += 1;
    }
    assert_eq!(counts, [4, 4]);
}

#[test]
fn a_common_first_chunk_does_not_draw_everything_to_one_replica() {
    let mut router = two();
    let path = |group: u32| {
        let own = (0..4).map(move |step| 100 * (group + 1) + step);
        std::iter::once(7).chain(own).collect::<Vec<u32>>()
    };
    let mut homes = Vec::new();
    for round in 0..3 {
        for group in 0..8 {
            let chosen = router.route(&prefix(&path(group), 0), 1, all).unwrap();
            router.finish(chosen, 1);
            if round == 0 {
                homes.push(chosen);
            } else {
                assert_eq!(
                    chosen, homes[group as usize],
                    "it stays where it was computed"
                );
            }
        }
    }
    assert!(homes.contains(&0) && homes.contains(&1));
}

#[test]
fn an_answer_that_was_learned_draws_the_next_question() {
    let mut router = two();
    assert_eq!(router.route(&prefix(&[1], 0), 1, all), Some(0));
    assert_eq!(router.route(&prefix(&[2], 0), 1, all), Some(1));
    router.learn(1, &prefix(&[2, 3, 4, 5], 0));
    router.finish(0, 1);
    router.finish(1, 1);
    assert_eq!(router.route(&prefix(&[2, 3, 4, 5, 6], 0), 1, all), Some(1));
}

#[test]
fn a_replica_that_comes_back_has_nothing_cached() {
    let mut router = two();
    assert_eq!(router.route(&prefix(&[1, 2], 0), 1, all), Some(0));
    router.disconnect(0);
    assert_eq!(router.cached_tokens(0), 0);
    assert_eq!(router.route(&prefix(&[1, 2], 0), 1, all), Some(1));
    router.connect(0, CACHE_TOKENS);
    router.finish(1, 1);
    assert_eq!(router.route(&prefix(&[1, 2], 0), 1, all), Some(1));
}
