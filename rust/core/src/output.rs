//! What goes in and out at a commit: the results of a step, and what each request learns from them.

use thiserror::Error;

use crate::ids::{RequestId, StepId};

/// Why a choice ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model's end-of-sequence token.
    Eos(u32),
    /// One of the request's `stop_token_ids`.
    Stop(u32),
    /// `max_tokens`, `max_model_len`, or as many tokens as the pool has room for.
    Length,
    /// The caller withdrew it.
    Abort,
    /// The device could not compute it (NaN, every token masked).
    Error,
}

/// What one choice learns at a commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Output<'a> {
    /// The request.
    pub id: RequestId,
    /// The choice.
    pub choice: u32,
    /// Row of the committed step (logprobs of the tokens are there); none if no row of it ended the choice.
    pub row: Option<u32>,
    /// New tokens, those after a stop cut off; a stop token is the last of them.
    pub tokens: &'a [u32],
    /// Set once, in the choice's last output.
    pub finish: Option<FinishReason>,
    /// Output tokens up to now, `tokens` among them.
    pub num_output_tokens: u32,
    /// Known tokens found in the cache when the choice was first admitted.
    pub num_cached_tokens: u32,
    /// How often the choice was preempted.
    pub num_preemptions: u32,
    /// Prompt logprobs in this row. A row of a partial prefill has an output only if this is not empty.
    pub prompt_logprobs: PromptSpan,
}

/// Prompt positions `[start, end)` whose logprobs a row gives and no earlier row gave. Each position from 1 on is told exactly once,
/// preempted or not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PromptSpan {
    /// First position.
    pub start: u32,
    /// One past the last.
    pub end: u32,
    /// How many of the row's prompt logprobs come before `start`: they were told already.
    pub skip: u32,
}

impl PromptSpan {
    /// Whether the row has nothing new.
    pub fn is_empty(&self) -> bool {
        self.start >= self.end
    }
}

/// Takes the outputs of a commit, in row order.
pub trait OutputSink {
    /// One choice's output; `output.tokens` lives until the call returns.
    fn output(&mut self, output: Output<'_>);
}

impl<F: FnMut(Output<'_>)> OutputSink for F {
    fn output(&mut self, output: Output<'_>) {
        self(output);
    }
}

/// What the device made of a step of `R` rows, row-major.
#[derive(Clone, Copy, Debug)]
pub struct StepResults<'a> {
    /// The step; commits come in the order of `schedule`.
    pub step_id: StepId,
    /// `[R * (1 + k)]`: the accepted tokens of each row, then padding of any value.
    pub tokens: &'a [i32],
    /// `[R]`: 0 for a partial prefill, else the accepted tokens, or −1 if this request failed.
    pub num_sampled: &'a [i32],
    /// `[R * k]`: drafts for each row's next step, −1 where there is none. Without it every row has `k`.
    pub next_drafts: Option<&'a [i32]>,
}

/// Results that do not belong to the step; nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CommitError {
    /// No step waits for its commit.
    #[error("step_id = {0}: no step is in flight")]
    NothingInFlight(StepId),
    /// Another step is next.
    #[error("step_id = {given}: step {expected} is the next to be committed")]
    OutOfOrder {
        /// The step given.
        given: StepId,
        /// The oldest step in flight.
        expected: StepId,
    },
    /// An array of the wrong length.
    #[error("{name} has {given} entries, the step needs {expected}")]
    WrongLength {
        /// Name of the array.
        name: &'static str,
        /// Its length.
        given: usize,
        /// The right length.
        expected: usize,
    },
    /// A count the row cannot have.
    #[error(
        "num_sampled[{row}] = {given} is not possible: the row samples {min} to {max} tokens (−1: failed)"
    )]
    Count {
        /// The row.
        row: usize,
        /// Its count.
        given: i32,
        /// Fewest tokens.
        min: i32,
        /// Most tokens.
        max: i32,
    },
    /// A token outside the vocabulary.
    #[error("tokens of row {row} hold {given}; the vocabulary has {vocab_size} tokens")]
    Token {
        /// The row.
        row: usize,
        /// The token.
        given: i32,
        /// Size of the vocabulary.
        vocab_size: u32,
    },
}
