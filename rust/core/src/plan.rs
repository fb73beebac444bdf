//! The plan of a step as one flat `int32` buffer: the one definition of its layout (`docs/engine.md` explains it).
//!
//! Fixed sections lie at offsets that depend on the configuration alone, ragged ones behind them, packed.

use crate::config::{CoreConfig, blocks_touched};
use crate::ids::{BlockId, Slot, StepId};
use crate::params::SamplingParams;
use crate::request::{SeqKey, Sequence};

/// First word of every plan: "oct1".
pub const MAGIC: i32 = 0x6f63_7431;
/// Words of the header.
pub const HEADER_WORDS: usize = 32;
/// Words of a `slot_init` entry before its lists.
pub const SLOT_INIT_HEADER_WORDS: usize = 23;
/// Words of a block write: group, slot, column, block id.
pub const BLOCK_WRITE_WORDS: usize = 4;
/// Block writes of a group that a plan has room for, if all slots together need no fewer: 64 sequences of 16,384 tokens admitted at once
/// take as many. 1 MiB.
const BATCH_BLOCK_WRITES: usize = 1 << 16;
/// Known tokens that a plan has room for, if all slots together can have so many. 4 MiB.
const BATCH_TOKENS: usize = 1 << 20;
/// Index of the full group; those with windows follow.
pub(crate) const FULL_GROUP: usize = 0;

/// Header words by index.
pub mod header {
    /// [`MAGIC`](super::MAGIC).
    pub const MAGIC: usize = 0;
    /// Low 32 bits of the step id.
    pub const STEP_LO: usize = 1;
    /// High 32 bits of the step id.
    pub const STEP_HI: usize = 2;
    /// `R`.
    pub const NUM_ROWS: usize = 3;
    /// `T`: query tokens of all rows.
    pub const NUM_TOKENS: usize = 4;
    /// Rows at the front whose query is `1 + num_draft_tokens`.
    pub const NUM_DECODE_ROWS: usize = 5;
    /// Longest query.
    pub const MAX_QUERY_LEN: usize = 6;
    /// Longest context, query included (an upper bound where a row's count is one).
    pub const MAX_SEQ_LEN: usize = 7;
    /// Number of block writes.
    pub const NUM_BLOCK_WRITES: usize = 8;
    /// Where they start, in words.
    pub const BLOCK_WRITES_OFFSET: usize = 9;
    /// Number of freed slots.
    pub const NUM_FREED_SLOTS: usize = 10;
    /// Where they start.
    pub const FREED_SLOTS_OFFSET: usize = 11;
    /// Number of `slot_init` entries.
    pub const NUM_SLOT_INITS: usize = 12;
    /// Where they start.
    pub const SLOT_INITS_OFFSET: usize = 13;
    /// Words of the plan that are used: what has to be uploaded.
    pub const USED_WORDS: usize = 14;
    /// Low 32 bits of the step after whose commit the masks can be made, 0: at once; both halves −1: no masks.
    pub const MASK_AFTER_LO: usize = 15;
    /// Query length of every row if all are decode rows of the same one, else 0.
    pub const GRAPH_KEY: usize = 16;
    /// OR of all row flags.
    pub const FLAGS: usize = 17;
    /// High 32 bits of that step.
    pub const MASK_AFTER_HI: usize = 18;
}

/// Row flags.
pub mod flags {
    /// The plan's `num_computed_tokens` is the truth; else an upper bound.
    pub const HOST_STATE: i32 = 1;
    /// The row ends at its last known token and gets sampled.
    pub const SAMPLE: i32 = 2;
    /// The row's tokens are masked by a grammar.
    pub const GRAMMAR: i32 = 4;
    /// Logprobs of the prompt tokens of this row are wanted.
    pub const PROMPT_LOGPROBS: i32 = 8;
    /// Logprobs of the sampled tokens are wanted.
    pub const LOGPROBS: i32 = 16;
    /// Presence, frequency or repetition penalty.
    pub const PENALTIES: i32 = 32;
    /// The temperature is not greedy.
    pub const RANDOM: i32 = 64;
    /// top-k, top-p or min-p.
    pub const FILTER: i32 = 128;
    /// Bias, bans, allow-list, bad words or a pending `min_tokens`.
    pub const BIAS: i32 = 256;
    /// The prompt's vector is wanted.
    pub const POOL: i32 = 512;
    /// It is the mean over all tokens, not the last one's hidden state.
    pub const POOL_MEAN: i32 = 1024;
}

