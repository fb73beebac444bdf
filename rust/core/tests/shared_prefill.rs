//! Requests that begin alike and come together: what one of them is computing, the others wait for.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use common::engine::{Engine, config, params, prompt, request};
use common::{make_seed, mix};
use octavo_core::config::{CacheGroup, CoreConfig};
use octavo_core::ids::{Namespace, RequestId, TenantId};
use octavo_core::output::{Output, StepResults};
use octavo_core::params::SamplingParams;
use octavo_core::plan::{flags, header};
use octavo_core::request::AddRequest;
use octavo_core::scheduler::Core;
use proptest::prelude::*;

/// Query tokens of each step of 64 requests with a beginning of `common` tokens and 32 of their own, until each has its first token.
fn burst(common: u32, budget: u32, max_in_flight: u32) -> Vec<u32> {
    let mut core = Core::new(CoreConfig {
        num_blocks: 2000,
        max_num_batched_tokens: budget,
        max_num_seqs: 256,
        max_model_len: 16_384,
        max_in_flight,
        ..CoreConfig::default()
    })
    .unwrap();
    for id in 0..64 {
        let shared = (0..common).map(|i| i % 997);
        let own = (0..32).map(|i| 1000 + id as u32 * 32 + i);
        let params = SamplingParams {
            max_tokens: 1,
            ..SamplingParams::default()
        };
        core.add(AddRequest::new(
            RequestId(id),
            shared.chain(own).collect(),
            params,
        ))
        .unwrap();
    }
    let mut buffer = vec![0; core.layout().total_words];
    let (mut steps, mut in_flight) = (Vec::new(), VecDeque::new());
    while core.has_work() {
        while let Some(id) = core.schedule(&mut buffer) {
            core.check_integrity().unwrap();
            steps.push(buffer[header::NUM_TOKENS] as u32);
            let rows = buffer[header::NUM_ROWS] as usize;
            let row_flags = &buffer[core.layout().flags..][..rows];
            let samples = row_flags
                .iter()
                .map(|row| i32::from(row & flags::SAMPLE != 0));
            in_flight.push_back((id, samples.collect::<Vec<i32>>()));
        }
        let (step_id, num_sampled) = in_flight.pop_front().unwrap();
        let results = StepResults {
            step_id,
            tokens: &vec![5; num_sampled.len()],
            num_sampled: &num_sampled,
            next_drafts: None,
        };
        core.commit(&results, &mut |_: Output<'_>| ()).unwrap();
        core.check_integrity().unwrap();
    }
    steps
}

#[test]
fn a_burst_computes_its_common_beginning_once() {
    for max_in_flight in [1, 2] {
        assert_eq!(burst(8192, 8192, max_in_flight), [8192, 64 * 32]);
        assert_eq!(
            burst(8192, 2048, max_in_flight),
            [2048; 5],
            "four steps for the beginning, one for what is everyone's own"
        );
    }
}

/// A request whose first `common` tokens are those of all others, and three of its own.
fn alike(id: u64, common: u32) -> AddRequest {
    let own = (0..3).map(|i| 900 + id as u32 * 3 + i);
    let tokens: Vec<u32> = prompt(1, common).into_iter().chain(own).collect();
    request(id, &tokens, 2)
}

/// An engine that has computed the first step of a long prompt, number 1.
fn engine_in_a_long_prefill(config: CoreConfig) -> Engine {
    let mut engine = Engine::new(CoreConfig {
        num_blocks: 200,
        ..config
    });
    engine.add(alike(1, 180));
    assert_eq!(engine.step(), [64]);
    engine
}

#[test]
fn who_begins_like_a_running_prefill_waits_for_it_and_then_computes_only_its_own() {
    let window = vec![CacheGroup::Full, CacheGroup::Window { window: 10 }];
    for groups in [vec![CacheGroup::Full], window] {
        let mut engine = Engine::new(CoreConfig {
            num_blocks: 200,
            groups,
            ..config()
        });
        for id in 1..=3 {
            engine.add(alike(id, 100));
        }
        assert_eq!(engine.step(), [64]);
        assert_eq!(engine.step(), [39, 3, 3]);
        engine.run();
        let cached = [1, 2, 3].map(|id| engine.told(id).num_cached_tokens);
        assert_eq!(cached, [0, 100, 100]);
    }
}

#[test]
fn a_step_with_room_takes_those_who_waited_for_it_as_well() {
    let mut engine = Engine::new(config());
    for id in 1..=2 {
        engine.add(alike(id, 56));
    }
    assert_eq!(engine.step(), [59, 3]);
    engine.run();
}

#[test]
fn choices_wait_for_another_request_as_well() {
    let mut engine = Engine::new(CoreConfig {
        num_blocks: 200,
        ..config()
    });
    engine.add(alike(1, 100));
    engine.add(AddRequest {
        params: SamplingParams { n: 3, ..params(2) },
        ..alike(2, 100)
    });
    assert_eq!(engine.step(), [64]);
    assert_eq!(engine.step(), [39, 3, 3, 3]);
    engine.run();
    assert_eq!(engine.finished.len(), 4);
}

#[test]
fn others_go_past_one_that_is_held_back_whatever_their_tenant_and_class() {
    for (tenant, priority) in [(0, 0), (7, 0), (0, 3), (7, 3)] {
        let mut engine = engine_in_a_long_prefill(config());
        engine.add(alike(2, 180));
        engine.add(AddRequest {
            tenant: TenantId(tenant),
            priority,
            ..request(3, &prompt(9, 10), 2)
        });
        assert_eq!(
            engine.step(),
            [54, 10],
            "tenant {tenant}, priority {priority}"
        );
        assert!(engine.has_told(3) && !engine.has_told(2));
        engine.run();
        assert_eq!(engine.told(2).num_cached_tokens, 180);
    }
}

#[test]
fn a_less_urgent_class_leaves_slots_to_those_held_back() {
    let mut engine = engine_in_a_long_prefill(CoreConfig {
        max_num_seqs: 3,
        ..config()
    });
    engine.add(alike(2, 180));
    for id in 3..=4 {
        engine.add(AddRequest {
            priority: 3,
            ..request(id, &prompt(id as u32, 5), 30)
        });
    }
    assert_eq!(engine.step().len(), 2, "of two free slots, one is kept");
    while !engine.has_told(2) {
        engine.step();
    }
    assert!(engine.has_told(3) && !engine.has_told(4));
    engine.run();
}

#[test]
fn a_more_urgent_request_does_not_wait_for_a_less_urgent_one() {
    for (priority, wanted) in [(0, vec![64]), (1, vec![64]), (-1, vec![48, 16])] {
        let mut engine = engine_in_a_long_prefill(config());
        engine.add(AddRequest {
            priority,
            ..alike(2, 180)
        });
        assert_eq!(engine.step(), wanted, "priority {priority}");
        engine.run();
    }
}

#[test]
fn nobody_waits_for_what_it_cannot_take() {
    let with_prompt_logprobs = AddRequest {
        params: SamplingParams {
            prompt_logprobs: Some(0),
            ..params(2)
        },
        ..alike(2, 180)
    };
    let of_another_namespace = AddRequest {
        namespace: Namespace(1),
        params: SamplingParams {
            seed: make_seed(1, 0, 1),
            ..params(2)
        },
        ..alike(2, 180)
    };
    // Request 1 gets 48 tokens first, to position 112. What it computes next is request 2's last block, which is not looked up.
    let mut engine = engine_in_a_long_prefill(config());
    engine.add(request(2, &prompt(1, 116), 2));
    assert_eq!(engine.step(), [60, 4]);
    engine.run();
    // Or the two part there.
    let mut engine = engine_in_a_long_prefill(config());
    let tokens: Vec<u32> = prompt(1, 112).into_iter().chain(900..908).collect();
    engine.add(request(2, &tokens, 2));
    assert_eq!(engine.step(), [56, 8]);
    engine.run();
    for other in [with_prompt_logprobs, of_another_namespace] {
        let mut engine = engine_in_a_long_prefill(config());
        engine.add(other);
        assert_eq!(engine.step(), [48, 16]);
        engine.run();
    }
    let mut engine = engine_in_a_long_prefill(CoreConfig {
        enable_prefix_caching: false,
        ..config()
    });
    engine.add(alike(2, 180));
    assert_eq!(engine.step(), [48, 16]);
    engine.run();
}

#[test]
fn after_a_reset_nobody_waits_for_blocks_that_will_not_be_published() {
    let mut engine = engine_in_a_long_prefill(config());
    engine.core.reset_prefix_cache();
    for id in 2..=3 {
        engine.add(alike(id, 180));
    }
    assert_eq!(engine.step(), [52, 12], "request 3 waits for request 2");
    engine.run();
    assert_eq!(engine.told(3).num_cached_tokens, 180);
}

#[test]
fn if_the_one_that_computes_is_aborted_the_next_goes_on_where_it_was() {
    let mut engine = engine_in_a_long_prefill(config());
    for id in 2..=3 {
        engine.add(alike(id, 180));
    }
    engine.core.abort(RequestId(1));
    engine.take_ended();
    assert_eq!(engine.step(), [64]);
    engine.run();
    assert_eq!(engine.told(2).num_cached_tokens, 64);
    assert_eq!(engine.told(3).num_cached_tokens, 180);
}

#[test]
fn one_that_is_to_be_admitted_next_and_becomes_held_back_lets_others_go() {
    let mut engine = Engine::new(CoreConfig {
        num_blocks: 60,
        max_num_batched_tokens: 16,
        ..config()
    });
    engine.add(request(1, &prompt(9, 100), 80));
    engine.add(AddRequest {
        priority: 1,
        ..alike(2, 160)
    });
    while !engine.has_told(1) {
        engine.step();
    }
    assert_eq!(engine.step(), [1], "request 2 has no room");
    engine.add(alike(3, 60));
    engine.add(AddRequest {
        priority: 1,
        ..request(4, &prompt(8, 3), 1)
    });
    assert_eq!(engine.step(), [1, 12, 3]);
    assert!(engine.has_told(4));
    engine.run();
}

#[test]
fn a_preempted_one_waits_as_well_but_nobody_passes_it() {
    let mut engine = Engine::new(CoreConfig {
        num_blocks: 29,
        max_num_batched_tokens: 16,
        ..config()
    });
    // Takes all blocks but one in the end, so that nothing of the others stays cached for long.
    engine.add(AddRequest {
        priority: -1,
        ..request(1, &prompt(9, 60), 45)
    });
    while !engine.has_told(1) {
        engine.step();
    }
    for id in 2..=3 {
        engine.add(AddRequest {
            params: params(30),
            ..alike(id, 40)
        });
    }
    while engine.core.stats().preemptions < 2 {
        engine.step();
    }
    engine.add(request(4, &prompt(5, 3), 1));
    while !engine.finished.contains(&(1, 0)) {
        engine.step();
    }
    let mut steps = Vec::new();
    while !engine.has_told(4) {
        steps.push(engine.step());
    }
    let wanted: [&[usize]; 3] = [&[16], &[16], &[5, 5, 3]];
    assert_eq!(steps, wanted);
    engine.run();
}

#[test]
fn one_that_is_held_back_is_passed_16_times_by_its_tenant_and_no_more() {
    let mut engine = Engine::new(CoreConfig {
        max_model_len: 1200,
        num_blocks: 1000,
        max_num_seqs: 40,
        ..config()
    });
    engine.add(alike(1, 1000));
    engine.step();
    engine.add(alike(2, 1000));
    for id in 3..=30 {
        engine.add(request(id, &prompt(id as u32, 2), 1));
    }
    let firsts: Vec<usize> = (0..3).map(|_| engine.step().len()).collect();
    assert_eq!(firsts, [1 + 8, 1 + 8, 1]);
    engine.add(AddRequest {
        tenant: TenantId(7),
        ..request(31, &prompt(31, 2), 1)
    });
    assert_eq!(engine.step(), [62, 2], "another tenant is not held up");
    engine.run();
    for id in 19..=30 {
        assert!(engine.told(id).first_at >= engine.told(2).first_at);
    }
    assert_eq!(engine.told(2).num_cached_tokens, 1000);
}

/// A prompt: a path through a binary tree of beginnings, and tokens of its own.
#[derive(Clone, Debug)]
struct Branch {
    path: Vec<bool>,
    own_len: u8,
    tenant: u8,
    namespace: bool,
}

#[derive(Clone, Debug)]
enum Op {
    Add(Branch),
    Schedule,
    Commit,
}

/// What brute force knows of the work done.
#[derive(Default)]
struct Work {
    /// Positions computed in blocks that their request could have taken from the cache, and what names a block: the namespace and all
    /// tokens up to its end.
    computed: BTreeSet<(u64, Vec<u32>, usize)>,
    /// Of each request that waits, by id: its tenant, and how often a later one of that tenant went first.
    waiting: BTreeMap<u64, (u8, u32)>,
    num_requests: u64,
}

impl Work {
    /// Looks at the last step scheduled.
    fn see(&mut self, engine: &Engine) {
        let size = engine.core.config().block_size as usize;
        for row in &engine.in_flight.back().unwrap().rows {
            let (seed, prompt) = engine.device.prompt(row.slot);
            let (namespace, id) = (seed >> 32, seed & 0xffff);
            if let Some((tenant, _)) = self.waiting.remove(&id) {
                for (_, passed) in self.waiting.range_mut(..id) {
                    passed.1 += u32::from(passed.0 == tenant);
                    assert!(passed.1 <= 16, "passed by request {id}");
                }
            }
            // The last token is computed whatever is cached, and with it its block.
            let reusable = (prompt.len() - 1) / size * size;
            for position in row.computed..(row.computed + row.query).min(reusable) {
                let block_end = (position / size + 1) * size;
                let is_new =
                    self.computed
                        .insert((namespace, prompt[..block_end].to_vec(), position));
                assert!(
                    is_new,
                    "request {id} computes position {position} once more"
                );
            }
        }
    }
}

fn add(engine: &mut Engine, work: &mut Work, segment: u32, branch: &Branch) {
    let id = work.num_requests;
    work.num_requests += 1;
    let mut tokens = Vec::new();
    let mut node = 1;
    for &right in &branch.path {
        node = 2 * node + u64::from(right);
        tokens.extend((0..u64::from(segment)).map(|i| mix(node, i) as u32 % 500));
    }
    tokens.extend((0..=u32::from(branch.own_len)).map(|i| 500 + (id as u32 * 7 + i) % 500));
    let namespace = u32::from(branch.namespace);
    work.waiting.insert(id, (branch.tenant, 0));
    engine.add(AddRequest {
        params: SamplingParams {
            max_tokens: 1,
            seed: make_seed(namespace, 0, id as u32),
            ..SamplingParams::default()
        },
        tenant: TenantId(u64::from(branch.tenant)),
        namespace: Namespace(u64::from(namespace)),
        ..AddRequest::new(RequestId(id), tokens, SamplingParams::default())
    });
}

prop_compose! {
    fn branch()(
        path in prop::collection::vec(prop::bool::weighted(0.2), 0..7),
        own_len in 0u8..9,
        tenant in prop_oneof![3 => Just(0u8), 1 => 0u8..3],
        namespace in prop::bool::weighted(0.1),
    ) -> Branch {
        Branch { path, own_len, tenant, namespace }
    }
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![6 => branch().prop_map(Op::Add), 2 => Just(Op::Schedule), 2 => Just(Op::Commit)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn in_a_pool_with_room_no_token_that_could_be_shared_is_computed_twice_and_nobody_starves(
        ops in prop::collection::vec(op(), 1..50),
        block_size in prop_oneof![Just(1u32), Just(2), Just(4)],
        segment in 1u32..10,
        max_num_seqs in 1u32..9,
        max_num_batched_tokens in prop_oneof![1u32..40, Just(64)],
        max_in_flight in 1u32..4,
    ) {
        let num_requests = ops.iter().filter(|op| matches!(op, Op::Add(_))).count();
        let mut engine = Engine::new(CoreConfig {
            block_size,
            num_blocks: 2 + num_requests as u32 * 80u32.div_ceil(block_size),
            max_num_seqs,
            max_num_batched_tokens,
            max_model_len: 80,
            max_in_flight,
            ..config()
        });
        let mut work = Work::default();
        let schedule = |engine: &mut Engine, work: &mut Work| {
            let is_scheduled = engine.schedule().is_some();
            if is_scheduled {
                work.see(engine);
            }
            is_scheduled
        };
        for op in &ops {
            match op {
                Op::Add(branch) => add(&mut engine, &mut work, segment, branch),
                Op::Schedule => {
                    schedule(&mut engine, &mut work);
                }
                Op::Commit if engine.in_flight.is_empty() => {}
                Op::Commit => engine.commit(),
            }
        }
        while engine.core.has_work() {
            while schedule(&mut engine, &mut work) {}
            prop_assert!(!engine.in_flight.is_empty(), "work is left, but nothing can be scheduled");
            engine.commit();
        }
        prop_assert_eq!(engine.finished.len(), num_requests);
    }
}
