//! What prefix-aware routing is worth, and what a choice costs. `make bench-routing`.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout)]

#[path = "../tests/common/mod.rs"]
mod common;

use std::hint::black_box;
use std::time::Instant;

use common::{Policy, simulate};
use octavo_router::{Prefix, Router};

const PROMPTS: u32 = 2000;
const PROMPT_TOKENS: u32 = 1024;
const REPEATS: u32 = 7;

fn main() {
    println!(
        "| in flight | one replica, 72 prefixes | two of 36, routed | two of 36, in turn | routed : one | routed : in turn | worst imbalance |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- |");
    for at_once in [1, 4, 8, 16, 32] {
        let routed = simulate(Policy::PrefixAware, 2, 36, at_once, 1);
        let single = simulate(Policy::RoundRobin, 1, 72, at_once, 1).hit_rate;
        let in_turn = simulate(Policy::RoundRobin, 2, 36, at_once, 1).hit_rate;
        println!(
            "| {at_once} | {single:.3} | {:.3} | {in_turn:.3} | {:.3} | {:.2} | {} |",
            routed.hit_rate,
            routed.hit_rate / single,
            routed.hit_rate / in_turn,
            routed.worst_imbalance
        );
    }
    for replicas in [2, 8] {
        println!(
            "a choice among {replicas} replicas for {PROMPT_TOKENS} tokens: {:.1} µs",
            microseconds(replicas)
        );
    }
}

/// For each choice, half of whose prompts are known: the best of some runs, each the average of many choices.
fn microseconds(replicas: usize) -> f64 {
    let runs = (0..REPEATS).map(|_| one_run(replicas));
    runs.fold(f64::INFINITY, f64::min)
}

fn one_run(replicas: usize) -> f64 {
    let mut router = Router::new(replicas);
    for replica in 0..replicas {
        router.connect(replica, 1 << 20);
    }
    let prompts: Vec<Vec<u32>> = (0..PROMPTS)
        .map(|number| (0..PROMPT_TOKENS).map(|i| number / 2 + i).collect())
        .collect();
    let start = Instant::now();
    for tokens in &prompts {
        let chosen = router.route(&Prefix::new(0, tokens), 1, |_| true).unwrap();
        router.finish(black_box(chosen), 1);
    }
    start.elapsed().as_secs_f64() * 1e6 / f64::from(PROMPTS)
}
