//! The messages. Both sides are built of one source, so fields have no names on the wire.

use octavo_core::params::{Pooling, SamplingParams};
use octavo_core::stats::Stats;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

use crate::grammar::GrammarSource;

use crate::state::EngineState;

/// From the front to an engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToEngine {
    /// A request, or one choice of it that goes on after a restart.
    Add(Box<AddRequest>),
    /// Ends every choice of a request. Unknown ones are left alone.
    Abort {
        /// The request.
        id: u64,
    },
    /// Ends one choice: a stop string was met.
    AbortChoice {
        /// The request.
        id: u64,
        /// The choice.
        choice: u32,
    },
    /// Asks for a [`FromEngine::Pong`].
    Ping {
        /// Comes back with the answer.
        nonce: u64,
    },
    /// Asks for a [`FromEngine::State`].
    Inspect,
    /// Forget every cached prefix.
    ResetPrefixCache,
    /// End the process. The end of the stream means the same.
    Shutdown,
}

/// A request whose every part has been resolved by the front.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AddRequest {
    /// Chosen by the front, never used twice.
    pub id: u64,
    /// The prompt, then what was already produced (with one choice only).
    pub tokens: Vec<u32>,
    /// How many of `tokens` are the prompt.
    pub num_prompt_tokens: u32,
    /// Number of the first choice.
    pub first_choice: u32,
    /// Of `params.n` choices.
    pub params: SamplingParams,
    /// Lower runs first.
    pub priority: i32,
    /// Whom fairness counts the tokens for.
    pub tenant: u64,
    /// Prefixes are shared within it only.
    pub namespace: u64,
    /// What its outputs must be.
    pub grammar: Option<Arc<GrammarSource>>,
}

/// From an engine to the front.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum FromEngine {
    /// The first message.
    Hello {
        /// [`crate::VERSION`] of the engine.
        version: u32,
    },
    /// The model is loaded; requests are taken from now on.
    Ready(Box<ModelInfo>),
    /// The engine cannot start or go on, and why. Its process ends.
    Failed(String),
    /// What requests gained since they were told of last, after one or more steps.
    Updates(Vec<Update>),
    /// A request that can never run. It has no updates.
    Refused {
        /// The request.
        id: u64,
        /// Why.
        message: String,
    },
    /// Answers a ping.
    Pong {
        /// Of the ping.
        nonce: u64,
        /// What the engine is doing.
        progress: Box<Progress>,
    },
    /// Answers an inspection.
    State(Box<EngineState>),
}

/// What an engine has done, and what it holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Steps committed since its start.
    pub steps: u64,
    /// Counters of the control plane.
    pub stats: Stats,
}

/// What one request gained.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Update {
    /// The request.
    pub id: u64,
    /// Prompt tokens that were found in the cache.
    pub num_cached_tokens: u32,
    /// Given once, when the prompt is computed: one entry for each prompt token, the first empty.
    pub prompt_logprobs: Option<Vec<Option<PositionLogprobs>>>,
    /// Given once, if it was asked for: the prompt as a vector.
    pub pooled: Option<Vec<f32>>,
    /// Choices that gained something.
    pub choices: Vec<ChoiceUpdate>,
    /// Every choice has ended: there are no further updates.
    pub finished: bool,
    /// Why the request failed alone.
    pub error: Option<String>,
}

/// What one choice gained.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ChoiceUpdate {
    /// Number of the choice in the request.
    pub index: u32,
    /// Output tokens; one that ended the choice is the last of them.
    pub token_ids: Vec<u32>,
    /// One entry for each token, if the request asked for them.
    pub logprobs: Vec<PositionLogprobs>,
    /// Set once, with the last tokens of the choice.
    pub finish: Option<Finish>,
}

/// Log-probabilities at one position: the position's own token first, then the likeliest in order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PositionLogprobs {
    /// Token ids.
    pub ids: Vec<u32>,
    /// Natural logarithms, one for each id.
    pub values: Vec<f32>,
    /// Rank of the position's own token, from 1.
    pub rank: u32,
}

/// Why the engine ended a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Finish {
    /// The model's own end-of-sequence token.
    EndOfSequence,
    /// A stop token id given by the user.
    StopToken(u32),
    /// `max_tokens`, or the end of the context.
    Length,
    /// Withdrawn by the front, or the engine was shut down.
    Abort,
    /// Failed alone: not a number, or every token masked.
    Error,
}

/// What the front must know of the model to make requests of texts, and texts of tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelInfo {
    /// Token ids are below it.
    pub vocab_size: u32,
    /// Tokens of prompt and output together, at most.
    pub max_model_len: u32,
    /// Requests that run at once.
    pub max_num_seqs: u32,
    /// Tokens that the KV cache holds.
    pub cache_tokens: u64,
    /// Seconds that the largest step takes at most, as predicted.
    pub step_seconds: f64,
    /// Largest `logprobs` and `prompt_logprobs`.
    pub max_logprobs: u32,
    /// Ids that end a generation.
    pub eos_token_ids: Vec<u32>,
    /// Folder, `tokenizer.json` or `.gguf` file; none: token ids only.
    pub tokenizer: Option<String>,
    /// Source of a template that replaces the tokenizer's own.
    pub chat_template: Option<String>,
    /// Numbers of a hidden state.
    pub hidden_size: u32,
    /// How a prompt becomes a vector where a request does not say.
    pub pooling: Pooling,
    /// Sampling parameters of requests that say nothing.
    pub defaults: SamplingDefaults,
    /// Sequences longer than this use the long rotary frequencies, and share no prefix with the others.
    pub long_rope_above: Option<u32>,
    /// Bytes of the weights that a decode step reads, as they are stored; none if it depends on the tokens (experts).
    pub weight_bytes: Option<u64>,
    /// Bytes a second that the engine's device was measured to read from its memory, if it was.
    pub read_bandwidth: Option<f64>,
}

/// Sampling parameters that come from the model's files or the engine's arguments; what is absent is built in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SamplingDefaults {
    /// See [`SamplingParams`]; so are the others.
    pub temperature: Option<f32>,
    /// −1 and 0 keep all.
    pub top_k: Option<i64>,
    #[allow(missing_docs)]
    pub top_p: Option<f32>,
    #[allow(missing_docs)]
    pub min_p: Option<f32>,
    #[allow(missing_docs)]
    pub presence_penalty: Option<f32>,
    #[allow(missing_docs)]
    pub frequency_penalty: Option<f32>,
    #[allow(missing_docs)]
    pub repetition_penalty: Option<f32>,
    /// `max_tokens`.
    pub max_new_tokens: Option<u32>,
}
