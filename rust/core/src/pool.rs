//! Owns every block's reference count and the free list. Knows nothing of tokens or of who holds a
//! reference.

use crate::ids::BlockId;

/// Reference counts and the free list. Count 0 ⇔ in the free list; the null block is in neither.
#[derive(Debug)]
pub(crate) struct BlockPool {
    counts: Vec<u32>,
    /// A stack. Lists are released from their end, so that they come back in the order of their
    /// tokens.
    free: Vec<BlockId>,
}

impl BlockPool {
    /// A pool of `num_blocks` blocks, the null block included.
    pub(crate) fn new(num_blocks: u32) -> Self {
        assert!(
            num_blocks > 0,
            "num_blocks = 0: a pool has at least the null block"
        );
        Self {
            counts: vec![0; num_blocks as usize],
            free: (1..num_blocks).rev().map(BlockId).collect(),
        }
    }

    /// Blocks that can be allocated: all but the null block.
    pub(crate) fn num_blocks(&self) -> u32 {
        self.counts.len() as u32 - 1
    }

    pub(crate) fn num_free(&self) -> u32 {
        self.free.len() as u32
    }

    pub(crate) fn count(&self, block: BlockId) -> u32 {
        self.counts[block.0 as usize]
    }

    /// Appends `n` free blocks, each with one reference, to `out`. False, and nothing changes, if
    /// fewer are free.
    pub(crate) fn allocate(&mut self, n: u32, out: &mut Vec<BlockId>) -> bool {
        let Some(rest) = self.free.len().checked_sub(n as usize) else {
            return false;
        };
        for &block in self.free[rest..].iter().rev() {
            self.counts[block.0 as usize] = 1;
            out.push(block);
        }
        self.free.truncate(rest);
        true
    }

    /// Adds a reference to a block that has one, and returns the new count.
    ///
    /// # Panics
    /// If the block is free or null: its content belongs to nobody.
    pub(crate) fn retain(&mut self, block: BlockId) -> u32 {
        let count = &mut self.counts[block.0 as usize];
        assert!(*count > 0, "block {block} is retained but nobody holds it");
        *count += 1;
        *count
    }

    /// Drops a reference and returns the new count; at 0 the block is free.
    ///
    /// # Panics
    /// If the block is free or null: a second release would hand it to two requests.
    pub(crate) fn release(&mut self, block: BlockId) -> u32 {
        let count = &mut self.counts[block.0 as usize];
        assert!(*count > 0, "block {block} is released but nobody holds it");
        *count -= 1;
        if *count == 0 {
            self.free.push(block);
        }
        *count
    }

    /// Compares the counts with `expected`, one per block, and the free list with the counts.
    pub(crate) fn check(&self, expected: &[u32]) -> Result<(), String> {
        for (id, (&count, &expected)) in self.counts.iter().zip(expected).enumerate() {
            if count != expected {
                return Err(format!(
                    "block {id} has count {count}, {expected} references exist"
                ));
            }
        }
        let mut is_free = vec![false; self.counts.len()];
        for &block in &self.free {
            if std::mem::replace(&mut is_free[block.0 as usize], true) {
                return Err(format!("block {block} is twice in the free list"));
            }
        }
        if is_free[0] || self.counts[0] != 0 {
            return Err("the null block is free or held".into());
        }
        match (1..self.counts.len()).find(|&id| is_free[id] != (self.counts[id] == 0)) {
            Some(id) => Err(format!(
                "block {id} has count {} and is_free = {}",
                self.counts[id], is_free[id]
            )),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_come_back_in_the_order_of_their_list() {
        let mut pool = BlockPool::new(6);
        let mut blocks = Vec::new();
        assert!(pool.allocate(4, &mut blocks));
        for &block in blocks[1..].iter().rev() {
            assert_eq!(pool.release(block), 0);
        }
        let mut again = Vec::new();
        assert!(pool.allocate(4, &mut again));
        assert_eq!(again, [2, 3, 4, 5].map(BlockId));
    }

    #[test]
    fn a_block_is_free_when_its_last_holder_drops_it() {
        let mut pool = BlockPool::new(2);
        let mut blocks = Vec::new();
        assert!(pool.allocate(1, &mut blocks));
        assert_eq!(pool.retain(blocks[0]), 2);
        assert_eq!((pool.release(blocks[0]), pool.num_free()), (1, 0));
        assert_eq!((pool.release(blocks[0]), pool.num_free()), (0, 1));
    }

    #[test]
    #[should_panic(expected = "block 0 is retained but nobody holds it")]
    fn the_null_block_is_never_held() {
        BlockPool::new(2).retain(BlockId::NULL);
    }

    #[test]
    fn check_notices_each_kind_of_damage() {
        type Damage = fn(&mut BlockPool);
        let damages: [(&str, Damage); 5] = [
            ("block 1 has count 2, 1 references", |pool| {
                pool.counts[1] = 2
            }),
            ("block 3 is twice in the free list", |pool| {
                pool.free.push(BlockId(3))
            }),
            ("the null block is free", |pool| {
                pool.free.push(BlockId::NULL)
            }),
            ("block 1 has count 1 and is_free = true", |pool| {
                pool.free.push(BlockId(1))
            }),
            ("block 2 has count 0 and is_free = false", |pool| {
                pool.free.truncate(1)
            }),
        ];
        for (expected, damage) in damages {
            let mut pool = BlockPool::new(4);
            assert!(pool.allocate(1, &mut Vec::new()));
            assert_eq!(pool.check(&[0, 1, 0, 0]), Ok(()));
            damage(&mut pool);
            let error = pool.check(&[0, 1, 0, 0]).expect_err(expected);
            assert!(error.contains(expected), "{error}");
        }
    }
}
