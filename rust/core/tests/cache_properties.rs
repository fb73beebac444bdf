//! Random histories of the KV cache against a naive model: a map from (namespace, exact prefix) to
//! a block, and a list of requests.
//!
//! Tokens come from an alphabet of two, so that prompts part within edges, repeat each other and
//! publish duplicates all the time.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};

use octavo_core::cache::{Cursor, KvCache};
use octavo_core::ids::{BlockId, Namespace};
use proptest::prelude::*;

/// A cached prefix: its namespace and all its tokens.
type Prefix = (Namespace, Vec<u32>);

#[derive(Clone, Debug)]
enum Op {
    /// A prompt arrives, takes what is cached and allocates the rest, unless that doesn't fit.
    Admit {
        ns: u64,
        tokens: Vec<u32>,
    },
    /// A request gets more tokens and blocks for them.
    Append {
        request: usize,
        tokens: Vec<u32>,
    },
    /// A request publishes up to so many of its full blocks.
    Publish {
        request: usize,
        blocks: usize,
    },
    /// A new request shares another's published blocks by handle, or all full ones if it is stale.
    Fork {
        request: usize,
    },
    /// A request ends; its shadows go first, last or together with its table.
    Release {
        request: usize,
        order: u8,
    },
    /// A prompt begins to wait: its cursor is kept and extended after each further operation.
    Wait {
        ns: u64,
        tokens: Vec<u32>,
    },
    Clear,
}

fn op() -> impl Strategy<Value = Op> {
    let tokens = |most| prop::collection::vec(0..2u32, 0..=most);
    let request = 0..8usize;
    prop_oneof![
        5 => (0..2u64, tokens(14)).prop_map(|(ns, tokens)| Op::Admit { ns, tokens }),
        4 => (request.clone(), tokens(5)).prop_map(|(request, tokens)| Op::Append { request, tokens }),
        6 => (request.clone(), 1..6usize).prop_map(|(request, blocks)| Op::Publish { request, blocks }),
        1 => request.clone().prop_map(|request| Op::Fork { request }),
        5 => (request, 0..3u8).prop_map(|(request, order)| Op::Release { request, order }),
        2 => (0..2u64, tokens(14)).prop_map(|(ns, tokens)| Op::Wait { ns, tokens }),
        1 => Just(Op::Clear),
    ]
}

#[derive(Clone)]
struct Request {
    ns: Namespace,
    tokens: Vec<u32>,
    table: Vec<BlockId>,
    shadows: Vec<BlockId>,
    cursor: Cursor,
    /// Blocks of its path in the tree, by the model's count.
    num_published: usize,
    /// It began before the last clear.
    is_stale: bool,
}

struct Waiting {
    ns: Namespace,
    tokens: Vec<u32>,
    cursor: Cursor,
}

/// The cache under test and the model of it.
struct World {
    cache: KvCache,
    size: usize,
    cached: BTreeMap<Prefix, BlockId>,
    last_use: BTreeMap<BlockId, u64>,
    clock: u64,
    requests: Vec<Request>,
    waiting: Vec<Waiting>,
}

impl World {
    fn new(num_blocks: u32, size: u32) -> Self {
        Self {
            cache: KvCache::new(num_blocks, size, true),
            size: size as usize,
            cached: BTreeMap::new(),
            last_use: BTreeMap::new(),
            clock: 0,
            requests: Vec::new(),
            waiting: Vec::new(),
        }
    }

    fn holders(&self, block: BlockId) -> usize {
        let lists = self
            .requests
            .iter()
            .flat_map(|request| [&request.table, &request.shadows]);
        lists.flatten().filter(|&&held| held == block).count()
    }

    fn is_free(&self, block: BlockId) -> bool {
        self.holders(block) == 0 && !self.cached.values().any(|&cached| cached == block)
    }

    fn free(&self) -> BTreeSet<BlockId> {
        (1..=self.cache.num_blocks())
            .map(BlockId)
            .filter(|&block| self.is_free(block))
            .collect()
    }

    fn num_evictable(&self) -> usize {
        self.cached
            .values()
            .filter(|&&block| self.holders(block) == 0)
            .count()
    }

    /// The longest cached path of whole blocks, found by looking each prefix up.
    fn longest_match(&self, ns: Namespace, tokens: &[u32]) -> Vec<BlockId> {
        let prefixes =
            (1..=tokens.len() / self.size).map(|n| (ns, tokens[..n * self.size].to_vec()));
        prefixes
            .map_while(|prefix| self.cached.get(&prefix).copied())
            .collect()
    }

