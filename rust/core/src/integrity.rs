//! `check_integrity`: every count and every set from first principles, compared with what is kept.

use std::collections::{BTreeMap, BTreeSet};

use crate::plan::Row;
use crate::request::{Phase, SeqKey, Sequence};
use crate::scheduler::Core;
use crate::window::{WindowTable, first_visible};

macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err(format!($($message)+));
        }
    };
}

impl Core {
    /// Recomputes every count and every set and compares; for tests and debugging. O(everything).
    ///
    /// # Errors
    /// What is wrong first.
    pub fn check_integrity(&self) -> Result<(), String> {
        self.check_sets()?;
        self.check_slots()?;
        let mut rows: BTreeMap<SeqKey, Vec<&Row>> = BTreeMap::new();
        for row in self.in_flight.iter().flat_map(|step| &step.rows) {
            rows.entry(row.key).or_default().push(row);
        }
        for (key, sequence) in self.seqs.iter() {
            let rows = rows.get(&key).map_or(&[][..], Vec::as_slice);
            self.check_sequence(sequence, rows).map_err(|error| {
                format!(
                    "request {} choice {}: {error}",
                    sequence.id, sequence.choice
                )
            })?;
        }
        self.queue.check_integrity(&self.seqs)?;
        self.tenants
            .check_integrity(self.seqs.iter().map(|(_, sequence)| sequence.tenant_index))?;
        self.check_blocks()
    }

    fn check_sets(&self) -> Result<(), String> {
        let of_phase = |wanted: fn(&Phase) -> bool| -> BTreeSet<SeqKey> {
            self.seqs
                .iter()
                .filter(|(_, sequence)| wanted(&sequence.phase))
                .map(|(key, _)| key)
                .collect()
        };
        let running: BTreeSet<SeqKey> = self.running.iter().copied().collect();
        ensure!(running.len() == self.running.len(), "a sequence runs twice");
        ensure!(
            running == of_phase(|phase| *phase == Phase::Running),
            "the running list is not what runs"
        );
        ensure!(
            self.running.is_sorted_by_key(|&key| self.seqs[key].rank()),
            "the running list is out of order"
        );
        let waiting: BTreeSet<SeqKey> = self.queue.iter().collect();
        ensure!(
            waiting.len() == self.queue.len(),
            "the queue counts {} sequences, not {}",
            self.queue.len(),
            waiting.len()
        );
        ensure!(
            waiting == of_phase(|phase| *phase == Phase::Waiting),
            "the queue is not what waits"
        );
        let draining = of_phase(|phase| *phase == Phase::Draining).len();
        ensure!(
            draining == self.num_draining as usize,
            "{} drain, not {draining}",
            self.num_draining
        );

        let held: BTreeSet<SeqKey> = self
            .seqs
            .iter()
            .flat_map(|(_, sequence)| sequence.held.iter().copied())
            .collect();
        ensure!(
            held == of_phase(|phase| matches!(phase, Phase::Held(_))),
            "held choices have lost their first"
        );
        for &key in &held {
            let Phase::Held(leader) = self.seqs[key].phase else {
                continue;
            };
            ensure!(
                self.seqs[leader].held.contains(&key),
                "a held choice waits for the wrong one"
            );
        }
        let listed: BTreeSet<SeqKey> = self.requests.values().flatten().copied().collect();
        ensure!(
            self.requests.values().all(|choices| !choices.is_empty()),
            "a request has no choice"
        );
        ensure!(
            listed == of_phase(|_| true),
            "the choices listed are not those that live"
        );
        Ok(())
    }

    fn check_slots(&self) -> Result<(), String> {
        let running = self.running.iter().map(|&key| self.seqs[key].slot);
        let coming = self.releases.iter().filter_map(|release| release.slot);
        let mut slots: Vec<u32> = running
            .chain(coming)
            .chain(self.free_slots.iter().copied())
            .map(|slot| slot.0)
            .collect();
        slots.sort_unstable();
        ensure!(
            slots.iter().copied().eq(0..self.config.max_num_seqs),
            "slots are lost or used twice: {slots:?}"
        );
        ensure!(
            self.freed_slots
                .iter()
                .all(|slot| self.free_slots.contains(slot)),
            "a freed slot is not free"
        );
        ensure!(
            self.releases
                .iter()
                .is_sorted_by_key(|release| release.after),
            "releases are out of order"
        );
        let oldest = self
            .in_flight
            .front()
            .map_or(self.last_step, |step| step.id);
        ensure!(
            self.releases
                .iter()
                .all(|release| release.after >= oldest && !self.in_flight.is_empty()),
            "a release is overdue"
        );
        Ok(())
    }

