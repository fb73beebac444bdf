//! Sampling parameters as the control plane keeps them: resolved, validated, ready to be written into a plan.

mod validate;

pub use validate::{Limits, ParamError};

/// A temperature below this is greedy.
pub const GREEDY_TEMPERATURE: f32 = 1e-5;

/// A logit bias of this or less removes the token altogether.
pub const BAN_BIAS: f32 = -100.0;

/// How a prompt becomes one vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "lowercase")
)]
pub enum Pooling {
    /// The hidden state of its last token.
    Last,
    /// The mean of those of all its tokens. Nothing of the prompt is taken from the cache then.
    Mean,
}

/// How the tokens of one request are drawn. Names and meanings follow vLLM's `SamplingParams`.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct SamplingParams {
    /// Number of choices.
    pub n: u32,
    /// Seed of every draw of this request (drawn by the caller when the client gave none).
    pub seed: u64,
    /// Divides the logits; below [`GREEDY_TEMPERATURE`] the likeliest token is taken.
    pub temperature: f32,
    /// Number of most likely tokens kept, with all that equal the last of them; 0 or the vocabulary's size keep all.
    pub top_k: u32,
    /// A token is kept if those likelier than it add up to less than this; 1 keeps all.
    pub top_p: f32,
    /// Tokens less likely than this times the likeliest are dropped; 0 keeps all.
    pub min_p: f32,
    /// Subtracted once from the logit of every token among the outputs.
    pub presence_penalty: f32,
    /// Subtracted per occurrence among the outputs.
    pub frequency_penalty: f32,
    /// Divides positive and multiplies negative logits of tokens in prompt or outputs; 1 is neutral.
    pub repetition_penalty: f32,
    /// Output tokens at most.
    pub max_tokens: u32,
    /// Output tokens before which no stop token may be drawn.
    pub min_tokens: u32,
    /// End-of-sequence ids do not end the request (ids in `stop_token_ids` still do).
    pub ignore_eos: bool,
    /// Ids that end the request, given by the user.
    pub stop_token_ids: Vec<u32>,
    /// The model's end-of-sequence ids.
    pub eos_token_ids: Vec<u32>,
    /// Number of likeliest tokens reported per output token, beside the sampled one.
    pub logprobs: Option<u32>,
    /// Number of likeliest tokens reported per prompt token, beside the real one.
    pub prompt_logprobs: Option<u32>,
    /// Added to the raw logits, by token id; [`BAN_BIAS`] or less (also −∞) removes the token.
    pub logit_bias: Vec<(u32, f32)>,
    /// Token sequences that outputs must not complete.
    pub bad_words: Vec<Vec<u32>>,
    /// If not empty, no other token is ever drawn.
    pub allowed_token_ids: Vec<u32>,
    /// The prompt's vector is wanted; `n` and `max_tokens` are 1 then, and the token means nothing.
    pub pooling: Option<Pooling>,
}

impl SamplingParams {
    /// Whether every token is the likeliest one.
    pub fn is_greedy(&self) -> bool {
        self.temperature < GREEDY_TEMPERATURE
    }
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            n: 1,
            seed: 0,
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            max_tokens: 16,
            min_tokens: 0,
            ignore_eos: false,
            stop_token_ids: Vec::new(),
            eos_token_ids: Vec::new(),
            logprobs: None,
            prompt_logprobs: None,
            logit_bias: Vec::new(),
            bad_words: Vec::new(),
            allowed_token_ids: Vec::new(),
            pooling: None,
        }
    }
}