    /// Of all cached blocks that nothing holds and nothing is cached below, the one used least
    /// recently.
    fn next_victim(&self) -> Option<Prefix> {
        let is_leaf = |(ns, tokens): &Prefix| {
            !self
                .cached
                .keys()
                .any(|(n, t)| n == ns && t.len() > tokens.len() && t.starts_with(tokens))
        };
        let idle = self
            .cached
            .iter()
            .filter(|&(prefix, &block)| self.holders(block) == 0 && is_leaf(prefix));
        idle.min_by_key(|&(_, &block)| (self.last_use[&block], block))
            .map(|(prefix, _)| prefix.clone())
    }

    /// Allocates in the cache and in the model; both must agree on whether it fits and on which
    /// blocks are evicted.
    fn allocate(&mut self, n: usize) -> Option<Vec<BlockId>> {
        let mut usable = self.free();
        let fits = n <= usable.len() + self.num_evictable();
        let must_evict = fits && n > usable.len();
        while fits && usable.len() < n {
            let victim = self
                .next_victim()
                .expect("an evictable block can be evicted");
            usable.insert(self.cached.remove(&victim).unwrap());
        }
        let mut blocks = vec![BlockId(77)];
        assert_eq!(self.cache.allocate(n as u32, &mut blocks), fits);
        assert_eq!(blocks.remove(0), BlockId(77), "what was in the list stays");
        let got: BTreeSet<_> = blocks.iter().copied().collect();
        assert_eq!(got.len(), if fits { n } else { 0 }, "blocks are distinct");
        assert!(got.is_subset(&usable), "{got:?} of {usable:?}");
        assert!(!must_evict || got == usable, "evicts only what it needs");
        fits.then_some(blocks)
    }

    fn admit(&mut self, ns: Namespace, tokens: Vec<u32>) {
        let expected = self.longest_match(ns, &tokens);
        let mut cursor = self.cache.root(ns);
        let whole = (tokens.len() / self.size) as u32;
        for max_blocks in [1, whole] {
            self.cache
                .extend_match(ns, &mut cursor, &tokens, max_blocks);
            assert_eq!(cursor.depth(), (expected.len() as u32).min(max_blocks));
        }
        let evictable = expected
            .iter()
            .filter(|&&block| self.holders(block) == 0)
            .count();
        assert_eq!(self.cache.matched_evictable(cursor) as usize, evictable);
        let missing = tokens.len().div_ceil(self.size) - expected.len();
        if missing + evictable > self.cache.num_available() as usize {
            return;
        }
        let mut table = Vec::new();
        self.cache.take_match(cursor, &mut table);
        assert_eq!(table, expected);
        let num_published = table.len();
        self.requests.push(Request {
            ns,
            tokens,
            table,
            shadows: vec![],
            cursor,
            num_published,
            is_stale: false,
        });
        let blocks = self
            .allocate(missing)
            .expect("it was counted before it was taken");
        self.requests.last_mut().unwrap().table.extend(blocks);
    }

    fn append(&mut self, index: usize, tokens: Vec<u32>) {
        let request = &self.requests[index];
        let missing =
            (request.tokens.len() + tokens.len()).div_ceil(self.size) - request.table.len();
        if let Some(blocks) = self.allocate(missing) {
            self.requests[index].tokens.extend(tokens);
            self.requests[index].table.extend(blocks);
        }
    }

    fn publish(&mut self, index: usize, most: usize) {
        let size = self.size;
        let request = &mut self.requests[index];
        let start = request.num_published;
        let end = (request.tokens.len() / size).min(start + most);
        let mut expected = request.shadows.clone();
        for at in start..end {
            let prefix = (request.ns, request.tokens[..(at + 1) * size].to_vec());
            if !request.is_stale {
                let cached = *self.cached.entry(prefix).or_insert(request.table[at]);
                expected.extend((cached != request.table[at]).then_some(cached));
                request.num_published += 1;
            }
        }
        let before = request.cursor;
        self.cache.publish(
            request.ns,
            &mut request.cursor,
            &request.tokens[start * size..end * size],
            &request.table[start..end],
            &mut request.shadows,
        );
        assert_eq!(request.shadows, expected);
        assert_eq!(request.cursor.depth() as usize, request.num_published);
        assert!(!request.is_stale || request.cursor == before);
    }

    fn fork(&mut self, index: usize) {
        let mut request = self.requests[index].clone();
        let whole = if request.is_stale {
            request.tokens.len() / self.size
        } else {
            request.num_published
        };
        request.tokens.truncate(whole * self.size);
        request.table.truncate(whole);
        self.cache.retain(&request.table);
        self.cache.retain(&request.shadows);
        self.requests.push(request);
    }

    fn release(&mut self, index: usize, order: u8) {
        let mut request = self.requests.remove(index);
        let lists = match order {
            0 => vec![request.shadows, request.table],
            1 => vec![request.table, request.shadows],
            _ => {
                request.table.append(&mut request.shadows);
                vec![request.table]
            }
        };
        for (at, list) in lists.iter().enumerate() {
            self.clock += 1;
            self.cache.release(list);
            let later: Vec<_> = lists[at + 1..].concat();
            for block in list {
                if self.holders(*block) == 0 && !later.contains(block) {
                    self.last_use.insert(*block, self.clock);
                }
            }
        }
    }

