//! The way in: `add`, and from the queue to a slot and blocks. Nothing is changed by a request that is not admitted.

use std::sync::Arc;

use crate::config::blocks_touched;
use crate::ids::{BlockId, RequestId, Slot, StepId};
use crate::params::SamplingParams;
use crate::plan::{self, FULL_GROUP, flags};
use crate::queue::{View, match_prefix};
use crate::request::{self, AddError, AddRequest, Phase, SeqKey, Sequence};
use crate::scheduler::{Budget, Core};
use crate::window::WindowTable;

/// Where a sequence that is admitted gets its blocks from.
struct Admission {
    /// Blocks of its known tokens.
    total: u32,
    /// What another choice of the request computes already; only without the prefix cache.
    shared: Shared,
    /// Columns whose content exists: cached or shared.
    existing: u32,
}

/// Blocks of a running choice that a further one can use.
#[derive(Debug, Default)]
struct Shared {
    full: Vec<BlockId>,
    /// In each window group, what a query behind the full blocks reads.
    windows: Vec<WindowTable>,
}

impl Core {
    /// Puts `params.n` choices of a request into the queue. The first is computed; the others wait until its prompt is scheduled and
    /// then share it.
    ///
    /// # Errors
    /// If the request can never run; nothing is changed then.
    pub fn add(&mut self, request: AddRequest) -> Result<(), AddError> {
        self.check_request(&request)?;
        let stops = request::stop_table(&request.params, self.config.vocab_size);
        let AddRequest {
            id,
            tokens,
            num_prompt_tokens,
            params,
            first_choice,
            priority,
            tenant,
            namespace,
            has_grammar,
        } = request;
        let n = params.n;
        // The last token needs no block: its KV is never computed.
        let pool_len = self.longest_request + 1;
        let wanted_len = num_prompt_tokens.saturating_add(params.max_tokens);
        let max_len = self.config.max_model_len.min(wanted_len).min(pool_len);
        let first_params = Arc::new(params);
        // The prompt's logprobs are the first choice's.
        let later_params = match first_params.prompt_logprobs {
            Some(_) if n > 1 => Arc::new(SamplingParams {
                prompt_logprobs: None,
                ..(*first_params).clone()
            }),
            _ => Arc::clone(&first_params),
        };
        let mut leader: Option<SeqKey> = None;
        for i in 0..n {
            let params = Arc::clone(if i == 0 { &first_params } else { &later_params });
            let num_tokens = tokens.len() as u32;
            let sequence = Sequence {
                phase: leader.map_or(Phase::Waiting, Phase::Held),
                slot: Slot::default(),
                computed_bound: 0,
                tokens_bound: num_tokens,
                settled: 0,
                in_flight: 0,
                in_flight_samples: 0,
                last_sample: StepId(0),
                in_flight_drafts: 0,
                max_len,
                num_prompt: num_prompt_tokens,
                min_tokens: params.min_tokens,
                num_drafts: 0,
                param_flags: request::param_flags(&params)
                    | plan::flag(has_grammar, flags::GRAMMAR),
                is_fresh: true,
                tenant_index: self.tenants.join(tenant),
                blocks: Vec::new(),
                windows: Vec::new(),
                tokens: tokens.clone(),
                stops: Arc::clone(&stops),
                cursor: self.cache.root(namespace),
                usable: self.cache.root(namespace),
                namespace,
                id,
                choice: first_choice + i,
                priority,
                arrival: self.num_arrivals,
                match_version: None,
                bypassed: 0,
                is_resumed: false,
                shadows: Vec::new(),
                held: Vec::new(),
                num_preemptions: 0,
                num_cached_tokens: None,
                // The first token has no logprob.
                prompt_logprobs_done: if params.prompt_logprobs.is_some() {
                    1
                } else {
                    num_prompt_tokens
                },
                params,
            };
            self.num_arrivals += 1;
            let key = self.seqs.insert(sequence);
            self.requests.entry(id).or_default().push(key);
            match leader {
                None => {
                    leader = Some(key);
                    self.queue.push(key, &self.seqs[key], &mut self.tenants);
                }
                Some(leader) => self.seqs[leader].held.push(key),
            }
        }
        Ok(())
    }

