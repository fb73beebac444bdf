//! A request as it is given, and a choice of it as the scheduler keeps it.

use std::sync::Arc;

use thiserror::Error;

use crate::cache::{Cursor, KvCache};
use crate::ids::{BlockId, Namespace, RequestId, Slot, StepId, TenantId};
use crate::output::FinishReason;
use crate::params::{Pooling, SamplingParams};
use crate::plan::{self, flags};
use crate::window::WindowTable;

/// A request, or one choice of it that goes on after a restart.
#[derive(Clone, Debug, PartialEq)]
pub struct AddRequest {
    /// Given by the caller; with the choice it names one sequence.
    pub id: RequestId,
    /// The prompt, then the outputs already produced (those only with `params.n == 1`).
    pub tokens: Vec<u32>,
    /// How many of `tokens` are the prompt.
    pub num_prompt_tokens: u32,
    /// How tokens are drawn. `n` choices are made, numbered from `first_choice`.
    pub params: SamplingParams,
    /// Number of the first choice.
    pub first_choice: u32,
    /// Lower goes first.
    pub priority: i32,
    /// Whom the tokens are counted for.
    pub tenant: TenantId,
    /// Prefixes are shared within it only.
    pub namespace: Namespace,
    /// A grammar restricts its tokens: what it allows depends on all tokens before.
    pub has_grammar: bool,
}

impl AddRequest {
    /// A request for `params.n` choices after `prompt`, with priority 0 of tenant 0 in namespace 0.
    pub fn new(id: RequestId, prompt: Vec<u32>, params: SamplingParams) -> Self {
        Self {
            id,
            num_prompt_tokens: prompt.len() as u32,
            tokens: prompt,
            params,
            first_choice: 0,
            priority: 0,
            tenant: TenantId::default(),
            namespace: Namespace::default(),
            has_grammar: false,
        }
    }
}

/// A request that can never run; nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum AddError {
    /// No prompt.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// The prompt is said to be longer than the tokens given.
    #[error(
        "num_prompt_tokens = {num_prompt_tokens} must be between 1 and the {num_tokens} tokens given"
    )]
    PromptLength {
        /// As given.
        num_prompt_tokens: u32,
        /// Length of `tokens`.
        num_tokens: usize,
    },
    /// No room for one output token.
    #[error("{num_tokens} tokens leave no room for an output: max_model_len = {max_model_len}")]
    ContextLengthExceeded {
        /// Length of `tokens`.
        num_tokens: usize,
        /// The limit.
        max_model_len: u32,
    },
    /// More blocks than there are.
    #[error("{num_tokens} tokens need {needed} blocks of the KV cache, which has {num_blocks}")]
    PoolTooSmall {
        /// Length of `tokens`.
        num_tokens: usize,
        /// Blocks they take.
        needed: u64,
        /// Blocks of the pool.
        num_blocks: u32,
    },
    /// A token outside the vocabulary.
    #[error("tokens[{position}] = {token} is out of vocabulary (size {vocab_size})")]
    OutOfVocabulary {
        /// Where.
        position: usize,
        /// The token.
        token: u32,
        /// Size of the vocabulary.
        vocab_size: u32,
    },
    /// A number that must be at least 1.
    #[error("{0} = 0 must be at least 1")]
    Zero(&'static str),
    /// The outputs given are already as many as asked for.
    #[error("{num_outputs} output tokens are given, max_tokens = {max_tokens}")]
    NothingLeft {
        /// Outputs among `tokens`.
        num_outputs: u32,
        /// The limit.
        max_tokens: u32,
    },
    /// Choices part after the prompt.
    #[error("n = {n} choices cannot go on after {num_outputs} given output tokens")]
    ManyChoicesWithOutputs {
        /// Choices.
        n: u32,
        /// Outputs among `tokens`.
        num_outputs: u32,
    },
    /// Bias, stop, bad-word and allow lists that no plan can hold.
    #[error(
        "the lists of logit_bias, stop ids, bad_words and allowed_token_ids take {words} words of a plan, which has {max}"
    )]
    ListsTooLong {
        /// Words they take.
        words: usize,
        /// Words there are.
        max: usize,
    },
    /// Numbers of choices fit into 31 bits.
    #[error("first_choice = {first_choice} with n = {n} is too large")]
    ChoiceTooLarge {
        /// As given.
        first_choice: u32,
        /// Choices.
        n: u32,
    },
    /// The same choice lives already.
    #[error("request {id} choice {choice} exists already")]
    Duplicate {
        /// The request.
        id: RequestId,
        /// The choice.
        choice: u32,
    },
}