/// `value` if `condition`, else no flag.
pub(crate) fn flag(condition: bool, value: i32) -> i32 {
    if condition { value } else { 0 }
}

/// Offsets, in words, and capacities of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// `S`.
    pub max_rows: usize,
    /// `slot[S]`.
    pub slot: usize,
    /// `query_start_loc[S + 1]`.
    pub query_start_loc: usize,
    /// `num_computed_tokens[S]`.
    pub num_computed_tokens: usize,
    /// `num_draft_tokens[S]`.
    pub num_draft_tokens: usize,
    /// `flags[S]`.
    pub flags: usize,
    /// First word of the ragged parts.
    pub ragged: usize,
    /// Block writes of a plan at most.
    pub max_block_writes: usize,
    /// Words of all `slot_init` entries of a plan at most.
    pub max_slot_init_words: usize,
    /// Words of the lists of one request at most: a bias for every token of the vocabulary and 4,096 more.
    pub max_list_words: usize,
    /// Length of a buffer.
    pub total_words: usize,
}

impl Layout {
    /// The layout of a valid configuration.
    pub fn new(config: &CoreConfig) -> Self {
        /// Every section starts at a multiple of 16 bytes.
        fn take(next: &mut usize, words: usize) -> usize {
            let start = *next;
            *next += words.next_multiple_of(4);
            start
        }
        let rows = config.max_num_seqs as usize;
        let max_len = config.max_model_len as usize;
        let blocks_per_seq = config.blocks_for(config.max_model_len) as usize;
        let growth = config.blocks_for(1 + config.max_draft_tokens) as usize;
        let max_list_words = 2 * config.vocab_size as usize + 4096;

        let mut next = HEADER_WORDS;
        let slot = take(&mut next, rows);
        let query_start_loc = take(&mut next, rows + 1);
        let num_computed_tokens = take(&mut next, rows);
        let num_draft_tokens = take(&mut next, rows);
        let flags = take(&mut next, rows);
        // One admission of any size always fits, and a batch beside it: of small ones, or of as many as the limits say; in each window
        // group, the window and the chunk.
        let batch = |most: usize, limit: usize| (rows * most).min(limit).max(2 * most);
        let block_writes =
            |columns: usize| rows * (growth + 4) + batch(columns, BATCH_BLOCK_WRITES);
        let max_block_writes: usize = block_writes(blocks_per_seq)
            + config
                .windows()
                .map(|window| {
                    let span = u64::from(window) + u64::from(config.max_num_batched_tokens);
                    let touched = blocks_touched(span, config.block_size) as usize;
                    block_writes(blocks_per_seq.min(touched))
                })
                .sum::<usize>();
        let max_slot_init_words =
            SLOT_INIT_HEADER_WORDS + max_list_words + 64 * rows + batch(max_len, BATCH_TOKENS);
        let ragged_words = BLOCK_WRITE_WORDS * max_block_writes + rows + max_slot_init_words;
        Self {
            max_rows: rows,
            slot,
            query_start_loc,
            num_computed_tokens,
            num_draft_tokens,
            flags,
            ragged: next,
            max_block_writes,
            max_slot_init_words,
            max_list_words,
            total_words: next + ragged_words,
        }
    }
}

/// A row of a step, from its `schedule` to its `commit`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    pub(crate) key: SeqKey,
    pub(crate) slot: Slot,
    /// Computed tokens before the row, at most.
    pub(crate) computed: u32,
    /// Query tokens, drafts among them.
    pub(crate) query: u32,
    pub(crate) drafts: u32,
    pub(crate) flags: i32,
}

impl Row {
    pub(crate) fn samples(&self) -> bool {
        self.flags & flags::SAMPLE != 0
    }
}

