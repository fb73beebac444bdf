//! Random histories of the KV cache against a naive model: a map from (namespace, exact prefix) to
//! a block, one from (namespace, exact prefix, window group) to a companion, and a list of requests.
//!
//! Tokens come from an alphabet of two, so that prompts part within edges, repeat each other and
//! publish duplicates all the time.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};

use octavo_core::cache::{Cursor, KvCache};
use octavo_core::ids::{BlockId, Namespace};
use octavo_core::window::WindowTable;
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
    /// A request gives back its first columns of every window group.
    Slide {
        request: usize,
        columns: usize,
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
        3 => (request.clone(), 1..5usize).prop_map(|(request, columns)| Op::Slide { request, columns }),
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
    /// The first column and the blocks of each window group.
    windows: Vec<(usize, Vec<BlockId>)>,
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
    windows: Vec<u32>,
    cached: BTreeMap<Prefix, BlockId>,
    companions: BTreeMap<(Prefix, usize), BlockId>,
    /// The release that made a block idle, and its place within it.
    last_use: BTreeMap<BlockId, (u64, usize)>,
    clock: u64,
    requests: Vec<Request>,
    waiting: Vec<Waiting>,
}

impl World {
    fn new(num_blocks: u32, size: u32, windows: &[u32]) -> Self {
        Self {
            cache: KvCache::with_windows(num_blocks, size, true, windows.iter().copied()),
            size: size as usize,
            windows: windows.to_vec(),
            cached: BTreeMap::new(),
            companions: BTreeMap::new(),
            last_use: BTreeMap::new(),
            clock: 0,
            requests: Vec::new(),
            waiting: Vec::new(),
        }
    }

    fn holders(&self, block: BlockId) -> usize {
        let lists = self.requests.iter().flat_map(|request| {
            let windows = request.windows.iter().map(|(_, blocks)| blocks);
            windows.chain([&request.table, &request.shadows])
        });
        lists.flatten().filter(|&&held| held == block).count()
    }

    fn in_tree(&self) -> impl Iterator<Item = BlockId> {
        self.cached
            .values()
            .chain(self.companions.values())
            .copied()
    }

    fn is_free(&self, block: BlockId) -> bool {
        self.holders(block) == 0 && !self.in_tree().any(|cached| cached == block)
    }

    fn free(&self) -> BTreeSet<BlockId> {
        (1..=self.cache.num_blocks())
            .map(BlockId)
            .filter(|&block| self.is_free(block))
            .collect()
    }

