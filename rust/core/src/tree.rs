//! The radix tree of cached prefixes: which block holds which tokens below which prefix, and which
//! leaf goes first. Knows nothing of requests or reference counts: its owner says when a block
//! becomes idle (held by the tree only) or used.
//!
//! Every node is one block, addressed by its id, so an edge of the radix tree is a chain of blocks:
//! the first child of a block is linked directly (`next`), and only its siblings, and the first
//! blocks of namespaces, are found by a hash. Walking an edge therefore costs one exact comparison
//! per block and no hash, and two prompts that part in the middle of an edge split nothing: the
//! second becomes a branch of the last common block.

use std::collections::BTreeSet;
use std::hash::{BuildHasher, RandomState};

use crate::ids::{BlockId, Namespace};

mod integrity;

/// Where a path of cached blocks ends. Valid until its last block leaves the tree; from then on it
/// is stale, for ever, because every publication has a stamp of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cursor {
    pub(crate) ns: Namespace,
    /// Last block of the path; the null block at the root.
    pub(crate) block: BlockId,
    pub(crate) depth: u32,
    pub(crate) stamp: u64,
}

impl Cursor {
    /// Length of the path, in blocks.
    pub fn depth(&self) -> u32 {
        self.depth
    }
}

/// When an idle leaf was last used, then its id: the order of eviction.
pub(crate) type LeafKey = (u64, BlockId);

/// One block's place in the tree. Block 0 is the root of all namespaces; it has no `next`.
#[derive(Clone, Copy, Debug, Default)]
struct Node {
    parent: BlockId,
    /// The child that continues the edge, or null.
    next: BlockId,
    /// How many children besides `next` the branch table holds.
    num_branches: u32,
    /// The next entry of this block's bucket, if it is in the branch table.
    chain: BlockId,
    /// Number of this publication; 0 if the block is not in the tree. The root's changes with
    /// `clear`.
    stamp: u64,
    last_use: u64,
}

#[derive(Debug)]
pub(crate) struct RadixTree {
    block_size: usize,
    nodes: Vec<Node>,
    /// Tokens of each block, `[num_blocks, block_size]`.
    tokens: Vec<u32>,
    /// Namespaces of the root's children, by block id.
    namespaces: Vec<Namespace>,
    /// The branch table: heads of chains of blocks. As many as blocks, so it never grows.
    buckets: Vec<BlockId>,
    /// SipHash under random keys: nobody can choose prompts that collide. It finds candidates,
    /// tokens decide.
    hasher: RandomState,
    idle_leaves: BTreeSet<LeafKey>,
    num_cached: u32,
    last_stamp: u64,
}

impl RadixTree {
    /// An empty tree over block ids below `num_blocks`.
    pub(crate) fn new(num_blocks: u32, block_size: u32) -> Self {
        Self::with_buckets(num_blocks, block_size, num_blocks.next_power_of_two())
    }

    fn with_buckets(num_blocks: u32, block_size: u32, num_buckets: u32) -> Self {
        let n = num_blocks as usize;
        let mut nodes = vec![Node::default(); n];
        nodes[0].stamp = 1;
        Self {
            block_size: block_size as usize,
            nodes,
            tokens: vec![0; n * block_size as usize],
            namespaces: vec![Namespace(0); n],
            buckets: vec![BlockId::NULL; num_buckets as usize],
            hasher: RandomState::new(),
            idle_leaves: BTreeSet::new(),
            num_cached: 0,
            last_stamp: 1,
        }
    }

    pub(crate) fn num_cached(&self) -> u32 {
        self.num_cached
    }

    pub(crate) fn root(&self, ns: Namespace) -> Cursor {
        Cursor {
            ns,
            block: BlockId::NULL,
            depth: 0,
            stamp: self.node(BlockId::NULL).stamp,
        }
    }

    pub(crate) fn is_valid(&self, cursor: Cursor) -> bool {
        self.node(cursor.block).stamp == cursor.stamp
    }

    pub(crate) fn contains(&self, block: BlockId) -> bool {
        block != BlockId::NULL && self.node(block).stamp != 0
    }

    /// The block before this one on its path; null for the first.
    pub(crate) fn parent(&self, block: BlockId) -> BlockId {
        self.node(block).parent
    }

    /// The cursor one block below `cursor`, at its child `block`.
    pub(crate) fn step(&self, cursor: Cursor, block: BlockId) -> Cursor {
        Cursor {
            ns: cursor.ns,
            block,
            depth: cursor.depth + 1,
            stamp: self.node(block).stamp,
        }
    }

    /// The cursor one block above `cursor`, which is valid and not at the root.
    pub(crate) fn step_back(&self, cursor: Cursor) -> Cursor {
        let block = self.parent(cursor.block);
        Cursor {
            ns: cursor.ns,
            block,
            depth: cursor.depth - 1,
            stamp: self.node(block).stamp,
        }
    }

