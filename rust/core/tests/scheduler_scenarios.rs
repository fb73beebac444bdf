//! What the scheduler does, one sentence a test.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::{BTreeMap, VecDeque};

use common::{Device, DeviceStep, make_seed, run_alone};
use octavo_core::config::{ConfigError, CoreConfig};
use octavo_core::ids::{RequestId, StepId, TenantId};
use octavo_core::output::{CommitError, FinishReason, Output, StepResults};
use octavo_core::params::SamplingParams;
use octavo_core::plan::{flags, header};
use octavo_core::request::{AddError, AddRequest};
use octavo_core::scheduler::Core;

/// The tokens of one choice, and how it ended.
#[derive(Clone, Debug, Default, PartialEq)]
struct Told {
    tokens: Vec<u32>,
    finish: Option<FinishReason>,
    num_cached_tokens: u32,
    num_preemptions: u32,
    /// Steps committed when its first token came.
    first_at: Option<u64>,
}

/// A control plane on the device that checks every plan.
struct Engine {
    core: Core,
    device: Device,
    buffer: Vec<i32>,
    in_flight: VecDeque<DeviceStep>,
    told: BTreeMap<(u64, u32), Told>,
    finished: Vec<(u64, u32)>,
}

fn config() -> CoreConfig {
    CoreConfig {
        block_size: 4,
        num_blocks: 65,
        max_num_seqs: 8,
        max_num_batched_tokens: 64,
        max_model_len: 200,
        vocab_size: 1000,
        watermark: 0.0,
        ..CoreConfig::default()
    }
}

fn params(max_tokens: u32) -> SamplingParams {
    SamplingParams {
        max_tokens,
        seed: make_seed(0, 0, 1),
        ..SamplingParams::default()
    }
}

fn request(id: u64, prompt: &[u32], max_tokens: u32) -> AddRequest {
    AddRequest::new(RequestId(id), prompt.to_vec(), params(max_tokens))
}

/// A prompt that shares nothing with those of other numbers.
fn prompt(number: u32, len: u32) -> Vec<u32> {
    (0..len)
        .map(|i| {
            if i == 0 {
                number
            } else {
                (number * 37 + i * 11) % 1000
            }
        })
        .collect()
}

impl Engine {
    fn new(config: CoreConfig) -> Self {
        let core = Core::new(config.clone()).unwrap();
        Self {
            buffer: vec![0; core.layout().total_words],
            core,
            device: Device::new(&config),
            in_flight: VecDeque::new(),
            told: BTreeMap::new(),
            finished: Vec::new(),
        }
    }

    fn add(&mut self, request: AddRequest) {
        self.core.add(request).unwrap();
        self.core.check_integrity().unwrap();
    }

    /// Query tokens of each row of the next step, in plan order; none if nothing can be scheduled.
    fn schedule(&mut self) -> Option<Vec<usize>> {
        let scheduled = self.core.schedule(&mut self.buffer);
        self.core.check_integrity().unwrap();
        scheduled?;
        let step = self.device.run(&self.buffer);
        let queries = step.rows.iter().map(|row| row.query).collect();
        self.in_flight.push_back(step);
        Some(queries)
    }

    fn commit(&mut self) {
        let step = self.in_flight.pop_front().unwrap();
        let Self {
            core,
            told,
            finished,
            ..
        } = self;
        core.commit(&step.results(true), &mut |output: Output<'_>| {
            note(told, finished, step.id, &output)
        })
        .unwrap();
        self.core.check_integrity().unwrap();
    }

    fn step(&mut self) -> Vec<usize> {
        let queries = self.schedule().expect("something to schedule");
        self.commit();
        queries
    }

    fn take_ended(&mut self) {
        let Self {
            core,
            told,
            finished,
            ..
        } = self;
        core.take_ended(&mut |output: Output<'_>| note(told, finished, StepId(0), &output));
        self.core.check_integrity().unwrap();
    }

    fn run(&mut self) {
        for _ in 0..10_000 {
            if !self.core.has_work() {
                return;
            }
            while self.schedule().is_some() {}
            if !self.in_flight.is_empty() {
                self.commit();
            }
        }
        panic!("no end");
    }

    fn told(&self, id: u64) -> &Told {
        &self.told[&(id, 0)]
    }

    fn has_told(&self, id: u64) -> bool {
        self.told.contains_key(&(id, 0))
    }

    fn available(&self) -> u32 {
        let stats = self.core.stats();
        stats.free_blocks + stats.evictable_blocks
    }
}

