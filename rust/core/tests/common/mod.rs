//! A device that computes no logits but checks everything a plan asks of it, and the tokens each request must get.
//!
//! The KV of a position is a hash over all tokens up to there, so a row that reads one wrong block, or one that was overwritten, is found at
//! once. Samples are a function of that hash, seed, choice and position: what a request gets depends on nothing else.
#![allow(dead_code, clippy::unwrap_used)]

pub(crate) mod engine;

use octavo_core::config::{CacheGroup, CoreConfig};
use octavo_core::ids::StepId;
use octavo_core::output::{FinishReason, StepResults};
use octavo_core::plan::{self, Layout, flags, header};
use octavo_core::request::AddRequest;

/// A good 64-bit mixer (the finaliser of SplitMix64).
pub(crate) fn mix(a: u64, b: u64) -> u64 {
    let mut x = a.rotate_left(23) ^ b.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The KV before the first token. Namespaces must not share, so the tests put them into the upper half of the seed.
fn root_content(seed: u64) -> u64 {
    mix(0x5eed, seed >> 32)
}

fn next_content(content: u64, token: i64) -> u64 {
    mix(content, token as u64)
}

/// The token after a context; the whole of the "model".
fn sample(content: u64, seed: u64, choice: u32, position: usize, vocab_size: u32) -> u32 {
    (mix(mix(content, seed), mix(u64::from(choice), position as u64)) % u64::from(vocab_size))
        as u32
}

/// Seeds carry what the device has to know besides: a namespace, and the output at which the device fails (0: none).
pub(crate) fn make_seed(namespace: u32, fails_at: u32, low: u32) -> u64 {
    u64::from(namespace) << 32 | u64::from(fails_at) << 16 | u64::from(low & 0xffff)
}

fn fails_at(seed: u64) -> u32 {
    (seed >> 16) as u32 & 0xffff
}

/// How many positions before its own a query of a group reads, its own among them.
fn window_of(group: &CacheGroup) -> usize {
    match group {
        CacheGroup::Full => usize::MAX,
        CacheGroup::Window { window } => *window as usize,
    }
}

/// The first position that a query at `position` reads.
fn first_read(group: &CacheGroup, position: usize) -> usize {
    (0..=position)
        .find(|&read| position - read < window_of(group))
        .unwrap()
}

/// Blocks that a request of `num_tokens` may hold at once: whatever positions the oldest step in flight reads, up to the last that is
/// computed by the newest, wherever they lie.
pub(crate) fn most_blocks(config: &CoreConfig, num_tokens: usize) -> usize {
    let size = config.block_size as usize;
    let in_flight = (config.max_num_batched_tokens * config.max_in_flight) as usize;
    let touched = |group: &CacheGroup| {
        let span = window_of(group)
            .saturating_add(in_flight - 1)
            .min(num_tokens + size);
        let ends = (0..size).map(|start| (start + span - 1) / size + 1);
        ends.max().unwrap().min(num_tokens.div_ceil(size))
    };
    config.groups.iter().map(touched).sum()
}

/// The most tokens whose KV fits into the pool, up to the model's length.
pub(crate) fn longest_in_pool(config: &CoreConfig) -> usize {
    (0..=config.max_model_len as usize)
        .take_while(|&n| most_blocks(config, n) < config.num_blocks as usize)
        .last()
        .unwrap()
}

/// All tokens of a choice run alone, and why it ends.
pub(crate) fn run_alone(
    config: &CoreConfig,
    request: &AddRequest,
    choice: u32,
) -> (Vec<u32>, FinishReason) {
    let params = &request.params;
    let prompt = request.num_prompt_tokens as usize;
    // The last token's KV is never computed.
    let end = (prompt + params.max_tokens as usize)
        .min(config.max_model_len as usize)
        .min(longest_in_pool(config) + 1);
    let mut content = request
        .tokens
        .iter()
        .fold(root_content(params.seed), |content, &token| {
            next_content(content, i64::from(token))
        });
    let mut tokens = request.tokens.clone();
    loop {
        let outputs = tokens.len() - prompt;
        if fails_at(params.seed) as usize == outputs + 1 {
            return (tokens, FinishReason::Error);
        }
        let token = sample(
            content,
            params.seed,
            choice,
            tokens.len(),
            config.vocab_size,
        );
        content = next_content(content, i64::from(token));
        tokens.push(token);
        if outputs >= params.min_tokens as usize {
            if params.stop_token_ids.contains(&token) {
                return (tokens, FinishReason::Stop(token));
            }
            if !params.ignore_eos && params.eos_token_ids.contains(&token) {
                return (tokens, FinishReason::Eos(token));
            }
        }
        if tokens.len() >= end {
            return (tokens, FinishReason::Length);
        }
    }
}

/// State of one slot, as the runner would keep it.
#[derive(Clone, Debug, Default)]
struct SlotState {
    is_live: bool,
    tokens: Vec<u32>,
    num_prompt: usize,
    choice: u32,
    seed: u64,
    computed: usize,
    /// Block tables by group; columns of a window group that were never written hold 0. Nothing tells of those that left the window.
    tables: Vec<Vec<u32>>,
    drafts: Vec<i32>,
}

impl SlotState {
    /// Columns of a group that a query from the next position on reads, with their blocks.
    fn readable(
        &self,
        group: usize,
        kind: &CacheGroup,
        block_size: u32,
    ) -> impl Iterator<Item = (usize, u32)> {
        let first = match self.computed {
            usize::MAX => 0,
            computed => first_read(kind, computed) / block_size as usize,
        };
        let columns = self.tables[group].iter().copied().enumerate().skip(first);
        columns.filter(|&(_, block)| block != 0)
    }

    /// KV of position `p` if the slot's own known tokens are right.
    fn contents(&self) -> Vec<u64> {
        let mut content = root_content(self.seed);
        let steps = self.tokens.iter().map(|&token| {
            content = next_content(content, i64::from(token));
            content
        });
        steps.collect()
    }
}

/// A row as it is read from the plan.
#[derive(Clone, Debug)]
pub(crate) struct PlanRow {
    pub(crate) slot: usize,
    pub(crate) query: usize,
    pub(crate) computed: usize,
    pub(crate) drafts: usize,
    pub(crate) flags: i32,
}

/// Results of a step as its commit wants them.
#[derive(Clone, Debug)]
pub(crate) struct DeviceStep {
    pub(crate) id: StepId,
    pub(crate) rows: Vec<PlanRow>,
    pub(crate) num_decode_rows: usize,
    pub(crate) tokens: Vec<i32>,
    pub(crate) num_sampled: Vec<i32>,
    pub(crate) next_drafts: Vec<i32>,
}

impl DeviceStep {
    pub(crate) fn results(&self, with_drafts: bool) -> StepResults<'_> {
        StepResults {
            step_id: self.id,
            tokens: &self.tokens,
            num_sampled: &self.num_sampled,
            next_drafts: with_drafts.then_some(&self.next_drafts[..]),
        }
    }
}

