//! What a client is told about its request.

use octavo_core::ids::RequestId;

/// Log-probabilities at one position: the position's own token first, then the likeliest in order.
#[derive(Clone, Debug, PartialEq)]
pub struct PositionLogprobs {
    /// Token ids.
    pub ids: Vec<u32>,
    /// Natural logarithms, one for each id.
    pub values: Vec<f32>,
    /// Rank of the position's own token, from 1.
    pub rank: u32,
}

/// Why a choice ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model's own end-of-sequence token.
    EndOfSequence,
    /// A stop token id given by the user.
    StopToken(u32),
    /// A stop string given by the user.
    StopString(String),
    /// `max_tokens`, or the end of the context.
    Length,
    /// Aborted by its client or by a shutdown.
    Abort,
    /// Failed alone: not a number, or every token masked.
    Error,
}

impl Finish {
    /// The `finish_reason` of the protocol.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::EndOfSequence | Self::StopToken(_) | Self::StopString(_) => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
            Self::Error => "error",
        }
    }
}

/// What one choice gained since the last update.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChoiceUpdate {
    /// Which choice.
    pub index: u32,
    /// Text that can never change any more.
    pub text: String,
    /// Output tokens, cut at a stop.
    pub token_ids: Vec<u32>,
    /// One entry for each token of `token_ids`, if the request asked for them.
    pub logprobs: Vec<PositionLogprobs>,
    /// Character offset in the whole text at which each of these tokens begins.
    pub text_offsets: Vec<usize>,
    /// Set once, with the last update of the choice.
    pub finish: Option<Finish>,
}

/// What one request gained since the last update.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Update {
    /// Which request.
    pub id: RequestId,
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
    /// The request failed; the message is for its client.
    pub error: Option<String>,
}
