//! GB/s of packed weights beside a plain read of as many bytes, the weights not in any cache.
//!
//! `OCTAVO_BENCH_THREADS` sets the threads (default: all).
#![allow(missing_docs, clippy::unwrap_used)]

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use octavo_cpu::{PackedMatrix, Part, Storage};
use rayon::prelude::*;

/// More than the last-level cache holds.
const COLD_BYTES: usize = 128 << 20;

const SHAPES: [(Storage, usize, usize); 4] = [
    (Storage::Q4_1, 3072, 576),
    (Storage::Q4_1, 576, 1536),
    (Storage::Q4_0, 3072, 576),
    (Storage::Q8_0, 49152, 576),
];

/// Blocks whose f16 fields are 1/128 and whose codes vary.
fn weights(storage: Storage, rows: usize, width: usize) -> Vec<u8> {
    let mut data: Vec<u8> = (0..rows * width / 32 * storage.block_bytes())
        .map(|i| (i * 37 % 251) as u8)
        .collect();
    for block in data.chunks_mut(storage.block_bytes()) {
        block[..4].copy_from_slice(&[0, 0x20, 0, 0x20]);
    }
    data
}

fn linear(c: &mut Criterion) {
    let threads = std::env::var("OCTAVO_BENCH_THREADS").map_or_else(
        |_| std::thread::available_parallelism().unwrap().get(),
        |value| value.parse().unwrap(),
    );
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build()
        .unwrap();
    for (storage, rows, width) in SHAPES {
        let data = weights(storage, rows, width);
        let part = Part {
            storage,
            rows,
            data: &data,
        };
        let copies: Vec<PackedMatrix> = (0..COLD_BYTES.div_ceil(data.len()))
            .map(|_| PackedMatrix::new(&[part]).unwrap())
            .collect();
        let mut group = c.benchmark_group(format!("{storage:?}_{rows}x{width}_{threads}threads"));
        group.throughput(Throughput::Bytes(data.len() as u64));
        for m in [1usize, 2, 4, 8, 32, 128] {
            if m > 8 && rows > 4096 {
                continue;
            }
            let x: Vec<f32> = (0..m * width).map(|i| (i % 17) as f32 - 8.0).collect();
            let mut out = vec![0.0; m * rows];
            let mut next = copies.iter().cycle();
            group.bench_function(BenchmarkId::new("linear", m), |b| {
                b.iter(|| {
                    next.next()
                        .unwrap()
                        .linear(black_box(&x), &mut out, threads)
                });
            });
        }
        drop(copies);
        let memory: Vec<u64> = (0..(COLD_BYTES / 8) as u64).collect();
        let mut next = memory.chunks_exact(data.len() / 8).cycle();
        group.bench_function("read", |b| {
            b.iter(|| {
                let words = next.next().unwrap();
                let sum = |words: &[u64]| words.iter().fold(0u64, |a, b| a.wrapping_add(*b));
                if threads == 1 {
                    return sum(words);
                }
                let parts = words.par_chunks(words.len().div_ceil(threads));
                pool.install(|| parts.map(sum).reduce(|| 0, u64::wrapping_add))
            });
        });
        group.finish();
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20).warm_up_time(std::time::Duration::from_millis(300)).measurement_time(std::time::Duration::from_secs(1));
    targets = linear
}
criterion_main!(benches);
