//! `schedule()` + `commit()` of one step, by number of running rows and of waiting requests: of decodes alone, and of decodes and a part of
//! a prompt that all who wait begin with.
//!
//! The target: 512 rows with 10,000 waiting in at most 80 µs (median, one core), and nothing that grows with the waiting queue.
#![allow(missing_docs, clippy::unwrap_used)]

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use octavo_core::config::CoreConfig;
use octavo_core::ids::{RequestId, TenantId};
use octavo_core::output::{Output, StepResults};
use octavo_core::params::SamplingParams;
use octavo_core::plan::{flags, header};
use octavo_core::request::AddRequest;
use octavo_core::scheduler::Core;

const PROMPT_TOKENS: u32 = 64;
/// Length of a prompt that others begin with as well.
const SHARED_TOKENS: u32 = 2048;
/// Decode steps after which the control plane is built anew, so that no request ends and contexts stay alike.
const STEPS: u64 = 2000;

/// A control plane that decodes `rows` requests while others wait.
struct Decoding {
    core: Core,
    buffer: Vec<i32>,
    rows: usize,
    tokens: Vec<i32>,
    num_sampled: Vec<i32>,
}

impl Decoding {
    /// `waiting` others find no slot.
    fn new(rows: u32, waiting: u32) -> Self {
        Self::with_limits(rows, waiting, rows, 65_536)
    }

    fn with_limits(
        rows: u32,
        waiting: u32,
        max_num_seqs: u32,
        max_num_batched_tokens: u32,
    ) -> Self {
        let config = CoreConfig {
            block_size: 16,
            num_blocks: 100_000,
            max_num_seqs,
            max_num_batched_tokens,
            max_model_len: 8192,
            max_in_flight: 2,
            vocab_size: 50_000,
            host_state: false,
            ..CoreConfig::default()
        };
        let mut core = Core::new(config).unwrap();
        for id in 0..u64::from(rows + waiting) {
            let prompt = (0..PROMPT_TOKENS)
                .map(|i| (id as u32 * 31 + i * 7) % 50_000)
                .collect();
            core.add(AddRequest::new(RequestId(id), prompt, params()))
                .unwrap();
        }
        let mut decoding = Self {
            buffer: vec![0; core.layout().total_words],
            rows: rows as usize,
            tokens: (0..max_num_seqs as i32).map(|row| 100 + row).collect(),
            num_sampled: vec![1; max_num_seqs as usize],
            core,
        };
        while !decoding.step() {}
        decoding
    }

    /// Adds requests of so many tenants that begin alike for `SHARED_TOKENS` tokens.
    fn add_alike(&mut self, count: u32, tenants: u32) {
        for id in 0..count {
            let common = (0..SHARED_TOKENS).map(|i| (i * 13 + 5) % 50_000);
            let id = 1_000_000 + id;
            let prompt = common.chain([id % 50_000]).collect();
            let request = AddRequest {
                tenant: TenantId(u64::from(id % tenants)),
                ..AddRequest::new(RequestId(id.into()), prompt, params())
            };
            self.core.add(request).unwrap();
        }
    }

    /// Schedules and commits; whether every request that is to decode did.
    fn step(&mut self) -> bool {
        let step_id = self.core.schedule(&mut self.buffer).unwrap();
        let rows = self.buffer[header::NUM_ROWS] as usize;
        let num_decode_rows = self.buffer[header::NUM_DECODE_ROWS] as usize;
        let row_flags = &self.buffer[self.core.layout().flags..][..rows];
        for (count, row_flags) in self.num_sampled[num_decode_rows..]
            .iter_mut()
            .zip(&row_flags[num_decode_rows..])
        {
            *count = i32::from(row_flags & flags::SAMPLE != 0);
        }
        let results = StepResults {
            step_id,
            tokens: &self.tokens[..rows],
            num_sampled: &self.num_sampled[..rows],
            next_drafts: None,
        };
        let mut count = 0;
        self.core
            .commit(&results, &mut |output: Output<'_>| {
                count += output.tokens.len()
            })
            .unwrap();
        self.num_sampled[num_decode_rows..rows].fill(1);
        black_box(count);
        num_decode_rows == self.rows
    }
}

fn params() -> SamplingParams {
    SamplingParams {
        max_tokens: 8000,
        eos_token_ids: vec![2],
        stop_token_ids: vec![7],
        ..SamplingParams::default()
    }
}

fn schedule_and_commit(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("schedule_and_commit");
    for rows in [64, 256, 512] {
        for waiting in [0, 10_000] {
            let id = BenchmarkId::new(format!("{rows}_rows"), format!("{waiting}_waiting"));
            let mut decoding = Decoding::new(rows, waiting);
            let mut steps_left = STEPS;
            group.bench_function(id, |bencher| {
                bencher.iter_custom(|iterations| {
                    let mut elapsed = Duration::ZERO;
                    let mut left = iterations;
                    while left > 0 {
                        if steps_left == 0 {
                            decoding = Decoding::new(rows, waiting);
                            steps_left = STEPS;
                        }
                        let steps = left.min(steps_left);
                        let start = Instant::now();
                        for _ in 0..steps {
                            decoding.step();
                        }
                        elapsed += start.elapsed();
                        left -= steps;
                        steps_left -= steps;
                    }
                    elapsed
                });
            });
        }
    }
    group.finish();
}

/// Steps of `ROWS` decodes and a chunk of a prompt, for whose blocks others wait.
fn beside_a_shared_prefill(criterion: &mut Criterion) {
    const ROWS: u32 = 512;
    let mut group = criterion.benchmark_group("beside_a_shared_prefill");
    for chunk in [64, 256] {
        for (waiting, tenants) in [(0, 1), (10_000, 1), (10_000, 10_000)] {
            let of_tenants = format!("{waiting}_waiting_of_{tenants}");
            let id = BenchmarkId::new(format!("{chunk}_tokens"), of_tenants);
            group.bench_function(id, |bencher| {
                bencher.iter_custom(|iterations| {
                    let mut elapsed = Duration::ZERO;
                    let mut left = iterations;
                    while left > 0 {
                        let mut decoding = Decoding::with_limits(ROWS, 0, 2 * ROWS, ROWS + chunk);
                        decoding.add_alike(1 + waiting, tenants);
                        // The first chunk finds the others never looked at; after the last one they are admitted.
                        decoding.step();
                        let steps = u64::from(SHARED_TOKENS / chunk) - 2;
                        let start = Instant::now();
                        for _ in 0..steps {
                            decoding.step();
                        }
                        let wanted = left.min(steps);
                        elapsed += start.elapsed().mul_f64(wanted as f64 / steps as f64);
                        left -= wanted;
                    }
                    elapsed
                });
            });
        }
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(30).measurement_time(Duration::from_secs(2)).warm_up_time(Duration::from_millis(500));
    targets = schedule_and_commit, beside_a_shared_prefill
}
criterion_main!(benches);
