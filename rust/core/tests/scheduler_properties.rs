//! Random lives of many requests on a device that checks every read and write of the KV cache, against each request run alone.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::{BTreeMap, VecDeque};

use common::{Device, DeviceStep, longest_in_pool, make_seed, mix, run_alone};
use octavo_core::config::{CacheGroup, CoreConfig};
use octavo_core::ids::{Namespace, RequestId, TenantId};
use octavo_core::output::{FinishReason, Output};
use octavo_core::params::SamplingParams;
use octavo_core::request::AddRequest;
use octavo_core::scheduler::Core;
use proptest::prelude::*;

/// A request, in small numbers that shrink well.
#[derive(Clone, Debug)]
struct Plan {
    family: u8,
    shared_len: u8,
    own_len: u8,
    max_tokens: u8,
    min_tokens: u8,
    n: u8,
    /// How many outputs were produced before a restart (n = 1).
    resumed: u8,
    stops: u8,
    ignore_eos: bool,
    prompt_logprobs: bool,
    fails_at: u8,
    priority: i8,
    tenant: u8,
    namespace: u8,
}

#[derive(Clone, Debug)]
enum Op {
    Add(Plan),
    Schedule,
    Commit,
    Abort(u8),
    AbortChoice(u8, u8),
    ResetPrefixCache,
}

/// Sizes of a control plane, small enough that everything runs short.
#[derive(Clone, Debug)]
struct Sizes {
    block_size: u32,
    num_blocks: u32,
    max_num_seqs: u32,
    max_num_batched_tokens: u32,
    max_model_len: u32,
    max_in_flight: u32,
    max_draft_tokens: u32,
    watermark: bool,
    enable_prefix_caching: bool,
    host_state: bool,
    next_drafts: bool,
    windows: Vec<u32>,
}

impl Sizes {
    fn config(&self) -> CoreConfig {
        let windows = self.windows.iter();
        let groups = windows.map(|&window| CacheGroup::Window { window });
        CoreConfig {
            block_size: self.block_size,
            num_blocks: self.num_blocks,
            max_num_seqs: self.max_num_seqs,
            max_num_batched_tokens: self.max_num_batched_tokens,
            max_model_len: self.max_model_len,
            max_in_flight: self.max_in_flight,
            max_draft_tokens: self.max_draft_tokens,
            enable_prefix_caching: self.enable_prefix_caching,
            watermark: if self.watermark { 0.15 } else { 0.0 },
            vocab_size: 11,
            host_state: self.host_state && (self.max_draft_tokens == 0 || self.max_in_flight == 1),
            groups: std::iter::once(CacheGroup::Full).chain(groups).collect(),
            ..CoreConfig::default()
        }
    }
}

/// What must come of one choice, and what has come of it so far.
struct Expected {
    tokens: Vec<u32>,
    finish: FinishReason,
    got: Vec<u32>,
    num_prompt: u32,
    finished: Option<FinishReason>,
    prompt_logprobs: Option<Vec<u32>>,
}

struct Harness {
    core: Core,
    device: Device,
    buffer: Vec<i32>,
    in_flight: VecDeque<DeviceStep>,
    with_drafts: bool,
    expected: BTreeMap<(u64, u32), Expected>,
    next_id: u64,
}

impl Harness {
    fn new(sizes: Sizes) -> Self {
        let config = sizes.config();
        let core = Core::new(config.clone()).unwrap();
        Self {
            buffer: vec![-99; core.layout().total_words],
            core,
            device: Device::new(&config),
            in_flight: VecDeque::new(),
            with_drafts: sizes.next_drafts,
            expected: BTreeMap::new(),
            next_id: 1,
        }
    }

    fn request(&self, plan: &Plan) -> AddRequest {
        // Prompts of a family have the same beginning.
        let shared = (0..u64::from(plan.shared_len)).map(|i| mix(u64::from(plan.family), i) % 11);
        let own = (0..u64::from(plan.own_len)).map(|i| mix(self.next_id + 1000, i) % 11);
        let prompt: Vec<u32> = shared.chain(own).map(|token| token as u32).collect();
        let params = SamplingParams {
            n: u32::from(plan.n),
            seed: make_seed(
                u32::from(plan.namespace),
                u32::from(plan.fails_at),
                self.next_id as u32,
            ),
            max_tokens: u32::from(plan.max_tokens),
            min_tokens: u32::from(plan.min_tokens.min(plan.max_tokens)),
            ignore_eos: plan.ignore_eos,
            stop_token_ids: (0..u32::from(plan.stops)).collect(),
            eos_token_ids: vec![7],
            prompt_logprobs: plan.prompt_logprobs.then_some(1),
            logit_bias: vec![(3, 0.5); usize::from(plan.family)],
            bad_words: vec![vec![1, 2, 3]; usize::from(plan.stops)],
            ..SamplingParams::default()
        };
        AddRequest {
            priority: i32::from(plan.priority),
            tenant: TenantId(u64::from(plan.tenant)),
            namespace: Namespace(u64::from(plan.namespace)),
            ..AddRequest::new(RequestId(self.next_id), prompt, params)
        }
    }