/// A plan while it is made; keeps its memory from step to step.
#[derive(Debug, Default)]
pub(crate) struct PlanDraft {
    pub(crate) decode_rows: Vec<Row>,
    pub(crate) prefill_rows: Vec<Row>,
    /// Running sequences that have known tokens to compute.
    pub(crate) prefilling: Vec<SeqKey>,
    /// Prompts that had a part computed by this step and a part left, when they got their row; none without the prefix cache.
    pub(crate) unfinished: Vec<SeqKey>,
    /// Somebody waits for blocks: those that come after take none.
    pub(crate) is_short: bool,
    /// The step after whose commit the masks of all rows can be made, 0: at once; none: no row has one.
    pub(crate) mask_after: Option<StepId>,
    block_writes: Vec<i32>,
    slot_inits: Vec<i32>,
    num_slot_inits: usize,
}

impl PlanDraft {
    pub(crate) fn clear(&mut self) {
        self.decode_rows.clear();
        self.prefill_rows.clear();
        self.prefilling.clear();
        self.unfinished.clear();
        self.is_short = false;
        self.mask_after = None;
        self.block_writes.clear();
        self.slot_inits.clear();
        self.num_slot_inits = 0;
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.decode_rows.is_empty() && self.prefill_rows.is_empty()
    }

    /// Block writes that the plan still has room for.
    pub(crate) fn free_block_writes(&self, layout: &Layout) -> usize {
        layout.max_block_writes - self.block_writes.len() / BLOCK_WRITE_WORDS
    }

    /// Whether a request of `list_words` and `num_tokens` with `num_blocks` blocks still fits.
    pub(crate) fn fits(
        &self,
        layout: &Layout,
        list_words: usize,
        num_tokens: usize,
        num_blocks: usize,
    ) -> bool {
        let words = self.slot_inits.len() + SLOT_INIT_HEADER_WORDS + list_words + num_tokens;
        num_blocks <= self.free_block_writes(layout) && words <= layout.max_slot_init_words
    }

    /// Puts `blocks` into the slot's block table of a group, from column `first` on.
    pub(crate) fn write_blocks(
        &mut self,
        slot: Slot,
        group: usize,
        first: usize,
        blocks: &[BlockId],
    ) {
        for (column, block) in (first..).zip(blocks) {
            self.block_writes.extend_from_slice(&[
                group as i32,
                slot.0 as i32,
                column as i32,
                block.0 as i32,
            ]);
        }
    }

    /// Gives the slot to a sequence: parameters and known tokens.
    pub(crate) fn init_slot(&mut self, sequence: &Sequence) {
        encode_slot_init(&mut self.slot_inits, sequence);
        self.num_slot_inits += 1;
    }

    /// Writes the plan and leaves all rows, decode rows first, in `decode_rows`.
    pub(crate) fn write(
        &mut self,
        layout: &Layout,
        step: StepId,
        freed: &[Slot],
        buffer: &mut [i32],
    ) {
        let num_decode = self.decode_rows.len();
        self.decode_rows.extend_from_slice(&self.prefill_rows);
        let rows = &self.decode_rows;
        let totals = write_rows(layout, rows, buffer);

        let block_writes_at = layout.ragged;
        let freed_at = block_writes_at + self.block_writes.len();
        let slot_inits_at = freed_at + freed.len();
        let used = slot_inits_at + self.slot_inits.len();
        buffer[block_writes_at..freed_at].copy_from_slice(&self.block_writes);
        for (word, slot) in buffer[freed_at..slot_inits_at].iter_mut().zip(freed) {
            *word = slot.0 as i32;
        }
        buffer[slot_inits_at..used].copy_from_slice(&self.slot_inits);

        let is_uniform =
            num_decode == rows.len() && rows.iter().all(|row| row.query == totals.max_query);
        let head = &mut buffer[..HEADER_WORDS];
        head.fill(0);
        head[header::MAGIC] = MAGIC;
        (head[header::STEP_LO], head[header::STEP_HI]) = split(step.0);
        head[header::NUM_ROWS] = rows.len() as i32;
        head[header::NUM_TOKENS] = totals.tokens as i32;
        head[header::NUM_DECODE_ROWS] = num_decode as i32;
        head[header::MAX_QUERY_LEN] = totals.max_query as i32;
        head[header::MAX_SEQ_LEN] = totals.max_seq as i32;
        head[header::NUM_BLOCK_WRITES] = (self.block_writes.len() / BLOCK_WRITE_WORDS) as i32;
        head[header::BLOCK_WRITES_OFFSET] = block_writes_at as i32;
        head[header::NUM_FREED_SLOTS] = freed.len() as i32;
        head[header::FREED_SLOTS_OFFSET] = freed_at as i32;
        head[header::NUM_SLOT_INITS] = self.num_slot_inits as i32;
        head[header::SLOT_INITS_OFFSET] = slot_inits_at as i32;
        head[header::USED_WORDS] = used as i32;
        (head[header::MASK_AFTER_LO], head[header::MASK_AFTER_HI]) =
            self.mask_after.map_or((-1, -1), |step| split(step.0));
        head[header::GRAPH_KEY] = if is_uniform {
            totals.max_query as i32
        } else {
            0
        };
        head[header::FLAGS] = totals.flags;
    }
}

