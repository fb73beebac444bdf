//! The end of a step and of a request: `commit`, `abort`, and everything a sequence leaves behind.

use crate::ids::RequestId;
use crate::output::{CommitError, FinishReason, Output, OutputSink, PromptSpan, StepResults};
use crate::plan::{Row, flags};
use crate::request::{Phase, SeqKey, Sequence};
use crate::scheduler::{Core, Step};

impl Core {
    /// Appends the tokens of the oldest step in flight, ends what is at its end, publishes what is full, and frees what was released
    /// before that step. Outputs go to `sink` in row order, after those of choices that ended outside of a commit.
    ///
    /// Rows of choices that are gone (ended, aborted) are dropped.
    ///
    /// # Errors
    /// If the results do not belong to the oldest step in flight; nothing is changed then.
    pub fn commit(
        &mut self,
        results: &StepResults<'_>,
        sink: &mut impl OutputSink,
    ) -> Result<(), CommitError> {
        self.check_results(results)?;
        self.take_ended(sink);
        let mut step = self
            .in_flight
            .pop_front()
            .expect("the results belong to it");
        // Before anything else is released: the cache sees releases in their order.
        self.apply_releases(step.id);
        let width = 1 + self.config.max_draft_tokens as usize;
        for (index, row) in step.rows.iter().enumerate() {
            let tokens = &results.tokens[index * width..(index + 1) * width];
            let drafts = results
                .next_drafts
                .map(|drafts| &drafts[index * (width - 1)..(index + 1) * (width - 1)]);
            self.settle(
                index as u32,
                row,
                results.num_sampled[index],
                tokens,
                drafts,
                sink,
            );
        }
        self.last_committed = step.id;
        step.rows.clear();
        self.spare_rows.push(step.rows);
        Ok(())
    }

    fn settle(
        &mut self,
        index: u32,
        row: &Row,
        num_sampled: i32,
        tokens: &[i32],
        drafts: Option<&[i32]>,
        sink: &mut impl OutputSink,
    ) {
        let Some(sequence) = self.seqs.get_mut(row.key) else {
            return;
        };
        sequence.in_flight -= 1;
        let failed = num_sampled < 0;
        let accepted = if failed {
            &[]
        } else {
            &tokens[..num_sampled as usize]
        };
        let (start, mut finish) = (sequence.tokens.len(), failed.then_some(FinishReason::Error));
        for &token in accepted {
            sequence.tokens.push(token as u32);
            finish = sequence.finish_reason();
            if finish.is_some() {
                break;
            }
        }
        if row.samples() {
            sequence.in_flight_samples -= 1;
            sequence.in_flight_drafts -= row.drafts;
            sequence.num_drafts = drafts.map_or(self.config.max_draft_tokens, count_drafts);
        }
        let is_running = sequence.phase == Phase::Running;
        if is_running && !failed {
            // A row writes its whole query, but what follows the accepted tokens is rejected drafts.
            let rejected = if row.samples() {
                1 + row.drafts - accepted.len() as u32
            } else {
                0
            };
            sequence.computed_bound -= rejected;
            sequence.tokens_bound -= rejected;
            sequence.settled += row.query - rejected;
            sequence.publish(sequence.settled.min(sequence.num_tokens()), &mut self.cache);
        }
        let prompt_logprobs = if failed {
            PromptSpan::default()
        } else {
            sequence.deliver_prompt_logprobs(row)
        };
        if finish.is_some() || sequence.tokens.len() > start || !prompt_logprobs.is_empty() {
            self.counters.generation_tokens += (sequence.tokens.len() - start) as u64;
            sink.output(Output {
                id: sequence.id,
                choice: sequence.choice,
                row: Some(index),
                tokens: &sequence.tokens[start..],
                finish,
                num_output_tokens: sequence.num_outputs(),
                num_cached_tokens: sequence.num_cached_tokens.unwrap_or(0),
                num_preemptions: sequence.num_preemptions,
                prompt_logprobs,
            });
        }
        if finish.is_some() {
            self.remove(row.key);
        } else if !is_running && sequence.in_flight == 0 {
            self.num_draining -= 1;
            self.requeue(row.key);
        }
    }

    /// Outputs of choices that ended outside of a commit: aborted, or longer than the pool.
    pub fn take_ended(&mut self, sink: &mut impl OutputSink) {
        for ended in self.ended.drain(..) {
            sink.output(Output {
                id: ended.id,
                choice: ended.choice,
                row: None,
                tokens: &[],
                finish: Some(ended.reason),
                num_output_tokens: ended.num_output_tokens,
                num_cached_tokens: ended.num_cached_tokens,
                num_preemptions: ended.num_preemptions,
                prompt_logprobs: PromptSpan::default(),
            });
        }
    }

    /// Whether [`take_ended`](Self::take_ended) has something to tell.
    pub fn has_ended(&self) -> bool {
        !self.ended.is_empty()
    }

    /// Ends every choice of a request; how many there were.
    pub fn abort(&mut self, id: RequestId) -> usize {
        let keys = self.requests.get(&id).cloned().unwrap_or_default();
        for &key in &keys {
            self.end(key, FinishReason::Abort);
        }
        keys.len()
    }