    fn check_sequence(&self, sequence: &Sequence, rows: &[&Row]) -> Result<(), String> {
        let (num_tokens, held_blocks) = (sequence.num_tokens(), sequence.blocks.len() as u32);
        let samples = rows.iter().filter(|row| row.samples()).count();
        ensure!(
            rows.len() == sequence.in_flight as usize,
            "{} rows in flight, not {}",
            sequence.in_flight,
            rows.len()
        );
        ensure!(
            samples == sequence.in_flight_samples as usize,
            "{} sampling rows in flight, not {samples}",
            sequence.in_flight_samples
        );
        ensure!(
            num_tokens < sequence.max_len,
            "{num_tokens} tokens, the end is at {}",
            sequence.max_len
        );
        if sequence.phase != Phase::Running {
            ensure!(
                held_blocks == 0 && sequence.shadows.is_empty() && sequence.windows.is_empty(),
                "holds blocks but does not run"
            );
            ensure!(
                (sequence.phase == Phase::Draining) == (sequence.in_flight > 0),
                "{:?} with rows in flight",
                sequence.phase
            );
            return Ok(());
        }
        let queries: u32 = rows.iter().map(|row| row.query).sum();
        let sampled: u32 = rows
            .iter()
            .filter(|row| row.samples())
            .map(|row| 1 + row.drafts)
            .sum();
        ensure!(
            sequence.computed_bound == sequence.settled + queries,
            "computed_bound = {}",
            sequence.computed_bound
        );
        ensure!(
            sequence.tokens_bound == num_tokens + sampled,
            "tokens_bound = {}",
            sequence.tokens_bound
        );
        ensure!(
            sequence.computed_bound < sequence.tokens_bound,
            "more computed than known"
        );
        ensure!(
            sequence.settled < num_tokens,
            "the last token is computed before it is used"
        );
        ensure!(
            sequence.tokens_bound <= sequence.max_len,
            "in flight beyond the end"
        );
        ensure!(
            held_blocks >= self.config.blocks_for(sequence.computed_bound),
            "{held_blocks} blocks are too few"
        );
        ensure!(
            held_blocks
                <= self.config.blocks_for(
                    sequence.tokens_bound.max(num_tokens)
                        + self.config.max_draft_tokens * (self.config.max_in_flight + 1)
                ),
            "{held_blocks} blocks are too many"
        );
        let drafts: u32 = rows.iter().map(|row| row.drafts).sum();
        ensure!(
            drafts == sequence.in_flight_drafts,
            "{} drafts in flight, not {drafts}",
            sequence.in_flight_drafts
        );
        self.check_windows(sequence)?;
        let published = sequence.cursor.depth() * self.config.block_size;
        ensure!(
            published <= num_tokens.min(sequence.computed_bound),
            "unknown tokens are published"
        );
        Ok(())
    }

    /// A running sequence has in each window group what its next query reads and the steps in flight write.
    fn check_windows(&self, sequence: &Sequence) -> Result<(), String> {
        let size = self.config.block_size;
        let windows: Vec<u32> = self.config.windows().collect();
        ensure!(
            sequence.windows.len() == windows.len(),
            "{} window tables",
            sequence.windows.len()
        );
        let computed = self.config.blocks_for(sequence.computed_bound);
        for (table, window) in sequence.windows.iter().zip(windows) {
            ensure!(
                table.first() <= first_visible(sequence.lowest_computed(), window, size),
                "column {} is the first of a window of {window}",
                table.first()
            );
            ensure!(
                table.end() == sequence.windows[0].end()
                    && (computed..=sequence.blocks.len() as u32).contains(&table.end()),
                "the columns of a window of {window} end at {}",
                table.end()
            );
        }
        Ok(())
    }

    fn check_blocks(&self) -> Result<(), String> {
        let coming: u32 = self
            .releases
            .iter()
            .map(|release| release.blocks.len())
            .sum();
        ensure!(
            coming == self.coming_blocks,
            "{} blocks are coming, not {coming}",
            self.coming_blocks
        );
        let running = self.running.iter().map(|&key| &self.seqs[key]);
        let running = running.flat_map(|sequence| {
            let windows = sequence.windows.iter().flat_map(WindowTable::parts);
            windows.chain([&sequence.blocks[..], &sequence.shadows[..]])
        });
        let released = self
            .releases
            .iter()
            .flat_map(|release| release.blocks.lists());
        self.cache.check_integrity(running.chain(released))
    }
}
