//! What a picture of the engine costs the step: how long the control plane is held at once, and all together, by size of the pool.
//!
//! The target: at most 200 µs at once, whatever the size.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use octavo_core::config::CoreConfig;
use octavo_core::ids::{Namespace, TenantId};
use octavo_core::output::StepResults;
use octavo_core::params::{Limits, SamplingParams};
use octavo_core::plan::{Layout, flags, header};
use octavo_engine::engine::{Engine, Extras, Submission};
use octavo_engine::mailbox::Mailbox;
use octavo_text::output::TextOptions;

const ROWS: u32 = 256;
const PICTURES: usize = 50;

fn main() {
    println!(
        "blocks, held at once (median and longest of {PICTURES} pictures), held in all, whole picture; step without and with pictures"
    );
    for num_blocks in [1_000, 10_000, 100_000, 1_000_000] {
        let (engine, mut plan) = full(num_blocks);
        let mut longest = Vec::new();
        let (mut total, mut whole) = (Vec::new(), Vec::new());
        for _ in 0..PICTURES {
            let start = Instant::now();
            let (at_once, in_all) = engine.inspect().held_us;
            whole.push(start.elapsed().as_secs_f64() * 1e6);
            longest.push(at_once);
            total.push(in_all);
        }
        for times in [&mut longest, &mut total, &mut whole] {
            times.sort_by(f64::total_cmp);
        }
        let middle = PICTURES / 2;
        let alone = steps(&engine, &mut plan);
        let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let (watched, stopped) = (Arc::clone(&engine), Arc::clone(&stop));
        let watcher = std::thread::spawn(move || {
            while !stopped.load(std::sync::atomic::Ordering::Relaxed) {
                let _ = watched.inspect();
            }
        });
        let beside = steps(&engine, &mut plan);
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        watcher.join().unwrap();
        println!(
            "{num_blocks:>9}, {:>6.1} µs {:>6.1} µs, {:>7.1} µs, {:>8.1} µs; {:>6.1} µs {:>6.1} µs",
            longest[middle],
            longest[PICTURES - 1],
            total[middle],
            whole[middle],
            alone.as_secs_f64() * 1e6,
            beside.as_secs_f64() * 1e6,
        );
    }
}

/// An engine whose pool is nearly full of prompts that share beginnings, with some of them running.
fn full(num_blocks: u32) -> (Arc<Engine>, Vec<i32>) {
    let config = CoreConfig {
        block_size: 16,
        num_blocks,
        max_num_seqs: ROWS,
        max_num_batched_tokens: 65_536,
        max_model_len: 1 << 20,
        vocab_size: 50_000,
        ..CoreConfig::default()
    };
    let engine = Arc::new(Engine::new(config, Limits::default(), None, Vec::new()).unwrap());
    let mut plan = vec![0; Layout::new(engine.config()).total_words];
    let mailbox = Arc::new(Mailbox::default());
    let length = (num_blocks * 16 / ROWS * 3 / 4).max(17);
    for number in 0..ROWS {
        let shared = length / 2;
        let tokens = (0..length).map(|i| {
            if i < shared {
                i % 997
            } else {
                (i * 31 + number) % 50_000
            }
        });
        let submission = Submission {
            tokens: tokens.collect(),
            num_prompt_tokens: length,
            first_choice: 0,
            params: SamplingParams {
                // Half of them go on, the others leave what they have cached.
                max_tokens: if number % 2 == 0 { 1 } else { 100_000 },
                ..SamplingParams::default()
            },
            detokenize: false,
            text: TextOptions::default(),
            priority: 0,
            tenant: TenantId(0),
            namespace: Namespace(0),
            stream: false,
            grammar: None,
        };
        engine.add(submission, &mailbox).unwrap();
    }
    for _ in 0..2000 {
        step(&engine, &mut plan);
        if engine.stats().num_waiting == 0 {
            break;
        }
    }
    (engine, plan)
}

fn step(engine: &Engine, plan: &mut [i32]) {
    let layout = Layout::new(engine.config());
    let Some(step_id) = engine.schedule(plan) else {
        return;
    };
    let rows = plan[header::NUM_ROWS] as usize;
    let sampled: Vec<i32> = (0..rows)
        .map(|row| i32::from(plan[layout.flags + row] & flags::SAMPLE != 0))
        .collect();
    let results = StepResults {
        step_id,
        tokens: &vec![7; rows],
        num_sampled: &sampled,
        next_drafts: None,
    };
    engine.commit(results, Extras::default()).unwrap();
}

/// Median time of a step's `schedule` and `commit`.
fn steps(engine: &Engine, plan: &mut [i32]) -> Duration {
    let mut times: Vec<Duration> = (0..1000)
        .map(|_| {
            let start = Instant::now();
            step(engine, plan);
            start.elapsed()
        })
        .collect();
    times.sort();
    times[times.len() / 2]
}
