//! Full and sliding-window groups over one pool: what is kept, what is shared, what is waited for.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::VecDeque;

use common::engine::{Engine, alone, config, params, prompt, request};
use common::most_blocks;
use octavo_core::config::{CacheGroup, CoreConfig};
use octavo_core::ids::RequestId;
use octavo_core::output::{Output, StepResults};
use octavo_core::params::SamplingParams;
use octavo_core::plan::{flags, header};
use octavo_core::request::{AddError, AddRequest};
use octavo_core::scheduler::Core;

fn groups(windows: &[u32]) -> Vec<CacheGroup> {
    let windows = windows.iter();
    std::iter::once(CacheGroup::Full)
        .chain(windows.map(|&window| CacheGroup::Window { window }))
        .collect()
}

/// One full group and one with a window of 8: two blocks of 4 before a query at the beginning of a block.
fn windowed(num_blocks: u32) -> CoreConfig {
    CoreConfig {
        num_blocks: num_blocks + 1,
        max_num_batched_tokens: 16,
        groups: groups(&[8]),
        ..config()
    }
}

/// A long context: 8,192 tokens and 100 more, in chunks of 512, with `n` window groups of 512 beside the full one.
fn long_context(windows: usize, max_in_flight: u32) -> CoreConfig {
    CoreConfig {
        block_size: 16,
        num_blocks: 6000,
        max_num_batched_tokens: 512,
        max_model_len: 9000,
        max_in_flight,
        groups: groups(&vec![512; windows]),
        ..config()
    }
}

/// The most blocks in use at any time: held, or still seen by a step in flight. Every sampled token is 7.
fn peak_blocks(config: CoreConfig, num_tokens: u32, max_tokens: u32) -> u32 {
    let mut core = Core::new(config).unwrap();
    let mut buffer = vec![0; core.layout().total_words];
    let flags_at = core.layout().flags;
    core.add(request(1, &prompt(1, num_tokens), max_tokens))
        .unwrap();
    let (mut peak, mut num_outputs) = (0, 0);
    let mut in_flight = VecDeque::new();
    while core.has_work() {
        while let Some(step_id) = core.schedule(&mut buffer) {
            let samples = buffer[flags_at] & flags::SAMPLE != 0;
            in_flight.push_back((step_id, i32::from(samples)));
            let stats = core.stats();
            peak = peak.max(stats.num_blocks - stats.free_blocks - stats.evictable_blocks);
        }
        let (step_id, num_sampled) = in_flight.pop_front().unwrap();
        let results = StepResults {
            step_id,
            tokens: &[7],
            num_sampled: &[num_sampled],
            next_drafts: None,
        };
        core.commit(&results, &mut |output: Output<'_>| {
            num_outputs += output.tokens.len()
        })
        .unwrap();
    }
    core.check_integrity().unwrap();
    assert_eq!(num_outputs, max_tokens as usize);
    peak
}

#[test]
fn a_context_of_8k_tokens_takes_less_than_a_third_of_what_full_layers_take() {
    let full = 6 * 8192 / 16;
    let peak = peak_blocks(long_context(5, 1), 8192, 100);
    assert!(
        f64::from(peak) <= 0.30 * f64::from(full),
        "{peak} of {full} blocks"
    );
    // One to one, as in models that alternate.
    let peak = peak_blocks(long_context(1, 1), 8192, 100);
    assert!(
        f64::from(peak) <= 0.60 * f64::from(2 * 8192 / 16),
        "{peak} blocks"
    );
}

#[test]
fn the_bound_of_a_request_is_the_most_that_it_ever_holds() {
    for max_in_flight in 1..=3 {
        let config = CoreConfig {
            host_state: false,
            ..long_context(5, max_in_flight)
        };
        let bound = config.blocks_per_request(8192 + 99);
        assert_eq!(bound, most_blocks(&config, 8192 + 99) as u64);
        let peak = u64::from(peak_blocks(config, 8192, 100));
        // The full group's blocks of the outputs come when the chunk's are gone; each group's first block may be one more.
        assert!(
            peak <= bound && bound <= peak + 7 + 5,
            "{peak} of {bound} blocks with {max_in_flight} in flight"
        );
    }
}

#[test]
fn the_bound_is_what_counting_positions_gives() {
    for (block_size, window) in [(1, 1), (4, 1), (4, 8), (4, 9), (16, 512), (8, 30)] {
        for (max_num_batched_tokens, max_in_flight) in [(1, 1), (7, 1), (16, 2), (5, 3)] {
            let config = CoreConfig {
                block_size,
                max_num_batched_tokens,
                max_in_flight,
                groups: groups(&[window, 3]),
                ..config()
            };
            for num_tokens in 0..200 {
                assert_eq!(
                    config.blocks_per_request(num_tokens),
                    most_blocks(&config, num_tokens as usize) as u64,
                    "{num_tokens} tokens of {config:?}"
                );
            }
        }
    }
}

#[test]
fn a_request_longer_than_the_pool_could_keep_in_full_runs_to_its_end() {
    // 30 columns in full, and the window's 7 of the other group.
    let config = windowed(37);
    let request = request(1, &prompt(1, 100), 20);
    let mut engine = Engine::new(config.clone());
    engine.add(request.clone());
    engine.run();
    assert_eq!(engine.told(1).tokens, alone(&config, &request, 0).0);
    assert_eq!(engine.told(1).tokens.len(), 20);
    assert_eq!(engine.told(1).num_preemptions, 0);
}