    fn add(&mut self, plan: &Plan) {
        let mut request = self.request(plan);
        let config = self.core.config().clone();
        self.next_id += 1;
        let prompt_len = request.tokens.len();
        let capacity = longest_in_pool(&config);
        let fits =
            prompt_len > 0 && prompt_len < config.max_model_len as usize && prompt_len <= capacity;
        if !fits {
            assert!(
                self.core.add(request).is_err(),
                "a prompt that can never run is accepted"
            );
            return;
        }
        if plan.resumed > 0 {
            request.params.n = 1;
            let (all, _) = run_alone(&config, &request, 0);
            // The last token is never given: the request would be over.
            let produced = usize::from(plan.resumed)
                .min(all.len() - prompt_len - usize::from(all.len() > prompt_len));
            request
                .tokens
                .extend_from_slice(&all[prompt_len..prompt_len + produced]);
            if request.tokens.len() > capacity {
                request.tokens.truncate(prompt_len);
            }
        }
        for choice in 0..request.params.n {
            let (tokens, finish) = run_alone(&config, &request, choice);
            let wants_prompt_logprobs = plan.prompt_logprobs && choice == 0;
            let expected = Expected {
                tokens: tokens[request.tokens.len()..].to_vec(),
                finish,
                got: Vec::new(),
                num_prompt: request.num_prompt_tokens,
                finished: None,
                prompt_logprobs: wants_prompt_logprobs.then(Vec::new),
            };
            self.expected.insert((request.id.0, choice), expected);
        }
        self.core.add(request).unwrap();
    }

    fn schedule(&mut self) -> bool {
        let scheduled = self.core.schedule(&mut self.buffer);
        let is_new = scheduled.is_some();
        if let Some(id) = scheduled {
            let step = self.device.run(&self.buffer);
            assert_eq!(step.id, id);
            self.in_flight.push_back(step);
        }
        self.check();
        is_new
    }

    fn commit(&mut self) -> bool {
        let Some(step) = self.in_flight.pop_front() else {
            return false;
        };
        let expected = &mut self.expected;
        let width = 1 + self.core.config().max_draft_tokens as usize;
        let mut sink = |output: Output<'_>| check_output(expected, &step, width, &output);
        self.core
            .commit(&step.results(self.with_drafts), &mut sink)
            .unwrap();
        self.check();
        true
    }

    fn take_ended(&mut self) {
        let expected = &mut self.expected;
        self.core.take_ended(&mut |output: Output<'_>| {
            assert_eq!(
                (output.row, output.tokens, output.finish),
                (None, &[][..], Some(FinishReason::Abort))
            );
            finish(
                expected.get_mut(&(output.id.0, output.choice)).unwrap(),
                FinishReason::Abort,
            );
        });
    }

    fn living(&self, index: u8) -> Option<(u64, u32)> {
        let living: Vec<(u64, u32)> = self
            .expected
            .iter()
            .filter(|(_, expected)| expected.finished.is_none())
            .map(|(&key, _)| key)
            .collect();
        if living.is_empty() {
            None
        } else {
            Some(living[usize::from(index) % living.len()])
        }
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Add(plan) => self.add(plan),
            Op::Schedule => {
                self.schedule();
            }
            Op::Commit => {
                self.commit();
            }
            Op::Abort(index) => {
                if let Some((id, _)) = self.living(*index) {
                    assert!(self.core.abort(RequestId(id)) > 0);
                    assert_eq!(self.core.abort(RequestId(id)), 0);
                }
            }
            Op::AbortChoice(index, choice) => {
                if let Some((id, _)) = self.living(*index) {
                    let choice = u32::from(*choice);
                    let lives = self
                        .expected
                        .get(&(id, choice))
                        .is_some_and(|expected| expected.finished.is_none());
                    assert_eq!(self.core.abort_choice(RequestId(id), choice), lives);
                }
            }
            Op::ResetPrefixCache => self.core.reset_prefix_cache(),
        }
        self.take_ended();
        self.check();
    }

    fn check(&self) {
        self.core.check_integrity().unwrap();
    }

    /// Runs until nothing lives; there must always be something to schedule or to commit.
    fn drain(&mut self) {
        let mut steps = 0;
        while self.core.has_work() {
            let mut progress = false;
            while self.schedule() {
                progress = true;
            }
            progress |= self.commit();
            self.take_ended();
            assert!(
                progress,
                "nothing to schedule, nothing to commit, but work is left"
            );
            steps += 1;
            assert!(steps < 20_000, "no end after {steps} steps");
        }
        assert!(self.in_flight.is_empty());
    }

    fn check_end(&mut self) {
        for (key, expected) in &self.expected {
            assert!(expected.finished.is_some(), "{key:?} never finished");
        }
        let stats = self.core.stats();
        assert_eq!(stats.free_blocks + stats.evictable_blocks, stats.num_blocks);
        assert_eq!(
            (stats.num_running, stats.num_waiting, stats.coming_blocks),
            (0, 0, 0)
        );
        self.core.reset_prefix_cache();
        self.check();
        let stats = self.core.stats();
        assert_eq!(
            (stats.free_blocks, stats.cached_blocks),
            (stats.num_blocks, 0)
        );
    }
}

