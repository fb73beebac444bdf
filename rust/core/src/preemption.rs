//! The way out before the end: who gives up its blocks when there are too few, and when they come back.

use crate::ids::{BlockId, Slot, StepId};
use crate::output::FinishReason;
use crate::plan::FULL_GROUP;
use crate::request::{Blocks, Phase, SeqKey};
use crate::scheduler::{Core, Ended, Release};
use crate::window::first_visible;

/// What became of a row that needs a block more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    /// It has blocks for one token and so many drafts.
    For {
        /// Drafts, not more than asked for.
        drafts: u32,
    },
    /// It waits: for a commit, or for those before it to end.
    NotNow,
    /// It is not running any more.
    Gone,
}

impl Core {
    /// Sees to it that the running sequence at `position` has blocks for one more token and up to `drafts` drafts.
    pub(crate) fn make_room(&mut self, position: usize, drafts: u32) -> Room {
        let key = self.running[position];
        let sequence = &self.seqs[key];
        let held = sequence.num_columns();
        let length = sequence.computed_bound + 1;
        let needed = self.config.blocks_for(length + drafts);
        if needed <= held || self.grow(key, needed) {
            return Room::For { drafts };
        }
        let free_tokens = held * self.config.block_size - (length - 1);
        if free_tokens > 0 {
            return Room::For {
                drafts: free_tokens - 1,
            };
        }
        let room = self.make_room_for_column(position, held + 1);
        if room == Room::NotNow {
            // Nobody after it takes the few blocks there are, or it would wait for ever.
            self.draft.is_short = true;
        }
        room
    }

    /// The same where everything the sequence holds is full: a block of each group that lacks one, by preemption if need be.
    fn make_room_for_column(&mut self, position: usize, columns: u32) -> Room {
        let key = self.running[position];
        loop {
            if self.grow(key, columns) {
                return Room::For { drafts: 0 };
            }
            let missing = self.missing_blocks(key, columns);
            if self.draft.is_short || self.cache.num_available() + self.coming_blocks >= missing {
                return Room::NotNow;
            }
            let is_last = position + 1 == self.running.len();
            if is_last && position == 0 && self.in_flight.is_empty() {
                // Alone, and the rest of the pool is cached blocks whose content it holds twice.
                self.preempt(position);
                return Room::Gone;
            }
            // Those before it go on, so it keeps what it has until they end or take it.
            if is_last || (position > 0 && !self.can_gain_after(position)) {
                return Room::NotNow;
            }
            self.preempt(self.running.len() - 1);
        }
    }

    /// Blocks that a running sequence lacks for so many columns, over all groups.
    fn missing_blocks(&self, key: SeqKey, columns: u32) -> u32 {
        let sequence = &self.seqs[key];
        let lacks = |held: u32| columns.saturating_sub(held);
        let of_windows: u32 = sequence
            .windows
            .iter()
            .map(|table| lacks(table.end()))
            .sum();
        lacks(sequence.blocks.len() as u32) + of_windows
    }

    /// Sees to it that a running sequence holds so many columns in every group, and writes the new ones into the plan. False, and nothing
    /// changes, if there are too few blocks, or if one before it waits for these.
    fn grow(&mut self, key: SeqKey, columns: u32) -> bool {
        let missing = self.missing_blocks(key, columns);
        if self.draft.is_short || missing > self.cache.num_available() {
            return false;
        }
        let sequence = &mut self.seqs[key];
        let first = sequence.blocks.len();
        let full = columns.saturating_sub(first as u32);
        let is_allocated = self.cache.allocate(full, &mut sequence.blocks);
        assert!(is_allocated, "the missing blocks are available");
        self.draft
            .write_blocks(sequence.slot, FULL_GROUP, first, &sequence.blocks[first..]);
        self.grow_windows(key, columns);
        true
    }

    /// The same for the window groups alone, whose blocks are available.
    fn grow_windows(&mut self, key: SeqKey, columns: u32) {
        let sequence = &mut self.seqs[key];
        for (group, table) in (FULL_GROUP + 1..).zip(&mut sequence.windows) {
            let first = table.end();
            self.new_blocks.clear();
            let n = columns.saturating_sub(first);
            let is_allocated = self.cache.allocate(n, &mut self.new_blocks);
            assert!(is_allocated, "the missing blocks are available");
            for &block in &self.new_blocks {
                table.push(block);
            }
            self.draft
                .write_blocks(sequence.slot, group, first as usize, &self.new_blocks);
        }
    }

