//! Which sequences get which tokens in the next step: no phases, one token budget, running first, then waiting.
//!
//! Owns every request between `add` and its last output. The parts lie beside it: `admission`, `preemption`, `settling`, `stats`.

use std::collections::{HashMap, VecDeque};

use crate::cache::KvCache;
use crate::config::{ConfigError, CoreConfig};
use crate::ids::{BlockId, RequestId, Slot, StepId};
use crate::output::FinishReason;
use crate::plan::{self, Layout, PlanDraft, Row, flags};
use crate::policy::Tenants;
use crate::preemption::Room;
use crate::queue::WaitingQueue;
use crate::request::{Arena, Blocks, SeqKey};
use crate::stats::Counters;

/// The control plane. Not thread-safe by itself; every method keeps the invariants of [`check_integrity`](Self::check_integrity).
#[derive(Debug)]
pub struct Core {
    pub(crate) config: CoreConfig,
    pub(crate) layout: Layout,
    pub(crate) cache: KvCache,
    /// Windows of the groups after the first.
    pub(crate) windows: Vec<u32>,
    /// The most tokens of a sequence whose KV the pool has room for.
    pub(crate) longest_request: u32,
    pub(crate) seqs: Arena,
    /// Living choices of each request.
    pub(crate) requests: HashMap<RequestId, Vec<SeqKey>>,
    pub(crate) tenants: Tenants,
    pub(crate) queue: WaitingQueue,
    /// By priority, then arrival: the last one is preempted first.
    pub(crate) running: Vec<SeqKey>,
    /// Preempted sequences whose last rows are not committed yet.
    pub(crate) num_draining: u32,
    pub(crate) free_slots: Vec<Slot>,
    /// Slots that became free since the last plan.
    pub(crate) freed_slots: Vec<Slot>,
    /// Blocks and slots that steps in flight still see, oldest first.
    pub(crate) releases: VecDeque<Release>,
    /// Blocks of all releases.
    pub(crate) coming_blocks: u32,
    /// Oldest first.
    pub(crate) in_flight: VecDeque<Step>,
    pub(crate) last_step: StepId,
    pub(crate) last_committed: StepId,
    pub(crate) num_arrivals: u64,
    pub(crate) draft: PlanDraft,
    /// Blocks on their way into a table.
    pub(crate) new_blocks: Vec<BlockId>,
    /// Row lists of committed steps, to be used again.
    pub(crate) spare_rows: Vec<Vec<Row>>,
    /// Ended outside of a commit, not told yet.
    pub(crate) ended: VecDeque<Ended>,
    pub(crate) counters: Counters,
}

/// A step between `schedule` and `commit`.
#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) id: StepId,
    /// As [`PlanDraft::mask_after`].
    pub(crate) mask_after: Option<StepId>,
    pub(crate) rows: Vec<Row>,
}

/// A row of a step whose draw a grammar restricts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaskedRow<'a> {
    /// Index in the step.
    pub row: u32,
    /// The request.
    pub id: RequestId,
    /// The choice.
    pub choice: u32,
    /// Output tokens that are known.
    pub outputs: &'a [u32],
}

/// What a sequence gave back while steps were in flight: everything, or (without a slot) blocks that left their windows.
#[derive(Debug)]
pub(crate) struct Release {
    /// The last step scheduled before.
    pub(crate) after: StepId,
    pub(crate) slot: Option<Slot>,
    pub(crate) blocks: Blocks,
}

/// A choice that ended outside of a commit.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) id: RequestId,
    pub(crate) choice: u32,
    pub(crate) reason: FinishReason,
    pub(crate) num_output_tokens: u32,
    pub(crate) num_cached_tokens: u32,
    pub(crate) num_preemptions: u32,
}

/// Tokens that the step being made may still take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budget {
    pub(crate) left: u32,
}