fn finish(expected: &mut Expected, reason: FinishReason) {
    assert_eq!(expected.finished, None, "finished twice");
    expected.finished = Some(reason);
    assert!(
        expected.tokens.starts_with(&expected.got),
        "{:?} is not how {:?} begins",
        expected.got,
        expected.tokens
    );
    if reason == FinishReason::Abort {
        return;
    }
    assert_eq!((&expected.got, reason), (&expected.tokens, expected.finish));
    if let Some(positions) = &expected.prompt_logprobs {
        assert!(
            reason == FinishReason::Error || positions.iter().copied().eq(1..expected.num_prompt),
            "prompt logprobs of {positions:?}"
        );
    }
}

fn check_output(
    expected: &mut BTreeMap<(u64, u32), Expected>,
    step: &DeviceStep,
    width: usize,
    output: &Output<'_>,
) {
    let expected = expected.get_mut(&(output.id.0, output.choice)).unwrap();
    assert_eq!(expected.finished, None, "an output after the last");
    let row = output.row.unwrap() as usize;
    let sampled: Vec<i32> = output.tokens.iter().map(|&token| token as i32).collect();
    assert!(
        step.tokens[row * width..(row + 1) * width].starts_with(&sampled),
        "tokens are not of the row named"
    );
    expected.got.extend_from_slice(output.tokens);
    let span = output.prompt_logprobs;
    if !span.is_empty() {
        let positions = expected
            .prompt_logprobs
            .as_mut()
            .expect("prompt logprobs that nobody wants");
        assert_eq!(
            span.start,
            positions.len() as u32 + 1,
            "prompt logprobs twice or with a hole"
        );
        positions.extend(span.start..span.end);
        // The span starts `skip` entries into a row whose first entry scores the position after its first query token.
        assert_eq!(span.start - span.skip, step.rows[row].computed as u32 + 1);
        assert_eq!(
            output.num_cached_tokens, 0,
            "prompt logprobs need the whole prompt computed"
        );
    }
    if let Some(reason) = output.finish {
        finish(expected, reason);
    }
}

prop_compose! {
    fn plan(max_n: u8, fails: bool)(
        lens in (0u8..4, 0u8..24, 0u8..20),
        limits in (1u8..24, 0u8..6),
        n in 1u8..=max_n,
        resumed in prop_oneof![4 => Just(0u8), 1 => 1u8..6],
        stops in 0u8..3,
        ignore_eos in any::<bool>(),
        prompt_logprobs in prop::bool::weighted(0.15),
        fails_at in prop_oneof![9 => Just(0u8), 1 => 1u8..8],
        order in (-1i8..2, 0u8..3),
        namespace in prop_oneof![5 => Just(0u8), 1 => Just(1u8)],
    ) -> Plan {
        Plan {
            family: lens.0,
            shared_len: lens.1,
            own_len: lens.2,
            max_tokens: limits.0,
            min_tokens: limits.1,
            n,
            resumed,
            stops,
            ignore_eos,
            prompt_logprobs,
            fails_at: if fails { fails_at } else { 0 },
            priority: order.0,
            tenant: order.1,
            namespace,
        }
    }
}