    /// Whether a request can ever run.
    ///
    /// # Errors
    /// What forbids it.
    pub fn check_request(&self, request: &AddRequest) -> Result<(), AddError> {
        let num_stops = request.params.stop_token_ids.len() + request.params.eos_token_ids.len();
        let (config, params) = (&self.config, &request.params);
        let num_tokens = request.tokens.len();
        if num_tokens == 0 {
            return Err(AddError::EmptyPrompt);
        }
        let num_prompt_tokens = request.num_prompt_tokens;
        if num_prompt_tokens == 0 || num_prompt_tokens as usize > num_tokens {
            return Err(AddError::PromptLength {
                num_prompt_tokens,
                num_tokens,
            });
        }
        if num_tokens >= config.max_model_len as usize {
            return Err(AddError::ContextLengthExceeded {
                num_tokens,
                max_model_len: config.max_model_len,
            });
        }
        let (needed, num_blocks) = (
            config.blocks_per_request(num_tokens as u32),
            self.cache.num_blocks(),
        );
        if needed > u64::from(num_blocks) {
            return Err(AddError::PoolTooSmall {
                num_tokens,
                needed,
                num_blocks,
            });
        }
        let vocab_size = config.vocab_size;
        if let Some(position) = request.tokens.iter().position(|&token| token >= vocab_size) {
            return Err(AddError::OutOfVocabulary {
                position,
                token: request.tokens[position],
                vocab_size,
            });
        }
        for (name, value) in [("n", params.n), ("max_tokens", params.max_tokens)] {
            if value == 0 {
                return Err(AddError::Zero(name));
            }
        }
        let num_outputs = num_tokens as u32 - num_prompt_tokens;
        if num_outputs >= params.max_tokens {
            return Err(AddError::NothingLeft {
                num_outputs,
                max_tokens: params.max_tokens,
            });
        }
        if params.n > 1 && num_outputs > 0 {
            return Err(AddError::ManyChoicesWithOutputs {
                n: params.n,
                num_outputs,
            });
        }
        let (words, max) = (
            plan::list_words(params, num_stops),
            self.layout.max_list_words,
        );
        if words > max {
            return Err(AddError::ListsTooLong { words, max });
        }
        self.check_choices(request.id, request.first_choice, params.n)
    }

    fn check_choices(&self, id: RequestId, first_choice: u32, n: u32) -> Result<(), AddError> {
        if first_choice
            .checked_add(n)
            .is_none_or(|end| end > i32::MAX as u32)
        {
            return Err(AddError::ChoiceTooLarge { first_choice, n });
        }
        let living = self.requests.get(&id).into_iter().flatten();
        for &key in living {
            let choice = self.seqs[key].choice;
            if (first_choice..first_choice + n).contains(&choice) {
                return Err(AddError::Duplicate { id, choice });
            }
        }
        Ok(())
    }

    /// Whether somebody waits who could get a slot.
    pub(crate) fn may_admit(&self) -> bool {
        // Preempted sequences come back first, once their last tokens are known.
        self.num_draining == 0 && self.queue.len() > 0 && !self.free_slots.is_empty()
    }

    /// Admits from the queue, in its order, until something is short: budget, slots, blocks, words of the plan, or sequences that are not held back.
    pub(crate) fn admit(&mut self, budget: &mut Budget) {
        while budget.left > 0 && self.may_admit() {
            let mut view = View {
                seqs: &mut self.seqs,
                tenants: &mut self.tenants,
                cache: &self.cache,
                prefills: &self.draft.unfinished,
                free_slots: self.free_slots.len(),
            };
            let Some(key) = self.queue.select(&mut view) else {
                break;
            };
            let Some(admission) = self.plan_admission(key, *budget) else {
                break;
            };
            self.take_admission(key, admission);
            let need = self.seqs[key].prefill_need();
            let chunk = budget.share(need, self.may_admit());
            let chunk = self.fit_chunk(key, chunk);
            self.place_prefill(key, chunk, budget);
        }
    }

    /// Match, then count. None if the sequence does not fit now.
    fn plan_admission(&mut self, key: SeqKey, budget: Budget) -> Option<Admission> {
        if self.draft.is_short {
            return None;
        }
        let cached = match_prefix(&mut self.seqs[key], &self.cache);
        let shared = self.blocks_to_share(key);
        let sequence = &self.seqs[key];
        let num_tokens = sequence.num_tokens();
        let total = self.config.blocks_for(num_tokens);
        let existing = cached.max(shared.full.len() as u32);
        let need = num_tokens - existing * self.config.block_size;
        let (of_windows, window_writes) = self.window_needs(total, existing, need.min(budget.left));
        let reserve = if self.running.is_empty() {
            0
        } else {
            self.watermark_blocks()
        };
        let needed = total - existing + of_windows + reserve;
        let available = self.cache.num_available();
        if needed > available || needed + self.cache.matched_evictable(sequence.usable) > available
        {
            return None;
        }
        let list_words = plan::list_words(&sequence.params, sequence.stops.len());
        if !self.draft.fits(
            &self.layout,
            list_words,
            num_tokens as usize,
            (total + window_writes) as usize,
        ) {
            return None;
        }
        // What others left of the step may be too little to begin with; a small budget's quarter never is.
        let least = self
            .config
            .block_size
            .min(self.config.max_num_batched_tokens / 8);
        if !self.draft.prefill_rows.is_empty() && budget.left < need.min(least) {
            return None;
        }
        Some(Admission {
            total,
            shared,
            existing,
        })
    }