    /// Ends one choice of a request; false if there is none.
    pub fn abort_choice(&mut self, id: RequestId, choice: u32) -> bool {
        let mut keys = self.requests.get(&id).into_iter().flatten().copied();
        let Some(key) = keys.find(|&key| self.seqs[key].choice == choice) else {
            return false;
        };
        self.end(key, FinishReason::Abort);
        true
    }

    /// Takes a sequence out of everything. Its rows in flight will find it gone.
    pub(crate) fn remove(&mut self, key: SeqKey) -> Sequence {
        match self.seqs[key].phase {
            Phase::Held(leader) => self.seqs[leader].held.retain(|&held| held != key),
            Phase::Waiting => self.queue.remove(key, &self.seqs[key]),
            Phase::Running => {
                let position = self.position_of(key);
                self.running.remove(position);
            }
            Phase::Draining => self.num_draining -= 1,
        }
        let mut sequence = self.seqs.remove(key);
        if sequence.phase == Phase::Running {
            let blocks = sequence.take_blocks();
            self.release(Some(sequence.slot), blocks);
        }
        self.promote(std::mem::take(&mut sequence.held));
        let choices = self
            .requests
            .get_mut(&sequence.id)
            .expect("a living choice has its request");
        choices.retain(|&choice| choice != key);
        if choices.is_empty() {
            self.requests.remove(&sequence.id);
        }
        self.tenants.leave(sequence.tenant_index);
        sequence
    }

    /// Where a running sequence stands.
    fn position_of(&self, key: SeqKey) -> usize {
        let rank = self.seqs[key].rank();
        let position = self
            .running
            .partition_point(|&other| self.seqs[other].rank() < rank);
        debug_assert_eq!(self.running[position], key);
        position
    }

    /// The sequence whose prompt these choices wait for is gone: the first of them computes it.
    fn promote(&mut self, mut held: Vec<SeqKey>) {
        if held.is_empty() {
            return;
        }
        let leader = held.remove(0);
        for &key in &held {
            self.seqs[key].phase = Phase::Held(leader);
        }
        self.seqs[leader].held = held;
        self.enqueue_held(vec![leader]);
    }

    fn check_results(&self, results: &StepResults<'_>) -> Result<(), CommitError> {
        let Some(step) = self.in_flight.front() else {
            return Err(CommitError::NothingInFlight(results.step_id));
        };
        if step.id != results.step_id {
            return Err(CommitError::OutOfOrder {
                given: results.step_id,
                expected: step.id,
            });
        }
        let (rows, drafts) = (step.rows.len(), self.config.max_draft_tokens as usize);
        let lengths = [
            ("tokens", results.tokens.len(), rows * (1 + drafts)),
            ("num_sampled", results.num_sampled.len(), rows),
            (
                "next_drafts",
                results.next_drafts.map_or(rows * drafts, <[i32]>::len),
                rows * drafts,
            ),
        ];
        for (name, given, expected) in lengths {
            if given != expected {
                return Err(CommitError::WrongLength {
                    name,
                    given,
                    expected,
                });
            }
        }
        self.check_rows(step, results)
    }

    fn check_rows(&self, step: &Step, results: &StepResults<'_>) -> Result<(), CommitError> {
        let width = 1 + self.config.max_draft_tokens as usize;
        for (index, (row, &given)) in step.rows.iter().zip(results.num_sampled).enumerate() {
            let (min, max) = if row.samples() {
                (1, 1 + row.drafts as i32)
            } else {
                (0, 0)
            };
            if given != -1 && !(min..=max).contains(&given) {
                return Err(CommitError::Count {
                    row: index,
                    given,
                    min,
                    max,
                });
            }
            let accepted = &results.tokens[index * width..][..given.max(0) as usize];
            let is_unknown = |&&token: &&i32| !(0..self.config.vocab_size as i32).contains(&token);
            if let Some(&given) = accepted.iter().find(is_unknown) {
                return Err(CommitError::Token {
                    row: index,
                    given,
                    vocab_size: self.config.vocab_size,
                });
            }
        }
        Ok(())
    }
}

/// Drafts before the first that is missing.
fn count_drafts(drafts: &[i32]) -> u32 {
    drafts.iter().take_while(|&&draft| draft >= 0).count() as u32
}

impl Sequence {
    /// The part of a row's prompt logprobs that was not delivered before. Logits of position `p` score the token at `p + 1`.
    fn deliver_prompt_logprobs(&mut self, row: &Row) -> PromptSpan {
        if row.flags & flags::PROMPT_LOGPROBS == 0 {
            return PromptSpan::default();
        }
        let first = row.computed + 1;
        let span = PromptSpan {
            start: first.max(self.prompt_logprobs_done),
            end: (first + row.query).min(self.num_prompt),
            skip: self.prompt_logprobs_done.saturating_sub(first),
        };
        self.prompt_logprobs_done = self.prompt_logprobs_done.max(span.end);
        span
    }
}
