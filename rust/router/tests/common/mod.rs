//! Real schedulers with their radix trees behind the router, on a device that computes nothing.

use octavo_core::config::CoreConfig;
use octavo_core::ids::RequestId;
use octavo_core::output::{Output, StepResults};
use octavo_core::params::SamplingParams;
use octavo_core::plan::{flags, header};
use octavo_core::request::AddRequest;
use octavo_core::scheduler::Core;
use octavo_router::{Prefix, Router};

const GROUPS: u32 = 64;
const PREFIX_TOKENS: u32 = 1024;
const PER_GROUP: u32 = 20;
const OWN_TOKENS: u32 = 32;
const OUTPUT_TOKENS: u32 = 8;
const BLOCK: u32 = 16;
const VOCABULARY: u32 = 32_000;

/// How requests find their replica.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Policy {
    /// `Router`.
    PrefixAware,
    /// In turn.
    RoundRobin,
}

struct Replica {
    core: Core,
    buffer: Vec<i32>,
    running: usize,
}

impl Replica {
    /// One whose cache holds `prefixes` prefixes, and nothing more.
    fn new(prefixes: u32) -> Self {
        let config = CoreConfig {
            block_size: BLOCK,
            num_blocks: prefixes * PREFIX_TOKENS / BLOCK + 1,
            max_num_seqs: 64,
            max_num_batched_tokens: 2048,
            max_model_len: 4096,
            vocab_size: VOCABULARY,
            ..CoreConfig::default()
        };
        let core = Core::new(config).unwrap();
        Self {
            buffer: vec![0; core.layout().total_words],
            core,
            running: 0,
        }
    }

    /// One step, in which every row that is due gets a token; returns the requests that ended.
    fn step(&mut self) -> Vec<u64> {
        let mut ended = Vec::new();
        let Some(step_id) = self.core.schedule(&mut self.buffer) else {
            return ended;
        };
        let rows = self.buffer[header::NUM_ROWS] as usize;
        let first = self.core.layout().flags;
        let due = |flag: &i32| i32::from(flag & flags::SAMPLE != 0);
        let num_sampled: Vec<i32> = self.buffer[first..first + rows].iter().map(due).collect();
        let results = StepResults {
            step_id,
            tokens: &vec![3; rows],
            num_sampled: &num_sampled,
            next_drafts: None,
        };
        let mut sink = |output: Output<'_>| {
            if output.finish.is_some() {
                ended.push(output.id.0);
            }
        };
        self.core.commit(&results, &mut sink).unwrap();
        self.running -= ended.len();
        ended
    }
}

/// Requests in an order that is random and always the same: groups, each `PER_GROUP` times.
fn shuffled_groups(mut seed: u64) -> Vec<u32> {
    let mut groups: Vec<u32> = (0..GROUPS * PER_GROUP).map(|i| i % GROUPS).collect();
    for last in (1..groups.len()).rev() {
        // Knuth's MMIX generator, and Fisher and Yates's shuffle.
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        groups.swap(last, (seed >> 33) as usize % (last + 1));
    }
    groups
}

fn prompt(number: u32, group: u32) -> Vec<u32> {
    let shared = (0..PREFIX_TOKENS).map(|i| (group * 7919 + i * 13) % VOCABULARY);
    let own = (0..OWN_TOKENS).map(|i| (number * 104_729 + i * 17 + 5) % VOCABULARY);
    shared.chain(own).collect()
}

/// What came of a run.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Outcome {
    /// Share of the prompts' tokens that were found in a cache.
    pub(crate) hit_rate: f64,
    /// Requests that each replica got.
    pub(crate) requests: Vec<usize>,
    /// Most sequences that one replica had more than another when it got a request.
    pub(crate) worst_imbalance: usize,
}

/// Runs 64 groups of 20 requests that share a prefix of 1,024 tokens, shuffled, `at_once` of them in flight, on replicas whose caches hold
/// `prefixes` such prefixes each.
pub(crate) fn simulate(
    policy: Policy,
    replicas: usize,
    prefixes: u32,
    at_once: usize,
    seed: u64,
) -> Outcome {
    let mut fleet: Vec<Replica> = (0..replicas).map(|_| Replica::new(prefixes)).collect();
    let mut router = Router::new(replicas);
    for replica in 0..replicas {
        router.connect(replica, (prefixes * PREFIX_TOKENS) as usize);
    }
    let mut waiting = (0..).zip(shuffled_groups(seed)).peekable();
    let (mut requests, mut worst_imbalance) = (vec![0; replicas], 0);
    loop {
        while fleet.iter().map(|one| one.running).sum::<usize>() < at_once {
            let Some((number, group)) = waiting.next() else {
                break;
            };
            let tokens = prompt(number, group);
            let chosen = match policy {
                Policy::PrefixAware => router.route(&Prefix::new(0, &tokens), 1, |_| true).unwrap(),
                Policy::RoundRobin => number as usize % replicas,
            };
            let least = fleet.iter().map(|one| one.running).min().unwrap();
            worst_imbalance = worst_imbalance.max(fleet[chosen].running - least);
            let params = SamplingParams {
                max_tokens: OUTPUT_TOKENS,
                ..SamplingParams::default()
            };
            let request = AddRequest::new(RequestId(u64::from(number)), tokens, params);
            fleet[chosen].core.add(request).unwrap();
            fleet[chosen].running += 1;
            requests[chosen] += 1;
        }
        for (number, replica) in fleet.iter_mut().enumerate() {
            for _ in replica.step() {
                router.finish(number, 1);
            }
        }
        if waiting.peek().is_none() && fleet.iter().all(|one| one.running == 0) {
            break;
        }
    }
    let stats: Vec<_> = fleet.iter().map(|one| one.core.stats()).collect();
    let sum = |count: fn(&octavo_core::stats::Stats) -> u64| stats.iter().map(count).sum::<u64>();
    Outcome {
        hit_rate: sum(|one| one.hit_tokens) as f64 / sum(|one| one.query_tokens) as f64,
        requests,
        worst_imbalance,
    }
}
