//! Counts for metrics.

use crate::request::Sequence;
use crate::scheduler::Core;

/// Counts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counters {
    pub(crate) preemptions: u64,
    pub(crate) query_tokens: u64,
    pub(crate) hit_tokens: u64,
    pub(crate) generation_tokens: u64,
}

impl Counters {
    /// A sequence found `hit_tokens` of its known tokens in the cache.
    pub(crate) fn admitted(&mut self, sequence: &Sequence, hit_tokens: u32) {
        self.query_tokens += u64::from(sequence.num_tokens());
        self.hit_tokens += u64::from(hit_tokens);
    }
}

/// Where blocks and tokens are now, and counts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Stats {
    /// Sequences with a slot.
    pub num_running: usize,
    /// Sequences without one.
    pub num_waiting: usize,
    /// Blocks that can be allocated, the null block left out.
    pub num_blocks: u32,
    /// Blocks that nobody holds.
    pub free_blocks: u32,
    /// Blocks that only the tree holds.
    pub evictable_blocks: u32,
    /// Blocks in the tree.
    pub cached_blocks: u32,
    /// Blocks of releases that steps in flight still see.
    pub coming_blocks: u32,
    /// Bytes of the blocks that somebody holds who may still need them: neither free nor evictable.
    pub used_bytes: u64,
    /// Tokens for which running sequences hold blocks, summed over all groups, a shared block counted for each holder.
    pub allocated_tokens: u64,
    /// Those of them whose KV is computed by a step that is scheduled (drafts in flight included). `(allocated − filled) / allocated` is
    /// the waste of the KV cache.
    pub filled_tokens: u64,
    /// Known tokens of all admissions.
    pub query_tokens: u64,
    /// Those of them found in the cache.
    pub hit_tokens: u64,
    /// Output tokens of all requests.
    pub generation_tokens: u64,
    /// Preemptions.
    pub preemptions: u64,
}

impl Core {
    /// Counts for metrics. O(running).
    pub fn stats(&self) -> Stats {
        let mut stats = Stats {
            num_running: self.num_running(),
            num_waiting: self.num_waiting(),
            num_blocks: self.cache.num_blocks(),
            free_blocks: self.cache.num_free(),
            evictable_blocks: self.cache.num_evictable(),
            cached_blocks: self.cache.num_cached(),
            coming_blocks: self.coming_blocks,
            used_bytes: u64::from(self.cache.num_blocks() - self.cache.num_available())
                * self.config.bytes_per_block,
            query_tokens: self.counters.query_tokens,
            hit_tokens: self.counters.hit_tokens,
            generation_tokens: self.counters.generation_tokens,
            preemptions: self.counters.preemptions,
            ..Stats::default()
        };
        for &key in &self.running {
            let sequence = &self.seqs[key];
            let (size, computed) = (
                u64::from(self.config.block_size),
                u64::from(sequence.computed_bound),
            );
            stats.allocated_tokens += sequence.blocks.len() as u64 * size;
            stats.filled_tokens += computed;
            for table in &sequence.windows {
                let allocated = u64::from(table.len()) * size;
                stats.allocated_tokens += allocated;
                let from_first = computed.saturating_sub(u64::from(table.first()) * size);
                stats.filled_tokens += from_first.min(allocated);
            }
        }
        stats
    }

    /// Forgets every cached prefix: after new weights, or to measure from cold. Running requests keep their blocks.
    pub fn reset_prefix_cache(&mut self) {
        self.cache.clear();
    }
}