fn note(
    told: &mut BTreeMap<(u64, u32), Told>,
    finished: &mut Vec<(u64, u32)>,
    step: StepId,
    output: &Output<'_>,
) {
    let key = (output.id.0, output.choice);
    let told = told.entry(key).or_default();
    assert_eq!(told.finish, None);
    told.tokens.extend_from_slice(output.tokens);
    told.finish = output.finish;
    told.num_cached_tokens = output.num_cached_tokens;
    told.num_preemptions = output.num_preemptions;
    if !output.tokens.is_empty() {
        told.first_at.get_or_insert(step.0);
    }
    if output.finish.is_some() {
        finished.push(key);
    }
}

fn alone(config: &CoreConfig, request: &AddRequest, choice: u32) -> (Vec<u32>, FinishReason) {
    let (tokens, finish) = run_alone(config, request, choice);
    (tokens[request.tokens.len()..].to_vec(), finish)
}

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
fn a_stop_inside_an_accepted_run_cuts_what_follows() {
    let config = CoreConfig {
        max_draft_tokens: 4,
        ..config()
    };
    let (all, _) = alone(&config, &request(1, &prompt(1, 6), 40), 0);
    let mut cut_inside = 0;
    for &last in &all[2..30] {
        let mut stopping = request(1, &prompt(1, 6), 40);
        stopping.params.stop_token_ids = vec![last];
        let wanted = alone(&config, &stopping, 0);
        let mut engine = Engine::new(config.clone());
        engine.add(stopping);
        while engine.core.has_work() {
            engine.schedule();
            let accepted = engine.in_flight[0].num_sampled[0] as usize;
            let before = engine.told.get(&(1, 0)).map_or(0, |told| told.tokens.len());
            engine.commit();
            cut_inside += usize::from(engine.told(1).tokens.len() < before + accepted);
        }
        assert_eq!(
            (engine.told(1).tokens.clone(), engine.told(1).finish),
            (wanted.0, Some(wanted.1))
        );
    }
    assert!(
        cut_inside > 5,
        "stops came inside an accepted run {cut_inside} times only"
    );
}

#[test]
fn a_stop_at_the_last_token_of_the_budget_wins_over_length() {
    let (all, _) = alone(&config(), &request(1, &prompt(1, 6), 8), 0);
    for (max_tokens, finish) in [(8, FinishReason::Stop(all[7])), (7, FinishReason::Length)] {
        let mut engine = Engine::new(config());
        let mut stopping = request(1, &prompt(1, 6), max_tokens);
        stopping.params.stop_token_ids = vec![all[7]];
        engine.add(stopping);
        engine.run();
        assert_eq!(engine.told(1).finish, Some(finish));
    }
}

#[test]
fn stop_ids_of_the_user_count_under_ignore_eos_and_those_of_the_model_do_not() {
    let (all, _) = alone(&config(), &request(1, &prompt(1, 6), 20), 0);
    let mut engine = Engine::new(config());
    let mut stopping = request(1, &prompt(1, 6), 20);
    stopping.params.eos_token_ids = vec![all[2], all[4]];
    let mut ignoring = AddRequest {
        id: RequestId(2),
        ..stopping.clone()
    };
    ignoring.params.ignore_eos = true;
    let mut both = AddRequest {
        id: RequestId(3),
        ..ignoring.clone()
    };
    both.params.stop_token_ids = vec![all[5]];
    for request in [stopping, ignoring, both] {
        engine.add(request);
    }
    engine.run();
    assert_eq!(engine.told(1).finish, Some(FinishReason::Eos(all[2])));
    assert_eq!(
        (engine.told(2).finish, engine.told(2).tokens.len()),
        (Some(FinishReason::Length), 20)
    );
    assert_eq!(engine.told(3).finish, Some(FinishReason::Stop(all[5])));
}

#[test]
fn nothing_stops_before_min_tokens_and_the_prompt_does_not_count() {
    let (all, _) = alone(&config(), &request(1, &prompt(1, 40), 20), 0);
    let mut engine = Engine::new(config());
    let mut stopping = request(1, &prompt(1, 40), 20);
    stopping.params.min_tokens = 8;
    stopping.params.eos_token_ids = all[..10].to_vec();
    engine.add(stopping);
    engine.schedule();
    assert_ne!(
        engine.in_flight[0].rows[0].flags & flags::BIAS,
        0,
        "a pending min_tokens bans the stop ids"
    );
    engine.commit();
    engine.run();
    assert_eq!(
        (engine.told(1).tokens.len(), engine.told(1).finish),
        (9, Some(FinishReason::Eos(all[8])))
    );
}