impl Budget {
    /// Tokens for a prefill that needs `need`: while others wait for their first chunk, a long one leaves a quarter.
    pub(crate) fn share(self, need: u32, others_wait: bool) -> u32 {
        let most = if others_wait {
            self.left - self.left / 4
        } else {
            self.left
        };
        need.min(most)
    }
}

impl Core {
    /// An empty control plane.
    ///
    /// # Errors
    /// The first field of `config` that cannot be used.
    pub fn new(config: CoreConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        let layout = Layout::new(&config);
        Ok(Self {
            cache: KvCache::with_windows(
                config.num_blocks,
                config.block_size,
                config.enable_prefix_caching,
                config.windows(),
            ),
            windows: config.windows().collect(),
            longest_request: config.longest_request(),
            layout,
            seqs: Arena::default(),
            requests: HashMap::new(),
            tenants: Tenants::default(),
            queue: WaitingQueue::default(),
            running: Vec::with_capacity(config.max_num_seqs as usize),
            num_draining: 0,
            free_slots: (0..config.max_num_seqs).rev().map(Slot).collect(),
            freed_slots: Vec::with_capacity(config.max_num_seqs as usize),
            releases: VecDeque::new(),
            coming_blocks: 0,
            in_flight: VecDeque::with_capacity(config.max_in_flight as usize),
            last_step: StepId(0),
            last_committed: StepId(0),
            num_arrivals: 0,
            draft: PlanDraft::default(),
            new_blocks: Vec::new(),
            spare_rows: Vec::new(),
            ended: VecDeque::new(),
            counters: Counters::default(),
            config,
        })
    }

    /// The configuration.
    pub fn config(&self) -> &CoreConfig {
        &self.config
    }

    /// The layout of every plan.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Whether a request lives: something to schedule or to commit, now or after the next commit.
    pub fn has_work(&self) -> bool {
        self.seqs.len() > 0 || !self.in_flight.is_empty()
    }

    /// Sequences with a slot.
    pub fn num_running(&self) -> usize {
        self.running.len()
    }

    /// Sequences without a slot: queued, preempted, or waiting for the prompt of their first choice.
    pub fn num_waiting(&self) -> usize {
        self.seqs.len() - self.running.len()
    }

    /// Steps between their `schedule` and their `commit`.
    pub fn num_in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// The request of each row of the steps in flight that still lives, oldest step first.
    pub fn requests_in_flight(&self) -> impl Iterator<Item = RequestId> {
        let rows = self.in_flight.iter().flat_map(|step| &step.rows);
        rows.filter_map(|row| Some(self.seqs.get(row.key)?.id))
    }

    /// Whether a choice of the request lives.
    pub fn has_request(&self, id: RequestId) -> bool {
        self.requests.contains_key(&id)
    }

    /// Whether the step's draw waits for masks whose tokens are not all known yet.
    pub fn waits_for_masks(&self, step: StepId) -> bool {
        let step = self.in_flight.iter().find(|other| other.id == step);
        step.is_some_and(|step| step.mask_after > Some(self.last_committed))
    }