    /// What the window groups need beyond `existing` columns of `total`, that the sequence can go on chunk by chunk: blocks to count on,
    /// and block writes for a first chunk of `chunk` tokens.
    fn window_needs(&self, total: u32, existing: u32, chunk: u32) -> (u32, u32) {
        let size = self.config.block_size;
        let first_columns = self.config.blocks_for(existing * size + chunk) - existing;
        let (mut blocks, mut writes) = (0, 0);
        for (&window, before) in self.windows.iter().zip(self.cache.window_columns(existing)) {
            let span = u64::from(window) - 1 + u64::from(chunk);
            let most = u64::from(total).min(blocks_touched(span, size)) as u32;
            blocks += most - before;
            writes += before + first_columns;
        }
        (blocks, writes)
    }

    /// Blocks kept free for running sequences.
    fn watermark_blocks(&self) -> u32 {
        (self.cache.num_blocks() as f32 * self.config.watermark) as u32
    }

    /// Without the prefix cache: the full blocks of the prompt that a running choice of the same request has scheduled, if the part of
    /// them within the windows has not left these.
    fn blocks_to_share(&self, key: SeqKey) -> Shared {
        let sequence = &self.seqs[key];
        if self.config.enable_prefix_caching || sequence.wants_prompt_logprobs() {
            return Shared::default();
        }
        let size = self.config.block_size;
        let num_blocks = sequence.num_prompt.min(sequence.num_tokens() - 1) / size;
        let prompt = &sequence.tokens[..(num_blocks * size) as usize];
        let donor = self.requests[&sequence.id]
            .iter()
            .map(|&other| &self.seqs[other])
            .find(|other| {
                other.phase == Phase::Running
                    && other.computed_bound >= num_blocks * size
                    && other.num_prompt >= num_blocks * size
                    && other.namespace == sequence.namespace
                    && other.tokens.starts_with(prompt)
            });
        donor
            .and_then(|donor| self.share_of(donor, num_blocks))
            .unwrap_or_default()
    }

    /// The first `columns` columns of a running sequence, in every group; None if a window group has not kept what it would need.
    fn share_of(&self, donor: &Sequence, columns: u32) -> Option<Shared> {
        let before = self.cache.window_columns(columns);
        let windows = donor.windows.iter().zip(before).map(|(table, before)| {
            let first = columns - before;
            let blocks: Option<Vec<BlockId>> =
                (first..columns).map(|column| table.get(column)).collect();
            Some(WindowTable::new(first, blocks?))
        });
        Some(Shared {
            windows: windows.collect::<Option<_>>()?,
            full: donor.blocks[..columns as usize].to_vec(),
        })
    }

    /// Takes what was counted: slot, blocks and the words of the plan.
    fn take_admission(&mut self, key: SeqKey, admission: Admission) {
        self.queue.take(key, &mut self.seqs);
        let slot = self
            .free_slots
            .pop()
            .expect("admission asks for a free slot first");
        let sequence = &mut self.seqs[key];
        debug_assert!(sequence.blocks.is_empty() && sequence.in_flight == 0);
        sequence.blocks.reserve(admission.total as usize + 1);
        sequence.cursor = sequence.usable;
        if admission.shared.full.is_empty() {
            self.cache.take_match(sequence.usable, &mut sequence.blocks);
            sequence.windows = self.cache.take_windows(sequence.usable);
        } else {
            self.cache.retain(&admission.shared.full);
            sequence.blocks.extend_from_slice(&admission.shared.full);
            for part in admission.shared.windows.iter().flat_map(WindowTable::parts) {
                self.cache.retain(part);
            }
            sequence.windows = admission.shared.windows;
        }
        let is_allocated = self
            .cache
            .allocate(admission.total - admission.existing, &mut sequence.blocks);
        assert!(is_allocated, "admission counted the available blocks");
        let hit_tokens = admission.existing * self.config.block_size;
        sequence.phase = Phase::Running;
        sequence.slot = slot;
        sequence.computed_bound = hit_tokens;
        sequence.settled = hit_tokens;
        sequence.tokens_bound = sequence.num_tokens();
        sequence.num_drafts = 0;
        sequence.is_fresh = true;
        sequence.is_resumed = false;
        sequence.bypassed = 0;
        sequence.num_cached_tokens.get_or_insert(hit_tokens);
        self.counters.admitted(sequence, hit_tokens);
        self.draft.init_slot(sequence);
        self.draft
            .write_blocks(slot, FULL_GROUP, 0, &sequence.blocks);
        for (group, table) in (FULL_GROUP + 1..).zip(&sequence.windows) {
            let mut column = table.first() as usize;
            for part in table.parts() {
                self.draft.write_blocks(slot, group, column, part);
                column += part.len();
            }
        }

        let rank = sequence.rank();
        let position = self
            .running
            .partition_point(|&other| self.seqs[other].rank() < rank);
        self.running.insert(position, key);
    }

    /// Choices whose prompt is scheduled now: ordinary sequences from here on.
    pub(crate) fn enqueue_held(&mut self, held: Vec<SeqKey>) {
        for key in held {
            self.seqs[key].phase = Phase::Waiting;
            self.queue.push(key, &self.seqs[key], &mut self.tenants);
        }
    }
}