#[test]
fn no_row_is_scheduled_for_tokens_that_are_in_flight_already() {
    let mut engine = Engine::new(CoreConfig {
        max_in_flight: 3,
        ..config()
    });
    engine.add(request(1, &prompt(1, 6), 2));
    assert!(engine.schedule().is_some() && engine.schedule().is_some());
    assert_eq!(engine.schedule(), None);
    engine.run();
    assert_eq!(engine.told(1).tokens.len(), 2);
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

#[test]
fn choices_wait_for_the_prompt_and_then_share_its_blocks() {
    for enable_prefix_caching in [true, false] {
        let config = CoreConfig {
            enable_prefix_caching,
            ..config()
        };
        let mut engine = Engine::new(config.clone());
        let many = AddRequest {
            params: SamplingParams { n: 4, ..params(6) },
            ..request(1, &prompt(1, 70), 6)
        };
        engine.add(many.clone());
        assert_eq!(
            engine.step(),
            [64],
            "the others wait while the prompt is not scheduled"
        );
        assert_eq!(engine.step(), [6, 2, 2, 2]);
        let tables: Vec<Vec<u32>> = (0..4)
            .map(|slot| engine.device.table(slot).to_vec())
            .collect();
        for table in &tables[1..] {
            assert_eq!(table[..17], tables[0][..17]);
            assert_ne!(table[17], tables[0][17]);
        }
        engine.run();
        for choice in 0..4 {
            assert_eq!(
                engine.told[&(1, choice)].tokens,
                alone(&config, &many, choice).0
            );
        }
    }
}

#[test]
fn a_choice_takes_over_the_prompt_if_the_first_is_aborted() {
    let mut engine = Engine::new(config());
    engine.add(AddRequest {
        params: SamplingParams { n: 3, ..params(6) },
        ..request(1, &prompt(1, 70), 6)
    });
    engine.schedule();
    assert!(engine.core.abort_choice(RequestId(1), 0));
    assert!(!engine.core.abort_choice(RequestId(1), 0));
    engine.commit();
    engine.run();
    assert_eq!(engine.told(1).finish, Some(FinishReason::Abort));
    assert_eq!(
        (
            engine.told[&(1, 1)].tokens.len(),
            engine.told[&(1, 2)].tokens.len()
        ),
        (6, 6)
    );
}

#[test]
fn prompt_logprobs_skip_the_look_up_and_still_insert() {
    let mut engine = Engine::new(config());
    engine.add(request(1, &prompt(1, 20), 1));
    engine.run();
    let asking = SamplingParams {
        prompt_logprobs: Some(1),
        ..params(1)
    };
    engine.add(AddRequest {
        params: asking.clone(),
        ..request(2, &prompt(1, 20), 1)
    });
    assert_eq!(engine.step(), [20]);
    engine.add(AddRequest {
        params: asking,
        ..request(3, &prompt(3, 20), 1)
    });
    engine.run();
    engine.add(request(4, &prompt(3, 20), 1));
    engine.run();
    assert_eq!(
        (
            engine.told(2).num_cached_tokens,
            engine.told(4).num_cached_tokens
        ),
        (0, 16)
    );
}

#[test]
fn a_request_the_device_cannot_compute_fails_alone() {
    let mut engine = Engine::new(CoreConfig {
        max_in_flight: 2,
        ..config()
    });
    let failing = SamplingParams {
        seed: make_seed(0, 3, 1),
        ..params(10)
    };
    engine.add(AddRequest {
        params: failing,
        ..request(1, &prompt(1, 6), 10)
    });
    engine.add(request(2, &prompt(2, 6), 10));
    engine.run();
    assert_eq!(
        (engine.told(1).tokens.len(), engine.told(1).finish),
        (2, Some(FinishReason::Error))
    );
    assert_eq!(
        (engine.told(2).tokens.len(), engine.told(2).finish),
        (10, Some(FinishReason::Length))
    );
}

#[test]
fn a_request_that_can_never_run_is_refused_with_the_reason() {
    let mut core = Core::new(CoreConfig {
        num_blocks: 11,
        ..config()
    })
    .unwrap();
    let tried = |core: &mut Core, request: AddRequest| core.add(request).unwrap_err();
    assert_eq!(tried(&mut core, request(1, &[], 1)), AddError::EmptyPrompt);
    assert!(matches!(
        tried(&mut core, request(1, &prompt(1, 41), 1)),
        AddError::PoolTooSmall {
            needed: 11,
            num_blocks: 10,
            ..
        }
    ));
    assert!(matches!(
        tried(&mut core, request(1, &prompt(1, 200), 1)),
        AddError::ContextLengthExceeded { .. }
    ));
    assert!(matches!(
        tried(&mut core, request(1, &[5, 1000], 1)),
        AddError::OutOfVocabulary { position: 1, .. }
    ));
    assert_eq!(
        tried(&mut core, request(1, &[5], 0)),
        AddError::Zero("max_tokens")
    );
    let long = SamplingParams {
        bad_words: vec![vec![1; 7000]],
        ..params(1)
    };
    let long = AddRequest {
        params: long,
        ..request(1, &[5], 1)
    };
    assert!(matches!(
        tried(&mut core, long),
        AddError::ListsTooLong { words: 7001, .. }
    ));
    core.add(request(1, &prompt(1, 40), 1)).unwrap();
    assert!(matches!(
        tried(&mut core, request(1, &[5], 1)),
        AddError::Duplicate { choice: 0, .. }
    ));
    core.check_integrity().unwrap();
}

#[test]
fn results_that_do_not_belong_to_the_step_change_nothing() {
    let mut engine = Engine::new(config());
    engine.add(request(1, &prompt(1, 6), 3));
    engine.schedule();
    let good = StepResults {
        step_id: StepId(1),
        tokens: &[5],
        num_sampled: &[1],
        next_drafts: None,
    };
    let bad = [
        StepResults {
            step_id: StepId(2),
            ..good
        },
        StepResults {
            tokens: &[5, 6],
            ..good
        },
        StepResults {
            num_sampled: &[2],
            ..good
        },
        StepResults {
            num_sampled: &[0],
            ..good
        },
        StepResults {
            tokens: &[1000],
            ..good
        },
    ];
    for results in bad {
        let error = engine.core.commit(&results, &mut |_: Output<'_>| {
            panic!("an output of {results:?}")
        });
        assert!(error.is_err());
        assert_eq!(engine.core.num_in_flight(), 1);
    }
    engine.commit();
    let error = engine
        .core
        .commit(&good, &mut |_: Output<'_>| ())
        .unwrap_err();
    assert_eq!(error, CommitError::NothingInFlight(StepId(1)));
}

#[test]
fn a_slot_init_entry_holds_all_parameters_and_lists_in_the_order_of_the_contract() {
    let mut engine = Engine::new(config());
    let params = SamplingParams {
        seed: 0x1234_5678_9abc_def0,
        temperature: 0.7,
        top_k: 40,
        top_p: 0.9,
        min_p: 0.05,
        presence_penalty: 0.1,
        frequency_penalty: 0.2,
        repetition_penalty: 1.3,
        max_tokens: 9,
        min_tokens: 2,
        stop_token_ids: vec![8, 3],
        eos_token_ids: vec![2],
        logprobs: Some(5),
        logit_bias: vec![(4, -1.5), (6, 2.0)],
        bad_words: vec![vec![10, 11], vec![12]],
        allowed_token_ids: vec![20, 21, 22],
        ..SamplingParams::default()
    };
    let resumed = AddRequest {
        first_choice: 6,
        num_prompt_tokens: 2,
        ..AddRequest::new(RequestId(1), vec![30, 31, 32], params)
    };
    engine.add(resumed);
    engine.schedule();
    let plan = &engine.buffer;
    assert_eq!(plan[header::NUM_SLOT_INITS], 1);
    let at = plan[header::SLOT_INITS_OFFSET] as usize;
    let float = |value: f32| value.to_bits() as i32;
    let param_flags =
        flags::LOGPROBS | flags::PENALTIES | flags::RANDOM | flags::FILTER | flags::BIAS;
    let expected = [
        41,
        0,
        2,
        3,
        6,
        0x9abc_def0_u32 as i32,
        0x1234_5678,
        float(0.7),
        float(0.9),
        float(0.05),
        float(0.1),
        float(0.2),
        float(1.3),
        40,
        2,
        9,
        5,
        -1,
        param_flags,
        2,
        3,
        2,
        3, // header
        4,
        float(-1.5),
        6,
        float(2.0),
        2,
        3,
        8,
        2,
        10,
        11,
        1,
        12,
        20,
        21,
        22,
        30,
        31,
        32,
    ];
    assert_eq!(plan[at..plan[header::USED_WORDS] as usize], expected);
    assert_eq!(engine.in_flight[0].rows[0].flags & param_flags, param_flags);
}

#[test]
fn an_unusable_configuration_is_refused_by_the_name_of_its_field() {
    let error = |config: CoreConfig| Core::new(config).unwrap_err();
    let zero = error(CoreConfig {
        max_num_seqs: 0,
        ..config()
    });
    assert!(matches!(
        zero,
        ConfigError::OutOfRange {
            field: "max_num_seqs",
            value: 0,
            ..
        }
    ));
    assert!(zero.to_string().starts_with("max_num_seqs = 0"));
    assert_eq!(
        error(CoreConfig {
            watermark: 1.0,
            ..config()
        }),
        ConfigError::Watermark(1.0)
    );
    assert_eq!(
        error(CoreConfig {
            groups: Vec::new(),
            ..config()
        }),
        ConfigError::Groups(0)
    );
    let drafts = CoreConfig {
        max_draft_tokens: 2,
        max_in_flight: 2,
        host_state: true,
        ..config()
    };
    assert!(matches!(
        error(drafts),
        ConfigError::HostStateWithDrafts { .. }
    ));
}
