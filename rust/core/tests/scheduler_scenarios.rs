//! Who is scheduled, admitted and preempted, and what becomes of the blocks: one sentence a test.
#![allow(clippy::unwrap_used)]

mod common;

use common::engine::{Engine, alone, config, params, prompt, request};
use octavo_core::config::CoreConfig;
use octavo_core::ids::{RequestId, TenantId};
use octavo_core::output::FinishReason;
use octavo_core::params::SamplingParams;
use octavo_core::request::AddRequest;
use std::collections::BTreeMap;

#[test]
fn a_pool_of_12_blocks_where_a_has_5_blocks_and_b_has_2() {
    let mut engine = Engine::new(CoreConfig {
        num_blocks: 12,
        enable_prefix_caching: false,
        ..config()
    });
    engine.add(request(1, &prompt(1, 15), 3));
    engine.step();
    // B comes while A is at home in four blocks; A's fifth lies behind those of B.
    engine.add(request(2, &prompt(2, 5), 3));
    engine.step();
    assert_eq!(engine.schedule(), Some(vec![1, 1]));
    let (a, b) = (
        engine.device.table(0).to_vec(),
        engine.device.table(1).to_vec(),
    );
    assert_eq!((a.len(), b.len()), (5, 2));
    assert_ne!(a[4], a[3] + 1, "{a:?} is contiguous");
    assert!(a.iter().all(|block| *block != 0 && !b.contains(block)));
    let stats = engine.core.stats();
    assert_eq!(
        (stats.num_blocks, stats.free_blocks),
        (11, 4),
        "the null block is the twelfth"
    );
    assert_eq!((stats.allocated_tokens, stats.filled_tokens), (28, 17 + 6));
    engine.commit();
    engine.run();
    assert_eq!(engine.core.stats().free_blocks, 11);
}

#[test]
fn three_prompts_with_the_same_beginning_store_it_once_and_then_split() {
    let texts = [
        "你是一个AI助手，帮我写一首诗",
        "你是一个AI助手，帮我算一下1+1",
        "你是一个AI助手，分析以下代码",
    ];
    let mut ids: BTreeMap<char, u32> = BTreeMap::new();
    let mut tokens = |text: &str| -> Vec<u32> {
        text.chars()
            .map(|char| {
                let next = ids.len() as u32;
                *ids.entry(char).or_insert(next)
            })
            .collect()
    };
    let prompts = texts.map(&mut tokens);
    // "你是一个AI助手，" is nine tokens, and the first two go on with "帮我" to eleven.
    let mut engine = Engine::new(CoreConfig {
        block_size: 1,
        ..config()
    });
    for (id, prompt) in prompts.iter().enumerate() {
        engine.add(request(id as u64, prompt, 2));
    }
    engine.schedule();
    let tables: Vec<Vec<u32>> = (0..3)
        .map(|slot| engine.device.table(slot).to_vec())
        .collect();
    let common = |a: &[u32], b: &[u32]| a.iter().zip(b).take_while(|(a, b)| a == b).count();
    assert_eq!(common(&tables[0], &tables[1]), 11);
    assert_eq!(common(&tables[0], &tables[2]), 9);
    assert_eq!(common(&tables[1], &tables[2]), 9);
    let lens = prompts.each_ref().map(|prompt| prompt.len() as u32);
    let stored = lens.iter().sum::<u32>() - 11 - 9;
    assert_eq!(
        engine.core.stats().cached_blocks,
        stored,
        "every token of the tree is stored once"
    );
    assert_eq!(engine.core.stats().hit_tokens, 11 + 9);
    engine.commit();
    engine.run();
}

#[test]
fn a_block_that_is_computed_in_a_step_is_hit_in_the_same_step() {
    let mut engine = Engine::new(config());
    for id in 1..=3 {
        engine.add(request(id, &prompt(1, 17), 4));
    }
    assert_eq!(engine.step(), [17, 1, 1]);
    engine.run();
    assert_eq!(engine.told(1).num_cached_tokens, 0);
    assert_eq!(engine.told(2).num_cached_tokens, 16);
    assert_eq!(engine.told(1).tokens, engine.told(3).tokens);
}

#[test]
fn the_last_known_token_is_computed_even_if_it_is_cached() {
    let mut engine = Engine::new(config());
    engine.add(request(1, &prompt(1, 16), 1));
    engine.run();
    engine.add(request(2, &prompt(1, 16), 1));
    engine.run();
    assert_eq!(engine.told(2).num_cached_tokens, 12);
}

#[test]
fn a_newcomer_gets_its_first_token_before_a_long_prompt_is_done() {
    let config = CoreConfig {
        max_model_len: 8000,
        num_blocks: 4001,
        max_num_batched_tokens: 512,
        ..config()
    };
    let mut engine = Engine::new(config);
    engine.add(request(1, &prompt(1, 20), 40));
    engine.step();
    engine.add(request(2, &prompt(2, 7000), 2));
    engine.add(request(3, &prompt(3, 20), 2));
    // The decode row first, three quarters for the long prompt, then the newcomer; what is left goes to the long one after all.
    assert_eq!(engine.step(), [1, 491, 20]);
    assert!(engine.has_told(3) && !engine.has_told(2));
    engine.run();
    assert_eq!(engine.told(1).tokens.len(), 40);
    assert!(engine.told(2).first_at > engine.told(3).first_at);
}

