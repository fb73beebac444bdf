//! The KV cache as the scheduler sees it: blocks with reference counts, and the prefixes that are
//! cached in some of them. Owns the block pool, the radix tree and the companions of its nodes, and
//! keeps invariants 1–4 of `docs/engine.md` between them.

use crate::companions::Companions;
use crate::ids::{BlockId, Namespace};
use crate::pool::BlockPool;
pub use crate::tree::Cursor;
use crate::tree::RadixTree;
use crate::view::{BlockState, BlockView};
use crate::window::columns_before;

mod windows;

/// The block pool and the radix tree over it.
///
/// A block is *free* (count 0), *evictable* (only the tree holds it) or *used* (a request holds it,
/// the tree perhaps too). Whoever holds a cached block also holds every block before it on its
/// path: that is why every evictable block can be evicted, leaves first. The nodes of the tree are
/// blocks of the full group; each may have a *companion* for each window group, which can be
/// evicted at any time while the tree alone holds it. Whoever holds a companion holds its node.
#[derive(Debug)]
pub struct KvCache {
    pool: BlockPool,
    tree: RadixTree,
    companions: Companions,
    /// For each window group, the columns before a hit's end that the next query reads.
    columns_before: Vec<u32>,
    block_size: u32,
    enable_prefix_caching: bool,
    num_evictable: u32,
    version: u64,
    /// Logical time of the last release: what "least recently used" is measured by.
    clock: u64,
}

impl KvCache {
    /// A cache of `num_blocks` blocks of `block_size` tokens each, for one full group. The null
    /// block is one of them and is never allocated.
    ///
    /// # Panics
    /// If `num_blocks` or `block_size` is 0.
    pub fn new(num_blocks: u32, block_size: u32, enable_prefix_caching: bool) -> Self {
        Self::with_windows(num_blocks, block_size, enable_prefix_caching, [])
    }

    /// A cache for a full group and further ones with `windows`.
    ///
    /// # Panics
    /// If `num_blocks`, `block_size` or a window is 0.
    pub fn with_windows(
        num_blocks: u32,
        block_size: u32,
        enable_prefix_caching: bool,
        windows: impl IntoIterator<Item = u32>,
    ) -> Self {
        assert!(
            block_size > 0,
            "block_size = 0: a block holds at least one token"
        );
        let columns_before: Vec<u32> = windows
            .into_iter()
            .map(|window| columns_before(window, block_size))
            .collect();
        Self {
            pool: BlockPool::new(num_blocks),
            tree: RadixTree::new(num_blocks, block_size),
            companions: Companions::new(num_blocks, columns_before.len()),
            columns_before,
            block_size,
            enable_prefix_caching,
            num_evictable: 0,
            version: 0,
            clock: 0,
        }
    }

    /// The cursor of the empty prefix.
    pub fn root(&self, ns: Namespace) -> Cursor {
        self.tree.root(ns)
    }

    /// Extends `cursor` along cached blocks of `tokens` (all of the request's known tokens, from
    /// position 0) to at most `max_blocks` in all. Reads only. Costs O(new blocks) while the cursor
    /// is valid; a stale one, or one of another namespace, starts again at the root.
    ///
    /// For requests that hold nothing yet: it would make a cursor valid again that `clear` made
    /// stale.
    pub fn extend_match(
        &self,
        ns: Namespace,
        cursor: &mut Cursor,
        tokens: &[u32],
        max_blocks: u32,
    ) {
        if cursor.ns != ns || !self.tree.is_valid(*cursor) {
            *cursor = self.tree.root(ns);
        }
        let size = self.block_size as usize;
        let limit = (tokens.len() / size).min(max_blocks as usize);
        while cursor.depth as usize > limit {
            *cursor = self.tree.step_back(*cursor);
        }
        for wanted in tokens[cursor.depth as usize * size..limit * size].chunks_exact(size) {
            let Some(block) = self.tree.child(*cursor, wanted) else {
                break;
            };
            *cursor = self.tree.step(*cursor, block);
        }
    }

    /// How many blocks of the matched path, and of the companions that belong to the match, are
    /// evictable: taking the match makes them used.
    pub fn matched_evictable(&self, cursor: Cursor) -> u32 {
        if !self.tree.is_valid(cursor) {
            return 0;
        }
        // Above a used block all are used.
        let path = self
            .path(cursor)
            .take_while(|&block| self.pool.count(block) == 1);
        path.count() as u32 + self.evictable_companions(cursor)
    }

