//! Window groups in the cache: how much of a cached path they can use, and the companions they leave beside it.

use super::{Cursor, KvCache};
use crate::ids::BlockId;
use crate::window::WindowTable;

impl KvCache {
    /// The longest part of a matched path that every group can go on from: the whole of it for the full group, and companions in the
    /// columns before its end that a query reads. One walk up from the end; O(1) without window groups.
    pub fn usable_match(&self, cursor: Cursor) -> Cursor {
        let Some(&most_before) = self.columns_before.iter().max() else {
            return cursor;
        };
        let (mut usable, mut at) = (cursor, cursor);
        while at.depth > 0 && at.depth + most_before > usable.depth {
            let column = at.depth - 1;
            let is_missing = |(group, &before): (usize, &u32)| {
                column + before >= usable.depth && self.companions.get(at.block, group).is_none()
            };
            let has_hole = self.columns_before.iter().enumerate().any(is_missing);
            at = self.tree.step_back(at);
            if has_hole {
                // No end between the hole and the window's width behind it will do.
                usable = at;
            }
        }
        usable
    }

    /// Takes one reference on each companion that belongs to a usable match, whose path is taken. One table for each window group.
    ///
    /// # Panics
    /// If a companion is missing: the match is not usable.
    pub fn take_windows(&mut self, cursor: Cursor) -> Vec<WindowTable> {
        let tables: Vec<WindowTable> = (0..self.columns_before.len())
            .map(|group| {
                let mut blocks: Vec<BlockId> = self
                    .companions_of(cursor, group)
                    .map(|block| block.expect("a usable match has its companions"))
                    .collect();
                blocks.reverse();
                WindowTable::new(cursor.depth - blocks.len() as u32, blocks)
            })
            .collect();
        for table in &tables {
            table.parts().into_iter().for_each(|part| self.retain(part));
        }
        tables
    }

    /// Makes the caller's window blocks companions of the nodes that it has published from column `first` up to the cursor, where these
    /// have none that a request uses. A companion that the tree alone holds is replaced: its content exists twice.
    pub fn attach_windows(&mut self, cursor: Cursor, first: u32, tables: &[WindowTable]) {
        if cursor.depth <= first || !self.tree.is_valid(cursor) {
            return;
        }
        let mut at = cursor;
        while at.depth > first {
            for (group, table) in tables.iter().enumerate() {
                if let Some(block) = table.get(at.depth - 1) {
                    self.attach(at.block, group, block);
                }
            }
            at = self.tree.step_back(at);
        }
    }

    fn attach(&mut self, node: BlockId, group: usize, block: BlockId) {
        match self.companions.get(node, group) {
            Some(companion) if self.companions.is_idle(companion) => {
                self.evict_companion(companion)
            }
            Some(_) => return,
            None => self.version += 1,
        }
        assert!(
            self.pool.count(block) == 1 && !self.tree.contains(block),
            "block {block} is free, cached elsewhere or shared before it is published"
        );
        self.pool.retain(block);
        self.companions.insert(node, group, block);
    }

    /// How many columns before a hit of `depth` blocks each window group reads.
    pub(crate) fn window_columns(&self, depth: u32) -> impl Iterator<Item = u32> {
        self.columns_before
            .iter()
            .map(move |&before| before.min(depth))
    }

    /// Companions of a usable match, last first.
    fn companions_of(&self, cursor: Cursor, group: usize) -> impl Iterator<Item = Option<BlockId>> {
        self.path(cursor)
            .take(self.columns_before[group] as usize)
            .map(move |node| self.companions.get(node, group))
    }

    pub(super) fn evictable_companions(&self, cursor: Cursor) -> u32 {
        let groups = 0..self.columns_before.len();
        let companions = groups.flat_map(|group| self.companions_of(cursor, group));
        companions
            .flatten()
            .filter(|&block| self.companions.is_idle(block))
            .count() as u32
    }

    /// Frees the idle companion that was used least recently, unless a leaf is older.
    pub(super) fn evict_oldest_companion(&mut self) -> bool {
        let Some((last_use, companion)) = self.companions.first_idle() else {
            return false;
        };
        if self
            .tree
            .first_idle_leaf()
            .is_some_and(|(leaf_use, _)| leaf_use < last_use)
        {
            return false;
        }
        self.evict_companion(companion);
        true
    }

    pub(super) fn evict_companion(&mut self, companion: BlockId) {
        self.companions.remove(companion);
        self.pool.release(companion);
        self.num_evictable -= 1;
    }

    pub(super) fn num_idle_companions(&self, is_idle: impl Fn(BlockId) -> bool) -> u32 {
        let companions = (1..=self.num_blocks()).map(BlockId);
        companions
            .filter(|&block| self.companions.contains(block) && is_idle(block))
            .count() as u32
    }
}