/// Names a sequence for as long as it lives: the place is reused, the generation is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct SeqKey {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

/// Where a sequence is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// A further choice: waits until the prompt of the sequence named is scheduled.
    Held(SeqKey),
    /// In the queue.
    Waiting,
    /// Has a slot and blocks.
    Running,
    /// Preempted, with rows in flight whose tokens are still to come. In no queue.
    Draining,
}

/// Blocks that a sequence gives back.
#[derive(Debug, Default)]
pub(crate) struct Blocks {
    /// Of all window groups.
    pub(crate) windows: Vec<BlockId>,
    /// Of the full group.
    pub(crate) full: Vec<BlockId>,
    pub(crate) shadows: Vec<BlockId>,
}

impl Blocks {
    pub(crate) fn len(&self) -> u32 {
        self.lists().iter().map(|list| list.len() as u32).sum()
    }

    /// All of them, in the order in which they are released: a companion before its node.
    pub(crate) fn lists(&self) -> [&[BlockId]; 3] {
        [&self.windows, &self.full, &self.shadows]
    }
}

/// One choice of a request.
#[derive(Debug)]
pub(crate) struct Sequence {
    // Read for every row of every step.
    pub(crate) phase: Phase,
    pub(crate) slot: Slot,
    /// Tokens whose KV is written once all steps in flight are done, at most.
    pub(crate) computed_bound: u32,
    /// Tokens there are once all steps in flight are done, at most.
    pub(crate) tokens_bound: u32,
    /// Tokens whose KV committed steps have written.
    pub(crate) settled: u32,
    /// Rows in flight.
    pub(crate) in_flight: u32,
    /// Rows in flight that sample: each gives one token at least.
    pub(crate) in_flight_samples: u32,
    /// The last step with a row that samples.
    pub(crate) last_sample: StepId,
    /// Length at which the sequence ends.
    pub(crate) max_len: u32,
    pub(crate) num_prompt: u32,
    pub(crate) min_tokens: u32,
    /// Drafts in flight: so many computed tokens may turn out to be rejected.
    pub(crate) in_flight_drafts: u32,
    /// Drafts of the next row, if nothing is in flight.
    pub(crate) num_drafts: u32,
    /// Row flags that the parameters alone decide.
    pub(crate) param_flags: i32,
    /// The next row is the first in its slot: the device has no count of its own yet.
    pub(crate) is_fresh: bool,
    pub(crate) tenant_index: u32,
    /// Blocks of the full group.
    pub(crate) blocks: Vec<BlockId>,
    /// Blocks of each window group; they end at the same column. Empty unless it runs.
    pub(crate) windows: Vec<WindowTable>,
    pub(crate) tokens: Vec<u32>,
    /// Sorted; the flag says that it is an end-of-sequence id.
    pub(crate) stops: Arc<[(u32, bool)]>,
    /// Published up to here while it runs; matched up to here while it waits.
    pub(crate) cursor: Cursor,
    pub(crate) namespace: Namespace,

    // Read when something happens to it.
    pub(crate) id: RequestId,
    pub(crate) choice: u32,
    pub(crate) params: Arc<SamplingParams>,
    pub(crate) priority: i32,
    /// Order of arrival, over all sequences.
    pub(crate) arrival: u64,
    /// The part of the match that every group can use, while it waits.
    pub(crate) usable: Cursor,
    /// Tree version at which `cursor` and `usable` were matched.
    pub(crate) match_version: Option<u64>,
    /// How often a later one of the same tenant was taken first.
    pub(crate) bypassed: u32,
    /// Goes before every tenant's turn: it was preempted.
    pub(crate) is_resumed: bool,
    pub(crate) shadows: Vec<BlockId>,
    /// Further choices that wait for this one's prompt.
    pub(crate) held: Vec<SeqKey>,
    pub(crate) num_preemptions: u32,
    /// Set at the first admission.
    pub(crate) num_cached_tokens: Option<u32>,
    /// Prompt positions below it have had their logprobs delivered (all, if none were asked for).
    pub(crate) prompt_logprobs_done: u32,
}

impl Sequence {
    pub(crate) fn num_tokens(&self) -> u32 {
        self.tokens.len() as u32
    }

    pub(crate) fn num_outputs(&self) -> u32 {
        self.num_tokens() - self.num_prompt
    }