    /// Takes one reference on each block of the matched path and appends the blocks to `out`, in
    /// the order of their tokens.
    ///
    /// # Panics
    /// If `cursor` is stale. `extend_match` makes it valid; `allocate` and `clear` may make it
    /// stale.
    pub fn take_match(&mut self, cursor: Cursor, out: &mut Vec<BlockId>) {
        assert!(
            self.tree.is_valid(cursor),
            "{cursor:?} is stale: match again before taking"
        );
        let start = out.len();
        out.extend(self.path(cursor));
        for &block in &out[start..] {
            self.retain_one(block);
        }
        out[start..].reverse();
    }

    /// Appends `n` blocks, each with one reference, to `out`; evicts as many least recently used
    /// blocks as the free list lacks. False, and nothing changes, if fewer than `n` are available.
    pub fn allocate(&mut self, n: u32, out: &mut Vec<BlockId>) -> bool {
        if n > self.num_available() {
            return false;
        }
        self.evict(n.saturating_sub(self.num_free()));
        self.pool.allocate(n, out)
    }

    /// Publishes full blocks (`tokens.len() == blocks.len() * block_size`) below the cursor and
    /// advances it. The caller holds `blocks`, and the path above the cursor, in its table or as
    /// shadows.
    ///
    /// Where the tree has the same tokens in another block already, the caller keeps its private
    /// one, and a reference on the tree's is taken and appended to `shadows`. A stale cursor
    /// publishes nothing: the content of its blocks predates `clear`.
    ///
    /// # Panics
    /// If the lengths differ, if nobody holds the path, or if a new block is free, cached elsewhere
    /// or shared: its other holder would lack the shadows above it.
    pub fn publish(
        &mut self,
        ns: Namespace,
        cursor: &mut Cursor,
        tokens: &[u32],
        blocks: &[BlockId],
        shadows: &mut Vec<BlockId>,
    ) {
        let size = self.block_size as usize;
        assert_eq!(
            tokens.len(),
            blocks.len() * size,
            "publish takes {size} tokens for each block"
        );
        assert_eq!(cursor.ns, ns, "a cursor belongs to one namespace");
        if !self.enable_prefix_caching || !self.tree.is_valid(*cursor) {
            return;
        }
        assert!(
            cursor.block == BlockId::NULL || self.pool.count(cursor.block) > 1,
            "{cursor:?} is published below, but no request holds its path"
        );
        for (wanted, &block) in tokens.chunks_exact(size).zip(blocks) {
            let cached = match self.tree.child(*cursor, wanted) {
                Some(cached) => cached,
                None => {
                    assert!(
                        self.pool.count(block) == 1 && !self.tree.contains(block),
                        "block {block} is free, cached elsewhere or shared before it is published"
                    );
                    self.pool.retain(block);
                    self.tree.insert(*cursor, wanted, block);
                    self.version += 1;
                    block
                }
            };
            if cached != block {
                self.retain_one(cached);
                shadows.push(cached);
            }
            *cursor = self.tree.step(*cursor, cached);
        }
    }

    /// Takes one more reference on each block: sharing by handle. With prefix caching, share only
    /// published blocks, with the shadows of their holder, or blocks whose cursor is stale.
    ///
    /// # Panics
    /// If a block is free.
    pub fn retain(&mut self, blocks: &[BlockId]) {
        for &block in blocks {
            self.retain_one(block);
        }
    }

    /// Drops one reference on each block; blocks of a table and shadows alike. A request drops all
    /// of them before anything else is asked of the cache, those of its window groups first. This
    /// is the use that "least recently used" speaks of.
    ///
    /// # Panics
    /// If a block is free.
    pub fn release(&mut self, blocks: &[BlockId]) {
        self.clock += 1;
        for &block in blocks.iter().rev() {
            let count = self.pool.release(block);
            if count == 1 && self.tree.contains(block) {
                self.num_evictable += 1;
                self.tree.set_idle(block, self.clock);
            } else if count == 1 && self.companions.contains(block) {
                self.num_evictable += 1;
                self.companions.set_idle(block, self.clock);
            }
        }
    }

    /// Forgets every cached prefix: evictable blocks become free, used ones merely leave the tree.
    /// All cursors become stale.
    pub fn clear(&mut self) {
        let pool = &mut self.pool;
        self.tree.clear(|block| {
            pool.release(block);
        });
        self.companions.clear(|block| {
            pool.release(block);
        });
        self.num_evictable = 0;
        self.version += 1;
    }

    /// Blocks that nobody holds.
    pub fn num_free(&self) -> u32 {
        self.pool.num_free()
    }

    /// Blocks that only the tree holds.
    pub fn num_evictable(&self) -> u32 {
        self.num_evictable
    }

    /// Blocks that `allocate` can give: free and evictable ones.
    pub fn num_available(&self) -> u32 {
        self.num_free() + self.num_evictable
    }