/// Applies plans to its own state and panics at whatever is wrong with one.
#[derive(Debug)]
pub(crate) struct Device {
    config: CoreConfig,
    layout: Layout,
    slots: Vec<SlotState>,
    /// KV by block and offset.
    kv: Vec<Option<u64>>,
    last_step: u64,
}

impl Device {
    pub(crate) fn new(config: &CoreConfig) -> Self {
        Self {
            config: config.clone(),
            layout: Layout::new(config),
            slots: vec![SlotState::default(); config.max_num_seqs as usize],
            kv: vec![None; (config.num_blocks * config.block_size) as usize],
            last_step: 0,
        }
    }

    /// Block table of a slot in the full group.
    pub(crate) fn table(&self, slot: usize) -> &[u32] {
        &self.slots[slot].tables[0]
    }

    /// Seed and prompt of the request in a slot.
    pub(crate) fn prompt(&self, slot: usize) -> (u64, &[u32]) {
        let state = &self.slots[slot];
        (state.seed, &state.tokens[..state.num_prompt])
    }

    /// Runs a step.
    pub(crate) fn run(&mut self, plan: &[i32]) -> DeviceStep {
        let id = self.check_header(plan);
        self.apply_freed(plan);
        self.apply_slot_inits(plan);
        self.apply_block_writes(plan);
        let rows = self.read_rows(plan);
        let queries: Vec<Vec<i64>> = rows.iter().map(|row| self.begin_row(row)).collect();
        let computed: Vec<usize> = rows
            .iter()
            .map(|row| self.slots[row.slot].computed)
            .collect();
        for ((row, query), &computed) in rows.iter().zip(&queries).zip(&computed) {
            self.write_row(row, query, computed);
        }
        for ((row, query), &computed) in rows.iter().zip(&queries).zip(&computed) {
            self.check_context(row, query, computed);
        }
        let width = 1 + self.config.max_draft_tokens as usize;
        let mut step = DeviceStep {
            id,
            num_decode_rows: plan[header::NUM_DECODE_ROWS] as usize,
            tokens: Vec::new(),
            num_sampled: Vec::new(),
            next_drafts: Vec::new(),
            rows: rows.clone(),
        };
        for (row, query) in rows.iter().zip(&queries) {
            let (num_sampled, accepted) = self.sample_row(row, query);
            step.num_sampled.push(num_sampled);
            let padding = std::iter::repeat_n(-7, width - accepted.len());
            step.tokens
                .extend(accepted.iter().map(|&token| token as i32).chain(padding));
            step.next_drafts.extend(&self.slots[row.slot].drafts);
        }
        step
    }