fn op(max_n: u8, fails: bool) -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => plan(max_n, fails).prop_map(Op::Add),
        7 => Just(Op::Schedule),
        6 => Just(Op::Commit),
        1 => any::<u8>().prop_map(Op::Abort),
        1 => (any::<u8>(), 0u8..4).prop_map(|(index, choice)| Op::AbortChoice(index, choice)),
        1 => prop::bool::weighted(0.3).prop_map(|reset| if reset { Op::ResetPrefixCache } else { Op::Schedule }),
    ]
}

fn ops(max_n: u8, fails: bool) -> impl Strategy<Value = Vec<Op>> {
    prop::collection::vec(op(max_n, fails), 1..40)
}

prop_compose! {
    fn sizes(blocks: std::ops::Range<u32>, drafts: std::ops::Range<u32>, caching: bool)(
        block_size in prop_oneof![Just(1u32), Just(2), Just(4), Just(8)],
        blocks in blocks,
        max_num_seqs in 1u32..6,
        max_num_batched_tokens in prop_oneof![Just(1u32), Just(3), 4u32..40, Just(64)],
        max_model_len in 20u32..80,
        max_in_flight in 1u32..4,
        max_draft_tokens in drafts,
        switches in (any::<bool>(), any::<bool>(), any::<bool>()),
    ) -> Sizes {
        Sizes {
            block_size,
            // As many tokens whatever the size of a block.
            num_blocks: (blocks * 4).div_ceil(block_size) + 1,
            max_num_seqs,
            max_num_batched_tokens,
            max_model_len,
            max_in_flight,
            max_draft_tokens,
            watermark: switches.0,
            enable_prefix_caching: caching,
            host_state: switches.1,
            next_drafts: switches.2,
            windows: Vec::new(),
        }
    }
}

prop_compose! {
    /// One to three window groups, and a pool that a prompt of some length fits into.
    fn windowed(blocks: std::ops::Range<u32>, drafts: std::ops::Range<u32>, caching: bool)(
        sizes in sizes(blocks, drafts, caching),
        windows in prop::collection::vec(prop_oneof![1u32..6, 4u32..40], 1..4),
    ) -> Sizes {
        let num_blocks = sizes.num_blocks * (1 + windows.len() as u32);
        Sizes { windows, num_blocks, ..sizes }
    }
}

fn run(sizes: Sizes, ops: &[Op]) {
    let mut harness = Harness::new(sizes);
    for op in ops {
        harness.apply(op);
    }
    harness.drain();
    harness.check_end();
}

/// `cases` sequences, or as many as `PROPTEST_CASES` says.
fn cases(cases: u32) -> ProptestConfig {
    let cases = if std::env::var_os("PROPTEST_CASES").is_some() {
        ProptestConfig::default().cases
    } else {
        cases
    };
    ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(cases(6_000))]

    #[test]
    fn every_request_gets_what_it_gets_alone(sizes in sizes(20..60, 0..1, true), ops in ops(3, true)) {
        run(sizes, &ops);
    }

    #[test]
    fn every_request_gets_what_it_gets_alone_in_a_pool_that_is_too_small(sizes in sizes(3..16, 0..1, true), ops in ops(3, true)) {
        run(sizes, &ops);
    }

    #[test]
    fn drafts_change_nothing_but_the_number_of_steps(sizes in sizes(4..40, 1..5, true), ops in ops(2, false)) {
        run(sizes, &ops);
    }

    #[test]
    fn without_the_prefix_cache_nothing_but_the_work_is_different(sizes in sizes(3..40, 0..3, false), ops in ops(4, false)) {
        run(sizes, &ops);
    }
}

proptest! {
    #![proptest_config(cases(3_000))]

    #[test]
    fn windows_change_nothing_but_what_is_kept(sizes in windowed(10..50, 0..1, true), ops in ops(3, true)) {
        run(sizes, &ops);
    }

    #[test]
    fn windows_change_nothing_in_a_pool_that_is_too_small(sizes in windowed(2..14, 0..1, true), ops in ops(3, true)) {
        run(sizes, &ops);
    }

    #[test]
    fn windows_keep_what_a_query_reads_if_drafts_are_rejected(sizes in windowed(3..30, 1..5, true), ops in ops(2, false)) {
        run(sizes, &ops);
    }

    #[test]
    fn windows_change_nothing_without_the_prefix_cache(sizes in windowed(3..30, 0..3, false), ops in ops(4, false)) {
        run(sizes, &ops);
    }
}