    /// Order among running sequences.
    pub(crate) fn rank(&self) -> (i32, u64) {
        (self.priority, self.arrival)
    }

    /// Notes a row that samples in `step`. With a grammar: the step whose tokens its mask needs, 0 if all are known.
    pub(crate) fn note_sample(&mut self, step: StepId) -> Option<StepId> {
        let before = match self.in_flight_samples {
            0 => StepId(0),
            _ => self.last_sample,
        };
        self.last_sample = step;
        self.in_flight_samples += 1;
        (self.param_flags & flags::GRAMMAR != 0).then_some(before)
    }

    /// Whether known tokens are left that a step has to compute before it can sample.
    pub(crate) fn is_prefilling(&self) -> bool {
        self.computed_bound < self.num_prompt || self.tokens_bound - self.computed_bound > 1
    }

    /// Known tokens that no step computes yet; only while it prefills.
    pub(crate) fn prefill_need(&self) -> u32 {
        self.num_tokens() - self.computed_bound
    }

    /// Whether the next token sampled may still come before `min_tokens`.
    pub(crate) fn is_below_min_tokens(&self) -> bool {
        self.num_outputs() + self.in_flight_samples < self.min_tokens
    }

    /// Columns for which it holds a block in every group that the next query needs.
    pub(crate) fn num_columns(&self) -> u32 {
        let full = self.blocks.len() as u32;
        self.windows
            .first()
            .map_or(full, |table| full.min(table.end()))
    }

    /// Where the next query begins, if every draft in flight is rejected.
    pub(crate) fn lowest_computed(&self) -> u32 {
        self.computed_bound - self.in_flight_drafts
    }

    /// Takes all blocks from it.
    pub(crate) fn take_blocks(&mut self) -> Blocks {
        let tables = std::mem::take(&mut self.windows);
        let first = tables.iter().map(WindowTable::first).min().unwrap_or(0);
        let end = tables.iter().map(WindowTable::end).max().unwrap_or(0);
        // Lists are released from their end: what a hit behind the last column reads is evicted last.
        let columns = (first..end).rev();
        let windows =
            columns.flat_map(|column| tables.iter().filter_map(move |table| table.get(column)));
        Blocks {
            windows: windows.collect(),
            full: std::mem::take(&mut self.blocks),
            shadows: std::mem::take(&mut self.shadows),
        }
    }

    /// Publishes the full blocks of the first `computed` tokens, all of them known.
    pub(crate) fn publish(&mut self, computed: u32, cache: &mut KvCache) {
        let size = cache.block_size();
        let (first, last) = (self.cursor.depth() as usize, (computed / size) as usize);
        if last > first {
            let tokens = &self.tokens[first * size as usize..last * size as usize];
            let blocks = &self.blocks[first..last];
            cache.publish(
                self.namespace,
                &mut self.cursor,
                tokens,
                blocks,
                &mut self.shadows,
            );
            cache.attach_windows(self.cursor, first as u32, &self.windows);
        }
    }

    /// Blocks that it can take from the cache at most: logits are needed of the last known token, and of those whose prompt logprobs are
    /// still to come; all states for a mean.
    pub(crate) fn max_match(&self, block_size: u32) -> u32 {
        let first_needed = if self.params.pooling == Some(Pooling::Mean) {
            0
        } else if self.wants_prompt_logprobs() {
            self.prompt_logprobs_done - 1
        } else {
            self.num_tokens() - 1
        };
        first_needed / block_size
    }

    /// Whether a look-up in the cache would lose prompt logprobs.
    pub(crate) fn wants_prompt_logprobs(&self) -> bool {
        self.prompt_logprobs_done < self.num_prompt
    }

    /// Why the sequence ends with its last token, if it does. A stop counts first: within the budget it wins over the length.
    pub(crate) fn finish_reason(&self) -> Option<FinishReason> {
        let last = *self.tokens.last()?;
        match self.stops.binary_search_by_key(&last, |&(id, _)| id) {
            Ok(found) if self.num_outputs() > self.min_tokens => Some(match self.stops[found].1 {
                true => FinishReason::Eos(last),
                false => FinishReason::Stop(last),
            }),
            _ => (self.num_tokens() >= self.max_len).then_some(FinishReason::Length),
        }
    }
}

