//! The control plane for onlookers: blocks in slices that cost little each, and what the newest step computes.

use std::ops::Range;

use crate::ids::BlockId;
use crate::scheduler::Core;

/// Who holds a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockState {
    /// Nobody.
    Free,
    /// One request.
    Private,
    /// Two requests or more.
    Shared,
    /// The tree alone: it may be found again, or evicted.
    Cached,
}

/// One block of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockView {
    /// Who holds it.
    pub state: BlockState,
    /// If it is a node of the radix tree, the block before it on its path; the null block for the first.
    pub parent: Option<BlockId>,
}

/// What a step computes, summed over its rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepBatch {
    /// Rows of one token and its drafts, at the end of what is known.
    pub decode_rows: u32,
    /// Their query tokens.
    pub decode_tokens: u32,
    /// Rows of prompts, or of sequences that are computed again.
    pub prefill_rows: u32,
    /// Their query tokens.
    pub prefill_tokens: u32,
    /// Tokens whose keys and values the step reads, summed over rows and cache groups: a window group's row reads no more than its window.
    pub kv_tokens: u64,
}

impl Core {
    /// Appends the blocks with ids in `ids` to `out`, as far as there are such. The null block counts as free. O(ids).
    pub fn view_blocks(&self, ids: Range<u32>, out: &mut Vec<BlockView>) {
        let end = ids.end.min(self.config.num_blocks);
        out.extend((ids.start..end).map(|id| self.cache.view(BlockId(id))));
    }

    /// The newest step in flight: `num_decode_rows` of its plan come first. None if none is. O(rows).
    pub fn newest_batch(&self, num_decode_rows: u32) -> Option<StepBatch> {
        let mut batch = StepBatch::default();
        for (place, row) in (0..).zip(&self.in_flight.back()?.rows) {
            let (rows, tokens) = if place < num_decode_rows {
                (&mut batch.decode_rows, &mut batch.decode_tokens)
            } else {
                (&mut batch.prefill_rows, &mut batch.prefill_tokens)
            };
            *rows += 1;
            *tokens += row.query;
            let seen = u64::from(row.computed + row.query);
            batch.kv_tokens += seen;
            for &window in &self.windows {
                batch.kv_tokens += seen.min(u64::from(window) + u64::from(row.query) - 1);
            }
        }
        Some(batch)
    }
}