    fn check_header(&mut self, plan: &[i32]) -> StepId {
        assert_eq!(plan[header::MAGIC], plan::MAGIC);
        let id = plan[header::STEP_LO] as u32 as u64 | (plan[header::STEP_HI] as u32 as u64) << 32;
        assert_eq!(id, self.last_step + 1, "steps are numbered without gaps");
        self.last_step = id;
        assert!(plan[header::USED_WORDS] as usize <= self.layout.total_words);
        assert!(plan[header::NUM_TOKENS] as u32 <= self.config.max_num_batched_tokens);
        assert!(plan[header::NUM_ROWS] > 0, "an empty step");
        StepId(id)
    }

    fn apply_freed(&mut self, plan: &[i32]) {
        let start = plan[header::FREED_SLOTS_OFFSET] as usize;
        for &slot in &plan[start..start + plan[header::NUM_FREED_SLOTS] as usize] {
            let state = &mut self.slots[slot as usize];
            assert!(state.is_live, "slot {slot} is freed twice");
            state.is_live = false;
        }
    }

    fn apply_slot_inits(&mut self, plan: &[i32]) {
        let mut at = plan[header::SLOT_INITS_OFFSET] as usize;
        for _ in 0..plan[header::NUM_SLOT_INITS] {
            let words = plan[at] as usize;
            let entry = &plan[at..at + words];
            at += words;
            let num_tokens = entry[3] as usize;
            let state = &mut self.slots[entry[1] as usize];
            assert!(!state.is_live, "slot {} has an owner already", entry[1]);
            *state = SlotState {
                is_live: true,
                tokens: entry[words - num_tokens..]
                    .iter()
                    .map(|&token| token as u32)
                    .collect(),
                num_prompt: entry[2] as usize,
                choice: entry[4] as u32,
                seed: entry[5] as u32 as u64 | (entry[6] as u32 as u64) << 32,
                computed: usize::MAX,
                tables: vec![Vec::new(); self.config.groups.len()],
                drafts: vec![-1; self.config.max_draft_tokens as usize],
            };
        }
        assert_eq!(
            at,
            plan[header::USED_WORDS] as usize,
            "slot_init entries end where the plan ends"
        );
    }

    fn apply_block_writes(&mut self, plan: &[i32]) {
        let start = plan[header::BLOCK_WRITES_OFFSET] as usize;
        let words = 4 * plan[header::NUM_BLOCK_WRITES] as usize;
        for write in plan[start..start + words].chunks_exact(4) {
            let [group, slot, column, block] = [write[0], write[1], write[2], write[3]];
            let state = &mut self.slots[slot as usize];
            assert!(
                state.is_live,
                "a block is written for slot {slot}, which nobody owns"
            );
            assert!(
                block > 0 && (block as u32) < self.config.num_blocks,
                "block {block} cannot be used"
            );
            for (other, kind) in self.config.groups.iter().enumerate() {
                assert!(
                    state
                        .readable(other, kind, self.config.block_size)
                        .all(|(_, held)| held != block as u32),
                    "block {block} is in the tables twice"
                );
            }
            let table = &mut state.tables[group as usize];
            if group > 0 && table.is_empty() {
                // A hit leaves out what no query reads.
                table.resize(column as usize, 0);
            }
            assert_eq!(
                column as usize,
                table.len(),
                "block tables grow column by column"
            );
            table.push(block as u32);
        }
    }

