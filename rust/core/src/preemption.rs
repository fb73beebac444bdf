//! The way out before the end: who gives up its blocks when there are too few, and when they come back.

use crate::ids::{BlockId, Slot, StepId};
use crate::output::FinishReason;
use crate::request::{Phase, SeqKey};
use crate::scheduler::{Core, Ended, Release};

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
        let held = sequence.blocks.len() as u32;
        let length = sequence.computed_bound + 1;
        let needed = self.config.blocks_for(length + drafts);
        if needed <= held || self.grow(key, needed - held) {
            return Room::For { drafts };
        }
        let free_tokens = held * self.config.block_size - (length - 1);
        if free_tokens > 0 {
            return Room::For {
                drafts: free_tokens - 1,
            };
        }
        self.make_room_for_block(position)
    }

    /// The same where everything the sequence holds is full: one block, by preemption if need be.
    fn make_room_for_block(&mut self, position: usize) -> Room {
        let key = self.running[position];
        loop {
            if self.grow(key, 1) {
                return Room::For { drafts: 0 };
            }
            if self.coming_blocks > 0 {
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

    /// Allocates `n` blocks to a running sequence and writes them into the plan.
    fn grow(&mut self, key: SeqKey, n: u32) -> bool {
        let sequence = &mut self.seqs[key];
        let first = sequence.blocks.len();
        if !self.cache.allocate(n, &mut sequence.blocks) {
            return false;
        }
        self.draft
            .write_blocks(sequence.slot, first, &sequence.blocks[first..]);
        true
    }

    /// Whether preempting those after `position` would make a block available: one that no one else but the tree holds.
    fn can_gain_after(&self, position: usize) -> bool {
        let is_gain = |&block: &BlockId| self.cache.ref_count(block) <= 2;
        self.running[position + 1..].iter().rev().any(|&key| {
            let victim = &self.seqs[key];
            victim.blocks.iter().rev().any(is_gain) || victim.shadows.iter().any(is_gain)
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
        let (slot, blocks, shadows) = (
            sequence.slot,
            std::mem::take(&mut sequence.blocks),
            std::mem::take(&mut sequence.shadows),
        );
        if sequence.in_flight == 0 {
            self.requeue(key);
        } else {
            sequence.phase = Phase::Draining;
            self.num_draining += 1;
        }
        self.release(slot, blocks, shadows);
    }

    /// A preempted sequence whose tokens are all known waits again.
    pub(crate) fn requeue(&mut self, key: SeqKey) {
        let sequence = &mut self.seqs[key];
        sequence.phase = Phase::Waiting;
        sequence.tokens_bound = sequence.num_tokens();
        self.queue.push(key, &self.seqs[key], &mut self.tenants);
    }

    /// Gives back a slot and blocks: now if nothing is in flight, else at the commit of the last step scheduled.
    pub(crate) fn release(&mut self, slot: Slot, blocks: Vec<BlockId>, shadows: Vec<BlockId>) {
        let release = Release {
            after: self.last_step,
            slot,
            blocks,
            shadows,
        };
        if self.in_flight.is_empty() {
            self.apply_release(&release);
        } else {
            self.coming_blocks += release.num_blocks();
            self.releases.push_back(release);
        }
    }

    fn apply_release(&mut self, release: &Release) {
        self.cache.release(&release.blocks);
        self.cache.release(&release.shadows);
        self.free_slots.push(release.slot);
        self.freed_slots.push(release.slot);
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
            self.coming_blocks -= release.num_blocks();
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

impl Release {
    fn num_blocks(&self) -> u32 {
        (self.blocks.len() + self.shadows.len()) as u32
    }
}