#[test]
fn a_prompt_alone_takes_the_whole_budget() {
    let mut engine = Engine::new(config());
    engine.add(request(1, &prompt(1, 150), 2));
    assert_eq!(
        [engine.step(), engine.step(), engine.step()],
        [[64], [64], [22]]
    );
}

#[test]
fn chunks_of_any_size_give_the_same_tokens() {
    let wanted = alone(&config(), &request(1, &prompt(1, 50), 12), 0);
    for budget in [1, 7, 16, 17, 64, 1000] {
        for max_in_flight in 1..=3 {
            let config = CoreConfig {
                max_num_batched_tokens: budget,
                max_in_flight,
                ..config()
            };
            let mut engine = Engine::new(config);
            engine.add(request(1, &prompt(1, 50), 12));
            engine.add(request(2, &prompt(2, 9), 5));
            engine.run();
            assert_eq!(
                engine.told(1).tokens,
                wanted.0,
                "budget {budget}, {max_in_flight} in flight"
            );
        }
    }
}

#[test]
fn six_requests_in_a_pool_for_two_are_preempted_and_go_on_where_they_were() {
    for max_in_flight in 1..=3 {
        let config = CoreConfig {
            num_blocks: 30,
            max_in_flight,
            ..config()
        };
        let mut engine = Engine::new(config.clone());
        for id in 1..=6 {
            engine.add(request(id, &prompt(id as u32, 10), 45));
        }
        engine.run();
        assert!(engine.core.stats().preemptions > 0);
        for id in 1..=6 {
            let told = engine.told(id);
            let wanted = alone(&config, &request(id, &prompt(id as u32, 10), 45), 0);
            assert_eq!(
                (told.tokens.clone(), told.finish),
                (wanted.0, Some(wanted.1))
            );
        }
        assert_eq!(engine.finished.len(), 6);
        assert_eq!(
            engine.told(1).num_preemptions,
            0,
            "the oldest is never preempted"
        );
    }
}

#[test]
fn the_last_of_the_lowest_priority_is_preempted_and_is_the_next_to_be_admitted() {
    let mut engine = Engine::new(CoreConfig {
        num_blocks: 10,
        ..config()
    });
    engine.add(AddRequest {
        priority: 5,
        ..request(1, &prompt(1, 11), 5)
    });
    engine.add(AddRequest {
        priority: 0,
        ..request(2, &prompt(2, 11), 5)
    });
    engine.add(AddRequest {
        priority: 0,
        ..request(3, &prompt(3, 11), 5)
    });
    engine.step();
    engine.add(AddRequest {
        priority: 5,
        ..request(4, &prompt(4, 3), 2)
    });
    // Nine blocks are full after 12 tokens each: at the 13th, request 1 has to go though it came first.
    while engine.core.stats().preemptions == 0 {
        engine.step();
    }
    assert_eq!(engine.core.num_running(), 2);
    let produced = engine.told(1).tokens.len();
    while !engine.has_told(4) {
        engine.step();
    }
    assert!(
        engine.told(1).tokens.len() > produced,
        "request 4 does not go before the one that was preempted"
    );
    engine.run();
    let preemptions = [1, 2, 3, 4].map(|id| engine.told(id).num_preemptions);
    assert_eq!(preemptions, [1, 0, 0, 0]);
}

#[test]
fn blocks_released_while_a_step_is_in_flight_come_free_at_its_commit() {
    let mut engine = Engine::new(CoreConfig {
        max_in_flight: 2,
        enable_prefix_caching: false,
        ..config()
    });
    engine.add(request(1, &prompt(1, 10), 20));
    engine.schedule();
    engine.schedule();
    engine.core.abort(RequestId(1));
    let stats = engine.core.stats();
    assert_eq!((stats.coming_blocks, stats.free_blocks), (3, 61));
    engine.commit();
    assert_eq!(
        engine.core.stats().coming_blocks,
        3,
        "the second step still sees them"
    );
    engine.commit();
    let stats = engine.core.stats();
    assert_eq!((stats.coming_blocks, stats.free_blocks), (0, 64));
}

#[test]
fn coming_blocks_are_waited_for_before_anyone_else_is_preempted() {
    let mut engine = Engine::new(CoreConfig {
        num_blocks: 10,
        max_in_flight: 2,
        ..config()
    });
    for id in 1..=3 {
        engine.add(request(id, &prompt(id as u32, 11), 5));
    }
    while engine.core.stats().preemptions == 0 {
        engine.schedule();
        if engine.in_flight.len() == 2 {
            engine.commit();
        }
    }
    assert!(engine.core.stats().coming_blocks > 0);
    assert_eq!(
        (engine.core.stats().preemptions, engine.core.num_running()),
        (1, 2)
    );
    engine.run();
    assert_eq!(engine.told(2).num_preemptions, 0);
}

