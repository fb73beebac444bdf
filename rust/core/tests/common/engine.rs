//! A control plane together with the device, driven step by step.

use std::collections::{BTreeMap, VecDeque};

use octavo_core::config::CoreConfig;
use octavo_core::ids::{RequestId, StepId};
use octavo_core::output::{FinishReason, Output};
use octavo_core::params::SamplingParams;
use octavo_core::request::AddRequest;
use octavo_core::scheduler::Core;

use super::{Device, DeviceStep, make_seed, run_alone};

/// The tokens of one choice, and how it ended.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Told {
    pub(crate) tokens: Vec<u32>,
    pub(crate) finish: Option<FinishReason>,
    pub(crate) num_cached_tokens: u32,
    pub(crate) num_preemptions: u32,
    /// Steps committed when its first token came.
    pub(crate) first_at: Option<u64>,
}

/// A control plane on the device that checks every plan.
pub(crate) struct Engine {
    pub(crate) core: Core,
    pub(crate) device: Device,
    pub(crate) buffer: Vec<i32>,
    pub(crate) in_flight: VecDeque<DeviceStep>,
    pub(crate) told: BTreeMap<(u64, u32), Told>,
    pub(crate) finished: Vec<(u64, u32)>,
}

pub(crate) fn config() -> CoreConfig {
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

pub(crate) fn params(max_tokens: u32) -> SamplingParams {
    SamplingParams {
        max_tokens,
        seed: make_seed(0, 0, 1),
        ..SamplingParams::default()
    }
}

pub(crate) fn request(id: u64, prompt: &[u32], max_tokens: u32) -> AddRequest {
    AddRequest::new(RequestId(id), prompt.to_vec(), params(max_tokens))
}

/// A prompt that shares nothing with those of other numbers.
pub(crate) fn prompt(number: u32, len: u32) -> Vec<u32> {
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
    pub(crate) fn new(config: CoreConfig) -> Self {
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

    pub(crate) fn add(&mut self, request: AddRequest) {
        self.core.add(request).unwrap();
        self.core.check_integrity().unwrap();
    }

    /// Query tokens of each row of the next step, in plan order; none if nothing can be scheduled.
    pub(crate) fn schedule(&mut self) -> Option<Vec<usize>> {
        let scheduled = self.core.schedule(&mut self.buffer);
        self.core.check_integrity().unwrap();
        scheduled?;
        let step = self.device.run(&self.buffer);
        let queries = step.rows.iter().map(|row| row.query).collect();
        self.in_flight.push_back(step);
        Some(queries)
    }

    pub(crate) fn commit(&mut self) {
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

    pub(crate) fn step(&mut self) -> Vec<usize> {
        let queries = self.schedule().expect("something to schedule");
        self.commit();
        queries
    }

    pub(crate) fn take_ended(&mut self) {
        let Self {
            core,
            told,
            finished,
            ..
        } = self;
        core.take_ended(&mut |output: Output<'_>| note(told, finished, StepId(0), &output));
        self.core.check_integrity().unwrap();
    }

    pub(crate) fn run(&mut self) {
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

    pub(crate) fn told(&self, id: u64) -> &Told {
        &self.told[&(id, 0)]
    }

    pub(crate) fn has_told(&self, id: u64) -> bool {
        self.told.contains_key(&(id, 0))
    }

    pub(crate) fn available(&self) -> u32 {
        let stats = self.core.stats();
        stats.free_blocks + stats.evictable_blocks
    }
}

pub(crate) fn note(
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

pub(crate) fn alone(
    config: &CoreConfig,
    request: &AddRequest,
    choice: u32,
) -> (Vec<u32>, FinishReason) {
    let (tokens, finish) = run_alone(config, request, choice);
    (tokens[request.tokens.len()..].to_vec(), finish)
}