    fn clear(&mut self) {
        self.cache.clear();
        self.cached.clear();
        for request in &mut self.requests {
            request.is_stale = true;
        }
    }

    fn apply(&mut self, op: Op) {
        let version = self.cache.version();
        let before = self.cached.clone();
        let n = self.requests.len();
        match op {
            Op::Admit { ns, tokens } => self.admit(Namespace(ns), tokens),
            Op::Wait { ns, tokens } => {
                let cursor = self.cache.root(Namespace(ns));
                self.waiting.push(Waiting {
                    ns: Namespace(ns),
                    tokens,
                    cursor,
                });
            }
            Op::Clear => self.clear(),
            _ if n == 0 => {}
            Op::Append { request, tokens } => self.append(request % n, tokens),
            Op::Publish { request, blocks } => self.publish(request % n, blocks),
            Op::Fork { request } => self.fork(request % n),
            Op::Release { request, order } => self.release(request % n, order),
        }
        assert!(
            before == self.cached || version < self.cache.version(),
            "the tree changed, its version did not"
        );
        self.compare();
    }

    /// Everything that can be read of the cache equals the model.
    fn compare(&mut self) {
        let lists = self
            .requests
            .iter()
            .flat_map(|request| [&request.table[..], &request.shadows[..]]);
        self.cache.check_integrity(lists).unwrap();
        assert_eq!(self.cache.num_cached() as usize, self.cached.len());
        assert_eq!(self.cache.num_evictable() as usize, self.num_evictable());
        assert_eq!(self.cache.num_free() as usize, self.free().len());
        for (ns, tokens) in self.cached.keys() {
            let mut cursor = self.cache.root(*ns);
            self.cache.extend_match(*ns, &mut cursor, tokens, u32::MAX);
            assert_eq!(cursor.depth() as usize, tokens.len() / self.size);
        }
        for at in 0..self.waiting.len() {
            let expected = self
                .longest_match(self.waiting[at].ns, &self.waiting[at].tokens)
                .len();
            let Waiting { ns, tokens, cursor } = &mut self.waiting[at];
            self.cache.extend_match(*ns, cursor, tokens, u32::MAX);
            assert_eq!(
                cursor.depth() as usize,
                expected,
                "an old cursor finds what a new one finds"
            );
        }
    }

    /// Ends all requests and evicts everything, one block at a time, in the model's order.
    fn evict_everything(&mut self) {
        while !self.requests.is_empty() {
            self.release(0, 2);
        }
        self.compare();
        let evictable = self.cache.num_evictable();
        let mut taken = Vec::new();
        assert!(self.cache.allocate(self.cache.num_free(), &mut taken));
        for _ in 0..evictable {
            let victim = self
                .next_victim()
                .expect("an evictable block can be evicted");
            let mut block = Vec::new();
            assert!(self.cache.allocate(1, &mut block));
            assert_eq!(block, [self.cached.remove(&victim).unwrap()]);
            taken.extend(block);
        }
        assert_eq!(
            (self.cache.num_available(), self.cache.num_cached()),
            (0, 0)
        );
        assert!(!self.cache.allocate(1, &mut taken));
        self.cache
            .check_integrity([&taken[..]].into_iter())
            .unwrap();
    }
}

fn config(default_cases: u32) -> ProptestConfig {
    let cases = std::env::var("PROPTEST_CASES")
        .ok()
        .and_then(|cases| cases.parse().ok())
        .unwrap_or(default_cases);
    ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(config(100_000))]

    #[test]
    fn any_history_of_requests_leaves_the_cache_equal_to_the_naive_model(
        num_blocks in 4..24u32,
        size in 1..4u32,
        ops in prop::collection::vec(op(), 1..24),
    ) {
        let mut world = World::new(num_blocks, size);
        for op in ops {
            world.apply(op);
        }
        world.evict_everything();
    }
}

proptest! {
    #![proptest_config(config(5_000))]

    #[test]
    fn the_same_history_gives_the_same_blocks_whatever_the_hash_keys(
        ops in prop::collection::vec(op(), 1..40),
    ) {
        // Each world draws hash keys of its own.
        let mut worlds = [World::new(12, 2), World::new(12, 2)];
        for op in ops {
            let tables = worlds.each_mut().map(|world| {
                world.apply(op.clone());
                world.requests.iter().map(|request| (request.table.clone(), request.shadows.clone())).collect::<Vec<_>>()
            });
            prop_assert_eq!(&tables[0], &tables[1]);
        }
    }
}