    /// The rows of a step in flight that need a mask, of sequences that still live.
    pub fn masked_rows(&self, step: StepId) -> impl Iterator<Item = MaskedRow<'_>> {
        let step = self.in_flight.iter().find(|other| other.id == step);
        let rows = step.into_iter().flat_map(|step| (0..).zip(&step.rows));
        rows.filter(|(_, row)| row.samples() && row.flags & flags::GRAMMAR != 0)
            .filter_map(|(index, row)| {
                let sequence = self.seqs.get(row.key)?;
                Some(MaskedRow {
                    row: index,
                    id: sequence.id,
                    choice: sequence.choice,
                    outputs: &sequence.tokens[sequence.num_prompt as usize..],
                })
            })
    }

    /// The last scheduled step; 0 before the first.
    pub fn last_scheduled(&self) -> StepId {
        self.last_step
    }

    /// The last committed step; 0 before the first.
    pub fn last_committed(&self) -> StepId {
        self.last_committed
    }

    /// Makes the next step and writes its plan. None if nothing can be scheduled now: `max_in_flight` steps are in flight, or everything
    /// waits for a commit, or there is no work. Nor behind a step whose masks wait for a commit: its logits must be drawn from before the
    /// next ones come.
    ///
    /// # Panics
    /// If `buffer` is shorter than [`Layout::total_words`].
    pub fn schedule(&mut self, buffer: &mut [i32]) -> Option<StepId> {
        let words = self.layout.total_words;
        assert!(
            buffer.len() >= words,
            "a plan needs {words} words, the buffer has {}",
            buffer.len()
        );
        if self.in_flight.len() >= self.config.max_in_flight as usize
            || self.waits_for_masks(self.last_step)
        {
            return None;
        }
        self.slide_windows();
        loop {
            self.draft.clear();
            let preemptions = self.counters.preemptions;
            let mut budget = Budget {
                left: self.config.max_num_batched_tokens,
            };
            self.schedule_decodes(&mut budget);
            self.schedule_prefills(&mut budget);
            let may_admit = self.counters.preemptions == preemptions;
            self.fill(may_admit, &mut budget);
            if !self.draft.is_empty() {
                break;
            }
            // With what was preempted out of the way, another pass can find something.
            if self.counters.preemptions == preemptions {
                return None;
            }
        }
        self.last_step.0 += 1;
        self.draft
            .write(&self.layout, self.last_step, &self.freed_slots, buffer);
        self.freed_slots.clear();
        let empty = self.spare_rows.pop().unwrap_or_default();
        let rows = std::mem::replace(&mut self.draft.decode_rows, empty);
        self.in_flight.push_back(Step {
            id: self.last_step,
            mask_after: self.draft.mask_after,
            rows,
        });
        Some(self.last_step)
    }

    /// What is left of the step: admissions, then more of the prompts that left a quarter for them. Blocks that these compute after all
    /// may be what others were held back for.
    fn fill(&mut self, may_admit: bool, budget: &mut Budget) {
        loop {
            if may_admit {
                self.admit(budget);
            }
            let left = budget.left;
            self.extend_prefills(budget);
            if budget.left == left {
                break;
            }
        }
    }

    /// Rows of one token, and drafts as far as tokens, blocks and the sequence's length allow.
    fn schedule_decodes(&mut self, budget: &mut Budget) {
        // One token for each row first, drafts from the rest.
        let mut spare = budget.left.saturating_sub(self.running.len() as u32);
        let mut position = 0;
        while position < self.running.len() && budget.left > 0 {
            let key = self.running[position];
            let sequence = &self.seqs[key];
            if sequence.is_prefilling() {
                // One token's room in its turn; how many more it gets is seen once every row has got as much.
                match self.make_room(position, 0) {
                    Room::For { .. } => self.draft.prefilling.push(key),
                    Room::NotNow => {}
                    Room::Gone => continue,
                }
                position += 1;
                continue;
            }
            let room = sequence.max_len - sequence.tokens_bound;
            if room == 0 {
                // Its last tokens are in flight already.
                position += 1;
                continue;
            }
            let wanted = match sequence.in_flight_samples {
                0 => sequence.num_drafts,
                _ => self.config.max_draft_tokens,
            };
            match self.make_room(position, wanted.min(room - 1).min(spare)) {
                Room::For { drafts } => {
                    spare -= drafts;
                    budget.left -= 1 + drafts;
                    self.place_decode(key, drafts);
                    position += 1;
                }
                Room::NotNow => position += 1,
                Room::Gone => {}
            }
        }
    }

    fn place_decode(&mut self, key: SeqKey, drafts: u32) {
        let host_state = self.config.host_state;
        let sequence = &mut self.seqs[key];
        let row = Row {
            key,
            slot: sequence.slot,
            computed: sequence.computed_bound,
            query: 1 + drafts,
            drafts,
            flags: sequence.param_flags
                | flags::SAMPLE
                | plan::flag(host_state || sequence.is_fresh, flags::HOST_STATE)
                | plan::flag(sequence.is_below_min_tokens(), flags::BIAS),
        };
        sequence.is_fresh = false;
        sequence.computed_bound += 1 + drafts;
        sequence.tokens_bound += 1 + drafts;
        sequence.in_flight += 1;
        sequence.in_flight_drafts += drafts;
        let mask_after = sequence.note_sample(StepId(self.last_step.0 + 1));
        self.draft.mask_after = self.draft.mask_after.max(mask_after);
        self.tenants.charge(sequence.tenant_index, 1 + drafts);
        self.draft.decode_rows.push(row);
    }

    /// Further chunks of prompts that are computed in part. The full group's blocks were allocated at the admission, those of the window
    /// groups are for each chunk.
    fn schedule_prefills(&mut self, budget: &mut Budget) {
        let others_wait = self.may_admit();
        let pending = std::mem::take(&mut self.draft.prefilling);
        for (position, &key) in pending.iter().enumerate() {
            if budget.left == 0 {
                break;
            }
            let need = self.seqs[key].prefill_need();
            let chunk = budget.share(need, others_wait || position + 1 < pending.len());
            let chunk = self.fit_chunk(key, chunk);
            self.place_prefill(key, chunk, budget);
        }
        self.draft.prefilling = pending;
    }

    /// Gives a row of `chunk` known tokens to a sequence that has none in this step.
    pub(crate) fn place_prefill(&mut self, key: SeqKey, chunk: u32, budget: &mut Budget) {
        let host_state = self.config.host_state;
        let sequence = &mut self.seqs[key];
        let row = Row {
            key,
            slot: sequence.slot,
            computed: sequence.computed_bound,
            query: 0,
            drafts: 0,
            flags: sequence.param_flags
                | plan::flag(host_state || sequence.is_fresh, flags::HOST_STATE)
                | plan::flag(sequence.wants_prompt_logprobs(), flags::PROMPT_LOGPROBS)
                | plan::flag(sequence.is_below_min_tokens(), flags::BIAS),
        };
        sequence.is_fresh = false;
        sequence.in_flight += 1;
        self.draft.prefill_rows.push(row);
        let index = self.draft.prefill_rows.len() - 1;
        self.extend_row(index, chunk, budget);
        if self.config.enable_prefix_caching && !self.draft.prefill_rows[index].samples() {
            self.draft.unfinished.push(key);
        }
    }

    /// What the step still has room for goes to the prompts that left a quarter for others.
    fn extend_prefills(&mut self, budget: &mut Budget) {
        for index in 0..self.draft.prefill_rows.len() {
            if budget.left == 0 {
                break;
            }
            let row = self.draft.prefill_rows[index];
            if !row.samples() {
                let more = self.seqs[row.key].prefill_need().min(budget.left);
                let more = self.fit_chunk(row.key, more);
                self.extend_row(index, more, budget);
            }
        }
    }

    /// Adds `more` known tokens to a prefill row, publishes the blocks that they fill, and samples if they are the last.
    fn extend_row(&mut self, index: usize, more: u32, budget: &mut Budget) {
        let row = &mut self.draft.prefill_rows[index];
        let sequence = &mut self.seqs[row.key];
        row.query += more;
        budget.left -= more;
        sequence.computed_bound += more;
        self.tenants.charge(sequence.tenant_index, more);
        sequence.publish(sequence.computed_bound, &mut self.cache);
        if sequence.computed_bound == sequence.num_tokens() {
            row.flags |= flags::SAMPLE;
            sequence.tokens_bound += 1;
            let mask_after = sequence.note_sample(StepId(self.last_step.0 + 1));
            self.draft.mask_after = self.draft.mask_after.max(mask_after);
        }
        if sequence.computed_bound >= sequence.num_prompt && !sequence.held.is_empty() {
            let held = std::mem::take(&mut sequence.held);
            self.enqueue_held(held);
        }
    }
}
