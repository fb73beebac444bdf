//! The latest steps with their times, for people to look at.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use octavo_core::ids::StepId;
use octavo_core::view::StepBatch;
use octavo_wire::StepRecord;

/// Steps that are kept.
const KEPT: usize = 256;

/// What the steps in flight compute, and how long the latest committed ones took. A few additions for each step.
#[derive(Debug)]
pub(crate) struct StepLog {
    /// Of the clock that records are on.
    began: Instant,
    bytes_per_token: u64,
    in_flight: VecDeque<(StepId, Instant, StepBatch)>,
    last_commit: Instant,
    committed: VecDeque<StepRecord>,
}

impl StepLog {
    /// `bytes_per_token` is what one token's keys and values of one cache group take.
    pub(crate) fn new(bytes_per_token: u64) -> Self {
        let now = Instant::now();
        Self {
            began: now,
            bytes_per_token,
            in_flight: VecDeque::new(),
            last_commit: now,
            committed: VecDeque::with_capacity(KEPT),
        }
    }

    pub(crate) fn now_us(&self) -> u64 {
        micros(self.began.elapsed())
    }

    pub(crate) fn scheduled(&mut self, step: StepId, batch: StepBatch) {
        self.in_flight.push_back((step, Instant::now(), batch));
    }

    /// Steps that were forgotten by the core, in a failed commit say, are passed over.
    pub(crate) fn committed(&mut self, step: StepId) {
        while let Some((id, scheduled, batch)) = self.in_flight.pop_front() {
            if id != step {
                continue;
            }
            let now = Instant::now();
            // Steps that overlap run one after the other on the device.
            let start = scheduled.max(std::mem::replace(&mut self.last_commit, now));
            if self.committed.len() == KEPT {
                self.committed.pop_front();
            }
            self.committed.push_back(StepRecord {
                id: id.0,
                at_us: micros(now - self.began),
                duration_us: micros(now - start),
                decode_rows: batch.decode_rows,
                decode_tokens: batch.decode_tokens,
                prefill_rows: batch.prefill_rows,
                prefill_tokens: batch.prefill_tokens,
                kv_bytes: batch.kv_tokens * self.bytes_per_token,
            });
            return;
        }
    }

    pub(crate) fn latest(&self) -> Vec<StepRecord> {
        self.committed.iter().copied().collect()
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