    fn read_rows(&self, plan: &[i32]) -> Vec<PlanRow> {
        let (layout, num_rows) = (&self.layout, plan[header::NUM_ROWS] as usize);
        let starts = &plan[layout.query_start_loc..=layout.query_start_loc + layout.max_rows];
        let row = |i: usize| PlanRow {
            slot: plan[layout.slot + i] as usize,
            query: (starts[i + 1] - starts[i]) as usize,
            computed: plan[layout.num_computed_tokens + i] as usize,
            drafts: plan[layout.num_draft_tokens + i] as usize,
            flags: plan[layout.flags + i],
        };
        let rows: Vec<PlanRow> = (0..num_rows).map(row).collect();
        for padding in (num_rows..layout.max_rows).map(row) {
            assert!(
                padding.slot == 0 && padding.query == 0 && padding.flags == 0,
                "{padding:?}"
            );
        }
        assert_eq!(starts[layout.max_rows], plan[header::NUM_TOKENS]);
        let decodes = &rows[..plan[header::NUM_DECODE_ROWS] as usize];
        for row in decodes {
            assert!(
                row.query == 1 + row.drafts && row.flags & flags::SAMPLE != 0,
                "{row:?}"
            );
        }
        assert!(
            rows[decodes.len()..]
                .iter()
                .all(|row| row.query > 0 && row.drafts == 0)
        );
        let mut slots: Vec<usize> = rows.iter().map(|row| row.slot).collect();
        slots.sort_unstable();
        slots.dedup();
        assert_eq!(slots.len(), rows.len(), "a slot has two rows");
        assert_eq!(
            plan[header::FLAGS],
            rows.iter().fold(0, |all, row| all | row.flags)
        );
        assert_eq!(
            plan[header::MAX_QUERY_LEN] as usize,
            rows.iter().map(|row| row.query).max().unwrap()
        );
        let longest = rows
            .iter()
            .map(|row| row.computed + row.query)
            .max()
            .unwrap();
        assert_eq!(plan[header::MAX_SEQ_LEN] as usize, longest);
        rows
    }

    /// Settles how much the slot has computed; the row's query tokens, drafts among them.
    fn begin_row(&mut self, row: &PlanRow) -> Vec<i64> {
        let host_state = self.config.host_state;
        let state = &mut self.slots[row.slot];
        assert!(
            state.is_live,
            "a row of slot {}, which nobody owns",
            row.slot
        );
        if row.flags & flags::HOST_STATE != 0 {
            assert!(
                state.computed == usize::MAX || state.computed == row.computed,
                "the host is wrong: {row:?}"
            );
            state.computed = row.computed;
        } else {
            assert!(
                !host_state && state.computed != usize::MAX,
                "nobody knows what slot {} computed",
                row.slot
            );
            assert!(
                state.computed <= row.computed,
                "{} computed is not within {row:?}",
                state.computed
            );
        }
        let last = state.computed + row.query - row.drafts;
        if row.flags & flags::SAMPLE != 0 {
            assert_eq!(
                last,
                state.tokens.len(),
                "a sampled row ends at its last known token"
            );
        } else {
            assert!(
                last < state.tokens.len(),
                "a row that ends at the last known token is sampled"
            );
        }
        let known = state.tokens[state.computed..last]
            .iter()
            .map(|&token| i64::from(token));
        known
            .chain(
                state.drafts[..row.drafts]
                    .iter()
                    .map(|&draft| i64::from(draft)),
            )
            .collect()
    }