    fn num_evictable(&self) -> usize {
        self.in_tree()
            .filter(|&block| self.holders(block) == 0)
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

    /// Companions that the query after `hit` blocks reads, group by group; None if one is missing.
    fn companions_before(
        &self,
        ns: Namespace,
        tokens: &[u32],
        hit: usize,
    ) -> Option<Vec<Vec<BlockId>>> {
        let query = (hit * self.size) as i64;
        let of_group = |(group, &window): (usize, &u32)| {
            let is_read = |column: &usize| {
                let last = ((column + 1) * self.size) as i64 - 1;
                last > query - i64::from(window)
            };
            (0..hit)
                .filter(is_read)
                .map(|column| {
                    let prefix = (ns, tokens[..(column + 1) * self.size].to_vec());
                    self.companions.get(&(prefix, group)).copied()
                })
                .collect()
        };
        self.windows.iter().enumerate().map(of_group).collect()
    }

    /// The longest part of the cached path that every group can go on from.
    fn longest_usable(&self, ns: Namespace, tokens: &[u32]) -> usize {
        let longest = self.longest_match(ns, tokens).len();
        (0..=longest)
            .rfind(|&hit| self.companions_before(ns, tokens, hit).is_some())
            .unwrap()
    }

    /// Takes out of the tree the block that was used least recently of those that nothing holds:
    /// companions, and nodes that nothing is cached below.
    fn evict_next(&mut self) -> Option<BlockId> {
        let idle = self
            .companions
            .iter()
            .filter(|&(_, &block)| self.holders(block) == 0);
        let companion = idle
            .min_by_key(|&(_, block)| self.last_use[block])
            .map(|(key, &block)| (self.last_use[&block].0, key.clone()));
        let leaf = self.next_leaf();
        match (companion, leaf) {
            (Some((used, key)), leaf) if leaf.as_ref().is_none_or(|leaf| used <= leaf.0) => {
                self.companions.remove(&key)
            }
            (_, Some((_, prefix))) => {
                assert!(
                    self.companions.keys().all(|(of, _)| *of != prefix),
                    "a node goes before its companions"
                );
                self.cached.remove(&prefix)
            }
            _ => None,
        }
    }

    /// Of all nodes that nothing holds and nothing is cached below, the one used least recently.
    fn next_leaf(&self) -> Option<(u64, Prefix)> {
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
        idle.min_by_key(|&(_, &block)| (self.last_use[&block].0, block))
            .map(|(prefix, block)| (self.last_use[block].0, prefix.clone()))
    }

    /// Allocates in the cache and in the model; both must agree on whether it fits and on which
    /// blocks are evicted.
    fn allocate(&mut self, n: usize) -> Option<Vec<BlockId>> {
        let mut usable = self.free();
        let fits = n <= usable.len() + self.num_evictable();
        let must_evict = fits && n > usable.len();
        while fits && usable.len() < n {
            let victim = self.evict_next();
            usable.insert(victim.expect("an evictable block can be evicted"));
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
        let cursor = self.cache.usable_match(cursor);
        let hit = self.longest_usable(ns, &tokens);
        assert_eq!(cursor.depth() as usize, hit);
        let companions = self.companions_before(ns, &tokens, hit).unwrap();
        let evictable = expected[..hit]
            .iter()
            .chain(companions.iter().flatten())
            .filter(|&&block| self.holders(block) == 0)
            .count();
        assert_eq!(self.cache.matched_evictable(cursor) as usize, evictable);
        let columns = tokens.len().div_ceil(self.size) - hit;
        if self.per_column() * columns + evictable > self.cache.num_available() as usize {
            return;
        }
        let mut table = Vec::new();
        self.cache.take_match(cursor, &mut table);
        assert_eq!(table, expected[..hit]);
        let taken = self.cache.take_windows(cursor);
        let windows: Vec<(usize, Vec<BlockId>)> = taken
            .iter()
            .map(|table| (table.first() as usize, table.blocks().collect()))
            .collect();
        let expected = companions.into_iter();
        let expected: Vec<_> = expected
            .map(|blocks| (hit - blocks.len(), blocks))
            .collect();
        assert_eq!(windows, expected);
        let num_published = table.len();
        self.requests.push(Request {
            ns,
            tokens,
            table,
            windows,
            shadows: vec![],
            cursor,
            num_published,
            is_stale: false,
        });
        let last = self.requests.len() - 1;
        assert!(
            self.grow(last, columns),
            "it was counted before it was taken"
        );
    }

    /// Blocks of a column, over all groups.
    fn per_column(&self) -> usize {
        1 + self.windows.len()
    }

    /// Allocates columns for a request, in every group.
    fn grow(&mut self, index: usize, columns: usize) -> bool {
        let Some(mut blocks) = self.allocate(columns * self.per_column()) else {
            return false;
        };
        let request = &mut self.requests[index];
        request.table.extend(blocks.drain(..columns));
        for (_, table) in &mut request.windows {
            table.extend(blocks.drain(..columns));
        }
        true
    }

    fn append(&mut self, index: usize, tokens: Vec<u32>) {
        let request = &self.requests[index];
        let missing =
            (request.tokens.len() + tokens.len()).div_ceil(self.size) - request.table.len();
        if self.grow(index, missing) {
            self.requests[index].tokens.extend(tokens);
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
        self.attach(index, start);
    }

    /// Columns from `start` on that a request has published get its window blocks, unless somebody
    /// uses the ones they have.
    fn attach(&mut self, index: usize, start: usize) {
        let request = self.requests[index].clone();
        for column in start..request.num_published {
            let prefix = (
                request.ns,
                request.tokens[..(column + 1) * self.size].to_vec(),
            );
            for (group, (first, blocks)) in request.windows.iter().enumerate() {
                let own = column.checked_sub(*first).and_then(|at| blocks.get(at));
                let key = (prefix.clone(), group);
                let is_used = |&block: &BlockId| self.holders(block) > 0;
                if let Some(&own) = own
                    && !self.companions.get(&key).is_some_and(is_used)
                {
                    self.companions.insert(key, own);
                }
            }
        }
        let tables: Vec<WindowTable> = request
            .windows
            .iter()
            .map(|(first, blocks)| WindowTable::new(*first as u32, blocks.iter().copied()))
            .collect();
        self.cache
            .attach_windows(request.cursor, start as u32, &tables);
    }

    fn slide(&mut self, index: usize, columns: usize) {
        let mut gone = Vec::new();
        for (first, blocks) in &mut self.requests[index].windows {
            let n = columns.min(blocks.len());
            *first += n;
            gone.extend(blocks.drain(..n));
        }
        self.release_list(&gone, &[]);
    }

    /// Releases blocks that no request of the model holds any more, but for those in `later`.
    fn release_list(&mut self, list: &[BlockId], later: &[BlockId]) {
        self.clock += 1;
        self.cache.release(list);
        for (place, block) in list.iter().rev().enumerate() {
            if self.holders(*block) == 0 && !later.contains(block) {
                self.last_use.insert(*block, (self.clock, place));
            }
        }
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
        for (first, blocks) in &mut request.windows {
            *first = whole.min(*first);
            blocks.truncate(whole - *first);
            self.cache.retain(blocks);
        }
        self.cache.retain(&request.table);
        self.cache.retain(&request.shadows);
        self.requests.push(request);
    }

    fn release(&mut self, index: usize, order: u8) {
        let mut request = self.requests.remove(index);
        let windows = request.windows.drain(..).flat_map(|(_, blocks)| blocks);
        let windows: Vec<BlockId> = windows.collect();
        let mut lists = match order {
            0 => vec![request.shadows, request.table],
            1 => vec![request.table, request.shadows],
            _ => {
                request.table.append(&mut request.shadows);
                vec![request.table]
            }
        };
        lists.insert(0, windows);
        for (at, list) in lists.iter().enumerate() {
            self.release_list(list, &lists[at + 1..].concat());
        }
    }

    fn clear(&mut self) {
        self.cache.clear();
        self.cached.clear();
        self.companions.clear();
        for request in &mut self.requests {
            request.is_stale = true;
        }
    }

    fn apply(&mut self, op: Op) {
        let version = self.cache.version();
        let cached_columns = |world: &Self| {
            let companions: Vec<_> = world.companions.keys().cloned().collect();
            (world.cached.clone(), companions)
        };
        let before = cached_columns(self);
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
            Op::Slide { request, columns } => self.slide(request % n, columns),
            Op::Release { request, order } => self.release(request % n, order),
        }
        assert!(
            before == cached_columns(self) || version < self.cache.version(),
            "the tree changed, its version did not"
        );
        self.compare();
    }

    /// Everything that can be read of the cache equals the model.
    fn compare(&mut self) {
        let lists = self.requests.iter().flat_map(|request| {
            let windows = request.windows.iter().map(|(_, blocks)| &blocks[..]);
            windows.chain([&request.table[..], &request.shadows[..]])
        });
        self.cache.check_integrity(lists).unwrap();
        assert_eq!(self.cache.num_cached() as usize, self.in_tree().count());
        assert_eq!(self.cache.num_evictable() as usize, self.num_evictable());
        assert_eq!(self.cache.num_free() as usize, self.free().len());
        for (ns, tokens) in self.cached.keys() {
            let mut cursor = self.cache.root(*ns);
            self.cache.extend_match(*ns, &mut cursor, tokens, u32::MAX);
            assert_eq!(cursor.depth() as usize, tokens.len() / self.size);
            assert_eq!(
                self.cache.usable_match(cursor).depth() as usize,
                self.longest_usable(*ns, tokens)
            );
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
            let victim = self.evict_next();
            let mut block = Vec::new();
            assert!(self.cache.allocate(1, &mut block));
            assert_eq!(block, [victim.expect("an evictable block can be evicted")]);
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
        let mut world = World::new(num_blocks, size, &[]);
        for op in ops {
            world.apply(op);
        }
        world.evict_everything();
    }
}

proptest! {
    #![proptest_config(config(10_000))]

    #[test]
    fn any_history_of_requests_with_windows_leaves_the_cache_equal_to_the_naive_model(
        num_blocks in 6..40u32,
        size in 1..4u32,
        windows in prop::collection::vec(1..8u32, 1..4),
        ops in prop::collection::vec(op(), 1..24),
    ) {
        let mut world = World::new(num_blocks, size, &windows);
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
        let mut worlds = [World::new(12, 2, &[]), World::new(12, 2, &[])];
        for op in ops {
            let tables = worlds.each_mut().map(|world| {
                world.apply(op.clone());
                world.requests.iter().map(|request| (request.table.clone(), request.shadows.clone())).collect::<Vec<_>>()
            });
            prop_assert_eq!(&tables[0], &tables[1]);
        }
    }
}
