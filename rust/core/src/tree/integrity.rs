//! Recomputes the tree from the parent links alone and compares everything else with it.

use std::collections::{BTreeSet, HashSet};

use super::{LeafKey, RadixTree};
use crate::ids::BlockId;

impl RadixTree {
    /// Compares links, branch table and idle leaves with what the parent links and `is_idle` say.
    /// Returns how many blocks an eviction that takes only idle leaves could reach.
    pub(crate) fn check(&self, is_idle: impl Fn(BlockId) -> bool) -> Result<u32, String> {
        let cached: Vec<BlockId> = (1..self.nodes.len() as u32)
            .map(BlockId)
            .filter(|&b| self.contains(b))
            .collect();
        if cached.len() != self.num_cached as usize {
            return Err(format!(
                "num_cached is {}, {} blocks are in the tree",
                self.num_cached,
                cached.len()
            ));
        }
        let stamps: HashSet<u64> = cached.iter().map(|&b| self.node(b).stamp).collect();
        if stamps.len() != cached.len() || stamps.iter().any(|&stamp| stamp > self.last_stamp) {
            return Err("two publications share a stamp, or one is from the future".into());
        }
        let mut children = vec![Vec::new(); self.nodes.len()];
        for &block in &cached {
            let parent = self.parent(block);
            if parent != BlockId::NULL && !self.contains(parent) {
                return Err(format!(
                    "the parent {parent} of block {block} is not in the tree"
                ));
            }
            children[parent.0 as usize].push(block);
        }
        let order = self.top_down(&children)?;
        let branches = self.check_children(&children)?;
        self.check_branch_table(&branches)?;
        self.check_idle_leaves(&cached, &children, &is_idle)?;
        Ok(count_reachable(&order, &children, is_idle))
    }

    /// All cached blocks, parents before children.
    fn top_down(&self, children: &[Vec<BlockId>]) -> Result<Vec<BlockId>, String> {
        let mut order = children[0].clone();
        let mut at = 0;
        while at < order.len() {
            order.extend(&children[order[at].0 as usize]);
            at += 1;
        }
        if order.len() != self.num_cached as usize {
            return Err(format!(
                "{} of {} cached blocks can be reached from the root",
                order.len(),
                self.num_cached
            ));
        }
        Ok(order)
    }

    /// Checks each block's links to its children and returns the children that belong in the branch
    /// table.
    fn check_children(&self, children: &[Vec<BlockId>]) -> Result<HashSet<BlockId>, String> {
        let mut branches = HashSet::new();
        for (id, children) in children.iter().enumerate() {
            let node = &self.nodes[id];
            if node.next != BlockId::NULL && (id == 0 || !children.contains(&node.next)) {
                return Err(format!(
                    "block {id} is continued by {}, which is no child of it",
                    node.next
                ));
            }
            let others = children.iter().filter(|&&child| child != node.next);
            if others.clone().count() != node.num_branches as usize {
                return Err(format!(
                    "block {id} counts {} branches, its children are {children:?}",
                    node.num_branches
                ));
            }
            branches.extend(others);
            let mut contents = HashSet::new();
            for &child in children {
                let ns = (id == 0).then(|| self.namespaces[child.0 as usize]);
                if !contents.insert((ns, self.tokens(child))) {
                    return Err(format!("block {child} has a sibling with the same tokens"));
                }
            }
        }
        Ok(branches)
    }

    fn check_branch_table(&self, branches: &HashSet<BlockId>) -> Result<(), String> {
        let mut seen = HashSet::new();
        for (bucket, &head) in self.buckets.iter().enumerate() {
            let mut block = head;
            while block != BlockId::NULL {
                if !branches.contains(&block) || !seen.insert(block) {
                    return Err(format!(
                        "block {block} is in bucket {bucket} but no branch, or there twice"
                    ));
                }
                let ns = self.namespaces[block.0 as usize];
                if self.bucket(ns, self.parent(block), self.tokens(block)) != bucket {
                    return Err(format!(
                        "block {block} is in bucket {bucket}, its key in another"
                    ));
                }
                block = self.node(block).chain;
            }
        }
        if seen.len() != branches.len() {
            return Err(format!(
                "the branch table has {} of {} branches",
                seen.len(),
                branches.len()
            ));
        }
        Ok(())
    }

    fn check_idle_leaves(
        &self,
        cached: &[BlockId],
        children: &[Vec<BlockId>],
        is_idle: impl Fn(BlockId) -> bool,
    ) -> Result<(), String> {
        let leaves = cached
            .iter()
            .filter(|block| children[block.0 as usize].is_empty() && is_idle(**block));
        let expected: BTreeSet<LeafKey> = leaves
            .map(|&block| (self.node(block).last_use, block))
            .collect();
        if expected != self.idle_leaves {
            return Err(format!(
                "idle leaves are {:?}, should be {expected:?}",
                self.idle_leaves
            ));
        }
        Ok(())
    }
}

/// How many blocks are idle with everything below them.
fn count_reachable(
    order: &[BlockId],
    children: &[Vec<BlockId>],
    is_idle: impl Fn(BlockId) -> bool,
) -> u32 {
    let mut reachable = vec![false; children.len()];
    for &block in order.iter().rev() {
        let below = &children[block.0 as usize];
        reachable[block.0 as usize] =
            is_idle(block) && below.iter().all(|child| reachable[child.0 as usize]);
    }
    reachable.iter().filter(|&&reached| reached).count() as u32
}