    /// The child of a valid cursor's block that holds exactly `tokens`, one block of them.
    pub(crate) fn child(&self, cursor: Cursor, tokens: &[u32]) -> Option<BlockId> {
        let node = self.node(cursor.block);
        if node.next != BlockId::NULL && self.tokens(node.next) == tokens {
            return Some(node.next);
        }
        if node.num_branches == 0 {
            return None;
        }
        let mut block = self.buckets[self.bucket(cursor.ns, cursor.block, tokens)];
        while block != BlockId::NULL {
            let candidate = self.node(block);
            if candidate.parent == cursor.block
                && (cursor.block != BlockId::NULL || self.namespaces[block.0 as usize] == cursor.ns)
                && self.tokens(block) == tokens
            {
                return Some(block);
            }
            block = candidate.chain;
        }
        None
    }

    /// Adds `block`, used and not in the tree, with `tokens` below a valid cursor that has no such
    /// child and whose block is used.
    pub(crate) fn insert(&mut self, cursor: Cursor, tokens: &[u32], block: BlockId) {
        self.last_stamp += 1;
        self.num_cached += 1;
        let at = block.0 as usize;
        let mut node = Node {
            parent: cursor.block,
            stamp: self.last_stamp,
            ..Node::default()
        };
        self.tokens[at * self.block_size..][..self.block_size].copy_from_slice(tokens);
        if cursor.block != BlockId::NULL && self.node(cursor.block).next == BlockId::NULL {
            self.node_mut(cursor.block).next = block;
        } else {
            self.namespaces[at] = cursor.ns;
            let bucket = self.bucket(cursor.ns, cursor.block, tokens);
            node.chain = std::mem::replace(&mut self.buckets[bucket], block);
            self.node_mut(cursor.block).num_branches += 1;
        }
        *self.node_mut(block) = node;
    }

    /// Takes a leaf that is not among the idle ones out of the tree and returns its parent.
    pub(crate) fn remove_leaf(&mut self, block: BlockId) -> BlockId {
        let node = std::mem::take(self.node_mut(block));
        self.num_cached -= 1;
        let parent = self.node_mut(node.parent);
        if parent.next == block {
            parent.next = BlockId::NULL;
        } else {
            parent.num_branches -= 1;
            self.unchain(block, node);
        }
        node.parent
    }

    fn unchain(&mut self, block: BlockId, node: Node) {
        let bucket = self.bucket(
            self.namespaces[block.0 as usize],
            node.parent,
            self.tokens(block),
        );
        let mut before = self.buckets[bucket];
        if before == block {
            self.buckets[bucket] = node.chain;
            return;
        }
        while self.node(before).chain != block {
            before = self.node(before).chain;
        }
        self.node_mut(before).chain = node.chain;
    }

    /// Notes that only the tree holds `block` from now on.
    pub(crate) fn set_idle(&mut self, block: BlockId, now: u64) {
        self.node_mut(block).last_use = now;
        self.add_idle_leaf(block);
    }

    /// Notes that an idle `block` is in use again.
    pub(crate) fn set_used(&mut self, block: BlockId) {
        if self.is_leaf(block) {
            self.idle_leaves.remove(&self.leaf_key(block));
        }
    }

    /// Puts an idle block among the idle leaves if it is a leaf.
    pub(crate) fn add_idle_leaf(&mut self, block: BlockId) {
        if self.is_leaf(block) {
            self.idle_leaves.insert(self.leaf_key(block));
        }
    }

    /// Takes the idle leaf that was used least recently out of their set; it stays in the tree.
    pub(crate) fn pop_idle_leaf(&mut self) -> Option<BlockId> {
        self.idle_leaves.pop_first().map(|(_, block)| block)
    }

    /// The key of the next `pop_idle_leaf`.
    pub(crate) fn first_idle_leaf(&self) -> Option<LeafKey> {
        self.idle_leaves.first().copied()
    }

    pub(crate) fn leaf_key(&self, block: BlockId) -> LeafKey {
        (self.node(block).last_use, block)
    }

    pub(crate) fn is_leaf(&self, block: BlockId) -> bool {
        let node = self.node(block);
        node.next == BlockId::NULL && node.num_branches == 0
    }

    /// Forgets everything; calls `removed` for each block that was in the tree. All cursors become
    /// stale.
    pub(crate) fn clear(&mut self, mut removed: impl FnMut(BlockId)) {
        for id in (1..self.nodes.len()).rev() {
            if std::mem::take(&mut self.nodes[id]).stamp != 0 {
                removed(BlockId(id as u32));
            }
        }
        self.last_stamp += 1;
        self.nodes[0] = Node {
            stamp: self.last_stamp,
            ..Node::default()
        };
        self.buckets.fill(BlockId::NULL);
        self.idle_leaves.clear();
        self.num_cached = 0;
    }

    fn bucket(&self, ns: Namespace, parent: BlockId, tokens: &[u32]) -> usize {
        self.hasher.hash_one((ns, parent, tokens)) as usize & (self.buckets.len() - 1)
    }

    fn tokens(&self, block: BlockId) -> &[u32] {
        &self.tokens[block.0 as usize * self.block_size..][..self.block_size]
    }

    fn node(&self, block: BlockId) -> &Node {
        &self.nodes[block.0 as usize]
    }

    fn node_mut(&mut self, block: BlockId) -> &mut Node {
        &mut self.nodes[block.0 as usize]
    }
}

#[cfg(test)]
mod tests;