    /// How many of `chunk` further known tokens a running sequence has window blocks for, after taking what is available: all of them
    /// without window groups.
    pub(crate) fn fit_chunk(&mut self, key: SeqKey, chunk: u32) -> u32 {
        let num_windows = self.windows.len() as u32;
        if num_windows == 0 {
            return chunk;
        }
        let (computed, held) = {
            let sequence = &self.seqs[key];
            (sequence.computed_bound, sequence.num_columns())
        };
        let wanted = self
            .config
            .blocks_for(computed + chunk)
            .saturating_sub(held);
        let most = if self.draft.is_short {
            0
        } else {
            let writes = self.draft.free_block_writes(&self.layout) as u32;
            self.cache.num_available().min(writes) / num_windows
        };
        let columns = held + wanted.min(most);
        self.grow_windows(key, columns);
        chunk.min(columns * self.config.block_size - computed)
    }

    /// Gives back the blocks that no query will read any more: drafts in flight may be rejected, and steps in flight still read theirs.
    pub(crate) fn slide_windows(&mut self) {
        if self.windows.is_empty() {
            return;
        }
        let mut blocks = Blocks::default();
        for &key in &self.running {
            let sequence = &mut self.seqs[key];
            let lowest = sequence.lowest_computed();
            for (table, &window) in sequence.windows.iter_mut().zip(&self.windows) {
                let first = first_visible(lowest, window, self.config.block_size);
                table.drop_before(first, &mut blocks.windows);
            }
        }
        if !blocks.windows.is_empty() {
            self.release(None, blocks);
        }
    }

    /// Whether preempting those after `position` would make a block available: one that no one else but the tree holds.
    fn can_gain_after(&self, position: usize) -> bool {
        let is_gain = |&block: &BlockId| self.cache.ref_count(block) <= 2;
        self.running[position + 1..].iter().rev().any(|&key| {
            let victim = &self.seqs[key];
            let mut windows = victim.windows.iter().flat_map(|table| table.blocks().rev());
            victim.blocks.iter().rev().any(is_gain)
                || windows.any(|block| is_gain(&block))
                || victim.shadows.iter().any(is_gain)
        })
    }

    /// Takes slot and blocks from a running sequence that has no row in the step being made, and puts it back into the queue.
    fn preempt(&mut self, position: usize) {
        let key = self.running.remove(position);
        self.counters.preemptions += 1;
        let sequence = &mut self.seqs[key];
        sequence.num_preemptions += 1;
        sequence.is_resumed = true;
        sequence.computed_bound = 0;
        sequence.settled = 0;
        sequence.cursor = self.cache.root(sequence.namespace);
        sequence.match_version = None;
        let (slot, blocks) = (sequence.slot, sequence.take_blocks());
        if sequence.in_flight == 0 {
            self.requeue(key);
        } else {
            sequence.phase = Phase::Draining;
            self.num_draining += 1;
        }
        self.release(Some(slot), blocks);
    }

    /// A preempted sequence whose tokens are all known waits again.
    pub(crate) fn requeue(&mut self, key: SeqKey) {
        let sequence = &mut self.seqs[key];
        sequence.phase = Phase::Waiting;
        sequence.tokens_bound = sequence.num_tokens();
        self.queue.push(key, &self.seqs[key], &mut self.tenants);
    }

    /// Gives back a slot and blocks: now if nothing is in flight, else at the commit of the last step scheduled.
    pub(crate) fn release(&mut self, slot: Option<Slot>, blocks: Blocks) {
        let release = Release {
            after: self.last_step,
            slot,
            blocks,
        };
        if self.in_flight.is_empty() {
            self.apply_release(&release);
        } else {
            self.coming_blocks += release.blocks.len();
            self.releases.push_back(release);
        }
    }

    fn apply_release(&mut self, release: &Release) {
        for list in release.blocks.lists() {
            self.cache.release(list);
        }
        self.free_slots.extend(release.slot);
        self.freed_slots.extend(release.slot);
    }

    /// Everything released before or during `committed` is free from now on.
    pub(crate) fn apply_releases(&mut self, committed: StepId) {
        while self
            .releases
            .front()
            .is_some_and(|release| release.after <= committed)
        {
            let Some(release) = self.releases.pop_front() else {
                break;
            };
            self.coming_blocks -= release.blocks.len();
            self.apply_release(&release);
        }
    }

    /// Ends a choice outside of a commit; [`take_ended`](Self::take_ended) tells the caller.
    pub(crate) fn end(&mut self, key: SeqKey, reason: FinishReason) {
        let sequence = self.remove(key);
        self.ended.push_back(Ended {
            id: sequence.id,
            choice: sequence.choice,
            reason,
            num_output_tokens: sequence.num_outputs(),
            num_cached_tokens: sequence.num_cached_tokens.unwrap_or(0),
            num_preemptions: sequence.num_preemptions,
        });
    }
}