    fn write_row(&mut self, row: &PlanRow, query: &[i64], computed: usize) {
        let state = &self.slots[row.slot];
        let known = state.contents();
        let mut content = if computed == 0 {
            root_content(state.seed)
        } else {
            known[computed - 1]
        };
        for (i, &token) in query.iter().enumerate() {
            content = next_content(content, token);
            let position = computed + i;
            assert!(
                position < self.config.max_model_len as usize,
                "position {position} is beyond the model"
            );
            for group in 0..self.config.groups.len() {
                self.write_position(row.slot, group, position, content);
            }
        }
    }

    /// Writes the KV of a position in one group, unless another slot could read something else from there.
    fn write_position(&mut self, slot: usize, group: usize, position: usize, content: u64) {
        let size = self.config.block_size as usize;
        let block = self.slots[slot].tables[group][position / size];
        assert!(
            block > 0,
            "slot {slot} position {position} group {group}: no block"
        );
        let others = self
            .slots
            .iter()
            .enumerate()
            .filter(|&(other, reader)| other != slot && reader.is_live);
        for (other, reader) in others {
            for (read_group, kind) in self.config.groups.iter().enumerate() {
                let mut readable = reader.readable(read_group, kind, self.config.block_size);
                let Some((column, _)) = readable.find(|&(_, held)| held == block) else {
                    continue;
                };
                let read_at = column * size + position % size;
                assert_eq!(
                    (read_group, reader.contents().get(read_at).copied()),
                    (group, Some(content)),
                    "slot {slot} overwrites block {block} of slot {other}"
                );
            }
        }
        self.kv[block as usize * size + position % size] = Some(mix(content, group as u64));
    }

    /// Compares the KV of all that the row's queries read, in every group, with what the slot's tokens and drafts give.
    fn check_context(&self, row: &PlanRow, query: &[i64], computed: usize) {
        let size = self.config.block_size as usize;
        let state = &self.slots[row.slot];
        let before = state.tokens[..computed]
            .iter()
            .map(|&token| i64::from(token));
        let mut content = root_content(state.seed);
        for (position, token) in before.chain(query.iter().copied()).enumerate() {
            content = next_content(content, token);
            for (group, kind) in self.config.groups.iter().enumerate() {
                if position < first_read(kind, computed) {
                    continue;
                }
                let block = state.tables[group][position / size] as usize;
                let found = self.kv[block * size + position % size];
                assert_eq!(
                    found,
                    Some(mix(content, group as u64)),
                    "slot {} position {position} group {group} block {block}: wrong KV",
                    row.slot
                );
            }
        }
    }

    /// Accepts drafts as long as they are what would be sampled; (`num_sampled`, tokens).
    fn sample_row(&mut self, row: &PlanRow, query: &[i64]) -> (i32, Vec<u32>) {
        let vocab_size = self.config.vocab_size;
        let state = &mut self.slots[row.slot];
        if row.flags & flags::SAMPLE == 0 {
            state.computed += row.query;
            return (0, Vec::new());
        }
        let (seed, choice) = (state.seed, state.choice);
        let mut content = *state.contents().last().unwrap();
        let mut accepted = Vec::new();
        let drafts = &query[row.query - row.drafts..];
        let offered = drafts.iter().map(|&draft| Some(draft)).chain([None]);
        for draft in offered {
            let token = sample(content, seed, choice, state.tokens.len(), vocab_size);
            content = next_content(content, i64::from(token));
            state.tokens.push(token);
            accepted.push(token);
            if draft.is_some_and(|draft| draft != i64::from(token)) {
                break;
            }
        }
        assert!(
            state.tokens.len() <= self.config.max_model_len as usize,
            "token_ids overflows"
        );
        state.computed = state.tokens.len() - 1;
        for (position, draft) in (state.tokens.len()..).zip(&mut state.drafts) {
            let token = sample(content, seed, choice, position, vocab_size);
            content = next_content(content, i64::from(token));
            // Some drafts are wrong, some are missing.
            *draft = match mix(content, 0xd4af7) % 8 {
                0 => -1,
                1 | 2 => (token as i32 + 1) % vocab_size as i32,
                _ => token as i32,
            };
        }
        let outputs = state.tokens.len() - state.num_prompt;
        if fails_at(seed) != 0 && outputs >= fails_at(seed) as usize {
            return (-1, Vec::new());
        }
        (accepted.len() as i32, accepted)
    }
}