    /// Blocks there are, but for the null block.
    pub fn num_blocks(&self) -> u32 {
        self.pool.num_blocks()
    }

    /// Blocks in the tree, companions among them.
    pub fn num_cached(&self) -> u32 {
        self.tree.num_cached() + self.companions.len()
    }

    /// Tokens of a block.
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Grows whenever a block enters or leaves the tree: while it is the same, so is every match.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// How many references there are on `block`, the tree's included.
    pub fn ref_count(&self, block: BlockId) -> u32 {
        self.pool.count(block)
    }

    /// Who holds `block`, and where it is in the tree.
    pub(crate) fn view(&self, block: BlockId) -> BlockView {
        let is_node = self.tree.contains(block);
        let is_cached = is_node || self.companions.contains(block);
        let state = match (self.pool.count(block), is_cached) {
            (0, _) => BlockState::Free,
            (1, true) => BlockState::Cached,
            (1, false) | (2, true) => BlockState::Private,
            _ => BlockState::Shared,
        };
        let parent = is_node.then(|| self.tree.parent(block));
        BlockView { state, parent }
    }

    /// Recomputes every count and every set from first principles and compares. `holders` are all
    /// lists of references that requests hold: tables and shadows.
    ///
    /// # Errors
    /// What differs first, in words.
    pub fn check_integrity<'a>(
        &self,
        holders: impl Iterator<Item = &'a [BlockId]>,
    ) -> Result<(), String> {
        let mut expected = vec![0; self.pool.num_blocks() as usize + 1];
        for &block in holders.flatten() {
            expected[block.0 as usize] += 1;
        }
        let is_cached =
            |block: BlockId| self.tree.contains(block) || self.companions.contains(block);
        let is_idle = |block: BlockId| is_cached(block) && expected[block.0 as usize] == 0;
        self.companions.check(
            |block| self.tree.contains(block),
            is_idle,
            |block| self.tree.leaf_key(block).0,
        )?;
        let reachable = self.tree.check(is_idle)? + self.num_idle_companions(is_idle);
        let num_idle = (1..expected.len() as u32)
            .filter(|&id| is_idle(BlockId(id)))
            .count() as u32;
        if (num_idle, reachable) != (self.num_evictable, self.num_evictable) {
            return Err(format!(
                "num_evictable is {}; {num_idle} blocks are held by the tree only, {reachable} of them can be evicted",
                self.num_evictable
            ));
        }
        for (id, count) in expected.iter_mut().enumerate() {
            *count += u32::from(is_cached(BlockId(id as u32)));
        }
        self.pool.check(&expected)
    }

    /// The blocks of a valid cursor's path, last first.
    fn path(&self, cursor: Cursor) -> impl Iterator<Item = BlockId> {
        let above = |&block: &BlockId| Some(self.tree.parent(block));
        std::iter::successors(Some(cursor.block), above).take(cursor.depth as usize)
    }

    fn retain_one(&mut self, block: BlockId) {
        let count = self.pool.retain(block);
        if count == 2 && self.tree.contains(block) {
            self.num_evictable -= 1;
            self.tree.set_used(block);
        } else if count == 2 && self.companions.is_idle(block) {
            self.num_evictable -= 1;
            self.companions.set_used(block);
        }
    }

    /// Frees the `n` evictable blocks that were used least recently, companions and leaves. Of
    /// equals, companions go first: none was used later than its node, so it goes before it. Ties of
    /// leaves go by block id.
    fn evict(&mut self, n: u32) {
        let mut missing = n;
        while missing > 0 {
            if self.evict_oldest_companion() {
                missing -= 1;
                continue;
            }
            let Some(mut block) = self.tree.pop_idle_leaf() else {
                break;
            };
            // Follow the edge upwards while it holds the oldest leaf: one search of the set per edge, not per block.
            loop {
                let parent = self.tree.remove_leaf(block);
                self.pool.release(block);
                self.num_evictable -= 1;
                missing -= 1;
                if parent == BlockId::NULL
                    || self.pool.count(parent) > 1
                    || !self.tree.is_leaf(parent)
                {
                    break;
                }
                let key = self.tree.leaf_key(parent);
                let is_oldest = self.tree.first_idle_leaf().is_none_or(|first| key < first)
                    && self
                        .companions
                        .first_idle()
                        .is_none_or(|(last_use, _)| key.0 < last_use);
                if missing == 0 || !is_oldest {
                    self.tree.add_idle_leaf(parent);
                    break;
                }
                block = parent;
            }
        }
        if missing < n {
            self.version += 1;
        }
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod window_tests;
