//! Log-probabilities of tokens in the form that chats and responses share.

use std::sync::Arc;

use octavo_text::Tokenizer;
use octavo_wire::PositionLogprobs;
use serde::Serialize;

use super::choice::Piece;
use super::reply;

/// One token of a position.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Token {
    token: String,
    logprob: f64,
    bytes: Option<Vec<u8>>,
}

/// The token of a position, and the likeliest there.
#[derive(Clone, Debug, Serialize)]
pub(super) struct TokenLogprobs {
    #[serde(flatten)]
    token: Token,
    top_logprobs: Vec<Token>,
}

/// Makes scores of what the engine tells.
#[derive(Clone, Debug)]
pub(super) struct Scorer {
    pub(super) tokenizer: Option<Arc<Tokenizer>>,
    /// How many of the likeliest tokens were asked for; none: no scores at all.
    pub(super) top: Option<u32>,
}

impl Scorer {
    /// The scores of a token, if they were asked for.
    pub(super) fn scores(&self, piece: &Piece) -> Option<TokenLogprobs> {
        let (top, position) = (self.top?, piece.logprobs.as_ref()?);
        let mut entries = reply::entries(position).map(|(id, value)| self.token(id, value));
        let drawn = entries.next()?;
        let mut others: Vec<Token> = entries.collect();
        if let (true, Some((id, value))) = (position.rank <= top, first(position)) {
            let place = (position.rank as usize).saturating_sub(1);
            others.insert(place.min(others.len()), self.token(id, value));
        }
        Some(TokenLogprobs {
            token: drawn,
            top_logprobs: others,
        })
    }

    fn token(&self, id: u32, logprob: f32) -> Token {
        let bytes = self
            .tokenizer
            .as_ref()
            .map(|tokenizer| tokenizer.token_bytes(id));
        Token {
            token: reply::token_text(self.tokenizer.as_deref(), id),
            logprob: f64::from(logprob),
            bytes: bytes.map(|bytes| bytes.unwrap_or_default().to_vec()),
        }
    }
}

fn first(position: &PositionLogprobs) -> Option<(u32, f32)> {
    Some((*position.ids.first()?, *position.values.first()?))
}
