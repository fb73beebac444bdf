//! What all replies have in common: ids, usage, tokens as JSON.

use std::time::{SystemTime, UNIX_EPOCH};

use octavo_text::Tokenizer;
use octavo_wire::PositionLogprobs;
use serde::Serialize;

use crate::error::ApiError;

/// The fields that every reply and every chunk of one request begins with.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Head {
    pub(crate) id: String,
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) model: String,
}

impl Head {
    pub(crate) fn new(prefix: &str, object: &'static str, model: &str) -> Result<Self, ApiError> {
        Ok(Self {
            id: format!("{prefix}{}", random_hex()?),
            object,
            created: now(),
            model: model.to_owned(),
        })
    }
}

/// 24 hexadecimal digits that nobody can guess.
pub(crate) fn random_hex() -> Result<String, ApiError> {
    let mut bytes = [0u8; 12];
    getrandom::fill(&mut bytes).map_err(|error| ApiError::failed(error.to_string()))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

/// Tokens of all prompts and choices of one body.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: usize,
    pub(crate) completion_tokens: usize,
    total_tokens: usize,
    prompt_tokens_details: PromptDetails,
}

#[derive(Clone, Copy, Debug, Default, Serialize)]
struct PromptDetails {
    cached_tokens: usize,
}

impl Usage {
    pub(crate) fn of_prompts(prompt_tokens: usize) -> Self {
        Self {
            prompt_tokens,
            ..Self::default()
        }
    }

    pub(crate) fn add_cached(&mut self, tokens: u32) {
        self.prompt_tokens_details.cached_tokens += tokens as usize;
    }

    pub(crate) fn cached_tokens(&self) -> usize {
        self.prompt_tokens_details.cached_tokens
    }

    /// With the sum.
    pub(crate) fn told(mut self) -> Self {
        self.total_tokens = self.prompt_tokens + self.completion_tokens;
        self
    }
}

/// A token alone, as text; bytes that are no whole character show as U+FFFD.
pub(crate) fn token_text(tokenizer: Option<&Tokenizer>, token: u32) -> String {
    match tokenizer {
        Some(tokenizer) => {
            let bytes = tokenizer.token_bytes(token).unwrap_or_default();
            String::from_utf8_lossy(bytes).into_owned()
        }
        None => format!("token_id:{token}"),
    }
}

/// The entries of a position, each token once: its own first, then the likeliest in order.
pub(crate) fn entries(position: &PositionLogprobs) -> impl Iterator<Item = (u32, f32)> {
    let own = position.ids.first().copied();
    let pairs = position
        .ids
        .iter()
        .copied()
        .zip(position.values.iter().copied());
    pairs
        .enumerate()
        .filter(move |&(place, (id, _))| place == 0 || Some(id) != own)
        .map(|(_, pair)| pair)
}