/// The ids that end a request, sorted; `true` marks the model's own. An id the user gave as well counts as the user's.
pub(crate) fn stop_table(params: &SamplingParams, vocab_size: u32) -> Arc<[(u32, bool)]> {
    let eos: &[u32] = if params.ignore_eos {
        &[]
    } else {
        &params.eos_token_ids
    };
    let mut table: Vec<(u32, bool)> = params
        .stop_token_ids
        .iter()
        .map(|&id| (id, false))
        .collect();
    table.extend(eos.iter().map(|&id| (id, true)));
    // A tokenizer may know more tokens than the model: these are never drawn, and a ban of one would be out of bounds.
    table.retain(|&(id, _)| id < vocab_size);
    table.sort_unstable();
    table.dedup_by_key(|entry| entry.0);
    table.into()
}

/// Row flags that follow from the parameters.
pub(crate) fn param_flags(params: &SamplingParams) -> i32 {
    let has_penalties = params.presence_penalty != 0.0
        || params.frequency_penalty != 0.0
        || params.repetition_penalty != 1.0;
    let has_filter = params.top_k > 0 || params.top_p < 1.0 || params.min_p > 0.0;
    let has_bias = !params.logit_bias.is_empty()
        || !params.bad_words.is_empty()
        || !params.allowed_token_ids.is_empty();
    plan::flag(params.logprobs.is_some(), flags::LOGPROBS)
        | plan::flag(has_penalties, flags::PENALTIES)
        | plan::flag(!params.is_greedy(), flags::RANDOM)
        | plan::flag(has_filter, flags::FILTER)
        | plan::flag(has_bias, flags::BIAS)
        | plan::flag(params.pooling.is_some(), flags::POOL)
        | plan::flag(params.pooling == Some(Pooling::Mean), flags::POOL_MEAN)
}

/// Sequences by place; a place is reused after its sequence is gone.
#[derive(Debug, Default)]
pub(crate) struct Arena {
    places: Vec<Place>,
    vacant: Vec<u32>,
}

#[derive(Debug)]
struct Place {
    generation: u32,
    sequence: Option<Sequence>,
}

impl Arena {
    /// Puts in what `make` builds for its key.
    pub(crate) fn insert(&mut self, sequence: Sequence) -> SeqKey {
        let index = self.vacant.pop().unwrap_or_else(|| {
            self.places.push(Place {
                generation: 0,
                sequence: None,
            });
            self.places.len() as u32 - 1
        });
        let place = &mut self.places[index as usize];
        place.sequence = Some(sequence);
        SeqKey {
            index,
            generation: place.generation,
        }
    }

    pub(crate) fn remove(&mut self, key: SeqKey) -> Sequence {
        let place = &mut self.places[key.index as usize];
        assert_eq!(place.generation, key.generation, "{key:?} is gone");
        place.generation = place.generation.wrapping_add(1);
        self.vacant.push(key.index);
        place
            .sequence
            .take()
            .expect("a live generation has its sequence")
    }

    pub(crate) fn get(&self, key: SeqKey) -> Option<&Sequence> {
        let place = &self.places[key.index as usize];
        if place.generation == key.generation {
            place.sequence.as_ref()
        } else {
            None
        }
    }

    pub(crate) fn get_mut(&mut self, key: SeqKey) -> Option<&mut Sequence> {
        let place = &mut self.places[key.index as usize];
        if place.generation == key.generation {
            place.sequence.as_mut()
        } else {
            None
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (SeqKey, &Sequence)> {
        self.places.iter().enumerate().filter_map(|(index, place)| {
            let key = SeqKey {
                index: index as u32,
                generation: place.generation,
            };
            place.sequence.as_ref().map(|sequence| (key, sequence))
        })
    }

    pub(crate) fn len(&self) -> usize {
        self.places.len() - self.vacant.len()
    }
}

impl std::ops::Index<SeqKey> for Arena {
    type Output = Sequence;

    fn index(&self, key: SeqKey) -> &Sequence {
        let place = &self.places[key.index as usize];
        debug_assert_eq!(place.generation, key.generation, "{key:?} is gone");
        place
            .sequence
            .as_ref()
            .expect("the owner of a key keeps its sequence alive")
    }
}

impl std::ops::IndexMut<SeqKey> for Arena {
    fn index_mut(&mut self, key: SeqKey) -> &mut Sequence {
        let place = &mut self.places[key.index as usize];
        debug_assert_eq!(place.generation, key.generation, "{key:?} is gone");
        place
            .sequence
            .as_mut()
            .expect("the owner of a key keeps its sequence alive")
    }
}