struct Totals {
    tokens: u32,
    max_query: u32,
    max_seq: u32,
    flags: i32,
}

/// Writes the fixed sections; padding rows have slot 0 and an empty query.
fn write_rows(layout: &Layout, rows: &[Row], buffer: &mut [i32]) -> Totals {
    let mut totals = Totals {
        tokens: 0,
        max_query: 0,
        max_seq: 0,
        flags: 0,
    };
    for (i, row) in rows.iter().enumerate() {
        buffer[layout.slot + i] = row.slot.0 as i32;
        buffer[layout.query_start_loc + i] = totals.tokens as i32;
        buffer[layout.num_computed_tokens + i] = row.computed as i32;
        buffer[layout.num_draft_tokens + i] = row.drafts as i32;
        buffer[layout.flags + i] = row.flags;
        totals.tokens += row.query;
        totals.max_query = totals.max_query.max(row.query);
        totals.max_seq = totals.max_seq.max(row.computed + row.query);
        totals.flags |= row.flags;
    }
    let padding = rows.len()..layout.max_rows;
    for section in [
        layout.slot,
        layout.num_computed_tokens,
        layout.num_draft_tokens,
        layout.flags,
    ] {
        buffer[section + padding.start..section + padding.end].fill(0);
    }
    let ends = layout.query_start_loc + padding.start..=layout.query_start_loc + padding.end;
    buffer[ends].fill(totals.tokens as i32);
    totals
}

/// Words that the lists of a request take in its `slot_init` entry.
pub(crate) fn list_words(params: &SamplingParams, num_stops: usize) -> usize {
    let bad_words: usize = params.bad_words.iter().map(|word| 1 + word.len()).sum();
    2 * params.logit_bias.len() + num_stops + bad_words + params.allowed_token_ids.len()
}

fn encode_slot_init(out: &mut Vec<i32>, sequence: &Sequence) {
    let start = out.len();
    let params = &*sequence.params;
    let (seed_lo, seed_hi) = split(params.seed);
    let float = |value: f32| value.to_bits() as i32;
    let count = |value: Option<u32>| value.map_or(-1, |value| value as i32);
    out.extend_from_slice(&[
        0, // total words, known at the end
        sequence.slot.0 as i32,
        sequence.num_prompt as i32,
        sequence.num_tokens() as i32,
        sequence.choice as i32,
        seed_lo,
        seed_hi,
        float(params.temperature),
        float(params.top_p),
        float(params.min_p),
        float(params.presence_penalty),
        float(params.frequency_penalty),
        float(params.repetition_penalty),
        params.top_k as i32,
        params.min_tokens as i32,
        params.max_tokens as i32,
        count(params.logprobs),
        count(params.prompt_logprobs),
        sequence.param_flags,
        params.logit_bias.len() as i32,
        sequence.stops.len() as i32,
        params.bad_words.len() as i32,
        params.allowed_token_ids.len() as i32,
    ]);
    for &(id, value) in &params.logit_bias {
        out.extend_from_slice(&[id as i32, float(value)]);
    }
    out.extend(sequence.stops.iter().map(|&(id, _)| id as i32));
    for word in &params.bad_words {
        out.push(word.len() as i32);
        out.extend(word.iter().map(|&id| id as i32));
    }
    out.extend(params.allowed_token_ids.iter().map(|&id| id as i32));
    out.extend(sequence.tokens.iter().map(|&id| id as i32));
    out[start] = (out.len() - start) as i32;
}

/// Low and high half.
fn split(value: u64) -> (i32, i32) {
    (value as u32 as i32, (value >> 32) as u32 as i32)
}