#[test]
fn a_request_that_could_not_go_on_alone_is_refused_with_what_it_needs() {
    let mut engine = Engine::new(windowed(20));
    let error = engine.core.add(request(1, &prompt(1, 60), 4)).unwrap_err();
    assert_eq!(
        error,
        AddError::PoolTooSmall {
            num_tokens: 60,
            needed: 15 + 7,
            num_blocks: 20
        }
    );
    engine.add(request(2, &prompt(1, 52), 40));
    engine.run();
    // 53 tokens: the KV of the last is never computed.
    assert_eq!(engine.told(2).tokens.len(), 1);
}

#[test]
fn a_hit_ends_where_the_window_is_still_cached() {
    let config = windowed(24);
    let mut engine = Engine::new(config.clone());
    engine.add(request(1, &prompt(1, 48), 1));
    engine.run();
    assert_eq!(engine.core.stats().cached_blocks, 24);
    // A stranger takes eight blocks: the window's first eight columns, which were used least recently.
    engine.add(request(2, &prompt(2, 16), 1));
    engine.run();
    for (id, len, cached) in [(3, 49, 48), (4, 30, 0), (5, 30, 28)] {
        let request = request(id, &prompt(1, len), 1);
        engine.add(request.clone());
        engine.run();
        assert_eq!(engine.told(id).num_cached_tokens, cached, "request {id}");
        assert_eq!(engine.told(id).tokens, alone(&config, &request, 0).0);
    }
}

#[test]
fn blocks_that_left_the_window_are_coming_until_the_steps_that_read_them_are_done() {
    let mut engine = Engine::new(CoreConfig {
        max_in_flight: 2,
        host_state: false,
        enable_prefix_caching: false,
        ..windowed(60)
    });
    engine.add(request(1, &prompt(1, 40), 1));
    engine.schedule().unwrap();
    assert_eq!(engine.core.stats().coming_blocks, 0);
    engine.schedule().unwrap();
    // The second chunk's first query, at position 16, reads from position 9 on; the first step still writes columns 0 and 1.
    assert_eq!(engine.core.stats().coming_blocks, 2);
    let before = engine.available();
    engine.commit();
    assert_eq!(engine.core.stats().coming_blocks, 0);
    assert_eq!(engine.available(), before + 2);
}

#[test]
fn choices_share_the_windows_of_a_prompt_without_the_prefix_cache() {
    let config = CoreConfig {
        enable_prefix_caching: false,
        ..windowed(60)
    };
    let many = AddRequest::new(
        RequestId(1),
        prompt(1, 42),
        SamplingParams { n: 3, ..params(6) },
    );
    let mut engine = Engine::new(config.clone());
    engine.add(many.clone());
    engine.run();
    for choice in 0..3 {
        let told = &engine.told[&(1, choice)];
        assert_eq!(told.tokens, alone(&config, &many, choice).0);
        let cached = if choice == 0 { 0 } else { 40 };
        assert_eq!(told.num_cached_tokens, cached, "choice {choice}");
    }
}

#[test]
fn a_choice_that_comes_after_the_window_has_passed_computes_its_prompt() {
    let config = CoreConfig {
        enable_prefix_caching: false,
        max_num_seqs: 2,
        ..windowed(60)
    };
    let mut engine = Engine::new(config.clone());
    // The other slot is taken while the first choice decodes.
    engine.add(request(2, &prompt(2, 4), 16));
    let many = AddRequest::new(
        RequestId(1),
        prompt(1, 42),
        SamplingParams { n: 2, ..params(40) },
    );
    engine.add(many.clone());
    engine.run();
    assert_eq!(engine.told[&(1, 1)].num_cached_tokens, 0);
    for choice in 0..2 {
        assert_eq!(
            engine.told[&(1, choice)].tokens,
            alone(&config, &many, choice).0
        );
    }
}

#[test]
fn a_prompt_that_stands_twice_in_a_small_pool_is_computed_piece_by_piece() {
    // What is cached of the prompt is held as shadows while it is computed anew for its logprobs; with them the pool is too small.
    let config = CoreConfig {
        num_blocks: 26,
        max_num_batched_tokens: 4,
        groups: groups(&[33]),
        ..config()
    };
    assert_eq!(config.blocks_per_request(60), 25);
    let mut engine = Engine::new(config.clone());
    engine.add(request(1, &prompt(1, 60), 1));
    engine.run();
    let again = AddRequest::new(
        RequestId(2),
        prompt(1, 60),
        SamplingParams {
            prompt_logprobs: Some(0),
            ..params(1)
        },
    );
    engine.add(again.clone());
    engine.run();
    let told = engine.told(2);
    assert_eq!(told.tokens, alone(&config, &again, 0).0);
    assert!(told.num_preemptions > 0, "the case does not occur");
}

#[test]
fn nobody_takes_blocks_that_an_earlier_request_waits_for() {
    let mut waits = 0;
    for num_blocks in 24..60 {
        let mut engine = Engine::new(CoreConfig {
            max_num_batched_tokens: 12,
            max_in_flight: 3,
            host_state: false,
            enable_prefix_caching: false,
            groups: groups(&[4, 6]),
            ..windowed(num_blocks)
        });
        engine.add(AddRequest {
            priority: -1,
            ..request(1, &prompt(1, 6), 24)
        });
        engine.schedule().unwrap();
        for id in 2..6 {
            let _ = engine.core.add(request(id, &prompt(id as u32, 20), 20));
        }
        while engine.told.get(&(1, 0)).map_or(0, |told| told.tokens.len()) < 18 {
            while engine.schedule().is_some() {
                let step = engine.in_flight.back().unwrap();
                let first_runs = step.rows.iter().any(|row| row.slot == 0);
                if !first_runs {
                    waits += 1;
                    assert_eq!(
                        engine.buffer[header::NUM_BLOCK_WRITES],
                        0,
                        "in a pool of {num_blocks} blocks"
                    );
                }
            }
            engine.commit();
        }
    }
    assert!(waits > 0, "the case does not occur");
}
