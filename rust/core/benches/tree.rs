//! What the radix tree costs per request: `cargo bench -p octavo-core --bench tree`.
//!
//! Prompts of 2,048 tokens in blocks of 16, the first half of each shared by eight of them. Times exclude making
//! prompts, releasing blocks and everything else that is not the operation named.
#![allow(missing_docs)]

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use octavo_core::cache::{Cursor, KvCache};
use octavo_core::ids::{BlockId, Namespace};

const BLOCK_SIZE: u32 = 16;
/// Blocks in each half of a prompt.
const HALF: u32 = 64;
const PROMPTS_PER_PREFIX: u32 = 8;
const NS: Namespace = Namespace(1);
/// 868 such prompts are 1,000,000 cached tokens.
const NUM_PROMPTS: [u32; 6] = [1, 100, 868, 1_000, 10_000, 100_000];

/// A cache whose blocks are all cached, and a source of further prompts.
struct Bench {
    cache: KvCache,
    num_prefixes: u32,
    num_made: u32,
    prompt: Vec<u32>,
    blocks: Vec<BlockId>,
    shadows: Vec<BlockId>,
}

impl Bench {
    fn new(num_prompts: u32) -> Self {
        let num_prefixes = num_prompts.div_ceil(PROMPTS_PER_PREFIX);
        let num_blocks = (num_prefixes + num_prompts) * HALF;
        let mut bench = Self {
            cache: KvCache::new(1 + num_blocks, BLOCK_SIZE, true),
            num_prefixes,
            num_made: 0,
            prompt: Vec::new(),
            blocks: Vec::new(),
            shadows: Vec::new(),
        };
        for _ in 0..num_prompts {
            bench.next_prompt();
            bench.match_and_insert();
            bench.release();
        }
        assert_eq!(bench.cache.num_free(), 0);
        bench
    }

    /// A prompt with the prefix that was used longest ago and a second half never seen before.
    fn next_prompt(&mut self) {
        self.num_made += 1;
        let prefix = self.num_made % self.num_prefixes;
        let half = |seed: u32| {
            (0..HALF * BLOCK_SIZE).map(move |at| (seed ^ at.wrapping_mul(0x9E37_79B9)) % 128_000)
        };
        self.prompt.clear();
        self.prompt.extend(half(prefix));
        self.prompt
            .extend(half(self.num_made.wrapping_mul(0x85EB_CA6B)));
    }

    fn match_and_insert(&mut self) -> Cursor {
        let mut cursor = self.cache.root(NS);
        let most = self.prompt.len() as u32 / BLOCK_SIZE;
        self.cache.extend_match(NS, &mut cursor, &self.prompt, most);
        self.cache.take_match(cursor, &mut self.blocks);
        let matched = self.blocks.len();
        assert!(self.cache.allocate(most - cursor.depth(), &mut self.blocks));
        let tokens = &self.prompt[matched * BLOCK_SIZE as usize..];
        self.cache.publish(
            NS,
            &mut cursor,
            tokens,
            &self.blocks[matched..],
            &mut self.shadows,
        );
        cursor
    }

    fn release(&mut self) {
        self.cache.release(&self.blocks);
        self.cache.release(&self.shadows);
        self.blocks.clear();
        self.shadows.clear();
    }

    /// Evicts so that `n` blocks are free.
    fn make_room(&mut self, n: u32) {
        let mut blocks = Vec::new();
        assert!(self.cache.allocate(n, &mut blocks));
        self.cache.release(&blocks);
    }
}

/// Match, take, allocate and publish a prompt whose first half is cached; no eviction.
fn match_and_insert(c: &mut Criterion) {
    let mut group = c.benchmark_group("match_and_insert_2048_tokens");
    for num_prompts in NUM_PROMPTS {
        let mut bench = Bench::new(num_prompts);
        group.bench_function(BenchmarkId::new("cached_prompts", num_prompts), |b| {
            b.iter_custom(|iterations| {
                let mut total = Duration::ZERO;
                for _ in 0..iterations {
                    bench.make_room(HALF);
                    bench.next_prompt();
                    let start = Instant::now();
                    black_box(bench.match_and_insert());
                    total += start.elapsed();
                    assert_eq!(
                        bench.cache.num_free(),
                        0,
                        "exactly the first half was cached"
                    );
                    bench.release();
                }
                total
            });
        });
    }
}

/// Allocate 128 blocks that all have to be evicted.
fn evict(c: &mut Criterion) {
    let mut group = c.benchmark_group("evict_2048_tokens");
    for num_prompts in NUM_PROMPTS {
        let mut bench = Bench::new(num_prompts);
        let mut blocks = Vec::new();
        group.bench_function(BenchmarkId::new("cached_prompts", num_prompts), |b| {
            b.iter_custom(|iterations| {
                let mut total = Duration::ZERO;
                for _ in 0..iterations {
                    let start = Instant::now();
                    assert!(bench.cache.allocate(2 * HALF, &mut blocks));
                    total += start.elapsed();
                    bench.cache.release(&blocks);
                    blocks.clear();
                    for _ in 0..2 {
                        bench.next_prompt();
                        bench.match_and_insert();
                        bench.release();
                    }
                }
                total
            });
        });
    }
}

criterion_group!(benches, match_and_insert, evict);
criterion_main!(benches);