#[test]
fn a_request_that_fills_the_whole_pool_ends_with_length() {
    let config = CoreConfig {
        num_blocks: 6,
        ..config()
    };
    let mut engine = Engine::new(config);
    engine.add(request(1, &prompt(1, 6), 100));
    engine.run();
    // 20 tokens have their KV in 5 blocks; the 21st needs none.
    assert_eq!(
        (engine.told(1).tokens.len(), engine.told(1).finish),
        (15, Some(FinishReason::Length))
    );
}

#[test]
fn abort_in_every_state_gives_all_blocks_back() {
    let config = CoreConfig {
        max_num_seqs: 2,
        num_blocks: 20,
        max_in_flight: 2,
        ..config()
    };
    let mut engine = Engine::new(config);
    // Running, running and to be preempted, waiting, held (a second choice).
    engine.add(request(1, &prompt(1, 30), 100));
    engine.add(request(2, &prompt(2, 30), 100));
    engine.add(request(3, &prompt(3, 30), 100));
    engine.add(AddRequest {
        params: SamplingParams { n: 3, ..params(10) },
        ..request(4, &prompt(4, 70), 10)
    });
    while engine.core.stats().preemptions == 0 {
        engine.schedule();
        if engine.in_flight.len() == 2 {
            engine.commit();
        }
    }
    assert!(
        engine.core.num_in_flight() > 0,
        "request 2 is preempted with a row in flight"
    );
    for (id, choices) in [(2, 1), (4, 3), (1, 1), (3, 1)] {
        assert_eq!(engine.core.abort(RequestId(id)), choices);
        engine.core.check_integrity().unwrap();
    }
    engine.take_ended();
    assert_eq!(engine.finished.len(), 6);
    while !engine.in_flight.is_empty() {
        engine.commit();
    }
    assert_eq!(engine.available(), 19);
    assert!(!engine.core.has_work());
    // Mid-prefill.
    engine.add(request(5, &prompt(5, 75), 1));
    engine.schedule();
    engine.core.abort(RequestId(5));
    engine.commit();
    assert_eq!(engine.available(), 19);
    engine.add(request(6, &prompt(6, 70), 2));
    engine.run();
    assert_eq!(engine.told(6).finish, Some(FinishReason::Length));
}

#[test]
fn with_one_slot_an_urgent_request_goes_before_eight_that_came_earlier() {
    let mut engine = Engine::new(CoreConfig {
        max_num_seqs: 1,
        ..config()
    });
    for id in 1..=8 {
        engine.add(AddRequest {
            priority: 3,
            ..request(id, &prompt(id as u32, 6), 2)
        });
    }
    engine.step();
    engine.add(AddRequest {
        priority: -1,
        ..request(9, &prompt(9, 6), 2)
    });
    engine.run();
    assert_eq!(engine.finished[..3], [(1, 0), (9, 0), (2, 0)]);
}

#[test]
fn a_tenant_with_many_requests_does_not_keep_another_waiting() {
    let mut engine = Engine::new(CoreConfig {
        max_num_seqs: 1,
        ..config()
    });
    for id in 1..=10 {
        engine.add(request(id, &prompt(id as u32, 20), 4));
    }
    engine.step();
    for id in 11..=12 {
        engine.add(AddRequest {
            tenant: TenantId(7),
            ..request(id, &prompt(id as u32, 20), 4)
        });
    }
    engine.run();
    let order: Vec<u64> = engine.finished.iter().map(|&(id, _)| id).collect();
    assert_eq!(order[..5], [1, 11, 2, 12, 3], "the tenants take turns");
}

#[test]
fn a_tenant_that_paused_does_not_catch_up_on_what_it_did_not_ask_for() {
    let mut engine = Engine::new(CoreConfig {
        max_num_seqs: 1,
        ..config()
    });
    engine.add(AddRequest {
        tenant: TenantId(7),
        ..request(1, &prompt(1, 20), 4)
    });
    engine.run();
    for id in 2..=12 {
        engine.add(request(id, &prompt(id as u32, 20), 4));
    }
    while engine.finished.len() < 6 {
        engine.step();
    }
    for id in 13..=18 {
        engine.add(AddRequest {
            tenant: TenantId(7),
            ..request(id, &prompt(id as u32, 20), 4)
        });
    }
    engine.run();
    let order: Vec<u64> = engine.finished[6..].iter().map(|&(id, _)| id).collect();
    let returned = order[..6].iter().filter(|&&id| id >= 13).count();
    assert!((2..=4).contains(&returned), "{order:?}");
}

#[test]
fn the_longest_cached_prefix_goes_first_but_passes_nobody_more_than_16_times() {
    let mut engine = Engine::new(CoreConfig {
        max_num_seqs: 1,
        ..config()
    });
    engine.add(request(100, &prompt(1, 20), 1));
    engine.run();
    engine.add(request(101, &prompt(7, 20), 1));
    for id in 1..=30 {
        engine.add(request(id, &prompt(1, 20), 1));
    }
    engine.run();
    let place = engine
        .finished
        .iter()
        .position(|&(id, _)| id == 101)
        .unwrap();
    assert_eq!(
        place,
        1 + 16,
        "the one without a cached prefix came first and is admitted after 16 others"
    );
}
