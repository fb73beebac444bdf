//! `schedule()` + `commit()` of one decode step, by number of running rows and of waiting requests.
//!
//! The target: 512 rows with 10,000 waiting in at most 80 µs (median, one core), and nothing that grows with the waiting queue.
#![allow(missing_docs, clippy::unwrap_used)]

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use octavo_core::config::CoreConfig;
use octavo_core::ids::RequestId;
use octavo_core::output::{Output, StepResults};
use octavo_core::params::SamplingParams;
use octavo_core::plan::header;
use octavo_core::request::AddRequest;
use octavo_core::scheduler::Core;

const PROMPT_TOKENS: u32 = 64;
/// Decode steps after which the control plane is built anew, so that no request ends and contexts stay alike.
const STEPS: u64 = 2000;

/// A control plane that decodes `rows` requests while `waiting` others find no slot.
struct Decoding {
    core: Core,
    buffer: Vec<i32>,
    tokens: Vec<i32>,
    num_sampled: Vec<i32>,
}

impl Decoding {
    fn new(rows: u32, waiting: u32) -> Self {
        let config = CoreConfig {
            block_size: 16,
            num_blocks: 100_000,
            max_num_seqs: rows,
            max_num_batched_tokens: 65_536,
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
            let params = SamplingParams {
                max_tokens: 8000,
                eos_token_ids: vec![2],
                stop_token_ids: vec![7],
                ..SamplingParams::default()
            };
            core.add(AddRequest::new(RequestId(id), prompt, params))
                .unwrap();
        }
        let mut decoding = Self {
            buffer: vec![0; core.layout().total_words],
            tokens: (0..rows as i32).map(|row| 100 + row).collect(),
            num_sampled: vec![1; rows as usize],
            core,
        };
        while !decoding.step() {}
        decoding
    }

    /// Schedules and commits; whether every row decoded.
    fn step(&mut self) -> bool {
        let step_id = self.core.schedule(&mut self.buffer).unwrap();
        let rows = self.buffer[header::NUM_ROWS] as usize;
        let is_decode = self.buffer[header::NUM_DECODE_ROWS] as usize == self.num_sampled.len();
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
        black_box(count);
        is_decode
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

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(30).measurement_time(Duration::from_secs(2)).warm_up_time(Duration::from_millis(500));
    targets = schedule_and_commit
}
criterion_main!(benches);
